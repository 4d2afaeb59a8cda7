//! Blocks of finished requests, held by the engine until they are saved.

use std::time::Duration;

use connector_shim::core::policy::RequestId;

use crate::harness::{BLOCK_TOKENS, Begin, Engine, Setup};

const WHOLE: u32 = 3;
const TAIL: u32 = WHOLE + 1;
/// A save without an end holds a block for so long.
const HELD: Duration = Duration::from_secs(1);

/// A request with a prompt of three blocks and a tail, computed, and being saved in parts of two blocks.
fn prefill(hands_over: bool) -> (Engine, RequestId) {
    let mut setup = Setup::default();
    setup.machine.block_bytes = 2 << 20;
    let mut engine = setup.engine();
    let tokens = WHOLE * BLOCK_TOKENS + 5;
    let request = if hands_over { engine.arrive_to_decode(tokens) } else { engine.arrive(tokens) };
    engine.compute(request);
    (engine, request)
}

/// The request is over, and the engine holds these of the blocks named by the policy.
fn end(engine: &mut Engine, request: RequestId, held: &[u32]) {
    assert_eq!(engine.finish(request).hold, (1..=TAIL).collect::<Vec<u32>>());
    engine.policy.held(held, engine.time);
}

/// The blocks released with the next step, when the ends of saves are known.
fn released(engine: &mut Engine) -> Vec<u32> {
    engine.idle();
    let mut released = engine.opened.released.clone();
    engine.idle();
    released.extend(&engine.opened.released);
    released
}

/// An engine with a prefix cache gives the block of the tail away in the step after its save.
#[test]
fn a_tail_is_not_reused_before_it_is_saved() {
    let (mut engine, request) = prefill(true);
    end(&mut engine, request, &[TAIL]);
    assert_eq!(released(&mut engine), [0_u32; 0]);
    engine.sidecar().finish(0);
    assert_eq!(released(&mut engine), [TAIL]);
}

/// The save of such a request is given up where its block is overwritten.
#[test]
fn what_nobody_goes_on_with_is_reused() {
    let (mut engine, request) = prefill(false);
    let ended = engine.finish(request);
    assert_eq!((ended.hold, ended.handed_over), (vec![], None));
}

/// An engine reuses all blocks of a request at once there.
#[test]
fn without_a_prefix_cache_every_block_waits() {
    let (mut engine, request) = prefill(true);
    end(&mut engine, request, &[1, 2, 3, TAIL]);
    engine.sidecar().finish_next(0);
    assert_eq!(released(&mut engine), [1, 2]);
    engine.sidecar().finish(0);
    assert_eq!(released(&mut engine), [3, TAIL]);
}

/// A hanging sidecar ends no save.
#[test]
fn a_save_without_an_end_holds_nothing_for_long() {
    let (mut engine, request) = prefill(true);
    end(&mut engine, request, &[TAIL]);
    engine.time += HELD;
    assert_eq!(released(&mut engine), [0_u32; 0]);
    engine.time += Duration::from_millis(1);
    assert_eq!(released(&mut engine), [TAIL]);
}

/// An engine resets a pool only while no block is in use, so held ones are given back before.
#[test]
fn vllm_can_reset_its_pool() {
    let (mut engine, request) = prefill(true);
    end(&mut engine, request, &[TAIL]);
    assert_eq!(engine.policy.release_held(), [TAIL]);
    engine.sidecar().finish(0);
    assert_eq!(released(&mut engine), [0_u32; 0], "each is given back once");
}

/// A preempted request may name, at its end, a block held since the end of another request.
#[test]
fn a_block_is_held_once() {
    let (mut engine, preempted) = prefill(true);
    let other = engine.arrive_to_decode(WHOLE * BLOCK_TOKENS + 5);
    engine.begin(other, Begin { blocks: vec![1, 2, 3, TAIL], ..Begin::default() });
    end(&mut engine, other, &[TAIL]);
    assert_eq!(engine.finish(preempted).hold, [1, 2, 3]);
}
