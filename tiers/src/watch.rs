//! The blocks newly findable in a tier and those no longer findable, in order: for announcements.

use shm_protocol::key::BlockKey;

/// The log; `None` without a watcher, and then an event costs one comparison.
#[derive(Debug, Default)]
pub(crate) struct Watch(Option<Vec<(BlockKey, bool)>>);

// === impl Watch ===

impl Watch {
    pub(crate) fn begin(&mut self) {
        self.0.get_or_insert_default();
    }

    #[inline]
    pub(crate) fn note(&mut self, key: BlockKey, findable: bool) {
        if let Some(changes) = &mut self.0 {
            changes.push((key, findable));
        }
    }

    pub(crate) fn drain(&mut self) -> impl Iterator<Item = (BlockKey, bool)> + '_ {
        self.0.iter_mut().flat_map(|changes| changes.drain(..))
    }
}
