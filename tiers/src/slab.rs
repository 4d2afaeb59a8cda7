//! The slots of a pool: segments, classes of block sizes, and the entries of each.

mod kin;
mod raise;

use std::collections::{HashMap, VecDeque};

use shm_protocol::pool::{self, Geometry, SlotRef};

use crate::entries::{Entries, FIRST_OUT, ListPlace, PolicyLists, SlotEntry, SlotState, Tables};
use crate::index::Index;
use crate::ledger::HolderId;
use crate::list::{List, Spot};
use crate::quota::{PoolQuotas, QuotaId, QuotaMember};
use crate::standing::Standing;

/// Most block sizes in the pool at once; a class without segments gives way to a new one.
const CLASSES_MAX: usize = 256;
/// A segment of no class.
const UNASSIGNED: u16 = u16::MAX;

/// The blocks among which one must go.
#[derive(Copy, Clone, Debug)]
pub(crate) enum Among {
    /// All blocks of one size.
    Class(usize),
    /// All blocks charged to one quota.
    Quota(QuotaId),
}

/// One block size: its slots and their queues.
#[derive(Debug)]
pub(crate) struct Class {
    pub(crate) geometry: Geometry,
    pub(crate) segments: u32,
    pub(crate) free: List,
    pub(crate) queues: PolicyLists,
}

/// The facts about a segment as a whole.
#[derive(Copy, Clone, Debug)]
pub(crate) struct SlabSegment {
    class: u16,
    /// Slots that are leased, being filled, not verified or debris of an earlier life: with any such slot the
    /// segment stays.
    pub(crate) held: u32,
    /// Slots that are not free.
    pub(crate) used: u32,
}

/// All entries, segments and classes.
#[derive(Debug)]
pub(crate) struct Slab {
    pub(crate) entries: Entries,
    pub(crate) segments: Box<[SlabSegment]>,
    pub(crate) classes: Vec<Class>,
    /// `None` in a tier without quotas.
    pub(crate) quotas: Option<PoolQuotas>,
    segment_bytes: u64,
    /// Segments in service without a class so far, lowest first: GPUs reach the pool from its start
    /// upwards.
    fresh: VecDeque<usize>,
    /// Number of segments with a class.
    assigned: usize,
    slots: u64,
    /// Counts of children too large for the entries' own field, by entry.
    many: HashMap<u32, u32>,
}

// === impl Class ===

impl Class {
    fn new(geometry: Geometry) -> Self {
        Self { geometry, segments: 0, free: List::default(), queues: PolicyLists::default() }
    }

    /// Returns the list of an entry's place.
    fn entry_list(&mut self, entry: &SlotEntry) -> Option<&mut List> {
        if entry.list_place() == ListPlace::Free {
            Some(&mut self.free)
        } else {
            self.queues.entry_list(entry)
        }
    }
}

// === impl Slab ===

impl Slab {
    /// Makes an empty slab, no segment in service. The caller has checked the sizes: `segments` of
    /// `segment_bytes`, a power of two, fit a pool.
    pub(crate) fn new(segment_bytes: u64, segments: usize) -> Self {
        let shift = (segment_bytes / pool::SLOT_ALIGN).trailing_zeros();
        debug_assert!(
            ((segments as u64) << shift) <= u64::from(Index::ENTRY_MAX),
            "POOL_BYTES_MAX keeps ids in u32"
        );
        let segment = SlabSegment { class: UNASSIGNED, held: 0, used: 0 };
        Self {
            entries: Entries::new(segments, shift),
            segments: vec![segment; segments].into_boxed_slice(),
            classes: Vec::new(),
            quotas: None,
            segment_bytes,
            fresh: VecDeque::new(),
            assigned: 0,
            slots: 0,
            many: HashMap::new(),
        }
    }

    /// Returns the quotas, made with the first one.
    pub(crate) fn quotas_mut(&mut self) -> &mut PoolQuotas {
        assert_eq!(self.assigned, 0, "quotas come before blocks");
        self.quotas.get_or_insert_with(|| PoolQuotas::new(Tables::like(&self.entries)))
    }

    /// Returns the class with the most evictable bytes of a holder, other than `besides`.
    pub(crate) fn main_class(&self, holder: HolderId, besides: usize) -> Option<usize> {
        let blocks = |class: &Class| {
            let lists =
                class.queues.holders().find(|id| *id == holder).map(|id| class.queues.holder_lists(id));
            let blocks: u64 = lists.into_iter().flatten().map(|list| u64::from(list.len())).sum();
            blocks * class.geometry.block_bytes
        };
        let others =
            self.classes.iter().enumerate().filter(|(at, class)| *at != besides && blocks(class) > 0);
        others.max_by_key(|(_, class)| blocks(class)).map(|(at, _)| at)
    }

    /// Returns lists of the policy.
    pub(crate) fn queues(&self, among: Among) -> &PolicyLists {
        match (among, &self.quotas) {
            (Among::Class(class), _) => &self.classes[class].queues,
            (Among::Quota(quota), Some(quotas)) => quotas.queues(quota),
            (Among::Quota(_), None) => unreachable!("an id was given out with a quota"),
        }
    }

    /// Returns the oldest of a holder's blocks that go first.
    pub(crate) fn device_tail(&self, class: usize, holder: HolderId) -> Option<u32> {
        let queues = &self.classes[class].queues;
        let has_lists = queues.holders().any(|id| id == holder);
        has_lists.then(|| queues.holder_lists(holder)[FIRST_OUT].tail()).flatten()
    }

    /// Returns the entry before another in a list of the policy.
    pub(crate) fn ahead(&self, among: Among, id: u32) -> Option<u32> {
        let link = match (among, &self.quotas) {
            (Among::Quota(_), Some(quotas)) => quotas.members.get(id).link(),
            _ => self.entries.get(id).link,
        };
        (link.previous != crate::list::NIL).then_some(link.previous)
    }

    /// Returns the entry behind another in its list.
    pub(crate) fn behind(&self, id: u32) -> Option<u32> {
        let link = self.entries.get(id).link;
        (link.next != crate::list::NIL).then_some(link.next)
    }

    /// True if a segment in service has had no class so far.
    pub(crate) fn has_fresh(&self) -> bool {
        !self.fresh.is_empty()
    }

    /// Returns the number of such segments.
    pub(crate) fn fresh(&self) -> u64 {
        self.fresh.len() as u64
    }

    /// Returns the number of slots of all assigned segments.
    pub(crate) fn slots(&self) -> u64 {
        self.slots
    }

    /// Returns the number of segments with a class.
    pub(crate) fn assigned(&self) -> usize {
        self.assigned
    }

    /// Returns the class of an entry.
    #[inline]
    pub(crate) fn class_of(&self, id: u32) -> usize {
        self.segments[self.entries.segment(id)].class.into()
    }

    /// Returns the bytes of the block in an entry's slot.
    pub(crate) fn block_bytes(&self, id: u32) -> u64 {
        self.classes[self.class_of(id)].geometry.block_bytes
    }

    /// Returns the reference to an entry's slot in its present filling.
    #[inline]
    pub(crate) fn slot_ref(&self, id: u32) -> SlotRef {
        let (segment, slot) = self.entries.split(id);
        let geometry = &self.classes[usize::from(self.segments[segment].class)].geometry;
        let start = pool::SEGMENT_ALIGN + segment as u64 * self.segment_bytes;
        let offset = start + geometry.data + slot as u64 * geometry.stride;
        SlotRef { offset, generation: self.entries.get(id).generation }
    }

    /// Returns the entry of a slot in its present filling.
    pub(crate) fn find_slot(&self, slot: SlotRef) -> Option<u32> {
        let segment =
            usize::try_from(slot.offset.checked_sub(pool::SEGMENT_ALIGN)? / self.segment_bytes).ok()?;
        let class = self.classes.get(usize::from(self.segments.get(segment)?.class))?;
        let place = class.geometry.place_of(slot.offset).ok()?;
        let id = self.entries.entry_id(segment, place.index as usize);
        (self.entries.get(id).generation == slot.generation).then_some(id)
    }

    /// Returns the class of a block size, made if there is none; `None` if there are too many.
    pub(crate) fn class(&mut self, geometry: Geometry) -> Option<usize> {
        if let Some(found) = self.classes.iter().position(|class| class.geometry == geometry) {
            return Some(found);
        }
        if let Some(unused) = self.classes.iter().position(|class| class.segments == 0) {
            self.classes[unused] = Class::new(geometry);
            return Some(unused);
        }
        if self.classes.len() == CLASSES_MAX {
            return None;
        }
        self.classes.push(Class::new(geometry));
        Some(self.classes.len() - 1)
    }

    /// Takes an empty segment into service.
    pub(crate) fn add_fresh(&mut self, segment: usize) {
        self.fresh.push_back(segment);
    }

    /// Gives a never used segment to a class, if there is one.
    pub(crate) fn assign_fresh(&mut self, class: usize) -> Option<usize> {
        let segment = self.fresh.pop_front()?;
        self.assign(segment, class);
        Some(segment)
    }

    /// Gives an empty segment to a class; all its slots become free.
    pub(crate) fn assign(&mut self, segment: usize, class: usize) {
        self.adopt(segment, class);
        for id in self.entries.of_segment(segment) {
            self.move_to(id, ListPlace::Free);
        }
    }

    /// Takes a segment of an earlier life into service: its slots belong to a class, and none is free yet.
    pub(crate) fn adopt(&mut self, segment: usize, class: usize) {
        let slots = self.classes[class].geometry.slot_count;
        self.segments[segment] = SlabSegment { class: class as u16, held: 0, used: 0 };
        self.entries.assign(segment, slots, SlotEntry::NONE.clone());
        if let Some(quotas) = &mut self.quotas {
            quotas.members.assign(segment, slots, QuotaMember::NONE);
        }
        self.classes[class].segments += 1;
        self.assigned += 1;
        self.slots += u64::from(slots);
    }

    /// Returns the entry of a slot of an assigned segment.
    pub(crate) fn entry(&self, segment: usize, index: u32) -> Option<u32> {
        let exists = (index as usize) < self.entries.get_table(segment)?.len();
        exists.then(|| self.entries.entry_id(segment, index as usize))
    }

    /// Takes an empty segment from its class: every slot must be free.
    pub(crate) fn withdraw(&mut self, segment: usize) {
        assert_eq!(self.segments[segment].used, 0, "a segment with blocks must not be withdrawn");
        for id in self.entries.of_segment(segment) {
            self.move_to(id, ListPlace::Detached);
        }
        let class = &mut self.classes[usize::from(self.segments[segment].class)];
        class.segments -= 1;
        self.slots -= u64::from(class.geometry.slot_count);
        self.assigned -= 1;
        self.segments[segment].class = UNASSIGNED;
    }

    /// Returns the segment to take from a class accepted by `is_meant`: from the class with the most
    /// segments, the segment with the fewest blocks. Never returns one with a leased slot.
    pub(crate) fn victim(&self, is_meant: impl Fn(usize) -> bool) -> Option<usize> {
        let stealable = |segment: &SlabSegment| {
            segment.held == 0 && segment.class != UNASSIGNED && is_meant(usize::from(segment.class))
        };
        let worth = |segment: &SlabSegment| {
            let owner = &self.classes[usize::from(segment.class)];
            (owner.segments, std::cmp::Reverse(segment.used))
        };
        let candidates = self.segments.iter().enumerate();
        candidates
            .filter(|(_, segment)| stealable(segment))
            .max_by_key(|(_, segment)| worth(segment))
            .map(|(at, _)| at)
    }

    /// Returns the committed blocks of a segment.
    pub(crate) fn committed_blocks(&self, segment: usize) -> Vec<u32> {
        let committed = |id: &u32| self.entries.get(*id).state() == SlotState::Committed;
        self.entries.of_segment(segment).filter(committed).collect()
    }

    /// Returns the entries of a segment whose slots are not free.
    pub(crate) fn used(&self, segment: usize) -> impl Iterator<Item = u32> + '_ {
        let used = |id: &u32| self.entries.get(*id).state() != SlotState::Free;
        self.entries.of_segment(segment).filter(used)
    }

    /// Moves an entry from its list to the free list, or to none.
    pub(crate) fn move_to(&mut self, id: u32, place: ListPlace) {
        debug_assert!(
            matches!(place, ListPlace::Free | ListPlace::Detached),
            "the policy says where in which list"
        );
        self.leave_list(id);
        self.enter_list(id, place, Spot::Head);
    }

    /// Moves an entry from its list to the list of its standing's sort. The entry before its new place has
    /// that sort.
    pub(crate) fn keep(&mut self, id: u32, standing: Standing, spot: Spot) {
        self.put(id, standing, ListPlace::Kept, spot);
    }

    /// Moves an entry from its list to the end of the list of blocks that go first.
    pub(crate) fn go_first(&mut self, id: u32, standing: Standing) {
        self.put(id, standing, ListPlace::FirstOut, Spot::Tail);
    }

    fn put(&mut self, id: u32, standing: Standing, place: ListPlace, spot: Spot) {
        self.leave_list(id);
        self.entries.get_mut(id).standing = standing;
        self.enter_list(id, place, spot);
    }

    fn leave_list(&mut self, id: u32) {
        let entry = self.entries.get(id);
        if let Some(quotas) = &mut self.quotas {
            quotas.leave_list(id, entry);
        }
        let class = &mut self.classes[usize::from(self.segments[self.entries.segment(id)].class)];
        if let Some(list) = class.entry_list(entry) {
            list.remove(&mut self.entries, id);
        }
        self.entries.get_mut(id).set_place(ListPlace::Detached);
    }

    fn enter_list(&mut self, id: u32, place: ListPlace, spot: Spot) {
        self.entries.get_mut(id).set_place(place);
        let entry = self.entries.get(id);
        let group_of =
            |id| (self.segments[self.entries.segment(id)].class, self.entries.get(id).claims.holder());
        let spot = spot.among(|ahead| group_of(ahead) == group_of(id));
        if let Some(quotas) = &mut self.quotas {
            quotas.entered(id, entry, spot);
        }
        if let Some(list) = self.classes[usize::from(group_of(id).0)].entry_list(entry) {
            list.push(&mut self.entries, id, spot);
        }
    }
}
