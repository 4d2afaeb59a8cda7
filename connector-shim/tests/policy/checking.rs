//! The standing check: blocks of a hit are computed nevertheless, and saved to be compared.

use crate::harness::{BLOCK_TOKENS, Begin, Engine, Setup};
use crate::sidecar::HERE;

/// Blocks computed by a short check.
const CHECK_BLOCKS: u32 = 4;

/// An engine with a hit of 7 blocks for every prompt.
fn finding(setup: Setup) -> Engine {
    let mut engine = setup.engine();
    engine.sidecar().hits = Some(7);
    engine
}

fn checking() -> Engine {
    finding(Setup::checking(100))
}

/// The check computes exactly the blocks found and not loaded; the blocks behind them are saved as ever.
#[test]
fn the_end_of_a_hit_is_computed_and_compared() {
    let mut engine = checking();
    let request = engine.arrive(9 * BLOCK_TOKENS + 1);
    assert_eq!(engine.ask(request), Some((7 - CHECK_BLOCKS) * BLOCK_TOKENS));
    engine.compute_behind(request, 3 * BLOCK_TOKENS);
    assert_eq!(engine.sidecar().checked, [(0, 3, vec![4, 5, 6, 7])]);
    assert_eq!(engine.take_saves(), [(0, 7, vec![8, 9])]);
    engine.decode(&[request]);
    assert_eq!(engine.take_saves(), [(0, 0, vec![1, 2, 3])], "offered, and so marked as used");
    assert_eq!(engine.sidecar().checked.len(), 1);
}

/// Nothing is saved before all of it can be compared.
#[test]
fn a_checked_hit_that_is_computed_in_parts() {
    let mut engine = checking();
    let request = engine.arrive(9 * BLOCK_TOKENS + 1);
    assert_eq!(engine.ask(request), Some(3 * BLOCK_TOKENS));
    let most = Some(2 * BLOCK_TOKENS);
    engine.begin(request, Begin { found: 3 * BLOCK_TOKENS, most, ..Begin::default() });
    assert_eq!((engine.sidecar().checked.len(), engine.take_saves()), (0, vec![]));
    engine.go_on(request);
    assert_eq!(engine.sidecar().checked, [(0, 3, vec![4, 5, 6, 7])]);
    assert_eq!(engine.take_saves(), [(0, 7, vec![8, 9])]);
}

/// All blocks of the hit are compared, and nothing is loaded.
#[test]
fn a_long_check_computes_the_whole_hit_in_as_many_steps_as_it_takes() {
    let mut setup = Setup::checking(1);
    setup.options.checks.per_mille = 1000;
    let mut engine = finding(setup);
    let [first, second, third] = [(); 3].map(|()| engine.arrive(9 * BLOCK_TOKENS + 1));
    assert_eq!(engine.ask(first), Some(3 * BLOCK_TOKENS), "nothing was loaded yet");
    engine.compute_behind(first, 3 * BLOCK_TOKENS);
    engine.sidecar().finish(0);
    engine.decode(&[first]);
    engine.decode(&[first]);
    assert_eq!(engine.ask(second), Some(7 * BLOCK_TOKENS));
    engine.compute_behind(second, 7 * BLOCK_TOKENS);
    engine.sidecar().checked.clear();
    assert_eq!(engine.ask(third), Some(0));
    engine.begin(third, Begin { most: Some(4 * BLOCK_TOKENS), ..Begin::default() });
    assert_eq!(engine.sidecar().checked, []);
    engine.go_on(third);
    let compared: Vec<_> =
        engine.sidecar().checked.iter().map(|(_, first, blocks)| (*first, blocks.len())).collect();
    assert_eq!(compared, [(0, 7)]);
}

/// The next request arrives before the next step: blocks of the hit may be in the engine's own cache, too.
#[test]
fn after_a_difference_no_block_of_before_is_found_or_kept() {
    let mut engine = checking();
    let request = engine.arrive(9 * BLOCK_TOKENS + 1);
    engine.ask(request);
    engine.compute_behind(request, 3 * BLOCK_TOKENS);
    engine.sidecar().finish(1);
    engine.take_saves();
    let another = engine.arrive(9 * BLOCK_TOKENS + 1);
    assert!(engine.contradicted);
    engine.decode(&[request]);
    assert_eq!(engine.take_saves(), [], "computed upon what was loaded");
    assert_eq!(engine.ask(another), Some(0), "in doubt");
}

/// Nothing of it is loaded.
#[test]
fn a_short_hit_is_computed_wholly() {
    let mut engine = checking();
    engine.sidecar().hits = Some(3);
    let request = engine.arrive(5 * BLOCK_TOKENS + 1);
    assert_eq!(engine.ask(request), Some(0));
    engine.compute(request);
    assert_eq!(engine.sidecar().checked, [(0, 0, vec![1, 2, 3])]);
    assert_eq!(engine.take_saves(), [(0, 3, vec![4, 5])]);
}

/// The engine had no blocks for the request at its first question.
#[test]
fn vllm_may_ask_again() {
    let mut engine = checking();
    let request = engine.arrive(9 * BLOCK_TOKENS + 1);
    assert_eq!([engine.ask(request), engine.ask(request)], [Some(3 * BLOCK_TOKENS); 2]);
    let other = engine.arrive(9 * BLOCK_TOKENS + 1);
    assert_eq!(engine.ask(other), Some(7 * BLOCK_TOKENS), "one check at a time");
}

/// The weights may differ from then on, so blocks proven before may be wrong.
#[test]
fn after_a_verdict_hits_are_whole_until_the_weights_may_have_changed() {
    let mut engine = checking();
    let request = engine.arrive(9 * BLOCK_TOKENS + 1);
    engine.ask(request);
    engine.compute_behind(request, 3 * BLOCK_TOKENS);
    engine.sidecar().finish(0);
    engine.decode(&[request]);
    let next = |engine: &mut Engine| {
        let next = engine.arrive(9 * BLOCK_TOKENS + 1);
        engine.ask(next)
    };
    assert_eq!(next(&mut engine), Some(7 * BLOCK_TOKENS));
    engine.policy.weights_may_have_changed();
    assert_eq!(next(&mut engine), Some(7 * BLOCK_TOKENS), "not bound yet");
    engine.bind(HERE);
    assert_eq!(next(&mut engine), Some(3 * BLOCK_TOKENS));
}

/// Not compared are blocks on their way, requests with a failed load, and all blocks if checks are off.
#[test]
fn what_is_not_compared() {
    let mut setup = Setup::checking(100);
    (setup.machine.recomputes, setup.machine.by_engine) = (true, false);
    let mut engine = finding(setup);
    engine.sidecar().arriving = true;
    let arriving = engine.arrive(9 * BLOCK_TOKENS + 1);
    assert_eq!(engine.ask(arriving), Some(7 * BLOCK_TOKENS));
    engine.sidecar().arriving = false;
    let begin = |engine: &mut Engine| {
        let request = engine.arrive(9 * BLOCK_TOKENS + 1);
        assert_eq!(engine.ask(request), Some(3 * BLOCK_TOKENS));
        engine
            .begin(request, Begin { found: 3 * BLOCK_TOKENS, most: Some(BLOCK_TOKENS), ..Begin::default() });
        request
    };
    let next = |engine: &mut Engine| {
        let next = engine.arrive(9 * BLOCK_TOKENS + 1);
        engine.ask(next)
    };
    let failed = begin(&mut engine);
    engine.policy.loads_failed(&[1]);
    // Hits pass after a check without a verdict: one, then two.
    assert_eq!(next(&mut engine), Some(7 * BLOCK_TOKENS));
    let passed_over = begin(&mut engine);
    engine.go_on(failed);
    let step = engine.idle();
    engine.take(&step);
    engine.go_on(passed_over);
    assert_eq!(engine.sidecar().checked, []);
    assert_eq!([(); 3].map(|()| next(&mut engine)), [7, 7, 3].map(|blocks| Some(blocks * BLOCK_TOKENS)));
    let mut without = finding(Setup::default());
    let request = without.arrive(9 * BLOCK_TOKENS + 1);
    assert_eq!(without.ask(request), Some(7 * BLOCK_TOKENS));
}
