//! What a device is to be told that no later life may find: one namespace at a time, since each is one write to one place, and again
//! until it is written.

use std::collections::VecDeque;

use shm_protocol::key::NamespaceDigest;

use crate::ssd::Work;

/// Milliseconds before a device is told again what it failed to write.
const PAUSE_MS: u64 = 1_000;

/// A namespace, and the sequence below which its blocks are distrusted.
type Entry = (NamespaceDigest, u64);

/// What one device was not told yet.
#[derive(Debug, Default)]
pub(super) struct Distrusts {
    waiting: VecDeque<Entry>,
    /// The one that the device is being told.
    telling: Option<Entry>,
    /// It is told nothing until then: it failed to write what it was told.
    until_ms: u64,
}

// === impl Distrusts ===

impl Distrusts {
    /// A namespace is distrusted. What is said last of it stands.
    pub(super) fn add(&mut self, namespace: NamespaceDigest, before: u64) {
        self.waiting.retain(|(other, _)| *other != namespace);
        self.waiting.push_back((namespace, before));
    }

    /// What the device is told next, unless it is being told something or just failed to write it.
    pub(super) fn next(&mut self, now_ms: u64) -> Option<Work> {
        if self.telling.is_some() || now_ms < self.until_ms {
            return None;
        }
        self.telling = self.waiting.pop_front();
        self.telling.map(|(namespace, before)| Work::Distrust { namespace, before })
    }

    /// The device was told, or is to be told again, soon: an orderly end waits for it.
    pub(super) fn told(&mut self, well: bool, now_ms: u64) {
        self.until_ms = if well { 0 } else { now_ms + PAUSE_MS };
        let again = self.telling.take().filter(|_| !well);
        if let Some(entry) = again
            && !self.waiting.iter().any(|(other, _)| *other == entry.0)
        {
            self.waiting.push_front(entry);
        }
    }

    /// Whether there is something that the device has not written.
    pub(super) fn any(&self) -> bool {
        self.telling.is_some() || !self.waiting.is_empty()
    }
}
