//! Standing fetches: promised blocks are asked of the promising peer before they are committed there.
//!
//! The blocks have slots here from the ask on. A question does not count them as on their way before the peer
//! has announced them, since they may come much later, or never. A fetch that ends without a block is no fault
//! of its peer, and no other peer is asked.

use mesh::digest::{Digest, DigestChange};
use mesh::transport::{PeerNumber, StandingTerms};
use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::pool::SlotRef;
use shm_protocol::source::Source;

use super::MeshPeers;
use super::fetches::{PeerFetch, WantedBlock};
use crate::core::context::Context;
use crate::core::namespaces::Binding;
use crate::core::sources::Sources;

/// Bytes of a question's standing blocks: enough for a fast wire until the next ones are asked for.
pub(in crate::core) const AHEAD_BYTES: u64 = 64 << 20;
/// Milliseconds for which an ask may stand at the peer. The fetch ends later by itself, so the peer's answer is
/// here first.
const PATIENCE_MS: u32 = 1500;

// === impl Sources ===

impl Sources {
    /// Asks one of the promising `peers` for the blocks of a run that begins at this place of the prompt, as far
    /// as there is room. Most of them may already be asked for. Returns true if it asked for any.
    pub(in crate::core) fn stand_for(
        &mut self,
        binding: &Binding,
        peers: &[PeerNumber],
        (place, run): (u32, &[BlockHash]),
        cx: &mut Context,
    ) -> bool {
        let Some(number) = self.tiers.iter().position(|tier| tier.source() == Source::Peer) else {
            return false;
        };
        let Some(mesh) = self.mesh().filter(|mesh| mesh.may_ask_for(binding, run, cx)) else { return false };
        let Some(peer) = peers.iter().copied().find(|peer| mesh.keeping_asks.contains(peer)) else {
            return false;
        };
        let trusted = run.iter().take_while(|hash| !mesh.distrusts(binding, hash)).count();
        let (run, bytes) = (&run[..trusted], binding.block_bytes());
        let key = |hash: &BlockHash| binding.block_key(hash);
        let asked = run.iter().take_while(|hash| cx.arrivals.is_standing(&key(hash))).count();
        if cx.draining || 2 * asked > run.len() {
            return false;
        }
        let room = (cx.arrivals.standing_room() / bytes) as usize;
        let mut blocks = Vec::new();
        for key in run[asked..].iter().take(room).map(key) {
            let Ok(slot) = cx.begin_fill(key, binding) else { break };
            cx.arrivals.begin_standing(key, slot, bytes);
            self.stats[number].begin_read(bytes, cx.now);
            blocks.push((key, slot));
        }
        let asks = !blocks.is_empty();
        if asks && let Some(mesh) = self.mesh_mut() {
            mesh.post_standing(peer, binding, (place + asked as u32, blocks), cx);
        }
        asks
    }
}

// === impl MeshPeers ===

impl MeshPeers {
    fn post_standing(
        &mut self,
        peer: PeerNumber,
        binding: &Binding,
        (place, blocks): (u32, Vec<(BlockKey, SlotRef)>),
        cx: &mut Context,
    ) {
        self.standing.extend(blocks.iter().map(|(key, _)| (binding.block_digest(&key.hash), *key)));
        self.stats.standing_blocks += blocks.len() as u64;
        let wanted = blocks.into_iter().map(|(key, slot)| WantedBlock { key, slot }).collect();
        let terms = StandingTerms { patience_ms: PATIENCE_MS, place };
        self.post_fetch(PeerFetch::standing(peer, cx.now, binding, wanted), Some(terms), cx);
    }

    /// Notes blocks announced by a peer: the standing ones among them are on their way.
    pub(super) fn note_announced(&mut self, changes: &[DigestChange], cx: &mut Context) {
        if self.standing.is_empty() {
            return;
        }
        for change in changes {
            if let DigestChange::Added(digest) = change
                && let Some(key) = self.standing.remove(digest)
            {
                cx.arrivals.end_standing(&key);
            }
        }
    }

    /// Notes the end of a standing block.
    pub(super) fn forget_standing(&mut self, digest: Digest) {
        self.standing.remove(&digest);
    }
}
