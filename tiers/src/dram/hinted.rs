//! Blocks kept by hints of clients, each until a time: a pinned one is not evicted, and a retained one goes after all
//! others of its holder.
//!
//! Such a block is held as by a lease of its holder. These hold at all times:
//! - the blocks of one holder take at most half of its share: of the pool, or of the smaller quota of its namespace,
//!   divided by the number of holders at work or with such blocks. Beyond it, blocks end early: retained ones first, the
//!   soonest end before all;
//! - every block has an end;
//! - a holder short of its share without a free slot gets one of the others' blocks.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::AddAssign;

use shm_protocol::key::{BlockHash, BlockKey, GROUP};

use super::lookups::BATCH;
use super::{BlockAccount, Dram, HolderId};
use crate::index::NO_ENTRY;
use crate::ledger::HolderSet;
use crate::slab::Among;

/// All such blocks take 1 of so many parts of the pool at most: the rest is for leases and saves.
const PART: u64 = 2;
/// Most such blocks of all holders: it bounds the time to end them.
const BLOCKS_MAX: usize = 1 << 17;
/// Most blocks awaited from saves: those of 16 steps of 4,096 blocks.
const COMING_MAX: usize = 1 << 16;
/// The longest wait for a save: it waits 30 s for its acceptance.
const COMING_MS: u64 = 40_000;
/// Number of retained blocks to end together when a slot is wanted.
const GIVEN_WAY: usize = 64;

/// How a hint keeps blocks.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct HintTerms {
    pub until_ms: u64,
    /// False: retained, so the blocks go after all others.
    pub is_pinned: bool,
}

/// The number of a chain's blocks by the effect of a hint.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct HintedCounts {
    pub done: u64,
    /// Blocks beyond the holder's limit.
    pub clipped: u64,
    /// Blocks not in DRAM.
    pub missing: u64,
}

/// A block kept, or demoted, as soon as its save has ended.
#[derive(Copy, Clone, Debug)]
struct ComingBlock {
    holder: HolderId,
    /// `None`: it is demoted.
    terms: Option<HintTerms>,
    /// It is forgotten then.
    by_ms: u64,
}

/// Blocks of one holder and one kind.
///
/// Both are trees: an insertion never moves all others, so a part of a hint takes no longer among many blocks.
#[derive(Debug, Default)]
struct KeptUntil {
    /// The place of each block in `ends`.
    places: BTreeMap<u32, EndPlace>,
    ends: BTreeMap<EndPlace, u32>,
    /// Number of insertions so far.
    inserted: u64,
    bytes: u64,
}

/// The place of a block among all ends, and of blocks with one end before those inserted earlier: a chain's deepest block
/// ends first.
#[derive(Copy, Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct EndPlace {
    until_ms: u64,
    inserted: Reverse<u64>,
}

/// The limits of a holder.
#[derive(Copy, Clone, Debug)]
struct HintedMax {
    bytes: u64,
    blocks: usize,
}

#[derive(Debug, Default)]
struct HolderHints {
    /// The pool, or the smaller quota.
    room_bytes: u64,
    retained: KeptUntil,
    pinned: KeptUntil,
}

/// All blocks kept by hints.
#[derive(Debug, Default)]
pub(super) struct HintedBlocks {
    holders: BTreeMap<HolderId, HolderHints>,
    /// Blocks awaited from saves, in a tree for the same reason.
    coming: BTreeMap<BlockKey, ComingBlock>,
}

// === impl HintedCounts ===

impl AddAssign for HintedCounts {
    fn add_assign(&mut self, other: Self) {
        self.done += other.done;
        self.clipped += other.clipped;
        self.missing += other.missing;
    }
}

// === impl KeptUntil ===

impl KeptUntil {
    fn set_end(&mut self, id: u32, bytes: u64, until_ms: u64) {
        let before = self.places.get(&id).copied();
        if before.is_some_and(|before| before.until_ms == until_ms) {
            return;
        }
        match before {
            Some(before) => _ = self.ends.remove(&before),
            None => self.bytes += bytes,
        }
        self.inserted += 1;
        let place = EndPlace { until_ms, inserted: Reverse(self.inserted) };
        self.places.insert(id, place);
        self.ends.insert(place, id);
    }

    fn remove(&mut self, id: u32, bytes: u64) -> bool {
        let Some(place) = self.places.remove(&id) else { return false };
        self.ends.remove(&place);
        self.bytes -= bytes;
        true
    }

    /// Returns the block with the first end, the deepest of its chain, and the end.
    fn first_end(&self) -> Option<(u32, u64)> {
        self.ends.first_key_value().map(|(place, id)| (*id, place.until_ms))
    }
}

// === impl HolderHints ===

impl HolderHints {
    fn is_within(&self, max: HintedMax) -> bool {
        self.bytes() <= max.bytes && self.block_count() <= max.blocks
    }

    fn bytes(&self) -> u64 {
        self.retained.bytes + self.pinned.bytes
    }

    fn block_count(&self) -> usize {
        self.retained.places.len() + self.pinned.places.len()
    }

    fn has(&self, id: u32) -> bool {
        self.retained.places.contains_key(&id) || self.pinned.places.contains_key(&id)
    }

    /// The last hint for a block counts.
    fn set_terms(&mut self, id: u32, bytes: u64, terms: HintTerms) {
        let (of, other) = match terms.is_pinned {
            true => (&mut self.pinned, &mut self.retained),
            false => (&mut self.retained, &mut self.pinned),
        };
        other.remove(id, bytes);
        of.set_end(id, bytes, terms.until_ms);
    }

    fn remove(&mut self, id: u32, bytes: u64) -> bool {
        self.retained.remove(id, bytes) || self.pinned.remove(id, bytes)
    }

    /// Returns the next block to end early.
    fn first_out(&self) -> Option<u32> {
        self.retained.first_end().or_else(|| self.pinned.first_end()).map(|(id, _)| id)
    }

    fn due(&self, now_ms: u64) -> Option<u32> {
        let ends = [self.retained.first_end(), self.pinned.first_end()];
        ends.into_iter().flatten().find(|(_, until_ms)| *until_ms <= now_ms).map(|(id, _)| id)
    }
}

// === impl HintedBlocks ===

impl HintedBlocks {
    /// True if a hint keeps any block.
    pub(super) fn any(&self) -> bool {
        !self.holders.is_empty()
    }

    fn with(&self, id: u32) -> Vec<HolderId> {
        self.holders.iter().filter(|(_, hints)| hints.has(id)).map(|(holder, _)| *holder).collect()
    }
}

// === impl Dram: hints ===

impl Dram {
    /// Keeps a chain's blocks for a holder, and blocks `coming` from saves as soon as they are there. `is_run`: a block is of
    /// no use without those before it.
    pub fn keep_chain(
        &mut self,
        whose: BlockAccount,
        (namespace, hashes): (u32, &[BlockHash]),
        (terms, now_ms): (HintTerms, u64),
        is_run: bool,
        coming: impl Fn(&BlockHash) -> bool,
    ) -> HintedCounts {
        let holder = whose.holder;
        let quota_bytes = whose.quota.map_or(u64::MAX, |quota| self.quota(quota).bytes_max);
        let hints = self.hinted.holders.entry(holder).or_default();
        hints.room_bytes = quota_bytes.min(self.config.pool_bytes);
        self.trim_hinted();
        let (max, mut counts) = (self.hinted_max(holder), HintedCounts::default());
        'chain: for batch in hashes.chunks(BATCH) {
            let ids = self.find_batch(namespace, batch);
            for (id, hash) in ids.into_iter().zip(batch) {
                if id != NO_ENTRY {
                    let kept = self.keep_block(id, holder, terms, max);
                    *(if kept { &mut counts.done } else { &mut counts.clipped }) += 1;
                } else if coming(hash) && self.await_block(namespace, hash, (holder, Some(terms)), now_ms) {
                    counts.done += 1;
                } else if is_run {
                    break 'chain;
                }
            }
        }
        counts.missing = hashes.len() as u64 - counts.done - counts.clipped;
        self.forget_unhinted(holder);
        counts
    }

    /// Lets a chain's blocks go before all others, except shared ones, and ends the holder's hints for all of them.
    pub fn demote_chain(&mut self, holder: HolderId, namespace: u32, hashes: &[BlockHash]) -> HintedCounts {
        let mut chain = std::mem::take(&mut self.chain);
        chain.clear();
        self.deepest_first(namespace, hashes, |_, id| chain.extend(id));
        let done = chain.len();
        self.end_hints_for(holder, &chain);
        chain.retain(|id| !self.slab.entries.get(*id).standing.is_shared());
        self.policy.demote(&mut self.slab, &chain);
        self.chain = chain;
        HintedCounts { done: done as u64, clipped: 0, missing: (hashes.len() - done) as u64 }
    }

    /// Demotes blocks of a chain `coming` from saves as soon as they are there. Counts these and the blocks in DRAM, left as
    /// they are.
    pub fn await_demotion(
        &mut self,
        holder: HolderId,
        (namespace, hashes): (u32, &[BlockHash]),
        now_ms: u64,
        coming: impl Fn(&BlockHash) -> bool,
    ) -> HintedCounts {
        let mut counts = HintedCounts::default();
        for batch in hashes.chunks(BATCH) {
            let ids = self.find_batch(namespace, batch);
            for (id, hash) in ids.into_iter().zip(batch) {
                let done = id != NO_ENTRY
                    || coming(hash) && self.await_block(namespace, hash, (holder, None), now_ms);
                *(if done { &mut counts.done } else { &mut counts.missing }) += 1;
            }
        }
        counts
    }

    /// Ends a holder's hints for these blocks.
    pub(super) fn end_hints_for(&mut self, holder: HolderId, chain: &[u32]) {
        if self.hinted.holders.contains_key(&holder) {
            chain.iter().for_each(|id| self.unkeep(holder, *id));
            self.forget_unhinted(holder);
        }
    }

    /// Ends all hints.
    pub fn end_all_hints(&mut self) {
        while let Some(holder) = self.hinted.holders.keys().next().copied() {
            self.end_hints(holder);
        }
    }

    /// Ends all hints of a holder.
    pub(super) fn end_hints(&mut self, holder: HolderId) {
        self.hinted.coming.retain(|_, coming| coming.holder != holder);
        while let Some(id) = self.hinted.holders.get(&holder).and_then(HolderHints::first_out) {
            self.unkeep(holder, id);
        }
        self.hinted.holders.remove(&holder);
    }

    /// Ends the hints for a block to be removed.
    pub(super) fn end_hints_of_block(&mut self, id: u32) {
        for holder in self.hinted.with(id) {
            self.unkeep(holder, id);
            self.forget_unhinted(holder);
        }
    }

    /// Ends hints at the end of their time.
    pub(super) fn expire_hints(&mut self, now_ms: u64) {
        let is_awaited = |coming: &ComingBlock| {
            coming.by_ms > now_ms && coming.terms.is_none_or(|terms| terms.until_ms > now_ms)
        };
        self.hinted.coming.retain(|_, coming| is_awaited(coming));
        for holder in self.hinted.holders.keys().copied().collect::<Vec<_>>() {
            while let Some(id) = self.hinted.holders.get(&holder).and_then(|hints| hints.due(now_ms)) {
                self.unkeep(holder, id);
            }
            self.forget_unhinted(holder);
        }
    }

    /// Keeps or demotes a just committed block, if a hint awaits it.
    pub(super) fn keep_awaited(&mut self, id: u32, key: &BlockKey) {
        if self.hinted.coming.is_empty() {
            return;
        }
        let Some(ComingBlock { holder, terms, .. }) = self.hinted.coming.remove(key) else { return };
        match terms {
            Some(terms) => {
                self.keep_block(id, holder, terms, self.hinted_max(holder));
                self.forget_unhinted(holder);
            }
            None => self.policy.demote(&mut self.slab, &[id]),
        }
    }

    /// Returns the bytes kept by hints: retained, and pinned.
    pub(super) fn hinted_bytes(&self) -> (u64, u64) {
        let hints = self.hinted.holders.values();
        hints.fold((0, 0), |sum, hints| (sum.0 + hints.retained.bytes, sum.1 + hints.pinned.bytes))
    }

    /// Ends blocks of holders above their limits: these sink with the number of holders.
    pub(super) fn trim_hinted(&mut self) {
        for holder in self.hinted.holders.keys().copied().collect::<Vec<_>>() {
            let max = self.hinted_max(holder);
            let is_beyond = |hints: &HolderHints| if hints.is_within(max) { None } else { hints.first_out() };
            while let Some(id) = self.hinted.holders.get(&holder).and_then(is_beyond) {
                self.unkeep(holder, id);
            }
        }
    }

    /// Ends some retained blocks of these holders, so one of them can go. Returns false if there is none.
    pub(super) fn end_retained(&mut self, among: Among, losers: HolderSet) -> bool {
        let holders: Vec<HolderId> =
            self.hinted.holders.keys().copied().filter(|id| losers.has(*id)).collect();
        for holder in holders {
            let mut given = 0;
            while given < GIVEN_WAY
                && let Some(hints) = self.hinted.holders.get(&holder)
                && let Some((id, _)) = hints.retained.first_end()
                && self.is_among(id, among)
            {
                self.unkeep(holder, id);
                given += 1;
            }
            if given > 0 {
                self.forget_unhinted(holder);
                return true;
            }
        }
        false
    }

    /// Ends the hints of the other holder with the most bytes, if `holder` is short of its share. Returns false if
    /// there is none.
    pub(super) fn end_hints_beside(&mut self, holder: HolderId) -> bool {
        if !self.hinted.any() || !self.ledger.is_short(holder) {
            return false;
        }
        let others = self.hinted.holders.iter().filter(|(other, _)| **other != holder);
        let Some(other) = others.max_by_key(|(_, hints)| hints.bytes()).map(|(other, _)| *other) else {
            return false;
        };
        self.end_hints(other);
        true
    }

    /// Panics if a holder's hinted blocks are not held, or exceed its limit. Looks at all of them.
    pub fn audit_hints(&self) {
        for (holder, hints) in &self.hinted.holders {
            let kept = || hints.retained.places.keys().chain(hints.pinned.places.keys());
            let held = |id: &u32| {
                self.slab.entries.get(*id).is_committed() && self.slab.entries.get(*id).claims.pins() > 0
            };
            assert!(kept().all(held), "{holder:?}: a hinted block is held");
            assert_eq!(hints.bytes(), kept().map(|id| self.slab.block_bytes(*id)).sum::<u64>());
            assert!(hints.is_within(self.hinted_max(*holder)), "{holder:?} is above its limit");
        }
    }

    /// Returns the limits of a holder with hints.
    fn hinted_max(&self, holder: HolderId) -> HintedMax {
        let has_part = |id: &HolderId| self.ledger.works(*id) || self.hinted.holders.contains_key(id);
        let parts = self.ledger.ids().filter(has_part).count().max(1);
        let room_bytes = self.hinted.holders.get(&holder).map_or(0, |hints| hints.room_bytes);
        HintedMax { bytes: room_bytes / PART / parts as u64, blocks: BLOCKS_MAX / parts }
    }

    fn keep_block(&mut self, id: u32, holder: HolderId, terms: HintTerms, max: HintedMax) -> bool {
        let bytes = self.slab.block_bytes(id);
        let Some(hints) = self.hinted.holders.get(&holder) else { return false };
        if !hints.has(id) {
            let is_full = hints.bytes() + bytes > max.bytes || hints.block_count() >= max.blocks;
            if is_full || !self.pin_id(id) {
                return false;
            }
            self.ledger.lease(holder, false, bytes);
        }
        self.hinted.holders.entry(holder).or_default().set_terms(id, bytes, terms);
        true
    }

    /// Returns false if too many blocks are awaited.
    fn await_block(
        &mut self,
        namespace: u32,
        hash: &BlockHash,
        (holder, terms): (HolderId, Option<HintTerms>),
        now_ms: u64,
    ) -> bool {
        let has_room = self.hinted.coming.len() < COMING_MAX;
        if has_room {
            let awaited = ComingBlock { holder, terms, by_ms: now_ms + COMING_MS };
            self.hinted.coming.insert(BlockKey { namespace, group: GROUP, hash: *hash }, awaited);
        }
        has_room
    }

    /// Ends a holder's hint for a block, if there is one.
    fn unkeep(&mut self, holder: HolderId, id: u32) {
        let bytes = self.slab.block_bytes(id);
        if !self.hinted.holders.get_mut(&holder).is_some_and(|hints| hints.remove(id, bytes)) {
            return;
        }
        self.ledger.unlease(holder, false, bytes);
        if self.unpin_id(id) && !self.free_removed(id) {
            self.policy.unheld(&mut self.slab, id);
        }
    }

    /// Forgets a holder without a hinted block, present or awaited.
    fn forget_unhinted(&mut self, holder: HolderId) {
        let hints = self.hinted.holders.get(&holder);
        if hints.is_some_and(|hints| hints.block_count() == 0)
            && self.hinted.coming.values().all(|coming| coming.holder != holder)
        {
            self.hinted.holders.remove(&holder);
        }
    }

    fn is_among(&self, id: u32, among: Among) -> bool {
        match among {
            Among::Class(class) => self.slab.class_of(id) == class,
            Among::Quota(quota) => {
                self.slab.quotas.as_ref().is_some_and(|quotas| quotas.is_member(id, quota))
            }
        }
    }
}
