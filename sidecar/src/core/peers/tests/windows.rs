//! The rules of waiting for a producer.

use super::*;

const WINDOW_MS: u64 = 200;

/// An engine with waiting requests, and a peer without blocks so far.
fn waiting() -> Scene {
    waiting_for(WINDOW_MS as u32)
}

fn waiting_for(window_ms: u32) -> Scene {
    let mut scene = Scene::waiting(Some(window_ms));
    scene.join(A, 0..0);
    scene
}

fn warnings(scene: &mut Scene) -> Vec<String> {
    scene.engine.out.iter().filter_map(taken!(Action::Warn(text) => text.clone())).collect()
}

/// Asks for blocks of no producer. Returns true if the query waited.
fn ask_in_vain(scene: &mut Scene, log: u32) -> bool {
    scene.engine.out.clear();
    let op = scene.query(log, 1000..1004);
    let waits = scene.answers() == [(op, Status::Pending, 0)];
    if waits {
        scene.tick(WINDOW_MS - 1);
        assert!(scene.answers().is_empty(), "not before the end of the window");
        scene.tick(1);
    }
    waits
}

/// Asks for blocks of the peer, and fetches them.
fn ask_and_fetch(scene: &mut Scene, log: u32, keys: Range<u32>) {
    scene.query(log, keys);
    let fetch = scene.fetch();
    scene.end_all(&fetch, Ok(1));
    assert!(matches!(scene.answers().last(), Some((_, Status::Ok, 1..))));
}

#[test]
fn a_window_lasts_as_long_as_blocks_keep_coming() {
    let mut scene = waiting();
    let op = scene.query(1, 0..6);
    assert_eq!(scene.answers(), [(op, Status::Pending, 0)]);
    assert_eq!(scene.engine.core.next_look_ms(), Some(20));
    for part in [0..2, 2..3, 3..6] {
        scene.tick(WINDOW_MS - 50);
        scene.produce(part.clone());
        let fetch = scene.fetch();
        assert_eq!(keys_of(&fetch), part.map(label).collect::<Vec<_>>());
        scene.tick(10);
        scene.end_all(&fetch, Ok(1));
    }
    let answers = scene.answers();
    assert_eq!(answers.last(), Some(&(op, Status::Ok, 6)));
    assert!(answers[..answers.len() - 1].iter().all(|answer| answer.1 == Status::Pending));
    let stats = scene.stats();
    assert_eq!((stats.miss_waits, stats.miss_waits_exhausted), (1, 0));
    assert_eq!(scene.engine.core.stats().wait_ms, scene.engine.now_ms);
    scene.ask(SchedulerRequest::Close { log: 1, way: 0 });
    scene.tick(20);
    assert!(scene.is_quiet() && scene.engine.core.next_look_ms().is_none());
}

#[test]
fn what_an_engine_beside_it_saves_is_an_answer_too() {
    let mut scene = waiting();
    let op = scene.query(1, 0..3);
    scene.answers();
    scene.save(0..3);
    scene.tick(20);
    assert_eq!(scene.answers(), [(op, Status::Ok, 3)]);
    assert_eq!(scene.stats().miss_waits_exhausted, 0);
}

#[test]
fn no_window_lasts_beyond_the_hard_deadline() {
    let mut scene = waiting();
    let (op, mut last) = (scene.query(1, 0..100), None);
    for key in 0.. {
        scene.produce(key..key + 1);
        scene.tick(WINDOW_MS - 50);
        last = scene.answers().last().copied();
        if matches!(last, Some((_, Status::Ok, _))) {
            break;
        }
        let fetch = scene.fetch();
        scene.end_all(&fetch, Ok(1));
    }
    assert_eq!((scene.engine.now_ms, last), (2100, Some((op, Status::Ok, 13))));
    assert_eq!(scene.stats().miss_waits_exhausted, 1);
}

#[test]
fn an_exhausted_window_is_told_of_and_its_request_waits_no_more() {
    let mut scene = waiting();
    assert!(ask_in_vain(&mut scene, 1));
    let told = warnings(&mut scene);
    assert!(
        matches!(&told[..], [text] if text.contains("200 ms (pillion.miss_wait_ms) for 4 blocks")),
        "{told:?}"
    );
    assert!(matches!(scene.answers()[..], [(_, Status::Ok, 0)]));
    let op = scene.query_again(1, 4);
    assert_eq!(scene.answers(), [(op, Status::Ok, 0)]);
    assert_eq!(scene.stats().miss_waits_exhausted, 1);
    // The log gets no second line at once.
    assert!(ask_in_vain(&mut scene, 2));
    assert!(warnings(&mut scene).is_empty());
}

#[test]
fn three_windows_in_vain_end_the_waiting_until_a_peer_has_given_a_block() {
    let mut scene = waiting();
    assert!(ask_in_vain(&mut scene, 1) && ask_in_vain(&mut scene, 2));
    assert_eq!(scene.stats().miss_wait_breakers, 0);
    scene.engine.out.clear();
    assert!(ask_in_vain(&mut scene, 3));
    let told = warnings(&mut scene);
    assert!(
        matches!(&told[..], [text] if text.contains("after 3 such waits in a row") && text.contains("(2 such")),
        "{told:?}"
    );
    assert_eq!(scene.stats().miss_wait_breakers, 1);
    scene.answers();
    assert!(!ask_in_vain(&mut scene, 4), "no query waits");
    scene.produce(0..2);
    ask_and_fetch(&mut scene, 5, 0..2);
    assert_eq!(scene.stats().miss_wait_breakers, 0);
    assert!(ask_in_vain(&mut scene, 6), "as before");
}

#[test]
fn a_block_from_a_peer_breaks_the_row() {
    let mut scene = waiting();
    for round in 0..4 {
        assert!(ask_in_vain(&mut scene, 3 * round) && ask_in_vain(&mut scene, 3 * round + 1), "{round}");
        scene.produce(round..round + 1);
        scene.answers();
        ask_and_fetch(&mut scene, 3 * round + 2, round..round + 1);
    }
}

#[test]
fn a_peer_that_has_not_what_it_told_of_is_not_asked_again_and_again() {
    let mut scene = waiting_for(2000);
    let op = scene.query(1, 0..4);
    scene.produce(0..4);
    let mut asked = 0;
    while scene.engine.now_ms < 2000 {
        scene.tick(10);
        for fetch in std::mem::take(&mut scene.fetches) {
            asked += 1;
            scene.end_all(&fetch, Err(FetchFault::Absent));
        }
    }
    assert_eq!(scene.answers().last(), Some(&(op, Status::Ok, 0)));
    assert!((2..10).contains(&asked), "{asked} times");
    assert!(scene.is_quiet());
}

#[test]
fn nobody_waits_unasked_or_without_peers() {
    let mut unasked = Scene::with(A, 0..0);
    assert!(!ask_in_vain(&mut unasked, 1));
    let mut alone = waiting();
    alone.hear(MeshEvent::Left(A));
    assert!(!ask_in_vain(&mut alone, 1));
    assert_eq!(alone.stats().miss_waits + unasked.stats().miss_waits, 0);
}

#[test]
fn whoever_stops_waiting_is_asked_for_no_more() {
    let mut scene = waiting();
    scene.query(1, 0..4);
    scene.ask(SchedulerRequest::Release { log: 1 });
    let hang_up = scene.query(2, 0..4);
    scene.answers();
    scene.event(CoreEvent::Drain);
    assert_eq!(scene.answers(), [(hang_up, Status::Ok, 0)]);
    scene.tick(WINDOW_MS);
    assert!(scene.answers().is_empty() && scene.is_quiet());
    assert_eq!(scene.stats().miss_waits_exhausted, 0);
}
