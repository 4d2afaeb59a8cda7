//! The fields of each request, in a message: put in and taken out, with every bound of a field.

use super::{Append, Cancel, Golden, Keys, Load, LoadEnd, LoadFlags, Query, RequestError, Save};
use crate::layout::{CHUNK_KEYS, CHUNKS, GOLDEN_TOKENS, LOG_KEYS, LOGS, QUERY_KEYS};
use crate::message::{
    APPEND_CHUNKS, APPEND_PROMISED, APPEND_TAIL, Kind, Message, QUERY_ARRIVING, QUERY_AWAIT, SAVE_CHECKED,
    SAVE_HANDOVER, Status,
};

// === impl LoadEnd ===

impl LoadEnd {
    const ALL: [Self; 3] = [Self::Whole, Self::Failed, Self::Mismatch];

    /// As LOADED states it.
    pub(super) fn status(self) -> Status {
        match self {
            Self::Whole => Status::Ok,
            Self::Failed => Status::Failed,
            Self::Mismatch => Status::Mismatch,
        }
    }

    pub(super) fn read(message: &Message) -> Result<Self, RequestError> {
        let end = Self::ALL.into_iter().find(|end| end.status() as u8 == message.flags);
        let rule = "2 (OK), 3 (FAILED) and 12 (MISMATCH) are the ends there are";
        range(message, "status", message.flags.into(), end.is_some(), rule)?;
        Ok(end.expect("in range"))
    }
}

// === impl Keys ===

impl Keys {
    pub(super) fn read(message: &Message) -> Result<Self, RequestError> {
        let keys = Self { log: log(message)?, from: message.from, count: message.count };
        end(message, "a log holds at most 1,048,576 keys")?;
        Ok(keys)
    }

    /// Keys that are searched for.
    pub(super) fn read_asked(message: &Message) -> Result<Self, RequestError> {
        let few = message.count as usize <= QUERY_KEYS;
        range(message, "count", message.count.into(), few, "at most 65,536 keys")?;
        Self::read(message)
    }

    pub(super) fn message(self, kind: Kind) -> Message {
        Message { log: self.log, from: self.from, count: self.count, ..Message::new(kind) }
    }
}

// === impl Append ===

impl Append {
    pub(super) fn read(message: &Message) -> Result<Self, RequestError> {
        let keys = Keys::read(message)?;
        let (from, count) = (keys.from as usize, keys.count as usize);
        let few = count > 0 && (from + count).div_ceil(CHUNK_KEYS) - from / CHUNK_KEYS <= APPEND_CHUNKS;
        range(message, "count", keys.count.into(), few, "at least 1 key, in at most 6 chunks")?;
        let known = message.flags & !(APPEND_PROMISED | APPEND_TAIL) == 0;
        range(message, "flags", message.flags.into(), known, "this release knows only 1 and 2")?;
        let has = |flag| message.flags & flag != 0;
        let (promised, tail) = (has(APPEND_PROMISED), has(APPEND_TAIL));
        let append = Self { keys, chunks: message.data, promised, tail };
        for &chunk in append.chunks() {
            let known = (chunk as usize) < CHUNKS;
            range(message, "chunk", chunk.into(), known, "chunks are numbered below 16,384")?;
        }
        Ok(append)
    }

    pub(super) fn message(self) -> Message {
        let flags = flag(self.promised, APPEND_PROMISED) | flag(self.tail, APPEND_TAIL);
        Message { flags, data: self.chunks, ..self.keys.message(Kind::Append) }
    }
}

// === impl Query ===

impl Query {
    pub(super) fn read(message: &Message) -> Result<Self, RequestError> {
        let keys = Keys::read_asked(message)?;
        let known = message.flags & !(QUERY_ARRIVING | QUERY_AWAIT) == 0;
        range(message, "flags", message.flags.into(), known, "this release knows only 1 and 2")?;
        let has = |flag| message.flags & flag != 0;
        Ok(Self { op: message.op, keys, arriving: has(QUERY_ARRIVING), awaits: has(QUERY_AWAIT) })
    }

    pub(super) fn message(self) -> Message {
        let flags = flag(self.arriving, QUERY_ARRIVING) | flag(self.awaits, QUERY_AWAIT);
        Message { op: self.op, flags, ..self.keys.message(Kind::Query) }
    }
}

// === impl Load ===

impl Load {
    pub(super) fn read(message: &Message) -> Result<Self, RequestError> {
        let keys = Keys::read(message)?;
        let known = message.flags & !LoadFlags::ALL == 0;
        range(message, "flags", message.flags.into(), known, "this release knows only 1, 2, 4 and 8")?;
        Ok(Self {
            op: message.op,
            keys,
            position: message.data[0],
            step: message.step,
            lease: message.lease,
            flags: LoadFlags(message.flags),
        })
    }

    pub(super) fn message(self) -> Message {
        Message {
            op: self.op,
            step: self.step,
            lease: self.lease,
            flags: self.flags.0,
            data: [self.position, 0, 0, 0, 0, 0],
            ..self.keys.message(Kind::Load)
        }
    }
}

// === impl Save ===

impl Save {
    pub(super) fn read(message: &Message) -> Result<Self, RequestError> {
        let keys = Keys::read(message)?;
        let known = message.flags & !(SAVE_CHECKED | SAVE_HANDOVER) == 0;
        range(message, "flags", message.flags.into(), known, "this release knows only 1 and 2")?;
        let (position, step) = (message.data[0], message.step);
        let has = |flag| message.flags & flag != 0;
        let (checked, handover) = (has(SAVE_CHECKED), has(SAVE_HANDOVER));
        Ok(Self { op: message.op, keys, position, step, checked, handover })
    }

    pub(super) fn message(self) -> Message {
        let flags = flag(self.checked, SAVE_CHECKED) | flag(self.handover, SAVE_HANDOVER);
        let data = [self.position, 0, 0, 0, 0, 0];
        Message { op: self.op, flags, step: self.step, data, ..self.keys.message(Kind::Save) }
    }
}

// === impl Golden ===

impl Golden {
    pub(super) fn read(message: &Message) -> Result<Self, RequestError> {
        let count = message.count;
        let few = (1..=GOLDEN_TOKENS as u32).contains(&count);
        range(message, "count", count.into(), few, "1 to 4,096 tokens")?;
        Ok(Self { count, position: message.data[0] })
    }

    pub(super) fn message(self) -> Message {
        Message { count: self.count, data: [self.position, 0, 0, 0, 0, 0], ..Message::new(Kind::Golden) }
    }
}

// === impl Cancel ===

impl Cancel {
    pub(super) fn read(message: &Message) -> Result<Self, RequestError> {
        end(message, "a save has at most 1,048,576 blocks")?;
        Ok(Self { op: message.op, from: message.from, count: message.count })
    }

    pub(super) fn message(self) -> Message {
        Message { op: self.op, from: self.from, count: self.count, ..Message::new(Kind::Cancel) }
    }
}

// === fields ===

fn flag(set: bool, bit: u8) -> u8 {
    if set { bit } else { 0 }
}

fn range(
    message: &Message,
    field: &'static str,
    value: u64,
    valid: bool,
    rule: &'static str,
) -> Result<(), RequestError> {
    if valid { Ok(()) } else { Err(RequestError::Range { kind: message.kind, field, value, rule }) }
}

pub(super) fn log(message: &Message) -> Result<u32, RequestError> {
    let known = (message.log as usize) < LOGS;
    range(message, "log", message.log.into(), known, "logs are numbered below 65,536")?;
    Ok(message.log)
}

/// OPEN's log. Its other two fields are kept for engines whose blocks are bundles of several cache groups.
pub(super) fn opened(message: &Message) -> Result<u32, RequestError> {
    for (field, value) in [("bundle", message.data[0]), ("set", message.data[1])] {
        range(
            message,
            field,
            value.into(),
            value == 0,
            "this release serves one bundle, which is 0 of set 0",
        )?;
    }
    log(message)
}

/// The end of `from..from + count`.
fn end(message: &Message, rule: &'static str) -> Result<(), RequestError> {
    let end = u64::from(message.from) + u64::from(message.count);
    range(message, "end", end, end <= LOG_KEYS as u64, rule)
}

/// The number of a WEIGHTS, from 1 on.
pub(super) fn number(message: &Message) -> Result<u64, RequestError> {
    range(message, "op", message.op, message.op > 0, "numbered from 1 on")?;
    Ok(message.op)
}

/// Whether the status of a STAGED says that all went well.
pub(super) fn staged(message: &Message) -> Result<bool, RequestError> {
    let status = Status::try_from(message.flags);
    let known = [Ok(Status::Ok), Ok(Status::Failed)].contains(&status);
    range(message, "status", message.flags.into(), known, "2 (OK) and 3 (FAILED) are the ends there are")?;
    Ok(status == Ok(Status::Ok))
}
