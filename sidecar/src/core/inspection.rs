//! Inspections of the numbers in blocks: beside kept blocks of the same keys, and alone.

use std::collections::VecDeque;
use std::sync::Arc;

use shm_protocol::pool::SlotRef;
use tiers::pool::BlockSum;

use super::SessionId;
use crate::compare::{BlockDifference, Layers};

/// Blocks of a save to be inspected; answered by [`super::CoreEvent::Inspected`].
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Inspection {
    /// The save of the blocks: its scheduler's session, and its operation.
    pub save: (SessionId, u64),
    pub blocks: InspectedBlocks,
    /// Parts of a block, each of these layers.
    pub shards: u32,
    /// The layers of a part.
    pub layers: Arc<Layers>,
    /// Searched blocks are summed in the same pass: the choice of the runtime, for a pool with checksums.
    pub sums: bool,
}

/// The blocks of an inspection.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum InspectedBlocks {
    /// Kept blocks, each with a computed one to be compared. Their slots stay as they are until the end of the inspection.
    Pairs(Vec<(SlotRef, SlotRef)>),
    /// Blocks to be searched for non-finite numbers.
    Alone(Vec<SlotRef>),
}

/// The results of an inspection.
#[derive(Clone, Debug, PartialEq)]
pub enum Findings {
    Compared(InspectionResult),
    Searched(Vec<SearchedBlock>),
}

/// The result of a block's search.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct SearchedBlock {
    pub slot: SlotRef,
    /// All numbers of the block are finite.
    pub is_finite: bool,
    /// The checksum of a finite block's bytes, if the inspection sums.
    pub checksum: Option<u64>,
}

/// The result of a comparison.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct InspectionResult {
    /// Blocks that differ by more than computing them twice does.
    pub differing: u32,
    /// The first of them, by its place among the pairs.
    pub first: u32,
    /// The largest difference of all blocks.
    pub worst: BlockDifference,
}

// === impl Inspection ===

impl Inspection {
    /// Blocks to be compared, none where blocks are searched.
    pub fn pairs(&self) -> &[(SlotRef, SlotRef)] {
        match &self.blocks {
            InspectedBlocks::Pairs(pairs) => pairs,
            InspectedBlocks::Alone(_) => &[],
        }
    }

    /// Joins a queue: searches come behind all comparisons.
    pub fn enqueue(self, queue: &mut VecDeque<Self>) {
        let is_search = matches!(self.blocks, InspectedBlocks::Alone(_));
        let place =
            queue.partition_point(|ahead| is_search || matches!(ahead.blocks, InspectedBlocks::Pairs(_)));
        queue.insert(place, self);
    }

    /// Inspects the blocks; `read` copies bytes at a pool offset out.
    pub fn carry_out(&self, read: impl Fn(u64, &mut [u8])) -> Findings {
        let part = |slot: SlotRef| {
            let read = &read;
            move |at: u64, out: &mut [u8]| read(slot.offset + at, out)
        };
        match &self.blocks {
            InspectedBlocks::Alone(slots) => {
                let search = |slot: &SlotRef| {
                    let mut sum = self.sums.then(BlockSum::default);
                    let is_finite = self.layers.are_finite(self.shards, sum.as_mut(), part(*slot));
                    let checksum = sum.filter(|_| is_finite).map(|sum| sum.finish());
                    SearchedBlock { slot: *slot, is_finite, checksum }
                };
                Findings::Searched(slots.iter().map(search).collect())
            }
            InspectedBlocks::Pairs(pairs) => {
                let compare = |(kept, computed): &(SlotRef, SlotRef)| {
                    self.layers.compare(self.shards, part(*kept), part(*computed))
                };
                Findings::Compared(InspectionResult::among(&pairs.iter().map(compare).collect::<Vec<_>>()))
            }
        }
    }
}

// === impl InspectionResult ===

impl InspectionResult {
    /// The result of these differences, at least one.
    fn among(differences: &[BlockDifference]) -> Self {
        let differing = differences.iter().filter(|difference| difference.is_too_large()).count() as u32;
        let first = differences.iter().position(BlockDifference::is_too_large).unwrap_or_default() as u32;
        let worst = differences.iter().copied().reduce(BlockDifference::max).expect("at least one pair");
        Self { differing, first, worst }
    }
}
