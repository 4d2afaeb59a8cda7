//! Kinds of ends: each of the commonest ways of ending an answer is a kind, and all other ways together are kind 0.

use crate::standing::KINDS;

/// The ways with a kind of their own, each with its count above those of the other ways (the algorithm of Misra and Gries).
#[derive(Debug, Default)]
pub(super) struct Kinds([CommonEnd; KINDS - 1]);

#[derive(Copy, Clone, Debug, Default)]
struct CommonEnd {
    number: u32,
    count: u32,
}

// === impl Kinds ===

impl Kinds {
    /// Counts an end of this way and returns its kind: 0 if the way has none of its own, or is not known.
    pub(super) fn kind(&mut self, number: u32) -> usize {
        if number == 0 {
            return 0;
        }
        let same = self.0.iter().position(|way| way.count > 0 && way.number == number);
        if let Some(at) = same.or_else(|| self.0.iter().position(|way| way.count == 0)) {
            self.0[at] = CommonEnd { number, count: self.0[at].count.saturating_add(1) };
            return at + 1;
        }
        self.0.iter_mut().for_each(|way| way.count -= 1);
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commonest_ways_keep_their_kinds() {
        let mut kinds = Kinds::default();
        let [tool, person] = [7, 8].map(|way| kinds.kind(way));
        let mut others = 0;
        for round in 0..1000 {
            assert_eq!(kinds.kind(7), tool);
            assert_eq!(kinds.kind(8), person);
            others += usize::from(kinds.kind(100 + round) == 0);
        }
        assert!(others > 300, "{others} of 1,000 that came once had no kind of their own");
        assert_eq!(kinds.kind(0), 0, "nobody said how it ended");
    }
}
