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
        let predicted = forecast.found().map(|found| found as f64 / forecast.asked() as f64);
        for (real, predicted) in real.iter().zip(predicted) {
            assert!((real - predicted).abs() < 0.03, "{slots} by {slots_max}: {real} and {predicted}");
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

const FULL: u32 = 1;
const OTHER: u32 = 2;

/// A request of a set: a chain of full attention, and these saved keys of another group. Returns the blocks found in the smallest room, and in
/// the endless one.
fn set_request(
    forecast: &mut Forecast,
    chain: &[BlockHash],
    asked_end: usize,
    reads: GroupReads,
    saved: &[SavedKeys],
) -> [u64; 2] {
    let before = forecast.found();
    let others = [OtherGroup { namespace: OTHER, reads }];
    forecast.lead(FULL, chain, 0..chain.len(), Ending::default(), &others);
    forecast.beside(&OtherRequest {
        namespace: OTHER,
        keys: chain,
        saved,
        ending: Ending::default(),
        asked_end,
        reads,
        size: 1.0,
    });
    [0, ROOMS.len() - 1].map(|room| forecast.found()[room] - before[room])
}

fn saved(keys: Range<usize>) -> SavedKeys {
    SavedKeys { keys, replaced: None }
}

#[test]
fn a_set_is_found_up_to_the_last_end_of_all_groups() {
    let chain = blocks(&mut Random(3), 20);
    for (reads, kept, found) in [
        (GroupReads::Last(1), vec![4..5, 9..10], 10),
        (GroupReads::Last(1), vec![], 0),
        (GroupReads::Last(3), vec![4..9, 12..14], 9),
        (GroupReads::Last(3), vec![5..7, 8..10], 0),
        (GroupReads::Last(3), vec![0..2, 9..11], 2),
        (GroupReads::All, vec![0..7, 8..16], 7),
    ] {
        let mut forecast = Forecast::new(400, 400);
        let kept: Vec<SavedKeys> = kept.into_iter().map(saved).collect();
        assert_eq!(set_request(&mut forecast, &chain[..16], 0, reads, &kept), [0; 2]);
        assert_eq!(set_request(&mut forecast, &chain, 0, reads, &[]), [found; 2], "{reads:?} {kept:?}");
        assert_eq!(forecast.asked(), 36, "a set's blocks count once");
    }
}

/// The real request found them, and saved nothing. In a smaller room the engine computes them again.
#[test]
fn blocks_read_at_the_end_of_a_prompt_are_kept_in_any_room() {
    let chain = blocks(&mut Random(6), 20);
    for reads in [GroupReads::Last(1), GroupReads::Last(3), GroupReads::All] {
        let mut forecast = Forecast::new(400, 400);
        set_request(&mut forecast, &chain, 12, reads, &[]);
        assert_eq!(set_request(&mut forecast, &chain, 12, reads, &[]), [12; 2], "{reads:?}");
    }
}

#[test]
fn states_take_room_and_replaced_ones_none() {
    let states = |replaced: bool| {
        let mut random = Random(4);
        let mut forecast = Forecast::new(100, 100);
        let chains: Vec<Vec<BlockHash>> = (0..3).map(|_| blocks(&mut random, 10)).collect();
        let save =
            |at: usize| SavedKeys { keys: at..at + 1, replaced: at.checked_sub(1).filter(|_| replaced) };
        let made: Vec<SavedKeys> = (0..10).map(save).collect();
        let mut all = || {
            chains
                .iter()
                .map(|chain| set_request(&mut forecast, chain, 0, GroupReads::Last(1), &made)[0])
                .sum::<u64>()
        };
        all();
        all()
    };
    assert_eq!(states(true), 30, "thirty blocks and three states fit half of the room");
    assert!(states(false) < 30, "thirty states beside them do not");
}

#[test]
fn a_set_has_no_strides() {
    let chain = blocks(&mut Random(5), 10);
    let mut forecast = Forecast::new(100, 50);
    set_request(&mut forecast, &chain, 0, GroupReads::Last(1), &[saved(9..10)]);
    assert_eq!(set_request(&mut forecast, &chain, 0, GroupReads::Last(1), &[]), [0; 2]);
    assert_eq!(forecast.asked(), 0, "neither is it asked for");
}
