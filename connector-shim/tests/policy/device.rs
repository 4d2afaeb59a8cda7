//! Blocks of ended requests in the engine's own cache: saved again, or given up, before the engine reuses them.

use connector_shim::core::policy::{Changes, RequestId};

use crate::harness::{BLOCK_TOKENS, Begin, Engine, Setup};

const PROMPT: u32 = 3 * BLOCK_TOKENS + 1;
/// With so many allocated blocks a step is asked for the blocks reused next.
const ASKED_AFTER: u32 = 8;

fn engine(keep_copies: bool) -> Engine {
    let mut setup = Setup::default();
    setup.options.keep_copies = keep_copies;
    setup.engine()
}

/// A request with three full blocks, 1 to 3, of an accepted step is over.
fn ended(engine: &mut Engine) -> RequestId {
    let id = engine.arrive(PROMPT);
    let step = engine.compute(id);
    engine.take(&step);
    engine.sidecar().finish(0);
    engine.take_saves();
    engine.finish(id);
    id
}

/// The logs ended on the device, and the closed ones.
fn logs(engine: &mut Engine) -> (Vec<usize>, Vec<usize>) {
    let sidecar = engine.sidecar();
    (sidecar.ended.clone(), sidecar.closed.clone())
}

/// A step with these blocks named as reused next.
fn name(engine: &mut Engine, blocks: &[u32]) {
    engine.named = blocks.to_vec();
    let step = engine.idle();
    engine.take(&step);
}

#[test]
fn blocks_about_to_be_reused_are_saved_under_their_ended_request() {
    let mut engine = engine(false);
    ended(&mut engine);
    assert_eq!(logs(&mut engine), (vec![0], vec![]));
    name(&mut engine, &[3, 2]);
    assert_eq!(engine.take_saves(), [(0, 1, vec![2, 3])]);
    assert!(engine.sidecar().closed.is_empty(), "a block of it is left");
    name(&mut engine, &[3, 1]);
    assert_eq!(engine.take_saves(), [(0, 0, vec![1])], "each is offered once");
    assert_eq!(engine.sidecar().closed, [0]);
    assert_eq!(engine.sidecar().ways, [0], "the request has ended before");
}

/// The engine may reuse the blocks in its next step, before it takes the output of this one.
#[test]
fn their_save_is_accepted_at_once() {
    let mut engine = engine(false);
    ended(&mut engine);
    let before = engine.sidecar().accepted.clone();
    engine.named = vec![3, 2, 1];
    engine.idle();
    assert_eq!(engine.take_saves(), [(0, 0, vec![1, 2, 3])]);
    assert_eq!(engine.sidecar().accepted, [before[0], before[0]], "the step that filled them");
}

#[test]
fn by_default_logs_close_and_nothing_is_offered_again() {
    let mut engine = engine(true);
    ended(&mut engine);
    assert_eq!(logs(&mut engine), (vec![], vec![0]));
    name(&mut engine, &[3, 2, 1]);
    assert_eq!(engine.take_saves(), []);
}

#[test]
fn blocks_reused_without_a_name_have_left() {
    let mut engine = engine(false);
    ended(&mut engine);
    let next = engine.arrive(BLOCK_TOKENS * 2);
    engine.begin(next, Begin { blocks: vec![2, 3], ..Begin::default() });
    assert_eq!(engine.sidecar().left, [(0, 1, 2)]);
    name(&mut engine, &[3, 2, 1]);
    assert_eq!(engine.take_saves().last(), Some(&(0, 0, vec![1])));
    assert_eq!(engine.sidecar().closed, [0]);
}

#[test]
fn a_block_belongs_to_the_request_that_ended_last() {
    let mut engine = engine(false);
    ended(&mut engine);
    let next = engine.arrive(PROMPT + BLOCK_TOKENS);
    let blocks = vec![1, 2, 10, 11];
    let step = engine.begin(next, Begin { found: 2 * BLOCK_TOKENS, listed: true, blocks, most: None });
    engine.take(&step);
    // Blocks found by a request are offered one step later, if at all.
    let step = engine.decode(&[next]);
    engine.take(&step);
    assert!(!engine.take_saved().iter().any(|block| [1, 2].contains(block)), "they are on the device");
    engine.finish(next);
    name(&mut engine, &[11, 10, 2, 1]);
    assert_eq!(engine.take_saves(), [(1, 0, vec![1, 2, 10, 11])]);
    assert_eq!(engine.sidecar().closed, [1], "block 3 of the first request is left");
}

/// The step may still be refused, and other steps' outputs taken.
#[test]
fn blocks_of_an_open_step_are_not_offered() {
    let mut engine = engine(false);
    let id = engine.arrive(PROMPT);
    let open = engine.compute(id);
    engine.finish(id);
    engine.take_saves();
    engine.named = vec![3, 2, 1];
    engine.idle();
    assert_eq!(engine.take_saves(), []);
    engine.take(&open);
    name(&mut engine, &[3, 2, 1]);
    assert_eq!(engine.take_saves(), [(0, 0, vec![1, 2, 3])]);
}

#[test]
fn blocks_of_a_refused_step_are_never_offered() {
    let mut engine = engine(false);
    let id = engine.arrive(PROMPT);
    engine.compute(id);
    engine.finish(id);
    engine.take_saves();
    let later = engine.idle();
    engine.take(&later);
    name(&mut engine, &[3, 2, 1]);
    assert_eq!(engine.take_saves(), []);
}

#[test]
fn after_a_change_of_weights_nothing_on_the_device_is_offered() {
    let mut engine = engine(false);
    ended(&mut engine);
    engine.policy.weights_may_have_changed();
    engine.serve();
    assert_eq!(engine.sidecar().closed, [0]);
    name(&mut engine, &[3, 2, 1]);
    assert_eq!(engine.take_saves(), []);
}

#[test]
fn a_prompt_for_another_engine_is_kept_as_before() {
    let mut engine = engine(false);
    let id = engine.arrive_to_decode(PROMPT);
    let step = engine.compute(id);
    engine.take(&step);
    engine.finish(id);
    assert_eq!(logs(&mut engine), (vec![], vec![0]));
}

#[test]
fn the_engine_is_asked_for_names_once_in_many_blocks() {
    let mut engine = engine(false);
    let asked = |engine: &mut Engine, blocks: u32| {
        let grown = engine.free_blocks(blocks);
        engine.step_with(Changes { grown: vec![(None, vec![grown])], ..Changes::default() }, &[]);
        engine.opened.named
    };
    assert_eq!(asked(&mut engine, 100), 0, "nothing is on the device");
    ended(&mut engine);
    let first: Vec<u32> = (0..ASKED_AFTER).map(|_| asked(&mut engine, 1)).collect();
    assert!(first[..7].iter().all(|count| *count == 0), "{first:?}");
    assert!(first[7] >= 2 * ASKED_AFTER, "{first:?}");
    assert_eq!(asked(&mut engine, 100), 200, "twice the blocks of a step");
}
