//! Blocks come to a pod that starts before it asks for them, and those of a pod that ends stay at another.

use super::*;

const PREFETCHED: &str = "pillion_mesh_prefetched_blocks_total";
const RESCUED: &str = "pillion_mesh_rescued_blocks_total";

#[test]
fn a_pod_that_starts_gets_the_blocks_of_its_peer_before_it_asks() {
    let (one, two) = (Pod::new("one"), Pod::new("two"));
    let first = one.start(&[&two]);
    let mut saver = Engine::connect(&first);
    let keys = saver.save(&mut 1);
    let second = two.start(&[&one]);
    wait_known(&second, keys.len());
    let mut engine = Engine::connect(&second);
    second.wait_metric(PREFETCHED, |count| count == keys.len() as u64);
    first.kill();
    assert_eq!(engine.served(&keys), (keys.clone(), 0), "{}", two.log());
    second.wait_metric("pillion_mesh_prefetched_used_blocks_total", |used| used == keys.len() as u64);
}

#[test]
fn the_blocks_of_a_pod_that_ends_stay_at_its_peer() {
    let (one, two) = (Pod::new("one"), Pod::new("two"));
    let (first, second) = (one.start(&[&two]), two.start(&[&one]));
    let (mut saver, mut engine) = (Engine::connect(&first), Engine::connect(&second));
    // Their peers have no blocks yet: nothing comes before the end.
    [&first, &second]
        .iter()
        .for_each(|sidecar| _ = sidecar.wait_metric("pillion_mesh_lists_total", |lists| lists == 1));
    let keys = saver.save(&mut 1);
    wait_known(&second, keys.len());
    first.terminate();
    second.wait_metric(RESCUED, |count| count == keys.len() as u64);
    assert_eq!(engine.served(&keys), (keys.clone(), 0), "{}", two.log());
}

#[test]
fn a_pod_without_a_peer_ends_at_once() {
    let (one, two) = (Pod::new("one"), Pod::new("two"));
    let first = one.start(&[&two]);
    let keys = Engine::connect(&first).save(&mut 1);
    assert!(!keys.is_empty());
    first.terminate();
    assert!(!one.log().contains("did not end within the grace period"), "{}", one.log());
}
