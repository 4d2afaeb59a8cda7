//! DRAM with a disk of three times its room, the real log below the real tier, both filled as the sidecar
//! fills them. Reads and writes end between the steps of a prompt.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};

use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use tiers::dram::{HolderId, Leaving};
use tiers::ssd::{
    DeviceGeometry, DeviceJob, DeviceWork, EndedJob, JobDone, Label, LogConfig, LogRefusal, Recovered,
    SegmentLog,
};

use crate::caches::{BLOCK_BYTES, Cache, Clairvoyant, Lru, Request, STEP_BLOCKS, Tier};
use crate::replayed::share;

/// Rooms of DRAM for the replays of a trace.
pub(crate) const ROOMS: [usize; 5] = [500, 1000, 2555, 5110, 10_220];
/// The disk has so many times the room of DRAM.
pub(crate) const DISK_ROOMS: usize = 3;
const UNIT_BYTES: u64 = 4096;
/// The number for a disk of 32 GiB; larger ones have more.
const SEGMENTS: usize = 512;
/// Writes wait for so many rounds of jobs at most.
const TRIES: usize = 64;
/// The part of DRAM written ahead of its eviction, as in the sidecar.
const AHEAD_PART: u64 = 32;
const DIGEST: NamespaceDigest = NamespaceDigest([1; 16]);

/// The content of each segment: its sequence, and blocks by unit.
type Medium = BTreeMap<u32, (u64, Vec<(u32, Label)>)>;

/// DRAM and a disk.
pub(crate) struct Disked {
    pub(crate) tier: Tier,
    pub(crate) log: SegmentLog,
    room: usize,
    pub(crate) now_ms: u64,
    /// Reads that have not ended, if reads take time.
    pub(crate) reads: Option<VecDeque<DeviceJob>>,
    requests: usize,
    /// Requests that are not counted, and bytes written by them.
    warm_up: usize,
    written_before: u64,
    /// The request at which DRAM is lost, and the way.
    end: Option<(usize, End)>,
    medium: Medium,
    saved: VecDeque<BlockKey>,
}

/// The way a sidecar ends.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum End {
    Killed,
    Stopped,
}

pub(crate) fn key(hash: &BlockHash) -> BlockKey {
    BlockKey { namespace: 0, group: 0, hash: *hash }
}

fn geometry(room: usize) -> DeviceGeometry {
    let block_units = 1 + BLOCK_BYTES.div_ceil(UNIT_BYTES);
    let blocks = (DISK_ROOMS * room).div_ceil(SEGMENTS) as u64;
    let footer_units = 1 + (blocks * 64).div_ceil(UNIT_BYTES);
    DeviceGeometry {
        unit_bytes: UNIT_BYTES,
        segment_bytes: (1 + blocks * block_units + footer_units) * UNIT_BYTES,
        segments: ((DISK_ROOMS * room) as u64 / blocks) as u32,
        first_sequence: 1,
    }
}

// === impl Disked ===

impl Disked {
    pub(crate) fn new(room: usize, requests: usize, end: Option<End>) -> Self {
        let (tier, log) = Self::begin(room, geometry(room), &Medium::new());
        Self {
            tier,
            log,
            room,
            now_ms: 0,
            reads: None,
            requests: 0,
            warm_up: requests / 4,
            written_before: 0,
            end: end.map(|end| (requests / 2, end)),
            medium: Medium::new(),
            saved: VecDeque::new(),
        }
    }

    /// Starts a sidecar over the disk of an earlier one.
    fn begin(room: usize, geometry: DeviceGeometry, medium: &Medium) -> (Tier, SegmentLog) {
        let config = LogConfig { devices: vec![geometry], write_bytes_max: u64::MAX, late_ms: u64::MAX / 2 };
        let mut log = SegmentLog::new(config);
        let mut segments: Vec<_> = medium.iter().collect();
        segments.sort_by_key(|(_, (sequence, _))| Reverse(*sequence));
        let last = [(&0, &(0, Vec::new()))];
        for (at, (segment, (sequence, blocks))) in segments.iter().chain(&last).enumerate() {
            let found = Recovered {
                device: 0,
                segment: **segment,
                sequence: *sequence,
                blocks: blocks.clone(),
                unreadable: false,
                segments_read: 0,
                last: at == segments.len(),
            };
            log.recovered(&found, |_, _| Some(0));
        }
        let mut tier = Tier::chunked(room);
        log.put_below(&mut tier.dram);
        (tier, log)
    }

    /// Ends all jobs, and those that follow.
    fn end_jobs(&mut self) {
        loop {
            let jobs: Vec<_> = self.log.drain_jobs().collect();
            if jobs.is_empty() {
                return;
            }
            for job in jobs {
                match &mut self.reads {
                    Some(reads) if matches!(job.work, DeviceWork::Read { .. }) => reads.push_back(job),
                    _ => self.end_job(job),
                }
            }
        }
    }

    pub(crate) fn end_job(&mut self, job: DeviceJob) {
        self.carry_out(job.work);
        let done = JobDone { device: job.device, ticket: job.ticket, micros: 1, result: Ok(()) };
        match self.log.done(self.now_ms, done) {
            Some(EndedJob::Read { slot, key, .. }) => {
                let standing = self.log.standing(&key);
                assert!(self.tier.dram.commit_back(slot, standing));
                self.log.came(&key);
            }
            Some(EndedJob::Written { slot, .. }) => self.tier.dram.unhold(slot, HolderId::NOBODY),
            None => {}
        }
    }

    fn carry_out(&mut self, work: DeviceWork) {
        match work {
            DeviceWork::Begin { segment, sequence } => {
                drop(self.medium.insert(segment, (sequence, Vec::new())))
            }
            DeviceWork::Write { place, label, .. } | DeviceWork::Move { to: place, label, .. } => {
                self.medium.get_mut(&place.segment).expect("begun").1.push((place.unit, label));
            }
            _ => {}
        }
    }

    /// Writes a block of DRAM, unless the disk keeps it.
    fn write(&mut self, block: &Leaving) {
        if self.log.came(&block.key) || !self.log.make_room(block, self.tier.dram.judge()) {
            return;
        }
        // A new segment's header is written first, and a full disk gives up a segment.
        for _ in 0..TRIES {
            let Some(slot) = self.tier.dram.hold(&block.key, HolderId::NOBODY) else { return };
            let written = self.log.write_block(block, DIGEST, slot);
            if written.is_err() {
                self.tier.dram.unhold(slot, HolderId::NOBODY);
            }
            self.end_jobs();
            if written != Err(LogRefusal::Busy) {
                return;
            }
            self.log.tick(self.now_ms, &mut Vec::new());
        }
    }

    /// Writes DRAM's next evictions, then saved blocks, as far as there is room for copies.
    pub(crate) fn flow(&mut self) {
        self.tier.dram.drain_gone().for_each(|(key, standing)| self.log.leave_dram(&key, standing));
        let mut due = Vec::new();
        self.tier.dram.next_out(self.tier.dram.config().pool_bytes / AHEAD_PART, usize::MAX, &mut due);
        due.iter().for_each(|block| self.write(block));
        while let Some(key) = self.saved.pop_front() {
            if self.log.has_room_for_copy(0, BLOCK_BYTES) {
                self.write(&Leaving::copy(key, BLOCK_BYTES));
            }
        }
    }

    /// Begins to read a block into DRAM. Returns false if there is no slot for it, or the disk does not take the read.
    pub(crate) fn begin_read(&mut self, hash: &BlockHash) -> bool {
        let Ok(slot) = self.tier.dram.begin_fill(key(hash), BLOCK_BYTES, self.tier.whose) else {
            return false;
        };
        let begun = self.log.read_block(self.now_ms, &key(hash), slot, 1).is_some();
        if !begun {
            self.tier.dram.abandon(slot);
        }
        self.tier.dram.drain_evicted().for_each(drop);
        self.tier.dram.drain_assigned().for_each(drop);
        self.end_jobs();
        begun
    }

    /// Ends the request of a chain: its missing blocks are saved.
    pub(crate) fn save_chain(&mut self, Request { chain, ending }: &Request) {
        for (at, hash) in chain.iter().enumerate() {
            if !self.tier.dram.is_kept(&key(hash)) {
                self.tier.save(chain, at..at + 1);
                self.saved.push_back(key(hash));
                self.flow();
            }
        }
        self.tier.dram.end_chain(HolderId::NOBODY, 0, chain, *ending);
    }

    /// Brings leading blocks kept by the disk into DRAM, and returns their number.
    fn promote(&mut self, chain: &[BlockHash]) -> usize {
        let kept = |hash: &&BlockHash| self.log.keeps(&key(hash)).is_some();
        let run = chain.iter().take(STEP_BLOCKS).take_while(kept).count();
        let run = &chain[..run];
        for (at, hash) in run.iter().enumerate() {
            // Its parent went to the disk, and this block stayed in DRAM.
            let Ok(slot) = self.tier.dram.begin_fill(key(hash), BLOCK_BYTES, self.tier.whose) else {
                self.end_jobs();
                return at;
            };
            if self.log.read_block(0, &key(hash), slot, 1).is_none() {
                self.tier.dram.abandon(slot);
                self.end_jobs();
                return at;
            }
        }
        self.tier.dram.drain_evicted().for_each(drop);
        self.tier.dram.drain_assigned().for_each(drop);
        self.end_jobs();
        self.flow();
        run.len()
    }

    fn written_bytes(&self) -> u64 {
        let stats = &self.log.log_stats().devices[0];
        stats.written_bytes_total + stats.moved_bytes_total
    }

    /// Loses DRAM, and starts the next sidecar over the disk.
    fn restart(&mut self, end: End) {
        if end == End::Stopped {
            self.log.keep_copies();
            let mut best = Vec::new();
            self.tier.dram.best(&mut best);
            best.iter().for_each(|block| self.write(block));
        }
        let geometry = DeviceGeometry { first_sequence: 1 << 32, ..geometry(self.room) };
        (self.tier, self.log) = Self::begin(self.room, geometry, &self.medium);
        self.saved.clear();
    }
}

impl Cache for Disked {
    fn request(&mut self, Request { chain, ending }: &Request, found: usize) -> usize {
        if self.requests == self.warm_up {
            self.written_before = self.written_bytes();
        }
        if let Some((_, end)) = self.end.take_if(|(at, _)| *at == self.requests) {
            self.restart(end);
        }
        self.requests += 1;
        self.now_ms += 1;
        let mut began_on = found;
        loop {
            began_on += self.tier.dram.probe(0, &chain[began_on..]);
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
            self.saved.extend(chain[next..end].iter().map(key));
            self.flow();
            next = end;
        }
        self.tier.dram.end_chain(HolderId::NOBODY, 0, chain, *ending);
        began_on
    }
}

/// Returns the share found in the eighth of the requests behind the middle.
fn after_end(room: usize, requests: &[Request], end: Option<End>) -> f64 {
    let mut disked = Disked::new(room, requests.len(), end);
    let (mut asked, mut found) = (0, 0);
    for (at, request) in requests[..requests.len() * 5 / 8].iter().enumerate() {
        let hits = disked.request(request, 0);
        if at >= requests.len() / 2 {
            asked += request.chain.len();
            found += hits;
        }
    }
    found as f64 / asked as f64
}

/// Cells of JSON: shares of blocks found in DRAM and on the disk, and bytes written, relative to all blocks
/// and bytes of the queries.
pub(crate) fn of_trace(name: &str, rooms: &[usize], requests: &[Request]) -> Vec<String> {
    let mut cells = Vec::new();
    let counted: usize = requests[requests.len() / 4..].iter().map(|request| request.chain.len()).sum();
    for &room in rooms {
        let mut disked = Disked::new(room, requests.len(), None);
        let ours = share(&mut disked, requests, 0);
        let written = disked.written_bytes() - disked.written_before;
        let room_of_all = (1 + DISK_ROOMS) * room;
        let figures = [
            ("pillion", ours),
            ("on", after_end(room, requests, None)),
            ("killed", after_end(room, requests, Some(End::Killed))),
            ("stopped", after_end(room, requests, Some(End::Stopped))),
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
