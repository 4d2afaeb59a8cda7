//! The ring: the time of a query to a running sidecar, beside that of a word between two threads of this
//! process.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use clap::Args;
use shm_protocol::handshake::Reply;
use shm_protocol::key::BlockHash;
use shm_protocol::request::{Append, LogKeys, Query, SchedulerRequest};
use shm_protocol::ring::Producer;
use shm_protocol::session::{RegionRing, Ring, SessionMemory};
use shm_protocol::{message::Message, transport, wait};

use super::{BenchError, BenchFigures, ROUNDS, median, part, rounded};
use crate::doctor::{self, Finding};
use sidecar::config::default_socket;
use sidecar::system::clock::Clock;

const CONNECT_MAX: Duration = Duration::from_secs(2);
/// A sidecar answers in microseconds; one without a core for this long is no figure.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// The sidecar's data thread sleeps by then.
const PAUSE: Duration = Duration::from_millis(20);
/// Round trips before the measured ones.
const WARM_UP: u32 = 100;
/// One query to a sleeping sidecar for this many others.
const ASLEEP_PART: u32 = 100;

/// Options of `pillion bench ring`.
#[derive(Args, Clone, Debug)]
pub struct RingOptions {
    /// The sidecar's socket [default: as pillion serve]
    #[arg(long, env = "PILLION_SOCKET", value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Number of queries to send
    #[arg(long, value_name = "COUNT", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub count: u32,
}

/// An engine without ranks: its queries go all the way, and are answered without a lookup of blocks.
struct RingEngine {
    memory: SessionMemory,
    submissions: Producer<RegionRing>,
    doorbell: OwnedFd,
    _socket: OwnedFd,
    clock: Clock,
    op: u64,
}

// === impl RingEngine ===

impl RingEngine {
    fn connect_sidecar(options: &RingOptions) -> Result<Self, BenchError> {
        let path = options.socket.clone().unwrap_or_else(default_socket);
        let shown = path.display();
        let socket = transport::connect_socket(&path, CONNECT_MAX).map_err(|errno| {
            let Finding { text, remedy, .. } = doctor::explain_unreached(&path, errno);
            BenchError::failed(
                "the ring cannot be measured",
                format!("{text}: {}", remedy.unwrap_or_default()),
            )
        })?;
        let look = format!("pillion doctor --socket {shown} says more");
        let (welcome, descriptors) = match doctor::send_probe(&socket, "pillion bench") {
            Some((Some(Reply::Welcome(welcome)), descriptors)) => (welcome, descriptors),
            Some((Some(Reply::Refused { reason, .. }), _)) => {
                return Err(BenchError::failed("the sidecar refuses the connection", reason));
            }
            _ => return Err(BenchError::failed("the sidecar does not answer", look)),
        };
        let [memory, doorbell, ..] = <[OwnedFd; 4]>::try_from(descriptors)
            .map_err(|_| BenchError::failed("the sidecar's answer is incomplete", look.clone()))?;
        let memory = SessionMemory::open(welcome.version, memory)
            .map_err(|error| BenchError::failed("the session's memory", format!("{error}: {look}")))?;
        let submissions = Producer::new(memory.ring(Ring::Submission));
        let mut engine =
            Self { memory, submissions, doorbell, _socket: socket, clock: Clock::start_now(), op: 0 };
        engine.memory.write_key(0, 0, &BlockHash::from_words([1, 2, 3, 4]));
        engine.post_request(SchedulerRequest::Open { log: 0 })?;
        let append = Append { keys: LogKeys::new(0, 0..1), chunks: [0; 6], promised: false, tail: false };
        engine.post_request(SchedulerRequest::Append(append))?;
        Ok(engine)
    }

    fn post_request(&mut self, request: SchedulerRequest) -> Result<(), BenchError> {
        if !self.submissions.has_room(0).is_ok_and(|room| room) {
            return Err(BenchError::failed("the ring is full", "look at the sidecar's log, and restart it"));
        }
        self.submissions.push(&Message::from(request).encode_slot());
        self.submissions.publish();
        wait::ring_doorbell(self.memory.region(), self.doorbell.as_fd());
        Ok(())
    }

    /// Microseconds of one query.
    fn time_question(&mut self) -> Result<f64, BenchError> {
        self.op += 1;
        let (op, began) = (self.op, self.clock.now());
        self.post_request(SchedulerRequest::Query(Query::new(op, LogKeys::new(0, 0..1))))?;
        while self.memory.load_outcome(op).is_none() {
            if self.clock.now() - began > ANSWER_MAX {
                return Err(BenchError::failed(
                    "no answer within 5 s",
                    "look at the sidecar's log, and restart it",
                ));
            }
            std::hint::spin_loop();
        }
        Ok((self.clock.now() - began).as_secs_f64() * 1e6)
    }

    fn ask_often(&mut self, count: u32, pause: Duration) -> Result<Vec<f64>, BenchError> {
        (0..count)
            .map(|_| {
                thread::sleep(pause);
                self.time_question()
            })
            .collect()
    }
}

/// Microseconds of a word to another thread and back: no ring is faster.
fn words(count: u32) -> Vec<f64> {
    let (there, back) = (&AtomicU64::new(0), &AtomicU64::new(0));
    let clock = Clock::start_now();
    thread::scope(|scope| {
        scope.spawn(move || {
            for number in 1..=u64::from(count) {
                while there.load(Ordering::Acquire) != number {
                    std::hint::spin_loop();
                }
                back.store(number, Ordering::Release);
            }
        });
        (1..=u64::from(count))
            .map(|number| {
                let began = clock.now();
                there.store(number, Ordering::Release);
                while back.load(Ordering::Acquire) != number {
                    std::hint::spin_loop();
                }
                (clock.now() - began).as_secs_f64() * 1e6
            })
            .collect()
    })
}

/// Measures words while the sidecar has no work of this engine, and queries. A count below that of the rounds
/// is rounded up.
pub(super) fn measure_ring(options: &RingOptions) -> Result<BenchFigures, BenchError> {
    let mut engine = RingEngine::connect_sidecar(options)?;
    engine.ask_often(WARM_UP, Duration::ZERO)?;
    let (mut word, mut awake) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let count = options.count.div_ceil(ROUNDS as u32);
        word.extend(words(count));
        awake.extend(engine.ask_often(count, Duration::ZERO)?);
    }
    let mut asleep = engine.ask_often(options.count.div_ceil(ASLEEP_PART), PAUSE)?;
    let mut figures = BenchFigures::new("ring");
    figures.add_figure("word_us", rounded(median(&mut word)));
    figures.add_figure("query_us", rounded(median(&mut awake)));
    figures.add_figure("query_p99_us", rounded(part(&mut awake, 0.99)));
    figures.add_figure("query_asleep_us", rounded(median(&mut asleep)));
    Ok(figures)
}
