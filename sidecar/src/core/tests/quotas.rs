//! The quotas of blocks.

use shm_protocol::pool::Remains;

use super::*;

/// An engine of one rank, in namespace c19a..., with these quotas.
fn engine(quotas: &[&str]) -> Harness {
    let mut engine = Harness::over(core_over(64 << 20, quotas, None), 1, SHARD_BYTES);
    engine.join();
    engine
}

fn used(engine: &Harness) -> Vec<u64> {
    engine.core.quotas_used().map(|bytes| bytes / SHARD_BYTES).collect()
}

/// Saves `count` keys from `first` on under a log of their number.
fn save(engine: &mut Harness, log: u32, first: u32, count: u32) -> Saved {
    engine.open(log, first..first + count);
    let step = log.into();
    engine.save(log, step, step, 1..count + 1);
    engine.fences(RANKS[0], step, step);
    engine.copied();
    engine.saved().unwrap()
}

#[test]
fn a_namespace_keeps_what_its_quota_has_room_for() {
    let mut engine = engine(&["02020202=1GiB", "c19a797f=16KiB", "others=1GiB"]);
    let saved = save(&mut engine, 1, 0, 6);
    assert_eq!((saved.committed, saved.dropped), (4, 2), "a slot being filled makes no room");
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
    let quotas = ["c19a797f=16KiB", "others=1GiB"].map(|quota| quota.parse().unwrap());
    let mut core = Core::new(Dram::unopened(config, 50).unwrap(), &quotas, []);
    let block = |namespace, n| Remains::Block { generation: 1, namespace, group: GROUP, hash: hash(n) };
    let remains =
        (0..10).map(|n| block(if n < 6 { NAMESPACE } else { NamespaceDigest([2; 16]) }, n)).collect();
    let used_segment = Opened::Used { segment: 0, block_bytes: SHARD_BYTES, first: 0, remains };
    core.handle(Duration::ZERO, Event::Opened(used_segment), &mut Vec::new());
    assert_eq!(core.quotas_used().collect::<Vec<_>>(), [6 * SHARD_BYTES, 4 * SHARD_BYTES]);
}

#[test]
fn blocks_of_windows_stay_without_those_before_them() {
    let apart = [false, true, true];
    let in_chains = [true, true, false];
    for (name, kind, left) in [
        ("e group 1", "window 64 x2", apart),
        ("e group 1", "full", in_chains),
        ("e group 1", "window 64, full", in_chains),
        ("e", "window 64 x2", in_chains),
    ] {
        let facts = Facts::from([("group_kind".into(), kind.into())]);
        let namespace = shm_protocol::namespace::digest(&facts);
        let mut engine = Harness::of(core_over(64 << 20, &["others=16KiB"], None));
        let named = |hello| Hello { engine: name.into(), ..hello };
        engine.connect(RANKS[0], named(changed(rank_hello(1, 0), |rank| rank.facts = facts)));
        engine.connect(SCHEDULER, named(hello(1, Role::Scheduler { run: RUN })));
        engine.join();
        save(&mut engine, 1, 50, 1);
        engine.open(2, 0..4);
        engine.post_save(2, 2, 2..4, false);
        engine.fences(RANKS[0], 2, 2);
        engine.copied();
        assert_eq!(save(&mut engine, 3, 60, 2).committed, 2);
        let kept = engine.core.locate(namespace, &[hash(50), hash(2), hash(3)]);
        assert_eq!([0, 1, 2].map(|at| kept[at].memory), left, "{name}: {kind}");
    }
}

#[test]
fn cache_groups_of_an_engine_have_one_share() {
    let mut engine = Harness::of(core_of(64 << 20));
    let names = ["e group 0", "e group 1", "f group 0", "e", "e"];
    for (session, name) in (20..).zip(names) {
        let role = Role::Scheduler { run: [session as u8; 16] };
        engine.connect(session, Hello::new(name.into(), 1, role));
    }
    let holder = |engine: &Harness, at: u64| engine.core.base.engines[20 + at].holder;
    let found = [0, 1, 2, 3, 4].map(|at| holder(&engine, at));
    assert_eq!(found[0], found[1]);
    let apart: std::collections::BTreeSet<_> = found.into_iter().collect();
    assert_eq!(apart.len(), 4, "engines that merely have one name are several");
    // The share is there for as long as one of its groups is.
    engine.disconnect([20]);
    engine.connect(30, Hello::new("e group 2".into(), 1, Role::Scheduler { run: [30; 16] }));
    assert_eq!(engine.core.base.engines[30].holder, found[0]);
    engine.disconnect([21, 30]);
    engine.connect(31, Hello::new("g".into(), 1, Role::Scheduler { run: [31; 16] }));
    assert_eq!(engine.core.base.engines[31].holder, found[0], "its number is used again");
}
