//! Round trips between two real processes over a session's memory; prints one JSON line last.
//!
//! `spin_rtt_us`: message and outcome word, both sides spinning. `futex_rtt_us`: the sleeping path, message
//! and eventfd up, outcome word and futex down, both sides asleep in between, on one core: the cost of the
//! path alone. `futex_rtt_free_us`: the same on cores of the scheduler's choice. On an idle virtual machine
//! these are two halted cores, and the hypervisor's wake-ups are most of the time. Medians, in microseconds.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
#![expect(clippy::print_stdout, reason = "a benchmark's result is its output")]

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use shm_protocol::message::{Kind, Message, Outcome, Status};
use shm_protocol::ring::{Consumer, Producer};
use shm_protocol::session::{RegionRing, Ring, SessionMemory};
use shm_protocol::{PROTOCOL_VERSION, transport, wait};

/// Measured round trips of each kind, and unmeasured ones before them.
const SPINS: usize = 100_000;
const SLEEPS: usize = 10_000;
const WARM_UP: usize = 1_000;
/// The argument that makes the process the sidecar's side; the socket follows.
const SIDECAR: &str = "--sidecar";
/// A side waiting longer has lost its peer.
const LIMIT: Duration = Duration::from_secs(10);
/// `flags` of a message of the sleeping part, so the sidecar's side sleeps too; and of the last one.
const SLEEPING: u8 = 1;
const LAST: u8 = 2;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1).skip_while(|argument| argument != SIDECAR);
    if arguments.next().is_some() {
        sidecar(Path::new(&arguments.next().expect("the socket's path")));
        return ExitCode::SUCCESS;
    }
    let path: PathBuf = std::env::temp_dir().join(format!("pillion-bench-{}", std::process::id()));
    let listener = transport::listen(&path).expect("listen");
    let mut child = Command::new(std::env::current_exe().expect("own path"))
        .arg(SIDECAR)
        .arg(&path)
        .spawn()
        .expect("spawn");
    let mut engine = Engine::accept(&listener);
    let _ = std::fs::remove_file(&path);
    let spin = engine.measure(SPINS, 0);
    let free = engine.measure(SLEEPS, SLEEPING);
    share_a_core(child.id());
    let sleep = engine.measure(SLEEPS, SLEEPING);
    engine.round_trip(LAST);
    let ended = child.wait().expect("the child was started");
    println!(
        "{{\"spin_rtt_us\": {:.3}, \"futex_rtt_us\": {:.3}, \"futex_rtt_free_us\": {:.3}, \"spin_p99_us\": {:.3}, \
         \"futex_p99_us\": {:.3}, \"futex_free_p99_us\": {:.3}, \"spins\": {SPINS}, \"sleeps\": {SLEEPS}}}",
        spin.0, sleep.0, free.0, spin.1, sleep.1, free.1
    );
    if ended.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Puts this process and the child on one core.
fn share_a_core(child: u32) {
    let child = Pid::from_raw(child.cast_signed()).expect("a process has a number");
    let allowed = sched_getaffinity(None).expect("own affinity");
    let first = (0..CpuSet::MAX_CPU).find(|core| allowed.is_set(*core)).expect("this runs on some core");
    let mut one = CpuSet::new();
    one.set(first);
    for process in [None, Some(child)] {
        sched_setaffinity(process, &one).expect("an own process on an allowed core");
    }
}

// === the engine's side: this process ===

struct Engine {
    memory: SessionMemory,
    submissions: Producer<RegionRing>,
    doorbell: OwnedFd,
    _socket: OwnedFd,
    op: u64,
}

impl Engine {
    fn accept(listener: &OwnedFd) -> Self {
        let socket = wait_for(|| transport::accept(listener).ok());
        let (_, descriptors) = wait_for(|| transport::receive(&socket).ok());
        let [memory, doorbell]: [OwnedFd; 2] = descriptors.try_into().expect("two descriptors");
        let memory = SessionMemory::open(PROTOCOL_VERSION, memory).expect("session memory");
        let submissions = Producer::new(memory.ring(Ring::Submission));
        Self { memory, submissions, doorbell, _socket: socket, op: 0 }
    }

    fn round_trip(&mut self, flags: u8) {
        self.op += 1;
        assert!(self.submissions.has_room(0).expect("an honest peer"), "one message is in flight");
        self.submissions.push(&Message { flags, op: self.op, ..Message::new(Kind::Query) }.encode());
        self.submissions.publish();
        wait::ring_doorbell(self.memory.region(), self.doorbell.as_fd());
        if flags & SLEEPING == 0 {
            while self.memory.load_outcome(self.op).is_none() {
                std::hint::spin_loop();
            }
            return;
        }
        let region = self.memory.region();
        while !wait::sleep_turn(region, LIMIT, || self.memory.load_outcome(self.op).is_some()) {}
    }

    /// Returns the median and the 99th percentile of `count` round trips, in microseconds.
    fn measure(&mut self, count: usize, flags: u8) -> (f64, f64) {
        (0..WARM_UP).for_each(|_| self.round_trip(flags));
        let mut nanoseconds: Vec<u128> = (0..count)
            .map(|_| {
                let began = Instant::now();
                self.round_trip(flags);
                began.elapsed().as_nanos()
            })
            .collect();
        nanoseconds.sort_unstable();
        let at = |part: usize| nanoseconds[count * part / 100] as f64 / 1e3;
        (at(50), at(99))
    }
}

fn wait_for<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(value) = attempt() {
            return value;
        }
        assert!(began.elapsed() < LIMIT, "the other process does not answer");
        std::thread::sleep(Duration::from_millis(1));
    }
}

// === the sidecar's side: the child ===

fn sidecar(path: &Path) {
    let socket = transport::connect(path, LIMIT).expect("connect");
    let (fd, memory) = SessionMemory::create(PROTOCOL_VERSION, 1, 1).expect("session memory");
    let doorbell = wait::eventfd().expect("eventfd");
    transport::send(&socket, b"memory and doorbell", &[fd.as_fd(), doorbell.as_fd()]).expect("send");
    let mut submissions = Consumer::new(memory.ring(Ring::Submission));
    let mut sleeping = false;
    loop {
        if submissions.ready().expect("an honest peer") == 0 {
            if sleeping {
                sleep(&memory, &mut submissions, &doorbell);
            } else {
                std::hint::spin_loop();
            }
            continue;
        }
        while let Some(slot) = submissions.pop() {
            let message = Message::decode(&slot).expect("a known message");
            sleeping = message.flags & SLEEPING != 0;
            memory.store_outcome(message.op, Outcome { op: message.op as u32, value: 1, status: Status::Ok });
            wait::wake_engine(memory.region());
            if message.flags & LAST != 0 {
                return;
            }
        }
        submissions.release();
    }
}

/// Sleeps as the product does: announce it, look once more, block on the eventfd.
fn sleep(memory: &SessionMemory, submissions: &mut Consumer<RegionRing>, doorbell: &OwnedFd) {
    wait::set_asleep(memory.region(), true);
    if submissions.ready().expect("an honest peer") == 0 {
        let limit = rustix::event::Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
        let woken =
            rustix::event::poll(&mut [PollFd::new(doorbell, PollFlags::IN)], Some(&limit)).expect("poll");
        assert!(woken > 0, "the engine's side is gone");
    }
    wait::set_asleep(memory.region(), false);
    // The eventfd is empty if a message was there before the sleep.
    let _ = rustix::io::read(doorbell, &mut [0; 8]);
}
