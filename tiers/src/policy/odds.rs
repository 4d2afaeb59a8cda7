//! Rates of use by sort and age, learned from a sample of all keys, kept or not.
//!
//! [`Odds`] counts, for each sort and span of ages, the uses seen and the ticks spent there by sampled keys. Their quotient is the
//! rate of use of such blocks. A block's worth is the expected uses for each tick of its stay, at the best length of stay from its
//! age on (Gittins' index). With few samples of a sort, its rate leans on the rate of its kind, and the rate of a kind on the rate
//! of all blocks. Such a rate is of the same age, times the quotient of the two at ages near it. With no samples, blocks of all
//! sorts are worth less the older they are, and the tier is LRU.

use std::hint::black_box;

use crate::index::KeyPrint;
use crate::standing::{KINDS, SORTS, Sort, TURNS};

use super::{EndedTurn, TICKS_PER_ROOM};

/// First ticks of the spans of ages, two to an octave, from a 64th of a room on. The last span has no end, and blocks in it are worth nothing.
const SPANS: [u32; 23] =
    [0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448, 2048];
/// The least age, in ticks, of a block worth nothing.
pub(super) const AGE_MAX: u32 = SPANS[SPANS.len() - 1];
/// The most keys for one sampled key. A tier of fewer slots than this times [`SAMPLED_MIN`] samples a larger part of its keys.
const ONE_IN_MAX: u64 = 32;
const SAMPLED_MIN: u64 = 2048;
/// Samples of one set: two cache lines.
const WAYS: usize = 8;
/// Sets looked through at every sampled use: enough to look through all sets within half a room.
const LOOKS: usize = 2;
/// Ticks between two updates of the rates.
const LEARN_TICKS: u32 = TICKS_PER_ROOM as u32 / 8;
/// The factor of all counts at each update of the rates: it halves them in some 40 rooms.
const FADE: f64 = 0.998;
/// The weight of a guessed rate, in requests.
const GUESS: f64 = 24.0;
/// The weight of counts at the next span of ages, relative to those at a span itself.
const NEAR: f64 = 0.5;
/// Rooms of uses whose sampled keys have space in the sets.
const ROOMS_SAMPLED: u64 = 8;

/// A sampled key, the tick of its last use, and its age at the last count of its ticks. A print of zero is no key.
#[repr(C)]
#[derive(Copy, Clone, Debug, Default)]
struct KeySample {
    print: u32,
    stamp: u32,
    counted: u32,
    sort: Sort,
    /// The span of the age `counted`.
    span: u8,
}

const _: () = assert!(size_of::<KeySample>() == 16);

/// Uses of samples, and ticks spent by them.
#[derive(Copy, Clone, Debug, Default)]
struct Count {
    uses: f64,
    ticks: f64,
}

/// Counts by span of ages.
type Counts = [Count; SPANS.len()];

/// Uses for each tick, by span.
#[derive(Copy, Clone, Debug)]
struct Rates([f64; SPANS.len()]);

#[derive(Debug, Default)]
pub(super) struct Odds {
    sets: Box<[[KeySample; WAYS]]>,
    /// Slots of the tier when the sets were made.
    slots: u64,
    one_in: u64,
    /// The set to look through next.
    look: usize,
    learned: u32,
    /// Empty between calls. Its memory is kept, so no call allocates.
    chosen: Vec<(usize, KeyPrint)>,
    /// Requests, and their sampled uses in `sampled`.
    requests: f64,
    sampled: f64,
    counts: [Counts; SORTS],
    worth: [[f32; SPANS.len()]; SORTS],
}

fn span(age: u32) -> usize {
    SPANS.partition_point(|first| *first <= age) - 1
}

/// Ticks of a span; the last one has no end and infinitely many.
fn width(span: usize) -> f64 {
    SPANS.get(span + 1).map_or(f64::INFINITY, |end| f64::from(end - SPANS[span]))
}

// === impl KeySample ===

impl KeySample {
    /// Counts the ticks since the last count.
    fn count_ticks(&mut self, tick: u32, counts: &mut [Counts; SORTS]) {
        let age = tick.wrapping_sub(self.stamp).min(AGE_MAX);
        while self.counted < age {
            let (span, end) = (usize::from(self.span), SPANS[usize::from(self.span) + 1]);
            let until = age.min(end);
            counts[self.sort.index()][span].ticks += f64::from(until - self.counted);
            self.counted = until;
            self.span += u8::from(until == end);
        }
    }
}

// === impl Rates ===

impl Rates {
    /// The rates of the counts `seen`. They lean, with the weight of `guess` uses, on `self` times the quotient of seen and expected uses
    /// at nearby ages. The quotient leans on 1, with the weight of `lean` uses.
    fn learned(&self, seen: &Counts, guess: f64, lean: f64) -> Self {
        let Self(rates) = self;
        // For each span, with the ages around it: the uses seen, and in `ticks` the uses expected by `self`.
        let mut near = [Count { uses: lean, ticks: lean }; SPANS.len()];
        let mut add = |spans: &mut dyn Iterator<Item = usize>, with_itself: bool| {
            let mut sum = Count::default();
            for span in spans {
                let Count { uses, ticks } = seen[span];
                let own = Count { uses, ticks: if ticks > 0.0 { ticks * rates[span] } else { 0.0 } };
                let (before, after) =
                    (sum, Count { uses: sum.uses + own.uses, ticks: sum.ticks + own.ticks });
                let told = if with_itself { after } else { before };
                near[span].uses += told.uses;
                near[span].ticks += told.ticks;
                sum = Count { uses: after.uses * NEAR, ticks: after.ticks * NEAR };
            }
        };
        add(&mut (0..SPANS.len() - 1), true);
        add(&mut (0..SPANS.len() - 1).rev(), false);
        Self(std::array::from_fn(|span| {
            let guessed = rates[span] * near[span].uses / near[span].ticks;
            (seen[span].uses + guess) / (seen[span].ticks + guess / guessed)
        }))
    }
}

// === impl Odds ===

impl Odds {
    /// Makes the sets for a tier of `slots` slots: they hold the sampled keys of [`ROOMS_SAMPLED`] rooms.
    fn fit(&mut self, slots: u64) {
        if self.slots < slots / 2 || self.slots > slots.saturating_mul(2) || self.sets.is_empty() {
            let one_in = 1 << (slots / SAMPLED_MIN).clamp(1, ONE_IN_MAX).ilog2();
            let sets = (slots * ROOMS_SAMPLED / one_in).div_ceil(WAYS as u64).max(1);
            let sets = vec![[KeySample::default(); WAYS]; sets as usize].into_boxed_slice();
            *self = Self { sets, slots, one_in, ..Self::default() };
        }
    }

    /// Counts a request's use of these keys, the deepest one last.
    pub(super) fn used(&mut self, prints: &[KeyPrint], turn: EndedTurn, tick: u32, slots: u64) {
        self.fit(slots);
        self.requests += 1.0;
        let mut chosen = std::mem::take(&mut self.chosen);
        let is_chosen = |(_, print): &(usize, KeyPrint)| (print.bits() >> 32) & (self.one_in - 1) == 0;
        chosen.extend(prints.iter().copied().enumerate().rev().filter(is_chosen));
        // The sets are seldom in the CPU's cache, and a loop with nothing else overlaps the misses.
        black_box(
            chosen
                .iter()
                .fold(0, |sum, (_, print)| sum ^ self.sets[print.set_index(self.sets.len())][0].print),
        );
        for (at, print) in chosen.drain(..) {
            self.sample(print, turn.sort, at < turn.shared, tick);
        }
        self.chosen = chosen;
    }

    fn sample(&mut self, print: KeyPrint, turn: Sort, shares: bool, tick: u32) {
        self.sampled += 1.0;
        let key = (print.bits() >> 24) as u32 | 1;
        let place = print.set_index(self.sets.len());
        let set = &mut self.sets[place];
        let before = match set.iter().position(|sample| sample.print == key) {
            Some(way) => {
                let mut known = set[way];
                known.count_ticks(tick, &mut self.counts);
                self.counts[known.sort.index()][usize::from(known.span)].uses += 1.0;
                set.copy_within(..way, 1);
                known.sort
            }
            None => {
                if set[WAYS - 1].print != 0 {
                    set[WAYS - 1].count_ticks(tick, &mut self.counts);
                }
                set.copy_within(..WAYS - 1, 1);
                Sort::OPEN
            }
        };
        let sort = before.after_end(turn, shares);
        set[0] = KeySample { print: key, stamp: tick, counted: 0, sort, span: 0 };
        self.look_through(tick);
        if tick.wrapping_sub(self.learned) >= LEARN_TICKS {
            self.learned = tick;
            self.learn();
        }
    }

    fn look_through(&mut self, tick: u32) {
        for _ in 0..LOOKS.min(self.sets.len()) {
            for sample in self.sets[self.look].iter_mut().filter(|sample| sample.print != 0) {
                sample.count_ticks(tick, &mut self.counts);
                if sample.counted == AGE_MAX {
                    *sample = KeySample::default();
                }
            }
            self.look = (self.look + 1) % self.sets.len();
        }
    }

    fn learn(&mut self) {
        // All uses by one request are one observation, so a guess weighs more with more sampled uses a request.
        let guess = GUESS * (self.sampled / self.requests).max(1.0);
        // The guess before any use was seen: the rate falls with age.
        let by_age = Rates(std::array::from_fn(|span| 1.0 / width(span)));
        let all = by_age.learned(&self.seen(0..SORTS), guess, 1.0);
        for sort in 0..SORTS {
            self.value(sort, &all);
        }
        for kind in 0..KINDS {
            let turns = || (1..=TURNS as u8).map(|turn| Sort::of_turn(kind, turn).index());
            let of_kind = all.learned(&self.seen(turns()), guess, guess);
            for sort in turns() {
                self.value(sort, &of_kind.learned(&self.seen([sort]), guess, guess));
            }
        }
        for sort in (0..SORTS).filter(|sort| Sort::at(*sort).is_shared()) {
            self.value(sort, &all.learned(&self.seen([sort]), guess, guess));
        }
        let counts = self.counts.iter_mut().flatten().flat_map(|Count { uses, ticks }| [uses, ticks]);
        counts.chain([&mut self.requests, &mut self.sampled]).for_each(|count| *count *= FADE);
    }

    /// The sum of the counts of some sorts.
    fn seen(&self, sorts: impl IntoIterator<Item = usize>) -> Counts {
        sorts.into_iter().fold(Counts::default(), |mut seen, sort| {
            for (sum, count) in seen.iter_mut().zip(&self.counts[sort]) {
                (sum.uses, sum.ticks) = (sum.uses + count.uses, sum.ticks + count.ticks);
            }
            seen
        })
    }

    /// Computes the worth of blocks of a sort; it never rises with age.
    fn value(&mut self, sort: usize, Rates(rates): &Rates) {
        let last = SPANS.len() - 1;
        let kept: [f64; SPANS.len() - 1] = std::array::from_fn(|span| (-rates[span] * width(span)).exp());
        for span in (0..last).rev() {
            let (mut left, mut uses, mut ticks, mut best) = (1.0, 0.0, 0.0, 0.0_f64);
            for stay in span..last {
                let used = left * (1.0 - kept[stay]);
                uses += used;
                ticks += used / rates[stay];
                left *= kept[stay];
                best = best.max(uses / ticks);
            }
            self.worth[sort][span] = (best as f32).max(self.worth[sort][span + 1]);
        }
    }

    /// The worth of a block, in expected uses for each tick of its stay.
    #[inline]
    pub(super) fn worth(&self, sort: Sort, age: u32) -> f32 {
        self.worth[sort.index()][span(age)]
    }
}

#[cfg(test)]
mod tests {
    use shm_protocol::key::BlockHash;

    use super::*;

    const SLOTS: u64 = 1024;

    fn print(number: u64) -> KeyPrint {
        KeyPrint::new(0, 0, &BlockHash::from_words([number, 0, 0, 0]))
    }

    fn turn(turn: u8) -> EndedTurn {
        EndedTurn { sort: Sort::of_turn(0, turn), shared: 0, last: false, device: None }
    }

    /// Odds after uses of two sorts of keys: first turns' keys used once, and second turns' keys used again after a room.
    fn taught() -> Odds {
        let mut odds = Odds::default();
        for tick in 0..8000_u32 {
            odds.used(&[print(u64::from(tick))], turn(1), tick, SLOTS);
            odds.used(&[print(1 << 40 | u64::from(tick % 64))], turn(2), tick, SLOTS);
        }
        odds
    }

    fn worths(odds: &Odds, age: u32) -> impl Iterator<Item = f32> {
        (0..SORTS).map(move |sort| odds.worth(Sort::at(sort), age))
    }

    #[test]
    fn what_is_used_again_is_worth_more_and_what_is_older_never_more() {
        let odds = taught();
        let [once, again] = [1, 2].map(|turn| odds.worth(Sort::of_turn(0, turn), 32));
        assert!(again > 4.0 * once, "{:?}", odds.worth);
        for age in 1..2 * AGE_MAX {
            assert!(worths(&odds, age).zip(worths(&odds, age - 1)).all(|(older, younger)| older <= younger));
        }
    }

    #[test]
    fn before_anything_was_used_twice_all_are_worth_the_same() {
        let mut odds = Odds::default();
        for tick in 0..4000_u32 {
            odds.used(&[print(u64::from(tick))], turn(1 + (tick % 2) as u8), tick, SLOTS);
        }
        for age in 0..AGE_MAX {
            let least = worths(&odds, age).fold(f32::INFINITY, f32::min);
            assert!(worths(&odds, age).all(|worth| worth <= least * 1.5), "{:?}", odds.worth);
        }
    }

    #[test]
    fn a_pool_that_grows_much_begins_again() {
        let mut odds = taught();
        odds.used(&[print(1)], turn(1), 9000, 10 * SLOTS);
        assert!(worths(&odds, 0).all(|worth| worth == odds.worth(Sort::OPEN, 0)));
    }
}
