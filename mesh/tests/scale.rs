//! A small mesh in virtual time has the costs that docs/mesh-cost.md gives for a large one.

mod world;

use mesh::digest::Thinning;
use mesh::pace;
use world::{FRAME_BYTES, Setup, World};

/// Followers of each node in the large mesh with the same pace.
const FOLLOWERS: u64 = 200;

const SETUP: Setup = Setup {
    nodes: 24,
    blocks: 2000,
    observers: 3,
    replaced_per_mille: 50,
    batch_ms: pace::TURN.as_micros() as u64 * FOLLOWERS / 1000,
    latency_ms_max: 5,
    thinning: Thinning::NONE,
    seed: 1,
};

fn about(found: u64, expected: u64) {
    assert!(found.abs_diff(expected) * 10 <= expected, "{found} where the formula says {expected}");
}

#[test]
fn messages_bytes_and_staleness_follow_the_formulae() {
    for seed in 1..3 {
        let mut world = World::new(Setup { seed, ..SETUP });
        let seconds = 3;
        world.run(seconds * 1000);
        let pairs = SETUP.observers as u64 * u64::from(SETUP.nodes - 1);
        let changes = 2 * SETUP.blocks * SETUP.replaced_per_mille / 1000;
        assert_eq!(u128::from(SETUP.batch_ms), pace::rest(pace::TURN, FOLLOWERS as usize).as_millis());
        let batches = 1000 / SETUP.batch_ms;
        assert_eq!(batches * FOLLOWERS, 4000, "batches a second of a node in the large mesh");
        let seen = &world.seen;
        about(seen.messages, pairs * batches * seconds);
        about(seen.changes, pairs * changes * seconds);
        about(seen.bytes, pairs * (batches * FRAME_BYTES + changes * 8) * seconds);

        let mut staleness = world.seen.staleness_ms.clone();
        staleness.sort_unstable();
        let median = staleness[staleness.len() / 2];
        let gather_ms = pace::GATHER.as_millis() as u64;
        let expected = (SETUP.batch_ms + gather_ms) / 2 + SETUP.latency_ms_max.div_ceil(2);
        assert!(median.abs_diff(expected) <= 5, "{median} ms");
        let longest = *staleness.last().expect("changes");
        assert!(longest <= SETUP.batch_ms + gather_ms + SETUP.latency_ms_max, "{longest} ms");

        let seen = &world.seen;
        assert!(seen.named_wrongly * 20 < seen.probes, "{seen:?}");
        assert!(seen.named_late > 0, "some blocks are requested just after they went");
        assert!(seen.found * 100 > seen.asked * 99, "{} of {}", seen.found, seen.asked);
        world.settle();
        world.assert_equal();
    }
}

#[test]
fn thinning_divides_what_is_told_and_takes_a_little_of_the_end_of_each_run() {
    let thinning = Thinning::new(2).expect("few");
    let mut world = World::new(Setup { thinning, ..SETUP });
    let seconds = 3;
    world.run(seconds * 1000);
    let pairs = SETUP.observers as u64 * u64::from(SETUP.nodes - 1);
    let changes = 2 * SETUP.blocks * SETUP.replaced_per_mille / 1000;
    about(world.seen.changes, pairs * changes * seconds / 4);
    let share = world.seen.found as f64 / world.seen.asked as f64;
    // Three blocks of 64 are behind the last announced one.
    assert!((0.92..0.98).contains(&share), "{share}");
    world.settle();
    world.assert_equal();
}
