//! Serving: blocks requested by a peer are held in their slots until the peer has read them.
//!
//! `granted_bytes_max` limits the bytes held for all peers together. This limit less the bytes held
//! for the other peers is the room of one peer, and the peer's share is half of its room. So a peer with many
//! asks and slow reads always leaves as much to all others as is held for it. The first block of a peer, while
//! no other is held for it, may exceed the share, but not the limit for all peers. A block over the share or
//! the limit is denied: the peer gets the same answer as for an absent block, and only the statistics here
//! tell the two apart.

use mesh::transport::{Label, PeerNumber};
use shm_protocol::key::BlockKey;
use shm_protocol::pool::SlotRef;
use tiers::dram::HolderId;

use super::MeshPeers;
use crate::core::Action;
use crate::core::context::Context;
use crate::core::namespaces::Space;

/// Blocks held for one ask of a peer until it has read them.
#[derive(Debug)]
pub(super) struct PeerGrant {
    peer: PeerNumber,
    /// The held slots, each with its bytes, in the order of the ask.
    slots: Vec<(SlotRef, u64)>,
}

// === impl PeerGrant ===

impl PeerGrant {
    fn slot_bytes(&self) -> u64 {
        self.slots.iter().map(|(_, bytes)| bytes).sum()
    }
}

// === impl MeshPeers ===

impl MeshPeers {
    /// Answers a peer's ask: grants its blocks, except those over a limit and those absent here or of another
    /// length. A draining sidecar grants nothing, unless it lets peers take its blocks.
    pub(super) fn grant_blocks(&mut self, ask: u64, peer: PeerNumber, blocks: &[Label], cx: &mut Context) {
        let mut granted = PeerGrant { peer, slots: Vec::new() };
        let mut has: u64 =
            self.grants.values().filter(|granted| granted.peer == peer).map(PeerGrant::slot_bytes).sum();
        let slots = blocks.iter().map(|label| {
            let slot = self.hold(label, has, cx)?;
            let bytes = u64::from(label.bytes);
            has += bytes;
            granted.slots.push((slot, bytes));
            Some(slot)
        });
        let slots: Vec<Option<SlotRef>> = slots.collect();
        self.leaving.note_activity(cx.now_ms);
        self.stats.asks += 1;
        self.stats.asked_blocks += blocks.len() as u64;
        let before = self.grants.insert(ask, granted);
        assert!(before.is_none(), "an ask is made once");
        cx.actions.push(Action::Grant { ask, slots });
    }

    /// Holds a block for a peer with `has` bytes held for it before; `None` denies the block. An ask does not
    /// count as a use of the block: the peer keeps its own copy from now on.
    fn hold(&mut self, label: &Label, has: u64, cx: &mut Context) -> Option<SlotRef> {
        let bytes = u64::from(label.bytes);
        let space = Space { digest: label.namespace, block_bytes: bytes };
        let namespace = cx.namespaces.known(space).filter(|_| !cx.draining || self.leaving.has_begun());
        let key = namespace.map(|namespace| BlockKey { namespace, group: label.group, hash: label.hash });
        let Some(slot) = key.and_then(|key| cx.dram.hold(&key, HolderId::NOBODY)) else {
            self.stats.absent_blocks += 1;
            return None;
        };
        let room = self.granted_bytes + bytes <= self.granted_bytes_max && self.has_share(has, bytes);
        // The peer reads as many bytes as its ask states.
        let fits = cx.dram.block_bytes(slot) == Some(bytes);
        if room && fits {
            self.granted_bytes += bytes;
            return Some(slot);
        }
        self.stats.withheld_blocks += u64::from(fits);
        self.stats.absent_blocks += u64::from(!fits);
        cx.dram.unhold(slot, HolderId::NOBODY);
        None
    }

    /// Returns true if a peer with `has` held bytes may get `bytes` more: both together are at most its
    /// share. A peer without held bytes gets one block of
    /// any length.
    fn has_share(&self, has: u64, bytes: u64) -> bool {
        let others = self.granted_bytes - has;
        has == 0 || has + bytes <= (self.granted_bytes_max - others) / 2
    }

    /// Ends a grant: the transport no longer needs its slots, and has sent its first `sent` blocks whole.
    /// Sent blocks are no longer kept for another engine: its own sidecar has them.
    pub(super) fn release_grant(&mut self, ask: u64, sent: u32, cx: &mut Context) {
        let granted = self.grants.remove(&ask).expect("a grant is released once");
        self.granted_bytes -= granted.slot_bytes();
        self.leaving.note_activity(cx.now_ms);
        let whole = &granted.slots[..granted.slots.len().min(sent as usize)];
        self.stats.served_blocks += whole.len() as u64;
        self.stats.served_bytes += whole.iter().map(|(_, bytes)| bytes).sum::<u64>();
        let slots: Vec<SlotRef> = whole.iter().map(|(slot, _)| *slot).collect();
        cx.kept.loaded(&slots, HolderId::NOBODY, &mut cx.dram);
        granted.slots.into_iter().for_each(|(slot, _)| cx.dram.unhold(slot, HolderId::NOBODY));
    }
}
