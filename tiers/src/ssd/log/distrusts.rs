//! What a device is to be told that no later life may find: one namespace at a time, since each is one write to one place, and again
//! until it is written.

use std::collections::VecDeque;

use shm_protocol::key::NamespaceDigest;

use crate::ssd::Work;

/// A namespace, and the sequence below which its blocks are distrusted.
type Entry = (NamespaceDigest, u64);

/// What one device was not told yet.
#[derive(Debug, Default)]
pub(super) struct Distrusts {
    waiting: VecDeque<Entry>,
    /// The one that the device is being told.
    telling: Option<Entry>,
}

// === impl Distrusts ===

impl Distrusts {
    /// A namespace is distrusted. What is said last of it stands.
    pub(super) fn add(&mut self, namespace: NamespaceDigest, before: u64) {
        self.waiting.retain(|(other, _)| *other != namespace);
        self.waiting.push_back((namespace, before));
    }

    /// What the device is told next, unless it is being told something.
    pub(super) fn next(&mut self) -> Option<Work> {
        if self.telling.is_some() {
            return None;
        }
        self.telling = self.waiting.pop_front();
        self.telling.map(|(namespace, before)| Work::Distrust { namespace, before })
    }

    /// The device was told, or is to be told again.
    pub(super) fn told(&mut self, well: bool) {
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
