//! Brings the pool's segments into service, one after the other, as soon as their memory is reserved. It
//! reads the headers of blocks left by an earlier life, a part at a time, so engines are served meanwhile.

use shm_protocol::pool::{Geometry, Remains};

use crate::pool::Pool;

/// Slot headers read at a time: some 0.3 ms.
const SLOTS_MAX: u32 = 2048;

/// A part of the pool newly in service.
#[derive(Debug)]
pub enum Opened {
    /// An empty segment.
    Empty { segment: u64 },
    /// Slots from `first` on of a segment used by an earlier life. The slots of a segment come in order.
    Used {
        segment: u64,
        /// Bytes of its blocks.
        block_bytes: u64,
        /// The first of these slots.
        first: u32,
        /// The content of each slot.
        remains: Vec<Remains>,
    },
}

/// The progress of opening.
#[derive(Debug, Default)]
pub struct Opener {
    /// Segments below this one are in service.
    segment: u64,
    /// The current segment, and the number of its slots read so far.
    begun: Option<(Geometry, u32)>,
}

// === impl Opener ===

impl Opener {
    pub fn segments(&self) -> u64 {
        self.segment
    }

    /// Returns the next part, if its memory is reserved.
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
