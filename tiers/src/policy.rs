//! Eviction: the block least likely to be used again soon goes first, judged by the later uses of blocks like
//! it.
//!
//! Every kept block has a sort, and each sort a list in order of use. While a request goes on, its blocks are
//! judged by age alone. When it is over, its blocks get a sort from its answer's end ([`Kinds`]) and its turn
//! in its conversation ([`Ends`]), unless another conversation uses them, too. Among the blocks at the lists'
//! tails, the policy evicts the one with the fewest uses expected by [`Odds`] for the time of its stay.
//!
//! A parent goes after its children, for any worth of theirs: a parent chosen while it has children waits in
//! a separate list, and takes its last child's place when the child goes. Every holder has its own lists: the
//! ledger decides which holders may lose a block. If a holder has only parents of other holders' blocks, one
//! of them goes, to keep the holder to its share. A leased or held block at a tail leaves the lists until its
//! last lease or hold ends: it is never evicted, and is met at most once per lease or hold.
//! last lease or hold ends: it is never evicted, and is met at most once per lease or hold.

mod ends;
mod ghost;
mod kinds;
mod odds;
mod order;

use self::ends::Ends;
use self::ghost::Ghost;
use self::kinds::Kinds;
use self::odds::Odds;
use crate::entries::{Entry, Place};
use crate::index::Print;
use crate::ledger::{Group, HolderId};
use crate::list::Spot;
use crate::slab::{Among, Slab};
use crate::standing::{SORTS, Sort, Standing};

/// Ticks in the time of as many uses as there are slots: the unit of ages.
const TICKS_PER_ROOM: u64 = 64;
/// Number of the sorts whose blocks may go.
const SORTS_THAT_GO: usize = SORTS - 1;

/// Time, counted in uses of blocks.
#[derive(Debug, Default)]
struct Clock {
    tick: u32,
    /// Uses since the tick began, times [`TICKS_PER_ROOM`].
    rest: u64,
}

/// The policy's own memory.
#[derive(Debug, Default)]
pub(crate) struct Policy {
    clock: Clock,
    ends: Ends,
    kinds: Kinds,
    odds: Odds,
    ghost: Ghost,
    /// Kept between calls, so no call allocates.
    prints: Vec<Print>,
}

/// A block at a tail.
#[derive(Copy, Clone, Debug)]
struct Candidate {
    worth: f32,
    age: u32,
    sort: Sort,
    generation: u64,
    entry: u32,
}

/// The block before a block in its chain.
#[derive(Copy, Clone, Debug)]
pub(crate) enum Parent {
    /// The block has no parent, its parent is not known, or the parent is being filled.
    None,
    Kept(u32),
    /// The parent is not kept.
    Lost,
    /// The parent is not known, and DRAM evicted the block with this standing before.
    Below(Standing),
}

/// The end of a request's answer.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Ending {
    /// A number for the way it ended, the same for similar ends; 0 if not known.
    pub way: u32,
    /// The conversation ends here: blocks without a use by another conversation go next.
    pub last: bool,
}

/// An ended request, for [`Policy::used`].
#[derive(Copy, Clone, Debug)]
pub(crate) struct Turn {
    sort: Sort,
    /// Number of its first keys used by other conversations.
    pub(crate) shared: usize,
    last: bool,
}

// === impl Clock ===

impl Clock {
    fn advance(&mut self, uses: u64, slots: u64) {
        self.rest += uses * TICKS_PER_ROOM;
        self.tick = self.tick.wrapping_add((self.rest / slots) as u32);
        self.rest %= slots;
    }
}

// === impl Policy ===

impl Policy {
    /// Puts a just committed block into a list. A block without its kept parent cannot be found: it goes
    /// next.
    pub(crate) fn admit(&mut self, slab: &mut Slab, entry: u32, print: Print, parent: Parent) {
        let returned = self.ghost.recall(print) || matches!(parent, Parent::Below(_));
        slab.entries.get_mut(entry).set_returned(returned);
        let now = Standing::new(Sort::OPEN, self.clock.tick);
        let (standing, spot) = match parent {
            Parent::Lost => (self.worthless(), Spot::Tail),
            Parent::Kept(parent) => {
                slab.adopt_child(parent, entry);
                let before = slab.entries.get(parent);
                match before.list_place() == Place::Kept && before.standing.sort() == now.sort() {
                    true => (before.standing, Spot::Behind(parent)),
                    false => (now, Spot::Head),
                }
            }
            Parent::Below(standing) => (standing.at(self.clock.tick), Spot::Head),
            Parent::None => (now, Spot::Head),
        };
        slab.keep(entry, standing, spot);
    }

    /// Puts an adopted block into a list: without a query, such blocks go in the order of their slots.
    pub(crate) fn adopt(&mut self, slab: &mut Slab, entry: u32) {
        slab.keep(entry, Standing::RECOVERED.at(self.clock.tick), Spot::Head);
    }

    /// Records the use of blocks by a request that goes on, or the end of their lease: those of a chain, the
    /// deepest first.
    pub(crate) fn touch(&self, slab: &mut Slab, entries: &[u32]) {
        slab.raise(entries, |entry| entry.standing.at(self.clock.tick));
    }

    /// Puts a block that was held and not used back to the tail, if it had left its list.
    pub(crate) fn unheld(&self, slab: &mut Slab, entry: u32) {
        let Entry { standing, .. } = *slab.entries.get(entry);
        if slab.entries.get(entry).list_place() == Place::Detached {
            slab.keep(entry, standing, Spot::Tail);
        }
    }

    /// Loads the word for a later look at a key's eviction, so that look need not wait.
    pub(crate) fn load(&self, print: Print) -> u64 {
        self.ghost.load(print)
    }

    /// Records a key's eviction.
    pub(crate) fn evicted(&mut self, print: Print, slots: u64) {
        self.ghost.remember(print, slots);
    }

    /// Records that the last child of a block went, with this standing.
    pub(crate) fn lost_children(&self, slab: &mut Slab, parent: u32, standing: Standing) {
        let entry = slab.entries.get_mut(parent);
        if entry.standing.sort() != Sort::PARENT {
            return;
        }
        match entry.list_place() {
            Place::Kept => slab.keep(parent, standing.left(), Spot::Tail),
            _ => entry.standing = standing.left(),
        }
    }

    /// Records an ended request with these keys, in a tier of so many slots. [`Policy::used`] follows with
    /// its kept blocks.
    pub(crate) fn turn(&mut self, prints: impl Iterator<Item = Print>, slots: u64, ending: Ending) -> Turn {
        self.prints.clear();
        self.prints.extend(prints);
        self.clock.advance(self.prints.len() as u64, slots);
        let end = self.ends.turn(&self.prints, slots);
        let Ending { way, last } = ending;
        let sort = if last { Sort::OPEN } else { Sort::of_turn(self.kinds.kind(way), end.turn) };
        let turn = Turn { sort, shared: end.shared, last };
        self.odds.used(&self.prints, turn, self.clock.tick, slots);
        turn
    }

    /// Sorts blocks used by an ended request, the deepest first; those from `shared` on are among its first
    /// keys shared with other conversations.
    pub(crate) fn used(&self, slab: &mut Slab, entries: &[u32], turn: Turn, shared: usize) {
        let mut at = 0;
        slab.raise(entries, |entry| {
            at += 1;
            Standing::new(entry.standing.sort().after_end(turn.sort, at > shared), self.clock.tick)
        });
        if turn.last {
            let ended = |slab: &Slab, id: u32| slab.entries.get(id).standing.sort() == Sort::OPEN;
            for id in entries.iter().rev() {
                if ended(slab, *id) {
                    slab.keep(*id, self.worthless(), Spot::Tail);
                }
            }
        }
    }

    /// Returns the standing of the block to go next.
    fn worthless(&self) -> Standing {
        Standing::new(Sort::OPEN, self.clock.tick.wrapping_sub(odds::AGE_MAX))
    }

    /// Returns the next block to evict among those of these holders, left in its list; `None` if every one is
    /// leased or being filled.
    pub(crate) fn next(&self, slab: &mut Slab, among: Among, losers: Group) -> Option<u32> {
        let holders = slab.queues(among).holders().filter(|id| losers.has(*id));
        loop {
            for sort in 0..SORTS {
                holders.clone().for_each(|holder| detach_pinned(slab, among, holder, sort));
            }
            let queues = slab.queues(among);
            let tails = (0..SORTS_THAT_GO)
                .rev()
                .flat_map(|sort| holders.clone().filter_map(move |id| queues.of(id)[sort].tail()));
            let Some(first) = self.first(slab, tails) else {
                let mut parents = holders.filter_map(|id| queues.of(id)[SORTS_THAT_GO].tail());
                return parents.next();
            };
            if slab.children(first) == 0 {
                return Some(first);
            }
            let standing = slab.entries.get(first).standing;
            slab.keep(first, Standing::new(Sort::PARENT, standing.tick()), Spot::Head);
        }
    }

    /// Returns the next block to go among those at lists' tails. A block of a request that goes on never goes
    /// before an older one: otherwise a prompt computed in steps would lose its first blocks to its next
    /// ones.
    fn first(&self, slab: &Slab, tails: impl Iterator<Item = u32>) -> Option<u32> {
        let (mut first, mut open): (Option<Candidate>, Option<Candidate>) = (None, None);
        for entry in tails {
            let Entry { standing, generation, .. } = *slab.entries.get(entry);
            let candidate = Candidate { generation, ..self.candidate(entry, standing) };
            let of = if candidate.sort.is_open() { &mut open } else { &mut first };
            if of.is_none_or(|other| candidate.goes_before(&other)) {
                *of = Some(candidate);
            }
        }
        let oldest = |open: &Candidate| first.is_none_or(|first| open.age > first.age);
        open.filter(oldest).or(first).map(|first| first.entry)
    }

    fn candidate(&self, entry: u32, standing: Standing) -> Candidate {
        let (sort, age) = (standing.sort(), standing.age(self.clock.tick));
        Candidate { worth: self.odds.worth(sort, age), age, sort, generation: 0, entry }
    }

    /// Returns the next block to go among those at the tails of a disk's lists.
    pub(crate) fn least(&self, tails: impl Iterator<Item = (u32, Standing)>) -> Option<u32> {
        let candidates = tails.map(|(entry, standing)| self.candidate(entry, standing));
        let first = candidates.reduce(|first, other| if other.goes_before(&first) { other } else { first });
        first.map(|first| first.entry)
    }
}

// === impl Candidate ===

impl Candidate {
    fn goes_before(&self, other: &Self) -> bool {
        if self.worth != other.worth {
            return self.worth < other.worth;
        }
        // If two holders' blocks compare equal, the last filled one is no parent of the other.
        let order =
            |of: &Self| (std::cmp::Reverse(of.age), of.sort.index(), std::cmp::Reverse(of.generation));
        order(self) < order(other)
    }
}

/// Lets pinned blocks at the tail of a holder's sort leave their list.
fn detach_pinned(slab: &mut Slab, among: Among, holder: HolderId, sort: usize) {
    while let Some(entry) = slab.queues(among).of(holder)[sort].tail() {
        if slab.entries.get(entry).claims.pins() == 0 {
            return;
        }
        slab.move_to(entry, Place::Detached);
    }
}
