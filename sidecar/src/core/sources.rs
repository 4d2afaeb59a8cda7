//! Sources of blocks other than DRAM. Slots are filled from an ordered list of tiers, blocks of earlier lives
//! are verified in their slots, and the end of each block is passed to its waiters.

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
use super::tier::{NewTier, Notice, ReadEnd, Tier, TierSpan, TierStats};
use super::timing::Timed;

#[derive(Debug, Default)]
pub(super) struct Sources {
    pub(super) verification: Verification,
    /// The tiers below DRAM, by number: blocks are looked for in this order.
    pub(super) tiers: Vec<Box<dyn Tier>>,
    /// Figures of each.
    pub(super) stats: Vec<TierStats>,
}

/// The blocks of a run, as far as it was followed.
#[derive(Debug, Default)]
pub(super) struct Followed {
    /// Blocks in DRAM, held for the asking engine.
    pub(super) held: Vec<SlotRef>,
    /// Blocks on their way.
    pub(super) coming: Vec<BlockKey>,
    /// Blocks of an earlier life to be verified, in DRAM.
    adopted: Vec<BlockKey>,
    /// Blocks to be read from each tier.
    spans: Vec<Vec<TierSpan>>,
}

// === impl Sources ===

impl Sources {
    /// Adds a tier behind the others.
    pub(super) fn add_tier(&mut self, tier: NewTier, dram: &mut Dram) {
        let tier = tier.attached(self.tiers.len(), dram);
        self.stats.push(TierStats { source: tier.source(), ..TierStats::default() });
        self.tiers.push(tier);
    }

    /// Returns the first tier of this kind, if there is one.
    pub(super) fn tier<T: Tier>(&self) -> Option<&T> {
        self.tiers.iter().find_map(|tier| (&**tier as &dyn Any).downcast_ref())
    }

    pub(super) fn tier_mut<T: Tier>(&mut self) -> Option<&mut T> {
        self.tiers.iter_mut().find_map(|tier| (&mut **tier as &mut dyn Any).downcast_mut())
    }

    /// True if a tier with this source keeps the block.
    pub(super) fn has_block(&self, source: Source, key: &BlockKey) -> bool {
        self.tiers.iter().any(|tier| tier.source() == source && tier.has(key))
    }

    /// True if there may be blocks a query does not find in DRAM.
    pub(super) fn any(&self, dram: &Dram) -> bool {
        !self.tiers.is_empty() || dram.stats().unverified_blocks > 0
    }

    /// True if every block an engine may find, now or after another start, is known here.
    pub(super) fn knows_all(&self, cx: &Context) -> bool {
        !cx.opening && !cx.unread && self.mesh().is_none() && !self.tiers.iter().any(|tier| tier.recovers())
    }

    /// Passes a notice to all tiers.
    pub(super) fn tell_tiers(&mut self, notice: Notice<'_>, cx: &mut Context) {
        self.tiers.iter_mut().for_each(|tier| tier.take_notice(notice, cx));
    }

    /// Goes on with work without a waiting engine: blocks are verified and written.
    pub(super) fn go_on(&mut self, cx: &mut Context) {
        if !cx.draining {
            self.verification.go_on(cx);
        }
        for (key, standing) in cx.dram.drain_gone().collect::<Vec<_>>() {
            self.tell_tiers(Notice::Left(&key, standing), cx);
        }
        self.tell_tiers(Notice::Over, cx);
    }

    /// Passes the changes of blocks to tiers, and to engines that request them.
    pub(super) fn tell_changes(&mut self, announcer: &mut Announcer, cx: &mut Context) {
        let mut changes = std::mem::take(&mut cx.changes);
        changes.extend(cx.dram.drain_changes());
        self.tell_tiers(Notice::Changed(&changes), cx);
        cx.prefetched.note_changes(&changes);
        announcer.note_changes(Source::Memory, changes.drain(..));
        cx.changes = changes;
        for tier in &mut self.tiers {
            announcer.note_changes(tier.source(), tier.drain_changes().into_iter());
        }
    }

    /// True if the first block of a run may soon be in DRAM; with `awaits`, also from a save. A tier may use
    /// its blocks behind the first one to decide whether it has that one.
    pub(super) fn may_arrive(
        &self,
        binding: &Binding,
        run: &[BlockHash],
        awaits: bool,
        cx: &Context,
    ) -> bool {
        let Some(hash) = run.first() else { return false };
        let key = binding.block_key(hash);
        cx.arrivals.is_in_time(&key, awaits).unwrap_or_else(|| {
            awaits && cx.dram.filling(&key).is_some()
                || cx.dram.is_adopted(&key)
                || self.tiers.iter().any(|tier| tier.may_have(binding, run, cx))
        })
    }

    /// Begins to bring a run into DRAM as far as it can be had, with 1 of `parts` of the limit for arrivals
    /// at most, in all and in each tier.
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
        followed.coming.extend(self.verification.begin_blocks(&followed.adopted, cx));
        let mut gap = usize::MAX;
        for (number, spans) in std::mem::take(&mut followed.spans).into_iter().enumerate() {
            for span in spans {
                gap = self.begin_span(number, binding, &span, (parts, gap), &mut followed.coming, cx);
            }
        }
        followed
    }

    /// Begins reads of a span as far as there is room, and adds them to `coming`. Nothing is read from the
    /// place `gap` of the run on. Returns the place of the first block not read so far.
    fn begin_span(
        &mut self,
        tier: usize,
        binding: &Binding,
        span: &TierSpan,
        (parts, mut gap): (u64, usize),
        coming: &mut Vec<BlockKey>,
        cx: &mut Context,
    ) -> usize {
        let mut slots = Vec::with_capacity(span.blocks.len());
        for (at, key) in span.wanted_blocks().take_while(|(at, _)| *at < gap) {
            let Some(slot) = self.begin_block(tier, binding, key, parts, cx) else {
                gap = at;
                break;
            };
            coming.push(key);
            slots.push(slot);
        }
        self.tiers[tier].read_span(binding, span, &slots, cx);
        gap
    }

    /// Begins the read of a block; `None` if there is no slot for it, or its tier cannot read it in time.
    pub(super) fn begin_block(
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
        cx.arrivals.begin_arrival(key, slot, bytes, self.stats[tier].source);
        self.stats[tier].begin_read(bytes, cx.now);
        Some(slot)
    }

    /// Follows a run while no more than `most` bytes are on their way, with an equal part for each engine at
    /// work; a single block is always allowed. Without `awaits`, a block being filled by a save ends the run.
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
            let key = binding.block_key(hash);
            if followed.held.len() == held_max {
                break;
            }
            if let Some(slot) = cx.dram.hold(&key, holder) {
                cx.prefetched.use_block(&key);
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
            span.push_block(at, key);
            room -= 1;
        }
        followed
    }

    /// Returns the source of the first block of a run.
    pub(super) fn lane(&self, binding: &Binding, run: &[BlockHash], cx: &Context) -> Option<SourceLane> {
        self.tiers.iter().find_map(|tier| tier.lane(binding, run, cx))
    }

    /// Returns the source of the first block of a run on this node, below memory.
    pub(super) fn lane_here(&self, binding: &Binding, run: &[BlockHash], cx: &Context) -> Option<SourceLane> {
        let here = self.tiers.iter().filter(|tier| tier.source() != Source::Peer);
        here.filter_map(|tier| tier.lane(binding, run, cx)).next()
    }

    /// Returns the number of a run's first blocks in memory or to be brought there, as far as is known.
    pub(super) fn reach(&self, binding: &Binding, run: &[BlockHash], cx: &Context) -> usize {
        self.walk_run(binding, run, cx, |_, _| {})
    }

    /// Does the same, and shows each of these blocks that is not in memory, with its source.
    pub(super) fn walk_run(
        &self,
        binding: &Binding,
        run: &[BlockHash],
        cx: &Context,
        mut see: impl FnMut(&BlockHash, Source),
    ) -> usize {
        let (mut at, mut kept) = (0, Vec::with_capacity(run.len()));
        cx.dram.lookup(binding.namespace, run, &mut kept);
        for spans in 0.. {
            at += kept[at..].iter().take_while(|kept| **kept).count();
            let found = self.tiers.iter().filter_map(|tier| {
                tier.find(binding, &run[at..], spans, cx).map(|span| (span.reach, tier.source()))
            });
            match found.max_by_key(|(reach, _)| *reach) {
                Some((reach @ 1.., source)) => {
                    (at..at + reach).filter(|at| !kept[*at]).for_each(|at| see(&run[at], source));
                    at += reach;
                }
                _ => break,
            }
        }
        at
    }

    /// Returns the span over `at` of the first tier with this block: the tier's last span, or a new one for
    /// the run `ahead` from there.
    fn span<'a>(
        &self,
        binding: &Binding,
        spans: &'a mut [Vec<TierSpan>],
        at: usize,
        ahead: &[BlockHash],
        cx: &Context,
    ) -> Option<&'a mut TierSpan> {
        let number = self.tiers.iter().zip(&mut *spans).position(|(tier, spans)| {
            if spans.last().is_none_or(|span| span.end() <= at) {
                let found = tier.find(binding, ahead, spans.len(), cx);
                spans.extend(found.map(|span| TierSpan { from: at, ..span }));
            }
            spans.last().is_some_and(|span| at < span.end())
        })?;
        spans[number].last_mut()
    }

    /// Ends the read of a block: with a checksum it is whole, without one it did not come. Returns its key
    /// and its waiters.
    fn arrived(&mut self, tier: usize, read: &ReadEnd, cx: &mut Context) -> (BlockKey, Vec<Waiter>) {
        let ReadEnd { key, slot, checksum, .. } = *read;
        let bytes = cx.dram.block_bytes(slot).expect("a slot belongs to a read until its end");
        self.stats[tier].end_read(read, bytes, cx.now);
        // No query was joined to a standing block.
        cx.produced.claimed |= cx.arrivals.is_standing(&key);
        let (trusted, waiting) = cx.arrivals.end_arrival(&key, checksum.is_some(), cx.now_ms);
        match checksum.filter(|_| trusted && self.commit_arrived(&key, slot, cx)) {
            Some(checksum) => cx.actions.push(Action::CommitSlot { slot, checksum }),
            None => {
                cx.prefetched.take_coming(&key);
                cx.abandon(slot);
            }
        }
        (key, waiting)
    }

    /// Commits a block from a tier. A tier may know its standing from before.
    fn commit_arrived(&mut self, key: &BlockKey, slot: SlotRef, cx: &mut Context) -> bool {
        let prefetched = cx.prefetched.take_coming(key);
        let committed = match &prefetched {
            Some(Some(parent)) => cx.dram.commit_apart(slot, parent),
            _ => {
                let standing = self.tiers.iter().find_map(|tier| tier.standing(key));
                cx.dram.commit_back(slot, standing)
            }
        };
        if committed {
            prefetched.is_some().then(|| cx.prefetched.note_here(*key));
            self.tell_tiers(Notice::Came(key), cx);
        }
        committed
    }

    /// Ends the verification of a block of an earlier life: it is kept if its bytes match. Returns its
    /// waiters.
    pub(super) fn verified(
        &mut self,
        key: &BlockKey,
        slot: SlotRef,
        whole: bool,
        cx: &mut Context,
    ) -> Vec<Waiter> {
        let (trusted, waiting) = cx.arrivals.end_arrival(key, whole, cx.now_ms);
        self.verification.end_block(slot, whole, trusted, cx);
        waiting
    }

    /// Handles an ended job of a tier, or blocks found there. Returns the read block and its waiters; `None`
    /// if the tier goes on with the block because an operation still `waits`, or if nothing was read.
    pub(super) fn end_job(
        &mut self,
        tier: usize,
        end: JobEnd,
        waits: impl Fn(&Waiter) -> bool,
        cx: &mut Context,
    ) -> Option<(BlockKey, Vec<Waiter>)> {
        let read = self.tiers[tier].end_job(end, &waits, cx)?;
        if read.checksum.is_some() {
            cx.took(Timed::Read(self.stats[tier].source), read.since);
        }
        Some(self.arrived(tier, &read, cx))
    }

    /// Lets a tier go on with failed reads. Returns the blocks not to be had, each with its waiters.
    pub(super) fn retry(&mut self, tier: usize, cx: &mut Context) -> Vec<(BlockKey, Vec<Waiter>)> {
        let left = self.tiers[tier].retry(cx);
        left.iter().map(|read| self.arrived(tier, read, cx)).collect()
    }

    /// Removes blocks from memory and from all tiers, also those on their way. The caller ends their leases.
    pub(super) fn remove(&mut self, keys: &BTreeSet<BlockKey>, cx: &mut Context) {
        for key in keys {
            cx.dram.remove(key);
            self.tell_tiers(Notice::Removed(key), cx);
        }
        cx.arrivals.distrust(|key| keys.contains(key));
        cx.apply_evictions();
    }
}
