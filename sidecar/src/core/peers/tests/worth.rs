//! Queries waiting for peers, as long as they bring blocks sooner than the engine computes them.

use shm_protocol::handshake::{Hello, Role};
use shm_protocol::prefill::PrefillRate;

use super::*;
use crate::core::tests::{RUN, changed, hello, rank_hello_of};

/// An engine with 100 ms for a block, and peer A with these blocks.
pub(super) fn judged(keys: Range<u32>) -> Scene {
    judged_larger(1, keys)
}

/// The same with blocks and a pool so many times as large.
pub(super) fn judged_larger(times: u64, keys: Range<u32>) -> Scene {
    let mut scene = Scene::over(POOL_SEGMENT * times, None);
    scene.event(CoreEvent::Disconnected { session: SCHEDULER });
    scene.event(CoreEvent::Disconnected { session: RANKS[0] });
    let facts = BTreeMap::from([("block_tokens".to_owned(), "1".to_owned())]);
    scene
        .engine
        .connect(RANKS[0], changed(rank_hello_of(1, 0, BLOCK_BYTES * times), |rank| rank.facts = facts));
    let wait_max_ms = Some(30_000);
    scene.engine.connect(SCHEDULER, Hello { wait_max_ms, ..hello(1, Role::Scheduler { run: RUN }) });
    scene.engine.join();
    scene.engine.core.note_prefill(SCHEDULER, PrefillRate::new(1e8, 0.0));
    let namespace = {
        let base = &scene.engine.core.base;
        base.engines[SCHEDULER].binding().expect("its rank has joined").digest
    };
    scene.hear(MeshEvent::Joined(A));
    let mut filter = Filter::with_capacity(1000);
    keys.for_each(|key| assert!(filter.insert(Digest::new(&namespace, 0, &hash(key)))));
    scene.hear(MeshEvent::Keeps { peer: A, filter });
    scene.engine.out.clear();
    scene
}

/// Peers give a block each `every_ms`. Returns the time of the answer, and its blocks.
pub(super) fn play(scene: &mut Scene, op: u64, every_ms: u64) -> (u64, u32) {
    let mut wanted: VecDeque<(u64, u32, Duration)> = VecDeque::new();
    let begun_ms = scene.engine.now_ms;
    for now_ms in (0..40_000).step_by(10) {
        scene.engine.now_ms = begun_ms + now_ms;
        let until = Duration::from_millis(begun_ms + now_ms);
        for fetch in std::mem::take(&mut scene.fetches) {
            let blocks = 0..fetch.blocks.len() as u32;
            wanted.extend(blocks.map(|index| (fetch.ticket, index, until + fetch.deadline)));
        }
        let end = |ticket, index, result| JobEnd::Peer(FetchDone { ticket, index, result });
        let mut ends = Vec::new();
        while let Some((ticket, index, _)) = wanted.pop_front_if(|(_, _, by)| *by <= until) {
            ends.push(end(ticket, index, Err(FetchFault::Timeout(FetchStage::Whole))));
        }
        if now_ms % every_ms == 0
            && now_ms > 0
            && let Some((ticket, index, _)) = wanted.pop_front()
        {
            ends.push(end(ticket, index, Ok(1)));
        }
        scene.event(CoreEvent::Transferred { tier: 0, ends });
        if now_ms % 100 == 0 {
            scene.event(CoreEvent::Tick);
        }
        let answers = scene.answers();
        if let Some((_, _, hits)) = answers.iter().find(|(of, status, _)| *of == op && *status == Status::Ok)
        {
            return (now_ms, *hits);
        }
    }
    panic!("no answer within 40 s");
}

#[test]
fn a_run_that_takes_longer_than_a_fetch_comes_in_turns() {
    let mut scene = judged(0..80);
    let op = scene.query(1, 0..100);
    let (ms, hits) = play(&mut scene, op, 60);
    assert_eq!(hits, 80, "after {ms} ms");
    assert!((4_700..5_200).contains(&ms), "80 blocks take 4.8 s, not {ms} ms");
    scene.ask(SchedulerRequest::Close { log: 1, way: 0 });
    assert!(scene.is_quiet());
}

#[test]
fn a_peer_that_is_slower_than_the_engine_is_left_for_it() {
    let mut scene = judged(0..80);
    let op = scene.query(1, 0..80);
    let (ms, hits) = play(&mut scene, op, 200);
    assert!(ms <= 900 && hits <= 4, "{hits} after {ms} ms");
}

#[test]
fn a_peer_is_not_judged_by_small_requests_before() {
    let mut scene = judged(0..60);
    // Two of them are under way at any time. At their rate the engine would compute the long prompt sooner.
    for key in 0..10 {
        scene.query(10 + key, key..key + 1);
        scene.engine.now_ms += 200;
        if scene.fetches.len() > 1 {
            let fetch = scene.fetches.pop_front().unwrap();
            scene.end_all(&fetch, Ok(1));
        }
    }
    let op = scene.query(1, 20..60);
    let (_, hits) = play(&mut scene, op, 10);
    assert_eq!(hits, 40);
}
