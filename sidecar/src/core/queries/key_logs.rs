//! Key logs: the keys of requests, and the lease that a query leaves on its log.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use shm_protocol::key::BlockHash;
use shm_protocol::layout::{CHUNK_KEYS, LOG_KEYS};
use shm_protocol::pool::SlotRef;
use shm_protocol::request::{self, Append, LogKeys};
use shm_protocol::source::Source;
use tiers::dram::{EndedChain, LeaseId};
use tiers::forecast::SavedKeys;

use super::windows::Window;
use super::{Context, Question, SessionId, Violation};

/// Most parts of saves remembered for the forecast, in all logs of a scheduler: 3 MB.
const SAVED_MAX: usize = 1 << 16;

/// The key logs of one scheduler.
#[derive(Debug, Default)]
pub(crate) struct KeyLogs {
    open: BTreeMap<u32, KeyLog>,
    /// Logs with a lease.
    leased: BTreeSet<u32>,
    /// Logs of prompts promised by the engine: it will save their blocks.
    pub(super) promised: BTreeSet<u32>,
    /// Number of keys in all logs; the arena bounds it.
    keys: usize,
    /// Number of remembered parts of saves in all logs.
    saved: usize,
    /// True once a request has ended with its blocks on the engine's device: a block may have its parent there
    /// alone.
    pub(super) has_device: bool,
}

/// The keys of one request, in order.
#[derive(Debug, Default)]
pub(super) struct KeyLog {
    pub(super) keys: Vec<BlockHash>,
    /// Number of blocks kept for other engines before the log was opened.
    pub(super) kept_before: u64,
    pub(super) chunks: Vec<u32>,
    /// The log ends with the key of a prompt's tail: not every engine saves this block, and a further append
    /// is a violation.
    pub(super) tail: bool,
    pub(super) lease: Option<QueryLease>,
    /// The sources of those of its blocks brought into DRAM for it.
    pub(super) brought: BTreeMap<BlockHash, Source>,
    /// The end of the keys whose blocks came in a stream. They have left the pool, and are at their source.
    pub(super) streamed: u32,
    /// True once a question was put.
    pub(super) asked: bool,
    /// The range of the first question's keys.
    pub(super) first_asked: Option<Range<usize>>,
    /// The keys of its saves, in their order.
    pub(super) saved: Vec<SavedKeys>,
    /// The key of the state that the request goes on from, by the answer to its last question for the last kept key.
    pub(super) read_from: u32,
    /// `Some` while its questions may wait for a producer.
    pub(super) window: Option<Window>,
    /// True once a hint used it without a request.
    pub(super) is_alone: bool,
    /// The keys of blocks that go first once its request has ended, by a hint.
    pub(super) demoted: Option<Range<usize>>,
    /// `Some` once its request has ended: its blocks are on the engine's device, and saved as they leave it.
    pub(super) ended: Option<EndedChain>,
}

/// The lease granted by a query.
#[derive(Copy, Clone, Debug)]
pub(super) struct QueryLease {
    pub(super) id: LeaseId,
    /// The operation of the query; its name on the wire.
    pub(super) op: u64,
    pub(super) from: u32,
    pub(super) hits: u32,
}

// === impl KeyLogs ===

impl KeyLogs {
    /// Opens a log. Fails if it is open.
    pub(crate) fn open_log(&mut self, number: u32, cx: &Context) -> Result<(), Violation> {
        let opened = KeyLog { kept_before: cx.kept.block_count(), ..KeyLog::default() };
        if self.open.insert(number, opened).is_some() {
            return Err(format!("log {number} was opened twice"));
        }
        Ok(())
    }

    /// Adds keys to the end of a log. Fails if it is not open or ended, if the keys do not follow its last
    /// one, or beyond the limit of keys.
    pub(crate) fn append_keys(&mut self, append: &Append, keys: Vec<BlockHash>) -> Result<(), Violation> {
        let LogKeys { log: number, from, .. } = append.keys;
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

    /// Notes a save of an open log. Beyond the limit it is in no forecast.
    pub(super) fn note_save(&mut self, asked: &request::Save) {
        let log = self.open.get_mut(&asked.keys.log).expect("the caller checked");
        let keys = asked.keys.from as usize..asked.keys.end() as usize;
        let replaced = asked.replaced.checked_sub(1).map(|replaced| replaced as usize);
        let replaced = replaced.filter(|replaced| *replaced < log.keys.len());
        let last = log.saved.last_mut().filter(|last| last.keys.end == keys.start);
        if let Some(last) = last.filter(|last| replaced.or(last.replaced).is_none()) {
            last.keys.end = keys.end;
        } else if self.saved < SAVED_MAX {
            self.saved += 1;
            log.saved.push(SavedKeys { keys, replaced });
        }
    }

    /// Returns a log named by an engine. Fails if it is not open.
    pub(super) fn get(&self, number: u32) -> Result<&KeyLog, Violation> {
        self.open.get(&number).ok_or_else(|| unknown(number))
    }

    /// Returns an open log.
    pub(super) fn known(&self, number: u32) -> &KeyLog {
        &self.open[&number]
    }

    /// Returns an open log, to be changed.
    pub(super) fn known_mut(&mut self, number: u32) -> &mut KeyLog {
        self.open.get_mut(&number).expect("the caller checked")
    }

    /// Returns the window of a log, if it has one.
    pub(super) fn window(&mut self, number: u32) -> Option<&mut Window> {
        self.open.get_mut(&number)?.window.as_mut()
    }

    /// Sets a log's lease; `None`: the query was granted nothing.
    pub(super) fn lease(&mut self, number: u32, lease: Option<QueryLease>) {
        match lease {
            Some(_) => self.leased.insert(number),
            None => self.leased.remove(&number),
        };
        self.known_mut(number).lease = lease;
    }

    /// Takes the lease off a log, if it has one. Fails if the log is not open.
    pub(super) fn take_lease(&mut self, number: u32) -> Result<Option<QueryLease>, Violation> {
        let log = self.open.get_mut(&number).ok_or_else(|| unknown(number))?;
        self.leased.remove(&number);
        Ok(log.lease.take())
    }

    /// Returns the logs with a lease.
    pub(super) fn leased(&self) -> Vec<u32> {
        self.leased.iter().copied().collect()
    }

    pub(super) fn leases(&self) -> impl Iterator<Item = QueryLease> + '_ {
        self.open.values().filter_map(|log| log.lease)
    }

    /// Closes a log, and returns it; `None` if it is not open.
    pub(super) fn close_log(&mut self, number: u32) -> Option<KeyLog> {
        let log = self.open.remove(&number)?;
        self.promised.remove(&number);
        self.keys -= log.keys.len();
        self.saved -= log.saved.len();
        Some(log)
    }
}

// === impl KeyLog ===

impl KeyLog {
    /// Notes a question for `count` keys from `from` on.
    pub(super) fn note_question(&mut self, from: u32, count: u32) {
        self.first_asked.get_or_insert(from as usize..from as usize + count as usize);
    }

    /// Returns the keys of the log named by a question.
    pub(super) fn wanted_keys(&self, question: Question) -> &[BlockHash] {
        self.some(question.from, question.count)
    }

    /// Returns the keys of the log among `count` from `from` on.
    pub(super) fn some(&self, from: u32, count: u32) -> &[BlockHash] {
        let (from, count) = (from as usize, count as usize);
        self.keys.get(from..self.keys.len().min(from + count)).unwrap_or(&[])
    }

    /// Returns the keys of a question from this one of the log on; `None` if they end before it.
    pub(super) fn wanted_from(&self, question: Question, key: u32) -> Option<&[BlockHash]> {
        let upto = (question.from as usize + question.count as usize).min(self.keys.len());
        self.keys[..upto].get(key as usize..)
    }

    /// True if this key is the key of a prompt's tail.
    pub(super) fn is_tail(&self, key: usize) -> bool {
        self.tail && key + 1 == self.keys.len()
    }

    /// Returns the number of keys missing to a question with so many hits. The key of a tail does not count:
    /// a run without it is whole.
    pub(super) fn missing(&self, question: Question, hits: u32) -> usize {
        let from = question.from as usize;
        let wanted = from + self.wanted_keys(question).len();
        (from + hits as usize..wanted).filter(|key| !self.is_tail(*key)).count()
    }

    /// Returns the sources of the blocks of `count` keys from `from` on; empty if none was brought.
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
    /// Ends the lease; at worst it has expired meanwhile.
    pub(super) fn release_lease(self, session: SessionId, cx: &mut Context) {
        let _ = cx.dram.release(self.id, session);
    }

    /// Returns the slots of `count` hits from key `from` on, out of all its slots; `None` if it has not so
    /// many.
    pub(super) fn part(&self, slots: &[SlotRef], from: u32, count: u32) -> Option<Vec<SlotRef>> {
        let first = from.checked_sub(self.from)? as usize;
        slots.get(first..first.checked_add(count as usize)?).map(<[SlotRef]>::to_vec)
    }
}

fn unknown(log: u32) -> Violation {
    format!("log {log} is not open")
}
