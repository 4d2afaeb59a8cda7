//! A mesh of 1,000 nodes with 1,000,000 blocks each, as one of its nodes sees it. The last line is JSON.
//!
//! - Messages, in virtual time and through real feeds: 1,000 nodes of 10,000 blocks, with one in a hundred
//!   replaced in a second; two nodes are observers. Messages, bytes and staleness follow from the changes,
//!   regardless of a node's other blocks.
//! - Memory and time at full size: the 999 filters, probes, changes; and a feed of 1,000,000 digests.
//! - The same with 256 MiB for it.

#![expect(clippy::print_stdout, reason = "a bench reports")]
#![expect(clippy::disallowed_methods, reason = "a bench reads the clock")]

#[expect(dead_code, reason = "the test also compares what was told")]
#[path = "../tests/world/mod.rs"]
mod world;

use std::time::Instant;

use mesh::digest::{Change, Digest, Thinning};
use mesh::directory::{Config, Directory};
use mesh::feed::{Feed, Follower, Heard, Message, keys_max};
use mesh::transport::PeerNumber;

use crate::world::{Setup, World, digest};

const NODES: u32 = 1000;
const BLOCKS: u64 = 1_000_000;
const QUERY: u64 = 640;
const LIMIT_BYTES: usize = 256 << 20;
const SECONDS: u64 = 5;

fn percentile(times: &mut [f64], share: f64) -> f64 {
    times.sort_by(f64::total_cmp);
    times[((times.len() - 1) as f64 * share) as usize]
}

fn rss_bytes() -> f64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("statm");
    let pages: f64 = statm.split_whitespace().nth(1).expect("resident").parse().expect("a number");
    pages * 4096.0
}

/// Paces to compare: those of meshes of 200 and of 1,000 nodes.
const BATCHES_MS: [u64; 2] = [50, 250];

/// Messages to an observer, per second: JSON.
fn told(batch_ms: u64) -> String {
    let setup = Setup {
        nodes: NODES,
        blocks: BLOCKS / 100,
        observers: 2,
        replaced_per_mille: 10,
        batch_ms,
        latency_ms_max: 2,
        thinning: Thinning::NONE,
        seed: 1,
    };
    let mut world = World::new(setup);
    world.run(SECONDS * 1000);
    let seen = &world.seen;
    let each = |count: u64| count as f64 / (setup.observers as u64 * SECONDS) as f64;
    let mut staleness: Vec<f64> = seen.staleness_ms.iter().map(|ms| *ms as f64).collect();
    let (p50, p99) = (percentile(&mut staleness, 0.5), percentile(&mut staleness, 0.99));
    format!(
        "\"batch{batch_ms}_messages_per_s\":{:.0},\"batch{batch_ms}_changes_per_s\":{:.0},\
         \"batch{batch_ms}_mb_per_s\":{:.2},\"batch{batch_ms}_staleness_ms_p50\":{p50},\
         \"batch{batch_ms}_staleness_ms_p99\":{p99},\"batch{batch_ms}_named_wrongly_per_probe\":{:.3}",
        each(seen.messages),
        each(seen.changes),
        each(seen.bytes) / 1e6,
        seen.named_wrongly as f64 / seen.probes as f64,
    )
}

/// The filter of a follower after an inventory, chunk by chunk.
fn follow(digests: impl Iterator<Item = Digest>, thinning: Thinning) -> mesh::directory::Filter {
    let mut follower = Follower::new(BLOCKS as usize * 2);
    let keys = thinning.of(BLOCKS);
    follower.hear(Message::Begin { sequence: 0, keys, thinning }).expect("room");
    let mut kept: Vec<Digest> = digests.filter(|digest| thinning.keeps(*digest)).collect();
    kept.sort_unstable();
    for chunk in kept.chunks(mesh::feed::CHUNK_DIGESTS_MAX) {
        let message = Message::Chunk { sequence: 0, digests: chunk.to_vec(), last: false };
        follower.hear(message).expect("a chunk");
    }
    let last = Message::Chunk { sequence: 0, digests: Vec::new(), last: true };
    match follower.hear(last).expect("the last") {
        Heard::Snapshot(filter) => filter,
        Heard::Nothing | Heard::Changes(_) | Heard::Promises(_) => unreachable!("it was the last"),
    }
}

/// The directory of all peers, with its costs: JSON, each name prefixed by `what`.
fn kept(what: &str, thinning: Thinning) -> String {
    let mut directory = Directory::new(Config::default());
    for node in 1..NODES {
        let digests = (0..BLOCKS).map(|number| digest(node as usize, number));
        directory.join(PeerNumber(node));
        directory.replace(PeerNumber(node), follow(digests, thinning));
    }
    let memory: usize = directory.peers().map(|peer| peer.bytes).sum();

    let (mut one, mut absent, mut wrong, mut found) = (Vec::new(), Vec::new(), 0, 0);
    let probes = 2000;
    for probe in 0..probes {
        let node = 1 + (probe * 7919 % u64::from(NODES - 1)) as usize;
        let first = probe * 104_729 % (BLOCKS - QUERY);
        for (times, first) in [(&mut one, first), (&mut absent, (1 << 39) + first)] {
            let keys: Vec<Digest> = (first..first + QUERY).map(|number| digest(node, number)).collect();
            let start = Instant::now();
            let candidates = directory.probe(0, &keys);
            times.push(start.elapsed().as_nanos() as f64 / 1000.0);
            let owner = |peer: PeerNumber| peer.0 as usize == node && first < BLOCKS;
            wrong += candidates.iter().filter(|candidate| !owner(candidate.peer)).count();
            let run = candidates.iter().find(|candidate| owner(candidate.peer)).map_or(0, |it| it.run);
            found += u64::from(run);
        }
    }
    let share = found as f64 / (probes * QUERY) as f64;
    let wrong = wrong as f64 / (probes * 2) as f64;
    let apply_ns = apply_ns(&mut directory, thinning);
    format!(
        "\"{what}_mb\":{:.0},\"{what}_one_us_p50\":{:.1},\"{what}_one_us_p99\":{:.1},\"{what}_absent_us_p50\":{:.1},\
         \"{what}_absent_us_p99\":{:.1},\"{what}_named_wrongly_per_probe\":{wrong:.3},\
         \"{what}_run_found\":{share:.4},\"{what}_apply_ns\":{apply_ns:.0}",
        memory as f64 / 1e6,
        percentile(&mut one, 0.5),
        percentile(&mut one, 0.99),
        percentile(&mut absent, 0.5),
        percentile(&mut absent, 0.99),
    )
}

/// Nanoseconds of a change: one batch of 1,000 from each peer.
fn apply_ns(directory: &mut Directory, thinning: Thinning) -> f64 {
    let batch = |node: u32| -> Vec<Change> {
        let digests = |from: u64| (from..).map(move |number| digest(node as usize, number));
        let kept = |from: u64| digests(from).filter(|digest| thinning.keeps(*digest)).take(500);
        kept(0).map(Change::Removed).chain(kept(BLOCKS).map(Change::Added)).collect()
    };
    let batches: Vec<Vec<Change>> = (1..NODES).map(batch).collect();
    let start = Instant::now();
    for (node, batch) in (1..NODES).zip(&batches) {
        assert!(directory.apply(PeerNumber(node), batch));
    }
    start.elapsed().as_nanos() as f64 / (batches.len() * 1000) as f64
}

/// One node's own feed: JSON.
fn own() -> String {
    let all: Vec<Change> = (0..BLOCKS).map(|number| Change::Added(digest(0, number))).collect();
    let before = rss_bytes();
    let mut feed = Feed::new(0);
    let start = Instant::now();
    feed.apply(&all);
    feed.seal();
    let apply_ns = start.elapsed().as_nanos() as f64 / BLOCKS as f64;
    let bytes = (rss_bytes() - before) / BLOCKS as f64;
    let mut reader = feed.reader(Thinning::NONE, None);
    let mut follower = Follower::new(BLOCKS as usize);
    let (mut tell, mut hear) = (Vec::new(), Vec::new());
    loop {
        let start = Instant::now();
        let Some(message) = feed.next(&mut reader) else { break };
        tell.push(start.elapsed().as_secs_f64() * 1000.0);
        let start = Instant::now();
        follower.hear(message).expect("a feed's own message");
        hear.push(start.elapsed().as_secs_f64() * 1000.0);
    }
    let [tell_ms, hear_ms] = [&mut tell, &mut hear].map(|times| percentile(times, 1.0));
    format!(
        "\"feed_bytes_per_key\":{bytes:.1},\"feed_apply_ns\":{apply_ns:.0},\
         \"chunk_tell_ms_max\":{tell_ms:.2},\"chunk_hear_ms_max\":{hear_ms:.2}"
    )
}

fn main() {
    let own = own();
    let told: Vec<String> = BATCHES_MS.into_iter().map(told).collect();
    let full = kept("full", Thinning::NONE);
    let fits = |thinning: &Thinning| thinning.of(BLOCKS) <= keys_max(LIMIT_BYTES, NODES as usize - 1) as u64;
    let thinning = (0..).map_while(Thinning::new).find(fits).expect("it fits");
    let thinned = kept("limited", thinning);
    println!("limited to {} MiB: one block in {}", LIMIT_BYTES >> 20, 1 << thinning.power());
    println!("{{\"limited_one_in\":{},{own},{},{full},{thinned}}}", 1 << thinning.power(), told.join(","));
}
