//! Requests of adapters: their keys are mixed with a digest of the adapter's bytes.

use std::time::Duration;

use connector_shim::core::policy::{Adapter, Arrival, RequestId};

use crate::harness::{BLOCK_TOKENS, Begin, Engine, key};

const ONE: [u8; 16] = [b'a'; 16];
const OTHER: [u8; 16] = [b'b'; 16];
/// Half of a request's wait for a digest.
const MOMENT: Duration = Duration::from_millis(100);

/// An engine with a hit of two blocks for every prompt, and a request of an adapter.
fn with_adapter(adapter: Adapter) -> (Engine, RequestId) {
    let mut engine = Engine::new();
    engine.sidecar().hits = Some(2);
    let request = engine.follow(4 * BLOCK_TOKENS + 1, Arrival::default());
    engine[request].adapter = adapter;
    engine.announce(request);
    (engine, request)
}

/// Whether the keys of each log are mixed with a digest.
fn folds(engine: &mut Engine) -> Vec<Option<[u8; 16]>> {
    let fold = |first| {
        let folds = [None, Some(ONE), Some(OTHER)];
        let of = |fold: &Option<[u8; 16]>| fold.map_or(key(0), |fold| key(0).folded(&fold)) == first;
        folds.into_iter().find(of).expect("a known fold")
    };
    engine.sidecar().logs.iter().map(|log| fold(log.keys[0])).collect()
}

/// Requests without an adapter have logs without a fold.
#[test]
fn requests_of_an_adapter_have_logs_of_its_fold() {
    let (mut engine, request) = with_adapter(Adapter::Fold(ONE));
    assert_eq!(engine.ask(request), Some(2 * BLOCK_TOKENS));
    let without = engine.arrive(4 * BLOCK_TOKENS + 1);
    assert_eq!(engine.ask(without), Some(2 * BLOCK_TOKENS));
    assert_eq!(folds(&mut engine), [Some(ONE), None]);
}

/// The adapter is replaced while its request runs.
#[test]
fn a_log_has_keys_of_one_fold() {
    let (mut engine, request) = with_adapter(Adapter::Fold(ONE));
    engine.ask(request);
    engine[request].adapter = Adapter::Fold(OTHER);
    engine.ask(request);
    assert_eq!(folds(&mut engine), [Some(ONE), Some(OTHER)]);
    assert_eq!(engine.sidecar().closed, [0]);
}

/// After this wait the request goes without the cache; its computed blocks are saved once the digest is
/// there.
#[test]
fn a_digest_is_waited_for_a_moment() {
    let (mut engine, request) = with_adapter(Adapter::Undigested);
    assert_eq!(engine.ask(request), None);
    engine.time += MOMENT;
    assert_eq!(engine.ask(request), None);
    engine.time += MOMENT;
    assert_eq!(engine.ask(request), Some(0));
    engine.compute(request);
    assert_eq!((engine.sidecar().logs.len(), engine.take_saves()), (0, vec![]));
    engine[request].adapter = Adapter::Fold(ONE);
    engine.decode(&[request]);
    assert_eq!(engine.take_saves(), [(0, 0, vec![1, 2, 3, 4])]);
}

/// Its files changed while the request's blocks were loaded.
#[test]
fn an_adapter_is_looked_at_again_in_the_step_in_which_ranks_load_it() {
    let (mut engine, request) = with_adapter(Adapter::Fold(ONE));
    assert_eq!(engine.ask(request), Some(2 * BLOCK_TOKENS));
    engine.load(request, 2 * BLOCK_TOKENS);
    engine[request].adapter = Adapter::Undigested;
    let blocks = engine[request].blocks[0].clone();
    engine.begin(request, Begin { found: 2 * BLOCK_TOKENS, listed: true, blocks, most: None });
    assert_eq!(engine.take_saves(), []);
}

/// Such a request is answered at once.
#[test]
fn an_adapter_without_the_cache() {
    let (mut engine, request) = with_adapter(Adapter::Unknown);
    assert_eq!(engine.ask(request), Some(0));
    engine.compute(request);
    engine.decode(&[request]);
    assert_eq!((engine.sidecar().logs.len(), engine.take_saves()), (0, vec![]));
}

/// Blocks computed with bytes given up by the ranks are not kept.
#[test]
fn a_replaced_adapter_is_noticed_by_its_files() {
    let (mut engine, request) = with_adapter(Adapter::Fold(ONE));
    engine.compute(request);
    assert_eq!(engine.take_saves().len(), 1);
    engine.policy.disown();
    engine[request].adapter = Adapter::Fold(OTHER);
    engine.decode(&[request]);
    assert_eq!((engine.take_saves(), engine.voided()), (vec![], 1));
}
