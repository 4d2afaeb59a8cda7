//! Scores of prompts that another pod has, or is to compute.

use serde_json::Value;
use shm_protocol::request::{Append, LogKeys};

use super::client::prompts::{TOKENS, facts, keys_of};
use super::*;

#[test]
fn a_pod_knows_how_much_of_a_prompt_its_peer_has_and_what_the_peer_has_promised() {
    let (a, b) = (Pod::new("a"), Pod::new("b"));
    let first = a.start(&[&b]);
    let second = b.start(&[&a]);
    let mut engine = Engine::stating(facts("tiny"), [5; 16], &first, None);
    let _other = Engine::stating(facts("tiny"), [6; 16], &second, None);
    let prompt: Vec<u32> = (0..60 * TOKENS as u32).collect();
    let keys = keys_of(&prompt);
    // The other pod fetches what its peer has now, and nothing later.
    second.wait_metric("pillion_mesh_lists_total", |lists| lists == 1);
    engine.save_keys(&keys[..40]);
    wait_known(&second, 40);
    let score = || second.ask("POST", "/score", &json!({ "tokens": prompt })).unwrap();
    let places =
        |score: &Value| ["memory", "disk", "found", "promised"].map(|place| score[place].as_u64().unwrap());
    let scored = score();
    assert_eq!(places(&scored), [0, 0, 640, 0], "{scored}");
    assert_eq!(scored["peers"], json!({ "a": 640 }));
    assert_eq!(second.metric("pillion_mesh_fetched_blocks_total"), 0, "nothing was fetched");

    engine.scheduler.post(SchedulerRequest::Open { log: 900 });
    let part = &keys[..50];
    part.iter().enumerate().for_each(|(at, key)| engine.scheduler.memory.write_key(20, at, key));
    let keys = LogKeys::new(900, 0..part.len() as u32);
    let append = Append { keys, chunks: [20, 0, 0, 0, 0, 0], promised: true, tail: false };
    engine.scheduler.post(SchedulerRequest::Append(append));
    watch("a promise", || (places(&score())[3] == 800).then_some(()));
    let own = first.ask("POST", "/score", &json!({ "tokens": prompt })).unwrap();
    assert_eq!((places(&own), &own["peers"]), ([640, 640, 640, 800], &json!({})));
    first.terminate();
    second.terminate();
}
