//! A block's state, its place, its return after an eviction, and the number of its children, in one byte.

use super::{ListPlace, SlotState};

/// 3 bits of state, 2 of place, one of return, 2 of children.
#[derive(Copy, Clone, Debug)]
pub(super) struct EntryPhase(u8);

const STATES: [SlotState; 8] = [
    SlotState::Free,
    SlotState::Filling,
    SlotState::Adopted,
    SlotState::Verifying,
    SlotState::Committed,
    SlotState::Removed,
    SlotState::Removed,
    SlotState::Removed,
];
const PLACES: [ListPlace; 4] = [ListPlace::Detached, ListPlace::Free, ListPlace::Kept, ListPlace::FirstOut];

// === impl EntryPhase ===

impl EntryPhase {
    /// Free, in no list, without children.
    pub(super) const NONE: Self = Self(0);
    pub(super) const CHILDREN_MAX: u8 = Self::CHILDREN >> Self::CHILDREN_SHIFT;
    const STATE: u8 = 0b111;
    const PLACE: u8 = 0b11 << Self::PLACE_SHIFT;
    const PLACE_SHIFT: u32 = 3;
    const RETURNED: u8 = 1 << 5;
    const CHILDREN: u8 = 0b11 << Self::CHILDREN_SHIFT;
    const CHILDREN_SHIFT: u32 = 6;

    #[inline]
    pub(super) fn state(self) -> SlotState {
        STATES[usize::from(self.0 & Self::STATE)]
    }

    pub(super) fn set_state(&mut self, state: SlotState) {
        self.put_bits(Self::STATE, state as u8);
    }

    #[inline]
    pub(super) fn list_place(self) -> ListPlace {
        PLACES[usize::from((self.0 & Self::PLACE) >> Self::PLACE_SHIFT)]
    }

    pub(super) fn set_place(&mut self, place: ListPlace) {
        self.put_bits(Self::PLACE, (place as u8) << Self::PLACE_SHIFT);
    }

    pub(super) fn has_returned(self) -> bool {
        self.0 & Self::RETURNED != 0
    }

    pub(super) fn set_returned(&mut self, returned: bool) {
        self.put_bits(Self::RETURNED, u8::from(returned) * Self::RETURNED);
    }

    pub(super) fn children(self) -> u8 {
        self.0 >> Self::CHILDREN_SHIFT
    }

    pub(super) fn set_children(&mut self, children: u8) {
        self.put_bits(Self::CHILDREN, children << Self::CHILDREN_SHIFT);
    }

    fn put_bits(&mut self, field: u8, bits: u8) {
        self.0 = self.0 & !field | bits;
    }
}
