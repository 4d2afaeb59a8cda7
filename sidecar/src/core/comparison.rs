//! Looks at the numbers in blocks: beside kept blocks of the same keys, and alone.

use std::sync::Arc;

use shm_protocol::pool::SlotRef;
use tiers::pool::BlockSum;

use super::SessionId;
use crate::compare::{Difference, Layers};

/// Blocks to be compared; answered by [`super::Event::Compared`].
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Comparison {
    /// The save whose blocks they are: its scheduler's session, and its operation.
    pub save: (SessionId, u64),
    pub pairs: Vec<(SlotRef, SlotRef)>,
    /// Parts of a block, each of these layers.
    pub shards: u32,
    /// What a part's bytes are.
    pub layers: Arc<Layers>,
}

/// Blocks to be searched for non-finite numbers; answered by [`super::Event::Scanned`].
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Scan {
    /// The save of the blocks: its scheduler's session, and its operation.
    pub save: (SessionId, u64),
    pub slots: Vec<SlotRef>,
    /// Parts of a block, each of these layers.
    pub shards: u32,
    /// The layers of a part.
    pub layers: Arc<Layers>,
}

/// A searched block.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Searched {
    pub slot: SlotRef,
    pub is_finite: bool,
    /// The checksum of its bytes, if it was asked for and all numbers are finite.
    pub checksum: Option<u64>,
}

/// What a comparison found.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Found {
    /// Blocks that differ by more than computing them twice does.
    pub differing: u32,
    /// The first of them, by its place among the pairs.
    pub first: u32,
    /// The largest difference of all blocks.
    pub worst: Difference,
}

// === impl Scan ===

impl Scan {
    /// Searches the blocks, and sums them if asked to; `read` copies bytes at a pool offset out.
    pub fn carry_out(&self, sums: bool, read: impl Fn(u64, &mut [u8])) -> Vec<Searched> {
        let search = |slot: &SlotRef| {
            let mut sum = sums.then(BlockSum::default);
            let is_finite =
                self.layers.are_finite(self.shards, sum.as_mut(), |at, out| read(slot.offset + at, out));
            let checksum = sum.filter(|_| is_finite).map(|sum| sum.finish());
            Searched { slot: *slot, is_finite, checksum }
        };
        self.slots.iter().map(search).collect()
    }
}

// === impl Comparison ===

impl Comparison {
    /// Compares the blocks; `read` copies bytes at a pool offset out.
    pub fn carry_out(&self, read: impl Fn(u64, &mut [u8])) -> Found {
        let compare = |(kept, computed): &(SlotRef, SlotRef)| {
            let (kept, computed) = (kept.offset, computed.offset);
            self.layers.compare(
                self.shards,
                |at, out| read(kept + at, out),
                |at, out| read(computed + at, out),
            )
        };
        let found: Vec<Difference> = self.pairs.iter().map(compare).collect();
        let differing = found.iter().filter(|difference| difference.is_too_large()).count() as u32;
        let first = found.iter().position(Difference::is_too_large).unwrap_or_default() as u32;
        let worst = found.into_iter().reduce(Difference::max).expect("at least one pair");
        Found { differing, first, worst }
    }
}
