//! Nothing unaccepted is kept: steps passed over by the engine, and blocks listed by it but filled by no step.

use connector_shim::core::policy::{Changes, PlannedStep, Remark, RequestId, ServedState, Unkept};

use crate::harness::{BLOCK_TOKENS, Begin, Engine, Setup, key};

const PROMPT: u32 = 9 * BLOCK_TOKENS;
/// The most steps waiting for the engine to take their output.
const OPEN_STEPS_MAX: usize = 32;

/// An engine whose requests may fill a block in any step.
fn engine() -> Engine {
    let mut setup = Setup::default();
    setup.options.tokens_per_step = BLOCK_TOKENS;
    setup.engine()
}

/// An engine that frees all blocks but the last two.
fn engine_with_window() -> Engine {
    let mut setup = Setup::default();
    setup.options.tokens_per_step = BLOCK_TOKENS;
    setup.forms[0].window = BLOCK_TOKENS + 1;
    setup.engine()
}

/// Whether a block filled by a step behind all of the request's blocks is kept.
fn keeps_another_block(engine: &mut Engine, request: RequestId) -> bool {
    let block = engine.free_blocks(1);
    let filled = engine[request].keys.len();
    engine[request].keys.push(key(filled));
    engine[request].tokens += BLOCK_TOKENS;
    engine.take_saves();
    let changes = Changes { grown: vec![(Some(request), vec![block.clone()])], ..Changes::default() };
    let tokens = engine[request].tokens - engine[request].computed;
    engine.step_with(changes, &[(request, tokens)]);
    engine.take_saved().contains(&block[0])
}

fn unkept(unaccepted_steps: u64, unproven_blocks: u64) -> Unkept {
    Unkept { unaccepted_steps, unproven_blocks }
}

#[test]
fn the_sidecar_is_told_of_each_output_that_vllm_takes() {
    let mut engine = engine();
    let request = engine.arrive(PROMPT);
    let step = engine.compute(request);
    assert_eq!(engine.sidecar().accepted, [0_u64; 0]);
    engine.take(&step);
    assert_eq!((engine.sidecar().accepted.clone(), engine.voided()), (vec![step.step], 0));
}

/// The sidecar learns of it with the next taken output. The later step stays valid: it has computed another
/// prompt.
#[test]
fn a_step_that_is_passed_over_is_counted() {
    let mut engine = engine();
    let [first, passed, other] = [(); 3].map(|()| engine.arrive(PROMPT));
    let step = engine.compute(first);
    engine.take(&step);
    engine.compute(passed);
    let step = engine.compute(other);
    engine.take(&step);
    assert_eq!((engine.sidecar().accepted.last().copied(), engine.voided()), (Some(step.step), 0));
    assert_eq!(engine.policy.take_unkept(), unkept(1, 0));
    assert_eq!(engine.policy.take_unkept(), Unkept::default());
    assert_eq!(engine.policy.take_remarks(), [Remark::PassedOver { steps: 1, step: step.step }]);
    assert!(keeps_another_block(&mut engine, other));
    assert!(!keeps_another_block(&mut engine, passed));
}

/// Its output may have reported the end of a load. Later steps name it to the ranks until the engine has
/// taken the output of one.
#[test]
fn a_step_without_tokens_may_be_passed_over() {
    let mut engine = engine();
    let idle = engine.idle();
    assert!(idle.asks);
    let request = engine.arrive(PROMPT);
    let step = engine.compute(request);
    engine.take(&step);
    let (told, again) = (engine.idle(), engine.idle());
    assert_eq!((&told.passed, &again.passed), (&vec![idle.step], &vec![idle.step]));
    engine.take(&again);
    let last = engine.idle();
    assert_eq!(last.passed, [told.step]);
    engine.take(&last);
    assert_eq!(engine.idle().passed, [0_u64; 0]);
}

/// It is in doubt even if it goes on: its blocks saved by the next step are void.
#[test]
fn a_request_of_a_step_that_is_passed_over_is_in_doubt() {
    let mut engine = engine();
    let request = engine.arrive(PROMPT);
    engine.begin(request, Begin { most: Some(4 * BLOCK_TOKENS), ..Begin::default() });
    let step = engine.go_on(request);
    engine.take(&step);
    assert_eq!(engine.voided(), 1);
    assert!(!keeps_another_block(&mut engine, request));
    engine[request].computed = 0;
    engine.go_on(request);
    assert_eq!(engine.take_saved(), (1..11).collect::<Vec<_>>(), "all of it was computed again");
}

/// Begins a new request on the blocks of another one with the same beginning, and on `more` further blocks.
fn list_again(
    engine: &mut Engine,
    request: RequestId,
    more: u32,
    most: Option<u32>,
) -> (RequestId, PlannedStep) {
    let mut blocks = engine[request].blocks[0].clone();
    blocks.extend(engine.free_blocks(more));
    let other = engine.arrive(PROMPT + more * BLOCK_TOKENS);
    let step = engine.begin(other, Begin { found: PROMPT, listed: true, blocks, most });
    (other, step)
}

/// The other request begins on the blocks after the step was passed over.
#[test]
fn what_is_computed_upon_a_step_is_kept_if_the_step_is_accepted() {
    for taken in [true, false] {
        let mut engine = engine();
        let request = engine.arrive(PROMPT);
        let step = engine.compute(request);
        if taken {
            engine.take(&step);
        }
        let next = engine.arrive(BLOCK_TOKENS);
        let step = engine.compute(next);
        engine.take(&step);
        engine.take_saves();
        let (other, _) = list_again(&mut engine, request, 1, None);
        let saved: Vec<_> = engine.take_saves().iter().map(|(_, first, _)| *first).collect();
        assert_eq!(saved, if taken { vec![9] } else { vec![] });
        assert_eq!(engine.policy.take_unkept().unproven_blocks, if taken { 0 } else { 9 });
        assert_eq!(keeps_another_block(&mut engine, other), taken);
    }
}

/// A request begun before the engine passed the step over is in doubt from there on.
#[test]
fn what_began_upon_a_step_in_flight_is_void_with_it() {
    let mut engine = engine();
    let request = engine.arrive(PROMPT);
    engine.compute(request);
    let (other, step) = list_again(&mut engine, request, 1, None);
    let saved: Vec<_> = engine.take_saves().iter().map(|(_, first, _)| *first).collect();
    assert_eq!(saved, [0, 9]);
    engine.take(&step);
    assert_eq!(engine.voided(), 1);
    assert!(!keeps_another_block(&mut engine, other), "it goes on upon what nobody stood behind");
}

/// A request with a window begins on blocks of a step in flight, and slides past them. The engine then passes over the step.
#[test]
fn what_began_upon_blocks_that_left_its_window_is_void_too() {
    let mut engine = engine_with_window();
    let request = engine.arrive(PROMPT);
    engine.compute(request);
    let (other, step) = list_again(&mut engine, request, 4, Some(2 * BLOCK_TOKENS));
    engine.go_on(other);
    engine.take(&step);
    assert_eq!(engine.voided(), 1);
    assert!(!keeps_another_block(&mut engine, other));
}

/// The request has slid past the passed step's blocks when it ends. Its last blocks are of later steps, and fill another request's window.
#[test]
fn what_an_ended_request_computed_upon_a_passed_step_is_not_kept() {
    let mut engine = engine_with_window();
    let request = engine.arrive(PROMPT);
    engine.begin(request, Begin { most: Some(2 * BLOCK_TOKENS), ..Begin::default() });
    let step = engine.step(Vec::new(), &[(request, 3 * BLOCK_TOKENS)]);
    let last = engine.go_on(request);
    let mut blocks = engine[request].blocks[0].clone();
    engine.finish(request);
    engine.take(&step);
    assert_eq!(engine.voided(), 1);
    engine.take(&last);
    blocks[..7].fill(0);
    blocks.extend(engine.free_blocks(1));
    let other = engine.arrive(PROMPT + BLOCK_TOKENS);
    engine.begin(other, Begin { found: PROMPT, listed: true, blocks, most: None });
    assert!(!keeps_another_block(&mut engine, other));
}

/// An example is a block of a request preempted in the same schedule() that listed its blocks.
#[test]
fn a_block_that_no_step_filled_is_not_kept() {
    let mut engine = engine();
    let mut first = None;
    for _ in 0..2 {
        let request = engine.arrive(PROMPT);
        first.get_or_insert(request);
        engine.begin(request, Begin { found: 4 * BLOCK_TOKENS, listed: true, ..Begin::default() });
        engine.decode(&[request]);
        assert_eq!(engine.take_saves(), [], "neither what was found nor what was computed upon it");
    }
    let said = Remark::Unproven { blocks: 4, request: first.unwrap() };
    assert_eq!(engine.policy.take_remarks(), [said], "said once");
    assert_eq!(engine.policy.take_unkept(), unkept(0, 8));
}

/// The engine lists it under another one, and preempts the request before a step writes the block.
#[test]
fn a_block_is_proven_under_one_key() {
    let mut engine = engine();
    let first = engine.arrive(PROMPT);
    let step = engine.compute(first);
    engine.take(&step);
    engine.take_saves();
    let mut blocks = engine[first].blocks[0].clone();
    blocks.push(60);
    let other = engine.arrive(PROMPT + BLOCK_TOKENS);
    engine[other].keys = (100..110).map(key).collect();
    engine.begin(other, Begin { found: PROMPT, listed: true, blocks, most: None });
    assert_eq!(engine.take_saves(), []);
}

/// The request saves its blocks again after a preemption, from the first unproven block on.
#[test]
fn a_request_that_computes_everything_again_is_kept() {
    let mut engine = engine();
    let request = engine.arrive(PROMPT);
    engine.begin(request, Begin { found: 4 * BLOCK_TOKENS, listed: true, ..Begin::default() });
    (engine[request].preemptions, engine[request].computed) = (1, 0);
    engine.take_saves();
    engine.compute(request);
    let saved: Vec<_> = engine.take_saves().into_iter().map(|(_, first, blocks)| (first, blocks)).collect();
    assert_eq!(saved, [(0, (10..19).collect())]);
}

/// An engine awaiting its blocks computes them at once.
#[test]
fn nothing_is_promised_of_a_request_in_doubt() {
    let mut engine = engine();
    let promised = |engine: &mut Engine| engine.sidecar().logs.iter().filter(|log| log.promised).count();
    let request = engine.arrive_to_decode(PROMPT);
    assert_eq!(promised(&mut engine), 1);
    engine.begin(request, Begin { found: 4 * BLOCK_TOKENS, listed: true, ..Begin::default() });
    assert_eq!(engine.sidecar().closed, [0]);
    engine.decode(&[request]);
    assert_eq!(promised(&mut engine), 1);
    // Another prompt is promised as before.
    engine.arrive_to_decode(PROMPT);
    assert_eq!(promised(&mut engine), 2);
}

/// The policy says it once. It ends when the engine takes an output again.
#[test]
fn an_engine_whose_outputs_nobody_takes_keeps_and_promises_nothing() {
    let mut engine = engine();
    let promised = |engine: &mut Engine| engine.sidecar().logs.iter().filter(|log| log.promised).count();
    let request = engine.arrive_to_decode(PROMPT);
    engine.compute(request);
    assert_eq!(engine.policy.state(), ServedState::Serving);
    let mut step = engine.idle();
    for _ in 0..=OPEN_STEPS_MAX {
        step = engine.decode(&[request]);
    }
    assert_eq!(engine.policy.state(), ServedState::Unaccepted);
    assert_eq!((engine.voided(), engine.sidecar().closed.clone()), (1, vec![0]));
    engine.take_saves();
    let other = engine.arrive_to_decode(PROMPT);
    engine.compute(other);
    assert_eq!((engine.take_saves(), promised(&mut engine)), (vec![], 1));
    assert_eq!(engine.policy.take_remarks(), [Remark::Stalled { steps: OPEN_STEPS_MAX as u64 }]);
    engine.take(&step);
    let next = engine.arrive(PROMPT);
    let next = engine.compute(next);
    engine.take(&next);
    let saved: Vec<_> = engine.take_saves().iter().map(|(_, first, _)| *first).collect();
    assert_eq!(saved, [0]);
    assert_eq!(engine.sidecar().accepted.last(), Some(&next.step));
}
