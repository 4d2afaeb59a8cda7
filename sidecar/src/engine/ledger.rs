//! Which engines are at work: those share the pool, and what crosses the data thread.
//!
//! The tier counts what each of them holds. An engine is at work for a second after a message of its scheduler's or a step of its
//! ranks'.

use tiers::dram::Holdings;

use super::members::Scheduler;
use super::{Action, Core, Event, SessionId};

/// Blocks that one event takes slots for, some 10 ms with what is evicted for them. The others wait for the next turn.
pub(super) const CLAIMS_MAX: usize = 8192;

/// What one engine holds.
#[derive(Debug)]
pub struct Holder<'a> {
    /// As it calls itself.
    pub engine: &'a str,
    pub holdings: Holdings,
}

// === impl Core ===

impl Core {
    /// The same where one event takes slots for no more blocks than this.
    pub fn with_claims(self, claims_max: usize) -> Self {
        Self { claims_max, ..self }
    }

    /// Whoever says something or has done a step is at work, once it is served: a scheduler without ranks takes no share.
    pub(super) fn note_work(&mut self, now_ms: u64, event: &Event) {
        let (Event::Message { session, .. } | Event::Fences { session, .. }) = event else { return };
        let scheduler = self.workers.get(session).map_or(Some(*session), |worker| worker.scheduler);
        let scheduler = scheduler.and_then(|id| self.schedulers.get(&id));
        if let Some(Scheduler { holder, binding: Some(_), .. }) = scheduler {
            self.dram.work(*holder, now_ms);
        }
    }

    /// So many blocks of a session's saves do not wait any more.
    pub(super) fn unwant(&mut self, session: SessionId, blocks: usize) {
        if let Some(scheduler) = self.schedulers.get_mut(&session) {
            scheduler.pending.unwant(blocks);
        }
    }

    /// Saves of a session are to be gone on with in the next turn.
    pub(super) fn fall_behind(&mut self, session: SessionId) {
        if !self.behind.contains(&session) {
            self.behind.push_back(session);
        }
    }

    /// A session with saves that the last turn had no time for, if there is one: [`Event::Behind`] is for it.
    pub fn behind(&self) -> Option<SessionId> {
        self.behind.front().copied()
    }

    /// Goes on with saves of a session that have waited for this turn.
    pub(super) fn catch_up(&mut self, session: SessionId, out: &mut Vec<Action>) {
        self.behind.retain(|other| *other != session);
        self.dispatch(session, out);
    }

    pub fn at_work(&self) -> usize {
        self.dram.at_work() as usize
    }

    /// What every engine holds, those with no rank too.
    pub fn holders(&self) -> impl Iterator<Item = Holder<'_>> {
        self.schedulers.values().map(|scheduler| Holder {
            engine: &scheduler.engine,
            holdings: self.dram.holdings(scheduler.holder),
        })
    }

    /// Panics unless what is said of every engine is what the blocks and leases are. Looks at all of them.
    pub fn audit_ledger(&self) {
        self.dram.audit_ledger();
    }
}
