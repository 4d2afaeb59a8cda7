//! Blocks kept for another engine in a quota full of such blocks.

use shm_protocol::pool::Remains;
use tiers::dram::Whose;

use super::*;

/// Two engines of a namespace with a quota of 8 blocks.
fn within_8_blocks() -> Harness {
    pair(core_over(64 << 20, &["c19a797f=32KiB"], None), SHARD_BYTES)
}

impl Harness {
    /// P's step of this number hands over a part of the prompt of its open log `log`.
    fn hand_over_part(&mut self, log: u32, op: u64, part: std::ops::Range<u32>) {
        self.hand_over(op, Keys::new(log, part));
        self.fences(RANKS[0], op, op);
        self.copied();
        self.out.clear();
    }
}

#[test]
fn what_is_kept_in_a_quota_takes_no_room_from_what_its_engine_hands_over_next() {
    let mut engine = within_8_blocks();
    engine.compute(0, 1, 0..8, true);
    engine.compute(1, 2, 100..108, true);
    let stats = engine.core.stats();
    assert_eq!((stats.handover_dropped, stats.handover_full), (0, 8));
    assert_eq!((stats.saved_blocks, stats.handover_kept_bytes), (16, 8 * SHARD_BYTES));
    engine.compute(2, 3, 200..208, false);
    assert_eq!(engine.core.stats().handover_full, 8, "its own saves have to find other room");
    engine.open(2, 100..108);
    assert_eq!(engine.query(2, 4, 0, 8).value, 8);

    let Base { engines, cx, .. } = &mut engine.core.base;
    let whose = engines[SCHEDULER].binding().unwrap().whose;
    let of_another_quota = Whose { quota: None, ..whose };
    let before = cx.kept.count();
    let gives = [(of_another_quota, SHARD_BYTES), (whose, 2 * SHARD_BYTES), (whose, SHARD_BYTES)]
        .map(|(whose, bytes)| cx.kept.make_slot(whose, bytes, before, &mut cx.dram).is_some());
    assert_eq!(gives, [false, false, true], "a block stays if it makes no room");
}

#[test]
fn what_is_kept_stays_while_an_engine_of_an_earlier_life_may_read_what_that_left() {
    let config = Config { pool_bytes: 4 << 20, segment_bytes: 2 << 20, lease_ttl_ms: 1000 };
    let mut core = Core::new(Dram::unopened(config, 5000).unwrap(), &["c19a797f=32KiB".parse().unwrap()], []);
    let block = |n| Remains::Block { generation: 1, namespace: NAMESPACE, group: GROUP, hash: hash(n) };
    let remains = (1000..1004).map(block).collect();
    let used = Opened::Used { segment: 0, block_bytes: SHARD_BYTES, first: 0, remains };
    for opened in [used, Opened::Empty { segment: 1 }] {
        core.handle(Duration::ZERO, Event::Opened(opened), &mut Vec::new());
    }
    let mut engine = Harness::over(core, 1, SHARD_BYTES);
    engine.join();
    engine.compute(0, 1, 0..4, true);
    engine.compute(1, 2, 100..104, true);
    let stats = engine.core.stats();
    assert_eq!((stats.handover_dropped, stats.handover_full), (4, 0));
    assert_eq!(stats.handover_kept_bytes, 4 * SHARD_BYTES);
}

#[test]
fn a_prompt_larger_than_its_quota_keeps_its_beginning() {
    let mut engines = within_8_blocks();
    engines.open(0, 0..12);
    (0..3).for_each(|part| engines.hand_over_part(0, part + 1, 4 * part as u32..4 * part as u32 + 4));
    engines.await_keys(0, 1, 0..12, false);
    assert_eq!(engines.answers()[&1], (Status::Ok, 8), "and D does not wait for the rest");
}

#[test]
fn a_prompt_that_is_computed_anew_keeps_what_of_it_is_there() {
    let mut engines = within_8_blocks();
    engines.compute(0, 1, 0..4, false);
    engines.open(0, 0..12);
    engines.hand_over_part(0, 2, 0..4);
    engines.hand_over_part(0, 3, 4..12);
    assert_eq!(engines.found(0, 1, 0..12), 8);
}

#[test]
fn of_prompts_whose_parts_alternate_the_later_one_has_the_room() {
    let mut engines = within_8_blocks();
    engines.open(0, 0..8);
    engines.hand_over_part(0, 1, 0..4);
    engines.open(1, 100..108);
    engines.hand_over_part(1, 2, 0..4);
    engines.hand_over_part(0, 3, 4..8);
    engines.hand_over_part(1, 4, 4..8);
    assert_eq!(engines.found(0, 1, 100..108), 8);
    engines.await_keys(1, 2, 0..8, false);
    assert_eq!(engines.answers()[&2], (Status::Ok, 0), "the other gave way, and D does not wait");
}

#[test]
fn nobody_waits_for_what_gave_way() {
    let mut engines = within_8_blocks();
    engines.compute(0, 1, 0..8, true);
    engines.compute(1, 2, 100..104, true);
    engines.await_keys(0, 1, 0..12, false);
    assert_eq!(engines.answers()[&1], (Status::Ok, 0));
    assert_eq!(engines.found(1, 2, 100..104), 4);
}
