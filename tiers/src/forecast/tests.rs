//! The forecast for a room, compared with a tier of that size.

use super::*;
use shm_protocol::random::Random;

fn blocks(random: &mut Random, count: u64) -> Vec<BlockHash> {
    (0..count).map(|_| BlockHash::from_words(std::array::from_fn(|_| random.next()))).collect()
}

/// Conversations of 1 to 10 turns, each with one of 8 prompts at its begin, 20 open at a time.
fn conversations() -> Vec<Vec<BlockHash>> {
    let mut random = Random(1);
    let prompts: Vec<_> = (0..8).map(|_| blocks(&mut random, 40)).collect();
    let mut open: Vec<(Vec<BlockHash>, u64)> = vec![(Vec::new(), 0); 20];
    let mut requests = Vec::new();
    for _ in 0..300 {
        let (chain, left) = &mut open[random.next() as usize % 20];
        if *left == 0 {
            (*chain, *left) = (prompts[random.next() as usize % 8].clone(), random.within(1..=10));
        }
        let more = random.within(4..=40);
        chain.extend(blocks(&mut random, more));
        *left -= 1;
        requests.push(chain.clone());
    }
    requests
}

/// Returns the share of all requested blocks found by a tier of so many slots.
fn share(requests: &[Vec<BlockHash>], slots: u64) -> f64 {
    let mut tier = Miniature::new(slots);
    let found: usize = requests.iter().map(|chain| tier.request(0, chain, 0, Ending::default())).sum();
    found as f64 / requests.iter().map(Vec::len).sum::<usize>() as f64
}

#[test]
fn a_room_finds_what_was_foretold_of_it() {
    let (requests, slots) = (conversations(), 800);
    let real = [slots / 2, slots, 2 * slots, 4 * slots].map(|slots| share(&requests, slots));
    assert!(real[2] - real[0] > 0.1, "the room makes no difference: {real:?}");
    for slots_max in [slots, slots / 4] {
        let mut forecast = Forecast::new(slots, slots_max);
        requests.iter().for_each(|chain| forecast.request(0, chain, 0..chain.len(), Ending::default()));
        let foretold = forecast.found().map(|found| found as f64 / forecast.asked() as f64);
        for (real, foretold) in real.iter().zip(foretold) {
            assert!((real - foretold).abs() < 0.03, "{slots} by {slots_max}: {real} and {foretold}");
        }
    }
}

#[test]
fn what_lies_on_the_device_is_not_asked_for() {
    let chain = blocks(&mut Random(2), 10);
    let mut forecast = Forecast::new(100, 100);
    forecast.request(0, &chain, 0..8, Ending::default());
    assert_eq!((forecast.asked(), forecast.found()), (8, [0; 5]));
    forecast.request(0, &chain, 4..8, Ending::default());
    assert_eq!((forecast.asked(), forecast.found()), (12, [4; 5]));
    forecast.request(1, &chain, 0..8, Ending::default());
    assert_eq!((forecast.asked(), forecast.found()), (20, [4; 5]), "another namespace");
    // A query for more than its blocks, or for none.
    forecast.request(0, &chain[..2], 1..20, Ending::default());
    forecast.request(0, &chain, 10..10, Ending::default());
    assert_eq!((forecast.asked(), forecast.found()), (21, [5; 5]));
}
