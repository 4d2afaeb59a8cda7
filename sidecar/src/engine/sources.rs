//! What else than DRAM keeps blocks: slots are filled from disks and from peers, and what those parts say is passed on.

use mesh::transport::Done;
use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::pool::SlotRef;
use tiers::ssd;

use super::namespaces::Binding;
use super::peers::{Again, Peers, Span};
use super::{Action, Core, Heard};

// === impl Core: blocks of earlier lives ===

impl Core {
    /// Begins to verify blocks that somebody asks for; those that were begun.
    pub(super) fn begin_verifications(
        &mut self,
        wanted: &[BlockKey],
        out: &mut Vec<Action>,
    ) -> Vec<BlockKey> {
        let begun = self.verification.begin(wanted, &mut self.dram, &mut self.arrivals);
        out.extend(self.verification.drain_actions());
        begun
    }

    /// Goes on with what nobody asks for.
    pub(super) fn verify_ahead(&mut self, out: &mut Vec<Action>) {
        if !self.draining {
            self.verification.go_on(&mut self.dram, &mut self.arrivals);
        }
        out.extend(self.verification.drain_actions());
    }

    /// A block was verified; `trusted`, unless its engine was found to compute something else meanwhile.
    pub(super) fn end_verification(
        &mut self,
        slot: SlotRef,
        whole: bool,
        trusted: bool,
        out: &mut Vec<Action>,
    ) {
        self.verification.end(slot, whole, trusted, self.draining, &mut self.dram);
        out.extend(self.verification.drain_actions());
    }
}

// === impl Core: disks ===

impl Core {
    /// Whether a device keeps the block, in this size.
    pub(super) fn disk_keeps(&self, key: &BlockKey, block_bytes: u64) -> bool {
        self.ssd.as_ref().is_some_and(|ssd| ssd.keeps(key, block_bytes))
    }

    /// Begins reads as far as there is room; those that were begun.
    pub(super) fn begin_reads(
        &mut self,
        binding: &Binding,
        wanted: &[BlockKey],
        out: &mut Vec<Action>,
    ) -> Vec<BlockKey> {
        let mut begun = Vec::with_capacity(wanted.len());
        for key in wanted {
            let filled = self.dram.begin_fill(*key, binding.block_bytes(), binding.whose);
            self.apply_evictions(out);
            let (Ok(slot), Some(ssd)) = (filled, &mut self.ssd) else { break };
            if !ssd.read(*key, slot) {
                self.dram.abandon(slot);
                break;
            }
            self.expect(*key, slot, binding, out);
            begun.push(*key);
        }
        begun
    }

    /// A block is on its way into a slot that was empty.
    fn expect(&mut self, key: BlockKey, slot: SlotRef, binding: &Binding, out: &mut Vec<Action>) {
        out.push(Action::FillSlot { slot, namespace: binding.digest, key });
        self.arrivals.begin(key, slot, binding.block_bytes());
    }

    /// A device has ended a job.
    pub(super) fn transferred(&mut self, now_ms: u64, done: ssd::Done, out: &mut Vec<Action>) {
        let Some(ssd) = &mut self.ssd else { return };
        if let Some(read) = ssd.ended(now_ms, done, &mut self.dram) {
            // The device has compared the block's checksum with its own, and keeps that to itself.
            self.arrived(now_ms, &read.key, read.slot, read.ok.then_some(0), out);
        }
    }

    /// Time passed: what is late is waited for no longer.
    pub(super) fn give_up_late(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        let reads = self.ssd.as_mut().map(|ssd| ssd.tick(now_ms)).unwrap_or_default();
        reads.iter().for_each(|key| self.give_up(now_ms, key, out));
        let fetches = self.peers.as_ref().map(|peers| peers.late(now_ms)).unwrap_or_default();
        fetches.iter().for_each(|key| self.give_up(now_ms, key, out));
    }

    /// A block was committed.
    pub(super) fn offer_saved(
        &mut self,
        slot: SlotRef,
        key: BlockKey,
        namespace: NamespaceDigest,
        bytes: u64,
    ) {
        if let Some(ssd) = &mut self.ssd {
            ssd.offer_saved(slot, key, namespace, bytes, &self.dram);
        }
    }

    /// A block that is kept was asked for or saved again.
    pub(super) fn offer_again(&mut self, key: BlockKey, namespace: NamespaceDigest, bytes: u64) {
        if let Some(ssd) = &mut self.ssd {
            ssd.offer_again(key, namespace, bytes);
        }
    }

    /// What every event may have made room for.
    pub(super) fn run_ssd(&mut self, out: &mut Vec<Action>) {
        if let Some(ssd) = &mut self.ssd {
            out.extend(ssd.drain_jobs(&mut self.dram).map(Action::Transfer));
        }
    }
}

// === impl Core: peers ===

impl Core {
    /// Whether anybody can be asked for blocks of this engine.
    pub(super) fn may_ask_peers(&self, binding: &Binding) -> bool {
        self.peers.as_ref().is_some_and(|peers| peers.may_ask(binding))
    }

    /// Who may have the begin of a run, which is at `from` of what was asked for.
    pub(super) fn ask_directory(
        &self,
        now_ms: u64,
        binding: &Binding,
        from: usize,
        hashes: &[BlockHash],
    ) -> Option<Span> {
        self.peers.as_ref()?.probe(now_ms, binding, from, hashes)
    }

    /// Begins fetches as far as there is room; the blocks that were begun.
    pub(super) fn begin_fetches(
        &mut self,
        now_ms: u64,
        binding: &Binding,
        spans: &[Span],
        out: &mut Vec<Action>,
    ) -> Vec<BlockKey> {
        let mut all = Vec::new();
        for span in spans {
            let mut slots = Vec::with_capacity(span.keys().len());
            for key in span.keys() {
                let filled = self.dram.begin_fill(key, binding.block_bytes(), binding.whose);
                self.apply_evictions(out);
                let Ok(slot) = filled else { break };
                self.expect(key, slot, binding, out);
                all.push(key);
                slots.push(slot);
            }
            let peers = self.peers.as_mut().expect("they were asked for the span");
            peers.fetch(now_ms, binding, span, &slots);
            out.extend(peers.drain_actions());
            if slots.len() < span.keys().len() {
                break;
            }
        }
        all
    }

    /// The mesh has said something.
    pub(super) fn heard(&mut self, now_ms: u64, heard: Heard, out: &mut Vec<Action>) {
        let Some(peers) = &mut self.peers else { return };
        match heard {
            Heard::Joined(peer) => peers.join(peer),
            Heard::Left(peer) => peers.leave(peer),
            Heard::Keeps { peer, filter } => peers.replace(peer, filter),
            Heard::Changed { peer, changes } => peers.change(peer, &changes),
            Heard::Fetched(ends) => self.fetched(now_ms, &ends, out),
            Heard::Asked { ask, blocks } => {
                let namespaces = (!self.draining).then_some(&self.namespaces);
                peers.grant(ask, &blocks, &mut self.dram, namespaces);
            }
            Heard::Released { ask, sent } => peers.release(ask, sent, &mut self.dram),
        }
        self.run_peers(out);
    }

    /// Blocks of fetches have ended. Those that another peer may have are asked of it, together.
    fn fetched(&mut self, now_ms: u64, ends: &[Done], out: &mut Vec<Action>) {
        if ends.iter().any(|end| end.result.is_ok()) {
            self.schedulers.values_mut().for_each(|scheduler| scheduler.patience.restore());
        }
        let mut again = Again::default();
        for end in ends {
            let Some(peers) = &mut self.peers else { return };
            let is_wished = |key: &BlockKey| !self.draining && self.arrivals.wished(key);
            if let Some((key, slot, checksum)) = peers.ended(now_ms, end, is_wished, &mut again) {
                self.arrived(now_ms, &key, slot, checksum, out);
            }
        }
        if let Some(peers) = &mut self.peers {
            peers.fetch_again(now_ms, again);
        }
    }

    /// The sidecar is to end: nobody waits for fetches.
    pub(super) fn cancel_fetches(&mut self, out: &mut Vec<Action>) {
        self.peers.iter_mut().for_each(Peers::cancel);
        self.run_peers(out);
    }

    /// Tells the peers what an event has changed in DRAM.
    pub(super) fn tell_peers(&mut self, out: &mut Vec<Action>) {
        self.peers.iter_mut().for_each(|peers| peers.tell(&mut self.dram, &self.namespaces));
        self.run_peers(out);
    }

    fn run_peers(&mut self, out: &mut Vec<Action>) {
        self.peers.iter_mut().for_each(|peers| out.extend(peers.drain_actions()));
    }
}
