//! Promises of engines, as published to peers, and waits for promises of peers.

use mesh::digest::Thinning;
use shm_protocol::request::Append;

use super::*;

/// A request's wait for the first block, or for the next one, without a promise.
const AWAIT_MS: u64 = 1000;

impl Scene {
    /// The engine appends promised keys to a log with `length` keys.
    fn append(&mut self, log: u32, length: u32, keys: Range<u32>) {
        let chunks = [log * 2, log * 2 + 1, 0, 0, 0, 0];
        let named = LogKeys::new(log, length..length + keys.len() as u32);
        let append = Append { keys: named, chunks, promised: true, tail: false };
        self.engine.append(append, keys.map(hash).collect());
        self.take_actions();
    }

    fn promise(&mut self, log: u32, keys: Range<u32>) {
        self.ask(SchedulerRequest::Open { log });
        self.append(log, 0, keys);
    }

    /// Takes the promises published since the last look.
    fn published_promises(&mut self) -> Vec<Vec<Digest>> {
        std::mem::take(&mut self.promised)
    }

    /// The peer promises prompts with these last keys.
    fn hear_promises(&mut self, lasts: &[u32]) {
        let promises = lasts.iter().map(|key| digest(*key)).collect();
        self.hear(MeshEvent::Promises { peer: A, promises });
    }

    /// The engine asks for keys computed by another engine.
    fn await_keys(&mut self, log: u32, keys: Range<u32>) -> u64 {
        let (op, count) = (self.next_op(), keys.len() as u32);
        self.engine.open(log, keys);
        let query = Query { awaits: true, ..Query::new(op, LogKeys::new(log, 0..count)) };
        self.ask(SchedulerRequest::Query(query));
        op
    }

    /// Lets the time pass, with its ticks.
    fn pass(&mut self, ms: u64) {
        (0..ms / 100).for_each(|_| self.tick(100));
    }

    /// Returns the last answer to a query.
    fn answer(&mut self, op: u64) -> Option<(Status, u32)> {
        self.answers().into_iter().rfind(|answer| answer.0 == op).map(|(_, status, hits)| (status, hits))
    }
}

/// Returns the digests of these keys, sorted: promises are published in this order.
fn digests_of(keys: &[u32]) -> Vec<Digest> {
    let mut digests: Vec<Digest> = keys.iter().map(|key| digest(*key)).collect();
    digests.sort_unstable();
    digests
}

fn with_peer() -> Scene {
    let mut scene = Scene::new();
    scene.join(A, 0..0);
    scene
}

#[test]
fn of_each_promise_the_last_two_keys_are_told_until_its_log_is_closed() {
    let mut scene = with_peer();
    scene.promise(1, 0..4);
    assert_eq!(scene.published_promises(), [digests_of(&[2, 3])]);
    scene.append(1, 4, 4..6);
    assert_eq!(scene.published_promises(), [digests_of(&[4, 5])], "a prompt's keys may come in parts");
    scene.promise(2, 10..11);
    assert_eq!(scene.published_promises(), [digests_of(&[4, 5, 10])]);
    scene.pass(1000);
    assert!(scene.published_promises().is_empty(), "nothing has changed");
    scene.ask(SchedulerRequest::Close { log: 1, way: 0 });
    scene.ask(SchedulerRequest::Close { log: 2, way: 0 });
    assert_eq!(scene.published_promises(), [vec![digest(10)], vec![]]);
}

#[test]
fn a_promise_is_told_until_its_blocks_are_kept_and_behind_that() {
    for whole in [true, false] {
        let mut scene = with_peer();
        scene.promise(9, 0..3);
        for (op, keys) in [(1, 0..2), (2, 2..3)] {
            scene.engine.hand_over(op, LogKeys::new(9, keys));
        }
        scene.take_actions();
        scene.published_promises();
        // P closes the log with its answer, before its step was seen done.
        scene.ask(SchedulerRequest::Close { log: 9, way: 0 });
        scene.pass(500);
        assert!(scene.published_promises().is_empty(), "nothing was copied");
        // P promises another prompt.
        scene.promise(8, 10..11);
        assert_eq!(scene.published_promises().last().map(Vec::len), Some(3));
        scene.engine.hand_over(3, LogKeys::new(8, 0..1));
        scene.take_actions();
        let copies = scene.engine.copies();
        for (copy, kept) in [(1, 1), (0, 3)] {
            assert!(scene.published_promises().is_empty(), "not all are kept");
            scene.event(CoreEvent::Copied { copy: copies[copy].0, ok: whole });
            scene.engine.drained();
            scene.take_actions();
            assert_eq!(scene.published.len(), if whole { kept } else { 0 });
        }
        assert_eq!(scene.published_promises(), [[digest(10)]]);
    }
}

#[test]
fn a_promise_is_told_while_its_engine_works() {
    let mut scene = with_peer();
    scene.promise(1, 0..4);
    scene.pass(4900);
    assert_eq!(scene.published_promises(), [digests_of(&[2, 3])]);
    scene.pass(100);
    assert_eq!(scene.published_promises(), [vec![]]);
    scene.engine.fences(RANKS[0], 1, 1);
    scene.tick(100);
    assert_eq!(scene.published_promises(), [digests_of(&[2, 3])], "it works again");
    scene.engine.disconnect([RANKS[0]]);
    scene.tick(100);
    assert_eq!(scene.published_promises(), [vec![]]);

    let mut scene = with_peer();
    scene.promise(1, 0..4);
    scene.engine.disconnect([SCHEDULER, RANKS[0]]);
    scene.take_actions();
    assert_eq!(scene.published_promises(), [digests_of(&[2, 3]), vec![]]);
}

#[test]
fn what_is_promised_in_a_namespace_of_one_engine_alone_is_not_told() {
    let mut scene = with_peer();
    scene.ask(SchedulerRequest::Salt { salt: [9; 16] });
    scene.promise(1, 0..4);
    scene.pass(200);
    assert!(scene.published_promises().is_empty());
}

#[test]
fn of_one_engine_64_promises_are_told() {
    let mut scene = with_peer();
    (0..70).for_each(|log| scene.promise(log, log..log + 1));
    assert_eq!(scene.published_promises().last().map(Vec::len), Some(64));
}

#[test]
fn of_promises_that_have_ended_before_their_saves_the_newest_are_told() {
    let mut scene = with_peer();
    scene.promise(1000, 9000..9001);
    // This save never begins: its step is never seen done.
    scene.engine.hand_over(1, LogKeys::new(1000, 0..1));
    for log in 0..100 {
        scene.promise(log, 2 * log..2 * log + 2);
        scene.ask(SchedulerRequest::Close { log, way: 0 });
    }
    let newest: Vec<u32> = (72..200).chain([9000]).collect();
    assert_eq!(scene.published_promises().last(), Some(&digests_of(&newest)));
}

#[test]
fn what_a_peer_promises_is_waited_for_and_fetched_as_it_comes() {
    let mut scene = with_peer();
    scene.hear_promises(&[3]);
    // The promised prompt may be the begin of this one.
    let (op, other) = (scene.await_keys(1, 0..6), scene.await_keys(2, 100..104));
    scene.pass(20_000);
    let answers = scene.answers();
    let last = |op| answers.iter().rfind(|answer| answer.0 == op).unwrap().1;
    assert_eq!((last(op), last(other)), (Status::Pending, Status::Ok), "the other is not promised");
    for part in [0..1, 1..4] {
        scene.produce(part.clone());
        scene.tick(20);
        let fetch = scene.fetch();
        assert_eq!(keys_of(&fetch), part.map(label).collect::<Vec<_>>());
        scene.end_all(&fetch, Ok(1));
    }
    // The blocks behind it are not promised.
    assert_eq!(scene.answer(op), Some((Status::Ok, 4)));
}

#[test]
fn what_a_peer_has_computed_is_found_where_one_block_in_a_few_is_told() {
    let thinning = Thinning::new(3).unwrap();
    let all = 0..200;
    let announced: Vec<u32> = all.clone().filter(|key| thinning.keeps(digest(*key))).collect();
    assert!(announced[0] > 0, "the first block is none of these");
    let mut scene = Scene::new();
    scene.hear(MeshEvent::Joined(A));
    scene.hear(MeshEvent::Keeps { peer: A, filter: Filter::thinned(100, thinning) });
    scene.hear_promises(&[announced[1] + 1]);
    let op = scene.await_keys(1, 0..announced[1] + 2);
    scene.pass(1000);
    for (known, upto) in [(0, announced[0]), (announced[0] + 1, announced[1])] {
        scene.produce(upto..upto + 1);
        scene.tick(20);
        let fetch = scene.fetch();
        assert_eq!(keys_of(&fetch), (known..upto + 1).map(label).collect::<Vec<_>>());
        scene.end_all(&fetch, Ok(1));
    }
    assert_eq!(scene.answer(op).unwrap().0, Status::Pending);
    scene.hear_promises(&[]);
    assert_eq!(scene.answer(op), Some((Status::Ok, announced[1] + 1)), "the rest is not announced");
}

#[test]
fn a_promise_of_a_peer_is_worth_30_s() {
    let mut scene = with_peer();
    scene.hear_promises(&[3]);
    let op = scene.await_keys(1, 0..4);
    scene.pass(29_900);
    assert_eq!(scene.answer(op), Some((Status::Pending, 0)));
    scene.pass(100);
    assert_eq!(scene.answer(op), Some((Status::Ok, 0)));
    assert_eq!(scene.engine.core.stats().handover_exhausted, 1);
}

#[test]
fn what_begins_with_a_block_that_nobody_is_asked_for_is_not_waited_for_though_it_is_promised() {
    let mut scene = with_peer();
    let base = &mut scene.engine.core.base;
    let binding = base.engines[SCHEDULER].binding().unwrap();
    base.sources.mesh_mut().unwrap().distrust(&BTreeSet::from([binding.block_key(&hash(0))]), &base.cx);
    scene.hear_promises(&[3]);
    let op = scene.await_keys(1, 0..4);
    scene.pass(AWAIT_MS);
    assert_eq!(scene.answer(op), Some((Status::Ok, 0)), "as if it were not promised");
}

#[test]
fn a_promise_of_a_peer_ends_with_its_word_with_the_peer_or_with_its_breaker() {
    for end in ["withdrawn", "replaced", "left", "breaker"] {
        let mut scene = with_peer();
        scene.hear_promises(&[3]);
        let op = scene.await_keys(1, 0..4);
        scene.pass(5000);
        assert_eq!(scene.answer(op), Some((Status::Pending, 0)), "{end}");
        match end {
            "withdrawn" => scene.hear_promises(&[]),
            "replaced" => scene.hear_promises(&[2000]),
            "left" => scene.hear(MeshEvent::Left(A)),
            _ => {
                scene.produce(500..504);
                for log in 10..13 {
                    scene.query(log, 500..501);
                    let fetch = scene.fetch();
                    scene.tick(50);
                    scene.end_all(&fetch, Err(FetchFault::Short));
                }
            }
        }
        if end == "breaker" {
            scene.pass(AWAIT_MS);
        }
        assert_eq!(scene.answer(op), Some((Status::Ok, 0)), "{end}");
    }
}

#[test]
fn blocks_that_were_told_of_before_their_promise_ended_are_fetched() {
    let mut scene = with_peer();
    scene.hear_promises(&[3]);
    let op = scene.await_keys(1, 0..4);
    scene.pass(1000);
    scene.produce(0..3);
    scene.hear_promises(&[]);
    assert_eq!(scene.answer(op), Some((Status::Pending, 0)));
    scene.tick(20);
    let fetch = scene.fetch();
    scene.end_all(&fetch, Ok(1));
    assert_eq!(scene.answer(op), Some((Status::Ok, 3)), "the last one was lost at the peer");
}

#[test]
fn blocks_that_a_peer_has_are_asked_for_again_though_their_promise_has_ended() {
    let mut scene = with_peer();
    scene.hear_promises(&[1]);
    let op = scene.await_keys(1, 0..2);
    scene.pass(1000);
    scene.produce(0..2);
    scene.tick(20);
    let fetch = scene.fetch();
    scene.hear_promises(&[]);
    scene.end_all(&fetch, Err(FetchFault::Absent));
    assert_eq!(scene.answer(op), Some((Status::Pending, 0)));
    scene.pass(100);
    let fetch = scene.fetch();
    scene.end_all(&fetch, Ok(1));
    assert_eq!(scene.answer(op), Some((Status::Ok, 2)));
}

impl Scene {
    /// The peer promises four blocks and computes none. Returns true if a request waits for them, and true if
    /// it waits longer than for unpromised ones.
    fn is_waited_for(&mut self, round: u32) -> (bool, bool) {
        let first = 1000 + 4 * round;
        self.hear_promises(&[first + 3]);
        let op = self.await_keys(round, first..first + 4);
        let waits = self.answer(op) == Some((Status::Pending, 0));
        self.pass(AWAIT_MS + 500);
        let is_long = waits && self.answer(op).is_none_or(|(status, _)| status == Status::Pending);
        if is_long {
            self.pass(30_000);
        }
        (waits, is_long)
    }
}

#[test]
fn broken_promises_are_counted_by_promiser_whatever_others_give() {
    let mut scene = with_peer();
    scene.join(B, 500..600);
    let says = |action: &&Action| matches!(action, Action::Warn(text) if text.contains("broke its last 3"));
    let mut announced = 0;
    let waits = (0..7).map(|round| {
        give(&mut scene, 500 + round..501 + round);
        let waits = scene.is_waited_for(round).0;
        announced += scene.engine.out.iter().filter(says).count();
        waits
    });
    assert_eq!(waits.collect::<Vec<_>>(), [true, true, true, false, false, false, false]);
    assert_eq!(announced, 1);
    let stats = scene.stats();
    assert_eq!(stats.peers.iter().map(|peer| peer.broken_promises_total).collect::<Vec<_>>(), [3, 0]);
    assert_eq!(scene.engine.core.stats().handover_promises_broken, 3);
    // Promises of another peer are waited for as before.
    scene.hear(MeshEvent::Promises { peer: B, promises: vec![digest(2003)] });
    let op = scene.await_keys(20, 2000..2004);
    scene.pass(20_000);
    assert_eq!(scene.answer(op), Some((Status::Pending, 0)));
}

#[test]
fn a_promiser_that_is_not_believed_is_tried_after_each_pause_and_believed_once_it_keeps_a_promise() {
    let mut scene = with_peer();
    (0..3).for_each(|round| assert_eq!(scene.is_waited_for(round), (true, true)));
    scene.pass(8_500);
    assert_eq!(scene.is_waited_for(3), (true, false), "one request, as if nothing were promised");
    assert_eq!(scene.is_waited_for(4), (false, false));
    scene.pass(20_000);
    scene.hear_promises(&[3]);
    let op = scene.await_keys(5, 0..4);
    scene.pass(AWAIT_MS - 100);
    scene.produce(0..4);
    scene.tick(20);
    let fetch = scene.fetch();
    scene.end_all(&fetch, Ok(1));
    assert_eq!(scene.answer(op), Some((Status::Ok, 4)));
    assert_eq!(scene.is_waited_for(6), (true, true));
}

#[test]
fn of_several_promisers_nobody_is_believed_for_what_one_of_them_gave() {
    let mut scene = with_peer();
    scene.join(B, 0..0);
    (0..3).for_each(|round| assert_eq!(scene.is_waited_for(round), (true, true)));
    scene.hear_promises(&[3]);
    scene.hear(MeshEvent::Promises { peer: B, promises: vec![digest(3)] });
    let op = scene.await_keys(5, 0..4);
    scene.hear(MeshEvent::Changed {
        peer: B,
        changes: (0..4).map(|key| DigestChange::Added(digest(key))).collect(),
    });
    scene.tick(20);
    let fetch = scene.fetch();
    scene.end_all(&fetch, Ok(1));
    assert_eq!(scene.answer(op), Some((Status::Ok, 4)));
    assert_eq!(scene.is_waited_for(6), (false, false));
}
