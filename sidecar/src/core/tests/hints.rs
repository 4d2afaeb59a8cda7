//! ADVISE: hints of an engine's clients.

use shm_protocol::hints::Advice;

use super::*;

const ALL: u32 = 4;

/// Keys of a part: a whole hint is one part.
const PARTS: [u32; 3] = [1, 3, u32::MAX];

impl Harness {
    /// Posts advice on the first keys of a log, in parts of two keys. Returns its answer.
    pub(in crate::core) fn advise(&mut self, log: u32, op: u64, count: u32, advice: Advice) -> (Status, u32) {
        self.advise_as((log, op), count, advice, false, 2)
    }

    pub(in crate::core) fn advise_as(
        &mut self,
        (log, op): (u32, u64),
        count: u32,
        advice: Advice,
        alone: bool,
        part_keys: u32,
    ) -> (Status, u32) {
        let mut rest = Some(request::Advise { op, keys: LogKeys::new(log, 0..count), advice, alone });
        while let Some(advise) = rest {
            self.out.retain(|action| !matches!(action, Action::Outcome { .. }));
            let part;
            (part, rest) = AdvicePart::cut_hint(advise, part_keys as usize * 8);
            assert_eq!((part.is_last, part.advise.keys.count <= part_keys), (rest.is_none(), true));
            self.event(CoreEvent::Message { session: self.speaker, request: RingRequest::Advice(part) });
            let answers = self.out.iter().filter(|action| matches!(action, Action::Outcome { .. })).count();
            assert_eq!(answers, usize::from(part.is_last), "one answer, of the last part");
        }
        let of_op = |action: &Action| match action {
            Action::Outcome { op: of, outcome, .. } if *of == op => Some((outcome.status, outcome.value)),
            _ => None,
        };
        self.out.iter().find_map(of_op).expect("it is answered at once")
    }

    fn pinned_blocks(&self) -> u64 {
        self.core.stats().pinned_bytes / SHARD_BYTES
    }
}

#[test]
fn a_pin_holds_a_chain_for_its_time_also_against_all_other_saves() {
    let mut engine = Harness::over(core_of(4 << 20), 1, SHARD_BYTES);
    engine.join();
    engine.keep_chain(0, 1, 0..ALL);
    let pin = Advice::Pin { seconds: 10 };
    assert_eq!(engine.advise(0, 2, ALL, pin), (Status::Ok, ALL));
    engine.ask(SchedulerRequest::Close { log: 0, way: 0 });
    engine.keep_chain(1, 3, 100..104);
    engine.ask(SchedulerRequest::Close { log: 1, way: 0 });
    engine.fill_until_evicted(4, 8);
    engine.open(0, 0..ALL);
    engine.open(1, 100..104);
    let kept = [(0, 1900), (1, 1901)].map(|(log, op)| engine.count_kept(log, op, 0..ALL));
    assert_eq!(kept, [ALL, 0], "the younger chain went");
    engine.tick_at(9_999);
    assert_eq!(engine.pinned_blocks(), u64::from(ALL));
    engine.tick_at(10_000);
    assert_eq!(engine.pinned_blocks(), 0);
}

#[test]
fn blocks_of_unfinished_saves_are_pinned_with_their_end_and_others_are_missing() {
    let mut engine = Harness::engine(1);
    engine.open(0, 0..ALL);
    engine.post_save(0, 1, 0..2, false);
    let pin = Advice::Pin { seconds: 10 };
    assert_eq!(engine.advise(0, 2, ALL, pin), (Status::Absent, 2));
    engine.ask(SchedulerRequest::Close { log: 0, way: 7 });
    assert_eq!(engine.pinned_blocks(), 0);
    engine.fences(RANKS[0], 1, 1);
    engine.copied();
    assert_eq!(engine.saved().expect("the save ends").committed, 2);
    assert_eq!(engine.pinned_blocks(), 2);
    let stats = engine.core.stats().hints;
    let (_, counts) = stats.by_action().nth(1).expect("pins");
    assert_eq!((counts.done, counts.clipped, counts.missing), (2, 0, 2));
}

#[test]
fn a_pin_beyond_half_of_the_pool_is_clipped() {
    let mut engine = Harness::over(core_of(2 << 20), 1, 256 << 10);
    engine.join();
    engine.keep_chain(0, 1, 0..ALL + 2);
    assert_eq!(engine.advise(0, 2, ALL + 2, Advice::Pin { seconds: 1 }), (Status::Clipped, ALL));
    engine.core.base.cx.dram.audit_hints();
}

#[test]
fn a_demoted_chain_goes_first_once_its_request_has_ended() {
    let mut engine = Harness::over(core_of(4 << 20), 1, SHARD_BYTES);
    engine.join();
    for (log, op) in [(1, 1), (0, 2)] {
        engine.keep_chain(log, op, log * 100..log * 100 + ALL);
    }
    assert_eq!(engine.advise(0, 3, ALL, Advice::Demote), (Status::Ok, ALL));
    for log in [1, 0] {
        engine.ask(SchedulerRequest::Close { log, way: 7 });
    }
    engine.fill_until_evicted(4, 4);
    engine.open(1, 100..104);
    engine.open(0, 0..ALL);
    let kept = [(1, 1900), (0, 1901)].map(|(log, op)| engine.count_kept(log, op, 0..ALL));
    assert_eq!(kept, [ALL, 0], "the older chain stays");
}

/// Hints for log 3 with these keys, of which 0 to 5 are kept in a pool of eight blocks. Returns the answer.
fn hint_in_parts(keys: &[u32], advice: Advice, part_keys: u32) -> (Status, u32) {
    let mut engine = Harness::over(core_of(2 << 20), 1, 256 << 10);
    engine.join();
    engine.keep_chain(0, 1, 0..6);
    engine.ask(SchedulerRequest::Open { log: 3 });
    let (chunks, count) = (std::array::from_fn(|_| 3 * APPEND_CHUNKS as u32), keys.len() as u32);
    let append = Append { keys: LogKeys::new(3, 0..count), chunks, promised: false, tail: false };
    engine.append(append, keys.iter().copied().map(hash).collect());
    let end = engine.advise_as((3, 2), count, advice, true, part_keys);
    engine.core.base.cx.dram.audit_hints();
    let hints = engine.core.stats().hints;
    let blocks = hints.by_action().map(|(_, counts)| counts.done + counts.clipped + counts.missing);
    assert_eq!(blocks.sum::<u64>(), u64::from(count), "each block counts once");
    end
}

#[test]
fn a_hint_in_parts_ends_as_a_whole_one() {
    let (whole, with_gap) = ([0, 1, 2, 3, 4, 5], [0, 1, 900, 901, 3, 4, 5]);
    for (advice, ended) in [
        // Hints keep half of the pool; blocks behind a gap are of no use to a request.
        (Advice::Pin { seconds: 10 }, [(Status::Clipped, 4), (Status::Absent, 2)]),
        (Advice::Retain { seconds: 10 }, [(Status::Clipped, 4), (Status::Absent, 2)]),
        (Advice::Demote, [(Status::Ok, 6), (Status::Absent, 5)]),
        (Advice::Prefetch, [(Status::Ok, 6), (Status::Absent, 2)]),
    ] {
        for part_keys in PARTS {
            let found = [&whole[..], &with_gap[..]].map(|keys| hint_in_parts(keys, advice, part_keys));
            assert_eq!(found, ended, "{advice:?} in parts of {part_keys}");
        }
    }
}

#[test]
fn children_go_before_parents_after_a_demotion_in_parts() {
    for part_keys in PARTS {
        let mut engine = Harness::over(core_of(4 << 20), 1, SHARD_BYTES);
        engine.join();
        engine.keep_chain(0, 1, 0..ALL);
        engine.ask(SchedulerRequest::Close { log: 0, way: 7 });
        engine.open(5, 0..ALL);
        assert_eq!(engine.advise_as((5, 2), ALL, Advice::Demote, true, part_keys), (Status::Ok, ALL));
        engine.fill_until_evicted(3, 2);
        assert_eq!(engine.count_kept(5, 1900, 0..ALL), ALL - 2, "parts of {part_keys}");
    }
}

#[test]
fn a_request_is_demoted_whole_after_a_hint_in_parts() {
    for part_keys in PARTS {
        let mut engine = Harness::over(core_of(4 << 20), 1, SHARD_BYTES);
        engine.join();
        for (log, op) in [(1, 1), (0, 2)] {
            engine.keep_chain(log, op, log * 100..log * 100 + ALL);
        }
        engine.advise_as((0, 3), 2, Advice::Demote, false, part_keys);
        assert_eq!(engine.advise_as((0, 4), ALL, Advice::Demote, false, part_keys), (Status::Ok, ALL));
        for log in [1, 0] {
            engine.ask(SchedulerRequest::Close { log, way: 7 });
        }
        engine.fill_until_evicted(5, u64::from(ALL));
        engine.open(1, 100..104);
        engine.open(0, 0..ALL);
        let kept = [(1, 1900), (0, 1901)].map(|(log, op)| engine.count_kept(log, op, 0..ALL));
        assert_eq!(kept, [ALL, 0], "parts of {part_keys}");
    }
}

#[test]
fn a_log_of_no_request_counts_as_no_use() {
    let mut engine = Harness::keeping(1, 2);
    engine.open(5, 0..2);
    assert_eq!(engine.advise_as((5, 9), 2, Advice::Retain { seconds: 5 }, true, 1), (Status::Ok, 2));
    engine.core.base.cx.ended.clear();
    engine.ask(SchedulerRequest::Close { log: 5, way: 0 });
    assert!(engine.core.base.cx.ended.is_empty());
    assert_eq!(engine.core.stats().retained_bytes, 2 * SHARD_BYTES);
}

#[test]
fn hints_of_an_engine_without_service_find_nothing_and_end_with_their_engine() {
    let mut engine = Harness::unjoined(1);
    engine.open(0, 0..ALL);
    assert_eq!(engine.advise(0, 1, ALL, Advice::Pin { seconds: 5 }), (Status::Absent, 0));
    engine.join();
    engine.post_save(0, 2, 0..ALL, false);
    engine.fences(RANKS[0], 2, 2);
    engine.copied();
    assert_eq!(engine.advise(0, 3, ALL, Advice::Pin { seconds: 5 }), (Status::Ok, ALL));
    engine.event(CoreEvent::Disconnected { session: SCHEDULER });
    assert_eq!(engine.pinned_blocks(), 0);
    engine.core.audit_ledger();
}
