//! What of an engine's operations has not ended.

use std::collections::BTreeSet;
use std::time::Duration;

use shm_protocol::handshake::RANKS_MAX;
use shm_protocol::layout::{COMPLETION_SLOTS, OPERATIONS};

use super::{OpKey, SessionId, Violation};

/// Blocks of a scheduler's saves that wait for its binding or for their step, 5 MB: 16 steps of 4,096 blocks. Saves beyond that are
/// dropped.
const WANTED_MAX: usize = 65_536;
/// The most LOADED that may wait for their LOAD: every operation of a session on every rank.
const EARLY_MAX: usize = OPERATIONS * RANKS_MAX as usize;

/// Whether the engine went on with the output of a save's step. A later answer counts only if it is worse.
#[derive(Copy, Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Acceptance {
    /// It has not said so yet.
    Awaited,
    Given,
    /// Its answer does not matter: a copy failed, a rank or the engine is gone, or the engine is barred.
    Void,
    /// It went on with a later step, or is of a release that accepts none.
    Refused,
}

#[derive(Debug, Default)]
pub(super) struct Pending {
    /// Saves and loads that have not ended.
    pub(super) saves: usize,
    pub(super) loads: usize,
    /// Blocks of saves that wait for a binding or their step.
    pub(super) wanted: usize,
    /// Operations, in order, that some rank has not started yet.
    pub(super) waiting: BTreeSet<u64>,
    /// How long the last step took whose blocks were for another engine.
    pub(super) handover_step: Option<Duration>,
    /// Saves whose copies ended and that wait for a drained ring. They are committed in their order, parents before children.
    copied: BTreeSet<u64>,
    /// The last step that the engine accepted.
    accepted: Option<u64>,
    /// Steps that may still be accepted, each with a save of it.
    unaccepted: BTreeSet<(u64, u64)>,
    /// The newest operation read from its ring.
    newest: u64,
    /// LOADED of ranks whose rings were read before this one's LOAD: operation, rank, well.
    early: Vec<(u64, u32, bool)>,
}

// === impl Acceptance ===

impl Acceptance {
    pub(super) fn settle(&mut self, answer: Self) {
        *self = answer.max(*self);
    }
}

// === impl Pending ===

impl Pending {
    /// An operation was read.
    pub(super) fn see(&mut self, op: u64) {
        self.newest = self.newest.max(op);
    }

    /// Refuses a save if there are as many as the engine has room to be told the ends of.
    pub(super) fn check_save(&self) -> Result<(), Violation> {
        if self.saves < COMPLETION_SLOTS {
            return Ok(());
        }
        Err(format!("more than {COMPLETION_SLOTS} saves at once"))
    }

    /// Refuses a load if there are as many as may be.
    pub(super) fn check_load(&self) -> Result<(), Violation> {
        if self.loads < OPERATIONS {
            return Ok(());
        }
        Err(format!("more than {OPERATIONS} loads at once"))
    }

    /// Whether so many more blocks may wait.
    pub(super) fn may_want(&self, blocks: usize) -> bool {
        self.wanted + blocks <= WANTED_MAX
    }

    /// A save waits for a drained ring.
    pub(super) fn await_drain(&mut self, save: u64) {
        self.copied.insert(save);
    }

    /// The ring was drained: the saves that have waited for it.
    pub(super) fn drained(&mut self) -> BTreeSet<u64> {
        std::mem::take(&mut self.copied)
    }

    pub(super) fn any_awaits_drain(&self) -> bool {
        !self.copied.is_empty()
    }

    /// A save has ended: it waits for nothing.
    pub(super) fn forget(&mut self, save: u64, step: u64) {
        self.waiting.remove(&save);
        self.copied.remove(&save);
        self.unaccepted.remove(&(step, save));
    }

    /// A save of `step` was read: whether the engine has accepted that step.
    pub(super) fn await_acceptance(&mut self, save: u64, step: u64) -> Acceptance {
        let acceptance = match self.accepted {
            Some(accepted) if step < accepted => Acceptance::Refused,
            Some(accepted) if step == accepted => Acceptance::Given,
            _ => Acceptance::Awaited,
        };
        if acceptance == Acceptance::Awaited {
            self.unaccepted.insert((step, save));
        }
        acceptance
    }

    /// The engine accepted `step`: the saves of it and of earlier steps that have waited for this.
    pub(super) fn accept(&mut self, step: u64) -> Vec<(u64, Acceptance)> {
        if self.accepted.is_some_and(|accepted| step <= accepted) {
            return Vec::new();
        }
        self.accepted = Some(step);
        let settled = self.unaccepted.extract_if(..=(step, u64::MAX), |_| true);
        let settle = |(of, save)| (save, if of == step { Acceptance::Given } else { Acceptance::Refused });
        settled.map(settle).collect()
    }

    /// Saves of this session without an answer of its engine.
    pub(super) fn unaccepted(&self, session: SessionId) -> impl Iterator<Item = OpKey> + '_ {
        self.unaccepted.iter().map(move |(_, save)| (session, *save))
    }

    /// A rank has ended its part of a load that is not there: its LOAD lies unread in the scheduler's ring, since rings are
    /// read one after the other, or it was refused, or ended when its rank was thought lost.
    pub(super) fn report_early(&mut self, load: u64, rank: u32, ok: bool) -> Result<(), Violation> {
        if load <= self.newest {
            return Ok(());
        }
        if self.early.len() >= EARLY_MAX {
            return Err(format!("more than {EARLY_MAX} loads were reported that no scheduler posted"));
        }
        self.early.push((load, rank, ok));
        Ok(())
    }

    /// A load was read: the ranks that have ended it, each well or not.
    pub(super) fn take_early(&mut self, load: u64) -> Vec<(u32, bool)> {
        let known = self.early.extract_if(.., |early| early.0 <= load);
        known.filter(|early| early.0 == load).map(|(_, rank, ok)| (rank, ok)).collect()
    }
}
