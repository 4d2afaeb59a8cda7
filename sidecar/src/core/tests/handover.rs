//! One engine awaits blocks of another, over one sidecar.

mod acceptance;
mod quotas;

use super::*;

/// The engine awaiting blocks. The engine of [`SCHEDULER`], called P below, computes them.
const D: SessionId = 31;
const D_RANK: SessionId = 32;
const D_RUN: [u8; 16] = [3; 16];

/// Large blocks: a pool of 4 MiB has room for 62.
const LARGE: u64 = 64 << 10;

/// Both engines, of one rank each.
fn two_engines() -> Harness {
    over(64 << 20, SHARD_BYTES)
}

/// The same over a pool of this size, with blocks of so many bytes.
fn over(pool_bytes: u64, bytes: u64) -> Harness {
    pair(core_of(pool_bytes), bytes)
}

/// The same over this core.
fn pair(core: Core, bytes: u64) -> Harness {
    let mut engines = Harness::over(core, 1, bytes);
    engines.join();
    engines.connect(D, hello(1, Role::Scheduler { run: D_RUN }));
    engines.connect(D_RANK, rank_hello_of(1, 0, bytes));
    engines.report(D_RANK, WorkerRequest::Join { run: D_RUN, step: 0 });
    engines.out.clear();
    engines
}

/// A query for blocks of another engine.
fn awaiting(op: u64, keys: LogKeys, arriving: bool) -> SchedulerRequest {
    SchedulerRequest::Query(Query { arriving, awaits: true, ..Query::new(op, keys) })
}

impl Harness {
    /// D opens a log of these keys and asks for all of them.
    fn await_keys(&mut self, log: u32, op: u64, keys: std::ops::Range<u32>, arriving: bool) {
        self.speaker = D;
        let all = LogKeys::new(log, 0..keys.len() as u32);
        self.open(log, keys);
        self.ask(awaiting(op, all, arriving));
        self.speaker = SCHEDULER;
    }

    /// The last answer to each of D's queries, since actions were last taken.
    fn answers(&self) -> BTreeMap<u64, (Status, u32)> {
        let answered = self.out.iter().filter_map(|action| match action {
            Action::Answer { session: D, op, outcome, .. } | Action::Outcome { session: D, op, outcome } => {
                Some((*op, (outcome.status, outcome.value)))
            }
            _ => None,
        });
        answered.collect()
    }

    /// P saves blocks of its log 0 as operation and step `op`.
    fn produce(&mut self, op: u64, keys: std::ops::Range<u32>) {
        let (count, keys) = (keys.len() as u32, LogKeys::new(0, keys));
        let save =
            request::Save { op, keys, position: 0, step: op, checked: false, handover: false, replaced: 0 };
        self.post(SchedulerRequest::Save(save), Vec::new(), (1..count + 1).collect());
    }

    /// P computes prompts of these keys under log `log`, each with a step of its own, and hands them over or not.
    fn compute(&mut self, log: u32, op: u64, keys: std::ops::Range<u32>, handover: bool) {
        let (count, named) = (keys.len() as u32, LogKeys::new(log, 0..keys.len() as u32));
        self.open(log, keys);
        let save =
            request::Save { op, keys: named, position: 0, step: op, checked: false, handover, replaced: 0 };
        self.post(SchedulerRequest::Save(save), Vec::new(), (1..count + 1).collect());
        self.fences(RANKS[0], op, op);
        self.copied();
        self.ask(SchedulerRequest::Close { log, way: 0 });
        self.out.clear();
    }

    /// Returns the number of these keys found by D. Their lease ends at once.
    fn found(&mut self, log: u32, op: u64, keys: std::ops::Range<u32>) -> u32 {
        self.speaker = D;
        let count = keys.len() as u32;
        self.open(log, keys);
        let hits = self.query(log, op, 0, count).value;
        self.ask(SchedulerRequest::Close { log, way: 0 });
        self.speaker = SCHEDULER;
        self.out.clear();
        hits
    }

    /// P promises to hand over the prompt of these keys.
    fn promise(&mut self, log: u32, keys: std::ops::Range<u32>) {
        self.open_as(log, keys, true, false);
    }

    /// Opens a log of these keys, `promised` or not. The last key may be of a `tail`.
    fn open_as(&mut self, log: u32, keys: std::ops::Range<u32>, promised: bool, tail: bool) {
        self.ask(SchedulerRequest::Open { log });
        let named = LogKeys::new(log, 0..keys.len() as u32);
        let chunks = [log * 2, log * 2 + 1, 0, 0, 0, 0];
        self.append(Append { keys: named, chunks, promised, tail }, keys.map(hash).collect());
    }

    /// D asks for keys 0 to 2; the last one is of a tail.
    fn await_tail(&mut self, op: u64) {
        self.speaker = D;
        self.open_as(0, 0..3, false, true);
        self.ask(awaiting(op, LogKeys::new(0, 0..3), false));
        self.speaker = SCHEDULER;
    }

    /// P's step `op` saves these blocks of its log 0, and they are kept.
    fn step(&mut self, op: u64, keys: std::ops::Range<u32>) {
        self.produce(op, keys);
        self.fences(RANKS[0], op, op);
        self.copied();
    }

    fn tick(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        self.event(CoreEvent::Tick);
    }
}

#[test]
fn who_awaits_is_answered_by_the_saves_of_another_engine() {
    let mut engines = two_engines();
    engines.open(0, 0..4);
    engines.await_keys(0, 1, 0..4, false);
    assert_eq!(engines.answers(), BTreeMap::from([(1, (Status::Pending, 0))]), "before anything is saved");
    engines.produce(1, 0..2);
    engines.fences(RANKS[0], 1, 1);
    engines.copied();
    engines.produce(2, 2..4);
    engines.fences(RANKS[0], 2, 2);
    let copies = engines.copies();
    assert!(
        engines.answers().values().all(|answer| answer.0 == Status::Pending),
        "two blocks are being copied"
    );
    engines.end_copy(copies[0].0, true);
    engines.drained();
    assert_eq!(engines.answers()[&1], (Status::Ok, 4), "with the end of the last copy, at no look");
}

#[test]
fn a_tail_that_is_promised_is_waited_for() {
    let mut engines = two_engines();
    engines.open_as(0, 0..3, true, true);
    engines.await_tail(1);
    engines.step(1, 0..2);
    (1..=40).for_each(|at| engines.tick(at * 100));
    assert_eq!(engines.answers()[&1].0, Status::Pending, "P works, and computes the tail last");
    engines.step(2, 2..3);
    assert_eq!(engines.answers()[&1], (Status::Ok, 3));
}

#[test]
fn a_tail_that_is_not_promised_is_not_waited_for() {
    // P is of a build before tails, or has promised nothing.
    for promised in [true, false] {
        for _ in 0..4 {
            let mut engines = two_engines();
            engines.open_as(0, 0..2, promised, false);
            engines.await_tail(1);
            engines.step(1, 0..2);
            assert_eq!(engines.answers()[&1], (Status::Ok, 2), "with its last block");
            assert_eq!(engines.core.stats().handover_exhausted, 0, "no wait ended without its blocks");
        }
    }
    let mut engines = two_engines();
    engines.open_as(0, 0..3, true, true);
    engines.await_tail(1);
    engines.step(1, 0..2);
    engines.ask(SchedulerRequest::Close { log: 0, way: 0 });
    assert_eq!(engines.answers()[&1], (Status::Ok, 2), "the promise has ended");
}

#[test]
fn no_key_follows_a_tail() {
    let mut engines = two_engines();
    engines.open_as(0, 0..3, true, true);
    let append = Append { keys: LogKeys::new(0, 3..4), chunks: [0; 6], promised: false, tail: false };
    engines.append(append, vec![hash(3)]);
    let reason = engines.closed().expect("a key that was written is never another one");
    assert!(reason.contains("cannot append"), "{reason}");
}

#[test]
fn nobody_waits_where_no_other_engine_of_the_namespace_is() {
    let mut engines = Harness::over(core_of(64 << 20), 1, SHARD_BYTES);
    engines.join();
    engines.connect(D, hello(1, Role::Scheduler { run: D_RUN }));
    // Its blocks have another form than those of P, so P's blocks are of no use to it.
    engines.connect(D_RANK, rank_hello_of(1, 0, 2 * SHARD_BYTES));
    engines.report(D_RANK, WorkerRequest::Join { run: D_RUN, step: 0 });
    engines.out.clear();
    engines.await_keys(0, 1, 0..4, false);
    assert_eq!(engines.answers(), BTreeMap::from([(1, (Status::Ok, 0))]));
    assert_eq!(engines.core.stats().handover_without_producer, 1);
    let mut engines = two_engines();
    engines.disconnect([SCHEDULER, RANKS[0]]);
    engines.out.clear();
    engines.await_keys(0, 1, 0..4, false);
    assert_eq!(engines.answers(), BTreeMap::from([(1, (Status::Ok, 0))]), "P has gone");
}

#[test]
fn who_asks_without_awaiting_is_answered_at_once() {
    let mut engines = two_engines();
    engines.begin_save(2);
    let copies = engines.copies();
    engines.speaker = D;
    engines.open(0, 0..2);
    let miss = engines.query(0, 1, 0, 2);
    assert_eq!((miss.status, miss.value), (Status::Ok, 0));
    engines.speaker = SCHEDULER;
    engines.await_keys(1, 2, 0..2, false);
    engines.speaker = D;
    assert_eq!(engines.query(0, 3, 0, 2).value, 0, "also where others await the blocks");
    engines.speaker = SCHEDULER;
    engines.end_copy(copies[0].0, true);
    engines.drained();
    assert_eq!(engines.answers()[&2], (Status::Ok, 2));
}

#[test]
fn a_load_is_parked_while_the_last_blocks_are_copied_and_begins_when_they_are_kept() {
    let mut engines = two_engines();
    engines.await_keys(0, 1, 0..4, true);
    engines.begin_save(4);
    assert_eq!(engines.answers()[&1], (Status::Arriving, 4), "whole, as soon as the slots are taken");
    let copies = engines.copies();
    engines.speaker = D;
    engines.load(0, 2, 1, 0..4, shm_protocol::message::LOAD_ARRIVING);
    engines.speaker = SCHEDULER;
    engines.fences(D_RANK, 5, 4);
    assert!(engines.copies().is_empty(), "nothing is read from a slot that is being filled");
    engines.end_copy(copies[0].0, true);
    engines.drained();
    let loads = engines.copies();
    assert_eq!(loads.iter().map(|copy| (copy.1, copy.2.len())).collect::<Vec<_>>(), [(D_RANK, 4)]);
}

impl Harness {
    /// P posts a handover of its log `log`, as operation and step `op`, and begins the step.
    fn begin_handover(&mut self, log: u32, op: u64, keys: std::ops::Range<u32>) {
        let named = LogKeys::new(log, 0..keys.len() as u32);
        self.open(log, keys);
        self.hand_over(op, named);
    }

    /// P hands over a part of the prompt of its open log 0.
    fn begin_part(&mut self, op: u64, keys: std::ops::Range<u32>) {
        self.hand_over(op, LogKeys::new(0, keys));
    }

    /// P hands over some keys of an open log, as operation and step `op`, and begins the step.
    pub(in crate::core) fn hand_over(&mut self, op: u64, named: LogKeys) {
        let count = named.count;
        let save = request::Save {
            op,
            keys: named,
            position: 0,
            step: op,
            checked: false,
            handover: true,
            replaced: 0,
        };
        self.post(SchedulerRequest::Save(save), Vec::new(), (1..count + 1).collect());
        self.fences(RANKS[0], op, op - 1);
    }

    /// Ends the step begun last, after so many milliseconds.
    fn end_step(&mut self, op: u64, ms: u64) {
        self.now_ms += ms;
        self.fences(RANKS[0], op, op);
    }
}

#[test]
fn who_awaits_is_told_while_the_last_step_runs_if_steps_are_short() {
    let mut engines = two_engines();
    engines.await_keys(0, 1, 0..2, true);
    engines.begin_handover(0, 1, 0..2);
    assert_eq!(engines.answers()[&1].0, Status::Pending, "how long its steps are is not known");
    engines.end_step(1, 500);
    engines.copied();
    engines.await_keys(1, 2, 10..12, true);
    engines.begin_handover(1, 2, 10..12);
    assert_eq!(engines.answers()[&2], (Status::Arriving, 2));
    engines.speaker = D;
    engines.load(1, 3, 2, 0..2, shm_protocol::message::LOAD_ARRIVING);
    engines.speaker = SCHEDULER;
    engines.fences(D_RANK, 5, 4);
    assert!(engines.copies().is_empty(), "nothing is copied before the step is done");
    engines.end_step(2, 501);
    let saved = engines.copies();
    engines.end_copy(saved[0].0, true);
    engines.drained();
    assert_eq!(engines.copies().iter().map(|copy| copy.1).collect::<Vec<_>>(), [D_RANK]);
    engines.await_keys(2, 4, 20..22, true);
    engines.begin_handover(2, 3, 20..22);
    assert_eq!(engines.answers()[&4].0, Status::Pending, "the last one was long");
}

#[test]
fn a_handover_takes_from_the_last_fence_to_the_end_of_its_last_part() {
    let mut engines = two_engines();
    let handovers = |engines: &mut Harness| {
        let took = engines.took().into_iter().filter(|(what, _)| *what == Timed::Handover);
        took.map(|(_, since)| since).collect::<Vec<_>>()
    };
    engines.open(0, 0..4);
    engines.await_keys(0, 1, 0..4, true);
    engines.begin_part(1, 0..2);
    engines.end_step(1, 10);
    engines.copied();
    engines.begin_part(2, 2..4);
    assert_eq!(engines.answers()[&1], (Status::Arriving, 4));
    engines.speaker = D;
    for (op, part) in [(2, 0..2), (3, 2..4)] {
        engines.load(0, op, 1, part, shm_protocol::message::LOAD_ARRIVING);
    }
    engines.fences(D_RANK, 5, 4);
    engines.speaker = SCHEDULER;
    let first = engines.copies();
    engines.end_step(2, 20);
    let saved = engines.copies();
    engines.end_copy(first[0].0, true);
    assert!(handovers(&mut engines).is_empty(), "a part is missing");
    engines.now_ms = 45;
    engines.end_copy(saved[0].0, true);
    engines.drained();
    let last = engines.copies();
    engines.end_copy(last[0].0, true);
    assert_eq!(handovers(&mut engines), [30]);
    // A block found in the pool by P's save has no fence.
    engines.begin_part(3, 0..4);
    engines.await_keys(1, 4, 0..4, false);
    assert_eq!(engines.answers()[&4], (Status::Ok, 4));
    engines.speaker = D;
    engines.load(1, 5, 4, 0..4, 0);
    let again = engines.copies();
    let released = engines.core.stats().handover_loaded;
    engines.end_copy(again[0].0, true);
    assert!(handovers(&mut engines).is_empty());
    assert_eq!(engines.core.stats().handover_loaded - released, 4, "though it was handed over");
}

#[test]
fn a_step_whose_blocks_are_overwritten_while_it_runs_refuses_the_load() {
    let mut engines = two_engines();
    engines.begin_handover(0, 1, 0..2);
    engines.end_step(1, 1);
    engines.copied();
    for dies in [false, true] {
        let op = 2 + u64::from(dies);
        let (log, first) = (op as u32, 10 * op as u32);
        engines.await_keys(log, op, first..first + 2, true);
        engines.begin_handover(log, op, first..first + 2);
        engines.speaker = D;
        engines.load(log, 10 + op, op, 0..2, shm_protocol::message::LOAD_ARRIVING);
        engines.speaker = SCHEDULER;
        if dies {
            engines.disconnect([RANKS[0], SCHEDULER]);
        } else {
            engines.ask(SchedulerRequest::Cancel(Cancel { op, from: 0, count: 2 }));
            engines.end_step(op, 1);
        }
        assert!(!engines.out.iter().any(|action| matches!(action, Action::Copy { .. })));
        let refused =
            engines.take(taken!(Action::Outcome { session: D_RANK, outcome, .. } => outcome.status));
        assert_eq!(refused.collect::<Vec<_>>(), [Status::Absent]);
    }
}

#[test]
fn a_save_that_is_given_up_ends_the_wait_and_refuses_the_load() {
    for dies in [false, true] {
        let mut engines = two_engines();
        engines.await_keys(0, 1, 0..2, true);
        engines.await_keys(1, 3, 0..2, false);
        engines.begin_save(2);
        let copies = engines.copies();
        engines.speaker = D;
        engines.load(0, 2, 1, 0..2, shm_protocol::message::LOAD_ARRIVING);
        engines.speaker = SCHEDULER;
        if dies {
            engines.disconnect([RANKS[0], SCHEDULER]);
            engines.end_copy(copies[0].0, true);
        } else {
            engines.ask(SchedulerRequest::Cancel(Cancel { op: 1, from: 0, count: 2 }));
            engines.end_copy(copies[0].0, true);
            engines.drained();
        }
        let refused =
            engines.take(taken!(Action::Outcome { session: D_RANK, op: 2, outcome } => outcome.status));
        assert_eq!(refused.collect::<Vec<_>>(), [Status::Absent]);
        engines.tick(1100);
        assert_eq!(engines.answers()[&3], (Status::Ok, 0), "its window is over");
    }
}

#[test]
fn a_copy_that_hangs_holds_a_parked_load_for_2_s() {
    let mut engines = two_engines();
    engines.await_keys(0, 1, 0..2, true);
    engines.begin_save(2);
    engines.speaker = D;
    engines.load(0, 2, 1, 0..2, shm_protocol::message::LOAD_ARRIVING);
    engines.speaker = SCHEDULER;
    let copies = engines.copies();
    engines.tick(1999);
    assert_eq!(engines.core.stats().load_refusals, 0);
    engines.tick(2000);
    assert_eq!(engines.core.stats().load_refusals, 1);
    engines.end_copy(copies[0].0, true);
    engines.drained();
    engines.await_keys(1, 3, 0..2, false);
    assert_eq!(engines.answers()[&3], (Status::Ok, 2), "it came, late");
}

#[test]
fn nobody_waits_for_an_engine_that_has_gone() {
    let mut engines = two_engines();
    for round in 0..4u32 {
        let op = u64::from(round) + 1;
        engines.await_keys(round, op, 100..104, false);
        assert_eq!(
            engines.answers()[&op].0,
            Status::Pending,
            "round {round}: one gone engine says nothing of the next"
        );
        let gone = [RANKS[0], SCHEDULER];
        engines.disconnect(if round % 2 == 0 { &gone[..1] } else { &gone[1..] }.iter().copied());
        assert_eq!(engines.answers()[&op], (Status::Ok, 0), "round {round}: at once");
        engines.disconnect(if round % 2 == 0 { &gone[1..] } else { &gone[..1] }.iter().copied());
        engines.connect(SCHEDULER, hello(1, Role::Scheduler { run: RUN }));
        engines.connect(RANKS[0], rank_hello_of(1, 0, SHARD_BYTES));
        engines.join();
        engines.out.clear();
    }
    assert_eq!(engines.core.stats().handover_exhausted, 4);
}

#[test]
fn a_promise_that_ends_with_nothing_to_come_ends_the_wait() {
    for saves in [false, true] {
        let mut engines = two_engines();
        engines.promise(0, 0..4);
        engines.await_keys(0, 1, 0..4, false);
        // Nobody has promised these.
        engines.await_keys(1, 2, 100..104, false);
        if saves {
            let keys = LogKeys::new(0, 0..4);
            let save = request::Save {
                op: 1,
                keys,
                position: 0,
                step: 1,
                checked: false,
                handover: true,
                replaced: 0,
            };
            engines.post(SchedulerRequest::Save(save), Vec::new(), (1..5).collect());
        }
        engines.ask(SchedulerRequest::Close { log: 0, way: 0 });
        if saves {
            assert_eq!(engines.answers()[&1].0, Status::Pending, "its step runs");
            engines.ask(SchedulerRequest::Cancel(Cancel { op: 1, from: 0, count: 4 }));
            engines.fences(RANKS[0], 1, 1);
            engines.drained();
        }
        let answers = engines.answers();
        assert_eq!((answers[&1], answers[&2].0), ((Status::Ok, 0), Status::Pending), "{saves}");
    }
}

#[test]
fn nobody_waits_for_what_was_computed_and_lost() {
    let mut engines = two_engines();
    engines.await_keys(0, 1, 0..4, false);
    engines.open(0, 0..4);
    let keys = LogKeys::new(0, 0..4);
    let save =
        request::Save { op: 1, keys, position: 0, step: 1, checked: false, handover: true, replaced: 0 };
    engines.post(SchedulerRequest::Save(save), Vec::new(), (1..5).collect());
    engines.ask(SchedulerRequest::Cancel(Cancel { op: 1, from: 1, count: 3 }));
    engines.fences(RANKS[0], 1, 1);
    engines.copied();
    engines.ask(SchedulerRequest::Close { log: 0, way: 0 });
    engines.await_keys(1, 2, 100..104, false);
    engines.await_keys(2, 3, 0..4, false);
    let answers = engines.answers();
    assert_eq!((answers[&1], answers[&3]), ((Status::Ok, 1), (Status::Ok, 1)), "the kept block, at once");
    assert_eq!(answers[&2].0, Status::Pending, "no engine has computed this");
    engines.open(6, 100..104);
    let keys = LogKeys::new(6, 0..4);
    let save =
        request::Save { op: 9, keys, position: 0, step: 2, checked: false, handover: true, replaced: 0 };
    engines.post(SchedulerRequest::Save(save), Vec::new(), (1..5).collect());
    engines.ask(SchedulerRequest::Cancel(Cancel { op: 9, from: 0, count: 4 }));
    engines.drained();
    assert_eq!(engines.answers()[&2], (Status::Ok, 0), "nothing of it was ever on its way");

    engines.promise(1, 0..4);
    engines.await_keys(3, 4, 0..4, false);
    assert_eq!(engines.answers()[&4].0, Status::Pending, "it is computed once more");
    engines.ask(SchedulerRequest::Close { log: 1, way: 0 });
    assert_eq!(engines.answers()[&4], (Status::Ok, 1));
    engines.tick(29_999);
    // P works again: D waits for it.
    engines.compute(2, 2, 50..52, true);
    engines.await_keys(4, 5, 0..4, false);
    engines.tick(30_000);
    engines.await_keys(5, 6, 0..4, false);
    let answers = engines.answers();
    assert_eq!((answers[&5], answers[&6].0), ((Status::Ok, 1), Status::Pending), "it is forgotten");
}

#[test]
fn three_waits_in_vain_are_enough_until_another_engine_saves() {
    let mut engines = two_engines();
    for round in 0..3 {
        engines.await_keys(round, u64::from(round) + 1, 100..102, false);
        engines.tick(1100 * (u64::from(round) + 1));
        assert_eq!(engines.answers()[&(u64::from(round) + 1)], (Status::Ok, 0));
    }
    engines.await_keys(3, 4, 100..102, false);
    assert_eq!(engines.answers()[&4], (Status::Ok, 0), "at once");
    let stats = engines.core.stats();
    assert_eq!((stats.handover_exhausted, stats.handover_without_producer), (3, 1));
    engines.keep(1);
    engines.await_keys(4, 5, 100..102, false);
    assert_eq!(engines.answers()[&5].0, Status::Pending);
}

/// Lets the seconds pass, with a message of P in each.
fn ticks(engines: &mut Harness, until_s: u64) {
    for second in 1..until_s {
        engines.now_ms = second * 1000 + 10;
        // P's scheduler posts a message.
        engines.ask(SchedulerRequest::Open { log: 1000 + second as u32 });
        engines.event(CoreEvent::Tick);
    }
}

#[test]
fn what_is_promised_is_waited_for_while_its_engine_works() {
    let mut engines = two_engines();
    engines.promise(0, 0..4);
    engines.await_keys(0, 1, 0..4, false);
    engines.await_keys(1, 2, 100..104, false);
    ticks(&mut engines, 20);
    let answers = engines.answers();
    assert_eq!(
        (answers[&1].0, answers[&2]),
        (Status::Pending, (Status::Ok, 0)),
        "no engine has promised the other"
    );
    engines.produce(1, 0..4);
    engines.fences(RANKS[0], 1, 1);
    engines.copied();
    assert_eq!(engines.answers()[&1], (Status::Ok, 4));
    let stats = engines.core.stats();
    assert_eq!((stats.handover_promises, stats.handover_exhausted), (1, 1));
}

#[test]
fn a_promise_is_worth_30_s() {
    let mut engines = two_engines();
    engines.promise(0, 0..4);
    engines.await_keys(0, 1, 0..4, false);
    ticks(&mut engines, 30);
    assert_eq!(engines.answers()[&1].0, Status::Pending);
    engines.tick(30_000);
    assert_eq!(engines.answers()[&1], (Status::Ok, 0));
}

#[test]
fn an_engine_says_how_long_it_waits() {
    // The longest `promise_wait_ms` is also the longest wait of a query.
    for promise_wait_ms in [100, 2000] {
        let mut engines = two_engines();
        engines.disconnect([D_RANK, D]);
        let role = Role::Scheduler { run: D_RUN };
        let promise_wait = Some(promise_wait_ms);
        let waits = Hello { handover_wait_ms: Some(4000), promise_wait_ms: promise_wait, ..hello(1, role) };
        engines.connect(D, waits);
        engines.connect(D_RANK, rank_hello_of(1, 0, SHARD_BYTES));
        engines.report(D_RANK, WorkerRequest::Join { run: D_RUN, step: 0 });
        engines.out.clear();
        engines.promise(0, 0..4);
        engines.await_keys(0, 1, 0..4, false);
        engines.await_keys(1, 2, 100..104, false);
        engines.tick(u64::from(promise_wait_ms) - 1);
        assert_eq!(engines.answers()[&2].0, Status::Pending);
        engines.tick(promise_wait_ms.into());
        assert_eq!(engines.answers()[&2], (Status::Ok, 0));
        engines.fences(RANKS[0], 1, 1);
        engines.tick(3999);
        assert_eq!(engines.answers()[&1].0, Status::Pending, "{promise_wait_ms}");
        engines.tick(4000);
        assert_eq!(engines.answers()[&1], (Status::Ok, 0));
    }
}

#[test]
fn a_promise_ends_with_its_log_its_engine_or_that_one_s_work() {
    for end in ["log", "session", "rank", "work", "namespace"] {
        let mut engines = two_engines();
        engines.promise(0, 0..4);
        engines.await_keys(0, 1, 0..4, false);
        ticks(&mut engines, 3);
        assert_eq!(engines.answers()[&1].0, Status::Pending, "{end}");
        match end {
            "log" => engines.ask(SchedulerRequest::Close { log: 0, way: 0 }),
            "session" => engines.disconnect([RANKS[0], SCHEDULER]),
            "rank" => engines.disconnect([RANKS[0]]),
            "namespace" => engines.ask(SchedulerRequest::Salt { salt: [7; 16] }),
            _ => {}
        }
        let late_ms = if end == "work" { 5000 } else { 0 };
        for ms in (3000..=3100 + late_ms).step_by(100) {
            engines.tick(ms);
        }
        assert_eq!(engines.answers()[&1], (Status::Ok, 0), "{end}");
    }
}

/// Its other saves do not count as kept promises.
#[test]
fn an_engine_that_broke_three_promises_is_not_waited_for_though_it_saves() {
    let mut engines = two_engines();
    let mut waits = |round: u32| {
        let (op, keys) = (u64::from(round) + 1, 100 + 4 * round..104 + 4 * round);
        engines.compute(500 + round, op, 1000 + round..1001 + round, false);
        engines.promise(round, keys.clone());
        engines.await_keys(round, op, keys, false);
        let waits = engines.answers()[&op].0 == Status::Pending;
        for _ in 0..if waits { 31 } else { 0 } {
            // It is seen to work.
            engines.fences(RANKS[0], op, op);
            engines.tick(engines.now_ms + 1000);
        }
        engines.ask(SchedulerRequest::Close { log: round, way: 0 });
        engines.out.clear();
        waits
    };
    assert_eq!([0, 1, 2, 3, 4].map(&mut waits), [true, true, true, false, false]);
    assert_eq!(engines.core.stats().handover_promises_broken, 3);
}

/// Its broken promises cost the engines awaiting them three waits, and other engines none.
#[test]
fn a_hoarder_of_promises_takes_no_room_from_the_promises_of_others() {
    let mut engines = two_engines();
    for log in 0..100 {
        engines.promise(log, log..log + 1);
    }
    let stats = engines.core.stats();
    assert_eq!((stats.handover_promises, stats.handover_promises_refused), (64, 36));
    engines.await_keys(0, 1, 63..64, false);
    engines.await_keys(1, 2, 64..65, false);
    ticks(&mut engines, 3);
    let answers = engines.answers();
    assert_eq!(
        (answers[&1].0, answers[&2].0),
        (Status::Pending, Status::Ok),
        "the 64th, and the refused one"
    );
    engines.ask(SchedulerRequest::Close { log: 0, way: 0 });
    engines.promise(200, 200..201);
    assert_eq!(engines.core.stats().handover_promises, 65, "one has ended");
}

#[test]
fn of_one_engine_64_requests_await_and_others_compute() {
    let mut engines = two_engines();
    for log in 0..65 {
        engines.await_keys(log, u64::from(log) + 1, 100..101, false);
    }
    let answers = engines.answers();
    assert_eq!(answers.values().filter(|answer| answer.0 == Status::Pending).count(), 64);
    assert_eq!((answers[&65], engines.core.stats().handover_beyond_limit), ((Status::Ok, 0), 1));
}

/// A block kept for another engine outlives all later saves; otherwise it is evicted first.
#[test]
fn what_is_handed_over_stays_until_another_engine_has_loaded_it() {
    for handover in [false, true] {
        let mut engines = over(4 << 20, LARGE);
        engines.compute(0, 1, 0..20, handover);
        engines.compute(1, 2, 100..162, false);
        assert_eq!(engines.found(0, 1, 0..20), if handover { 20 } else { 0 });
        if !handover {
            continue;
        }
        engines.await_keys(1, 2, 0..20, false);
        engines.speaker = D;
        engines.load(1, 3, 2, 0..20, 0);
        engines.speaker = SCHEDULER;
        engines.out.clear();
        engines.fences(D_RANK, 5, 4);
        engines.copied();
        let stats = engines.core.stats();
        assert_eq!((stats.handover_blocks, stats.handover_loaded, stats.handover_kept_bytes), (20, 20, 0));
    }
}

#[test]
fn what_nobody_loads_is_kept_for_its_time_and_by_its_own_engine_s_loads_no_less() {
    let mut engines = over(4 << 20, LARGE);
    engines.core.base.cx.kept.set_ttl(5_000);
    engines.compute(0, 1, 0..10, true);
    engines.open(5, 0..10);
    assert_eq!(engines.query(5, 2, 0, 10).value, 10);
    engines.load(5, 3, 2, 0..10, LOAD_BY_ENGINE);
    engines.loaded(RANKS[0], 3, true);
    engines.tick(4_000);
    engines.compute(1, 4, 0..10, true);
    engines.tick(8_999);
    assert_eq!(
        engines.core.stats().handover_kept_bytes,
        10 * LARGE,
        "again since its second handover, for a whole TTL"
    );
    engines.tick(9_000);
    let stats = engines.core.stats();
    assert_eq!((stats.handover_kept_bytes, stats.handover_expired, stats.handover_loaded), (0, 10, 0));
    engines.core.audit_ledger();
}

#[test]
fn half_of_the_pool_is_kept_at_most_and_the_oldest_goes_first() {
    let mut engines = over(4 << 20, LARGE);
    engines.compute(0, 1, 0..20, true);
    engines.compute(1, 2, 100..120, true);
    let stats = engines.core.stats();
    assert_eq!((stats.handover_kept_bytes, stats.handover_full), (32 * LARGE, 8));
    engines.compute(2, 3, 200..230, false);
    assert_eq!(engines.found(0, 1, 100..120), 20);
    assert_eq!(engines.found(1, 2, 0..20), 0, "its first blocks have gone");
}

#[test]
fn what_is_kept_takes_no_room_from_what_its_engine_saves_next() {
    let mut engines = over(4 << 20, LARGE);
    assert_eq!(engines.found(0, 1, 0..1), 0, "both are at work: each has half of the pool");
    for prompt in 0..6 {
        engines.compute(prompt, u64::from(prompt) + 1, prompt * 100..prompt * 100 + 20, true);
    }
    assert_eq!(engines.core.stats().handover_dropped, 0);
    assert_eq!(engines.found(1, 2, 500..520), 20);
}

#[test]
fn what_its_engine_gives_up_is_lost_and_counted() {
    let mut engines = two_engines();
    engines.open(0, 0..2);
    let save = request::Save {
        op: 1,
        keys: LogKeys::new(0, 0..2),
        position: 0,
        step: 1,
        checked: false,
        handover: true,
        replaced: 0,
    };
    engines.post(SchedulerRequest::Save(save), Vec::new(), vec![1, 2]);
    assert!(
        engines.core.hands_over(RANKS[0]) && !engines.core.hands_over(D_RANK),
        "its fences are read more often"
    );
    engines.ask(SchedulerRequest::Cancel(Cancel { op: 1, from: 1, count: 1 }));
    engines.fences(RANKS[0], 1, 1);
    engines.copied();
    let stats = engines.core.stats();
    assert_eq!((stats.handover_blocks, stats.handover_lost_to_reuse, stats.handover_dropped), (1, 1, 0));
    assert!(!engines.core.hands_over(RANKS[0]));
}

#[test]
fn blocks_that_are_kept_again_and_again_leave_little_behind() {
    let mut engines = two_engines();
    for op in 1..1000 {
        engines.now_ms += 1;
        engines.compute(0, op, 0..4, true);
    }
    let kept = &engines.core.base.cx.kept;
    assert!(kept.bytes() > 0 && kept.ends_len() < 1100, "{}", kept.ends_len());
}
