//! The census: how much of what is here no peer has, and the computing time that it saves. A walk over DRAM, some
//! blocks at each tick, begins again when it ends.

use std::collections::BTreeMap;

use tiers::dram::Walk;

use super::Base;

/// Most slots of one step, and most look-ups of blocks at peers.
const STEP: usize = 8192;
/// Milliseconds from the begin of one walk to the next.
const EVERY_MS: u64 = 10_000;

/// Blocks of a namespace in DRAM.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct UniqueBlocks {
    pub blocks: u64,
    /// Blocks that no peer announces.
    pub unique: u64,
    /// Seconds that engines here are expected to spend on computing the unique blocks again if these were lost.
    pub value_seconds: f64,
}

/// The walk under way, and the result of the last whole one.
#[derive(Debug, Default)]
pub(super) struct Census {
    at: Option<Walk>,
    next_ms: u64,
    sums: BTreeMap<u32, UniqueBlocks>,
    last: UniqueBlocks,
}

// === impl Census ===

impl Census {
    /// Looks at some more blocks.
    pub(super) fn step(&mut self, base: &Base) {
        let Base { engines, sources, cx } = base;
        let mesh = sources.mesh();
        if self.at.is_none() {
            if cx.now_ms < self.next_ms {
                return;
            }
            (self.at, self.next_ms) = (Some(Walk::default()), cx.now_ms + EVERY_MS);
            self.sums.clear();
        }
        let seconds = engines.block_seconds();
        let slots = STEP / (1 + mesh.map_or(0, |mesh| mesh.directory().peer_count()));
        let sums = &mut self.sums;
        let at = self.at.expect("set above");
        self.at = cx.dram.walk_ranked(at, slots.max(1), |block| {
            let is_unique = mesh.is_none_or(|mesh| mesh.is_unique(&block.key, cx) == Some(true));
            let sum = sums.entry(block.key.namespace).or_default();
            sum.blocks += 1;
            if is_unique {
                let seconds = seconds.get(&block.key.namespace).copied().unwrap_or_default();
                sum.unique += 1;
                sum.value_seconds += seconds * f64::from(block.uses.min(1.0));
            }
        });
        if self.at.is_none() {
            self.last = UniqueBlocks::default();
            for sum in self.sums.values() {
                self.last.unique += sum.unique;
                self.last.value_seconds += sum.value_seconds;
            }
        }
    }

    /// Returns the result of the last whole walk.
    pub(super) fn result(&self) -> UniqueBlocks {
        self.last
    }
}
