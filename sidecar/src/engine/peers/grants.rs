//! Serving: blocks that a peer asks for are held in their slots until it has read them.

use mesh::transport::Label;
use shm_protocol::key::BlockKey;
use shm_protocol::pool::SlotRef;
use tiers::dram::HolderId;

use crate::engine::namespaces::Space;
use crate::engine::{Action, Core};

/// What one ask was granted.
#[derive(Debug, Default)]
pub(super) struct Granted {
    /// Slots, held, with the bytes of each, in the order asked.
    slots: Vec<(SlotRef, u64)>,
}

// === impl Granted ===

impl Granted {
    fn bytes(&self) -> u64 {
        self.slots.iter().map(|(_, bytes)| bytes).sum()
    }
}

// === impl Core ===

impl Core {
    /// Answers a peer's ask: what is here, in the length it says, and what is not.
    pub(super) fn asked(&mut self, ask: u64, blocks: &[Label], out: &mut Vec<Action>) {
        let mut granted = Granted::default();
        let slots = blocks.iter().map(|label| {
            let slot = self.grant(label);
            granted.slots.extend(slot.map(|slot| (slot, u64::from(label.bytes))));
            slot
        });
        let slots: Vec<Option<SlotRef>> = slots.collect();
        let Some(peers) = &mut self.peers else { return };
        peers.stats.asks += 1;
        peers.stats.asked_blocks += blocks.len() as u64;
        let before = peers.grants.insert(ask, granted);
        assert!(before.is_none(), "an ask is made once");
        out.push(Action::Grant { ask, slots });
    }

    /// Holds a block for a peer. An ask counts as no access: the peer keeps the block for itself from now on.
    fn grant(&mut self, label: &Label) -> Option<SlotRef> {
        let bytes = u64::from(label.bytes);
        let space = Space { digest: label.namespace, block_bytes: bytes };
        let namespace = self.namespaces.known(space).filter(|_| !self.draining);
        let peers = self.peers.as_mut()?;
        let key = namespace.map(|namespace| BlockKey { namespace, group: label.group, hash: label.hash });
        let Some(slot) = key.and_then(|key| self.dram.hold(&key, HolderId::NOBODY)) else {
            peers.stats.absent_blocks += 1;
            return None;
        };
        let room = peers.granted_bytes + bytes <= peers.granted_bytes_max;
        // The peer reads as many bytes as it has asked for.
        let fits = self.dram.block_bytes(slot) == Some(bytes);
        if room && fits {
            peers.granted_bytes += bytes;
            return Some(slot);
        }
        peers.stats.withheld_blocks += u64::from(fits);
        peers.stats.absent_blocks += u64::from(!fits);
        self.dram.unhold(slot, HolderId::NOBODY);
        None
    }

    /// The transport needs the slots of a grant no more.
    pub(super) fn released(&mut self, ask: u64, sent: u32) {
        let Some(peers) = &mut self.peers else { return };
        let granted = peers.grants.remove(&ask).expect("a grant is released once");
        peers.granted_bytes -= granted.bytes();
        let whole = granted.slots.iter().take(sent as usize);
        peers.stats.served_blocks += whole.len() as u64;
        peers.stats.served_bytes += whole.map(|(_, bytes)| bytes).sum::<u64>();
        granted.slots.into_iter().for_each(|(slot, _)| self.dram.unhold(slot, HolderId::NOBODY));
    }
}
