//! What goes first, and what a request's end does to its blocks.

use super::*;

fn rank(dram: &Dram, number: u64) -> usize {
    let id = dram.index.find(Print::new(7, 0, &hash(number)), |_| true).expect("there");
    dram.slab.entries.get(id).standing.rank()
}

/// A request for a chain: what is missing is filled; then it is over.
fn request(dram: &mut Dram, chain: &[u64]) {
    let opened_at = dram.generation();
    let hashes: Vec<BlockHash> = chain.iter().map(|number| hash(*number)).collect();
    let mut leased = Vec::new();
    let lease = dram.grant(1, NOBODY, 1, 7, &hashes, 0, &mut leased);
    let hits = leased.len();
    let filled: Vec<_> = (hits..chain.len())
        .map(|at| (at, dram.begin_fill(key(chain[at]), 600_000, Whose::default())))
        .collect();
    for (at, slot) in filled {
        let Ok(slot) = slot else { continue };
        assert!(match at {
            0 => dram.commit(slot),
            _ => dram.commit_behind(slot, &key(chain[at - 1])),
        });
    }
    lease.into_iter().for_each(|lease| dram.release(lease, 1).expect("live"));
    dram.end_chain(NOBODY, 7, &hashes, opened_at);
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
    for _ in 0..40 {
        request(&mut dram, &hot);
        scan(&mut dram, slots / 4);
    }
    let last = scan(&mut dram, 2 * slots);
    let kept = |dram: &Dram, number: u64| dram.find(7, 0, &hash(number)).is_some();
    let survivors = hot.iter().filter(|number| kept(&dram, **number)).count();
    assert_eq!(survivors, hot.len(), "of the hot blocks");
    let evicted = (1000..last).rev().find(|number| !kept(&dram, *number)).expect("the scan was evicted");
    let again = fill(&mut dram, evicted, 600_000);
    assert!(dram.has_returned(again), "the ghost remembered it");
    assert_eq!(rank(&dram, evicted), 1);
}

#[test]
fn a_request_uses_what_was_there_before_it_and_nothing_of_its_own() {
    let mut dram = tier(1);
    let ranks = |dram: &Dram| [1, 2].map(|number| rank(dram, number));
    fill(&mut dram, 1, 600_000);
    let came = dram.generation();
    let own = dram.begin_fill(key(2), 600_000, Whose::default()).expect("room");
    for (number, there) in [(1, FillError::Present), (2, FillError::Filling)] {
        assert_eq!(dram.begin_fill(key(number), 600_000, Whose::default()), Err(there));
    }
    dram.use_run(7, &hashes(1..3));
    assert_eq!(ranks(&dram), [0, 0], "a request that goes on has not used it more than once");
    dram.end_chain(NOBODY, 7, &hashes(1..3), came);
    assert_eq!(ranks(&dram), [1, 0], "one that is being filled is nobody's");
    assert!(dram.commit(own));
    dram.end_chain(NOBODY, 7, &hashes(1..3), came);
    assert_eq!(ranks(&dram), [2, 0]);
    let generation = dram.generation();
    dram.end_chain(NOBODY, 7, &hashes(1..3), generation);
    assert_eq!(ranks(&dram), [3, 1], "a request that came later");
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
fn a_conversation_s_new_blocks_have_the_rank_of_their_turn() {
    let mut dram = tier(20);
    let chain: Vec<u64> = (0..40).collect();
    for (turn, end) in [(0, 10), (1, 20), (2, 30)] {
        request(&mut dram, &chain[..end]);
        assert_eq!(rank(&dram, end as u64 - 1), turn);
        assert!(rank(&dram, 0) >= turn);
    }
}

#[test]
fn a_block_enters_behind_its_parent_wherever_that_is() {
    let mut dram = tier(1);
    fill_all(&mut dram, 0..1, 600_000);
    fill_all(&mut dram, 10..11, 600_000);
    let child = dram.begin_fill(key(1), 600_000, Whose::default()).expect("room");
    assert!(dram.commit_behind(child, &key(0)));
    // Three slots: what is last goes first.
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
    let asked_for_once = dram.slab.classes[0].queues.of(NOBODY)[0].len();
    assert!(asked_for_once <= 3, "it is worth nothing here: {asked_for_once} are left");
    request(&mut dram, &one);
    for depth in 0..3 {
        let slot = dram.begin_fill(key(9000 + depth), 600_000, Whose::default()).expect("room");
        assert!(if depth == 0 { dram.commit(slot) } else { dram.commit_behind(slot, &key(8999 + depth)) });
    }
    assert_eq!(dram.probe(7, &hashes(9000..9003)), 3, "others went");
}

#[test]
fn a_block_without_its_parent_goes_next() {
    let mut dram = tier(1);
    fill_all(&mut dram, 10..12, 600_000);
    let orphan = dram.begin_fill(key(1), 600_000, Whose::default()).expect("room");
    assert!(dram.commit_behind(orphan, &key(0)));
    fill(&mut dram, 20, 600_000);
    assert_eq!([1, 10, 11].map(|number| dram.probe(7, &hashes(number..number + 1))), [0, 1, 1]);
}

#[test]
fn a_block_of_a_window_stays_without_its_parent() {
    let mut dram = tier(1);
    fill_all(&mut dram, 10..12, 600_000);
    for (number, parent) in [(1, 0), (2, 1)] {
        let slot = dram.begin_fill(key(number), 600_000, Whose::default()).expect("room");
        assert!(dram.commit_apart(slot, &key(parent)));
    }
    let kept =
        |dram: &Dram, numbers: [u64; 3]| numbers.map(|number| dram.find(7, 0, &hash(number)).is_some());
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
            // A conversation's blocks are behind other heads where the heads' lengths differ.
            let chain: Vec<u64> = shared.chain(own.map(|number| number * 100 + length)).collect();
            parents.extend(chain.windows(2).map(|pair| (pair[1], pair[0])));
            (0..=again).for_each(|_| request(&mut dram, &chain));
            let kept = |number: &u64| dram.find(7, 0, &hash(*number)).is_some();
            let lost = parents.iter().find(|(child, parent)| kept(child) && !kept(parent));
            prop_assert_eq!(lost, None);
        }
    }
}
