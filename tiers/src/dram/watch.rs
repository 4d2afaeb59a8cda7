//! What changes of the blocks in DRAM: [`crate::watch`].

use shm_protocol::key::BlockKey;

use super::Dram;

// === impl Dram: watching ===

impl Dram {
    /// Notes from now on what changes: blocks that are there already are never told of. The log grows until
    /// [`Dram::drain_changes`], so drain it after every event.
    pub fn watch(&mut self) {
        self.watch.begin();
    }

    /// Blocks that may be found since the last call, with true, and those that may not any more, with false, in the order
    /// in which that happened. A block that was there is never told of as new, nor one that was not as gone.
    pub fn drain_changes(&mut self) -> impl Iterator<Item = (BlockKey, bool)> + '_ {
        self.watch.drain()
    }
}
