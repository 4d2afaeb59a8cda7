//! The rules of the core, one test each, against the real tier.

mod acceptance;
mod adoption;
pub(super) mod announcements;
mod binding;
pub(super) mod checks;
mod handover;
mod hints;
mod ledger;
mod on_device;
mod proofs;
mod quotas;
mod scans;
pub(super) mod score;
mod states;
mod timing;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shm_protocol::handshake::{BlockRegion, Copier, HelloDigest, Role, WorkerHello};
use shm_protocol::key::{BlockKey, GROUP, NamespaceDigest};
use shm_protocol::message::{APPEND_CHUNKS, LOAD_BY_ENGINE, LOAD_EARLY, Outcome, Saved, Status};
use shm_protocol::namespace::Facts;
use shm_protocol::pool::SlotRef;
use shm_protocol::request::{self, Append, Cancel, LoadEnd, LoadFlags, LogKeys, Query};
use shm_protocol::session::Bound;
use tiers::dram::DramConfig;
use tiers::opener::OpenedSegment;

use super::*;

/// Returns a closure for a part of the actions with this pattern.
macro_rules! taken {
    ($pattern:pat => $part:expr) => {
        |action| match action {
            $pattern => Some($part),
            _ => None,
        }
    };
}
pub(super) use taken;

pub(super) const SCHEDULER: SessionId = 1;
pub(super) const RANKS: [SessionId; 2] = [2, 3];
pub(super) const RUN: [u8; 16] = [7; 16];
const SHARD_BYTES: u64 = 4096;
/// The namespace of ranks without facts.
pub(super) const NAMESPACE: NamespaceDigest =
    NamespaceDigest(0xc19a_797f_a1fd_590c_d2e5_b42d_1cf5_f246_u128.to_be_bytes());

pub(super) struct Harness {
    pub(super) core: Core,
    pub(super) out: Vec<Action>,
    pub(super) now_ms: u64,
    /// The session of the scheduler's messages.
    speaker: SessionId,
    /// Steps of posted saves without an ACCEPT, each with its scheduler.
    unaccepted: BTreeSet<(SessionId, u64)>,
}

pub(super) fn hash(n: u32) -> BlockHash {
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&n.to_le_bytes());
    bytes[8..12].copy_from_slice(&n.wrapping_mul(0x9E37_79B9).to_le_bytes());
    BlockHash(bytes)
}

pub(super) fn hello(world_size: u32, role: Role) -> Hello {
    Hello::new("e".into(), world_size, role)
}

fn rank_hello(world_size: u32, rank: u32) -> Hello {
    rank_hello_of(world_size, rank, SHARD_BYTES)
}

pub(super) fn rank_hello_of(world_size: u32, rank: u32, bytes: u64) -> Hello {
    let regions = vec![BlockRegion { fd: 0, offset: 0, stride: bytes, bytes }];
    let (shards, copy) = (world_size, Copier::Sidecar);
    let worker = WorkerHello { rank, shard: rank, shards, blocks: 1000, regions, copy, ..Default::default() };
    hello(world_size, Role::Worker(worker))
}

/// A rank's hello with a change.
pub(super) fn changed(mut hello: Hello, change: impl FnOnce(&mut WorkerHello)) -> Hello {
    let Role::Worker(worker) = &mut hello.role else { unreachable!("a rank's") };
    change(worker);
    hello
}

/// A core over a pool of so many bytes.
fn core_of(pool_bytes: u64) -> Core {
    core_over(pool_bytes, &[], None)
}

/// The same, with quotas and a tier.
fn core_over(pool_bytes: u64, quotas: &[&str], tier: Option<NewTier>) -> Core {
    let dram = Dram::new(DramConfig { pool_bytes, segment_bytes: 2 << 20, lease_ttl_ms: 1000 }).unwrap();
    let quotas: Vec<_> = quotas.iter().map(|quota| quota.parse().unwrap()).collect();
    Core::new(dram, &quotas, tier)
}

/// A scheduler's message without keys and blocks.
pub(super) fn asked(request: SchedulerRequest) -> CoreEvent {
    let request = RingRequest::Scheduler { request, keys: Vec::new(), blocks: Vec::new() };
    CoreEvent::Message { session: SCHEDULER, request }
}

impl Harness {
    /// An engine of `world_size` ranks, all joined, over a pool of 64 MiB.
    fn engine(world_size: u32) -> Self {
        let mut harness = Self::unjoined(world_size);
        harness.join();
        harness
    }

    /// The same, keeping `count` blocks saved by operation 1.
    fn keeping(world_size: u32, count: u32) -> Self {
        let mut harness = Self::engine(world_size);
        harness.keep(count);
        harness
    }

    /// The same, keeping two blocks leased as operation 2.
    fn leasing(world_size: u32) -> Self {
        let mut harness = Self::keeping(world_size, 2);
        assert_eq!(harness.query(0, 2, 0, 2).value, 2);
        harness
    }

    pub(super) fn join(&mut self) {
        for session in self.ranks() {
            self.join_from(session, 0);
        }
    }

    fn unjoined(world_size: u32) -> Self {
        Self::over(core_of(64 << 20), world_size, SHARD_BYTES)
    }

    /// An engine of ranks with blocks of `bytes` each, not joined yet.
    pub(super) fn over(core: Core, world_size: u32, bytes: u64) -> Self {
        Self::waiting(core, world_size, bytes, None)
    }

    /// The same, with this wait of its requests for a producer.
    pub(super) fn waiting(core: Core, world_size: u32, bytes: u64, miss_wait_ms: Option<u32>) -> Self {
        let mut harness = Self::of(core);
        for rank in 0..world_size {
            harness.connect(RANKS[rank as usize], rank_hello_of(world_size, rank, bytes));
        }
        let hello = Hello { miss_wait_ms, ..hello(world_size, Role::Scheduler { run: RUN }) };
        harness.connect(SCHEDULER, hello);
        harness
    }

    /// A core without any session.
    pub(super) fn of(core: Core) -> Self {
        Self { core, out: Vec::new(), now_ms: 0, speaker: SCHEDULER, unaccepted: BTreeSet::new() }
    }

    pub(super) fn connect(&mut self, session: SessionId, hello: Hello) {
        self.event(CoreEvent::Connected { session, hello: Box::new(hello) });
    }

    /// Sessions of the connected ranks.
    fn ranks(&self) -> Vec<SessionId> {
        RANKS.into_iter().filter(|session| self.core.base.engines.has_worker(*session)).collect()
    }

    pub(super) fn event(&mut self, event: CoreEvent) {
        self.core.handle(Duration::from_millis(self.now_ms), event, &mut self.out);
    }

    fn join_from(&mut self, session: SessionId, step: u64) {
        self.report(session, WorkerRequest::Join { run: RUN, step });
    }

    pub(super) fn loaded(&mut self, session: SessionId, op: u64, ok: bool) {
        self.report(
            session,
            WorkerRequest::Loaded { op, end: if ok { LoadEnd::Whole } else { LoadEnd::Failed } },
        );
    }

    fn report(&mut self, session: SessionId, request: WorkerRequest) {
        self.event(CoreEvent::Message { session, request: RingRequest::Worker(request) });
    }

    pub(super) fn ask(&mut self, request: SchedulerRequest) {
        self.post(request, Vec::new(), Vec::new());
    }

    fn post(&mut self, request: SchedulerRequest, keys: Vec<BlockHash>, blocks: Vec<u32>) {
        if let SchedulerRequest::Save(save) = request {
            self.unaccepted.insert((self.speaker, save.step));
        }
        let request = RingRequest::Scheduler { request, keys, blocks };
        self.event(CoreEvent::Message { session: self.speaker, request });
    }

    pub(super) fn open(&mut self, log: u32, keys: std::ops::Range<u32>) {
        self.ask(SchedulerRequest::Open { log });
        let keys: Vec<BlockHash> = keys.map(hash).collect();
        let chunks = std::array::from_fn(|at| log * APPEND_CHUNKS as u32 + at as u32);
        self.append(
            Append { keys: LogKeys::new(log, 0..keys.len() as u32), chunks, promised: false, tail: false },
            keys,
        );
    }

    pub(super) fn append(&mut self, append: Append, keys: Vec<BlockHash>) {
        self.post(SchedulerRequest::Append(append), keys, Vec::new());
    }

    pub(super) fn save(&mut self, log: u32, op: u64, step: u64, blocks: std::ops::Range<u32>) {
        let keys = LogKeys::new(log, 0..blocks.len() as u32);
        let save =
            request::Save { op, keys, position: 0, step, checked: false, handover: false, replaced: 0 };
        self.post(SchedulerRequest::Save(save), Vec::new(), blocks.collect());
    }

    /// Saves `keys` under log 9, in a step already done. The caller ends the copies.
    pub(super) fn save_done(&mut self, op: u64, keys: std::ops::Range<u32>) {
        let blocks = 1..keys.len() as u32 + 1;
        self.open(9, keys);
        self.save(9, op, 1, blocks);
        self.fences(RANKS[0], 1, 1);
    }

    /// Saves keys of a log from block 1 on; with `checked`, kept ones are compared.
    pub(super) fn post_save(&mut self, log: u32, op: u64, keys: std::ops::Range<u32>, checked: bool) {
        let count = keys.len() as u32;
        let save = request::Save {
            op,
            keys: LogKeys::new(log, keys),
            position: 0,
            step: op,
            checked,
            handover: false,
            replaced: 0,
        };
        self.post(SchedulerRequest::Save(save), Vec::new(), (1..count + 1).collect());
    }

    /// Takes the actions since the last look, and returns those of a kind.
    pub(super) fn take<T>(&mut self, kind: impl FnMut(Action) -> Option<T>) -> impl Iterator<Item = T> {
        std::mem::take(&mut self.out).into_iter().filter_map(kind)
    }

    /// The comparison asked for since the last look.
    pub(super) fn comparison(&mut self) -> Option<Inspection> {
        self.take(taken!(Action::Inspect(asked) => asked)).find(|asked| !asked.pairs().is_empty())
    }

    pub(super) fn query(&mut self, log: u32, op: u64, from: u32, count: u32) -> Outcome {
        let query = Query::new(op, LogKeys { log, from, count });
        self.ask(SchedulerRequest::Query(query));
        match self.out.pop() {
            Some(Action::Answer { outcome, .. } | Action::Outcome { outcome, .. }) => outcome,
            other => panic!("no answer: {other:?}"),
        }
    }

    pub(super) fn load(&mut self, log: u32, op: u64, lease: u64, range: std::ops::Range<u32>, flags: u8) {
        let (keys, flags) = (LogKeys::new(log, range), LoadFlags::new(flags));
        self.post_load(request::Load { op, keys, position: 0, step: 5, lease, flags });
    }

    fn post_load(&mut self, load: request::Load) {
        self.post(SchedulerRequest::Load(load), Vec::new(), (1..=load.keys.count).collect());
    }

    pub(super) fn fences(&mut self, session: SessionId, start: u64, done: u64) {
        self.event(CoreEvent::Fences { session, start, done });
    }

    /// The engine accepts every step of its saves, and the ring is drained.
    pub(super) fn drained(&mut self) {
        self.accept();
        self.drained_below(0);
    }

    /// The ring is drained, and saves below this operation are void.
    fn drained_below(&mut self, void_below: u64) {
        self.event(CoreEvent::Drained { session: self.speaker, void_below });
    }

    /// The engine accepts every step of its saves.
    fn accept(&mut self) {
        let steps = self.unaccepted.extract_if((self.speaker, 0)..=(self.speaker, u64::MAX), |_| true);
        for (_, step) in steps.collect::<Vec<_>>() {
            self.accept_step(step);
        }
    }

    fn accept_step(&mut self, step: u64) {
        self.ask(SchedulerRequest::Accept { step });
    }

    /// Copies asked for since the last look: (copy, session, pieces).
    pub(super) fn copies(&mut self) -> Vec<(CopyId, SessionId, Vec<RankBlock>)> {
        self.take(taken!(Action::Copy { copy, session, pieces, .. } => (copy, session, pieces))).collect()
    }

    fn end_copy(&mut self, copy: CopyId, ok: bool) {
        self.event(CoreEvent::Copied { copy, ok });
    }

    /// Ends the copies asked for since the last look; then the ring is drained.
    pub(super) fn copied(&mut self) {
        self.copies().iter().for_each(|(copy, ..)| self.end_copy(*copy, true));
        self.drained();
    }

    pub(super) fn saved(&mut self) -> Option<Saved> {
        self.take(taken!(Action::Saved { saved, .. } => saved)).next()
    }

    pub(super) fn closed(&mut self) -> Option<String> {
        self.take(taken!(Action::Close { reason, .. } => reason)).next()
    }

    pub(super) fn disconnect(&mut self, sessions: impl IntoIterator<Item = SessionId>) {
        sessions.into_iter().for_each(|session| self.event(CoreEvent::Disconnected { session }));
    }

    /// Operation 1 saves keys `0..count` under log 0, in a step done by rank 0.
    fn begin_save(&mut self, count: u32) {
        self.open(0, 0..count);
        self.save(0, 1, 1, 1..count + 1);
        self.fences(RANKS[0], 1, 1);
    }

    /// The same on all ranks, and whole.
    fn keep(&mut self, count: u32) {
        self.begin_save(count);
        self.ranks().into_iter().for_each(|session| self.fences(session, 1, 1));
        self.copied();
        assert_eq!(self.saved().unwrap().committed, count);
    }
}

#[test]
fn a_save_waits_for_the_step_of_every_rank_and_for_a_drained_ring() {
    let mut engine = Harness::engine(2);
    engine.open(0, 0..3);
    engine.save(0, 1, 4, 1..4);
    engine.fences(RANKS[0], 4, 3);
    assert!(engine.copies().is_empty(), "rank 0 has not done step 4");
    engine.fences(RANKS[0], 4, 4);
    assert!(engine.copies().is_empty(), "rank 1 has not done step 4");
    engine.fences(RANKS[1], 9, 9);
    let copies = engine.copies();
    assert_eq!(copies.iter().map(|copy| copy.1).collect::<Vec<_>>(), RANKS);
    assert_eq!(copies[1].2[0].offset - copies[0].2[0].offset, SHARD_BYTES, "shards lie side by side");
    engine.end_copy(copies[0].0, true);
    engine.drained();
    assert_eq!(engine.query(0, 2, 0, 3).value, 0, "one shard is not a block");
    engine.end_copy(copies[1].0, true);
    assert_eq!(engine.query(0, 3, 0, 3).value, 0, "not before the ring was drained");
    engine.drained();
    assert_eq!(engine.saved().unwrap().committed, 3);
    assert_eq!(engine.query(0, 4, 0, 3).value, 3);
}

#[test]
fn a_save_whose_step_does_not_come_holds_no_slot_and_keeps_no_key_from_others() {
    let mut engine = Harness::engine(2);
    engine.open(0, 0..3);
    engine.save(0, 1, 1 << 40, 1..4);
    engine.fences(RANKS[0], 1 << 40, 1 << 40);
    engine.fences(RANKS[1], 1, 1);
    assert_eq!(engine.core.stats().pool_used_bytes, 0);
    engine.save(0, 2, 1, 11..14);
    let copies = engine.copies();
    assert_eq!(copies.len(), 2, "the same keys, whose step is done");
    copies.iter().for_each(|copy| engine.end_copy(copy.0, true));
    engine.drained();
    assert_eq!(engine.saved().unwrap().committed, 3);
    engine.ask(SchedulerRequest::Cancel(Cancel { op: 1, from: 0, count: 1 }));
    engine.fences(RANKS[1], 1 << 40, 1 << 40);
    let saved = engine.saved().unwrap();
    assert_eq!((saved.op, saved.cancelled, saved.present), (1, 1, 2));
}

#[test]
fn a_cancel_seen_before_the_commit_wins() {
    let mut engine = Harness::engine(1);
    engine.begin_save(4);
    let copies = engine.copies();
    engine.end_copy(copies[0].0, true);
    engine.ask(SchedulerRequest::Cancel(Cancel { op: 1, from: 1, count: 2 }));
    engine.drained();
    let saved = engine.saved().unwrap();
    assert_eq!((saved.committed, saved.cancelled), (2, 2));
    assert_eq!(engine.query(0, 2, 0, 4).value, 1, "block 0 is kept, block 1 is not");
    assert_eq!(engine.query(0, 3, 3, 1).value, 1, "block 3 is kept");
}

#[test]
fn saves_below_the_void_word_are_not_kept() {
    let mut engine = Harness::engine(1);
    engine.begin_save(1);
    let copies = engine.copies();
    engine.end_copy(copies[0].0, true);
    engine.event(CoreEvent::Drained { session: SCHEDULER, void_below: 2 });
    assert_eq!(engine.saved().unwrap().cancelled, 1);
    assert_eq!(engine.query(0, 2, 0, 1).value, 0);
}

#[test]
fn a_failed_copy_commits_nothing() {
    let mut engine = Harness::engine(2);
    engine.begin_save(2);
    engine.fences(RANKS[1], 1, 1);
    let copies = engine.copies();
    engine.end_copy(copies[0].0, true);
    engine.end_copy(copies[1].0, false);
    engine.drained();
    assert_eq!(engine.saved().unwrap().dropped, 2);
    assert_eq!(engine.query(0, 2, 0, 2).value, 0);
}

#[test]
fn the_null_block_is_never_saved_and_a_kept_block_not_twice() {
    let mut engine = Harness::keeping(1, 2);
    engine.open(1, 0..3);
    engine.save(1, 2, 2, 0..3);
    engine.fences(RANKS[0], 2, 2);
    let copies = engine.copies();
    assert_eq!(copies[0].2.len(), 1, "keys 0 and 1 are there; key 2 comes from block 2");
    assert_eq!(copies[0].2[0].block, 2);
}

#[test]
fn a_load_by_the_engine_ends_when_every_rank_reported_once() {
    let mut engine = Harness::keeping(2, 4);
    assert_eq!(engine.query(0, 2, 1, 3).value, 3);
    engine.load(0, 3, 2, 2..4, LOAD_BY_ENGINE);
    engine.ask(SchedulerRequest::Close { log: 0, way: 0 });
    engine.loaded(RANKS[0], 3, true);
    engine.loaded(RANKS[0], 3, true);
    engine.now_ms = 100_000;
    engine.event(CoreEvent::Tick);
    assert_eq!(engine.core.stats().leases, 1, "promised: neither time nor CLOSE ends it");
    engine.loaded(RANKS[1], 3, true);
    assert_eq!(engine.core.stats().leases, 0);
    assert!(engine.closed().is_none());
}

#[test]
fn a_rank_may_report_a_load_before_its_post_was_read() {
    let mut engine = Harness::leasing(2);
    engine.loaded(RANKS[0], 3, true);
    engine.load(0, 3, 2, 0..2, LOAD_BY_ENGINE);
    assert_eq!((engine.core.stats().leases, engine.core.stats().loaded_blocks), (1, 2));
    engine.loaded(RANKS[1], 3, true);
    assert_eq!((engine.core.stats().leases, engine.core.stats().loaded_blocks), (0, 4));
    engine.loaded(RANKS[1], 1, true);
    assert!(engine.closed().is_none(), "a report of an older operation is ignored");
}

#[test]
fn a_load_by_the_sidecar_waits_for_the_step_and_answers_each_rank() {
    let mut engine = Harness::leasing(2);
    engine.load(0, 3, 2, 0..2, 0);
    engine.fences(RANKS[0], 4, 4);
    assert!(engine.copies().is_empty(), "step 5 has not begun");
    engine.fences(RANKS[0], 5, 4);
    engine.fences(RANKS[1], 5, 4);
    let copies = engine.copies();
    assert_eq!(copies.iter().map(|copy| copy.1).collect::<Vec<_>>(), RANKS);
    assert_eq!(copies[0].2.iter().map(|piece| piece.block).collect::<Vec<_>>(), [1, 2]);
    engine.end_copy(copies[0].0, true);
    engine.end_copy(copies[1].0, false);
    let outcome =
        |session, status| Action::Outcome { session, op: 3, outcome: Outcome { op: 3, value: 2, status } };
    assert_eq!(engine.out, [outcome(RANKS[0], Status::Ok), outcome(RANKS[1], Status::Failed)]);
    assert_eq!(engine.core.stats().leases, 1, "the rank finishes its part from the leased slots");
    engine.loaded(RANKS[1], 3, true);
    let stats = engine.core.stats();
    assert_eq!((stats.leases, stats.load_failures, stats.loaded_blocks), (0, 0, 4));
}

#[test]
fn a_load_into_memory_that_a_rank_does_not_have_is_not_copied() {
    let mut engine = Harness::leasing(1);
    let load = request::Load {
        op: 3,
        keys: LogKeys::new(0, 0..2),
        position: 0,
        step: 5,
        lease: 2,
        flags: LoadFlags::new(0),
    };
    engine.post(SchedulerRequest::Load(load), Vec::new(), vec![1, 1000]);
    engine.out.clear();
    engine.fences(RANKS[0], 5, 4);
    let outcome = Outcome { op: 3, value: 0, status: Status::Failed };
    assert_eq!(engine.out, [Action::Outcome { session: RANKS[0], op: 3, outcome }], "and no copy");
    engine.loaded(RANKS[0], 3, false);
    assert_eq!((engine.core.stats().leases, engine.core.stats().load_failures), (0, 1));
}

#[test]
fn an_early_load_waits_for_the_end_of_the_step_before() {
    let mut engine = Harness::leasing(1);
    engine.fences(RANKS[0], 4, 3);
    engine.load(0, 3, 2, 0..2, LOAD_EARLY);
    assert!(engine.copies().is_empty(), "step 4 may still write the blocks");
    engine.fences(RANKS[0], 4, 4);
    assert_eq!(engine.copies().len(), 1, "step 5 has not begun");
}

#[test]
fn a_load_that_its_rank_finished_before_it_was_read_is_not_copied() {
    let mut engine = Harness::leasing(2);
    RANKS.into_iter().for_each(|session| engine.fences(session, 5, 4));
    engine.loaded(RANKS[0], 3, true);
    engine.load(0, 3, 2, 0..2, 0);
    let copies = engine.copies();
    assert_eq!(copies.iter().map(|copy| copy.1).collect::<Vec<_>>(), [RANKS[1]]);
    engine.loaded(RANKS[1], 3, false);
    assert_eq!(engine.core.stats().leases, 1, "its copy still reads the slots");
    engine.end_copy(copies[0].0, false);
    let stats = engine.core.stats();
    assert_eq!((stats.leases, stats.load_failures, stats.loaded_blocks), (0, 1, 2));
    assert!(engine.closed().is_none());
}

#[test]
fn a_load_that_its_rank_took_back_is_not_started() {
    let mut engine = Harness::leasing(1);
    engine.load(0, 3, 2, 0..2, 0);
    assert!(engine.core.waits_on_fences(RANKS[0]));
    engine.loaded(RANKS[0], 3, true);
    assert!(!engine.core.waits_on_fences(RANKS[0]));
    engine.fences(RANKS[0], 5, 5);
    assert!(engine.copies().is_empty());
    assert_eq!(engine.core.stats().leases, 0);
}

#[test]
fn a_load_without_its_lease_is_answered_with_the_reason() {
    let mut engine = Harness::leasing(1);
    engine.load(0, 3, 99, 0..2, 0);
    let outcome = Outcome { op: 3, value: 0, status: Status::LeaseUnknown };
    assert_eq!(engine.out.pop(), Some(Action::Outcome { session: RANKS[0], op: 3, outcome }));
    engine.now_ms = 1001;
    engine.event(CoreEvent::Tick);
    engine.load(0, 4, 2, 0..2, 0);
    let outcome = Outcome { op: 4, value: 0, status: Status::LeaseExpired };
    assert_eq!(engine.out.pop(), Some(Action::Outcome { session: RANKS[0], op: 4, outcome }));
}

#[test]
fn a_repeated_query_renews_and_extends() {
    let mut engine = Harness::keeping(1, 2);
    engine.open(1, 0..3);
    assert_eq!(engine.query(1, 2, 0, 3).value, 2);
    engine.open(2, 2..3);
    engine.save(2, 3, 2, 5..6);
    engine.fences(RANKS[0], 2, 2);
    engine.copied();
    engine.now_ms = 900;
    assert_eq!(engine.query(1, 4, 0, 3).value, 3);
    engine.now_ms = 1800;
    engine.event(CoreEvent::Tick);
    engine.load(1, 5, 4, 0..3, LOAD_BY_ENGINE);
    assert_eq!(engine.core.stats().leases, 1, "still the one lease, renewed");
}

#[test]
fn an_engine_that_dies_leaves_nothing_once_its_copies_ended() {
    let mut engine = Harness::leasing(1);
    engine.open(1, 10..12);
    engine.save(1, 3, 2, 5..7);
    engine.fences(RANKS[0], 2, 2);
    let copies = engine.copies();
    engine.disconnect([RANKS[0], SCHEDULER]);
    assert_eq!(engine.core.stats().leases, 0);
    assert!(engine.core.busy(), "its slots are not free while a copy writes them");
    assert!(!engine.out.iter().any(|action| matches!(action, Action::FreeSlot { .. })));
    engine.end_copy(copies[0].0, true);
    assert!(!engine.core.busy());
    assert_eq!(engine.core.stats().blocks, 2, "committed blocks stay, the others are gone");
}

#[test]
fn a_lost_rank_fails_what_it_has_not_copied() {
    let mut engine = Harness::engine(2);
    engine.begin_save(1);
    assert!(engine.copies().is_empty(), "rank 1 has not done the step");
    engine.event(CoreEvent::Disconnected { session: RANKS[1] });
    engine.drained();
    assert_eq!(engine.saved().unwrap().dropped, 1);
    assert_eq!(engine.query(0, 2, 0, 1).status, Status::NotReady, "a rank is missing");
}

#[test]
fn plans_wait_for_a_rank_that_has_not_joined() {
    let mut engine = Harness::unjoined(1);
    engine.begin_save(1);
    assert!(engine.copies().is_empty());
    engine.join_from(RANKS[0], 0);
    assert_eq!(engine.copies().len(), 1);
}

#[test]
fn an_engine_of_the_same_name_lends_no_namespace() {
    let mut engine = Harness::keeping(1, 2);
    let (scheduler, rank, run) = (10, 11, [8; 16]);
    engine.connect(scheduler, hello(1, Role::Scheduler { run }));
    let other = changed(rank_hello(1, 0), |other| _ = other.facts.insert("other".into(), String::new()));
    engine.connect(rank, other);
    engine.event(CoreEvent::Disconnected { session: SCHEDULER });
    engine.speaker = scheduler;
    engine.open(0, 0..2);
    assert_eq!(engine.query(0, 1, 0, 2).status, Status::NotReady, "no rank of this run has joined");
    engine.save(0, 2, 1, 1..3);
    engine.report(rank, WorkerRequest::Join { run, step: 0 });
    engine.fences(rank, 1, 1);
    let copies = engine.copies();
    assert_eq!((copies.len(), copies[0].1), (1, rank), "the save is of this run's rank");
    engine.end_copy(copies[0].0, true);
    engine.drained();
    let committed = engine.saved().unwrap().committed;
    assert_eq!(committed, 2, "not present: the blocks of the other are another namespace's");
    assert_eq!(engine.query(0, 3, 0, 2).value, 2);
}

#[test]
fn a_save_before_the_join_can_be_given_up_and_ends_with_its_generation() {
    let mut engine = Harness::unjoined(2);
    engine.open(0, 0..4);
    engine.save(0, 1, 1, 1..5);
    engine.ask(SchedulerRequest::Cancel(Cancel { op: 1, from: 1, count: 2 }));
    engine.join_from(RANKS[0], 0);
    assert!(engine.out.is_empty(), "a rank is missing: {:?}", engine.out);
    engine.join_from(RANKS[1], 0);
    RANKS.into_iter().for_each(|session| engine.fences(session, 1, 1));
    for (copy, _, pieces) in engine.copies() {
        assert_eq!(pieces.iter().map(|piece| piece.block).collect::<Vec<_>>(), [1, 4]);
        engine.end_copy(copy, true);
    }
    engine.drained();
    let saved = engine.saved().unwrap();
    assert_eq!((saved.committed, saved.cancelled), (2, 2));

    let mut engine = Harness::unjoined(1);
    engine.open(0, 0..2);
    engine.save(0, 1, 1, 1..3);
    engine.ask(SchedulerRequest::Salt { salt: [1; 16] });
    assert_eq!(engine.saved().unwrap().dropped, 2);
    engine.join_from(RANKS[0], 0);
    assert_eq!(engine.query(0, 2, 0, 2).value, 0);
}

#[test]
fn blocks_of_another_size_are_a_miss_and_are_saved_anew() {
    let mut engine = Harness::keeping(1, 2);
    engine.disconnect([SCHEDULER, RANKS[0]]);
    let Harness { core, .. } = engine;
    let mut engine = Harness::over(core, 1, 3 * SHARD_BYTES);
    engine.join();
    engine.open(0, 0..2);
    assert_eq!(engine.query(0, 1, 0, 2).value, 0, "a hit that could not be loaded");
    engine.save(0, 2, 1, 1..3);
    engine.fences(RANKS[0], 1, 1);
    engine.copied();
    assert_eq!(engine.saved().unwrap().committed, 2);
    assert_eq!(engine.query(0, 3, 0, 2).value, 2);
}

#[test]
fn ranks_of_different_form_are_not_served() {
    let mut engine = Harness::unjoined(2);
    engine.join_from(RANKS[0], 0);
    let facts = Facts::from([("other".into(), String::new())]);
    let other = changed(rank_hello(2, 1), |worker| worker.facts = facts.clone());
    engine.connect(9, other);
    engine.join_from(9, 0);
    let reason = engine.closed().unwrap();
    let digests = [NAMESPACE, shm_protocol::namespace::digest_facts(&facts)].map(|digest| digest.to_string());
    assert!(digests.iter().all(|digest| reason.contains(digest)), "{reason}");
    engine.open(0, 0..1);
    assert_eq!(engine.query(0, 1, 0, 1).status, Status::NotReady);
}

#[test]
fn a_salted_namespace_hides_the_old_blocks_and_comes_back_with_the_same_salt() {
    let mut engine = Harness::keeping(1, 2);
    engine.ask(SchedulerRequest::Salt { salt: [1; 16] });
    assert_eq!(engine.query(0, 2, 0, 2).value, 0);
    engine.save(0, 3, 2, 1..3);
    engine.fences(RANKS[0], 2, 2);
    engine.copied();
    engine.ask(SchedulerRequest::Salt { salt: [2; 16] });
    assert_eq!(engine.query(0, 4, 0, 2).value, 0);
    engine.ask(SchedulerRequest::Salt { salt: [1; 16] });
    assert_eq!(engine.query(0, 5, 0, 2).value, 2);
}

#[test]
fn violations_close_the_session() {
    let save = request::Save {
        op: 9,
        keys: LogKeys::new(0, 1..8),
        position: 0,
        step: 1,
        checked: false,
        handover: false,
        replaced: 0,
    };
    let append =
        Append { keys: LogKeys::new(0, 1..3), chunks: [0; APPEND_CHUNKS], promised: false, tail: false };
    let cases = [
        SchedulerRequest::Open { log: 0 },
        SchedulerRequest::Query(Query::new(9, LogKeys::new(5, 0..1))),
        SchedulerRequest::Append(append),
        SchedulerRequest::Save(save),
        SchedulerRequest::Release { log: 5 },
        SchedulerRequest::Close { log: 5, way: 0 },
        SchedulerRequest::Hint { keys: LogKeys::new(5, 0..1) },
    ];
    for request in cases {
        let mut engine = Harness::engine(1);
        engine.open(0, 0..2);
        engine.ask(request);
        assert!(engine.closed().is_some(), "{request:?}");
    }
    let moved =
        Append { keys: LogKeys::new(0, 2..4), chunks: [9; APPEND_CHUNKS], promised: false, tail: false };
    let mut engine = Harness::engine(1);
    engine.open(0, 0..2);
    engine.append(moved, vec![hash(2), hash(3)]);
    assert!(engine.closed().is_some(), "a log keeps its chunks");
}

#[test]
fn a_session_that_was_closed_is_not_heard() {
    let mut engine = Harness::engine(1);
    engine.out.clear();
    engine.disconnect([SCHEDULER, RANKS[0]]);
    engine.ask(SchedulerRequest::Open { log: 0 });
    engine.loaded(RANKS[0], 1, true);
    assert!(engine.out.is_empty(), "{:?}", engine.out);
}

#[test]
fn a_draining_sidecar_takes_nothing_new() {
    let mut engine = Harness::keeping(1, 1);
    engine.event(CoreEvent::Drain);
    let outcome = engine.query(0, 2, 0, 1);
    let miss = (Status::Ok, 0);
    assert_eq!((outcome.status, outcome.value), miss, "at once: nothing is worth asking for again");
    engine.save(0, 3, 1, 1..2);
    assert_eq!(engine.saved().unwrap().dropped, 1);
    assert!(!engine.core.busy());
}

#[test]
fn a_rank_that_comes_again_has_ended_the_loads_of_steps_it_began_before() {
    let mut engine = Harness::leasing(1);
    engine.event(CoreEvent::Disconnected { session: RANKS[0] });
    engine.connect(RANKS[1], rank_hello(1, 0));
    engine.join_from(RANKS[1], 5);
    engine.load(0, 3, 2, 0..2, LOAD_BY_ENGINE);
    let leases = engine.core.stats().leases;
    assert_eq!(leases, 0, "it loaded in step 5, and reported it to its old session");
    assert_eq!(engine.query(0, 4, 0, 2).value, 2);
    let (keys, flags) = (LogKeys::new(0, 0..2), LoadFlags::new(LOAD_BY_ENGINE));
    engine.post_load(request::Load { op: 5, keys, position: 0, step: 6, lease: 4, flags });
    assert_eq!(engine.core.stats().leases, 1, "step 6 is still to come");
}
