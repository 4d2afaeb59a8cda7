//! The limit of an engine for its pending queries.

use super::*;

#[test]
fn a_query_is_pending_as_long_as_its_engine_lets_it_wait_while_the_sidecar_lives() {
    let peer = Peer::new(1);
    let wait = |config: &mut Config| config.load_wait.most_ms = 10_000;
    let (mut scheduler, served) = connected_with(&peer, BLOCK_BYTES, wait);
    let log = log_with(&mut scheduler, 4);
    let op = scheduler.post_query(log, 0, 4).unwrap();
    served.answer(op, Status::Pending, 0);
    #[expect(clippy::disallowed_methods, reason = "a time after the question's, which the scheduler read")]
    let now = std::time::Instant::now();
    for second in (0..=10).step_by(2) {
        served.beat();
        assert_eq!(scheduler.answer(op, now + Duration::from_secs(second)), Some(PENDING), "{second} s");
    }
    served.beat();
    assert_eq!(scheduler.answer(op, now + Duration::from_millis(11_001)), Some(0));
    let op = scheduler.post_query(log, 0, 3).unwrap_or_default();
    assert_eq!(op, 0, "nothing is asked until the heartbeat moves");
}

#[test]
fn a_frozen_sidecar_is_waited_for_no_longer_because_the_engine_lets_queries_wait() {
    let peer = Peer::new(1);
    let wait = |config: &mut Config| config.load_wait.most_ms = 30_000;
    let (mut scheduler, served) = connected_with(&peer, BLOCK_BYTES, wait);
    let log = log_with(&mut scheduler, 4);
    let op = scheduler.post_query(log, 0, 4).unwrap();
    served.answer(op, Status::Pending, 0);
    #[expect(clippy::disallowed_methods, reason = "a time after the question's, which the scheduler read")]
    let now = std::time::Instant::now();
    assert_eq!(scheduler.answer(op, now), Some(PENDING));
    assert_eq!(scheduler.answer(op, now + Duration::from_secs(4)), Some(0));
}
