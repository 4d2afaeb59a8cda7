//! Messages for the engine's log, each given once per cause.

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, PoisonError};

/// The most notices kept for a caller that does not take them. It exceeds the number of causes, and a
/// flapping sidecar cannot fill the engine's memory.
const NOTICES_MAX: usize = 64;

/// The cause of a notice. Until a cause is forgotten, only its first notice is kept.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) enum NoticeCause {
    /// Nobody listens on the socket.
    Absent,
    /// The sidecar refuses.
    Refused,
    /// The sidecar hung up.
    Lost,
    /// A sidecar is connected again.
    Reconnected,
    /// A query ran out of time.
    Budget,
    /// A rank has not joined or not stated its weights, or the ranks disagree.
    NotReady,
    /// The sidecar broke the protocol.
    Protocol,
    /// The engine finished a load itself.
    Rescue,
    /// A load named a pool that is not mapped here.
    Pool,
    /// The GPU's driver refused.
    Gpu,
    /// Blocks of a load had left their slots.
    Moved,
    /// A load is of another namespace than the rank.
    Mismatch,
    /// The namespace is closed to this engine.
    Barred,
    /// This engine's own check found a difference between its KV and the kept KV.
    Differs,
    /// Saves of this engine are not kept, since it has not passed the KV check.
    Unproven,
    /// The sidecar's release knows no message for accepted steps.
    OldSidecar,
    /// The sidecar's WELCOME has a note about this engine.
    Note,
}

/// Causes with a notice so far, and the notices not yet handed over.
#[derive(Debug, Default)]
pub struct Notices {
    state: Mutex<NoticesState>,
}

#[derive(Debug, Default)]
struct NoticesState {
    said: HashSet<NoticeCause>,
    waiting: VecDeque<String>,
}

// === impl Notices ===

impl Notices {
    /// Adds the notice `text`, unless this cause has had one.
    pub(crate) fn say(&self, cause: NoticeCause, text: impl Into<String>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.said.insert(cause) && state.waiting.len() < NOTICES_MAX {
            state.waiting.push_back(text.into());
        }
    }

    /// Allows a new notice for each of these causes.
    pub(crate) fn forget_causes(&self, causes: &[NoticeCause]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.said.retain(|cause| !causes.contains(cause));
    }

    /// Takes all notices not yet handed over.
    pub fn take_texts(&self) -> Vec<String> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).waiting.drain(..).collect()
    }
}
