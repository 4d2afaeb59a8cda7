//! Leases and holds on the block of a slot, and the block's holder.

use crate::ledger::HolderId;

/// Counts of a block's leases and holds in 24 bits, and its holder in 8.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Claims(u32);

// === impl Claims ===

impl Claims {
    pub(super) const NONE: Self = Self(0);
    const HOLDER_BITS: u32 = u8::BITS;

    pub(crate) fn pins(self) -> u32 {
        self.0 >> Self::HOLDER_BITS
    }

    /// Counts one lease or hold more; `None` if the count is at its limit.
    pub(crate) fn pin(&mut self) -> Option<u32> {
        self.0 = self.0.checked_add(1 << Self::HOLDER_BITS)?;
        Some(self.pins())
    }

    /// Counts one lease or hold less, and returns the remaining number.
    pub(crate) fn unpin(&mut self) -> u32 {
        self.0 -= 1 << Self::HOLDER_BITS;
        self.pins()
    }

    #[inline]
    pub(crate) fn holder(self) -> HolderId {
        HolderId::from_byte(self.0 as u8)
    }

    /// Changes the holder. The block is in no list.
    pub(crate) fn set_holder(&mut self, holder: HolderId) {
        self.0 = self.pins() << Self::HOLDER_BITS | u32::from(holder.byte());
    }
}
