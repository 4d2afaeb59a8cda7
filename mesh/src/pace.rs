//! The pace at which a node announces its changes: the more followers it has, the longer each rests between
//! two batches, so all of them together get a bounded number of batches a second.
//!
//! Followers with a waiting request are counted on their own. Even so, the waiting followers get no more than
//! a batch every [`TURN`] together, and so do the others.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Changes are gathered for so long before they are sent, and no follower gets two batches in less.
pub const GATHER: Duration = Duration::from_millis(5);
/// Default time added by each follower to the rest of all: 4,000 batches a second, a fifth of a core over
/// TLS.
pub const TURN: Duration = Duration::from_micros(250);
/// Milliseconds for which a follower counts as waiting: as long as a request may wait.
pub const WAIT_MS: u64 = shm_protocol::layout::QUERY_WAIT_MS_MAX as u64;

/// The time between two batches to each of so many followers.
pub fn rest(turn: Duration, followers: usize) -> Duration {
    GATHER.max(turn.saturating_mul(u32::try_from(followers).unwrap_or(u32::MAX)))
}

/// All followers, and those with a waiting request.
#[derive(Debug)]
pub(crate) struct Pace {
    turn: Duration,
    next: u64,
    /// The end of each follower's last wait, in milliseconds; zero without one.
    followers: BTreeMap<u64, u64>,
    /// Waiting followers, by the end of their wait.
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

    /// Marks a follower as waiting for a block, for [`WAIT_MS`] from now on.
    pub(crate) fn wait(&mut self, follower: u64, now_ms: u64) {
        let Some(until_ms) = self.followers.get_mut(&follower) else { return };
        self.waiting.remove(&(*until_ms, follower));
        *until_ms = now_ms + WAIT_MS;
        self.waiting.insert((*until_ms, follower));
    }

    /// The time between two batches to a follower.
    pub(crate) fn rest(&mut self, follower: u64, now_ms: u64) -> Duration {
        while self.waiting.first().is_some_and(|(until_ms, _)| *until_ms <= now_ms) {
            self.waiting.pop_first();
        }
        let waits = self.followers.get(&follower).is_some_and(|until_ms| *until_ms > now_ms);
        rest(self.turn, if waits { self.waiting.len() } else { self.followers.len() })
    }

    /// The time between two batches to a follower without a waiting request.
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
        // A follower is counted once however often it waits, and not after it has left.
        (0..50).for_each(|ms| pace.wait(waits, 5000 + ms));
        all[1..].iter().for_each(|one| pace.leave(*one));
        assert_eq!((pace.rest(waits, 5000), pace.longest()), (GATHER, GATHER));
        pace.wait(other, 5000);
        assert_eq!(pace.waiting.len(), 1, "a follower that has left does not wait");
    }
}
