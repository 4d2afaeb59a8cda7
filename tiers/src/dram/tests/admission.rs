//! Who comes in beside a filter.

use super::*;

const BLOCK: u64 = 4096;

/// A full tier with a filter, no block of which was asked for since it came.
fn full() -> (Dram, u64) {
    let mut dram = tier(2);
    dram.filter_admission();
    let slots = 2 * u64::from(pool::slot_count(SEGMENT, BLOCK).expect("fits"));
    fill_all(&mut dram, 0..slots, BLOCK);
    assert_eq!(dram.stats().blocks, slots, "while there is room, all come in");
    (dram, slots)
}

#[test]
fn a_newcomer_comes_in_when_it_is_asked_for_more_often_than_what_goes() {
    let (mut dram, slots) = full();
    let new = key(1 << 40);
    assert_eq!(dram.begin_fill(new, BLOCK, None), Err(FillError::NotAdmitted), "as often as the oldest");
    assert_eq!(dram.stats().evicted_blocks_total, 0);
    let slot = dram.begin_fill(new, BLOCK, None).expect("asked for twice");
    assert!(dram.commit(slot));
    assert_eq!((dram.stats().blocks, dram.stats().evicted_blocks_total), (slots, 1));
}

#[test]
fn of_a_scan_next_to_nothing_comes_in() {
    let (mut dram, slots) = full();
    for _ in 0..2 {
        assert_eq!(dram.probe(7, 0, &hashes(0..slots)), slots as usize);
    }
    let came_in = (slots..3 * slots).filter(|number| dram.begin_fill(key(*number), BLOCK, None).is_ok());
    let came_in = came_in.count() as u64;
    assert!(came_in < slots / 50, "{came_in} of {} that were asked for once", 2 * slots);
}

#[test]
fn a_quota_s_newcomers_are_compared_with_its_own() {
    let mut dram = tier(2);
    dram.filter_admission();
    let quota = dram.add_quota(10 * BLOCK);
    for number in 0..10 {
        let slot = dram.begin_fill(key(number), BLOCK, Some(quota)).expect("room");
        assert!(dram.commit(slot));
    }
    assert_eq!(dram.begin_fill(key(10), BLOCK, Some(quota)), Err(FillError::NotAdmitted));
    assert!(dram.begin_fill(key(10), BLOCK, Some(quota)).is_ok());
    assert_eq!(dram.quota(quota).bytes_used, 10 * BLOCK);
}
