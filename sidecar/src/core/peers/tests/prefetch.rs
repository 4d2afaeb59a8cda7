//! Blocks fetched before a request asks for them, and lists of blocks for peers.

use mesh::listed::{BlocksAsk, ListedBlock};

use super::worth::{judged, play};
use super::*;
use crate::core::{BestBlocks, PrefetchReason, PrefetchStats};

/// Blocks of a batch.
const BATCH: u32 = 16;
const ASK: BlocksAsk = BlocksAsk { namespace: NAMESPACE, block_bytes: BLOCK_BYTES, blocks: 1000 };

/// Chained blocks with these expected uses.
fn listed(keys: Range<u32>, uses: f32) -> Vec<ListedBlock> {
    let parent = |place: u32| place.checked_sub(1);
    let block = |(place, key)| ListedBlock { hash: hash(key), parent: parent(place), uses };
    (0..).zip(keys).map(block).collect()
}

impl Scene {
    fn greet(&mut self, peer: PeerNumber) {
        self.hear(MeshEvent::Greeted { peer, keeps_asks: false, lists_blocks: true });
    }

    /// The questions for lists since the last look.
    fn list_asks(&mut self) -> Vec<(PeerNumber, BlocksAsk)> {
        self.engine.take(taken!(Action::AskBlocks { peer, ask } => (peer, ask))).collect()
    }

    /// Lists the best blocks here for a peer.
    fn best_blocks(&mut self, asker: Option<PeerNumber>, ask: BlocksAsk) -> Vec<ListedBlock> {
        let mut list = Box::new(BestBlocks::new(asker, ask));
        loop {
            match self.engine.core.list_blocks(list) {
                Ok(listed) => return listed,
                Err(more) => list = more,
            }
        }
    }

    fn prefetched(&self) -> PrefetchStats {
        self.stats().prefetched
    }

    fn keeps(&self, keys: Range<u32>) -> usize {
        let namespace = self.engine.core.base.engines[SCHEDULER].binding().expect("it is bound").namespace;
        let hashes: Vec<_> = keys.map(hash).collect();
        let mut found = Vec::new();
        self.engine.core.base.cx.dram.lookup(namespace, &hashes, &mut found);
        found.iter().filter(|found| **found).count()
    }
}

/// A scene with peer A, whose list of these blocks has come.
fn given(keys: Range<u32>) -> Scene {
    let mut scene = Scene::with(A, keys.clone());
    scene.greet(A);
    scene.tick(100);
    let asks = scene.list_asks();
    assert_eq!(asks, [(A, BlocksAsk { blocks: POOL_BLOCKS, ..ASK })]);
    scene.hear(MeshEvent::Listed { peer: A, ask: asks[0].1, blocks: listed(keys, 1.0) });
    scene
}

#[test]
fn a_started_pod_fetches_the_best_blocks_of_a_peer_in_batches() {
    let mut scene = given(0..40);
    let mut came = 0;
    for count in [BATCH, BATCH, 8] {
        let fetch = scene.fetch();
        assert_eq!(keys_of(&fetch), (came..came + count).map(label).collect::<Vec<_>>());
        scene.end_all(&fetch, Ok(1));
        came += count;
    }
    assert!(scene.fetches.is_empty() && scene.is_quiet());
    assert_eq!(scene.keeps(0..40), 40);
    scene.tick(100);
    assert_eq!(scene.list_asks(), [], "the list was shorter than asked for: it had all of the peer's blocks");
    assert_eq!(scene.prefetched(), PrefetchStats { lists: 1, came: [40, 0], ..PrefetchStats::default() });
    let op = scene.query(1, 0..40);
    assert_eq!(scene.answers(), [(op, Status::Ok, 40)]);
    assert_eq!(scene.prefetched().used, 40);
}

#[test]
fn an_older_peer_is_not_asked_and_no_list_comes_without_a_question() {
    let mut scene = Scene::with(A, 0..40);
    scene.hear(MeshEvent::Greeted { peer: A, keeps_asks: true, lists_blocks: false });
    scene.hear(MeshEvent::Leaving(A));
    scene.tick(100);
    assert_eq!(scene.list_asks(), []);
    scene.hear(MeshEvent::Listed { peer: A, ask: ASK, blocks: listed(0..40, 1.0) });
    scene.tick(100);
    assert!(scene.fetches.is_empty());
}

#[test]
fn a_pod_that_has_served_for_a_minute_asks_no_new_peer() {
    let mut scene = Scene::with(A, 0..40);
    scene.greet(A);
    scene.tick(100);
    assert_eq!(scene.list_asks().len(), 1);
    scene.tick(60_000);
    scene.join(B, 0..40);
    scene.greet(B);
    scene.tick(100);
    assert_eq!(scene.list_asks(), []);
}

#[test]
fn each_of_several_peers_has_an_equal_part_of_the_free_slots() {
    let mut scene = Scene::with(A, 0..40);
    scene.join(B, 0..40);
    [A, B].into_iter().for_each(|peer| scene.greet(peer));
    scene.save(1000..1012);
    scene.tick(100);
    let part = (POOL_BLOCKS - 12) / 2;
    let ask = BlocksAsk { blocks: part, ..ASK };
    assert_eq!(scene.list_asks(), [(A, ask), (B, ask)]);
    // A peer that lists more than it was asked for gives no more, and none later.
    scene.hear(MeshEvent::Listed { peer: A, ask, blocks: listed(0..500, 9.0) });
    let mut came = 0;
    while let Some(fetch) = scene.fetches.pop_front() {
        came += fetch.blocks.len() as u32;
        scene.end_all(&fetch, Ok(1));
    }
    assert_eq!(came, part);
    scene.tick(100);
    assert_eq!(scene.list_asks(), []);
}

#[test]
fn a_batch_waits_for_the_blocks_of_requests() {
    let mut scene = Scene::with(A, 0..60);
    scene.greet(A);
    scene.tick(100);
    let ask = scene.list_asks()[0].1;
    let op = scene.query(1, 50..54);
    let fetch = scene.fetch();
    scene.hear(MeshEvent::Listed { peer: A, ask, blocks: listed(0..40, 1.0) });
    scene.tick(100);
    assert!(scene.fetches.is_empty(), "a request's blocks are on their way");
    scene.answers();
    scene.end_all(&fetch, Ok(1));
    assert_eq!(scene.answers(), [(op, Status::Ok, 4)]);
    let batch = scene.fetch();
    assert_eq!(batch.blocks.len() as u32, BATCH);
    // A request for the batch's blocks waits for them, and asks for the others.
    let op = scene.query(2, 0..BATCH);
    assert!(scene.fetches.is_empty());
    scene.answers();
    scene.end_all(&batch, Ok(1));
    assert_eq!(scene.answers(), [(op, Status::Ok, BATCH)]);
}

#[test]
fn a_peer_is_not_judged_by_prefetches() {
    let mut scene = judged(0..80);
    scene.greet(A);
    scene.tick(100);
    let ask = scene.list_asks()[0].1;
    scene.hear(MeshEvent::Listed { peer: A, ask, blocks: listed(0..40, 1.0) });
    // At this rate a request's blocks would be computed sooner.
    for _ in 0..BATCH {
        scene.engine.now_ms += 200;
        let batch = scene.fetches[0].ticket;
        let index = scene.prefetched().came[0] as u32 % BATCH;
        let end = FetchDone { ticket: batch, index, result: Ok(1) };
        scene.event(CoreEvent::Transferred { tier: 0, ends: vec![JobEnd::Peer(end)] });
    }
    assert_eq!(scene.prefetched().came, [BATCH.into(), 0]);
    scene.fetches.pop_front();
    let op = scene.query(1, 40..80);
    let (_, hits) = play(&mut scene, op, 10);
    assert_eq!(hits, 40);
}

#[test]
fn a_list_ends_with_a_batch_that_brings_nothing_and_with_its_peer() {
    let mut scene = given(0..100);
    let fetch = scene.fetch();
    scene.end(&fetch, 0..1, Ok(1));
    scene.end(&fetch, 1..16, Err(FetchFault::Absent));
    let fetch = scene.fetch();
    scene.end_all(&fetch, Err(FetchFault::Absent));
    scene.tick(100);
    assert!(scene.fetches.is_empty() && scene.is_quiet());

    let mut scene = given(0..100);
    let fetch = scene.fetch();
    scene.hear(MeshEvent::Left(A));
    scene.end_all(&fetch, Err(FetchFault::Stopped));
    scene.tick(100);
    assert!(scene.fetches.is_empty() && scene.is_quiet());
}

#[test]
fn after_a_start_nothing_is_evicted_for_a_prefetch() {
    let mut scene = given(0..POOL_BLOCKS);
    for first in (500..500 + POOL_BLOCKS - 20).step_by(10) {
        scene.save(first..first + 10);
    }
    let here = scene.keeps(500..500 + POOL_BLOCKS);
    let mut came = 0;
    while let Some(fetch) = scene.fetches.pop_front() {
        came += fetch.blocks.len();
        scene.end_all(&fetch, Ok(1));
    }
    assert_eq!((scene.keeps(500..500 + POOL_BLOCKS), came + here), (here, POOL_BLOCKS as usize));
    // Saves evict them like any others: they were not used.
    for first in (1000..1000 + POOL_BLOCKS).step_by(8) {
        scene.save(first..first + 8);
    }
    let stats = scene.prefetched();
    assert!(stats.unused > 0 && stats.used == 0, "{stats:?}");
}

#[test]
fn a_block_of_a_leaving_peer_takes_the_place_of_one_worth_less() {
    for (uses, most) in [(9.0, POOL_BLOCKS / 2), (0.0, 0)] {
        let mut scene = Scene::with(A, 0..100);
        for first in (500..500 + POOL_BLOCKS).step_by(8) {
            scene.save(first..first + 8);
        }
        scene.greet(A);
        scene.hear(MeshEvent::Leaving(A));
        scene.tick(100);
        let asks = scene.list_asks();
        assert_eq!(asks, [(A, BlocksAsk { blocks: 64, ..ASK })], "half of the pool's bytes");
        scene.hear(MeshEvent::Listed { peer: A, ask: asks[0].1, blocks: listed(0..100, uses) });
        let mut came = 0;
        while let Some(fetch) = scene.fetches.pop_front() {
            came += fetch.blocks.len() as u32;
            scene.end_all(&fetch, Ok(1));
        }
        assert!(came >= most && (most > 0 || came == 0), "{came} blocks worth {uses}");
        assert_eq!(scene.prefetched().came[PrefetchReason::Leaving as usize], u64::from(came));
    }
}

#[test]
fn a_list_names_what_the_peer_lacks_from_the_root_of_each_chain() {
    let mut scene = Scene::with(A, 4..6);
    scene.save(0..6);
    let list = scene.best_blocks(Some(A), ASK);
    assert_eq!(list, listed(0..4, list[0].uses));
    assert_eq!(scene.best_blocks(Some(B), BlocksAsk { blocks: 3, ..ASK }).len(), 3);
    assert_eq!(scene.best_blocks(None, BlocksAsk { block_bytes: 1, ..ASK }), [], "blocks of another size");
    let other = NamespaceDigest([9; 16]);
    assert_eq!(scene.best_blocks(None, BlocksAsk { namespace: other, ..ASK }), []);
}

#[test]
fn a_leaving_sidecar_lists_each_unique_block_once_and_grants_it() {
    let mut scene = Scene::with(A, 4..6);
    scene.join(B, 0..0);
    scene.save(0..8);
    scene.event(CoreEvent::Drain);
    assert!(!scene.engine.core.begin_leaving(), "no peer would take a block");
    [A, B].into_iter().for_each(|peer| scene.greet(peer));
    assert!(scene.engine.core.begin_leaving());
    let hashes = |list: Vec<ListedBlock>| list.iter().map(|block| block.hash).collect::<Vec<_>>();
    let first = hashes(scene.best_blocks(Some(A), BlocksAsk { blocks: 4, ..ASK }));
    assert_eq!(first, [0, 1, 2, 3].map(hash));
    assert_eq!(hashes(scene.best_blocks(Some(B), ASK)), [6, 7].map(hash));
    assert_eq!(scene.best_blocks(Some(B), ASK), []);

    scene.engine.now_ms += 900;
    scene.hear(MeshEvent::Asked { ask: 1, peer: B, blocks: vec![label(6), label(7)], standing: None });
    assert!(scene.granted[&1].iter().all(Option::is_some));
    let at = |ms: u64| Duration::from_millis(ms);
    let now = scene.engine.now_ms;
    assert!(scene.engine.core.is_leaving(at(now + 5000)), "a peer reads");
    scene.hear(MeshEvent::Released { ask: 1, sent: 2 });
    assert!(scene.engine.core.is_leaving(at(now + 900)));
    assert!(!scene.engine.core.is_leaving(at(now + 1000)), "no peer does anything");
}

#[test]
fn unique_blocks_are_counted_with_the_computing_time_they_save() {
    let mut scene = super::worth::judged(0..2);
    scene.save(0..6);
    scene.tick(100);
    scene.tick(10_000);
    let counted = scene.engine.core.unique_blocks();
    assert_eq!((counted.unique, scene.stats().unique_blocks), (4, 4), "{counted:?}");
    // 100 ms a block, used at most once.
    assert!((0.0..=0.4).contains(&counted.value_seconds), "{counted:?}");
}
