//! A sidecar is killed at any moment under saves; the next one serves what was whole in the same pool file, and nothing
//! else. `KILLS=200 SEED=7 cargo test -p sidecar --test adoption -- --nocapture` tells what came of it.

mod client;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::Ordering;
use std::time::Duration;

use client::{Kv, LAYER_BYTES, LAYERS, Session, hello, pattern, watch};
use shm_protocol::handshake::{Copier, Role};
use shm_protocol::key::BlockHash;
use shm_protocol::layout::CHUNK_KEYS;
use shm_protocol::message::{Kind, Message, Status};
use shm_protocol::pool::SlotRef;
use shm_protocol::{pool, transport};

const RUN: [u8; 16] = [7; 16];
/// Blocks of one save: two chunks of keys, seven tasks of copies.
const SAVED: std::ops::Range<u32> = 1..101;
/// Bytes of the pool that is killed on.
const POOL_BYTES: u64 = 64 << 20;
/// Kills that one pool file sees: by then most of it is full.
const LIVES: u64 = 8;
/// The longest time from the first save of a life to its end.
const LIFE_US_MAX: u64 = 40_000;
/// Kills of a plain `cargo test`.
const KILLS: u64 = 16;

fn number(name: &str, default: u64) -> u64 {
    let given = std::env::var_os(name).map(|text| text.to_str().and_then(|text| text.parse().ok()));
    given.map_or(default, |number| number.unwrap_or_else(|| panic!("{name} is no number")))
}

/// The next number of a sequence that a seed begins.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

/// A pool file's name, and a folder for the socket.
struct Place {
    pool: PathBuf,
    folder: tempfile::TempDir,
}

struct Sidecar {
    process: Child,
    socket: PathBuf,
    port: u16,
}

/// One rank and its scheduler.
struct Engine {
    kv: Kv,
    rank: Session,
    scheduler: Session,
    op: u64,
    log: u32,
}

/// What was found after the kills.
#[derive(Debug, Default)]
struct Tally {
    /// Blocks whose save was reported, in all lives of a file.
    kept: u64,
    served: u64,
    /// Kept and not served, of a file that took more than it has room for.
    evicted: u64,
    /// Kept and not served all the same.
    lost: u64,
    /// Served, and their save was not reported before the kill.
    unreported: u64,
    /// Kills with slots half-written.
    torn: u64,
    wrong: u64,
}

// === impl Place ===

impl Place {
    fn new(name: &str) -> Self {
        let pool = format!("/dev/shm/pillion-test-{}-{name}", std::process::id()).into();
        Self { pool, folder: tempfile::tempdir().unwrap() }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.pool);
    }
}

// === impl Sidecar ===

impl Sidecar {
    fn start(place: &Place, dram: &str) -> Self {
        let socket = place.folder.path().join("p.sock");
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let log = std::fs::File::create(place.folder.path().join("log")).unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_pillion"))
            .args(["serve", "--gpu", "off", "--dram", dram, "--http", &format!("127.0.0.1:{port}")])
            .args([Path::new("--socket"), &socket, Path::new("--pool-path"), &place.pool])
            .stderr(Stdio::from(log))
            .spawn()
            .unwrap();
        let sidecar = Self { process, socket, port };
        watch("a socket", || transport::connect(&sidecar.socket, client::WATCHDOG).ok());
        sidecar
    }

    fn page(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned())
    }

    /// Waits until nothing of the start is left to do.
    fn wait_started(&self) {
        watch("the whole pool in service", || self.page("/readyz").filter(|text| text == "ready\n"));
    }

    fn metric(&self, name: &str) -> u64 {
        let page = self.page("/metrics").expect("metrics");
        let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.expect("a metric").parse().expect("a number")
    }

    fn kill(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        self.end();
    }
}

// === impl Engine ===

/// A key says which block of KV it is, and the stamp that was put at its start and end.
fn key(stamp: u64, block: u32) -> BlockHash {
    BlockHash::from_words([stamp, block.into(), stamp ^ 0x55, 1])
}

/// What each block of KV holds before it is stamped: all its layers, end to end.
static PATTERNS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let layers = |block| (0..LAYERS).flat_map(move |layer| pattern(block, layer)).collect();
    (0..u64::from(SAVED.end)).map(layers).collect()
});

/// What a key stands for.
fn content(key: &BlockHash) -> Vec<u8> {
    let [stamp, block, ..] = key.words();
    let mut bytes = PATTERNS[block as usize].clone();
    let end = bytes.len() - 8;
    bytes[..8].copy_from_slice(&stamp.to_le_bytes());
    bytes[end..].copy_from_slice(&stamp.to_le_bytes());
    bytes
}

impl Engine {
    fn connect(sidecar: &Sidecar) -> Self {
        let kv = Kv::new();
        for block in SAVED {
            let layers = PATTERNS[block as usize].chunks(LAYER_BYTES as usize);
            for (region, bytes) in kv.regions.iter().zip(layers) {
                let at = region.offset + u64::from(block) * region.stride;
                assert_eq!(rustix::io::pwrite(&kv.fds[region.fd as usize], bytes, at).unwrap(), bytes.len());
            }
        }
        let fds: Vec<&OwnedFd> = kv.fds.iter().collect();
        let worker = kv.worker(0, 1, Copier::Sidecar);
        let mut rank = Session::open(&sidecar.socket, &hello("engine", 1, worker), &fds);
        rank.post(Message::new(Kind::Join).with_bytes16(RUN));
        rank.fences(1, 1);
        let scheduler =
            Session::open(&sidecar.socket, &hello("engine", 1, Role::Scheduler { run: RUN }), &[]);
        Self { kv, rank, scheduler, op: 0, log: 0 }
    }

    /// Writes a stamp where a block's bytes begin and end.
    fn stamp(&self, block: u32, stamp: u64) {
        let (first, last) = (&self.kv.regions[0], &self.kv.regions[LAYERS as usize - 1]);
        for (region, inside) in [(first, 0), (last, LAYER_BYTES - 8)] {
            let at = region.offset + u64::from(block) * region.stride + inside;
            let fd = &self.kv.fds[region.fd as usize];
            assert_eq!(rustix::io::pwrite(fd, &stamp.to_le_bytes(), at).unwrap(), 8);
        }
    }

    fn next_op(&mut self) -> u64 {
        self.op += 1;
        self.op
    }

    /// Posts a save of every block, under keys of its own.
    fn post_save(&mut self, stamp: &mut u64) -> Vec<BlockHash> {
        let keys: Vec<BlockHash> = SAVED
            .map(|block| {
                *stamp += 1;
                self.stamp(block, *stamp);
                key(*stamp, block)
            })
            .collect();
        self.log += 1;
        self.scheduler.open_log(self.log, &keys);
        let op = self.next_op();
        let save = Message { op, log: self.log, step: 1, ..Message::new(Kind::Save) };
        self.scheduler.with_blocks(save, &SAVED.collect::<Vec<_>>());
        self.scheduler.post(Message { log: self.log, ..Message::new(Kind::Close) });
        keys
    }

    /// Those of `keys` that are served, in their order; how many of them are not what they should be.
    fn served(&mut self, keys: &[BlockHash]) -> (Vec<BlockHash>, u64) {
        self.scheduler.open_log(0, keys);
        let (mut from, mut served, mut wrong) = (0, Vec::new(), 0);
        while from < keys.len() {
            let count = (keys.len() - from) as u32;
            let hits = watch("an answer", || {
                let op = self.next_op();
                let query = Message { op, from: from as u32, count, ..Message::new(Kind::Query) };
                self.scheduler.post(query);
                Some(self.scheduler.outcome(op)).filter(|outcome| outcome.status == Status::Ok)
            });
            let found = from..from + hits.value as usize;
            for (index, key) in found.clone().zip(&keys[found.clone()]) {
                let slot = self.scheduler.memory.read_ref((index / CHUNK_KEYS) as u32, index % CHUNK_KEYS);
                wrong += u64::from(!self.holds(slot, key));
                served.push(*key);
            }
            from = found.end + 1;
        }
        self.scheduler.post(Message::new(Kind::Close));
        (served, wrong)
    }

    /// Whether a slot that was answered is whole and holds this key's bytes, seen by the engine's own mapping.
    fn holds(&self, slot: SlotRef, key: &BlockHash) -> bool {
        let expected = content(key);
        let view = pool::PoolView::new(
            |at| self.rank.pool.word64(at).load(Ordering::Acquire),
            self.rank.welcome.pool_bytes,
        );
        let words = self.rank.pool.words64(slot.offset as usize, expected.len() / 8);
        let expected_words = expected.as_chunks::<8>().0.iter().map(|eight| u64::from_le_bytes(*eight));
        let equal = words.iter().map(|word| word.load(Ordering::Relaxed)).eq(expected_words);
        equal && view.is_ok_and(|view| view.verify(slot, expected.len() as u64))
    }
}

/// Saves until the sidecar is killed, `after` the first save was posted; the keys that were posted, and how many of them
/// in all, from the first, were reported to be kept.
fn save_until_killed(sidecar: Sidecar, after: Duration, stamp: &mut u64) -> (Vec<BlockHash>, usize) {
    let mut engine = Engine::connect(&sidecar);
    let (mut posted, mut reported) = (engine.post_save(stamp), 0);
    let killer = std::thread::spawn(move || {
        std::thread::sleep(after);
        sidecar.kill();
    });
    while !engine.scheduler.sidecar_gone() {
        let Some(saved) = engine.scheduler.try_saved() else {
            std::thread::sleep(Duration::from_micros(50));
            continue;
        };
        if saved.dropped > 0 {
            // No room: what follows would not be kept either.
            break;
        }
        assert_eq!((saved.committed, saved.present, saved.cancelled), (SAVED.len() as u32, 0, 0));
        reported = posted.len();
        posted.extend(engine.post_save(stamp));
    }
    killer.join().unwrap();
    (posted, reported)
}

// === tests ===

/// Blocks that a pool holds.
fn room() -> u64 {
    let segment_bytes = tiers::dram::segment_bytes_for(POOL_BYTES);
    let slots = pool::slot_count(segment_bytes, LAYERS * LAYER_BYTES).expect("small blocks");
    POOL_BYTES / segment_bytes * u64::from(slots)
}

/// `kills` kills of sidecars that share pool files, `LIVES` each.
fn kill_at_random(kills: u64, seed: u64) -> Tally {
    let (mut tally, mut state, mut stamp) = (Tally::default(), seed, 0);
    for file in 0..kills.div_ceil(LIVES) {
        let place = Place::new(&format!("kills-{seed}-{file}"));
        let (mut posted, mut kept) = (Vec::new(), BTreeSet::new());
        for life in 0..LIVES.min(kills - file * LIVES) + 1 {
            let sidecar = Sidecar::start(&place, &format!("{}MiB", POOL_BYTES >> 20));
            sidecar.wait_started();
            let mut engine = Engine::connect(&sidecar);
            let (served, wrong) = engine.served(&posted);
            let served: BTreeSet<BlockHash> = served.into_iter().collect();
            assert_eq!(sidecar.metric("pillion_adopted_blocks_total"), served.len() as u64, "{file} {life}");
            tally.torn += u64::from(sidecar.metric("pillion_adoption_dropped_total") > 0);
            tally.wrong += wrong;
            let missing = kept.difference(&served).count() as u64;
            let evicted = missing.min((posted.len() as u64).saturating_sub(room()));
            tally.evicted += evicted;
            tally.lost += missing - evicted;
            tally.unreported += served.difference(&kept).count() as u64;
            tally.served += served.len() as u64;
            tally.kept += kept.len() as u64;
            kept = served;
            drop(engine);
            if life == LIVES.min(kills - file * LIVES) {
                break;
            }
            let after = Duration::from_micros(random(&mut state) % LIFE_US_MAX);
            let (keys, reported) = save_until_killed(sidecar, after, &mut stamp);
            kept.extend(&keys[..reported]);
            posted.extend(keys);
        }
    }
    tally
}

#[test]
fn after_a_kill_at_any_moment_what_is_served_is_whole() {
    let (kills, seed) = (number("KILLS", KILLS), number("SEED", 1));
    let tally = kill_at_random(kills, seed);
    eprintln!("{kills} kills, seed {seed}: {tally:?}");
    assert_eq!((tally.wrong, tally.lost), (0, 0), "seed {seed}: {tally:?}");
    assert!(tally.served > 0, "{tally:?}");
}

#[test]
fn a_pool_that_cannot_be_adopted_is_served_empty_and_said() {
    let place = Place::new("other");
    let sidecar = Sidecar::start(&place, "16MiB");
    let mut engine = Engine::connect(&sidecar);
    let keys = engine.post_save(&mut 0);
    assert_eq!(engine.scheduler.saved().committed, SAVED.len() as u32);
    sidecar.kill();

    let sidecar = Sidecar::start(&place, "16MiB");
    sidecar.wait_started();
    assert_eq!(Engine::connect(&sidecar).served(&keys), (keys.clone(), 0));
    sidecar.kill();
    let file = std::fs::OpenOptions::new().write(true).open(&place.pool).unwrap();
    rustix::io::pwrite(&file, &99u64.to_le_bytes(), pool::header::VERSION).unwrap();

    // Killed before it has emptied the file: the next one must not take it for its own.
    Sidecar::start(&place, "16MiB").kill();
    let sidecar = Sidecar::start(&place, "16MiB");
    let mut engine = Engine::connect(&sidecar);
    assert_eq!(engine.served(&keys), (Vec::new(), 0));
    let log = std::fs::read_to_string(place.folder.path().join("log")).unwrap();
    assert!(log.contains("before it had emptied it") && log.contains("starting empty"), "{log}");
    let page = sidecar.page("/readyz").expect("ready");
    assert!(page.contains("0 of 4 segments in service"), "engines may read the old pool for a while: {page}");
    sidecar.wait_started();
    engine.post_save(&mut 1000);
    assert_eq!(engine.scheduler.saved().committed, SAVED.len() as u32);
}
