//! What became findable and what ceased to be, in order: for who tells others of it.

use shm_protocol::key::BlockKey;

use super::Dram;

/// The log; `None` while nobody watches, and then an event costs one comparison.
#[derive(Debug, Default)]
pub(super) struct Watch(Option<Vec<(BlockKey, bool)>>);

// === impl Watch ===

impl Watch {
    #[inline]
    pub(super) fn note(&mut self, key: BlockKey, findable: bool) {
        if let Some(changes) = &mut self.0 {
            changes.push((key, findable));
        }
    }
}

// === impl Dram: watching ===

impl Dram {
    /// Notes from now on what changes: blocks that are there already are never told of. The log grows until
    /// [`Dram::drain_changes`], so drain it after every event.
    pub fn watch(&mut self) {
        self.watch.0.get_or_insert_default();
    }

    /// Blocks that may be found since the last call, with true, and those that may not any more, with false, in the order
    /// in which that happened. A block that was there is never told of as new, nor one that was not as gone.
    pub fn drain_changes(&mut self) -> impl Iterator<Item = (BlockKey, bool)> + '_ {
        self.watch.0.iter_mut().flat_map(|changes| changes.drain(..))
    }
}
