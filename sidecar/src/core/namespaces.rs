//! Which blocks are whose: forms, bindings, and the short numbers of the namespaces that this life has seen.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use mesh::digest::Digest;
use shm_protocol::key::{BlockHash, BlockKey, GROUP, NamespaceDigest};
use tiers::dram::Whose;

/// Namespaces that are remembered, of engines past and present: at 40 bytes each, 3 MB.
const NAMESPACES_MAX: usize = 65_536;

/// What the blocks of one rank are, but for the weights: ranks of one run agree on it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Form {
    /// Digest of the facts as the rank states them.
    pub(super) stated: NamespaceDigest,
    pub(super) shard_bytes: u64,
    pub(super) shards: u32,
    /// Its blocks are of use without those before them, as of windows and states.
    pub(super) parentless: bool,
}

/// Blocks of one namespace and one size. Blocks of another size, left by an earlier life or a mistaken engine, are found by
/// nobody who could not load them.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Space {
    pub(super) digest: NamespaceDigest,
    pub(super) block_bytes: u64,
}

/// What an engine's blocks are.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Binding {
    pub(super) base: NamespaceDigest,
    pub(super) digest: NamespaceDigest,
    pub(super) namespace: u32,
    /// What its blocks count to: the same quota for every salt.
    pub(super) whose: Whose,
    pub(super) shard_bytes: u64,
    pub(super) shards: u32,
    /// Its blocks are of use without those before them.
    pub(super) parentless: bool,
}

/// What is known of a namespace that has an id.
#[derive(Debug)]
struct Known {
    id: u32,
    /// When it was last asked for, counted in questions.
    asked: u64,
    /// Whether any block of it was kept.
    has_kept: bool,
}

/// Short ids of the namespaces seen in this epoch.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    ids: BTreeMap<Space, Known>,
    /// Digests of those whose blocks peers are told of, by id. Kept when a namespace is forgotten: its blocks are still there,
    /// and peers are to be told when they go. The first [`NAMESPACES_MAX`] of an epoch.
    shared: BTreeMap<u32, NamespaceDigest>,
    /// Namespaces that began anew in this life: blocks of them that earlier lives kept are adopted under no id, and peers are asked for
    /// none.
    retired: BTreeSet<Space>,
    next: u32,
    asked: u64,
}

// === impl Namespaces ===

impl Namespaces {
    /// Ids never repeat, so that blocks of a forgotten namespace are found by nobody and go by their age.
    pub(super) fn id(&mut self, space: Space) -> Option<u32> {
        self.asked += 1;
        if let Some(known) = self.ids.get_mut(&space) {
            known.asked = self.asked;
            return Some(known.id);
        }
        if self.ids.len() >= NAMESPACES_MAX {
            let oldest = self.ids.iter().min_by_key(|(_, known)| known.asked).map(|(space, _)| *space);
            oldest.map(|space| self.ids.remove(&space));
        }
        let id = self.next;
        self.next = self.next.checked_add(1)?;
        self.ids.insert(space, Known { id, asked: self.asked, has_kept: false });
        Some(id)
    }

    /// The id of a namespace of which blocks of an earlier life were found; `None` where it began anew, and rather than forget another.
    pub(super) fn adopt(&mut self, space: Space) -> Option<u32> {
        if self.is_retired(space) {
            return None;
        }
        let known = self.ids.contains_key(&space) || self.ids.len() < NAMESPACES_MAX;
        let id = if known { self.id(space) } else { None };
        id.iter().for_each(|id| self.share(*id, space.digest));
        self.note_kept(space);
        id
    }

    /// A block of this namespace is kept.
    pub(super) fn note_kept(&mut self, space: Space) {
        self.ids.get_mut(&space).into_iter().for_each(|known| known.has_kept = true);
    }

    /// Whether any block of this namespace was kept since it has its id.
    pub(super) fn has_kept(&self, space: Space) -> bool {
        self.ids.get(&space).is_some_and(|known| known.has_kept)
    }

    /// Peers may have blocks of this namespace, and may be told of those that are here.
    pub(super) fn share(&mut self, id: u32, digest: NamespaceDigest) {
        if self.shared.len() < NAMESPACES_MAX {
            self.shared.insert(id, digest);
        }
    }

    /// The digest of a namespace whose blocks peers are told of.
    pub(super) fn shared(&self, id: u32) -> Option<&NamespaceDigest> {
        self.shared.get(&id)
    }

    /// Every namespace of which a block may be kept, by its id.
    pub(super) fn all(&self) -> BTreeMap<u32, NamespaceDigest> {
        let known = self.ids.iter().map(|(space, known)| (known.id, space.digest));
        self.shared.iter().map(|(id, digest)| (*id, *digest)).chain(known).collect()
    }

    /// Ids under which blocks of a namespace may be kept: one for each size of a block, and those of before it was forgotten.
    pub(super) fn ids_of(&self, digest: NamespaceDigest) -> impl Iterator<Item = u32> + '_ {
        let space = |block_bytes| Space { digest, block_bytes };
        let known = self.ids.range(space(0)..=space(u64::MAX)).map(|(_, known)| known.id);
        known.chain(self.shared.iter().filter(move |(_, of)| **of == digest).map(|(id, _)| *id))
    }

    /// The id of a namespace that has one.
    pub(super) fn known(&self, space: Space) -> Option<u32> {
        self.ids.get(&space).map(|known| known.id)
    }

    pub(super) fn forget(&mut self, space: Space) {
        self.ids.remove(&space);
    }

    /// Whether a namespace began anew in this life.
    pub(super) fn is_retired(&self, space: Space) -> bool {
        self.retired.contains(&space)
    }

    /// A namespace begins anew: nobody is believed who kept blocks of it so far.
    pub(super) fn retire(&mut self, space: Space) {
        self.forget(space);
        self.retired.insert(space);
    }
}

// === impl Form ===

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { stated, shard_bytes, shards, .. } = self;
        write!(f, "blocks of {shards} shards of {shard_bytes} bytes and facts that digest to {stated}")
    }
}

// === impl Binding ===

impl Binding {
    /// Bytes of a whole block, all shards.
    pub(super) fn block_bytes(&self) -> u64 {
        self.shard_bytes * u64::from(self.shards)
    }

    /// Whether no other engine can have these blocks.
    pub(super) fn is_private(&self) -> bool {
        self.digest != self.base
    }

    pub(super) fn space(&self) -> Space {
        Space { digest: self.digest, block_bytes: self.block_bytes() }
    }

    /// The key of one of the namespace's blocks.
    pub(super) fn key(&self, hash: &BlockHash) -> BlockKey {
        BlockKey { namespace: self.namespace, group: GROUP, hash: *hash }
    }

    /// The digest by which peers ask for one of the namespace's blocks.
    pub(super) fn block_digest(&self, hash: &BlockHash) -> Digest {
        Digest::new(&self.digest, GROUP, hash)
    }
}
