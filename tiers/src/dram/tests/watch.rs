//! The log of changes, replayed, gives the findable blocks.

use super::*;
use shm_protocol::random::Random;

/// Applies the log to the known blocks; a change without effect is a fault.
fn replay(dram: &mut Dram, known: &mut HashSet<u64>) {
    for (key, findable) in dram.drain_changes() {
        assert_eq!((key.namespace, key.group), (7, 0));
        let number = key.hash.words()[0];
        let changed = if findable { known.insert(number) } else { known.remove(&number) };
        assert!(changed, "{number} was told twice");
    }
}

/// Fills, commits, abandons, holds, changes of block size, and quotas, over the blocks of an earlier life.
#[test]
fn the_log_replayed_is_what_can_be_found() {
    for seed in 0..40 {
        let mut random = Random(seed);
        let config = Config { pool_bytes: 3 * SEGMENT, segment_bytes: SEGMENT, lease_ttl_ms: TTL_MS };
        let mut dram = Dram::unopened(config, HOLD).expect("sizes");
        dram.watch();
        let quota = dram.add_quota(2_000_000);
        assert!(dram.open_used(0, SIZES[0], 0));
        for (index, remains) in [whole(1, 5), whole(1, 6), whole(2, 7)].iter().enumerate() {
            assert!(dram.adopt(0, index as u32, remains, Some(7), Some(quota)));
        }
        verify_all(&mut dram);
        (1..3).for_each(|segment| dram.open_empty(segment));

        let (mut known, mut filling, mut held) = (HashSet::new(), Vec::new(), Vec::new());
        let mut gone = false;
        for step in 0..600 {
            let number = random.next() % KEYS;
            match random.next() % 10 {
                0..5 => {
                    let size = SIZES[(random.next() % 10).saturating_sub(7) as usize];
                    let counted = random.next().is_multiple_of(3).then_some(quota);
                    filling.extend(dram.begin_fill(
                        key(number),
                        size,
                        Whose { quota: counted, ..Whose::default() },
                    ));
                }
                5..8 if !filling.is_empty() => {
                    let slot = filling.swap_remove(number as usize % filling.len());
                    let commit = !random.next().is_multiple_of(4);
                    assert!(if commit { dram.commit(slot) } else { dram.abandon(slot) });
                }
                8 => held.extend(dram.hold(&key(number), NOBODY)),
                _ if !held.is_empty() => dram.unhold(held.swap_remove(number as usize % held.len()), NOBODY),
                _ => drop(dram.expire(step)),
            }
            // Sometimes several events lie between two looks.
            if random.next().is_multiple_of(3) {
                let before = known.len();
                replay(&mut dram, &mut known);
                gone |= known.len() < before;
                for number in 0..KEYS {
                    let found = dram.find(7, 0, &hash(number)).is_some();
                    assert_eq!(found, known.contains(&number), "seed {seed}, step {step}: {number}");
                }
            }
        }
        assert!(dram.stats().evicted_blocks_total > 0 && gone, "seed {seed} evicted nothing");
    }
}

#[test]
fn nobody_watches_unless_asked_and_a_key_that_goes_and_comes_is_told_in_order() {
    let mut dram = tier(1);
    fill(&mut dram, 1, SIZES[2]);
    assert_eq!(dram.drain_changes().count(), 0);
    dram.watch();
    fill(&mut dram, 2, SIZES[2]);
    fill(&mut dram, 1, SIZES[2]);
    dram.watch();
    let told: Vec<(BlockKey, bool)> = dram.drain_changes().collect();
    assert_eq!(told, [(key(1), false), (key(2), true), (key(2), false), (key(1), true)]);
    assert_eq!(dram.drain_changes().count(), 0);
}
