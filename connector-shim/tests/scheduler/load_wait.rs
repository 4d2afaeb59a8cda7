//! The limit of an engine for its pending queries.

use std::time::Instant;

use super::*;

/// A scheduler with a pending query and this limit, its sidecar, the query's log and number, and a time after the question.
fn pending_query(peer: &Peer, most_ms: u32) -> (SchedulerClient, Served, (i64, u64), Instant) {
    let wait = |config: &mut SessionConfig| config.load_wait.most_ms = most_ms;
    let (mut scheduler, served) = connected_with(peer, BLOCK_BYTES, wait);
    let log = log_with(&mut scheduler, 4);
    let op = scheduler.post_query(log, 0, 4).unwrap();
    served.answer(op, Status::Pending, 0);
    #[expect(clippy::disallowed_methods, reason = "a time after the question's, which the scheduler read")]
    let now = Instant::now();
    (scheduler, served, (log, op), now)
}

#[test]
fn a_query_is_pending_as_long_as_its_engine_lets_it_wait_while_the_sidecar_lives() {
    let peer = Peer::new(1);
    let (mut scheduler, served, (log, op), now) = pending_query(&peer, 10_000);
    for second in (0..=10).step_by(2) {
        served.beat();
        assert_eq!(scheduler.take_answer(op, now + Duration::from_secs(second)), Some(PENDING), "{second} s");
    }
    served.beat();
    assert_eq!(scheduler.take_answer(op, now + Duration::from_millis(11_001)), Some(0));
    let op = scheduler.post_query(log, 0, 3).unwrap_or_default();
    assert_eq!(op, 0, "nothing is asked until the heartbeat moves");
}

#[test]
fn a_frozen_sidecar_is_waited_for_no_longer_because_the_engine_lets_queries_wait() {
    let peer = Peer::new(1);
    let (mut scheduler, _served, (_, op), now) = pending_query(&peer, 30_000);
    assert_eq!(scheduler.take_answer(op, now), Some(PENDING));
    assert_eq!(scheduler.take_answer(op, now + Duration::from_secs(4)), Some(0));
}
