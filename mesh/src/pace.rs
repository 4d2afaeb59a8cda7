//! The pace at which a node announces its changes: the more followers it has, the longer each rests between
//! two batches, so all of them together get a bounded number of batches a second.
//!
//! Followers with a waiting request are counted on their own, and rest for no least time. Even so, the waiting
//! followers get no more than a batch every [`TURN`] together, and so do the others.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Changes are gathered for so long before they are sent, and no follower without a waiting request gets two
/// batches in less. Blocks that engines compute for others are not gathered while any follower waits.
pub const GATHER: Duration = Duration::from_millis(5);
/// Default time added by each follower to the rest of all: 4,000 batches a second, a fifth of a core over
/// TLS.
pub const TURN: Duration = Duration::from_micros(250);
/// Milliseconds for which a follower counts as waiting: as long as a request may wait.
pub const WAIT_MS: u64 = shm_protocol::layout::QUERY_WAIT_MS_MAX as u64;

/// The time between two batches to each of so many followers without a waiting request.
pub fn compute_rest(turn: Duration, followers: usize) -> Duration {
    GATHER.max(compute_turns(turn, followers))
}

/// The time in which each of so many followers has had its turn.
fn compute_turns(turn: Duration, followers: usize) -> Duration {
    turn.saturating_mul(u32::try_from(followers).unwrap_or(u32::MAX))
}

/// All followers, and those with a waiting request.
#[derive(Debug)]
pub(crate) struct FollowerPace {
    turn: Duration,
    next: u64,
    /// The end of each follower's last wait, in milliseconds; zero without one.
    followers: BTreeMap<u64, u64>,
    /// Waiting followers, by the end of their wait.
    waiting: BTreeSet<(u64, u64)>,
}

// === impl FollowerPace ===

impl FollowerPace {
    pub(crate) fn new(turn: Duration) -> Self {
        Self { turn, next: 0, followers: BTreeMap::new(), waiting: BTreeSet::new() }
    }

    pub(crate) fn add_follower(&mut self) -> u64 {
        self.next += 1;
        self.followers.insert(self.next, 0);
        self.next
    }

    pub(crate) fn remove_follower(&mut self, follower: u64) {
        if let Some(until_ms) = self.followers.remove(&follower) {
            self.waiting.remove(&(until_ms, follower));
        }
    }

    /// Marks a follower as waiting for a block, for [`WAIT_MS`] from now on.
    pub(crate) fn note_wait(&mut self, follower: u64, now_ms: u64) {
        let Some(until_ms) = self.followers.get_mut(&follower) else { return };
        self.waiting.remove(&(*until_ms, follower));
        *until_ms = now_ms + WAIT_MS;
        self.waiting.insert((*until_ms, follower));
    }

    /// The time between two batches to a follower.
    pub(crate) fn follower_rest(&mut self, follower: u64, now_ms: u64) -> Duration {
        let waiting = self.count_waiting(now_ms);
        match self.followers.get(&follower) {
            Some(until_ms) if *until_ms > now_ms => compute_turns(self.turn, waiting),
            _ => self.longest(),
        }
    }

    /// The number of followers with a waiting request.
    pub(crate) fn count_waiting(&mut self, now_ms: u64) -> usize {
        while self.waiting.first().is_some_and(|(until_ms, _)| *until_ms <= now_ms) {
            self.waiting.pop_first();
        }
        self.waiting.len()
    }

    /// The time between two batches to a follower without a waiting request.
    pub(crate) fn longest(&self) -> Duration {
        compute_rest(self.turn, self.followers.len())
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
            let rest = compute_rest(TURN, followers);
            assert!(rest >= GATHER && rest >= before, "{followers}: {rest:?}");
            let told = followers as u128 * SECOND / rest.as_nanos();
            assert!(told <= 4000, "{followers} are told {told} batches a second");
            before = rest;
        }
        assert_eq!((compute_rest(TURN, 8), compute_rest(TURN, 20)), (GATHER, GATHER));
        assert_eq!(compute_rest(TURN, 999), Duration::from_micros(249_750));
        assert!(compute_rest(Duration::MAX, usize::MAX) >= GATHER);
    }

    #[test]
    fn who_waits_rests_as_if_only_those_followed_that_wait() {
        let mut pace = FollowerPace::new(TURN);
        let all: Vec<u64> = (0..999).map(|_| pace.add_follower()).collect();
        let (waits, other) = (all[0], all[1]);
        pace.note_wait(waits, 100);
        assert_eq!((pace.follower_rest(waits, 100), pace.follower_rest(other, 100)), (TURN, pace.longest()));
        assert_eq!(pace.follower_rest(waits, 100 + WAIT_MS), pace.longest(), "for a time");
        all.iter().for_each(|one| pace.note_wait(*one, 5000));
        assert_eq!(
            pace.follower_rest(waits, 5000),
            pace.longest(),
            "those that wait have a bound of their own"
        );
        // A follower is counted once however often it waits, and not after it has left.
        (0..50).for_each(|ms| pace.note_wait(waits, 5000 + ms));
        all[1..].iter().for_each(|one| pace.remove_follower(*one));
        assert_eq!((pace.follower_rest(waits, 5000), pace.longest()), (TURN, GATHER));
        pace.note_wait(other, 5000);
        assert_eq!(pace.waiting.len(), 1, "a follower that has left does not wait");
    }
}
