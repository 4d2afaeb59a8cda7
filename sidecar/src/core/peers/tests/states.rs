//! Queries for the last kept key, of blocks at a peer.

use super::*;

/// Asks for the last kept one of six keys; the peer has the third to the fifth.
fn asking() -> (Scene, u64) {
    let mut scene = Scene::with(A, 2..5);
    scene.save(1..2);
    scene.engine.open(1, 0..6);
    let op = scene.next_op();
    let keys = LogKeys::new(1, 0..6);
    scene.ask(SchedulerRequest::Query(Query { last: true, ..Query::new(op, keys) }));
    assert_eq!(scene.answers(), [(op, Status::Pending, 0)]);
    (scene, op)
}

#[test]
fn the_last_key_is_fetched_alone() {
    let (mut scene, op) = asking();
    let fetch = scene.fetch();
    assert_eq!(keys_of(&fetch), [label(4)]);
    scene.end_all(&fetch, Ok(1));
    assert_eq!(scene.answers(), [(op, Status::Ok, 5)]);
    scene.assert_quiet_once_closed();
}

#[test]
fn a_peer_that_does_not_have_it_costs_the_states_in_memory_nothing() {
    let (mut scene, op) = asking();
    let fetch = scene.fetch();
    scene.end_all(&fetch, Err(FetchFault::Absent));
    assert_eq!(scene.answers(), [(op, Status::Ok, 2)]);
    scene.assert_quiet_once_closed();
}
