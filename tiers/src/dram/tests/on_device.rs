//! Blocks on their holder's device: their copies go first, until they leave it.

use super::*;

const BYTES: u64 = 600_000;
/// Slots of a segment.
const SLOTS: u64 = 3;

fn kept(dram: &Dram, numbers: std::ops::Range<u64>) -> Vec<u64> {
    numbers.filter(|number| dram.find_committed(7, 0, &hash(*number)).is_some()).collect()
}

fn save(dram: &mut Dram, holder: HolderId, numbers: std::ops::Range<u64>) {
    for number in numbers.clone() {
        let whose = BlockAccount { holder, quota: None };
        let slot = dram.begin_fill(key(number), BYTES, whose).expect("room");
        assert!(match number == numbers.start {
            true => dram.commit(slot),
            false => dram.commit_behind(slot, &key(number - 1)),
        });
    }
    dram.drain_evicted().for_each(drop);
}

/// A request for a chain, with its blocks on the holder's device at its end.
fn end_on_device(dram: &mut Dram, holder: HolderId, numbers: std::ops::Range<u64>) -> EndedChain {
    let ending = Ending { on_device: true, ..Ending::default() };
    dram.end_chain(holder, 7, &hashes(numbers), ending)
}

#[test]
fn blocks_on_the_device_go_first_and_the_deepest_of_the_oldest_before() {
    let mut dram = tier(4);
    let engine = dram.enter_holder();
    save(&mut dram, engine, 0..4);
    dram.end_chain(engine, 7, &hashes(0..4), Ending::default());
    save(&mut dram, engine, 10..14);
    end_on_device(&mut dram, engine, 10..14);
    save(&mut dram, engine, 20..24);
    end_on_device(&mut dram, engine, 20..24);
    let mut gone = Vec::new();
    dram.next_out(4 * SLOTS * BYTES, 12, &mut gone);
    let gone: Vec<BlockKey> = gone.iter().map(|leaving| leaving.key).collect();
    let order = [13, 12, 11, 10, 23, 22, 21, 20, 3, 2, 1, 0];
    assert_eq!(gone, order.map(key));
    save(&mut dram, engine, 30..36);
    assert_eq!(kept(&dram, 0..30), [0, 1, 2, 3, 20, 21], "in that order");
    dram.audit_ledger();
}

#[test]
fn a_block_about_to_leave_its_device_is_judged_like_any_other() {
    let mut dram = tier(4);
    let engine = dram.enter_holder();
    for chain in [0..3, 3..6] {
        save(&mut dram, engine, chain.clone());
        end_on_device(&mut dram, engine, chain);
    }
    save(&mut dram, engine, 10..16);
    end_on_device(&mut dram, engine, 10..16);
    assert_eq!(dram.leave_device(7, &hashes(3..7)), 3, "the kept ones of them");
    assert_eq!(dram.leave_device(7, &hashes(10..16)), 6);
    save(&mut dram, engine, 20..23);
    assert_eq!(kept(&dram, 0..16), [3, 4, 5, 10, 11, 12, 13, 14, 15], "those on the device went");
    save(&mut dram, engine, 30..33);
    assert_eq!(kept(&dram, 0..16), [10, 11, 12, 13, 14, 15], "those whose request is older went");
}

#[test]
fn a_copy_made_at_the_end_has_the_rank_of_its_request() {
    let mut dram = tier(4);
    let engine = dram.enter_holder();
    let whose = BlockAccount { holder: engine, quota: None };
    save(&mut dram, engine, 0..4);
    let ended = end_on_device(&mut dram, engine, 0..4);
    save(&mut dram, engine, 10..18);
    dram.end_chain(engine, 7, &hashes(10..18), Ending::default());
    save(&mut dram, engine, 20..24);
    assert!(kept(&dram, 0..4).is_empty(), "they went first");
    let slot = dram.begin_fill(key(3), BYTES, whose).expect("room");
    assert!(dram.commit_left(slot, Some(&key(2)), (ended, 3)), "its parent is on the device alone");
    let entry = |dram: &Dram, number| {
        let id = dram.find_committed(7, 0, &hash(number)).expect("kept");
        dram.slab.entries.get(id).standing
    };
    let own = entry(&dram, 3);
    assert_eq!(own.sort(), entry(&dram, 10).sort());
    assert!(own.tick() < entry(&dram, 10).tick(), "its request is older than the last one");
}

#[test]
fn a_parent_copied_after_its_child_goes_after_it() {
    let mut dram = tier(2);
    let engine = dram.enter_holder();
    let whose = BlockAccount { holder: engine, quota: None };
    save(&mut dram, engine, 0..3);
    let ended = end_on_device(&mut dram, engine, 0..3);
    save(&mut dram, engine, 10..16);
    end_on_device(&mut dram, engine, 10..16);
    assert_eq!(kept(&dram, 0..3), [0_u64; 0]);
    for number in [2, 1, 0] {
        let slot = dram.begin_fill(key(number), BYTES, whose).expect("room");
        let before = number.checked_sub(1).map(key);
        assert!(dram.commit_left(slot, before.as_ref(), (ended, number as usize)));
        dram.drain_evicted().for_each(drop);
    }
    dram.use_run(7, &hashes(2..3));
    let mut out = Vec::new();
    dram.next_out(6 * BYTES, 6, &mut out);
    let order: Vec<u64> =
        out.iter().map(|leaving| leaving.key.hash.words()[0]).filter(|number| *number < 3).collect();
    assert_eq!(order, [2, 1, 0], "though the first two are older than the last");
}

#[test]
fn without_their_device_blocks_are_judged_like_any_other() {
    let mut dram = tier(2);
    let [gone, other] = [(); 2].map(|()| dram.enter_holder());
    save(&mut dram, gone, 0..3);
    end_on_device(&mut dram, gone, 0..3);
    save(&mut dram, other, 10..13);
    dram.end_chain(other, 7, &hashes(10..13), Ending::default());
    dram.leave_holder(gone);
    let mut next = Vec::new();
    dram.next_out(6 * BYTES, 6, &mut next);
    let sorts: Vec<bool> = next.iter().map(|leaving| leaving.key.hash.words()[0] < 10).collect();
    assert_eq!(sorts, [true, true, true, false, false, false], "the older ones first");
    save(&mut dram, other, 20..21);
    assert_eq!(kept(&dram, 0..13), [0, 1, 10, 11, 12]);
    dram.audit_ledger();
}

#[test]
fn a_used_block_and_one_of_another_holder_are_not_on_the_device() {
    let mut dram = tier(3);
    let [engine, other] = [(); 2].map(|()| dram.enter_holder());
    save(&mut dram, other, 0..3);
    end_on_device(&mut dram, engine, 0..3);
    save(&mut dram, engine, 10..13);
    end_on_device(&mut dram, engine, 10..13);
    dram.use_run(7, &hashes(10..12));
    save(&mut dram, engine, 20..24);
    assert_eq!(kept(&dram, 10..13), [10, 11], "a request is at work with them");
}

proptest! {
    /// The lists of the policy stay whole, and the ledger right, over any order of ends, leaves and fillings.
    #[test]
    fn any_order_of_events_leaves_the_tier_whole(
        steps in prop::collection::vec((0..5u8, 0..8u64, 1..4u64), 1..120)
    ) {
        let mut dram = tier(3);
        let engine = dram.enter_holder();
        let mut ended = EndedChain::default();
        for (action, first, count) in steps {
            let (first, end) = (first * 4, first * 4 + count);
            match action {
                0 => {
                    for number in first..end {
                        let whose = BlockAccount { holder: engine, quota: None };
                        let Ok(slot) = dram.begin_fill(key(number), BYTES, whose) else { continue };
                        prop_assert!(dram.commit_before(slot, &key(number.wrapping_sub(1))));
                    }
                }
                1 => ended = end_on_device(&mut dram, engine, first..end),
                2 => _ = dram.leave_device(7, &hashes(first..end)),
                3 => {
                    let whose = BlockAccount { holder: engine, quota: None };
                    if let Ok(slot) = dram.begin_fill(key(first + 1), BYTES, whose) {
                        prop_assert!(dram.commit_left(slot, Some(&key(first)), (ended, 1)));
                    }
                }
                _ => dram.use_run(7, &hashes(first..end)),
            }
            dram.drain_evicted().for_each(drop);
            let mut next = Vec::new();
            dram.best(&mut next);
            let found = kept(&dram, 0..40);
            prop_assert_eq!(next.len(), found.len(), "every kept block is in one list");
            dram.audit_ledger();
        }
    }
}
