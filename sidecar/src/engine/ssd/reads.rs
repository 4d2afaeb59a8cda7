//! Reads: what a query misses in DRAM and a device keeps comes back into DRAM.

use shm_protocol::key::BlockKey;
use shm_protocol::pool::SlotRef;
use tiers::ssd::Ticket;

use crate::engine::namespaces::Binding;
use crate::engine::{Action, Core};

// === impl Core ===

impl Core {
    /// Whether a device keeps the block, in this size.
    pub(in crate::engine) fn disk_keeps(&self, key: &BlockKey, block_bytes: u64) -> bool {
        self.ssd.as_ref().and_then(|ssd| ssd.log.keeps(key)).map(u64::from) == Some(block_bytes)
    }

    /// Begins reads as far as there is room; those that were begun.
    pub(in crate::engine) fn begin_reads(
        &mut self,
        binding: &Binding,
        wanted: &[BlockKey],
        out: &mut Vec<Action>,
    ) -> Vec<BlockKey> {
        let bytes = binding.block_bytes();
        let mut begun = Vec::with_capacity(wanted.len());
        for key in wanted {
            let filled = self.dram.begin_fill(*key, bytes, binding.whose);
            self.apply_evictions(out);
            let (Ok(slot), Some(ssd)) = (filled, &mut self.ssd) else { break };
            let Some(ticket) = ssd.log.read(key, slot) else {
                self.dram.abandon(slot);
                break;
            };
            out.push(Action::FillSlot { slot, namespace: binding.digest, key: *key });
            ssd.reads.insert(ticket, *key);
            self.arrivals.begin(*key, slot, bytes);
            begun.push(*key);
        }
        begun
    }

    /// A read has ended: its block is in the slot, or is not to be had.
    pub(super) fn read_ended(
        &mut self,
        now_ms: u64,
        ticket: Ticket,
        slot: SlotRef,
        ok: bool,
        out: &mut Vec<Action>,
    ) {
        let Some(ssd) = &mut self.ssd else { return };
        let key = ssd.reads.remove(&ticket).expect("a read ends once");
        ssd.stats.promoted_blocks += u64::from(ok);
        // The device has compared the block's checksum with its own, and keeps that to itself.
        self.arrived(now_ms, &key, slot, ok.then_some(0), out);
    }

    /// A read is late, and its device taken for broken.
    pub(super) fn give_up_read(&mut self, now_ms: u64, ticket: Ticket, out: &mut Vec<Action>) {
        let key = self.ssd.as_ref().and_then(|ssd| ssd.reads.get(&ticket).copied());
        key.iter().for_each(|key| self.give_up(now_ms, key, out));
    }
}
