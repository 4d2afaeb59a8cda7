//! Events, the core's input, and actions, its output.

use std::ops::Range;
use std::sync::Arc;

use mesh::digest::{Digest, DigestChange};
use mesh::directory::Filter;
use mesh::listed::{BlocksAsk, ListedBlock};
use mesh::transport::{self, Fetch, Label, PeerNumber, StandingTerms};
use shm_protocol::handshake::Hello;
use shm_protocol::hints::Advice;
use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::message::{Outcome, Saved};
use shm_protocol::namespace::Facts;
use shm_protocol::pool::SlotRef;
use shm_protocol::request::{Advise, LogKeys, SchedulerRequest, WorkerRequest};
use shm_protocol::session::Bound;
use shm_protocol::source::Source;
use tiers::dram::Ending;
use tiers::forecast::{GroupReads, OtherGroup, SavedKeys};
use tiers::opener::OpenedSegment;
use tiers::ssd;

use super::inspection::{Findings, Inspection};
use super::{CopyId, SessionId};

/// The cost of binding an engine, in keys searched: its facts are digested, and its namespace is compared
/// with the known ones.
const BIND_COST: usize = 8192;
/// The cost of a hint's key, in keys searched: 0.3 us.
const ADVICE_COST: usize = 8;

#[derive(Debug)]
pub enum CoreEvent {
    /// A client was accepted.
    Connected {
        session: SessionId,
        /// Its HELLO, already checked.
        hello: Box<Hello>,
    },
    /// A client is gone.
    Disconnected {
        session: SessionId,
    },
    /// A message was read from a ring.
    Message {
        session: SessionId,
        request: RingRequest,
    },
    /// A worker's fence words as just read.
    Fences {
        session: SessionId,
        /// Last step whose loads may be written.
        start: u64,
        /// Last step whose KV is written.
        done: u64,
    },
    /// A batch of copies has ended.
    Copied {
        copy: CopyId,
        /// True if every byte was moved.
        ok: bool,
    },
    /// A scheduler's ring was read to its tail, after every `Copied` of this turn was handled.
    Drained {
        session: SessionId,
        /// Saves below this operation are void.
        void_below: u64,
    },
    /// An inspection of [`Action::Inspect`] has ended.
    Inspected {
        /// The save of the blocks: its scheduler's session, and its operation.
        save: (SessionId, u64),
        findings: Findings,
    },
    /// A part of the pool may be used from now on, with the blocks left in it by an earlier life.
    Opened(OpenedSegment),
    /// A comparison of [`Action::Verify`] has ended.
    Verified {
        key: BlockKey,
        slot: SlotRef,
        /// True if its bytes match its checksum.
        whole: bool,
    },
    /// Jobs of [`Action::Transfer`] have ended, or blocks of earlier lives were found.
    Transferred {
        /// Number of the tier.
        tier: usize,
        ends: Vec<JobEnd>,
    },
    /// A message of the mesh.
    Mesh(MeshEvent),
    /// It is the turn of a session of [`super::Core::behind`].
    Behind {
        session: SessionId,
    },
    Tick,
    /// The sidecar is to end: it takes nothing new, and finishes its running work.
    Drain,
}

/// One message of a ring with all data named by it, copied out of shared memory.
#[derive(Debug)]
pub enum RingRequest {
    Scheduler {
        request: SchedulerRequest,
        /// Keys of an APPEND.
        keys: Vec<BlockHash>,
        /// Block ids of a LOAD or SAVE.
        blocks: Vec<u32>,
    },
    Advice(AdvicePart),
    Worker(WorkerRequest),
}

/// A part of an ADVISE. Engines are answered between the parts, and no later message of the session is read before the last.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct AdvicePart {
    /// The message, with the keys of this part.
    pub advise: Advise,
    pub is_last: bool,
}

/// A step for the core's host to carry out; actions are carried out in the given order.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Write `refs` beside the keys `from..` of the log with these chunks, then the outcome.
    Answer {
        session: SessionId,
        op: u64,
        outcome: Outcome,
        /// Slots of the hit blocks.
        refs: Vec<SlotRef>,
        /// The source of each block; memory for blocks without an entry.
        sources: Vec<Source>,
        /// Chunks of the log.
        chunks: Vec<u32>,
        /// Key index of the first slot.
        from: u32,
    },
    /// Write an outcome word.
    Outcome { session: SessionId, op: u64, outcome: Outcome },
    /// Push a save's end on the completion ring.
    Saved { session: SessionId, saved: Saved },
    /// Format a segment of the pool for blocks of one size.
    AssignSegment {
        /// Index of the segment.
        segment: u64,
        /// Bytes of its blocks.
        block_bytes: u64,
    },
    /// Keep later lives from the slot of a removed block, which engines may still read.
    DisownSlot { slot: SlotRef },
    /// Mark a slot free in its header.
    FreeSlot { slot: SlotRef },
    /// Mark a slot as being filled, with its key.
    FillSlot {
        slot: SlotRef,
        /// Namespace of the key.
        namespace: NamespaceDigest,
        key: BlockKey,
    },
    /// Mark a slot as whole.
    CommitSlot {
        slot: SlotRef,
        /// Checksum of the block; zero where it is not known.
        checksum: u64,
    },
    /// Copy blocks of a rank; answered by [`CoreEvent::Copied`].
    Copy {
        copy: CopyId,
        /// The engine, by its scheduler's session.
        engine: SessionId,
        session: SessionId,
        direction: CopyDirection,
        pieces: Vec<RankBlock>,
        /// Operation of a load, to compare with the rank's gate; zero for a save.
        load_op: u64,
        /// True if a step of the engine waits for the copy.
        awaited: bool,
    },
    /// Compare or search blocks; answered by [`CoreEvent::Inspected`].
    Inspect(Inspection),
    /// Compare a block of an earlier life with its checksum; answered by [`CoreEvent::Verified`]. Its slot stays
    /// as it is until then.
    Verify { key: BlockKey, slot: SlotRef },
    /// Hand a job to the tier with this number; answered by [`CoreEvent::Transferred`].
    Transfer { tier: usize, job: TierJob },
    /// Let a peer read these slots; answered by [`MeshEvent::Released`].
    Grant {
        ask: u64,
        /// One for each block asked for; `None`: the block is not granted.
        slots: Vec<Option<SlotRef>>,
    },
    /// Publish the blocks added to DRAM and removed from it to peers.
    Publish {
        changes: Vec<DigestChange>,
        /// True if a block was computed for another engine, whose request may wait for it at a peer.
        at_once: bool,
    },
    /// Publish all promises to peers, behind the changes of blocks: the last two keys of each promised
    /// prompt.
    Promise(Vec<Digest>),
    /// Ask a peer for its whole inventory: the announced one had too little room.
    Resync { peer: PeerNumber },
    /// Ask a peer for its best blocks; answered by [`MeshEvent::Listed`].
    AskBlocks { peer: PeerNumber, ask: BlocksAsk },
    /// Show an engine's processes their binding, in this order, and count the engine for its namespace.
    Bind {
        engine: String,
        /// All facts of the namespace, with the fact of the weights.
        facts: Arc<Facts>,
        /// Bytes of a block, all shards.
        block_bytes: u64,
        /// Distinct parts of a block.
        shards: u32,
        /// The ranks' sessions, each with its words, then the scheduler's session.
        words: Vec<(SessionId, Bound)>,
    },
    /// Write this warning to the log.
    Warn(String),
    Close {
        session: SessionId,
        /// The reason, for the log.
        reason: String,
    },
}

/// A job of a tier.
#[derive(Debug, PartialEq, Eq)]
pub enum TierJob {
    Disk(ssd::DeviceJob),
    /// Fetch blocks from a peer.
    Fetch(Fetch),
    /// End a fetch early; answered as if it had ended by itself.
    CancelFetch {
        ticket: u64,
    },
}

/// The end of a job of a tier, or blocks of earlier lives.
#[derive(Debug)]
pub enum JobEnd {
    Disk(ssd::JobDone),
    /// Blocks of earlier lives on a disk.
    Recovered(ssd::Recovered),
    /// A block of a fetch.
    Peer(transport::FetchDone),
}

/// The direction of a copy.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum CopyDirection {
    /// Engine memory to pool.
    Save,
    /// Pool to engine memory.
    Load,
}

/// One block of a rank, to be copied.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct RankBlock {
    /// Block id in the engine.
    pub block: u32,
    /// Pool offset of this rank's shard.
    pub offset: u64,
}

/// An ended request.
#[derive(Debug)]
pub struct FinishedRequest {
    /// Number of its namespace.
    pub namespace: u32,
    pub block_bytes: u64,
    /// All of its blocks.
    pub keys: Vec<BlockHash>,
    /// The range of the keys asked for first.
    pub asked: Range<usize>,
    pub ending: Ending,
    pub part: SetPart,
}

/// The part of a request that a cache group has.
#[derive(Clone, Debug, PartialEq)]
pub enum SetPart {
    /// The engine has one group.
    Whole,
    /// Full attention, the first of the set, beside the other groups.
    Lead(Vec<OtherGroup>),
    /// Another group.
    Other { saved: Vec<SavedKeys>, reads: GroupReads },
}

/// A message of the mesh to the core.
#[derive(Debug)]
pub enum MeshEvent {
    Joined(PeerNumber),
    /// A member states whether it keeps asks for promised blocks until these are committed, and whether it lists its
    /// best blocks.
    Greeted {
        peer: PeerNumber,
        keeps_asks: bool,
        lists_blocks: bool,
    },
    /// A member is about to leave.
    Leaving(PeerNumber),
    /// The answer to [`Action::AskBlocks`].
    Listed {
        peer: PeerNumber,
        ask: BlocksAsk,
        blocks: Vec<ListedBlock>,
    },
    /// A member is gone; fetches from it end by themselves.
    Left(PeerNumber),
    /// All blocks of a member.
    Keeps {
        peer: PeerNumber,
        filter: Filter,
    },
    /// The changes at a member since then.
    Changed {
        peer: PeerNumber,
        /// The changes, in order.
        changes: Vec<DigestChange>,
    },
    /// All promises of a member: the last two keys of each promised prompt.
    Promises {
        peer: PeerNumber,
        promises: Vec<Digest>,
    },
    /// A member asks for blocks; answered by [`Action::Grant`].
    Asked {
        ask: u64,
        peer: PeerNumber,
        blocks: Vec<Label>,
        /// The terms of a standing ask.
        standing: Option<StandingTerms>,
    },
    /// The connection of a standing ask has ended.
    Withdrawn {
        ask: u64,
    },
    /// A grant has ended: the transport no longer needs its slots.
    Released {
        ask: u64,
        /// Number of the grant's first blocks, sent whole.
        sent: u32,
    },
}

// === impl JobEnd ===

impl JobEnd {
    /// True if another node gave a block.
    pub(super) fn shows_producer(&self) -> bool {
        matches!(self, Self::Peer(done) if done.result.is_ok())
    }
}

// === impl AdvicePart ===

impl AdvicePart {
    /// Cuts a part of about this cost off a hint: from its begin, or from the end of a demotion, since children go before their
    /// parents. Returns the part and the rest.
    pub fn cut_hint(advise: Advise, cost: usize) -> (Self, Option<Advise>) {
        let LogKeys { log, from, count } = advise.keys;
        let part = count.min((cost / ADVICE_COST).max(1) as u32);
        let rest = count - part;
        let (from, rest_from) = match advise.advice {
            Advice::Demote => (from + rest, from),
            _ => (from, from + part),
        };
        let with_keys = |from, count| Advise { keys: LogKeys { log, from, count }, ..advise };
        let cut = Self { advise: with_keys(from, part), is_last: rest == 0 };
        (cut, (rest > 0).then(|| with_keys(rest_from, rest)))
    }
}

// === impl RingRequest ===

impl RingRequest {
    /// Returns the cost of its handling: one more than the keys and blocks named by it, or the cost of a
    /// binding.
    pub fn cost(&self) -> usize {
        match self {
            // A part ends its session's turn.
            Self::Advice(AdvicePart { is_last: false, .. }) => usize::MAX,
            Self::Advice(part) => 1 + part.advise.keys.count as usize * ADVICE_COST,
            Self::Scheduler { request: SchedulerRequest::Weights { .. }, .. }
            | Self::Worker(WorkerRequest::Weights { .. } | WorkerRequest::Join { .. }) => BIND_COST,
            Self::Scheduler { request, .. } => 1 + request.named_count() as usize,
            Self::Worker(_) => 1,
        }
    }
}
