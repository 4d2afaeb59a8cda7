//! The cost of deriving keys, in nanoseconds a block of 16 tokens on one core; prints one JSON line last.
//!
//! Each sample is a new request of 32,768 tokens drawn uniformly from a vocabulary of 151,936, appended at
//! once (`*_one_by_one_ns`: a token at a time, as a decoding engine does). Each number is the median over the
//! samples.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
#![expect(clippy::print_stdout, reason = "a benchmark's result is its output")]

use std::hint::black_box;
use std::time::Instant;

use shm_protocol::key::{Algorithm, Chain, NoneHashRule, none_hash};
use shm_protocol::random::Random;

const BLOCK_TOKENS: u32 = 16;
const TOKENS: usize = 32_768;
const VOCABULARY: u64 = 151_936;
const SAMPLES: usize = 201;

fn main() {
    let numbers = [Algorithm::XxhashCbor, Algorithm::Sha256Cbor, Algorithm::Sha256, Algorithm::Xxhash].map(
        |algorithm| {
            let at_once = measure(algorithm, |chain, tokens| chain.append(tokens));
            let one_by_one =
                measure(algorithm, |chain, tokens| tokens.chunks(1).for_each(|token| chain.append(token)));
            format!("\"{algorithm}_ns\": {at_once:.1}, \"{algorithm}_one_by_one_ns\": {one_by_one:.1}")
        },
    );
    println!("{{{}, \"block_tokens\": {BLOCK_TOKENS}, \"samples\": {SAMPLES}}}", numbers.join(", "));
}

/// Returns the median nanoseconds a block.
fn measure(algorithm: Algorithm, append: impl Fn(&mut Chain, &[u32])) -> f64 {
    let first = none_hash(algorithm, NoneHashRule::Since029, Some("0")).expect("a seed is given");
    let mut random = Random(1);
    let mut nanoseconds: Vec<u128> = (0..SAMPLES)
        .map(|_| {
            let tokens: Vec<u32> = (0..TOKENS).map(|_| random.below(VOCABULARY) as u32).collect();
            let mut chain = Chain::new(algorithm, algorithm.bytes(&first), BLOCK_TOKENS).expect("a chain");
            let began = Instant::now();
            append(&mut chain, black_box(&tokens));
            let spent = began.elapsed().as_nanos();
            assert_eq!(black_box(chain.hashes()).len(), TOKENS / BLOCK_TOKENS as usize);
            spent
        })
        .collect();
    nanoseconds.sort_unstable();
    nanoseconds[SAMPLES / 2] as f64 / (TOKENS as f64 / f64::from(BLOCK_TOKENS))
}
