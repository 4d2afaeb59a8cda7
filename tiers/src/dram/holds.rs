//! Holds: a block stays in its slot while a disk's transfer needs it there, or a query waits for its
//! neighbours. A hold belongs to no lease and is no access.

use shm_protocol::key::BlockKey;
use shm_protocol::pool::SlotRef;

use super::{Dram, HolderId};

// === impl Dram: holds ===

impl Dram {
    /// Keeps a block from eviction until [`Dram::unhold`], as often as it is held. It counts as a lease of
    /// `holder`, even beyond its room. `None` if the block is not committed.
    pub fn hold(&mut self, key: &BlockKey, holder: HolderId) -> Option<SlotRef> {
        let id = self.find(key.namespace, key.group, &key.hash)?;
        let held = self.pin_id(id);
        if held {
            self.ledger.lease(holder, false, self.slab.block_bytes(id));
        }
        held.then(|| self.slab.slot_ref(id))
    }

    pub fn unhold(&mut self, slot: SlotRef, holder: HolderId) {
        let id = self.slab.find(slot).expect("a held block stays in its slot");
        self.ledger.unlease(holder, false, self.slab.block_bytes(id));
        if self.unpin_id(id) && !self.free_removed(id) {
            self.policy.unheld(&mut self.slab, id);
        }
    }

    /// Returns the bytes of the block in a slot, if it is still there.
    pub fn block_bytes(&self, slot: SlotRef) -> Option<u64> {
        self.slab.find(slot).map(|id| self.slab.block_bytes(id))
    }

    /// True if a just committed block was evicted not long ago and came back.
    pub fn has_returned(&self, slot: SlotRef) -> bool {
        self.slab.find(slot).is_some_and(|id| self.slab.entries.get(id).has_returned())
    }
}
