//! ADVISE: hints of an engine's clients.

use shm_protocol::hints::Advice;

use super::*;

const ALL: u32 = 4;

impl Harness {
    /// Posts advice on the first keys of a log. Returns its answer.
    pub(in crate::core) fn advise(&mut self, log: u32, op: u64, count: u32, advice: Advice) -> (Status, u32) {
        self.advise_as(log, op, count, advice, false)
    }

    fn advise_as(&mut self, log: u32, op: u64, count: u32, advice: Advice, alone: bool) -> (Status, u32) {
        let keys = LogKeys::new(log, 0..count);
        self.ask(SchedulerRequest::Advise(request::Advise { op, keys, advice, alone }));
        let of_op = |action: &Action| match action {
            Action::Outcome { op: of, outcome, .. } if *of == op => Some((outcome.status, outcome.value)),
            _ => None,
        };
        self.out.iter().find_map(of_op).expect("it is answered at once")
    }

    fn pinned_blocks(&self) -> u64 {
        self.core.stats().pinned_bytes / SHARD_BYTES
    }
}

#[test]
fn a_pin_holds_a_chain_for_its_time_also_against_all_other_saves() {
    let mut engine = Harness::over(core_of(4 << 20), 1, SHARD_BYTES);
    engine.join();
    engine.keep_chain(0, 1, 0..ALL);
    let pin = Advice::Pin { seconds: 10 };
    assert_eq!(engine.advise(0, 2, ALL, pin), (Status::Ok, ALL));
    engine.ask(SchedulerRequest::Close { log: 0, way: 0 });
    engine.keep_chain(1, 3, 100..104);
    engine.ask(SchedulerRequest::Close { log: 1, way: 0 });
    engine.fill_until_evicted(4, 8);
    engine.open(0, 0..ALL);
    engine.open(1, 100..104);
    let kept = [(0, 1900), (1, 1901)].map(|(log, op)| engine.count_kept(log, op, 0..ALL));
    assert_eq!(kept, [ALL, 0], "the younger chain went");
    engine.tick_at(9_999);
    assert_eq!(engine.pinned_blocks(), u64::from(ALL));
    engine.tick_at(10_000);
    assert_eq!(engine.pinned_blocks(), 0);
}

#[test]
fn blocks_of_unfinished_saves_are_pinned_with_their_end_and_others_are_missing() {
    let mut engine = Harness::engine(1);
    engine.open(0, 0..ALL);
    engine.post_save(0, 1, 0..2, false);
    let pin = Advice::Pin { seconds: 10 };
    assert_eq!(engine.advise(0, 2, ALL, pin), (Status::Absent, 2));
    engine.ask(SchedulerRequest::Close { log: 0, way: 7 });
    assert_eq!(engine.pinned_blocks(), 0);
    engine.fences(RANKS[0], 1, 1);
    engine.copied();
    assert_eq!(engine.saved().expect("the save ends").committed, 2);
    assert_eq!(engine.pinned_blocks(), 2);
    let stats = engine.core.stats().hints;
    let (_, counts) = stats.by_action().nth(1).expect("pins");
    assert_eq!((counts.done, counts.clipped, counts.missing), (2, 0, 2));
}

#[test]
fn a_pin_beyond_half_of_the_pool_is_clipped() {
    let mut engine = Harness::over(core_of(2 << 20), 1, 256 << 10);
    engine.join();
    engine.keep_chain(0, 1, 0..ALL + 2);
    assert_eq!(engine.advise(0, 2, ALL + 2, Advice::Pin { seconds: 1 }), (Status::Clipped, ALL));
    engine.core.base.cx.dram.audit_hints();
}

#[test]
fn a_demoted_chain_goes_first_once_its_request_has_ended() {
    let mut engine = Harness::over(core_of(4 << 20), 1, SHARD_BYTES);
    engine.join();
    for (log, op) in [(1, 1), (0, 2)] {
        engine.keep_chain(log, op, log * 100..log * 100 + ALL);
    }
    assert_eq!(engine.advise(0, 3, ALL, Advice::Demote), (Status::Ok, ALL));
    for log in [1, 0] {
        engine.ask(SchedulerRequest::Close { log, way: 7 });
    }
    engine.fill_until_evicted(4, 4);
    engine.open(1, 100..104);
    engine.open(0, 0..ALL);
    let kept = [(1, 1900), (0, 1901)].map(|(log, op)| engine.count_kept(log, op, 0..ALL));
    assert_eq!(kept, [ALL, 0], "the older chain stays");
}

#[test]
fn a_log_of_no_request_counts_as_no_use() {
    let mut engine = Harness::keeping(1, 2);
    engine.open(5, 0..2);
    assert_eq!(engine.advise_as(5, 9, 2, Advice::Retain { seconds: 5 }, true), (Status::Ok, 2));
    engine.core.base.cx.ended.clear();
    engine.ask(SchedulerRequest::Close { log: 5, way: 0 });
    assert!(engine.core.base.cx.ended.is_empty());
    assert_eq!(engine.core.stats().retained_bytes, 2 * SHARD_BYTES);
}

#[test]
fn hints_of_an_engine_without_service_find_nothing_and_end_with_their_engine() {
    let mut engine = Harness::unjoined(1);
    engine.open(0, 0..ALL);
    assert_eq!(engine.advise(0, 1, ALL, Advice::Pin { seconds: 5 }), (Status::Absent, 0));
    engine.join();
    engine.post_save(0, 2, 0..ALL, false);
    engine.fences(RANKS[0], 2, 2);
    engine.copied();
    assert_eq!(engine.advise(0, 3, ALL, Advice::Pin { seconds: 5 }), (Status::Ok, ALL));
    engine.event(CoreEvent::Disconnected { session: SCHEDULER });
    assert_eq!(engine.pinned_blocks(), 0);
    engine.core.audit_ledger();
}
