//! What a [`Message`] asks, by who may ask it: typed, and every bound of a field checked once, when it is read.
//!
//! The list of messages says where each field of a request is in a message; `places` puts it in and takes it out. What depends on
//! earlier messages, such as whether a log is open, is the receiver's to check. Fields that a kind does not name are ignored.

mod places;

use thiserror::Error;

use self::places::{
    APPENDED, ASKED, BLOCKS, BYTES16, FROM, KEYS, LEASE, LOAD_END, LOAD_FLAGS, LOG, NUMBER, OP, OPENED,
    POSITION, STAGED_OK, STEP, TOKENS, TOUCHED, WAY, flag_bit,
};
use crate::layout::CHUNK_KEYS;
use crate::message::{
    APPEND_CHUNKS, APPEND_PROMISED, APPEND_TAIL, DecodeError, Kind, LOAD_ARRIVING, LOAD_BY_ENGINE,
    LOAD_EARLY, LOAD_SYNC, Message, QUERY_ARRIVING, QUERY_AWAIT, QUERY_LAST, SAVE_CHECKED, SAVE_HANDOVER,
    Slot,
};

/// The requests of the list of messages, and their fields in a message.
macro_rules! requests {
    ($(
        $(#[$doc:meta])* $code:literal $kind:ident $text:literal $($reserved:ident)? {
            $(of $body:ident {
                $($(#[$of_part:meta])* $part:ident: $part_type:ty = $part_place:expr,)*
            })?
            $(scheduler {
                $($(#[$of_asked:meta])* $asked:ident: $asked_type:ty = $asked_place:expr,)*
            })?
            $(worker {
                $($(#[$of_told:meta])* $told:ident: $told_type:ty = $told_place:expr,)*
            })?
        }
    )*) => {
        /// What a scheduler may send.
        #[derive(Copy, Clone, Debug, Eq, PartialEq)]
        pub enum SchedulerRequest {
            $(
                $(
                    #[doc = concat!("See [`Kind::", stringify!($kind), "`].")]
                    $kind($body),
                )?
                $(
                    #[doc = concat!("See [`Kind::", stringify!($kind), "`].")]
                    $kind { $($(#[$of_asked])* $asked: $asked_type,)* },
                )?
            )*
        }

        /// What a worker may send.
        #[derive(Copy, Clone, Debug, Eq, PartialEq)]
        pub enum WorkerRequest {
            $($(
                #[doc = concat!("See [`Kind::", stringify!($kind), "`].")]
                $kind { $($(#[$of_told])* $told: $told_type,)* },
            )?)*
        }

        $($(
            #[doc = concat!($text, ".")]
            #[derive(Copy, Clone, Debug, Eq, PartialEq)]
            pub struct $body {
                $($(#[$of_part])* pub $part: $part_type,)*
            }
        )?)*

        impl SchedulerRequest {
            /// Reads a slot that was copied out of a scheduler's ring.
            pub fn decode(slot: &Slot) -> Result<Self, RequestError> {
                let message = &Message::decode(slot)?;
                Ok(match message.kind {
                    $(
                        $(Kind::$kind => Self::$kind($body { $($part: ($part_place.take)(message)?,)* }),)?
                        $(Kind::$kind => Self::$kind { $($asked: ($asked_place.take)(message)?,)* },)?
                    )*
                    kind => return Err(RequestError::Role { sender: "scheduler", kind }),
                })
            }
        }

        impl WorkerRequest {
            /// Reads a slot that was copied out of a worker's ring.
            pub fn decode(slot: &Slot) -> Result<Self, RequestError> {
                let message = &Message::decode(slot)?;
                Ok(match message.kind {
                    $($(Kind::$kind => Self::$kind { $($told: ($told_place.take)(message)?,)* },)?)*
                    kind => return Err(RequestError::Role { sender: "worker", kind }),
                })
            }
        }

        impl From<SchedulerRequest> for Message {
            fn from(request: SchedulerRequest) -> Self {
                match request {
                    $(
                        $(SchedulerRequest::$kind($body { $($part,)* }) => {
                            let message = &mut Self::new(Kind::$kind);
                            $(($part_place.put)($part, message);)*
                            *message
                        })?
                        $(SchedulerRequest::$kind { $($asked,)* } => {
                            let message = &mut Self::new(Kind::$kind);
                            $(($asked_place.put)($asked, message);)*
                            *message
                        })?
                    )*
                }
            }
        }

        impl From<WorkerRequest> for Message {
            fn from(request: WorkerRequest) -> Self {
                match request {
                    $($(WorkerRequest::$kind { $($told,)* } => {
                        let message = &mut Self::new(Kind::$kind);
                        $(($told_place.put)($told, message);)*
                        *message
                    })?)*
                }
            }
        }
    };
}

messages!(requests);

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

/// Flags of a LOAD, all of them known.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct LoadFlags(u8);

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
        &self.chunks[..self.keys.chunks()]
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
    const KNOWN: u8 = LOAD_SYNC | LOAD_BY_ENGINE | LOAD_EARLY | LOAD_ARRIVING;

    /// These flags; all of them must be known.
    pub fn new(bits: u8) -> Self {
        assert!(bits & !Self::KNOWN == 0, "LOAD has no flags {bits:#x}");
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
