//! Messages for the engine's log, each said once per cause.

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, PoisonError};

/// Notices kept for a caller that does not take them: more than there are causes, so that a flapping sidecar cannot
/// fill the engine's memory.
const NOTICES_MAX: usize = 64;

/// Why something is said.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) enum NoticeCause {
    /// Nobody listens on the socket.
    Absent,
    /// The sidecar refuses.
    Refused,
    /// The sidecar hung up.
    Lost,
    /// A sidecar is there again.
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
    /// Blocks of a load were not where they were promised.
    Moved,
    /// A load is of another namespace than the rank.
    Mismatch,
    /// The namespace is closed to this engine.
    Barred,
    /// This engine's own check found that it computes other KV.
    Differs,
    /// What this engine saves is not kept, since it has not proven what it computes.
    Unproven,
    /// The sidecar is of a release that cannot be told which steps were accepted.
    OldSidecar,
    /// The sidecar has something to say about this engine.
    Note,
}

/// What has been said and what is still to be handed over.
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
    /// Says `text` unless something was said for this cause already.
    pub(crate) fn say(&self, cause: NoticeCause, text: impl Into<String>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.said.insert(cause) && state.waiting.len() < NOTICES_MAX {
            state.waiting.push_back(text.into());
        }
    }

    /// Lets these causes be said again.
    pub(crate) fn forget_causes(&self, causes: &[NoticeCause]) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.said.retain(|cause| !causes.contains(cause));
    }

    /// Everything not yet handed over.
    pub fn take_texts(&self) -> Vec<String> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).waiting.drain(..).collect()
    }
}
