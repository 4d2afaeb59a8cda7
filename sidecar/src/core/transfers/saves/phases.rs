//! The life cycle of a save: its phases, and the events between them.

use std::ops::ControlFlow::{self, Break, Continue};
use std::ops::Range;
use std::time::Duration;

use shm_protocol::pool::SlotRef;

use super::{Save, Wanted};
use crate::core::transfers::pending::Acceptance;

/// A phase of a save, with the facts of this phase alone. [`SavePhase::after`] is the list of the transitions.
///
/// - A save takes its slots in `Wanted`, and copies them in `Copying`.
/// - The next drained ring makes a `Copied` save `Whole`. A CANCEL before that is for the save, a later one is not.
/// - A save ends with commits from `Whole` alone. All other ends give its slots back.
/// - `Stopped` and `Orphan` commit nothing. A save is `Stopped` before its copies: a rank is lost, or the step was refused. It is
///   `Orphan` while copies outlive its engine.
#[derive(Debug)]
pub(super) enum SavePhase {
    /// The save waits for its step, and for turns to take its slots.
    Wanted {
        /// Blocks without a slot.
        wanted: Vec<Wanted>,
        /// The time of the first look with a running step.
        runs_since: Option<Duration>,
        /// The time of the first look with the step done on every rank.
        fenced: Option<Duration>,
    },
    /// So many copies run.
    Copying { running: u32, fenced: Duration },
    /// All copies ended: the save waits for a drained ring.
    Copied { fenced: Duration },
    /// The ring was drained at `since`: the save waits for its acceptance.
    Whole { fenced: Duration, since: Duration },
    /// No copy will run: the save waits for a drained ring, so that its CANCELs count.
    Stopped { wanted: Vec<Wanted> },
    /// The engine is gone, and so many copies still run.
    Orphan { running: u32 },
}

/// The search of copied blocks for non-finite numbers. It runs beside the phases: CANCEL and ACCEPT do not wait for it.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Search {
    NotBegun,
    Running,
    Ended,
}

/// An event in the life of a save.
#[derive(Debug)]
pub(in crate::core::transfers) enum SaveEvent {
    /// No block needs a copy.
    Empty,
    /// Every block has its slot. So many copies began, and the step was first seen done at this time.
    Started(u32, Duration),
    /// A copy ended, well or not.
    CopyEnded(bool),
    /// The ring was read to its tail at this time. The engine cancels all saves below this operation.
    Drained(Duration, u64),
    /// CANCEL of these blocks.
    Cancelled(Range<u32>),
    /// The engine accepted or refused the step.
    Settled(Acceptance),
    /// The search ended: these blocks have a non-finite number.
    Scanned(Vec<SlotRef>),
    /// The acceptance did not come in time.
    Overdue,
    RankLost,
    EngineLost,
}

// === impl SavePhase ===

impl SavePhase {
    /// Returns the blocks without a slot.
    pub(super) fn wanted(&self) -> &[Wanted] {
        match self {
            Self::Wanted { wanted, .. } | Self::Stopped { wanted } => wanted,
            _ => &[],
        }
    }

    /// Returns the next phase; `Break`: the last phase of an ended save. `decided`: the event ends a save
    /// without copies.
    fn after(self, event: &SaveEvent, decided: bool) -> ControlFlow<Self, Self> {
        use SaveEvent::{
            Cancelled, CopyEnded, Drained, Empty, EngineLost, Overdue, RankLost, Scanned, Settled, Started,
        };
        use SavePhase::{Copied, Copying, Orphan, Stopped, Wanted, Whole};
        match (self, event) {
            (phase @ Wanted { .. }, Empty) => Break(phase),
            (Wanted { .. }, &Started(0, fenced)) => Continue(Copied { fenced }),
            (Wanted { .. }, &Started(running, fenced)) => Continue(Copying { running, fenced }),
            (Wanted { wanted, .. }, RankLost | Settled(Acceptance::Refused)) => Continue(Stopped { wanted }),
            (Copying { running: 1, fenced }, CopyEnded(_)) => Continue(Copied { fenced }),
            (Copying { running, fenced }, CopyEnded(_)) => Continue(Copying { running: running - 1, fenced }),
            (Copied { fenced }, &Drained(now, _)) if decided => Break(Whole { fenced, since: now }),
            (Copied { fenced }, &Drained(now, _)) => Continue(Whole { fenced, since: now }),
            (phase @ (Whole { .. } | Stopped { .. }), Drained(..)) if decided => Break(phase),
            (phase @ (Wanted { .. } | Copied { .. } | Stopped { .. }), Cancelled(_)) if decided => {
                Break(phase)
            }
            (phase @ Whole { .. }, Overdue) => Break(phase),
            (Copying { running, .. }, EngineLost) => Continue(Orphan { running }),
            (phase @ (Wanted { .. } | Copied { .. } | Whole { .. } | Stopped { .. }), EngineLost) => {
                Break(phase)
            }
            (Orphan { running: 1 }, CopyEnded(_)) => Break(Orphan { running: 0 }),
            (Orphan { running }, CopyEnded(_)) => Continue(Orphan { running: running - 1 }),
            (phase, Cancelled(_) | Settled(_) | Scanned(_)) => Continue(phase),
            (phase, event) => unreachable!("{event:?} of a save in {phase:?}"),
        }
    }
}

// === impl Save ===

impl Save {
    /// Returns the save after an event; `Break`: the save ends.
    pub(super) fn after(mut self, event: SaveEvent) -> ControlFlow<Self, Self> {
        let mut decided = false;
        match &event {
            SaveEvent::CopyEnded(false) | SaveEvent::RankLost | SaveEvent::EngineLost => self.void(),
            SaveEvent::Settled(acceptance) => self.acceptance.settle(*acceptance),
            SaveEvent::Scanned(broken) => {
                self.search = Search::Ended;
                let found = self.blocks.iter_mut().filter(|block| broken.contains(&block.slot));
                found.for_each(|block| block.broken = true);
            }
            SaveEvent::Overdue => self.acceptance.settle(Acceptance::Refused),
            SaveEvent::Cancelled(range) => {
                self.cancel_blocks(range);
                decided = self.phase.wanted().is_empty() && self.blocks.iter().all(|block| block.cancelled);
            }
            SaveEvent::Drained(_, void_below) => {
                let is_void = self.end.op < *void_below;
                if is_void {
                    self.cancel_blocks(&(0..u32::MAX));
                }
                decided = self.is_decided() || is_void;
            }
            _ => {}
        }
        match self.phase.after(&event, decided) {
            Continue(phase) => Continue(Self { phase, ..self }),
            Break(phase) => Break(Self { phase, ..self }),
        }
    }

    pub(super) fn awaits_drain(&self) -> bool {
        match self.phase {
            SavePhase::Wanted { .. } | SavePhase::Copying { .. } | SavePhase::Orphan { .. } => false,
            SavePhase::Copied { .. } | SavePhase::Stopped { .. } => true,
            SavePhase::Whole { .. } => self.is_decided(),
        }
    }

    /// True if a whole save may end.
    fn is_decided(&self) -> bool {
        match self.acceptance {
            Acceptance::Awaited => false,
            Acceptance::Given => self.search != Search::Running,
            Acceptance::Void | Acceptance::Refused => true,
        }
    }

    /// Voids the save: none of its blocks is committed.
    fn void(&mut self) {
        self.acceptance.settle(Acceptance::Void);
    }

    /// Voids the save in a namespace its engine is barred from: none of its blocks is committed or compared
    /// there.
    pub(in crate::core::transfers) fn void_in(&mut self, namespace: u32) {
        if self.binding.namespace == namespace {
            self.void();
        }
    }

    /// Cancels blocks: the engine is about to overwrite their sources.
    fn cancel_blocks(&mut self, range: &Range<u32>) {
        if let SavePhase::Wanted { wanted, .. } | SavePhase::Stopped { wanted } = &mut self.phase {
            let cancelled = wanted.extract_if(.., |wanted| range.contains(&wanted.index));
            self.end.cancelled += cancelled.count() as u32;
        }
        for block in self.blocks.iter_mut().filter(|block| range.contains(&block.index)) {
            block.cancelled = true;
        }
    }
}
