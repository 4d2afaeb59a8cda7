//! A walk over all blocks, some slots at a time, to count, rank or remove blocks while engines are served.

use shm_protocol::key::BlockKey;
use shm_protocol::pool::Geometry;

use super::Dram;
use crate::entries::SlotEntry;
use crate::slab::Among;

/// Slots looked at by one step: half a megabyte of entries, some tenths of a millisecond.
const SLOTS: usize = 8192;

/// The next place of a walk.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Walk {
    segment: usize,
    slot: usize,
}

/// A block with its rank.
#[derive(Copy, Clone, Debug)]
pub struct RankedBlock {
    pub key: BlockKey,
    /// Number of its filling; no other block has it.
    pub generation: u64,
    /// The filling of its kept parent.
    pub parent: Option<u64>,
    /// Expected uses while as many blocks are used as the tier has room for.
    pub uses: f32,
}

// === impl Dram: walking ===

impl Dram {
    /// Passes the findable blocks of the next slots to `see`. Returns the next place, `None` at the pool's
    /// end. Blocks that come or go between two steps may be seen or not, all others are seen once.
    pub fn walk(&self, from: Walk, mut see: impl FnMut(&BlockKey)) -> Option<Walk> {
        self.walk_entries(from, SLOTS, |_, entry| see(&entry.block_key()))
    }

    /// Does the same for the next `slots` slots at most, with the ranks of blocks. A parent mostly has no smaller
    /// rank than its children; see [`Dram::best`].
    pub fn walk_ranked(&self, from: Walk, slots: usize, mut see: impl FnMut(&RankedBlock)) -> Option<Walk> {
        self.walk_entries(from, slots.min(SLOTS), |id, entry| {
            let parent = self.slab.parent(id).map(|parent| self.slab.entries.get(parent).generation);
            let uses = self.policy.uses(entry.standing);
            let (key, generation) = (entry.block_key(), entry.generation);
            see(&RankedBlock { key, generation, parent, uses });
        })
    }

    /// Returns the expected uses of the block evicted for a new one of this size; `None` if a slot is free.
    pub fn uses_given_up(&self, block_bytes: u64) -> Option<f32> {
        let geometry = Geometry::new(self.config.segment_bytes, block_bytes).ok()?;
        let class = self.slab.classes.iter().position(|class| class.geometry == geometry);
        let is_free = |class: usize| self.slab.classes[class].free.tail().is_some();
        if self.slab.has_fresh() || class.is_some_and(is_free) {
            return None;
        }
        let losers = self.ledger.losers(self.ledger.used());
        let next = class.and_then(|class| self.policy.least_uses(&self.slab, Among::Class(class), losers));
        Some(next.unwrap_or(f32::INFINITY))
    }

    /// Returns the number of free slots for blocks of this size.
    pub fn free_blocks(&self, block_bytes: u64) -> u64 {
        let Ok(geometry) = Geometry::new(self.config.segment_bytes, block_bytes) else { return 0 };
        let class = self.slab.classes.iter().find(|class| class.geometry == geometry);
        let free = class.map_or(0, |class| u64::from(class.free.len()));
        free + self.slab.fresh() * u64::from(geometry.slot_count)
    }

    /// Passes the entries of the findable blocks of the next slots to `see`, each with its number.
    fn walk_entries(&self, from: Walk, slots: usize, mut see: impl FnMut(u32, &SlotEntry)) -> Option<Walk> {
        let Walk { mut segment, mut slot } = from;
        let mut left = slots;
        while segment < self.slab.segments.len() {
            let rest = self.slab.entries.segment_entries(segment).get(slot..).unwrap_or_default();
            let looked = rest.len().min(left);
            (slot..)
                .zip(&rest[..looked])
                .filter(|(_, entry)| entry.is_committed())
                .for_each(|(slot, entry)| see(self.slab.entries.entry_id(segment, slot), entry));
            if looked < rest.len() {
                return Some(Walk { segment, slot: slot + looked });
            }
            left -= looked;
            (segment, slot) = (segment + 1, 0);
        }
        None
    }
}
