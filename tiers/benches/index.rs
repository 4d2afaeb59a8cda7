//! The index at 10 million keys: bytes a key, look-ups a second, and eviction at 1 and 10 million.
//!
//! Keys are drawn uniformly at random over all, hits and misses mixed evenly, in batches of 512, on one core.
//! No block memory exists: the tier only decides. The bench also measures the least time of as many random
//! reads in this machine's memory. The last line is JSON.

#![expect(clippy::print_stdout, reason = "a bench reports")]
#![expect(clippy::disallowed_methods, reason = "a bench reads the clock")]

use std::hint::black_box;
use std::time::Instant;

use shm_protocol::key::{BlockHash, BlockKey};
use tiers::dram::{Config, Dram, Ending, HolderId, Whose};

use shm_protocol::random::Random;

const BLOCK_BYTES: u64 = 4096;
const SEGMENT_BYTES: u64 = 64 << 20;
const KEYS: u64 = 10_000_000;
const KEYS_FEW: u64 = 1_000_000;
const BATCH: usize = 512;
const BATCHES: usize = 20_000;
const NAMESPACE: u32 = 3;
const OWNER: u64 = 1;

/// A hash of 32 random-looking bytes for a number.
fn hash(number: u64) -> BlockHash {
    let mut random = Random(number.wrapping_mul(0x2545_f491_4f6c_dd1d));
    BlockHash::from_words([random.next(), random.next(), random.next(), random.next()])
}

/// A cache line: the size of a core's load, of a block's entry and of a bucket of the index.
#[repr(C, align(64))]
#[derive(Copy, Clone)]
struct Line([u64; 8]);

fn rss_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("statm");
    let pages: u64 = statm.split_whitespace().nth(1).expect("resident").parse().expect("a number");
    pages * 4096
}

fn fill(dram: &mut Dram, number: u64) {
    let key = BlockKey { namespace: NAMESPACE, group: 0, hash: hash(number) };
    let slot = dram.begin_fill(key, BLOCK_BYTES, Whose::default()).expect("room, evicting");
    assert!(dram.commit(slot));
    dram.drain_evicted().for_each(drop);
    dram.drain_assigned().for_each(drop);
}

/// A tier whose pool is exactly full: at least `keys` blocks, in whole segments.
fn full(keys: u64) -> (Dram, u64) {
    let slots = u64::from(shm_protocol::pool::slot_count(SEGMENT_BYTES, BLOCK_BYTES).expect("fits"));
    let segments = keys.div_ceil(slots);
    let config =
        Config { pool_bytes: segments * SEGMENT_BYTES, segment_bytes: SEGMENT_BYTES, lease_ttl_ms: 30_000 };
    let mut dram = Dram::new(config).expect("sizes");
    let keys = segments * slots;
    (0..keys).for_each(|number| fill(&mut dram, number));
    assert_eq!((dram.stats().blocks, dram.stats().evicted_blocks_total), (keys, 0));
    (dram, keys)
}

/// Returns the nanoseconds of a filling with an eviction, one in a hundred blocks replaced, and the number of
/// evictions for each.
fn evict(dram: &mut Dram, keys: u64, from: u64) -> (f64, f64) {
    let before = dram.stats().evicted_blocks_total;
    let count = keys / 100;
    let start = Instant::now();
    (from..from + count).for_each(|number| fill(dram, number));
    let elapsed = start.elapsed().as_nanos() as f64 / count as f64;
    (elapsed, (dram.stats().evicted_blocks_total - before) as f64 / count as f64)
}

/// Leases a tenth of the keys, 512 at a time, as a busy engine would; how many blocks.
fn lease(dram: &mut Dram, keys: u64) -> usize {
    let mut slots = Vec::new();
    let mut leased = 0;
    for first in (0..keys / 10).step_by(BATCH) {
        let hashes: Vec<BlockHash> =
            (first..first + BATCH as u64).map(|number| hash(keys - 1 - number)).collect();
        slots.clear();
        dram.grant(OWNER, HolderId::NOBODY, 1, NAMESPACE, &hashes, 0, &mut slots).expect("hits");
        leased += slots.len();
    }
    leased
}

/// Returns the look-ups a second of `hashes` in batches of [`BATCH`], and the hits among them. The best of
/// five passes: the machine is shared.
fn lookups(dram: &mut Dram, hashes: &[BlockHash]) -> (f64, f64, usize) {
    let mut found = Vec::with_capacity(BATCH);
    let (mut rates, mut hits) = (Vec::new(), 0);
    for _ in 0..5 {
        hits = 0;
        let start = Instant::now();
        for batch in hashes.chunks(BATCH) {
            found.clear();
            dram.lookup(NAMESPACE, batch, &mut found);
            hits += found.iter().filter(|found| **found).count();
        }
        rates.push(hashes.len() as f64 / start.elapsed().as_secs_f64());
    }
    rates.sort_by(f64::total_cmp);
    (rates[2], rates[4], hits)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Returns the work's result, and its microseconds.
fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed().as_nanos() as f64 / 1000.0)
}

/// Microseconds of a leading-run probe over 1,024 random resident keys, the median of many.
fn probe_1024_us(dram: &mut Dram, hits: &[BlockHash]) -> f64 {
    let probe = |run| {
        let (found, us) = timed(|| dram.probe(NAMESPACE, run));
        assert_eq!(found, 1024);
        us
    };
    median(hits.chunks_exact(1024).map(probe).collect())
}

/// Microseconds of a grant over `count` random resident keys, the median of many; the release is outside.
fn grant_us(dram: &mut Dram, hits: &[BlockHash], count: usize) -> f64 {
    let mut slots = Vec::with_capacity(count);
    let grant = |run| {
        slots.clear();
        let (lease, us) =
            timed(|| dram.grant(OWNER, HolderId::NOBODY, 1, NAMESPACE, run, 0, &mut slots).expect("hits"));
        assert_eq!(slots.len(), count);
        dram.release(lease, OWNER).expect("granted");
        us
    };
    median(hits.chunks_exact(count).map(grant).collect())
}

/// Microseconds of the first use of a chain of `count` blocks, kept in this order, of its second use, and of
/// the end of a request with it: medians.
fn touch_us(dram: &mut Dram, keys: u64, count: u64) -> [f64; 3] {
    let mut times = [const { Vec::new() }; 3];
    for first in (0..keys - count).step_by((keys / 200) as usize) {
        let chain: Vec<BlockHash> = (first..first + count).map(hash).collect();
        // For the first time, index and entries are in no cache.
        for times in &mut times[..2] {
            times.push(timed(|| dram.use_run(NAMESPACE, &chain)).1);
        }
        times[2].push(timed(|| dram.end_chain(HolderId::NOBODY, NAMESPACE, &chain, Ending::default())).1);
    }
    times.map(median)
}

/// The same for blocks at random places, each run of them used once.
fn touch_random_us(dram: &mut Dram, hits: &[BlockHash]) -> f64 {
    median(hits.chunks_exact(BATCH).map(|run| timed(|| dram.use_run(NAMESPACE, run)).1).collect())
}

/// Microseconds of 512 reads of random lines in a table as large as the entries of `keys` blocks. Then the
/// same of as many pairs of reads: the first, of a table as large as the index, gives the place of the
/// second. Medians. No code for random blocks takes less.
fn floor_us(random: &mut Random, keys: u64) -> [f64; 2] {
    let mut table =
        |lines: u64| -> Vec<Line> { (0..lines).map(|_| Line([random.next() % keys; 8])).collect() };
    // At most three of four words of an index of 8 bytes a word are used.
    let (entries, index) = (table(keys), table(keys / 6));
    let [mut one, mut two] = [const { Vec::new() }; 2];
    for _ in 0..400 {
        let mut draw = |lines: &[Line]| [(); BATCH].map(|()| random.next() as usize % lines.len());
        let (starts, ends) = (draw(&index), draw(&entries));
        let sum = |ends: &[usize; BATCH]| ends.iter().fold(0, |sum, at| sum ^ entries[*at].0[0]);
        one.push(timed(|| black_box(sum(&ends))).1);
        two.push(timed(|| black_box(sum(&starts.map(|at| index[at].0[0] as usize)))).1);
    }
    [one, two].map(median)
}

fn main() {
    let mut random = Random(42);
    let (mut few, few_keys) = full(KEYS_FEW);
    evict(&mut few, few_keys, 1 << 40);
    let (evict_ns_1m, evicted_1m) = evict(&mut few, few_keys, 1 << 41);
    drop(few);

    // The hashes of the look-ups are made before the index, so neither RSS reading has them twice.
    let slots = u64::from(shm_protocol::pool::slot_count(SEGMENT_BYTES, BLOCK_BYTES).expect("fits"));
    let keys_wanted = KEYS.div_ceil(slots) * slots;
    let draw = |random: &mut Random, range: u64, base: u64| hash(base + random.next() % range);
    let mixed: Vec<BlockHash> = (0..BATCHES * BATCH)
        .map(|_| {
            let base = if random.next() & 1 == 0 { 0 } else { 1 << 50 };
            draw(&mut random, keys_wanted, base)
        })
        .collect();
    let mut draw_hits =
        || -> Vec<BlockHash> { (0..1024 * 200).map(|_| draw(&mut random, keys_wanted, 0)).collect() };
    let (hits, others) = (draw_hits(), draw_hits());

    let before = rss_bytes();
    let fill_start = Instant::now();
    let (mut dram, keys) = full(KEYS);
    let fill_ns = fill_start.elapsed().as_nanos() as f64 / keys as f64;
    let filled = (rss_bytes() - before) as f64 / keys as f64;
    let (rate_median, rate_best, found) = lookups(&mut dram, &mixed);
    let probe_us = probe_1024_us(&mut dram, &hits);
    let (grant_512_us, grant_8192_us) = (grant_us(&mut dram, &hits, 512), grant_us(&mut dram, &hits, 8192));
    let [touch_512_cold_us, touch_512_us, end_512_us] = touch_us(&mut dram, keys, 512);
    let touch_512_random_us = touch_random_us(&mut dram, &others);
    let leased = lease(&mut dram, keys);
    evict(&mut dram, keys, 1 << 40);
    let (evict_ns_10m, evicted_10m) = evict(&mut dram, keys, 1 << 41);
    // Neighbours in their list since then, and none of them is in a cache any more.
    let touch_512_scattered_us = touch_random_us(&mut dram, &others);
    let all = (rss_bytes() - before) as f64 / keys as f64;
    drop(dram);
    let [floor_512_one_us, floor_512_two_us] = floor_us(&mut random, keys);

    println!(
        "{keys} keys filled at {fill_ns:.0} ns each; {filled:.1} bytes a key before leases and evictions"
    );
    println!("{} look-ups, {found} hits, median {rate_median:.0}/s, best {rate_best:.0}/s", mixed.len());
    println!("{leased} blocks leased while evicting");
    println!(
        "{{\"keys\":{keys},\"bytes_per_key\":{all:.1},\"lookups_per_s\":{rate_median:.0},\"probe_1024_us\":{probe_us:.1},\
         \"grant_512_us\":{grant_512_us:.1},\"grant_8192_us\":{grant_8192_us:.1},\"touch_512_us\":{touch_512_us:.1},\
         \"touch_512_cold_us\":{touch_512_cold_us:.1},\"touch_512_random_us\":{touch_512_random_us:.1},\
         \"touch_512_scattered_us\":{touch_512_scattered_us:.1},\"end_512_us\":{end_512_us:.1},\
         \"floor_512_one_us\":{floor_512_one_us:.1},\"floor_512_two_us\":{floor_512_two_us:.1},\
         \"evict_ns_1m\":{evict_ns_1m:.0},\"evict_ns_10m\":{evict_ns_10m:.0},\
         \"evicted_per_fill_1m\":{evicted_1m:.3},\"evicted_per_fill_10m\":{evicted_10m:.3}}}"
    );
}
