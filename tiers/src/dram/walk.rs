//! A walk over all blocks, some slots at a time, to count or remove blocks while engines are served.

use shm_protocol::key::BlockKey;

use super::Dram;

/// Slots looked at by one step: half a megabyte of entries, some tenths of a millisecond.
const SLOTS: usize = 8192;

/// The next place of a walk.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Walk {
    segment: usize,
    slot: usize,
}

// === impl Dram: walking ===

impl Dram {
    /// Passes the findable blocks of the next slots to `see`. Returns the next place, `None` at the pool's
    /// end. Blocks that come or go between two steps may be seen or not, all others are seen once.
    pub fn walk(&self, from: Walk, mut see: impl FnMut(&BlockKey)) -> Option<Walk> {
        let Walk { mut segment, mut slot } = from;
        let mut left = SLOTS;
        while segment < self.slab.segments.len() {
            let rest = self.slab.entries.of(segment).get(slot..).unwrap_or_default();
            let looked = rest.len().min(left);
            rest[..looked].iter().filter(|entry| entry.is_committed()).for_each(|entry| see(&entry.key()));
            if looked < rest.len() {
                return Some(Walk { segment, slot: slot + looked });
            }
            left -= looked;
            (segment, slot) = (segment + 1, 0);
        }
        None
    }
}
