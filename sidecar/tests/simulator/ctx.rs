//! What every part of the simulated world shares: time, chance, coverage, the trace, and who acts next.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

use shm_protocol::handshake::Hello;

use crate::connection::Connection;
use crate::coverage::Coverage;
use crate::origin::{Kv, taint};
use crate::rng::{Rng, mix};

pub(crate) type Micros = u64;

/// Ranks of an engine at most, and its cache groups.
pub(crate) const RANKS: usize = 2;
pub(crate) const GROUPS: usize = 2;
/// Workers of an engine at most: one for each rank and group.
pub(crate) const WORKERS: usize = RANKS * GROUPS;
pub(crate) const ENGINES: usize = 2;
/// Threads that copy for the sidecar.
pub(crate) const COPIERS: usize = 2;

/// Product times, shortened so that a run sees many of each: a step takes about a millisecond here as there.
pub(crate) const TICK: Micros = 5_000;
pub(crate) const RETRY: Micros = 20_000;
/// How much faster than `now` the clock of a rank's session runs: its deadlines are 2 s and more.
const RANK_HASTE: u32 = 100;
/// Longer than any freeze: beyond it the product gives up a sidecar that is frozen half-way through a block.
pub(crate) const SETTLE: Micros = 10_000_000;
/// As long as ranks keep the pool of an earlier life.
pub(crate) const HOLD: Micros = 50_000;
pub(crate) const BUDGET: Micros = 2_000;

/// A thread of some process.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Actor {
    /// The sidecar's data thread.
    Data,
    /// A thread of the sidecar that copies.
    Copier(usize),
    Scheduler(usize),
    Worker(usize, usize),
    /// A rank's thread that copies loads.
    Rescuer(usize, usize),
    Fate,
}

/// What kind of world a seed makes.
#[derive(Clone, Debug)]
pub(crate) struct Knobs {
    pub(crate) lease_ttl_ms: u64,
    pub(crate) segments: u64,
    /// The pool is a file that a restarted sidecar opens again.
    pub(crate) pool_file: bool,
    /// It has a disk for what memory gives up.
    pub(crate) disk: bool,
    /// Number of the tier of a second disk, slow and faulty, in some worlds with a disk: before it or behind it.
    pub(crate) slow_disk: Option<usize>,
    /// There are pods beside this one.
    pub(crate) mesh: bool,
    /// Keys and messages that a session may cost in one turn.
    pub(crate) turn_cost: usize,
    /// Slowness of copies: microseconds for a word at most.
    pub(crate) copy_us: u64,
    /// A step has no room for a request with a hit at one in so many occasions.
    pub(crate) full_steps: u64,
    /// A client comes at one in so many occasions.
    pub(crate) arrivals: u64,
    /// Faults per run at most.
    pub(crate) faults: u64,
    /// One in so many blocks fails to be copied; zero: none.
    pub(crate) failing_copies: u64,
    /// One in so many wake-ups is lost; zero: none.
    pub(crate) lost_wakeups: u64,
}

/// A process asks to be connected.
#[derive(Debug)]
pub(crate) struct Dial {
    pub(crate) hello: Hello,
    pub(crate) kv: Option<Rc<Kv>>,
    /// Where the connection is left.
    pub(crate) fresh: Rc<RefCell<Option<Rc<Connection>>>>,
    /// Cleared when the call was answered, one way or the other.
    pub(crate) pending: Rc<Cell<bool>>,
}

#[derive(Debug)]
pub(crate) struct Ctx {
    pub(crate) now: Micros,
    /// What `now` counts from for the shim, whose times are instants.
    began: Instant,
    pub(crate) rng: Rng,
    pub(crate) cover: Coverage,
    /// Loads that the sidecar does not finish are called finished, to see that the oracle notices.
    pub(crate) without_rescue: bool,
    pub(crate) knobs: Knobs,
    /// Actors to be woken, and when.
    pub(crate) wakes: Vec<(Actor, Micros)>,
    pub(crate) dials: Vec<Dial>,
    /// Slots of which a bit was changed between two lives of the sidecar.
    pub(crate) changed: BTreeSet<u64>,
    /// The doorbells of all sessions: a ring ends the data thread's sleep.
    pub(crate) bell: Rc<Cell<bool>>,
    tainted: u64,
    /// The last events, and how many of them are kept.
    trace: VecDeque<String>,
    events: usize,
    /// Digest of everything that happened, for the check that a seed means one run.
    pub(crate) fingerprint: u64,
}

// === impl Ctx ===

impl Ctx {
    pub(crate) fn new(seed: u64, without_rescue: bool, events: usize) -> Self {
        let mut rng = Rng::new(seed);
        let knobs = Knobs {
            lease_ttl_ms: rng.pick(&[4, 20, 100]),
            segments: rng.within(1, 2),
            pool_file: rng.one_in(3),
            disk: rng.one_in(2),
            // The seed alone decides: the other worlds stay as they are without it.
            slow_disk: (!mix(seed).is_multiple_of(3)).then_some((mix(seed) >> 32) as usize % 2),
            mesh: rng.one_in(2),
            turn_cost: rng.pick(&[4, 16, 1000]),
            copy_us: rng.pick(&[2, 20, 200, 2_000]),
            full_steps: rng.pick(&[2, 8]),
            arrivals: rng.pick(&[1, 3, 30]),
            faults: rng.pick(&[0, 4, 12, 12]),
            failing_copies: rng.pick(&[0, 0, 20]),
            lost_wakeups: rng.pick(&[0, 0, 4]),
        };
        #[allow(clippy::disallowed_methods, reason = "there is no other instant to count from")]
        let began = Instant::now();
        Self {
            now: 0,
            began,
            rng,
            cover: Coverage::default(),
            without_rescue,
            knobs,
            wakes: Vec::new(),
            dials: Vec::new(),
            changed: BTreeSet::new(),
            bell: Rc::default(),
            tainted: 0,
            trace: VecDeque::new(),
            events,
            fingerprint: 0,
        }
    }

    /// What a scheduler's session takes for now.
    pub(crate) fn instant(&self) -> Instant {
        self.began + Duration::from_micros(self.now)
    }

    /// What a rank's session takes for now.
    pub(crate) fn rank_instant(&self) -> Instant {
        self.began + Duration::from_micros(self.now) * RANK_HASTE
    }

    pub(crate) fn hit(&mut self, point: &'static str) {
        self.cover.hit(point);
    }

    /// Whether anybody will read what is noted.
    pub(crate) fn traced(&self) -> bool {
        self.events > 0
    }

    /// Notes what happened; the text is made only where it is wanted.
    pub(crate) fn note(&mut self, text: impl FnOnce() -> String) {
        if self.events > 0 {
            if self.trace.len() == self.events {
                self.trace.pop_front();
            }
            self.trace.push_back(format!("{:>9} us  {}", self.now, text()));
        }
    }

    pub(crate) fn trace(&self) -> impl Iterator<Item = &String> {
        self.trace.iter()
    }

    /// A word that belongs to no key and is never made twice.
    pub(crate) fn taint(&mut self) -> u64 {
        self.tainted += 1;
        taint(self.tainted)
    }

    /// A short time, now and then a long one.
    pub(crate) fn pause(&mut self, usual: Micros) -> Micros {
        let longer = if self.rng.one_in(32) { 20 } else { 1 };
        1 + self.rng.below(usual * 2 * longer)
    }
}
