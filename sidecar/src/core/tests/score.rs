//! Scores of prompts: what is counted, and that nothing but counting happens.

use shm_protocol::prefill::PrefillRate;

use super::*;

/// Tokens of a block.
const TOKENS: u32 = 100;

/// Returns the score of a prompt with these blocks, and `rest` tokens behind them.
pub(in crate::core) fn score_blocks(
    core: &Core,
    namespace: NamespaceDigest,
    (block_bytes, block_tokens): (u64, u32),
    numbers: impl IntoIterator<Item = u32>,
    rest: u64,
) -> PromptPlaces {
    let keys: Vec<BlockHash> = numbers.into_iter().map(hash).collect();
    let tokens = keys.len() as u64 * u64::from(block_tokens) + rest;
    let mut score = PromptScore::new(ScoredKeys { namespace, block_bytes, block_tokens, tokens, keys });
    std::iter::repeat_with(|| core.follow_score(&mut score)).find_map(|places| places).expect("an end")
}

impl Harness {
    fn score(&self, numbers: impl IntoIterator<Item = u32>) -> PromptPlaces {
        score_blocks(&self.core, NAMESPACE, (SHARD_BYTES, TOKENS), numbers, 50)
    }

    fn score_here(&self, numbers: impl IntoIterator<Item = u32>) -> u64 {
        let places = self.score(numbers);
        assert_eq!((places.disk, places.found), (places.memory, places.memory), "{places:?}");
        places.memory
    }

    /// Saves blocks under a log, and closes it.
    fn save_chain(&mut self, log: u32, keys: std::ops::Range<u32>) {
        let count = keys.len() as u32;
        self.open(log, keys);
        self.save(log, u64::from(log) + 100, 1, 1..count + 1);
        self.fences(RANKS[0], 1, 1);
        self.copied();
        self.ask(SchedulerRequest::Close { log, way: 0 });
        self.out.clear();
    }
}

#[test]
fn leading_blocks_in_memory_are_counted_up_to_the_first_gap() {
    let mut engine = Harness::engine(2);
    engine.keep(150);
    assert_eq!(engine.score_here(0..4), 400);
    assert_eq!(engine.score_here(0..200), 15_000, "over several parts");
    assert_eq!(engine.score_here([0, 1, 999, 2]), 200);
    assert_eq!(engine.score_here([999, 0]), 0);
    assert_eq!(engine.score_here([]), 0);
    let other = score_blocks(&engine.core, NamespaceDigest([1; 16]), (SHARD_BYTES, TOKENS), 0..4, 0);
    assert_eq!(other.found, 0, "of another namespace");
}

#[test]
fn without_an_engine_its_blocks_are_counted_and_after_a_reset_they_are_not() {
    let mut engine = Harness::keeping(1, 3);
    engine.disconnect([SCHEDULER, RANKS[0]]);
    let of_size = |bytes| score_blocks(&engine.core, NAMESPACE, (bytes, TOKENS), 0..4, 0);
    assert_eq!((of_size(SHARD_BYTES).memory, of_size(2 * SHARD_BYTES).memory), (300, 0));
    assert_eq!(of_size(SHARD_BYTES).expected_ms, None);

    let mut engine = Harness::keeping(1, 3);
    engine.ask(SchedulerRequest::Salt { salt: [9; 16] });
    assert_eq!(engine.score_here(0..3), 0, "its engine does not find them");
}

#[test]
fn the_expected_time_is_that_of_the_tokens_to_compute() {
    let mut engine = Harness::keeping(1, 3);
    assert_eq!(engine.score(0..5).expected_ms, None, "the rate is unknown");
    engine.core.note_prefill(SCHEDULER, PrefillRate::new(1e6, 0.0));
    let expected = |numbers: std::ops::Range<u32>| engine.score(numbers).expected_ms.unwrap();
    assert!((expected(0..5) - 250.0).abs() < 0.1 && (expected(9..12) - 350.0).abs() < 0.1);
    let whole = score_blocks(&engine.core, NAMESPACE, (SHARD_BYTES, TOKENS), 0..3, 0);
    assert!((whole.expected_ms.unwrap() - 1.0).abs() < 0.1, "the last token is computed");
}

#[test]
fn a_prompt_counts_as_promised_up_to_where_it_parts_from_the_promised_one() {
    let mut engine = Harness::engine(1);
    engine.ask(SchedulerRequest::Open { log: 3 });
    let append = Append { keys: LogKeys::new(3, 0..6), chunks: [0; 6], promised: true, tail: false };
    engine.append(append, (0..6).map(hash).collect());
    for (numbers, tokens) in [(0..4, 400), (0..9, 600), (1..4, 0)] {
        assert_eq!(engine.score(numbers.clone()).promised, tokens, "{numbers:?}");
    }
    assert_eq!(engine.score([0, 1, 2, 70, 71]).promised, 300);
    engine.now_ms += 5_000;
    engine.event(CoreEvent::Tick);
    assert_eq!(engine.score(0..4).promised, 0, "its engine has not worked for 5 s");
    engine.fences(RANKS[0], 1, 1);
    engine.ask(SchedulerRequest::Close { log: 3, way: 0 });
    assert_eq!(engine.score(0..4).promised, 0);
}

/// Saves chains of ten blocks until earlier ones are evicted, with `look` at the first one before each. Returns the kept blocks.
fn kept_after(mut look: impl FnMut(&mut Harness, u32)) -> Vec<u32> {
    let mut engine = Harness::over(core_of(4 << 20), 1, SHARD_BYTES * 16);
    engine.join();
    engine.save_chain(0, 0..10);
    for chain in 1..12 {
        look(&mut engine, chain);
        engine.save_chain(chain, chain * 10..chain * 10 + 10);
    }
    let all: Vec<BlockHash> = (0..120).map(hash).collect();
    let found = engine.core.locate(NAMESPACE, &all);
    (0..120).zip(found).filter(|(_, at)| at.memory).map(|(number, _)| number).collect()
}

#[test]
fn a_score_is_no_use_of_a_block_and_a_query_is_one() {
    let untouched = kept_after(|_, _| {});
    assert!(untouched.len() < 120 && !untouched.contains(&0), "{untouched:?}");
    let scored = kept_after(|engine, _| {
        (0..5)
            .for_each(|_| drop(score_blocks(&engine.core, NAMESPACE, (16 * SHARD_BYTES, TOKENS), 0..10, 0)));
        let stats = engine.core.stats();
        assert_eq!((stats.queries, stats.leases, engine.out.len()), (0, 0, 0));
    });
    assert_eq!(scored, untouched);
    let queried = kept_after(|engine, chain| {
        engine.open(500 + chain, 0..10);
        engine.query(500 + chain, u64::from(chain) + 900, 0, 10);
        engine.ask(SchedulerRequest::Close { log: 500 + chain, way: 0 });
        engine.out.clear();
    });
    assert!(queried.contains(&0), "{queried:?}");
}
