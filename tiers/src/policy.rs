//! Which block goes: the one that is least likely to be used again soon, judged by what became of others like it.
//!
//! Every kept block has a rank, and each rank a list in order of use. A block of a first request has rank 0; its rank grows
//! when another request uses it, and is never below the number of turns that its conversation has gone on for ([`Ends`]). A
//! block that comes back while the ghost remembers it counts as used. Of the blocks at the lists' tails that one goes for which
//! [`Odds`] sees the fewest uses for the time that it would stay.
//!
//! Every holder has lists of its own: who may lose a block is the ledger's to say. Of one holder's blocks a parent goes after its
//! children: its rank is at least theirs, its last use is no earlier, in a list it lies before them, and odds neither fall
//! with the rank nor grow with the age. Where several may lose one, a parent of another holder may go first, for its share's sake;
//! so may one that comes back from a hold long after its children did ([`Policy::unheld`]). A leased or held block that reaches a
//! tail leaves the lists until nothing holds it: it is never evicted, and is met at most once per lease or hold.

mod ends;
mod ghost;
mod odds;

use self::ends::Ends;
use self::ghost::Ghost;
use self::odds::Odds;
use crate::entries::{Entry, Place, Queues};
use crate::index::Print;
use crate::ledger::{Group, HolderId};
use crate::list::{List, Spot};
use crate::slab::{Among, Slab};
use crate::standing::{RANKS, Standing};

/// The part of all blocks below which rank 0 loses none to what is older: prompts that are computed in steps would lose their
/// first blocks to their next ones.
const WINDOW_PART: u32 = 16;
/// Ticks in which as many blocks are used as there are slots: what ages are counted in.
const TICKS_PER_ROOM: u64 = 256;
/// Blocks that one which comes back from a hold is put ahead of, at most: thousands may have been used last in one tick.
const LATER_MAX: usize = 64;

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
    rank: usize,
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

/// A request that is over, for [`Policy::used`]: the rank that its blocks have at least.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Turn(u8);

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
        let returned = self.ghost.recall(print);
        let (rank, tick, spot) = match parent {
            Parent::Lost => (0, self.clock.tick.wrapping_sub(odds::AGE_MAX), Spot::Tail),
            Parent::Kept(parent) if slab.entries.get(parent).place == Place::Kept => {
                let standing = slab.entries.get(parent).standing;
                (standing.rank() as u8, standing.tick(), Spot::Behind(parent))
            }
            Parent::Below(standing) => (risen(standing.rank() as u8), self.clock.tick, Spot::Head),
            Parent::None | Parent::Kept(_) => (u8::from(returned), self.clock.tick, Spot::Head),
        };
        let returned = returned || matches!(parent, Parent::Below(_));
        slab.keep(entry, Standing::new(rank, returned, tick), spot);
    }

    /// Puts a block of an earlier life into a list: those that nobody asks for go in the order in which they lie.
    pub(crate) fn adopt(&mut self, slab: &mut Slab, entry: u32) {
        slab.keep(entry, Standing::new(1, false, self.clock.tick), Spot::Head);
    }

    /// Blocks were used by a request that goes on, or were leased until now: those of a chain, the deepest first.
    pub(crate) fn touch(&self, slab: &mut Slab, entries: &[u32]) {
        slab.raise(entries, |entry| entry.standing.at(self.clock.tick));
    }

    /// Puts a block back that was held and not used, if it had left its list: to the tail, where it was. Of others that came back so
    /// before it, it lies ahead of those that were filled later, which may be its children, unless these are many: who holds a chain
    /// gives it back from its beginning.
    pub(crate) fn unheld(&self, slab: &mut Slab, entry: u32) {
        let Entry { place, standing, generation, .. } = *slab.entries.get(entry);
        if place != Place::Detached {
            return;
        }
        let among = Among::Class(slab.class_of(entry));
        let holder = slab.entries.get(entry).claims.holder();
        let later = |id: &u32| {
            let other = slab.entries.get(*id);
            other.standing.tick() == standing.tick() && other.generation > generation
        };
        let mut ahead = slab.queues(among).tail(holder, standing.rank());
        let mut spot = Spot::Tail;
        for _ in 0..LATER_MAX {
            let Some(other) = ahead.filter(later) else { return slab.keep(entry, standing, spot) };
            ahead = slab.ahead(among, other);
            spot = ahead.map_or(Spot::Head, Spot::Behind);
        }
        slab.keep(entry, standing, Spot::Tail);
    }

    /// Loads what says whether a key was evicted, so that who asks for that soon need not wait.
    pub(crate) fn load(&self, print: Print) -> u64 {
        self.ghost.load(print)
    }

    /// A key was evicted.
    pub(crate) fn evicted(&mut self, print: Print, slots: u64) {
        self.ghost.remember(print, slots);
    }

    /// A request with these keys is over, in a tier of so many slots. What follows are its kept blocks by [`Policy::used`].
    pub(crate) fn turn(&mut self, prints: impl Iterator<Item = Print>, slots: u64) -> Turn {
        self.prints.clear();
        self.prints.extend(prints);
        self.clock.advance(self.prints.len() as u64, slots);
        let rank = self.ends.turn(&self.prints, slots) - 1;
        self.odds.used(&self.prints, rank, self.clock.tick, slots);
        Turn(rank)
    }

    /// Blocks that the request has used, the deepest first. Those of a generation from `own_from` on are its own.
    pub(crate) fn used(&self, slab: &mut Slab, entries: &[u32], turn: Turn, own_from: u64) {
        // The rank of the block behind the next one.
        let mut deeper = turn.0;
        slab.raise(entries, |entry| {
            let standing = entry.standing;
            let own = entry.generation >= own_from;
            deeper =
                deeper.max(if own { u8::from(standing.returned()) } else { risen(standing.rank() as u8) });
            Standing::new(deeper, false, self.clock.tick)
        });
    }

    /// The block that goes next of those that these holders have, left in its list; `None` if every one is leased or being filled.
    pub(crate) fn next(&self, slab: &mut Slab, among: Among, losers: Group) -> Option<u32> {
        let holders = slab.queues(among).holders().filter(|id| losers.has(*id));
        for rank in 0..RANKS {
            holders.clone().for_each(|holder| detach_pinned(slab, among, holder, rank));
        }
        let queues = slab.queues(among);
        let tails = (0..RANKS)
            .rev()
            .flat_map(|rank| holders.clone().filter_map(move |id| queues.of(id)[rank].tail()));
        self.first(slab, tails, || Kept::of(queues, losers).in_window())
    }

    /// The blocks that [`Policy::next`] will name, one after the other, as far as nothing is used meanwhile.
    pub(crate) fn order<'a>(
        &'a self,
        slab: &'a Slab,
        among: Among,
        losers: Group,
    ) -> impl Iterator<Item = u32> + 'a {
        let queues = slab.queues(among);
        let holders = queues.holders().filter(move |id| losers.has(*id));
        let unpinned = move |mut entry: Option<u32>| {
            while let Some(pinned) = entry.filter(|id| slab.entries.get(*id).claims.pins() > 0) {
                entry = slab.ahead(among, pinned);
            }
            entry
        };
        let ranks = (0..RANKS).rev();
        let tails =
            ranks.flat_map(|rank| holders.clone().map(move |id| unpinned(queues.of(id)[rank].tail())));
        let (mut tails, mut kept): (Vec<_>, _) = (tails.collect(), Kept::of(queues, losers));
        std::iter::from_fn(move || {
            let first = self.first(slab, tails.iter().flatten().copied(), || kept.in_window())?;
            kept.all -= 1;
            kept.lowest -= u32::from(slab.entries.get(first).standing.rank() == 0);
            let tail = tails.iter_mut().find(|tail| **tail == Some(first)).expect("it is one of them");
            *tail = unpinned(slab.ahead(among, first));
            Some(first)
        })
    }

    /// Of blocks at lists' tails, those of higher ranks first, the one that goes next.
    fn first(
        &self,
        slab: &Slab,
        tails: impl Iterator<Item = u32>,
        in_window: impl Fn() -> bool,
    ) -> Option<u32> {
        let mut first: Option<Candidate> = None;
        for entry in tails {
            let Entry { standing, generation, .. } = *slab.entries.get(entry);
            let candidate = Candidate { generation, ..self.candidate(entry, standing) };
            // What is older than all of rank 0 is no parent of any of them.
            let older = first.is_some_and(|first| first.age > candidate.age);
            if candidate.rank == 0 && older && in_window() {
                continue;
            }
            if first.is_none_or(|first| candidate.goes_before(&first)) {
                first = Some(candidate);
            }
        }
        first.map(|first| first.entry)
    }

    fn candidate(&self, entry: u32, standing: Standing) -> Candidate {
        let (rank, age) = (standing.rank(), standing.age(self.clock.tick));
        Candidate { worth: self.odds.worth(rank, age), age, rank, generation: 0, entry }
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
        let order = |of: &Self| (std::cmp::Reverse(of.age), of.rank, std::cmp::Reverse(of.generation));
        order(self) < order(other)
    }
}

/// The rank after a further use.
fn risen(rank: u8) -> u8 {
    (rank + 1).min(RANKS as u8 - 1)
}

/// How many blocks these holders have.
#[derive(Copy, Clone, Debug)]
struct Kept {
    all: u32,
    /// Of the lowest rank.
    lowest: u32,
}

// === impl Kept ===

impl Kept {
    fn of(queues: &Queues, losers: Group) -> Self {
        let lists = || queues.holders().filter(|id| losers.has(*id)).map(|id| queues.of(id));
        let all = lists().flatten().map(List::len).sum();
        Self { all, lowest: lists().map(|ranks| ranks[0].len()).sum() }
    }

    /// Whether the lowest rank has so few blocks that they may belong to requests that go on.
    fn in_window(self) -> bool {
        self.lowest <= self.all / WINDOW_PART
    }
}

/// Lets the blocks at the tail of a holder's rank leave that something pins.
fn detach_pinned(slab: &mut Slab, among: Among, holder: HolderId, rank: usize) {
    while let Some(entry) = slab.queues(among).of(holder)[rank].tail() {
        if slab.entries.get(entry).claims.pins() == 0 {
            return;
        }
        slab.move_to(entry, Place::Detached);
    }
}
