//! Hints: blocks kept until a time within a holder's limit, and blocks that go first.

use super::*;

const BYTES: u64 = 600_000;

fn whose(holder: HolderId) -> BlockAccount {
    BlockAccount { holder, ..BlockAccount::default() }
}

fn save(dram: &mut Dram, holder: HolderId, number: u64, bytes: u64) -> bool {
    let slot = dram.begin_fill(key(number), bytes, whose(holder));
    dram.drain_evicted().for_each(drop);
    slot.is_ok_and(|slot| match number.checked_sub(1).filter(|_| !number.is_multiple_of(100)) {
        Some(parent) => dram.commit_behind(slot, &key(parent)),
        None => dram.commit(slot),
    })
}

/// Saves a chain, and ends its request.
fn save_chain(dram: &mut Dram, holder: HolderId, numbers: std::ops::Range<u64>) {
    assert!(numbers.clone().all(|number| save(dram, holder, number, BYTES)), "room");
    dram.end_chain(holder, 7, &hashes(numbers), Ending::default());
}

fn kept(dram: &Dram, numbers: std::ops::Range<u64>) -> Vec<u64> {
    numbers.filter(|number| dram.find_committed(7, 0, &hash(*number)).is_some()).collect()
}

fn hint(
    dram: &mut Dram,
    holder: HolderId,
    numbers: std::ops::Range<u64>,
    is_pinned: bool,
    until_ms: u64,
) -> HintedCounts {
    let terms = HintTerms { until_ms, is_pinned };
    dram.keep_chain(whose(holder), (7, &hashes(numbers)), (terms, 0), true, |_| false)
}

fn counts(done: u64, clipped: u64, missing: u64) -> HintedCounts {
    HintedCounts { done, clipped, missing }
}

#[test]
fn a_pin_outlives_a_flood_until_its_time_is_over() {
    let mut dram = tier(4);
    let engine = dram.enter_holder();
    save_chain(&mut dram, engine, 0..3);
    assert_eq!(hint(&mut dram, engine, 0..3, true, 1000), counts(3, 0, 0));
    (100..160).for_each(|number| assert!(save(&mut dram, engine, number, BYTES)));
    dram.expire(999);
    assert_eq!(kept(&dram, 0..3), [0, 1, 2]);
    assert_eq!(dram.stats().pinned_bytes, 3 * BYTES);
    dram.expire(1000);
    assert_eq!(dram.stats().pinned_bytes, 0);
    (160..220).for_each(|number| assert!(save(&mut dram, engine, number, BYTES)));
    assert_eq!(kept(&dram, 0..3), [0; 0]);
    dram.audit_ledger();
}

#[test]
fn retained_blocks_go_after_all_others_and_before_any_save_is_dropped() {
    let mut dram = tier(4);
    let engine = dram.enter_holder();
    save_chain(&mut dram, engine, 0..4);
    assert_eq!(hint(&mut dram, engine, 0..4, false, 1000), counts(4, 0, 0));
    save_chain(&mut dram, engine, 100..104);
    save_chain(&mut dram, engine, 200..204);
    assert_eq!(kept(&dram, 0..4), [0, 1, 2, 3]);
    (300..308).for_each(|number| assert!(save(&mut dram, engine, number, BYTES)));
    assert_eq!(kept(&dram, 0..4), [0, 1, 2, 3], "the others have gone");
    let mut leased = Vec::new();
    dram.grant(1, engine, 1, 7, &hashes(300..308), 0, &mut leased).expect("hits");
    assert_eq!(leased.len(), 8);
    assert!(save(&mut dram, engine, 400, BYTES), "one of them gives way");
    assert!(kept(&dram, 0..4).len() < 4);
    dram.audit_hints();
}

#[test]
fn a_hint_takes_half_of_a_share_and_the_head_of_its_chain() {
    let mut dram = tier(4);
    let [first, second] = [dram.enter_holder(), dram.enter_holder()];
    dram.work(first, 0);
    save_chain(&mut dram, first, 0..12);
    let half = 4 * SEGMENT / 2 / BYTES;
    assert_eq!(hint(&mut dram, first, 0..12, true, 1000), counts(half, 12 - half, 0));
    dram.work(second, 0);
    let part = 4 * SEGMENT / 4 / BYTES;
    assert_eq!(dram.stats().pinned_bytes, part * BYTES, "another engine is at work");
    dram.audit_hints();
    dram.leave_holder(first);
    assert_eq!(dram.stats().pinned_bytes, 0, "a hint ends with its engine");
    dram.audit_ledger();
}

#[test]
fn blocks_being_saved_are_kept_once_they_are_there() {
    let mut dram = tier(4);
    let engine = dram.enter_holder();
    save_chain(&mut dram, engine, 0..2);
    let terms = HintTerms { until_ms: 1000, is_pinned: true };
    let coming = |wanted: &BlockHash| *wanted == hash(2);
    let found = dram.keep_chain(whose(engine), (7, &hashes(0..4)), (terms, 0), true, coming);
    assert_eq!(found, counts(3, 0, 1));
    assert!(save(&mut dram, engine, 2, BYTES));
    assert_eq!(dram.stats().pinned_bytes, 3 * BYTES);
    dram.audit_hints();
}

#[test]
fn a_chain_demoted_before_its_last_save_ends_goes_as_a_whole() {
    let mut dram = tier(4);
    let engine = dram.enter_holder();
    save_chain(&mut dram, engine, 100..103);
    save_chain(&mut dram, engine, 0..2);
    let found = dram.await_demotion(engine, (7, &hashes(0..4)), 0, |wanted| *wanted == hash(2));
    assert_eq!(found, counts(3, 0, 1));
    dram.demote_chain(engine, 7, &hashes(0..4));
    assert!(save(&mut dram, engine, 2, BYTES));
    (300..309).for_each(|number| assert!(save(&mut dram, engine, number, BYTES)));
    assert_eq!(kept(&dram, 0..200), [100, 101, 102]);
}

#[test]
fn demoted_blocks_go_next_except_shared_ones() {
    let mut dram = tier(4);
    let engine = dram.enter_holder();
    save_chain(&mut dram, engine, 0..3);
    save_chain(&mut dram, engine, 100..103);
    save_chain(&mut dram, engine, 200..203);
    hint(&mut dram, engine, 200..203, true, 1000);
    assert_eq!(dram.demote_chain(engine, 7, &hashes(200..204)), counts(3, 0, 1));
    assert_eq!(dram.stats().pinned_bytes, 0);
    (300..306).for_each(|number| assert!(save(&mut dram, engine, number, BYTES)));
    assert_eq!(kept(&dram, 0..300), [0, 1, 2, 100, 101, 102]);
    // A next turn and another conversation begin with the same two blocks.
    for tail in [500..501, 600..601] {
        dram.end_chain(engine, 7, &[hashes(0..2), hashes(tail)].concat(), Ending::default());
    }
    dram.demote_chain(engine, 7, &hashes(0..3));
    (306..308).for_each(|number| assert!(save(&mut dram, engine, number, BYTES)));
    assert_eq!(kept(&dram, 0..300), [0, 1, 100, 101], "the one demoted, then the oldest");
}

#[test]
fn hints_of_others_give_way_to_a_share_in_blocks_of_another_size() {
    let mut dram = tier(4);
    let [greedy, other] = [dram.enter_holder(), dram.enter_holder()];
    dram.work(greedy, 0);
    let slots = u64::from(pool::slot_count(SEGMENT, BYTES / 4).expect("fits"));
    (0..4 * slots).for_each(|number| assert!(save(&mut dram, greedy, 1000 + number, BYTES / 4)));
    for segment in 0..4 {
        let first = 1000 + segment * slots;
        assert_eq!(hint(&mut dram, greedy, first..first + 1, true, 1000), counts(1, 0, 0));
    }
    dram.work(other, 5000);
    assert_eq!(dram.stats().pinned_bytes, BYTES, "a pin of each segment is within the limit");
    assert!(save(&mut dram, other, 1, BYTES), "no segment is out of reach");
    assert_eq!(dram.stats().pinned_bytes, 0);
    dram.audit_ledger();
}

#[test]
fn the_last_request_of_a_conversation_ends_its_hints() {
    let mut dram = tier(4);
    let engine = dram.enter_holder();
    save_chain(&mut dram, engine, 0..3);
    hint(&mut dram, engine, 0..3, true, 1000);
    dram.end_chain(engine, 7, &hashes(0..3), Ending { last: true, ..Ending::default() });
    assert_eq!(dram.stats().pinned_bytes, 0);
}

// === any order of events ===

#[derive(Clone, Debug)]
enum Event {
    Save(usize, u64, u64),
    Hint { holder: usize, first: u64, count: u64, is_pinned: bool, ms: u64 },
    Coming(usize, u64, bool),
    Demote(usize, u64, u64),
    End(usize, u64, bool),
    Work(usize),
    Replace(usize),
    Remove(u64),
    Pass(u64),
}

fn event() -> impl Strategy<Value = Event> {
    let (holder, number) = (0..3usize, 0..24u64);
    prop_oneof![
        8 => (holder.clone(), number.clone(), 0..3u64).prop_map(|(holder, number, size)| Event::Save(holder, number, size)),
        6 => (holder.clone(), number.clone(), 1..12u64, any::<bool>(), 1..400u64)
            .prop_map(|(holder, first, count, is_pinned, ms)| Event::Hint { holder, first, count, is_pinned, ms }),
        2 => (holder.clone(), number.clone(), any::<bool>())
            .prop_map(|(holder, number, keeps)| Event::Coming(holder, number, keeps)),
        1 => (holder.clone(), number.clone(), 1..6u64).prop_map(|(holder, first, count)| Event::Demote(holder, first, count)),
        2 => (holder.clone(), number.clone(), any::<bool>()).prop_map(|(holder, first, last)| Event::End(holder, first, last)),
        2 => holder.clone().prop_map(Event::Work),
        1 => holder.prop_map(Event::Replace),
        1 => number.prop_map(Event::Remove),
        2 => (1..600u64).prop_map(Event::Pass),
    ]
}

proptest! {
    /// Hinted bytes never exceed half of a share, a pinned block stays, and every hint ends.
    #[test]
    fn hints_keep_their_limits_and_end(events in prop::collection::vec(event(), 1..120)) {
        let mut dram = tier(4);
        let mut engines = [dram.enter_holder(), dram.enter_holder(), NOBODY];
        let (mut now_ms, mut last_end) = (0, 0);
        let terms = |is_pinned, until_ms| HintTerms { until_ms, is_pinned };
        for event in events {
            match event {
                Event::Save(holder, number, size) => _ = save(&mut dram, engines[holder], number, SIZES[size as usize]),
                Event::Hint { holder, first, count, is_pinned, ms } => {
                    last_end = last_end.max(now_ms + ms);
                    let (keys, terms) = (hashes(first..first + count), terms(is_pinned, now_ms + ms));
                    let found = dram.keep_chain(whose(engines[holder]), (7, &keys), (terms, now_ms), is_pinned, |_| false);
                    prop_assert_eq!(found.done + found.clipped + found.missing, count);
                }
                Event::Coming(holder, number, false) => {
                    dram.await_demotion(engines[holder], (7, &hashes(number..number + 1)), now_ms, |_| true);
                }
                Event::Coming(holder, number, true) => {
                    last_end = last_end.max(now_ms + 50);
                    let (keys, terms) = (hashes(number..number + 1), terms(true, now_ms + 50));
                    dram.keep_chain(whose(engines[holder]), (7, &keys), (terms, now_ms), true, |_| true);
                }
                Event::Demote(holder, first, count) => {
                    dram.demote_chain(engines[holder], 7, &hashes(first..first + count));
                }
                Event::End(holder, first, last) => {
                    dram.end_chain(engines[holder], 7, &hashes(first..first + 4), Ending { last, ..Ending::default() });
                }
                Event::Work(holder) => dram.work(engines[holder.min(1)], now_ms),
                Event::Replace(holder) => {
                    dram.leave_holder(engines[holder.min(1)]);
                    engines[holder.min(1)] = dram.enter_holder();
                }
                Event::Remove(number) => {
                    dram.remove(&key(number));
                    dram.end_removal();
                }
                Event::Pass(ms) => {
                    now_ms += ms;
                    dram.expire(now_ms);
                }
            }
            dram.drain_evicted().for_each(drop);
            dram.drain_disowned().for_each(drop);
            dram.audit_hints();
            dram.audit_ledger();
            let DramStats { retained_bytes, pinned_bytes, bytes_leased, .. } = dram.stats();
            prop_assert!(retained_bytes + pinned_bytes <= 4 * SEGMENT / 2);
            prop_assert!(bytes_leased <= retained_bytes + pinned_bytes, "nothing else is held");
        }
        let alone_ms = last_end.max(now_ms) + 2000;
        dram.expire(last_end);
        let stats = dram.stats();
        prop_assert_eq!((stats.retained_bytes, stats.pinned_bytes, stats.bytes_leased), (0, 0, 0));
        dram.work(engines[0], alone_ms);
        (1000..1012).for_each(|number| assert!(save(&mut dram, engines[0], number, SIZES[0]), "all slots can be had"));
    }
}
