//! KV events for routers: the blocks kept by the sidecar for an engine.

use connector_shim::core::policy::EventChange;
use shm_protocol::key::Algorithm;

use crate::harness::{BLOCK_TOKENS, Engine, Setup, key};

fn telling() -> Engine {
    let mut setup = Setup::default();
    setup.options.events = Some(Some(Algorithm::Sha256));
    setup.engine()
}

/// Announced by the last request that saved them, while the request is known.
#[test]
fn saved_blocks_are_told_of_by_their_request() {
    let mut engine = telling();
    let request = engine.arrive(3 * BLOCK_TOKENS);
    engine.compute(request);
    engine.sidecar().announce(key(2));
    engine.sidecar().announce(key(1));
    let events = engine.policy.take_events(0, engine.time);
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].hashes, [key(1).0, key(2).0]);
    assert_eq!(events[0].change, EventChange::Stored { request, first: 1 });
    assert!(engine.policy.lingers(engine.time), "the ends of its saves are told of");
}

/// The session then asks for all blocks again.
#[test]
fn what_was_cleared_is_asked_for_again() {
    let mut engine = telling();
    assert_eq!(engine.sidecar().asked_for_all(), 1);
    engine.policy.blocks_cleared();
    assert_eq!(engine.sidecar().asked_for_all(), 2);
    assert_eq!(Engine::new().sidecar().asked_for_all(), 0, "nobody is told");
}
