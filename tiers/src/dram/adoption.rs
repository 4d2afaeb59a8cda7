//! Adoption of the blocks left in the pool by an earlier life of the sidecar.
//!
//! An engine of that life may still copy blocks leased to it, from its own mapping of the same file, and a
//! copy of the dead process may still be on its way into a slot being filled then. So, while the hold lasts,
//! only free slots are filled: no block is evicted, no segment changes its block size.
//!
//! A block's bytes may have changed between two lives. The block keeps its slot, but no lookup finds it until
//! the caller has verified it. Blocks of queries are verified first, the others in the order of their slots.
//!
//! Uses of blocks by the earlier life are not recorded. Adopted blocks have the sort of shared blocks, in the
//! order of their slots: new blocks without a use go before them, and adopted blocks with a use stay.

use std::collections::VecDeque;

use shm_protocol::key::BlockKey;
use shm_protocol::pool::{Geometry, Remains, SlotRef};

use super::{Dram, QuotaId, Whose};
use crate::entries::{Entry, Place, State};
use crate::index::Print;

/// How long slots in use by an earlier life keep their bytes: as long as an engine keeps an earlier pool
/// mapped, a thousand times the time of its own copies of loads.
pub const HOLD_MS: u64 = 5_000;

/// Most slots freed by one call once the hold is over: engines are answered in between.
const FREED_AT_ONCE: usize = 8192;

/// Keeps adopted blocks in their slots for a while.
#[derive(Debug)]
pub(super) struct Hold {
    ms: u64,
    /// The end of the hold; `None` once it is over, or without adopted segments.
    until_ms: Option<u64>,
    /// Slots without a whole block: freed after the hold, some at a time. Each keeps its segment until then.
    debris: Vec<u32>,
    /// Blocks removed during the hold: freed in the same way, each pinned until then.
    removed: Vec<u32>,
    /// Blocks to be verified, in their order, and some verified since.
    unverified: VecDeque<u32>,
}

/// Takes the last entries of a list, `most` at most.
fn some_of(entries: &mut Vec<u32>, most: usize) -> Vec<u32> {
    entries.split_off(entries.len().saturating_sub(most))
}

// === impl Hold ===

impl Hold {
    pub(super) fn new(ms: u64) -> Self {
        Self { ms, until_ms: None, debris: Vec::new(), removed: Vec::new(), unverified: VecDeque::new() }
    }

    pub(super) fn lasts(&self) -> bool {
        self.until_ms.is_some()
    }
}

// === impl Dram: adoption ===

impl Dram {
    /// Takes an empty segment into service.
    pub fn open_empty(&mut self, segment: u64) {
        self.slab.add_fresh(segment as usize);
    }

    /// Takes a segment into service that an earlier life gave to blocks of `block_bytes`; its slots follow,
    /// each by one [`Dram::adopt`]. Returns false, and leaves the segment out of service, if no sidecar can
    /// have given it so.
    #[must_use = "slots of a segment that is not in service are not there"]
    pub fn open_used(&mut self, segment: u64, block_bytes: u64, now_ms: u64) -> bool {
        let Ok(geometry) = Geometry::new(self.config.segment_bytes, block_bytes) else { return false };
        let Some(class) = self.slab.class(geometry) else { return false };
        self.slab.adopt(segment as usize, class);
        self.hold.until_ms = Some(now_ms.saturating_add(self.hold.ms));
        true
    }

    /// Adopts slot `index` of a segment in service. `namespace` is the number of the block's digest. The
    /// block counts to `quota`, even without room there, and to no holder until it is used. Returns false if
    /// there is no such slot.
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
        let print = Print::of(&key);
        // The key has a group of no engine, or was filled again in this life, or is twice in a file not
        // written by a sidecar.
        if key.group > Entry::GROUP_MAX
            || self.index.find(print, |id| self.slab.entries.get(id).key() == key).is_some()
        {
            return self.adopt_debris(id, generation);
        }
        let entry = self.slab.entries.get_mut(id);
        entry.set_key(key);
        entry.generation = generation;
        entry.set_state(State::Adopted);
        self.charge(id, Whose { quota, ..Whose::default() });
        self.index.insert(print, id);
        let segment = &mut self.slab.segments[self.slab.entries.segment(id)];
        segment.held += 1;
        segment.used += 1;
        self.stats.unverified_blocks += 1;
        self.stats.bytes_used += self.slab.block_bytes(id);
        self.hold.unverified.push_back(id);
    }

    fn adopt_debris(&mut self, id: u32, generation: u64) {
        self.slab.entries.get_mut(id).generation = generation;
        self.leave_debris(id);
        self.stats.adoption_dropped_total += 1;
    }

    fn leave_debris(&mut self, id: u32) {
        self.slab.segments[self.slab.entries.segment(id)].held += 1;
        self.hold.debris.push(id);
    }

    /// True if a block is of an earlier life and its verification has not begun.
    pub fn is_adopted(&self, key: &BlockKey) -> bool {
        self.find_adopted(key).is_some()
    }

    /// Begins the verification of such a block: [`Dram::end_verification`] follows.
    pub fn begin_verification(&mut self, key: &BlockKey) -> Option<SlotRef> {
        let id = self.find_adopted(key)?;
        self.slab.entries.get_mut(id).set_state(State::Verifying);
        Some(self.slab.slot_ref(id))
    }

    /// Does the same for the next block without a query for it.
    pub fn begin_next_verification(&mut self) -> Option<(BlockKey, SlotRef)> {
        while let Some(id) = self.hold.unverified.pop_front() {
            // A slot whose block was discarded may be in a segment of another size by now.
            let entry = self.slab.entries.get_or_vacant(id);
            if entry.state() == State::Adopted {
                let key = entry.key();
                return Some((key, self.begin_verification(&key).expect("an adopted block is in the index")));
            }
        }
        None
    }

    /// Ends a verification: lookups find a whole block from now on; the slot of another one is free once the
    /// hold is over.
    pub fn end_verification(&mut self, slot: SlotRef, whole: bool) {
        let id = self.slab.find(slot).expect("a block that is verified stays in its slot");
        let entry = self.slab.entries.get_mut(id);
        assert!(entry.state() == State::Verifying, "a block is verified once");
        if !whole {
            return self.discard(id);
        }
        entry.set_state(State::Committed);
        self.watch.note(entry.key(), true);
        self.leave_unverified(id);
        self.stats.blocks += 1;
        self.stats.adopted_blocks_total += 1;
        self.policy.adopt(&mut self.slab, id);
    }

    /// Discards a namespace's adopted blocks whose verification has not begun.
    pub(super) fn discard_namespace(&mut self, namespace: u32) {
        let entries = &self.slab.entries;
        let meant = |id: &u32| {
            let entry = entries.get_or_vacant(*id);
            entry.state() == State::Adopted && entry.key().namespace == namespace
        };
        let ids: Vec<u32> = self.hold.unverified.iter().copied().filter(meant).collect();
        ids.into_iter().for_each(|id| self.discard(id));
    }

    fn find_adopted(&self, key: &BlockKey) -> Option<u32> {
        if self.stats.unverified_blocks == 0 {
            return None;
        }
        let print = Print::of(key);
        let id = self.index.find(print, |id| self.slab.entries.get(id).key() == *key)?;
        (self.slab.entries.get(id).state() == State::Adopted).then_some(id)
    }

    fn leave_unverified(&mut self, id: u32) {
        self.slab.segments[self.slab.entries.segment(id)].held -= 1;
        self.stats.unverified_blocks -= 1;
    }

    /// Discards a block. During the hold its slot is not reused: an engine of the earlier life may still copy
    /// the block.
    fn discard(&mut self, id: u32) {
        self.leave_unverified(id);
        self.vacated(id, self.slab.block_bytes(id));
        if self.hold.lasts() {
            self.slab.move_to(id, Place::Detached);
            self.leave_debris(id);
            self.disowned.push(self.slab.slot_ref(id));
        } else {
            self.evicted.push(self.slab.slot_ref(id));
        }
    }

    /// Frees some of the kept slots once the hold is over.
    pub(super) fn end_hold(&mut self, now_ms: u64) {
        if self.hold.until_ms.is_some_and(|until_ms| now_ms < until_ms) {
            return;
        }
        self.hold.until_ms = None;
        let debris = some_of(&mut self.hold.debris, FREED_AT_ONCE);
        let removed = some_of(&mut self.hold.removed, FREED_AT_ONCE - debris.len());
        for id in debris {
            self.slab.segments[self.slab.entries.segment(id)].held -= 1;
            self.slab.move_to(id, Place::Free);
            self.evicted.push(self.slab.slot_ref(id));
        }
        for id in removed {
            if self.unpin_id(id) {
                self.free_removed(id);
            }
        }
    }

    /// True if blocks may be evicted: none is while an engine of the earlier life may still read it.
    pub fn may_evict(&self) -> bool {
        !self.hold.lasts()
    }

    /// Keeps a removed block's slot as it is until the hold ends. Returns false without a hold.
    pub(super) fn hold_removed(&mut self, id: u32) -> bool {
        let held = self.hold.lasts() && self.pin_id(id);
        if held {
            self.hold.removed.push(id);
        }
        held
    }
}
