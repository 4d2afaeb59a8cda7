//! Removal of blocks whose KV does not match their key, and room for the bytes that show this.
//!
//! No lookup finds a removed block from then on. A leased or held one keeps its bytes in place until its last
//! lease or hold ends, and only then is its slot free. Until then the slot is disowned: after a sudden death
//! of the process no later life adopts the block.

use shm_protocol::key::BlockKey;
use shm_protocol::pool::SlotRef;

use super::Dram;
use crate::entries::{ListPlace, SlotState};

// === impl Dram: removal ===

impl Dram {
    /// Removes a committed block; returns false if there is none. Call [`Dram::end_removal`] after the last
    /// of several.
    pub fn remove(&mut self, key: &BlockKey) -> bool {
        let found = self.find_committed(key.namespace, key.group, &key.hash);
        found.into_iter().for_each(|id| self.remove_entry(id));
        found.is_some()
    }

    /// Removes every block of a namespace, and returns their number. Looks at every slot: 10 ms for each 64
    /// MB of entries, and 0.2 us for each removed block.
    pub fn remove_namespace(&mut self, namespace: u32) -> usize {
        let here = |id: &u32| self.slab.entries.get(*id).block_key().namespace == namespace;
        let segments = 0..self.slab.segments.len();
        let ids: Vec<u32> =
            segments.flat_map(|segment| self.slab.committed_blocks(segment)).filter(here).collect();
        ids.iter().for_each(|id| self.remove_entry(*id));
        self.discard_namespace(namespace);
        ids.len()
    }

    fn remove_entry(&mut self, id: u32) {
        self.end_hints_of_block(id);
        self.watch.note_change(self.slab.entries.get(id).block_key(), false);
        self.unindexed(id);
        self.stats.blocks -= 1;
        self.stats.removed_blocks_total += 1;
        self.slab.entries.get_mut(id).set_state(SlotState::Removed);
        self.slab.move_to(id, ListPlace::Detached);
        if self.slab.entries.get(id).claims.pins() == 0 {
            self.free_removed(id);
        }
        if self.slab.entries.get(id).state() == SlotState::Removed {
            self.disowned.push(self.slab.slot_ref(id));
        }
    }

    /// Returns slots of removed blocks whose bytes stay, since the last call: no later life may adopt them.
    pub fn drain_disowned(&mut self) -> impl Iterator<Item = SlotRef> + '_ {
        self.disowned.drain(..)
    }

    /// Ends every lease for loads of a removed block. Posted loads go on.
    pub fn end_removal(&mut self) {
        let entries = &self.slab.entries;
        for (lease, owner) in self.leases.timed_with(|id| entries.get(id).state() == SlotState::Removed) {
            self.release(lease, owner).expect("found above");
        }
    }

    /// Frees the slot of a removed block without pins. Returns false if the block was not removed.
    pub(super) fn free_removed(&mut self, id: u32) -> bool {
        if self.slab.entries.get(id).state() != SlotState::Removed {
            return false;
        }
        if self.hold_removed(id) {
            return true;
        }
        self.evicted.push(self.slab.slot_ref(id));
        self.free(id, self.slab.block_bytes(id));
        true
    }
}
