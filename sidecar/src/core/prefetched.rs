//! The prefetched blocks in DRAM and on their way: each is counted when a request uses it, or when it goes without a
//! use.

use std::collections::{HashMap, HashSet};

use shm_protocol::key::BlockKey;

/// The reason for a prefetch.
#[derive(Copy, Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum PrefetchReason {
    /// A namespace's first engine is served here.
    Started,
    /// The peer is about to leave.
    Leaving,
}

/// Blocks prefetched by this sidecar.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct PrefetchStats {
    /// Answered questions for lists.
    pub lists: u64,
    /// Blocks brought here, by [`PrefetchReason`].
    pub came: [u64; 2],
    /// Blocks used by a request.
    pub used: u64,
    /// Blocks evicted or removed before any use.
    pub unused: u64,
}

/// The prefetched blocks in DRAM and on their way.
#[derive(Debug, Default)]
pub(super) struct PrefetchedBlocks {
    /// Blocks on their way, each with its parent.
    pub(super) coming: HashMap<BlockKey, Option<BlockKey>>,
    /// Blocks here, not used so far.
    unused: HashSet<BlockKey>,
    /// Number of blocks brought by the last batch, and its reason.
    pub(super) batch: Option<(u64, PrefetchReason)>,
    pub(super) stats: PrefetchStats,
}

// === impl PrefetchedBlocks ===

impl PrefetchedBlocks {
    /// Ends the arrival of a block. Returns its parent, if it is prefetched.
    pub(super) fn take_coming(&mut self, key: &BlockKey) -> Option<Option<BlockKey>> {
        self.coming.remove(key)
    }

    /// Counts a block of the batch, here from now on.
    pub(super) fn note_here(&mut self, key: BlockKey) {
        let Some((came, reason)) = &mut self.batch else { return };
        *came += 1;
        self.stats.came[*reason as usize] += 1;
        self.unused.insert(key);
    }

    /// Counts the first use of a block by a request.
    pub(super) fn use_block(&mut self, key: &BlockKey) {
        if !self.unused.is_empty() && self.unused.remove(key) {
            self.stats.used += 1;
        }
    }

    /// Notes the changes in DRAM by an event.
    pub(super) fn note_changes(&mut self, changes: &[(BlockKey, bool)]) {
        if !self.unused.is_empty() {
            let gone = changes.iter().filter(|(key, added)| !added && self.unused.remove(key));
            self.stats.unused += gone.count() as u64;
        }
    }
}
