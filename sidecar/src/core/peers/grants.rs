//! Serving: blocks requested by a peer are held in their slots until it has read them.

use mesh::transport::{Label, PeerNumber};
use shm_protocol::key::BlockKey;
use shm_protocol::pool::SlotRef;
use tiers::dram::HolderId;

use super::Peers;
use crate::core::Action;
use crate::core::context::Context;
use crate::core::namespaces::Space;

/// Blocks held for one ask of a peer until it has read them.
#[derive(Debug)]
pub(super) struct Granted {
    peer: PeerNumber,
    /// Held slots with the bytes of each, in the order of the ask.
    slots: Vec<(SlotRef, u64)>,
}

// === impl Granted ===

impl Granted {
    fn bytes(&self) -> u64 {
        self.slots.iter().map(|(_, bytes)| bytes).sum()
    }
}

// === impl Peers ===

impl Peers {
    /// Answers a peer's ask: grants the blocks here with the stated length, and denies the others. A sidecar
    /// about to end gives nothing.
    pub(super) fn grant(&mut self, ask: u64, peer: PeerNumber, blocks: &[Label], cx: &mut Context) {
        let mut granted = Granted { peer, slots: Vec::new() };
        let mut has: u64 =
            self.grants.values().filter(|granted| granted.peer == peer).map(Granted::bytes).sum();
        let slots = blocks.iter().map(|label| {
            let slot = self.hold(label, has, cx)?;
            let bytes = u64::from(label.bytes);
            has += bytes;
            granted.slots.push((slot, bytes));
            Some(slot)
        });
        let slots: Vec<Option<SlotRef>> = slots.collect();
        self.stats.asks += 1;
        self.stats.asked_blocks += blocks.len() as u64;
        let before = self.grants.insert(ask, granted);
        assert!(before.is_none(), "an ask is made once");
        cx.actions.push(Action::Grant { ask, slots });
    }

    /// Holds a block for a peer with `has` bytes of grants. An ask counts as no access: the peer keeps its
    /// own copy from now on.
    fn hold(&mut self, label: &Label, has: u64, cx: &mut Context) -> Option<SlotRef> {
        let bytes = u64::from(label.bytes);
        let space = Space { digest: label.namespace, block_bytes: bytes };
        let namespace = cx.namespaces.known(space).filter(|_| !cx.draining);
        let key = namespace.map(|namespace| BlockKey { namespace, group: label.group, hash: label.hash });
        let Some(slot) = key.and_then(|key| cx.dram.hold(&key, HolderId::NOBODY)) else {
            self.stats.absent_blocks += 1;
            return None;
        };
        let room = self.granted_bytes + bytes <= self.granted_bytes_max && self.has_share(has, bytes);
        // The peer reads as many bytes as it has asked for.
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

    /// True if a peer with `has` bytes of grants may have `bytes` more: a slow reader leaves as much to all
    /// others as it has. The first block of each peer may be larger.
    fn has_share(&self, has: u64, bytes: u64) -> bool {
        let others = self.granted_bytes - has;
        has == 0 || has + bytes <= (self.granted_bytes_max - others) / 2
    }

    /// Ends a grant: the transport no longer needs its slots. Sent blocks are no longer kept for another
    /// engine: its own sidecar has them.
    pub(super) fn release(&mut self, ask: u64, sent: u32, cx: &mut Context) {
        let granted = self.grants.remove(&ask).expect("a grant is released once");
        self.granted_bytes -= granted.bytes();
        let whole = &granted.slots[..granted.slots.len().min(sent as usize)];
        self.stats.served_blocks += whole.len() as u64;
        self.stats.served_bytes += whole.iter().map(|(_, bytes)| bytes).sum::<u64>();
        let slots: Vec<SlotRef> = whole.iter().map(|(slot, _)| *slot).collect();
        cx.kept.loaded(&slots, HolderId::NOBODY, &mut cx.dram);
        granted.slots.into_iter().for_each(|(slot, _)| cx.dram.unhold(slot, HolderId::NOBODY));
    }
}
