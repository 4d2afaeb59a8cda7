//! Prompts of one engine, for another one to go on with.

use std::time::Duration;

use connector_shim::core::policy::{Arrival, EndedRequest, RequestId};
use shm_protocol::key::BlockHash;

use crate::harness::{BLOCK_TOKENS, Engine, Setup, key};
use crate::sidecar::Saves;

fn promised(engine: &mut Engine) -> Vec<usize> {
    let logs = engine.sidecar().logs.iter().enumerate();
    logs.filter(|(_, log)| log.promised).map(|(number, _)| number).collect()
}

/// The logs with questions awaiting another engine.
fn awaited(engine: &mut Engine) -> Vec<usize> {
    let mut logs: Vec<_> =
        engine.sidecar().questions.iter().filter(|asked| asked.awaits).map(|asked| asked.log).collect();
    logs.dedup();
    logs
}

fn tails(engine: &mut Engine) -> Vec<BlockHash> {
    engine.sidecar().logs.iter().filter_map(|log| log.tail).collect()
}

/// Computes a prompt for another engine; the number of its tokens kept for the handover.
fn handed_over(engine: &mut Engine, tokens: u32) -> Option<u32> {
    let request = engine.arrive_to_decode(tokens);
    engine.compute(request);
    engine.finish(request).handed_over
}

/// Tokens of the answer are computed up to the end of the prompt's last block.
fn fill_last_block(engine: &mut Engine, request: RequestId) {
    let blocks = engine[request].tokens.div_ceil(BLOCK_TOKENS);
    (engine[request].tokens, engine[request].computed) = (blocks * BLOCK_TOKENS + 1, blocks * BLOCK_TOKENS);
    engine[request].keys.push(key(200));
}

/// The prompt is saved in parts, and the end of the request states the saved tokens.
#[test]
fn a_prompt_for_another_engine_is_offered_with_what_was_found_in_the_step_that_may_be_its_last() {
    let mut engine = Engine::new();
    let tokens = 9 * BLOCK_TOKENS + 1;
    let request = engine.arrive_to_decode(tokens);
    engine.compute_behind(request, 3 * BLOCK_TOKENS);
    assert_eq!((promised(&mut engine), awaited(&mut engine)), (vec![0], vec![]));
    let saves: Saves = vec![(0, 0, vec![1, 2, 3]), (0, 3, vec![4, 5, 6, 7, 8, 9, 10])];
    assert_eq!(engine.take_saves(), saves);
    assert_eq!(engine.finish(request).handed_over, Some(tokens));
    let awaiting = engine.arrive_awaiting(tokens, tokens);
    engine.ask(awaiting);
    assert_eq!((promised(&mut engine), awaited(&mut engine)), (vec![0], vec![1]));
    let EndedRequest { handed_over, hold } = engine.finish(awaiting);
    assert_eq!((handed_over, hold), (None, vec![]));
}

/// It promises even if it loads nothing. An engine that saves nothing promises nothing.
#[test]
fn who_saves_promises_a_prompt_as_soon_as_it_arrives() {
    for (loads, saves) in [(true, true), (false, true), (true, false)] {
        let mut setup = Setup::default();
        (setup.options.loads, setup.options.saves) = (loads, saves);
        let mut engine = setup.engine();
        let request = engine.arrive_to_decode(9 * BLOCK_TOKENS);
        let told = if saves { vec![0] } else { vec![] };
        assert_eq!(promised(&mut engine), told);
        engine.arrive(9 * BLOCK_TOKENS);
        let logs = engine.sidecar().logs.len();
        assert_eq!(logs, if loads { 2 } else { 1 }, "keys of other prompts are told to be fetched");
        engine.compute(request);
        assert_eq!(promised(&mut engine), told);
    }
}

/// The partly full block has a key until it is full: then it is saved as any other, by a log of its own.
#[test]
fn who_goes_on_with_a_prompt_has_one_token_to_compute() {
    let mut engine = Engine::new();
    let tokens = 9 * BLOCK_TOKENS + 5;
    assert_eq!(handed_over(&mut engine, tokens), Some(tokens));
    assert_eq!(engine.take_saves(), [(0, 0, (1..11).collect())]);
    engine.sidecar().hits = Some(9);
    let without = engine.arrive_awaiting(tokens, tokens);
    assert_eq!(engine.ask(without), Some(9 * BLOCK_TOKENS), "without the tail");
    engine.finish(without);
    engine.sidecar().hits = Some(10);
    let request = engine.arrive_awaiting(tokens, tokens);
    assert_eq!(engine.ask(request), Some(tokens - 1));
    let tails = tails(&mut engine);
    assert_eq!((tails.len(), tails[2]), (3, tails[0]));
    engine.compute_behind(request, tokens - 1);
    assert_eq!(engine.policy.sources(request, tokens - 1).map(|sources| sources[0]), Some(tokens - 1));
    engine[request].keys.push(key(200));
    for _ in 0..BLOCK_TOKENS - 5 {
        assert_eq!(engine.sidecar().logs.len(), 3);
        engine.decode(&[request]);
        engine[request].computed += 1;
        engine[request].tokens += 1;
    }
    assert_eq!((engine.sidecar().closed.last().copied(), engine.sidecar().logs.len()), (Some(2), 4));
    let saves: Vec<_> = engine.take_saves().iter().map(|(log, first, _)| (*log, *first)).collect();
    assert_eq!(saves.last(), Some(&(3, 9)), "the full block, and what was kept before not again");
}

/// The tail lacks tokens of the block filled by the request meanwhile. The same holds for an engine that
/// saves nothing.
#[test]
fn a_tail_is_not_asked_for_as_the_whole_block_after_a_preemption() {
    for saves in [true, false] {
        let mut setup = Setup::default();
        setup.options.saves = saves;
        let mut engine = setup.engine();
        let tokens = 9 * BLOCK_TOKENS + 5;
        let request = engine.arrive_awaiting(tokens, tokens);
        engine.sidecar().hits = Some(10);
        assert_eq!(engine.ask(request), Some(tokens - 1));
        engine.compute_behind(request, tokens - 1);
        assert!(engine.sidecar().logs[0].tail.is_some());
        fill_last_block(&mut engine, request);
        (engine[request].computed, engine[request].preemptions) = (0, 1);
        assert_eq!(engine.ask(request), Some(10 * BLOCK_TOKENS));
        let log = engine.sidecar().questions.last().unwrap().log;
        assert!(engine.sidecar().logs[log].tail.is_none());
        assert_eq!(awaited(&mut engine), [0], "another engine computes no block of the answer");
    }
}

/// The prompt may also end on a block's boundary: its log then goes on.
#[test]
fn nobody_is_awaited_for_blocks_of_an_answer_after_a_preemption() {
    let mut engine = Setup::on_gpu().engine();
    let request = engine.arrive_awaiting(9 * BLOCK_TOKENS, 9 * BLOCK_TOKENS);
    engine.sidecar().hits = None;
    assert_eq!(engine.ask(request), None);
    assert_eq!(engine.sidecar().lingered.len(), 1);
    engine.sidecar().hits = Some(10);
    let found = engine.ask(request).unwrap();
    engine.compute_behind(request, found);
    engine[request].tokens += BLOCK_TOKENS + 1;
    engine[request].keys.push(key(200));
    (engine[request].computed, engine[request].preemptions) = (0, 1);
    for _ in 0..2 {
        assert_eq!(engine.ask(request), Some(10 * BLOCK_TOKENS));
        assert_eq!((awaited(&mut engine), engine.sidecar().closed.clone()), (vec![0], vec![0]));
        assert_eq!(engine.sidecar().questions.last().unwrap().log, 1);
    }
    // No step waits for another engine either, as an idle one would. The lease is old by then.
    engine.idle();
    engine.time += Duration::from_secs(20);
    engine.sidecar().hits = None;
    assert_eq!(engine.ask(request), None);
    assert_eq!(engine.sidecar().lingered.len(), 1);
}

/// The first token may also fill the block.
#[test]
fn who_goes_on_behind_a_first_token_has_the_same_tail() {
    let mut engine = Setup::on_gpu().engine();
    for rest in [1, 5, BLOCK_TOKENS - 1] {
        let tokens = 9 * BLOCK_TOKENS + rest;
        assert_eq!(handed_over(&mut engine, tokens), Some(tokens));
        let request = engine.arrive_awaiting(tokens + 1, tokens);
        engine.sidecar().hits = Some(10);
        assert_eq!(engine.ask(request), Some(tokens));
        let tails = tails(&mut engine);
        let [.., theirs, ours] = tails.as_slice() else { panic!("two tails") };
        assert_eq!(ours, theirs);
        let step = engine.compute_behind(request, tokens);
        assert_eq!(step.parts[0].loads.iter().map(|load| load.sync).collect::<Vec<_>>(), [true]);
        assert!(step.fills_tail, "the step writes into the block in which the hit ends");
    }
}

/// The last block of such a prompt is full, so it is found by its own key.
#[test]
fn a_prompt_of_whole_blocks_is_loaded_but_for_its_last_token() {
    let mut engine = Setup::on_gpu().engine();
    let tokens = 9 * BLOCK_TOKENS;
    assert_eq!(handed_over(&mut engine, tokens), Some(tokens));
    let request = engine.arrive_awaiting(tokens, tokens);
    engine.sidecar().hits = Some(9);
    assert_eq!(engine.ask(request), Some(tokens - 1));
    assert_eq!(tails(&mut engine), []);
    assert!(engine.compute_behind(request, tokens - 1).fills_tail);
    let whole = engine.arrive_awaiting(tokens + 1, tokens + 1);
    assert_eq!(engine.ask(whole), Some(tokens));
    assert!(!engine.compute_behind(whole, tokens).fills_tail);
}

/// A tail is missing where a key depends on more than tokens, where no whole block is before it, at a sidecar without tails, where less
/// was saved, and for a request handed over by nobody.
#[test]
fn without_a_tail_a_hit_ends_on_a_block_s_boundary() {
    for why in ["", "salt", "short", "sidecar", "fewer", "fewer of whole blocks", "not awaited"] {
        let mut engine = Engine::new();
        engine.sidecar().hits = Some(10);
        if why == "sidecar" {
            engine.sidecar().know_no_tails();
        }
        let tokens = match why {
            "short" => 5,
            "fewer of whole blocks" => 10 * BLOCK_TOKENS,
            _ => 9 * BLOCK_TOKENS + 5,
        };
        let saved = if why.starts_with("fewer") { 9 * BLOCK_TOKENS } else { tokens };
        let arrival = Arrival { awaits: (why != "not awaited").then_some(saved), ..Arrival::default() };
        let request =
            if why == "salt" { engine.follow(tokens, arrival) } else { engine.arrive_as(tokens, arrival) };
        let whole = (tokens - 1) / BLOCK_TOKENS * BLOCK_TOKENS;
        assert_eq!(engine.ask(request), Some(if why.is_empty() { tokens - 1 } else { whole }), "{why}");
    }
}

/// The standing check has whole found blocks computed, and with them the tokens behind them.
#[test]
fn a_tail_is_not_compared() {
    let mut engine = Setup::checking(4).engine();
    engine.sidecar().hits = Some(10);
    let tokens = 9 * BLOCK_TOKENS + 5;
    let request = engine.arrive_awaiting(tokens, tokens);
    let kept = 9 - 4;
    assert_eq!(engine.ask(request), Some(kept * BLOCK_TOKENS));
    engine.compute_behind(request, kept * BLOCK_TOKENS);
    let checked: Vec<_> =
        engine.sidecar().checked.iter().map(|(_, first, blocks)| (*first, blocks.len())).collect();
    assert_eq!(checked, [(kept, 4)]);
}

/// An engine in doubt compares only the end of its hit.
#[test]
fn a_handed_over_prompt_is_not_computed_again() {
    let mut engine = Setup::checking(4).engine();
    engine.sidecar().hits = Some(9);
    let tokens = 9 * BLOCK_TOKENS + 1;
    let own = engine.arrive(tokens);
    assert_eq!(engine.ask(own), Some(5 * BLOCK_TOKENS));
    engine.compute_behind(own, 5 * BLOCK_TOKENS);
    engine.sidecar().finish(1);
    let request = engine.arrive_awaiting(tokens, tokens);
    assert!(engine.contradicted);
    assert_eq!(engine.ask(request), Some(5 * BLOCK_TOKENS));
}

/// The engine has saved the tail, and goes on itself.
#[test]
fn the_block_of_a_tail_is_saved_again_once_it_is_full() {
    let mut engine = Engine::new();
    let request = engine.arrive_to_decode(9 * BLOCK_TOKENS + 5);
    engine.compute(request);
    assert_eq!(engine.take_saves(), [(0, 0, (1..11).collect())]);
    engine[request].keys.push(key(200));
    for _ in 0..BLOCK_TOKENS - 5 {
        engine.decode(&[request]);
        engine[request].computed += 1;
        engine[request].tokens += 1;
    }
    assert_eq!(engine.take_saves(), [(1, 9, vec![10])]);
}

/// The same holds without a sidecar.
#[test]
fn who_is_aborted_or_has_saved_nothing_sends_nobody_to_wait() {
    let mut engine = Engine::new();
    let never = engine.arrive_to_decode(9 * BLOCK_TOKENS);
    assert_eq!(engine.finish(never).handed_over, Some(0), "it was not scheduled");
    let alone = engine.arrive_to_decode(9 * BLOCK_TOKENS);
    engine.compute(alone);
    engine.policy.session(0).detach();
    assert_eq!(engine.finish(alone).handed_over, Some(0));
}

/// A request without the router's parameters.
#[test]
fn what_is_no_request_for_a_handover_is_none() {
    let mut engine = Engine::new();
    let request = engine.arrive(9 * BLOCK_TOKENS);
    engine.ask(request);
    engine.compute(request);
    assert_eq!((promised(&mut engine), awaited(&mut engine)), (vec![], vec![]));
    assert_eq!(engine.finish(request).handed_over, None);
}
