//! The unended operations of an engine.

use std::collections::BTreeSet;
use std::time::Duration;

use shm_protocol::handshake::RANKS_MAX;
use shm_protocol::layout::{COMPLETION_SLOTS, OPERATIONS};

use super::{OpKey, SessionId, Violation};

/// Limit of the blocks of a scheduler's saves waiting for its binding or their step, 5 MB: 16 steps of 4,096
/// blocks. Saves beyond it are dropped.
const WANTED_MAX: usize = 65_536;
/// Limit of LOADED waiting for their LOAD: every operation of a session on every rank.
const EARLY_MAX: usize = OPERATIONS * RANKS_MAX as usize;

/// The engine's answer to a save: it went on with the output of the save's step, or did not. A later answer
/// counts only if it is worse.
#[derive(Copy, Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Acceptance {
    /// There is no answer yet.
    Awaited,
    Given,
    /// The answer does not matter: a copy failed, a rank or the engine is gone, or the engine is barred.
    Void,
    /// The engine went on with a later step, or its release accepts none.
    Refused,
}

#[derive(Debug, Default)]
pub(super) struct Pending {
    /// Number of unended saves and loads.
    pub(super) saves: usize,
    pub(super) loads: usize,
    /// Blocks of saves waiting for a binding or their step.
    pub(super) wanted: usize,
    /// Operations not yet started by some rank, in order.
    pub(super) waiting: BTreeSet<u64>,
    /// Duration of the last step with blocks for another engine.
    pub(super) handover_step: Option<Duration>,
    /// Saves with ended copies, waiting for a drained ring. They are committed in their order, parents before
    /// children.
    copied: BTreeSet<u64>,
    /// The last step accepted by the engine.
    accepted: Option<u64>,
    /// Steps that may still be accepted, each with a save of it.
    unaccepted: BTreeSet<(u64, u64)>,
    /// The newest operation read from its ring.
    newest: u64,
    /// LOADED of ranks read before this scheduler's LOAD: operation, rank, well.
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
    /// Notes an operation read from the ring.
    pub(super) fn see(&mut self, op: u64) {
        self.newest = self.newest.max(op);
    }

    /// Fails if the completion ring has no room for the end of one more save.
    pub(super) fn check_save(&self) -> Result<(), Violation> {
        if self.saves < COMPLETION_SLOTS {
            return Ok(());
        }
        Err(format!("more than {COMPLETION_SLOTS} saves at once"))
    }

    /// Fails if there are as many loads as may be.
    pub(super) fn check_load(&self) -> Result<(), Violation> {
        if self.loads < OPERATIONS {
            return Ok(());
        }
        Err(format!("more than {OPERATIONS} loads at once"))
    }

    /// True if so many more blocks may wait.
    pub(super) fn may_want(&self, blocks: usize) -> bool {
        self.wanted + blocks <= WANTED_MAX
    }

    /// Lets a save wait for a drained ring.
    pub(super) fn await_drain(&mut self, save: u64) {
        self.copied.insert(save);
    }

    /// Returns the saves waiting for a drained ring: it was drained.
    pub(super) fn drained(&mut self) -> BTreeSet<u64> {
        std::mem::take(&mut self.copied)
    }

    pub(super) fn any_awaits_drain(&self) -> bool {
        !self.copied.is_empty()
    }

    /// Forgets an ended save: it waits for nothing.
    pub(super) fn forget(&mut self, save: u64, step: u64) {
        self.waiting.remove(&save);
        self.copied.remove(&save);
        self.unaccepted.remove(&(step, save));
    }

    /// Adds a save of `step`. Returns the answer to it so far.
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

    /// Notes the acceptance of `step`. Returns the saves waiting for it, of this and of earlier steps, each
    /// with its answer.
    pub(super) fn accept(&mut self, step: u64) -> Vec<(u64, Acceptance)> {
        if self.accepted.is_some_and(|accepted| step <= accepted) {
            return Vec::new();
        }
        self.accepted = Some(step);
        let settled = self.unaccepted.extract_if(..=(step, u64::MAX), |_| true);
        let settle = |(of, save)| (save, if of == step { Acceptance::Given } else { Acceptance::Refused });
        settled.map(settle).collect()
    }

    /// Returns the saves of this session without an answer of its engine.
    pub(super) fn unaccepted(&self, session: SessionId) -> impl Iterator<Item = OpKey> + '_ {
        self.unaccepted.iter().map(move |(_, save)| (session, *save))
    }

    /// Remembers a rank's report on a load not there, if its LOAD may lie unread in the scheduler's ring:
    /// rings are read one after the other. Otherwise the load was refused, or ended when its rank was thought
    /// lost. Fails beyond [`EARLY_MAX`] reports.
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

    /// Returns the early reports on a load just read: the ranks, each well or not.
    pub(super) fn take_early(&mut self, load: u64) -> Vec<(u32, bool)> {
        let known = self.early.extract_if(.., |early| early.0 <= load);
        known.filter(|early| early.0 == load).map(|(_, rank, ok)| (rank, ok)).collect()
    }
}
