//! An operator's requests: the number of kept blocks of each namespace, the places of certain blocks, and the
//! eviction of a namespace. Work on all blocks goes in parts, and engines are answered in between.

use std::collections::{BTreeMap, BTreeSet};

use mesh::digest::Digest;
use mesh::transport::PeerNumber;
use shm_protocol::key::{BlockHash, BlockKey, GROUP, NamespaceDigest};
use shm_protocol::source::Source;
use tiers::dram::{Dram, Walk};

use super::Base;

/// Blocks of a namespace, by where they are kept.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Kept {
    pub memory: u64,
    /// In this node's tiers below memory, or being written there.
    pub below: u64,
}

/// The places of a block.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Location {
    /// In memory, or in the pool file and still to be verified.
    pub memory: bool,
    /// In a tier of this node below memory.
    pub below: bool,
    /// Peers known to keep it; this knowledge is late and sometimes wrong.
    pub peers: Vec<PeerNumber>,
}

/// The position of a walk over memory and then over all tiers.
#[derive(Copy, Clone, Debug)]
pub(super) enum At {
    Memory(Walk),
    /// A tier's number, and the position of the walk over its blocks.
    Tier(usize, usize),
}

/// A count of all blocks, under way.
#[derive(Debug)]
pub struct Survey {
    /// `None` at the end.
    at: Option<At>,
    /// Counts by the number of the namespace.
    kept: BTreeMap<u32, Kept>,
}

/// The removal of a namespace's blocks, under way.
#[derive(Debug)]
pub struct Eviction {
    /// `None` at the end.
    at: Option<At>,
    numbers: BTreeSet<u32>,
    removed: Kept,
}

// === impl At ===

impl Default for At {
    fn default() -> Self {
        Self::Memory(Walk::default())
    }
}

impl At {
    /// Shows some of the blocks, each with its place. Returns the position behind them; `None` at the end.
    pub(super) fn step(self, base: &Base, mut see: impl FnMut(&BlockKey, Source)) -> Option<Self> {
        match self {
            Self::Memory(walk) => {
                let next = base.cx.dram.walk(walk, |key| see(key, Source::Memory));
                Some(next.map_or(Self::Tier(0, 0), Self::Memory))
            }
            Self::Tier(number, at) => {
                let tier = base.sources.tiers.get(number)?;
                let next = tier.walk(at, &mut |key| see(key, tier.source()));
                Some(next.map_or(Self::Tier(number + 1, 0), |at| Self::Tier(number, at)))
            }
        }
    }
}

// === impl Kept ===

impl Kept {
    fn at(&mut self, medium: Source) -> &mut u64 {
        match medium {
            Source::Memory => &mut self.memory,
            _ => &mut self.below,
        }
    }
}

// === impl Survey ===

impl Default for Survey {
    fn default() -> Self {
        Self { at: Some(At::default()), kept: BTreeMap::new() }
    }
}

impl Survey {
    /// Counts some blocks. False once all are counted.
    pub(super) fn step(&mut self, base: &Base) -> bool {
        let kept = &mut self.kept;
        let count = |key: &BlockKey, medium| *kept.entry(key.namespace).or_default().at(medium) += 1;
        self.at = self.at.and_then(|at| at.step(base, count));
        self.at.is_some()
    }

    /// Returns the counts by namespace. Blocks of a salted namespace count to the unsalted one.
    pub(super) fn result(&self, base: &Base) -> BTreeMap<NamespaceDigest, Kept> {
        let mut names = base.cx.namespaces.all();
        names.extend(base.engines.private_namespaces());
        let mut result: BTreeMap<NamespaceDigest, Kept> = BTreeMap::new();
        for (number, kept) in &self.kept {
            let Some(name) = names.get(number) else { continue };
            let sum = result.entry(*name).or_default();
            sum.memory += kept.memory;
            sum.below += kept.below;
        }
        result
    }
}

// === impl Eviction ===

impl Eviction {
    /// Returns the removal of all blocks of a namespace and of its salted forms. `None`: the namespace is
    /// unknown.
    pub(super) fn new(namespace: NamespaceDigest, base: &Base) -> Option<Self> {
        let numbers = numbers_of(namespace, base);
        (!numbers.is_empty()).then(|| Self { at: Some(At::default()), numbers, removed: Kept::default() })
    }

    /// Returns the numbers of the namespaces whose blocks are removed.
    pub(super) fn numbers(&self) -> &BTreeSet<u32> {
        &self.numbers
    }

    /// Removes some blocks. False once the last one is gone. Leases go on: an engine can still load leased
    /// blocks, and their slots are free afterwards.
    pub(super) fn step(&mut self, base: &mut Base) -> bool {
        let (mut keys, numbers, removed) = (BTreeSet::new(), &self.numbers, &mut self.removed);
        let see = |key: &BlockKey, medium| {
            if numbers.contains(&key.namespace) && keys.insert(*key) {
                *removed.at(medium) += 1;
            }
        };
        self.at = self.at.and_then(|at| at.step(base, see));
        base.sources.remove(&keys, &mut base.cx);
        self.at.is_some()
    }

    /// Returns the blocks removed so far, by place.
    pub fn removed(&self) -> Kept {
        self.removed
    }
}

/// Returns the places of each of these blocks of a namespace.
pub(super) fn locate(namespace: NamespaceDigest, hashes: &[BlockHash], base: &Base) -> Vec<Location> {
    let numbers = numbers_of(namespace, base);
    let locate = |hash: &BlockHash| {
        let keys = || numbers.iter().map(|&namespace| BlockKey { namespace, group: GROUP, hash: *hash });
        let mesh = base.sources.mesh();
        let digest = Digest::new(&namespace, GROUP, hash);
        Location {
            memory: keys().any(|key| in_memory(&key, &base.cx.dram)),
            below: base.sources.tiers.iter().any(|tier| keys().any(|key| tier.has(&key))),
            peers: mesh.map(|peers| peers.holders(digest).collect()).unwrap_or_default(),
        }
    };
    hashes.iter().map(locate).collect()
}

fn in_memory(key: &BlockKey, dram: &Dram) -> bool {
    let mut found = Vec::with_capacity(1);
    dram.lookup(key.namespace, &[key.hash], &mut found);
    found == [true] || dram.is_adopted(key)
}

fn numbers_of(namespace: NamespaceDigest, base: &Base) -> BTreeSet<u32> {
    let private = base.engines.private_namespaces().into_iter().filter(|(_, of)| *of == namespace);
    base.cx.namespaces.ids_of(namespace).chain(private.map(|(number, _)| number)).collect()
}
