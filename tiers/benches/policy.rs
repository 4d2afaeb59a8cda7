//! Hit ratios of the tier's eviction policy beside those of LRU. The tier is the real one, filled as the
//! sidecar fills it; LRU lives here alone. No block memory exists. The last line is JSON.
//!
//! Arguments: `NAME FILE` replays a trace, a line for each request (`benches/policy.py` makes it), in rooms
//! of several sizes, also behind a GPU's cache (`NAME_gpu_`), where copies of that cache's blocks go first
//! (`NAME_once_`), and with prompts computed in steps (`NAME_chunked_`), beside a clairvoyant.
//! `NAME_restart_ROOM_kept` and `_once` are the shares of the tenth of the requests after a restart of the engine
//! in the middle. `generated` adds traces with several seeds, and prints least,
//! median and most:
//!
//! - `zipf`: single blocks out of 100,000, requested with probability 1/rank^0.9; room for 1 % or 10 % of
//!   them.
//! - `turns`: conversations. Each begins with one of 32 system prompts (32 to 128 blocks, the n-th 1/n as
//!   often as the first) and makes 1 to 12 requests, each for all earlier blocks and 4 to 40 blocks more. 600
//!   are open at a time, each as likely to be next. Room for a tenth or a half of their blocks.
//! - `scan`: `turns`, and every eighth request is a document of 512 blocks, never requested again.
//!
//! `disk_NAME FILE` replays a trace, and `disk_turns` replays `turns`, in DRAM with a disk of three times its room,
//! beside LRU and a clairvoyant of the room of both. `written` is the bytes written to the disk by the bytes of all
//! requested blocks.
//!
//! `fetch_back_NAME FILE` replays a trace in time, in DRAM with a disk of three times its room, with reads on
//! demand, and ahead by an oracle: see `fetch_back/mod.rs`.
//!
//! `shared FILE` replays a trace in rooms shared by two namespaces, one with a quota, and in two pods with
//! reads from each other.
//!
//! `forecast FILE` replays a trace, and `turns`, and prints the difference between the forecast for a half,
//! for two and for four times the room and the real share.
//!
//! A ratio is blocks found in leading runs by blocks requested, the first quarter of the requests not
//! counted.

#![expect(clippy::print_stdout, reason = "a bench reports")]

mod caches;
mod disk;
mod fetch_back;
mod forecast;
mod replayed;
mod shared;

use std::collections::BTreeMap;

use shm_protocol::key::BlockHash;

use crate::caches::{Chain, Lru, Request, Tier};
use crate::replayed::{Report, read, share};
use shm_protocol::random::Random;

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

struct Conversation {
    chain: Chain,
    turns_left: u64,
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

fn blocks(random: &mut Random, count: u64) -> Chain {
    (0..count).map(|_| BlockHash::from_words(std::array::from_fn(|_| random.next()))).collect()
}

fn zipf(seed: u64) -> Vec<Request> {
    let mut random = Random(seed);
    let blocks = blocks(&mut random, ZIPF_BLOCKS as u64);
    let ranks = Zipf::new(ZIPF_BLOCKS, ZIPF_EXPONENT);
    (0..ZIPF_REQUESTS).map(|_| vec![blocks[ranks.draw(&mut random)]].into()).collect()
}

/// Turns of conversations, every `scan`-th request a document instead; and the number of blocks of open
/// conversations.
fn turns(seed: u64, scan: Option<usize>) -> (Vec<Request>, usize) {
    let mut random = Random(seed ^ 0x7475_726e);
    let prompts: Vec<Chain> = (0..PROMPTS)
        .map(|_| {
            let count = random.within(32..=128);
            blocks(&mut random, count)
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
            requests.push(blocks(&mut random, SCAN_BLOCKS).into());
            continue;
        }
        let at = (random.next() % OPEN as u64) as usize;
        let more = random.within(4..=40);
        let conversation = &mut open[at];
        conversation.chain.extend(blocks(&mut random, more));
        conversation.turns_left -= 1;
        requests.push(conversation.chain.clone().into());
        if conversation.turns_left == 0 {
            *conversation = begin(&mut random);
        }
    }
    let shared: usize = prompts.iter().map(Vec::len).sum();
    (requests, shared + OPEN * 6 * 22)
}

/// Ratios of every policy on one trace, with room for about `blocks`.
fn compare(requests: &[Request], blocks: usize) -> [(&'static str, f64); 2] {
    let blocks = blocks.next_multiple_of(5);
    [
        ("pillion", share(&mut Tier::new(blocks), requests, 0)),
        ("lru", share(&mut Lru::new(blocks), requests, 0)),
    ]
}

/// Cells of JSON for the generated traces.
fn generated() -> Vec<String> {
    let mut ratios: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut note = |trace: &str, compared: [(&str, f64); 2]| {
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
    cells
}

fn main() {
    // Cargo adds this option.
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let mut cells = Vec::new();
    while let Some(argument) = arguments.next() {
        if argument == "generated" {
            cells.extend(generated());
            continue;
        }
        if argument == "disk_turns" {
            let (requests, held) = turns(1, None);
            cells.extend(disk::of_trace(&argument, &[held / 20, held / 10], &requests));
            continue;
        }
        let file = arguments.next().expect("a trace's file follows its name");
        if argument.starts_with("disk_") {
            cells.extend(disk::of_trace(&argument, &disk::ROOMS, &read(&file)));
            continue;
        }
        if let Some(name) = argument.strip_prefix("fetch_back_") {
            cells.extend(fetch_back::of_trace(name, &fetch_back::read(&file)));
            continue;
        }
        if argument == "forecast" {
            cells.extend(forecast::of_trace("forecast", &[2555, 5110, 10_220, 20_440], &read(&file)));
            let (requests, held) = turns(1, None);
            let some = &requests[..forecast::TURNS];
            cells.extend(forecast::of_trace("forecast_turns", &[held / 10, held / 4], some));
            continue;
        }
        if argument == "shared" {
            cells.extend(shared::of_trace(&read(&file)));
            continue;
        }
        let mut report = Report::default();
        report.replay(&argument, &read(&file));
        cells.extend(report.cells());
    }
    println!("{{{}}}", cells.join(","));
}
