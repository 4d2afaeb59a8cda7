//! The sort and the last use of a block, for the policy.

/// Commonest ways in which answers ended that are told apart, and all others.
pub(crate) const KINDS: usize = 4;
/// Turns of a conversation that are told apart: the first, and later ones.
pub(crate) const TURNS: usize = 2;
/// How many requests that go on from no other used a block that was known: none, one, or more.
const LEVELS: usize = 3;
/// Sorts of blocks, each of which has a list.
pub(crate) const SORTS: usize = LEVELS + KINDS * TURNS + (LEVELS - 1) + 1;

/// What is known of a block: which conversation's it is, or that several share it.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Sort(u8);

/// A block's sort and the tick of its last use, in 16 bits. 12 bits of the tick are kept: 64 rooms, twice the oldest age with an effect.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Standing(u16);

// === impl Sort ===

impl Sort {
    /// The request that uses the block goes on, and no other has shared it.
    pub(crate) const OPEN: Self = Self(0);
    /// A block that would have gone while it has kept children: it goes after them.
    pub(crate) const PARENT: Self = Self(SORTS as u8 - 1);
    const FIRST_TURN: u8 = LEVELS as u8;
    const SHARED: u8 = Self::FIRST_TURN + (KINDS * TURNS) as u8;

    /// The sort of a conversation's blocks after its turn `turn`, from 1, which ended in a way of a kind.
    pub(crate) fn of_turn(kind: usize, turn: u8) -> Self {
        let turn = usize::from(turn).clamp(1, TURNS) - 1;
        Self(Self::FIRST_TURN + (kind * TURNS + turn) as u8)
    }

    pub(crate) fn index(self) -> usize {
        self.0.into()
    }

    pub(crate) fn at(index: usize) -> Self {
        Self(index as u8)
    }

    /// Whether a request is at work with the block.
    pub(crate) fn is_open(self) -> bool {
        self.0 < Self::FIRST_TURN
    }

    pub(crate) fn is_shared(self) -> bool {
        self.0 >= Self::SHARED && self != Self::PARENT
    }

    /// How many requests have shared it.
    fn level(self) -> u8 {
        match self {
            _ if self.is_open() => self.0,
            _ if self.is_shared() => 1 + self.0 - Self::SHARED,
            _ => 0,
        }
    }

    /// The sort while a request uses the block.
    pub(crate) fn opened(self) -> Self {
        Self(self.level())
    }

    /// The sort at a request's end: `turn` for what is its conversation's alone. `shares`: it goes on from no request that used the block.
    pub(crate) fn after_end(self, turn: Self, shares: bool) -> Self {
        let level = (self.level() + u8::from(shares)).min(LEVELS as u8 - 1);
        if level == 0 { turn } else { Self(Self::SHARED + level - 1) }
    }
}

// === impl Standing ===

impl Standing {
    /// The standing of no block.
    pub(crate) const NONE: Self = Self(0);
    /// The standing on a disk of a block in DRAM and on the disk: no block there is only a parent.
    pub(crate) const ABOVE: Self = Self((Sort::PARENT.0 as u16) << Self::SORT_SHIFT);
    /// Of a block of an earlier life: it may have been shared.
    pub(crate) const RECOVERED: Self = Self((Sort::SHARED as u16) << Self::SORT_SHIFT);
    const TICK_MASK: u16 = (1 << Self::SORT_SHIFT) - 1;
    const SORT_SHIFT: u32 = 12;

    pub(crate) fn new(sort: Sort, tick: u32) -> Self {
        Self(u16::from(sort.0) << Self::SORT_SHIFT | (tick as u16 & Self::TICK_MASK))
    }

    #[inline]
    pub(crate) fn sort(self) -> Sort {
        Sort((self.0 >> Self::SORT_SHIFT) as u8)
    }

    /// Whether another request than its first has used the block, or went on from where it is.
    pub fn was_used_again(self) -> bool {
        let of_first_turn = |kind| Sort::of_turn(kind, 1) == self.sort();
        self.sort() != Sort::OPEN && !(0..KINDS).any(of_first_turn)
    }

    /// The same for a block on its way out of DRAM.
    pub(crate) fn left(self) -> Self {
        if self.sort() == Sort::PARENT { Self::new(Sort::OPEN, self.tick()) } else { self }
    }

    pub(crate) fn tick(self) -> u32 {
        u32::from(self.0 & Self::TICK_MASK)
    }

    pub(crate) fn age(self, tick: u32) -> u32 {
        u32::from((tick as u16).wrapping_sub(self.0) & Self::TICK_MASK)
    }

    /// The same as of a use by a request that goes on.
    #[inline]
    pub(crate) fn at(self, tick: u32) -> Self {
        Self::new(self.sort().opened(), tick)
    }
}

const _: () = assert!(SORTS <= 1 << (u16::BITS - Standing::SORT_SHIFT));
