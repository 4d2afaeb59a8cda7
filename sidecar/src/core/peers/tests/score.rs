//! Scores of prompts that peers have.

use shm_protocol::prefill::PrefillRate;

use super::worth::judged_larger;
use super::*;
use crate::core::PromptPlaces;
use crate::core::tests::score::score_blocks;

fn score(scene: &Scene, keys: Range<u32>) -> PromptPlaces {
    score_blocks(&scene.engine.core, NAMESPACE, (BLOCK_BYTES, 100), keys, 0)
}

#[test]
fn each_peer_s_blocks_are_counted_and_all_places_together() {
    let mut scene = Scene::with(A, 0..100);
    scene.join(B, 0..3);
    scene.join(PeerNumber(3), 1..4);
    let places = score(&scene, 0..120);
    assert_eq!((places.memory, places.disk, places.found), (0, 0, 10_000));
    assert_eq!(places.peers, [(A, 10_000), (B, 300)]);
    scene.save(100..110);
    scene.engine.core.note_prefill(SCHEDULER, PrefillRate::new(1e6, 0.0));
    let places = score(&scene, 0..120);
    assert_eq!((places.memory, places.found), (0, 11_000), "a run may go on in another place");
    assert_eq!((places.peers[0], places.expected_ms), ((A, 10_000), None), "the peer's rate is unknown");
    assert!(scene.fetches.is_empty() && scene.is_quiet(), "nothing is brought");
    scene.hear(MeshEvent::Left(A));
    assert_eq!(score(&scene, 0..120).found, 400, "three of one peer and one of another");
}

#[test]
fn a_prompt_is_promised_up_to_the_last_key_that_a_peer_names() {
    let mut scene = Scene::with(A, 0..0);
    let promise = |scene: &mut Scene, lasts: &[u32]| {
        let promises = lasts.iter().map(|key| digest(*key)).collect();
        scene.hear(MeshEvent::Promises { peer: A, promises });
    };
    promise(&mut scene, &[98, 99]);
    let places = score(&scene, 0..120);
    assert_eq!((places.found, places.promised), (0, 10_000));
    assert_eq!(score(&scene, 0..50).promised, 0, "neither key is in this prompt");
    promise(&mut scene, &[]);
    assert_eq!(score(&scene, 0..120).promised, 0);
}

/// Peer A gives a block each `every_ms`, so many of them.
fn give(scene: &mut Scene, blocks: usize, every_ms: u64) {
    let fetch = scene.fetch();
    for index in 0..blocks {
        scene.engine.now_ms += every_ms;
        scene.end(&fetch, index..index + 1, Ok(1));
    }
}

#[test]
fn blocks_of_a_peer_are_expected_at_its_rate_or_computed_if_that_is_sooner() {
    for (every_ms, given, expected_ms) in [(40, 14, 40 * (2 + 20) + 500), (90, 10, 2_500)] {
        // The query's blocks, 64 MiB, keep the peer busy.
        let mut scene = judged_larger(16, 0..80);
        scene.query(1, 0..MOST);
        give(&mut scene, given, every_ms);
        let namespace = scene.engine.core.base.engines[SCHEDULER].binding().unwrap().digest;
        // 20 blocks and 5 tokens, each of 100 ms; the requested blocks of the query, 16, come before.
        let places = score_blocks(&scene.engine.core, namespace, (BLOCK_BYTES * 16, 1), 40..60, 5);
        assert_eq!((places.memory, places.found), (0, 20));
        let expected = places.expected_ms.unwrap();
        assert!((expected - f64::from(expected_ms)).abs() < 100.0, "{expected} in place of {expected_ms}");
    }
}
