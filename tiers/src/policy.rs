//! Which block goes: the one that is least likely to be used again soon, judged by what became of others like it.
//!
//! Every kept block has a sort, and each sort a list in order of use. While a request goes on, what it uses is as good as its age.
//! When it is over its blocks are of a sort that follows from how its answer ended ([`Kinds`]) and from which turn of its
//! conversation it was ([`Ends`]), unless another conversation uses them, too. Of the blocks at the lists' tails that one goes for
//! which [`Odds`] sees the fewest uses for the time that it would stay.
//!
//! A parent goes after its children, whatever each is worth: one that would have gone while it has some waits in a list of its own,
//! and takes its last child's place when that goes. Every holder has lists of its own: who may lose a block is the ledger's to say.
//! Where all that a holder has are parents of others' blocks, one of them goes, for its share's sake. A leased or held block that
//! reaches a tail leaves the lists until nothing holds it: it is never evicted, and is met at most once per lease or hold.

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

/// Ticks in which as many blocks are used as there are slots: what ages are counted in.
const TICKS_PER_ROOM: u64 = 64;
/// Sorts of blocks that may go.
const SORTS_THAT_GO: usize = SORTS - 1;

/// Time, as blocks are used.
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
    /// Kept between calls, so that none allocates.
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

/// The block before one in its chain.
#[derive(Copy, Clone, Debug)]
pub(crate) enum Parent {
    /// There is none, nobody said which it is, or it is being filled.
    None,
    Kept(u32),
    /// It is not there.
    Lost,
    /// Nobody said, and the block had this standing when DRAM gave it up.
    Below(Standing),
}

/// How a request's answer ended.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Ending {
    /// A number for the way in which it ended, the same for ends that are alike; 0 where nobody said.
    pub way: u32,
    /// Nobody goes on from here: what no other conversation uses goes next.
    pub last: bool,
}

/// A request that is over, for [`Policy::used`].
#[derive(Copy, Clone, Debug)]
pub(crate) struct Turn {
    sort: Sort,
    /// So many of its first keys were used by others from which it does not go on.
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
    /// Puts a block that was just committed into a list. A block without its parent is found by nobody: it goes next.
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

    /// Puts a block of an earlier life into a list: those that nobody asks for go in the order in which they lie.
    pub(crate) fn adopt(&mut self, slab: &mut Slab, entry: u32) {
        slab.keep(entry, Standing::RECOVERED.at(self.clock.tick), Spot::Head);
    }

    /// Blocks were used by a request that goes on, or were leased until now: those of a chain, the deepest first.
    pub(crate) fn touch(&self, slab: &mut Slab, entries: &[u32]) {
        slab.raise(entries, |entry| entry.standing.at(self.clock.tick));
    }

    /// Puts a block back that was held and not used, if it had left its list: to the tail, where it was.
    pub(crate) fn unheld(&self, slab: &mut Slab, entry: u32) {
        let Entry { standing, .. } = *slab.entries.get(entry);
        if slab.entries.get(entry).list_place() == Place::Detached {
            slab.keep(entry, standing, Spot::Tail);
        }
    }

    /// Loads what says whether a key was evicted, so that who asks for that soon need not wait.
    pub(crate) fn load(&self, print: Print) -> u64 {
        self.ghost.load(print)
    }

    /// A key was evicted.
    pub(crate) fn evicted(&mut self, print: Print, slots: u64) {
        self.ghost.remember(print, slots);
    }

    /// The last child of a block went, with this standing.
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

    /// A request with these keys is over, in a tier of so many slots. What follows are its kept blocks by [`Policy::used`].
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

    /// Blocks that the request has used, the deepest first; those from `shared` on are among its first keys that it shares.
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

    /// The standing of what goes next.
    fn worthless(&self) -> Standing {
        Standing::new(Sort::OPEN, self.clock.tick.wrapping_sub(odds::AGE_MAX))
    }

    /// The block that goes next of those that these holders have, left in its list; `None` if every one is leased or being filled.
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

    /// Of blocks at lists' tails the one that goes next. One of a request that goes on goes before none that is older: a prompt that is
    /// computed in steps would lose its first blocks to its next ones.
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

    /// Of blocks at the tails of a disk's lists, the one that goes next.
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
        // Of two holders' blocks that are alike the one that was filled last is no parent of the other.
        let order =
            |of: &Self| (std::cmp::Reverse(of.age), of.sort.index(), std::cmp::Reverse(of.generation));
        order(self) < order(other)
    }
}

/// Lets the blocks at the tail of a holder's sort leave that something pins.
fn detach_pinned(slab: &mut Slab, among: Among, holder: HolderId, sort: usize) {
    while let Some(entry) = slab.queues(among).of(holder)[sort].tail() {
        if slab.entries.get(entry).claims.pins() == 0 {
            return;
        }
        slab.move_to(entry, Place::Detached);
    }
}
