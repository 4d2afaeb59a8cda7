//! How long a load is left to the sidecar: as long as something of its rank moves, and until its bytes and those ahead of it
//! should be there. A load behind a backlog is not late. Pure.

use std::time::{Duration, Instant};

use shm_protocol::layout::QUERY_WAIT_MS_MAX;

use crate::core::plan::Plan;

/// How long a copy by the sidecar is waited for without progress before the engine copies itself: a hundred times what the
/// largest load takes, and short enough for a request that waits.
pub const LOAD_DEADLINE: Duration = Duration::from_secs(2);
/// Nanoseconds that a byte takes at most once its load has begun: 1 GB/s, a fortieth of a GPU's link.
const BYTE_NS_MAX: u64 = 1;

/// How long a load may not have begun, beyond the time of its bytes and those ahead of it: on host memory nothing tells when
/// it has, and others' loads are ahead of it too.
const BEGINS_MAX: Duration = LOAD_DEADLINE.saturating_mul(4);

/// How long one load may still take, from what was seen of it.
#[derive(Clone, Debug)]
pub(crate) struct CopyPatience {
    /// How long it may stand still.
    still: Duration,
    /// How long it may take from its own first cut on, whatever else of its rank moves.
    whole: Duration,
    /// The last progress that was seen, and when it was new.
    last: Option<(LoadProgress, Instant)>,
    /// When it was looked at first.
    since: Option<Instant>,
    begun: Option<Instant>,
}

/// What a sidecar has brought. The numbers count nothing: a load moves when they change, and has begun when `cuts` is not 0.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct LoadProgress {
    /// Batches of this rank's loads that ended; blocks on host memory.
    pub(crate) ended: u64,
    /// Cuts of this load that are there.
    pub(crate) cuts: u64,
}

// === impl CopyPatience ===

impl CopyPatience {
    /// With a load that has so many bytes in it and ahead of it. Its blocks may be on their way for as long as a query may wait.
    pub(crate) fn of_plan(plan: &Plan, bytes: u64) -> Self {
        let arrival = Duration::from_millis(u64::from(QUERY_WAIT_MS_MAX));
        Self::new(if plan.arriving() { arrival } else { Duration::ZERO }, bytes)
    }

    /// With a load that the sidecar begins within `begins`, which has `bytes` in it and ahead of it.
    pub(crate) fn new(begins: Duration, bytes: u64) -> Self {
        let still = begins + LOAD_DEADLINE;
        let whole = LOAD_DEADLINE + Duration::from_nanos(bytes.saturating_mul(BYTE_NS_MAX));
        Self { still, whole, last: None, since: None, begun: None }
    }

    /// Whether it is over, now that so much is there. It begins with the first look.
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
