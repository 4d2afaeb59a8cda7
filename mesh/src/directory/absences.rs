//! How often a peer lacked its announced blocks.
//!
//! An inventory is always a little late, so each peer lacks a few. A peer with many announced blocks and none
//! to give would otherwise hide the peers with these blocks. So the count comes first in the order of peers.
//! It excludes no peer: it halves with time, and a request goes to the only peer at any count.

/// The highest count: forgotten after 110 s.
const COUNT_MAX: u32 = 1024;
/// Milliseconds until the count is half of itself.
const HALF_MS: u64 = 10_000;

/// The lacked blocks of a peer, less its given ones.
#[derive(Clone, Debug, Default)]
pub(super) struct Absences {
    count: u32,
    /// When the count was last halved.
    halved_ms: u64,
    pub(super) total: u64,
}

// === impl Absences ===

impl Absences {
    /// The peer's level in the order of peers: 0 without absences, and one more for each doubling of their
    /// count.
    pub(super) fn level(&self, now_ms: u64) -> u32 {
        u32::BITS - self.count_at(now_ms).leading_zeros()
    }

    pub(super) fn count_absent(&mut self, now_ms: u64) {
        self.total += 1;
        self.age(now_ms);
        self.count = (self.count + 1).min(COUNT_MAX);
    }

    /// The peer has given a block.
    pub(super) fn count_given(&mut self, now_ms: u64) {
        self.age(now_ms);
        self.count = self.count.saturating_sub(1);
    }

    fn count_at(&self, now_ms: u64) -> u32 {
        let halvings = u32::try_from(now_ms.saturating_sub(self.halved_ms) / HALF_MS);
        halvings.ok().and_then(|halvings| self.count.checked_shr(halvings)).unwrap_or(0)
    }

    fn age(&mut self, now_ms: u64) {
        self.count = self.count_at(now_ms);
        let since_ms = now_ms.saturating_sub(self.halved_ms);
        // The time of an empty count begins with the next absence.
        self.halved_ms = if self.count == 0 { now_ms } else { now_ms - since_ms % HALF_MS };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absences_are_forgotten_with_time_and_blocks_that_were_given() {
        let mut absences = Absences::default();
        assert_eq!(absences.level(0), 0);
        (0..3000).for_each(|_| absences.count_absent(5_000));
        assert_eq!((absences.level(5_000), absences.total), (11, 3000));
        let levels: Vec<u32> = (0..12).map(|halvings| absences.level(5_000 + halvings * HALF_MS)).collect();
        assert_eq!(levels, [11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]);
        (0..1000).for_each(|_| absences.count_given(5_000));
        assert_eq!(absences.level(5_000), 5, "24 are left");
        // An update does not begin the time again.
        (0..10).for_each(|second| absences.count_absent(5_000 + 1000 * second));
        assert_eq!([14_999, 15_000].map(|now_ms| absences.level(now_ms)), [6, 5]);
        absences.count_absent(u64::MAX);
        assert_eq!(absences.level(u64::MAX), 1);
    }
}
