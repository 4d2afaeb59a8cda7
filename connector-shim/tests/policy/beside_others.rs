//! Beside another connector: its blocks are never kept, and no block computed upon them.

use connector_shim::core::policy::{BegunRequest, Unkept};

use crate::harness::{BLOCK_TOKENS, Begin, Setup};

/// Under the same key, after the engine has dropped the block from its own cache.
#[test]
fn a_proven_block_is_not_once_another_connector_loads_it() {
    let mut setup = Setup::default();
    setup.options.beside_others = true;
    let mut engine = setup.engine();
    let blocks = vec![1, 2, 3];
    for _ in 0..2 {
        let request = engine.arrive(3 * BLOCK_TOKENS);
        engine.ask(request);
        let step = engine.begin(request, Begin { blocks: blocks.clone(), ..Begin::default() });
        engine.take(&step);
        engine.finish(request);
        assert_eq!(engine.take_saved(), blocks, "what the engine computes is kept");
    }
    let brought = engine.arrive(3 * BLOCK_TOKENS);
    engine.ask(brought);
    engine[brought].blocks = vec![blocks.clone()];
    engine.allocate(brought, 0);
    engine[brought].computed = 2 * BLOCK_TOKENS;
    let begun = BegunRequest { request: Some(brought), blocks: vec![blocks], computed: 2 * BLOCK_TOKENS };
    let step = engine.step(vec![begun], &[(brought, BLOCK_TOKENS)]);
    engine.take(&step);
    engine.decode(&[brought]);
    assert_eq!(engine.take_saves(), [], "nothing of another connector's, and nothing computed upon that");
    assert_eq!(engine.policy.take_unkept(), Unkept::default(), "and nobody is alarmed");
}
