//! The life cycle of a load: its phases, those of each rank's part, and the events between them.

use std::ops::ControlFlow::{self, Break, Continue};
use std::time::Duration;

use shm_protocol::key::BlockHash;
use shm_protocol::pool::SlotRef;
use tiers::dram::LeaseId;

/// A phase of a load, with the facts of this phase alone. [`LoadPhase::after`] is the list of the transitions.
///
/// A `Leased` load ends with the last part: each rank's end consumes its share of the lease. The other phases end their holds at the
/// end of the load.
#[derive(Debug)]
pub(super) enum LoadPhase {
    /// So many blocks are missing and on their way, the `rest` is not sent for yet, and the others are held.
    Deferred { missing: usize, held: Vec<SlotRef>, rest: Vec<BlockHash> },
    /// All blocks are here since `ready`.
    Leased { lease: LeaseId, ready: Duration },
    /// The engine is gone: the lease is for running copies alone.
    Orphan { lease: LeaseId },
}

/// An event in the life of a load.
#[derive(Copy, Clone, Debug)]
pub(super) enum LoadEvent {
    /// The last missing block is here at this time, and all are leased.
    Arrived(LeaseId, Duration),
    /// A block is not to be had.
    Refused,
    /// The last part ended, well or not.
    PartsEnded(bool),
    /// The engine is gone.
    EngineLost,
    /// No copy runs for the gone engine.
    CopiesEnded,
}

/// A phase of one rank's part of a load. [`LoadPart::after`] is the list of the transitions.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum LoadPart {
    /// This process is to copy.
    Unstarted,
    Copying,
    /// The rank reported its end, well or not, and the copy runs on.
    Reported {
        well: bool,
    },
    /// The rank copies, or reports that it cannot.
    Left,
    Ended {
        well: bool,
    },
}

/// An event in the life of a part.
#[derive(Copy, Clone, Debug)]
pub(super) enum PartEvent {
    CopyStarted,
    /// The rank copies for itself.
    Left,
    /// The copy ended, well or not.
    CopyEnded(bool),
    /// The rank ended its part, well or not, or is gone.
    Reported(bool),
}

// === impl LoadPhase ===

impl LoadPhase {
    /// Returns the next phase; `Break`: the last phase of an ended load.
    pub(super) fn after(self, event: LoadEvent) -> ControlFlow<Self, Self> {
        use LoadEvent::{Arrived, CopiesEnded, EngineLost, PartsEnded, Refused};
        use LoadPhase::{Deferred, Leased, Orphan};
        match (self, event) {
            (Deferred { .. }, Arrived(lease, ready)) => Continue(Leased { lease, ready }),
            (phase @ Deferred { .. }, Refused | EngineLost) => Break(phase),
            (phase @ (Deferred { .. } | Leased { .. }), PartsEnded(_)) => Break(phase),
            (Leased { lease, .. }, EngineLost) => Continue(Orphan { lease }),
            (phase @ Orphan { .. }, CopiesEnded) => Break(phase),
            (phase, event) => unreachable!("{event:?} of a load in {phase:?}"),
        }
    }
}

// === impl LoadPart ===

impl LoadPart {
    pub(super) fn after(self, event: PartEvent) -> Self {
        use LoadPart::{Copying, Ended, Left, Reported, Unstarted};
        match (self, event) {
            (Unstarted, PartEvent::CopyStarted) => Copying,
            (Unstarted, PartEvent::Left) => Left,
            (Copying, PartEvent::CopyEnded(true)) => Ended { well: true },
            // The rank finishes the part from the leased slots, and reports its end.
            (Copying, PartEvent::CopyEnded(false)) => Left,
            (Copying, PartEvent::Reported(well)) => Reported { well },
            (Reported { well }, PartEvent::Reported(ok)) => Reported { well: well || ok },
            (Reported { well }, PartEvent::CopyEnded(ok)) => Ended { well: well || ok },
            (Unstarted | Left, PartEvent::Reported(well)) => Ended { well },
            (Ended { well }, PartEvent::Reported(_)) => Ended { well },
            (part, event) => unreachable!("{event:?} of a part in {part:?}"),
        }
    }

    pub(super) fn has_copy(self) -> bool {
        matches!(self, Self::Copying | Self::Reported { .. })
    }

    pub(super) fn has_ended(self) -> bool {
        matches!(self, Self::Ended { .. })
    }
}
