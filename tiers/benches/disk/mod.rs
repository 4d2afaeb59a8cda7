//! DRAM with a disk of three times its room, the real log below the real tier, kept as the sidecar keeps them. Reads and writes
//! end between the steps of a prompt.

use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::pool::SlotRef;
use tiers::dram::HolderId;
use tiers::ssd::{Config, Done, Ended, Geometry, Log, Recovered, Refused};

use crate::caches::{BLOCK_BYTES, Cache, Chain, Clairvoyant, Lru, STEP_BLOCKS, Tier};
use crate::replayed::share;

/// Rooms of DRAM in which a trace is replayed.
pub(crate) const ROOMS: [usize; 5] = [500, 1000, 2555, 5110, 10_220];
/// The disk has so many times the room of DRAM.
const DISK_ROOMS: usize = 3;
const UNIT_BYTES: u64 = 4096;
/// What a disk of 32 GiB has, about; larger ones have more.
const SEGMENTS: usize = 128;
/// Writes wait for so many rounds of jobs at most.
const TRIES: usize = 64;
const DIGEST: NamespaceDigest = NamespaceDigest([1; 16]);

/// DRAM and a disk.
struct Disked {
    tier: Tier,
    log: Log,
    now_ms: u64,
    requests: usize,
    /// Requests that are not counted, and bytes that they wrote.
    warm_up: usize,
    written_before: u64,
}

fn key(hash: &BlockHash) -> BlockKey {
    BlockKey { namespace: 0, group: 0, hash: *hash }
}

// === impl Disked ===

impl Disked {
    fn new(room: usize, requests: usize) -> Self {
        let block_units = 1 + BLOCK_BYTES.div_ceil(UNIT_BYTES);
        let blocks = (DISK_ROOMS * room).div_ceil(SEGMENTS) as u64;
        let footer_units = 1 + (blocks * 64).div_ceil(UNIT_BYTES);
        let geometry = Geometry {
            unit_bytes: UNIT_BYTES,
            segment_bytes: (1 + blocks * block_units + footer_units) * UNIT_BYTES,
            segments: ((DISK_ROOMS * room) as u64 / blocks) as u32,
            first_sequence: 1,
        };
        let tier = Tier::chunked(room);
        let config = Config { devices: vec![geometry], write_bytes_max: u64::MAX, late_ms: u64::MAX };
        let mut log = Log::new(config);
        let nothing = Recovered {
            device: 0,
            segment: 0,
            sequence: 0,
            blocks: Vec::new(),
            segments_read: geometry.segments,
            last: true,
        };
        log.recovered(&nothing, |_, _| None);
        Self { tier, log, now_ms: 0, requests: 0, warm_up: requests / 4, written_before: 0 }
    }

    /// Ends all jobs, and those that follow.
    fn end_jobs(&mut self) {
        loop {
            let jobs: Vec<_> = self.log.drain_jobs().collect();
            if jobs.is_empty() {
                return;
            }
            for job in jobs {
                let done = Done { device: job.device, ticket: job.ticket, micros: 1, result: Ok(()) };
                match self.log.done(self.now_ms, done) {
                    Some(Ended::Read { slot, .. }) => assert!(self.tier.dram.commit(slot)),
                    Some(Ended::Written { slot, .. }) => self.tier.dram.unhold(slot, HolderId::NOBODY),
                    None => {}
                }
            }
        }
    }

    /// Writes a block that DRAM has, unless the disk keeps it.
    fn write(&mut self, key: &BlockKey) {
        // A new segment's header is written first, and a full disk gives up its oldest segment.
        for _ in 0..TRIES {
            let Some(slot) = self.tier.dram.hold(key, HolderId::NOBODY) else { return };
            let written = self.log.write(*key, DIGEST, BLOCK_BYTES, slot);
            if written.is_err() {
                self.tier.dram.unhold(slot, HolderId::NOBODY);
            }
            self.end_jobs();
            if written != Err(Refused::Busy) {
                return;
            }
            self.log.tick(self.now_ms, &mut Vec::new());
        }
    }

    /// Brings blocks that the disk keeps into DRAM; how many of them there are, from the first.
    fn promote(&mut self, chain: &[BlockHash]) -> usize {
        let kept = |hash: &&BlockHash| self.log.keeps(&key(hash)).is_some();
        let run = chain.iter().take(STEP_BLOCKS).take_while(kept).count();
        let run = &chain[..run];
        for (at, hash) in run.iter().enumerate() {
            let slot: SlotRef =
                self.tier.dram.begin_fill(key(hash), BLOCK_BYTES, self.tier.whose).expect("nothing is held");
            if self.log.read(&key(hash), slot).is_none() {
                self.tier.dram.abandon(slot);
                self.end_jobs();
                return at;
            }
        }
        self.tier.dram.drain_evicted().for_each(drop);
        self.tier.dram.drain_assigned().for_each(drop);
        self.end_jobs();
        run.len()
    }

    fn written_bytes(&self) -> u64 {
        let stats = &self.log.stats().devices[0];
        stats.written_bytes_total + stats.moved_bytes_total
    }
}

impl Cache for Disked {
    fn request(&mut self, chain: &[BlockHash], found: usize) -> usize {
        if self.requests == self.warm_up {
            self.written_before = self.written_bytes();
        }
        self.requests += 1;
        self.now_ms += 1;
        let opened_at = self.tier.dram.generation();
        let mut began_on = found;
        loop {
            began_on += self.tier.dram.probe(0, 0, &chain[began_on..]);
            let promoted = self.promote(&chain[began_on..]);
            began_on += promoted;
            if promoted == 0 {
                break;
            }
        }
        let mut next = began_on;
        while next < chain.len() {
            let end = chain.len().min(next + STEP_BLOCKS);
            self.tier.save(chain, next..end);
            chain[next..end].iter().for_each(|hash| self.write(&key(hash)));
            next = end;
        }
        self.tier.dram.end_chain(HolderId::NOBODY, 0, 0, chain, opened_at);
        began_on
    }
}

/// Cells of JSON: shares of blocks found in DRAM and on the disk by blocks asked for, and bytes written by bytes asked for.
pub(crate) fn of_trace(name: &str, rooms: &[usize], requests: &[Chain]) -> Vec<String> {
    let mut cells = Vec::new();
    let counted: usize = requests[requests.len() / 4..].iter().map(Vec::len).sum();
    for &room in rooms {
        let mut disked = Disked::new(room, requests.len());
        let ours = share(&mut disked, requests, 0);
        let written = disked.written_bytes() - disked.written_before;
        let room_of_all = (1 + DISK_ROOMS) * room;
        let figures = [
            ("pillion", ours),
            ("lru", share(&mut Lru::new(room_of_all), requests, 0)),
            ("clairvoyant", share(&mut Clairvoyant::new(room_of_all, requests), requests, 0)),
            ("written", written as f64 / (counted as u64 * BLOCK_BYTES) as f64),
        ];
        for (figure, value) in figures {
            let name = format!("{name}_{room}_{figure}");
            println!("{name:32} {value:.4}");
            cells.push(format!("\"{name}\":{value:.4}"));
        }
    }
    cells
}
