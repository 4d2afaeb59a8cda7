//! How soon blocks are used again, by rank and age: learned from a sample of all keys, kept or not.
//!
//! For each rank and span of ages it counts the uses seen and the time that sampled keys spent there: their quotient is the rate at
//! which such blocks are used. What a block is worth is the most uses for each tick of its stay that rates promise it from its
//! age on, over every length of stay (Gittins' index). Where little was seen, a rate leans on that of the rank below at the same
//! age, times what the two ranks differ by in all; where nothing was, blocks of all ranks are worth less the older they are, and
//! the tier is LRU.

use std::hint::black_box;

use crate::index::Print;

use super::{RANKS, TICKS_PER_ROOM};

/// First ticks of the spans of ages, two to an octave, from a 64th of a room on. The last one is open, and worth nothing.
const SPANS: [u32; 20] =
    [0, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448, 2048];
/// The age from which on a block is worth nothing.
pub(super) const AGE_MAX: u32 = SPANS[SPANS.len() - 1];
/// One key in so many is sampled, unless that were fewer than [`SAMPLED_MIN`] slots' worth.
const ONE_IN_MAX: u64 = 32;
const SAMPLED_MIN: u64 = 256;
/// Samples of one set: two cache lines.
const WAYS: usize = 8;
/// Sets that are looked through for every sampled use: then all of them are within half a room.
const LOOKS: usize = 2;
/// Rates follow within this many ticks.
const LEARN_TICKS: u32 = TICKS_PER_ROOM as u32 / 8;
/// What was seen fades: by half in some 40 rooms.
const FADE: f64 = 0.998;
/// What a guess weighs, in requests.
const GUESS: f64 = 24.0;

/// A key, when it was last used, and up to which age its time was counted. A print of zero is none.
#[repr(C)]
#[derive(Copy, Clone, Debug, Default)]
struct Sample {
    print: u32,
    stamp: u32,
    counted: u32,
    rank: u8,
    /// The span of ages in which `counted` lies.
    span: u8,
}

const _: () = assert!(size_of::<Sample>() == 16);

#[derive(Debug, Default)]
pub(super) struct Odds {
    sets: Box<[[Sample; WAYS]]>,
    /// Slots that the sets were made for.
    slots: u64,
    one_in: u64,
    /// The set that is looked through next.
    look: usize,
    learned: u32,
    /// Kept between calls, so that none allocates.
    chosen: Vec<Print>,
    /// Requests, and uses of theirs that were sampled.
    requests: f64,
    sampled: f64,
    /// By rank and span: uses, and ticks of all samples.
    uses: [[f64; SPANS.len()]; RANKS],
    ticks: [[f64; SPANS.len()]; RANKS],
    worth: [[f32; SPANS.len()]; RANKS],
}

fn span(age: u32) -> usize {
    SPANS.partition_point(|first| *first <= age) - 1
}

/// Ticks of a span; of the last one, which has no end, infinitely many.
fn width(span: usize) -> f64 {
    SPANS.get(span + 1).map_or(f64::INFINITY, |end| f64::from(end - SPANS[span]))
}

// === impl Sample ===

impl Sample {
    /// Counts the time from when it was last counted.
    fn count(&mut self, tick: u32, ticks: &mut [[f64; SPANS.len()]; RANKS]) {
        let age = tick.wrapping_sub(self.stamp).min(AGE_MAX);
        while self.counted < age {
            let (span, end) = (usize::from(self.span), SPANS[usize::from(self.span) + 1]);
            let until = age.min(end);
            ticks[usize::from(self.rank)][span] += f64::from(until - self.counted);
            self.counted = until;
            self.span += u8::from(until == end);
        }
    }
}

// === impl Odds ===

impl Odds {
    /// Makes room for samples of all that is used in [`AGE_MAX`] ticks of a tier of `slots` slots.
    fn fit(&mut self, slots: u64) {
        if self.slots < slots / 2 || self.slots > slots.saturating_mul(2) || self.sets.is_empty() {
            let one_in = 1 << (slots / SAMPLED_MIN).clamp(1, ONE_IN_MAX).ilog2();
            let rooms = u64::from(AGE_MAX) / TICKS_PER_ROOM;
            let sets = (slots * rooms / one_in).div_ceil(WAYS as u64).max(1);
            let sets = vec![[Sample::default(); WAYS]; sets as usize].into_boxed_slice();
            *self = Self { sets, slots, one_in, ..Self::default() };
        }
    }

    /// A request of rank `rank` has used these keys, the deepest of which comes last.
    pub(super) fn used(&mut self, prints: &[Print], rank: u8, tick: u32, slots: u64) {
        self.fit(slots);
        self.requests += 1.0;
        let mut chosen = std::mem::take(&mut self.chosen);
        chosen.extend(prints.iter().rev().filter(|print| (print.bits() >> 32) & (self.one_in - 1) == 0));
        // Sets are far away: their cache misses overlap in a loop that does nothing else.
        black_box(chosen.iter().fold(0, |sum, print| sum ^ self.sets[print.place(self.sets.len())][0].print));
        for print in chosen.drain(..) {
            self.sample(print, rank, tick);
        }
        self.chosen = chosen;
    }

    fn sample(&mut self, print: Print, rank: u8, tick: u32) {
        self.sampled += 1.0;
        let key = (print.bits() >> 24) as u32 | 1;
        let place = print.place(self.sets.len());
        let set = &mut self.sets[place];
        let rank = match set.iter().position(|sample| sample.print == key) {
            Some(way) => {
                let mut known = set[way];
                known.count(tick, &mut self.ticks);
                self.uses[usize::from(known.rank)][usize::from(known.span)] += 1.0;
                set.copy_within(..way, 1);
                super::risen(known.rank).max(rank)
            }
            None => {
                if set[WAYS - 1].print != 0 {
                    set[WAYS - 1].count(tick, &mut self.ticks);
                }
                set.copy_within(..WAYS - 1, 1);
                rank
            }
        };
        set[0] = Sample { print: key, stamp: tick, counted: 0, rank, span: 0 };
        self.look_through(tick);
        if tick.wrapping_sub(self.learned) >= LEARN_TICKS {
            self.learned = tick;
            self.learn();
        }
    }

    fn look_through(&mut self, tick: u32) {
        for _ in 0..LOOKS.min(self.sets.len()) {
            for sample in self.sets[self.look].iter_mut().filter(|sample| sample.print != 0) {
                sample.count(tick, &mut self.ticks);
                if sample.counted == AGE_MAX {
                    *sample = Sample::default();
                }
            }
            self.look = (self.look + 1) % self.sets.len();
        }
    }

    fn learn(&mut self) {
        // Uses of one request say the same, however many of them are sampled.
        let guess = GUESS * (self.sampled / self.requests).max(1.0);
        // Before anything was seen: the older, the less.
        let mut rates: [f64; SPANS.len()] = std::array::from_fn(|span| 1.0 / width(span));
        for rank in 0..RANKS {
            let (uses, ticks) = (&self.uses[rank], &self.ticks[rank]);
            let expected: f64 = ticks.iter().zip(&rates).map(|(ticks, rate)| ticks * rate).sum();
            // The lowest rank has none below it to lean on.
            let lean = if rank == 0 { 1.0 } else { guess };
            let scale = (uses.iter().sum::<f64>() + lean) / (expected + lean);
            for (span, rate) in rates.iter_mut().enumerate() {
                *rate = (uses[span] + guess) / (ticks[span] + guess / (*rate * scale));
            }
            self.value(rank, &rates);
        }
        let counts = self.uses.iter_mut().chain(&mut self.ticks).flatten();
        counts.chain([&mut self.requests, &mut self.sampled]).for_each(|count| *count *= FADE);
    }

    /// What blocks of a rank are worth, never less than at a greater age or in the rank below.
    fn value(&mut self, rank: usize, rates: &[f64; SPANS.len()]) {
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
            let below = if rank > 0 { self.worth[rank - 1][span] } else { 0.0 };
            self.worth[rank][span] = (best as f32).max(self.worth[rank][span + 1]).max(below);
        }
    }

    /// What a block is worth.
    #[inline]
    pub(super) fn worth(&self, rank: usize, age: u32) -> f32 {
        self.worth[rank][span(age)]
    }
}

#[cfg(test)]
mod tests {
    use shm_protocol::key::BlockHash;

    use super::*;

    const SLOTS: u64 = 1024;

    fn print(number: u64) -> Print {
        Print::new(0, 0, &BlockHash::from_words([number, 0, 0, 0]))
    }

    /// Keys that are used once, beside such of rank 3 that are used again after a room.
    fn taught() -> Odds {
        let mut odds = Odds::default();
        for tick in 0..8000_u32 {
            odds.used(&[print(u64::from(tick))], 0, tick, SLOTS);
            odds.used(&[print(1 << 40 | u64::from(tick % 256))], 3, tick, SLOTS);
        }
        odds
    }

    #[test]
    fn what_is_used_again_is_worth_more_and_what_is_older_never_more() {
        let odds = taught();
        assert!(odds.worth(7, 128) > 4.0 * odds.worth(0, 128), "{:?}", odds.worth);
        for rank in 0..RANKS {
            for age in 1..2 * AGE_MAX {
                assert!(odds.worth(rank, age) <= odds.worth(rank, age - 1));
                assert!(
                    rank == 0 || odds.worth(rank, age) >= odds.worth(rank - 1, age),
                    "a parent's rank is higher"
                );
            }
        }
    }

    #[test]
    fn before_anything_was_used_twice_all_are_worth_the_same() {
        let mut odds = Odds::default();
        for tick in 0..4000_u32 {
            odds.used(&[print(u64::from(tick))], (tick % 8) as u8, tick, SLOTS);
        }
        for age in 0..AGE_MAX {
            let least = odds.worth(0, age);
            assert!((0..RANKS).all(|rank| odds.worth(rank, age) <= least * 1.5), "{:?}", odds.worth);
        }
    }

    #[test]
    fn a_pool_that_grows_much_begins_anew() {
        let mut odds = taught();
        odds.used(&[print(1)], 0, 9000, 10 * SLOTS);
        assert_eq!(odds.worth(7, 0), odds.worth(0, 0));
    }
}
