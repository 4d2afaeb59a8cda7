//! An engine process's side of the protocol, spoken directly over shm-protocol.
#![allow(dead_code, reason = "each test file uses its part")]

pub(crate) mod engine;
pub(crate) mod in_process;
pub(crate) mod prompts;
pub(crate) mod sidecar;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::MemfdFlags;
use shm_protocol::handshake::{self, BlockRegion, Copier, Hello, Reply, Role, Welcome, WorkerHello};
use shm_protocol::key::BlockHash;
use shm_protocol::layout::{STAGING_WORDS_BYTES, header};
use shm_protocol::message::{Kind, Message, Outcome, Saved, Slot, StageRequest, Status};
use shm_protocol::random::Random;
use shm_protocol::region::{Access, Region};
use shm_protocol::request::{Append, LogKeys, Query, Save, SchedulerRequest, WorkerRequest};
use shm_protocol::ring::{Consumer, Producer, RingMemory};
use shm_protocol::session::{RegionRing, Ring, SessionMemory};
use shm_protocol::{transport, wait};

/// The longest wait of a test.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(60);
/// Attempts of a test with steps bound by a limit of the sidecar.
const TRIES: u32 = 5;

#[expect(
    clippy::disallowed_methods,
    reason = "a test compares a limit of the sidecar's with the clock's time"
)]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Repeats the steps of a test until they came within a limit of the sidecar; `None` is an attempt that came
/// too late.
pub(crate) fn in_time<T>(what: &str, attempt: impl FnMut() -> Option<T>) -> T {
    let came = std::iter::repeat_with(attempt).take(TRIES as usize).flatten().next();
    came.unwrap_or_else(|| panic!("{what} came too late {TRIES} times"))
}

pub(crate) fn watch<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let began = now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(began.elapsed() < WATCHDOG, "no {what} under the watchdog");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Flips a bit in every block of a pool's or a log's file: in each of its pages, past the first MiB.
pub(crate) fn corrupt(path: &Path) {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let bytes = file.metadata().unwrap().len();
    for at in ((1 << 20)..bytes).step_by(4096) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at + 2000).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at + 2000).unwrap();
    }
    file.sync_all().unwrap();
}

/// The output of a `pillion` command, after its end.
pub(crate) fn pillion(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pillion")).args(arguments).output().unwrap()
}

pub(crate) fn hex(key: &BlockHash) -> String {
    key.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn greet(socket: &Path, hello: &Hello, fds: &[&OwnedFd]) -> (OwnedFd, Reply, Vec<OwnedFd>) {
    let connection = transport::connect_socket(socket, WATCHDOG).expect("a listening sidecar");
    let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
    transport::send_record(&connection, &handshake::encode_record(hello), &borrowed)
        .expect("the hello goes out");
    let (record, fds) = transport::receive_record(&connection).expect("a reply");
    let reply = handshake::decode_reply(&record).expect("a reply of this version");
    (connection, reply, fds)
}

pub(crate) fn hello(engine: &str, world_size: u32, role: Role) -> Hello {
    Hello::new(engine.into(), world_size, role)
}

pub(crate) struct Session {
    pub(crate) welcome: Welcome,
    pub(crate) memory: SessionMemory,
    pub(crate) pool: Region,
    pub(crate) pidfd: OwnedFd,
    doorbell: OwnedFd,
    socket: OwnedFd,
    submissions: Producer<RegionRing>,
    completions: Consumer<RegionRing>,
    block_ids: u32,
}

impl Session {
    pub(crate) fn open(socket: &Path, hello: &Hello, fds: &[&OwnedFd]) -> Self {
        // Each try takes a millisecond.
        let mut tries = 10_000;
        let (socket, welcome, fds) = loop {
            match greet(socket, hello, fds) {
                (socket, Reply::Welcome(welcome), fds) => break (socket, welcome, fds),
                // The scheduler before has gone, and the sidecar has not seen its end yet.
                (_, Reply::Refused { reason, .. }, _)
                    if reason.starts_with("another scheduler") && tries > 0 =>
                {
                    tries -= 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
                (_, reply, _) => panic!("{reply:?}"),
            }
        };
        let [memory, doorbell, pool, pidfd] = fds.try_into().expect("four descriptors");
        let memory = SessionMemory::open(welcome.version, memory).expect("session memory");
        let pool_bytes = welcome.pool_bytes as usize;
        assert!(Region::map(pool.as_fd(), pool_bytes, Access::ReadWrite).is_err(), "the pool is read-only");
        let pool = Region::map(pool.as_fd(), pool_bytes, Access::ReadOnly).expect("the pool");
        let submissions = Producer::new(memory.ring(Ring::Submission));
        let completions = Consumer::new(memory.ring(Ring::Completion));
        Self { welcome, memory, pool, pidfd, doorbell, socket, submissions, completions, block_ids: 0 }
    }

    pub(crate) fn scheduler(socket: &Path, engine: &str, world_size: u32, run: [u8; 16]) -> Self {
        Self::open(socket, &hello(engine, world_size, Role::Scheduler { run }), &[])
    }

    /// A rank with the memory `kv`, joined.
    pub(crate) fn rank(socket: &Path, hello: &Hello, kv: &Kv, run: [u8; 16]) -> Self {
        Self::join(socket, hello, &kv.fds.each_ref(), run)
    }

    /// The only rank of an engine, joined, with saves through a staging segment of `slots` slots; and the
    /// segment.
    pub(crate) fn staged_rank(socket: &Path, engine: &str, slots: u32, run: [u8; 16]) -> (Self, OwnedFd) {
        let segment = rustix::fs::memfd_create("staging", MemfdFlags::CLOEXEC).unwrap();
        let (offset, stride) = (STAGING_WORDS_BYTES as u64, BLOCK_BYTES.next_multiple_of(4096));
        rustix::fs::ftruncate(&segment, offset + u64::from(slots) * stride).unwrap();
        let regions = vec![BlockRegion { fd: 0, offset, stride, bytes: BLOCK_BYTES }];
        let worker = Kv::new().stated(engine, 0, 1, Copier::Engine);
        let role = Role::Worker(WorkerHello { regions, staging: Some(slots), ..worker });
        (Self::join(socket, &hello(engine, 1, role), &[&segment], run), segment)
    }

    fn join(socket: &Path, hello: &Hello, fds: &[&OwnedFd], run: [u8; 16]) -> Self {
        let mut rank = Self::open(socket, hello, fds);
        rank.post(WorkerRequest::Join { run, step: 0 });
        rank
    }

    pub(crate) fn post(&mut self, request: impl Into<Message>) {
        self.post_raw(request.into().encode_slot());
    }

    pub(crate) fn post_raw(&mut self, slot: Slot) {
        assert!(self.submissions.has_room(0).unwrap());
        self.submissions.push(&slot);
        self.submissions.publish();
        self.ring();
    }

    /// Posts as many of these slots as the ring has room for, all visible at once. Returns their number.
    pub(crate) fn post_all(&mut self, slots: &[Slot]) -> usize {
        let count = slots.len().min(self.submissions.free().unwrap() as usize);
        slots[..count].iter().for_each(|slot| self.submissions.push(slot));
        self.submissions.publish();
        self.ring();
        count
    }

    /// Posts all of these slots, as room comes.
    pub(crate) fn post_whole(&mut self, slots: &[Slot]) {
        let mut posted = 0;
        watch("room for all messages", || {
            posted += self.post_all(&slots[posted..]);
            (posted == slots.len()).then_some(())
        });
    }

    /// Waits until the sidecar has read every message.
    pub(crate) fn wait_read(&self) {
        let ring = self.submission();
        watch("messages read", || (ring.load_head() == ring.load_tail()).then_some(()));
    }

    /// The submission ring's words, for wrong values.
    pub(crate) fn submission(&self) -> RegionRing {
        self.memory.ring(Ring::Submission)
    }

    pub(crate) fn socket(&self) -> &OwnedFd {
        &self.socket
    }

    pub(crate) fn lie_about_tail(&self) {
        self.memory.ring(Ring::Submission).store_tail(1 << 30);
        self.ring();
    }

    pub(crate) fn ring(&self) {
        wait::ring_doorbell(self.memory.region(), self.doorbell.as_fd());
    }

    /// Opens log `log` with these keys in chunks from 0 on.
    pub(crate) fn open_log(&mut self, log: u32, keys: &[BlockHash]) {
        self.post(SchedulerRequest::Open { log });
        for (index, key) in keys.iter().enumerate() {
            self.memory.write_key((index / 64) as u32, index % 64, key);
        }
        for from in (0..keys.len()).step_by(64) {
            let chunks = [(from / 64) as u32, 0, 0, 0, 0, 0];
            let keys = LogKeys::new(log, from as u32..keys.len().min(from + 64) as u32);
            self.post(SchedulerRequest::Append(Append { keys, chunks, promised: false, tail: false }));
        }
    }

    pub(crate) fn query(&mut self, log: u32, op: u64, count: u32) -> Outcome {
        self.post(SchedulerRequest::Query(Query::new(op, LogKeys::new(log, 0..count))));
        self.outcome(op)
    }

    /// Repeats a query until the sidecar knows every rank, and returns the answer.
    pub(crate) fn query_ready(&mut self, log: u32, op: u64, count: u32) -> Outcome {
        watch("an answer to an engine whose ranks have joined", || {
            Some(self.query(log, op, count)).filter(|outcome| outcome.status == Status::Ok)
        })
    }

    /// Posts a LOAD or SAVE with its blocks; the step of a SAVE is accepted at once.
    pub(crate) fn with_blocks(&mut self, request: impl Into<Message>, blocks: &[u32]) {
        let message = request.into();
        self.unaccepted(message, blocks);
        if message.kind == Kind::Save {
            self.post(SchedulerRequest::Accept { step: message.step });
        }
    }

    /// Posts a LOAD or SAVE with its blocks.
    pub(crate) fn unaccepted(&mut self, request: impl Into<Message>, blocks: &[u32]) {
        let mut message = request.into();
        message.data[0] = self.block_ids;
        message.count = blocks.len() as u32;
        for &block in blocks {
            self.memory.write_block_id(self.block_ids, block);
            self.block_ids += 1;
        }
        self.post(message);
    }

    pub(crate) fn outcome(&self, op: u64) -> Outcome {
        watch("outcome", || self.memory.load_outcome(op))
    }

    pub(crate) fn saved(&mut self) -> Saved {
        watch("completion", || self.try_saved())
    }

    pub(crate) fn try_saved(&mut self) -> Option<Saved> {
        self.next_completion().map(|slot| Saved::decode_slot(&slot))
    }

    /// The next block for a rank with staged saves.
    pub(crate) fn stage(&mut self) -> StageRequest {
        watch("a block asked for", || self.next_completion().map(|slot| StageRequest::decode_slot(&slot)))
    }

    pub(crate) fn next_completion(&mut self) -> Option<Slot> {
        self.completions.ready().unwrap();
        let slot = self.completions.pop()?;
        self.completions.release();
        Some(slot)
    }

    pub(crate) fn store(&self, at: usize, value: u64) {
        self.memory.region().word64(at).store(value, std::sync::atomic::Ordering::Release);
    }

    pub(crate) fn fences(&self, start: u64, done: u64) {
        self.store(header::FENCE_START, start);
        self.store(header::FENCE_DONE, done);
    }

    pub(crate) fn heartbeat(&self) -> u64 {
        self.memory.region().word64(header::SIDECAR_HEARTBEAT).load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Returns true if the sidecar's process has ended; does not wait.
    pub(crate) fn sidecar_gone(&self) -> bool {
        let mut watched = [PollFd::new(&self.pidfd, PollFlags::IN)];
        rustix::event::poll(&mut watched, Some(&Timespec::default())).expect("a descriptor to poll") > 0
    }

    /// Waits for the sidecar's hang-up.
    pub(crate) fn closed(&self) {
        self.closed_after("what it did");
    }

    /// The same; the panic names `what` if no hang-up comes.
    pub(crate) fn closed_after(&self, what: &str) {
        match transport::receive_record(&self.socket) {
            Ok((record, _)) => assert!(record.is_empty(), "a record after {what}"),
            Err(error) => panic!("no hang-up after {what}: {error}"),
        }
    }
}

/// QUERY for the first `count` keys of log 0.
pub(crate) fn query(op: u64, count: u32) -> SchedulerRequest {
    SchedulerRequest::Query(Query::new(op, LogKeys::new(0, 0..count)))
}

/// SAVE of keys `from..` of log 0 after step `step`; [`Session::with_blocks`] sets their number.
pub(crate) fn save(op: u64, from: u32, step: u64) -> SchedulerRequest {
    SchedulerRequest::Save(Save {
        op,
        keys: LogKeys::new(0, from..from),
        position: 0,
        step,
        checked: false,
        handover: false,
        replaced: 0,
    })
}

/// The same from the first key of a log on.
pub(crate) fn save_log(op: u64, log: u32, step: u64) -> SchedulerRequest {
    SchedulerRequest::Save(Save {
        op,
        keys: LogKeys::new(log, 0..0),
        position: 0,
        step,
        checked: false,
        handover: false,
        replaced: 0,
    })
}

pub(crate) const BLOCKS: u32 = 128;
pub(crate) const LAYERS: u64 = 3;
pub(crate) const LAYER_BYTES: u64 = 5_000;
pub(crate) const BLOCK_BYTES: u64 = LAYERS * LAYER_BYTES;

/// One rank's KV: three layers in two descriptors, with gaps between blocks.
pub(crate) struct Kv {
    pub(crate) fds: [OwnedFd; 2],
    pub(crate) regions: Vec<BlockRegion>,
}

impl Kv {
    pub(crate) fn new() -> Self {
        let region = |fd, offset, stride| BlockRegion { fd, offset, stride, bytes: LAYER_BYTES };
        let regions = vec![region(0, 64, 12_000), region(0, 6_000, 12_000), region(1, 0, LAYER_BYTES)];
        let fds = [12_000 * u64::from(BLOCKS) + 6_000, LAYER_BYTES * u64::from(BLOCKS)].map(|bytes| {
            let fd = rustix::fs::memfd_create("kv", MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&fd, bytes).unwrap();
            fd
        });
        Self { fds, regions }
    }

    pub(crate) fn fill(&self, block: u32, seed: u64) {
        for (layer, region) in self.regions.iter().enumerate() {
            let bytes = pattern(seed, layer as u64);
            let at = region.offset + u64::from(block) * region.stride;
            assert_eq!(rustix::io::pwrite(&self.fds[region.fd as usize], &bytes, at).unwrap(), bytes.len());
        }
    }

    pub(crate) fn holds(&self, block: u32, seed: u64) -> bool {
        self.regions.iter().enumerate().all(|(layer, region)| {
            let mut bytes = vec![0; LAYER_BYTES as usize];
            let at = region.offset + u64::from(block) * region.stride;
            rustix::io::pread(&self.fds[region.fd as usize], &mut bytes, at).unwrap();
            bytes == pattern(seed, layer as u64)
        })
    }

    pub(crate) fn worker(&self, rank: u32, shards: u32, copy: Copier) -> Role {
        self.worker_of("tiny", rank, shards, copy)
    }

    pub(crate) fn worker_of(&self, model: &str, rank: u32, shards: u32, copy: Copier) -> Role {
        Role::Worker(self.stated(model, rank, shards, copy))
    }

    /// The statements of such a worker.
    pub(crate) fn stated(&self, model: &str, rank: u32, shards: u32, copy: Copier) -> WorkerHello {
        let facts = BTreeMap::from([("model".to_owned(), model.to_owned())]);
        let regions = self.regions.clone();
        WorkerHello {
            rank,
            shard: rank,
            shards,
            blocks: BLOCKS,
            regions,
            copy,
            facts,
            ..WorkerHello::default()
        }
    }
}

pub(crate) fn pattern(seed: u64, layer: u64) -> Vec<u8> {
    let mut random = Random(seed * 31 + layer);
    (0..LAYER_BYTES).map(|_| random.next() as u8).collect()
}

pub(crate) fn keys(count: usize) -> Vec<BlockHash> {
    (0..count).map(|index| BlockHash([index as u8 + 1; 32])).collect()
}
