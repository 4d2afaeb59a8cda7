//! A trace in virtual time, in DRAM with a disk of three times its room that reads some blocks a second: how much is in DRAM as a
//! request arrives, and how long it waits for the rest.
//!
//! A request's reads come in order, behind those of earlier requests; fetches ahead, one at a time, while no request waits. Writes take
//! no time, and a request ends once its blocks are there. Figures, the first quarter of the requests not counted:
//!
//! - `NAME_ROOM_RATE_KIND_found`: share of the requested blocks in DRAM at the arrival
//! - `..._kept`: the same on the disk, too
//! - `..._wait_ms`: mean wait for the blocks of the disk
//! - `..._gap` and `..._gap_wait`: the part of the way from LRU with reads on demand to an oracle of return times
//!
//! Kinds: `lru`; `demand`, the product's policy with reads on demand; `oracle`, which knows the next use of each block, keeps the
//! soonest in DRAM, and fetches ahead at the same rate.

mod memories;

use std::collections::{HashMap, HashSet, VecDeque};

use shm_protocol::key::BlockHash;

use self::memories::{LruMemory, Memory, Oracle, Policed};
use crate::caches::Request;
use crate::replayed::parse;

/// Rooms of DRAM, in blocks of 512 tokens.
const ROOMS: [usize; 2] = [2555, 5110];
/// Blocks a second: those of Llama-3.1-8B from one disk of 7 GB/s, and from four.
const RATES: [u64; 2] = [104, 416];
/// Milliseconds between two looks of an idle disk for a block to fetch ahead.
const LOOK_MS: f64 = 1000.0;

pub(crate) struct TimedRequest {
    pub(crate) ms: u64,
    pub(crate) request: Request,
}

/// The results of one replay.
#[derive(Copy, Clone, Debug)]
struct Played {
    found: f64,
    kept: f64,
    wait_ms: f64,
}

/// The disk, and the requests that wait for its blocks.
struct Clockwork<'a> {
    requests: &'a [TimedRequest],
    block_ms: f64,
    now_ms: f64,
    demanded: VecDeque<BlockHash>,
    /// Requests by the block they wait for; each one's number of such blocks; when its last one came.
    waiting: HashMap<BlockHash, Vec<usize>>,
    missing: Vec<usize>,
    done_ms: Vec<f64>,
}

/// Reads requests from a file with a line for each: its milliseconds, and a line of [`crate::replayed::read`].
pub(crate) fn read(path: &str) -> Vec<TimedRequest> {
    let timed = |line: &str| {
        let (ms, rest) = line.split_once(' ').expect("a time");
        TimedRequest { ms: ms.parse().expect("milliseconds"), request: parse(rest) }
    };
    std::fs::read_to_string(path).expect("a readable file").lines().map(timed).collect()
}

// === impl Clockwork ===

impl Clockwork<'_> {
    /// Lets the disk work until this time.
    fn work(&mut self, memory: &mut dyn Memory, until_ms: f64) {
        while self.now_ms < until_ms {
            let demanded = self.demanded.pop_front();
            if let Some(hash) = demanded.or_else(|| memory.fetch_ahead()) {
                self.now_ms += self.block_ms;
                memory.came(&hash, self.now_ms as u64);
                self.end_waits(memory, &hash);
            } else {
                self.now_ms = until_ms.min(self.now_ms + LOOK_MS);
            }
        }
    }

    fn end_waits(&mut self, memory: &mut dyn Memory, hash: &BlockHash) {
        for at in self.waiting.remove(hash).into_iter().flatten() {
            self.missing[at] -= 1;
            if self.missing[at] == 0 {
                self.done_ms[at] = self.now_ms;
                memory.end_request(&self.requests[at].request, self.now_ms as u64);
            }
        }
    }

    /// Returns the number of the request's blocks in memory at its arrival, and of those kept at all.
    fn arrive(&mut self, memory: &mut dyn Memory, at: usize) -> (usize, usize) {
        let TimedRequest { ms, request } = &self.requests[at];
        let arrival = memory.arrive(request, *ms);
        let kept = arrival.found + arrival.awaited.len();
        let wanted: HashSet<BlockHash> = arrival.awaited.into_iter().collect();
        self.missing[at] = wanted.len();
        for hash in wanted {
            self.waiting.entry(hash).or_default().push(at);
        }
        self.demanded.extend(arrival.reads);
        if self.missing[at] == 0 {
            self.done_ms[at] = *ms as f64;
            memory.end_request(request, *ms);
        }
        (arrival.found, kept)
    }
}

fn play(memory: &mut dyn Memory, requests: &[TimedRequest], rate: u64) -> Played {
    let mut disk = Clockwork {
        requests,
        block_ms: 1000.0 / rate as f64,
        now_ms: 0.0,
        demanded: VecDeque::new(),
        waiting: HashMap::new(),
        missing: vec![0; requests.len()],
        done_ms: vec![0.0; requests.len()],
    };
    let (mut asked, mut found, mut kept, first) = (0, 0, 0, requests.len() / 4);
    for (at, timed) in requests.iter().enumerate() {
        disk.work(memory, timed.ms as f64);
        let (here, reached) = disk.arrive(memory, at);
        if at >= first {
            (asked, found, kept) = (asked + timed.request.chain.len(), found + here, kept + reached);
        }
    }
    while !disk.demanded.is_empty() {
        let until_ms = disk.now_ms + disk.block_ms;
        disk.work(memory, until_ms);
    }
    let wait = |at: usize| disk.done_ms[at] - requests[at].ms as f64;
    let waits: f64 = (first..requests.len()).map(wait).sum();
    let part = |blocks: usize| blocks as f64 / asked as f64;
    Played { found: part(found), kept: part(kept), wait_ms: waits / (requests.len() - first) as f64 }
}

/// Cells of JSON for a trace.
pub(crate) fn of_trace(name: &str, requests: &[TimedRequest]) -> Vec<String> {
    let mut cells = Vec::new();
    for (room, rate) in ROOMS.into_iter().flat_map(|room| RATES.map(|rate| (room, rate))) {
        let lru = play(&mut LruMemory::new(room), requests, rate);
        let oracle = play(&mut Oracle::new(room, requests), requests, rate);
        let demand = play(&mut Policed::new(room, requests.len()), requests, rate);
        let mut say = |kind: &str, figure: &str, value: f64| {
            let name = format!("fetch_back_{name}_{room}_{rate}_{kind}_{figure}");
            println!("{name:56} {value:.4}");
            cells.push(format!("\"{name}\":{value:.4}"));
        };
        for (kind, played) in [("lru", lru), ("demand", demand), ("oracle", oracle)] {
            say(kind, "found", played.found);
            say(kind, "kept", played.kept);
            say(kind, "wait_ms", played.wait_ms);
            say(kind, "gap", (played.found - lru.found) / (oracle.found - lru.found));
            say(kind, "gap_wait", (lru.wait_ms - played.wait_ms) / (lru.wait_ms - oracle.wait_ms));
        }
    }
    cells
}
