//! The rank and the last use of a block, for the policy.

/// Ranks: from the last one on, conversations go on about as often.
pub(crate) const RANKS: usize = 8;

/// A block's rank, a flag for an eviction shortly before its present stay, and the tick of its last use, in 16 bits. 12 bits of the
/// tick are kept: 16 rooms, twice the oldest age with an effect.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Standing(u16);

// === impl Standing ===

impl Standing {
    /// The standing of no block.
    pub(crate) const NONE: Self = Self(0);
    /// The standing on a disk of a block in DRAM and on the disk: the only one there with the flag.
    pub(crate) const ABOVE: Self = Self(Self::RETURNED);
    /// On a disk, of a block of an earlier life.
    pub(crate) const RECOVERED: Self = Self(1 << Self::RANK_SHIFT);
    const TICK_BITS: u32 = 12;
    const TICK_MASK: u16 = (1 << Self::TICK_BITS) - 1;
    const RETURNED: u16 = 1 << Self::TICK_BITS;
    const RANK_SHIFT: u32 = Self::TICK_BITS + 1;

    pub(crate) fn new(rank: u8, returned: bool, tick: u32) -> Self {
        let flag = if returned { Self::RETURNED } else { 0 };
        Self(u16::from(rank) << Self::RANK_SHIFT | flag | (tick as u16 & Self::TICK_MASK))
    }

    #[inline]
    pub(crate) fn rank(self) -> usize {
        usize::from(self.0 >> Self::RANK_SHIFT)
    }

    pub(crate) fn returned(self) -> bool {
        self.0 & Self::RETURNED != 0
    }

    /// Whether another request than its first has used the block, or went on from where it is.
    pub fn was_used_again(self) -> bool {
        self.rank() > 0
    }

    /// The same without the flag, for a block's way out of DRAM.
    pub(crate) fn left(self) -> Self {
        Self(self.0 & !Self::RETURNED)
    }

    pub(crate) fn tick(self) -> u32 {
        u32::from(self.0 & Self::TICK_MASK)
    }

    pub(crate) fn age(self, tick: u32) -> u32 {
        u32::from((tick as u16).wrapping_sub(self.0) & Self::TICK_MASK)
    }

    #[inline]
    pub(crate) fn at(self, tick: u32) -> Self {
        Self(self.0 & !Self::TICK_MASK | tick as u16 & Self::TICK_MASK)
    }
}

const _: () = assert!(RANKS == 1 << (u16::BITS - Standing::RANK_SHIFT));
