//! Transfers between engines and the pool: the saves and loads of each engine, their copies, and the
//! comparisons of saved blocks with kept ones.

mod checks;
mod doubts;
mod loads;
mod pending;
mod saves;
mod scans;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use self::checks::Checks;
use self::doubts::Doubts;
use self::loads::RunningLoad;
use self::pending::Pending;
use self::saves::{Save, UnboundSave};
use self::scans::Scans;
use super::context::Context;
use super::event::{Action, CopyDirection, RankBlock};
use super::namespaces::Binding;
use super::queries::Queries;
use super::timing::{Timed, TimedPart};
use super::{Base, CopyId, SessionId, Violation};
use crate::compare::Number;

/// The key of a save or a load: its scheduler's session and its operation.
type OpKey = (SessionId, u64);

#[derive(Debug, Default)]
pub(super) struct Transfers {
    pending: BTreeMap<SessionId, Pending>,
    /// Saves of schedulers without a binding.
    unbound: BTreeMap<OpKey, UnboundSave>,
    saves: BTreeMap<OpKey, Save>,
    checks: Checks,
    doubts: Doubts,
    scans: Scans,
    loads: BTreeMap<OpKey, RunningLoad>,
    /// Schedulers with a streamed load that was posted, moved or ended in this event.
    moved_streams: BTreeSet<SessionId>,
    /// Running copies, each with its begin.
    copies: BTreeMap<CopyId, (CopyOwner, Duration)>,
    /// The number of the last copy.
    last_copy: CopyId,
    /// Schedulers' sessions with saves left over by the turn, the longest waiting first.
    behind: VecDeque<SessionId>,
}

/// The operation of a running copy.
#[derive(Copy, Clone, Debug)]
struct CopyOwner {
    key: OpKey,
    rank: u32,
    direction: CopyDirection,
}

// === impl CopyOwner ===

impl CopyOwner {
    fn timed(&self) -> Timed {
        match self.direction {
            CopyDirection::Save => Timed::Save(TimedPart::Copy),
            CopyDirection::Load => Timed::Load(TimedPart::Copy),
        }
    }
}

// === impl Transfers ===

impl Transfers {
    /// Adds a scheduler: it may transfer from now on.
    pub(super) fn enter_scheduler(&mut self, session: SessionId) {
        self.pending.insert(session, Pending::default());
    }

    /// Removes a gone scheduler: its operations end as soon as no copy runs.
    pub(super) fn leave_scheduler(&mut self, session: SessionId, base: &mut Base) {
        self.abandon_saves(session, base);
        self.abandon_loads(session, &mut base.cx);
        self.pending.remove(&session);
        self.checks.forget_session(session);
        self.doubts.end_session(session, base.engines[session].run);
    }

    /// Notes an operation read from a scheduler's ring.
    pub(super) fn see(&mut self, session: SessionId, op: u64) {
        self.pending(session).see(op);
    }

    fn pending(&mut self, session: SessionId) -> &mut Pending {
        self.pending.get_mut(&session).expect("its operations end with it")
    }

    pub(super) fn busy(&self) -> bool {
        !self.copies.is_empty()
            || !self.checks.running.is_empty()
            || self.scans.any()
            || self.pending.values().any(Pending::any_awaits_drain)
    }

    #[cfg(test)]
    pub(super) fn forget_sources(&mut self) {
        self.doubts.forget_savers();
    }

    #[cfg(test)]
    pub(super) fn any_load(&self) -> bool {
        !self.loads.is_empty()
    }

    pub(super) fn waits_on_fences(&self, scheduler: SessionId) -> bool {
        self.pending.get(&scheduler).is_some_and(|pending| !pending.waiting.is_empty())
    }

    /// True if one of those operations is a save for another engine.
    pub(super) fn hands_over(&self, scheduler: SessionId) -> bool {
        let is_handover =
            |op: &u64| self.saves.get(&(scheduler, *op)).is_some_and(|save| save.handover.is_some());
        self.pending.get(&scheduler).is_some_and(|pending| pending.waiting.iter().any(is_handover))
    }

    /// Returns the first words of the keys of a scheduler's unended saves, sorted: a set of 65,536 whole keys takes 7 ms.
    pub(super) fn saved_words(&self, scheduler: SessionId) -> Vec<u64> {
        let saves = self.saves.range(operations(scheduler)).flat_map(|(_, save)| save.keys().iter().copied());
        let unbound = self.unbound.range(operations(scheduler)).flat_map(|(_, save)| save.keys());
        let mut words: Vec<u64> = saves.chain(unbound).map(|hash| hash.words()[0]).collect();
        words.sort_unstable();
        words
    }

    /// Returns a scheduler's newest unended save for another engine.
    pub(super) fn newest_handover(&self, scheduler: SessionId) -> Option<u64> {
        self.saves
            .range(operations(scheduler))
            .rfind(|(_, save)| save.handover.is_some())
            .map(|((_, op), _)| *op)
    }

    /// True if a scheduler's saves for other engines, up to this operation, have not all ended.
    pub(super) fn hands_over_up_to(&self, scheduler: SessionId, op: u64) -> bool {
        self.saves.range((scheduler, 0)..=(scheduler, op)).any(|(_, save)| save.handover.is_some())
    }

    pub(super) fn behind(&self) -> Option<SessionId> {
        self.behind.front().copied()
    }

    /// Goes on with a session's saves left over by an earlier turn.
    pub(super) fn catch_up(&mut self, session: SessionId, base: &mut Base) {
        self.behind.retain(|other| *other != session);
        self.dispatch(session, base);
    }

    pub(super) fn largest_differences(&self) -> impl Iterator<Item = (Number, f64)> + '_ {
        Number::ALL.into_iter().zip(self.checks.largest)
    }

    /// Starts the copies of every waiting operation, for the ranks joined and past its fence.
    pub(super) fn dispatch(&mut self, session: SessionId, base: &mut Base) {
        let Some(pending) = self.pending.get(&session) else { return };
        let mut left = base.cx.claims_max;
        for op in pending.waiting.clone() {
            left -= self.dispatch_save((session, op), left, base);
            self.dispatch_load((session, op), base);
        }
    }

    /// Fails if an operation with this key is already under way.
    fn check_new(&self, key: OpKey) -> Result<(), Violation> {
        if self.saves.contains_key(&key)
            || self.loads.contains_key(&key)
            || self.checks.running.contains_key(&key)
            || self.scans.is_running(key)
        {
            return Err(format!("operation {} was posted twice", key.1));
        }
        Ok(())
    }

    fn start_copy(&mut self, owner: CopyOwner, session: SessionId, pieces: Vec<RankBlock>, cx: &mut Context) {
        self.last_copy += 1;
        self.copies.insert(self.last_copy, (owner, cx.now));
        let (copy, CopyOwner { key, direction, .. }) = (self.last_copy, owner);
        let load_op = if direction == CopyDirection::Load { key.1 } else { 0 };
        let awaited = self.loads.get(&(key.0, load_op)).is_some_and(|load| load.sync);
        cx.actions.push(Action::Copy { copy, engine: key.0, session, direction, pieces, load_op, awaited });
    }

    /// Ends a copy.
    pub(super) fn copied(&mut self, copy: CopyId, ok: bool, base: &mut Base) {
        let (owner, since) = self.copies.remove(&copy).expect("every copy is answered once");
        match owner.direction {
            CopyDirection::Save => self.save_copied(owner, ok, base),
            CopyDirection::Load => self.load_copied(owner, ok, base),
        }
        base.cx.took(owner.timed(), since);
    }
}

/// Returns the range of keys of a session's saves and loads.
fn operations(session: SessionId) -> std::ops::RangeInclusive<OpKey> {
    (session, 0)..=(session, u64::MAX)
}
