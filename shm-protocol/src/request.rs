//! Typed requests of a [`Message`], by the role of their sender. Every bound of a field is checked once, at
//! reading.
//!
//! The list of messages names the place of each field of a request in a message; `places` puts fields in and
//! takes them out. The receiver checks conditions on earlier messages, such as an open log. Fields outside
//! the list of a kind are ignored.

mod places;

use thiserror::Error;

use self::places::{
    ADVICE, APPENDED, ASKED, BLOCKS, BYTES16, FROM, KEYS, LEASE, LOAD_END, LOAD_FLAGS, LOG, NUMBER, OP,
    OPENED, POSITION, REPLACED, STAGED_OK, STEP, TOKENS, TOUCHED, WAY, flag_bit,
};
use crate::hints::Advice;
use crate::layout::CHUNK_KEYS;
use crate::message::{
    ADVISE_ALONE, APPEND_CHUNKS, APPEND_PROMISED, APPEND_TAIL, DecodeError, Kind, LOAD_ARRIVING,
    LOAD_BY_ENGINE, LOAD_EARLY, LOAD_STREAMED, LOAD_SYNC, Message, QUERY_ARRIVING, QUERY_AWAIT, QUERY_LAST,
    QUERY_STREAM, SAVE_CHECKED, SAVE_HANDOVER, Slot,
};

/// Makes the requests of the list of messages, and their fields in a message.
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
        /// A request of a scheduler.
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

        /// A request of a worker.
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
            /// Reads a slot already copied out of a scheduler's ring. Fails on a kind for workers alone, or a
            /// field out of range.
            pub fn decode_slot(slot: &Slot) -> Result<Self, RequestError> {
                let message = &Message::decode_slot(slot)?;
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
            /// Reads a slot already copied out of a worker's ring. Fails on a kind for schedulers alone, or a
            /// field out of range.
            pub fn decode_slot(slot: &Slot) -> Result<Self, RequestError> {
                let message = &Message::decode_slot(slot)?;
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

/// The end of a rank's part of a load.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum LoadEnd {
    /// Every block holds the KV of its key.
    Whole,
    /// Some block does not.
    Failed,
    /// The rank touched no block: the plan is of another namespace than its blocks.
    Mismatch,
}

/// Consecutive keys of one log. The log's number and the end of the keys are within the limits of the layout.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct LogKeys {
    /// The log.
    pub log: u32,
    /// Index of the first key in the log.
    pub from: u32,
    /// Number of keys.
    pub count: u32,
}

/// Keys of an APPEND in one chunk.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct ChunkPart {
    /// The chunk.
    pub chunk: u32,
    /// Index of the first key in the chunk.
    pub index: usize,
    /// Number of keys.
    pub count: usize,
}

/// Flags of a LOAD, all of them known.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct LoadFlags(u8);

/// A slot this version's engines do not write.
#[derive(Debug, Error, Eq, PartialEq)]
pub enum RequestError {
    /// The slot holds no message.
    #[error(transparent)]
    Unknown(#[from] DecodeError),
    /// The message belongs to the other role.
    #[error("a {sender} may not send {kind}")]
    Role {
        /// The role of the sender.
        sender: &'static str,
        /// The kind of the message.
        kind: Kind,
    },
    /// A field is out of range.
    #[error("{kind} with {field} {value}: {rule}")]
    Range {
        /// The message.
        kind: Kind,
        /// The field.
        field: &'static str,
        /// The field's value.
        value: u64,
        /// The field's valid values.
        rule: &'static str,
    },
}

// === impl SchedulerRequest ===

impl SchedulerRequest {
    /// Returns the operation named by the request; 0 if it names none.
    pub fn op(&self) -> u64 {
        match Message::from(*self) {
            // The message's number stands in that place.
            Message { kind: Kind::Weights, .. } => 0,
            Message { op, .. } => op,
        }
    }

    /// Returns the number of keys or blocks in the request. The receiver's work grows with it.
    pub fn named_count(&self) -> u32 {
        Message::from(*self).count
    }
}

// === impl LogKeys ===

impl LogKeys {
    /// Makes keys `range` of log `log`.
    pub fn new(log: u32, range: std::ops::Range<u32>) -> Self {
        Self { log, from: range.start, count: range.len() as u32 }
    }

    /// Returns the index behind the last key.
    pub fn end(&self) -> u32 {
        self.from + self.count
    }
}

// === impl Query ===

impl Query {
    /// A query without flags.
    pub fn new(op: u64, keys: LogKeys) -> Self {
        Self { op, keys, arriving: false, awaits: false, last: false, streams: false }
    }
}

// === impl Append ===

impl Append {
    /// Returns the chunks of the keys, in the log's order.
    pub fn chunks(&self) -> &[u32] {
        &self.chunks[..self.keys.chunks()]
    }

    /// Returns the places of the keys, chunk after chunk.
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
    const KNOWN: u8 = LOAD_SYNC | LOAD_BY_ENGINE | LOAD_EARLY | LOAD_ARRIVING | LOAD_STREAMED;

    /// Makes flags; panics on unknown ones.
    pub fn new(bits: u8) -> Self {
        assert!(bits & !Self::KNOWN == 0, "LOAD has no flags {bits:#x}");
        Self(bits)
    }

    /// Returns all flags as bits.
    pub fn bits(self) -> u8 {
        self.0
    }

    /// True if the step waits for the load.
    pub fn sync(self) -> bool {
        self.0 & LOAD_SYNC != 0
    }

    /// True if the ranks copy from the pool themselves.
    pub fn by_engine(self) -> bool {
        self.0 & LOAD_BY_ENGINE != 0
    }

    /// True if the load's blocks are free once the step before its own is done.
    pub fn early(self) -> bool {
        self.0 & LOAD_EARLY != 0
    }
}
