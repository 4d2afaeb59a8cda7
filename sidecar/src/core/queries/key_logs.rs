//! Key logs: the keys of requests, and the lease that a query leaves on its log.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use shm_protocol::key::BlockHash;
use shm_protocol::layout::{CHUNK_KEYS, LOG_KEYS};
use shm_protocol::pool::SlotRef;
use shm_protocol::request::{Append, Keys};
use shm_protocol::source::Source;
use tiers::dram::LeaseId;

use super::windows::Window;
use super::{Context, Question, SessionId, Violation};

/// Those of one scheduler.
#[derive(Debug, Default)]
pub(crate) struct KeyLogs {
    open: BTreeMap<u32, KeyLog>,
    /// Logs with a lease.
    leased: BTreeSet<u32>,
    /// Logs whose keys its engine has promised to save.
    pub(super) promised: BTreeSet<u32>,
    /// Keys in all logs; bounded by the arena that holds them.
    keys: usize,
}

/// The keys of one request, in order.
#[derive(Debug, Default)]
pub(super) struct KeyLog {
    pub(super) keys: Vec<BlockHash>,
    /// How many blocks had been kept for engines that await them by then.
    pub(super) kept_before: u64,
    pub(super) chunks: Vec<u32>,
    /// The log ends with the key of a prompt's tail: not every engine saves that block, and a further append is a violation.
    pub(super) tail: bool,
    pub(super) lease: Option<QueryLease>,
    /// Where those of its blocks were found that were brought into DRAM for it.
    pub(super) brought: BTreeMap<BlockHash, Source>,
    /// Whether a question was put.
    pub(super) asked: bool,
    /// The keys that the first question was for.
    pub(super) first_asked: Option<Range<usize>>,
    /// A question asked for the last kept key.
    pub(super) asked_last: bool,
    /// While its questions may wait for a producer.
    pub(super) window: Option<Window>,
}

/// What a query granted.
#[derive(Copy, Clone, Debug)]
pub(super) struct QueryLease {
    pub(super) id: LeaseId,
    /// The query that granted it; its name on the wire.
    pub(super) op: u64,
    pub(super) from: u32,
    pub(super) hits: u32,
}

// === impl KeyLogs ===

impl KeyLogs {
    /// A log is opened.
    pub(crate) fn open(&mut self, number: u32, cx: &Context) -> Result<(), Violation> {
        let opened = KeyLog { kept_before: cx.kept.count(), ..KeyLog::default() };
        if self.open.insert(number, opened).is_some() {
            return Err(format!("log {number} was opened twice"));
        }
        Ok(())
    }

    /// Keys are added to the end of a log.
    pub(crate) fn append(&mut self, append: &Append, keys: Vec<BlockHash>) -> Result<(), Violation> {
        let Keys { log: number, from, .. } = append.keys;
        let room = LOG_KEYS - self.keys;
        let log = self.open.get_mut(&number).ok_or_else(|| unknown(number))?;
        if from as usize != log.keys.len() || keys.len() > room || log.tail {
            return Err(format!("log {number} has {} keys; cannot append {append:?}", log.keys.len()));
        }
        for (at, &chunk) in (from as usize / CHUNK_KEYS..).zip(append.chunks()) {
            match log.chunks.get(at) {
                Some(&known) if known != chunk => return Err(format!("log {number} moved a chunk")),
                Some(_) => {}
                None => log.chunks.push(chunk),
            }
        }
        log.tail = append.tail;
        self.keys += keys.len();
        match log.keys.is_empty() {
            true => log.keys = keys,
            false => log.keys.extend(keys),
        }
        Ok(())
    }

    /// A log that an engine names.
    pub(super) fn get(&self, number: u32) -> Result<&KeyLog, Violation> {
        self.open.get(&number).ok_or_else(|| unknown(number))
    }

    /// A log that is open.
    pub(super) fn known(&self, number: u32) -> &KeyLog {
        &self.open[&number]
    }

    /// The same, to be changed.
    pub(super) fn known_mut(&mut self, number: u32) -> &mut KeyLog {
        self.open.get_mut(&number).expect("the caller checked")
    }

    /// The window of a log, if it has one.
    pub(super) fn window(&mut self, number: u32) -> Option<&mut Window> {
        self.open.get_mut(&number)?.window.as_mut()
    }

    /// What a query has granted on a log, or that it granted nothing.
    pub(super) fn lease(&mut self, number: u32, lease: Option<QueryLease>) {
        match lease {
            Some(_) => self.leased.insert(number),
            None => self.leased.remove(&number),
        };
        self.known_mut(number).lease = lease;
    }

    /// Parts a log from its lease.
    pub(super) fn take_lease(&mut self, number: u32) -> Result<Option<QueryLease>, Violation> {
        let log = self.open.get_mut(&number).ok_or_else(|| unknown(number))?;
        self.leased.remove(&number);
        Ok(log.lease.take())
    }

    /// Logs with a lease.
    pub(super) fn leased(&self) -> Vec<u32> {
        self.leased.iter().copied().collect()
    }

    pub(super) fn leases(&self) -> impl Iterator<Item = QueryLease> + '_ {
        self.open.values().filter_map(|log| log.lease)
    }

    /// A log is closed.
    pub(super) fn close(&mut self, number: u32) -> Option<KeyLog> {
        let log = self.open.remove(&number)?;
        self.promised.remove(&number);
        self.keys -= log.keys.len();
        Some(log)
    }
}

// === impl KeyLog ===

impl KeyLog {
    /// A question was put for `count` keys from `from` on; for the `last` kept one of them, or for the leading ones.
    pub(super) fn note_question(&mut self, from: u32, count: u32, last: bool) {
        self.first_asked.get_or_insert(from as usize..from as usize + count as usize);
        self.asked_last |= last;
    }

    /// Those of its keys that a question names.
    pub(super) fn wanted(&self, question: Question) -> &[BlockHash] {
        self.some(question.from, question.count)
    }

    /// Those of `count` keys from `from` on that it has.
    pub(super) fn some(&self, from: u32, count: u32) -> &[BlockHash] {
        let (from, count) = (from as usize, count as usize);
        self.keys.get(from..self.keys.len().min(from + count)).unwrap_or(&[])
    }

    /// The keys that a question is about from this one of the log on; `None` where they end before it.
    pub(super) fn wanted_from(&self, question: Question, key: u32) -> Option<&[BlockHash]> {
        let upto = (question.from as usize + question.count as usize).min(self.keys.len());
        self.keys[..upto].get(key as usize..)
    }

    /// Whether this key is that of a prompt's tail.
    pub(super) fn is_tail(&self, key: usize) -> bool {
        self.tail && key + 1 == self.keys.len()
    }

    /// How many keys a question with so many hits lacks. A tail's key is none of them: a run without it is whole.
    pub(super) fn missing(&self, question: Question, hits: u32) -> usize {
        let from = question.from as usize;
        let wanted = from + self.wanted(question).len();
        (from + hits as usize..wanted).filter(|key| !self.is_tail(*key)).count()
    }

    /// Where the blocks of `count` keys from `from` on were found; nothing where none was brought.
    pub(super) fn sources(&self, from: u32, count: usize) -> Vec<Source> {
        if self.brought.is_empty() {
            return Vec::new();
        }
        let keys = self.some(from, count as u32).iter();
        keys.map(|hash| self.brought.get(hash).copied().unwrap_or_default()).collect()
    }
}

// === impl QueryLease ===

impl QueryLease {
    /// Ends it; at worst it has expired meanwhile.
    pub(super) fn release(self, session: SessionId, cx: &mut Context) {
        let _ = cx.dram.release(self.id, session);
    }

    /// Of its slots, those of `count` hits from key `from` on.
    pub(super) fn part(&self, slots: &[SlotRef], from: u32, count: u32) -> Option<Vec<SlotRef>> {
        let first = from.checked_sub(self.from)? as usize;
        slots.get(first..first.checked_add(count as usize)?).map(<[SlotRef]>::to_vec)
    }
}

fn unknown(log: u32) -> Violation {
    format!("log {log} is not open")
}
