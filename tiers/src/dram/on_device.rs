//! Blocks that leave their holder's device: until then their copies here serve nobody, and go before all others.

use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::pool::SlotRef;

use super::{Dram, Parent};
pub use crate::policy::EndedChain;

// === impl Dram: blocks on a device ===

impl Dram {
    /// Ranks the kept ones of a chain's blocks by their own worth again, before their holder's device reuses
    /// them. Returns their number. No access.
    pub fn leave_device(&mut self, namespace: u32, hashes: &[BlockHash]) -> usize {
        self.chain.clear();
        self.deepest_first(namespace, hashes, |dram, id| dram.chain.extend(id));
        self.chain.iter().for_each(|id| self.policy.leave_device(&mut self.slab, *id));
        self.chain.len()
    }

    /// Ends the filling of a block, copied before its holder's device reuses it: its rank is that of the block at
    /// `place` of an ended chain. Its parent may follow later.
    pub fn commit_left(
        &mut self,
        slot: SlotRef,
        parent: Option<&BlockKey>,
        (chain, place): (EndedChain, usize),
    ) -> bool {
        let kept = parent.map(|key| self.parent(key));
        let kept = if let Some(Parent::Kept(id)) = kept { Some(id) } else { None };
        let committed = self.commit_in(slot, Parent::Left(kept, chain.standing(place)));
        if let Some(parent) = parent.filter(|_| committed && kept.is_none()) {
            self.await_parent(slot, parent);
        }
        committed
    }
}
