//! What came of checksums: blocks of earlier lives are found, those of this life can be adopted.

use tiers::pool::Found;

use super::Runtime;
use crate::checksums::{Checksums, Summed};
use crate::engine::Event;

/// Blocks that one turn takes in at most, some tenths of a millisecond: engines are answered in between.
const TURN_COST: usize = 512;

// === impl Runtime: checksums ===

impl Runtime {
    /// Takes in what one turn has time for; whether there was anything.
    pub(super) fn take_checksums(&mut self) -> bool {
        let mut cost = 0;
        while cost < TURN_COST
            && let Some(summed) = self.checksums.as_mut().and_then(Checksums::take)
        {
            cost += 1;
            match summed {
                Summed::Verified { key, slot, whole } => {
                    if !whole {
                        self.look_at_pool();
                    }
                    self.handle(Event::Verified { key, slot, whole });
                }
                // A block that was evicted meanwhile needs none.
                Summed::Sum { slot, checksum } => drop(checksum.map(|sum| self.pool.set_checksum(slot, sum))),
            }
        }
        if self.adopting && self.opener.is_none() && self.core.stats().unverified_blocks == 0 {
            self.adopting = false;
            self.report_adopted();
        }
        cost > 0
    }

    fn report_adopted(&self) {
        let stats = self.core.stats();
        let (blocks, bytes) = (stats.adopted_blocks, stats.pool_used_bytes);
        let (dropped, corrupt) = (stats.adoption_dropped, stats.adoption_corrupt);
        let after_ms = self.now.as_millis() as u64;
        if *self.pool.found() == Found::Pool {
            tracing::info!(blocks, bytes, dropped, corrupt, after_ms, "the pool file's blocks are adopted");
        }
    }
}
