//! The time for which a load is left to the sidecar: as long as a load of its rank moves, and until its bytes
//! and those ahead of it should be there. A load behind a backlog is not late. Pure.

use std::time::{Duration, Instant};

use shm_protocol::layout::{LOAD_WAIT_MS_MAX, QUERY_WAIT_MS_MAX};

use crate::core::plan::Plan;

/// Longest wait for a sidecar's copy without progress, before the engine copies the blocks itself: a hundred
/// times the longest load, and short enough for a waiting request.
pub const LOAD_DEADLINE: Duration = Duration::from_secs(2);
/// Nanoseconds for a byte at most, once its load has begun: 1 GB/s, a fortieth of a GPU's link.
const BYTE_NS_MAX: u64 = 1;

/// Longest wait for the begin of a load, beyond the time for its bytes and those ahead of it. On host memory
/// the begin cannot be seen, and other loads are ahead of it too.
const BEGINS_MAX: Duration = LOAD_DEADLINE.saturating_mul(4);

/// The time limits of one load, and its progress so far.
#[derive(Clone, Debug)]
pub(crate) struct CopyPatience {
    /// Longest time without progress.
    still: Duration,
    /// Longest time from its own first cut on, even if other loads of its rank move.
    whole: Duration,
    /// The last progress seen, and the time of its first sighting.
    last: Option<(LoadProgress, Instant)>,
    /// The time of the first look.
    since: Option<Instant>,
    begun: Option<Instant>,
}

/// The progress of a sidecar. Only changes of the numbers matter: a load moves when they change, and has
/// begun when `cuts` is not 0.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct LoadProgress {
    /// Ended batches of this rank's loads; on host memory, blocks.
    pub(crate) ended: u64,
    /// Number of cuts of this load that are there.
    pub(crate) cuts: u64,
}

// === impl CopyPatience ===

impl CopyPatience {
    /// The limits of a planned load with `bytes` in it and ahead of it. Blocks still on their way have the
    /// time of the longest query's wait. The sidecar begins a streamed load, or refuses it, within its
    /// scheduler's limit, and meanwhile moves the loads ahead of it.
    pub(crate) fn of_plan(plan: &Plan, bytes: u64) -> Self {
        let arrival = Duration::from_millis(u64::from(QUERY_WAIT_MS_MAX));
        let of_arrival = Self::new(if plan.arriving() { arrival } else { Duration::ZERO }, bytes);
        let ahead = if plan.streamed() { LOAD_WAIT_MS_MAX } else { 0 };
        Self { whole: of_arrival.whole + Duration::from_millis(u64::from(ahead)), ..of_arrival }
    }

    /// The limits of a load that the sidecar begins within `begins`; `bytes` are in it and ahead of it.
    pub(crate) fn new(begins: Duration, bytes: u64) -> Self {
        let still = begins + LOAD_DEADLINE;
        let whole = LOAD_DEADLINE + Duration::from_nanos(bytes.saturating_mul(BYTE_NS_MAX));
        Self { still, whole, last: None, since: None, begun: None }
    }

    /// Returns true if the time is over, at this progress. The first call starts the clock.
    pub(crate) fn is_over(&mut self, progress: LoadProgress, now: Instant) -> bool {
        if self.last.is_none_or(|(last, _)| last != progress) {
            self.last = Some((progress, now));
        }
        let since = *self.since.get_or_insert(now);
        if progress.cuts > 0 {
            self.begun.get_or_insert(now);
        }
        let over = |since: Instant, limit: Duration| now.duration_since(since) >= limit;
        let whole = match self.begun {
            Some(begun) => over(begun, self.whole),
            None => over(since, BEGINS_MAX + self.whole),
        };
        whole || self.last.is_some_and(|(_, since)| over(since, self.still))
    }
}

#[cfg(test)]
mod tests {
    use shm_protocol::message::{LOAD_ARRIVING, LOAD_STREAMED};

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_load_behind_a_backlog_that_moves_is_not_late() {
        let (mut patience, now) =
            (CopyPatience::new(Duration::ZERO, 200_000_000_000), crate::clock::read_clock());
        let at = |ended| LoadProgress { ended, cuts: 0 };
        for turn in 0..100_u32 {
            assert!(!patience.is_over(at(turn.into()), now + (LOAD_DEADLINE - MS) * turn), "turn {turn}");
        }
        let stopped = now + (LOAD_DEADLINE - MS) * 99;
        assert!(!patience.is_over(at(99), stopped + LOAD_DEADLINE - MS));
        assert!(patience.is_over(at(99), stopped + LOAD_DEADLINE));
    }

    #[test]
    fn a_streamed_load_waits_for_its_turn_while_the_loads_ahead_of_it_move() {
        let plan = |flags| Plan { op: 1, epoch: 1, namespace: 1, flags, blocks: Vec::new() };
        let streamed = CopyPatience::of_plan(&plan(LOAD_ARRIVING | LOAD_STREAMED), 0);
        let early = CopyPatience::of_plan(&plan(LOAD_ARRIVING), 0);
        let (now, seconds) = (crate::clock::read_clock(), |seconds| Duration::from_secs(seconds));
        let at = |ended| LoadProgress { ended, cuts: 0 };
        let ends = |mut patience: CopyPatience, moves: bool| {
            (0..700)
                .find(|second| patience.is_over(at(if moves { *second } else { 0 }), now + seconds(*second)))
        };
        assert_eq!((ends(early.clone(), true), ends(early, false)), (Some(10), Some(4)));
        assert_eq!((ends(streamed.clone(), true), ends(streamed, false)), (Some(610), Some(4)));
    }

    #[test]
    fn a_load_that_has_begun_has_the_time_that_its_bytes_and_those_ahead_of_it_take() {
        let whole = LOAD_DEADLINE + Duration::from_secs(3);
        let mut patience = CopyPatience::new(Duration::ZERO, 3_000_000_000);
        let (now, ahead) = (crate::clock::read_clock(), BEGINS_MAX + whole - MS);
        let behind = |tenth: u32| (LoadProgress { ended: tenth.into(), cuts: 0 }, now + ahead * tenth / 10);
        assert!((0..=10).map(behind).all(|(progress, now)| !patience.is_over(progress, now)));
        let mut another = patience.clone();
        assert!(another.is_over(LoadProgress { ended: 11, cuts: 0 }, now + ahead + MS), "it never begins");
        let begun = now + ahead;
        for tenth in 0..10_u32 {
            let progress = LoadProgress { ended: 100 + u64::from(tenth), cuts: 1 };
            assert!(!patience.is_over(progress, begun + whole * tenth / 10));
        }
        assert!(!patience.is_over(LoadProgress { ended: 110, cuts: 2 }, begun + whole - MS));
        assert!(
            patience.is_over(LoadProgress { ended: 111, cuts: 2 }, begun + whole),
            "however much else moves"
        );
    }
}
