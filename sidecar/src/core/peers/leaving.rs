//! Leaving: before this sidecar ends, peers take the blocks of no other pod. It tells them, they ask for
//! [lists](crate::core::best_blocks) and fetch the blocks as any others; nobody writes into another pod.

use std::collections::{BTreeSet, HashSet};

use mesh::transport::PeerNumber;
use shm_protocol::key::BlockKey;

use super::{MeshPeers, shared};
use crate::core::context::Context;

/// Milliseconds without a question, an ask or the end of a read of any peer: none is expected any more. A peer asks
/// within a tenth of a second.
const QUIET_MS: u64 = 1000;

/// The leaves of peers, and of this sidecar.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    /// Leaving peers.
    pub(super) peers: BTreeSet<PeerNumber>,
    /// The time of a peer's last activity since this sidecar began to leave.
    active_ms: Option<u64>,
    /// Blocks listed for a peer since then.
    listed: HashSet<BlockKey>,
}

// === impl Leaving ===

impl Leaving {
    pub(super) fn has_begun(&self) -> bool {
        self.active_ms.is_some()
    }

    pub(super) fn note_activity(&mut self, now_ms: u64) {
        self.active_ms.iter_mut().for_each(|active_ms| *active_ms = now_ms);
    }
}

// === impl MeshPeers ===

impl MeshPeers {
    /// True if any peer lists its best blocks.
    pub(in crate::core) fn lists_any(&self) -> bool {
        !self.listing.is_empty()
    }

    pub(in crate::core) fn listing_peers(&self) -> impl Iterator<Item = PeerNumber> {
        self.listing.difference(&self.leaving.peers).copied()
    }

    pub(in crate::core) fn leaving_peers(&self) -> impl Iterator<Item = PeerNumber> {
        self.listing.intersection(&self.leaving.peers).copied()
    }

    /// True if no peer announces a block; `None` if its namespace is not published.
    pub(in crate::core) fn is_unique(&self, key: &BlockKey, cx: &Context) -> Option<bool> {
        Some(self.directory.holders(shared(key, cx)?).next().is_none())
    }

    /// True if a block may be in a list for a peer.
    pub(in crate::core) fn may_list(&self, key: &BlockKey, asker: Option<PeerNumber>, cx: &Context) -> bool {
        if self.leaving.has_begun() {
            return !self.leaving.listed.contains(key) && self.is_unique(key, cx) == Some(true);
        }
        let known = |digest| asker.is_some_and(|peer| self.directory.keeps(peer, digest));
        shared(key, cx).is_some_and(|digest| !known(digest))
    }

    /// Notes the blocks of a list: while this sidecar leaves, no other list has them.
    pub(in crate::core) fn note_listed(&mut self, keys: Vec<BlockKey>, cx: &Context) {
        if self.leaving.has_begun() {
            self.leaving.note_activity(cx.now_ms);
            self.leaving.listed.extend(keys);
        }
    }

    /// Begins to leave. Returns false if no peer would take a block.
    pub(in crate::core) fn begin_leaving(&mut self, cx: &Context) -> bool {
        let takes = self.listing_peers().next().is_some();
        self.leaving.active_ms = takes.then_some(cx.now_ms);
        takes
    }

    /// True while peers take blocks, or may begin to.
    pub(in crate::core) fn is_leaving(&self, now_ms: u64) -> bool {
        let active = self.leaving.active_ms;
        active.is_some_and(|active_ms| !self.grants.is_empty() || now_ms < active_ms + QUIET_MS)
    }
}
