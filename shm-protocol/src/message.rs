//! The messages on the rings: 64 bytes each, fixed-width little-endian fields, decoded fallibly.

use thiserror::Error;

/// Words of a ring slot.
pub type Slot = [u64; 8];

/// A named enumeration whose values are bytes on a ring.
macro_rules! codes {
    ($(#[$meta:meta])* $name:ident $what:literal {
        $($(#[$doc:meta])* $code:literal $variant:ident $text:literal,)*
    }) => {
        crate::named! {
            $(#[$meta])*
            #[repr(u8)]
            pub enum $name {
                $($(#[$doc])* $variant = $text as $code,)*
            }
        }

        impl TryFrom<u8> for $name {
            type Error = DecodeError;
            fn try_from(value: u8) -> Result<Self, DecodeError> {
                match value {
                    $($code => Ok(Self::$variant),)*
                    _ => Err(DecodeError { what: $what, value }),
                }
            }
        }
    };
}

/// The kinds of the list of messages.
macro_rules! kinds {
    ($(
        $(#[$doc:meta])* $code:literal $variant:ident $text:literal $($reserved:ident)? { $($sent:tt)* }
    )*) => {
        codes! {
            /// Operation codes of the submission ring.
            Kind "kind" {
                $($(#[$doc])* $code $variant $text,)*
            }
        }

        impl Kind {
            /// True if the message may use the reserved slots, since it gives something back or fulfils a
            /// promise.
            pub fn reserved(self) -> bool {
                match self {
                    $(Self::$variant => !stringify!($($reserved)?).is_empty(),)*
                }
            }
        }
    };
}

messages!(kinds);

codes! {
/// Outcome of an operation, the low byte of its word or its completion.
Status "status" {
    /// The outcome is not known yet; the word will change.
    1 Pending "PENDING",
    /// The operation is done: `value` is the number of hit or moved blocks.
    2 Ok "OK",
    /// No block was moved, or fewer than asked, for a reason a later attempt may not meet.
    3 Failed "FAILED",
    /// The sidecar does not know the lease.
    4 LeaseUnknown "LEASE_UNKNOWN",
    /// The lease has run out.
    5 LeaseExpired "LEASE_EXPIRED",
    /// The lease belongs to another engine.
    6 LeaseForeign "LEASE_FOREIGN",
    /// The lease was used already.
    7 LeaseConsumed "LEASE_CONSUMED",
    /// Not every rank has joined the run, or stated the weights it holds now.
    8 NotReady "NOT_READY",
    /// A query: `value` is the number of hits, but some of their blocks are still on their way
    /// ([`QUERY_ARRIVING`]).
    9 Arriving "ARRIVING",
    /// A load: a block on its way has not come. No block was or will be written. An ADVISE: some blocks are nowhere;
    /// `value` is the number of the others.
    10 Absent "ABSENT",
    /// A query: this engine's computed KV differs from the KV of its namespace, so it gets no hits there.
    11 Barred "BARRED",
    /// The end of a load at a rank: its plan is of another namespace than the rank's blocks.
    12 Mismatch "MISMATCH",
    /// An ADVISE: the engine's limit left some blocks out. `value` is the number of the others.
    13 Clipped "CLIPPED",
    /// A query: `value` is the number of hits, more than the pool holds, and no slot of them is named
    /// ([`QUERY_STREAM`]).
    14 Streamed "STREAMED",
}
}

/// `flags` of APPEND: this engine computes the keys of the log for another one, and will save them before it
/// closes the log. Only with [`crate::handshake::Welcome::handover`].
pub const APPEND_PROMISED: u8 = 1;
/// `flags` of APPEND: its last key is the key of a prompt's tail, a partly full block. No key may follow it
/// in the log. Only with [`crate::handshake::Welcome::tails`].
pub const APPEND_TAIL: u8 = 2;
/// `flags` of QUERY: the sidecar may answer with [`Status::Arriving`]. Loads under such an answer may fail.
pub const QUERY_ARRIVING: u8 = 1;
/// `flags` of QUERY: another engine computes these keys, or is about to. Only with
/// [`crate::handshake::Welcome::handover`].
pub const QUERY_AWAIT: u8 = 2;
/// `flags` of QUERY: find the last kept one of its keys. `value` is its place plus 1, and no other key is
/// leased. Only with [`crate::handshake::Welcome::states`].
pub const QUERY_LAST: u8 = 4;
/// `flags` of QUERY: the sidecar may answer with [`Status::Streamed`]. Loads under such an answer may fail.
/// Only with [`crate::handshake::Welcome::streams`].
pub const QUERY_STREAM: u8 = 8;
/// `flags` of LOAD: the load's step waits for it.
pub const LOAD_SYNC: u8 = 1;
/// `flags` of LOAD: the ranks copy from the pool themselves and report LOADED.
pub const LOAD_BY_ENGINE: u8 = 2;
/// `flags` of LOAD: its blocks are free once the step before its own is done; its own step does not touch
/// them first.
pub const LOAD_EARLY: u8 = 4;
/// `flags` of SAVE: compare the blocks already kept under its keys with these blocks.
pub const SAVE_CHECKED: u8 = 1;
/// `flags` of SAVE: another engine will load these blocks. Only with [`crate::handshake::Welcome::handover`].
pub const SAVE_HANDOVER: u8 = 2;
/// `flags` of ADVISE: no request has its log.
pub const ADVISE_ALONE: u8 = 1;
/// `flags` of LOAD: its query was answered with [`Status::Arriving`], so some blocks may still be on their
/// way.
pub const LOAD_ARRIVING: u8 = 8;
/// `flags` of LOAD: its query was answered with [`Status::Streamed`]: it has no slots yet, and may begin much
/// later.
pub const LOAD_STREAMED: u8 = 16;
/// `data[0]` of CLOSE and ENDED: the conversation ends with this request. Earlier sidecars take it for a way in which
/// answers end.
pub const WAY_LAST: u32 = u32::MAX;

/// One submission, as it lies in a slot: `kind u8, flags u8, pad u16, log u32, op u64, from u32, count u32, step u64,
/// lease u64, data [u32; 6]`.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Message {
    /// The kind of the message.
    pub kind: Kind,
    /// Bits by kind.
    pub flags: u8,
    /// Key log, an index below [`crate::layout::LOGS`].
    pub log: u32,
    /// Operation id, increasing within a session.
    pub op: u64,
    /// First key.
    pub from: u32,
    /// Number of keys.
    pub count: u32,
    /// The scheduler's step number.
    pub step: u64,
    /// Operation id of the query that granted the lease.
    pub lease: u64,
    /// By kind: chunks, block-id position, run id, salt, digest; see [`crate::request`].
    pub data: [u32; 6],
}

/// The most chunks one APPEND names.
pub const APPEND_CHUNKS: usize = 6;

/// The bytes of a slot do not form a message.
#[derive(Debug, Error, Eq, PartialEq)]
#[error("a ring slot holds {what} {value}, which this version does not know")]
pub struct DecodeError {
    pub(crate) what: &'static str,
    pub(crate) value: u8,
}

/// Joins two halves to a word, the low one first.
fn pair([low, high]: [u32; 2]) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn halves(word: u64) -> [u32; 2] {
    [word as u32, (word >> 32) as u32]
}

// === impl Status ===

impl Status {
    /// True if the status of a load says that none of its blocks was or will be written.
    pub fn is_refusal(self) -> bool {
        !matches!(self, Self::Pending | Self::Ok | Self::Failed)
    }
}

// === impl Message ===

impl Message {
    /// Makes a message of `kind` with every other field zero.
    pub fn new(kind: Kind) -> Self {
        Self { kind, flags: 0, log: 0, op: 0, from: 0, count: 0, step: 0, lease: 0, data: [0; 6] }
    }

    /// Returns the words of the slot.
    pub fn encode_slot(&self) -> Slot {
        let Self { kind, flags, log, op, from, count, step, lease, data: [a, b, c, d, e, f] } = *self;
        let head = pair([u32::from(kind as u8) | u32::from(flags) << 8, log]);
        [head, op, pair([from, count]), step, lease, pair([a, b]), pair([c, d]), pair([e, f])]
    }

    /// Reads a slot already copied out of shared memory. Fails on an unknown kind.
    pub fn decode_slot(slot: &Slot) -> Result<Self, DecodeError> {
        let [head, op, keys, step, lease, data @ ..] = *slot;
        let ([head, log], [from, count]) = (halves(head), halves(keys));
        let [kind, flags, ..] = head.to_le_bytes();
        let data = data.map(halves).as_flattened().try_into().expect("three words of two");
        Ok(Self { kind: kind.try_into()?, flags, log, op, from, count, step, lease, data })
    }

    /// Returns `data[0..4]` as 16 bytes: a run id, a salt or a digest.
    pub fn bytes16(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        for (target, word) in bytes.chunks_exact_mut(4).zip(self.data) {
            target.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Sets `data[0..4]` from 16 bytes.
    pub fn with_bytes16(mut self, bytes: [u8; 16]) -> Self {
        for (word, source) in self.data.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes(source.try_into().expect("chunks of four"));
        }
        self
    }
}

/// A word of the completion table: `op` (low 32 bits) in the high half, then a 24-bit value, then the status byte.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Outcome {
    /// Low 32 bits of the operation's id; a word with older bits belongs to an earlier operation.
    pub op: u32,
    /// Hit or moved blocks.
    pub value: u32,
    /// The outcome of the operation.
    pub status: Status,
}

/// The most blocks an outcome can count.
pub const OUTCOME_VALUE_MAX: u32 = (1 << 24) - 1;

// === impl Outcome ===

impl Outcome {
    /// Returns the word for the table.
    pub fn encode(&self) -> u64 {
        assert!(self.value <= OUTCOME_VALUE_MAX, "a log holds at most 2^20 keys");
        u64::from(self.op) << 32 | u64::from(self.value) << 8 | u64::from(self.status as u8)
    }

    /// Reads a word loaded once. Fails on an unknown status.
    pub fn decode(word: u64) -> Result<Self, DecodeError> {
        let value = (word >> 8) as u32 & OUTCOME_VALUE_MAX;
        Ok(Self { op: (word >> 32) as u32, value, status: (word as u8).try_into()? })
    }
}

/// One entry of the completion ring: the end of a save.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Saved {
    /// The save's operation id.
    pub op: u64,
    /// Blocks now kept under their keys by this save.
    pub committed: u32,
    /// Blocks that were kept before, are being saved by another request, or came in a stream.
    pub present: u32,
    /// Blocks given up because their source was about to be overwritten.
    pub cancelled: u32,
    /// Blocks given up because the engine was about to overwrite their source.
    pub dropped: u32,
    /// Present blocks compared with the kept ones ([`SAVE_CHECKED`]).
    pub checked: u32,
    /// Compared blocks with a larger difference than computing them twice makes.
    pub differing: u32,
    /// The largest difference of the compared blocks, in millionths; all ones for a difference beyond the
    /// field's range.
    pub difference: u32,
    /// The limit of `difference`, in millionths.
    pub limit: u32,
    /// Dropped blocks the engine may not save before it has proven its KV.
    pub unproven: u32,
    /// Dropped blocks whose step the engine did not accept.
    pub unaccepted: u32,
}

// === impl Saved ===

impl Saved {
    /// Returns the words of the slot.
    pub fn encode_slot(&self) -> Slot {
        let mut copy = *self;
        let [a, b, c, d, e] = copy.counts().map(|of| pair(of.map(|count| *count)));
        [self.op, a, b, c, d, e, 0, 0]
    }

    /// Reads a slot; every value is valid.
    pub fn decode_slot(slot: &Slot) -> Self {
        let [op, words @ .., _, _] = *slot;
        let mut saved = Self { op, ..Self::default() };
        for (counts, word) in saved.counts().into_iter().zip(words) {
            for (count, value) in counts.into_iter().zip(halves(word)) {
                *count = value;
            }
        }
        saved
    }

    /// The counts of each word behind the operation.
    fn counts(&mut self) -> [[&mut u32; 2]; 5] {
        [
            [&mut self.committed, &mut self.present],
            [&mut self.cancelled, &mut self.dropped],
            [&mut self.checked, &mut self.differing],
            [&mut self.difference, &mut self.limit],
            [&mut self.unproven, &mut self.unaccepted],
        ]
    }
}

/// One entry of a worker's completion ring: a block to be copied into the staging segment. Answered by STAGED.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct StageRequest {
    /// Tag of the request; written to the slot's word before its bytes, and repeated in the answer.
    pub tag: u64,
    /// Block of the engine.
    pub block: u32,
    /// Slot of the staging segment.
    pub slot: u32,
}

// === impl StageRequest ===

impl StageRequest {
    /// Returns the words of the slot.
    pub fn encode_slot(&self) -> Slot {
        [self.tag, pair([self.block, self.slot]), 0, 0, 0, 0, 0, 0]
    }

    /// Reads a slot. The caller checks if block and slot exist.
    pub fn decode_slot(slot: &Slot) -> Self {
        let [block, place] = halves(slot[1]);
        Self { tag: slot[0], block, slot: place }
    }
}
