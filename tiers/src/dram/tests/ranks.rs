//! The order of eviction, and the effect of a request's end on its blocks.

use super::*;
use crate::standing::Sort;

fn sort(dram: &Dram, number: u64) -> Sort {
    let id = dram.index.find_entry(KeyPrint::new(7, 0, &hash(number)), |_| true).expect("there");
    dram.slab.entries.get(id).standing.sort()
}

/// A request for a chain: missing blocks are filled; then it is over.
fn request(dram: &mut Dram, chain: &[u64]) {
    request_ending(dram, chain, Ending::default());
}

fn request_ending(dram: &mut Dram, chain: &[u64], ending: Ending) {
    let hashes: Vec<BlockHash> = chain.iter().map(|number| hash(*number)).collect();
    let mut leased = Vec::new();
    let lease = dram.grant(1, NOBODY, 1, 7, &hashes, 0, &mut leased);
    let hits = leased.len();
    let filled: Vec<_> = (hits..chain.len())
        .map(|at| (at, dram.begin_fill(key(chain[at]), 600_000, BlockAccount::default())))
        .collect();
    for (at, slot) in filled {
        let Ok(slot) = slot else { continue };
        assert!(match at {
            0 => dram.commit(slot),
            _ => dram.commit_behind(slot, &key(chain[at - 1])),
        });
    }
    lease.into_iter().for_each(|lease| dram.release(lease, 1).expect("live"));
    dram.end_chain(NOBODY, 7, &hashes, ending);
}

#[test]
fn blocks_in_use_outlive_a_scan_and_a_returning_block_is_known() {
    let mut dram = tier(20);
    let slots = 20 * u64::from(pool::slot_count(SEGMENT, 600_000).expect("fits"));
    let hot: Vec<u64> = (0..slots / 2).collect();
    let mut scanned = 1000;
    let mut scan = |dram: &mut Dram, blocks: u64| {
        (0..blocks).for_each(|_| {
            scanned += 1;
            request(dram, &[scanned]);
        });
        scanned
    };
    for _ in 0..200 {
        request(&mut dram, &hot);
        scan(&mut dram, slots / 4);
    }
    let last = scan(&mut dram, slots * 3 / 2);
    let kept = |dram: &Dram, number: u64| dram.find_committed(7, 0, &hash(number)).is_some();
    let survivors = hot.iter().filter(|number| kept(&dram, **number)).count();
    assert_eq!(survivors, hot.len(), "of the hot blocks");
    let evicted = (1000..last).rev().find(|number| !kept(&dram, *number)).expect("the scan was evicted");
    let again = fill(&mut dram, evicted, 600_000);
    assert!(dram.has_returned(again), "the ghost remembered it");
}

#[test]
fn a_request_that_goes_on_sorts_nothing_and_its_end_sorts_all() {
    let mut dram = tier(1);
    let sorts = |dram: &Dram| [1, 2].map(|number| sort(dram, number));
    fill(&mut dram, 1, 600_000);
    let own = dram.begin_fill(key(2), 600_000, BlockAccount::default()).expect("room");
    for (number, there) in [(1, FillError::Present), (2, FillError::Filling)] {
        assert_eq!(dram.begin_fill(key(number), 600_000, BlockAccount::default()), Err(there));
    }
    dram.use_run(7, &hashes(1..3));
    assert_eq!(sorts(&dram), [Sort::OPEN; 2], "it goes on");
    dram.end_chain(NOBODY, 7, &hashes(1..2), Ending::default());
    assert_eq!(sorts(&dram), [Sort::of_turn(0, 1), Sort::OPEN], "one that is being filled is nobody's");
    assert!(dram.commit_behind(own, &key(1)));
    dram.end_chain(NOBODY, 7, &hashes(1..3), Ending::default());
    let again = Sort::of_turn(0, 2);
    assert_eq!(sorts(&dram), [again; 2], "a request that goes on from the first");
    dram.end_chain(NOBODY, 7, &hashes(1..3), Ending::default());
    assert_eq!(sorts(&dram), [again; 2], "the same once more");
    dram.use_run(7, &hashes(1..3));
    assert_eq!(sorts(&dram), [Sort::OPEN; 2], "it is used again");
}

#[test]
fn a_chain_is_sorted_by_how_its_last_answer_ended() {
    let mut dram = tier(20);
    let chain: Vec<u64> = (0..40).collect();
    let mut turn = |end: usize, way| {
        request_ending(&mut dram, &chain[..end], Ending { way, ..Ending::default() });
        [0, end as u64 - 1].map(|number| sort(&dram, number))
    };
    let [tool, person] = [1, 2];
    assert_eq!(turn(10, 77), [Sort::of_turn(tool, 1); 2]);
    assert_eq!(turn(20, 88), [Sort::of_turn(person, 2); 2], "all of it, whatever it was before");
    assert_eq!(turn(30, 77), [Sort::of_turn(tool, 3); 2]);
}

#[test]
fn what_nobody_goes_on_from_goes_next_and_what_others_share_stays() {
    let mut dram = tier(4);
    let chain = |user: u64| (0..2).chain(user * 100..user * 100 + 3).collect::<Vec<u64>>();
    request(&mut dram, &[0, 1]);
    for user in 1..3 {
        request_ending(&mut dram, &chain(user), Ending { way: 1, last: user == 2, ..Ending::default() });
    }
    let evicted = dram.stats().evicted_blocks_total;
    for number in 1000.. {
        if dram.stats().evicted_blocks_total - evicted == 3 {
            break;
        }
        request(&mut dram, &[number]);
    }
    let kept = |number: &u64| dram.find_committed(7, 0, &hash(*number)).is_some();
    assert_eq!(chain(2).iter().filter(|number| kept(number)).count(), 2);
    assert!(chain(1).iter().all(kept), "the other's, and what both use");
}

#[test]
fn what_a_request_passed_over_is_not_used_by_its_end() {
    for (last, gone) in [(false, [2, 3]), (true, [3, 4])] {
        let mut dram = tier(1);
        [2, 3, 4].into_iter().for_each(|number| _ = fill(&mut dram, number, 600_000));
        let ending = Ending { last, unread: 1, ..Ending::default() };
        dram.end_chain(NOBODY, 7, &hashes(3..5), ending);
        [10, 11].into_iter().for_each(|number| _ = fill(&mut dram, number, 600_000));
        let kept = |number: &u64| dram.find_committed(7, 0, &hash(*number)).is_some();
        assert!(!gone.iter().any(kept), "{gone:?} of 2, 3 and 4 go first, the conversation's last: {last}");
    }
}

#[test]
fn a_kept_block_whose_parent_is_not_is_counted_when_its_chain_is_saved_anew() {
    let mut dram = tier(1);
    fill_all(&mut dram, 0..3, 600_000);
    dram.use_run(7, &hashes(0..3));
    assert_eq!(dram.stats().unreachable_blocks_total, 0);
    assert!(dram.remove(&key(1)));
    dram.use_run(7, &hashes(0..3));
    assert_eq!(dram.stats().unreachable_blocks_total, 1);
}

#[test]
fn a_conversation_s_blocks_have_the_sort_of_its_turn_and_what_others_begin_with_is_shared() {
    let mut dram = tier(20);
    let chain: Vec<u64> = (0..40).collect();
    for (turn, end) in [(1, 10), (2, 20), (3, 30)] {
        request(&mut dram, &chain[..end]);
        assert_eq!([0, end as u64 - 1].map(|number| sort(&dram, number)), [Sort::of_turn(0, turn); 2]);
    }
    let other: Vec<u64> = (0..20).chain(100..110).collect();
    request(&mut dram, &other);
    assert!([0, 19].iter().all(|number| sort(&dram, *number).is_shared()));
    assert_eq!([29, 109].map(|number| sort(&dram, number)), [Sort::of_turn(0, 3), Sort::of_turn(0, 1)]);
    request(&mut dram, &chain[..40]);
    assert!(sort(&dram, 0).is_shared(), "whoever goes on");
}

#[test]
fn a_block_enters_behind_its_parent_wherever_that_is() {
    let mut dram = tier(1);
    fill_all(&mut dram, 0..1, 600_000);
    fill_all(&mut dram, 10..11, 600_000);
    let child = dram.begin_fill(key(1), 600_000, BlockAccount::default()).expect("room");
    assert!(dram.commit_behind(child, &key(0)));
    // Three slots: the last block of a list goes first.
    for gone in [1, 0, 10] {
        fill(&mut dram, 20 + gone, 600_000);
        assert_eq!(dram.probe(7, &hashes(gone..gone + 1)), 0, "{gone}");
    }
}

#[test]
fn the_first_steps_of_a_prompt_outlive_what_is_older() {
    let mut dram = tier(20);
    let slots = 20 * u64::from(pool::slot_count(SEGMENT, 600_000).expect("fits"));
    let [one, other]: [Vec<u64>; 2] = [(0..slots / 2).collect(), (100..100 + slots / 2).collect()];
    for round in 0..40 {
        request(&mut dram, &one);
        (0..slots / 4).for_each(|number| request(&mut dram, &[1000 + round * slots + number]));
    }
    (0..5).for_each(|_| request(&mut dram, &other));
    request(&mut dram, &one);
    for depth in 0..3 {
        let slot = dram.begin_fill(key(9000 + depth), 600_000, BlockAccount::default()).expect("room");
        assert!(if depth == 0 { dram.commit(slot) } else { dram.commit_behind(slot, &key(8999 + depth)) });
    }
    assert_eq!(dram.probe(7, &hashes(9000..9003)), 3, "others went");
}

#[test]
fn a_block_without_its_parent_goes_next() {
    let mut dram = tier(1);
    fill_all(&mut dram, 10..12, 600_000);
    let orphan = dram.begin_fill(key(1), 600_000, BlockAccount::default()).expect("room");
    assert!(dram.commit_behind(orphan, &key(0)));
    fill(&mut dram, 20, 600_000);
    assert_eq!([1, 10, 11].map(|number| dram.probe(7, &hashes(number..number + 1))), [0, 1, 1]);
}

#[test]
fn a_block_of_a_window_stays_without_its_parent() {
    let mut dram = tier(1);
    fill_all(&mut dram, 10..12, 600_000);
    for (number, parent) in [(1, 0), (2, 1)] {
        let slot = dram.begin_fill(key(number), 600_000, BlockAccount::default()).expect("room");
        assert!(dram.commit_apart(slot, &key(parent)));
    }
    let kept = |dram: &Dram, numbers: [u64; 3]| {
        numbers.map(|number| dram.find_committed(7, 0, &hash(number)).is_some())
    };
    // There are three slots: the older block is gone. The first one of the run goes after its child.
    assert_eq!(kept(&dram, [10, 1, 2]), [false, true, true]);
    fill_all(&mut dram, 20..22, 600_000);
    assert_eq!(kept(&dram, [11, 1, 2]), [false, true, false]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]
    #[test]
    fn no_parent_goes_before_its_child(
        requests in prop::collection::vec((0..4u64, 0..6u64, 1..12u64, 1..12u64, 0..3u64), 1..100),
    ) {
        let mut dram = tier(9);
        let mut parents = HashMap::new();
        for (head, conversation, shared, own, again) in requests {
            let length = shared;
            let shared = (0..shared).map(|depth| head * 100 + depth);
            let own = (0..own).map(|depth| 10_000 + head * 1000 + conversation * 100 + depth);
            // A conversation's blocks are behind other heads if the heads' lengths differ.
            let chain: Vec<u64> = shared.chain(own.map(|number| number * 100 + length)).collect();
            parents.extend(chain.windows(2).map(|pair| (pair[1], pair[0])));
            (0..=again).for_each(|_| request(&mut dram, &chain));
            let kept = |number: &u64| dram.find_committed(7, 0, &hash(*number)).is_some();
            let lost = parents.iter().find(|(child, parent)| kept(child) && !kept(parent));
            prop_assert_eq!(lost, None);
        }
    }
}
