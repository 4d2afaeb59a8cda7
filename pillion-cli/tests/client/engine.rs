//! One rank and its scheduler: they save stamped blocks and compare every served byte.

use std::sync::LazyLock;
use std::sync::atomic::Ordering;

use shm_protocol::handshake::{Copier, Hello, Role, WorkerHello};
use shm_protocol::key::BlockHash;
use shm_protocol::layout::CHUNK_KEYS;
use shm_protocol::message::{Kind, LOAD_ARRIVING, Message, Outcome, QUERY_ARRIVING, Status};
use shm_protocol::namespace::Facts;
use shm_protocol::pool::{self, SlotRef};
use shm_protocol::request::{LoadEnd, SchedulerRequest, WorkerRequest};

use super::sidecar::Sidecar;
use super::{BLOCK_BYTES, Kv, LAYER_BYTES, LAYERS, Session, hello, pattern, query, save_log, watch};

/// Blocks of one save: two chunks of keys, seven tasks of copies.
pub(crate) const SAVED: std::ops::Range<u32> = 1..101;

pub(crate) struct Engine {
    kv: Kv,
    rank: Session,
    pub(crate) scheduler: Session,
    op: u64,
    log: u32,
}

/// The key of a block of KV with this stamp at its start and end.
fn key(stamp: u64, block: u32) -> BlockHash {
    BlockHash::from_words([stamp, block.into(), stamp ^ 0x55, 1])
}

/// The bytes of each block of KV before its stamp: all its layers, end to end.
static PATTERNS: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let layers = |block| (0..LAYERS).flat_map(move |layer| pattern(block, layer)).collect();
    (0..u64::from(SAVED.end)).map(layers).collect()
});

/// The bytes saved under a key.
fn content(key: &BlockHash) -> Vec<u8> {
    let [stamp, block, ..] = key.words();
    let mut bytes = PATTERNS[block as usize].clone();
    let end = bytes.len() - 8;
    bytes[..8].copy_from_slice(&stamp.to_le_bytes());
    bytes[end..].copy_from_slice(&stamp.to_le_bytes());
    bytes
}

/// Keys of the next save after this stamp.
pub(crate) fn keys_after(stamp: u64) -> Vec<BlockHash> {
    SAVED.zip(stamp + 1..).map(|(block, stamp)| key(stamp, block)).collect()
}

impl Engine {
    pub(crate) fn connect(sidecar: &Sidecar) -> Self {
        Self::waiting(sidecar, None)
    }

    /// An engine with requests that wait this long for another engine's save.
    pub(crate) fn waiting(sidecar: &Sidecar, miss_wait_ms: Option<u32>) -> Self {
        Self::of("tiny", sidecar, miss_wait_ms)
    }

    /// An engine of another model than the others, if its name is of another length.
    pub(crate) fn of(model: &str, sidecar: &Sidecar, miss_wait_ms: Option<u32>) -> Self {
        let facts = Facts::from([("model".to_owned(), model.to_owned())]);
        Self::stating(facts, [model.len() as u8; 16], sidecar, miss_wait_ms)
    }

    /// An engine with these facts, and this run.
    pub(crate) fn stating(facts: Facts, run: [u8; 16], sidecar: &Sidecar, miss_wait_ms: Option<u32>) -> Self {
        let kv = Kv::new();
        for block in SAVED {
            let layers = PATTERNS[block as usize].chunks(LAYER_BYTES as usize);
            for (region, bytes) in kv.regions.iter().zip(layers) {
                let at = region.offset + u64::from(block) * region.stride;
                assert_eq!(rustix::io::pwrite(&kv.fds[region.fd as usize], bytes, at).unwrap(), bytes.len());
            }
        }
        let worker = Role::Worker(WorkerHello { facts, ..kv.stated("", 0, 1, Copier::Sidecar) });
        let rank = Session::rank(&sidecar.socket, &hello("engine", 1, worker), &kv, run);
        rank.fences(1, 1);
        let hello = Hello { miss_wait_ms, ..hello("engine", 1, Role::Scheduler { run }) };
        let scheduler = Session::open(&sidecar.socket, &hello, &[]);
        Self { kv, rank, scheduler, op: 0, log: 0 }
    }

    /// The engine's namespace.
    pub(crate) fn namespace(&self) -> &str {
        &self.rank.welcome.namespace
    }

    /// Writes a stamp at the begin and the end of a block.
    fn stamp(&self, block: u32, stamp: u64) {
        let (first, last) = (&self.kv.regions[0], &self.kv.regions[LAYERS as usize - 1]);
        for (region, inside) in [(first, 0), (last, LAYER_BYTES - 8)] {
            let at = region.offset + u64::from(block) * region.stride + inside;
            let fd = &self.kv.fds[region.fd as usize];
            assert_eq!(rustix::io::pwrite(fd, &stamp.to_le_bytes(), at).unwrap(), 8);
        }
    }

    pub(crate) fn next_op(&mut self) -> u64 {
        self.op += 1;
        self.op
    }

    /// Posts a save of every block, under keys of its own.
    pub(crate) fn post_save(&mut self, stamp: &mut u64) -> Vec<BlockHash> {
        let keys: Vec<BlockHash> = SAVED
            .map(|block| {
                *stamp += 1;
                self.stamp(block, *stamp);
                key(*stamp, block)
            })
            .collect();
        self.post_keys(&keys);
        keys
    }

    /// Posts a save of the first blocks under these keys.
    fn post_keys(&mut self, keys: &[BlockHash]) {
        self.log += 1;
        self.scheduler.open_log(self.log, keys);
        let save = save_log(self.next_op(), self.log, 1);
        self.scheduler.with_blocks(save, &SAVED.take(keys.len()).collect::<Vec<_>>());
        self.scheduler.post(SchedulerRequest::Close { log: self.log, way: 0 });
    }

    /// Saves blocks of any bytes under these keys, each of which must be kept.
    pub(crate) fn save_keys(&mut self, keys: &[BlockHash]) {
        for part in keys.chunks(SAVED.len()) {
            self.post_keys(part);
            assert_eq!(self.scheduler.saved().committed as usize, part.len());
        }
    }

    /// The same, and every block must be kept.
    pub(crate) fn save(&mut self, stamp: &mut u64) -> Vec<BlockHash> {
        let keys = self.post_save(stamp);
        assert_eq!(self.scheduler.saved().committed, SAVED.len() as u32);
        keys
    }

    /// Posts a query of `keys`, and returns its number.
    pub(crate) fn post_query(&mut self, keys: &[BlockHash]) -> u64 {
        self.scheduler.open_log(0, keys);
        let op = self.next_op();
        self.scheduler.post(query(op, keys.len() as u32));
        op
    }

    /// Queries `keys` until the rank has joined and an answer comes; it may count blocks still under way.
    pub(crate) fn ask_early(&mut self, keys: &[BlockHash]) -> (u64, Outcome) {
        self.scheduler.open_log(0, keys);
        watch("a rank that is known", || {
            let (op, count) = (self.next_op(), keys.len() as u32);
            self.scheduler.post(Message { op, count, flags: QUERY_ARRIVING, ..Message::new(Kind::Query) });
            let known = |outcome: &Outcome| outcome.status != Status::Pending;
            let outcome = watch("an answer", || Some(self.scheduler.outcome(op)).filter(known));
            Some((op, outcome)).filter(|_| outcome.status != Status::NotReady)
        })
    }

    /// Posts the load of keys `from..` into these blocks, under an early answer.
    pub(crate) fn post_load(&mut self, lease: u64, from: u32, blocks: std::ops::Range<u32>) -> u64 {
        let op = self.next_op();
        let load = Message { op, lease, from, step: 1, flags: LOAD_ARRIVING, ..Message::new(Kind::Load) };
        self.scheduler.with_blocks(load, &blocks.collect::<Vec<_>>());
        op
    }

    /// The status of a load, if it has ended.
    pub(crate) fn load_ended(&self, op: u64) -> Option<Status> {
        let outcome = self.rank.memory.load_outcome(op)?;
        Some(outcome.status).filter(|status| *status != Status::Pending)
    }

    /// Ends the rank's part of a load that failed in the sidecar.
    pub(crate) fn give_up(&mut self, op: u64, ended: Status) {
        if ended == Status::Failed {
            self.rank.post(WorkerRequest::Loaded { op, end: LoadEnd::Failed });
        }
    }

    /// Returns true if these blocks of KV hold the bytes of these keys.
    pub(crate) fn loaded(&self, blocks: std::ops::Range<u32>, keys: &[BlockHash]) -> bool {
        blocks.zip(keys).all(|(block, key)| {
            let mut bytes = vec![0; BLOCK_BYTES as usize];
            for (region, layer) in self.kv.regions.iter().zip(bytes.chunks_mut(LAYER_BYTES as usize)) {
                let at = region.offset + u64::from(block) * region.stride;
                let fd = &self.kv.fds[region.fd as usize];
                assert_eq!(rustix::io::pread(fd, &mut *layer, at), Ok(layer.len()));
            }
            bytes == content(key)
        })
    }

    /// Queries `keys`. Returns those served, in their order, and the number of them with wrong bytes.
    pub(crate) fn served(&mut self, keys: &[BlockHash]) -> (Vec<BlockHash>, u64) {
        self.scheduler.open_log(0, keys);
        let (mut from, mut served, mut wrong) = (0, Vec::new(), 0);
        while from < keys.len() {
            let count = (keys.len() - from) as u32;
            let hits = watch("a rank that is known", || {
                let op = self.next_op();
                let query = Message { op, from: from as u32, count, ..Message::new(Kind::Query) };
                self.scheduler.post(query);
                let known = |outcome: &Outcome| outcome.status != Status::Pending;
                let outcome = watch("an answer", || Some(self.scheduler.outcome(op)).filter(known));
                Some(outcome).filter(|outcome| outcome.status == Status::Ok)
            });
            let found = from..from + hits.value as usize;
            for (index, key) in found.clone().zip(&keys[found.clone()]) {
                let slot = self.scheduler.memory.read_ref((index / CHUNK_KEYS) as u32, index % CHUNK_KEYS);
                wrong += u64::from(!self.holds(slot, key));
                served.push(*key);
            }
            // An answer may be shorter than the run of kept blocks.
            from = found.end + usize::from(hits.value == 0);
        }
        self.scheduler.post(SchedulerRequest::Close { log: 0, way: 0 });
        (served, wrong)
    }

    /// Returns true if a slot of an answer holds this key's bytes, read through the engine's own mapping.
    fn holds(&self, slot: SlotRef, key: &BlockHash) -> bool {
        let expected = content(key);
        let view = pool::PoolView::new(|at| self.rank.pool.load64(at), self.rank.welcome.pool_bytes);
        let words = self.rank.pool.words64(slot.offset as usize, expected.len() / 8);
        let expected_words = expected.as_chunks::<8>().0.iter().map(|eight| u64::from_le_bytes(*eight));
        let equal = words.iter().map(|word| word.load(Ordering::Relaxed)).eq(expected_words);
        equal && view.is_ok_and(|view| view.verify(slot, expected.len() as u64))
    }
}
