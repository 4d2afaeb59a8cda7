//! Blocks that an engine computed beside those that are kept under the same keys.

use std::sync::Arc;

use shm_protocol::pool::SlotRef;

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

/// What a comparison found.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Found {
    /// Blocks that differ by more than computing them twice does.
    pub differing: u32,
    /// The largest difference of all blocks.
    pub worst: Difference,
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
        let worst = found.into_iter().reduce(Difference::max).expect("at least one pair");
        Found { differing, worst }
    }
}
