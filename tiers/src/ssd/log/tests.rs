//! The log over model devices. They carry jobs out in any order, fail at will, and check the soundness of
//! each job.

mod room;

use std::collections::BTreeMap;

use rustix::io::Errno;
use shm_protocol::random::Random;

use super::volume::STREAMED_MIN;
use super::*;
use crate::dram::{self, Dram, Judge, Leaving, QuotaId};
use crate::ssd::{EndedJob, JobDone, JobFault, Recovered, format};
use crate::standing::Sort;

const UNIT: u64 = 4096;
const SEGMENT: u64 = 16 * UNIT;
const SEGMENTS: u32 = 6;
/// Keys for each segment: more than fit.
const KEYS: u64 = 10;

/// A device with its written blocks, by segment.
#[derive(Default)]
struct Model {
    /// Sequence, true once it was sealed, and blocks by unit.
    segments: BTreeMap<u32, (u64, bool, BTreeMap<u32, Label>)>,
    sequence: u64,
}

/// A log, its devices, and issued jobs.
struct World {
    random: Random,
    log: SegmentLog,
    segments: u32,
    models: Vec<Model>,
    jobs: Vec<DeviceJob>,
    /// Slots owned by jobs, and the key of each.
    slots: BTreeMap<u64, BlockKey>,
    next_slot: u64,
    now_ms: u64,
    life: u64,
    failing: bool,
}

fn digest(namespace: u32) -> NamespaceDigest {
    NamespaceDigest([namespace as u8 + 1; 16])
}

fn key(number: u64) -> BlockKey {
    let hash = BlockHash::from_words([number, 0, 0, 0]);
    BlockKey { namespace: number as u32 % 3, group: number as u32 % 2, hash }
}

/// A block has the same number of bytes at every write.
fn bytes(key: &BlockKey) -> u64 {
    (key.hash.words()[0] * 3571) % (5 * UNIT) + 1
}

fn copy_of(key: BlockKey) -> Leaving {
    Leaving::copy(key, bytes(&key))
}

fn config(devices: usize, segments: u32, life: u64) -> LogConfig {
    let geometry =
        DeviceGeometry { unit_bytes: UNIT, segment_bytes: SEGMENT, segments, first_sequence: life << 32 };
    LogConfig { devices: vec![geometry; devices], write_bytes_max: 8 * UNIT, late_ms: 1_000 }
}

// === impl Model ===

impl Model {
    /// Writes a block after checks: into an open segment, over no other block, with room left for the footer.
    fn put(&mut self, place: DevicePlace, sequence: u64, label: Label) {
        let (begun, sealed, blocks) = self.segments.get_mut(&place.segment).expect("begun");
        assert!(*begun == sequence && !*sealed, "written where nothing may be");
        let end = place.unit + format::block_units(label.bytes, UNIT);
        let footer = format::footer_units(blocks.len() as u32 + 1, UNIT);
        assert!(place.unit >= 1 && u64::from(end + footer) <= SEGMENT / UNIT);
        for (unit, other) in blocks.iter() {
            let other_end = unit + format::block_units(other.bytes, UNIT);
            assert!(end <= *unit || other_end <= place.unit, "over another block");
        }
        blocks.insert(place.unit, label);
    }

    fn get(&self, place: DevicePlace, sequence: u64, label: Label) {
        let (begun, _, blocks) = &self.segments[&place.segment];
        assert_eq!((*begun, blocks.get(&place.unit)), (sequence, Some(&label)), "read what is not there");
    }

    fn carry_out(&mut self, work: DeviceWork) {
        match work {
            DeviceWork::Begin { segment, sequence } => {
                assert!(sequence > self.sequence, "a sequence is given out once");
                self.sequence = sequence;
                self.segments.insert(segment, (sequence, false, BTreeMap::new()));
            }
            DeviceWork::Write { place, sequence, label, .. } => self.put(place, sequence, label),
            DeviceWork::Read { place, sequence, label, .. } => self.get(place, sequence, label),
            DeviceWork::Move { from, from_sequence, to, to_sequence, label } => {
                self.get(from, from_sequence, label);
                self.put(to, to_sequence, label);
            }
            DeviceWork::Seal { segment, sequence } => {
                let found = self.segments.get_mut(&segment).expect("begun");
                assert_eq!(found.0, sequence);
                found.1 = true;
            }
            DeviceWork::Check | DeviceWork::GiveUp | DeviceWork::Distrust { .. } => {}
        }
    }
}

/// Returns the segments a job needs unchanged.
fn needs(work: &DeviceWork) -> Vec<u32> {
    match *work {
        DeviceWork::Begin { segment, .. } | DeviceWork::Seal { segment, .. } => vec![segment],
        DeviceWork::Write { place, .. } | DeviceWork::Read { place, .. } => vec![place.segment],
        DeviceWork::Move { from, to, .. } => vec![from.segment, to.segment],
        DeviceWork::Check | DeviceWork::GiveUp | DeviceWork::Distrust { .. } => Vec::new(),
    }
}

// === impl World ===

impl World {
    fn new(seed: u64, devices: usize) -> Self {
        Self::with_segments(seed, devices, SEGMENTS)
    }

    fn with_segments(seed: u64, devices: usize, segments: u32) -> Self {
        let mut world = Self {
            random: Random(seed),
            log: SegmentLog::new(config(devices, segments, 1)),
            segments,
            models: (0..devices).map(|_| Model::default()).collect(),
            jobs: Vec::new(),
            slots: BTreeMap::new(),
            next_slot: 0,
            now_ms: 0,
            life: 1,
            failing: true,
        };
        world.recover();
        world
    }

    /// Takes the log's jobs, and checks that no segment is begun or sealed under another job.
    fn take_jobs(&mut self) {
        for job in self.log.drain_jobs() {
            let others = self.jobs.iter().filter(|other| other.device == job.device);
            if let DeviceWork::Begin { segment, .. } = job.work {
                assert!(others.clone().all(|other| !needs(&other.work).contains(&segment)), "{job:?}");
            }
            if let DeviceWork::Seal { segment, .. } = job.work {
                let writes = others.filter(|other| !matches!(other.work, DeviceWork::Read { .. }));
                assert!(writes.clone().all(|other| !needs(&other.work).contains(&segment)), "{job:?}");
            }
            self.jobs.push(job);
        }
    }

    fn slot(&mut self) -> SlotRef {
        self.next_slot += 1;
        SlotRef { offset: self.next_slot, generation: 0 }
    }

    fn keys(&self) -> u64 {
        u64::from(self.segments) * KEYS
    }

    fn any_key(&mut self) -> BlockKey {
        key(self.random.below(self.keys()))
    }

    fn write(&mut self) {
        let number = self.random.below(self.keys());
        self.write_block(number);
    }

    /// Tells the log of a block's coming or leaving, or makes room for it.
    fn judge(&mut self, judge: Judge<'_>) {
        let (key, standing) = (self.any_key(), Standing::new(Sort::of_turn(0, 1), 0));
        match self.random.below(4) {
            0 => self.log.leave_dram(&key, standing),
            1 => drop(self.log.came(&key)),
            _ => drop(self.log.make_room(&Leaving { standing, ..copy_of(key) }, judge)),
        }
    }

    fn write_block(&mut self, number: u64) {
        let key = key(number);
        let slot = self.slot();
        let kept = self.log.keeps(&key).is_some();
        match self.log.write_block(&copy_of(key), digest(key.namespace), slot) {
            Ok(_) => drop(self.slots.insert(slot.offset, key)),
            Err(refused) => assert!(!kept || refused == LogRefusal::Present, "{refused}"),
        }
        self.take_jobs();
    }

    /// Writes the first block until it is kept; no job fails from then on.
    fn keep_block_0(&mut self) {
        self.failing = false;
        while self.log.keeps(&key(0)).is_none() {
            self.write_block(0);
            self.carry_out();
        }
        self.settle();
    }

    fn remove(&mut self) {
        let key = self.any_key();
        let kept = self.log.keeps(&key).is_some();
        assert!(self.log.remove(&key) || !kept);
        assert_eq!((self.log.keeps(&key), self.log.remove(&key)), (None, false));
    }

    fn read(&mut self) {
        let key = key(self.random.below(self.keys() / 4));
        let slot = self.slot();
        let kept = self.log.keeps(&key);
        assert!(kept.is_none_or(|kept| u64::from(kept) == bytes(&key)));
        assert_eq!(self.log.probe(key.namespace, key.group, &[key.hash]), usize::from(kept.is_some()));
        let begun = self.log.read_block(self.now_ms, &key, slot, 1).is_some();
        assert_eq!(begun, kept.is_some());
        if begun {
            self.slots.insert(slot.offset, key);
        }
        self.take_jobs();
    }

    /// Carries out any of the jobs, perhaps badly.
    fn carry_out(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        let at = self.random.below(self.jobs.len() as u64) as usize;
        let job = self.jobs.swap_remove(at);
        let result = match self.random.below(40) {
            0 if self.failing => Err(JobFault::Io(Errno::IO)),
            1 if self.failing => Err(JobFault::Corrupt("header")),
            _ => {
                self.models[job.device].carry_out(job.work);
                Ok(())
            }
        };
        let done = JobDone { device: job.device, ticket: job.ticket, micros: 1, result };
        match (self.log.done(self.now_ms, done), job.work) {
            (Some(EndedJob::Written { slot, ok }), DeviceWork::Write { from, .. }) => {
                assert!(slot.offset == from && ok == result.is_ok());
                assert!(self.slots.remove(&from).is_some(), "a slot ends once");
            }
            (Some(EndedJob::Read { slot, ok, key, ticket }), DeviceWork::Read { into, .. }) => {
                assert!(slot.offset == into && ok == result.is_ok() && ticket == job.ticket);
                assert_eq!(self.slots.remove(&into), Some(key), "a slot ends once");
            }
            (
                None,
                DeviceWork::Begin { .. }
                | DeviceWork::Seal { .. }
                | DeviceWork::Move { .. }
                | DeviceWork::Check
                | DeviceWork::GiveUp
                | DeviceWork::Distrust { .. },
            ) => {}
            (ended, work) => panic!("{work:?} ended as {ended:?}"),
        }
        self.take_jobs();
    }

    /// Writes a block of one unit as the sidecar does: room is made first.
    fn write_with_room(&mut self, number: u64, judge: Judge<'_>) {
        let (key, slot) = (key(number), self.slot());
        let block = Leaving::copy(key, UNIT);
        assert!(self.log.make_room(&block, judge));
        while self.log.write_block(&block, digest(key.namespace), slot) == Err(LogRefusal::Busy) {
            self.take_jobs();
            self.tick();
            self.carry_out();
        }
        self.slots.insert(slot.offset, key);
        self.end_jobs();
    }

    /// Carries out every job, and those that follow.
    fn end_jobs(&mut self) {
        self.take_jobs();
        while !self.jobs.is_empty() {
            self.carry_out();
        }
    }

    fn tick(&mut self) {
        self.now_ms += self.random.below(300);
        let mut late = Vec::new();
        self.log.tick(self.now_ms, &mut late);
        for ticket in late {
            assert!(self.jobs.iter().any(|job| job.ticket == ticket), "late, and not ended");
        }
        self.take_jobs();
    }

    /// Kills the sidecar with its jobs in flight, and starts another one over the disks.
    fn restart(&mut self) {
        self.jobs.clear();
        self.slots.clear();
        self.life += 1;
        self.log = SegmentLog::new(config(self.models.len(), self.segments, self.life));
        self.recover();
    }

    fn recover(&mut self) {
        for (device, model) in self.models.iter().enumerate() {
            let mut found: Vec<_> = model.segments.iter().collect();
            found.sort_by_key(|(_, (sequence, ..))| std::cmp::Reverse(*sequence));
            let last = Recovered {
                device,
                segment: 0,
                sequence: 0,
                blocks: Vec::new(),
                unreadable: false,
                segments_read: 0,
                last: true,
            };
            for (&segment, &(sequence, _, ref blocks)) in found {
                let blocks = blocks.iter().map(|(unit, label)| (*unit, *label)).collect();
                self.log.recovered(&Recovered { segment, sequence, blocks, last: false, ..last }, number);
            }
            self.log.recovered(&last, number);
        }
        self.take_jobs();
    }

    /// Lets all jobs end well; then the counters match the findable blocks.
    fn settle(&mut self) {
        self.failing = false;
        for _ in 0..10_000 {
            self.now_ms += 60_000;
            self.tick();
            self.end_jobs();
            if !self.log.busy() && self.log.log_stats().devices.iter().all(|device| !device.down) {
                break;
            }
        }
        self.failing = true;
        assert!(!self.log.busy() && self.slots.is_empty());
        let stats = self.log.log_stats();
        assert!(stats.devices.iter().all(|device| !device.down), "{stats:?}");
        let found: Vec<u64> =
            (0..self.keys()).filter_map(|number| self.log.keeps(&key(number))).map(u64::from).collect();
        let bytes: u64 = stats.devices.iter().map(|device| device.bytes).sum();
        assert_eq!((stats.blocks, bytes), (found.len() as u64, found.iter().sum()));
    }
}

fn number(digest: NamespaceDigest, _: u32) -> Option<u32> {
    Some(u32::from(digest.0[0]) - 1)
}

#[test]
fn whatever_happens_every_job_is_sound() {
    let mut happened = [0; 4];
    for seed in 0..60 {
        eprintln!("seed {seed}");
        let segments = if seed % 4 == 3 { STREAMED_MIN } else { SEGMENTS };
        let mut world = World::with_segments(seed, 1 + seed as usize % 3, segments);
        let (dram, _) = below(&mut world);
        world.failing = true;
        for round in 0..2_000 {
            match world.random.below(20) {
                0..=5 => {
                    world.write();
                    world.judge(dram.judge());
                }
                6..=8 => world.read(),
                9..=17 => world.carry_out(),
                18 => world.tick(),
                _ if round % 31 == 0 => (0..8).for_each(|_| world.tick()),
                _ if round % 7 == 0 => world.remove(),
                _ if round % 97 == 0 => world.restart(),
                _ => {}
            }
        }
        world.settle();
        for device in &world.log.log_stats().devices {
            let (moved, dropped) = (device.moved_blocks_total, device.dropped_blocks_total);
            let counts = [moved, dropped, device.trips_total, device.recovered_blocks_total];
            happened.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
    }
    assert!(happened.iter().all(|count| *count >= 50), "{happened:?}");
}

/// Steps in which a log makes room, if it ever does: some for each of its units.
const STEPS: usize = 500;

impl World {
    /// Takes up to [`STEPS`] steps. Returns false if these were too few.
    fn steps_until(&mut self, mut over: impl FnMut(&mut Self) -> bool) -> bool {
        (0..STEPS).any(|_| {
            let is_over = over(self);
            self.take_jobs();
            self.carry_out();
            is_over
        })
    }
}

/// A reclamation moves at most seven eighths of a segment and needs at least an eighth of gone units, and
/// only writes make units gone. So at most seven units move for each written one.
#[test]
fn every_block_is_taken_in_the_end_and_seven_units_move_for_one_at_most() {
    let mut moved_units = 0;
    // A segment has 14 units for blocks; blocks of 8 leave 6 empty, and no move gains these.
    for sizes in [&[8][..], &[2], &[5], &[13], &[3, 9], &[2, 4, 11]] {
        for (makes_room, segments) in [(true, SEGMENTS), (false, SEGMENTS), (true, STREAMED_MIN)] {
            let mut world = World::with_segments(6, 1, segments);
            let (dram, _) = below(&mut world);
            for number in (0..1_800).step_by(6) {
                let units = sizes[world.random.below(sizes.len() as u64) as usize];
                let (bytes, slot) = ((units - 1) * UNIT, world.slot());
                let block = Leaving::copy(key(number), bytes);
                assert!(!makes_room || world.log.make_room(&block, dram.judge()));
                world.slots.insert(slot.offset, key(number));
                let taken = |world: &mut World| world.log.write_block(&block, digest(0), slot).is_ok();
                assert!(world.steps_until(taken), "blocks of {sizes:?} move round and round");
                let turn = 1 + world.random.below(4) as u8;
                assert!(world.steps_until(|world| world.jobs.is_empty()), "moves of {sizes:?} do not end");
                world.log.leave_dram(&key(number), Standing::new(Sort::of_turn(0, turn), 0));
            }
            let device = &world.log.log_stats().devices[0];
            let moved = device.moved_bytes_total / UNIT + device.moved_blocks_total;
            let written = device.written_bytes_total / UNIT + device.written_blocks_total;
            assert!(moved <= 7 * written, "{sizes:?}: {moved} units moved for {written}");
            moved_units += moved;
        }
    }
    assert!(moved_units > 0);
}

/// DRAM with a quota of a quarter, over a log of one device.
fn below(world: &mut World) -> (Dram, QuotaId) {
    let config = dram::DramConfig { pool_bytes: 8 << 20, segment_bytes: 2 << 20, lease_ttl_ms: 1 };
    let mut dram = Dram::new(config).unwrap();
    let quota = dram.add_quota(2 << 20);
    world.failing = false;
    world.log.put_below(&mut dram);
    (dram, quota)
}

#[test]
fn a_block_on_a_device_that_is_down_is_written_to_another() {
    let mut world = World::new(3, 2);
    world.failing = false;
    let block = key(6);
    while world.log.keeps(&block).is_none() {
        let slot = world.slot();
        if world.log.write_block(&Leaving::copy(block, 100), digest(0), slot).is_ok() {
            world.slots.insert(slot.offset, block);
        }
        world.take_jobs();
        world.carry_out();
    }
    world.settle();
    let holder = world.log.log_stats().devices.iter().position(|device| device.blocks == 1).unwrap();
    world.log.volumes[holder].breaker.trip(world.now_ms);
    assert_eq!((world.log.keeps(&block), world.log.probe(0, 0, &[block.hash])), (None, 0));
    let slot = world.slot();
    assert!(world.log.read_block(world.now_ms, &block, slot, 1).is_none());
    world.log.write_block(&Leaving::copy(block, 100), digest(0), slot).unwrap();
    world.slots.insert(slot.offset, block);
    world.end_jobs();
    assert_eq!(world.log.keeps(&block), Some(100));
    assert_eq!(world.log.log_stats().devices[1 - holder].blocks, 1);
    assert_eq!(world.log.write_block(&Leaving::copy(block, 100), digest(0), slot), Err(LogRefusal::Present));
    assert_eq!(
        world.log.write_block(&Leaving::copy(key(7), SEGMENT), digest(1), slot),
        Err(LogRefusal::TooLarge)
    );
    world.log.volumes[1 - holder].breaker.trip(world.now_ms);
    assert_eq!(world.log.write_block(&Leaving::copy(key(7), 100), digest(1), slot), Err(LogRefusal::Down));
}

#[test]
fn a_late_read_is_told_once_and_its_slot_comes_back_with_its_end() {
    let mut world = World::new(4, 1);
    world.keep_block_0();
    let slot = world.slot();
    let ticket = world.log.read_block(world.now_ms, &key(0), slot, 1).unwrap();
    world.slots.insert(slot.offset, key(0));
    world.take_jobs();
    let mut late = Vec::new();
    world.log.tick(world.now_ms + 500, &mut late);
    world.log.tick(world.now_ms + 999, &mut late);
    assert!(late.is_empty());
    world.log.tick(world.now_ms + 1_000, &mut late);
    world.log.tick(world.now_ms + 1_001, &mut late);
    assert_eq!(late, [ticket]);
    assert_eq!(world.log.log_stats().devices[0].faults[FaultKind::Late as usize], 1);
    assert_eq!(world.log.keeps(&key(0)), None, "its device is down");
    world.carry_out();
    assert!(world.slots.is_empty());
    world.settle();
    assert!(world.log.keeps(&key(0)).is_some());
}

#[test]
fn what_would_be_read_too_late_is_refused_until_others_have_ended() {
    let mut world = World::new(5, 1);
    world.keep_block_0();
    // Three quarters of 1 GiB were read, in 15 s.
    const QUARTER: u64 = 256 << 20;
    let pace = &mut world.log.volumes[0].pace;
    (0..4).for_each(|_| pace.began(QUARTER, 0));
    [5_000, 10_000, 15_000].into_iter().for_each(|ms| pace.end_read(QUARTER, true, ms));
    let slot = world.slot();
    assert!(world.log.read_block(world.now_ms, &key(0), slot, 1).is_none());
    assert_eq!(world.log.keeps(&key(0)), Some(bytes(&key(0)) as u32), "it is kept nevertheless");
    assert_eq!(world.log.log_stats().devices[0].refused_reads_total, 1);
    world.log.volumes[0].pace.end_read(QUARTER, true, 20_000);
    assert!(world.log.read_block(world.now_ms, &key(0), slot, 1).is_some());
}

#[test]
fn what_a_device_that_fails_was_not_given_yet_comes_back_and_is_found_again() {
    let mut world = World::new(7, 1);
    let (dram, _) = below(&mut world);
    world.failing = false;
    (0..8).for_each(|number| world.write_with_room(number * 6, dram.judge()));
    world.settle();
    for number in 0..8 {
        let slot = world.slot();
        world.log.read_block(world.now_ms, &key(number * 6), slot, 1).unwrap();
    }
    world.take_jobs();
    let gives_up = |job: &DeviceJob| job.work == DeviceWork::GiveUp;
    let reads: Vec<DeviceJob> = std::mem::take(&mut world.jobs);
    let end = |world: &mut World, job: &DeviceJob, fault| {
        let done = JobDone { device: 0, ticket: job.ticket, micros: 1, result: Err(fault) };
        assert!(matches!(world.log.done(world.now_ms, done), Some(EndedJob::Read { ok: false, .. })));
        world.take_jobs();
    };
    reads[..4].iter().for_each(|job| end(&mut world, job, JobFault::Io(Errno::IO)));
    assert!(world.log.log_stats().devices[0].down);
    assert_eq!(world.jobs.iter().filter(|job| gives_up(job)).count(), 1);
    end(&mut world, &reads[4], JobFault::Io(Errno::IO));
    reads[5..].iter().for_each(|job| end(&mut world, job, JobFault::Stopped));
    assert_eq!(world.jobs.iter().filter(|job| gives_up(job)).count(), 1, "once for each time that it fails");
    world.settle();
    let kept = (0..8).filter(|number| world.log.keeps(&key(number * 6)).is_some());
    assert_eq!(kept.collect::<Vec<_>>(), [5, 6, 7]);
}

#[test]
fn a_device_is_broken_once_it_stands_still_not_while_its_queue_is_long() {
    let mut world = World::new(7, 1);
    world.failing = false;
    let (dram, _) = below(&mut world);
    (0..8).for_each(|number| world.write_with_room(number * 6, dram.judge()));
    world.settle();
    world.failing = false;
    for number in 0..8 {
        let slot = world.slot();
        world.log.read_block(world.now_ms, &key(number * 6), slot, 1).unwrap();
        world.slots.insert(slot.offset, key(number * 6));
    }
    world.take_jobs();
    let mut late = Vec::new();
    let mut later = |world: &mut World| {
        world.now_ms += 400;
        world.log.tick(world.now_ms, &mut late);
        world.log.log_stats().devices[0].down
    };
    for _ in 0..6 {
        assert!(!later(&mut world), "it ends a job every 400 ms");
        world.carry_out();
    }
    assert!(!later(&mut world) && !later(&mut world));
    world.now_ms += 10_000;
    assert!(!later(&mut world), "this process stood still");
    assert!(!later(&mut world) && !later(&mut world) && later(&mut world));
    assert!(!late.is_empty() && world.log.log_stats().devices[0].faults[FaultKind::Late as usize] == 1);
}

#[test]
fn what_could_not_be_read_is_written_over_after_all_that_could() {
    let mut log = SegmentLog::new(config(1, SEGMENTS, 2));
    let found = Recovered {
        device: 0,
        segment: 0,
        sequence: 0,
        blocks: Vec::new(),
        unreadable: true,
        segments_read: 4,
        last: false,
    };
    // All blocks of one namespace, and a part of another.
    let label = |number| Label { namespace: digest(0), group: 0, hash: key(number).hash, bytes: 100 };
    log.recovered(&Recovered { segment: 1, ..found.clone() }, number);
    log.recovered(
        &Recovered { segment: 3, sequence: 1, blocks: vec![(1, label(0))], ..found.clone() },
        number,
    );
    for (segment, sequence) in [(0, 2), (2, 3), (4, 4), (5, 5)] {
        let blocks = vec![(1, label(u64::from(segment) * 6 + 6))];
        let whole = Recovered { segment, sequence, blocks, unreadable: false, ..found.clone() };
        log.recovered(&whole, number);
    }
    log.recovered(&Recovered { unreadable: false, last: true, ..found }, number);
    let mut begun = Vec::new();
    for number in 0..200 {
        let (key, slot) = (key(1000 + number * 6), SlotRef { offset: number, generation: 0 });
        let _ = log.write_block(&Leaving::copy(key, 4 * UNIT), digest(0), slot);
        let jobs: Vec<DeviceJob> = log.drain_jobs().collect();
        for job in jobs {
            if let DeviceWork::Begin { segment, .. } = job.work {
                begun.push(segment);
            }
            log.done(0, JobDone { device: 0, ticket: job.ticket, micros: 1, result: Ok(()) });
        }
    }
    assert_eq!(begun[..6], [0, 2, 4, 5, 1, 3]);
}

#[test]
fn what_could_not_be_read_is_written_over_before_what_this_life_has_written() {
    let mut log = SegmentLog::new(config(1, SEGMENTS, 2));
    let found = Recovered {
        device: 0,
        segment: 0,
        sequence: 0,
        blocks: Vec::new(),
        unreadable: true,
        segments_read: 6,
        last: false,
    };
    log.recovered(&Recovered { segment: 1, ..found.clone() }, number);
    let label = Label { namespace: digest(0), group: 0, hash: key(6).hash, bytes: 100 };
    let whole = Recovered { segment: 4, sequence: 1, blocks: vec![(1, label)], unreadable: false, ..found };
    log.recovered(&whole, number);
    log.recovered(&Recovered { blocks: Vec::new(), last: true, ..whole }, number);
    log.remove(&key(6));
    let mut begun = Vec::new();
    for number in 0..200 {
        let (key, slot) = (key(1000 + number * 6), SlotRef { offset: number, generation: 0 });
        let _ = log.write_block(&Leaving::copy(key, 4 * UNIT), digest(0), slot);
        for job in log.drain_jobs().collect::<Vec<DeviceJob>>() {
            if let DeviceWork::Begin { segment, .. } = job.work {
                begun.push(segment);
            }
            log.done(0, JobDone { device: 0, ticket: job.ticket, micros: 1, result: Ok(()) });
        }
        log.remove(&key);
    }
    assert_eq!(begun[..7], [0, 2, 3, 5, 4, 1, 0], "segments of this life have nothing left in them, too");
}

#[test]
fn of_two_copies_in_one_segment_the_later_is_found() {
    let mut log = SegmentLog::new(config(1, SEGMENTS, 1));
    let label = Label { namespace: digest(0), group: 0, hash: key(6).hash, bytes: 100 };
    let blocks = vec![(1, label), (3, label), (5, label)];
    let found = Recovered {
        device: 0,
        segment: 2,
        sequence: 1,
        blocks,
        unreadable: false,
        segments_read: 6,
        last: true,
    };
    log.recovered(&found, number);
    log.read_block(0, &key(6), SlotRef { offset: 0, generation: 1 }, 1).unwrap();
    let work = log.drain_jobs().last().unwrap().work;
    assert!(matches!(work, DeviceWork::Read { place: DevicePlace { segment: 2, unit: 5 }, .. }), "{work:?}");
}

#[test]
fn blocks_of_a_namespace_that_began_anew_are_moved_nowhere() {
    let mut world = World::new(8, 1);
    let (dram, _) = below(&mut world);
    world.write_with_room(0, dram.judge());
    world.log.distrust(0, digest(0), true);
    for number in 0..200 {
        world.write_with_room(number * 6 + 1, dram.judge());
        if number % 20 > 0 {
            world.log.remove(&key(number * 6 + 1));
        }
    }
    assert!(world.log.keeps(&key(0)).is_none());
    let first = world.log.keeps(&key(1));
    assert!(
        first.is_some() && world.log.log_stats().devices[0].moved_blocks_total > 0,
        "its neighbour was moved"
    );
}

#[test]
fn a_device_is_told_of_one_distrusted_namespace_at_a_time_and_again_until_it_is_written() {
    let mut world = World::new(9, 1);
    world.failing = false;
    let told = |world: &mut World| -> Vec<NamespaceDigest> {
        world.take_jobs();
        let told = world.jobs.iter().filter_map(|job| match job.work {
            DeviceWork::Distrust { namespace, .. } => Some(namespace),
            _ => None,
        });
        told.collect()
    };
    world.log.distrust(0, digest(0), false);
    world.log.distrust(1, digest(1), false);
    assert_eq!(told(&mut world), [digest(0)]);
    let mut now_ms = 0;
    for _ in 0..8 {
        let job = world.jobs.pop().unwrap();
        let result = Err(JobFault::Io(Errno::IO));
        assert!(
            world.log.done(now_ms, JobDone { device: 0, ticket: job.ticket, micros: 1, result }).is_none()
        );
        now_ms += 1_000;
        world.log.tick(now_ms - 1, &mut Vec::new());
        assert!(told(&mut world).is_empty() && world.log.busy(), "after a pause");
        world.log.tick(now_ms, &mut Vec::new());
        assert_eq!(told(&mut world), [digest(0)]);
    }
    assert!(!world.log.log_stats().devices[0].down, "blocks are written all the same");
    world.log.distrust(0, digest(0), true);
    world.carry_out();
    assert_eq!(told(&mut world), [digest(1)]);
    world.carry_out();
    assert_eq!(told(&mut world), [digest(0)], "what was said of it meanwhile");
    world.carry_out();
    assert!(told(&mut world).is_empty() && !world.log.busy());
}
