//! The limits of a quota's blocks, and whose room they take.

use super::*;

const BLOCK: u64 = 4096;

fn try_fill(dram: &mut Dram, number: u64, bytes: u64, quota: Option<QuotaId>) -> Result<SlotRef, FillError> {
    let slot = dram.begin_fill(key(number), bytes, Whose { quota, ..Whose::default() })?;
    assert!(dram.commit(slot));
    Ok(slot)
}

fn keeps(dram: &Dram, numbers: std::ops::Range<u64>) -> usize {
    numbers.filter(|number| dram.find(7, 0, &hash(*number)).is_some()).count()
}

/// Half of a pool outside of all quotas, and a full quota of a hundred blocks.
fn at_its_quota() -> (Dram, QuotaId, std::ops::Range<u64>) {
    let mut dram = tier(2);
    let quota = dram.add_quota(100 * BLOCK + BLOCK / 2);
    let others = 1000..1000 + u64::from(pool::slot_count(SEGMENT, BLOCK).expect("fits"));
    fill_all(&mut dram, others.clone(), BLOCK);
    for number in 0..100 {
        try_fill(&mut dram, number, BLOCK, Some(quota)).expect("room");
    }
    (dram, quota, others)
}

#[test]
fn a_quota_that_is_used_up_evicts_its_own_blocks_alone() {
    let (mut dram, quota, others) = at_its_quota();
    assert_eq!(dram.stats().evicted_blocks_total, 0);
    for number in 100..150 {
        try_fill(&mut dram, number, BLOCK, Some(quota)).expect("its own make room");
    }
    assert_eq!(dram.stats().evicted_blocks_total, 50);
    assert_eq!((keeps(&dram, 0..50), keeps(&dram, 50..150)), (0, 100), "the oldest went");
    assert_eq!(keeps(&dram, others.clone()), others.clone().count());
    assert_eq!(dram.quota(quota), QuotaStats { bytes_max: 100 * BLOCK + BLOCK / 2, bytes_used: 100 * BLOCK });
}

#[test]
fn what_was_asked_for_outlives_what_was_not() {
    let (mut dram, quota, _) = at_its_quota();
    for round in 0..40 {
        dram.end_chain(NOBODY, 7, &hashes(0..40), Ending::default());
        for number in 100 + round * 20..120 + round * 20 {
            try_fill(&mut dram, number, BLOCK, Some(quota)).expect("its own make room");
            dram.end_chain(NOBODY, 7, &hashes(number..number + 1), Ending::default());
        }
    }
    for number in 10_000..10_100 {
        try_fill(&mut dram, number, BLOCK, Some(quota)).expect("its own make room");
        dram.end_chain(NOBODY, 7, &hashes(number..number + 1), Ending::default());
    }
    assert_eq!((keeps(&dram, 0..40), keeps(&dram, 40..900)), (40, 0));
}

#[test]
fn leased_blocks_and_those_being_filled_make_no_room() {
    let (mut dram, quota, _) = at_its_quota();
    let mut out = Vec::new();
    let lease = dram.grant(1, NOBODY, 1, 7, &hashes(0..99), 0, &mut out).expect("hits");
    let filling = dram
        .begin_fill(key(200), BLOCK, Whose { quota: Some(quota), ..Whose::default() })
        .expect("the one that is not leased goes");
    assert_eq!(try_fill(&mut dram, 201, BLOCK, Some(quota)), Err(FillError::NoSpace));
    assert_eq!((keeps(&dram, 0..99), keeps(&dram, 99..100)), (99, 0));
    assert!(dram.abandon(filling));
    assert_eq!(dram.quota(quota).bytes_used, 99 * BLOCK, "what did not come is not counted");
    assert!(try_fill(&mut dram, 201, BLOCK, Some(quota)).is_ok());
    assert_eq!(dram.release(lease, 1), Ok(()));
    assert!(try_fill(&mut dram, 202, BLOCK, Some(quota)).is_ok(), "unleased ones go again");
}

#[test]
fn a_block_larger_than_its_quota_evicts_nothing() {
    let (mut dram, quota, _) = at_its_quota();
    assert_eq!(try_fill(&mut dram, 200, 101 * BLOCK, Some(quota)), Err(FillError::NoSpace));
    assert_eq!(dram.stats().evicted_blocks_total, 0);
}

#[test]
fn a_full_pool_takes_from_whomever_the_policy_names() {
    let (mut dram, quota, others) = at_its_quota();
    fill_all(&mut dram, 5000..6000, BLOCK);
    assert!(keeps(&dram, 0..100) < 100 && keeps(&dram, others) == 0, "a quota reserves nothing");
    assert_eq!(dram.quota(quota).bytes_used, keeps(&dram, 0..100) as u64 * BLOCK);
}

#[test]
fn adopted_blocks_count_and_go_by_and_by_where_they_are_too_many() {
    let config = Config { pool_bytes: 2 * SEGMENT, segment_bytes: SEGMENT, lease_ttl_ms: TTL_MS };
    let mut dram = Dram::unopened(config, HOLD).expect("sizes");
    let quota = dram.add_quota(100 * BLOCK);
    assert!(dram.open_used(0, BLOCK, 0));
    for index in 0..300 {
        assert!(dram.adopt(0, index, &whole(u64::from(index), 5), Some(7), Some(quota)));
    }
    verify_all(&mut dram);
    assert_eq!(dram.quota(quota).bytes_used, 300 * BLOCK);
    dram.open_empty(1);
    assert_eq!(try_fill(&mut dram, 1000, BLOCK, Some(quota)), Err(FillError::NoSpace), "the hold lasts");
    assert!(try_fill(&mut dram, 1000, BLOCK, None).is_ok());
    dram.expire(HOLD);
    let tries = (1..10).find(|_| try_fill(&mut dram, 2000, BLOCK, Some(quota)).is_ok());
    assert_eq!(tries, Some(4), "64 blocks each time");
    assert_eq!(dram.quota(quota).bytes_used, 100 * BLOCK);
    assert_eq!(keeps(&dram, 1000..1001), 1);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]
    #[test]
    fn what_is_counted_is_what_is_there(
        steps in prop::collection::vec((0..60u64, 0..3usize, 0..4u8), 1..200),
    ) {
        let mut dram = tier(3);
        let quotas = [Some(dram.add_quota(2_500_000)), Some(dram.add_quota(1_000_000)), None];
        let mut leases = Vec::new();
        for (number, group, act) in steps {
            // A namespace has blocks of one size; the third one's blocks have another.
            let (number, bytes) = (number * 3 + group as u64, SIZES[group / 2]);
            let before: Vec<_> = (0..180).filter(|number| keeps(&dram, *number..number + 1) == 1).collect();
            let at_quota = quotas[group].is_some_and(|quota| {
                let QuotaStats { bytes_max, bytes_used } = dram.quota(quota);
                bytes_used + bytes > bytes_max
            });
            match act {
                0 => leases.extend(dram.grant(1, NOBODY, 1, 7, &[hash(number)], 0, &mut Vec::new())),
                1 => leases.pop().into_iter().for_each(|lease| dram.release(lease, 1).expect("live")),
                _ => {
                    let _ = try_fill(&mut dram, number, bytes, quotas[group]);
                }
            }
            let gone = before.iter().filter(|number| keeps(&dram, **number..**number + 1) == 0);
            prop_assert!(!at_quota || gone.clone().all(|number| *number as usize % 3 == group), "another's block went");
            for (group, quota) in quotas.iter().enumerate() {
                let Some(quota) = *quota else { continue };
                let count = (0..60).filter(|number| keeps(&dram, number * 3 + group as u64..number * 3 + group as u64 + 1) == 1);
                let QuotaStats { bytes_max, bytes_used } = dram.quota(quota);
                prop_assert_eq!(bytes_used, count.count() as u64 * SIZES[0]);
                prop_assert!(bytes_used <= bytes_max);
            }
        }
    }
}
