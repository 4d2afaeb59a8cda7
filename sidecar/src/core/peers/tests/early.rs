//! Early answers to queries with blocks on their way, and the loads waiting for these blocks.

use shm_protocol::message::{LOAD_BY_ENGINE, LOAD_SYNC};
use shm_protocol::request::{LoadEnd, WorkerRequest};

use super::*;

/// Enough blocks for an early answer, even if some have come by then.
const KEYS: u32 = 16;
/// Blocks on their way worth an early answer: a sixteenth of the limit.
const WORTH: u32 = MOST / 16;

/// The ends of loads: operation and status of each outcome for the rank.
type Words = Vec<(u64, Status)>;
/// A way to end a wait, with its name.
type Leave<'a> = (&'a str, &'a dyn Fn(&mut Scene));

impl Scene {
    /// Ends the copies. Returns the operations of their loads, and the outcomes for the rank.
    fn loads(&mut self) -> (Vec<u64>, Words) {
        let (mut copies, mut words) = (Vec::new(), Vec::new());
        for action in std::mem::take(&mut self.engine.out) {
            match action {
                Action::Copy { copy, load_op, .. } => {
                    copies.push(load_op);
                    self.event(CoreEvent::Copied { copy, ok: true });
                }
                Action::Outcome { session, op, outcome } if session == RANKS[0] => {
                    words.push((op, outcome.status));
                }
                _ => {}
            }
        }
        words.extend(self.engine.take(taken!(Action::Outcome { op, outcome, .. } => (op, outcome.status))));
        (copies, words)
    }

    /// Puts a question with leave for an early answer.
    fn query_early(&mut self, log: u32, keys: Range<u32>) -> u64 {
        let (op, count) = (self.next_op(), keys.len() as u32);
        self.engine.open(log, keys);
        let query = Query { arriving: true, ..Query::new(op, LogKeys::new(log, 0..count)) };
        self.ask(SchedulerRequest::Query(query));
        op
    }

    /// Ends the other blocks of the fetch: those before the arrived one well, and those behind it with
    /// `result`.
    fn end_rest(&mut self, fetch: &Fetch, result: Result<u64, FetchFault>) {
        self.end(fetch, 0..3, Ok(1));
        self.end(fetch, 4..KEYS as usize, result);
    }

    fn load(&mut self, log: u32, lease: u64, range: Range<u32>) -> u64 {
        let op = self.next_op();
        self.engine.load(log, op, lease, range, 0);
        self.take_actions();
        op
    }
}

/// A peer's blocks are on their way to a query of log 1, and the first has come. Returns the scene, the fetch
/// and the query.
fn answered() -> (Scene, Fetch, u64) {
    let mut scene = Scene::with(A, 0..KEYS);
    let op = scene.query_early(1, 0..KEYS);
    scene.engine.fences(RANKS[0], 5, 4);
    let fetch = scene.fetch();
    assert_eq!(scene.answers(), [(op, Status::Pending, 0)]);
    scene.end(&fetch, 3..4, Ok(1));
    assert_eq!(scene.answers(), [(op, Status::Arriving, KEYS)]);
    (scene, fetch, op)
}

#[test]
fn a_query_is_answered_with_its_first_block_and_loaded_in_parts() {
    let (mut scene, fetch, op) = answered();
    assert_eq!(scene.engine.core.stats().early_answers, 1);
    let parts = [0..4, 4..8, 8..KEYS].map(|part| scene.load(1, op, part));
    scene.ask(SchedulerRequest::Release { log: 1 });
    assert_eq!(scene.loads(), (vec![], vec![]), "none is whole");
    scene.end(&fetch, 4..8, Ok(1));
    assert_eq!(scene.loads(), (vec![parts[1]], vec![(parts[1], Status::Ok)]), "the second is");
    scene.end(&fetch, 0..3, Ok(1));
    assert_eq!(scene.loads().0, [parts[0]], "the owner still has the rest");
    scene.end(&fetch, 8..KEYS as usize, Ok(1));
    assert_eq!(scene.loads().0, [parts[2]]);
    scene.ask(SchedulerRequest::Close { log: 1, way: 0 });
    assert!(scene.is_quiet() && scene.engine.core.stats().leases == 0);
}

#[test]
fn slots_are_named_before_their_blocks_are_there() {
    let mut scene = Scene::with(A, 0..KEYS);
    scene.save(0..2);
    let op = scene.query_early(1, 0..KEYS);
    let fetch = scene.fetch();
    scene.engine.out.clear();
    scene.end(&fetch, 0..1, Ok(1));
    let named = scene.engine.out.iter().find_map(|action| match action {
        Action::Answer { op: of, refs, from: 0, .. } if *of == op => Some(refs.clone()),
        _ => None,
    });
    let named = named.expect("an answer that begins with its first block");
    let filled: Vec<u64> = fetch.blocks.iter().map(|(_, offset)| *offset).collect();
    assert_eq!(named[2..].iter().map(|slot| slot.offset).collect::<Vec<_>>(), filled);
    assert_eq!(named.len(), KEYS as usize);
    assert_eq!(scene.engine.core.stats().leases, 0, "they are held instead");
    assert_eq!(scene.held_bytes(), 3 * BLOCK_BYTES);
    scene.end(&fetch, 1..2, Ok(1));
    assert_eq!(scene.held_bytes(), 4 * BLOCK_BYTES, "arrived blocks are held, too");
    scene.ask(SchedulerRequest::Release { log: 1 });
    assert_eq!(scene.held_bytes(), 0);
    scene.end(&fetch, 2..fetch.blocks.len(), Ok(1));
    assert!(scene.is_quiet());
}

#[test]
fn nobody_is_answered_early_who_did_not_ask_for_it_or_gains_nothing() {
    let mut scene = Scene::with(A, 0..KEYS);
    scene.query(1, 0..KEYS);
    let fetch = scene.fetch();
    scene.answers();
    scene.end(&fetch, 0..1, Ok(1));
    assert!(scene.answers().is_empty(), "it did not ask");
    scene.query_early(2, 0..KEYS);
    scene.answers();
    scene.end(&fetch, 1..(KEYS - WORTH) as usize, Ok(1));
    let last = scene.answers().pop().map(|answer| (answer.1, answer.2));
    assert_eq!(last, Some((Status::Arriving, KEYS)), "enough was on its way");
    scene.query_early(3, 0..KEYS);
    scene.answers();
    scene.end(&fetch, (KEYS - WORTH) as usize..KEYS as usize - 1, Ok(1));
    assert!(scene.answers().is_empty(), "the rest is here in no time");
    scene.end(&fetch, KEYS as usize - 1..KEYS as usize, Ok(1));
    let last: Vec<_> = scene.answers().into_iter().map(|answer| (answer.1, answer.2)).collect();
    assert_eq!(last, [(Status::Ok, KEYS); 2]);
    (1..4).for_each(|log| scene.ask(SchedulerRequest::Close { log, way: 0 }));
    assert!(scene.is_quiet());
}

#[test]
fn a_block_that_fails_refuses_its_load_alone() {
    let (mut scene, fetch, op) = answered();
    let parts = [0..8, 8..KEYS].map(|part| scene.load(1, op, part));
    scene.ask(SchedulerRequest::Release { log: 1 });
    scene.end(&fetch, 8..9, Err(FetchFault::Absent));
    assert_eq!(scene.loads(), (vec![], vec![(parts[1], Status::Absent)]));
    scene.end(&fetch, 9..KEYS as usize, Ok(1));
    scene.end(&fetch, 0..3, Ok(1));
    scene.end(&fetch, 4..8, Ok(1));
    assert_eq!(scene.loads().0, [parts[0]]);
    assert_eq!(scene.engine.core.stats().load_failures, 1);
    scene.assert_quiet_once_closed();
}

#[test]
fn what_has_failed_before_its_load_is_refused_at_once() {
    let (mut scene, fetch, op) = answered();
    scene.end(&fetch, 0..1, Err(FetchFault::Absent));
    let bad = scene.load(1, op, 0..4);
    assert_eq!(scene.loads().1, [(bad, Status::Absent)]);
    let good = scene.load(1, op, 4..8);
    scene.end(&fetch, 1..3, Ok(1));
    scene.end(&fetch, 4..KEYS as usize, Ok(1));
    assert_eq!(scene.loads().0, [good]);
    scene.assert_quiet_once_closed();
}

#[test]
fn a_parked_load_is_a_wish_and_another_peer_is_asked() {
    let (mut scene, fetch, op) = answered();
    scene.join(B, 0..KEYS);
    let part = scene.load(1, op, 0..KEYS);
    scene.ask(SchedulerRequest::Close { log: 1, way: 0 });
    scene.end(&fetch, 0..3, Err(FetchFault::Corrupt));
    let again = scene.fetch();
    assert_eq!((again.peer, keys_of(&again)), (B, vec![label(0), label(1), label(2)]));
    scene.end(&fetch, 4..KEYS as usize, Ok(1));
    assert_eq!(scene.loads(), (vec![], vec![]));
    scene.end_all(&again, Ok(1));
    assert_eq!(scene.loads(), (vec![part], vec![(part, Status::Ok)]), "although its log is closed");
    assert!(scene.is_quiet());
}

#[test]
fn a_parked_load_is_refused_when_its_blocks_are_late() {
    let (mut scene, fetch, op) = answered();
    let part = scene.load(1, op, 0..KEYS);
    scene.tick(1999);
    assert_eq!(scene.loads(), (vec![], vec![]));
    scene.tick(1);
    assert_eq!(scene.loads().1, [(part, Status::Absent)]);
    assert_eq!(scene.held_bytes(), BLOCK_BYTES, "of the answer");
    let late = scene.load(1, op, 4..8);
    assert_eq!(scene.loads().1, [(late, Status::Absent)]);
    scene.end_rest(&fetch, Err(FetchFault::Stopped));
    scene.tick(8001);
    assert!(scene.is_quiet(), "the answer was not used for the time of a lease");
}

#[test]
fn whoever_goes_leaves_nothing_held() {
    let hang_up = |scene: &mut Scene| scene.event(CoreEvent::Disconnected { session: SCHEDULER });
    let lose_rank = |scene: &mut Scene| scene.event(CoreEvent::Disconnected { session: RANKS[0] });
    let salt = |scene: &mut Scene| scene.ask(SchedulerRequest::Salt { salt: [9; 16] });
    let drain = |scene: &mut Scene| scene.event(CoreEvent::Drain);
    let leave: [Leave<'_>; 4] =
        [("hang-up", &hang_up), ("rank", &lose_rank), ("salt", &salt), ("drain", &drain)];
    for (what, leave) in leave {
        let (mut scene, fetch, op) = answered();
        scene.load(1, op, 0..8);
        leave(&mut scene);
        scene.end_rest(&fetch, Err(FetchFault::Stopped));
        if scene.engine.core.base.engines.has_scheduler(SCHEDULER) {
            scene.ask(SchedulerRequest::Close { log: 1, way: 0 });
        }
        scene.loads();
        assert!(scene.is_quiet() && !scene.engine.core.transfers.any_load(), "{what}");
        assert_eq!(scene.engine.core.stats().leases, 0, "{what}");
    }
}

#[test]
fn a_part_that_its_rank_gave_up_is_not_copied_when_it_is_whole() {
    let (mut scene, fetch, op) = answered();
    let part = scene.load(1, op, 0..8);
    let loaded = WorkerRequest::Loaded { op: part, end: LoadEnd::Failed };
    scene.event(CoreEvent::Message { session: RANKS[0], request: RingRequest::Worker(loaded) });
    scene.ask(SchedulerRequest::Release { log: 1 });
    assert_eq!(scene.held_bytes(), 0);
    scene.end_rest(&fetch, Ok(1));
    assert_eq!(scene.loads(), (vec![], vec![]));
    scene.assert_quiet_once_closed();
}

#[test]
fn a_load_that_must_not_fail_is_refused_under_an_early_answer() {
    let (mut scene, fetch, op) = answered();
    for flags in [LOAD_SYNC, LOAD_BY_ENGINE] {
        let load = scene.next_op();
        scene.engine.load(1, load, op, 0..4, flags);
        assert_eq!(scene.loads().1, [(load, Status::LeaseUnknown)]);
    }
    let beyond = scene.load(1, op, 8..KEYS + 1);
    assert_eq!(scene.loads().1, [(beyond, Status::LeaseUnknown)]);
    scene.end_rest(&fetch, Ok(1));
    scene.assert_quiet_once_closed();
}

#[test]
fn the_next_question_of_a_log_ends_the_early_answer() {
    let (mut scene, fetch, op) = answered();
    let next = scene.query_again(1, KEYS);
    assert_eq!(scene.answers(), [(next, Status::Pending, 0)]);
    let stale = scene.load(1, op, 0..4);
    assert_eq!(scene.loads().1, [(stale, Status::LeaseUnknown)]);
    scene.end_rest(&fetch, Ok(1));
    assert_eq!(scene.answers().last(), Some(&(next, Status::Ok, KEYS)));
    scene.assert_quiet_once_closed();
}
