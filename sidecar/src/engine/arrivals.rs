//! What is on its way into DRAM, from wherever it is kept, and the queries that wait for it.
//!
//! A query's leading run is followed past its end in DRAM as far as each block lies in DRAM, is on its way there, or can be
//! had. A block of an earlier life lies in its slot and is on its way while it is verified. A block that a save is filling ends
//! the run: its step may be long in coming. What is missing is sent for, and the blocks between are held. The answer is what is
//! leased once everything has ended, or the time is over: never more than was asked for, perhaps less. Whoever stops waiting
//! leaves what is on its way to end by itself; its blocks stay in DRAM as any others.
//!
//! A slot given to an arrival is its own until its end, whoever asked for it.

use std::collections::BTreeMap;

use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::pool::SlotRef;
use tiers::dram::Dram;

use super::namespaces::Binding;
use super::peers::Span;
use super::waits::{Parked, Question, WAIT_MS_MAX, Wait, Waiter};
use super::{Action, Core, GROUP, SessionId};

/// What one query, and all that is on its way into the pool together, may take of it: 1 of so many parts. The rest is for
/// blocks in use and for saves.
pub(super) const PART: u64 = 4;
/// Times that the directory is asked how a run goes on, beside what is here of it: peers that were given the same prompts
/// have long parts of it.
const SPANS_MAX: usize = 4;

/// Blocks on their way, and who waits for them.
#[derive(Debug)]
pub(super) struct Arrivals {
    /// Bytes that may be on their way.
    bytes_max: u64,
    bytes: u64,
    /// What has not ended.
    coming: BTreeMap<BlockKey, Coming>,
    /// Queries that wait, and those that were answered early: at most one for each log of a session.
    pub(super) waits: BTreeMap<(SessionId, u32), Wait>,
    /// Loads that wait, by operation.
    pub(super) loads: BTreeMap<(SessionId, u64), Parked>,
    /// Questions that wait for what has not been sent for yet, and their leased hits.
    unsent: Vec<(SessionId, Question, u32)>,
}

/// A block on its way into a slot.
#[derive(Debug)]
struct Coming {
    slot: SlotRef,
    bytes: u64,
    /// Nobody waits for it any more.
    late: bool,
    /// It is not to be kept: what is kept under its key was removed meanwhile.
    distrusted: bool,
    waiting: Vec<Waiter>,
}

/// How far a run was followed.
#[derive(Debug, Default)]
struct Followed {
    /// Blocks in DRAM, held.
    held: Vec<SlotRef>,
    /// Blocks on their way already.
    coming: Vec<BlockKey>,
    /// Blocks of an earlier life to be verified, in DRAM.
    adopted: Vec<BlockKey>,
    /// Blocks to be read from a device.
    on_disk: Vec<BlockKey>,
    /// Blocks to be fetched from peers.
    at_peers: Vec<Span>,
}

// === impl Arrivals ===

impl Arrivals {
    pub(super) fn new(dram: &Dram) -> Self {
        let bytes_max = dram.config().pool_bytes / PART;
        let (coming, waits, loads, unsent) = Default::default();
        Self { bytes_max, bytes: 0, coming, waits, loads, unsent }
    }

    /// Whether a block's end is still to come.
    pub(super) fn any(&self) -> bool {
        !self.coming.is_empty()
    }

    /// The slot of one that may be waited for; `waiter` does from now on.
    pub(super) fn join(&mut self, key: &BlockKey, waiter: Waiter) -> Option<SlotRef> {
        let coming = self.coming.get_mut(key).filter(|coming| !coming.late)?;
        coming.waiting.push(waiter);
        Some(coming.slot)
    }

    /// The same for one that may wait for it already.
    pub(super) fn join_once(&mut self, key: &BlockKey, waiter: Waiter) -> Option<SlotRef> {
        let coming = self.coming.get(key)?;
        if coming.waiting.contains(&waiter) { Some(coming.slot) } else { self.join(key, waiter) }
    }

    /// Bytes that may be on their way.
    pub(super) fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// Whether a query or a load waits for this one.
    pub(super) fn wished(&self, key: &BlockKey) -> bool {
        let waits = |waiter: &Waiter| match waiter.log {
            Some(log) => {
                let wait = self.waits.get(&(waiter.session, log));
                wait.is_some_and(|wait| wait.question.op == waiter.op)
            }
            None => self.loads.contains_key(&(waiter.session, waiter.op)),
        };
        self.coming.get(key).is_some_and(|coming| coming.waiting.iter().any(waits))
    }

    /// A block of `bytes` is on its way into its slot.
    pub(super) fn begin(&mut self, key: BlockKey, slot: SlotRef, bytes: u64) {
        self.bytes += bytes;
        let before = self
            .coming
            .insert(key, Coming { slot, bytes, late: false, distrusted: false, waiting: Vec::new() });
        assert!(before.is_none(), "a slot is filled once at a time");
    }

    /// Blocks that are on their way will not be kept.
    pub(super) fn distrust(&mut self, is_meant: impl Fn(&BlockKey) -> bool) {
        let meant = self.coming.iter_mut().filter(|(key, _)| is_meant(key));
        meant.for_each(|(_, coming)| coming.distrusted = true);
    }

    /// A question was told to wait for what follows its hits.
    pub(super) fn send_for_later(&mut self, session: SessionId, question: Question, hits: u32) {
        self.unsent.push((session, question, hits));
    }

    /// A query waits for `open` blocks.
    pub(super) fn wait(
        &mut self,
        session: SessionId,
        question: Question,
        open: usize,
        whole: bool,
        held: Vec<SlotRef>,
    ) {
        let wait = Wait { question, open, whole, held, answered: None };
        let before = self.waits.insert((session, question.log), wait);
        assert!(before.is_none(), "a new question ends the wait of the one before");
    }

    /// Queries that wait although nothing is on its way to them.
    pub(super) fn idle(&self) -> Vec<(SessionId, Question)> {
        let idle = self.waits.iter().filter(|(_, wait)| wait.open == 0 && wait.answered.is_none());
        idle.map(|((session, _), wait)| (*session, wait.question)).collect()
    }
}

// === impl Core: queries ===

impl Core {
    /// Whether the block may be had in DRAM soon.
    pub(super) fn may_arrive(&self, now_ms: u64, binding: &Binding, hash: &BlockHash) -> bool {
        let key = BlockKey { namespace: binding.namespace, group: GROUP, hash: *hash };
        match self.arrivals.coming.get(&key) {
            Some(coming) => !coming.late,
            None => {
                self.dram.is_adopted(&key)
                    || self.disk_keeps(&key, binding.block_bytes())
                    || self.ask_directory(now_ms, binding, 0, &[*hash]).is_some()
            }
        }
    }

    /// Sends for what questions of this event were told to wait for.
    pub(super) fn send_for_unsent(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        for (session, question, hits) in std::mem::take(&mut self.arrivals.unsent) {
            let Some(binding) = self.binding(session) else { continue };
            let wanted = self.schedulers[&session].logs.known(question.log).wanted(question);
            let rest = wanted[hits as usize..].to_vec();
            if !self.wait_for(now_ms, session, question, &binding, &rest, out)
                && !self.wait_for_producer(now_ms, session, question)
            {
                self.answer_late(now_ms, session, question, out);
            }
        }
    }

    /// Begins to bring `hashes`, which follow a question's leased run, into DRAM; whether the question has to wait.
    fn wait_for(
        &mut self,
        now_ms: u64,
        session: SessionId,
        question: Question,
        binding: &Binding,
        hashes: &[BlockHash],
        out: &mut Vec<Action>,
    ) -> bool {
        let waiter = Waiter { session, log: Some(question.log), op: question.op };
        let mut followed = self.follow(now_ms, binding, hashes, self.arrivals.bytes_max);
        followed.coming.extend(self.begin_verifications(&followed.adopted, out));
        followed.coming.extend(self.begin_reads(binding, &followed.on_disk, out));
        followed.coming.extend(self.begin_fetches(now_ms, binding, &followed.at_peers, out));
        for key in &followed.coming {
            self.arrivals.join(key, waiter).expect("it was found there");
        }
        let open = followed.coming.len();
        if open == 0 {
            self.unhold(session, followed.held);
            return false;
        }
        let whole = followed.held.len() + open == hashes.len();
        self.arrivals.wait(session, question, open, whole, followed.held);
        true
    }

    /// Begins to bring into DRAM what a query will ask for. Leaves half of what may be on its way to those who ask.
    pub(super) fn prefetch(
        &mut self,
        now_ms: u64,
        session: SessionId,
        binding: &Binding,
        hashes: &[BlockHash],
        out: &mut Vec<Action>,
    ) {
        let followed = self.follow(now_ms, binding, hashes, self.arrivals.bytes_max / 2);
        self.begin_verifications(&followed.adopted, out);
        self.begin_reads(binding, &followed.on_disk, out);
        self.begin_fetches(now_ms, binding, &followed.at_peers, out);
        self.unhold(session, followed.held);
    }

    /// Follows a run, as long as no more than `most` bytes are on their way, and of engines at work each has its part of those; a
    /// block alone always may be.
    fn follow(&mut self, now_ms: u64, binding: &Binding, hashes: &[BlockHash], most: u64) -> Followed {
        let mut followed = Followed::default();
        let (block_bytes, holder) = (binding.block_bytes(), binding.whose.holder);
        let mut room = (most.max(block_bytes).saturating_sub(self.arrivals.bytes) / block_bytes) as usize;
        if let others @ 2.. = self.dram.at_work() {
            let filling = self.dram.holdings(holder).filling;
            room =
                room.min(((most / others).max(block_bytes).saturating_sub(filling) / block_bytes) as usize);
        }
        let held_max = (self.dram.room(holder) / block_bytes) as usize;
        for (at, hash) in hashes.iter().enumerate() {
            let key = BlockKey { namespace: binding.namespace, group: GROUP, hash: *hash };
            if followed.held.len() == held_max {
                break;
            }
            if let Some(slot) = self.dram.hold(&key, holder) {
                followed.held.push(slot);
                continue;
            }
            if let Some(coming) = self.arrivals.coming.get(&key) {
                if coming.late {
                    break;
                }
                followed.coming.push(key);
                continue;
            }
            if self.dram.is_adopted(&key) {
                followed.adopted.push(key);
                continue;
            }
            if room == 0 {
                break;
            }
            if self.disk_keeps(&key, block_bytes) {
                followed.on_disk.push(key);
            } else {
                let ahead = &hashes[at..hashes.len().min(at + room)];
                let Some(span) = self.span(now_ms, binding, &mut followed.at_peers, at, ahead) else { break };
                span.push(at, key);
            }
            room -= 1;
        }
        followed
    }

    /// The span that reaches `at`: the last one, or a new one that the directory has for what is `ahead` from there.
    fn span<'a>(
        &self,
        now_ms: u64,
        binding: &Binding,
        spans: &'a mut Vec<Span>,
        at: usize,
        ahead: &[BlockHash],
    ) -> Option<&'a mut Span> {
        if spans.last().is_none_or(|span| span.end() <= at) {
            let more = spans.len() < SPANS_MAX;
            spans.push(more.then(|| self.ask_directory(now_ms, binding, at, ahead)).flatten()?);
        }
        spans.last_mut()
    }
}

// === impl Core: ends ===

impl Core {
    /// A block has ended: with its checksum (zero: nobody knows it) it is whole, without it is not to be had.
    pub(super) fn arrived(
        &mut self,
        now_ms: u64,
        key: &BlockKey,
        slot: SlotRef,
        checksum: Option<u64>,
        out: &mut Vec<Action>,
    ) {
        let coming = self.arrivals.coming.remove(key).expect("a block ends once");
        self.arrivals.bytes -= coming.bytes;
        match checksum.filter(|_| !coming.distrusted && self.dram.commit(slot)) {
            Some(checksum) => out.push(Action::CommitSlot { slot, checksum }),
            None => {
                self.dram.abandon(slot);
                out.push(Action::FreeSlot { slot });
            }
        }
        self.tell(now_ms, &coming.waiting, Some(key), out);
    }

    /// A block of an earlier life was verified; it is kept if it is what was written.
    pub(super) fn verified(
        &mut self,
        now_ms: u64,
        key: &BlockKey,
        slot: SlotRef,
        whole: bool,
        out: &mut Vec<Action>,
    ) {
        let coming = self.arrivals.coming.remove(key).expect("a block is verified once");
        self.end_verification(slot, whole, !coming.distrusted, out);
        self.tell(now_ms, &coming.waiting, Some(key), out);
    }

    /// A block is late: whoever waits is answered without it. The slot stays its own until its end.
    pub(super) fn give_up(&mut self, now_ms: u64, key: &BlockKey, out: &mut Vec<Action>) {
        let Some(coming) = self.arrivals.coming.get_mut(key) else { return };
        coming.late = true;
        let waiting = std::mem::take(&mut coming.waiting);
        self.tell(now_ms, &waiting, None, out);
    }

    fn tell(&mut self, now_ms: u64, waiting: &[Waiter], ended: Option<&BlockKey>, out: &mut Vec<Action>) {
        for waiter in waiting {
            match waiter.log {
                Some(log) => self.tell_query(now_ms, (waiter.session, log), waiter.op, ended, out),
                None => self.tell_load(now_ms, (waiter.session, waiter.op), ended, out),
            }
        }
    }

    fn tell_query(
        &mut self,
        now_ms: u64,
        place: (SessionId, u32),
        op: u64,
        ended: Option<&BlockKey>,
        out: &mut Vec<Action>,
    ) {
        let wait = self.arrivals.waits.get_mut(&place);
        let Some(wait) = wait.filter(|wait| wait.question.op == op) else { return };
        let holder = self.schedulers[&place.0].holder;
        let here = ended.and_then(|key| self.dram.hold(key, holder));
        wait.held.extend(here);
        if wait.answered.is_some() {
            return;
        }
        wait.open -= 1;
        if wait.open == 0 {
            self.all_ended(now_ms, place, out);
        } else if here.is_some() {
            self.answer_early(now_ms, place, out);
        }
    }

    /// Answers the queries that have waited long enough with what is there, and lets go of early answers that nobody used.
    pub(super) fn end_due_waits(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        let is_due = |wait: &Wait| {
            let until_ms = wait.question.asked_ms.saturating_add(WAIT_MS_MAX);
            now_ms >= wait.answered.as_ref().map_or(until_ms, |answered| answered.until_ms)
        };
        let due = self.arrivals.waits.iter().filter(|(_, wait)| is_due(wait));
        let due: Vec<_> = due.map(|(place, wait)| (*place, wait.answered.is_some())).collect();
        for (place, answered) in due {
            if answered {
                self.end_wait(place.0, place.1);
            } else {
                self.stats.waits_timed_out += 1;
                self.answer_wait(now_ms, place, out);
            }
        }
    }

    /// Answers every query that waits, with what is there: nobody waits for a sidecar that ends.
    pub(super) fn answer_waits(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        let waiting = self.arrivals.waits.iter().filter(|(_, wait)| wait.answered.is_none());
        let places: Vec<_> = waiting.map(|(place, _)| *place).collect();
        places.into_iter().for_each(|place| self.answer_wait(now_ms, place, out));
    }

    /// Puts a waiting query's question again.
    pub(super) fn ask_again(&mut self, now_ms: u64, place: (SessionId, u32), out: &mut Vec<Action>) {
        let wait = self.arrivals.waits.remove(&place).expect("the caller found it");
        if !self.ask(now_ms, place.0, wait.question, out) {
            self.stats.wait_ms += now_ms.saturating_sub(wait.question.asked_ms);
        }
        // Leased by now, those that are.
        self.unhold(place.0, wait.held);
    }

    pub(super) fn answer_wait(&mut self, now_ms: u64, place: (SessionId, u32), out: &mut Vec<Action>) {
        let wait = self.arrivals.waits.remove(&place).expect("the caller found it");
        self.stats.wait_ms += now_ms.saturating_sub(wait.question.asked_ms);
        self.answer_late(now_ms, place.0, wait.question, out);
        // Leased by now, those that are.
        self.unhold(place.0, wait.held);
    }

    /// Ends holds of a session.
    pub(super) fn unhold(&mut self, session: SessionId, held: Vec<SlotRef>) {
        let holder = self.schedulers[&session].holder;
        held.into_iter().for_each(|slot| self.dram.unhold(slot, holder));
    }

    /// A log's query is not waited for any more, if there is one.
    pub(super) fn end_wait(&mut self, session: SessionId, log: u32) {
        let wait = self.arrivals.waits.remove(&(session, log));
        wait.into_iter().for_each(|wait| self.unhold(session, wait.held));
    }

    /// No query of a session is.
    pub(super) fn end_waits(&mut self, session: SessionId) {
        let of_session = self.arrivals.waits.range((session, 0)..=(session, u32::MAX));
        let logs: Vec<u32> = of_session.map(|((_, log), _)| *log).collect();
        logs.into_iter().for_each(|log| self.end_wait(session, log));
    }
}
