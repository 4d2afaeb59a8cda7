//! The DRAM tier's decisions: the slot of each block, the next eviction, the leases. Pure: no memory, no
//! clock.
//!
//! The caller carries decisions out on the pool's memory, in this order after every [`Dram::begin_fill`]:
//! mark the slots of [`Dram::drain_evicted`] free, write the segment headers of [`Dram::drain_assigned`],
//! then fill the slot. After a removal, keep later lives from the slots of [`Dram::drain_disowned`].

mod adoption;
mod below;
mod hinted;
mod holders;
mod holds;
mod leases;
mod lookups;
mod on_device;
mod quotas;
mod removal;
mod replacement;
mod walk;
mod watch;

use std::collections::HashMap;
use std::hint::black_box;

use shm_protocol::key::BlockKey;
use shm_protocol::pool::{self, Geometry, LayoutError, SlotRef};

pub use self::adoption::HOLD_MS;
use self::adoption::Hold;
use self::below::Below;
pub use self::below::{Judge, Leaving, Standing};
use self::hinted::HintedBlocks;
pub use self::hinted::{HintTerms, HintedCounts};
pub use self::holders::BlockAccount;
pub use self::on_device::EndedChain;
pub use self::quotas::QuotaStats;
pub use self::walk::{RankedBlock, Walk};
use crate::TierError;
use crate::entries::{ListPlace, SlotEntry, SlotState};
pub use crate::error::{FillError, LeaseError};
use crate::index::{Index, KeyPrint};
use crate::lease::Leases;
pub use crate::lease::{LeaseEnd, LeaseId, WORKERS_MAX};
use crate::ledger::Ledger;
pub use crate::ledger::{HolderId, Holdings};
pub use crate::policy::Ending;
use crate::policy::{Parent, Policy};
pub use crate::quota::QuotaId;
use crate::slab::Slab;
use crate::watch::ChangeWatch;

/// With this number of segments a pool wastes at most 1/32 of its bytes on a block size used once.
const POOL_SEGMENTS: u64 = 32;
/// The most parents waited for. Beyond it all are forgotten: such a parent may be evicted before its child.
const ORPHANS_MAX: usize = 1 << 16;
/// The smallest default segment: it holds the blocks of common models (up to 4 MiB less a page).
const SEGMENT_BYTES_DEFAULT_MIN: u64 = 4 << 20;
/// The largest default segment: its header area costs less than a thousandth.
const SEGMENT_BYTES_DEFAULT_MAX: u64 = 256 << 20;

/// Sizes of a DRAM tier.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct DramConfig {
    /// Bytes of all segments; a remainder below one segment is left unused.
    pub pool_bytes: u64,
    /// Bytes of a segment, a power of two; [`segment_bytes_for`] chooses one.
    pub segment_bytes: u64,
    /// Life of a lease in milliseconds, unless it is renewed or promised.
    pub lease_ttl_ms: u64,
}

/// A segment newly assigned to a block size: its header must be written before any slot of it is filled.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Assigned {
    pub segment: u64,
    /// Bytes of its blocks.
    pub block_bytes: u64,
}

/// The tier's fill level and its counters.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct DramStats {
    pub blocks: u64,
    pub filling: u64,
    /// Bytes of blocks: committed, being filled, and to be verified.
    pub bytes_used: u64,
    /// Bytes of blocks under at least one lease or hold.
    pub bytes_leased: u64,
    /// Blocks evicted since the start.
    pub evicted_blocks_total: u64,
    /// Blocks removed since the start because they are not trusted.
    pub removed_blocks_total: u64,
    /// Kept blocks found behind a missing one by requests that saved that block again. Until then no query
    /// could find them.
    pub unreachable_blocks_total: u64,
    pub leases: u64,
    /// Leases that ended before the leading hits did, since their holder had no room for more.
    pub leases_cut_total: u64,
    /// Segments of the pool.
    pub segments: u64,
    /// Blocks taken over from earlier lives, verified.
    pub adopted_blocks_total: u64,
    /// Blocks of earlier lives not verified yet.
    pub unverified_blocks: u64,
    /// Slots of earlier lives without a whole block.
    pub adoption_dropped_total: u64,
    /// Bytes of blocks kept by hints, once for each holder.
    pub retained_bytes: u64,
    pub pinned_bytes: u64,
}

#[derive(Debug)]
pub struct Dram {
    config: DramConfig,
    slab: Slab,
    index: Index,
    policy: Policy,
    leases: Leases,
    ledger: Ledger,
    generation: u64,
    hold: Hold,
    evicted: Vec<SlotRef>,
    assigned: Vec<Assigned>,
    /// Slots of removed blocks whose bytes stay for now.
    disowned: Vec<SlotRef>,
    /// Blocks committed before their parents, by the parent's print.
    orphans: HashMap<u64, Vec<SlotRef>>,
    /// Kept between calls, so no call allocates.
    chain: Vec<u32>,
    watch: ChangeWatch,
    below: Below,
    hinted: HintedBlocks,
    stats: DramStats,
}

/// Returns a segment size for a pool: a power of two near a 32nd of it, within 4 to 256 MiB.
pub fn segment_bytes_for(pool_bytes: u64) -> u64 {
    let wanted = (pool_bytes / POOL_SEGMENTS).clamp(SEGMENT_BYTES_DEFAULT_MIN, SEGMENT_BYTES_DEFAULT_MAX);
    1 << wanted.ilog2()
}

/// Returns the size of the smallest pool with segments for blocks of so many bytes, by [`segment_bytes_for`];
/// `None` if no pool has such segments.
pub fn pool_bytes_for(block_bytes: u64) -> Option<u64> {
    let segments = SEGMENT_BYTES_DEFAULT_MIN.ilog2()..=SEGMENT_BYTES_DEFAULT_MAX.ilog2();
    let segment_bytes =
        segments.map(|bits| 1 << bits).find(|bytes| Geometry::new(*bytes, block_bytes).is_ok())?;
    Some(if segment_bytes == SEGMENT_BYTES_DEFAULT_MIN {
        segment_bytes
    } else {
        segment_bytes * POOL_SEGMENTS
    })
}

/// Returns the number of segments of a pool; fails on invalid sizes.
pub(crate) fn count_segments(pool_bytes: u64, segment_bytes: u64) -> Result<u64, TierError> {
    // A block of one byte fits every valid segment, so this fails on a wrong segment size alone.
    Geometry::new(segment_bytes, 1)?;
    if pool_bytes > pool::POOL_BYTES_MAX {
        return Err(TierError::TooLarge { bytes: pool_bytes, max: pool::POOL_BYTES_MAX });
    }
    match pool_bytes / segment_bytes {
        0 => Err(TierError::TooSmall { bytes: pool_bytes, min: segment_bytes }),
        // One segment less leaves the last entry number free, since it means "none".
        count if count * segment_bytes == pool::POOL_BYTES_MAX => Ok(count - 1),
        count => Ok(count),
    }
}

// === impl Dram: construction and state ===

impl Dram {
    /// Makes an empty tier, all of its segments in service.
    pub fn new(config: DramConfig) -> Result<Self, TierError> {
        let mut dram = Self::unopened(config, 0)?;
        (0..dram.stats.segments).for_each(|segment| dram.open_empty(segment));
        Ok(dram)
    }

    /// Makes a tier without a segment in service: each comes by [`Dram::open_empty`] or [`Dram::open_used`].
    /// For `hold_ms` after the last segment with blocks of an earlier life, no block is evicted and no slot
    /// of such blocks reused.
    pub fn unopened(config: DramConfig, hold_ms: u64) -> Result<Self, TierError> {
        let count = count_segments(config.pool_bytes, config.segment_bytes)?;
        Ok(Self {
            config,
            slab: Slab::new(config.segment_bytes, count as usize),
            index: Index::new(),
            policy: Policy::default(),
            leases: Leases::new(config.lease_ttl_ms),
            ledger: Ledger::new(config.pool_bytes),
            generation: 1,
            hold: Hold::new(hold_ms),
            evicted: Vec::new(),
            assigned: Vec::new(),
            disowned: Vec::new(),
            orphans: HashMap::new(),
            chain: Vec::new(),
            watch: ChangeWatch::default(),
            below: Below::default(),
            hinted: HintedBlocks::default(),
            stats: DramStats { segments: count, ..DramStats::default() },
        })
    }

    /// Returns the number of the next filling: every present block has a smaller one.
    pub fn next_generation(&self) -> u64 {
        self.generation
    }

    /// Raises the number of the next filling to at least this one, above the numbers of a pool's earlier
    /// lives.
    pub fn raise_generation(&mut self, at_least: u64) {
        self.generation = self.generation.max(at_least);
    }

    /// Returns the sizes given at construction.
    pub fn config(&self) -> &DramConfig {
        &self.config
    }

    /// Returns the figures as of now.
    pub fn stats(&self) -> DramStats {
        let (retained_bytes, pinned_bytes) = self.hinted_bytes();
        DramStats { leases: self.leases.len() as u64, retained_bytes, pinned_bytes, ..self.stats }
    }
}

// === impl Dram: fillings ===

impl Dram {
    /// Finds a slot for a new block, evicting if necessary. The slot belongs to the caller until
    /// [`Dram::commit`] or [`Dram::abandon`]. Fails if the block is kept or being filled, or if there is no
    /// room. This is no access of a kept block: [`Dram::use_run`] records those.
    pub fn begin_fill(
        &mut self,
        key: BlockKey,
        block_bytes: u64,
        whose: BlockAccount,
    ) -> Result<SlotRef, FillError> {
        let print = KeyPrint::of_key(&key);
        black_box(self.far(print));
        if let Some(id) = self.index.find_entry(print, |id| self.slab.entries.get(id).block_key() == key) {
            let committed = self.slab.entries.get(id).state() == SlotState::Committed;
            return Err(if committed { FillError::Present } else { FillError::Filling });
        }
        let geometry =
            Geometry::new(self.config.segment_bytes, block_bytes).map_err(|error| match error {
                LayoutError::BlockBytes { block_bytes: 0, .. } => FillError::Empty,
                _ => FillError::TooLarge { max: pool::block_bytes_max(self.config.segment_bytes) },
            })?;
        let class = self.slab.class(geometry).filter(|_| key.group <= SlotEntry::GROUP_MAX);
        let class = class.ok_or(FillError::NoSpace)?;
        if self.room(whose.holder) < block_bytes {
            return Err(FillError::NoSpace);
        }
        let room = whose.quota.map_or(Ok(()), |quota| self.make_room(quota, block_bytes, whose.holder));
        let id = room.and_then(|()| self.vacate(class, whose.holder))?;
        self.slab.move_to(id, ListPlace::Detached);
        self.charge(id, whose);
        self.ledger.begin_fill(whose.holder, block_bytes);
        Ok(self.start_filling(id, key, print))
    }

    fn start_filling(&mut self, id: u32, key: BlockKey, print: KeyPrint) -> SlotRef {
        let entry = self.slab.entries.get_mut(id);
        entry.set_key(key);
        entry.generation = self.generation;
        entry.set_state(SlotState::Filling);
        self.generation += 1;
        self.index.insert(print, id);
        let segment = &mut self.slab.segments[self.slab.entries.segment(id)];
        segment.held += 1;
        segment.used += 1;
        self.stats.filling += 1;
        self.stats.bytes_used += self.slab.block_bytes(id);
        self.slab.slot_ref(id)
    }

    /// Returns a free entry of `class` for a holder: a free slot, otherwise one of a free segment, otherwise
    /// one freed by an eviction.
    fn vacate(&mut self, class: usize, holder: HolderId) -> Result<u32, FillError> {
        if let Some(id) = self.slab.classes[class].free.tail() {
            return Ok(id);
        }
        if let Some(segment) = self.slab.assign_fresh(class) {
            self.note_assigned(segment, class);
        } else if self.hold.lasts() || !self.make_way(class, holder) {
            return Err(FillError::NoSpace);
        }
        self.slab.classes[class].free.tail().ok_or(FillError::NoSpace)
    }

    fn note_assigned(&mut self, segment: usize, class: usize) {
        let block_bytes = self.slab.classes[class].geometry.block_bytes;
        self.assigned.push(Assigned { segment: segment as u64, block_bytes });
    }

    /// Loads the words of the index and of the ghost for a filling or an eviction. Both mostly come from
    /// memory: they are loaded together.
    fn far(&self, print: KeyPrint) -> u64 {
        self.index.home(print).load_word() ^ self.policy.load_key(print)
    }

    fn print(&self, id: u32) -> KeyPrint {
        KeyPrint::of_key(&self.slab.entries.get(id).block_key())
    }

    /// Frees the slot of a committed block without a lease.
    fn evict(&mut self, id: u32) {
        let entry = self.slab.entries.get(id);
        assert!(
            entry.claims.pins() == 0 && entry.state() == SlotState::Committed,
            "only an unleased, whole block is evicted"
        );
        // The entry ahead of it most likely goes next.
        let next = self.slab.entries.get_or_vacant(entry.link.previous).generation;
        black_box(self.far(self.print(id)) ^ next);
        self.watch.note_change(entry.block_key(), false);
        self.below.note_gone(entry.block_key(), entry.standing);
        self.evicted.push(self.slab.slot_ref(id));
        let bytes = self.slab.block_bytes(id);
        self.stats.blocks -= 1;
        self.stats.evicted_blocks_total += 1;
        let print = self.vacated(id, bytes);
        self.policy.evicted(print, self.slab.slots());
    }

    /// Takes an entry out of the index, and puts its slot into the free list.
    fn vacated(&mut self, id: u32, bytes: u64) -> KeyPrint {
        let print = self.unindexed(id);
        self.free(id, bytes);
        print
    }

    fn unindexed(&mut self, id: u32) -> KeyPrint {
        let print = self.print(id);
        assert!(self.index.remove(print, id), "a used slot is in the index");
        print
    }

    /// Puts the slot of an entry outside of the index into the free list.
    fn free(&mut self, id: u32, bytes: u64) {
        let SlotEntry { standing, .. } = *self.slab.entries.get(id);
        let place = self.slab.entries.get(id).list_place();
        self.slab.entries.get_mut(id).set_state(SlotState::Free);
        self.slab.move_to(id, ListPlace::Free);
        if let Some(parent) = self.slab.part(id) {
            self.policy.lost_children(&mut self.slab, parent, standing, place);
        }
        self.discharge(id, bytes);
        self.slab.segments[self.slab.entries.segment(id)].used -= 1;
        self.stats.bytes_used -= bytes;
    }

    /// Ends a filling: the block is whole and may be found. Returns false if the slot is not being filled in
    /// this generation.
    pub fn commit(&mut self, slot: SlotRef) -> bool {
        self.commit_in(slot, Parent::None)
    }

    /// Does the same for a block with a parent. The block is evicted before its parent. Commit a chain from
    /// its beginning.
    pub fn commit_behind(&mut self, slot: SlotRef, parent: &BlockKey) -> bool {
        self.commit_in(slot, self.parent(parent))
    }

    /// Does the same for a block of use without its parent, if the parent is not there.
    pub fn commit_apart(&mut self, slot: SlotRef, parent: &BlockKey) -> bool {
        match self.parent(parent) {
            Parent::Lost => self.commit_in(slot, Parent::None),
            parent => self.commit_in(slot, parent),
        }
    }

    /// Does the same for a block whose parent is committed later, if it is not there.
    pub fn commit_before(&mut self, slot: SlotRef, parent: &BlockKey) -> bool {
        let known = self.parent(parent);
        let committed = self.commit_apart(slot, parent);
        if committed && !matches!(known, Parent::Kept(_)) {
            self.await_parent(slot, parent);
        }
        committed
    }

    fn await_parent(&mut self, child: SlotRef, parent: &BlockKey) {
        if self.orphans.len() >= ORPHANS_MAX {
            self.orphans.clear();
        }
        self.orphans.entry(KeyPrint::of_key(parent).bits()).or_default().push(child);
    }

    fn parent(&self, key: &BlockKey) -> Parent {
        let entries = &self.slab.entries;
        match self.index.find_entry(KeyPrint::of_key(key), |id| entries.get(id).block_key() == *key) {
            Some(id) if entries.get(id).state() == SlotState::Committed => Parent::Kept(id),
            Some(_) => Parent::None,
            None => Parent::Lost,
        }
    }

    /// Does the same for a block back from the tier below, with its standing there.
    pub fn commit_back(&mut self, slot: SlotRef, standing: Option<Standing>) -> bool {
        self.commit_in(slot, standing.map_or(Parent::None, Parent::Below))
    }

    fn commit_in(&mut self, slot: SlotRef, parent: Parent) -> bool {
        let Some(id) = self.end_fill(slot) else { return false };
        let entry = self.slab.entries.get_mut(id);
        entry.set_state(SlotState::Committed);
        self.watch.note_change(entry.block_key(), true);
        self.stats.blocks += 1;
        let print = self.print(id);
        self.policy.admit_block(&mut self.slab, id, print, parent);
        self.keep_awaited(id, &self.slab.entries.get(id).block_key());
        for child in self.orphans.remove(&print.bits()).into_iter().flatten() {
            let child = self.slab.find_slot(child).filter(|id| self.slab.entries.get(*id).is_committed());
            child.into_iter().for_each(|child| self.slab.adopt_child(id, child));
        }
        true
    }

    /// Gives a filling up: the slot is free again. Returns false if the slot is not being filled in this
    /// generation.
    pub fn abandon(&mut self, slot: SlotRef) -> bool {
        let Some(id) = self.end_fill(slot) else { return false };
        self.vacated(id, self.slab.block_bytes(id));
        true
    }

    fn end_fill(&mut self, slot: SlotRef) -> Option<u32> {
        let id = self.slab.find_slot(slot)?;
        if self.slab.entries.get(id).state() != SlotState::Filling {
            return None;
        }
        self.slab.segments[self.slab.entries.segment(id)].held -= 1;
        self.stats.filling -= 1;
        let holder = self.slab.entries.get(id).claims.holder();
        self.ledger.end_fill(holder, self.slab.block_bytes(id));
        Some(id)
    }

    /// Returns slots of blocks evicted since the last call: mark them free before all other steps.
    pub fn drain_evicted(&mut self) -> impl Iterator<Item = SlotRef> + '_ {
        self.evicted.drain(..)
    }

    /// Returns segments assigned to a block size since the last call: write their headers before filling a
    /// slot.
    pub fn drain_assigned(&mut self) -> impl Iterator<Item = Assigned> + '_ {
        self.assigned.drain(..)
    }
}

#[cfg(test)]
mod tests;
