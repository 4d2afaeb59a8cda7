//! The namespace of computed KV, and times without a known one.

use connector_shim::core::policy::{BegunRequest, Media, Remark};

use crate::harness::{BLOCK_TOKENS, Begin, Engine, key};
use crate::sidecar::{ELSEWHERE, HERE};

// --- possible changes of the weights ---

/// Half of its first block was computed with the old weights.
#[test]
fn a_session_that_goes_on_in_a_block_of_before_keeps_nothing_of_it() {
    let mut engine = Engine::new();
    let request = engine.arrive(10);
    engine.compute(request);
    engine.policy.weights_may_have_changed();
    engine.bind(ELSEWHERE);
    engine.idle();
    engine[request].tokens = 2 * BLOCK_TOKENS + 1;
    engine[request].keys = vec![key(0), key(1)];
    let resumed = BegunRequest { request: Some(request), blocks: vec![vec![1, 2, 3]], computed: 10 };
    engine.step(vec![resumed], &[(request, 2 * BLOCK_TOKENS - 9)]);
    assert_eq!(engine.take_saves(), []);
    let other = engine.arrive(2 * BLOCK_TOKENS + 1);
    engine.compute(other);
    assert_eq!(engine.take_saves().len(), 1, "what begins anew is kept");
}

/// The block is not kept even if it is found in the engine's own cache. KV computed afterwards is kept, once
/// the session is bound again.
#[test]
fn what_was_computed_before_is_not_kept() {
    let mut engine = Engine::new();
    let first = engine.arrive(4 * BLOCK_TOKENS + 1);
    engine.compute(first);
    assert_eq!(engine.take_saves(), [(0, 0, vec![1, 2, 3, 4])]);
    engine.policy.weights_may_have_changed();
    engine.serve();
    assert_eq!((engine.sidecar().changed.clone(), engine.voided()), (vec![1], 1));
    assert_eq!(engine.decode(&[first]).weights, 1);
    engine.bind(ELSEWHERE);
    engine.decode(&[first]);
    assert_eq!(engine.take_saves(), []);
    let second = engine.arrive(2 * BLOCK_TOKENS + 1);
    engine.compute(second);
    assert_eq!(engine.take_saves(), [(1, 0, vec![6, 7])]);
}

/// An engine keeps its encoder's outputs until the encoder makes them again; KV computed upon such blocks, locally found, is lost too.
#[test]
fn an_image_of_before_is_not_kept_with_the_new_weights() {
    for anew in [false, true] {
        let mut engine = Engine::new();
        let image = || {
            let (offset, length) = (2 * BLOCK_TOKENS + 3, BLOCK_TOKENS);
            vec![Media { identifier: "image".into(), offset, length }]
        };
        engine.policy.weights_may_have_changed();
        engine.bind(ELSEWHERE);
        engine.idle();
        let seen = engine.arrive(4 * BLOCK_TOKENS + 1);
        engine.policy.follow_media(seen, image());
        if anew {
            engine.encoded.push("image".into());
        }
        engine.begin(seen, Begin { most: Some(BLOCK_TOKENS), ..Begin::default() });
        engine.go_on(seen);
        assert_eq!(engine.take_saved(), if anew { vec![1, 2, 3, 4] } else { vec![1, 2] });
        let again = engine.arrive(5 * BLOCK_TOKENS + 1);
        engine.policy.follow_media(again, image());
        let blocks = vec![1, 2, 3, 4, 20, 21];
        engine.begin(again, Begin { found: 4 * BLOCK_TOKENS, listed: true, blocks, most: None });
        assert_eq!(engine.take_saved(), if anew { vec![20] } else { vec![] });
    }
}

/// The blocks are not lost, in any namespace: ranks have looked before they computed.
#[test]
fn saves_wait_for_the_binding() {
    for namespace in [HERE, ELSEWHERE] {
        let mut engine = Engine::new();
        let first = engine.arrive(2 * BLOCK_TOKENS + 1);
        engine.compute(first);
        engine.policy.weights_may_have_changed();
        let request = engine.arrive(2 * BLOCK_TOKENS + 1);
        engine.compute(request);
        assert_eq!(engine.take_saves().len(), 1);
        engine.bind(namespace);
        engine.decode(&[request]);
        assert_eq!(engine.take_saves(), [(1, 0, vec![4, 5])]);
    }
}

/// Nothing was computed before it.
#[test]
fn the_first_connection_is_bound_later() {
    let mut engine = Engine::new();
    engine.bind(0);
    let request = engine.arrive(2 * BLOCK_TOKENS + 1);
    engine.compute(request);
    assert_eq!(engine.take_saves(), [(0, 0, vec![1, 2])]);
    engine.bind(HERE);
    engine.decode(&[request]);
    assert_eq!(engine.voided(), 0);
}

/// Nothing is asked for or saved until the update ends, and later nothing computed during it.
#[test]
fn an_update_that_goes_on() {
    let mut engine = Engine::new();
    engine.sidecar().hits = Some(2);
    engine.policy.updating = true;
    engine.policy.weights_may_have_changed();
    engine.bind(HERE);
    let request = engine.arrive(4 * BLOCK_TOKENS + 1);
    assert_eq!(engine.ask(request), Some(0));
    engine.compute(request);
    engine.decode(&[request]);
    engine.policy.updating = false;
    engine.policy.weights_may_have_changed();
    engine.bind(ELSEWHERE);
    engine.decode(&[request]);
    assert_eq!(engine.take_saves(), []);
    let next = engine.arrive(4 * BLOCK_TOKENS + 1);
    assert_eq!(engine.ask(next), Some(2 * BLOCK_TOKENS));
}

// --- a namespace changing by itself ---

/// KV computed before belongs to the namespace of before; nothing is saved until the namespace is known.
#[test]
fn a_connection_that_is_bound_elsewhere() {
    let mut engine = Engine::new();
    let first = engine.arrive(2 * BLOCK_TOKENS + 1);
    engine.compute(first);
    assert_eq!(engine.take_saves().len(), 1);
    engine.policy.session(0).reconnect(0);
    let second = engine.arrive(2 * BLOCK_TOKENS + 1);
    engine.compute(second);
    assert_eq!(engine.take_saves(), []);
    engine.bind(ELSEWHERE);
    engine.decode(&[first, second]);
    engine.decode(&[first, second]);
    assert_eq!(engine.take_saves(), []);
    assert_eq!(engine.policy.take_remarks(), [Remark::Changed]);
    let third = engine.arrive(2 * BLOCK_TOKENS + 1);
    engine.compute(third);
    assert_eq!(engine.take_saves().len(), 1);
}

/// A restarted sidecar is offered the missed blocks.
#[test]
fn a_connection_that_is_bound_as_before() {
    let mut engine = Engine::new();
    let first = engine.arrive(2 * BLOCK_TOKENS + 1);
    engine.compute(first);
    engine.policy.session(0).reconnect(0);
    let request = engine.arrive(3 * BLOCK_TOKENS + 1);
    engine.compute(request);
    engine.bind(HERE);
    engine.decode(&[request]);
    let blocks: Vec<_> = engine.take_saves().into_iter().map(|(_, _, blocks)| blocks).collect();
    assert_eq!(blocks, [vec![1, 2], vec![4, 5, 6]]);
    assert_eq!((engine.voided(), engine.policy.take_remarks().len()), (0, 0));
}
