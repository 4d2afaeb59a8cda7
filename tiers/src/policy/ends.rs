//! Ends of chains, by which a request's turn of its conversation is found.
//!
//! Some keys of a chain's last quarter are marked with its turn. A next turn begins with most of the chain, but seldom with its
//! last blocks, since an answer may be written differently in the next prompt. A request goes on from its deepest known key if
//! the mark there has a turn. Once a request has gone on from a key, the key's mark stays without a turn: a later request that
//! branches off there, as at the end of a system prompt, begins a conversation of its own.

use std::hint::black_box;

use crate::index::Print;

/// The last turn with a number of its own; later turns have it, too.
pub(super) const TURNS_MAX: u8 = 8;
/// Keys are marked in the last quarter of a chain, and at most [`MARKS_MAX`] of them.
const PART: usize = 4;
const MARKS_MAX: usize = 8;
/// Slots of the tier for each mark, but at least [`MARKS_MIN`] marks. Each set forgets its oldest mark.
const SLOTS_PER_MARK: u64 = 8;
const MARKS_MIN: u64 = 1 << 16;
const WAYS: usize = 16;
/// Keys looked up side by side.
const BATCH: usize = 64;

/// A mark: 28 bits of a key, never all zero, and the turn ended there, or 0 once a request has gone on from it.
#[derive(Copy, Clone, Debug, Default)]
struct Mark(u32);

#[repr(C, align(64))]
#[derive(Copy, Clone, Debug, Default)]
struct Set([Mark; WAYS]);

/// A request's place in its conversation, found at its end.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct ChainEnd {
    /// The number of its turn, from 1 to [`TURNS_MAX`].
    pub(super) turn: u8,
    /// Count of its first keys shared with other conversations; 0 if it goes on from an earlier turn.
    pub(super) shared: usize,
}

#[derive(Debug, Default)]
pub(super) struct Ends {
    sets: Box<[Set]>,
    /// Slots of the tier when the sets were made.
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
        // All marks are compared, without a branch for each.
        self.sets[print.place(self.sets.len())].0.iter().fold(false, |known, mark| known | mark.is_of(print))
    }

    /// Loads the sets of some keys. The sets are seldom in the CPU's cache, and a loop with nothing else overlaps the misses.
    fn load(&self, batch: &[Print]) {
        black_box(batch.iter().fold(0, |sum, print| sum ^ self.sets[print.place(self.sets.len())].0[0].0));
    }

    /// Returns the place of a chain's deepest known key.
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

    /// Returns the turn of a request with these keys. Marks them, so the next turn is found.
    pub(super) fn turn(&mut self, chain: &[Print], slots: u64) -> ChainEnd {
        self.fit(slots);
        let known = self.deepest_known(chain);
        let ended = known.map_or(0, |at| self.turn_at(chain[at]));
        let fresh = known.map_or(0, |at| at + 1);
        let shared = if ended > 0 { 0 } else { fresh };
        let turn = (ended + 1).min(TURNS_MAX);
        if fresh == chain.len() {
            // The same request again is the next turn, or the beginning of a conversation.
            if let Some(key) = chain.last().filter(|_| ended > 0) {
                self.mark(*key, turn);
            }
            return ChainEnd { turn, shared };
        }
        // The marks of the turn before lie in this quarter if it ended this far or further.
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

    /// Writes into a known key's mark the turn ended there.
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
