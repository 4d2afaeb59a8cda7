//! The distrusted namespaces a device must write down to hide their blocks from later lives: one at a time,
//! since each is one write to one place, and again after a failure.

use std::collections::VecDeque;

use shm_protocol::key::NamespaceDigest;

use crate::ssd::Work;

/// Milliseconds before a failed write is tried again.
const PAUSE_MS: u64 = 1_000;

/// A namespace, and the sequence below which its blocks are distrusted.
type Entry = (NamespaceDigest, u64);

/// The namespaces one device has not written down yet.
#[derive(Debug, Default)]
pub(super) struct Distrusts {
    waiting: VecDeque<Entry>,
    /// The namespace being written.
    telling: Option<Entry>,
    /// No write before this time: the last one failed.
    until_ms: u64,
}

// === impl Distrusts ===

impl Distrusts {
    /// Adds a distrusted namespace. Its last sequence counts.
    pub(super) fn add(&mut self, namespace: NamespaceDigest, before: u64) {
        self.waiting.retain(|(other, _)| *other != namespace);
        self.waiting.push_back((namespace, before));
    }

    /// Returns the next work, unless one is under way or just failed.
    pub(super) fn next(&mut self, now_ms: u64) -> Option<Work> {
        if self.telling.is_some() || now_ms < self.until_ms {
            return None;
        }
        self.telling = self.waiting.pop_front();
        self.telling.map(|(namespace, before)| Work::Distrust { namespace, before })
    }

    /// Notes the end of a write. A failed one is tried again soon: an orderly end of the sidecar waits for
    /// it.
    pub(super) fn told(&mut self, well: bool, now_ms: u64) {
        self.until_ms = if well { 0 } else { now_ms + PAUSE_MS };
        let again = self.telling.take().filter(|_| !well);
        if let Some(entry) = again
            && !self.waiting.iter().any(|(other, _)| *other == entry.0)
        {
            self.waiting.push_front(entry);
        }
    }

    /// True if the device has not written down all of them.
    pub(super) fn any(&self) -> bool {
        self.telling.is_some() || !self.waiting.is_empty()
    }
}
