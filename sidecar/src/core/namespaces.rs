//! Namespaces: the forms and bindings of their blocks, and the short numbers of the namespaces seen in this
//! life.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use mesh::digest::Digest;
use shm_protocol::key::{BlockHash, BlockKey, GROUP, NamespaceDigest};
use tiers::dram::Whose;

/// Limit of remembered namespaces, of past and present engines: at 40 bytes each, 3 MB.
const NAMESPACES_MAX: usize = 65_536;

/// The form of one rank's blocks, without the weights: ranks of one run agree on it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Form {
    /// Digest of the facts as stated by the rank.
    pub(super) stated: NamespaceDigest,
    pub(super) shard_bytes: u64,
    pub(super) shards: u32,
    /// Its blocks are of use without those before them, as of windows and states.
    pub(super) parentless: bool,
}

/// Blocks of one namespace and one size. No engine finds blocks it could not load: those of another size,
/// left by an earlier life or a mistaken engine, are in another space.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Space {
    pub(super) digest: NamespaceDigest,
    pub(super) block_bytes: u64,
}

/// The binding of an engine: the namespace, owner and form of its blocks.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Binding {
    pub(super) base: NamespaceDigest,
    pub(super) digest: NamespaceDigest,
    pub(super) namespace: u32,
    /// The holder and quota of its blocks; the quota is the same for every salt.
    pub(super) whose: Whose,
    pub(super) shard_bytes: u64,
    pub(super) shards: u32,
    /// Its blocks are of use without those before them.
    pub(super) parentless: bool,
}

/// The record of a namespace with an id.
#[derive(Debug)]
struct Known {
    id: u32,
    /// The last request for its id, counted in requests.
    asked: u64,
    /// True if any block of it was kept.
    has_kept: bool,
}

/// Short ids of the namespaces seen in this epoch.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    ids: BTreeMap<Space, Known>,
    /// Digests of the namespaces published to peers, by id: the first [`NAMESPACES_MAX`] of an epoch. A
    /// forgotten namespace stays here: its blocks are still in memory, and peers must learn when they go.
    shared: BTreeMap<u32, NamespaceDigest>,
    /// Namespaces started again in this life: blocks kept by earlier lives are adopted under no id, and peers
    /// are asked for none.
    retired: BTreeSet<Space>,
    next: u32,
    asked: u64,
}

// === impl Namespaces ===

impl Namespaces {
    /// Returns the id of a namespace, perhaps a new one; `None` once all ids are used. Ids never repeat: no
    /// query finds blocks of a forgotten namespace, and they are evicted by their age.
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

    /// Returns the id of a namespace with blocks of an earlier life. `None` if it started again in this life,
    /// or if another namespace would have to be forgotten for it.
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

    /// Notes a kept block of this namespace.
    pub(super) fn note_kept(&mut self, space: Space) {
        self.ids.get_mut(&space).into_iter().for_each(|known| known.has_kept = true);
    }

    /// True if any block of this namespace was kept since it has its id.
    pub(super) fn has_kept(&self, space: Space) -> bool {
        self.ids.get(&space).is_some_and(|known| known.has_kept)
    }

    /// Publishes a namespace: peers may have blocks of it, and learn of those here.
    pub(super) fn share(&mut self, id: u32, digest: NamespaceDigest) {
        if self.shared.len() < NAMESPACES_MAX {
            self.shared.insert(id, digest);
        }
    }

    /// Returns the digest of a published namespace.
    pub(super) fn shared(&self, id: u32) -> Option<&NamespaceDigest> {
        self.shared.get(&id)
    }

    /// Returns every namespace with possibly kept blocks, by id.
    pub(super) fn all(&self) -> BTreeMap<u32, NamespaceDigest> {
        let known = self.ids.iter().map(|(space, known)| (known.id, space.digest));
        self.shared.iter().map(|(id, digest)| (*id, *digest)).chain(known).collect()
    }

    /// Returns the ids with possibly kept blocks of a namespace: one for each size of a block, and ids from
    /// before it was forgotten.
    pub(super) fn ids_of(&self, digest: NamespaceDigest) -> impl Iterator<Item = u32> + '_ {
        let space = |block_bytes| Space { digest, block_bytes };
        let known = self.ids.range(space(0)..=space(u64::MAX)).map(|(_, known)| known.id);
        known.chain(self.shared.iter().filter(move |(_, of)| **of == digest).map(|(id, _)| *id))
    }

    /// Returns the id of a namespace, if it has one.
    pub(super) fn known(&self, space: Space) -> Option<u32> {
        self.ids.get(&space).map(|known| known.id)
    }

    pub(super) fn forget(&mut self, space: Space) {
        self.ids.remove(&space);
    }

    /// True if a namespace started again in this life.
    pub(super) fn is_retired(&self, space: Space) -> bool {
        self.retired.contains(&space)
    }

    /// Starts a namespace again: none of its blocks kept so far is trusted any longer.
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
    /// Returns the bytes of a whole block, all shards.
    pub(super) fn block_bytes(&self) -> u64 {
        self.shard_bytes * u64::from(self.shards)
    }

    /// True if no other engine can have these blocks.
    pub(super) fn is_private(&self) -> bool {
        self.digest != self.base
    }

    pub(super) fn space(&self) -> Space {
        Space { digest: self.digest, block_bytes: self.block_bytes() }
    }

    /// Returns the key of one of the namespace's blocks.
    pub(super) fn key(&self, hash: &BlockHash) -> BlockKey {
        BlockKey { namespace: self.namespace, group: GROUP, hash: *hash }
    }

    /// Returns the digest of one of the namespace's blocks, as peers ask for it.
    pub(super) fn block_digest(&self, hash: &BlockHash) -> Digest {
        Digest::new(&self.digest, GROUP, hash)
    }
}
