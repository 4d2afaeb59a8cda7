//! What a [`Message`] asks, by who may ask it: typed, and every bound of a field checked once, when it is read.
//!
//! A request's fields are put into a message and taken out of it in `wire` alone. What depends on earlier messages, such as
//! whether a log is open, is the receiver's to check. Fields that a kind does not name are ignored.

mod wire;

use thiserror::Error;

use self::wire::{log, number, opened, staged};
use crate::layout::CHUNK_KEYS;
use crate::message::{
    APPEND_CHUNKS, DecodeError, Kind, LOAD_ARRIVING, LOAD_BY_ENGINE, LOAD_EARLY, LOAD_SYNC, Message, Slot,
    Status,
};

/// What a scheduler may send.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum SchedulerRequest {
    /// Opens a key log.
    Open {
        /// The log.
        log: u32,
    },
    /// Appends keys to a log.
    Append(Append),
    /// Asks for the leading hits of keys, under a lease.
    Query(Query),
    /// Promises to load keys.
    Load(Load),
    /// Saves keys.
    Save(Save),
    /// Gives up blocks of a save.
    Cancel(Cancel),
    /// Ends a log's lease.
    Release {
        /// The log.
        log: u32,
    },
    /// Ends a log and its lease.
    Close {
        /// The log.
        log: u32,
    },
    /// Gives the engine's namespace a new generation.
    Salt {
        /// What tells this generation from every other.
        salt: [u8; 16],
    },
    /// Says that keys will most likely be asked for soon.
    Hint {
        /// The keys.
        keys: Keys,
    },
    /// Says that the engine's weights may have changed: each rank is to state what it holds.
    Weights {
        /// Its number, from 1 on; greater than that of the session's last one.
        number: u64,
    },
    /// Says which tokens a root block is of that the engine's namespace keeps, or will.
    Golden(Golden),
    /// Says that the engine went on with the output of a step.
    Accept {
        /// The step, which every rank returned.
        step: u64,
    },
}

/// What a worker may send.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum WorkerRequest {
    /// Takes part in an engine's run.
    Join {
        /// The run's id.
        run: [u8; 16],
        /// The last step that the rank began before this session; 0: none.
        step: u64,
    },
    /// The rank's part of a load has ended.
    Loaded {
        /// Operation of the LOAD.
        op: u64,
        /// What became of it.
        end: LoadEnd,
    },
    /// The rank has answered a STAGE.
    Staged {
        /// Tag of the STAGE.
        tag: u64,
        /// Slot of the staging segment.
        slot: u32,
        /// Whether the slot holds the block.
        ok: bool,
    },
    /// The rank states which weights it holds now.
    Weights {
        /// Its number, from 1 on; greater than that of the session's last one.
        number: u64,
        /// The number of the scheduler's WEIGHTS that it answers; 0: none.
        answers: u64,
        /// Digest of a sample of the weights.
        live: [u8; 16],
    },
}

/// What became of a rank's part of a load.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum LoadEnd {
    /// Every block holds what was asked for.
    Whole,
    /// A block does not.
    Failed,
    /// No block was touched: the plan is of another namespace than the rank's blocks.
    Mismatch,
}

/// Consecutive keys of one log. Neither the log's number nor the end of the keys is beyond what there can be.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Keys {
    /// The log.
    pub log: u32,
    /// Index of the first key in the log.
    pub from: u32,
    /// Their number.
    pub count: u32,
}

/// APPEND: keys that follow those of the log so far.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Append {
    /// The keys.
    pub keys: Keys,
    /// The chunks that hold them, as many as [`Append::chunks`] returns.
    pub chunks: [u32; APPEND_CHUNKS],
    /// The keys of the log will be saved for another engine.
    pub promised: bool,
    /// The last key is that of a prompt's tail, a block that is partly full: the log ends with it.
    pub tail: bool,
}

/// Keys of an APPEND that lie in one chunk.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct ChunkPart {
    /// The chunk.
    pub chunk: u32,
    /// The first key's place in it.
    pub index: usize,
    /// Number of keys.
    pub count: usize,
}

/// QUERY.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Query {
    /// The operation.
    pub op: u64,
    /// The keys, at most [`QUERY_KEYS`].
    pub keys: Keys,
    /// It may be answered while blocks are on their way.
    pub arriving: bool,
    /// Another engine computes these keys, or is about to.
    pub awaits: bool,
}

/// LOAD.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Load {
    /// The operation.
    pub op: u64,
    /// The keys.
    pub keys: Keys,
    /// Where in the circle the ids of the blocks begin that are loaded into.
    pub position: u32,
    /// Step that the load belongs to.
    pub step: u64,
    /// Operation of the query that granted the lease.
    pub lease: u64,
    /// How it is to be done.
    pub flags: LoadFlags,
}

/// Flags of a LOAD, all of them known.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct LoadFlags(u8);

/// SAVE.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Save {
    /// The operation.
    pub op: u64,
    /// The keys.
    pub keys: Keys,
    /// Where in the circle the ids of the blocks begin that are saved.
    pub position: u32,
    /// Step after which the blocks are whole.
    pub step: u64,
    /// Blocks that are kept already are compared with these.
    pub checked: bool,
    /// Another engine will load these blocks.
    pub handover: bool,
}

/// GOLDEN.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Golden {
    /// How many tokens, 1 to [`GOLDEN_TOKENS`].
    pub count: u32,
    /// Where in the circle of block ids the tokens begin.
    pub position: u32,
}

/// CANCEL.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Cancel {
    /// Operation of the save.
    pub op: u64,
    /// First block, counted from the save's own first one.
    pub from: u32,
    /// Number of blocks.
    pub count: u32,
}

/// A slot that no engine of this version writes.
#[derive(Debug, Error, Eq, PartialEq)]
pub enum RequestError {
    /// It is no message.
    #[error(transparent)]
    Unknown(#[from] DecodeError),
    /// The other role sends such messages.
    #[error("a {sender} may not send {kind}")]
    Role {
        /// Who sent it.
        sender: &'static str,
        /// What it sent.
        kind: Kind,
    },
    /// A field is out of range.
    #[error("{kind} with {field} {value}: {rule}")]
    Range {
        /// The message.
        kind: Kind,
        /// The field.
        field: &'static str,
        /// What it holds.
        value: u64,
        /// What it may hold.
        rule: &'static str,
    },
}

// === impl SchedulerRequest ===

impl SchedulerRequest {
    /// Reads a slot that was copied out of a scheduler's ring.
    pub fn decode(slot: &Slot) -> Result<Self, RequestError> {
        let message = &Message::decode(slot)?;
        Ok(match message.kind {
            Kind::Open => Self::Open { log: opened(message)? },
            Kind::Append => Self::Append(Append::read(message)?),
            Kind::Query => Self::Query(Query::read(message)?),
            Kind::Load => Self::Load(Load::read(message)?),
            Kind::Save => Self::Save(Save::read(message)?),
            Kind::Cancel => Self::Cancel(Cancel::read(message)?),
            Kind::Release => Self::Release { log: log(message)? },
            Kind::Close => Self::Close { log: log(message)? },
            Kind::Salt => Self::Salt { salt: message.bytes16() },
            Kind::Hint => Self::Hint { keys: Keys::read_asked(message)? },
            Kind::Weights => Self::Weights { number: number(message)? },
            Kind::Golden => Self::Golden(Golden::read(message)?),
            Kind::Accept => Self::Accept { step: message.step },
            kind @ (Kind::Join | Kind::Loaded | Kind::Staged) => {
                return Err(RequestError::Role { sender: "scheduler", kind });
            }
        })
    }

    /// The operation that it names; 0 where it names none.
    pub fn op(&self) -> u64 {
        match Message::from(*self) {
            // Its number stands in that place.
            Message { kind: Kind::Weights, .. } => 0,
            Message { op, .. } => op,
        }
    }

    /// Keys or blocks that it names, which is what its receiver's work grows with.
    pub fn count(&self) -> u32 {
        Message::from(*self).count
    }
}

impl From<SchedulerRequest> for Message {
    fn from(request: SchedulerRequest) -> Self {
        let of_log = |kind, log| Self { log, ..Self::new(kind) };
        match request {
            SchedulerRequest::Open { log } => of_log(Kind::Open, log),
            SchedulerRequest::Append(append) => append.message(),
            SchedulerRequest::Query(query) => query.message(),
            SchedulerRequest::Load(load) => load.message(),
            SchedulerRequest::Save(save) => save.message(),
            SchedulerRequest::Cancel(cancel) => cancel.message(),
            SchedulerRequest::Release { log } => of_log(Kind::Release, log),
            SchedulerRequest::Close { log } => of_log(Kind::Close, log),
            SchedulerRequest::Salt { salt } => Self::new(Kind::Salt).with_bytes16(salt),
            SchedulerRequest::Hint { keys } => keys.message(Kind::Hint),
            SchedulerRequest::Weights { number } => Self { op: number, ..Self::new(Kind::Weights) },
            SchedulerRequest::Golden(golden) => golden.message(),
            SchedulerRequest::Accept { step } => Self { step, ..Self::new(Kind::Accept) },
        }
    }
}

// === impl WorkerRequest ===

impl WorkerRequest {
    /// Reads a slot that was copied out of a worker's ring.
    pub fn decode(slot: &Slot) -> Result<Self, RequestError> {
        let message = &Message::decode(slot)?;
        Ok(match message.kind {
            Kind::Join => Self::Join { run: message.bytes16(), step: message.step },
            Kind::Loaded => Self::Loaded { op: message.op, end: LoadEnd::read(message)? },
            Kind::Staged => Self::Staged { tag: message.op, slot: message.from, ok: staged(message)? },
            Kind::Weights => {
                Self::Weights { number: number(message)?, answers: message.step, live: message.bytes16() }
            }
            kind => return Err(RequestError::Role { sender: "worker", kind }),
        })
    }
}

impl From<WorkerRequest> for Message {
    fn from(request: WorkerRequest) -> Self {
        match request {
            WorkerRequest::Join { run, step } => Self { step, ..Self::new(Kind::Join) }.with_bytes16(run),
            WorkerRequest::Loaded { op, end } => {
                Self { op, flags: end.status() as u8, ..Self::new(Kind::Loaded) }
            }
            WorkerRequest::Staged { tag, slot, ok } => {
                let status = if ok { Status::Ok } else { Status::Failed };
                Self { op: tag, from: slot, flags: status as u8, ..Self::new(Kind::Staged) }
            }
            WorkerRequest::Weights { number, answers, live } => {
                Self { op: number, step: answers, ..Self::new(Kind::Weights) }.with_bytes16(live)
            }
        }
    }
}

// === impl Keys ===

impl Keys {
    /// Keys `range` of log `log`.
    pub fn new(log: u32, range: std::ops::Range<u32>) -> Self {
        Self { log, from: range.start, count: range.len() as u32 }
    }

    /// Index behind the last key.
    pub fn end(&self) -> u32 {
        self.from + self.count
    }
}

// === impl Append ===

impl Append {
    /// The chunks that the keys touch, in the log's order.
    pub fn chunks(&self) -> &[u32] {
        let (from, end) = (self.keys.from as usize, self.keys.end() as usize);
        &self.chunks[..end.div_ceil(CHUNK_KEYS) - from / CHUNK_KEYS]
    }

    /// Where the keys lie, chunk after chunk.
    pub fn parts(&self) -> impl Iterator<Item = ChunkPart> {
        let (from, end) = (self.keys.from as usize, self.keys.end() as usize);
        let first = from / CHUNK_KEYS;
        self.chunks().iter().enumerate().map(move |(number, &chunk)| {
            let begin = (first + number) * CHUNK_KEYS;
            let at = from.max(begin);
            ChunkPart { chunk, index: at - begin, count: end.min(begin + CHUNK_KEYS) - at }
        })
    }
}

// === impl LoadFlags ===

impl LoadFlags {
    const ALL: u8 = LOAD_SYNC | LOAD_BY_ENGINE | LOAD_EARLY | LOAD_ARRIVING;

    /// These flags; all of them must be known.
    pub fn new(bits: u8) -> Self {
        assert!(bits & !Self::ALL == 0, "LOAD has no flags {bits:#x}");
        Self(bits)
    }

    /// All of them.
    pub fn bits(self) -> u8 {
        self.0
    }

    /// Whether the step waits for the load.
    pub fn sync(self) -> bool {
        self.0 & LOAD_SYNC != 0
    }

    /// Whether the ranks copy from the pool themselves.
    pub fn by_engine(self) -> bool {
        self.0 & LOAD_BY_ENGINE != 0
    }

    /// Whether its blocks are free once the step before its own is done.
    pub fn early(self) -> bool {
        self.0 & LOAD_EARLY != 0
    }
}
