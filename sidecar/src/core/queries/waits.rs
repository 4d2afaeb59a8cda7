//! Queries waiting for blocks on their way.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use shm_protocol::key::BlockKey;
use shm_protocol::pool::SlotRef;

use super::{Base, Binding, Context, Queries, Question, SessionId};
use crate::core::arrivals::{Owed, SourceLane, WAIT_MS_MAX, Waiter};
use crate::core::timing::{Timed, TimedPart};
use crate::core::worth::{Outlook, Over};
use crate::system::clock::count_millis;

/// A query without its last answer, or with blocks of an early answer.
#[derive(Debug)]
pub(super) struct Wait {
    pub(super) question: Question,
    pub(super) since: Duration,
    /// Held blocks of the query: they must not be evicted before they are leased or loaded.
    pub(super) held: Vec<SlotRef>,
    pub(super) phase: WaitPhase,
}

/// A phase of a wait, with the facts of this phase alone.
///
/// A wait begins in `ForProducer` or in `ForBlocks`, and ends there with an answer or with the same question again. An early answer
/// takes it from `ForBlocks` to `Answered`, and no answer follows.
#[derive(Debug)]
pub(super) enum WaitPhase {
    /// Nothing is on its way. The wait ends with its window; a promise may extend the window.
    ForProducer,
    ForBlocks {
        /// Number of blocks on their way; 0: their sources work for others, and the question is asked again.
        open: usize,
        /// True if the run reaches the end of the question.
        whole: bool,
        rest: Rest,
    },
    /// The query's hits were named early. Blocks already here are held until then.
    Answered { run: AnsweredRun, until_ms: u64 },
}

/// The run of an early answer.
#[derive(Debug)]
pub(super) enum AnsweredRun {
    /// All of it was here or on its way, in these slots.
    Named(Vec<SlotRef>),
    /// So many blocks, more than the pool holds: each is fetched for its load.
    Streamed(u32),
}

/// The rest of a run, for the rule of its wait.
#[derive(Debug, Default)]
pub(super) struct Rest {
    /// The bytes due from its sources.
    pub(super) owed: BTreeMap<SourceLane, Owed>,
    /// Number of blocks to be requested later: more are not brought at once.
    pub(super) beyond: u32,
    /// Number of blocks of the scheduler's stream to be requested before.
    ahead: u32,
    /// The end of the run among the keys of the log.
    pub(super) end: u32,
    /// True once a block has come.
    came: bool,
}

/// The result of sending for a question's blocks.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Sent {
    Waits,
    /// Nothing is on its way.
    Nothing,
    /// A wait is not worth it: the engine computes the rest sooner, or the time is over.
    Slower,
}

/// Milliseconds until the last block of an early answer, at most: half of a load's wait for it.
const EARLY_MS_MAX: f64 = WAIT_MS_MAX as f64 / 2.0;

// === impl Wait ===

impl Wait {
    /// Returns the latest end of the wait; `None`: it ends with its window, or as its blocks come.
    fn until_ms(&self) -> Option<u64> {
        match self.phase {
            WaitPhase::Answered { until_ms, .. } => Some(until_ms),
            WaitPhase::ForProducer if self.question.awaits => None,
            WaitPhase::ForProducer => Some(self.question.asked_ms().saturating_add(WAIT_MS_MAX)),
            // Promised blocks may begin to come late.
            WaitPhase::ForBlocks { .. } if self.question.awaits => {
                Some(count_millis(self.since).saturating_add(WAIT_MS_MAX))
            }
            WaitPhase::ForBlocks { .. } => None,
        }
    }

    /// Returns the outlook for its blocks; `None`: it waits for something else.
    fn outlook(&self, base: &Base) -> Option<Outlook> {
        let WaitPhase::ForBlocks { open, rest, .. } = &self.phase else { return None };
        let Question { session, from, first, .. } = self.question;
        let binding = base.engines[session].binding()?;
        let left = rest.beyond + *open as u32;
        // A block of use alone stands for all before it.
        let begin = if binding.parentless { 0 } else { first.unwrap_or(rest.end.saturating_sub(left)) };
        let still_ms = if rest.owed.is_empty() { count_millis(self.since) } else { 0 };
        Some(self.question.outlook(
            &rest.owed,
            rest.beyond + rest.ahead,
            begin..rest.end.max(from),
            still_ms,
            base,
        ))
    }

    /// Returns the reason to end a wait for blocks, if there is one. Promised blocks have another rule.
    fn over(&self, base: &Base) -> Option<Over> {
        let outlook = self.outlook(base).filter(|_| !self.question.awaits)?;
        outlook.over(base.engines[self.question.session].load_wait)
    }

    pub(super) fn timed(&self) -> Timed {
        let is_idle = matches!(self.phase, WaitPhase::ForProducer);
        Timed::Query(if is_idle { TimedPart::Waiting } else { TimedPart::Tier })
    }

    pub(super) fn is_answered(&self) -> bool {
        matches!(self.phase, WaitPhase::Answered { .. })
    }
}

// === impl Question ===

impl Question {
    pub(super) fn asked_ms(&self) -> u64 {
        count_millis(self.asked)
    }

    /// Returns the outlook for the blocks due from their sources, and for `beyond` further ones: in their
    /// place the engine would compute `keys`. `moved_ms`: the last progress, if none of the sources is later.
    pub(super) fn outlook(
        self,
        owed: &BTreeMap<SourceLane, Owed>,
        beyond: u32,
        keys: Range<u32>,
        moved_ms: u64,
        base: &Base,
    ) -> Outlook {
        let now_ms = base.cx.now_ms;
        let ahead = base.cx.arrivals.flows.ahead(owed, self.asked_ms(), now_ms);
        let block_bytes = base.engines[self.session].binding().map_or(0, |binding| binding.block_bytes());
        let bytes = f64::from(beyond) * block_bytes as f64;
        let behind_ms = if beyond == 0 { Some(0.0) } else { (ahead.rate > 0.0).then(|| bytes / ahead.rate) };
        Outlook {
            waited_ms: now_ms.saturating_sub(self.asked_ms()),
            still_ms: now_ms.saturating_sub(moved_ms.max(ahead.moved_ms)),
            load_ms: ahead.ms.zip(behind_ms).map(|(ahead_ms, behind_ms)| ahead_ms + behind_ms),
            compute_ms: base.engines.compute_ms(self.session, keys),
        }
    }

    /// Counts the time since the question as time of a wait.
    pub(super) fn count_wait(&self, cx: &mut Context) {
        cx.stats.wait_ms += cx.now_ms.saturating_sub(self.asked_ms());
    }

    pub(super) fn waiter(&self) -> Waiter {
        Waiter::Query { session: self.session, log: self.log, op: self.op }
    }
}

// === impl Queries ===

impl Queries {
    /// True if this query waits.
    pub(crate) fn waits(&self, session: SessionId, log: u32, op: u64) -> bool {
        self.waits.get(&(session, log)).is_some_and(|wait| wait.question.op == op)
    }

    /// Lets a query wait from now on.
    pub(super) fn begin_wait(&mut self, wait: Wait) {
        let before = self.waits.insert((wait.question.session, wait.question.log), wait);
        assert!(before.is_none(), "a new question ends the wait of the one before");
    }

    /// Begins to bring the blocks behind a question's leased `hits` into DRAM. Returns whether the question
    /// waits for them.
    pub(super) fn send_for(
        &mut self,
        question: Question,
        hits: u32,
        binding: &Binding,
        base: &mut Base,
    ) -> Sent {
        let rest = &self.wanted_keys(question)[hits as usize..];
        let asked = rest.len();
        if let Some(stream) = self.ahead_in_stream(question, rest, binding, base) {
            return self.wait_for_turn(question, (hits, stream), binding, base);
        }
        // A run brought in parts leaves half of the room to others.
        let judged = self.is_judged(question, base);
        let parts = if judged { 2 } else { 1 };
        let brought = base.sources.bring(binding, rest, parts, question.awaits, &mut base.cx);
        for key in &brought.coming {
            base.cx.arrivals.join_waiter(key, question.waiter()).expect("it was found there");
        }
        self.note_sources((question.session, question.log), &brought.coming, &base.cx);
        let open = brought.coming.len();
        if open == 0 {
            self.unhold(question.session, brought.held, &mut base.cx);
            if !judged {
                return Sent::Nothing;
            }
            let sent = self.wait_for_turn(question, (hits, 0), binding, base);
            // Its own blocks fill the pool: no further one can come first.
            let is_full = base.cx.dram.holdable(binding.whose.holder, binding.block_bytes()) == 0;
            if sent == Sent::Waits && hits > 0 && is_full {
                self.answer_streamed((question.session, question.log), base);
            }
            return sent;
        }
        let reached = brought.held.len() + open;
        let whole = reached == asked;
        let owed = base.cx.arrivals.owed(&brought.coming, base.cx.now_ms);
        let rest = self.rest_of_run(question, (hits + reached as u32, owed), binding, base);
        let sent = self.wait_if_worth(question, (brought.held, open, whole), rest, base);
        if sent == Sent::Waits && question.awaits && whole {
            self.answer_early((question.session, question.log), base);
        }
        sent
    }

    /// True if the rate of a question's engine is known. Promised blocks are not judged by it.
    pub(super) fn is_judged(&self, question: Question, base: &Base) -> bool {
        !question.awaits && base.engines.compute_ms(question.session, 0..1).is_some()
    }

    /// Waits for a source at work for others, or for a stream with `ahead` blocks: the question is asked again
    /// with each tick.
    fn wait_for_turn(
        &mut self,
        question: Question,
        (hits, ahead): (u32, u32),
        binding: &Binding,
        base: &mut Base,
    ) -> Sent {
        let behind = &self.wanted_keys(question)[hits as usize..];
        let Some(lane) = base.sources.lane(binding, behind, &base.cx) else { return Sent::Nothing };
        let owed = BTreeMap::from([(lane, base.cx.arrivals.flows.owed_by(lane, question.asked_ms()))]);
        let mut rest = self.rest_of_run(question, (hits, owed), binding, base);
        rest.ahead = ahead;
        self.wait_if_worth(question, (Vec::new(), 0, false), rest, base)
    }

    /// Lets a question wait with its held blocks, the number of blocks on their way, and true if these
    /// complete its run.
    fn wait_if_worth(
        &mut self,
        question: Question,
        (held, open, whole): (Vec<SlotRef>, usize, bool),
        rest: Rest,
        base: &mut Base,
    ) -> Sent {
        let (since, phase) = (base.cx.now, WaitPhase::ForBlocks { open, whole, rest });
        let wait = Wait { question, since, held, phase };
        if let Some(over) = wait.over(base) {
            base.cx.stats.count_over(over);
            self.unhold(question.session, wait.held, &mut base.cx);
            return Sent::Slower;
        }
        self.begin_wait(wait);
        Sent::Waits
    }

    /// Returns the rest of a question's run behind its first `reached` blocks, which are here or on their
    /// way.
    fn rest_of_run(
        &self,
        question: Question,
        (reached, owed): (u32, BTreeMap<SourceLane, Owed>),
        binding: &Binding,
        base: &Base,
    ) -> Rest {
        let behind = &self.wanted_keys(question)[reached as usize..];
        let judged = self.is_judged(question, base);
        let beyond = if judged { base.sources.reach(binding, behind, &base.cx) as u32 } else { 0 };
        Rest { owed, beyond, ahead: 0, end: question.from + reached + beyond, came: false }
    }

    /// True if a wait goes on after the end of its requested blocks.
    pub(super) fn goes_on(&self, place: (SessionId, u32)) -> bool {
        let phase = self.waits.get(&place).map(|wait| &wait.phase);
        matches!(phase, Some(WaitPhase::ForBlocks { rest: Rest { beyond: 1.., came: true, .. }, .. }))
    }

    /// True if the whole rest is on its way and comes within a load's wait for it. Always true for engines of
    /// unknown rate, and for promised blocks.
    pub(super) fn ends_soon(&self, wait: &Wait, base: &Base) -> bool {
        let WaitPhase::ForBlocks { rest, .. } = &wait.phase else { return false };
        let outlook = wait.outlook(base).filter(|it| it.compute_ms.is_some() && !wait.question.awaits);
        outlook.is_none_or(|it| rest.beyond == 0 && it.load_ms.is_some_and(|ms| ms <= EARLY_MS_MAX))
    }

    /// Handles the end of a block awaited by a query. `None`: the block is late or not kept.
    pub(crate) fn end_block(
        &mut self,
        place: (SessionId, u32),
        op: u64,
        ended: Option<&BlockKey>,
        base: &mut Base,
    ) {
        let wait = self.waits.get_mut(&place);
        let Some(wait) = wait.filter(|wait| wait.question.op == op) else { return };
        let here = ended.and_then(|key| base.cx.dram.hold(key, base.engines[place.0].holder));
        wait.held.extend(here);
        let WaitPhase::ForBlocks { open, rest, .. } = &mut wait.phase else { return };
        *open -= 1;
        rest.came |= here.is_some();
        let is_last = *open == 0;
        if here.is_some() && self.answer_streamed(place, base) {
            return;
        }
        if is_last {
            self.all_ended(place, base);
        } else if here.is_some() {
            self.answer_early(place, base);
        }
    }

    /// Answers the queries that have waited long enough with the blocks here, and ends unused early answers.
    pub(crate) fn end_due_waits(&mut self, base: &mut Base) {
        let over = |wait: &Wait| match wait.until_ms() {
            Some(until_ms) => (base.cx.now_ms >= until_ms).then_some(Over::Late),
            None => wait.over(base),
        };
        let due =
            self.waits.iter().filter_map(|(place, wait)| Some((*place, wait.is_answered(), over(wait)?)));
        for (place, answered, over) in due.collect::<Vec<_>>() {
            if answered {
                self.end_wait(place.0, place.1, &mut base.cx);
                continue;
            }
            base.cx.stats.count_over(over);
            self.answer_wait(place, base);
        }
        self.renew_leases(&mut base.cx);
        let has_turn = |wait: &&Wait| matches!(wait.phase, WaitPhase::ForBlocks { open: 0, .. });
        let turns: Vec<_> =
            self.waits.iter().filter(|(_, wait)| has_turn(wait)).map(|(place, _)| *place).collect();
        turns.into_iter().for_each(|place| self.ask_again(place, base));
    }

    /// Renews the leases of queries waiting for blocks: the found blocks stay while the rest comes.
    fn renew_leases(&self, cx: &mut Context) {
        let comes = |wait: &Wait| matches!(wait.phase, WaitPhase::ForBlocks { .. }) && !wait.question.awaits;
        for ((session, number), _) in self.waits.iter().filter(|(_, wait)| comes(wait)) {
            if let Some(lease) = self.log(*session, *number).lease {
                // An expired lease is granted again with the answer.
                let _ = cx.dram.renew(lease.id, *session, cx.now_ms);
            }
        }
    }

    /// Answers every waiting query with the blocks here: no engine waits for a sidecar about to end.
    pub(crate) fn answer_waits(&mut self, base: &mut Base) {
        let waiting = self.waits.iter().filter(|(_, wait)| !wait.is_answered());
        let places: Vec<_> = waiting.map(|(place, _)| *place).collect();
        places.into_iter().for_each(|place| self.answer_wait(place, base));
    }

    /// Ends a wait. Returns its question, and its held blocks.
    fn take_wait(&mut self, place: (SessionId, u32), cx: &mut Context) -> (Question, Vec<SlotRef>) {
        let wait = self.waits.remove(&place).expect("the caller found it");
        cx.took(wait.timed(), wait.since);
        (wait.question, wait.held)
    }

    /// Asks a waiting query's question again.
    pub(super) fn ask_again(&mut self, place: (SessionId, u32), base: &mut Base) {
        let (question, held) = self.take_wait(place, &mut base.cx);
        if !self.ask_question(question, base) {
            question.count_wait(&mut base.cx);
        }
        // The blocks of an answer are leased by now.
        self.unhold(place.0, held, &mut base.cx);
    }

    pub(super) fn answer_wait(&mut self, place: (SessionId, u32), base: &mut Base) {
        let (question, held) = self.take_wait(place, &mut base.cx);
        question.count_wait(&mut base.cx);
        self.answer_late(question, base);
        // The blocks of the answer are leased by now.
        self.unhold(place.0, held, &mut base.cx);
    }

    /// Ends holds of a session.
    pub(super) fn unhold(&self, session: SessionId, held: Vec<SlotRef>, cx: &mut Context) {
        let holder = self.askers[&session].holder;
        held.into_iter().for_each(|slot| cx.dram.unhold(slot, holder));
    }

    /// Ends the wait of a log's query, if there is one.
    pub(super) fn end_wait(&mut self, session: SessionId, log: u32, cx: &mut Context) {
        let wait = self.waits.remove(&(session, log));
        wait.into_iter().for_each(|wait| self.unhold(session, wait.held, cx));
        self.end_unused_stream(session, log);
    }

    /// Ends the waits of all queries of a session.
    pub(super) fn end_waits(&mut self, session: SessionId, cx: &mut Context) {
        let of_session = self.waits.range((session, 0)..=(session, u32::MAX));
        let logs: Vec<u32> = of_session.map(|((_, log), _)| *log).collect();
        logs.into_iter().for_each(|log| self.end_wait(session, log, cx));
    }
}
