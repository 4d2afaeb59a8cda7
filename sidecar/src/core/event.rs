//! What the core is told, and what it wants done.

use std::ops::Range;
use std::sync::Arc;

use mesh::digest::{Change, Digest};
use mesh::directory::Filter;
use mesh::transport::{self, Fetch, Label, PeerNumber};
use shm_protocol::handshake::Hello;
use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::message::{Outcome, Saved};
use shm_protocol::namespace::Facts;
use shm_protocol::pool::SlotRef;
use shm_protocol::request::{SchedulerRequest, WorkerRequest};
use shm_protocol::session::Bound;
use shm_protocol::source::Source;
use tiers::dram::Ending;
use tiers::opener::Opened;
use tiers::ssd;

use super::inspection::{Findings, Inspection};
use super::{CopyId, SessionId};

/// Keys whose search takes as long as binding an engine: its facts are digested, and its namespace is compared with those that are
/// known.
const BIND_COST: usize = 8192;

#[derive(Debug)]
pub enum Event {
    /// A peer was accepted.
    Connected {
        session: SessionId,
        /// What it said, already checked.
        hello: Box<Hello>,
    },
    /// A peer is gone.
    Disconnected {
        session: SessionId,
    },
    /// A message was read from a ring.
    Message {
        session: SessionId,
        request: Request,
    },
    /// A worker's fence words as just read.
    Fences {
        session: SessionId,
        /// Last step whose loads may be written.
        start: u64,
        /// Last step whose KV is written.
        done: u64,
    },
    /// A batch ended; `ok` says that every piece is whole.
    Copied {
        copy: CopyId,
        /// Whether every byte was moved.
        ok: bool,
    },
    /// A scheduler's ring was read to its tail, after every `Copied` of this turn was handled.
    Drained {
        session: SessionId,
        /// Saves below this operation are void.
        void_below: u64,
    },
    /// An inspection of [`Action::Inspect`] ended.
    Inspected {
        /// The save of the blocks: its scheduler's session, and its operation.
        save: (SessionId, u64),
        findings: Findings,
    },
    /// A part of the pool may be used from now on, with what an earlier life left in it.
    Opened(Opened),
    /// A comparison of [`Action::Verify`] has ended.
    Verified {
        key: BlockKey,
        slot: SlotRef,
        /// Whether its bytes are what its checksum says.
        whole: bool,
    },
    /// Jobs of [`Action::Transfer`] have ended, or blocks of earlier lives were found.
    Transferred {
        /// Number of the tier.
        tier: usize,
        ends: Vec<JobEnd>,
    },
    /// The mesh has something to say.
    Mesh(Heard),
    /// A turn has come for a session of [`super::Core::behind`].
    Behind {
        session: SessionId,
    },
    Tick,
    /// The sidecar is to end: nothing new is taken, what runs is finished.
    Drain,
}

/// One message of a ring and all that it refers to, copied out of shared memory.
#[derive(Debug)]
pub enum Request {
    Scheduler {
        request: SchedulerRequest,
        /// Keys of an APPEND.
        keys: Vec<BlockHash>,
        /// Block ids of a LOAD or SAVE.
        blocks: Vec<u32>,
    },
    Worker(WorkerRequest),
}

/// What must be done, in the order given.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Write `refs` beside the keys `from..` of the log whose chunks are given, then the outcome.
    Answer {
        session: SessionId,
        op: u64,
        outcome: Outcome,
        /// Slots of the hit blocks.
        refs: Vec<SlotRef>,
        /// Where the block of each was found; in memory where nothing stands.
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
    /// Keep later lives from a slot whose block was removed, and which engines may still read.
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
    /// Copy blocks of a rank; answered by [`Event::Copied`].
    Copy {
        copy: CopyId,
        /// The engine, by its scheduler's session.
        engine: SessionId,
        session: SessionId,
        direction: Direction,
        pieces: Vec<Piece>,
        /// Loads: the operation, to compare with the rank's gate. Saves: zero.
        load_op: u64,
        /// A step of the engine waits for it.
        awaited: bool,
    },
    /// Compare or search blocks; answered by [`Event::Inspected`].
    Inspect(Inspection),
    /// Compare a block of an earlier life with its checksum; answered by [`Event::Verified`]. Its slot stays as it is until then.
    Verify { key: BlockKey, slot: SlotRef },
    /// Hand a job to the tier with this number; answered by [`Event::Transferred`].
    Transfer { tier: usize, job: TierJob },
    /// Let a peer read these slots; answered by [`Heard::Released`].
    Grant {
        ask: u64,
        /// One for each block asked for, `None` where it is not here.
        slots: Vec<Option<SlotRef>>,
    },
    /// Tell peers what has come into DRAM and what has gone.
    Publish(Vec<Change>),
    /// Tell peers, behind that, all that is promised: of each prompt the last two keys.
    Promise(Vec<Digest>),
    /// Ask a peer for all that it has: there is more than was expected.
    Resync { peer: PeerNumber },
    /// Show an engine's processes what they are bound to, in this order, and count them among those that serve the namespace.
    Bind {
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
    Close {
        session: SessionId,
        /// Why, for the log.
        reason: String,
    },
}

/// A job of a tier.
#[derive(Debug, PartialEq, Eq)]
pub enum TierJob {
    Disk(ssd::Job),
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
    Disk(ssd::Done),
    /// Blocks of earlier lives on a disk.
    Recovered(ssd::Recovered),
    /// A block of a fetch.
    Peer(transport::Done),
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

/// A request that is over.
#[derive(Debug)]
pub struct Ended {
    /// Number of its namespace.
    pub namespace: u32,
    pub block_bytes: u64,
    /// All of its blocks.
    pub keys: Vec<BlockHash>,
    /// Those that it asked for first.
    pub asked: Range<usize>,
    pub ending: Ending,
}

/// What the mesh tells the core.
#[derive(Debug)]
pub enum Heard {
    Joined(PeerNumber),
    /// A member went; what is fetched from it ends by itself.
    Left(PeerNumber),
    /// All that a member has.
    Keeps {
        peer: PeerNumber,
        filter: Filter,
    },
    /// What has changed at a member since.
    Changed {
        peer: PeerNumber,
        /// The changes, in order.
        changes: Vec<Change>,
    },
    /// All that a member promises: of each prompt the last two keys.
    Promises {
        peer: PeerNumber,
        promises: Vec<Digest>,
    },
    /// A member wants blocks; answered by [`Action::Grant`].
    Asked {
        ask: u64,
        peer: PeerNumber,
        blocks: Vec<Label>,
    },
    /// The slots of a grant are free of it.
    Released {
        ask: u64,
        /// Blocks of it that were sent whole.
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
