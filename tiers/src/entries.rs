//! Entries and slots: one 64-byte entry per slot, in one table per assigned segment.
//!
//! An entry's number is (segment, slot) in 32 bits, so the slot's offset needs no storage, and an entry costs
//! one cache line: the key for the full comparison, the generation, the policy's links, the lease count and the holder.

mod claims;
mod phase;

use shm_protocol::key::{BlockHash, BlockKey};

pub(crate) use self::claims::Claims;
use self::phase::EntryPhase;
use crate::ledger::HolderId;
use crate::list::{LinkTable, List, ListLink, NIL};
use crate::standing::{SORTS, Standing};

/// The content of a slot.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
#[repr(u8)]
pub(crate) enum SlotState {
    Free,
    Filling,
    /// A block of an earlier life with unverified bytes: no lookup finds it.
    Adopted,
    /// The same, while its bytes are verified.
    Verifying,
    Committed,
    /// Found no more; its bytes stay until its last lease or hold ends.
    Removed,
}

/// The list an entry is in.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
#[repr(u8)]
pub(crate) enum ListPlace {
    /// No list: the block is being filled, was leased at its eviction or removal, or is of an earlier life
    /// and not verified.
    Detached,
    /// The free list of its class.
    Free,
    /// The policy's list of its sort.
    Kept,
    /// The policy's list of blocks that go first: their holder's device has them, too, or a hint said so.
    FirstOut,
}

#[repr(C, align(64))]
#[derive(Clone, Debug)]
pub(crate) struct SlotEntry {
    hash: BlockHash,
    namespace: u32,
    /// The entry of the block before it in its chain, or none: [`Slab`](crate::slab::Slab) keeps it.
    pub(crate) parent: u32,
    pub(crate) generation: u64,
    pub(crate) link: ListLink,
    pub(crate) claims: Claims,
    /// Its sort and last use, for the policy.
    pub(crate) standing: Standing,
    group: u8,
    phase: EntryPhase,
}

const _: () = assert!(size_of::<SlotEntry>() == 64);

/// The place of the list of blocks that go first, behind the sorts.
pub(crate) const FIRST_OUT: usize = SORTS;

/// The policy's lists of one holder: one for each sort, and that of blocks that go first.
pub(crate) type Sorts = [List; SORTS + 1];

/// The policy's lists, by holder.
#[derive(Debug, Default)]
pub(crate) struct PolicyLists(Vec<Sorts>);

/// One `T` for every slot: a table for each segment, empty until the segment is assigned.
#[derive(Clone, Debug)]
pub(crate) struct Tables<T> {
    tables: Box<[Box<[T]>]>,
    /// Entry number = segment << shift | slot.
    shift: u32,
}

/// The entries of all segments.
pub(crate) type Entries = Tables<SlotEntry>;

// === impl SlotEntry ===

const VACANT: SlotEntry = SlotEntry {
    hash: BlockHash([0; 32]),
    namespace: 0,
    parent: NIL,
    generation: 0,
    link: ListLink { previous: NIL, next: NIL },
    claims: Claims::NONE,
    standing: Standing::NONE,
    group: 0,
    phase: EntryPhase::NONE,
};

impl SlotEntry {
    pub(crate) const NONE: &Self = {
        static NONE: SlotEntry = VACANT;
        &NONE
    };

    /// The cache groups whose blocks fit an entry.
    pub(crate) const GROUP_MAX: u32 = u8::MAX as u32;

    pub(crate) fn block_key(&self) -> BlockKey {
        BlockKey { namespace: self.namespace, group: self.group.into(), hash: self.hash }
    }

    pub(crate) fn set_key(&mut self, key: BlockKey) {
        debug_assert!(key.group <= Self::GROUP_MAX, "checked where a block comes");
        (self.namespace, self.group, self.hash) = (key.namespace, key.group as u8, key.hash);
    }

    pub(crate) fn state(&self) -> SlotState {
        self.phase.state()
    }

    pub(crate) fn set_state(&mut self, state: SlotState) {
        self.phase.set_state(state);
    }

    pub(crate) fn list_place(&self) -> ListPlace {
        self.phase.list_place()
    }

    pub(crate) fn set_place(&mut self, place: ListPlace) {
        self.phase.set_place(place);
    }

    /// True if the block was evicted shortly before its present stay.
    pub(crate) fn has_returned(&self) -> bool {
        self.phase.has_returned()
    }

    pub(crate) fn set_returned(&mut self, returned: bool) {
        self.phase.set_returned(returned);
    }

    /// Returns the number of kept blocks with this one as their parent, up to [`SlotEntry::CHILDREN_MAX`] for
    /// that many or more.
    pub(crate) fn children(&self) -> u8 {
        self.phase.children()
    }

    pub(crate) const CHILDREN_MAX: u8 = EntryPhase::CHILDREN_MAX;

    pub(crate) fn set_children(&mut self, children: u8) {
        self.phase.set_children(children);
    }

    /// Returns the policy's list of the entry among those of its holder; `None` if it is in none of them.
    pub(crate) fn policy_list(&self) -> Option<usize> {
        match self.list_place() {
            ListPlace::Kept => Some(self.standing.sort().index()),
            ListPlace::FirstOut => Some(FIRST_OUT),
            ListPlace::Free | ListPlace::Detached => None,
        }
    }

    pub(crate) fn is_committed(&self) -> bool {
        self.state() == SlotState::Committed
    }

    #[inline]
    pub(crate) fn is_committed_as(&self, namespace: u32, group: u32, hash: &BlockHash) -> bool {
        // A key made of these fields would be copied first.
        self.is_committed()
            & (self.namespace == namespace)
            & (u32::from(self.group) == group)
            & (self.hash == *hash)
    }
}

// === impl Tables ===

impl<T: Clone> Tables<T> {
    pub(crate) fn new(segments: usize, shift: u32) -> Self {
        Self { tables: (0..segments).map(|_| Box::default()).collect(), shift }
    }

    /// Returns empty tables for as many segments of as many slots.
    pub(crate) fn like<U>(other: &Tables<U>) -> Self {
        Self::new(other.tables.len(), other.shift)
    }

    /// Makes a segment's table again.
    pub(crate) fn assign(&mut self, segment: usize, slots: u32, vacant: T) {
        self.tables[segment] = vec![vacant; slots as usize].into_boxed_slice();
    }

    #[inline]
    pub(crate) fn split(&self, id: u32) -> (usize, usize) {
        ((id >> self.shift) as usize, (id & ((1 << self.shift) - 1)) as usize)
    }

    pub(crate) fn entry_id(&self, segment: usize, slot: usize) -> u32 {
        (segment as u32) << self.shift | slot as u32
    }

    /// Returns the entry `id`. Panics if there is none.
    #[inline]
    pub(crate) fn get(&self, id: u32) -> &T {
        let (segment, slot) = self.split(id);
        &self.tables[segment][slot]
    }

    /// Returns the entry `id`. Panics if there is none.
    #[inline]
    pub(crate) fn get_mut(&mut self, id: u32) -> &mut T {
        let (segment, slot) = self.split(id);
        &mut self.tables[segment][slot]
    }

    /// Returns the segment of entry `id`.
    #[inline]
    pub(crate) fn segment(&self, id: u32) -> usize {
        self.split(id).0
    }

    /// Returns a segment's entries, if there is such a segment.
    pub(crate) fn get_table(&self, segment: usize) -> Option<&[T]> {
        self.tables.get(segment).map(|table| &**table)
    }

    /// Returns a segment's entries, none before it is assigned.
    pub(crate) fn segment_entries(&self, segment: usize) -> &[T] {
        &self.tables[segment]
    }

    /// Returns the numbers of a segment's entries.
    pub(crate) fn of_segment(&self, segment: usize) -> std::ops::Range<u32> {
        let first = self.entry_id(segment, 0);
        first..first + self.tables[segment].len() as u32
    }
}

impl Entries {
    /// Returns the entry `id`, or a vacant one if there is none.
    #[inline]
    pub(crate) fn get_or_vacant(&self, id: u32) -> &SlotEntry {
        let (segment, slot) = self.split(id);
        self.tables.get(segment).and_then(|table| table.get(slot)).unwrap_or(SlotEntry::NONE)
    }
}

impl LinkTable for Entries {
    fn link(&mut self, id: u32) -> &mut ListLink {
        &mut self.get_mut(id).link
    }
}

// === impl PolicyLists ===

impl PolicyLists {
    /// Returns the list of an entry's place, holder and sort.
    pub(crate) fn entry_list(&mut self, entry: &SlotEntry) -> Option<&mut List> {
        entry.policy_list().map(|list| self.holder_list(entry.claims.holder(), list))
    }

    /// Returns a list of a holder: that of a sort, or [`FIRST_OUT`].
    pub(crate) fn holder_list(&mut self, holder: HolderId, list: usize) -> &mut List {
        if self.0.len() <= holder.index() {
            self.0.resize_with(holder.index() + 1, Sorts::default);
        }
        &mut self.0[holder.index()][list]
    }

    /// Returns the holders of all blocks, present and past.
    pub(crate) fn holders(&self) -> impl Iterator<Item = HolderId> + Clone + use<> {
        HolderId::first(self.0.len())
    }

    /// Returns the lists of one holder.
    pub(crate) fn holder_lists(&self, holder: HolderId) -> &Sorts {
        &self.0[holder.index()]
    }
}
