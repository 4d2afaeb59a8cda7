//! Limits of one holder's effect on another.

use super::*;
use crate::ledger::WORK_MS;

const BLOCK: u64 = 600_000;
/// Blocks of a segment.
const SLOTS: u64 = 3;

fn whose(holder: HolderId) -> Whose {
    Whose { holder, ..Whose::default() }
}

fn save(dram: &mut Dram, holder: HolderId, number: u64, bytes: u64) -> Result<(), FillError> {
    let slot = dram.begin_fill(key(number), bytes, whose(holder))?;
    assert!(dram.commit(slot));
    Ok(())
}

fn save_all(dram: &mut Dram, holder: HolderId, numbers: std::ops::Range<u64>, bytes: u64) {
    numbers.for_each(|number| save(dram, holder, number, bytes).expect("room"));
}

fn kept(dram: &Dram, numbers: std::ops::Range<u64>) -> u64 {
    numbers.filter(|number| dram.find(7, 0, &hash(*number)).is_some()).count() as u64
}

/// A tier of 30 slots, and holders.
fn shared<const N: usize>() -> (Dram, [HolderId; N]) {
    shared_of(10)
}

fn shared_of<const N: usize>(segments: u64) -> (Dram, [HolderId; N]) {
    let mut dram = tier(segments);
    assert_eq!(u64::from(pool::slot_count(SEGMENT, BLOCK).expect("fits")), SLOTS);
    let holders = std::array::from_fn(|_| dram.enter());
    (dram, holders)
}

#[test]
fn a_flood_of_saves_leaves_another_at_work_its_share() {
    let (mut dram, [good, greedy]) = shared();
    dram.work(good, 0);
    save_all(&mut dram, good, 0..20, BLOCK);
    dram.work(greedy, 500);
    for number in 100..1000 {
        dram.work(good, 500 + number);
        dram.work(greedy, 500 + number);
        save(&mut dram, greedy, number, BLOCK).expect("its own make room");
    }
    assert_eq!((kept(&dram, 0..20), kept(&dram, 100..1000)), (15, 15));
    for number in 20..300 {
        save(&mut dram, good, number % 15 + 20, BLOCK).ok();
        save(&mut dram, greedy, 1000 + number, BLOCK).expect("its own make room");
    }
    assert_eq!(kept(&dram, 20..35), 15, "and room for what it saves anew");
}

#[test]
fn what_one_does_not_use_is_lent_and_given_back() {
    let (mut dram, [good, greedy]) = shared();
    dram.work(good, 0);
    dram.work(greedy, 0);
    save_all(&mut dram, good, 0..5, BLOCK);
    save_all(&mut dram, greedy, 100..200, BLOCK);
    assert_eq!((kept(&dram, 0..5), kept(&dram, 100..200)), (5, 25));
    save_all(&mut dram, good, 5..15, BLOCK);
    assert_eq!((kept(&dram, 0..15), kept(&dram, 100..200)), (15, 15));
}

#[test]
fn whoever_is_alone_at_work_has_everything() {
    let (mut dram, [idle, busy]) = shared();
    dram.work(idle, 0);
    dram.work(busy, WORK_MS);
    let mut compute = |holder, numbers: std::ops::Range<u64>| {
        for number in numbers {
            save(&mut dram, holder, number, BLOCK).expect("room");
            dram.end_chain(holder, 7, &hashes(number..number + 1), Ending::default());
        }
    };
    compute(idle, 0..30);
    compute(busy, 100..130);
    assert_eq!((kept(&dram, 0..30), kept(&dram, 100..130)), (0, 30), "the oldest went");
}

#[test]
fn whoever_has_leased_all_its_own_takes_none_of_what_is_within_a_share() {
    let (mut dram, [good, greedy]) = shared();
    dram.work(good, 0);
    dram.work(greedy, 0);
    save_all(&mut dram, good, 0..15, BLOCK);
    save_all(&mut dram, greedy, 100..115, BLOCK);
    dram.grant(2, greedy, 1, 7, &hashes(100..115), 0, &mut Vec::new()).expect("hits");
    assert_eq!(save(&mut dram, greedy, 115, BLOCK), Err(FillError::NoSpace));
    assert_eq!(kept(&dram, 0..15), 15);
}

#[test]
fn a_share_is_had_by_blocks_of_another_size_too() {
    let (mut dram, [first, second]) = shared_of(40);
    dram.work(first, 0);
    dram.work(second, 0);
    save_all(&mut dram, first, 0..120, BLOCK);
    save_all(&mut dram, second, 200..500, BLOCK / 2);
    let used = |dram: &Dram, holder| dram.holdings(holder).kept;
    let share = dram.config().pool_bytes / 2;
    assert!(used(&dram, second) > share * 3 / 4 && used(&dram, first) > share * 3 / 4, "{:?}", dram.stats());
    let evicted = dram.stats().evicted_blocks_total;
    for number in 0..100 {
        save(&mut dram, first, 1000 + number, BLOCK).expect("its own make room");
        save(&mut dram, second, 2000 + number, BLOCK / 2).expect("its own make room");
    }
    assert_eq!(dram.stats().evicted_blocks_total - evicted, 200, "no segment goes to and fro");
}

#[test]
fn leases_and_fillings_leave_others_at_work_their_share() {
    let (mut dram, [good, greedy]) = shared();
    let share = dram.config().pool_bytes / 2 / BLOCK;
    dram.work(good, 0);
    save_all(&mut dram, good, 0..30, BLOCK);
    let lease = |dram: &mut Dram, holder, numbers: std::ops::Range<u64>| {
        let mut out = Vec::new();
        let lease = dram.grant(1, holder, 1, 7, &hashes(numbers), 0, &mut out);
        (lease, out.len() as u64)
    };
    let (alone, hits) = lease(&mut dram, good, 0..30);
    assert_eq!(hits, 30, "alone it may have all");
    dram.release(alone.expect("hits"), 1).expect("live");
    dram.work(greedy, 1);
    let (first, hits) = lease(&mut dram, greedy, 0..30);
    assert_eq!(hits, share, "a shorter hit");
    assert_eq!(lease(&mut dram, greedy, 20..30), (None, 0));
    assert_eq!(dram.begin_fill(key(100), BLOCK, whose(greedy)), Err(FillError::NoSpace));
    let (_, hits) = lease(&mut dram, good, 20..30);
    assert_eq!(hits, 10);
    let first = first.expect("hits");
    dram.promise(first, 1).expect("live");
    assert_eq!(dram.holdings(greedy), Holdings { promised: share * BLOCK, ..Holdings::default() });
    assert!(dram.consume(first, 1, 0).expect("live"));
    assert_eq!(dram.holdings(greedy), Holdings::default());
    assert_eq!(lease(&mut dram, greedy, 0..10).1, 10);
}

#[test]
fn a_lease_from_before_others_came_is_cut_when_it_is_asked_for_again() {
    let (mut dram, [good, greedy]) = shared();
    dram.work(greedy, 0);
    save_all(&mut dram, greedy, 0..30, BLOCK);
    let lease = dram.grant(1, greedy, 1, 7, &hashes(0..30), 0, &mut Vec::new()).expect("hits");
    assert_eq!(dram.fitting(lease, 1), Ok(30));
    dram.work(good, 0);
    let share = dram.config().pool_bytes / 2 / BLOCK;
    assert_eq!(dram.fitting(lease, 1), Ok(share as usize));
}

#[test]
fn a_block_whose_holder_is_gone_is_its_next_users() {
    let (mut dram, [gone, user]) = shared();
    save_all(&mut dram, gone, 0..10, BLOCK);
    dram.end_chain(user, 7, &hashes(0..2), Ending::default());
    assert_eq!(dram.holdings(user).kept, 0, "it is another's");
    dram.leave(gone);
    dram.end_chain(user, 7, &hashes(0..4), Ending::default());
    assert_eq!((dram.holdings(user).kept, dram.holdings(gone).kept), (4 * BLOCK, 6 * BLOCK));
}

#[test]
fn numbers_serve_again_and_those_with_the_least_first() {
    let (mut dram, [first, second]) = shared();
    save_all(&mut dram, first, 0..2, BLOCK);
    save_all(&mut dram, second, 10..11, BLOCK);
    let others: Vec<HolderId> = (2..255).map(|_| dram.enter()).collect();
    assert!(!others.contains(&HolderId::NOBODY));
    assert_eq!(dram.enter(), HolderId::NOBODY, "none is left");
    let lease = dram.grant(1, second, 1, 7, &hashes(0..1), 0, &mut Vec::new()).expect("a hit");
    dram.leave(first);
    dram.leave(second);
    assert_eq!(dram.enter(), first, "the other's loads go on");
    dram.release(lease, 1).expect("live");
    assert_eq!(dram.enter(), second);
    assert_eq!(dram.holdings(second).kept, BLOCK, "what is left is its own");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn the_ledger_says_what_the_slots_do(
        steps in prop::collection::vec((0..4usize, 0..40u64, 0..10u8), 1..300),
    ) {
        let (mut dram, mut holders) = shared::<3>();
        let (mut filling, mut leases, mut held) = (Vec::new(), Vec::new(), Vec::new());
        for (now_ms, (who, number, act)) in (0..).step_by(100).zip(steps) {
            let holder = holders.get(who).copied().unwrap_or(NOBODY);
            let bytes = if number % 2 == 0 { BLOCK } else { BLOCK / 2 };
            dram.work(holder, now_ms);
            match act {
                0..4 => filling.extend(dram.begin_fill(key(number), bytes, whose(holder)).ok()),
                4 if !filling.is_empty() => {
                    let slot = filling.swap_remove(number as usize % filling.len());
                    assert!(if number % 3 > 0 { dram.commit(slot) } else { dram.abandon(slot) });
                }
                5 => {
                    let run = hashes(number..number + 3);
                    leases.extend(dram.grant(1, holder, 1, 7, &run, now_ms, &mut Vec::new()));
                }
                6 if !leases.is_empty() => {
                    let lease = leases[number as usize % leases.len()];
                    let _ = if number % 2 == 0 { dram.promise(lease, 1) } else { dram.truncate(lease, 1, 1, 1) };
                }
                7 if !leases.is_empty() => {
                    let _ = dram.release(leases.swap_remove(number as usize % leases.len()), 1);
                }
                8 => held.extend(dram.hold(&key(number), holder).map(|slot| (slot, holder))),
                8.. if !held.is_empty() => {
                    let (slot, holder) = held.swap_remove(number as usize % held.len());
                    dram.unhold(slot, holder);
                }
                _ if who < 3 => {
                    dram.end_chain(holder, 7, &hashes(number..number + 5), Ending::default());
                    dram.leave(holder);
                    holders[who] = dram.enter();
                }
                _ => drop((dram.expire(now_ms), dram.remove(&key(number)), dram.end_removal())),
            }
            dram.drain_evicted().for_each(drop);
            dram.drain_assigned().for_each(drop);
            dram.audit_ledger();
        }
    }
}
