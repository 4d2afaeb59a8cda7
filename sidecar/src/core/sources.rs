//! What else than DRAM keeps blocks: slots are filled from disks and from peers, blocks of earlier lives are verified in theirs,
//! and what becomes of each is told to those who wait for it.

use std::collections::BTreeSet;

use mesh::transport::Done;
use shm_protocol::announcement::Medium;
use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::pool::SlotRef;
use shm_protocol::source::Source;
use tiers::dram::Dram;
use tiers::ssd;

use super::adoption::Verification;
use super::announcer::Announcer;
use super::arrivals::Waiter;
use super::context::Context;
use super::event::{Action, Heard};
use super::namespaces::Binding;
use super::peers::{Again, Peers, SPANS_MAX, Span};
use super::ssd::Ssd;
use super::timing::Timed;

#[derive(Debug, Default)]
pub(super) struct Sources {
    pub(super) verification: Verification,
    pub(super) ssd: Option<Ssd>,
    /// Whether disks may hold blocks that nobody here has read, and a later start may: one was left out, or a part was unreadable.
    pub(super) unread: bool,
    pub(super) peers: Option<Peers>,
}

/// How far a run was followed.
#[derive(Debug, Default)]
pub(super) struct Followed {
    /// Blocks in DRAM, held for the engine that asked.
    pub(super) held: Vec<SlotRef>,
    /// Blocks on their way.
    pub(super) coming: Vec<BlockKey>,
    /// Blocks of an earlier life to be verified, in DRAM.
    adopted: Vec<BlockKey>,
    /// Blocks to be read from a device, each with its place in the run.
    on_disk: Vec<(usize, BlockKey)>,
    /// Blocks to be fetched from peers.
    at_peers: Vec<Span>,
}

// === impl Sources ===

impl Sources {
    /// Whether there may be blocks that no query finds in DRAM.
    pub(super) fn any(&self, dram: &Dram) -> bool {
        self.ssd.is_some() || self.peers.is_some() || dram.stats().unverified_blocks > 0
    }

    /// Whether every block that any engine may find, now or after another start, is known of here.
    pub(super) fn knows_all(&self, cx: &Context) -> bool {
        let recovers = self.ssd.as_ref().is_some_and(Ssd::recovers);
        self.peers.is_none() && !cx.opening && !recovers && !self.unread
    }

    /// Whether peers read blocks of DRAM, or devices write some or are to.
    pub(super) fn busy(&self) -> bool {
        self.peers.as_ref().is_some_and(Peers::granting) || self.ssd.as_ref().is_some_and(Ssd::busy)
    }

    /// Goes on with what nobody waits for: blocks are verified and written.
    pub(super) fn go_on(&mut self, cx: &mut Context) {
        if !cx.draining {
            self.verification.go_on(cx);
        }
        if let Some(ssd) = &mut self.ssd {
            cx.actions.extend(ssd.drain_jobs(&mut cx.dram).map(Action::Transfer));
        }
    }

    /// Tells peers, and engines that ask for it, what has changed.
    pub(super) fn tell(&mut self, announcer: &mut Announcer, cx: &mut Context) {
        let mut changes = std::mem::take(&mut cx.changes);
        changes.extend(cx.dram.drain_changes());
        if let Some(peers) = &mut self.peers {
            peers.tell(&changes, cx);
        }
        announcer.note(Medium::Memory, changes.drain(..));
        cx.changes = changes;
        if let Some(ssd) = &mut self.ssd {
            announcer.note(Medium::Disk, ssd.log.drain_changes());
        }
    }

    /// Whether the first block of a run may be had in DRAM soon; by who `awaits` it, also from a save. What peers have of the run behind
    /// it tells whether they have it.
    pub(super) fn may_arrive(
        &self,
        binding: &Binding,
        run: &[BlockHash],
        awaits: bool,
        cx: &Context,
    ) -> bool {
        let Some(hash) = run.first() else { return false };
        let key = binding.key(hash);
        cx.arrivals.is_in_time(&key, awaits).unwrap_or_else(|| {
            awaits && cx.dram.filling(&key).is_some()
                || cx.dram.is_adopted(&key)
                || self.disk_keeps(&key, binding.block_bytes())
                || self.peers.as_ref().is_some_and(|peers| peers.may_have(binding, run, cx))
        })
    }

    /// Whether anybody can be asked for blocks of this engine.
    pub(super) fn may_ask_peers(&self, binding: &Binding, cx: &Context) -> bool {
        self.peers.as_ref().is_some_and(|peers| peers.may_ask(binding, cx))
    }

    /// Whether a device keeps the block, in this size.
    fn disk_keeps(&self, key: &BlockKey, block_bytes: u64) -> bool {
        self.ssd.as_ref().is_some_and(|ssd| ssd.keeps(key, block_bytes))
    }

    /// Begins to bring a run into DRAM, as far as it can be had and takes no more than 1 of `parts` of what may be on its way, all
    /// together and to each disk.
    pub(super) fn bring(
        &mut self,
        binding: &Binding,
        run: &[BlockHash],
        parts: u64,
        awaits: bool,
        cx: &mut Context,
    ) -> Followed {
        let most = cx.arrivals.bytes_max() / parts;
        let mut followed = self.follow(binding, run, most, awaits, cx);
        followed.coming.extend(self.verification.begin(&followed.adopted, cx));
        if let Some(gap) = self.begin_reads(binding, &mut followed, parts, cx) {
            followed.at_peers.iter_mut().for_each(|span| span.end_before(gap));
        }
        self.begin_fetches(binding, &mut followed, cx);
        followed
    }

    /// Follows a run, as long as no more than `most` bytes are on their way, and of engines at work each has its part of those; a
    /// block alone always may be. A block that a save is filling ends the run, but of who `awaits` it.
    fn follow(
        &self,
        binding: &Binding,
        run: &[BlockHash],
        most: u64,
        awaits: bool,
        cx: &mut Context,
    ) -> Followed {
        let mut followed = Followed::default();
        let (block_bytes, holder) = (binding.block_bytes(), binding.whose.holder);
        let mut room = (most.max(block_bytes).saturating_sub(cx.arrivals.bytes()) / block_bytes) as usize;
        if let others @ 2.. = cx.dram.at_work() {
            let filling = cx.dram.holdings(holder).filling;
            room =
                room.min(((most / others).max(block_bytes).saturating_sub(filling) / block_bytes) as usize);
        }
        let held_max = (cx.dram.room(holder) / block_bytes) as usize;
        for (at, hash) in run.iter().enumerate() {
            let key = binding.key(hash);
            if followed.held.len() == held_max {
                break;
            }
            if let Some(slot) = cx.dram.hold(&key, holder) {
                followed.held.push(slot);
                continue;
            }
            match cx.arrivals.is_in_time(&key, awaits) {
                Some(true) => {
                    followed.coming.push(key);
                    continue;
                }
                Some(false) => break,
                None => {}
            }
            if awaits && let Some(slot) = cx.dram.filling(&key) {
                cx.arrivals.begin_saved(key, slot, cx.now_ms);
                followed.coming.push(key);
                continue;
            }
            if cx.dram.is_adopted(&key) {
                followed.adopted.push(key);
                continue;
            }
            if room == 0 {
                break;
            }
            if self.disk_keeps(&key, block_bytes) {
                followed.on_disk.push((at, key));
            } else {
                let ahead = &run[at..run.len().min(at + room)];
                let span = self.span(binding, &mut followed.at_peers, at, ahead, cx);
                let Some(span) = span else { break };
                span.push(at, key);
            }
            room -= 1;
        }
        followed
    }

    /// The span that reaches `at`: the last one, or a new one that the directory has for what is `ahead` from there. None where the block
    /// at `at` is not to be asked for.
    fn span<'a>(
        &self,
        binding: &Binding,
        spans: &'a mut Vec<Span>,
        at: usize,
        ahead: &[BlockHash],
        cx: &Context,
    ) -> Option<&'a mut Span> {
        let peers = self.peers.as_ref()?;
        if peers.distrusts(binding, ahead.first()?) {
            return None;
        }
        if spans.last().is_none_or(|span| span.end() <= at) {
            let more = spans.len() < SPANS_MAX;
            spans.push(more.then(|| peers.probe(binding, at, ahead, cx)).flatten()?);
        }
        spans.last_mut()
    }

    /// Begins reads as far as there is room, and adds them to what is coming. The place of the first block that is not read.
    fn begin_reads(
        &mut self,
        binding: &Binding,
        followed: &mut Followed,
        parts: u64,
        cx: &mut Context,
    ) -> Option<usize> {
        for &(at, key) in &followed.on_disk {
            let (Ok(slot), Some(ssd)) = (cx.take_slot(key, binding), &mut self.ssd) else { return Some(at) };
            if !ssd.read(cx.now, key, slot, parts) {
                cx.dram.abandon(slot);
                return Some(at);
            }
            cx.fill(slot, key, binding);
            cx.arrivals.begin(key, slot, binding.block_bytes(), Source::Disk);
            followed.coming.push(key);
        }
        None
    }

    /// Begins fetches as far as there is room, and adds their blocks to what is coming.
    fn begin_fetches(&mut self, binding: &Binding, followed: &mut Followed, cx: &mut Context) {
        for span in &followed.at_peers {
            let mut slots = Vec::with_capacity(span.keys().len());
            for key in span.keys() {
                let Ok(slot) = cx.begin_fill(key, binding) else { break };
                cx.arrivals.begin(key, slot, binding.block_bytes(), Source::Peer);
                followed.coming.push(key);
                slots.push(slot);
            }
            let peers = self.peers.as_mut().expect("they were asked for the span");
            peers.fetch(binding, span, &slots, cx);
            if slots.len() < span.keys().len() {
                return;
            }
        }
    }

    /// A block has ended: with its checksum (zero: nobody knows it) it is whole, without it is not to be had. Who has waited for it.
    fn arrived(
        &mut self,
        key: &BlockKey,
        slot: SlotRef,
        checksum: Option<u64>,
        cx: &mut Context,
    ) -> Vec<Waiter> {
        let (trusted, waiting) = cx.arrivals.end(key);
        match checksum.filter(|_| trusted && self.commit_arrived(key, slot, cx)) {
            Some(checksum) => cx.actions.push(Action::CommitSlot { slot, checksum }),
            None => cx.abandon(slot),
        }
        waiting
    }

    /// A block is whole that came from elsewhere: a disk may know what became of it before.
    fn commit_arrived(&mut self, key: &BlockKey, slot: SlotRef, cx: &mut Context) -> bool {
        let standing = self.ssd.as_ref().and_then(|ssd| ssd.log.standing(key));
        let committed = cx.dram.commit_back(slot, standing);
        if committed && let Some(ssd) = &mut self.ssd {
            ssd.log.came(key);
        }
        committed
    }

    /// A block of an earlier life was verified; it is kept if it is what was written. Who has waited for it.
    pub(super) fn verified(
        &mut self,
        key: &BlockKey,
        slot: SlotRef,
        whole: bool,
        cx: &mut Context,
    ) -> Vec<Waiter> {
        let (trusted, waiting) = cx.arrivals.end(key);
        self.verification.end(slot, whole, trusted, cx);
        waiting
    }

    /// A device has ended a job: the block that it read, and who has waited for it.
    pub(super) fn transferred(
        &mut self,
        done: ssd::Done,
        cx: &mut Context,
    ) -> Option<(BlockKey, Vec<Waiter>)> {
        let read = self.ssd.as_mut()?.ended(cx.now_ms, done, &mut cx.dram)?;
        if read.ok {
            cx.took(Timed::DiskRead, read.since);
        }
        // The device has compared the block's checksum with its own, and keeps that to itself.
        Some((read.key, self.arrived(&read.key, read.slot, read.ok.then_some(0), cx)))
    }

    /// Time passed: blocks that are late, each to be given up.
    pub(super) fn late(&mut self, now_ms: u64) -> Vec<BlockKey> {
        let mut late = self.ssd.as_mut().map(|ssd| ssd.tick(now_ms)).unwrap_or_default();
        late.extend(self.peers.as_ref().map(|peers| peers.late(now_ms)).unwrap_or_default());
        late
    }

    /// The mesh has said something. The ends of fetches are [`Sources::fetched`]'s, one by one.
    pub(super) fn heard(&mut self, heard: Heard, cx: &mut Context) -> Vec<Done> {
        self.peers.as_mut().map(|peers| peers.hear(heard, cx)).unwrap_or_default()
    }

    /// A block of a fetch has ended, and who has waited for it; none where it is `again` to be asked for, since somebody still `waits`.
    pub(super) fn fetched(
        &mut self,
        end: &Done,
        waits: impl Fn(&Waiter) -> bool,
        again: &mut Again,
        cx: &mut Context,
    ) -> Option<(BlockKey, Vec<Waiter>)> {
        let peers = self.peers.as_mut()?;
        let is_wished = |key: &BlockKey| !cx.draining && cx.arrivals.is_wished(key, waits);
        let (key, slot, fetched) = peers.ended(cx.now_ms, end, is_wished, again)?;
        if let Some(fetched) = &fetched {
            cx.took(Timed::PeerRead, fetched.since);
        }
        Some((key, self.arrived(&key, slot, fetched.map(|fetched| fetched.checksum), cx)))
    }

    /// Asks other peers for what one has failed to give. Blocks that none may have, and who has waited for each.
    pub(super) fn fetch_again(&mut self, again: Again, cx: &mut Context) -> Vec<(BlockKey, Vec<Waiter>)> {
        let left = self.peers.as_mut().map(|peers| peers.fetch_again(again, cx)).unwrap_or_default();
        left.into_iter().map(|(key, slot)| (key, self.arrived(&key, slot, None, cx))).collect()
    }

    /// Engines disagree about a namespace: no later life finds what disks hold of it. Nor does this one where it `begins_anew`.
    pub(super) fn distrust(&mut self, binding: &Binding, begins_anew: bool) {
        let (namespace, digest) = (binding.namespace, binding.digest);
        self.ssd.iter_mut().for_each(|ssd| ssd.log.distrust(namespace, digest, begins_anew));
    }

    /// Removes blocks from memory and from what is known of disks, those on their way too. Leases of them are the caller's to end.
    pub(super) fn remove(&mut self, keys: &BTreeSet<BlockKey>, cx: &mut Context) {
        for key in keys {
            cx.dram.remove(key);
            self.ssd.iter_mut().for_each(|ssd| _ = ssd.log.remove(key));
        }
        cx.arrivals.distrust(|key| keys.contains(key));
        cx.apply_evictions();
    }
}
