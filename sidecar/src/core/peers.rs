//! The mesh beside the tiers: what a query misses here and a peer may have is fetched into DRAM, what lies in this node's
//! DRAM is given to peers that ask for it, and they are told of it.
//!
//! - A slot given to a fetch is the fetch's until its end, whatever became of the peer or of the query.
//! - A slot granted to a peer is held until its release, which the transport always sends.
//! - What a peer is said to have may be wrong: then the block is absent, and a miss.
//! - Namespaces that cannot be another engine's (those of an engine that was reset) are neither told of nor asked for.
//!   One that is private by its facts is told of like any other: nobody asks for it, so that costs a few bytes at each peer.

mod distrusted;
mod fetches;
mod fruitless;
mod grants;
mod stats;

use std::collections::{BTreeMap, BTreeSet};

use mesh::digest::{Change, Digest};
use mesh::directory::{Credit, Directory};
use mesh::transport::PeerNumber;
use shm_protocol::key::{BlockHash, BlockKey};
use tiers::ssd::Pace;

use self::distrusted::Distrusted;
use self::fetches::{Again, Fetching};
use self::fruitless::FruitlessFetches;
use self::grants::Granted;
pub use self::stats::{FAULT_NAMES, PeersStats};
use super::context::Context;
use super::event::{Action, Heard};
use super::namespaces::Binding;
use super::sources::Sources;
use super::tier::NewTier;

/// The core's part in the mesh.
#[derive(Debug)]
pub(super) struct Peers {
    number: usize,
    directory: Directory,
    /// What is under way, by ticket.
    fetches: BTreeMap<u64, Fetching>,
    /// Blocks to be asked of other peers at the end of this event.
    again: Again,
    next_ticket: u64,
    fruitless: FruitlessFetches,
    /// What peers are reading, by ask.
    grants: BTreeMap<u64, Granted>,
    granted_bytes: u64,
    /// Bytes that peers may be reading: the rest of the pool stays evictable.
    granted_bytes_max: u64,
    /// The last keys of the promised prompts that peers were told of last.
    promised: BTreeSet<Digest>,
    distrusted: Distrusted,
    stats: PeersStats,
    /// How much may be asked for: the fetches of 2 s.
    pace: Pace,
}

/// A tier of the members of a directory.
pub fn peer_tier(directory: Directory) -> NewTier {
    NewTier::new(Peers::new(directory))
}

// === impl Sources: the mesh ===

impl Sources {
    /// The mesh, if there is one, with its members, asks and promises.
    pub(super) fn mesh(&self) -> Option<&Peers> {
        self.tier()
    }

    pub(super) fn mesh_mut(&mut self) -> Option<&mut Peers> {
        self.tier_mut()
    }

    /// Whether anybody can be asked for blocks of this engine.
    pub(super) fn may_ask_peers(&self, binding: &Binding, cx: &Context) -> bool {
        self.mesh().is_some_and(|peers| peers.may_ask(binding, cx))
    }
}

// === impl Peers ===

impl Peers {
    fn new(directory: Directory) -> Self {
        Self {
            number: 0,
            directory,
            fetches: BTreeMap::new(),
            again: Again::default(),
            next_ticket: 1,
            fruitless: FruitlessFetches::default(),
            grants: BTreeMap::new(),
            granted_bytes: 0,
            granted_bytes_max: 0,
            promised: BTreeSet::new(),
            distrusted: Distrusted::default(),
            stats: PeersStats::default(),
            pace: Pace::default(),
        }
    }

    /// The mesh has said something.
    pub(super) fn hear(&mut self, heard: Heard, cx: &mut Context) {
        match heard {
            Heard::Joined(peer) => self.directory.join(peer),
            Heard::Left(peer) => {
                cx.produced.over = true;
                self.directory.leave(peer);
                cx.arrivals.forget_peer(peer);
            }
            Heard::Keeps { peer, filter } => self.directory.replace(peer, filter),
            Heard::Changed { peer, changes } => {
                if !self.directory.apply(peer, &changes) {
                    self.stats.resyncs += 1;
                    cx.actions.push(Action::Resync { peer });
                }
            }
            Heard::Promises { peer, promises } => {
                cx.produced.over |= self.directory.promise(peer, promises);
            }
            Heard::Asked { ask, peer, blocks } => self.grant(ask, peer, &blocks, cx),
            Heard::Released { ask, sent } => self.release(ask, sent, cx),
        }
    }

    /// Tells the peers what an event has changed in DRAM. What lies on disks alone is not told of: who asked for it would
    /// wait for this node's disk.
    fn tell(&mut self, changes: &[(BlockKey, bool)], cx: &mut Context) {
        let changes = changes.iter().filter_map(|&(key, added)| {
            let digest = shared(&key, cx)?;
            Some(if added { Change::Added(digest) } else { Change::Removed(digest) })
        });
        let changes: Vec<Change> = changes.collect();
        if !changes.is_empty() {
            self.stats.told += changes.len() as u64;
            cx.actions.push(Action::Publish(changes));
        }
    }

    /// Tells the peers the last keys of all prompts that are promised here, if that is news. Told whole, it needs no order of changes:
    /// it is 256 digests of an engine at most.
    pub(super) fn tell_promises(&mut self, keys: Vec<BlockKey>, cx: &mut Context) {
        let promised: BTreeSet<Digest> = keys.iter().filter_map(|key| shared(key, cx)).collect();
        if promised != self.promised {
            cx.actions.push(Action::Promise(promised.iter().copied().collect()));
            self.promised = promised;
        }
    }

    /// The peers with a promise of a prompt with one of these last keys.
    pub(super) fn promisers(&self, binding: &Binding, keys: &[BlockHash], cx: &Context) -> Vec<PeerNumber> {
        if !self.may_ask_for(binding, keys, cx) {
            return Vec::new();
        }
        // As a rule it is the last of both.
        self.directory.promisers(cx.now_ms, keys.iter().rev().map(|hash| binding.block_digest(hash)))
    }

    /// How far a member's promises are believed.
    pub(super) fn credit(&self, peer: PeerNumber) -> Option<&Credit> {
        self.directory.credit(peer)
    }

    /// The same, to be changed. No promise counts while no peer is asked.
    pub(super) fn credit_mut(&mut self, peer: PeerNumber) -> Option<&mut Credit> {
        self.directory.credit_mut(peer).filter(|_| !self.fruitless.is_paused())
    }

    /// Peers that are known to keep a block.
    pub(super) fn holders(&self, key: Digest) -> impl Iterator<Item = PeerNumber> + '_ {
        self.directory.holders(key)
    }

    pub(super) fn stats(&self) -> PeersStats {
        PeersStats {
            peers: self.directory.peers().collect(),
            fetching: self.fetches.values().map(Fetching::open).sum(),
            distrusted: self.distrusted.len() as u64,
            granted_bytes: self.granted_bytes,
            paused: self.fruitless.is_paused(),
            ..self.stats.clone()
        }
    }
}

/// The digest of a block by which peers know it, if they may be told of it.
fn shared(key: &BlockKey, cx: &Context) -> Option<Digest> {
    Some(Digest::new(cx.namespaces.shared(key.namespace)?, key.group, &key.hash))
}

#[cfg(test)]
mod tests;
