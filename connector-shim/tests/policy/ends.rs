//! The last blocks of requests: filled by a step that was scheduled before their keys were known.

use connector_shim::core::policy::PlannedStep;

use crate::harness::{BLOCK_TOKENS, Engine, Request, Setup, key};

const FULL: u32 = 2 * BLOCK_TOKENS;

type Case = (&'static str, fn(&mut Request));

/// An engine whose request's second block was filled by the last step, of so many tokens. Its prompt is `missing` tokens shorter than two
/// blocks; the step was scheduled without knowing these, and its answer's last token comes behind them.
fn filled_unknown(missing: u32) -> (Engine, u64, PlannedStep) {
    let mut setup = Setup::default();
    setup.options.tokens_per_step = missing;
    let mut engine = setup.engine();
    let id = engine.arrive(FULL - missing);
    let prompt = engine.compute(id);
    let last = engine.step(Vec::new(), &[(id, missing)]);
    assert_eq!(engine.take_saves(), [(0, 0, engine[id].blocks[0][..1].to_vec())]);
    engine.take(&prompt);
    assert_eq!(last.step, prompt.step + 1);
    let request = &mut engine[id];
    (request.tokens, request.keys) = (FULL + 1, vec![key(0), key(1)]);
    (engine, id, last)
}

#[test]
fn a_block_filled_by_the_last_step_is_saved_before_the_log_closes() {
    for missing in [1, 4] {
        let (mut engine, id, _) = filled_unknown(missing);
        let block = engine[id].blocks[0][1];
        engine.finish(id);
        assert_eq!(engine.take_saves(), [(0, 1, vec![block])]);
        assert_eq!(engine.sidecar().closed, [0]);
    }
}

#[test]
fn a_last_block_is_not_saved_unless_its_step_surely_filled_it() {
    let cases: [Case; 4] = [
        ("its last token is an answer's last, or a refused draft", |request| request.tokens = FULL),
        ("the engine has taken tokens back", |request| request.computed = FULL - 1),
        ("the engine has taken the blocks back", |request| request.preemptions = 1),
        ("its key is not known", |request| request.keys.truncate(1)),
    ];
    for (case, change) in cases {
        let (mut engine, id, _) = filled_unknown(4);
        change(&mut engine[id]);
        engine.finish(id);
        assert!(engine.take_saved().is_empty(), "{case}");
    }
    let (mut engine, id, _) = filled_unknown(4);
    engine.policy.weights_may_have_changed();
    engine.finish(id);
    assert!(engine.take_saved().is_empty(), "its weights may have changed");
    for taken in [true, false] {
        let (mut engine, id, last) = filled_unknown(4);
        let later = engine.idle();
        if taken {
            engine.take(&last);
        }
        engine.take(&later);
        engine.finish(id);
        assert!(engine.take_saved().is_empty(), "its step was refused, or a save of it comes too late");
    }
}
