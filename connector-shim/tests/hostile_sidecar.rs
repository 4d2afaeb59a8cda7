//! Both roles of an engine against a broken or malicious sidecar: they miss, they never panic, they never
//! hang, and they never report a block as loaded whose slot did not verify.

mod peer;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use connector_shim::error::ShimError;
use connector_shim::scheduler::{PENDING, SchedulerClient, UNBOUND_WAIT};
use connector_shim::worker::RankClient;
use peer::rank::{BLOCK_BYTES, EPOCH, Kv, connected, content, options, plan, refusal};
use peer::{Peer, SEGMENT_BYTES, Served, TestPool, doorbell, eventually, own_process, session, welcome};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use shm_protocol::handshake::{Copier, Reply, Welcome, encode_record};
use shm_protocol::key::BlockHash;
use shm_protocol::layout::{self, COMPLETION_SLOTS, header};
use shm_protocol::message::{LOAD_BY_ENGINE, LOAD_SYNC, Saved, Status};
use shm_protocol::pool::{self, SlotRef};
use shm_protocol::random::Random;
use shm_protocol::region::{Access, Region, descriptor_bytes};
use shm_protocol::session::SessionMemory;
use shm_protocol::{PROTOCOL_OLDEST, PROTOCOL_VERSION, transport};

/// Far more than the sum of the engine's own limits: a handshake, a load's deadline and its settling.
const WATCHDOG: Duration = Duration::from_secs(60);

/// A case that must end, on its own thread: cases with long waits wait together.
#[must_use]
struct Case {
    what: &'static str,
    thread: JoinHandle<()>,
    done: Receiver<()>,
}

fn begin(what: &'static str, act: impl FnOnce() + Send + 'static) -> Case {
    let (sender, done) = channel();
    let thread = std::thread::spawn(move || {
        act();
        let _ = sender.send(());
    });
    Case { what, thread, done }
}

impl Case {
    fn ends(self) {
        let Self { what, thread, done } = self;
        if done.recv_timeout(WATCHDOG) == Err(RecvTimeoutError::Timeout) {
            panic!("{what} hangs");
        }
        assert!(thread.join().is_ok(), "{what} panics");
    }
}

fn all_end(cases: impl IntoIterator<Item = Case>) {
    let begun: Vec<Case> = cases.into_iter().collect();
    begun.into_iter().for_each(Case::ends);
}

fn ends(what: &'static str, act: impl FnOnce() + Send + 'static) {
    begin(what, act).ends();
}

fn log_of(scheduler: &mut SchedulerClient, keys: u32) -> i64 {
    let log = scheduler.open_log(None);
    assert!(log >= 0);
    let key = |index: u32, key: &mut BlockHash| key.set_bytes(&[index as u8; 32]).map_err(ShimError::from);
    assert_eq!(scheduler.append_keys(log, 0, keys, key).unwrap(), keys);
    log
}

// === the handshake ===

/// The parts of a welcome; a test replaces one of them by a wrong one.
struct Offer {
    welcome: Welcome,
    memory: OwnedFd,
    doorbell: OwnedFd,
    pool: OwnedFd,
    process: OwnedFd,
    more: Vec<OwnedFd>,
    fewer: usize,
}

impl Offer {
    fn new() -> Self {
        let pool = TestPool::new(BLOCK_BYTES);
        Self {
            welcome: welcome(EPOCH),
            memory: SessionMemory::create(PROTOCOL_VERSION, EPOCH, 1).unwrap().0,
            doorbell: doorbell(),
            pool: pool.fd().try_clone().unwrap(),
            process: own_process(),
            more: Vec::new(),
            fewer: 0,
        }
    }

    fn send(&self, socket: &OwnedFd) {
        let sent = [&self.memory, &self.doorbell, &self.pool, &self.process].into_iter().chain(&self.more);
        let mut sent: Vec<BorrowedFd<'_>> = sent.map(AsFd::as_fd).collect();
        sent.truncate(sent.len() - self.fewer);
        // The engine may have left already: then the record goes nowhere.
        let _ = transport::send_record(socket, &encode_record(&Reply::Welcome(self.welcome.clone())), &sent);
    }
}

fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

fn session_memory(bytes: usize, seals: SealFlags, word: usize, value: u64) -> OwnedFd {
    let fd = memfd(bytes as u64, seals);
    let words =
        [(header::MAGIC, layout::MAGIC), (header::VERSION, u64::from(PROTOCOL_VERSION)), (word, value)];
    for (at, value) in words {
        rustix::io::pwrite(&fd, &value.to_le_bytes(), at as u64).unwrap();
    }
    fd
}

fn pool_with(word: u64, value: u64) -> OwnedFd {
    let pool = TestPool::new(BLOCK_BYTES);
    pool.put(word, value);
    pool.fd().try_clone().unwrap()
}

fn open(path: &str, flags: OFlags) -> OwnedFd {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap()
}

/// The writing end of a full pipe: a writer waits.
fn full_pipe() -> OwnedFd {
    let (read, write) = rustix::pipe::pipe().unwrap();
    rustix::fs::fcntl_setfl(&write, OFlags::NONBLOCK).unwrap();
    while rustix::io::write(&write, &[0; 4096]).is_ok() {}
    rustix::fs::fcntl_setfl(&write, OFlags::empty()).unwrap();
    // Held as long as the process lives: without a reader no writer waits.
    std::mem::forget(read);
    write
}

type Spoil = fn(&mut Offer);

/// Wrong for either role.
const SPOILT: &[(&str, Spoil)] = &[
    ("no descriptors", |offer| offer.fewer = 4),
    ("three descriptors", |offer| offer.fewer = 1),
    ("five descriptors", |offer| offer.more = vec![doorbell()]),
    ("a session memory that may shrink", |offer| {
        offer.memory = session_memory(layout::SESSION_BYTES, SealFlags::GROW, header::EPOCH, 1);
    }),
    ("a session memory too small", |offer| {
        offer.memory = session_memory(layout::SESSION_BYTES - 4096, SealFlags::SHRINK, header::EPOCH, 1);
    }),
    ("an empty session memory", |offer| offer.memory = memfd(0, SealFlags::SHRINK)),
    ("a session memory too large", |offer| {
        offer.memory = session_memory(layout::SESSION_BYTES + 4096, SealFlags::SHRINK, header::EPOCH, 1);
    }),
    ("a session memory of another magic", |offer| {
        offer.memory = session_memory(layout::SESSION_BYTES, SealFlags::SHRINK, header::MAGIC, 1);
    }),
    ("a session memory of another version", |offer| {
        offer.memory = session_memory(layout::SESSION_BYTES, SealFlags::SHRINK, header::VERSION, 1);
    }),
    ("a session memory that forbids writing", |offer| {
        let seals = SealFlags::SHRINK | SealFlags::WRITE;
        offer.memory = session_memory(layout::SESSION_BYTES, SealFlags::SHRINK, header::EPOCH, 1);
        rustix::fs::fcntl_add_seals(&offer.memory, seals).unwrap();
    }),
    ("a pipe for a session memory", |offer| offer.memory = rustix::pipe::pipe().unwrap().0),
    ("a device for a session memory", |offer| offer.memory = open("/dev/zero", OFlags::RDWR)),
    ("a doorbell that makes its ringer wait", |offer| offer.doorbell = full_pipe()),
    ("a pipe for a process", |offer| offer.process = rustix::pipe::pipe().unwrap().0),
    ("a folder of a process", |offer| offer.process = open("/proc/self", OFlags::RDONLY)),
];

/// Wrong for a rank only, since it maps the pool.
const SPOILT_POOLS: &[(&str, Spoil)] = &[
    ("a pool smaller than stated", |offer| offer.welcome.pool_bytes += 1),
    ("a pool of nothing", |offer| offer.welcome.pool_bytes = 0),
    ("a pool of one byte", |offer| offer.welcome.pool_bytes = 1),
    ("a pool of all bytes", |offer| offer.welcome.pool_bytes = u64::MAX),
    ("a pool that fits no memory", |offer| {
        offer.pool = memfd(1 << 62, SealFlags::empty());
        offer.welcome.pool_bytes = 1 << 62;
    }),
    ("an empty pool file", |offer| offer.pool = memfd(0, SealFlags::empty())),
    ("a pool of zeros", |offer| offer.pool = memfd(2 * SEGMENT_BYTES, SealFlags::empty())),
    ("a pool of another magic", |offer| offer.pool = pool_with(pool::header::MAGIC, 7)),
    ("a pool of another version", |offer| offer.pool = pool_with(pool::header::VERSION, 1)),
    ("segments of nothing", |offer| offer.pool = pool_with(pool::header::SEGMENT_BYTES, 0)),
    ("segments of an odd size", |offer| offer.pool = pool_with(pool::header::SEGMENT_BYTES, 3 << 20)),
    ("segments of all bytes", |offer| offer.pool = pool_with(pool::header::SEGMENT_BYTES, 1 << 63)),
    ("one segment too many", |offer| offer.pool = pool_with(pool::header::SEGMENTS, 2)),
    ("all segments", |offer| offer.pool = pool_with(pool::header::SEGMENTS, u64::MAX)),
    ("a pipe for a pool", |offer| offer.pool = rustix::pipe::pipe().unwrap().0),
    ("a directory for a pool", |offer| offer.pool = open("/dev/shm", OFlags::RDONLY)),
];

/// A worker after a wrong welcome: its loads fail until a sound sidecar comes.
fn assert_misses_and_recovers(name: &str, peer: &Peer, kv: &Kv, mut worker: RankClient) {
    worker.join([3; 16]);
    worker.start_step(1, 0);
    worker.done(1, true, 0);
    assert!(!worker.is_connected(), "{name}");
    let slot = SlotRef { offset: 0, generation: 1 };
    assert_eq!(worker.load_now(plan(1, LOAD_SYNC, &[(2, slot)])), [2], "{name}");
    assert!(kv.is_untouched(2), "{name}");
    assert!(!worker.take_notices().is_empty(), "{name}: it is said why");
    let served = peer.serve(BLOCK_BYTES);
    eventually("a sound sidecar", || {
        worker.start_step(2, 0);
        worker.is_connected()
    });
    drop(served.join().unwrap());
}

fn rank_meets(name: &'static str, script: impl FnOnce(OwnedFd) + Send + 'static) -> Case {
    begin(name, move || {
        let (peer, kv) = (Peer::new(EPOCH), Kv::new());
        let scripted = peer.script(script);
        let worker = RankClient::new(options(&peer, &kv, Copier::Engine)).unwrap();
        scripted.join().unwrap();
        assert_misses_and_recovers(name, &peer, &kv, worker);
    })
}

fn scheduler_meets(name: &'static str, script: impl FnOnce(OwnedFd) + Send + 'static) -> Case {
    begin(name, move || {
        let peer = Peer::new(EPOCH);
        let scripted = peer.script(script);
        let mut scheduler = SchedulerClient::new(peer::scheduler::options(&peer)).unwrap();
        scripted.join().unwrap();
        assert!(!scheduler.is_connected() && scheduler.open_log(None) == -1, "{name}");
        assert_eq!(
            (scheduler.query(0, 0, 4), scheduler.post_save(0, 0, vec![1], 1, false)),
            (0, false),
            "{name}"
        );
        assert!(!scheduler.take_notices().is_empty(), "{name}: it is said why");
        let served = peer.serve(BLOCK_BYTES);
        eventually("a sound sidecar", || scheduler.open_log(None) >= 0);
        drop(served.join().unwrap());
    })
}

/// Welcomes the next engine, with the spoilt part.
fn offering(spoil: Spoil) -> impl FnOnce(OwnedFd) + Copy + Send + 'static {
    move |socket| {
        transport::receive_record(&socket).unwrap();
        let mut offer = Offer::new();
        spoil(&mut offer);
        offer.send(&socket);
    }
}

#[test]
fn a_welcome_with_a_wrong_part_is_a_miss() {
    all_end(SPOILT.iter().flat_map(|(name, spoil)| {
        let send = offering(*spoil);
        [scheduler_meets(name, send), rank_meets(name, send)]
    }));
}

#[test]
fn a_pool_that_is_not_what_was_said_is_a_miss() {
    all_end(SPOILT_POOLS.iter().map(|(name, spoil)| rank_meets(name, offering(*spoil))));
}

#[test]
fn an_answer_that_is_none_is_a_miss() {
    let good = || encode_record(&Reply::Welcome(welcome(EPOCH)));
    let mut answers: Vec<(&'static str, Vec<u8>)> = vec![
        ("a zero", vec![0]),
        ("zeros", vec![0; 65_536]),
        ("another protocol", b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()),
        ("a map without end", vec![0xbf; 60_000]),
        ("arrays in arrays", vec![0x81; 60_000]),
        ("a text of 2^63 bytes", b"\xa1\x7b\x7f\xff\xff\xff\xff\xff\xff\xff".to_vec()),
        ("an unknown answer", b"\xa1\x65maybe\xa1\x67version\x01".to_vec()),
    ];
    answers.extend([1, 20, 60].map(|cut| ("a cut welcome", good()[..good().len() - cut].to_vec())));
    all_end(answers.into_iter().flat_map(|(name, answer)| {
        let send = move |socket: OwnedFd| {
            transport::receive_record(&socket).unwrap();
            // The engine may have left already: then the record goes nowhere.
            let _ = transport::send_record(&socket, &answer, &[]);
        };
        [scheduler_meets(name, send.clone()), rank_meets(name, send)]
    }));
}

#[test]
fn a_hang_up_at_any_point_and_silence_are_a_miss() {
    type Script = fn(OwnedFd);
    let scripts: [(&'static str, Script); 4] = [
        ("a hang-up before the hello", drop),
        ("a hang-up after the hello", |socket| drop(transport::receive_record(&socket))),
        ("an empty answer", |socket| {
            transport::receive_record(&socket).unwrap();
            rustix::net::send(&socket, &[], rustix::net::SendFlags::NOSIGNAL).unwrap();
        }),
        ("silence", |socket| {
            // The script ends once the engine has given up.
            transport::receive_record(&socket).unwrap();
            eventually("end of patience", || transport::receive_record(&socket).is_ok());
        }),
    ];
    all_end(
        scripts
            .into_iter()
            .flat_map(|(name, script)| [scheduler_meets(name, script), rank_meets(name, script)]),
    );
}

#[test]
fn a_sidecar_of_another_version_is_refused_with_both_numbers() {
    for version in [0, 1, PROTOCOL_VERSION + 1, u32::MAX] {
        let both = [
            format!("version {version} (release"),
            format!("versions {PROTOCOL_OLDEST} to {PROTOCOL_VERSION} (release"),
        ];
        let replies = [
            (encode_record(&Reply::Welcome(Welcome { version, ..welcome(EPOCH) })), both),
            // The engine prints the reason of a refusal from a sidecar of any version.
            (
                encode_record(&Reply::Refused { version, reason: "one, other".into() }),
                ["one".into(), "other".into()],
            ),
        ];
        for (reply, numbers) in replies {
            let (peer, kv) = (Peer::new(EPOCH), Kv::new());
            let refused = session(|| {
                let reply = reply.clone();
                let scripted = peer.script(move |socket| {
                    transport::receive_record(&socket).unwrap();
                    // The engine may have left already: then the record goes nowhere.
                    let _ = transport::send_record(&socket, &reply, &[]);
                });
                refusal(options(&peer, &kv, Copier::Engine)).inspect(|_| scripted.join().unwrap())
            });
            let refused = refused.to_string();
            assert!(numbers.iter().all(|number| refused.contains(number)), "{refused}");
        }
    }
}

// === the rings and words of a scheduler ===

#[test]
fn an_engine_whose_ranks_have_not_joined_asks_again_for_a_while() {
    let peer = Peer::new(EPOCH);
    let (mut scheduler, served) = peer::scheduler::connected(&peer, BLOCK_BYTES);
    let log = log_of(&mut scheduler, 8);
    let ask = |scheduler: &mut SchedulerClient, status, hits| {
        served.beat();
        scheduler.end_step();
        let op = scheduler.post_query(log, 0, 8).expect("a query was posted");
        served.answer(op, status, hits);
        let hits = scheduler.wait_for_answer(op);
        scheduler.release_lease(log);
        hits
    };
    for _ in 0..2 {
        assert_eq!(ask(&mut scheduler, Status::NotReady, 0), PENDING);
        assert!(scheduler.take_notices().iter().all(|notice| !notice.contains("have not joined")));
        assert_eq!(ask(&mut scheduler, Status::Ok, 8), 8, "asked anew, and the wait is over");
        std::thread::sleep(UNBOUND_WAIT);
    }
    assert_eq!(ask(&mut scheduler, Status::NotReady, 0), PENDING, "it counts from the first of a row");
    std::thread::sleep(UNBOUND_WAIT);
    for _ in 0..2 {
        assert_eq!(ask(&mut scheduler, Status::NotReady, 0), 0);
    }
    let said = scheduler.take_notices();
    assert_eq!(said.iter().filter(|notice| notice.contains("have not joined")).count(), 1, "{said:?}");
}

#[test]
fn impossible_outcomes_are_bounded_or_no_answer() {
    let peer = Peer::new(EPOCH);
    let (mut scheduler, mut served) = peer::scheduler::connected(&peer, BLOCK_BYTES);
    let log = log_of(&mut scheduler, 8);
    let ask = |scheduler: &mut SchedulerClient, served: &Served| {
        served.beat();
        scheduler.end_step();
        scheduler.post_query(log, 0, 8).expect("a query was posted")
    };
    for (status, value, hits) in [
        (Status::Ok, (1 << 24) - 1, 8),
        (Status::Ok, 9, 8),
        (Status::Failed, 8, 0),
        (Status::LeaseUnknown, 8, 0),
        (Status::LeaseConsumed, 8, 0),
        (Status::NotReady, 8, PENDING),
        (Status::Arriving, 8, 0),
        (Status::Absent, 8, 0),
    ] {
        let op = ask(&mut scheduler, &served);
        served.answer(op, status, value);
        assert_eq!(scheduler.wait_for_answer(op), hits, "{status:?} {value}");
        scheduler.release_lease(log);
    }
    for status in [0, 15, 255_u64] {
        let op = ask(&mut scheduler, &served);
        let word = layout::TABLE + (op as usize % layout::OPERATIONS) * 8;
        served.store(word, op << 32 | 8 << 8 | status);
        assert_eq!(scheduler.wait_for_answer(op), PENDING, "a status that this version does not know");
        served.store(word, (op + 1) << 32 | 8 << 8 | 2);
        assert_eq!(scheduler.poll(op), None, "another's");
    }
    let op = ask(&mut scheduler, &served);
    served.answer(op, Status::Ok, u32::MAX >> 8);
    assert_eq!(scheduler.wait_for_answer(op), 8);
    let blocks: Vec<u32> = (0..9).collect();
    assert!(scheduler.post_load(log, 0, &blocks, 1, true).is_empty(), "more than was asked for");
    // The slots beside the keys were never written: the plan is made, and the ranks will find it void.
    let plan = scheduler.post_load(log, 0, &blocks[..8], 1, true).pop().expect("a lease of eight");
    assert_eq!(plan.blocks.len(), 8);
    served.drain();
}

#[test]
fn a_sidecar_that_breaks_a_ring_is_left_and_the_next_one_found() {
    type Break = fn(&mut Served);
    let breaks: [(&str, Break); 9] = [
        ("a completion tail too far", |s| s.store(header::COMPLETION_TAIL, COMPLETION_SLOTS as u64 + 1)),
        ("a completion tail of all ones", |s| s.store(header::COMPLETION_TAIL, u64::MAX >> 32)),
        ("completions never written", |s| s.store(header::COMPLETION_TAIL, COMPLETION_SLOTS as u64)),
        ("an unknown save", |s| s.complete(saved(u64::MAX))),
        ("a save ended twice", |s| {
            s.complete(saved(1));
            s.complete(saved(1));
        }),
        ("a completion tail that goes back", |s| {
            s.complete(saved(1));
            s.complete(saved(2));
            s.store(header::COMPLETION_TAIL, 1);
            s.store(header::COMPLETION_TAIL, u64::from(u32::MAX));
        }),
        ("a head that overtakes", |s| s.store(header::SUBMISSION_HEAD, 4000)),
        ("a head of all ones", |s| s.store(header::SUBMISSION_HEAD, u64::MAX >> 32)),
        ("a head that goes back", |s| {
            s.drain();
            s.store(header::SUBMISSION_HEAD, 1 << 31);
        }),
    ];
    all_end(breaks.map(|(name, spoil)| {
        begin(name, move || {
            let peer = Peer::new(EPOCH);
            let (mut scheduler, mut served) = peer::scheduler::connected(&peer, BLOCK_BYTES);
            let log = log_of(&mut scheduler, 8);
            assert!(
                scheduler.post_save(log, 0, vec![1, 2], 1, false)
                    && scheduler.post_save(log, 2, vec![3], 1, false)
            );
            scheduler.end_step();
            spoil(&mut served);
            scheduler.end_step();
            assert!(!scheduler.is_connected(), "{name}");
            assert_eq!(
                served.word(header::VOID_SAVES_BELOW),
                u64::MAX,
                "{name}: it must commit nothing more"
            );
            assert!(scheduler.take_notices().iter().any(|text| text.contains("protocol")), "{name}");
            assert_eq!(scheduler.query(log, 0, 8), 0);
            let again = peer.serve(BLOCK_BYTES);
            eventually("a sound sidecar", || scheduler.open_log(None) >= 0);
            drop(again.join().unwrap());
        })
    }));
}

fn saved(op: u64) -> Saved {
    Saved { op, ..Saved::decode_slot(&[u64::MAX; 8]) }
}

// === the slots of a worker ===

#[test]
fn slots_that_are_none_fail_and_touch_nothing() {
    let (_peer, kv, mut worker, served) = connected(Copier::Engine);
    let good = served.pool.commit(3, 11, &content(3));
    let last = SEGMENT_BYTES + pool::SEGMENT_ALIGN;
    let offsets =
        [0, 8, 64, 4096, pool::SEGMENT_ALIGN, last - 512, last, last + 512, u64::MAX, u64::MAX - 511];
    let around =
        [good.offset - 1, good.offset + 1, good.offset - 512, good.offset + 512, good.offset ^ 1 << 63];
    for offset in offsets.into_iter().chain(around) {
        for flags in [LOAD_BY_ENGINE, LOAD_SYNC | LOAD_BY_ENGINE] {
            let bad = SlotRef { offset, ..good };
            assert_eq!(worker.load_now(plan(1, flags, &[(0, bad), (1, good)])), [0], "offset {offset}");
        }
    }
    for generation in [0, 10, 12, u64::MAX] {
        assert_eq!(worker.load_now(plan(1, LOAD_BY_ENGINE, &[(0, SlotRef { generation, ..good })])), [0]);
    }
    for state in [pool::FREE, pool::FILLING, 3, u64::MAX] {
        served.pool.put_state(3, state);
        assert_eq!(worker.load_now(plan(1, LOAD_BY_ENGINE, &[(0, good)])), [0], "state {state}");
    }
    assert!(kv.is_untouched(0));
    assert_eq!(kv.block(1), content(3));
}

/// A slot is filled again during its copy: the load succeeds only with the bytes of the requested filling.
#[test]
fn a_slot_reused_under_a_copy_is_never_called_good() {
    let (_peer, kv, mut worker, served) = connected(Copier::Engine);
    let pool = served.pool;
    let slot = pool.commit(0, 1, &content(1));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for generation in (2..).take_while(|_| !stop.load(Ordering::Relaxed)) {
                pool.refill(0, generation, &content(generation));
            }
        });
        let (mut good, mut bad, mut op) = (0, 0, 0);
        eventually("loads that were overtaken and loads that were not", || {
            for _ in 0..100 {
                op += 1;
                let asked = SlotRef { generation: pool.generation(0), ..slot };
                if worker.load_now(plan(op, LOAD_BY_ENGINE, &[(5, asked)])).is_empty() {
                    assert_eq!(kv.block(5), content(asked.generation), "another filling's bytes");
                    good += 1;
                } else {
                    bad += 1;
                }
            }
            good > 500 && bad > 500
        });
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn words_that_promise_a_load_without_all_its_blocks_are_rescued() {
    for (status, value) in [
        (Status::Ok, 0),
        (Status::Ok, 1),
        (Status::Ok, (1 << 24) - 1),
        (Status::LeaseForeign, 2),
        (Status::NotReady, 2),
    ] {
        let (_peer, kv, mut worker, served) = connected(Copier::Sidecar);
        let slot = served.pool.commit(0, 11, &content(1));
        let stale = SlotRef { generation: 10, ..slot };
        served.answer(1, status, value);
        assert_eq!(worker.load_now(plan(1, LOAD_SYNC, &[(2, slot), (3, stale)])), [3], "{status:?} {value}");
        assert!(kv.block(2) == content(1) && kv.is_untouched(3));
    }
}

/// The sidecar never answers, and claims for ever to be writing a block.
#[test]
fn a_sidecar_that_never_ends_a_copy_is_given_up() {
    ends("a load that the sidecar holds up", || {
        let (_peer, kv, mut worker, served) = connected(Copier::Sidecar);
        let slot = served.pool.commit(0, 11, &content(1));
        served.store(header::FENCE_COPYING, u64::MAX);
        assert!(worker.load_now(plan(1, LOAD_SYNC, &[(2, slot)])).is_empty());
        assert_eq!(kv.block(2), content(1));
        assert!(served.gate() >= 1);
    });
}

#[test]
fn a_sidecar_that_leaves_in_the_middle_of_a_load_is_rescued() {
    ends("a load whose sidecar leaves", || {
        let (_peer, kv, mut worker, served) = connected(Copier::Sidecar);
        let slot = served.pool.commit(0, 11, &content(1));
        let stale = SlotRef { generation: 10, ..slot };
        served.store(header::FENCE_COPYING, 1);
        let leaving = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            drop(served);
        });
        assert_eq!(worker.load_now(plan(1, LOAD_SYNC, &[(2, slot), (3, stale)])), [3]);
        assert_eq!(kv.block(2), content(1));
        leaving.join().unwrap();
    });
}

/// Cuts the pool's file under a rank with a mapping of it.
#[test]
fn a_pool_that_shrinks_under_its_readers_is_a_miss() {
    ends("a pool that shrinks", || {
        let (_peer, _kv, mut worker, served) = connected(Copier::Engine);
        let slot = served.pool.commit(0, 11, &content(1));
        assert!(worker.load_now(plan(1, LOAD_BY_ENGINE, &[(2, slot)])).is_empty());
        rustix::fs::ftruncate(served.pool.fd(), 4096).unwrap();
        assert_eq!(worker.load_now(plan(2, LOAD_BY_ENGINE, &[(3, slot)])), [3]);
    });
}

/// A pool file is cut and then extended to its old length: the lost part reads as zeros, and the slot's
/// header below the cut is sound.
#[test]
fn a_pool_that_was_cut_and_made_longer_again_is_a_miss() {
    ends("a pool that shrinks and grows", || {
        let (_peer, kv, mut worker, served) = connected(Copier::Engine);
        served.pool.put(pool::header::SETTLED, 1);
        let slot = served.pool.commit(0, 11, &content(1));
        assert!(worker.load_now(plan(1, LOAD_BY_ENGINE, &[(2, slot)])).is_empty());
        let bytes = descriptor_bytes(served.pool.fd()).unwrap();
        rustix::fs::ftruncate(served.pool.fd(), slot.offset / 4096 * 4096).unwrap();
        rustix::fs::ftruncate(served.pool.fd(), bytes).unwrap();
        for op in 2..5 {
            assert_eq!(worker.load_now(plan(op, LOAD_BY_ENGINE, &[(3, slot)])), [3]);
        }
        assert!(kv.is_untouched(3));
    });
}

// === everything at once ===

/// Noise in every word of the session's memory, while both roles go through their steps.
#[test]
fn noise_in_the_session_memory_is_a_miss() {
    for seed in 1..25_u64 {
        ends("an engine under noise", move || {
            let (_peer, kv, mut worker, served) = connected(Copier::Sidecar);
            let slot = served.pool.commit(0, 11, &content(1));
            noise(served.memory.region(), seed);
            worker.join([3; 16]);
            for step in 1..4 {
                worker.start_step(step, 0);
                // The words of the binding are noise too, and so name another namespace.
                assert_eq!(worker.load_now(plan(step, LOAD_BY_ENGINE, &[(2, slot)])), [2]);
                assert!(kv.is_untouched(2));
                worker.done(step, true, 0);
                worker.finished();
            }
            served.bind(0, peer::namespace());
            assert!(worker.load_now(plan(9, LOAD_BY_ENGINE, &[(2, slot)])).is_empty());
            assert_eq!(kv.block(2), content(1));
            let other = Peer::new(EPOCH);
            let (mut scheduler, served) = peer::scheduler::connected(&other, BLOCK_BYTES);
            let log = log_of(&mut scheduler, 100);
            noise(served.memory.region(), seed);
            for step in 1..4 {
                assert!((PENDING..=100).contains(&scheduler.query(log, 0, 100)));
                scheduler.post_load(log, 0, &[1, 2], step, true);
                scheduler.post_save(log, 0, vec![3, 4], step, false);
                scheduler.overwrite([3].into_iter());
                scheduler.release_lease(log);
                scheduler.salt();
                scheduler.end_step();
            }
            scheduler.close_log(log, 0);
            scheduler.disconnect();
        });
    }
}

fn noise(region: &Region, seed: u64) {
    assert_eq!(region.access(), Access::ReadWrite);
    let mut random = Random(seed);
    for at in (0..1_700_000).step_by(8) {
        let word = if seed.is_multiple_of(3) { u64::MAX } else { random.next() };
        region.word64(at).store(word, Ordering::Relaxed);
    }
}
