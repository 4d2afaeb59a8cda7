//! The mesh beside the tiers: blocks missing here are fetched from peers into DRAM, and blocks here in DRAM
//! are published to peers and given to them.
//!
//! - A slot of a fetch belongs to it until its end, even if the peer or the query is gone.
//! - A slot granted to a peer is held until its release; the transport always sends it.
//! - An inventory of a peer may be wrong: then the block is absent, and a miss.
//! - Namespaces of one engine alone (after its reset) are not published, and peers are not asked for them. A
//!   namespace private by its facts is published like any other: no peer asks for it, so it costs a few bytes
//!   at each peer.

mod distrusted;
mod fetches;
mod fruitless;
mod grants;
mod kept_asks;
mod leaving;
mod standing;
mod stats;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use mesh::digest::{Digest, DigestChange};
use mesh::directory::{Credit, Directory};
use mesh::transport::PeerNumber;
use shm_protocol::key::{BlockHash, BlockKey};
use tiers::ssd::ReadPace;

use self::distrusted::DistrustedDigests;
use self::fetches::{Again, PeerFetch};
use self::fruitless::FruitlessFetches;
use self::grants::PeerGrant;
pub(super) use self::kept_asks::KeptAsk;
use self::kept_asks::KeptAsks;
use self::leaving::Leaving;
pub(super) use self::standing::AHEAD_BYTES;
pub use self::stats::{FAULT_NAMES, PeersStats};
use super::context::Context;
use super::event::{Action, MeshEvent};
use super::namespaces::Binding;
use super::sources::Sources;
use super::tier::NewTier;

/// The core's part in the mesh.
#[derive(Debug)]
pub(super) struct MeshPeers {
    number: usize,
    directory: Directory,
    /// Fetches under way, by ticket.
    fetches: BTreeMap<u64, PeerFetch>,
    /// Blocks to be asked of other peers at the end of this event.
    again: Again,
    next_ticket: u64,
    fruitless: FruitlessFetches,
    /// Grants being read by peers, by ask.
    grants: BTreeMap<u64, PeerGrant>,
    granted_bytes: u64,
    /// Limit of the bytes granted at once: the rest of the pool stays evictable.
    granted_bytes_max: u64,
    /// Asks of peers that stand here.
    kept_asks: KeptAsks,
    /// Peers that keep standing asks.
    keeping_asks: BTreeSet<PeerNumber>,
    /// Peers that list their best blocks.
    listing: BTreeSet<PeerNumber>,
    leaving: Leaving,
    /// Blocks asked of peers and not announced by them.
    standing: HashMap<Digest, BlockKey>,
    /// The last keys of the promised prompts, as published last.
    promised: BTreeSet<Digest>,
    /// Number of blocks kept so far for other engines, at the last publication of changes.
    published_kept: u64,
    distrusted: DistrustedDigests,
    stats: PeersStats,
    /// The limit of requested bytes: the fetches of 2 s.
    pace: ReadPace,
}

/// Returns a tier of the members of a directory.
pub fn peer_tier(directory: Directory) -> NewTier {
    NewTier::new(MeshPeers::new(directory))
}

// === impl Sources: the mesh ===

impl Sources {
    /// Returns the mesh, if there is one, with its members, asks and promises.
    pub(super) fn mesh(&self) -> Option<&MeshPeers> {
        self.tier()
    }

    pub(super) fn mesh_mut(&mut self) -> Option<&mut MeshPeers> {
        self.tier_mut()
    }

    /// True if any peer can be asked for blocks of this engine.
    pub(super) fn may_ask_peers(&self, binding: &Binding, cx: &Context) -> bool {
        self.mesh().is_some_and(|peers| peers.may_ask(binding, cx))
    }
}

// === impl MeshPeers ===

impl MeshPeers {
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
            kept_asks: KeptAsks::default(),
            keeping_asks: BTreeSet::new(),
            listing: BTreeSet::new(),
            leaving: Leaving::default(),
            standing: HashMap::new(),
            promised: BTreeSet::new(),
            published_kept: 0,
            distrusted: DistrustedDigests::default(),
            stats: PeersStats::default(),
            pace: ReadPace::default(),
        }
    }

    /// Handles a message of the mesh.
    pub(super) fn apply_event(&mut self, event: MeshEvent, cx: &mut Context) {
        match event {
            MeshEvent::Joined(peer) => self.directory.add_peer(peer),
            MeshEvent::Greeted { peer, keeps_asks, lists_blocks } => {
                note_feature(&mut self.keeping_asks, peer, keeps_asks);
                note_feature(&mut self.listing, peer, lists_blocks);
            }
            MeshEvent::Leaving(peer) => _ = self.leaving.peers.insert(peer),
            MeshEvent::Listed { .. } => unreachable!("a list is for the core's prefetches"),
            MeshEvent::Left(peer) => {
                cx.produced.over = true;
                self.keeping_asks.remove(&peer);
                self.listing.remove(&peer);
                self.leaving.peers.remove(&peer);
                self.directory.remove_peer(peer);
                cx.arrivals.forget_peer(peer);
            }
            MeshEvent::Keeps { peer, filter } => self.directory.replace(peer, filter),
            MeshEvent::Changed { peer, changes } => self.change_inventory(peer, &changes, cx),
            MeshEvent::Promises { peer, promises } => {
                cx.produced.over |= self.directory.replace_promises(peer, promises);
            }
            MeshEvent::Asked { ask, peer, blocks, .. } => self.grant_blocks(ask, peer, &blocks, cx),
            MeshEvent::Withdrawn { ask } => self.answer_kept(ask, cx),
            MeshEvent::Released { ask, sent } => self.release_grant(ask, sent, cx),
        }
    }

    /// Applies changes to the known inventory of a peer.
    pub(super) fn change_inventory(&mut self, peer: PeerNumber, changes: &[DigestChange], cx: &mut Context) {
        if !self.directory.apply(peer, changes) {
            self.stats.resyncs += 1;
            cx.actions.push(Action::Resync { peer });
        }
        self.note_announced(changes, cx);
    }

    /// Publishes an event's changes in DRAM to the peers. Blocks on disks alone are not published: a peer
    /// would wait for this node's disk.
    fn tell_changes(&mut self, changes: &[(BlockKey, bool)], cx: &mut Context) {
        let changes = changes.iter().filter_map(|&(key, added)| {
            let digest = shared(&key, cx)?;
            Some(if added { DigestChange::Added(digest) } else { DigestChange::Removed(digest) })
        });
        let changes: Vec<DigestChange> = changes.collect();
        if !changes.is_empty() {
            self.stats.published += changes.len() as u64;
            let kept = cx.kept.block_count();
            let at_once = std::mem::replace(&mut self.published_kept, kept) < kept;
            cx.actions.push(Action::Publish { changes, at_once });
        }
    }

    /// Publishes the last keys of all promised prompts here, if they have changed. The whole set needs no
    /// order of changes: it is 256 digests of an engine at most.
    pub(super) fn tell_promises(&mut self, keys: Vec<BlockKey>, cx: &mut Context) {
        let promised: BTreeSet<Digest> = keys.iter().filter_map(|key| shared(key, cx)).collect();
        if promised != self.promised {
            cx.actions.push(Action::Promise(promised.iter().copied().collect()));
            self.promised = promised;
        }
    }

    /// Returns the peers with a promise of a prompt with one of these last keys.
    pub(super) fn promisers(&self, binding: &Binding, keys: &[BlockHash], cx: &Context) -> Vec<PeerNumber> {
        if !self.may_ask_for(binding, keys, cx) {
            return Vec::new();
        }
        // As a rule the last key of both prompts matches.
        self.directory.promisers(cx.now_ms, keys.iter().rev().map(|hash| binding.block_digest(hash)))
    }

    /// Returns the credit of a member's promises.
    pub(super) fn credit(&self, peer: PeerNumber) -> Option<&Credit> {
        self.directory.credit(peer)
    }

    /// Returns the same, to be changed. No promise counts while no peer is asked.
    pub(super) fn credit_mut(&mut self, peer: PeerNumber) -> Option<&mut Credit> {
        self.directory.credit_mut(peer).filter(|_| !self.fruitless.is_paused())
    }

    /// Returns the peers known to keep a block.
    pub(super) fn holders(&self, key: Digest) -> impl Iterator<Item = PeerNumber> + '_ {
        self.directory.holders(key)
    }

    /// Returns the directory of peers' blocks.
    pub(super) fn directory(&self) -> &Directory {
        &self.directory
    }

    pub(super) fn peers_stats(&self) -> PeersStats {
        PeersStats {
            peers: self.directory.peers().collect(),
            fetching: self.fetches.values().filter(|one| !one.stands()).map(PeerFetch::open_blocks).sum(),
            distrusted: self.distrusted.len() as u64,
            granted_bytes: self.granted_bytes,
            paused: self.fruitless.is_paused(),
            ..self.stats.clone()
        }
    }
}

/// Notes whether a peer has a feature.
fn note_feature(having: &mut BTreeSet<PeerNumber>, peer: PeerNumber, has: bool) {
    if has {
        having.insert(peer);
    } else {
        having.remove(&peer);
    }
}

/// Returns the digest of a block at peers, if its namespace is published.
fn shared(key: &BlockKey, cx: &Context) -> Option<Digest> {
    Some(Digest::new(cx.namespaces.shared(key.namespace)?, key.group, &key.hash))
}

#[cfg(test)]
mod tests;
