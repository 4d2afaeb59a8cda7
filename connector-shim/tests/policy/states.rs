//! States beside full attention: one at each boundary where the engine has made one, and none of the tokens between.

use connector_shim::core::policy::kinds::{GroupForm, GroupKind};
use connector_shim::core::policy::{
    BegunRequest, Changes, FoundTokens, OfferedState, PlannedStep, RequestId,
};

use crate::harness::{BLOCK_TOKENS, Engine, Setup, full, key};
use crate::sidecar::Saves;

/// Whole blocks of every prompt, before its last token.
const BLOCKS: u32 = 9;
const PROMPT: u32 = BLOCKS * BLOCK_TOKENS + 1;
const FULL: usize = 0;
const STATES: usize = 1;

fn setup() -> Setup {
    let state = GroupForm { kind: GroupKind::State, ..full() };
    Setup { forms: vec![full(), state], ..Setup::default() }
}

/// An engine with every block of full attention in the cache, and the states behind so many blocks.
fn engine(kept: &[u32]) -> Engine {
    engine_of(setup(), kept)
}

fn engine_of(setup: Setup, kept: &[u32]) -> Engine {
    let mut engine = setup.engine();
    engine.policy.session(FULL).sidecar.hits = Some(u32::MAX);
    engine.policy.session(STATES).sidecar.states = kept.iter().map(|blocks| blocks - 1).collect();
    engine
}

fn found(blocks: u32) -> FoundTokens {
    FoundTokens::Tokens(blocks * BLOCK_TOKENS, blocks > 0)
}

fn offer(request: RequestId, block: u32, boundary: u32) -> OfferedState {
    OfferedState { request, group: STATES, block, boundary }
}

/// A step that begins a request on fresh blocks, behind a state of `computed` tokens, and makes states.
fn begin(engine: &mut Engine, id: RequestId, computed: u32, offered: Vec<OfferedState>) -> PlannedStep {
    engine.allocate(id, 0);
    engine[id].computed = computed;
    let begun = BegunRequest { request: Some(id), blocks: engine[id].blocks.clone(), computed };
    let tokens = engine[id].tokens - computed;
    engine.step_with(Changes { begun: vec![begun], offered, ..Changes::default() }, &[(id, tokens)])
}

fn saved_states(engine: &mut Engine) -> Vec<(u32, Vec<u32>)> {
    let saves: Saves = engine.policy.session(STATES).sidecar.take_saves();
    saves.into_iter().map(|(_, first, blocks)| (first, blocks)).collect()
}

/// The states between are sparse: no search in steps of a block would find the last one of a long prompt.
#[test]
fn a_hit_ends_at_the_last_state() {
    for (kept, hit) in [(vec![], 0), (vec![2], 2), (vec![2, 5], 5), (vec![2, 5, 9], 9)] {
        let mut engine = engine(&kept);
        let request = engine.arrive(PROMPT);
        assert_eq!(engine.matched(request, 0), found(hit), "{kept:?}");
        let asked = engine.policy.session(STATES).sidecar.questions.clone();
        assert!(asked.iter().all(|asked| asked.first == 0), "{asked:?}");
        let junction = if hit < BLOCKS { BLOCKS * BLOCK_TOKENS } else { 0 };
        assert_eq!(engine.policy.junction(request), junction);
    }
}

/// The engine ends its own hits a block earlier, for a drafter, and makes the last state of a prompt there.
#[test]
fn with_a_drafter_states_end_a_block_earlier() {
    let last = BLOCKS - 1;
    for (kept, own, hit, junction) in [
        // The engine's own hit on the same blocks, before and after its blocks are gone.
        (vec![last], last, 0, 0),
        (vec![last], 0, last, 0),
        // The last block alone is the one that the engine has dropped.
        (vec![last, BLOCKS], last, 0, 0),
        (vec![last, BLOCKS], last - 1, 2, 0),
        // Behind a hit of one block full attention has more: the engine had none of it.
        (vec![1], 0, 1, last),
        (vec![2], 0, 2, last),
        (vec![], 0, 0, last),
    ] {
        let mut engine = drafting_engine(&kept);
        let request = engine.arrive(PROMPT);
        assert_eq!(engine.matched(request, own * BLOCK_TOKENS), found(hit), "{kept:?} {own}");
        assert_eq!(engine.policy.junction(request), junction * BLOCK_TOKENS, "{kept:?} {own}");
    }
}

fn drafting_engine(kept: &[u32]) -> Engine {
    let mut setup = setup();
    setup.options.drops_last_block = true;
    engine_of(setup, kept)
}

/// Full attention ends first; then a state beyond its end is of no use.
#[test]
fn a_hit_ends_where_full_attention_has_all_blocks() {
    let mut engine = engine(&[3, 6, 8]);
    engine.policy.session(FULL).sidecar.hits = Some(7);
    let request = engine.arrive(PROMPT);
    assert_eq!(engine.matched(request, 0), found(6));
    assert_eq!(engine.policy.junction(request), 7 * BLOCK_TOKENS);
}

/// The two have made their states at other boundaries.
#[test]
fn groups_of_states_agree_on_a_boundary() {
    let mut setup = setup();
    setup.forms.push(setup.forms[STATES]);
    let mut engine = setup.engine();
    engine.policy.session(FULL).sidecar.hits = Some(u32::MAX);
    engine.policy.session(1).sidecar.states = [1, 3, 5, 8].into();
    engine.policy.session(2).sidecar.states = [0, 3, 6, 7].into();
    let request = engine.arrive(PROMPT);
    assert_eq!(engine.matched(request, 0), found(4));
}

/// The engine's own tokens make no difference.
#[test]
fn the_state_at_the_boundary_is_loaded_alone() {
    for computed in [0, 2 * BLOCK_TOKENS] {
        let mut engine = engine(&[3, 6]);
        let request = engine.arrive(PROMPT);
        let external = 6 * BLOCK_TOKENS - computed;
        assert_eq!(engine.matched(request, computed), FoundTokens::Tokens(external, true));
        let mut blocks = [0, 1].map(|_| engine.free_blocks(6)).to_vec();
        blocks[STATES][..5].fill(0);
        engine[request].blocks.clone_from(&blocks);
        engine.allocate(request, external);
        let step = engine.idle();
        assert!(step.parts.iter().all(|part| part.lost.is_empty()), "{step:?}");
        let loads = std::mem::take(&mut engine.policy.session(STATES).sidecar.loads);
        let loads: Vec<_> = loads.into_iter().map(|load| (load.first, load.blocks)).collect();
        assert_eq!(loads, [(5, vec![blocks[STATES][5]])]);
    }
}

/// A load into any other block would leave the last one with its old bytes.
#[test]
fn a_state_is_loaded_where_the_engine_reads_it() {
    let mut engine = engine(&[6]);
    let request = engine.arrive(PROMPT);
    engine.matched(request, 0);
    let mut blocks = [0, 1].map(|_| engine.free_blocks(6)).to_vec();
    blocks[STATES][..4].fill(0);
    engine[request].blocks.clone_from(&blocks);
    engine.allocate(request, 6 * BLOCK_TOKENS);
    let step = engine.idle();
    assert!(step.parts.iter().all(|part| part.loads.is_empty() && !part.lost.is_empty()), "{step:?}");
}

/// The engine names the block and the boundary of each state; its table may hold other blocks by then.
#[test]
fn offered_states_are_saved_and_no_other_ones() {
    let mut engine = setup().engine();
    let request = engine.arrive(PROMPT);
    let other = engine.arrive(PROMPT);
    let offered = vec![
        offer(request, 900, 4 * BLOCK_TOKENS),
        offer(request, 901, 9 * BLOCK_TOKENS),
        // No block, a part of one, tokens without a key, and a request without tokens in the step.
        offer(request, 0, 5 * BLOCK_TOKENS),
        offer(request, 902, 5 * BLOCK_TOKENS + 1),
        offer(request, 903, 10 * BLOCK_TOKENS),
        offer(other, 904, 3 * BLOCK_TOKENS),
    ];
    begin(&mut engine, request, 0, offered);
    assert_eq!(saved_states(&mut engine), [(3, vec![900]), (8, vec![901])]);
    // An offer holds for its own step.
    engine.go_on(request);
    assert_eq!(saved_states(&mut engine), []);
}

/// A decoding request is looked at where its blocks may be full; an offer may come between.
#[test]
fn an_offer_is_taken_in_any_step() {
    let mut engine = setup().engine();
    let request = engine.arrive(PROMPT);
    begin(&mut engine, request, 0, Vec::new());
    for step in 0..3 {
        let offered = vec![offer(request, 900 + step, BLOCK_TOKENS)];
        engine.step_with(Changes { offered, ..Changes::default() }, &[(request, 1)]);
        assert_eq!(saved_states(&mut engine), [(0, vec![900 + step])]);
    }
}

/// Steps of an engine with drafts: one that computes a prompt, and one that computes a token and three drafts of its answer.
fn drafting() -> (Engine, RequestId) {
    let mut setup = setup();
    setup.options.tokens_per_step = 4;
    let mut engine = setup.engine();
    let request = engine.arrive(PROMPT);
    let step = begin(&mut engine, request, 0, vec![offer(request, 900, 4 * BLOCK_TOKENS)]);
    assert_eq!(saved_states(&mut engine), [(3, vec![900])], "no draft is in the prompt");
    engine.take(&step);
    let offered = vec![offer(request, 901, BLOCKS * BLOCK_TOKENS)];
    engine.step_with(Changes { offered, ..Changes::default() }, &[(request, 4)]);
    assert_eq!(saved_states(&mut engine), []);
    (engine, request)
}

/// The engine moves it there once it has accepted the step's drafts.
#[test]
fn a_state_made_with_drafts_is_saved_by_the_next_step() {
    let (mut engine, request) = drafting();
    engine.step(Vec::new(), &[(request, 4)]);
    assert_eq!(saved_states(&mut engine), [(BLOCKS - 1, vec![901])]);
    engine.step(Vec::new(), &[(request, 4)]);
    assert_eq!(saved_states(&mut engine), [], "once");
}

/// By then its block may be written again, its step may have failed, or its request may be over or not computed.
#[test]
fn a_state_made_with_drafts_is_not_saved_when_it_is_lost_before() {
    let (mut engine, request) = drafting();
    let next = engine.arrive(PROMPT);
    let begun = BegunRequest { request: Some(next), blocks: vec![vec![], vec![901]], computed: 0 };
    engine.step_with(Changes { begun: vec![begun], ..Changes::default() }, &[(next, 1), (request, 4)]);
    assert_eq!(saved_states(&mut engine), []);

    let (mut engine, request) = drafting();
    let later = engine.idle();
    engine.take(&later);
    engine.step(Vec::new(), &[(request, 4)]);
    assert_eq!(saved_states(&mut engine), []);

    let (mut engine, request) = drafting();
    engine.finish(request);
    engine.idle();
    assert_eq!(saved_states(&mut engine), []);
}

/// The engine may note a state with the output of a step, and give its block away before it says so. A new block of the request itself is
/// the state's own.
#[test]
fn a_state_is_not_saved_from_a_block_that_the_same_step_gives_away() {
    for (other, group, saved) in [(true, FULL, 0), (true, STATES, 0), (false, FULL, 0), (false, STATES, 1)] {
        let mut engine = setup().engine();
        let (request, next) = (engine.arrive(PROMPT), engine.arrive(PROMPT));
        begin(&mut engine, request, 0, Vec::new());
        let mut blocks = vec![Vec::new(); 2];
        blocks[group].push(900);
        let mut changes = Changes::default();
        if other {
            changes.begun.push(BegunRequest { request: Some(next), blocks, computed: 0 });
        } else {
            changes.grown.push((Some(request), blocks));
        }
        changes.offered.push(offer(request, 900, 4 * BLOCK_TOKENS));
        engine.step_with(changes, &[(next, 1), (request, 1)]);
        assert_eq!(saved_states(&mut engine).len(), saved, "{other} {group}");
    }
}

/// Any group may get the block next.
#[test]
fn a_state_is_given_up_before_its_block_is_written_again() {
    for group in [FULL, STATES, 2] {
        let mut engine = setup().engine();
        let (request, next) = (engine.arrive(PROMPT), engine.arrive(PROMPT));
        begin(&mut engine, request, 0, vec![offer(request, 900, BLOCK_TOKENS)]);
        let mut blocks = vec![Vec::new(); 3];
        blocks[group].push(900);
        // A scratch group's blocks are written, wherever the request begins.
        let computed = if group == 2 { BLOCK_TOKENS } else { 0 };
        let begun = BegunRequest { request: Some(next), blocks, computed };
        engine.step_with(Changes { begun: vec![begun], ..Changes::default() }, &[(next, 1)]);
        assert_eq!(engine.policy.session(STATES).sidecar.cancelled, 1, "group {group}");
    }
}

/// A listed state proves nothing: its step may have been skipped.
#[test]
fn nothing_is_kept_that_was_computed_upon_an_unproven_state() {
    for made in [true, false] {
        let mut engine = setup().engine();
        let first = engine.arrive(PROMPT);
        let offered = if made { vec![offer(first, 900, 4 * BLOCK_TOKENS)] } else { Vec::new() };
        let step = begin(&mut engine, first, 0, offered);
        engine.take(&step);
        saved_states(&mut engine);
        let blocks = engine[first].blocks[FULL].clone();
        let second = engine.arrive(PROMPT);
        engine[second].blocks = vec![blocks, vec![0, 0, 0, 900, 901]];
        begin(&mut engine, second, 4 * BLOCK_TOKENS, vec![offer(second, 901, 9 * BLOCK_TOKENS)]);
        let expected = if made { vec![(8, vec![901])] } else { Vec::new() };
        assert_eq!(saved_states(&mut engine), expected);
    }
}

/// The engine has passed over its step.
#[test]
fn a_state_of_a_step_that_failed_is_unproven() {
    let mut engine = setup().engine();
    let (first, second) = (engine.arrive(PROMPT), engine.arrive(PROMPT));
    begin(&mut engine, first, 0, vec![offer(first, 900, 4 * BLOCK_TOKENS)]);
    let later = engine.idle();
    engine.take(&later);
    let blocks = engine[first].blocks[FULL].clone();
    engine[second].blocks = vec![blocks, vec![0, 0, 0, 900, 901]];
    saved_states(&mut engine);
    begin(&mut engine, second, 4 * BLOCK_TOKENS, vec![offer(second, 901, 9 * BLOCK_TOKENS)]);
    assert_eq!(saved_states(&mut engine), []);
}

/// Its block goes to another request soon, and an offer for use would save that one's bytes.
#[test]
fn a_found_state_is_not_offered_again() {
    let mut engine = setup().engine();
    let first = engine.arrive(PROMPT);
    let step = begin(&mut engine, first, 0, vec![offer(first, 900, 4 * BLOCK_TOKENS)]);
    engine.take(&step);
    let blocks = engine[first].blocks[FULL].clone();
    let second = engine.arrive(PROMPT);
    engine[second].blocks = vec![blocks, vec![0, 0, 0, 900, 901]];
    begin(&mut engine, second, 4 * BLOCK_TOKENS, Vec::new());
    saved_states(&mut engine);
    engine.step(Vec::new(), &[(second, 1)]);
    engine.step(Vec::new(), &[(second, 1)]);
    assert_eq!(saved_states(&mut engine), []);
}

/// Offers these states of a request in one step after another, and returns the keys of the saves that replace one, with the replaced keys.
fn replaced(engine: &mut Engine, id: RequestId, blocks: &[u32]) -> Vec<(u32, u32)> {
    for (number, at) in blocks.iter().enumerate() {
        let computed = at * BLOCK_TOKENS;
        (engine[id].tokens, engine[id].computed) = (computed.max(PROMPT) + 1, computed);
        engine[id].keys = (0..(engine[id].tokens / BLOCK_TOKENS) as usize).map(key).collect();
        let offered = vec![offer(id, 900 + number as u32, at * BLOCK_TOKENS)];
        let step = engine.step_with(Changes { offered, ..Changes::default() }, &[(id, 1)]);
        engine.take(&step);
    }
    assert_eq!(saved_states(engine).len(), blocks.len());
    std::mem::take(&mut engine.policy.session(STATES).sidecar.replaced)
}

/// A later turn of the conversation begins behind the answer; other requests may part from it at the prompt's end or before.
#[test]
fn a_state_of_an_answer_replaces_the_one_before() {
    let mut engine = setup().engine();
    let request = engine.arrive(PROMPT);
    let step = begin(&mut engine, request, 0, Vec::new());
    engine.take(&step);
    assert_eq!(replaced(&mut engine, request, &[4, 9]), [], "of the prompt");
    assert_eq!(replaced(&mut engine, request, &[10, 11, 13]), [(10, 9), (12, 10)]);
    let other = engine.arrive(PROMPT);
    let step = begin(&mut engine, other, 0, Vec::new());
    engine.take(&step);
    assert_eq!(replaced(&mut engine, other, &[11]), [], "of another request");
}

#[test]
fn a_state_at_a_checkpoint_stays() {
    let mut engine = Setup { checkpoint: 4 * BLOCK_TOKENS, ..setup() }.engine();
    let request = engine.arrive(PROMPT);
    let step = begin(&mut engine, request, 0, Vec::new());
    engine.take(&step);
    assert_eq!(replaced(&mut engine, request, &[11, 12, 13, 14]), [(11, 10), (13, 12)]);
}
