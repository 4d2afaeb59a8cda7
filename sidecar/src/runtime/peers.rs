//! Handles events of the mesh, and publishes its metrics.

use mesh::transport::Grant;
use shm_protocol::pool::SlotRef;
use shm_protocol::source::Source;

use super::Runtime;
use crate::core::CoreEvent;
use crate::ports::peers::{PeersEvent, PeersPort};

// === impl Runtime: peers ===

impl Runtime {
    /// Handles one event. Returns its cost in blocks, 0 if there was none.
    pub(super) fn hear_peer(&mut self) -> usize {
        let Some(event) = self.peers.as_mut().and_then(PeersPort::next_event) else { return 0 };
        let cost = event.cost().max(1);
        match event {
            PeersEvent::Mesh(event) => self.handle(CoreEvent::Mesh(event)),
            PeersEvent::Ends(ends) => self.end_jobs(Source::Peer, ends),
            PeersEvent::Checksum { slot, checksum } => {
                let noted = self.pool.set_checksum(slot, checksum);
                assert!(noted || !self.pool.is_whole(), "a granted slot stays as it is");
            }
        }
        cost
    }

    /// Grants slots to a peer for reading, with their known checksums.
    pub(super) fn grant_slots(&self, ask: u64, slots: &[Option<SlotRef>]) {
        let grant = |slot: &SlotRef| Grant { slot: *slot, checksum: self.pool.checksum(*slot) };
        let grants = slots.iter().map(|slot| slot.as_ref().map(grant));
        self.peers.as_ref().expect("the core has their part").grant_slots(ask, grants);
    }

    /// Publishes the metrics of the mesh.
    pub(super) fn show_peers(&mut self) {
        let (Some(stats), Some(peers)) = (self.core.peers_stats(), &self.peers) else { return };
        self.metrics.publish_refusals(peers.refusals());
        self.metrics.publish_pace(peers.pace());
        let listed = (peers.endpoints_empty(), peers.names_unresolved());
        self.metrics.publish_peers(&stats, listed, |peer| peers.name(peer));
    }
}
