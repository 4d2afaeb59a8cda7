use super::*;

fn grant(dram: &mut Dram, numbers: std::ops::Range<u64>) -> LeaseId {
    dram.grant(1, NOBODY, 1, 7, &hashes(numbers), 0, &mut Vec::new()).expect("kept")
}

#[test]
fn a_removed_block_is_found_by_nobody_and_its_slot_is_free_at_once() {
    let mut dram = tier(1);
    dram.watch();
    let slot = fill(&mut dram, 1, SIZES[2]);
    assert!(dram.remove(&key(1)) && !dram.remove(&key(1)));
    dram.end_removal();
    assert_eq!(dram.probe(7, &hashes(1..2)), 0);
    assert_eq!(dram.drain_evicted().collect::<Vec<_>>(), [slot]);
    assert_eq!(dram.drain_changes().collect::<Vec<_>>(), [(key(1), true), (key(1), false)]);
    let stats = dram.stats();
    assert_eq!((stats.blocks, stats.bytes_used, stats.removed_blocks_total), (0, 0, 1));
    assert_eq!(stats.evicted_blocks_total, 0, "it did not have to make room");
    let anew = fill(&mut dram, 1, SIZES[2]);
    assert!(anew.offset == slot.offset && anew.generation > slot.generation);
}

#[test]
fn the_bytes_of_a_removed_block_stay_under_a_load_and_a_lease_without_one_ends() {
    let mut dram = tier(1);
    let slot = fill(&mut dram, 1, 4096);
    let (loaded, waiting) = (grant(&mut dram, 1..2), grant(&mut dram, 1..2));
    dram.promise(loaded, 1).expect("granted");
    let held = dram.hold(&key(1), NOBODY).expect("kept");
    assert!(dram.remove(&key(1)));
    assert_eq!(dram.drain_disowned().collect::<Vec<_>>(), [slot], "no later life has it");
    dram.end_removal();
    assert_eq!(dram.renew(waiting, 1, 0), Err(LeaseError::Unknown));
    assert_eq!(dram.slots(loaded, 1).expect("promised").collect::<Vec<_>>(), [slot]);
    let right = fill(&mut dram, 1, 4096);
    assert_ne!(right.offset, slot.offset, "a right block of the key has a slot of its own");
    assert_eq!(dram.consume(loaded, 1, 0), Ok(true));
    assert_eq!(dram.drain_evicted().count(), 0, "it is held");
    dram.unhold(held, NOBODY);
    assert_eq!(dram.drain_evicted().collect::<Vec<_>>(), [slot]);
    assert_eq!(dram.hold(&key(1), NOBODY), Some(right));
}

#[test]
fn a_namespace_is_removed_whole_and_no_other_one() {
    let mut dram = tier(2);
    fill_all(&mut dram, 0..10, 4096);
    fill(&mut dram, 10, 900_001);
    let held = dram.hold(&key(3), NOBODY).expect("kept");
    let other = BlockKey { namespace: 8, ..key(1) };
    let slot = dram.begin_fill(other, 4096, BlockAccount::default()).expect("room");
    assert!(dram.commit(slot));
    let filling = dram.begin_fill(key(11), 4096, BlockAccount::default()).expect("room");
    assert_eq!((dram.remove_namespace(7), dram.remove_namespace(7)), (11, 0));
    dram.end_removal();
    assert_eq!(dram.drain_evicted().count(), 10, "one is held");
    assert_eq!((dram.probe(7, &hashes(0..11)), dram.probe(8, &hashes(1..2))), (0, 1));
    dram.unhold(held, NOBODY);
    assert!(dram.commit(filling), "what is being filled is its caller's to give up");
    assert_eq!(dram.stats().blocks, 2);
}

#[test]
fn while_the_slots_of_an_earlier_life_are_left_alone_a_removed_block_keeps_its_own() {
    let config = DramConfig { pool_bytes: SEGMENT, segment_bytes: SEGMENT, lease_ttl_ms: TTL_MS };
    let mut dram = Dram::unopened(config, HOLD_MS).expect("sizes");
    assert!(dram.open_used(0, SIZES[0], 1000));
    for index in 0..3 {
        let remains = SlotRemains::Block {
            generation: u64::from(index) + 1,
            namespace: NamespaceDigest([7; 16]),
            group: 0,
            hash: hash(index.into()),
        };
        assert!(dram.adopt(0, index, &remains, Some(7), None));
    }
    for number in [0, 1] {
        let slot = dram.begin_verification(&key(number)).expect("adopted");
        dram.end_verification(slot, true);
    }
    let held = dram.hold(&key(1), NOBODY).expect("verified");
    assert!(dram.remove(&key(0)) && dram.remove(&key(1)));
    assert_eq!(dram.drain_disowned().count(), 2);
    dram.end_removal();
    dram.unhold(held, NOBODY);
    dram.expire(1000 + HOLD_MS - 1);
    assert_eq!(
        (dram.drain_evicted().count(), dram.begin_fill(key(5), SIZES[0], BlockAccount::default())),
        (0, Err(FillError::NoSpace))
    );
    dram.expire(1000 + HOLD_MS);
    let freed: Vec<u64> = dram.drain_evicted().map(|slot| slot.generation).collect();
    assert_eq!(freed, [1, 2]);
    assert_eq!((dram.stats().bytes_used, dram.stats().bytes_leased), (SIZES[0], 0));
    assert!(dram.is_adopted(&key(2)) && dram.remove_namespace(7) == 0);
    assert!(!dram.is_adopted(&key(2)), "nor is it trusted before it is verified");
    assert_eq!((dram.drain_evicted().count(), dram.stats().bytes_used), (1, 0));
}
