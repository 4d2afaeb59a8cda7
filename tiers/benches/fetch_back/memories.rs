//! The compared memories: DRAM and a disk of three times its room.

use std::collections::{BTreeSet, HashMap, HashSet};

use shm_protocol::key::BlockHash;
use tiers::ssd::DeviceJob;

use super::TimedRequest;
use crate::caches::{Cache, Clairvoyant, Lru, Request};
use crate::disk::{DISK_ROOMS, Disked, key};

/// A request's arrival: its blocks in DRAM, those to be read, and all that it waits for.
pub(super) struct Arrival {
    pub(super) found: usize,
    pub(super) reads: Vec<BlockHash>,
    pub(super) awaited: Vec<BlockHash>,
}

pub(super) trait Memory {
    fn arrive(&mut self, request: &Request, now_ms: u64) -> Arrival;

    /// Notes that a read has ended.
    fn came(&mut self, hash: &BlockHash, now_ms: u64);

    fn end_request(&mut self, _request: &Request, _now_ms: u64) {}

    /// Begins the read of a block ahead of its request.
    fn fetch_ahead(&mut self) -> Option<BlockHash> {
        None
    }
}

/// LRU in both rooms, with reads on demand.
pub(super) struct LruMemory {
    dram: Lru,
    all: Lru,
    coming: HashSet<BlockHash>,
}

/// Both rooms by the next use of each block, and fetches ahead.
pub(super) struct Oracle<'a> {
    room: usize,
    requests: &'a [TimedRequest],
    all: Clairvoyant,
    /// Blocks in DRAM and on the disk alone: by next use and depth.
    dram: BTreeSet<(usize, usize, BlockHash)>,
    below: BTreeSet<(usize, usize, BlockHash)>,
    places: HashMap<BlockHash, (usize, usize, bool)>,
    coming: HashSet<BlockHash>,
}

/// The product's policy.
pub(super) struct Policed {
    disked: Disked,
    /// Reads under way, `None` for a block without a slot.
    coming: HashMap<BlockHash, Option<DeviceJob>>,
}

/// Sorts the found run of a request into its blocks in DRAM and the others.
fn arrival(run: &[BlockHash], in_dram: impl Fn(&BlockHash) -> bool, coming: &HashSet<BlockHash>) -> Arrival {
    let awaited: Vec<_> =
        run.iter().filter(|hash| !in_dram(hash) || coming.contains(*hash)).copied().collect();
    let reads = awaited.iter().filter(|hash| !coming.contains(*hash)).copied().collect();
    Arrival { found: run.len() - awaited.len(), reads, awaited }
}

// === impl LruMemory ===

impl LruMemory {
    pub(super) fn new(room: usize) -> Self {
        let (dram, all) = (Lru::new(room), Lru::new((1 + DISK_ROOMS) * room));
        Self { dram, all, coming: HashSet::new() }
    }
}

impl Memory for LruMemory {
    fn arrive(&mut self, request: &Request, _now_ms: u64) -> Arrival {
        let run = self.all.leading(&request.chain);
        let in_dram = |hash: &BlockHash| self.dram.used.contains_key(hash);
        let arrival = arrival(&request.chain[..run], in_dram, &self.coming);
        self.coming.extend(&arrival.reads);
        for lru in [&mut self.dram, &mut self.all] {
            lru.use_all(&request.chain);
            lru.dropped.clear();
        }
        arrival
    }

    fn came(&mut self, hash: &BlockHash, _now_ms: u64) {
        self.coming.remove(hash);
    }
}

// === impl Oracle ===

impl<'a> Oracle<'a> {
    pub(super) fn new(room: usize, requests: &'a [TimedRequest]) -> Self {
        let plain: Vec<_> = requests.iter().map(|timed| timed.request.clone()).collect();
        let all = Clairvoyant::new((1 + DISK_ROOMS) * room, &plain);
        let (dram, below, places, coming) = Default::default();
        Self { room, requests, all, dram, below, places, coming }
    }

    /// Puts a block into DRAM or below, or nowhere if it is not kept.
    fn place(&mut self, hash: &BlockHash, in_dram: bool) {
        if let Some((next, depth, was_in_dram)) = self.places.remove(hash) {
            let set = if was_in_dram { &mut self.dram } else { &mut self.below };
            set.remove(&(next, depth, *hash));
        }
        if let Some((next, depth)) = self.all.kept.get(hash).copied() {
            let set = if in_dram { &mut self.dram } else { &mut self.below };
            set.insert((next, depth, *hash));
            self.places.insert(*hash, (next, depth, in_dram));
        }
    }

    /// Evicts down to the room of DRAM.
    fn shrink(&mut self) {
        while self.dram.len() > self.room {
            let (_, _, last) = *self.dram.last().expect("more than none");
            self.place(&last, false);
        }
    }
}

impl Memory for Oracle<'_> {
    fn arrive(&mut self, request: &Request, _now_ms: u64) -> Arrival {
        let kept = |hash: &&BlockHash| self.all.kept.contains_key(*hash);
        let run = request.chain.iter().take_while(kept).count();
        let in_dram = |hash: &BlockHash| self.places.get(hash).is_some_and(|place| place.2);
        let arrival = arrival(&request.chain[..run], in_dram, &self.coming);
        self.coming.extend(&arrival.reads);
        self.all.request(request, 0);
        request.chain.iter().for_each(|hash| self.place(hash, true));
        for gone in std::mem::take(&mut self.all.dropped) {
            self.place(&gone, false);
        }
        self.shrink();
        arrival
    }

    fn came(&mut self, hash: &BlockHash, _now_ms: u64) {
        self.coming.remove(hash);
    }

    fn fetch_ahead(&mut self) -> Option<BlockHash> {
        let (next, _, hash) = *self.below.first()?;
        let full = self.dram.len() >= self.room;
        let is_later = self.dram.last().is_some_and(|(last, ..)| *last > next);
        if next >= self.requests.len() || full && !is_later {
            return None;
        }
        self.place(&hash, true);
        self.shrink();
        self.coming.insert(hash);
        Some(hash)
    }
}

// === impl Policed ===

impl Policed {
    pub(super) fn new(room: usize, requests: usize) -> Self {
        let mut disked = Disked::new(room, requests, None);
        disked.reads = Some(Default::default());
        Self { disked, coming: HashMap::new() }
    }

    fn begin_read(&mut self, hash: &BlockHash) -> bool {
        let begun = self.disked.begin_read(hash);
        let job = self.disked.reads.as_mut().and_then(|reads| reads.pop_front());
        if begun {
            self.coming.insert(*hash, job);
        }
        begun
    }
}

impl Memory for Policed {
    fn arrive(&mut self, request: &Request, now_ms: u64) -> Arrival {
        self.disked.now_ms = self.disked.now_ms.max(now_ms);
        let Request { chain, .. } = request;
        let dram = &self.disked.tier.dram;
        let is_kept = |hash: &&BlockHash| {
            dram.is_kept(&key(hash))
                || self.coming.contains_key(*hash)
                || self.disked.log.keeps(&key(hash)).is_some()
        };
        let run = &chain[..chain.iter().take_while(is_kept).count()];
        let coming = self.coming.keys().copied().collect();
        let arrival = arrival(run, |hash| dram.is_kept(&key(hash)), &coming);
        self.disked.tier.dram.use_run(0, run);
        for hash in &arrival.reads {
            if !self.begin_read(hash) {
                self.coming.insert(*hash, None);
            }
            self.disked.flow();
        }
        arrival
    }

    fn came(&mut self, hash: &BlockHash, now_ms: u64) {
        self.disked.now_ms = self.disked.now_ms.max(now_ms);
        if let Some(Some(job)) = self.coming.remove(hash) {
            self.disked.end_job(job);
        }
    }

    fn end_request(&mut self, request: &Request, now_ms: u64) {
        self.disked.now_ms = self.disked.now_ms.max(now_ms);
        self.disked.save_chain(request);
    }
}
