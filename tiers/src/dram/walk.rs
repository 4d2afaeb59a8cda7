//! A walk over all blocks, some slots at a time: for who counts or removes blocks while engines are served.

use shm_protocol::key::BlockKey;

use super::Dram;

/// Slots that one step looks at: half a megabyte of entries, some tenths of a millisecond.
const SLOTS: usize = 8192;

/// Where a walk goes on.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Walk {
    segment: usize,
    slot: usize,
}

// === impl Dram: walking ===

impl Dram {
    /// Shows the blocks that can be found in the next slots; where to go on, `None` at the pool's end. What comes or goes between
    /// two steps may be shown or not, all else is shown once.
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
