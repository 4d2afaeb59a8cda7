//! Hit ratios of the tier's eviction policy, without and with the admission filter, beside LRU's, on synthetic traces,
//! each with several seeds. The tier is the real one, filled as the sidecar fills it; LRU lives here alone. No block
//! memory exists. The last line is JSON: for each trace and policy least, median and most of the seeds.
//!
//! - `zipf`: single blocks out of 100,000, asked for with probability 1/rank^0.9; room for 1 % or 10 % of them.
//! - `turns`: conversations. Each begins with one of 32 system prompts (32 to 128 blocks, the n-th 1/n as often as the first)
//!   and asks 1 to 12 times, every time for all before it and 4 to 40 blocks more. 600 are open at a time, each as likely to be
//!   next. Room for a tenth or a half of what they hold.
//! - `scan`: `turns`, and every eighth request is a document of 512 blocks that nobody asks for again.
//!
//! A ratio is blocks found in leading runs by blocks asked for, the first quarter of the requests not counted.

#![expect(clippy::print_stdout, reason = "a bench reports")]

mod random;

use std::collections::{BTreeMap, HashMap};

use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::pool::{SlotRef, slot_count};
use tiers::dram::{Config, Dram};

use crate::random::Random;

const BLOCK_BYTES: u64 = 4096;
const SEGMENT_BYTES: u64 = 2 << 20;
const SEEDS: u64 = 5;
const ZIPF_BLOCKS: usize = 100_000;
const ZIPF_REQUESTS: usize = 1_000_000;
const ZIPF_EXPONENT: f64 = 0.9;
const PROMPTS: u64 = 32;
const OPEN: usize = 600;
const TURNS: usize = 40_000;
const SCAN_BLOCKS: u64 = 512;

/// Ranks, the first most often.
struct Zipf(Vec<f64>);

/// A chain of blocks, as one request asks for it.
type Chain = Vec<BlockHash>;

/// Least recently used goes first; of one request the deepest block counts as used before the others.
#[derive(Default)]
struct Lru {
    capacity: usize,
    clock: u64,
    used: HashMap<BlockHash, u64>,
    order: BTreeMap<u64, BlockHash>,
}

/// The real tier.
struct Tier {
    dram: Dram,
    slots: Vec<SlotRef>,
}

trait Cache {
    /// Asks for a chain and keeps what was missing; how many of its leading blocks were there.
    fn request(&mut self, chain: &[BlockHash]) -> usize;
}

/// An open conversation.
struct Conversation {
    chain: Chain,
    turns_left: u64,
}

impl Random {
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn within(&mut self, range: std::ops::RangeInclusive<u64>) -> u64 {
        range.start() + self.next() % (range.end() - range.start() + 1)
    }

    fn blocks(&mut self, count: u64) -> Chain {
        (0..count).map(|_| BlockHash::from_words(std::array::from_fn(|_| self.next()))).collect()
    }
}

impl Zipf {
    fn new(count: usize, exponent: f64) -> Self {
        let mut sum = 0.0;
        let weight = |rank: usize| (rank as f64 + 1.0).powf(-exponent);
        let sums: Vec<f64> = (0..count)
            .map(|rank| {
                sum += weight(rank);
                sum
            })
            .collect();
        Self(sums.into_iter().map(|part| part / sum).collect())
    }

    fn draw(&self, random: &mut Random) -> usize {
        let unit = random.unit();
        self.0.partition_point(|sum| *sum <= unit).min(self.0.len() - 1)
    }
}

impl Lru {
    fn new(capacity: usize) -> Self {
        Self { capacity, ..Self::default() }
    }
}

impl Cache for Lru {
    fn request(&mut self, chain: &[BlockHash]) -> usize {
        let hits = chain.iter().take_while(|hash| self.used.contains_key(hash)).count();
        for hash in chain.iter().rev() {
            self.clock += 1;
            if let Some(before) = self.used.insert(*hash, self.clock) {
                self.order.remove(&before);
            } else if self.used.len() > self.capacity {
                let (_, oldest) = self.order.pop_first().expect("more than none");
                self.used.remove(&oldest);
            }
            self.order.insert(self.clock, *hash);
        }
        hits
    }
}

impl Tier {
    fn new(segments: u64, filtered: bool) -> Self {
        let pool_bytes = segments * SEGMENT_BYTES;
        let config = Config { pool_bytes, segment_bytes: SEGMENT_BYTES, lease_ttl_ms: 30_000 };
        let mut dram = Dram::new(config).expect("sizes");
        if filtered {
            dram.filter_admission();
        }
        Self { dram, slots: Vec::new() }
    }
}

impl Cache for Tier {
    fn request(&mut self, chain: &[BlockHash]) -> usize {
        let hits = self.dram.probe(0, 0, chain);
        for hash in &chain[hits..] {
            let key = BlockKey { namespace: 0, group: 0, hash: *hash };
            self.slots.extend(self.dram.begin_fill(key, BLOCK_BYTES, None));
        }
        self.dram.drain_evicted().for_each(drop);
        self.dram.drain_assigned().for_each(drop);
        // Deepest first, as the sidecar does.
        while let Some(slot) = self.slots.pop() {
            assert!(self.dram.commit(slot));
        }
        hits
    }
}

fn zipf(seed: u64) -> Vec<Chain> {
    let mut random = Random(seed);
    let blocks = random.blocks(ZIPF_BLOCKS as u64);
    let ranks = Zipf::new(ZIPF_BLOCKS, ZIPF_EXPONENT);
    (0..ZIPF_REQUESTS).map(|_| vec![blocks[ranks.draw(&mut random)]]).collect()
}

/// Turns of conversations, every `scan`-th request a document instead; and the blocks that open conversations hold.
fn turns(seed: u64, scan: Option<usize>) -> (Vec<Chain>, usize) {
    let mut random = Random(seed ^ 0x7475_726e);
    let prompts: Vec<Chain> = (0..PROMPTS)
        .map(|_| {
            let blocks = random.within(32..=128);
            random.blocks(blocks)
        })
        .collect();
    let popularity = Zipf::new(PROMPTS as usize, 1.0);
    let begin = |random: &mut Random| Conversation {
        chain: prompts[popularity.draw(random)].clone(),
        turns_left: random.within(1..=12),
    };
    let mut open: Vec<Conversation> = (0..OPEN).map(|_| begin(&mut random)).collect();
    let mut requests = Vec::with_capacity(TURNS);
    for number in 0..TURNS {
        if scan.is_some_and(|every| number % every == 0) {
            requests.push(random.blocks(SCAN_BLOCKS));
            continue;
        }
        let at = (random.next() % OPEN as u64) as usize;
        let more = random.within(4..=40);
        let conversation = &mut open[at];
        conversation.chain.extend(random.blocks(more));
        conversation.turns_left -= 1;
        requests.push(conversation.chain.clone());
        if conversation.turns_left == 0 {
            *conversation = begin(&mut random);
        }
    }
    let shared: usize = prompts.iter().map(Vec::len).sum();
    (requests, shared + OPEN * 6 * 22)
}

fn ratio(cache: &mut dyn Cache, requests: &[Chain]) -> f64 {
    let (mut asked, mut found) = (0, 0);
    for (at, chain) in requests.iter().enumerate() {
        let hits = cache.request(chain);
        if at >= requests.len() / 4 {
            asked += chain.len();
            found += hits;
        }
    }
    found as f64 / asked as f64
}

/// Ratios of every policy on one trace, with room for about `blocks`.
fn compare(requests: &[Chain], blocks: usize) -> [(&'static str, f64); 3] {
    let slots = u64::from(slot_count(SEGMENT_BYTES, BLOCK_BYTES).expect("fits"));
    let segments = (blocks as u64).div_ceil(slots);
    let capacity = (segments * slots) as usize;
    [
        ("pillion", ratio(&mut Tier::new(segments, false), requests)),
        ("tinylfu", ratio(&mut Tier::new(segments, true), requests)),
        ("lru", ratio(&mut Lru::new(capacity), requests)),
    ]
}

fn main() {
    let mut ratios: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut note = |trace: &str, compared: [(&str, f64); 3]| {
        for (policy, ratio) in compared {
            ratios.entry(format!("{trace}_{policy}")).or_default().push(ratio);
        }
    };
    for seed in 1..=SEEDS {
        let requests = zipf(seed);
        note("zipf_1", compare(&requests, ZIPF_BLOCKS / 100));
        note("zipf_10", compare(&requests, ZIPF_BLOCKS / 10));
        let (requests, held) = turns(seed, None);
        note("turns_10", compare(&requests, held / 10));
        note("turns_50", compare(&requests, held / 2));
        let (requests, held) = turns(seed, Some(8));
        note("scan_50", compare(&requests, held / 2));
    }
    let mut cells = Vec::new();
    for (name, mut seeds) in ratios {
        seeds.sort_by(f64::total_cmp);
        let [least, median, most] = [seeds[0], seeds[seeds.len() / 2], seeds[seeds.len() - 1]];
        println!("{name:24} {median:.4} ({least:.4} to {most:.4})");
        cells.push(format!("\"{name}\":[{least:.4},{median:.4},{most:.4}]"));
    }
    println!("{{{}}}", cells.join(","));
}
