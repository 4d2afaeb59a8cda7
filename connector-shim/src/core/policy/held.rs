//! Blocks of ended requests, held until they are saved for another engine.
//!
//! vLLM gives a block without a hash to the very next request: the block of a prompt's tail, or every block if its prefix cache is off.
//! While the sidecar still reads the block, its reuse would give the save up.

use std::time::{Duration, Instant};

/// A save takes milliseconds. A block with a save unfinished by then goes back to the engine: the save is given up if the block is
/// overwritten.
const HELD: Duration = Duration::from_secs(1);

/// The held blocks, in use for the engine's pool, the oldest first, each with the end of its hold.
#[derive(Debug, Default)]
pub(super) struct HeldBlocks(Vec<(u32, Instant)>);

// === impl HeldBlocks ===

impl HeldBlocks {
    pub(super) fn holds(&self, block: u32) -> bool {
        self.0.iter().any(|(held, _)| *held == block)
    }

    /// Holds these blocks from now on.
    pub(super) fn hold(&mut self, blocks: &[u32], time: Instant) {
        self.0.extend(blocks.iter().map(|block| (*block, time + HELD)));
    }

    /// Takes the blocks to give back: saved ones, and those held for too long.
    pub(super) fn release_saved(&mut self, is_unsaved: impl Fn(u32) -> bool, time: Instant) -> Vec<u32> {
        let over = self.0.extract_if(.., |(block, until)| !is_unsaved(*block) || *until < time);
        over.map(|(block, _)| block).collect()
    }

    /// Takes all held blocks: vLLM resets no pool with a block in use.
    pub(super) fn release_all(&mut self) -> Vec<u32> {
        self.0.drain(..).map(|(block, _)| block).collect()
    }
}
