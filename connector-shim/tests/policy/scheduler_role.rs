//! Found and saved blocks of requests, and writes over them.

use connector_shim::core::policy::{BegunRequest, FoundTokens, LoadMode, way_of_end};

use crate::harness::{BLOCK_TOKENS, Begin, Engine, Setup, key};

const MEMORY: usize = 0;

// --- hits ---

/// In the step after the first: blocks computed by the request itself would be marked as used by it.
#[test]
fn what_was_found_is_offered_once_and_nothing_of_the_request_s_own() {
    let mut engine = Engine::new();
    let request = engine.arrive(9 * BLOCK_TOKENS + 1);
    let most = Some(2 * BLOCK_TOKENS);
    engine.begin(request, Begin { found: 3 * BLOCK_TOKENS, most, ..Begin::default() });
    assert_eq!(engine.take_saves(), [(0, 3, vec![4, 5])]);
    engine.go_on(request);
    assert_eq!(engine.take_saves(), [(0, 0, vec![1, 2, 3]), (0, 5, vec![6, 7, 8, 9])]);
    engine.decode(&[request]);
    assert_eq!(engine.take_saves(), []);
}

/// The hit's blocks are among them, once.
#[test]
fn after_a_load_that_failed_everything_is_saved_anew() {
    let mut engine = Engine::new();
    let request = engine.arrive(4 * BLOCK_TOKENS + 1);
    let most = Some(BLOCK_TOKENS);
    engine.begin(request, Begin { found: 2 * BLOCK_TOKENS, most, ..Begin::default() });
    engine.take_saves();
    engine.policy.loads_failed(&[]);
    engine.go_on(request);
    assert_eq!(engine.take_saves(), [(0, 0, vec![1, 2, 3, 4])]);
}

/// An engine counts hits by sources once, when a request is first admitted.
#[test]
fn a_preempted_request_does_not_count_its_hit_again() {
    let mut engine = Engine::new();
    engine.sidecar().hits = Some(3);
    let request = engine.arrive(4 * BLOCK_TOKENS + 1);
    for preemptions in 0..2 {
        engine[request].preemptions = preemptions;
        engine[request].computed = 0;
        assert_eq!(engine.ask(request), Some(3 * BLOCK_TOKENS));
        assert_eq!(engine.ask(request), Some(3 * BLOCK_TOKENS), "asked again");
        engine.compute_behind(request, 3 * BLOCK_TOKENS);
        let found = engine.policy.sources(request, 3 * BLOCK_TOKENS);
        assert_eq!(found.map(|sources| sources[MEMORY]), Some(3 * BLOCK_TOKENS));
        assert_eq!(engine.policy.sources(request, 4 * BLOCK_TOKENS), None);
    }
    assert_eq!(engine.policy.take_hit_tokens()[MEMORY], u64::from(3 * BLOCK_TOKENS));
    assert!(engine.policy.take_hit_tokens().iter().all(|tokens| *tokens == 0));
}

/// An engine without room for it would look at no request behind it, with its prompt in the engine's own cache or not.
#[test]
fn a_request_whose_load_failed_lets_others_pass_it() {
    for computed in [0, 9 * BLOCK_TOKENS] {
        let mut engine = Engine::new();
        let request = engine.arrive(9 * BLOCK_TOKENS + 1);
        engine.ask(request);
        engine.policy.requests_failed(&[request]);
        assert!(engine.policy.is_refused(request));
        let asked: Vec<_> = (0..4).map(|_| engine.matched(request, computed)).collect();
        let miss = FoundTokens::Tokens(0, false);
        assert_eq!(asked, [miss, FoundTokens::Later, miss, FoundTokens::Later]);
    }
}

/// Another request may have written anything there.
#[test]
fn a_session_goes_on_in_a_block_of_its_own() {
    for own in [true, false] {
        let mut engine = Engine::new();
        let request = engine.arrive(10);
        engine.compute(request);
        engine[request].tokens = 2 * BLOCK_TOKENS + 1;
        engine[request].keys = vec![key(0), key(1)];
        let blocks = if own { vec![1, 2, 3] } else { vec![4, 2, 3] };
        let resumed = BegunRequest { request: Some(request), blocks: vec![blocks], computed: 10 };
        engine.step(vec![resumed], &[(request, 2 * BLOCK_TOKENS - 9)]);
        assert_eq!(engine.take_saved(), if own { vec![1, 2] } else { vec![] });
    }
}

// --- ends of answers ---

/// Equal ends have one number, which the log's CLOSE carries; the end of a log alone, as for other weights, has none.
#[test]
fn the_way_in_which_an_answer_ended_is_told_with_its_log() {
    let [tool, sentence] = [[7, 2], [9, 2]].map(|tokens| way_of_end(1, &tokens));
    assert!(tool != 0 && tool != sentence && tool == way_of_end(1, &[7, 2]) && way_of_end(3, &[]) != 0);
    let mut engine = Engine::new();
    for way in [tool, sentence, 0] {
        let request = engine.arrive(2 * BLOCK_TOKENS + 1);
        engine.compute(request);
        engine.finish_in(request, way);
    }
    assert_eq!(engine.sidecar().ways, [tool, sentence, 0]);
}

// --- drafters ---

/// The engine has it: each request would hit this block alone again. A longer hit is worth its load.
#[test]
fn the_block_that_vllm_has_dropped_for_a_drafter_is_not_loaded() {
    let mut setup = Setup::default();
    setup.options.drops_last_block = true;
    let mut engine = setup.engine();
    engine.sidecar().hits = Some(1);
    let request = engine.arrive(4 * BLOCK_TOKENS + 1);
    assert_eq!(engine.matched(request, 2 * BLOCK_TOKENS), FoundTokens::Tokens(0, false));
    assert_eq!(engine.sidecar().released, [0], "nothing stays leased");
    engine.sidecar().hits = Some(2);
    assert_eq!(engine.matched(request, 2 * BLOCK_TOKENS), FoundTokens::Tokens(2 * BLOCK_TOKENS, true));
    let mut without = Engine::new();
    without.sidecar().hits = Some(1);
    let request = without.arrive(4 * BLOCK_TOKENS + 1);
    assert_eq!(without.matched(request, 2 * BLOCK_TOKENS), FoundTokens::Tokens(BLOCK_TOKENS, true));
}

/// Behind the blocks from the engine's own cache.
#[test]
fn who_is_not_followed_overwrites_all_the_same() {
    let mut engine = Engine::new();
    let request = engine.arrive(4 * BLOCK_TOKENS + 1);
    engine.compute(request);
    let read = |engine: &mut Engine| engine.policy.session(0).unsaved(vec![1, 2, 3, 4]);
    assert_eq!(read(&mut engine), [1, 2, 3, 4]);
    let stranger = BegunRequest { request: None, blocks: vec![vec![2, 3, 4]], computed: BLOCK_TOKENS };
    engine.step(vec![stranger], &[]);
    assert_eq!((read(&mut engine), engine.sidecar().cancelled), (vec![1, 2], 2));
}

// --- synchronous loads ---

/// The engine's prefix cache would have the blocks of a synchronous one before its end is known.
#[test]
fn a_load_that_can_fail_is_asynchronous() {
    for load in [LoadMode::Auto, LoadMode::Sync] {
        for waits in [true, false] {
            let mut setup = Setup::on_gpu();
            (setup.machine.load, setup.machine.waits) = (load, waits);
            let mut engine = setup.engine();
            engine.sidecar().hits = Some(2);
            let request = engine.arrive(4 * BLOCK_TOKENS + 1);
            assert_eq!(engine.matched(request, 0), FoundTokens::Tokens(2 * BLOCK_TOKENS, !waits));
        }
    }
}

/// The policy learns of it before the first request.
#[test]
fn loads_can_fail_where_ranks_copy_although_the_sidecar_was_to() {
    let mut engine = Setup::on_gpu().engine();
    engine.sidecar().hits = Some(2);
    let request = engine.arrive(4 * BLOCK_TOKENS + 1);
    assert_eq!(engine.matched(request, 0), FoundTokens::Tokens(2 * BLOCK_TOKENS, false));
    engine.policy.ranks_copy();
    assert_eq!(engine.matched(request, 0), FoundTokens::Tokens(2 * BLOCK_TOKENS, true));
}

// --- tokens taken back ---

/// As between two inputs of a streaming session: the last block's tokens are others, at once or after a while without.
#[test]
fn hashes_that_are_taken_back_begin_a_log_anew() {
    for longer in [false, true] {
        let mut engine = Engine::new();
        let request = engine.arrive(4 * BLOCK_TOKENS + 1);
        engine.compute(request);
        assert_eq!(engine.take_saves(), [(0, 0, vec![1, 2, 3, 4])]);
        engine[request].keys.truncate(3);
        if longer {
            engine[request].keys.extend([key(80), key(81)]);
        }
        engine[request].computed = 3 * BLOCK_TOKENS;
        engine[request].tokens = 5 * BLOCK_TOKENS + 1;
        engine.announce(request);
        assert_eq!(engine.sidecar().closed, [0]);
        engine.go_on(request);
        let keys = engine[request].keys.clone();
        assert_eq!(engine.sidecar().logs.len(), 2);
        assert_eq!(engine.sidecar().logs[1].keys, keys);
    }
}
