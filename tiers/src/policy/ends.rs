//! Where chains ended: which turn of its conversation a request is.
//!
//! Of a chain some keys of its last quarter are marked with its turn: a next turn begins with most of it, but seldom with its
//! last blocks, since what an engine answered may be written differently in the next prompt. A request whose deepest known key
//! is marked goes on from there. Keys that a request has gone on from stay known, without a turn: who branches off there, as
//! at the end of a system prompt, begins a conversation of its own.

use std::hint::black_box;

use crate::index::Print;

/// The last turn that is told apart.
pub(super) const TURNS_MAX: u8 = 8;
/// A chain's last part in which keys are marked: a quarter, and so many keys of it at most.
const PART: usize = 4;
const MARKS_MAX: usize = 8;
/// One mark for so many slots, in sets that each forget their oldest; at least so many.
const SLOTS_PER_MARK: u64 = 8;
const MARKS_MIN: u64 = 1 << 16;
const WAYS: usize = 16;
/// Keys that are looked for side by side.
const BATCH: usize = 64;

/// A mark: 28 bits of a key, never all zero, and above 0 the turn that ended there.
#[derive(Copy, Clone, Debug, Default)]
struct Mark(u32);

#[repr(C, align(64))]
#[derive(Copy, Clone, Debug, Default)]
struct Set([Mark; WAYS]);

/// What is known of a request at its end.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct ChainEnd {
    /// Which turn of its conversation it was, from 1.
    pub(super) turn: u8,
    /// So many of its first keys were used by others from which it does not go on.
    pub(super) shared: usize,
}

#[derive(Debug, Default)]
pub(super) struct Ends {
    sets: Box<[Set]>,
    /// Slots that the sets were made for.
    slots: u64,
}

// === impl Mark ===

impl Mark {
    const TURN_BITS: u32 = 4;

    fn new(print: Print, turn: u8) -> Self {
        Self(
            (print.bits() >> 28) as u32 >> Self::TURN_BITS << Self::TURN_BITS
                | 1 << Self::TURN_BITS
                | u32::from(turn),
        )
    }

    fn is_of(self, print: Print) -> bool {
        self.0 >> Self::TURN_BITS == Self::new(print, 0).0 >> Self::TURN_BITS
    }

    fn turn(self) -> u8 {
        self.0 as u8 & ((1 << Self::TURN_BITS) - 1)
    }
}

// === impl Ends ===

impl Ends {
    fn fit(&mut self, slots: u64) {
        if self.slots < slots / 2 || self.slots > slots.saturating_mul(2) || self.sets.is_empty() {
            let sets = (slots / SLOTS_PER_MARK).max(MARKS_MIN).div_ceil(WAYS as u64);
            self.sets = vec![Set::default(); sets as usize].into_boxed_slice();
            self.slots = slots;
        }
    }

    fn set(&mut self, print: Print) -> &mut [Mark; WAYS] {
        &mut self.sets[print.place(self.sets.len())].0
    }

    fn is_known(&self, print: Print) -> bool {
        // All of them, without a branch for each.
        self.sets[print.place(self.sets.len())].0.iter().fold(false, |known, mark| known | mark.is_of(print))
    }

    /// Loads the sets of some keys. They are far away: their cache misses overlap in a loop that does nothing else.
    fn load(&self, batch: &[Print]) {
        black_box(batch.iter().fold(0, |sum, print| sum ^ self.sets[print.place(self.sets.len())].0[0].0));
    }

    /// The place of the deepest key of a chain that is known.
    fn deepest_known(&self, chain: &[Print]) -> Option<usize> {
        let mut rest = chain;
        while !rest.is_empty() {
            let (before, batch) = rest.split_at(rest.len().saturating_sub(BATCH));
            self.load(batch);
            if let Some(at) = batch.iter().rposition(|print| self.is_known(*print)) {
                return Some(before.len() + at);
            }
            rest = before;
        }
        None
    }

    /// Which turn a request with these keys was; the next one will be found by it.
    pub(super) fn turn(&mut self, chain: &[Print], slots: u64) -> ChainEnd {
        self.fit(slots);
        let known = self.deepest_known(chain);
        let ended = known.map_or(0, |at| self.turn_at(chain[at]));
        let fresh = known.map_or(0, |at| at + 1);
        let shared = if ended > 0 { 0 } else { fresh };
        let turn = (ended + 1).min(TURNS_MAX);
        if fresh == chain.len() {
            // The same request once more, which is a turn of its own, or the beginning of one.
            if let Some(key) = chain.last().filter(|_| ended > 0) {
                self.mark(*key, turn);
            }
            return ChainEnd { turn, shared };
        }
        // Where the turn before ended this far or further, its marks lie in this quarter.
        for batch in chain[fresh - fresh.div_ceil(PART)..fresh].chunks(BATCH) {
            self.load(batch);
            for print in batch {
                if self.is_known(*print) {
                    self.mark(*print, 0);
                }
            }
        }
        let part = chain.len().div_ceil(PART).max(2);
        let marked = &chain[fresh.max(chain.len().saturating_sub(part))..];
        for print in marked.iter().rev().step_by(part.div_ceil(MARKS_MAX)) {
            let set = self.set(*print);
            set.copy_within(..WAYS - 1, 1);
            set[0] = Mark::new(*print, turn);
        }
        ChainEnd { turn, shared }
    }

    /// Says of a known key which turn ended there.
    fn mark(&mut self, print: Print, turn: u8) {
        let mark = self.set(print).iter_mut().find(|mark| mark.is_of(print));
        *mark.expect("it is known") = Mark::new(print, turn);
    }

    fn turn_at(&mut self, print: Print) -> u8 {
        self.set(print).iter().find(|mark| mark.is_of(print)).map_or(0, |mark| mark.turn())
    }
}

#[cfg(test)]
mod tests {
    use shm_protocol::key::BlockHash;

    use super::*;

    const SLOTS: u64 = 10_000;

    fn keys(numbers: std::ops::Range<u64>) -> Vec<Print> {
        numbers.map(|number| Print::new(0, 0, &BlockHash::from_words([number, 0, 0, 0]))).collect()
    }

    #[test]
    fn a_conversation_goes_on_from_about_where_it_ended() {
        let mut ends = Ends::default();
        assert_eq!(ends.turn(&keys(0..100), SLOTS).turn, 1);
        assert_eq!(
            ends.turn(&[keys(0..90), keys(1000..1060)].concat(), SLOTS).turn,
            2,
            "its last blocks were written differently"
        );
        assert_eq!(ends.turn(&[keys(0..90), keys(1000..1060)].concat(), SLOTS).turn, 3, "asked once more");
        assert_eq!(ends.turn(&[keys(0..90), keys(1000..1060), keys(2000..2004)].concat(), SLOTS).turn, 4);
        assert_eq!(
            ends.turn(&[keys(0..90), keys(1000..1060), keys(3000..3004)].concat(), SLOTS).turn,
            1,
            "a branch, where one went on before"
        );
        assert_eq!(
            ends.turn(&[keys(0..40), keys(4000..4004)].concat(), SLOTS).turn,
            1,
            "a branch further up"
        );
    }

    #[test]
    fn a_shared_prompt_makes_no_conversation() {
        let mut ends = Ends::default();
        ends.turn(&[keys(0..100), keys(1000..1010)].concat(), SLOTS);
        ends.turn(&[keys(0..100), keys(2000..2010)].concat(), SLOTS);
        for user in 3..20 {
            assert_eq!(
                ends.turn(&[keys(0..100), keys(user * 1000..user * 1000 + 10)].concat(), SLOTS).turn,
                1,
                "user {user}"
            );
        }
    }

    #[test]
    fn turns_are_told_apart_up_to_a_limit() {
        let mut ends = Ends::default();
        for turn in 1..20 {
            assert_eq!(ends.turn(&keys(0..turn * 20), SLOTS).turn, (turn as u8).min(TURNS_MAX));
        }
    }
}
