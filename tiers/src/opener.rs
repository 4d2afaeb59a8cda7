//! Brings the pool's segments into service, one after the other, as soon as their memory is reserved: what an earlier life
//! left in them is read from their headers alone, a part at a time, so that engines are served meanwhile.

use shm_protocol::pool::{Geometry, Remains};

use crate::pool::Pool;

/// Slot headers read at a time: some 0.3 ms.
const SLOTS_MAX: u32 = 2048;

/// A part of the pool that comes into service.
#[derive(Debug)]
pub enum Opened {
    /// A segment in which nothing is.
    Empty { segment: u64 },
    /// Slots from `first` on of a segment that an earlier life used. Those of a segment come in order.
    Used {
        segment: u64,
        /// Bytes of its blocks.
        block_bytes: u64,
        /// The first of these slots.
        first: u32,
        /// What is left in each.
        remains: Vec<Remains>,
    },
}

/// How far the pool is in service.
#[derive(Debug, Default)]
pub struct Opener {
    /// Segments below are in service.
    segment: u64,
    /// The segment at hand, and its slots that were read.
    begun: Option<(Geometry, u32)>,
}

// === impl Opener ===

impl Opener {
    pub fn segments(&self) -> u64 {
        self.segment
    }

    /// The next part, if its memory is there.
    pub fn next(&mut self, pool: &Pool) -> Option<Opened> {
        if self.segment >= pool.reserved_segments() {
            return None;
        }
        let segment = self.segment;
        let Some((geometry, first)) = self.begun.or_else(|| Some((pool.take_over(segment)?, 0))) else {
            self.segment += 1;
            return Some(Opened::Empty { segment });
        };
        let end = geometry.slot_count.min(first + SLOTS_MAX);
        self.begun = (end < geometry.slot_count).then_some((geometry, end));
        self.segment += u64::from(self.begun.is_none());
        let remains = pool.remains(segment, &geometry, first..end);
        Some(Opened::Used { segment, block_bytes: geometry.block_bytes, first, remains })
    }
}

#[cfg(test)]
mod tests;
