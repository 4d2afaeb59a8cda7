//! The life cycle of an engine's session: its phases, and the events between them.

use super::{Binding, EngineState, Scheduler};

/// A phase of a scheduler's session, with the facts of this phase alone. [`Service::after`] is the list of
/// the transitions.
///
/// `lost_rank`: a rank was lost since the engine was bound. The KV of earlier steps may be in no memory.
#[derive(Copy, Clone, Debug)]
pub(super) enum Service {
    /// No namespace: a rank has not joined, or has not stated its facts.
    Unbound { lost_rank: bool },
    /// The namespace is served, and every rank takes part.
    Served { binding: Binding },
    /// The namespace is closed to this run; see [`crate::core::transfers`].
    Barred { binding: Binding, lost_rank: bool },
}

/// An event in the life of a session.
#[derive(Copy, Clone, Debug)]
pub(super) enum ServiceEvent {
    /// All ranks have joined and stated their facts. The namespace is open to the run, or closed.
    Bound {
        binding: Binding,
        is_barred: bool,
    },
    /// The namespace was closed to the run.
    Closed,
    /// A rank joined, perhaps in the place of another session.
    RankJoined {
        replaces: bool,
    },
    RankLost,
    /// WEIGHTS or SALT ends the binding.
    GenerationEnded,
}

// === impl Service ===

impl Service {
    pub(super) fn after(self, event: ServiceEvent) -> Self {
        use Service::{Barred, Served, Unbound};
        use ServiceEvent::{Bound, Closed, GenerationEnded, RankJoined, RankLost};
        match (self, event) {
            (Unbound { .. }, Bound { binding, is_barred: false }) => Served { binding },
            (Unbound { .. }, Bound { binding, is_barred: true }) => Barred { binding, lost_rank: false },
            (Served { binding }, Closed) => Barred { binding, lost_rank: false },
            (Served { .. }, RankJoined { replaces }) => Unbound { lost_rank: replaces },
            (Served { .. }, GenerationEnded) => Unbound { lost_rank: false },
            (Barred { binding, lost_rank }, RankJoined { replaces }) => {
                Barred { binding, lost_rank: lost_rank || replaces }
            }
            (Barred { lost_rank, .. } | Unbound { lost_rank }, GenerationEnded) => Unbound { lost_rank },
            (Unbound { lost_rank }, RankJoined { replaces }) => Unbound { lost_rank: lost_rank || replaces },
            (Unbound { .. } | Served { .. } | Barred { .. }, RankLost) => Unbound { lost_rank: true },
            (service, event) => unreachable!("{event:?} of a session in {service:?}"),
        }
    }
}

// === impl Scheduler ===

impl Scheduler {
    pub(super) fn state(&self) -> EngineState {
        match self.service {
            Service::Served { .. } => EngineState::Serving,
            Service::Barred { .. } => EngineState::Barred,
            Service::Unbound { .. } if self.asked_in_vain => EngineState::Unbound,
            Service::Unbound { .. } => EngineState::Idle,
        }
    }

    /// Returns the served namespace, if there is one.
    pub(crate) fn binding(&self) -> Option<Binding> {
        let Service::Served { binding } = self.service else { return None };
        Some(binding)
    }

    /// Returns the namespace closed to this run, if it is barred.
    pub(crate) fn barred(&self) -> Option<Binding> {
        let Service::Barred { binding, .. } = self.service else { return None };
        Some(binding)
    }

    pub(crate) fn lost_rank(&self) -> bool {
        matches!(self.service, Service::Unbound { lost_rank: true } | Service::Barred { lost_rank: true, .. })
    }

    /// Takes the session into its next phase.
    pub(super) fn change(&mut self, event: ServiceEvent) {
        self.service = self.service.after(event);
    }
}
