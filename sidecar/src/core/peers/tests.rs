//! The rules of the mesh in the core, against the real tiers and the real directory. A list of actions, ended
//! by the test, stands for the transport.

mod absences;
mod early;
mod fruitless;
mod prefetch;
mod promises;
mod score;
mod standing;
mod states;
mod streams;
mod windows;
mod worth;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::time::Duration;

use mesh::directory::{DirectoryConfig, Filter};
use mesh::transport::{Fetch, FetchDone, FetchFault, FetchStage, Label, PeerNumber, Refusal};
use shm_protocol::key::{BlockKey, NamespaceDigest};
use shm_protocol::message::Status;
use shm_protocol::pool::SlotRef;
use shm_protocol::request::{LogKeys, Query, SchedulerRequest};
use shm_protocol::source::Source;
use tiers::dram::{self, BlockAccount, Dram};

use super::*;
use crate::core::namespaces::Space;
use crate::core::tests::{Harness, NAMESPACE, RANKS, SCHEDULER, asked, hash, taken};
use crate::core::{Core, CoreEvent, JobEnd, MeshEvent, RingRequest, TierJob, Timed, TimedPart, arrivals};

/// Seven blocks to a segment of the pool.
const BLOCK_BYTES: u64 = 256 << 10;
const POOL_SEGMENT: u64 = 2 << 20;
const POOL_SEGMENTS: u64 = 16;
const POOL_BLOCKS: u32 = 7 * POOL_SEGMENTS as u32;
/// Blocks on their way at once: a quarter of the pool.
const MOST: u32 = (POOL_SEGMENT * POOL_SEGMENTS / arrivals::PART / BLOCK_BYTES) as u32;

const A: PeerNumber = PeerNumber(1);
const B: PeerNumber = PeerNumber(2);

/// An engine over a pool without disks, in a mesh.
struct Scene {
    engine: Harness,
    fetches: VecDeque<Fetch>,
    cancelled: Vec<u64>,
    granted: BTreeMap<u64, Vec<Option<SlotRef>>>,
    published: Vec<DigestChange>,
    /// The last keys of the promised prompts, one list for each publication.
    promised: Vec<Vec<Digest>>,
    op: u64,
}

fn digest(key: u32) -> Digest {
    Digest::new(&NAMESPACE, 0, &hash(key))
}

fn label(key: u32) -> Label {
    Label { namespace: NAMESPACE, group: 0, hash: hash(key), bytes: BLOCK_BYTES as u32 }
}

impl Scene {
    fn new() -> Self {
        Self::waiting(None)
    }

    /// An engine with this wait of its requests for a producer.
    fn waiting(miss_wait_ms: Option<u32>) -> Self {
        Self::over(POOL_SEGMENT, miss_wait_ms)
    }

    /// The same over a pool with segments of another size.
    fn over(segment_bytes: u64, miss_wait_ms: Option<u32>) -> Self {
        let pool_bytes = segment_bytes * POOL_SEGMENTS;
        let config = dram::DramConfig { pool_bytes, segment_bytes, lease_ttl_ms: 10_000 };
        let peers = peer_tier(Directory::new(DirectoryConfig::default()));
        let core = Core::new(Dram::new(config).unwrap(), &[], [peers]);
        let mut engine = Harness::waiting(core, 1, BLOCK_BYTES, miss_wait_ms);
        engine.join();
        let (fetches, cancelled, granted, published, promised) = Default::default();
        Self { engine, fetches, cancelled, granted, published, promised, op: 0 }
    }

    /// The same with a peer keeping these blocks.
    fn with(peer: PeerNumber, keys: Range<u32>) -> Self {
        let mut scene = Self::new();
        scene.join(peer, keys);
        scene
    }

    /// Peer A announces these new blocks.
    fn produce(&mut self, keys: Range<u32>) {
        let changes = keys.map(|key| DigestChange::Added(digest(key))).collect();
        self.hear(MeshEvent::Changed { peer: A, changes });
    }

    fn join(&mut self, peer: PeerNumber, keys: Range<u32>) {
        self.hear(MeshEvent::Joined(peer));
        let mut filter = Filter::with_capacity(1000);
        keys.for_each(|key| assert!(filter.insert(digest(key))));
        self.hear(MeshEvent::Keeps { peer, filter });
    }

    fn hear(&mut self, event: MeshEvent) {
        self.event(CoreEvent::Mesh(event));
    }

    fn event(&mut self, event: CoreEvent) {
        self.engine.event(event);
        self.take_actions();
    }

    fn take_actions(&mut self) {
        for action in std::mem::take(&mut self.engine.out) {
            match action {
                Action::Transfer { job: TierJob::Fetch(fetch), .. } => self.fetches.push_back(fetch),
                Action::Transfer { job: TierJob::CancelFetch { ticket }, .. } => self.cancelled.push(ticket),
                Action::Grant { ask, slots } => drop(self.granted.insert(ask, slots)),
                Action::Publish { changes, .. } => self.published.extend(changes),
                Action::Promise(promises) => self.promised.push(promises),
                other => self.engine.out.push(other),
            }
        }
    }

    fn ask(&mut self, request: SchedulerRequest) {
        self.event(asked(request));
    }

    fn next_op(&mut self) -> u64 {
        self.op += 1;
        self.op
    }

    /// Saves `keys` under a log, and closes it.
    fn save(&mut self, keys: Range<u32>) {
        let op = self.next_op();
        self.engine.save_done(op, keys);
        self.take_actions();
        self.engine.copied();
        self.take_actions();
        self.ask(SchedulerRequest::Close { log: 9, way: 0 });
        self.engine.out.clear();
    }

    fn query(&mut self, log: u32, keys: Range<u32>) -> u64 {
        self.engine.open(log, keys.clone());
        self.query_again(log, keys.len() as u32)
    }

    fn query_again(&mut self, log: u32, count: u32) -> u64 {
        let op = self.next_op();
        let query = Query::new(op, LogKeys::new(log, 0..count));
        self.ask(SchedulerRequest::Query(query));
        op
    }

    /// Answers since the last look, each with its operation.
    fn answers(&mut self) -> Vec<(u64, Status, u32)> {
        let answers = self.engine.take(taken!(
            Action::Answer { op, outcome, .. } | Action::Outcome { op, outcome, .. } => (op, outcome.status, outcome.value)
        ));
        answers.collect()
    }

    /// The only fetch there is.
    fn fetch(&mut self) -> Fetch {
        let fetch = self.fetches.pop_front().expect("a fetch");
        assert!(self.fetches.is_empty(), "one fetch");
        fetch
    }

    /// Ends these blocks of a fetch.
    fn end(&mut self, fetch: &Fetch, indexes: Range<usize>, result: Result<u64, FetchFault>) {
        let end = |index| JobEnd::Peer(FetchDone { ticket: fetch.ticket, index: index as u32, result });
        self.event(CoreEvent::Transferred { tier: 0, ends: indexes.map(end).collect() });
    }

    fn end_all(&mut self, fetch: &Fetch, result: Result<u64, FetchFault>) {
        self.end(fetch, 0..fetch.blocks.len(), result);
    }

    fn tick(&mut self, ms: u64) {
        self.engine.now_ms += ms;
        self.event(CoreEvent::Tick);
    }

    fn held_bytes(&self) -> u64 {
        self.engine.core.base.cx.dram.stats().bytes_leased
    }

    fn stats(&self) -> PeersStats {
        self.engine.core.peers_stats().unwrap()
    }

    fn assert_quiet_once_closed(&mut self) {
        self.ask(SchedulerRequest::Close { log: 1, way: 0 });
        assert!(self.is_quiet());
    }

    /// Nothing is on its way, held or being filled.
    fn is_quiet(&self) -> bool {
        let tier = self.engine.core.base.cx.dram.stats();
        !self.engine.core.busy() && tier.filling == 0 && tier.bytes_leased == 0
    }
}

/// A query of log 1 waits for `count` blocks, and the peer is asked for them.
fn fetching(count: u32) -> (Scene, u64, Fetch) {
    let mut scene = Scene::with(A, 0..count);
    let op = scene.query(1, 0..count);
    let fetch = scene.fetch();
    assert_eq!(scene.answers(), [(op, Status::Pending, 0)]);
    (scene, op, fetch)
}

fn keys_of(fetch: &Fetch) -> Vec<Label> {
    fetch.blocks.iter().map(|(label, _)| *label).collect()
}

#[test]
fn a_query_waits_for_what_a_peer_has_and_its_checksums_go_into_the_headers() {
    let mut scene = Scene::with(A, 0..4);
    scene.save(0..2);
    let op = scene.query(1, 0..6);
    assert_eq!(scene.answers(), [(op, Status::Pending, 2)]);
    let fetch = scene.fetch();
    assert_eq!((fetch.peer, keys_of(&fetch)), (A, vec![label(2), label(3)]));
    assert_eq!(fetch.deadline.as_millis(), 2000);
    assert!(scene.engine.core.busy());
    scene.end(&fetch, 1..2, Ok(77));
    let committed = |action: &Action| matches!(action, Action::CommitSlot { checksum: 77, .. });
    assert!(scene.engine.out.iter().any(committed));
    assert!(scene.answers().is_empty());
    scene.end(&fetch, 0..1, Ok(78));
    assert_eq!(scene.answers(), [(op, Status::Ok, 4)]);
    scene.ask(SchedulerRequest::Close { log: 1, way: 0 });
    let stats = scene.stats();
    assert_eq!((stats.fetched_blocks, stats.fetched_bytes), (2, 2 * BLOCK_BYTES));
    assert!(scene.is_quiet());
}

#[test]
fn a_block_of_a_peer_was_asked_for_with_the_question() {
    let (mut scene, _, fetch) = fetching(2);
    let since = scene.engine.now_ms;
    scene.engine.now_ms += 5;
    scene.end(&fetch, 0..1, Err(FetchFault::Absent));
    assert_eq!(scene.engine.took(), [], "it did not come");
    scene.end(&fetch, 1..2, Ok(7));
    let (tier, whole) = (Timed::Query(TimedPart::Tier), Timed::Query(TimedPart::Whole));
    assert_eq!(scene.engine.took(), [(Timed::Read(Source::Peer), since), (tier, since), (whole, since)]);
}

#[test]
fn what_a_peer_sent_was_found_there() {
    let mut scene = Scene::with(A, 0..3);
    scene.save(0..1);
    scene.query(1, 0..3);
    let fetch = scene.fetch();
    scene.engine.out.clear();
    scene.end_all(&fetch, Ok(7));
    let answer = scene.engine.out.iter().find_map(|action| match action {
        Action::Answer { from, sources, .. } => Some((*from, sources.clone())),
        _ => None,
    });
    assert_eq!(answer, Some((1, vec![Source::Peer; 2])), "block 0 was named before");
}

#[test]
fn nobody_is_asked_for_what_no_peer_has() {
    let mut scene = Scene::with(A, 0..4);
    let op = scene.query(1, 10..14);
    assert_eq!(scene.answers(), [(op, Status::Ok, 0)]);
    scene.hear(MeshEvent::Left(A));
    let op = scene.query(2, 0..4);
    assert_eq!(scene.answers(), [(op, Status::Ok, 0)]);
    assert!(scene.fetches.is_empty() && scene.is_quiet());
}

#[test]
fn a_run_goes_on_with_whoever_has_the_next_part_and_around_what_is_here() {
    let mut scene = Scene::with(A, 0..3);
    scene.join(B, 5..8);
    scene.save(3..5);
    let op = scene.query(1, 0..9);
    let fetches: Vec<Fetch> = scene.fetches.drain(..).collect();
    let asked: Vec<_> = fetches.iter().map(|fetch| (fetch.peer, fetch.blocks.len())).collect();
    assert_eq!(asked, [(A, 3), (B, 3)]);
    assert_eq!(scene.held_bytes(), 2 * BLOCK_BYTES, "those between stay");
    fetches.iter().for_each(|fetch| scene.end_all(fetch, Ok(1)));
    assert_eq!(scene.answers().last(), Some(&(op, Status::Ok, 8)));
}

#[test]
fn a_long_run_is_spread_over_those_who_have_it() {
    let mut scene = Scene::with(A, 0..MOST);
    scene.join(B, 0..MOST / 4);
    scene.query(1, 0..MOST);
    let parts: BTreeMap<PeerNumber, Vec<Label>> =
        scene.fetches.iter().map(|fetch| (fetch.peer, keys_of(fetch))).collect();
    let part = |keys: Range<u32>| keys.map(label).collect::<Vec<_>>();
    assert_eq!(parts[&B], part(0..MOST / 4), "the shorter run is the begin");
    assert_eq!(parts[&A], part(MOST / 4..MOST));

    let mut scene = Scene::with(A, 0..MOST);
    scene.join(B, 0..MOST);
    scene.query(1, 0..MOST);
    let mut counts: Vec<_> = scene.fetches.iter().map(|fetch| fetch.blocks.len() as u32).collect();
    counts.sort_unstable();
    assert_eq!(counts.iter().sum::<u32>(), MOST);
    assert!(counts.len() == 2 && counts[1] - counts[0] <= 1, "{counts:?}");
}

#[test]
fn what_one_peer_fails_to_give_is_asked_of_another_together() {
    let mut scene = Scene::with(A, 0..4);
    scene.query(1, 0..4);
    let first = scene.fetch();
    scene.join(B, 0..4);
    scene.engine.now_ms += 500;
    scene.end(&first, 0..1, Ok(1));
    scene.end(&first, 1..4, Err(FetchFault::Peer(std::io::ErrorKind::ConnectionReset)));
    let second = scene.fetch();
    assert_eq!((second.peer, keys_of(&second)), (B, vec![label(1), label(2), label(3)]));
    assert_eq!(second.blocks, first.blocks[1..], "into the same slots");
    assert_eq!(second.deadline.as_millis(), 1500, "no later than the first");
    scene.answers();
    scene.end(&second, 0..2, Ok(1));
    scene.end(&second, 2..3, Err(FetchFault::Corrupt));
    assert!(scene.fetches.is_empty(), "both were asked");
    assert_eq!(scene.answers().last().map(|answer| (answer.1, answer.2)), Some((Status::Ok, 3)));
    let stats = scene.stats();
    assert_eq!((stats.retried_blocks, stats.faults[1], stats.faults[4]), (3, 1, 3));
}

#[test]
fn what_a_fetch_lacks_is_looked_for_as_often_as_a_run() {
    let (mut scene, _, first) = fetching(8);
    // Each peer has one block, and no other peer has the fourth one.
    for (peer, key) in (2..).zip([0, 1, 2, 4, 5]) {
        scene.join(PeerNumber(peer), key..key + 1);
    }
    scene.end_all(&first, Err(FetchFault::Peer(std::io::ErrorKind::ConnectionReset)));
    let asked: Vec<_> = scene.fetches.drain(..).map(|fetch| (fetch.peer.0, keys_of(&fetch))).collect();
    assert_eq!(asked, [(2, vec![label(0)]), (3, vec![label(1)]), (4, vec![label(2)])]);

    let (mut scene, _, first) = fetching(8);
    scene.join(B, 0..6);
    let end =
        |index| JobEnd::Peer(FetchDone { ticket: first.ticket, index, result: Err(FetchFault::Absent) });
    scene.event(CoreEvent::Transferred { tier: 0, ends: (0..8).rev().map(end).collect() });
    assert_eq!(keys_of(&scene.fetch()), (0..6).map(label).collect::<Vec<_>>(), "in any order of ends");

    let (mut scene, _, first) = fetching(8);
    (0..8).for_each(|key| scene.join(PeerNumber(2 + key), key..key + 1));
    scene.end_all(&first, Err(FetchFault::Peer(std::io::ErrorKind::ConnectionReset)));
    assert_eq!(scene.fetches.len(), fetches::SPANS_MAX);
}

#[test]
fn a_false_positive_is_a_miss() {
    let (mut scene, op, fetch) = fetching(4);
    scene.end(&fetch, 0..2, Ok(1));
    scene.end(&fetch, 2..4, Err(FetchFault::Absent));
    assert_eq!(scene.answers(), [(op, Status::Ok, 2)]);
    scene.ask(SchedulerRequest::Close { log: 1, way: 0 });
    assert_eq!((scene.stats().faults[0], scene.is_quiet()), (2, true));
}

#[test]
fn a_peer_that_fails_is_left_alone() {
    let mut scene = Scene::with(A, 0..4);
    for round in 0..3 {
        scene.query(round, 0..4);
        let fetch = scene.fetch();
        scene.end_all(&fetch, Err(FetchFault::Timeout(FetchStage::Connect)));
        scene.tick(100);
    }
    scene.answers();
    let op = scene.query(3, 0..4);
    assert_eq!(scene.answers(), [(op, Status::Ok, 0)], "no query waits for it");
    assert!(scene.fetches.is_empty() && scene.stats().peers[0].breaker_open);
    scene.tick(2000);
    scene.query(4, 0..4);
    let fetch = scene.fetch();
    scene.end_all(&fetch, Ok(1));
    assert!(!scene.stats().peers[0].breaker_open, "a trial that went well");
}

/// Ends 9 of the 10 blocks of a fetch well, one each 200 ms: its peer gives blocks all the time. The last one
/// is late.
fn end_late(scene: &mut Scene, fetch: &Fetch) {
    for block in 0..9 {
        scene.tick(200);
        scene.end(fetch, block..block + 1, Ok(1));
    }
    scene.tick(200);
    scene.end(fetch, 9..10, Err(FetchFault::Timeout(FetchStage::Whole)));
}

/// Peers with these blocks give them at once.
fn give(scene: &mut Scene, keys: Range<u32>) {
    let before = scene.fetches.len();
    scene.query(99, keys);
    for fetch in scene.fetches.split_off(before) {
        scene.end_all(&fetch, Ok(1));
    }
    scene.ask(SchedulerRequest::Close { log: 99, way: 0 });
}

/// Returns how often peer A was left alone after three late fetches from it. `before` and `meanwhile` act
/// before and during each fetch; their key is the first one of blocks for them to fetch. 30 other peers have
/// 10 blocks each, from 1000 on.
fn trips_of_late_fetches(before: impl Fn(&mut Scene, u32), meanwhile: impl Fn(&mut Scene, u32)) -> u64 {
    let mut scene = Scene::with(A, 0..900);
    (0..30).for_each(|other| scene.join(PeerNumber(2 + other), 1000 + 10 * other..1010 + 10 * other));
    for round in 0..3 {
        let first = 300 * round;
        before(&mut scene, first + 10);
        scene.tick(1);
        scene.query(round, first..first + 10);
        let late = scene.fetches.pop_back().expect("it is asked");
        meanwhile(&mut scene, first + 10);
        end_late(&mut scene, &late);
        for fetch in std::mem::take(&mut scene.fetches) {
            scene.end_all(&fetch, Err(FetchFault::Absent));
        }
    }
    scene.stats().peers[0].trips_total
}

#[test]
fn a_peer_that_gives_this_node_little_is_left_alone() {
    let nothing = |_: &mut Scene, _| {};
    let is_asked = |scene: &mut Scene, key| _ = scene.query(100 + key, key..key + 1);
    let gives_64_mib = |scene: &mut Scene, key| {
        (key..key + 260).step_by(20).for_each(|key| give(scene, key..key + 20));
    };
    let others_give = |scene: &mut Scene, key| {
        (0..30).for_each(|other| give(scene, 1000 + 10 * other + key / 300..1001 + 10 * other + key / 300));
    };
    assert_eq!(trips_of_late_fetches(nothing, nothing), 1, "it gives 2.25 MiB");
    assert_eq!(trips_of_late_fetches(is_asked, nothing), 1, "it has another fetch before it");
    assert_eq!(trips_of_late_fetches(gives_64_mib, nothing), 1);
    assert_eq!(trips_of_late_fetches(nothing, gives_64_mib), 0);
    assert_eq!(trips_of_late_fetches(others_give, nothing), 1);
    assert_eq!(trips_of_late_fetches(nothing, others_give), 0, "they share the link");
}

#[test]
fn a_slow_peer_is_left_alone_for_longer_each_time_though_a_trial_begins_well() {
    let mut scene = Scene::with(A, 0..100);
    let mut wait_ms = |round: u32| {
        let since_ms = scene.engine.now_ms;
        scene.query(round, 10 * round..10 * round + 10);
        while scene.fetches.is_empty() {
            scene.tick(100);
            scene.query_again(round, 10);
        }
        let wait_ms = scene.engine.now_ms - since_ms;
        let fetch = scene.fetch();
        end_late(&mut scene, &fetch);
        wait_ms
    };
    let waits_ms: Vec<u64> = (0..10).map(&mut wait_ms).collect();
    assert_eq!(waits_ms, [0, 0, 0, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000]);
}

#[test]
fn who_is_asked_for_what_another_failed_to_give_has_too_little_time_to_be_too_slow() {
    let mut scene = Scene::with(A, 0..400);
    scene.join(B, 0..400);
    for round in 0..4 {
        scene.query(round, 100 * round..100 * round + 4);
        let first = scene.fetch();
        scene.tick(1900);
        scene.end_all(&first, Err(FetchFault::Absent));
        let second = scene.fetch();
        scene.end(&second, 0..3, Ok(1));
        scene.tick(100);
        scene.end(&second, 3..4, Err(FetchFault::Timeout(FetchStage::Whole)));
    }
    assert!(scene.stats().peers.iter().all(|peer| peer.trips_total == 0));
}

#[test]
fn a_peer_that_leaves_keeps_the_slots_until_their_end() {
    let (mut scene, op, fetch) = fetching(2);
    scene.hear(MeshEvent::Left(A));
    assert!(scene.answers().is_empty() && scene.engine.core.busy());
    scene.end_all(&fetch, Err(FetchFault::Stopped));
    assert_eq!(scene.answers(), [(op, Status::Ok, 0)]);
    scene.assert_quiet_once_closed();
}

#[test]
fn whoever_stops_waiting_leaves_the_blocks_in_dram_and_nobody_else_is_asked() {
    let release = |scene: &mut Scene| scene.ask(SchedulerRequest::Release { log: 1 });
    let salt = |scene: &mut Scene| scene.ask(SchedulerRequest::Salt { salt: [9; 16] });
    let hang_up = |scene: &mut Scene| scene.event(CoreEvent::Disconnected { session: SCHEDULER });
    let ways: [&dyn Fn(&mut Scene); 3] = [&release, &salt, &hang_up];
    for (way, stop) in ways.into_iter().enumerate() {
        let mut scene = Scene::with(A, 0..3);
        scene.query(1, 0..3);
        let fetch = scene.fetch();
        scene.join(B, 0..3);
        scene.answers();
        stop(&mut scene);
        scene.end(&fetch, 0..2, Ok(1));
        scene.end(&fetch, 2..3, Err(FetchFault::Short));
        assert!(scene.answers().is_empty() && scene.fetches.is_empty(), "{way}");
        assert!(scene.is_quiet(), "{way}");
        assert_eq!(scene.stats().fetched_blocks, 2, "{way}");
    }
}

#[test]
fn the_engine_is_answered_before_anything_is_sent_for() {
    let mut scene = Scene::with(A, 0..8);
    scene.engine.open(1, 0..8);
    scene.engine.out.clear();
    let query = Query::new(77, LogKeys::new(1, 0..8));
    let event = asked(SchedulerRequest::Query(query));
    let mut first = Vec::new();
    scene.engine.core.respond(Duration::ZERO, event, &mut first);
    assert!(matches!(&first[..], [Action::Answer { outcome, .. }] if outcome.status == Status::Pending));
    let mut rest = Vec::new();
    scene.engine.core.go_on(Duration::ZERO, &mut rest);
    assert!(rest.iter().any(
        |action| matches!(action, Action::Transfer { job: TierJob::Fetch(fetch), .. } if fetch.blocks.len() == 8)
    ));
}

#[test]
fn a_run_whose_first_block_nobody_has_is_answered_at_once() {
    let mut scene = Scene::with(A, 1..8);
    let op = scene.query(1, 0..8);
    assert_eq!(scene.answers(), [(op, Status::Ok, 0)]);
    assert!(scene.fetches.is_empty());
}

#[test]
fn time_ends_a_wait_and_not_its_fetch() {
    let (mut scene, op, fetch) = fetching(2);
    scene.end(&fetch, 0..1, Ok(1));
    scene.tick(2000);
    assert_eq!(scene.answers(), [(op, Status::Ok, 1)]);
    let op = scene.query_again(1, 2);
    assert_eq!(scene.answers(), [(op, Status::Ok, 1)], "a late block is not waited for");
    assert!(scene.engine.core.busy(), "the slot is the fetch's until its end");
    scene.end(&fetch, 1..2, Ok(1));
    let op = scene.query_again(1, 2);
    assert_eq!(scene.answers(), [(op, Status::Ok, 2)]);
}

#[test]
fn no_more_than_a_part_of_the_pool_is_on_its_way() {
    let mut scene = Scene::with(A, 0..POOL_BLOCKS);
    scene.engine.open(1, 0..POOL_BLOCKS);
    scene.ask(SchedulerRequest::Hint { keys: LogKeys::new(1, 0..POOL_BLOCKS) });
    assert_eq!(scene.fetches[0].blocks.len() as u32, MOST / 2, "a hint leaves room for others");
    scene.query_again(1, POOL_BLOCKS);
    let blocks: usize = scene.fetches.iter().map(|fetch| fetch.blocks.len()).sum();
    assert_eq!(blocks as u32, MOST);
}

#[test]
fn what_belongs_to_one_engine_alone_is_neither_asked_for_nor_told_of() {
    let mut scene = Scene::with(A, 0..4);
    scene.ask(SchedulerRequest::Salt { salt: [9; 16] });
    scene.published.clear();
    let op = scene.query(1, 0..4);
    assert_eq!(scene.answers(), [(op, Status::Ok, 0)]);
    scene.save(0..2);
    assert!(scene.fetches.is_empty() && scene.published.is_empty());
}

#[test]
fn peers_are_told_what_comes_and_goes() {
    let mut scene = Scene::new();
    scene.save(0..2);
    let mut published = std::mem::take(&mut scene.published);
    published.sort_unstable_by_key(|change| change.digest());
    let mut expected = [DigestChange::Added(digest(0)), DigestChange::Added(digest(1))];
    expected.sort_unstable_by_key(|change| change.digest());
    assert_eq!(published, expected);
    for from in (1000..1000 + 4 * POOL_BLOCKS).step_by(7) {
        scene.save(from..from + 7);
    }
    assert!(scene.published.contains(&DigestChange::Removed(digest(0))));
    let mut filter = Filter::with_capacity(8 * POOL_BLOCKS as usize);
    expected.iter().for_each(|change| assert!(filter.insert(change.digest())));
    for change in &scene.published {
        match change {
            DigestChange::Added(digest) => assert!(filter.insert(*digest)),
            DigestChange::Removed(digest) => assert!(filter.remove(*digest), "it was announced before"),
        }
    }
    assert_eq!(filter.len() as u64, scene.engine.core.stats().blocks, "no more and no less than is here");
}

#[test]
fn granted_slots_are_held_until_their_release() {
    let mut scene = Scene::new();
    scene.save(0..2);
    let longer = Label { bytes: BLOCK_BYTES as u32 + 1, ..label(1) };
    let foreign = Label { namespace: NamespaceDigest([2; 16]), ..label(1) };
    let blocks = vec![label(0), longer, foreign, label(5), label(1)];
    scene.hear(MeshEvent::Asked { ask: 7, peer: A, blocks, standing: None });
    let granted: Vec<bool> = scene.granted[&7].iter().map(Option::is_some).collect();
    assert_eq!(granted, [true, false, false, false, true]);
    assert_eq!((scene.held_bytes(), scene.engine.core.busy()), (2 * BLOCK_BYTES, true));
    for from in (1000..1000 + 8 * POOL_BLOCKS).step_by(7) {
        scene.save(from..from + 7);
    }
    assert_eq!(scene.stats().granted_bytes, 2 * BLOCK_BYTES, "granted blocks are not evicted");
    scene.hear(MeshEvent::Released { ask: 7, sent: 1 });
    assert!(scene.is_quiet());
    let stats = scene.stats();
    assert_eq!((stats.asked_blocks, stats.absent_blocks), (5, 3));
    assert_eq!((stats.served_blocks, stats.served_bytes), (1, BLOCK_BYTES));
}

#[test]
fn what_a_peer_was_sent_is_not_kept_for_another_engine_any_longer() {
    let mut scene = Scene::new();
    scene.save(0..2);
    let Context { namespaces, kept, dram, now_ms, .. } = &mut scene.engine.core.base.cx;
    let space = Space { digest: NAMESPACE, block_bytes: BLOCK_BYTES };
    let namespace = namespaces.known(space).unwrap();
    let computes = BlockAccount { holder: dram.enter_holder(), quota: None };
    let keys = [0, 1].map(|n| BlockKey { namespace, group: 0, hash: hash(n) });
    keys.iter().for_each(|key| kept.keep(key, computes, None, *now_ms, dram));
    scene.hear(MeshEvent::Asked { ask: 1, peer: A, blocks: vec![label(0), label(1)], standing: None });
    scene.hear(MeshEvent::Released { ask: 1, sent: 1 });
    let stats = scene.engine.core.stats();
    assert_eq!((stats.handover_kept_bytes, stats.handover_loaded), (BLOCK_BYTES, 1));
    assert_eq!(scene.held_bytes(), BLOCK_BYTES, "the other one is");
}

#[test]
fn peers_read_a_part_of_the_pool_at_once_and_each_leaves_as_much_to_the_others() {
    let mut scene = Scene::new();
    for from in (0..MOST + 7).step_by(7) {
        scene.save(from..from + 7);
    }
    let ask = |scene: &mut Scene, ask, peer, count| {
        scene.hear(MeshEvent::Asked { ask, peer, blocks: (0..count).map(label).collect(), standing: None });
        scene.granted[&ask].iter().flatten().count() as u32
    };
    assert_eq!(ask(&mut scene, 1, A, MOST), MOST / 2);
    assert_eq!(ask(&mut scene, 2, A, 1), 0, "in another ask neither");
    assert_eq!(ask(&mut scene, 3, B, MOST), MOST / 4);
    assert_eq!(scene.stats().withheld_blocks, u64::from(MOST / 2 + 1 + MOST / 4 * 3));
    for (number, left) in (0..).zip((1..=MOST / 4).rev()) {
        assert_eq!(ask(&mut scene, 10 + number, PeerNumber(10 + number as u32), 1), 1, "{left} are left");
    }
    assert_eq!(ask(&mut scene, 4, PeerNumber(99), 1), 0);
    scene.hear(MeshEvent::Released { ask: 1, sent: MOST / 2 });
    assert_eq!(ask(&mut scene, 5, A, 1), 1);
}

#[test]
fn a_draining_sidecar_lets_nobody_wait_and_gives_nothing_more() {
    let mut scene = Scene::with(A, 0..2);
    scene.save(10..11);
    scene.hear(MeshEvent::Asked { ask: 1, peer: A, blocks: vec![label(10)], standing: None });
    let op = scene.query(1, 0..2);
    let fetch = scene.fetch();
    scene.join(B, 0..2);
    scene.answers();
    scene.event(CoreEvent::Drain);
    assert_eq!(scene.answers(), [(op, Status::Ok, 0)]);
    assert_eq!(scene.cancelled, [fetch.ticket]);
    scene.hear(MeshEvent::Asked { ask: 2, peer: A, blocks: vec![label(10)], standing: None });
    assert_eq!(scene.granted[&2], [None]);
    scene.hear(MeshEvent::Released { ask: 2, sent: 0 });
    scene.end_all(&fetch, Err(FetchFault::Stopped));
    assert!(scene.fetches.is_empty() && scene.engine.core.busy(), "a peer reads");
    scene.hear(MeshEvent::Released { ask: 1, sent: 1 });
    assert!(scene.is_quiet());
}

#[test]
fn a_filter_without_room_is_asked_for_anew_once() {
    let mut scene = Scene::with(A, 0..4);
    let changes: Vec<DigestChange> = (100..4000).map(|key| DigestChange::Added(digest(key))).collect();
    let resyncs = |scene: &mut Scene| {
        let out = std::mem::take(&mut scene.engine.out);
        out.iter().filter(|action| **action == Action::Resync { peer: A }).count()
    };
    scene.hear(MeshEvent::Changed { peer: A, changes: changes.clone() });
    assert_eq!(resyncs(&mut scene), 1);
    scene.hear(MeshEvent::Changed { peer: A, changes });
    assert_eq!(resyncs(&mut scene), 0);
    scene.hear(MeshEvent::Changed { peer: B, changes: vec![DigestChange::Added(digest(1))] });
    assert_eq!(scene.stats().peers.len(), 1, "only members are believed");
}

#[test]
fn a_peer_that_refuses_costs_nothing_but_the_miss() {
    let (mut scene, op, fetch) = fetching(2);
    scene.end_all(&fetch, Err(FetchFault::Refused(Refusal::Busy)));
    assert_eq!(scene.answers(), [(op, Status::Ok, 0)]);
    assert!(!scene.stats().peers[0].breaker_open);
}
