//! States within blocks of full attention: the block around a state is kept as far as the state reaches, under a key of its own.

use connector_shim::core::policy::kinds::{GroupForm, GroupKind};
use connector_shim::core::policy::{
    BegunRequest, Changes, FoundTokens, OfferedState, PlannedStep, RequestId,
};

use crate::harness::{BLOCK_TOKENS, Engine, Setup, full, key};
use crate::sidecar::Saves;

/// Tokens of a hash, and hashes of a block.
const UNIT: u32 = BLOCK_TOKENS / HASHES;
const HASHES: u32 = 4;
/// A prompt with its last state within its third block, and the tokens of this state.
const PROMPT: u32 = 3 * BLOCK_TOKENS - UNIT - 1;
const END: u32 = 3 * BLOCK_TOKENS - 2 * UNIT;
const TAIL: usize = (END / UNIT - 1) as usize;
const FULL: usize = 0;
const STATES: usize = 1;

fn setup() -> Setup {
    let full = GroupForm { hashes_each: HASHES, ..full() };
    Setup {
        forms: vec![full, GroupForm { kind: GroupKind::State, key_tokens: UNIT, ..full }],
        ..Setup::default()
    }
}

/// An engine with every block of full attention in the cache, and states of so many units.
fn engine(kept: &[u32]) -> Engine {
    let mut engine = setup().engine();
    engine.policy.session(FULL).sidecar.hits = Some(u32::MAX);
    engine.policy.session(STATES).sidecar.states = kept.iter().map(|units| units - 1).collect();
    engine
}

/// A request with a key for each unit.
fn arrive(engine: &mut Engine, tokens: u32) -> RequestId {
    let id = engine.arrive(tokens);
    engine[id].keys = (0..(tokens / UNIT) as usize).map(key).collect();
    id
}

/// A request begins on its blocks, or on fresh ones, behind `computed` tokens.
fn begin(
    engine: &mut Engine,
    id: RequestId,
    computed: u32,
    tokens: u32,
    copied: Vec<(u32, u32)>,
) -> PlannedStep {
    engine.allocate(id, 0);
    engine[id].computed = computed;
    let begun = BegunRequest { request: Some(id), blocks: engine[id].blocks.clone(), computed };
    engine.step_with(Changes { begun: vec![begun], copied, ..Changes::default() }, &[(id, tokens)])
}

/// The step after: it copies the state of `END` tokens to a block, and goes on.
fn offer(engine: &mut Engine, id: RequestId, block: u32) -> PlannedStep {
    let from = engine[id].blocks[STATES][2];
    let offered = vec![OfferedState { request: id, group: STATES, block, boundary: END }];
    let tokens = engine[id].tokens - engine[id].computed;
    engine.step_with(Changes { offered, copied: vec![(from, block)], ..Changes::default() }, &[(id, tokens)])
}

/// A request with a state of `END` tokens left in block 900.
fn producer(engine: &mut Engine) -> (RequestId, PlannedStep) {
    let id = arrive(engine, PROMPT);
    let first = begin(engine, id, 0, END, Vec::new());
    engine.take(&first);
    (id, offer(engine, id, 900))
}

fn take_saves(engine: &mut Engine, group: usize) -> Saves {
    engine.policy.session(group).sidecar.take_saves()
}

#[test]
fn a_hit_ends_within_a_block() {
    let mut engine = engine(&[END / UNIT]);
    let request = arrive(&mut engine, PROMPT);
    assert_eq!(engine.matched(request, 0), FoundTokens::Tokens(END, true));
    let mut blocks = [0, 1].map(|_| engine.free_blocks(3)).to_vec();
    blocks[STATES][..2].fill(0);
    engine[request].blocks.clone_from(&blocks);
    engine.allocate(request, END);
    let step = engine.idle();
    assert!(step.parts.iter().all(|part| part.lost.is_empty()), "{step:?}");
    let sidecar = &engine.policy.session(FULL).sidecar;
    let loads: Vec<_> = sidecar.loads.iter().map(|load| (load.first, load.blocks.clone())).collect();
    assert_eq!(loads, [(0, blocks[FULL][..2].to_vec()), (1, vec![blocks[FULL][2]])]);
    // Behind the key of the block before.
    let log = &sidecar.logs[sidecar.loads[1].log];
    assert_eq!((&log.keys[..], log.tail), (&[key(2 * HASHES as usize - 1)][..], Some(key(TAIL))));
    let loads = &engine.policy.session(STATES).sidecar.loads;
    assert_eq!((loads[0].first, &loads[0].blocks), (TAIL as u32, &vec![blocks[STATES][2]]));
}

/// The state alone is of no use.
#[test]
fn a_hit_without_the_beginning_of_a_block_ends_before_it() {
    let mut engine = engine(&[2, END / UNIT]);
    engine.policy.session(FULL).sidecar.lacks_tails = true;
    let request = arrive(&mut engine, PROMPT);
    assert_eq!(engine.matched(request, 0), FoundTokens::Tokens(0, false));
    engine.policy.session(STATES).sidecar.states.insert(HASHES - 1);
    assert_eq!(engine.matched(request, 0), FoundTokens::Tokens(BLOCK_TOKENS, true));
}

#[test]
fn a_state_is_saved_with_the_beginning_of_its_block() {
    let mut engine = setup().engine();
    let (request, _) = producer(&mut engine);
    let states: Vec<_> =
        take_saves(&mut engine, STATES).into_iter().map(|(_, first, ids)| (first, ids)).collect();
    assert_eq!(states, [(TAIL as u32, vec![900])]);
    let blocks = engine[request].blocks[FULL].clone();
    let saves = take_saves(&mut engine, FULL);
    let ids: Vec<_> = saves.iter().map(|(_, first, ids)| (*first, ids.clone())).collect();
    assert_eq!(ids, [(0, blocks[..2].to_vec()), (1, vec![blocks[2]])]);
    let sidecar = &engine.policy.session(FULL).sidecar;
    assert_eq!(sidecar.logs[saves[1].0].tail, Some(key(TAIL)));
    engine.finish(request);
    assert!(
        engine.policy.session(FULL).sidecar.closed.contains(&saves[1].0),
        "its log ends with the request"
    );
}

/// Copies of proven beginnings are proven. Copies from a passed-over step, or of another block, are not.
#[test]
fn what_begins_within_a_block_is_kept_where_its_beginning_is_proven() {
    for (accepted, copied, kept) in
        [(true, [2, 900], true), (false, [2, 900], false), (true, [2, 901], false), (true, [1, 900], false)]
    {
        let mut engine = setup().engine();
        let (first, step) = producer(&mut engine);
        let mut blocks = engine[first].blocks.clone();
        let sources = [blocks[FULL][copied[0] as usize], copied[1]];
        if accepted {
            engine.take(&step);
        } else {
            let later = engine.idle();
            engine.take(&later);
        }
        take_saves(&mut engine, FULL);
        (blocks[FULL][2], blocks[STATES]) = (910, vec![0, 0, 911]);
        let second = arrive(&mut engine, 3 * BLOCK_TOKENS);
        engine[second].blocks = blocks;
        begin(&mut engine, second, END, 3 * BLOCK_TOKENS - END, vec![(sources[0], 910), (sources[1], 911)]);
        let saved: Vec<_> = take_saves(&mut engine, FULL).into_iter().flat_map(|(_, _, ids)| ids).collect();
        assert_eq!(saved.contains(&910), kept, "{accepted} {copied:?}");
    }
}

/// The engine passes over the producer's step only after another request has begun on copies.
#[test]
fn a_copy_of_what_is_not_proven_is_not_either() {
    let mut engine = setup().engine();
    let (first, _) = producer(&mut engine);
    let mut blocks = engine[first].blocks.clone();
    let copied = vec![(blocks[FULL][2], 910), (900, 911)];
    engine.finish(first);
    // Nothing else of the two is the same.
    (blocks[FULL], blocks[STATES]) = (vec![blocks[FULL][0], blocks[FULL][1], 910], vec![0, 0, 911]);
    let second = arrive(&mut engine, 4 * BLOCK_TOKENS);
    engine[second].blocks = blocks;
    engine[second].blocks[FULL].push(912);
    let begun = begin(&mut engine, second, END, BLOCK_TOKENS, copied);
    take_saves(&mut engine, FULL);
    engine.take(&begun);
    engine.go_on(second);
    let saved: Vec<_> = take_saves(&mut engine, FULL).into_iter().flat_map(|(_, _, ids)| ids).collect();
    assert!(!saved.contains(&910) && !saved.contains(&912), "upon a step that was passed over: {saved:?}");
}

/// The step to copy the blocks may have failed as well, or the one before it alone.
#[test]
fn a_copy_of_a_copy_is_as_unproven() {
    for both in [true, false] {
        let mut engine = setup().engine();
        let (first, _) = producer(&mut engine);
        let shared = engine[first].blocks[FULL][..2].to_vec();
        let copied = vec![(engine[first].blocks[FULL][2], 910), (900, 911)];
        engine.finish(first);
        let second = arrive(&mut engine, 3 * BLOCK_TOKENS);
        engine[second].blocks = vec![[shared.clone(), vec![910]].concat(), vec![0, 0, 911]];
        let mut step = begin(&mut engine, second, END, 1, copied);
        if both {
            step = engine.idle();
        }
        engine.take(&step);
        engine.finish(second);
        take_saves(&mut engine, FULL);
        let third = arrive(&mut engine, 3 * BLOCK_TOKENS);
        engine[third].blocks = vec![[shared, vec![920]].concat(), vec![0, 0, 921]];
        begin(&mut engine, third, END, 3 * BLOCK_TOKENS - END, vec![(910, 920), (911, 921)]);
        let saved: Vec<_> = take_saves(&mut engine, FULL).into_iter().flat_map(|(_, _, ids)| ids).collect();
        assert!(!saved.contains(&920), "{both}: {saved:?}");
    }
}

/// A full block's state is the one at its end.
#[test]
fn a_state_at_the_end_of_a_block_proves_nothing_within_it() {
    let mut engine = setup().engine();
    let first = arrive(&mut engine, 3 * BLOCK_TOKENS);
    let step = begin(&mut engine, first, 0, 3 * BLOCK_TOKENS, Vec::new());
    engine.take(&step);
    let offered =
        vec![OfferedState { request: first, group: STATES, block: 900, boundary: 3 * BLOCK_TOKENS }];
    let step = engine.step_with(Changes { offered, ..Changes::default() }, &[(first, 1)]);
    engine.take(&step);
    take_saves(&mut engine, FULL);
    let mut blocks = engine[first].blocks.clone();
    let copied = vec![(blocks[FULL][2], 910), (900, 911)];
    (blocks[FULL][2], blocks[STATES]) = (910, vec![0, 0, 911]);
    let second = arrive(&mut engine, 3 * BLOCK_TOKENS);
    engine[second].blocks = blocks;
    begin(&mut engine, second, END, 3 * BLOCK_TOKENS - END, copied);
    assert_eq!(take_saves(&mut engine, FULL), []);
}

/// KV computed upon unproven blocks is not kept under any key.
#[test]
fn nothing_is_kept_of_a_block_in_doubt() {
    let mut engine = setup().engine();
    let request = arrive(&mut engine, PROMPT);
    let step = begin(&mut engine, request, BLOCK_TOKENS, END - BLOCK_TOKENS, Vec::new());
    engine.take(&step);
    offer(&mut engine, request, 900);
    assert_eq!((take_saves(&mut engine, FULL), take_saves(&mut engine, STATES)), (Vec::new(), Vec::new()));
}
