//! The sort and the last use of a block, for the policy.

/// Kinds of ends: kind 0 for all rare ways of ending an answer, and one kind for each of the three commonest ways.
pub(crate) const KINDS: usize = 4;
/// Turns of a conversation with sorts of their own: the first, and all later ones.
pub(crate) const TURNS: usize = 2;
/// Levels of sharing: no request has shared a block, one has, or more have. A request shares known blocks if it begins a conversation.
const LEVELS: usize = 3;
/// Sorts of blocks. Each sort has a list.
pub(crate) const SORTS: usize = LEVELS + KINDS * TURNS + (LEVELS - 1) + 1;

/// The sort of a block: used by a request at work, left by one conversation, shared by several, or a waiting parent.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Sort(u8);

/// A block's sort and the tick of its last use, in 16 bits. The low 12 bits of the tick are kept: 64 rooms, twice the oldest age with an effect.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Standing(u16);

// === impl Sort ===

impl Sort {
    /// A block used by a request at work, and shared by no other.
    pub(crate) const OPEN: Self = Self(0);
    /// A block with kept children, met when its turn to go came: it goes after them.
    pub(crate) const PARENT: Self = Self(SORTS as u8 - 1);
    const FIRST_TURN: u8 = LEVELS as u8;
    const SHARED: u8 = Self::FIRST_TURN + (KINDS * TURNS) as u8;

    /// The sort of a conversation's blocks after its turn `turn`, from 1, with an end of kind `kind`.
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

    /// True if a request is at work with the block.
    pub(crate) fn is_open(self) -> bool {
        self.0 < Self::FIRST_TURN
    }

    pub(crate) fn is_shared(self) -> bool {
        self.0 >= Self::SHARED && self != Self::PARENT
    }

    /// The level of sharing, below [`LEVELS`].
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

    /// The sort at a request's end: `turn` for a block of its conversation alone. `shares`: the block was known from another conversation.
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
    /// The standing of a block of an earlier life: it may have been shared.
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

    /// True if another conversation has used the block.
    pub(crate) fn is_shared(self) -> bool {
        self.sort().level() > 0
    }

    /// True if a second request has used the block, or its last turn was not the first of its conversation.
    pub fn was_used_again(self) -> bool {
        let of_first_turn = |kind| Sort::of_turn(kind, 1) == self.sort();
        self.sort() != Sort::OPEN && !(0..KINDS).any(of_first_turn)
    }

    /// The standing of the block on its way out of DRAM: no sort of a parent.
    pub(crate) fn leave_dram(self) -> Self {
        if self.sort() == Sort::PARENT { Self::new(Sort::OPEN, self.tick()) } else { self }
    }

    pub(crate) fn tick(self) -> u32 {
        u32::from(self.0 & Self::TICK_MASK)
    }

    pub(crate) fn age(self, tick: u32) -> u32 {
        u32::from((tick as u16).wrapping_sub(self.0) & Self::TICK_MASK)
    }

    /// The standing after a use at this tick by a request at work.
    #[inline]
    pub(crate) fn at(self, tick: u32) -> Self {
        Self::new(self.sort().opened(), tick)
    }
}

const _: () = assert!(SORTS <= 1 << (u16::BITS - Standing::SORT_SHIFT));
