//! Eviction: the block least likely to be used again soon goes first, judged by the later uses of blocks like
//! it.
//!
//! Every kept block has a sort, and each sort a list in order of use. While a request goes on, its blocks are
//! judged by age alone. When it is over, its blocks get a sort from its answer's end ([`Kinds`]) and its turn
//! in its conversation ([`TurnEnds`]), unless another conversation uses them, too. Among the blocks at the lists'
//! tails, the policy evicts the one with the fewest uses expected by [`Odds`] for the time of its stay.
//!
//! A parent goes after its children, for any worth of theirs: a parent chosen while it has children waits in
//! a separate list, and takes its last child's place when the child goes. Every holder has its own lists: the
//! ledger decides which holders may lose a block. If a holder has only parents of other holders' blocks, one
//! of them goes, to keep the holder to its share. A leased or held block at a tail leaves the lists until its
//! last lease or hold ends: it is never evicted, and is met at most once per lease or hold.
//!
//! A block that its holder's own device has, too, keeps its standing and lies in a list of its own: such blocks go
//! before all others, the oldest first. Before the device reuses the block, it returns to the list of its sort. A
//! block demoted by a hint lies in that list until its next use.

mod ends;
mod ghost;
mod kinds;
mod odds;
mod order;

use self::ends::TurnEnds;
use self::ghost::Ghost;
use self::kinds::Kinds;
use self::odds::Odds;
use crate::entries::{FIRST_OUT, ListPlace, SlotEntry};
use crate::index::KeyPrint;
use crate::ledger::{HolderId, HolderSet};
use crate::list::Spot;
use crate::slab::{Among, Slab};
use crate::standing::{SORTS, Sort, Standing};

/// Ticks in the time of as many uses as there are slots: the unit of ages.
const TICKS_PER_ROOM: u64 = 64;
/// Number of the sorts with blocks that may go.
const SORTS_THAT_GO: usize = SORTS - 1;

/// Time, counted in uses of blocks.
#[derive(Debug, Default)]
struct PolicyClock {
    tick: u32,
    /// Uses since the tick began, times [`TICKS_PER_ROOM`].
    rest: u64,
}

/// The policy's own memory.
#[derive(Debug, Default)]
pub(crate) struct Policy {
    clock: PolicyClock,
    ends: TurnEnds,
    kinds: Kinds,
    odds: Odds,
    ghost: Ghost,
    /// Kept between calls, so no call allocates.
    prints: Vec<KeyPrint>,
}

/// A block at a tail.
#[derive(Copy, Clone, Debug)]
struct EvictionCandidate {
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
    /// The block leaves its holder's device, with this standing. The parent is known if it is kept.
    Left(Option<u32>, Standing),
}

/// The end of a request's answer.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Ending {
    /// A number for the way it ended, the same for similar ends; 0 if not known.
    pub way: u32,
    /// The conversation ends here: blocks without a use by another conversation go next.
    pub last: bool,
    /// The holder's device has the blocks, too: those of this holder go before others until
    /// [`Dram::leave_device`](crate::dram::Dram::leave_device).
    pub on_device: bool,
    /// Number of its first keys, of states before the one that the request went on from. Its end is no use of them.
    pub unread: usize,
}

/// The rank of an ended request's blocks, for copies made later.
#[derive(Copy, Clone, Debug)]
pub struct EndedChain {
    alone: Standing,
    shared: Standing,
    /// Number of its first blocks used by other conversations.
    shared_blocks: u32,
}

/// An ended request, for [`Policy::used`].
#[derive(Copy, Clone, Debug)]
pub(crate) struct EndedTurn {
    sort: Sort,
    /// Number of its first keys used by other conversations.
    pub(crate) shared: usize,
    last: bool,
    /// The holder whose device has the blocks, too.
    pub(crate) device: Option<HolderId>,
}

// === impl EndedChain ===

impl Default for EndedChain {
    fn default() -> Self {
        Self { alone: Standing::NONE, shared: Standing::NONE, shared_blocks: 0 }
    }
}

impl EndedChain {
    /// The standing of the block at this place of the chain, as far as this request knows.
    pub(crate) fn standing(&self, place: usize) -> Standing {
        if place < self.shared_blocks as usize { self.shared } else { self.alone }
    }
}

// === impl PolicyClock ===

impl PolicyClock {
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
    pub(crate) fn admit_block(&mut self, slab: &mut Slab, entry: u32, print: KeyPrint, parent: Parent) {
        let returned = self.ghost.recall(print) || matches!(parent, Parent::Below(_));
        slab.entries.get_mut(entry).set_returned(returned);
        let now = Standing::new(Sort::OPEN, self.clock.tick);
        let (standing, spot) = match parent {
            Parent::Lost => (self.worthless(), Spot::Tail),
            Parent::Kept(parent) => {
                slab.adopt_child(parent, entry);
                let before = slab.entries.get(parent);
                match before.list_place() == ListPlace::Kept && before.standing.sort() == now.sort() {
                    true => (before.standing, Spot::Behind(parent)),
                    false => (now, Spot::Head),
                }
            }
            Parent::Below(standing) => (standing.at(self.clock.tick), Spot::Head),
            Parent::Left(parent, standing) => {
                parent.into_iter().for_each(|parent| slab.adopt_child(parent, entry));
                (standing, Spot::Head)
            }
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
        slab.raise(entries, |entry| (entry.standing.at(self.clock.tick), ListPlace::Kept));
    }

    /// Puts a block, about to leave its holder's device, into the list of its sort.
    pub(crate) fn leave_device(&self, slab: &mut Slab, entry: u32) {
        let SlotEntry { standing, .. } = *slab.entries.get(entry);
        if slab.entries.get(entry).list_place() == ListPlace::FirstOut {
            slab.keep(entry, standing, Spot::Head);
        }
    }

    /// Lets blocks of a chain, the deepest first, go before all others. They keep their standings.
    pub(crate) fn demote(&self, slab: &mut Slab, entries: &[u32]) {
        slab.raise(entries, |entry| (entry.standing.leave_dram(), ListPlace::FirstOut));
    }

    /// Returns all of a holder's blocks that go first to the lists of their sorts.
    pub(crate) fn lose_device(&self, slab: &mut Slab, holder: HolderId) {
        for class in 0..slab.classes.len() {
            while let Some(entry) = slab.device_tail(class, holder) {
                self.leave_device(slab, entry);
            }
        }
    }

    /// Puts a block that was held and not used back to the tail, if it had left its list.
    pub(crate) fn unheld(&self, slab: &mut Slab, entry: u32) {
        let SlotEntry { standing, .. } = *slab.entries.get(entry);
        if slab.entries.get(entry).list_place() == ListPlace::Detached {
            slab.keep(entry, standing, Spot::Tail);
        }
    }

    /// Puts a block to the end of its list: below DRAM, too, it goes next.
    pub(crate) fn give_up(&self, slab: &mut Slab, entry: u32) {
        slab.keep(entry, self.worthless(), Spot::Tail);
    }

    /// Loads the word for a later look at a key's eviction, so that look need not wait.
    pub(crate) fn load_key(&self, print: KeyPrint) -> u64 {
        self.ghost.load_set(print)
    }

    /// Records a key's eviction.
    pub(crate) fn evicted(&mut self, print: KeyPrint, slots: u64) {
        self.ghost.remember(print, slots);
    }

    /// Records that the last child of a block went, with this standing from this place.
    pub(crate) fn lost_children(&self, slab: &mut Slab, parent: u32, standing: Standing, place: ListPlace) {
        let entry = slab.entries.get_mut(parent);
        if entry.standing.sort() != Sort::PARENT {
            return;
        }
        match entry.list_place() {
            ListPlace::Kept if place == ListPlace::FirstOut => slab.go_first(parent, standing.leave_dram()),
            ListPlace::Kept => slab.keep(parent, standing.leave_dram(), Spot::Tail),
            _ => entry.standing = standing.leave_dram(),
        }
    }

    /// Records an ended request with these keys, in a tier of so many slots. [`Policy::used`] follows with
    /// its kept blocks.
    pub(crate) fn end_turn(
        &mut self,
        prints: impl Iterator<Item = KeyPrint>,
        slots: u64,
        holder: HolderId,
        ending: Ending,
    ) -> EndedTurn {
        self.prints.clear();
        self.prints.extend(prints);
        self.clock.advance(self.prints.len() as u64, slots);
        let end = self.ends.end_turn(&self.prints, slots);
        let Ending { way, last, on_device, .. } = ending;
        let sort = if last { Sort::OPEN } else { Sort::of_turn(self.kinds.kind(way), end.turn) };
        let device = on_device.then_some(holder);
        let turn = EndedTurn { sort, shared: end.shared, last, device };
        self.odds.used(&self.prints, turn, self.clock.tick, slots);
        turn
    }

    /// Returns the rank of the blocks of a just ended request.
    pub(crate) fn ended_chain(&self, turn: EndedTurn) -> EndedChain {
        let [alone, shared] = [false, true].map(|shares| Sort::OPEN.after_end(turn.sort, shares));
        let last_use = if turn.last { self.worthless().tick() } else { self.clock.tick };
        EndedChain {
            alone: Standing::new(alone, last_use),
            shared: Standing::new(shared, self.clock.tick),
            shared_blocks: turn.shared as u32,
        }
    }

    /// Sorts blocks used by an ended request, the deepest first; those from `shared` on are among its first
    /// keys shared with other conversations.
    pub(crate) fn used(&self, slab: &mut Slab, entries: &[u32], turn: EndedTurn, shared: usize) {
        let mut at = 0;
        slab.raise(entries, |entry| {
            at += 1;
            let sort = entry.standing.sort().after_end(turn.sort, at > shared);
            let is_on_device = turn.device == Some(entry.claims.holder());
            let place = if is_on_device { ListPlace::FirstOut } else { ListPlace::Kept };
            (Standing::new(sort, self.clock.tick), place)
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
    pub(crate) fn next(&self, slab: &mut Slab, among: Among, losers: HolderSet) -> Option<u32> {
        let holders = slab.queues(among).holders().filter(|id| losers.has(*id));
        loop {
            for list in 0..=FIRST_OUT {
                holders.clone().for_each(|holder| detach_pinned(slab, among, holder, list));
            }
            let queues = slab.queues(among);
            let tails = lists_that_go()
                .flat_map(|list| holders.clone().filter_map(move |id| queues.holder_lists(id)[list].tail()));
            let Some(first) = self.first(slab, tails) else {
                let mut parents = holders.filter_map(|id| queues.holder_lists(id)[SORTS_THAT_GO].tail());
                return parents.next();
            };
            if slab.children(first) == 0 {
                return Some(first);
            }
            let standing = slab.entries.get(first).standing;
            slab.keep(first, Standing::new(Sort::PARENT, standing.tick()), Spot::Head);
        }
    }

    /// Returns the next block to go among those at lists' tails: the oldest on a device, if there is one. A block
    /// of a request that goes on never goes before an older one: otherwise a prompt computed in steps would lose
    /// its first blocks to its next ones.
    fn first(&self, slab: &Slab, tails: impl Iterator<Item = u32>) -> Option<u32> {
        let (mut first, mut open): (Option<EvictionCandidate>, Option<EvictionCandidate>) = (None, None);
        let mut on_device: Option<EvictionCandidate> = None;
        for id in tails {
            let entry = slab.entries.get(id);
            let candidate =
                EvictionCandidate { generation: entry.generation, ..self.candidate(id, entry.standing) };
            if entry.list_place() == ListPlace::FirstOut {
                on_device = on_device.filter(|other| other.age >= candidate.age).or(Some(candidate));
                continue;
            }
            let of = if candidate.sort.is_open() { &mut open } else { &mut first };
            if of.is_none_or(|other| candidate.goes_before(&other)) {
                *of = Some(candidate);
            }
        }
        let oldest = |open: &EvictionCandidate| first.is_none_or(|first| open.age > first.age);
        on_device.or(open.filter(oldest)).or(first).map(|first| first.entry)
    }

    /// Returns the expected uses of a block of this standing while as many blocks are used as the tier has room for.
    pub(crate) fn uses(&self, standing: Standing) -> f32 {
        self.odds.worth(standing.sort(), standing.age(self.clock.tick)) * TICKS_PER_ROOM as f32
    }

    /// Returns the fewest expected uses of the blocks at the tails of these holders' lists, one of which goes next.
    pub(crate) fn least_uses(&self, slab: &Slab, among: Among, losers: HolderSet) -> Option<f32> {
        let queues = slab.queues(among);
        let holders = queues.holders().filter(|id| losers.has(*id));
        let tails = holders
            .flat_map(|id| lists_that_go().filter_map(move |list| queues.holder_lists(id)[list].tail()));
        let first = self.first(slab, tails)?;
        Some(self.uses(slab.entries.get(first).standing))
    }

    fn candidate(&self, entry: u32, standing: Standing) -> EvictionCandidate {
        let (sort, age) = (standing.sort(), standing.age(self.clock.tick));
        EvictionCandidate { worth: self.odds.worth(sort, age), age, sort, generation: 0, entry }
    }

    /// Returns the next block to go among those at the tails of a disk's lists.
    pub(crate) fn least(&self, tails: impl Iterator<Item = (u32, Standing)>) -> Option<u32> {
        let candidates = tails.map(|(entry, standing)| self.candidate(entry, standing));
        let first = candidates.reduce(|first, other| if other.goes_before(&first) { other } else { first });
        first.map(|first| first.entry)
    }
}

// === impl EvictionCandidate ===

impl EvictionCandidate {
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

/// The lists with blocks that may go, in the order of their look-ups.
fn lists_that_go() -> impl Iterator<Item = usize> + Clone {
    (0..SORTS_THAT_GO).rev().chain([FIRST_OUT])
}

/// Lets pinned blocks at the tail of a holder's list leave it.
fn detach_pinned(slab: &mut Slab, among: Among, holder: HolderId, list: usize) {
    while let Some(entry) = slab.queues(among).holder_lists(holder)[list].tail() {
        if slab.entries.get(entry).claims.pins() == 0 {
            return;
        }
        slab.move_to(entry, ListPlace::Detached);
    }
}
