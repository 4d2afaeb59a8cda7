//! What else than DRAM keeps blocks: slots are filled from an ordered list of tiers, blocks of earlier lives are verified in theirs,
//! and what becomes of each is told to those who wait for it.

use std::any::Any;
use std::collections::BTreeSet;

use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::pool::SlotRef;
use shm_protocol::source::Source;
use tiers::dram::Dram;

use super::adoption::Verification;
use super::announcer::Announcer;
use super::arrivals::{SourceLane, Waiter};
use super::context::Context;
use super::event::{Action, JobEnd};
use super::namespaces::Binding;
use super::tier::{NewTier, Notice, ReadEnd, Span, Tier, TierStats};
use super::timing::Timed;

#[derive(Debug, Default)]
pub(super) struct Sources {
    pub(super) verification: Verification,
    /// The tiers below DRAM, by number: a block is looked for in this order.
    pub(super) tiers: Vec<Box<dyn Tier>>,
    /// Figures of each.
    pub(super) stats: Vec<TierStats>,
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
    /// Blocks to be read from each tier.
    spans: Vec<Vec<Span>>,
}

// === impl Sources ===

impl Sources {
    /// Adds a tier behind the others.
    pub(super) fn add_tier(&mut self, tier: NewTier, dram: &mut Dram) {
        let tier = tier.attached(self.tiers.len(), dram);
        self.stats.push(TierStats { source: tier.source(), ..TierStats::default() });
        self.tiers.push(tier);
    }

    /// The first tier of this kind, if there is one.
    pub(super) fn tier<T: Tier>(&self) -> Option<&T> {
        self.tiers.iter().find_map(|tier| (&**tier as &dyn Any).downcast_ref())
    }

    pub(super) fn tier_mut<T: Tier>(&mut self) -> Option<&mut T> {
        self.tiers.iter_mut().find_map(|tier| (&mut **tier as &mut dyn Any).downcast_mut())
    }

    /// Whether a tier whose blocks are said to come from there keeps this one.
    pub(super) fn has(&self, source: Source, key: &BlockKey) -> bool {
        self.tiers.iter().any(|tier| tier.source() == source && tier.has(key))
    }

    /// Whether there may be blocks that no query finds in DRAM.
    pub(super) fn any(&self, dram: &Dram) -> bool {
        !self.tiers.is_empty() || dram.stats().unverified_blocks > 0
    }

    /// Whether every block that any engine may find, now or after another start, is known of here.
    pub(super) fn knows_all(&self, cx: &Context) -> bool {
        !cx.opening && !cx.unread && self.mesh().is_none() && !self.tiers.iter().any(|tier| tier.recovers())
    }

    /// Tells all tiers.
    pub(super) fn tell_tiers(&mut self, notice: Notice<'_>, cx: &mut Context) {
        self.tiers.iter_mut().for_each(|tier| tier.take_notice(notice, cx));
    }

    /// Goes on with what nobody waits for: blocks are verified and written.
    pub(super) fn go_on(&mut self, cx: &mut Context) {
        if !cx.draining {
            self.verification.go_on(cx);
        }
        for (key, standing) in cx.dram.drain_gone().collect::<Vec<_>>() {
            self.tell_tiers(Notice::Left(&key, standing), cx);
        }
        self.tell_tiers(Notice::Over, cx);
    }

    /// Tells tiers, and engines that ask for it, what has changed.
    pub(super) fn tell(&mut self, announcer: &mut Announcer, cx: &mut Context) {
        let mut changes = std::mem::take(&mut cx.changes);
        changes.extend(cx.dram.drain_changes());
        self.tell_tiers(Notice::Changed(&changes), cx);
        announcer.note(Source::Memory, changes.drain(..));
        cx.changes = changes;
        for tier in &mut self.tiers {
            announcer.note(tier.source(), tier.drain_changes().into_iter());
        }
    }

    /// Whether the first block of a run may be had in DRAM soon; by who `awaits` it, also from a save. What a tier has of the run behind
    /// that block may tell whether it has it.
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
                || self.tiers.iter().any(|tier| tier.may_have(binding, run, cx))
        })
    }

    /// Begins to bring a run into DRAM, as far as it can be had and takes no more than 1 of `parts` of what may be on its way, all
    /// together and in each tier.
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
        let mut gap = usize::MAX;
        for (number, spans) in std::mem::take(&mut followed.spans).into_iter().enumerate() {
            for span in spans {
                gap = self.begin_span(number, binding, &span, (parts, gap), &mut followed.coming, cx);
            }
        }
        followed
    }

    /// Begins reads of a span as far as there is room, and adds them to what is coming. Nothing is read from the place `gap` of the run
    /// on; the place of the first block that is not read, by now.
    fn begin_span(
        &mut self,
        tier: usize,
        binding: &Binding,
        span: &Span,
        (parts, mut gap): (u64, usize),
        coming: &mut Vec<BlockKey>,
        cx: &mut Context,
    ) -> usize {
        let mut slots = Vec::with_capacity(span.blocks.len());
        for (at, key) in span.wanted().take_while(|(at, _)| *at < gap) {
            let Some(slot) = self.begin_block(tier, binding, key, parts, cx) else {
                gap = at;
                break;
            };
            coming.push(key);
            slots.push(slot);
        }
        self.tiers[tier].read(binding, span, &slots, cx);
        gap
    }

    /// Begins the read of a block, if there is a slot for it and its tier can in time.
    fn begin_block(
        &mut self,
        tier: usize,
        binding: &Binding,
        key: BlockKey,
        parts: u64,
        cx: &mut Context,
    ) -> Option<SlotRef> {
        let (slot, bytes) = (cx.take_slot(key, binding).ok()?, binding.block_bytes());
        if !self.tiers[tier].begin_read(key, slot, bytes, parts, cx.now) {
            cx.dram.abandon(slot);
            return None;
        }
        cx.fill(slot, key, binding);
        cx.arrivals.begin(key, slot, bytes, self.stats[tier].source);
        self.stats[tier].begin_read(bytes, cx.now);
        Some(slot)
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
        let spans = self.tiers.iter().map(|_| Vec::new()).collect();
        let mut followed = Followed { spans, ..Followed::default() };
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
            let ahead = &run[at..run.len().min(at + room)];
            let Some(span) = self.span(binding, &mut followed.spans, at, ahead, cx) else { break };
            span.push(at, key);
            room -= 1;
        }
        followed
    }

    /// The source of the first block of a run.
    pub(super) fn lane(&self, binding: &Binding, run: &[BlockHash], cx: &Context) -> Option<SourceLane> {
        self.tiers.iter().find_map(|tier| tier.lane(binding, run, cx))
    }

    /// How many of the first blocks of a run are in memory or can be brought there, as far as is known.
    pub(super) fn reach(&self, binding: &Binding, run: &[BlockHash], cx: &Context) -> usize {
        let (mut at, mut kept) = (0, Vec::with_capacity(run.len()));
        cx.dram.lookup(binding.namespace, run, &mut kept);
        for spans in 0.. {
            at += kept[at..].iter().take_while(|kept| **kept).count();
            let found = self.tiers.iter().filter_map(|tier| tier.find(binding, &run[at..], spans, cx));
            match found.map(|span| span.reach).max() {
                Some(reach @ 1..) => at += reach,
                _ => break,
            }
        }
        at
    }

    /// The span that reaches over `at` of the first tier that holds that block: its last one, or a new one for what is `ahead` from
    /// there.
    fn span<'a>(
        &self,
        binding: &Binding,
        spans: &'a mut [Vec<Span>],
        at: usize,
        ahead: &[BlockHash],
        cx: &Context,
    ) -> Option<&'a mut Span> {
        let number = self.tiers.iter().zip(&mut *spans).position(|(tier, spans)| {
            if spans.last().is_none_or(|span| span.end() <= at) {
                let found = tier.find(binding, ahead, spans.len(), cx);
                spans.extend(found.map(|span| Span { from: at, ..span }));
            }
            spans.last().is_some_and(|span| at < span.end())
        })?;
        spans[number].last_mut()
    }

    /// A block has ended: with its checksum it is whole, without it is not to be had. Who has waited for it.
    fn arrived(&mut self, tier: usize, read: &ReadEnd, cx: &mut Context) -> (BlockKey, Vec<Waiter>) {
        let ReadEnd { key, slot, checksum, .. } = *read;
        let bytes = cx.dram.block_bytes(slot).expect("a slot belongs to a read until its end");
        self.stats[tier].end_read(read, bytes, cx.now);
        let (trusted, waiting) = cx.arrivals.end(&key, checksum.is_some(), cx.now_ms);
        match checksum.filter(|_| trusted && self.commit_arrived(&key, slot, cx)) {
            Some(checksum) => cx.actions.push(Action::CommitSlot { slot, checksum }),
            None => cx.abandon(slot),
        }
        (key, waiting)
    }

    /// A block is whole that came from elsewhere: a tier may know what became of it before.
    fn commit_arrived(&mut self, key: &BlockKey, slot: SlotRef, cx: &mut Context) -> bool {
        let standing = self.tiers.iter().find_map(|tier| tier.standing(key));
        let committed = cx.dram.commit_back(slot, standing);
        if committed {
            self.tell_tiers(Notice::Came(key), cx);
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
        let (trusted, waiting) = cx.arrivals.end(key, whole, cx.now_ms);
        self.verification.end(slot, whole, trusted, cx);
        waiting
    }

    /// A job of a tier has ended, or blocks were found there. The block that it read, and who has waited for it; none where the tier
    /// goes on with it, as somebody still `waits`.
    pub(super) fn ended(
        &mut self,
        tier: usize,
        end: JobEnd,
        waits: impl Fn(&Waiter) -> bool,
        cx: &mut Context,
    ) -> Option<(BlockKey, Vec<Waiter>)> {
        let read = self.tiers[tier].ended(end, &waits, cx)?;
        if read.checksum.is_some() {
            cx.took(Timed::Read(self.stats[tier].source), read.since);
        }
        Some(self.arrived(tier, &read, cx))
    }

    /// A tier goes on with reads that have failed. Blocks that are not to be had, and who has waited for each.
    pub(super) fn retry(&mut self, tier: usize, cx: &mut Context) -> Vec<(BlockKey, Vec<Waiter>)> {
        let left = self.tiers[tier].retry(cx);
        left.iter().map(|read| self.arrived(tier, read, cx)).collect()
    }

    /// Removes blocks from memory and from all tiers, those on their way too. Leases of them are the caller's to end.
    pub(super) fn remove(&mut self, keys: &BTreeSet<BlockKey>, cx: &mut Context) {
        for key in keys {
            cx.dram.remove(key);
            self.tell_tiers(Notice::Removed(key), cx);
        }
        cx.arrivals.distrust(|key| keys.contains(key));
        cx.apply_evictions();
    }
}
