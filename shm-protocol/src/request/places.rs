//! Places of the fields of requests in a message: `put` writes a field, `take` reads it and checks its bound.

use super::{LoadEnd, LoadFlags, LogKeys, RequestError};
use crate::hints::{Advice, HintAction, SECONDS_MAX};
use crate::layout::{CHUNK_KEYS, CHUNKS, GOLDEN_TOKENS, LOG_KEYS, LOGS, QUERY_KEYS};
use crate::message::{APPEND_CHUNKS, Message, Status};

/// The place of a field in a message.
pub(super) struct FieldPlace<T> {
    pub(super) take: fn(&Message) -> Result<T, RequestError>,
    pub(super) put: fn(T, &mut Message),
}

pub(super) const OP: FieldPlace<u64> =
    FieldPlace { take: |message| Ok(message.op), put: |op, message| message.op = op };
pub(super) const FROM: FieldPlace<u32> =
    FieldPlace { take: |message| Ok(message.from), put: |from, message| message.from = from };
pub(super) const STEP: FieldPlace<u64> =
    FieldPlace { take: |message| Ok(message.step), put: |step, message| message.step = step };
pub(super) const LEASE: FieldPlace<u64> =
    FieldPlace { take: |message| Ok(message.lease), put: |lease, message| message.lease = lease };
/// A position in the circle of block ids.
pub(super) const POSITION: FieldPlace<u32> =
    FieldPlace { take: |message| Ok(message.data[0]), put: |position, message| message.data[0] = position };
/// The place of an earlier key of a save's log, counted from 1 on; 0: none.
pub(super) const REPLACED: FieldPlace<u32> = FieldPlace {
    take: |message| {
        let (replaced, rule) = (message.data[1], "0, or a key of the log before the save, counted from 1 on");
        range(message, "replaced", replaced, replaced <= message.from, rule)?;
        Ok(replaced)
    },
    put: |replaced, message| message.data[1] = replaced,
};
/// A way in which an answer ended.
pub(super) const WAY: FieldPlace<u32> =
    FieldPlace { take: |message| Ok(message.data[0]), put: |way, message| message.data[0] = way };
/// The action of an ADVISE, and its time.
pub(super) const ADVICE: FieldPlace<Advice> = FieldPlace {
    take: |message| {
        let [action, seconds, ..] = message.data;
        let known = (action as usize).checked_sub(1).and_then(|at| HintAction::ALL.get(at));
        range(message, "action", action, known.is_some(), "1 to 4: retain, pin, demote, prefetch")?;
        let stated = (seconds > 0).then_some(seconds);
        let advice = Advice::new(*known.expect("in range"), stated).ok();
        let is_timed = advice.is_some_and(|advice| advice.seconds() == seconds);
        const _: () = assert!(SECONDS_MAX == 3600);
        range(
            message,
            "seconds",
            seconds,
            is_timed,
            "1 to 3,600 of retain and pin, 0 of demote and prefetch",
        )?;
        Ok(advice.expect("in range"))
    },
    put: |advice, message| {
        message.data[0] = advice.action() as u32 + 1;
        message.data[1] = advice.seconds();
    },
};
pub(super) const BYTES16: FieldPlace<[u8; 16]> = FieldPlace {
    take: |message| Ok(message.bytes16()),
    put: |bytes, message| *message = message.with_bytes16(bytes),
};

pub(super) const LOG: FieldPlace<u32> = FieldPlace {
    take: |message| {
        let known = (message.log as usize) < LOGS;
        range(message, "log", message.log, known, "logs are numbered below 65,536")?;
        Ok(message.log)
    },
    put: |log, message| message.log = log,
};
/// The log of an OPEN. Two more fields are reserved for blocks of several cache groups.
pub(super) const OPENED: FieldPlace<u32> = FieldPlace {
    take: |message| {
        for (field, value) in [("bundle", message.data[0]), ("set", message.data[1])] {
            let rule = "this release serves one bundle, which is 0 of set 0";
            range(message, field, value, value == 0, rule)?;
        }
        (LOG.take)(message)
    },
    ..LOG
};

pub(super) const KEYS: FieldPlace<LogKeys> = FieldPlace {
    take: |message| {
        let keys = LogKeys { log: (LOG.take)(message)?, from: message.from, count: message.count };
        check_end(message, "a log holds at most 1,048,576 keys")?;
        Ok(keys)
    },
    put: |LogKeys { log, from, count }, message| {
        (message.log, message.from, message.count) = (log, from, count);
    },
};
/// Keys of a search.
pub(super) const ASKED: FieldPlace<LogKeys> = FieldPlace {
    take: |message| {
        let few = message.count as usize <= QUERY_KEYS;
        range(message, "count", message.count, few, "at most 65,536 keys")?;
        (KEYS.take)(message)
    },
    ..KEYS
};
pub(super) const APPENDED: FieldPlace<LogKeys> = FieldPlace {
    take: |message| {
        let keys = (KEYS.take)(message)?;
        let few = keys.count > 0 && keys.chunks() <= APPEND_CHUNKS;
        range(message, "count", keys.count, few, "at least 1 key, in at most 6 chunks")?;
        Ok(keys)
    },
    ..KEYS
};
/// Chunks of the keys of an APPEND; further ones mean nothing.
pub(super) const TOUCHED: FieldPlace<[u32; APPEND_CHUNKS]> = FieldPlace {
    take: |message| {
        let chunks = (APPENDED.take)(message)?.chunks();
        for &chunk in &message.data[..chunks] {
            let known = (chunk as usize) < CHUNKS;
            range(message, "chunk", chunk, known, "chunks are numbered below 16,384")?;
        }
        Ok(message.data)
    },
    put: |chunks, message| message.data = chunks,
};
/// Blocks of a save, from `from` on.
pub(super) const BLOCKS: FieldPlace<u32> = FieldPlace {
    take: |message| {
        check_end(message, "a save has at most 1,048,576 blocks")?;
        Ok(message.count)
    },
    put: |count, message| message.count = count,
};
pub(super) const TOKENS: FieldPlace<u32> = FieldPlace {
    take: |message| {
        let few = (1..=GOLDEN_TOKENS as u32).contains(&message.count);
        range(message, "count", message.count, few, "1 to 4,096 tokens")?;
        Ok(message.count)
    },
    ..BLOCKS
};
/// The number of a WEIGHTS, from 1 on.
pub(super) const NUMBER: FieldPlace<u64> = FieldPlace {
    take: |message| {
        range(message, "op", message.op, message.op > 0, "numbered from 1 on")?;
        Ok(message.op)
    },
    ..OP
};

/// A flag of a kind with the flag 1, with the flags 1 and 2, or with the four flags 1, 2, 4 and 8.
pub(super) const fn flag_bit<const BIT: u8, const FLAGS: u32>() -> FieldPlace<bool> {
    FieldPlace {
        take: |message| {
            let known = message.flags >> FLAGS == 0;
            let rule = match FLAGS {
                1 => "this release knows only 1",
                2 => "this release knows only 1 and 2",
                _ => "this release knows only 1, 2, 4 and 8",
            };
            range(message, "flags", message.flags, known, rule)?;
            Ok(message.flags & BIT != 0)
        },
        put: |set, message| message.flags |= if set { BIT } else { 0 },
    }
}

pub(super) const LOAD_FLAGS: FieldPlace<LoadFlags> = FieldPlace {
    take: |message| {
        let known = message.flags & !LoadFlags::KNOWN == 0;
        range(message, "flags", message.flags, known, "this release knows only 1, 2, 4, 8 and 16")?;
        Ok(LoadFlags(message.flags))
    },
    put: |flags, message| message.flags = flags.0,
};
pub(super) const LOAD_END: FieldPlace<LoadEnd> = FieldPlace {
    take: |message| {
        let end = match Status::try_from(message.flags) {
            Ok(Status::Ok) => Some(LoadEnd::Whole),
            Ok(Status::Failed) => Some(LoadEnd::Failed),
            Ok(Status::Mismatch) => Some(LoadEnd::Mismatch),
            _ => None,
        };
        let rule = "2 (OK), 3 (FAILED) and 12 (MISMATCH) are the ends there are";
        range(message, "status", message.flags, end.is_some(), rule)?;
        Ok(end.expect("in range"))
    },
    put: |end, message| {
        message.flags = match end {
            LoadEnd::Whole => Status::Ok,
            LoadEnd::Failed => Status::Failed,
            LoadEnd::Mismatch => Status::Mismatch,
        } as u8;
    },
};
/// True for a STAGED without a failure.
pub(super) const STAGED_OK: FieldPlace<bool> = FieldPlace {
    take: |message| {
        let known = [Status::Ok as u8, Status::Failed as u8].contains(&message.flags);
        range(message, "status", message.flags, known, "2 (OK) and 3 (FAILED) are the ends there are")?;
        Ok(message.flags == Status::Ok as u8)
    },
    put: |ok, message| message.flags = if ok { Status::Ok } else { Status::Failed } as u8,
};

impl LogKeys {
    /// Returns the number of chunks the keys touch.
    pub(super) fn chunks(self) -> usize {
        (self.from as usize + self.count as usize).div_ceil(CHUNK_KEYS) - self.from as usize / CHUNK_KEYS
    }
}

fn range(
    message: &Message,
    field: &'static str,
    value: impl Into<u64>,
    valid: bool,
    rule: &'static str,
) -> Result<(), RequestError> {
    let refused = || RequestError::Range { kind: message.kind, field, value: value.into(), rule };
    if valid { Ok(()) } else { Err(refused()) }
}

/// Checks the end of `from..from + count`.
fn check_end(message: &Message, rule: &'static str) -> Result<(), RequestError> {
    let end = u64::from(message.from) + u64::from(message.count);
    range(message, "end", end, end <= LOG_KEYS as u64, rule)
}
