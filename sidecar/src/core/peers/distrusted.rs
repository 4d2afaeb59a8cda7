//! Distrusted blocks: no peer is asked for them. A check found their saver here wrong, and peers may still
//! have copies from that time.
//!
//! A block stays distrusted for this life, even if it is saved again: the copies of peers under its key stay
//! the same.

use std::collections::{BTreeSet, VecDeque};

use mesh::digest::Digest;
use shm_protocol::key::{BlockHash, BlockKey};

use super::{MeshPeers, shared};
use crate::core::context::Context;
use crate::core::namespaces::Binding;

/// Limit of remembered blocks, the last ones: all blocks lost by 16 barred engines. 30 MB.
pub(super) const DISTRUSTED_MAX: usize = 1 << 20;

#[derive(Debug, Default)]
pub(super) struct DistrustedDigests {
    digests: BTreeSet<Digest>,
    /// The same, oldest first.
    order: VecDeque<Digest>,
}

// === impl DistrustedDigests ===

impl DistrustedDigests {
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    fn insert(&mut self, digest: Digest) {
        if !self.digests.insert(digest) {
            return;
        }
        self.order.push_back(digest);
        if self.order.len() > DISTRUSTED_MAX {
            let oldest = self.order.pop_front().expect("one was added");
            self.digests.remove(&oldest);
        }
    }
}

// === impl MeshPeers ===

impl MeshPeers {
    /// Distrusts blocks: peers may have fetched wrong copies, so no peer is ever asked for them.
    pub(super) fn distrust(&mut self, keys: &BTreeSet<BlockKey>, cx: &Context) {
        keys.iter().filter_map(|key| shared(key, cx)).for_each(|digest| self.distrusted.insert(digest));
    }

    pub(in crate::core) fn distrusts(&self, binding: &Binding, hash: &BlockHash) -> bool {
        let digests = &self.distrusted.digests;
        !digests.is_empty() && digests.contains(&binding.block_digest(hash))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_blocks_are_remembered_each_once() {
        let mut distrusted = DistrustedDigests::default();
        let most = DISTRUSTED_MAX as u64;
        (0..most).chain([0]).for_each(|n| distrusted.insert(Digest(n)));
        assert!(distrusted.digests.contains(&Digest(0)));
        distrusted.insert(Digest(most));
        assert!(!distrusted.digests.contains(&Digest(0)) && distrusted.digests.contains(&Digest(1)));
        assert_eq!((distrusted.digests.len(), distrusted.len()), (DISTRUSTED_MAX, DISTRUSTED_MAX));
    }
}
