//! How often keys were asked for lately, about: a count-min sketch that ages.
//!
//! A key has four counters in one cache line; the least of them is its count, if anything too high, by what other keys add. Counts
//! are halved once in ten accesses for every slot, as in TinyLFU, so that what was popular once goes; one line at a time, so that
//! no access waits for them all.

use crate::index::Print;

/// Counters of one line: one cache line.
const LINE: usize = 64;
/// Slots for which there is a line: sixteen counters each, of which a key uses four.
const SLOTS_PER_LINE: u64 = 4;
const COUNTERS: u32 = 4;
/// More does not matter: counts are compared, and halved before long.
const COUNT_MAX: u8 = 15;
/// Accesses for every slot between two halvings of a line.
const SAMPLE: u64 = 10;

#[repr(C, align(64))]
#[derive(Copy, Clone, Debug)]
struct Line([u8; LINE]);

/// The sketch.
#[derive(Debug, Default)]
pub(crate) struct Sketch {
    lines: Box<[Line]>,
    /// Slots that the lines were made for.
    slots: u64,
    /// Accesses since a line was halved.
    accesses: u64,
    /// The line that is halved next.
    aging: usize,
}

// === impl Sketch ===

impl Sketch {
    /// Makes room for the keys of `slots` slots. Where their number changes much, what was counted is forgotten.
    fn fit(&mut self, slots: u64) {
        if self.slots < slots / 2 || self.slots > slots.saturating_mul(2) || self.lines.is_empty() {
            let lines = slots.div_ceil(SLOTS_PER_LINE).max(1) as usize;
            let lines = vec![Line([0; LINE]); lines].into_boxed_slice();
            *self = Self { lines, slots, accesses: 0, aging: 0 };
        }
    }

    /// The line of a key, by its high bits, and where in it its counters are, by six low bits for each.
    fn place(&self, print: Print) -> (usize, [usize; COUNTERS as usize]) {
        let line = (u128::from(print.bits()) * self.lines.len() as u128) >> 64;
        let counter = |number: usize| (print.bits() >> (6 * number)) as usize % LINE;
        (line as usize, std::array::from_fn(counter))
    }

    /// Counts an access in a tier of `slots` slots.
    pub(crate) fn add(&mut self, print: Print, slots: u64) {
        self.fit(slots);
        let (line, counters) = self.place(print);
        let Line(line) = &mut self.lines[line];
        let least = counters.iter().map(|at| line[*at]).min().expect("four");
        // What is above the least was added by other keys.
        for at in counters.into_iter().filter(|_| least < COUNT_MAX) {
            line[at] = line[at].max(least + 1);
        }
        self.age();
    }

    fn age(&mut self) {
        self.accesses += 1;
        if self.accesses == SAMPLE * SLOTS_PER_LINE {
            self.accesses = 0;
            self.lines[self.aging].0.iter_mut().for_each(|count| *count /= 2);
            self.aging = (self.aging + 1) % self.lines.len();
        }
    }

    /// How often a key was asked for.
    pub(crate) fn count(&self, print: Print) -> u8 {
        if self.lines.is_empty() {
            return 0;
        }
        let (line, counters) = self.place(print);
        counters.iter().map(|at| self.lines[line].0[*at]).min().expect("four")
    }
}

#[cfg(test)]
mod tests {
    use shm_protocol::key::BlockHash;

    use super::*;

    const SLOTS: u64 = 1000;

    fn print(number: u64) -> Print {
        Print::new(0, 0, &BlockHash::from_words([number, 0, 0, 0]))
    }

    #[test]
    fn counts_are_seldom_too_high() {
        let mut sketch = Sketch::default();
        assert_eq!(sketch.count(print(1)), 0);
        for number in 0..SLOTS {
            (0..number % 5).for_each(|_| sketch.add(print(number), SLOTS));
        }
        let wrong = (0..SLOTS).filter(|number| {
            let count = sketch.count(print(*number));
            assert!(u64::from(count) >= number % 5 / 2, "halved once at most: {number}");
            u64::from(count) > number % 5
        });
        let wrong = wrong.count();
        assert!(wrong < SLOTS as usize / 20, "{wrong} of {SLOTS} are too high");
    }

    #[test]
    fn what_was_popular_is_forgotten() {
        let mut sketch = Sketch::default();
        (0..40).for_each(|_| sketch.add(print(1), SLOTS));
        assert_eq!(sketch.count(print(1)), COUNT_MAX);
        (0..SLOTS * SAMPLE * 4).for_each(|number| sketch.add(print(2 + number), SLOTS));
        let left = sketch.count(print(1));
        assert!(left <= COUNT_MAX / 4, "{left} after four halvings, and what others added");
    }
}
