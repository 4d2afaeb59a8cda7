//! Shared rooms: by two namespaces, one of them with a quota, and by two pods with reads from each other.

use shm_protocol::key::{BlockHash, BlockKey};
use tiers::dram::{BlockAccount, HolderId};

use crate::caches::{BLOCK_BYTES, Cache, Chain, Lru, Request, Tier};
use crate::replayed::{ROOM_OF_GAIN_MAX, ROOMS, share};
use shm_protocol::random::Random;

/// A quota is one of so many parts of the room.
const QUOTA_PART: usize = 4;
/// One request of so many goes to the pod without its conversation.
const STRAYS_ONE_IN: u64 = 10;

/// The owner's record of a peer's read.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum OwnerCounts {
    Nothing,
    /// The blocks were used as of now.
    Touch,
    /// A request has used the blocks.
    Use,
}

/// Blocks found and requested, of each half.
#[derive(Debug, Default)]
struct Halves {
    found: [usize; 2],
    asked: [usize; 2],
}

// === impl Halves ===

impl Halves {
    fn count(&mut self, half: usize, found: usize, asked: usize) {
        self.found[half] += found;
        self.asked[half] += asked;
    }

    fn share(&self, half: usize) -> f64 {
        self.found[half] as f64 / self.asked[half].max(1) as f64
    }

    fn total(&self) -> f64 {
        self.found.iter().sum::<usize>() as f64 / self.asked.iter().sum::<usize>().max(1) as f64
    }
}

/// Returns the half of the conversations of a request: all begin with the same block.
fn half(chain: &[BlockHash]) -> usize {
    let own = chain.get(1).unwrap_or(&chain[0]);
    (own.words()[0] >> 7 & 1) as usize
}

/// Returns the request with the blocks of a separate namespace.
fn apart(Request { chain, ending }: &Request, half: usize) -> Request {
    let chain = chain
        .iter()
        .map(|hash| {
            let [first, rest @ ..] = hash.words();
            let [a, b, c] = rest;
            BlockHash::from_words([first ^ half as u64, a, b, c])
        })
        .collect();
    Request { chain, ending: *ending }
}

/// The tier, the second half of the conversations within a quota.
fn quota_of_tier(room: usize, requests: &[Request]) -> Halves {
    let mut tier = Tier::new(room);
    let quota = tier.dram.add_quota((room / QUOTA_PART) as u64 * BLOCK_BYTES);
    halves(requests, |half, request| {
        tier.whose.quota = (half == 1).then_some(quota);
        tier.request(request, 0)
    })
}

/// LRU of each namespace; the oldest block of both goes if the room is full.
fn quota_of_lru(room: usize, requests: &[Request]) -> Halves {
    let mut parts = [Lru::new(room), Lru::new(room / QUOTA_PART)];
    let mut clock = 0;
    halves(requests, |half, request| {
        parts[half].clock = clock;
        let found = parts[half].request(request, 0);
        clock = parts[half].clock;
        while parts.iter().map(|part| part.used.len()).sum::<usize>() > room {
            let oldest = |part: &Lru| part.order.first_key_value().map_or(u64::MAX, |(used, _)| *used);
            let victim = usize::from(oldest(&parts[1]) < oldest(&parts[0]));
            parts[victim].drop_oldest();
        }
        found
    })
}

fn halves(requests: &[Request], mut request: impl FnMut(usize, &Request) -> usize) -> Halves {
    let mut counted = Halves::default();
    for (at, asked) in requests.iter().enumerate() {
        let half = half(&asked.chain);
        let found = request(half, &apart(asked, half));
        if at >= requests.len() / 4 {
            counted.count(half, found, asked.chain.len());
        }
    }
    counted
}

/// Calls `request` with the pod serving each chain; one chain in ten goes to the pod without its
/// conversation.
fn routed(requests: &[Request], mut request: impl FnMut(usize, &Request) -> usize) -> Halves {
    let mut random = Random(1);
    let mut counted = Halves::default();
    for (at, asked) in requests.iter().enumerate() {
        let home = half(&asked.chain);
        let pod = if random.next().is_multiple_of(STRAYS_ONE_IN) { 1 - home } else { home };
        let found = request(pod, asked);
        if at >= requests.len() / 4 {
            counted.count(home, found, asked.chain.len());
        }
    }
    counted
}

fn key(hash: BlockHash) -> BlockKey {
    BlockKey { namespace: 0, group: 0, hash }
}

/// Two tiers with reads from each other.
fn pods_of_tiers(room: usize, requests: &[Request], counts: OwnerCounts, keeps: bool) -> Halves {
    let mut pods = [Tier::new(room / 2), Tier::new(room / 2)];
    routed(requests, |pod, Request { chain, ending }| {
        let mut held = Vec::new();
        let (mut found, mut read) = (0, Vec::new());
        for hash in chain {
            if let Some(slot) = pods[pod].dram.hold(&key(*hash), HolderId::NOBODY) {
                held.push((pod, slot));
            } else if let Some(slot) = pods[1 - pod].dram.hold(&key(*hash), HolderId::NOBODY) {
                held.push((1 - pod, slot));
                read.push(*hash);
            } else {
                break;
            }
            found += 1;
        }
        if keeps {
            for hash in &read {
                let Ok(slot) = pods[pod].dram.begin_fill(key(*hash), BLOCK_BYTES, BlockAccount::default())
                else {
                    continue;
                };
                pods[pod].dram.drain_evicted().for_each(drop);
                pods[pod].dram.drain_assigned().for_each(drop);
                assert!(pods[pod].dram.commit(slot));
            }
        }
        held.into_iter().for_each(|(pod, slot)| pods[pod].dram.unhold(slot, HolderId::NOBODY));
        pods[pod].dram.use_run(0, &chain[..found]);
        if keeps || read.is_empty() {
            pods[pod].save(chain, found..chain.len());
        }
        pods[pod].dram.end_chain(HolderId::NOBODY, 0, chain, *ending);
        if !read.is_empty() {
            let owner = &mut pods[1 - pod].dram;
            match counts {
                OwnerCounts::Nothing => {}
                OwnerCounts::Touch => owner.use_run(0, &chain[..found]),
                OwnerCounts::Use => {
                    owner.end_chain(HolderId::NOBODY, 0, &chain[..found], *ending);
                }
            }
        }
        found
    })
}

/// Two LRUs with reads from each other, keeping the read blocks.
fn pods_of_lru(room: usize, requests: &[Request], counts: bool) -> Halves {
    let mut pods = [Lru::new(room / 2), Lru::new(room / 2)];
    routed(requests, |pod, Request { chain, .. }| {
        let there = |pod: usize, hash| pods[pod].used.contains_key(hash);
        let found = chain.iter().take_while(|hash| there(0, hash) || there(1, hash)).count();
        let read: Chain = chain[..found].iter().filter(|hash| !there(pod, hash)).copied().collect();
        if counts {
            pods[1 - pod].use_all(&read);
        }
        pods[pod].use_all(chain);
        found
    })
}

/// Cells of JSON for a trace.
pub(crate) fn of_trace(requests: &[Request]) -> Vec<String> {
    let mut cells = Vec::new();
    let mut say = |key: String, value: f64| {
        println!("{key:32} {value:.4}");
        cells.push(format!("\"{key}\":{value:.4}"));
    };
    for room in ROOMS.into_iter().filter(|room| *room <= ROOM_OF_GAIN_MAX) {
        let (ours, lru) = (quota_of_tier(room, requests), quota_of_lru(room, requests));
        for (half, name) in [(0, "free"), (1, "limited")] {
            say(format!("quota_{room}_{name}_pillion"), ours.share(half));
            say(format!("quota_{room}_{name}_lru"), lru.share(half));
        }
        let pods = |counts, keeps| pods_of_tiers(room, requests, counts, keeps).total();
        say(format!("pods_{room}_one"), share(&mut Tier::new(room), requests, 0));
        say(format!("pods_{room}_pillion"), pods(OwnerCounts::Nothing, true));
        say(format!("pods_{room}_touched"), pods(OwnerCounts::Touch, true));
        say(format!("pods_{room}_used"), pods(OwnerCounts::Use, true));
        say(format!("pods_{room}_unkept"), pods(OwnerCounts::Nothing, false));
        say(format!("pods_{room}_lru"), pods_of_lru(room, requests, false).total());
        say(format!("pods_{room}_lru_used"), pods_of_lru(room, requests, true).total());
    }
    cells
}
