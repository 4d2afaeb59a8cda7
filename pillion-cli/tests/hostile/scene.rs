//! A `pillion` process, a good engine for the time of a scene, and the figures to show a leak.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::unistd::Pid;
use shm_protocol::handshake::{Copier, Hello};
use shm_protocol::key::BlockHash;
use shm_protocol::message::{Kind, Message, Status};
use shm_protocol::request::SchedulerRequest;
use tempfile::TempDir;

use crate::client::sidecar::Sidecar;
use crate::client::{BLOCK_BYTES, Kv, Session, WATCHDOG, hello, save, watch};

/// Bytes of the sidecar's pool.
pub(crate) const POOL_BYTES: u64 = 64 << 20;
/// Sessions of the good engine.
pub(crate) const OWN_SESSIONS: u64 = 2;
/// Sets of keys saved by the good engine in turn, so that its kept blocks stop growing.
const SETS: u64 = 50;
/// Keys saved once by the good engine, and found again in every round.
const HEIRLOOMS: u64 = 4;

/// The sidecar, ended with the scene.
pub(crate) struct Pillion {
    sidecar: Sidecar,
    pub(crate) socket: PathBuf,
    folder: TempDir,
}

/// The figures that must be as before after a hostile engine is gone.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Holdings {
    pub(crate) sessions: u64,
    pub(crate) leases: u64,
    /// Bytes in use beyond those of whole blocks.
    pub(crate) filling_bytes: u64,
    pub(crate) descriptors: usize,
    pub(crate) mappings: usize,
}

impl Holdings {
    /// Returns true if no figure is above `before`. A descriptor counted in `before` may have been about to
    /// close.
    pub(crate) fn within(&self, before: &Self) -> bool {
        let all =
            |of: &Self| [of.sessions, of.leases, of.filling_bytes, of.descriptors as u64, of.mappings as u64];
        all(self).iter().zip(all(before)).all(|(now, then)| *now <= then)
    }
}

/// A sidecar and a good engine. The engine is dropped first: it needs the sidecar for its last round.
pub(crate) struct Scene {
    good: Good,
    pub(crate) pillion: Pillion,
    before: Holdings,
}

/// The good engine, on its own thread.
struct Good {
    rounds: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    /// Held during a round.
    turn: Arc<Mutex<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The values of the good engine's thread.
struct GoodEngine {
    scheduler: Session,
    rank: Session,
    kv: Kv,
    round: u64,
    op: u64,
}

// === impl Pillion ===

impl Pillion {
    pub(crate) fn start(extra: &[&str]) -> Self {
        let (folder, dram) = (tempfile::tempdir().unwrap(), format!("{}MiB", POOL_BYTES >> 20));
        let mut arguments: Vec<&dyn AsRef<OsStr>> = vec![&"--dram", &dram];
        arguments.extend(extra.iter().map(|argument| argument as &dyn AsRef<OsStr>));
        let sidecar = Sidecar::start(folder.path(), &arguments);
        Self { socket: sidecar.socket.clone(), sidecar, folder }
    }

    pub(crate) fn pid(&self) -> Pid {
        self.sidecar.pid()
    }

    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(self.folder.path().join("log")).unwrap()).into_owned()
    }

    pub(crate) fn metrics(&self) -> BTreeMap<String, u64> {
        let page = watch("metrics", || self.sidecar.page("/metrics"));
        let lines = page.lines().filter_map(|line| line.strip_prefix("pillion_")?.split_once(' '));
        lines.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?))).collect()
    }

    /// Sessions closed so far for `reason`.
    pub(crate) fn closed(&self, reason: &str) -> u64 {
        self.metrics()[&format!("sessions_closed_total{{reason=\"{reason}\"}}")]
    }

    /// Connections refused so far for `reason`.
    pub(crate) fn refused(&self, reason: &str) -> u64 {
        self.metrics()[&format!("connections_refused_total{{reason=\"{reason}\"}}")]
    }

    pub(crate) fn holdings(&self) -> Holdings {
        let metrics = self.metrics();
        let whole = metrics["blocks"] * BLOCK_BYTES;
        Holdings {
            sessions: metrics["sessions"],
            leases: metrics["leases"],
            filling_bytes: metrics["pool_used_bytes"].abs_diff(whole),
            descriptors: self.descriptors(),
            mappings: self.mappings("pillion-session"),
        }
    }

    /// Open descriptors, except the short-lived sockets of the admin pages.
    pub(crate) fn descriptors(&self) -> usize {
        let folder = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        let links = folder.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        let unix = std::fs::read_to_string(format!("/proc/{}/net/unix", self.pid())).unwrap();
        let inodes: Vec<&str> = unix.lines().filter_map(|line| line.split_whitespace().nth(6)).collect();
        links
            .filter(|link| {
                let inode = link.to_str().and_then(|l| l.strip_prefix("socket:[")?.strip_suffix(']'));
                inode.is_none_or(|inode| inodes.contains(&inode))
            })
            .count()
    }

    /// Mappings of files of this name.
    pub(crate) fn mappings(&self, name: &str) -> usize {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", self.pid())).unwrap();
        maps.lines().filter(|line| line.contains(name)).count()
    }

    fn assert_alive(&mut self) {
        assert!(self.sidecar.is_alive(), "the sidecar ended:\n{}", self.log());
        assert!(!self.log().contains("panicked"), "{}", self.log());
    }
}

// === impl Scene ===

impl Scene {
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    pub(crate) fn start_with(extra: &[&str]) -> Self {
        let pillion = Pillion::start(extra);
        let good = Good::start(&pillion.socket);
        good.watch_rounds(2);
        let parked = good.park();
        // The sidecar updates its figures at the end of a turn.
        let before = watch("a good engine that holds nothing", || {
            let held = pillion.holdings();
            let nothing = (held.sessions, held.leases, held.filling_bytes) == (OWN_SESSIONS, 0, 0);
            nothing.then_some(held)
        });
        drop(parked);
        Self { good, pillion, before }
    }

    /// Keeps the good engine between two rounds for as long as the guard lives.
    pub(crate) fn park(&self) -> MutexGuard<'_, ()> {
        self.good.park()
    }

    /// Asserts that the good engine is still served.
    pub(crate) fn assert_served(&self) {
        self.good.watch_rounds(2);
    }

    /// The same until it has saved all its sets, and found them again.
    pub(crate) fn assert_served_sets(&self) {
        self.good.watch_rounds(SETS + 2);
    }

    /// Asserts that nothing is left of the hostile engines, and that the good engine and the process live.
    pub(crate) fn assert_unharmed(&mut self, after: &str) {
        self.pillion.assert_alive();
        self.assert_served();
        let parked = self.good.park();
        let mut left = self.pillion.holdings();
        for _ in (0..WATCHDOG.as_millis()).step_by(5) {
            if left.within(&self.before) {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
            left = self.pillion.holdings();
        }
        assert!(
            left.within(&self.before),
            "after {after} {left:?} is left, of which there was {:?} before\n{}",
            self.before,
            self.pillion.log()
        );
        drop(parked);
        self.pillion.assert_alive();
    }

    /// Waits for the log line with the reason why session `id` was closed.
    pub(crate) fn assert_said(&self, id: u64, reason: &str) {
        let session = format!("session={id} ");
        watch(&format!("reason \"{reason}\" for session {id}"), || {
            let log = self.pillion.log();
            log.lines().any(|line| line.contains(&session) && line.contains(reason)).then_some(())
        });
    }

    /// A hostile engine of one rank: its scheduler and its rank, joined.
    pub(crate) fn villain(&self) -> (Session, Session) {
        villain(&self.pillion.socket, &Kv::new(), "villain")
    }
}

/// An engine of one rank with the memory `kv`, joined.
pub(crate) fn villain(socket: &Path, kv: &Kv, model: &str) -> (Session, Session) {
    static RUN: AtomicU64 = AtomicU64::new(0);
    let run = run_id(1 << 32 | RUN.fetch_add(1, Ordering::Relaxed));
    let rank = Session::rank(socket, &worker(kv, model), kv, run);
    (Session::scheduler(socket, model, 1, run), rank)
}

pub(crate) fn worker(kv: &Kv, model: &str) -> Hello {
    hello(model, 1, kv.worker_of(model, 0, 1, Copier::Sidecar))
}

pub(crate) fn run_id(number: u64) -> [u8; 16] {
    std::array::from_fn(|at| number.to_le_bytes()[at % 8])
}

/// The key of `number`.
pub(crate) fn key(number: u64) -> BlockHash {
    BlockHash(std::array::from_fn(|at| number.to_le_bytes()[at % 8] ^ at as u8))
}

// === impl Good ===

impl Good {
    fn start(socket: &Path) -> Self {
        let (rounds, stop, turn) = (Arc::default(), Arc::default(), Arc::default());
        let mut engine = GoodEngine::connect(socket);
        let thread = std::thread::spawn({
            let (rounds, stop, turn): (Arc<AtomicU64>, Arc<AtomicBool>, Arc<Mutex<()>>) =
                (Arc::clone(&rounds), Arc::clone(&stop), Arc::clone(&turn));
            move || {
                while !stop.load(Ordering::Relaxed) {
                    let held = turn.lock().unwrap();
                    engine.round();
                    rounds.fetch_add(1, Ordering::Relaxed);
                    drop(held);
                    // Lets a thread that waits for the lock take it.
                    std::thread::sleep(Duration::from_millis(2));
                }
            }
        });
        Self { rounds, stop, turn, thread: Some(thread) }
    }

    fn park(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().expect("the good engine was harmed")
    }

    fn watch_rounds(&self, count: u64) {
        let target = self.rounds.load(Ordering::Relaxed) + count;
        watch("round of the good engine", || {
            assert!(!self.thread.as_ref().unwrap().is_finished(), "the good engine was harmed");
            (self.rounds.load(Ordering::Relaxed) >= target).then_some(())
        });
    }
}

impl Drop for Good {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking(), "the good engine was harmed");
    }
}

// === impl GoodEngine ===

impl GoodEngine {
    fn connect(socket: &Path) -> Self {
        let kv = Kv::new();
        let run = run_id(7);
        let rank = Session::rank(socket, &worker(&kv, "good"), &kv, run);
        let scheduler = Session::scheduler(socket, "good", 1, run);
        let mut good = Self { scheduler, rank, kv, round: 0, op: 0 };
        watch("joined rank", || {
            good.scheduler.open_log(0, &[key(0)]);
            let op = good.next_op();
            let answer = good.scheduler.query(0, op, 1).status;
            good.scheduler.post(SchedulerRequest::Close { log: 0, way: 0 });
            (answer == Status::Ok).then_some(())
        });
        good.save((0..HEIRLOOMS).collect());
        good
    }

    fn next_op(&mut self) -> u64 {
        self.op += 1;
        self.op
    }

    /// Saves two blocks, finds them and the heirlooms, loads all of them elsewhere and compares every byte.
    fn round(&mut self) {
        self.round += 1;
        let set = HEIRLOOMS + self.round % SETS * 2;
        self.save(vec![set, set + 1]);
        let numbers: Vec<u64> = (0..HEIRLOOMS).chain([set, set + 1]).collect();
        let keys: Vec<BlockHash> = numbers.iter().map(|number| key(*number)).collect();
        self.scheduler.open_log(0, &keys);
        let query = self.next_op();
        let answer = self.scheduler.query(0, query, keys.len() as u32);
        assert_eq!((answer.status, answer.value), (Status::Ok, keys.len() as u32));
        let targets: Vec<u32> = (0..keys.len() as u32).map(|index| 40 + index).collect();
        targets.iter().for_each(|block| self.kv.fill(*block, u64::MAX / 64));
        let op = self.next_op();
        let step = 2 * self.round + 1;
        self.scheduler.with_blocks(Message { op, lease: query, step, ..Message::new(Kind::Load) }, &targets);
        self.pass(step);
        assert_eq!(self.rank.outcome(op).status, Status::Ok);
        for (block, number) in targets.iter().zip(&numbers) {
            assert!(
                self.kv.holds(*block, *number),
                "block {block} holds other bytes than those of key {number}"
            );
        }
        self.scheduler.post(SchedulerRequest::Close { log: 0, way: 0 });
    }

    fn save(&mut self, numbers: Vec<u64>) {
        let keys: Vec<BlockHash> = numbers.iter().map(|number| key(*number)).collect();
        let blocks: Vec<u32> = (1..=keys.len() as u32).collect();
        blocks.iter().zip(&numbers).for_each(|(block, number)| self.kv.fill(*block, *number));
        self.scheduler.open_log(0, &keys);
        let (op, step) = (self.next_op(), 2 * self.round);
        self.scheduler.with_blocks(save(op, 0, step), &blocks);
        self.pass(step);
        let saved = self.scheduler.saved();
        assert_eq!((saved.op, saved.committed + saved.present), (op, keys.len() as u32), "{saved:?}");
        self.scheduler.post(SchedulerRequest::Close { log: 0, way: 0 });
    }

    fn pass(&self, step: u64) {
        self.rank.fences(step, step);
        self.rank.ring();
    }
}
