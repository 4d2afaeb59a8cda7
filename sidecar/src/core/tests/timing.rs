//! The begins of ended operations, in milliseconds.

use tiers::dram::LeaseEnd;

use super::*;

impl Harness {
    /// The operations ended by the last event.
    pub(in crate::core) fn took(&mut self) -> Vec<(Timed, u64)> {
        let over = self.core.drain_over();
        over.map(|took| (took.what, took.since.as_millis() as u64)).collect()
    }
}

#[test]
fn each_part_of_a_save_and_of_a_load_begins_where_the_one_before_ends() {
    let mut engine = Harness::engine(1);
    engine.open(0, 0..2);
    engine.now_ms = 10;
    engine.save(0, 1, 1, 1..3);
    assert_eq!(engine.took(), []);
    engine.now_ms = 20;
    engine.fences(RANKS[0], 1, 1);
    assert_eq!(engine.took(), [(Timed::Save(Part::Waiting), 10)]);
    let copy = engine.copies()[0].0;
    engine.now_ms = 30;
    engine.event(Event::Copied { copy, ok: true });
    assert_eq!(engine.took(), [(Timed::Save(Part::Copy), 20)]);
    engine.now_ms = 40;
    engine.drained();
    assert_eq!(engine.took(), [(Timed::Save(Part::Whole), 10)]);
    engine.now_ms = 50;
    assert_eq!(engine.query(0, 2, 0, 2).value, 2);
    assert_eq!(engine.took(), [(Timed::Query(Part::Whole), 50)]);
    engine.now_ms = 60;
    engine.load(0, 3, 2, 0..2, 0);
    assert_eq!(engine.took(), []);
    engine.now_ms = 70;
    engine.fences(RANKS[0], 5, 4);
    assert_eq!(engine.took(), [(Timed::Load(Part::Waiting), 60)]);
    let copy = engine.copies()[0].0;
    engine.now_ms = 80;
    engine.event(Event::Copied { copy, ok: true });
    let (whole, part, lease) =
        (Timed::Load(Part::Whole), Timed::Load(Part::Copy), Timed::Lease(LeaseEnd::Consumed));
    assert_eq!(engine.took(), [(whole, 60), (part, 70), (lease, 50)]);
}

#[test]
fn a_save_of_what_is_kept_takes_no_time() {
    let mut engine = Harness::engine(1);
    engine.keep(2);
    engine.save(0, 2, 2, 1..3);
    engine.fences(RANKS[0], 2, 2);
    assert_eq!((engine.saved().unwrap().present, engine.took()), (2, vec![]));
}

#[test]
fn a_lease_says_how_it_ended() {
    let mut engine = Harness::engine(1);
    engine.keep(2);
    engine.now_ms = 10;
    engine.query(0, 2, 0, 2);
    engine.now_ms = 500;
    assert_eq!(engine.query(0, 3, 0, 2).value, 2);
    assert_eq!(engine.took(), [(Timed::Query(Part::Whole), 500)], "the lease was renewed");
    engine.now_ms = 600;
    engine.ask(SchedulerRequest::Release { log: 0 });
    assert_eq!(engine.took(), [(Timed::Lease(LeaseEnd::Released), 10)]);
    engine.query(0, 4, 0, 2);
    engine.now_ms = 1700;
    engine.event(Event::Tick);
    assert_eq!(engine.took(), [(Timed::Lease(LeaseEnd::Expired), 600)]);
    engine.open(1, 7..8);
    assert_eq!(engine.query(1, 5, 0, 1).value, 0);
    assert_eq!(engine.took(), [(Timed::Query(Part::Whole), 1700)], "nothing was leased");
}

#[test]
fn a_request_that_is_over_is_told_of_with_what_it_asked_for_first() {
    let mut engine = Harness::keeping(1, 3);
    engine.open(1, 0..5);
    engine.query(1, 2, 1, 3);
    engine.query(1, 3, 0, 5);
    assert_eq!(engine.core.drain_ended().count(), 0);
    engine.ask(SchedulerRequest::Close { log: 1, way: 0 });
    let ended: Vec<Ended> = engine.core.drain_ended().collect();
    let [Ended { block_bytes, keys, asked, .. }] = ended.as_slice() else { panic!("{ended:?}") };
    assert_eq!((*block_bytes, asked.clone()), (SHARD_BYTES, 1..4));
    assert_eq!(*keys, (0..5).map(hash).collect::<Vec<_>>());
    engine.open(2, 0..5);
    engine.ask(SchedulerRequest::Close { log: 2, way: 0 });
    engine.event(Event::Tick);
    assert_eq!(engine.core.drain_ended().count(), 0, "not taken, so dropped");
}
