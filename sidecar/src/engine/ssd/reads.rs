//! Reads: what a query misses in DRAM and a device keeps comes back into DRAM, and the query waits for it.
//!
//! The query's leading run is followed past its end in DRAM as far as each block lies in DRAM, is on its way there from a
//! device, or is kept on one. A block that a save is filling ends it: its step may be long in coming. Reads are begun for
//! what is missing, and the blocks between are held. The answer is what is leased once the reads have ended, or the time
//! is over: never more than was asked for, perhaps less. Whoever stops waiting leaves the reads to end by themselves;
//! their blocks stay in DRAM as any others.

use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::pool::SlotRef;
use tiers::ssd::Ticket;

use crate::engine::logs::Question;
use crate::engine::members::Binding;
use crate::engine::{Action, Core, GROUP, SessionId};

/// The longest that a query waits: a device reads a long prompt's blocks (2 GiB) within a second; who waits much longer
/// had better computed.
const WAIT_MS_MAX: u64 = 2_000;

/// A block on its way into a slot.
#[derive(Debug)]
pub(super) struct Read {
    ticket: Ticket,
    bytes: u64,
    /// Nobody waits for it any more.
    late: bool,
    waiting: Vec<Waiter>,
}

/// A query that waits.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
struct Waiter {
    session: SessionId,
    log: u32,
    op: u64,
}

/// What a query waits for.
#[derive(Debug)]
pub(super) struct Wait {
    question: Question,
    since_ms: u64,
    /// Reads that have not ended.
    open: usize,
    /// Blocks that must not be evicted before they are leased.
    held: Vec<SlotRef>,
}

/// How far a run was followed.
#[derive(Debug, Default)]
struct Followed {
    /// Blocks in DRAM, held.
    held: Vec<SlotRef>,
    /// Blocks on their way already.
    coming: Vec<BlockKey>,
    /// Blocks to be read.
    missing: Vec<BlockKey>,
}

// === impl Core: queries ===

impl Core {
    /// Whether the block may be had in DRAM soon.
    pub(in crate::engine) fn comes_from_ssd(&self, binding: &Binding, hash: &BlockHash) -> bool {
        let Some(ssd) = &self.ssd else { return false };
        let key = BlockKey { namespace: binding.namespace, group: GROUP, hash: *hash };
        ssd.reads.get(&key).is_some_and(|read| !read.late) || ssd.log.keeps(&key).is_some()
    }

    /// Begins to bring `hashes`, which follow a question's leased run, into DRAM; whether the question has to wait.
    pub(in crate::engine) fn wait_for(
        &mut self,
        now_ms: u64,
        session: SessionId,
        question: Question,
        binding: &Binding,
        hashes: &[BlockHash],
        out: &mut Vec<Action>,
    ) -> bool {
        let waiter = Waiter { session, log: question.log, op: question.op };
        let most = self.ssd.as_ref().map_or(0, |ssd| ssd.read_bytes_max);
        let mut followed = self.follow(binding, hashes, most);
        followed.coming.extend(self.begin_reads(binding, &followed.missing, out));
        let Some(ssd) = &mut self.ssd else { return false };
        for key in &followed.coming {
            ssd.reads.get_mut(key).expect("it was found there").waiting.push(waiter);
        }
        let open = followed.coming.len();
        if open == 0 {
            followed.held.into_iter().for_each(|slot| self.dram.unhold(slot));
            return false;
        }
        ssd.stats.waits += 1;
        let wait = Wait { question, since_ms: now_ms, open, held: followed.held };
        let before = ssd.waits.insert((session, question.log), wait);
        assert!(before.is_none(), "a new question ends the wait of the one before");
        true
    }

    /// Begins to bring into DRAM what a query will ask for. Leaves half of what reads may take to those who ask.
    pub(in crate::engine) fn prefetch(
        &mut self,
        binding: &Binding,
        hashes: &[BlockHash],
        out: &mut Vec<Action>,
    ) {
        let most = self.ssd.as_ref().map_or(0, |ssd| ssd.read_bytes_max / 2);
        let followed = self.follow(binding, hashes, most);
        self.begin_reads(binding, &followed.missing, out);
        followed.held.into_iter().for_each(|slot| self.dram.unhold(slot));
    }

    /// Follows a run, as long as no more than `most` bytes are on their way; a block alone always may be.
    fn follow(&mut self, binding: &Binding, hashes: &[BlockHash], most: u64) -> Followed {
        let mut followed = Followed::default();
        let Some(ssd) = &self.ssd else { return followed };
        let block_bytes = binding.block_bytes();
        let mut room = most.max(block_bytes).saturating_sub(ssd.read_bytes);
        for hash in hashes {
            let key = BlockKey { namespace: binding.namespace, group: GROUP, hash: *hash };
            if let Some(slot) = self.dram.hold(&key) {
                followed.held.push(slot);
            } else if let Some(read) = ssd.reads.get(&key) {
                if read.late {
                    break;
                }
                followed.coming.push(key);
            } else if room >= block_bytes && ssd.log.keeps(&key).map(u64::from) == Some(block_bytes) {
                room -= block_bytes;
                followed.missing.push(key);
            } else {
                break;
            }
        }
        followed
    }

    /// Begins reads as far as there is room; those that were begun.
    fn begin_reads(
        &mut self,
        binding: &Binding,
        missing: &[BlockKey],
        out: &mut Vec<Action>,
    ) -> Vec<BlockKey> {
        let bytes = binding.block_bytes();
        let mut begun = Vec::with_capacity(missing.len());
        for key in missing {
            let filled = self.dram.begin_fill(*key, bytes, binding.quota);
            self.apply_evictions(out);
            let (Ok(slot), Some(ssd)) = (filled, &mut self.ssd) else { break };
            let Some(ticket) = ssd.log.read(key, slot) else {
                self.dram.abandon(slot);
                break;
            };
            out.push(Action::FillSlot { slot, namespace: binding.digest, key: *key });
            ssd.read_bytes += bytes;
            ssd.reads.insert(*key, Read { ticket, bytes, late: false, waiting: Vec::new() });
            begun.push(*key);
        }
        begun
    }
}

// === impl Core: ends ===

impl Core {
    /// A read has ended: its block is in DRAM, or is not to be had.
    pub(super) fn read_ended(
        &mut self,
        now_ms: u64,
        key: &BlockKey,
        slot: SlotRef,
        ok: bool,
        out: &mut Vec<Action>,
    ) {
        let Some(ssd) = &mut self.ssd else { return };
        let read = ssd.reads.remove(key).expect("one read for each block, which ends once");
        ssd.read_bytes -= read.bytes;
        let kept = ok && self.dram.commit(slot);
        if kept {
            ssd.stats.promoted_blocks += 1;
            out.push(Action::CommitSlot { slot });
        } else {
            self.dram.abandon(slot);
            out.push(Action::FreeSlot { slot });
        }
        self.tell(now_ms, &read.waiting, kept.then_some(key), out);
    }

    /// A read is late, and its device taken for broken: whoever waits is answered without it. The slot stays the read's.
    pub(super) fn give_up_read(&mut self, now_ms: u64, ticket: Ticket, out: &mut Vec<Action>) {
        let Some(ssd) = &mut self.ssd else { return };
        let Some(read) = ssd.reads.values_mut().find(|read| read.ticket == ticket) else { return };
        read.late = true;
        let waiting = std::mem::take(&mut read.waiting);
        self.tell(now_ms, &waiting, None, out);
    }

    fn tell(&mut self, now_ms: u64, waiting: &[Waiter], kept: Option<&BlockKey>, out: &mut Vec<Action>) {
        for waiter in waiting {
            let Some(ssd) = &mut self.ssd else { return };
            let place = (waiter.session, waiter.log);
            let Some(wait) = ssd.waits.get_mut(&place).filter(|wait| wait.question.op == waiter.op) else {
                continue;
            };
            wait.held.extend(kept.and_then(|key| self.dram.hold(key)));
            wait.open -= 1;
            if wait.open == 0 {
                self.answer_wait(now_ms, place, out);
            }
        }
    }

    /// Answers the queries that have waited long enough with what is there.
    pub(super) fn end_due_waits(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        let Some(ssd) = &mut self.ssd else { return };
        let is_due = |wait: &Wait| now_ms >= wait.since_ms.saturating_add(WAIT_MS_MAX);
        let due: Vec<_> =
            ssd.waits.iter().filter(|(_, wait)| is_due(wait)).map(|(place, _)| *place).collect();
        ssd.stats.waits_timed_out += due.len() as u64;
        due.into_iter().for_each(|place| self.answer_wait(now_ms, place, out));
    }

    /// Answers every query that waits, with what is there: nobody waits for a sidecar that ends.
    pub(in crate::engine) fn answer_waits(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        let Some(ssd) = &self.ssd else { return };
        let places: Vec<_> = ssd.waits.keys().copied().collect();
        places.into_iter().for_each(|place| self.answer_wait(now_ms, place, out));
    }

    fn answer_wait(&mut self, now_ms: u64, place: (SessionId, u32), out: &mut Vec<Action>) {
        let Some(ssd) = &mut self.ssd else { return };
        let wait = ssd.waits.remove(&place).expect("the caller found it");
        ssd.stats.wait_ms += now_ms.saturating_sub(wait.since_ms);
        self.answer_late(now_ms, place.0, wait.question, out);
        // Leased by now, those that are.
        wait.held.into_iter().for_each(|slot| self.dram.unhold(slot));
    }

    /// A log's query is not waited for any more, if there is one.
    pub(in crate::engine) fn end_wait(&mut self, session: SessionId, log: u32) {
        let wait = self.ssd.as_mut().and_then(|ssd| ssd.waits.remove(&(session, log)));
        wait.into_iter().flat_map(|wait| wait.held).for_each(|slot| self.dram.unhold(slot));
    }

    /// No query of a session is.
    pub(in crate::engine) fn end_waits(&mut self, session: SessionId) {
        let Some(ssd) = &self.ssd else { return };
        let logs: Vec<u32> =
            ssd.waits.range((session, 0)..=(session, u32::MAX)).map(|((_, log), _)| *log).collect();
        logs.into_iter().for_each(|log| self.end_wait(session, log));
    }
}
