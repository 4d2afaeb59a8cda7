//! Which blocks count to which quota.

use shm_protocol::pool::Remains;

use super::*;

/// An engine of one rank, in namespace c19a..., with these quotas.
fn engine(quotas: &[&str]) -> Harness {
    let mut engine = Harness::unjoined(1);
    let quotas: Vec<_> = quotas.iter().map(|quota| quota.parse().unwrap()).collect();
    engine.core.limit(&quotas);
    engine.join();
    engine
}

fn used(engine: &Harness) -> Vec<u64> {
    engine.core.quotas_used().map(|bytes| bytes / SHARD_BYTES).collect()
}

/// Saves `count` keys from `first` on under a log of their number.
fn save(engine: &mut Harness, log: u32, first: u32, count: u32) -> Saved {
    engine.open(log, first..first + count);
    engine.save(log, log.into(), 1, 1..count + 1);
    engine.fences(RANKS[0], 1, 1);
    engine.copied();
    engine.saved().unwrap()
}

#[test]
fn a_namespace_keeps_what_its_quota_has_room_for() {
    let mut engine = engine(&["02020202=1GiB", "c19a797f=16KiB", "others=1GiB"]);
    let saved = save(&mut engine, 1, 0, 6);
    assert_eq!((saved.committed, saved.dropped), (4, 2), "what is being filled makes no room");
    assert_eq!(used(&engine), [0, 4, 0]);
    assert_eq!(engine.query(1, 2, 0, 6).value, 4, "the head of the prefix is kept");
    engine.ask(SchedulerRequest::Release { log: 1 });
    let saved = save(&mut engine, 3, 100, 3);
    assert_eq!((saved.committed, saved.dropped), (3, 0));
    assert_eq!((used(&engine), engine.core.stats().evicted_blocks), (vec![0, 4, 0], 3));
}

#[test]
fn every_salt_counts_to_its_engine_s_quota() {
    let mut engine = engine(&["c19a797f=16KiB", "others=1GiB"]);
    assert_eq!(save(&mut engine, 1, 0, 4).committed, 4);
    engine.ask(SchedulerRequest::Salt { salt: [1; 16] });
    assert_eq!(save(&mut engine, 2, 0, 3).committed, 3);
    assert_eq!(
        (used(&engine), engine.core.stats().evicted_blocks),
        (vec![4, 0], 3),
        "the old ones made room"
    );
    engine.ask(SchedulerRequest::Salt { salt: [2; 16] });
    assert_eq!(save(&mut engine, 3, 0, 4).committed, 4);
    assert_eq!(used(&engine), [4, 0]);
}

#[test]
fn adopted_blocks_count() {
    let config = Config { pool_bytes: 4 << 20, segment_bytes: 2 << 20, lease_ttl_ms: 1000 };
    let mut core = Core::new(Dram::unopened(config, 50).unwrap());
    core.limit(&["c19a797f=16KiB".parse().unwrap(), "others=1GiB".parse().unwrap()]);
    let block = |namespace, n| Remains::Block { generation: 1, namespace, group: GROUP, hash: hash(n) };
    let remains =
        (0..10).map(|n| block(if n < 6 { NAMESPACE } else { NamespaceDigest([2; 16]) }, n)).collect();
    let used_segment = Opened::Used { segment: 0, block_bytes: SHARD_BYTES, first: 0, remains };
    core.handle(Duration::ZERO, Event::Opened(used_segment), &mut Vec::new());
    assert_eq!(core.quotas_used().collect::<Vec<_>>(), [6 * SHARD_BYTES, 4 * SHARD_BYTES]);
}
