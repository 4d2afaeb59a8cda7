//! Blocks of earlier lives, each found once it is verified.

use shm_protocol::pool::SlotRemains;

use super::*;

/// Only two of them are verified without a request at once, and three fill a segment.
const BLOCK_BYTES: u64 = 8 << 20;
const SEGMENT: u64 = 32 << 20;
const BLOCKS: u32 = 9;

/// An engine over a pool with keys `0..BLOCKS` of an earlier life.
fn adopted() -> Harness {
    let config = DramConfig { pool_bytes: 4 * SEGMENT, segment_bytes: SEGMENT, lease_ttl_ms: 1000 };
    let mut core = Core::new(Dram::unopened(config, 50).unwrap(), &[], []);
    for segment in 0..BLOCKS / 3 {
        let block =
            |n| SlotRemains::Block { generation: 1, namespace: NAMESPACE, group: GROUP, hash: hash(n) };
        let remains = (segment * 3..segment * 3 + 3).map(block).collect();
        let opened =
            OpenedSegment::Used { segment: segment.into(), block_bytes: BLOCK_BYTES, first: 0, remains };
        core.handle(Duration::ZERO, CoreEvent::Opened(opened), &mut Vec::new());
    }
    // The verification of the first two was begun before any look at the actions.
    let (first, second) = (verification(&core, 0), verification(&core, 1));
    let mut engine = Harness::over(core, 1, BLOCK_BYTES);
    engine.join();
    engine.out = vec![first, second];
    engine
}

/// The comparison of key `n`, the `n`th slot of all.
fn verification(core: &Core, n: u32) -> Action {
    let geometry = shm_protocol::pool::Geometry::new(SEGMENT, BLOCK_BYTES).unwrap();
    let offset = geometry.offset(u64::from(n / 3), n % 3).unwrap();
    let namespace =
        core.base.cx.namespaces.known(namespaces::Space { digest: NAMESPACE, block_bytes: BLOCK_BYTES });
    let key = BlockKey { namespace: namespace.unwrap(), group: GROUP, hash: hash(n) };
    Action::Verify { key, slot: SlotRef { offset, generation: 1 } }
}

impl Harness {
    fn verified(&mut self, n: u32, whole: bool) {
        let Action::Verify { key, slot } = verification(&self.core, n) else { unreachable!("no other") };
        self.event(CoreEvent::Verified { key, slot, whole });
    }

    /// Asserts: the comparisons begun since the last look are those of keys `expected`.
    fn assert_begun(&mut self, expected: &[u32]) {
        let begun: Vec<Action> =
            self.out.extract_if(.., |action| matches!(action, Action::Verify { .. })).collect();
        let expected: Vec<Action> = expected.iter().map(|n| verification(&self.core, *n)).collect();
        assert_eq!(begun, expected);
    }

    /// The last answer since the last look.
    fn answer(&mut self) -> Option<(Status, u32)> {
        self.take(taken!(Action::Answer { outcome, .. } => (outcome.status, outcome.value))).last()
    }

    fn ask_for(&mut self, op: u64, count: u32) {
        self.ask(SchedulerRequest::Query(Query::new(op, LogKeys::new(0, 0..count))));
    }
}

#[test]
fn blocks_that_are_asked_for_are_verified_first_and_their_query_waits() {
    let mut engine = adopted();
    engine.assert_begun(&[0, 1]);
    engine.open(0, 5..8);
    engine.ask_for(1, 3);
    engine.assert_begun(&[5, 6, 7]);
    assert_eq!(engine.answer(), Some((Status::Pending, 0)));
    engine.verified(0, true);
    engine.verified(5, true);
    engine.verified(6, true);
    assert_eq!(engine.answer(), None, "one is still looked at");
    engine.verified(7, false);
    let said = |action: &Action| matches!(action, Action::Warn(text) if text.contains("adoption_corrupt"));
    assert!(engine.out.iter().any(said));
    engine.assert_begun(&[2]);
    assert_eq!(engine.answer(), Some((Status::Ok, 2)), "a changed block is a miss");
    engine.verified(1, false);
    engine.verified(2, true);
    assert!(engine.out.iter().all(|action| !matches!(action, Action::Warn(_))), "logged once");
    engine.assert_begun(&[3, 4]);
    engine.verified(3, true);
    engine.verified(4, true);
    engine.verified(8, true);
    let stats = engine.core.stats();
    assert_eq!((stats.adopted_blocks, stats.adoption_corrupt, stats.unverified_blocks), (7, 2, 0));
    assert_eq!((stats.blocks, engine.core.busy()), (7, false));
    engine.event(CoreEvent::Tick);
    engine.now_ms = 50;
    engine.out.clear();
    engine.event(CoreEvent::Tick);
    let freed = engine.out.iter().filter(|action| matches!(action, Action::FreeSlot { .. })).count();
    assert_eq!(freed, 2, "once no engine of the earlier life can read them");
}

#[test]
fn a_query_waits_no_longer_for_a_block_that_is_verified_than_for_one_of_a_disk() {
    let mut engine = adopted();
    engine.open(0, 0..3);
    engine.ask_for(1, 3);
    engine.verified(0, true);
    engine.now_ms = arrivals::WAIT_MS_MAX - 1;
    engine.event(CoreEvent::Tick);
    assert_eq!(engine.answer(), Some((Status::Pending, 0)));
    engine.now_ms += 1;
    engine.event(CoreEvent::Tick);
    assert_eq!(engine.answer(), Some((Status::Ok, 1)));
    engine.verified(1, true);
    engine.verified(2, true);
    engine.out.clear();
    engine.ask_for(2, 3);
    assert_eq!(engine.answer(), Some((Status::Ok, 3)));
}

#[test]
fn a_key_that_is_asked_for_twice_is_verified_once() {
    let mut engine = adopted();
    engine.assert_begun(&[0, 1]);
    engine.ask(SchedulerRequest::Open { log: 0 });
    let append =
        Append { keys: LogKeys::new(0, 0..3), chunks: [0; APPEND_CHUNKS], promised: false, tail: false };
    engine.append(append, [5, 5, 6].map(hash).to_vec());
    engine.ask_for(1, 3);
    engine.assert_begun(&[5, 6]);
    engine.verified(5, true);
    engine.verified(6, true);
    assert_eq!(engine.answer(), Some((Status::Ok, 3)));
}

#[test]
fn a_hint_has_blocks_verified_before_their_turn() {
    let mut engine = adopted();
    engine.open(0, 7..9);
    engine.assert_begun(&[0, 1]);
    engine.ask(SchedulerRequest::Hint { keys: LogKeys { log: 0, from: 0, count: 2 } });
    engine.assert_begun(&[7, 8]);
}

#[test]
fn no_engine_learns_a_slot_before_its_block_is_verified() {
    let mut engine = adopted();
    engine.open(0, 5..8);
    let keys = LogKeys::new(0, 0..3);
    engine.ask(SchedulerRequest::Query(Query { arriving: true, ..Query::new(1, keys) }));
    assert_eq!(engine.answer(), Some((Status::Pending, 0)));
    engine.verified(5, true);
    assert_eq!(engine.answer(), None, "a rank reads any slot with the header of a whole block");
    engine.verified(6, true);
    engine.verified(7, false);
    assert_eq!(engine.answer(), Some((Status::Ok, 2)));
}
