//! Blocks of a step are kept only if the engine went on with its output.

use super::*;

/// A session of a release without ACCEPT.
const OLD: SessionId = 41;
const OLD_RANK: SessionId = 42;
const OLD_RUN: [u8; 16] = [4; 16];

impl Harness {
    /// Ends the copies asked for since the last look; the ring is drained, and no step is accepted.
    fn copied_unaccepted(&mut self) {
        self.copies().iter().for_each(|(copy, ..)| self.end_copy(*copy, true));
        self.drained_below(0);
    }

    /// Keys `0..count` of log 0, copied whole by operation 1 in step 2. The step is done and not accepted.
    fn whole(count: u32) -> Self {
        let mut engine = Self::engine(1);
        engine.open(0, 0..count);
        engine.save(0, 1, 2, 1..count + 1);
        engine.fences(RANKS[0], 2, 2);
        engine.copied_unaccepted();
        assert!(engine.saved().is_none(), "it waits for its acceptance");
        engine
    }

    pub(super) fn tick_at(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        self.event(CoreEvent::Tick);
    }

    /// Blocks of the next save's end: committed, present, cancelled, dropped, and unaccepted of these.
    fn end(&mut self) -> [u32; 5] {
        let Saved { committed, present, cancelled, dropped, unaccepted, .. } = self.saved().expect("an end");
        [committed, present, cancelled, dropped, unaccepted]
    }

    /// Returns the number of the first keys of log 0 found.
    fn found_keys(&mut self, op: u64, count: u32) -> u32 {
        self.query(0, op, 0, count).value
    }

    /// Connects an engine of the release before; it sends the messages from now on.
    fn connect_old(&mut self) {
        let old = |hello: Hello| Hello { version: 2, oldest: Some(2), release: "0.2.0".into(), ..hello };
        self.connect(OLD, old(hello(1, Role::Scheduler { run: OLD_RUN })));
        self.connect(OLD_RANK, old(rank_hello(1, 0)));
        self.report(OLD_RANK, WorkerRequest::Join { run: OLD_RUN, step: 0 });
        self.out.clear();
        self.speaker = OLD;
    }
}

#[test]
fn a_step_that_only_a_later_fence_passes_is_not_kept() {
    let mut engine = Harness::engine(2);
    engine.open(0, 0..20);
    engine.save(0, 1, 2, 1..21);
    // Step 2 never began on rank 1.
    engine.fences(RANKS[0], 2, 2);
    engine.fences(RANKS[1], 3, 3);
    engine.copied_unaccepted();
    assert_eq!(engine.found_keys(2, 20), 0);
    engine.accept_step(3);
    engine.drained_below(0);
    assert_eq!(engine.end(), [0, 0, 0, 20, 20]);
    assert_eq!(engine.found_keys(3, 20), 0);
    let stats = engine.core.stats();
    assert_eq!((stats.saves_unaccepted, stats.saves_dropped, stats.pool_used_bytes), (20, 20, 0));
}

#[test]
fn a_save_is_kept_in_the_turn_that_read_its_acceptance() {
    let mut engine = Harness::whole(3);
    assert_eq!(engine.found_keys(2, 3), 0);
    engine.accept_step(2);
    assert!(engine.saved().is_none(), "the word that voids saves was not read since");
    engine.drained_below(0);
    assert_eq!(engine.end(), [3, 0, 0, 0, 0]);
    assert_eq!(engine.found_keys(3, 3), 3);
}

#[test]
fn an_acceptance_may_come_before_the_copies_end_or_begin() {
    let mut engine = Harness::engine(1);
    engine.open(0, 0..2);
    engine.save(0, 1, 2, 1..3);
    engine.accept_step(2);
    engine.drained_below(0);
    engine.fences(RANKS[0], 2, 2);
    engine.copied_unaccepted();
    assert_eq!(engine.end(), [2, 0, 0, 0, 0]);
}

#[test]
fn a_later_step_voids_what_was_left_unaccepted_wherever_that_stands() {
    let mut engine = Harness::engine(1);
    engine.open(0, 0..2);
    engine.open(1, 10..12);
    engine.open(2, 20..22);
    engine.save(0, 1, 1, 1..3);
    engine.save(1, 2, 2, 3..5);
    engine.save(2, 3, 4, 5..7);
    // Operation 1 is being copied, 2 and 3 wait for their steps.
    engine.fences(RANKS[0], 1, 1);
    let copies = engine.copies();
    engine.accept_step(3);
    engine.drained_below(0);
    assert_eq!(engine.end(), [0, 0, 0, 2, 2], "operation 2 ends at once");
    engine.end_copy(copies[0].0, true);
    engine.drained_below(0);
    assert_eq!(engine.end(), [0, 0, 0, 2, 2], "operation 1 with its copy");
    engine.fences(RANKS[0], 4, 4);
    engine.copied_unaccepted();
    engine.accept_step(3);
    engine.accept_step(2);
    engine.drained_below(0);
    assert!(engine.saved().is_none(), "steps do not go back");
    engine.accept_step(4);
    engine.drained_below(0);
    assert_eq!(engine.end(), [2, 0, 0, 0, 0]);
}

#[test]
fn a_save_behind_its_acceptance_is_accepted_and_one_of_an_earlier_step_is_not() {
    let mut engine = Harness::engine(1);
    engine.fences(RANKS[0], 5, 5);
    engine.accept_step(5);
    engine.open(0, 0..2);
    engine.save(0, 1, 5, 1..3);
    engine.copied_unaccepted();
    assert_eq!(engine.end(), [2, 0, 0, 0, 0]);
    engine.open(1, 0..3);
    engine.save(1, 2, 4, 1..4);
    assert_eq!(engine.end(), [0, 2, 0, 1, 1], "two blocks of it are kept already");
}

#[test]
fn a_cancel_takes_nothing_from_a_whole_save() {
    let mut engine = Harness::whole(3);
    engine.ask(SchedulerRequest::Cancel(Cancel { op: 1, from: 0, count: 3 }));
    engine.drained_below(0);
    engine.accept_step(2);
    engine.drained_below(0);
    assert_eq!(engine.end(), [3, 0, 0, 0, 0]);
}

#[test]
fn a_whole_save_is_void_by_the_word_that_its_acceptance_makes_visible() {
    let mut engine = Harness::whole(3);
    engine.accept_step(2);
    engine.drained_below(2);
    assert_eq!(engine.end(), [0, 0, 3, 0, 0]);
    assert_eq!(engine.found_keys(2, 3), 0);
}

#[test]
fn a_save_that_waits_for_its_binding_keeps_its_acceptance() {
    let mut engine = Harness::unjoined(1);
    engine.open(0, 0..2);
    engine.open(1, 10..12);
    engine.save(0, 1, 1, 1..3);
    engine.save(1, 2, 2, 3..5);
    engine.accept_step(2);
    engine.join();
    engine.drained_below(0);
    assert_eq!(engine.end(), [0, 0, 0, 2, 2]);
    engine.fences(RANKS[0], 2, 2);
    engine.copied_unaccepted();
    assert_eq!(engine.end(), [2, 0, 0, 0, 0]);
}

#[test]
fn what_is_kept_already_needs_no_acceptance_and_a_check_does() {
    let mut engine = Harness::keeping(1, 2);
    engine.open(1, 0..2);
    engine.save(1, 2, 2, 1..3);
    assert_eq!(engine.end(), [0, 2, 0, 0, 0]);
    engine.post_save(1, 3, 0..2, true);
    engine.fences(RANKS[0], 3, 3);
    engine.copied_unaccepted();
    assert!(engine.comparison().is_none(), "the blocks may be worthless");
    engine.accept_step(3);
    engine.drained_below(0);
    assert!(engine.comparison().is_some());
}

#[test]
fn a_check_of_a_refused_step_has_no_verdict() {
    let mut engine = Harness::keeping(1, 2);
    engine.open(1, 0..2);
    engine.post_save(1, 3, 0..2, true);
    engine.fences(RANKS[0], 3, 3);
    engine.copied_unaccepted();
    engine.accept_step(4);
    engine.drained_below(0);
    let is_comparison =
        |action: &Action| matches!(action, Action::Inspect(asked) if !asked.pairs().is_empty());
    assert!(!engine.out.iter().any(is_comparison));
    assert_eq!(engine.end(), [0, 0, 0, 2, 2]);
    assert_eq!(engine.core.stats().checks_undecided, 1);
}

#[test]
fn what_is_never_accepted_is_nobodys_after_30_s() {
    let mut engine = Harness::whole(3);
    engine.tick_at(29_999);
    assert!(engine.saved().is_none());
    engine.tick_at(30_000);
    assert_eq!(engine.end(), [0, 0, 0, 3, 3]);
    assert_eq!(engine.core.stats().pool_used_bytes, 0);
    engine.save(0, 2, 3, 1..4);
    engine.fences(RANKS[0], 3, 3);
    engine.copied();
    assert_eq!(engine.end(), [3, 0, 0, 0, 0], "its keys are free");
}

#[test]
fn an_engine_of_the_release_before_loads_and_saves_nothing() {
    let mut engine = Harness::keeping(1, 2);
    engine.connect_old();
    engine.open(0, 0..4);
    assert_eq!(engine.found_keys(1, 4), 2);
    engine.save(0, 2, 1, 1..5);
    assert_eq!(engine.end(), [0, 2, 0, 2, 2]);
    engine.fences(OLD_RANK, 1, 1);
    assert!(engine.copies().is_empty(), "nothing is copied");
    engine.load(0, 3, 1, 0..2, LOAD_BY_ENGINE);
    engine.loaded(OLD_RANK, 3, true);
    assert_eq!(engine.core.stats().loaded_blocks, 2);
    engine.accept_step(1);
    assert_eq!(
        engine.closed().as_deref(),
        Some("the message ACCEPT belongs to protocol 3, and the session speaks an earlier one")
    );
}

#[test]
fn a_promise_of_the_release_before_is_waited_for_by_nobody() {
    let mut engine = Harness::engine(1);
    engine.connect_old();
    engine.ask(SchedulerRequest::Open { log: 0 });
    let append = Append { keys: LogKeys::new(0, 0..1), chunks: [0; 6], promised: true, tail: false };
    engine.append(append, vec![hash(0)]);
    assert_eq!(engine.core.stats().handover_promises, 0);
}
