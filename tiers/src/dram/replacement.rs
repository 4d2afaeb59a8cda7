//! Blocks evicted before others: a later block of their request is kept, or they came for one load alone.

use shm_protocol::key::BlockKey;

use super::{Dram, HolderId};
use crate::entries::{ListPlace, SlotState};

// === impl Dram: replacement ===

impl Dram {
    /// Lets a holder's block go at once, whose request has a later one in its place. It stays if another holder filled it,
    /// another conversation uses it, or somebody reads it. Returns true if it went.
    pub fn drop_replaced(&mut self, holder: HolderId, key: &BlockKey) -> bool {
        let Some(id) = self.find_unshared(key) else { return false };
        if self.slab.entries.get(id).claims.holder() != holder {
            return false;
        }
        self.policy.give_up(&mut self.slab, id);
        self.evict(id);
        true
    }

    /// Evicts a block from a tier below at the end of its only load. It stays if another conversation uses it,
    /// or somebody reads it. Returns true if it went.
    pub fn give_back(&mut self, key: &BlockKey) -> bool {
        let Some(id) = self.find_unshared(key) else { return false };
        self.evict(id);
        true
    }

    /// Returns the entry of a block without another conversation or a reader.
    fn find_unshared(&self, key: &BlockKey) -> Option<u32> {
        let id = self.find_committed(key.namespace, key.group, &key.hash)?;
        let entry = self.slab.entries.get(id);
        let is_free = entry.claims.pins() == 0 && entry.list_place() == ListPlace::Kept;
        let goes = is_free && !entry.standing.is_shared() && !self.hold.lasts();
        debug_assert!(!goes || entry.state() == SlotState::Committed);
        goes.then_some(id)
    }
}
