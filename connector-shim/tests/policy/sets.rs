//! Several cache groups: full attention, and windows of a few blocks.

use connector_shim::core::policy::kinds::{GroupForm, GroupKind};
use connector_shim::core::policy::{BegunRequest, FoundTokens, PlannedStep, Remark, RequestId};

use crate::harness::{BLOCK_TOKENS, Engine, Setup, full};

const PROMPT: u32 = 9 * BLOCK_TOKENS + 1;
/// Blocks of a window.
const READS: u32 = 3;

/// An engine with every prompt in the cache.
fn engine() -> Engine {
    let window = GroupForm { kind: GroupKind::Window { reads: READS }, window: 40, ..full() };
    let mut engine = Setup { forms: vec![full(), window], ..Setup::default() }.engine();
    (0..2).for_each(|group| engine.policy.session(group).sidecar.hits = Some(u32::MAX));
    engine
}

/// The engine gives the request blocks, in the window behind `null` null blocks alone, and takes so many tokens.
fn allocate(engine: &mut Engine, request: RequestId, null: usize, tokens: u32) -> PlannedStep {
    let mut blocks = [0, 1].map(|_| engine.free_blocks(10)).to_vec();
    blocks[1][..null].fill(0);
    engine[request].blocks = blocks;
    engine.allocate(request, tokens);
    engine.idle()
}

/// The blocks of each group's loads, and of its lost ones.
fn parts(engine: &mut Engine, step: &PlannedStep) -> Vec<(Vec<u32>, Vec<u32>)> {
    let lost = |group: usize| step.parts[group].lost.iter().flat_map(|lost| lost.blocks.clone()).collect();
    let loads = |engine: &mut Engine, group| {
        let loads = std::mem::take(&mut engine.policy.session(group).sidecar.loads);
        loads.into_iter().flat_map(|load| load.blocks).collect()
    };
    (0..2).map(|group| (loads(engine, group), lost(group))).collect()
}

/// The window may lack blocks at the boundary of the others.
#[test]
fn a_set_is_served_up_to_a_boundary_of_all_groups() {
    let mut engine = engine();
    let request = engine.arrive(PROMPT);
    assert_eq!(engine.matched(request, 0), FoundTokens::Tokens(9 * BLOCK_TOKENS, true));
    assert_eq!(
        engine.policy.session(1).sidecar.questions.last().map(|asked| (asked.first, asked.count)),
        Some((6, 3))
    );
    engine.policy.session(1).sidecar.hits = Some(READS - 1);
    let other = engine.arrive(PROMPT);
    assert_eq!(engine.matched(other, 0), FoundTokens::Tokens(2 * BLOCK_TOKENS, true));
    engine.policy.session(0).sidecar.hits = Some(1);
    let third = engine.arrive(PROMPT);
    assert_eq!(engine.matched(third, 0), FoundTokens::Tokens(BLOCK_TOKENS, true));
}

/// The engine ends its own hits a common boundary earlier, for a drafter. Blocks of several sizes have it further apart.
#[test]
fn the_blocks_dropped_for_a_drafter_are_not_loaded() {
    for (times, left) in [(1, 1), (2, 2)] {
        let block_tokens = times * BLOCK_TOKENS;
        let reads = GroupKind::Window { reads: READS };
        let window =
            GroupForm { kind: reads, block_tokens, key_tokens: block_tokens, hashes_each: times, window: 40 };
        let mut setup = Setup { forms: vec![full(), window], ..Setup::default() };
        setup.options.drops_last_block = true;
        let mut engine = setup.engine();
        (0..2).for_each(|group| engine.policy.session(group).sidecar.hits = Some(u32::MAX));
        let request = engine.arrive(8 * BLOCK_TOKENS + 1);
        let own = (8 - left) * BLOCK_TOKENS;
        assert_eq!(engine.matched(request, own), FoundTokens::Tokens(0, false), "{times}");
        assert!(!engine.policy.session(0).sidecar.released.is_empty(), "nothing stays leased");
        let own = own - left * BLOCK_TOKENS;
        assert_eq!(engine.matched(request, own), FoundTokens::Tokens(2 * left * BLOCK_TOKENS, true));
    }
}

/// The engine asks again until the group has answered.
#[test]
fn a_set_waits_for_its_last_group() {
    let mut engine = engine();
    engine.policy.session(1).sidecar.hits = None;
    let request = engine.arrive(PROMPT);
    assert_eq!(engine.matched(request, 0), FoundTokens::Later);
    engine.policy.session(1).sidecar.hits = Some(READS);
    assert_eq!(engine.matched(request, 0), FoundTokens::Tokens(9 * BLOCK_TOKENS, true));
}

/// A block of the window in front of the loaded ones would be read without a load.
#[test]
fn a_set_is_loaded_by_all_groups_or_by_none() {
    let mut engine = engine();
    let request = engine.arrive(PROMPT);
    engine.matched(request, 0);
    let step = allocate(&mut engine, request, 6, 9 * BLOCK_TOKENS);
    let blocks = engine[request].blocks.clone();
    let whole = [(blocks[0][..9].to_vec(), vec![]), (blocks[1][6..9].to_vec(), vec![])];
    assert_eq!(parts(&mut engine, &step), whole);
    let other = engine.arrive(PROMPT);
    engine.matched(other, 0);
    let step = allocate(&mut engine, other, 5, 9 * BLOCK_TOKENS);
    let blocks = engine[other].blocks.clone();
    let none = [(vec![], blocks[0][..9].to_vec()), (vec![], blocks[1][5..9].to_vec())];
    assert_eq!(parts(&mut engine, &step), none);
}

/// The engine takes less than the hit: the window is asked for again where that ends.
#[test]
fn a_set_may_be_loaded_in_part() {
    for kept in [true, false] {
        let mut engine = engine();
        let request = engine.arrive(PROMPT);
        engine.matched(request, 0);
        engine.policy.session(1).sidecar.hits = Some(if kept { READS } else { 1 });
        let step = allocate(&mut engine, request, 4, 7 * BLOCK_TOKENS);
        let blocks = engine[request].blocks.clone();
        let (full, window) = (blocks[0][..7].to_vec(), blocks[1][4..7].to_vec());
        let expected = match kept {
            true => [(full, vec![]), (window, vec![])],
            false => [(vec![], full), (vec![], window)],
        };
        assert_eq!(parts(&mut engine, &step), expected);
    }
}

/// A failed load of one group is one of the request: nothing is asked for again, and all of it is saved.
#[test]
fn a_load_that_one_group_lacks_has_failed() {
    let mut engine = engine();
    let request = engine.arrive(PROMPT);
    engine.matched(request, 0);
    allocate(&mut engine, request, 6, 9 * BLOCK_TOKENS);
    engine.policy.requests_failed(&[request]);
    assert!(engine.policy.is_refused(request));
    assert_eq!(engine.policy.take_remarks(), [Remark::NotLoaded { blocks: 9 + u64::from(READS) }]);
    assert_eq!(engine.matched(request, 0), FoundTokens::Tokens(0, false));
    engine[request].computed = 0;
    let blocks = [0, 1].map(|_| engine.free_blocks(10)).to_vec();
    let begun = BegunRequest { request: Some(request), blocks: blocks.clone(), computed: 0 };
    engine.step(vec![begun], &[(request, PROMPT)]);
    assert_eq!(engine.take_saved(), blocks[0][..9]);
    let window = engine.policy.session(1).sidecar.take_saves();
    let window: Vec<_> = window.into_iter().map(|(_, first, blocks)| (first, blocks)).collect();
    assert_eq!(window, [(6, blocks[1][6..9].to_vec())], "a later request reads the end of the prompt");
}

/// Another request has computed the prompt meanwhile.
#[test]
fn leases_end_once_the_engine_has_the_prompt_itself() {
    let mut engine = engine();
    let request = engine.arrive(PROMPT);
    assert_eq!(engine.matched(request, 0), FoundTokens::Tokens(9 * BLOCK_TOKENS, true));
    assert_eq!(engine.matched(request, 9 * BLOCK_TOKENS), FoundTokens::Tokens(0, false));
    for group in 0..2 {
        let session = engine.policy.session(group);
        session.serve();
        assert_eq!(session.sidecar.released, [0]);
    }
}
