//! The key logs of a session: the chunks of each request's keys, and the lease of its last query.
//!
//! The engine's handle of a log is `incarnation << 16 | number`. Incarnations never repeat, also not over
//! connections, so a handle of a closed log, or from before a reconnect, is recognised and is a miss.

use std::time::{Duration, Instant};

use shm_protocol::layout::{CHUNK_KEYS, LOGS, QUERY_KEYS};

/// Bits of a log's number in its handle.
const NUMBER_BITS: u32 = 16;

const _: () = assert!(LOGS == 1 << NUMBER_BITS);

/// One request's keys.
#[derive(Debug, Default)]
pub(crate) struct RequestLog {
    /// Chunks, in key order.
    pub(crate) chunks: Vec<u32>,
    /// Keys appended.
    pub(crate) length: u32,
    /// Mixed into every key.
    pub(crate) fold: Option<[u8; 16]>,
    /// Another engine computes its keys, or is about to.
    pub(crate) awaits: bool,
    /// Another engine will load its keys.
    pub(crate) handover: bool,
    /// The keys are posted with this engine's promise to produce them.
    pub(crate) promised: bool,
    /// The log ends with the key of a prompt's tail: further appends are refused.
    pub(crate) tail: bool,
    /// The lease of the last answer.
    pub(crate) lease: Option<LogLease>,
    /// A query posted ahead of its question, or pending at the sidecar.
    pub(crate) pending: Option<u64>,
}

/// The right to load keys `first..from+hits`.
#[derive(Copy, Clone, Debug)]
pub(crate) struct LogLease {
    /// The query of the lease.
    pub(crate) op: u64,
    /// First key asked for.
    pub(crate) from: u32,
    /// Keys asked for.
    pub(crate) asked: u32,
    /// Keys promised.
    pub(crate) hits: u32,
    /// The first leased key of these: the last one after a query for the last kept key.
    pub(crate) first: u32,
    /// Some of these blocks were still on their way: they are loaded in parts, and no step may count on them.
    pub(crate) arriving: bool,
    /// There are more of these blocks than the pool holds: the sidecar fetches them for their loads.
    pub(crate) streamed: bool,
    /// Time when the query was posted, earlier than the sidecar's time of the lease.
    pub(crate) since: Instant,
}

#[derive(Debug)]
struct NumberedLog {
    incarnation: u64,
    log: RequestLog,
}

/// Every open log.
#[derive(Debug)]
pub(crate) struct LogTable {
    entries: Vec<Option<NumberedLog>>,
    free: Vec<u32>,
    incarnation: u64,
}

// === impl RequestLog ===

impl RequestLog {
    /// The chunk of key `key`, and the key's index in it.
    pub(crate) fn key_place(&self, key: u32) -> (u32, usize) {
        let key = key as usize;
        (self.chunks[key / CHUNK_KEYS], key % CHUNK_KEYS)
    }

    /// The number of keys, of `count` from `start` on, that one query can name: keys already appended, and at
    /// most `QUERY_KEYS`.
    pub(crate) fn askable(&self, start: u32, count: u32) -> u32 {
        count.min(self.length.saturating_sub(start)).min(QUERY_KEYS as u32)
    }
}

// === impl LogLease ===

impl LogLease {
    /// True once half of the lease's life is over: it must not be relied on.
    pub(crate) fn is_old(&self, ttl: Duration, now: Instant) -> bool {
        now - self.since > ttl / 2
    }
}

// === impl LogTable ===

impl LogTable {
    /// A table whose handles differ from those of every table with a smaller `incarnation`.
    pub(crate) fn new(incarnation: u64) -> Self {
        Self { entries: Vec::new(), free: Vec::new(), incarnation }
    }

    /// The number of the next log, or `None` if 65,536 are open.
    pub(crate) fn next_number(&self) -> Option<u32> {
        let fresh = (self.entries.len() < LOGS).then_some(self.entries.len() as u32);
        self.free.last().copied().or(fresh)
    }

    /// Opens the log of [`LogTable::next_number`], with `fold` in every key, and returns its handle.
    pub(crate) fn open_log(&mut self, fold: Option<[u8; 16]>) -> Option<i64> {
        let number = self.next_number()?;
        if self.free.pop().is_none() {
            self.entries.push(None);
        }
        self.incarnation += 1;
        let log = RequestLog { fold, ..RequestLog::default() };
        self.entries[number as usize] = Some(NumberedLog { incarnation: self.incarnation, log });
        i64::try_from(self.incarnation << NUMBER_BITS | u64::from(number)).ok()
    }

    /// The log of a handle, unless it was closed or belongs to an earlier connection.
    pub(crate) fn get(&mut self, handle: i64) -> Option<(u32, &mut RequestLog)> {
        let handle = u64::try_from(handle).ok()?;
        let number = (handle & (LOGS as u64 - 1)) as usize;
        let entry = self.entries.get_mut(number)?.as_mut()?;
        (entry.incarnation == handle >> NUMBER_BITS).then_some((number as u32, &mut entry.log))
    }

    /// Ends a log; its number may be used by the very next one, since messages are read in order.
    pub(crate) fn close_log(&mut self, handle: i64) -> Option<(u32, RequestLog)> {
        let (number, _) = self.get(handle)?;
        let entry = self.entries[number as usize].take()?;
        self.free.push(number);
        Some((number, entry.log))
    }

    /// How many logs are open.
    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Every open log.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut RequestLog> {
        self.entries.iter_mut().flatten().map(|entry| &mut entry.log)
    }

    /// The last incarnation used.
    pub(crate) fn incarnation(&self) -> u64 {
        self.incarnation
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_dies_with_its_log_and_with_its_connection() {
        let mut table = LogTable::new(0);
        let first = table.open_log(None).unwrap();
        assert!(table.get(first).is_some());
        table.close_log(first).unwrap();
        let second = table.open_log(None).unwrap();
        assert_eq!(table.get(second).unwrap().0, 0, "the number is used again");
        assert!(table.get(first).is_none(), "the handle is not");
        let mut next = LogTable::new(table.incarnation());
        next.open_log(None).unwrap();
        assert!(next.get(second).is_none() && next.get(-1).is_none());
    }

    #[test]
    fn there_are_as_many_logs_as_the_layout_says() {
        let mut table = LogTable::new(0);
        assert!((0..LOGS).all(|_| table.open_log(None).is_some()));
        assert!(table.open_log(None).is_none());
    }
}
