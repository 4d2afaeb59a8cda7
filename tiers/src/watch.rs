//! The blocks newly findable in a tier and those no longer findable, in order: for announcements.

use shm_protocol::key::BlockKey;

/// The log; `None` without a watcher, and then an event costs one comparison.
#[derive(Debug, Default)]
pub(crate) struct ChangeWatch(Option<Vec<(BlockKey, bool)>>);

// === impl ChangeWatch ===

impl ChangeWatch {
    pub(crate) fn begin_watch(&mut self) {
        self.0.get_or_insert_default();
    }

    #[inline]
    pub(crate) fn note_change(&mut self, key: BlockKey, findable: bool) {
        if let Some(changes) = &mut self.0 {
            changes.push((key, findable));
        }
    }

    pub(crate) fn drain_changes(&mut self) -> impl Iterator<Item = (BlockKey, bool)> + '_ {
        self.0.iter_mut().flat_map(|changes| changes.drain(..))
    }
}
