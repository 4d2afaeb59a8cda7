//! Answers beyond the budget of a step, and sidecars that do not answer.

use std::time::Duration;

use connector_shim::scheduler::{AskedQuery, EngineSession, PENDING};
use shm_protocol::message::{Kind, Status};

use super::peer::Peer;
use super::peer::scheduler::connected;
use super::{BLOCK_BYTES, log_with, with_log};

#[test]
fn an_answer_beyond_the_budget_counts_in_a_later_step() {
    let (_peer, mut scheduler, mut served, log) = with_log(4);
    assert_eq!(scheduler.query(log, 0, 4), PENDING);
    let op = served.drain_kind(Kind::Query)[0].op;
    scheduler.end_step();
    assert_eq!(scheduler.ask_query(log, 0, 4), AskedQuery::Answered(PENDING));
    served.answer(op, Status::Ok, 4);
    assert_eq!(scheduler.ask_query(log, 0, 4), AskedQuery::Answered(4));
    assert!(served.drain().is_empty(), "it is asked once, and its lease stays");
    let stats = scheduler.stats();
    assert_eq!((stats["queries_late"], stats["queries_timed_out"]), (1, 0));
}

#[test]
fn steps_wait_again_once_the_heartbeat_moves() {
    let (_peer, mut scheduler, served, log) = with_log(4);
    let budget = scheduler.budget_left();
    assert_eq!(scheduler.query(log, 0, 4), PENDING);
    scheduler.end_step();
    assert_eq!(scheduler.budget_left(), Duration::ZERO);
    served.beat();
    scheduler.end_step();
    assert_eq!(scheduler.budget_left(), budget);
}

#[test]
fn what_a_sidecar_does_not_read_is_a_miss_and_nothing_is_asked_until_the_heartbeat_moves() {
    let (_peer, mut scheduler, mut served, log) = with_log(4);
    let op = scheduler.post_query(log, 0, 4).unwrap();
    #[expect(clippy::disallowed_methods, reason = "a time after the question's, which the scheduler read")]
    let now = std::time::Instant::now();
    assert_eq!(scheduler.look_for_answer(op, now, now + Duration::from_secs(1)), Some(0));
    assert_eq!(served.drain().last().unwrap().kind, Kind::Release, "the late answer's lease is given back");
    assert_eq!(scheduler.query(log, 0, 4), 0);
    scheduler.end_step();
    assert_eq!(scheduler.query(log, 0, 4), 0);
    assert!(served.drain_kind(Kind::Query).is_empty(), "the heartbeat stands still");
    let stats = scheduler.stats();
    assert_eq!((stats["queries_timed_out"], stats["queries_not_asked"]), (1, 2));
    served.beat();
    let again = scheduler.post_query(log, 0, 4).unwrap();
    served.answer(op, Status::Ok, 4);
    assert_eq!(scheduler.poll(again), None, "another query's answer");
    assert_eq!(scheduler.poll(op), Some(0), "too late");
    served.answer(again, Status::Ok, 2);
    assert_eq!(scheduler.poll(again), Some(2));
    let notices = scheduler.take_notices();
    assert_eq!(notices.iter().filter(|text| text.contains("counts as a miss")).count(), 1, "{notices:?}");
}

#[test]
fn one_budget_serves_all_queries_of_a_step() {
    let (_peer, mut scheduler, served, log) = with_log(4);
    let ops: Vec<u64> = (0..8).map(|_| scheduler.post_query(log, 0, 4).unwrap()).collect();
    assert_eq!(scheduler.wait_for_answer(ops[7]), PENDING);
    assert_eq!(scheduler.budget_left(), Duration::ZERO, "nothing is left");
    let later = scheduler.post_query(log, 0, 4).unwrap();
    assert_eq!(scheduler.wait_for_answer(later), PENDING, "asked, and not waited for");
    served.beat();
    scheduler.end_step();
    assert!(!scheduler.budget_left().is_zero(), "refilled");
}

/// A miss would make the engine compute a prompt that another engine computes for it.
#[test]
fn a_query_that_awaits_is_pending_until_the_sidecar_is_known_to_be_frozen() {
    let mut peer = Peer::new(1);
    peer.handover = true;
    let (mut scheduler, mut served) = connected(&peer, BLOCK_BYTES);
    let [plain, first, second] = [(); 3].map(|()| log_with(&mut scheduler, 4));
    for log in [first, second] {
        scheduler.await_producer(log);
    }
    assert_eq!(scheduler.query(plain, 0, 4), PENDING, "it has spent the budget");
    assert_eq!(scheduler.query(first, 0, 4), PENDING);
    assert_eq!(scheduler.query(second, 0, 4), PENDING);
    let asked = served.drain_kind(Kind::Query);
    assert_eq!(asked.len(), 3);
    served.answer(asked[1].op, Status::Ok, 4);
    assert_eq!(scheduler.query(first, 0, 4), 4, "asked again, no message is needed");
    assert_eq!(scheduler.query(second, 0, 4), PENDING);
    assert!(served.drain_kind(Kind::Query).is_empty());

    #[expect(clippy::disallowed_methods, reason = "a time after the question's, which the scheduler read")]
    let now = std::time::Instant::now();
    // Qualified: the host's own asks by its clock.
    let mut ask_at =
        |log, second| EngineSession::ask_query(&mut scheduler, log, 0, 4, now + Duration::from_secs(second));
    served.beat();
    assert_eq!(ask_at(second, 4), AskedQuery::Answered(PENDING), "as long as the sidecar lives");
    assert_eq!(ask_at(second, 8), AskedQuery::Answered(0), "it is frozen");
    assert_eq!(served.drain_kind(Kind::Release).len(), 1, "a late answer holds nothing");
    scheduler.end_step();
    assert_eq!(scheduler.query(first, 1, 3), 0, "it is asked nothing until it has moved");
    served.beat();
    assert_eq!(scheduler.query(first, 1, 3), PENDING);
}
