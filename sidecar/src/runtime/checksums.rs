//! Handles checksums: blocks of earlier lives become findable after their verification, and blocks of this
//! life can be adopted later.

use tiers::pool::FoundPool;

use super::Runtime;
use crate::core::{CoreEvent, SearchedBlock};
use crate::ports::checksums::{Checksums, Summed};

// === impl Runtime: checksums ===

impl Runtime {
    /// Writes the checksums of searched blocks before their commit. The checksum thread then skips them.
    pub(super) fn note_searched(&self, searched: &[SearchedBlock]) {
        if self.lost {
            return;
        }
        for block in searched {
            // The slot may have been filled again.
            _ = block.checksum.map(|sum| self.pool.set_checksum(block.slot, sum));
        }
    }

    /// Handles one report of the checksum threads. Returns false if there was none.
    pub(super) fn take_checksum(&mut self) -> bool {
        let summed = self.checksums.as_mut().and_then(Checksums::take_summed);
        let found = summed.is_some();
        match summed {
            Some(Summed::Verified { key, slot, whole }) => {
                if !whole {
                    self.look_at_pool();
                }
                self.handle(CoreEvent::Verified { key, slot, whole });
            }
            // A checksum of an evicted block is dropped.
            Some(Summed::Sum { slot, checksum: Some(sum) } | Summed::Found { slot, checksum: Some(sum) }) => {
                _ = self.pool.set_checksum(slot, sum);
            }
            Some(_) => {}
            None if self.adopting && self.opener.is_none() && self.core.stats().unverified_blocks == 0 => {
                self.adopting = false;
                self.report_adopted();
            }
            None => {}
        }
        found
    }

    fn report_adopted(&self) {
        let stats = self.core.stats();
        let (blocks, bytes) = (stats.adopted_blocks, stats.pool_used_bytes);
        let (dropped, corrupt) = (stats.adoption_dropped, stats.adoption_corrupt);
        let after_ms = self.now.as_millis() as u64;
        if *self.pool.found() == FoundPool::Pool {
            tracing::info!(
                blocks,
                bytes,
                dropped,
                corrupt,
                after_ms,
                "the blocks of the pool file are adopted"
            );
        }
    }
}
