//! Leases and holds on the block of a slot, and the block's holder.

use crate::ledger::HolderId;

/// Counts of a block's leases and holds in 23 bits, a bit for a parent filled later, and its holder in 8.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Claims(u32);

// === impl Claims ===

impl Claims {
    pub(super) const NONE: Self = Self(0);
    const LATE_PARENT: u32 = 1 << u8::BITS;
    const PINS_SHIFT: u32 = u8::BITS + 1;

    pub(crate) fn pins(self) -> u32 {
        self.0 >> Self::PINS_SHIFT
    }

    /// Counts one lease or hold more; `None` if the count is at its limit.
    pub(crate) fn pin(&mut self) -> Option<u32> {
        self.0 = self.0.checked_add(1 << Self::PINS_SHIFT)?;
        Some(self.pins())
    }

    /// Counts one lease or hold less, and returns the remaining number.
    pub(crate) fn unpin(&mut self) -> u32 {
        self.0 -= 1 << Self::PINS_SHIFT;
        self.pins()
    }

    /// True if the block's parent was filled after it.
    pub(crate) fn has_late_parent(self) -> bool {
        self.0 & Self::LATE_PARENT != 0
    }

    pub(crate) fn set_late_parent(&mut self, late: bool) {
        self.0 = self.0 & !Self::LATE_PARENT | (u32::from(late) * Self::LATE_PARENT);
    }

    #[inline]
    pub(crate) fn holder(self) -> HolderId {
        HolderId::from_byte(self.0 as u8)
    }

    /// Changes the holder. The block is in no list.
    pub(crate) fn set_holder(&mut self, holder: HolderId) {
        self.0 = self.0 & !u32::from(u8::MAX) | u32::from(holder.byte());
    }
}
