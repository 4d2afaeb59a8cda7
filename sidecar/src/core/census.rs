//! The census: the blocks of no peer, and the computing time saved by them. A walk over DRAM, some blocks at each
//! tick, begins again when it ends.

use std::collections::BTreeMap;

use shm_protocol::key::NamespaceDigest;
use tiers::dram::Walk;

use super::Base;

/// Most slots of one step, and most look-ups of blocks at peers.
const STEP: usize = 8192;
/// Milliseconds from the begin of one walk to the next.
const EVERY_MS: u64 = 10_000;

/// Blocks of this sidecar alone.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct UniqueBlocks {
    /// Blocks without an announcement of a peer.
    pub unique: u64,
    /// Expected seconds of computing the unique blocks again if these were lost.
    pub value_seconds: f64,
}

/// The walk under way, and the result of the last whole one.
#[derive(Debug, Default)]
pub(super) struct Census {
    at: Option<Walk>,
    next_ms: u64,
    /// By the number of the namespace.
    sums: BTreeMap<u32, UniqueBlocks>,
    last: BTreeMap<u32, UniqueBlocks>,
}

/// Returns the slots of one step of a walk that looks each block up at so many peers.
pub(super) fn slots_of_step(peers: usize) -> usize {
    (STEP / (1 + peers)).max(1)
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
        let slots = slots_of_step(mesh.map_or(0, |mesh| mesh.directory().peer_count()));
        let sums = &mut self.sums;
        let at = self.at.expect("set above");
        self.at = cx.dram.walk_ranked(at, slots, |block| {
            if mesh.is_none_or(|mesh| mesh.is_unique(&block.key, cx) == Some(true)) {
                let seconds = seconds.get(&block.key.namespace).copied().unwrap_or_default();
                let sum = sums.entry(block.key.namespace).or_default();
                sum.unique += 1;
                sum.value_seconds += seconds * f64::from(block.uses.min(1.0));
            }
        });
        if self.at.is_none() {
            self.last = std::mem::take(&mut self.sums);
        }
    }

    /// Returns the sum of the last whole walk.
    pub(super) fn sum(&self) -> UniqueBlocks {
        let add = |one: UniqueBlocks, other: &UniqueBlocks| UniqueBlocks {
            unique: one.unique + other.unique,
            value_seconds: one.value_seconds + other.value_seconds,
        };
        self.last.values().fold(UniqueBlocks::default(), add)
    }

    /// Returns the number of unique blocks of each published namespace, by the last whole walk.
    pub(super) fn by_namespace(&self, base: &Base) -> BTreeMap<NamespaceDigest, u64> {
        let mut unique = BTreeMap::new();
        for (number, of) in &self.last {
            let name = base.cx.namespaces.shared(*number);
            name.into_iter().for_each(|name| *unique.entry(*name).or_default() += of.unique);
        }
        unique
    }
}
