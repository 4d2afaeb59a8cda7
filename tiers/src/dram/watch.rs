//! Changes of the set of blocks in DRAM: [`crate::watch`].

use shm_protocol::key::BlockKey;

use super::Dram;

// === impl Dram: watching ===

impl Dram {
    /// Notes changes from now on, but not the blocks already there. The log grows until
    /// [`Dram::drain_changes`], so drain it after every event.
    pub fn watch(&mut self) {
        self.watch.begin();
    }

    /// Returns the changes since the last call in their order: newly findable blocks with true, blocks no
    /// longer findable with false. A block known before is never new, and an unknown one never gone.
    pub fn drain_changes(&mut self) -> impl Iterator<Item = (BlockKey, bool)> + '_ {
        self.watch.drain()
    }
}
