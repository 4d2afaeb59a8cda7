//! A small sidecar for tests of the SSD tier: a pool, a log, its devices, and one thread that keeps them
//! going.

#![allow(dead_code, reason = "each test uses its part")]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::pool::{SEGMENT_ALIGN, SlotRef};
use shm_protocol::random::mix_bits;
use shm_protocol::region::{Access, Region};
use tiers::dram::{self, Dram, Leaving};
use tiers::ssd::{
    Backend, DeviceEvent, EndedJob, FaultKind, LogConfig, LogRefusal, LogStats, Missing, OpenedDevice,
    SegmentLog, SsdDevice, Ticket,
};

pub(crate) const NAMESPACE: NamespaceDigest = NamespaceDigest([7; 16]);
/// The smallest log: a MiB and four segments of 4 MiB.
pub(crate) const LOG_BYTES: u64 = 17 << 20;
/// The longest wait of a test.
const WATCHDOG: Duration = Duration::from_secs(60);

/// The settings of a rig.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) devices: Vec<(PathBuf, u64)>,
    /// Bytes of a slot of the pool, enough for any block of the test.
    pub(crate) slot_bytes: u64,
    pub(crate) slots: u64,
    pub(crate) late_ms: u64,
    pub(crate) backend: Backend,
}

/// The backend of tests without another one: threads in the crate `threads`, which holds the same tests.
fn backend() -> Backend {
    if env!("CARGO_CRATE_NAME") == "threads" { Backend::Threads } else { Backend::IoUring }
}

/// The pool, log and devices.
pub(crate) struct Rig {
    pub(crate) log: SegmentLog,
    /// Judges blocks; it keeps none.
    dram: Dram,
    /// True if room is made for each block, as the sidecar does.
    pub(crate) makes_room: bool,
    pub(crate) devices: Vec<SsdDevice>,
    pub(crate) notes: Vec<String>,
    pool: Arc<Region>,
    free: Vec<SlotRef>,
    ups: Receiver<DeviceEvent>,
    began: Instant,
    /// Milliseconds added to the clock.
    pub(crate) ahead_ms: u64,
    /// Ends of jobs not taken by the test yet.
    ended: HashMap<u64, bool>,
    reading: HashMap<Ticket, (u64, SlotRef)>,
    writing: HashMap<u64, u64>,
    pub(crate) late: Vec<Ticket>,
}

/// A folder of this test alone, beside the test's binary: on a disk. Removed at the end.
pub(crate) struct Folder(pub(crate) PathBuf);

// === impl Folder ===

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::current_exe().unwrap();
        let path = path.with_file_name(format!("ssd-{}-{count}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.0.join("log")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns the key of block `number`.
pub(crate) fn key(number: u64) -> BlockKey {
    BlockKey { namespace: 0, group: 0, hash: BlockHash::from_words([number, !number, 1, 2]) }
}

/// Returns word `at` of block `number`.
fn word(number: u64, at: u64) -> u64 {
    mix_bits(mix_bits(number) ^ at)
}

// === impl Plan ===

impl Plan {
    pub(crate) fn new(path: &Path, bytes: u64) -> Self {
        let devices = vec![(path.to_owned(), bytes)];
        Self { devices, slot_bytes: 64 << 10, slots: 64, late_ms: 60_000, backend: backend() }
    }
}

// === impl Rig ===

impl Rig {
    pub(crate) fn new(plan: &Plan) -> Self {
        Self::start(plan, |opened, number, pool, ups| {
            let wanted = Some(plan.backend);
            SsdDevice::start(opened, number, pool, wanted, move |up| drop(ups.send(up))).unwrap()
        })
    }

    pub(crate) fn start(
        plan: &Plan,
        mut start: impl FnMut(OpenedDevice, usize, Arc<Region>, Sender<DeviceEvent>) -> SsdDevice,
    ) -> Self {
        let bytes = SEGMENT_ALIGN + plan.slot_bytes * plan.slots;
        let fd = rustix::fs::memfd_create("rig", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, bytes).unwrap();
        use std::os::fd::AsFd;
        let pool = Arc::new(Region::map(fd.as_fd(), bytes as usize, Access::ReadWrite).unwrap());
        let slot = |at| SlotRef { offset: SEGMENT_ALIGN + at * plan.slot_bytes, generation: at };
        let (sender, ups) = channel();
        let opened: Vec<OpenedDevice> = plan
            .devices
            .iter()
            .map(|(path, bytes)| OpenedDevice::open(path, *bytes, Missing::Create).unwrap())
            .collect();
        let notes = opened.iter().filter_map(OpenedDevice::given_up).map(ToString::to_string).collect();
        let log = SegmentLog::new(LogConfig {
            devices: opened.iter().map(OpenedDevice::geometry).collect(),
            write_bytes_max: 16 << 20,
            late_ms: plan.late_ms,
        });
        let devices = opened
            .into_iter()
            .enumerate()
            .map(|(number, opened)| start(opened, number, Arc::clone(&pool), sender.clone()));
        #[expect(clippy::disallowed_methods, reason = "a test is a runtime")]
        let began = Instant::now();
        Self {
            log,
            dram: Dram::new(dram::DramConfig {
                pool_bytes: 4 << 20,
                segment_bytes: 4 << 20,
                lease_ttl_ms: 1,
            })
            .unwrap(),
            makes_room: false,
            devices: devices.collect(),
            notes,
            pool,
            free: (0..plan.slots).map(slot).collect(),
            ups,
            began,
            ahead_ms: 0,
            ended: HashMap::new(),
            reading: HashMap::new(),
            writing: HashMap::new(),
            late: Vec::new(),
        }
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64 + self.ahead_ms
    }

    pub(crate) fn stats(&self) -> LogStats {
        self.log.log_stats()
    }

    fn post(&mut self) {
        for job in self.log.drain_jobs() {
            self.devices[job.device].post_jobs([job]);
        }
    }

    /// Hands the first device all of its jobs at once.
    pub(crate) fn post_together(&mut self) {
        self.devices[0].post_jobs(self.log.drain_jobs());
    }

    /// Handles reports of devices, waiting a moment for them.
    pub(crate) fn pump(&mut self) {
        self.pump_within(Duration::from_millis(20));
    }

    pub(crate) fn pump_within(&mut self, limit: Duration) {
        self.log.tick(self.now_ms(), &mut self.late);
        self.post();
        let Ok(up) = self.ups.recv_timeout(limit) else { return };
        match up {
            DeviceEvent::Note(note) => self.notes.push(note),
            DeviceEvent::Recovered(found) => self.log.recovered(&found, |digest, _| {
                assert_eq!(digest, NAMESPACE);
                Some(0)
            }),
            DeviceEvent::Done(done) => match self.log.done(self.now_ms(), done) {
                Some(EndedJob::Written { slot, ok }) => {
                    let number = self.writing.remove(&slot.generation).unwrap();
                    self.ended.insert(number, ok);
                    self.free.push(slot);
                }
                Some(EndedJob::Read { ticket, slot, ok, key }) => {
                    self.log.came(&key);
                    let (number, _) = self.reading[&ticket];
                    self.reading.insert(ticket, (number, slot));
                    self.ended.insert(number, ok);
                }
                None => {}
            },
        }
        self.post();
    }

    pub(crate) fn wait(&mut self, what: &str, mut holds: impl FnMut(&Self) -> bool) {
        let until = self.began.elapsed() + WATCHDOG;
        while !holds(self) {
            assert!(self.began.elapsed() < until, "{what} did not come: {:?}", self.stats());
            self.pump();
        }
    }

    /// Waits until all blocks of earlier lives were read.
    pub(crate) fn recover(&mut self) {
        self.wait("recovery", |rig| rig.stats().devices.iter().all(|device| !device.recovering));
    }

    pub(crate) fn settle(&mut self) {
        self.wait("an end of all jobs", |rig| !rig.log.busy());
    }

    fn fill(&self, number: u64, bytes: u64, slot: SlotRef) {
        let words = self.pool.words64(slot.offset as usize, (bytes / 8) as usize);
        for (at, place) in words.iter().enumerate() {
            place.store(word(number, at as u64), Ordering::Relaxed);
        }
    }

    fn holds(&self, number: u64, bytes: u64, slot: SlotRef) -> bool {
        let words = self.pool.words64(slot.offset as usize, (bytes / 8) as usize);
        words.iter().enumerate().all(|(at, place)| place.load(Ordering::Relaxed) == word(number, at as u64))
    }

    /// Begins to write a block; fails if the log refuses it.
    pub(crate) fn begin_write(&mut self, number: u64, bytes: u64) -> Result<(), LogRefusal> {
        self.wait("a free slot", |rig| !rig.free.is_empty());
        let slot = self.free.pop().unwrap();
        self.fill(number, bytes, slot);
        let block = Leaving::copy(key(number), bytes);
        let has_room =
            !self.makes_room || self.keeps(number) || self.log.make_room(&block, self.dram.judge());
        let taken =
            if has_room { self.log.write_block(&block, NAMESPACE, slot) } else { Err(LogRefusal::Busy) };
        match taken {
            Ok(_) => drop(self.writing.insert(slot.generation, number)),
            Err(_) => self.free.push(slot),
        }
        self.post();
        taken.map(drop)
    }

    /// True if a block can be found.
    pub(crate) fn keeps(&self, number: u64) -> bool {
        self.log.keeps(&key(number)).is_some()
    }

    /// Returns the first device's faults of a kind.
    pub(crate) fn faults(&self, kind: FaultKind) -> u64 {
        self.stats().devices[0].faults[kind as usize]
    }

    /// Writes a block, trying again while the tier is busy. Returns true if it is kept.
    pub(crate) fn write(&mut self, number: u64, bytes: u64) -> bool {
        loop {
            match self.begin_write(number, bytes) {
                Ok(()) => break,
                Err(LogRefusal::Busy) => self.pump(),
                Err(refused) => panic!("{number}: {refused}"),
            }
        }
        self.end_of(number)
    }

    fn end_of(&mut self, number: u64) -> bool {
        self.wait("a job's end", |rig| rig.ended.contains_key(&number));
        self.ended.remove(&number).unwrap()
    }

    /// Returns the blocks whose writes ended since the last call, each with true if it is kept.
    pub(crate) fn take_ended(&mut self) -> Vec<(u64, bool)> {
        self.ended.drain().collect()
    }

    /// Reads a block. Returns false if it is not there. Panics on wrong bytes.
    pub(crate) fn read(&mut self, number: u64) -> bool {
        let right = self.read_unchecked(number);
        assert!(right != Some(false), "wrong bytes of block {number}");
        right.is_some()
    }

    /// Reads a block. Returns `None` if it is not there, otherwise true if its bytes are the written ones.
    pub(crate) fn read_unchecked(&mut self, number: u64) -> Option<bool> {
        let bytes = self.log.keeps(&key(number))?;
        self.wait("a free slot", |rig| !rig.free.is_empty());
        let ticket = self.begin_read(number, bytes)?;
        self.post();
        let ok = self.end_of(number);
        let (_, slot) = self.reading.remove(&ticket).unwrap();
        let right = ok.then(|| self.holds(number, bytes.into(), slot));
        self.free.push(slot);
        right
    }

    /// Begins to read a block into a free slot; no job is posted.
    pub(crate) fn begin_read(&mut self, number: u64, bytes: u32) -> Option<Ticket> {
        let slot = self.free.pop().unwrap();
        self.fill(!number, bytes.into(), slot);
        let ticket = self.log.read_block(0, &key(number), slot, 1);
        match ticket {
            Some(ticket) => drop(self.reading.insert(ticket, (number, slot))),
            None => self.free.push(slot),
        }
        self.ended.remove(&number);
        ticket
    }
}
