//! State shared by all parts of the simulated world: time, randomness, coverage, the trace, and wake-ups.

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

/// Most ranks of an engine, and its cache groups.
pub(crate) const RANKS: usize = 2;
pub(crate) const GROUPS: usize = 2;
/// Most workers of an engine: one for each rank and group.
pub(crate) const WORKERS: usize = RANKS * GROUPS;
pub(crate) const ENGINES: usize = 2;
/// Copying threads of the sidecar.
pub(crate) const COPIERS: usize = 2;

/// Times of the product, shortened so a run has many of each: a step takes about a millisecond here and in
/// the product.
pub(crate) const TICK: Micros = 5_000;
pub(crate) const RETRY: Micros = 20_000;
/// The clock of a rank's session runs this many times faster than `now`: its deadlines are 2 s and more.
const RANK_HASTE: u32 = 100;
/// Longer than any freeze: after this time the product gives up a sidecar frozen in the middle of a block.
pub(crate) const SETTLE: Micros = 10_000_000;
/// The time for which ranks keep the pool of an earlier life.
pub(crate) const HOLD: Micros = 50_000;
pub(crate) const BUDGET: Micros = 2_000;

/// A thread of a process.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Actor {
    /// The sidecar's data thread.
    Data,
    /// A copying thread of the sidecar.
    Copier(usize),
    Scheduler(usize),
    Worker(usize, usize),
    /// A rank's thread for its own copies of loads.
    Rescuer(usize, usize),
    Fate,
}

/// The kind of world made by a seed.
#[derive(Clone, Debug)]
pub(crate) struct Knobs {
    pub(crate) lease_ttl_ms: u64,
    pub(crate) segments: u64,
    /// The pool is a file, opened again by a restarted sidecar.
    pub(crate) pool_file: bool,
    /// The sidecar has a disk for evicted blocks.
    pub(crate) disk: bool,
    /// Number of the tier of a second, slow and faulty disk, in some worlds with a disk: before or after the
    /// first.
    pub(crate) slow_disk: Option<usize>,
    /// Other pods exist.
    pub(crate) mesh: bool,
    /// Keys and messages of a session in one turn.
    pub(crate) turn_cost: usize,
    /// Longest time to copy a word, in microseconds.
    pub(crate) copy_us: u64,
    /// A step has no room for a request with a hit once in so many times.
    pub(crate) full_steps: u64,
    /// A request arrives once in so many times.
    pub(crate) arrivals: u64,
    /// Most faults in a run.
    pub(crate) faults: u64,
    /// One in so many blocks fails to be copied; zero: none.
    pub(crate) failing_copies: u64,
    /// One in so many wake-ups is lost; zero: none.
    pub(crate) lost_wakeups: u64,
}

/// A process's attempt to connect.
#[derive(Debug)]
pub(crate) struct Dial {
    pub(crate) hello: Hello,
    pub(crate) kv: Option<Rc<Kv>>,
    /// The place for the connection.
    pub(crate) fresh: Rc<RefCell<Option<Rc<Connection>>>>,
    /// Cleared once the attempt was accepted or refused.
    pub(crate) pending: Rc<Cell<bool>>,
}

#[derive(Debug)]
pub(crate) struct Ctx {
    pub(crate) now: Micros,
    /// The shim's instant at time 0.
    began: Instant,
    pub(crate) rng: Rng,
    pub(crate) cover: Coverage,
    /// Loads unfinished by the sidecar count as finished, to test the oracle.
    pub(crate) without_rescue: bool,
    pub(crate) knobs: Knobs,
    /// Actors to wake, each with its time.
    pub(crate) wakes: Vec<(Actor, Micros)>,
    pub(crate) dials: Vec<Dial>,
    /// Slots with a changed bit since an earlier life of the sidecar.
    pub(crate) changed: BTreeSet<u64>,
    /// The doorbells of all sessions: a ring ends the data thread's sleep.
    pub(crate) bell: Rc<Cell<bool>>,
    tainted: u64,
    /// The last events, and the most to keep.
    trace: VecDeque<String>,
    events: usize,
    /// Digest of all actions, for the check that a seed always gives the same run.
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
            // Only the seed decides, so worlds without this disk stay as they were.
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

    /// The current time of a scheduler's session.
    pub(crate) fn instant(&self) -> Instant {
        self.began + Duration::from_micros(self.now)
    }

    /// The current time of a rank's session.
    pub(crate) fn rank_instant(&self) -> Instant {
        self.began + Duration::from_micros(self.now) * RANK_HASTE
    }

    pub(crate) fn hit(&mut self, point: &'static str) {
        self.cover.hit(point);
    }

    /// True if events are recorded.
    pub(crate) fn traced(&self) -> bool {
        self.events > 0
    }

    /// Records an event; the text is made only if events are recorded.
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

    /// A new word of no key, different from all others.
    pub(crate) fn taint(&mut self) -> u64 {
        self.tainted += 1;
        taint(self.tainted)
    }

    /// A random short time, occasionally a long one.
    pub(crate) fn pause(&mut self, usual: Micros) -> Micros {
        let longer = if self.rng.one_in(32) { 20 } else { 1 };
        1 + self.rng.below(usual * 2 * longer)
    }
}
