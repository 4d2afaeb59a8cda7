//! The pure core: every decision of the sidecar, as a function of (state, now, event) to actions.
//!
//! Invariants it keeps:
//! - a slot is filled by one save, read only under a lease, and reused only when no copy touches it;
//! - a block is committed only after every shard's copy ended and, after that, its scheduler's ring was drained;
//! - a copy starts only once its rank has joined the engine's run and passed the step's fence;
//! - whatever a peer sends ends at worst in that peer's session being closed with a reason.
//!
//! No clock, memory or I/O here: [`crate::runtime`] feeds events and carries actions out, in their order.

mod adoption;
mod arrivals;
mod binding;
mod checks;
mod early;
mod ledger;
mod loads;
mod logs;
mod members;
mod namespaces;
mod peers;
mod quotas;
mod saves;
mod ssd;
mod stats;
#[cfg(test)]
mod tests;
mod windows;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use mesh::digest::Change;
use mesh::transport::{Fetch, PeerNumber};
use shm_protocol::handshake::{Hello, Role};
use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::message::{Outcome, Saved};
use shm_protocol::namespace::Facts;
use shm_protocol::pool::SlotRef;
use shm_protocol::request::{LoadEnd, SchedulerRequest, WorkerRequest};
use shm_protocol::session::Bound;
use tiers::dram::Dram;
use tiers::opener::Opened;
use tiers::ssd::{Done, Job, Recovered};

use self::adoption::Verification;
use self::arrivals::Arrivals;
use self::checks::Checks;
pub use self::checks::{Barred, Comparison, Found};
pub use self::ledger::Holder;
use self::loads::Load;
use self::members::{Scheduler, Worker};
use self::peers::Peers;
pub use self::peers::{FAULT_NAMES, Heard, PeersStats};
use self::saves::{Save, UnboundSave};
use self::ssd::Ssd;
pub use self::ssd::SsdStats;
pub use self::stats::Stats;
use self::windows::Windows;

/// A session, unique within an epoch.
pub type SessionId = u64;
/// A batch of copies, unique within an epoch.
pub type CopyId = u64;
/// Keys whose search takes as long as binding an engine: its facts are digested, and its namespace is compared with those that are
/// known.
const BIND_COST: usize = 8192;
/// The only cache group of version 1.
const GROUP: u32 = 0;

/// What happened.
#[derive(Debug)]
pub enum Event {
    /// A peer was accepted.
    Connected {
        /// Its session.
        session: SessionId,
        /// What it said, already checked.
        hello: Box<Hello>,
    },
    /// A peer is gone.
    Disconnected {
        /// Its session.
        session: SessionId,
    },
    /// A message was read from a ring.
    Message {
        /// Whose ring.
        session: SessionId,
        /// What it asks.
        request: Request,
    },
    /// A worker's fence words as just read.
    Fences {
        /// The worker's session.
        session: SessionId,
        /// Last step whose loads may be written.
        start: u64,
        /// Last step whose KV is written.
        done: u64,
    },
    /// A batch ended; `ok` says that every piece is whole.
    Copied {
        /// The batch.
        copy: CopyId,
        /// Whether every byte was moved.
        ok: bool,
    },
    /// A scheduler's ring was read to its tail, after every `Copied` of this turn was handled.
    Drained {
        /// The scheduler's session.
        session: SessionId,
        /// Saves below this operation are void.
        void_below: u64,
    },
    /// A comparison of [`Action::Compare`] ended.
    Compared {
        /// The save whose blocks they are: its scheduler's session, and its operation.
        save: (SessionId, u64),
        /// What came of it.
        found: Found,
    },
    /// A part of the pool may be used from now on, with what an earlier life left in it.
    Opened(Opened),
    /// A comparison of [`Action::Verify`] has ended.
    Verified {
        /// The block.
        key: BlockKey,
        /// Where it lies.
        slot: SlotRef,
        /// Whether its bytes are what its checksum says.
        whole: bool,
    },
    /// A disk has ended a job of [`Action::Transfer`].
    Transferred(Done),
    /// Blocks were found on a disk that earlier lives left there.
    Recovered(Recovered),
    /// The mesh has something to say.
    Mesh(Heard),
    /// A turn has come for a session of [`Core::behind`].
    Behind {
        /// The scheduler's session.
        session: SessionId,
    },
    /// Time passed.
    Tick,
    /// The sidecar is to end: nothing new is taken, what runs is finished.
    Drain,
}

/// One message of a ring and all that it refers to, copied out of shared memory.
#[derive(Debug)]
pub enum Request {
    /// A scheduler's.
    Scheduler {
        /// What it asks.
        request: SchedulerRequest,
        /// Keys of an APPEND.
        keys: Vec<BlockHash>,
        /// Block ids of a LOAD or SAVE.
        blocks: Vec<u32>,
    },
    /// A rank's.
    Worker(WorkerRequest),
}

/// What must be done, in the order given.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Write `refs` beside the keys `from..` of the log whose chunks are given, then the outcome.
    Answer {
        /// The scheduler's session.
        session: SessionId,
        /// The query.
        op: u64,
        /// Its outcome.
        outcome: Outcome,
        /// Slots of the hit blocks.
        refs: Vec<SlotRef>,
        /// Chunks of the log.
        chunks: Vec<u32>,
        /// Key index of the first slot.
        from: u32,
    },
    /// Write an outcome word.
    Outcome {
        /// Whose table.
        session: SessionId,
        /// The operation.
        op: u64,
        /// Its outcome.
        outcome: Outcome,
    },
    /// Push a save's end on the completion ring.
    Saved {
        /// The scheduler's session.
        session: SessionId,
        /// The end.
        saved: Saved,
    },
    /// Format a segment of the pool for blocks of one size.
    AssignSegment {
        /// Index of the segment.
        segment: u64,
        /// Bytes of its blocks.
        block_bytes: u64,
    },
    /// Mark a slot free in its header.
    FreeSlot {
        /// The slot.
        slot: SlotRef,
    },
    /// Mark a slot as being filled, with its key.
    FillSlot {
        /// The slot.
        slot: SlotRef,
        /// Namespace of the key.
        namespace: NamespaceDigest,
        /// The key.
        key: BlockKey,
    },
    /// Mark a slot as whole.
    CommitSlot {
        /// The slot.
        slot: SlotRef,
        /// Checksum of the block; zero where it is not known.
        checksum: u64,
    },
    /// Copy blocks of a rank; answered by [`Event::Copied`].
    Copy {
        /// The batch.
        copy: CopyId,
        /// The engine, by its scheduler's session.
        engine: SessionId,
        /// The rank's session.
        session: SessionId,
        /// Which way.
        direction: Direction,
        /// The blocks.
        pieces: Vec<Piece>,
        /// Loads: the operation, to compare with the rank's gate. Saves: zero.
        load_op: u64,
        /// A step of the engine waits for it.
        awaited: bool,
    },
    /// Compare blocks; answered by [`Event::Compared`]. Their slots stay as they are until then.
    Compare(Comparison),
    /// Compare a block of an earlier life with its checksum; answered by [`Event::Verified`]. Its slot stays as it is until then.
    Verify {
        /// The block.
        key: BlockKey,
        /// Where it lies.
        slot: SlotRef,
    },
    /// Hand a job to its disk; answered by [`Event::Transferred`].
    Transfer(Job),
    /// Fetch blocks from a peer; answered by [`Heard::Fetched`].
    Fetch(Fetch),
    /// End a fetch early; answered as if it had ended by itself.
    CancelFetch {
        /// The fetch.
        ticket: u64,
    },
    /// Let a peer read these slots; answered by [`Heard::Released`].
    Grant {
        /// What [`Heard::Asked`] named.
        ask: u64,
        /// One for each block asked for, `None` where it is not here.
        slots: Vec<Option<SlotRef>>,
    },
    /// Tell peers what has come into DRAM and what has gone.
    Publish(Vec<Change>),
    /// Ask a peer for all that it has: there is more than was expected.
    Resync {
        /// The peer.
        peer: PeerNumber,
    },
    /// Show an engine's processes what they are bound to, in this order, and count them among those that serve the namespace.
    Bind {
        /// The engine.
        engine: String,
        /// All facts of the namespace, that of the weights among them.
        facts: Arc<Facts>,
        /// Bytes of a block, all shards.
        block_bytes: u64,
        /// Distinct parts of a block.
        shards: u32,
        /// The ranks' sessions and the words for each, then the scheduler's.
        words: Vec<(SessionId, Bound)>,
    },
    /// Say this in the log.
    Warn(String),
    /// Close a session.
    Close {
        /// The session.
        session: SessionId,
        /// Why, for the log.
        reason: String,
    },
}

/// Which way a copy goes.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Engine memory to pool.
    Save,
    /// Pool to engine memory.
    Load,
}

/// One block of a rank.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Block id in the engine.
    pub block: u32,
    /// Pool offset of this rank's shard.
    pub offset: u64,
}

/// Why a peer's session must end.
type Violation = String;

/// Which operation a running copy belongs to.
#[derive(Copy, Clone, Debug)]
struct CopyOwner {
    scheduler: SessionId,
    op: u64,
    rank: u32,
    direction: Direction,
}

/// The state.
#[derive(Debug)]
pub struct Core {
    dram: Dram,
    arrivals: Arrivals,
    verification: Verification,
    windows: Windows,
    ssd: Option<Ssd>,
    peers: Option<Peers>,
    schedulers: BTreeMap<SessionId, Scheduler>,
    workers: BTreeMap<SessionId, Worker>,
    namespaces: namespaces::Namespaces,
    quotas: quotas::Quotas,
    saves: BTreeMap<(SessionId, u64), Save>,
    checks: Checks,
    /// Saves of schedulers that have no binding.
    unbound: BTreeMap<(SessionId, u64), UnboundSave>,
    loads: BTreeMap<(SessionId, u64), Load>,
    copies: BTreeMap<CopyId, CopyOwner>,
    next_copy: CopyId,
    /// Schedulers' sessions with saves that the turn had no time for, the longest waiting first.
    behind: VecDeque<SessionId>,
    claims_max: usize,
    draining: bool,
    stats: Stats,
}

// === impl Request ===

impl Request {
    /// What handling it costs: one more than the keys and blocks that it names, or as much as a binding.
    pub fn cost(&self) -> usize {
        match self {
            Self::Scheduler { request: SchedulerRequest::Weights { .. }, .. }
            | Self::Worker(WorkerRequest::Weights { .. } | WorkerRequest::Join { .. }) => BIND_COST,
            Self::Scheduler { request, .. } => 1 + request.count() as usize,
            Self::Worker(_) => 1,
        }
    }
}

// === impl Core ===

impl Core {
    /// A core over an empty tier.
    pub fn new(dram: Dram) -> Self {
        Self {
            arrivals: Arrivals::new(&dram),
            verification: Verification::default(),
            dram,
            windows: Windows::default(),
            ssd: None,
            peers: None,
            schedulers: BTreeMap::new(),
            workers: BTreeMap::new(),
            namespaces: namespaces::Namespaces::default(),
            quotas: quotas::Quotas::default(),
            saves: BTreeMap::new(),
            checks: Checks::default(),
            unbound: BTreeMap::new(),
            loads: BTreeMap::new(),
            copies: BTreeMap::new(),
            next_copy: 1,
            behind: VecDeque::new(),
            claims_max: ledger::CLAIMS_MAX,
            draining: false,
            stats: Stats::default(),
        }
    }

    /// Takes one event and appends what must be done.
    pub fn handle(&mut self, now_ms: u64, event: Event, out: &mut Vec<Action>) {
        self.respond(now_ms, event, out);
        self.go_on(now_ms, out);
    }

    /// Takes one event and appends what others wait for: an engine is held up by its question. [`Core::go_on`] follows.
    pub fn respond(&mut self, now_ms: u64, event: Event, out: &mut Vec<Action>) {
        self.note_work(now_ms, &event);
        match event {
            Event::Connected { session, hello } => self.connect(session, *hello, out),
            Event::Disconnected { session } => self.disconnect(session, out),
            Event::Message { session, request } => {
                if let Err(reason) = self.message(now_ms, session, request, out) {
                    out.push(Action::Close { session, reason });
                }
            }
            Event::Fences { session, start, done } => self.fences(session, start, done, out),
            Event::Copied { copy, ok } => self.copied(copy, ok, out),
            Event::Behind { session } => self.catch_up(session, out),
            Event::Drained { session, void_below } => self.commit_copied(session, void_below, out),
            Event::Compared { save, found } => self.compared(save, found, out),
            Event::Opened(opened) => self.open_part(now_ms, opened),
            Event::Verified { key, slot, whole } => self.verified(now_ms, &key, slot, whole, out),
            Event::Transferred(done) => self.transferred(now_ms, done, out),
            Event::Recovered(found) => self.recovered(&found),
            Event::Mesh(heard) => self.heard(now_ms, heard, out),
            Event::Tick => {
                self.dram.expire(now_ms);
                self.apply_evictions(out);
                self.tick_ssd(now_ms, out);
                self.give_up_fetches(now_ms, out);
                self.end_due_waits(now_ms, out);
                self.look_again(now_ms, out);
            }
            Event::Drain => {
                self.draining = true;
                self.answer_waits(now_ms, out);
                self.cancel_fetches(out);
            }
        }
    }

    /// Appends what else an event brings on: blocks are sent for and written, peers are told.
    pub fn go_on(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        // Slots of removed blocks become free wherever their last hold ends.
        self.apply_evictions(out);
        self.send_for_unsent(now_ms, out);
        self.verify_ahead(out);
        self.run_ssd(out);
        self.tell_peers(out);
    }

    /// Whether copies or transfers are running, or blocks wait to be committed or written. A save whose step is not done yet
    /// is none of these.
    pub fn busy(&self) -> bool {
        !self.copies.is_empty()
            || self.checks.any()
            || self.arrivals.any()
            || self.granting()
            || self.ssd_busy()
            || self.schedulers.values().any(|scheduler| !scheduler.copied.is_empty())
    }

    /// Whether an operation waits for this worker's fence words.
    pub fn waits_on_fences(&self, session: SessionId) -> bool {
        self.workers.get(&session).is_some_and(|worker| {
            let scheduler = worker.scheduler.and_then(|id| self.schedulers.get(&id));
            scheduler.is_some_and(|scheduler| !scheduler.waiting.is_empty())
        })
    }

    /// Counters and levels, for metrics.
    pub fn stats(&self) -> Stats {
        let tier = self.dram.stats();
        Stats {
            sessions: (self.schedulers.len() + self.workers.len()) as u64,
            blocks: tier.blocks,
            pool_used_bytes: tier.bytes_used,
            leases: tier.leases,
            evicted_blocks: tier.evicted_blocks_total,
            unreachable_blocks: tier.unreachable_blocks_total,
            adopted_blocks: tier.adopted_blocks_total,
            adoption_dropped: tier.adoption_dropped_total,
            adoption_corrupt: self.verification.corrupt,
            unverified_blocks: tier.unverified_blocks,
            removed_blocks: tier.removed_blocks_total,
            barred_engines: self.schedulers.values().filter(|scheduler| scheduler.barred.is_some()).count()
                as u64,
            ..self.stats.clone()
        }
    }

    fn message(
        &mut self,
        now_ms: u64,
        session: SessionId,
        request: Request,
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        match request {
            Request::Worker(request) if self.workers.contains_key(&session) => {
                self.worker_request(session, request, out)
            }
            Request::Scheduler { request, keys, blocks } if self.schedulers.contains_key(&session) => {
                self.scheduler_request(now_ms, session, request, keys, blocks, out)
            }
            // The session was closed by an earlier message of this turn.
            _ => Ok(()),
        }
    }

    fn worker_request(
        &mut self,
        session: SessionId,
        request: WorkerRequest,
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        match request {
            WorkerRequest::Join { run, step } => self.join(session, run, step, out),
            WorkerRequest::Loaded { op, end } => {
                self.stats.load_mismatches += u64::from(end == LoadEnd::Mismatch);
                self.loaded(session, op, end == LoadEnd::Whole)
            }
            WorkerRequest::Weights { number, answers, live } => {
                self.state_weights(session, (number, answers, live), out)
            }
            // The rank's copier was told when the message was read.
            WorkerRequest::Staged { .. } => Ok(()),
        }
    }

    fn scheduler_request(
        &mut self,
        now_ms: u64,
        session: SessionId,
        request: SchedulerRequest,
        keys: Vec<BlockHash>,
        blocks: Vec<u32>,
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        let scheduler = self.schedulers.get_mut(&session).expect("the caller looked");
        scheduler.newest = scheduler.newest.max(request.op());
        match request {
            SchedulerRequest::Open { log } => self.open(session, log),
            SchedulerRequest::Append(append) => self.append(session, &append, &keys),
            SchedulerRequest::Query(query) => self.query(now_ms, session, query, out),
            SchedulerRequest::Load(load) => self.load(now_ms, session, &load, blocks, out),
            SchedulerRequest::Save(save) => self.save(session, &save, &blocks, out),
            SchedulerRequest::Cancel(cancel) => self.cancel(session, cancel, out),
            SchedulerRequest::Release { log } => self.release(session, log),
            SchedulerRequest::Close { log } => self.close(session, log),
            SchedulerRequest::Salt { salt } => self.salt(session, salt, out),
            SchedulerRequest::Weights { number } => self.unbind(session, number, out),
            SchedulerRequest::Hint { keys } => self.hint(now_ms, session, keys, out),
        }
    }

    fn copied(&mut self, copy: CopyId, ok: bool, out: &mut Vec<Action>) {
        let owner = self.copies.remove(&copy).expect("every copy is answered once");
        match owner.direction {
            Direction::Save => self.save_copied(owner, ok, out),
            Direction::Load => self.load_copied(owner, ok, out),
        }
    }

    /// Refuses an operation that is under way already.
    fn check_new(&self, session: SessionId, op: u64) -> Result<(), Violation> {
        let key = (session, op);
        if self.saves.contains_key(&key) || self.loads.contains_key(&key) || self.checks.runs(key) {
            return Err(format!("operation {op} was posted twice"));
        }
        Ok(())
    }

    fn start_copy(
        &mut self,
        owner: CopyOwner,
        session: SessionId,
        pieces: Vec<Piece>,
        out: &mut Vec<Action>,
    ) {
        let copy = self.next_copy;
        self.next_copy += 1;
        self.copies.insert(copy, owner);
        let (engine, direction) = (owner.scheduler, owner.direction);
        let load_op = if direction == Direction::Load { owner.op } else { 0 };
        let awaited = self.loads.get(&(engine, load_op)).is_some_and(|load| load.sync);
        out.push(Action::Copy { copy, engine, session, direction, pieces, load_op, awaited });
    }
}

/// The keys of a session's saves and loads.
fn operations(session: SessionId) -> std::ops::RangeInclusive<(SessionId, u64)> {
    (session, 0)..=(session, u64::MAX)
}

/// The run id of a scheduler's hello.
fn run_of(hello: &Hello) -> Option<[u8; 16]> {
    match hello.role {
        Role::Scheduler { run } => Some(run),
        Role::Worker(_) => None,
    }
}
