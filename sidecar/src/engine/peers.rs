//! The mesh beside the tiers: what a query misses here and a peer may have is fetched into DRAM, what lies in this node's
//! DRAM is given to peers that ask for it, and they are told of it.
//!
//! - A slot given to a fetch is the fetch's until its end, whatever became of the peer or of the query.
//! - A slot granted to a peer is held until its release, which the transport always sends.
//! - What a peer is said to have may be wrong: then the block is absent, and a miss.
//! - Namespaces that cannot be another engine's (those of an engine that was reset) are neither told of nor asked for.
//!   One that is private by its facts is told of like any other: nobody asks for it, so that costs a few bytes at each peer.

mod fetches;
mod grants;
mod stats;

use std::collections::BTreeMap;

use mesh::digest::{Change, Digest};
use mesh::directory::Directory;

use self::fetches::Fetching;
pub(super) use self::fetches::Span;
use self::grants::Granted;
pub use self::stats::{FAULT_NAMES, PeersStats};
use super::{Action, Core, Heard, arrivals};

/// The core's part in the mesh.
#[derive(Debug)]
pub(super) struct Peers {
    directory: Directory,
    /// What is under way, by ticket.
    fetches: BTreeMap<u64, Fetching>,
    next_ticket: u64,
    /// What peers are reading, by ask.
    grants: BTreeMap<u64, Granted>,
    granted_bytes: u64,
    /// Bytes that peers may be reading: the rest of the pool stays evictable.
    granted_bytes_max: u64,
    pub(super) stats: PeersStats,
}

// === impl Core ===

impl Core {
    /// The same core in a mesh, whose peers `directory` knows. Of a tier that is empty yet.
    pub fn with_peers(mut self, directory: Directory) -> Self {
        self.dram.watch();
        self.peers = Some(Peers {
            directory,
            fetches: BTreeMap::new(),
            next_ticket: 1,
            grants: BTreeMap::new(),
            granted_bytes: 0,
            granted_bytes_max: self.dram.config().pool_bytes / arrivals::PART,
            stats: PeersStats::default(),
        });
        self
    }

    /// The mesh has said something.
    pub(super) fn heard(&mut self, now_ms: u64, heard: Heard, out: &mut Vec<Action>) {
        let Some(peers) = &mut self.peers else { return };
        match heard {
            Heard::Joined(peer) => peers.directory.join(peer),
            Heard::Left(peer) => peers.directory.leave(peer),
            Heard::Keeps { peer, filter } => peers.directory.replace(peer, filter),
            Heard::Changed { peer, changes } => {
                if !peers.directory.apply(peer, &changes) {
                    out.push(Action::Resync { peer });
                }
            }
            Heard::Fetched(ends) => self.fetched(now_ms, &ends, out),
            Heard::Asked { ask, blocks } => self.asked(ask, &blocks, out),
            Heard::Released { ask, sent } => self.released(ask, sent),
        }
    }

    /// Tells the peers what an event has changed in DRAM. What lies on disks alone is not told of: who asked for it would
    /// wait for this node's disk.
    pub(super) fn tell_peers(&mut self, out: &mut Vec<Action>) {
        let Some(peers) = &mut self.peers else { return };
        let namespaces = &self.namespaces;
        let changes = self.dram.drain_changes().filter_map(|(key, added)| {
            let digest = Digest::new(namespaces.shared(key.namespace)?, key.group, &key.hash);
            Some(if added { Change::Added(digest) } else { Change::Removed(digest) })
        });
        let changes: Vec<Change> = changes.collect();
        if !changes.is_empty() {
            peers.stats.told += changes.len() as u64;
            out.push(Action::Publish(changes));
        }
    }

    /// Whether a peer reads from this pool.
    pub(super) fn granting(&self) -> bool {
        self.peers.as_ref().is_some_and(|peers| !peers.grants.is_empty())
    }

    /// Figures of the mesh, if there is one.
    pub fn peers_stats(&self) -> Option<PeersStats> {
        let peers = self.peers.as_ref()?;
        let fetching = peers.fetches.values().map(Fetching::open).sum();
        Some(PeersStats {
            peers: peers.directory.peers().collect(),
            fetching,
            granted_bytes: peers.granted_bytes,
            miss_wait_breakers: self.lost_patience(),
            ..peers.stats.clone()
        })
    }
}

#[cfg(test)]
mod tests;
