//! Blocks of no use once a later block of their request is kept.

use shm_protocol::key::BlockKey;

use super::{Dram, HolderId};
use crate::entries::{ListPlace, SlotState};

// === impl Dram: replacement ===

impl Dram {
    /// Lets a holder's block go at once, whose request has a later one in its place. It stays if another holder filled it,
    /// another conversation uses it, or somebody reads it. Returns true if it went.
    pub fn drop_replaced(&mut self, holder: HolderId, key: &BlockKey) -> bool {
        let Some(id) = self.find_committed(key.namespace, key.group, &key.hash) else { return false };
        let entry = self.slab.entries.get(id);
        let is_own = entry.claims.holder() == holder && entry.claims.pins() == 0;
        let goes = is_own && entry.list_place() == ListPlace::Kept && !entry.standing.is_shared();
        if !goes || self.hold.lasts() {
            return false;
        }
        debug_assert_eq!(entry.state(), SlotState::Committed);
        self.policy.give_up(&mut self.slab, id);
        self.evict(id);
        true
    }
}
