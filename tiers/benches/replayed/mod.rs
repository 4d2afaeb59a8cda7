//! A trace of real requests: shares of rooms of several sizes, each policy alone, behind a GPU's cache, and
//! in steps.

use std::fs;

use shm_protocol::key::BlockHash;

use tiers::dram::Ending;

use crate::caches::{Cache, Clairvoyant, Lru, Request, Tier};
use shm_protocol::random::Random;

/// Sizes of the rooms, in blocks.
pub(crate) const ROOMS: [usize; 8] = [500, 1000, 2555, 5110, 10_220, 20_440, 40_880, 100_000];
/// The largest room in the average of the gain: in larger ones almost all blocks stay.
pub(crate) const ROOM_OF_GAIN_MAX: usize = 20_440;
/// A GPU's own cache holds one block for so many of the room.
const ROOM_BY_GPU: usize = 3;
/// Number of stops of a replay to count unreachable blocks.
const STOPS: usize = 4;

/// A share, and the largest part of the kept blocks found unreachable at one of the stops.
struct Replayed {
    share: f64,
    unreachable: f64,
}

/// The results of a replay of one kind: cells of JSON.
#[derive(Default)]
pub(crate) struct Report {
    cells: Vec<String>,
}

/// Reads requests from a file with a line for each: a number for the way its answer ended, 1 for the last
/// request of a session or 0, and the numbers of its blocks.
pub(crate) fn read(path: &str) -> Vec<Request> {
    fs::read_to_string(path).expect("a readable file").lines().map(parse).collect()
}

/// Reads one of these lines.
pub(crate) fn parse(line: &str) -> Request {
    let hash = |number: &str| {
        let mut random = Random(number.parse().expect("a block's number"));
        BlockHash::from_words(std::array::from_fn(|_| random.next()))
    };
    let mut words = line.split(' ');
    let mut number = || words.next().and_then(|word| word.parse().ok()).expect("a number");
    let ending = Ending { way: number(), last: number() == 1, ..Ending::default() };
    Request { chain: words.map(hash).collect(), ending }
}

/// Returns blocks found by blocks requested, the first quarter of the requests not counted.
pub(crate) fn share(cache: &mut dyn Cache, requests: &[Request], gpu_blocks: usize) -> f64 {
    replay(cache, requests, gpu_blocks, |_, _, _| {})
}

fn replay<C: Cache + ?Sized>(
    cache: &mut C,
    requests: &[Request],
    gpu_blocks: usize,
    mut stop: impl FnMut(&mut C, &[Request], &Lru),
) -> f64 {
    let mut gpu = Lru::new(gpu_blocks);
    let (mut asked, mut found) = (0, 0);
    for (at, request) in requests.iter().enumerate() {
        let in_gpu = if gpu_blocks > 0 { gpu.request(request, 0) } else { 0 };
        cache.leave_device(&std::mem::take(&mut gpu.dropped));
        cache.leave_device(&std::mem::take(&mut gpu.dropped));
        let hits = cache.request(request, in_gpu);
        if at >= requests.len() / 4 {
            asked += request.chain.len();
            found += hits;
        }
        if (at + 1) % (requests.len() / STOPS).max(1) == 0 {
            stop(cache, &requests[..=at], &gpu);
        }
    }
    found as f64 / asked as f64
}

/// Returns the share of blocks found by the tenth of the requests after an engine's restart in the middle.
fn share_after_restart(mut tier: Tier, requests: &[Request], gpu_blocks: usize) -> f64 {
    let (middle, mut gpu) = (requests.len() / 2, Lru::new(gpu_blocks));
    let (mut asked, mut found) = (0, 0);
    for (at, request) in requests.iter().enumerate().take(middle + requests.len() / 10) {
        if at == middle {
            gpu = Lru::new(gpu_blocks);
            tier.restart_engine();
        }
        let in_gpu = gpu.request(request, 0);
        tier.leave_device(&std::mem::take(&mut gpu.dropped));
        let hits = tier.request(request, in_gpu);
        if at >= middle {
            (asked, found) = (asked + request.chain.len(), found + hits);
        }
    }
    found as f64 / asked as f64
}

fn replay_tier(mut tier: Tier, requests: &[Request], gpu_blocks: usize) -> Replayed {
    let mut worst: f64 = 0.0;
    let share = replay(&mut tier, requests, gpu_blocks, |tier, so_far, gpu| {
        let (unreachable, kept) = tier.unreachable(so_far, gpu);
        worst = worst.max(unreachable as f64 / kept.max(1) as f64);
    });
    Replayed { share, unreachable: worst }
}

// === impl Report ===

impl Report {
    /// Replays a trace called `name` in all rooms.
    pub(crate) fn replay(&mut self, name: &str, requests: &[Request]) {
        self.rooms(name, requests, |_| 0, Tier::new);
        self.rooms(&format!("{name}_gpu"), requests, |room| room / ROOM_BY_GPU, Tier::new);
        self.rooms(&format!("{name}_once"), requests, |room| room / ROOM_BY_GPU, Tier::once);
        for room in ROOMS.into_iter().filter(|room| *room <= ROOM_OF_GAIN_MAX) {
            for (kind, tier) in [("kept", Tier::new as fn(usize) -> Tier), ("once", Tier::once)] {
                let share = share_after_restart(tier(room), requests, room / ROOM_BY_GPU);
                self.say(&format!("{name}_restart_{room}_{kind}"), share);
            }
        }
        self.rooms(&format!("{name}_chunked"), requests, |_| 0, Tier::chunked);
    }

    fn rooms(
        &mut self,
        prefix: &str,
        requests: &[Request],
        gpu_blocks: impl Fn(usize) -> usize,
        tier: impl Fn(usize) -> Tier,
    ) {
        let (mut gains, mut unreachable): (Vec<f64>, f64) = (Vec::new(), 0.0);
        for room in ROOMS {
            let gpu = gpu_blocks(room);
            let ours = replay_tier(tier(room), requests, gpu);
            let lru = share(&mut Lru::new(room), requests, gpu);
            let clairvoyant = share(&mut Clairvoyant::new(room, requests), requests, gpu);
            let shares = [("pillion", ours.share), ("lru", lru), ("clairvoyant", clairvoyant)];
            for (policy, share) in shares {
                self.say(&format!("{prefix}_{room}_{policy}"), share);
            }
            unreachable = unreachable.max(ours.unreachable);
            if room <= ROOM_OF_GAIN_MAX && clairvoyant > lru {
                gains.push((ours.share - lru) / (clairvoyant - lru));
            }
        }
        self.say(&format!("{prefix}_gain"), gains.iter().sum::<f64>() / gains.len().max(1) as f64);
        self.say(&format!("{prefix}_unreachable"), unreachable);
    }

    fn say(&mut self, key: &str, value: f64) {
        println!("{key:32} {value:.4}");
        self.cells.push(format!("\"{key}\":{value:.4}"));
    }

    pub(crate) fn cells(self) -> Vec<String> {
        self.cells
    }
}
