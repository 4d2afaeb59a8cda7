//! How often a node tells each follower what has changed: the more of them there are, the longer each rests between two batches,
//! so that all of them together are told a bounded number of batches a second.
//!
//! Followers that wait for a block are told in turns of their own. However many wait, and however many do not, neither get
//! more than a batch every [`TURN`] together.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Changes are gathered for so long before they are told, and no follower is told twice in less.
pub const GATHER: Duration = Duration::from_millis(5);
/// What each follower adds to the rest of all, unless told otherwise: 4,000 batches a second, a fifth of a core over TLS.
pub const TURN: Duration = Duration::from_micros(250);
/// How long a follower that said that it waits is one that waits: as long as a request may.
pub const WAIT_MS: u64 = shm_protocol::layout::QUERY_WAIT_MS_MAX as u64;

/// The time between two batches to each of so many followers.
pub fn rest(turn: Duration, followers: usize) -> Duration {
    GATHER.max(turn.saturating_mul(u32::try_from(followers).unwrap_or(u32::MAX)))
}

/// Who follows, and who of them waits.
#[derive(Debug)]
pub(crate) struct Pace {
    turn: Duration,
    next: u64,
    /// Until when each follower waits, or has waited.
    followers: BTreeMap<u64, u64>,
    /// Those that wait, by the end of that.
    waiting: BTreeSet<(u64, u64)>,
}

// === impl Pace ===

impl Pace {
    pub(crate) fn new(turn: Duration) -> Self {
        Self { turn, next: 0, followers: BTreeMap::new(), waiting: BTreeSet::new() }
    }

    pub(crate) fn enter(&mut self) -> u64 {
        self.next += 1;
        self.followers.insert(self.next, 0);
        self.next
    }

    pub(crate) fn leave(&mut self, follower: u64) {
        if let Some(until_ms) = self.followers.remove(&follower) {
            self.waiting.remove(&(until_ms, follower));
        }
    }

    /// A follower waits for a block, for [`WAIT_MS`] from now on.
    pub(crate) fn wait(&mut self, follower: u64, now_ms: u64) {
        let Some(until_ms) = self.followers.get_mut(&follower) else { return };
        self.waiting.remove(&(*until_ms, follower));
        *until_ms = now_ms + WAIT_MS;
        self.waiting.insert((*until_ms, follower));
    }

    /// How long a follower rests between two batches.
    pub(crate) fn rest(&mut self, follower: u64, now_ms: u64) -> Duration {
        while self.waiting.first().is_some_and(|(until_ms, _)| *until_ms <= now_ms) {
            self.waiting.pop_first();
        }
        let waits = self.followers.get(&follower).is_some_and(|until_ms| *until_ms > now_ms);
        rest(self.turn, if waits { self.waiting.len() } else { self.followers.len() })
    }

    /// How long those rest that do not wait.
    pub(crate) fn longest(&self) -> Duration {
        rest(self.turn, self.followers.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nanoseconds of a second.
    const SECOND: u128 = 1_000_000_000;

    #[test]
    fn the_rest_is_never_below_5_ms_grows_with_the_followers_and_bounds_what_all_are_told() {
        let mut before = GATHER;
        for followers in 0..=1024 {
            let rest = rest(TURN, followers);
            assert!(rest >= GATHER && rest >= before, "{followers}: {rest:?}");
            let told = followers as u128 * SECOND / rest.as_nanos();
            assert!(told <= 4000, "{followers} are told {told} batches a second");
            before = rest;
        }
        assert_eq!((rest(TURN, 8), rest(TURN, 20)), (GATHER, GATHER));
        assert_eq!(rest(TURN, 999), Duration::from_micros(249_750));
        assert!(rest(Duration::MAX, usize::MAX) >= GATHER);
    }

    #[test]
    fn who_waits_rests_as_if_only_those_followed_that_wait() {
        let mut pace = Pace::new(TURN);
        let all: Vec<u64> = (0..999).map(|_| pace.enter()).collect();
        let (waits, other) = (all[0], all[1]);
        pace.wait(waits, 100);
        assert_eq!((pace.rest(waits, 100), pace.rest(other, 100)), (GATHER, pace.longest()));
        assert_eq!(pace.rest(waits, 100 + WAIT_MS), pace.longest(), "for a time");
        all.iter().for_each(|one| pace.wait(*one, 5000));
        assert_eq!(pace.rest(waits, 5000), pace.longest(), "those that wait have a bound of their own");
        // Who says it again and again is counted once, and who leaves is not counted.
        (0..50).for_each(|ms| pace.wait(waits, 5000 + ms));
        all[1..].iter().for_each(|one| pace.leave(*one));
        assert_eq!((pace.rest(waits, 5000), pace.longest()), (GATHER, GATHER));
        pace.wait(other, 5000);
        assert_eq!(pace.waiting.len(), 1, "who has left does not wait");
    }
}
