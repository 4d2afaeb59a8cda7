//! Taking over what an earlier life of the sidecar left in the pool.
//!
//! An engine of that life may still copy blocks that were leased to it, from its own mapping of the same file, and a
//! copy of the dead process may still be on its way into a slot that was being filled. So, while the hold lasts, only
//! slots that were free are filled: nothing is evicted, no segment changes its block size.
//!
//! Which blocks were asked for is not recorded. Adopted ones get the rank of blocks that were used again, in the order they lie
//! in: new blocks that nobody asks for go before them, and of them those that are asked for stay.

use shm_protocol::key::BlockKey;
use shm_protocol::pool::{Geometry, Remains};

use super::{Dram, QuotaId, Whose};
use crate::index::Print;
use crate::slab::{Place, State};

/// How long slots that an earlier life had in use keep their bytes: as long as an engine keeps an earlier pool mapped,
/// a thousand times what its rescue takes.
pub const HOLD_MS: u64 = 5_000;

/// Keeps what was adopted in its place for a while.
#[derive(Debug)]
pub(super) struct Hold {
    ms: u64,
    /// Until when; `None` once it is over, or where nothing was adopted.
    until_ms: Option<u64>,
    /// Slots that held no whole block: free when the hold ends.
    debris: Vec<u32>,
    /// Blocks that were removed meanwhile: the same, each pinned until then.
    removed: Vec<u32>,
}

// === impl Hold ===

impl Hold {
    pub(super) fn new(ms: u64) -> Self {
        Self { ms, until_ms: None, debris: Vec::new(), removed: Vec::new() }
    }

    pub(super) fn lasts(&self) -> bool {
        self.until_ms.is_some()
    }
}

// === impl Dram: adoption ===

impl Dram {
    /// Takes a segment into service in which nothing is.
    pub fn open_empty(&mut self, segment: u64) {
        self.slab.add_fresh(segment as usize);
    }

    /// Takes a segment into service that an earlier life gave to blocks of `block_bytes`; its slots follow, each by one
    /// [`Dram::adopt`]. False, and the segment stays out of service, where no sidecar can have done so.
    #[must_use = "slots of a segment that is not in service are not there"]
    pub fn open_used(&mut self, segment: u64, block_bytes: u64, now_ms: u64) -> bool {
        let Ok(geometry) = Geometry::new(self.config.segment_bytes, block_bytes) else { return false };
        let Some(class) = self.slab.class(geometry) else { return false };
        self.slab.adopt(segment as usize, class);
        self.hold.until_ms = Some(now_ms.saturating_add(self.hold.ms));
        true
    }

    /// Takes over slot `index` of a segment in service with what it holds; `namespace` numbers a block's digest, `quota`
    /// is what it counts to, whether there is room in it or not. It is nobody's until it is used. False if there is no such slot.
    pub fn adopt(
        &mut self,
        segment: u64,
        index: u32,
        remains: &Remains,
        namespace: Option<u32>,
        quota: Option<QuotaId>,
    ) -> bool {
        let Some(id) = self.slab.entry(segment as usize, index) else { return false };
        match (remains, namespace) {
            (Remains::Free, _) => self.slab.move_to(id, Place::Free),
            (Remains::Block { generation, group, hash, .. }, Some(namespace)) => {
                let key = BlockKey { namespace, group: *group, hash: *hash };
                self.adopt_block(id, *generation, key, quota);
            }
            (Remains::Block { generation, .. } | Remains::Debris { generation }, _) => {
                self.adopt_debris(id, *generation);
            }
        }
        true
    }

    fn adopt_block(&mut self, id: u32, generation: u64, key: BlockKey, quota: Option<QuotaId>) {
        let print = Print::new(key.namespace, key.group, &key.hash);
        // Filled anew since this life began, or twice in a file that no sidecar wrote.
        if self.index.find(print, |id| self.slab.entries.get(id).key == key).is_some() {
            return self.adopt_debris(id, generation);
        }
        let entry = self.slab.entries.get_mut(id);
        (entry.key, entry.generation, entry.state) = (key, generation, State::Committed);
        self.watch.note(key, true);
        self.charge(id, Whose { quota, ..Whose::default() });
        self.index.insert(print, id);
        self.slab.segments[self.slab.entries.segment(id)].used += 1;
        self.stats.blocks += 1;
        self.stats.bytes_used += self.slab.block_bytes(id);
        self.stats.adopted_blocks_total += 1;
        self.policy.adopt(&mut self.slab, id);
    }

    fn adopt_debris(&mut self, id: u32, generation: u64) {
        self.slab.entries.get_mut(id).generation = generation;
        self.hold.debris.push(id);
        self.stats.adoption_dropped_total += 1;
    }

    pub(super) fn end_hold(&mut self, now_ms: u64) {
        if self.hold.until_ms.is_none_or(|until_ms| now_ms < until_ms) {
            return;
        }
        self.hold.until_ms = None;
        for id in std::mem::take(&mut self.hold.debris) {
            self.slab.move_to(id, Place::Free);
            self.evicted.push(self.slab.slot_ref(id));
        }
        for id in std::mem::take(&mut self.hold.removed) {
            if self.unpin_id(id) {
                self.free_removed(id);
            }
        }
    }

    /// Keeps a removed block's slot as it is until the hold ends, if there is one.
    pub(super) fn hold_removed(&mut self, id: u32) -> bool {
        let held = self.hold.lasts() && self.pin_id(id);
        if held {
            self.hold.removed.push(id);
        }
        held
    }
}
