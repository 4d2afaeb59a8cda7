//! Digests: the names of blocks between nodes.

use shm_protocol::key::{BlockHash, Label, NamespaceDigest};
use twox_hash::XxHash3_64;

/// XXH3-64 over a block's namespace, group and hash. Two blocks with one digest are a false positive in a
/// filter: the owner answers it as absent.
#[derive(Copy, Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Digest(pub u64);

/// A change of a node's inventory.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub enum Change {
    /// The block may be requested.
    Added(Digest),
    Removed(Digest),
}

/// The part of a node's blocks that is announced: one in 2^n, the same ones everywhere, because the digest
/// alone decides. It keeps the directory of a large mesh small: the blocks of a prefix come and go together,
/// so one in a few of them shows how much of it a peer has.
#[derive(Copy, Clone, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub struct Thinning(u8);

// === impl Thinning ===

impl Thinning {
    pub const NONE: Self = Self(0);
    /// One block in 256: of a prefix of 4,096 tokens in blocks of 16, one is left.
    pub const MOST: Self = Self(8);

    /// One in 2^`power`; `None` above [`Thinning::MOST`].
    pub fn new(power: u8) -> Option<Self> {
        (power <= Self::MOST.0).then_some(Self(power))
    }

    /// The power of two.
    pub fn power(self) -> u8 {
        self.0
    }

    /// True if the block is announced. A filter uses none of these bits.
    #[inline]
    pub fn keeps(self, digest: Digest) -> bool {
        (digest.0 >> 16) & ((1 << self.0) - 1) == 0
    }

    /// Approximate number of announced blocks among `keys`.
    pub fn of(self, keys: u64) -> u64 {
        keys >> self.0
    }
}

// === impl Digest ===

impl Digest {
    /// The digest of a block.
    pub fn new(namespace: &NamespaceDigest, group: u32, hash: &BlockHash) -> Self {
        let mut bytes = [0; 52];
        bytes[..16].copy_from_slice(&namespace.0);
        bytes[16..20].copy_from_slice(&group.to_le_bytes());
        bytes[20..].copy_from_slice(&hash.0);
        Self(XxHash3_64::oneshot(&bytes))
    }

    /// The digest of a label's block. The length in the label is no part of it.
    pub fn of(label: &Label) -> Self {
        Self::new(&label.namespace, label.group, &label.hash)
    }
}

// === impl Change ===

impl Change {
    pub fn digest(self) -> Digest {
        let (Self::Added(digest) | Self::Removed(digest)) = self;
        digest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_name_counts_and_the_value_is_the_same_on_every_node() {
        let label = Label {
            namespace: NamespaceDigest([1; 16]),
            group: 2,
            hash: BlockHash::from_words([3, 4, 5, 6]),
            bytes: 7,
        };
        let mut written = vec![1; 16];
        written.extend([2, 0, 0, 0]);
        written.extend(label.hash.0);
        assert_eq!(Digest::of(&label), Digest(xxhash_rust::xxh3::xxh3_64(&written)));
        assert_eq!(Digest::of(&label), Digest::of(&Label { bytes: 8, ..label }));
        let others = [
            Label { namespace: NamespaceDigest([2; 16]), ..label },
            Label { group: 3, ..label },
            Label { hash: BlockHash::from_words([3, 4, 5, 7]), ..label },
        ];
        assert!(others.iter().all(|other| Digest::of(other) != Digest::of(&label)));
    }
}
