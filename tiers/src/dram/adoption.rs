//! Taking over what an earlier life of the sidecar left in the pool.
//!
//! An engine of that life may still copy blocks that were leased to it, from its own mapping of the same file, and a
//! copy of the dead process may still be on its way into a slot that was being filled. So, while the hold lasts, only
//! slots that were free are filled: nothing is evicted, no segment changes its block size.
//!
//! A block's bytes may have been changed between two lives: it is found by nobody, and keeps its slot, until the caller has
//! verified it. Those asked for come first, the others in the order they lie in.
//!
//! Uses of blocks by the earlier life are not recorded. Adopted blocks have the sort of shared ones, in the order of their slots:
//! new blocks without a use go before them, and adopted blocks with a use stay.

use std::collections::VecDeque;

use shm_protocol::key::BlockKey;
use shm_protocol::pool::{Geometry, Remains, SlotRef};

use super::{Dram, QuotaId, Whose};
use crate::entries::{Entry, Place, State};
use crate::index::Print;

/// How long slots that an earlier life had in use keep their bytes: as long as an engine keeps an earlier pool mapped,
/// a thousand times what its rescue takes.
pub const HOLD_MS: u64 = 5_000;

/// Slots that one call frees once the hold is over: engines are answered in between.
const FREED_AT_ONCE: usize = 8192;

/// Keeps what was adopted in its place for a while.
#[derive(Debug)]
pub(super) struct Hold {
    ms: u64,
    /// Until when; `None` once it is over, or where nothing was adopted.
    until_ms: Option<u64>,
    /// Slots that held no whole block: free after the hold, some at a time. Each keeps its segment until then.
    debris: Vec<u32>,
    /// Blocks that were removed meanwhile: the same, each pinned until then.
    removed: Vec<u32>,
    /// Blocks to be verified, in their order, and some that have been since.
    unverified: VecDeque<u32>,
}

/// Takes the last entries of a list, so many at most.
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
        let print = Print::of(&key);
        // The key has a group of no engine, or was filled again in this life, or is twice in a file not written by a sidecar.
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

    /// Whether a block is an earlier life's and nobody has begun to verify it.
    pub fn is_adopted(&self, key: &BlockKey) -> bool {
        self.find_adopted(key).is_some()
    }

    /// Such a block is verified from now on: [`Dram::end_verification`] follows.
    pub fn begin_verification(&mut self, key: &BlockKey) -> Option<SlotRef> {
        let id = self.find_adopted(key)?;
        self.slab.entries.get_mut(id).set_state(State::Verifying);
        Some(self.slab.slot_ref(id))
    }

    /// The same of the next one that nobody has asked for.
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

    /// A block was verified: it is found from now on, or its slot is free once the hold is over.
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

    /// Discards the adopted blocks of a namespace that nobody has begun to verify.
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

    /// An engine of the earlier life may still copy the block.
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

    /// Once the hold is over, frees some of the slots that it kept.
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

    /// Whether blocks may give way to others: none does while an engine of the earlier life may still read it.
    pub fn may_evict(&self) -> bool {
        !self.hold.lasts()
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
