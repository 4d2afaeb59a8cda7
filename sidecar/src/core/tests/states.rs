//! Queries for the last kept key, over memory.

use tiers::forecast::{GroupReads, SavedKeys};

use super::*;

/// An engine with the states of these keys of its log 0, each saved by itself.
fn keeping(kept: &[u32]) -> Harness {
    keeping_in(64 << 20, SHARD_BYTES, kept)
}

/// The same, in a pool of so many bytes.
fn keeping_in(pool_bytes: u64, state_bytes: u64, kept: &[u32]) -> Harness {
    let facts = Facts::from([("group_kind".into(), "state".into())]);
    let mut engine = Harness::of(core_of(pool_bytes));
    let named = |hello| Hello { engine: "e group 1".into(), ..hello };
    let hello_of_rank = changed(rank_hello_of(1, 0, state_bytes), |rank| rank.facts = facts);
    engine.connect(RANKS[0], named(hello_of_rank));
    engine.connect(SCHEDULER, named(hello(1, Role::Scheduler { run: RUN })));
    engine.join();
    engine.open(0, 0..10);
    for (op, key) in (1..).zip(kept) {
        engine.post_save(0, op, *key..key + 1, false);
        engine.fences(RANKS[0], op, op);
        engine.copied();
        assert_eq!(engine.saved().unwrap().committed, 1, "it needs none of those before it");
    }
    engine
}

impl Harness {
    /// Asks for the last kept one of keys `from..from + count` of log 0; the answer, and the keys of the written slots.
    fn ask_last(&mut self, op: u64, from: u32, count: u32) -> (u32, Vec<u32>) {
        let keys = LogKeys { log: 0, from, count };
        self.ask(SchedulerRequest::Query(Query { last: true, ..Query::new(op, keys) }));
        match self.out.pop() {
            Some(Action::Answer { outcome, refs, from, .. }) => {
                assert_eq!(outcome.status, Status::Ok);
                (outcome.value, (from..from + refs.len() as u32).collect())
            }
            other => panic!("no answer: {other:?}"),
        }
    }
}

#[test]
fn the_last_kept_key_is_found_and_leased_alone() {
    let mut engine = keeping(&[2, 5, 6]);
    for (from, count, value, slots) in [
        (0, 10, 7, vec![6]),
        (0, 6, 6, vec![5]),
        (0, 5, 3, vec![2]),
        (3, 2, 0, vec![]),
        (3, 3, 3, vec![5]),
        (0, 2, 0, vec![]),
    ] {
        assert_eq!(engine.ask_last(20, from, count), (value, slots), "of {count} keys from {from} on");
        assert_eq!(engine.core.stats().leases, u64::from(value > 0), "one block is leased");
    }
}

#[test]
fn a_state_is_loaded_under_the_lease_of_its_key() {
    let mut engine = keeping(&[2, 5]);
    assert_eq!(engine.ask_last(20, 0, 10), (6, vec![5]));
    engine.load(0, 21, 20, 4..6, LOAD_BY_ENGINE);
    engine.loaded(RANKS[0], 21, true);
    assert_eq!(engine.core.stats().leases, 1, "no other key is leased");
    engine.load(0, 22, 20, 5..6, LOAD_BY_ENGINE);
    engine.loaded(RANKS[0], 22, true);
    assert_eq!(engine.core.stats().leases, 0);
}

#[test]
fn a_query_that_is_repeated_renews_the_lease() {
    let mut engine = keeping(&[2, 5]);
    assert_eq!(engine.ask_last(20, 0, 10), (6, vec![5]));
    assert_eq!(engine.ask_last(21, 0, 10), (6, vec![]), "its slot is known");
    engine.load(0, 22, 21, 5..6, LOAD_BY_ENGINE);
    engine.loaded(RANKS[0], 22, true);
    assert_eq!(engine.core.stats().leases, 0);
}

#[test]
fn leading_hits_are_not_asked_for() {
    let mut engine = keeping(&[0, 1, 5]);
    assert_eq!(engine.query(0, 20, 0, 10).value, 2);
    assert_eq!(engine.ask_last(21, 0, 10), (6, vec![5]));
}

/// The parts of a request that groups of these kinds have, with blocks of so many tokens. Each saves keys 0 and 1 together, then key 2 in
/// place of key 1.
fn parts(kinds: &[(&str, u32)]) -> Vec<Option<SetPart>> {
    let mut engine = Harness::of(core_of(64 << 20));
    let sessions: Vec<[SessionId; 2]> =
        (0..kinds.len() as u64).map(|at| [10 + 2 * at, 11 + 2 * at]).collect();
    for (at, (kind, tokens)) in kinds.iter().enumerate() {
        let facts =
            [("group_kind", (*kind).into()), ("block_tokens", tokens.to_string()), ("group", at.to_string())];
        let facts: Facts = facts.map(|(name, value)| (name.into(), value)).into();
        let named = |hello| Hello { engine: format!("e group {at}"), ..hello };
        engine.connect(sessions[at][0], named(changed(rank_hello(1, 0), |rank| rank.facts = facts)));
        engine.connect(sessions[at][1], named(hello(1, Role::Scheduler { run: [1 + at as u8; 16] })));
        engine.report(sessions[at][0], WorkerRequest::Join { run: [1 + at as u8; 16], step: 0 });
    }
    let part = |[rank, scheduler]: &[SessionId; 2]| {
        engine.speaker = *scheduler;
        engine.open(0, 0..10);
        engine.post_save(0, 1, 0..2, false);
        engine.fences(*rank, 1, 1);
        engine.copied();
        assert!(engine.save_replacing_from(*rank, 2, 2, 1));
        engine.ask(SchedulerRequest::Close { log: 0, way: 0 });
        engine.core.drain_ended().next().map(|ended| ended.part)
    };
    sessions.iter().map(part).collect()
}

#[test]
fn a_request_of_a_set_is_foretold_by_all_groups() {
    let saved = vec![SavedKeys { keys: 0..2, replaced: None }, SavedKeys { keys: 2..3, replaced: Some(1) }];
    let other = |reads| Some(SetPart::Other { saved: saved.clone(), reads });
    let found = parts(&[("window 100 x5", 16), ("full", 16), ("state", 16), ("full", 16)]);
    let [window, Some(SetPart::Lead(others)), states, full] = &found[..] else { panic!("{found:?}") };
    let reads: Vec<_> = others.iter().map(|group| group.reads).collect();
    assert_eq!(reads, [GroupReads::Last(7), GroupReads::Last(1), GroupReads::All]);
    assert_eq!([window, states, full], [other(reads[0]), other(reads[1]), other(reads[2])].each_ref());
    for left_out in [&[("full", 16), ("state", 32)][..], &[("full", 16), ("chunk 8", 16)], &[("state", 16)]] {
        assert!(parts(left_out).iter().all(Option::is_none), "{left_out:?}");
    }
}

/// A conversation goes on from its last state: those before it would only take room.
#[test]
fn a_state_before_the_found_one_goes_first() {
    let mut engine = keeping_in(2 << 20, 600_000, &[2, 5, 8]);
    assert_eq!(engine.ask_last(20, 0, 7), (6, vec![5]));
    engine.ask(SchedulerRequest::Close { log: 0, way: 0 });
    engine.open(1, 0..10);
    engine.open(2, 20..30);
    engine.post_save(2, 30, 0..1, false);
    engine.fences(RANKS[0], 30, 30);
    engine.copied();
    assert_eq!(engine.saved().unwrap().committed, 1);
    let kept = (0..10).filter(|key| engine.query(1, 40, *key, 1).value == 1);
    assert_eq!(kept.collect::<Vec<_>>(), [5, 8]);
}

/// Another engine is to compute the prompt's last state. If it does not come, a state before it is as good.
#[test]
fn who_awaits_asks_for_the_last_key_first() {
    let mut engine = keeping(&[2]);
    let keys = LogKeys::new(0, 0..10);
    engine.ask(SchedulerRequest::Query(Query { awaits: true, last: true, ..Query::new(20, keys) }));
    let Some(Action::Answer { outcome, .. }) = engine.out.pop() else { panic!("no answer") };
    assert_eq!((outcome.status, outcome.value), (Status::Ok, 3), "no other engine is there to wait for");
}

impl Harness {
    /// Saves a key of log 0 in place of an earlier one, and returns whether the save was kept.
    fn save_replacing(&mut self, op: u64, key: u32, replaced: u32) -> bool {
        self.save_replacing_from(RANKS[0], op, key, replaced)
    }

    /// The same for this rank's engine.
    fn save_replacing_from(&mut self, rank: SessionId, op: u64, key: u32, replaced: u32) -> bool {
        let keys = LogKeys::new(0, key..key + 1);
        let (position, step, replaced) = (0, op, replaced + 1);
        let save = request::Save { op, keys, position, step, checked: false, handover: false, replaced };
        self.post(SchedulerRequest::Save(save), Vec::new(), vec![1]);
        self.fences(rank, op, op);
        self.copied();
        self.saved().is_some_and(|saved| saved.committed == 1)
    }
}

/// The block before the new one is its parent, and still goes.
#[test]
fn a_state_goes_once_a_later_one_of_its_answer_is_kept() {
    let mut engine = keeping(&[2, 5]);
    assert!(engine.save_replacing(11, 6, 5));
    assert_eq!(engine.ask_last(20, 0, 10), (7, vec![6]));
    engine.ask(SchedulerRequest::Release { log: 0 });
    assert_eq!(engine.ask_last(21, 3, 3), (0, vec![]), "key 5 has no block");
    assert_eq!(engine.ask_last(22, 0, 3), (3, vec![2]));
    assert_eq!(engine.core.stats().replaced_blocks, 1);
}

#[test]
fn a_state_stays_while_it_is_read_or_shared() {
    let mut read = keeping(&[5]);
    assert_eq!(read.ask_last(20, 0, 10), (6, vec![5]));
    assert!(read.save_replacing(11, 6, 5));
    let mut shared = keeping(&[5]);
    for log in 1..4 {
        // A conversation, its next turn, and another one that parts from it.
        shared.open(log, 0..6);
        let chunks = std::array::from_fn(|at| log * APPEND_CHUNKS as u32 + at as u32);
        let append = Append { keys: LogKeys::new(log, 6..9), chunks, promised: false, tail: false };
        if log > 1 {
            shared.append(append, (log * 10..log * 10 + 3).map(hash).collect());
        }
        shared.ask(SchedulerRequest::Close { log, way: 0 });
    }
    assert!(shared.save_replacing(11, 6, 5));
    for engine in [&mut read, &mut shared] {
        assert_eq!((engine.core.stats().replaced_blocks, engine.core.stats().blocks), (0, 2));
    }
}
