//! Limits of the cost of one engine to the others.

use super::*;

const OTHER: SessionId = 21;
const OTHER_RANK: SessionId = 22;
const OTHER_RUN: [u8; 16] = [9; 16];
/// Large blocks: a pool has room for few of them.
const BLOCK_BYTES: u64 = 64 << 10;

/// An engine of one rank beside another one with no rank joined, over a pool of 62 blocks.
fn two_engines() -> Harness {
    let mut engine = Harness::over(core_of(4 << 20), 1, BLOCK_BYTES);
    engine.join();
    engine.connect(OTHER, hello(1, Role::Scheduler { run: OTHER_RUN }));
    engine.connect(OTHER_RANK, rank_hello_of(1, 0, BLOCK_BYTES));
    engine
}

/// The other engine sends some messages.
fn other_speaks(engine: &mut Harness) {
    engine.speaker = OTHER;
    engine.open(0, 0..0);
    engine.ask(SchedulerRequest::Close { log: 0, way: 0 });
    engine.speaker = SCHEDULER;
    engine.out.clear();
}

#[test]
fn an_engine_is_at_work_for_a_second_after_a_message_or_a_step() {
    let mut engine = two_engines();
    engine.open(0, 0..1);
    other_speaks(&mut engine);
    assert_eq!(engine.core.at_work(), 1, "a scheduler without ranks takes no share");
    engine.report(OTHER_RANK, WorkerRequest::Join { run: OTHER_RUN, step: 0 });
    other_speaks(&mut engine);
    assert_eq!(engine.core.at_work(), 2);
    engine.now_ms = 1500;
    other_speaks(&mut engine);
    assert_eq!(engine.core.at_work(), 1);
    engine.fences(RANKS[0], 1, 1);
    assert_eq!(engine.core.at_work(), 2);
    engine.event(Event::Disconnected { session: OTHER });
    assert_eq!(engine.core.at_work(), 1);
}

#[test]
fn a_hit_is_cut_where_others_are_at_work_and_its_load_is_inside() {
    let mut engine = two_engines();
    engine.keep(60);
    assert_eq!(engine.query(0, 2, 0, 60).value, 60, "alone it may lease everything");
    engine.report(OTHER_RANK, WorkerRequest::Join { run: OTHER_RUN, step: 0 });
    other_speaks(&mut engine);
    assert_eq!(engine.query(0, 3, 0, 60).value, 32, "half of the pool, its leases included");
    engine.out.clear();
    engine.load(0, 4, 3, 0..32, 0);
    engine.fences(RANKS[0], 5, 4);
    assert_eq!(engine.copies().len(), 1, "a load of answered hits is never refused");
    engine.open(1, 0..60);
    assert_eq!(engine.query(1, 5, 0, 60).value, 0);
    engine.open(2, 100..101);
    engine.save(2, 6, 1, 1..2);
    assert_eq!(engine.saved().map(|saved| saved.dropped), Some(1));
    let holder = engine.core.holders().next().unwrap();
    assert_eq!((holder.engine, holder.holdings.promised), ("e", 32 * BLOCK_BYTES));
    engine.core.audit_ledger();
}

#[test]
fn keys_that_two_engines_save_at_once_are_copied_once() {
    let mut engine = two_engines();
    engine.report(OTHER_RANK, WorkerRequest::Join { run: OTHER_RUN, step: 0 });
    engine.open(0, 0..4);
    engine.save(0, 1, 1, 1..5);
    engine.speaker = OTHER;
    engine.open(0, 0..4);
    engine.save(0, 1, 1, 1..5);
    assert_eq!(engine.copies().len(), 0, "both wait for their steps");
    engine.fences(RANKS[0], 1, 1);
    assert_eq!(engine.copies().len(), 1);
    engine.fences(OTHER_RANK, 1, 1);
    assert!(!engine.out.iter().any(|action| matches!(action, Action::Copy { .. })));
    assert_eq!(engine.saved().map(|saved| saved.present), Some(4), "the other's are on their way");
}

#[test]
fn saves_that_wait_for_their_step_are_bounded() {
    let mut engine = Harness::engine(1);
    // 172 times 380 blocks are 65,360.
    engine.open(0, 0..380);
    for op in 1..=173 {
        engine.save(0, op, 1 << 40, 1..381);
        let dropped = engine.saved().map(|saved| saved.dropped);
        assert_eq!(dropped, (op == 173).then_some(380), "save {op}");
    }
    engine.ask(SchedulerRequest::Cancel(Cancel { op: 1, from: 0, count: 380 }));
    assert_eq!(engine.saved().map(|saved| saved.op), Some(1));
    engine.save(0, 174, 1 << 40, 1..381);
    assert_eq!(engine.saved(), None, "there is room again");
}

#[test]
fn one_event_takes_slots_for_so_many_blocks_and_the_others_wait_a_turn() {
    let mut engine = Harness::over(core_of(4 << 20).with_claims(4), 1, SHARD_BYTES);
    engine.join();
    engine.open(0, 0..10);
    engine.save(0, 1, 1, 1..7);
    engine.save(0, 2, 1, 7..9);
    engine.fences(RANKS[0], 1, 1);
    let filled = |engine: &mut Harness| {
        let out = std::mem::take(&mut engine.out);
        let count = |meant: fn(&Action) -> bool| out.iter().filter(|action| meant(action)).count();
        (
            count(|action| matches!(action, Action::FillSlot { .. })),
            count(|action| matches!(action, Action::Copy { .. })),
        )
    };
    assert_eq!((filled(&mut engine), engine.core.behind()), ((4, 0), Some(SCHEDULER)));
    engine.event(Event::Behind { session: SCHEDULER });
    assert_eq!((filled(&mut engine), engine.core.behind()), ((2, 1), None));
}
