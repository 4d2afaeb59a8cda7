//! Queries that wait for blocks that are on their way.

use std::time::Duration;

use shm_protocol::key::BlockKey;
use shm_protocol::pool::SlotRef;

use super::{Base, Binding, Context, Queries, Question, SessionId};
use crate::core::arrivals::{WAIT_MS_MAX, Waiter};
use crate::core::timing::{Part, Timed};
use crate::system::clock::millis;

/// A query without its last answer, or with blocks of an early answer.
#[derive(Debug)]
pub(super) struct Wait {
    pub(super) question: Question,
    pub(super) since: Duration,
    /// Blocks of the query that must not be evicted before they are leased or loaded.
    pub(super) held: Vec<SlotRef>,
    pub(super) phase: WaitPhase,
}

/// A phase of a wait, with the facts of this phase alone.
///
/// A wait begins in `ForProducer` or in `ForBlocks`, and ends there with an answer or with the same question again. An early answer
/// takes it from `ForBlocks` to `Answered`, and no answer follows.
#[derive(Debug)]
pub(super) enum WaitPhase {
    /// Nothing is on its way. The wait ends with its window, and a promise may extend this one.
    ForProducer,
    ForBlocks {
        /// Blocks on their way, one at least.
        open: usize,
        /// The run reaches to the end of what was asked for.
        whole: bool,
    },
    /// The query was told the slots of its hits early. Those here are held until then.
    Answered { slots: Vec<SlotRef>, until_ms: u64 },
}

// === impl Wait ===

impl Wait {
    /// When it ends at the latest; none: with its window, which a promise may extend.
    fn until_ms(&self) -> Option<u64> {
        // What is promised may begin to come late.
        let since_ms = if self.question.awaits { millis(self.since) } else { self.question.asked_ms() };
        match self.phase {
            WaitPhase::Answered { until_ms, .. } => Some(until_ms),
            WaitPhase::ForProducer if self.question.awaits => None,
            _ => Some(since_ms.saturating_add(WAIT_MS_MAX)),
        }
    }

    pub(super) fn timed(&self) -> Timed {
        let is_idle = matches!(self.phase, WaitPhase::ForProducer);
        Timed::Query(if is_idle { Part::Waiting } else { Part::Tier })
    }

    pub(super) fn is_answered(&self) -> bool {
        matches!(self.phase, WaitPhase::Answered { .. })
    }
}

// === impl Question ===

impl Question {
    pub(super) fn asked_ms(&self) -> u64 {
        millis(self.asked)
    }

    /// Counts the time from when it was asked until now as one of waiting.
    pub(super) fn count_wait(&self, cx: &mut Context) {
        cx.stats.wait_ms += cx.now_ms.saturating_sub(self.asked_ms());
    }

    pub(super) fn waiter(&self) -> Waiter {
        Waiter::Query { session: self.session, log: self.log, op: self.op }
    }
}

// === impl Queries ===

impl Queries {
    /// Whether this query waits.
    pub(crate) fn waits(&self, session: SessionId, log: u32, op: u64) -> bool {
        self.waits.get(&(session, log)).is_some_and(|wait| wait.question.op == op)
    }

    /// A query waits from now on.
    pub(super) fn wait(&mut self, wait: Wait) {
        let before = self.waits.insert((wait.question.session, wait.question.log), wait);
        assert!(before.is_none(), "a new question ends the wait of the one before");
    }

    /// Begins to bring what follows a question's leased `hits` into DRAM; whether the question has to wait.
    pub(super) fn send_for(
        &mut self,
        question: Question,
        hits: u32,
        binding: &Binding,
        base: &mut Base,
    ) -> bool {
        let rest = &self.wanted(question)[hits as usize..];
        let asked = rest.len();
        let brought = base.sources.bring(binding, rest, 1, question.awaits, &mut base.cx);
        for key in &brought.coming {
            base.cx.arrivals.join(key, question.waiter()).expect("it was found there");
        }
        self.note_sources((question.session, question.log), &brought.coming, &base.cx);
        let open = brought.coming.len();
        if open == 0 {
            self.unhold(question.session, brought.held, &mut base.cx);
            return false;
        }
        let whole = brought.held.len() + open == asked;
        let (since, phase) = (base.cx.now, WaitPhase::ForBlocks { open, whole });
        self.wait(Wait { question, since, held: brought.held, phase });
        if question.awaits && whole {
            self.answer_early((question.session, question.log), base);
        }
        true
    }

    /// A block that a query waits for has ended, well if it is `ended`.
    pub(crate) fn tell(
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
        let WaitPhase::ForBlocks { open, .. } = &mut wait.phase else { return };
        *open -= 1;
        if *open == 0 {
            self.all_ended(place, base);
        } else if here.is_some() {
            self.answer_early(place, base);
        }
    }

    /// Answers the queries that have waited long enough with what is there, and lets go of early answers that nobody used.
    pub(crate) fn end_due_waits(&mut self, base: &mut Base) {
        let is_due = |wait: &Wait| wait.until_ms().is_some_and(|until_ms| base.cx.now_ms >= until_ms);
        let due = self.waits.iter().filter(|(_, wait)| is_due(wait));
        let due: Vec<_> = due.map(|(place, wait)| (*place, wait.is_answered())).collect();
        for (place, answered) in due {
            if answered {
                self.end_wait(place.0, place.1, &mut base.cx);
            } else {
                base.cx.stats.waits_timed_out += 1;
                self.answer_wait(place, base);
            }
        }
    }

    /// Answers every query that waits, with what is there: nobody waits for a sidecar that ends.
    pub(crate) fn answer_waits(&mut self, base: &mut Base) {
        let waiting = self.waits.iter().filter(|(_, wait)| !wait.is_answered());
        let places: Vec<_> = waiting.map(|(place, _)| *place).collect();
        places.into_iter().for_each(|place| self.answer_wait(place, base));
    }

    /// Ends a wait; its question, and what is held for it.
    fn take_wait(&mut self, place: (SessionId, u32), cx: &mut Context) -> (Question, Vec<SlotRef>) {
        let wait = self.waits.remove(&place).expect("the caller found it");
        cx.took(wait.timed(), wait.since);
        (wait.question, wait.held)
    }

    /// Puts a waiting query's question again.
    pub(super) fn ask_again(&mut self, place: (SessionId, u32), base: &mut Base) {
        let (question, held) = self.take_wait(place, &mut base.cx);
        if !self.ask(question, base) {
            question.count_wait(&mut base.cx);
        }
        // Leased by now, those that are.
        self.unhold(place.0, held, &mut base.cx);
    }

    pub(super) fn answer_wait(&mut self, place: (SessionId, u32), base: &mut Base) {
        let (question, held) = self.take_wait(place, &mut base.cx);
        question.count_wait(&mut base.cx);
        self.answer_late(question, base);
        // Leased by now, those that are.
        self.unhold(place.0, held, &mut base.cx);
    }

    /// Ends holds of a session.
    pub(super) fn unhold(&self, session: SessionId, held: Vec<SlotRef>, cx: &mut Context) {
        let holder = self.askers[&session].holder;
        held.into_iter().for_each(|slot| cx.dram.unhold(slot, holder));
    }

    /// A log's query is not waited for any more, if there is one.
    pub(super) fn end_wait(&mut self, session: SessionId, log: u32, cx: &mut Context) {
        let wait = self.waits.remove(&(session, log));
        wait.into_iter().for_each(|wait| self.unhold(session, wait.held, cx));
    }

    /// No query of a session is.
    pub(super) fn end_waits(&mut self, session: SessionId, cx: &mut Context) {
        let of_session = self.waits.range((session, 0)..=(session, u32::MAX));
        let logs: Vec<u32> = of_session.map(|((_, log), _)| *log).collect();
        logs.into_iter().for_each(|log| self.end_wait(session, log, cx));
    }
}
