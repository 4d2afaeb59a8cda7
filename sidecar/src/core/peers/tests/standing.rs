//! Standing asks, of peers here and of this node at peers.

use mesh::transport::StandingTerms;
use shm_protocol::request::Append;

use super::*;

const PATIENCE_MS: u32 = 1500;

impl Scene {
    /// The engine promises a prompt of these keys.
    fn promise_prompt(&mut self, log: u32, keys: Range<u32>) {
        self.ask(SchedulerRequest::Open { log });
        let chunks = [log * 2, log * 2 + 1, 0, 0, 0, 0];
        let named = LogKeys::new(log, 0..keys.len() as u32);
        let append = Append { keys: named, chunks, promised: true, tail: false };
        self.engine.append(append, keys.map(hash).collect());
        self.take_actions();
    }

    /// The engine saves blocks of its promised log 9 for another engine, as step `op`. They are not copied yet.
    fn begin_save(&mut self, op: u64, keys: Range<u32>) {
        self.engine.hand_over(op, LogKeys::new(9, keys));
        self.engine.fences(RANKS[0], op, op);
        self.take_actions();
    }

    fn end_save(&mut self) {
        self.engine.copied();
        self.take_actions();
    }

    /// A peer asks for blocks of a prompt from key 0 on, before they are committed.
    fn stand(&mut self, ask: u64, peer: PeerNumber, keys: Range<u32>) {
        let standing = Some(StandingTerms { patience_ms: PATIENCE_MS, place: keys.start });
        self.hear(MeshEvent::Asked { ask, peer, blocks: keys.map(label).collect(), standing });
    }

    /// For each block of an ask true if it was granted; `None`: the ask stands.
    fn answered(&self, ask: u64) -> Option<Vec<bool>> {
        self.granted.get(&ask).map(|slots| slots.iter().map(Option::is_some).collect())
    }

    fn pass_ms(&mut self, ms: u64) {
        (0..ms / 100).for_each(|_| self.tick(100));
    }

    /// The engine asks for keys computed by another engine.
    fn await_prompt(&mut self, log: u32, keys: Range<u32>) -> u64 {
        let (op, count) = (self.next_op(), keys.len() as u32);
        self.engine.open(log, keys);
        let keys = LogKeys::new(log, 0..count);
        self.ask(SchedulerRequest::Query(Query { awaits: true, ..Query::new(op, keys) }));
        op
    }

    fn last_answer(&mut self, op: u64) -> Option<(Status, u32)> {
        self.answers().into_iter().rfind(|answer| answer.0 == op).map(|(_, status, hits)| (status, hits))
    }
}

/// An engine with a promised prompt of keys 0 to 5 in its log 9.
fn promising() -> Scene {
    let mut scene = Scene::new();
    scene.join(A, 0..0);
    scene.promise_prompt(9, 0..6);
    scene
}

/// A peer, with or without standing asks, has promised the prompt of keys 0 to 5. A request waits for it.
fn awaiting(keeps_asks: Option<bool>) -> (Scene, u64) {
    let mut scene = Scene::new();
    scene.join(A, 0..0);
    if let Some(keeps_asks) = keeps_asks {
        scene.hear(MeshEvent::Greeted { peer: A, keeps_asks, lists_blocks: false });
    }
    scene.hear(MeshEvent::Promises { peer: A, promises: vec![digest(4), digest(5)] });
    let op = scene.await_prompt(1, 0..6);
    (scene, op)
}

#[test]
fn each_ask_is_granted_behind_the_commit_of_its_last_block() {
    let mut scene = promising();
    for (ask, keys) in [(1, 0..2), (2, 2..4), (3, 4..6)] {
        scene.stand(ask, A, keys);
    }
    assert!(scene.granted.is_empty(), "nothing is computed");
    scene.begin_save(1, 0..3);
    assert!(scene.granted.is_empty(), "nothing is committed");
    scene.end_save();
    assert_eq!((scene.answered(1), scene.answered(2)), (Some(vec![true; 2]), None));
    scene.begin_save(2, 3..6);
    scene.end_save();
    assert_eq!((scene.answered(2), scene.answered(3)), (Some(vec![true; 2]), Some(vec![true; 2])));
    (1..=3).for_each(|ask| scene.hear(MeshEvent::Released { ask, sent: 2 }));
    let stats = scene.stats();
    assert_eq!((stats.kept_asks, stats.granted_behind, stats.served_blocks), (3, 3, 6));
    scene.ask(SchedulerRequest::Close { log: 9, way: 0 });
    assert!(scene.is_quiet(), "and kept for no engine here");
}

#[test]
fn an_ask_for_what_is_here_or_not_promised_is_answered_at_once() {
    let mut scene = promising();
    scene.begin_save(1, 0..2);
    scene.end_save();
    scene.stand(1, A, 0..2);
    assert_eq!(scene.answered(1), Some(vec![true; 2]));
    // The promised prompt ends before the last of these blocks.
    scene.stand(2, A, 4..7);
    assert_eq!(scene.answered(2), Some(vec![false; 3]));
    // Other keys at these places.
    let standing = Some(StandingTerms { patience_ms: PATIENCE_MS, place: 3 });
    scene.hear(MeshEvent::Asked { ask: 3, peer: A, blocks: vec![label(2)], standing });
    assert_eq!(scene.answered(3), Some(vec![false]));
    let unknown = Label { namespace: NamespaceDigest([2; 16]), ..label(2) };
    let standing = Some(StandingTerms { patience_ms: PATIENCE_MS, place: 2 });
    scene.hear(MeshEvent::Asked { ask: 4, peer: A, blocks: vec![unknown], standing });
    assert_eq!(scene.answered(4), Some(vec![false]));
    assert_eq!(scene.stats().kept_asks, 0);
}

#[test]
fn an_ask_ends_with_its_patience() {
    let mut scene = promising();
    scene.begin_save(1, 0..1);
    scene.end_save();
    scene.stand(1, A, 0..2);
    scene.engine.fences(RANKS[0], 2, 2);
    scene.pass_ms(u64::from(PATIENCE_MS) - 100);
    assert_eq!(scene.answered(1), None);
    scene.pass_ms(100);
    assert_eq!(scene.answered(1), Some(vec![true, false]), "with the block that is here");
}

#[test]
fn an_ask_ends_with_its_promise_and_not_before_the_saves_of_it() {
    let mut scene = promising();
    scene.stand(1, A, 0..2);
    scene.stand(2, A, 4..6);
    scene.ask(SchedulerRequest::Close { log: 9, way: 0 });
    assert_eq!((scene.answered(1), scene.answered(2)), (Some(vec![false; 2]), Some(vec![false; 2])));
    let mut scene = promising();
    scene.stand(1, A, 0..2);
    scene.stand(2, A, 4..6);
    scene.begin_save(1, 0..2);
    scene.ask(SchedulerRequest::Close { log: 9, way: 0 });
    assert!(scene.granted.is_empty(), "two blocks are being copied");
    scene.end_save();
    assert_eq!((scene.answered(1), scene.answered(2)), (Some(vec![true; 2]), Some(vec![false; 2])));
    for end in ["silence", "gone"] {
        let mut scene = promising();
        scene.stand(1, A, 0..2);
        match end {
            "silence" => {
                scene.pass_ms(4000);
                scene.stand(2, A, 2..4);
                scene.pass_ms(1000);
                assert_eq!(scene.answered(2), Some(vec![false; 2]), "its engine does not work");
            }
            _ => scene.engine.disconnect([SCHEDULER, RANKS[0]]),
        }
        scene.take_actions();
        assert_eq!(scene.answered(1), Some(vec![false; 2]), "{end}");
    }
}

#[test]
fn an_ask_ends_with_its_connection_and_at_drain() {
    let mut scene = promising();
    scene.stand(1, A, 0..2);
    scene.stand(2, A, 2..4);
    scene.hear(MeshEvent::Withdrawn { ask: 1 });
    scene.hear(MeshEvent::Released { ask: 1, sent: 0 });
    assert_eq!((scene.answered(1), scene.answered(2)), (Some(vec![false; 2]), None));
    scene.event(CoreEvent::Drain);
    assert_eq!(scene.answered(2), Some(vec![false; 2]));
    // The transport noticed the end of the connection before it got the grant.
    scene.hear(MeshEvent::Withdrawn { ask: 2 });
    scene.stand(3, A, 2..4);
    assert_eq!(scene.answered(3), Some(vec![false; 2]), "nothing stands any more");
}

#[test]
fn the_asks_of_one_peer_leave_room_to_the_others() {
    let mut scene = promising();
    let standing = |scene: &mut Scene, peer, asks: Range<u64>| {
        asks.clone().for_each(|ask| scene.stand(ask, peer, 0..1));
        asks.filter(|ask| scene.answered(*ask).is_none()).count()
    };
    assert_eq!(standing(&mut scene, A, 0..1500), 1024);
    assert_eq!(standing(&mut scene, B, 2000..3000), 512);
    scene.begin_save(1, 0..1);
    scene.end_save();
    assert_eq!(scene.granted.len(), 2500, "each is answered once");
}

#[test]
fn promised_blocks_are_asked_for_once_and_found_as_they_come() {
    let (mut scene, op) = awaiting(Some(true));
    let fetch = scene.fetch();
    let terms = StandingTerms { patience_ms: PATIENCE_MS, place: 0 };
    assert_eq!((fetch.peer, fetch.standing), (A, Some(terms)));
    assert_eq!(keys_of(&fetch), (0..6).map(label).collect::<Vec<_>>());
    assert_eq!(scene.stats().fetching, 0, "they are not on their way");
    scene.pass_ms(900);
    scene.end(&fetch, 0..2, Ok(1));
    scene.end(&fetch, 2..4, Ok(1));
    assert_eq!(scene.last_answer(op), Some((Status::Pending, 4)));
    scene.end(&fetch, 4..6, Ok(1));
    assert_eq!(scene.last_answer(op), Some((Status::Ok, 6)), "at no look");
    assert!(scene.fetches.is_empty(), "nothing was asked for twice");
    assert_eq!(scene.stats().fetched_blocks, 6);
    scene.assert_quiet_once_closed();
}

#[test]
fn announced_blocks_of_a_standing_ask_are_on_their_way_and_not_asked_for_again() {
    let (mut scene, op) = awaiting(Some(true));
    let fetch = scene.fetch();
    scene.produce(0..6);
    assert!(scene.fetches.is_empty());
    assert_eq!(scene.last_answer(op), Some((Status::Pending, 0)));
    scene.end(&fetch, 0..5, Ok(1));
    // The last block is missing: the peer has evicted it.
    scene.end(&fetch, 5..6, Err(FetchFault::Absent));
    scene.pass_ms(100);
    let again = scene.fetch();
    assert_eq!((keys_of(&again), again.standing), (vec![label(5)], None));
    scene.end_all(&again, Ok(1));
    assert_eq!(scene.last_answer(op), Some((Status::Ok, 6)));
}

#[test]
fn a_standing_ask_without_blocks_is_no_fault_and_is_made_again_after_a_second() {
    let (mut scene, op) = awaiting(Some(true));
    let fetch = scene.fetch();
    scene.pass_ms(500);
    scene.end_all(&fetch, Err(FetchFault::Absent));
    assert!(scene.fetches.is_empty(), "not at once");
    scene.pass_ms(500);
    let again = scene.fetch();
    assert_eq!(again.standing, fetch.standing);
    let stats = scene.stats();
    assert_eq!((stats.faults, stats.peers[0].absent_total, stats.paused), ([0; 8], 0, false));
    scene.end_all(&again, Ok(1));
    assert_eq!(scene.last_answer(op), Some((Status::Ok, 6)));
}

#[test]
fn a_peer_that_does_not_keep_asks_gets_none() {
    for earlier in [None, Some(false)] {
        let (mut scene, op) = awaiting(earlier);
        scene.pass_ms(1000);
        assert!(scene.fetches.is_empty());
        scene.produce(0..6);
        let fetch = scene.fetch();
        assert_eq!(fetch.standing, None);
        scene.end_all(&fetch, Ok(1));
        assert_eq!(scene.last_answer(op), Some((Status::Ok, 6)));
    }
    // The peer has restarted with an earlier release, and promises the same.
    let (mut scene, _) = awaiting(Some(true));
    let fetch = scene.fetch();
    scene.hear(MeshEvent::Left(A));
    scene.end_all(&fetch, Err(FetchFault::Stopped));
    scene.join(B, 0..0);
    scene.hear(MeshEvent::Promises { peer: B, promises: vec![digest(5)] });
    scene.await_prompt(2, 0..6);
    scene.pass_ms(1000);
    assert!(scene.fetches.is_empty());
}

#[test]
fn standing_blocks_take_a_part_of_the_room_for_arrivals() {
    let mut scene = Scene::new();
    scene.join(A, 0..0);
    scene.hear(MeshEvent::Greeted { peer: A, keeps_asks: true, lists_blocks: false });
    scene.hear(MeshEvent::Promises { peer: A, promises: vec![digest(99), digest(199)] });
    scene.await_prompt(1, 0..100);
    let fetch = scene.fetch();
    assert_eq!(fetch.blocks.len() as u32, MOST / 4);
    scene.await_prompt(2, 100..200);
    assert!(scene.fetches.is_empty(), "no room is left");
    // The next ones are asked for as these come.
    scene.end(&fetch, 0..8, Ok(1));
    let next = scene.fetches.pop_front().expect("there is room");
    let place = next.standing.unwrap().place;
    assert_eq!(keys_of(&next).first().copied(), Some(label(place)));
}

#[test]
fn a_drain_ends_standing_asks() {
    let (mut scene, op) = awaiting(Some(true));
    let fetch = scene.fetch();
    scene.event(CoreEvent::Drain);
    assert_eq!((scene.last_answer(op), &scene.cancelled[..]), (Some((Status::Ok, 0)), &[fetch.ticket][..]));
    scene.end_all(&fetch, Err(FetchFault::Stopped));
    assert!(scene.is_quiet());
}
