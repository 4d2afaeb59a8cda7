//! The rules of the SSD tier in the core, against the real tiers. A list of jobs, ended by the test, stands
//! for the devices.

mod score;
mod states;
mod streams;
mod worth;

use std::ops::Range;

use mesh::digest::Digest;
use mesh::directory::{Directory, Filter};
use mesh::transport::PeerNumber;
use shm_protocol::hints::Advice;
use shm_protocol::key::NamespaceDigest;
use shm_protocol::message::{LOAD_BY_ENGINE, Outcome, Status};
use shm_protocol::pool::SlotRef;
use shm_protocol::request::{LogKeys, Query, SchedulerRequest};
use shm_protocol::source::Source;
use tiers::dram::{self, Dram, HolderId};
use tiers::ssd::{DeviceGeometry, DeviceWork, JobFault, Label, LogConfig};

use super::*;
use crate::core::tests::announcements::Follower;
use crate::core::tests::checks::found;
use crate::core::tests::{Harness, NAMESPACE, RANKS, SCHEDULER, hash};
use crate::core::{Action, Core, CoreEvent, Findings, MeshEvent, Timed, TimedPart, arrivals, peer_tier};

/// Seven blocks to a segment of the pool.
const BLOCK_BYTES: u64 = 256 << 10;
const POOL_SEGMENT: u64 = 2 << 20;
const POOL_SEGMENTS: u64 = 4;
const DRAM_BLOCKS: u32 = 7 * POOL_SEGMENTS as u32;

/// An engine over a small pool and one device.
struct Scene {
    engine: Harness,
    jobs: VecDeque<ssd::DeviceJob>,
    op: u64,
    /// Slots of answers, by key of the log.
    refs: BTreeMap<u32, SlotRef>,
}

fn core(admission: SsdAdmission) -> Core {
    let pool_bytes = POOL_SEGMENT * POOL_SEGMENTS;
    let config = dram::DramConfig { pool_bytes, segment_bytes: POOL_SEGMENT, lease_ttl_ms: 10_000 };
    let geometry =
        DeviceGeometry { unit_bytes: 4096, segment_bytes: 4 << 20, segments: 64, first_sequence: 1 };
    let log =
        SegmentLog::new(LogConfig { devices: vec![geometry], write_bytes_max: 1 << 20, late_ms: 10_000 });
    Core::new(Dram::new(config).unwrap(), &[], [disk_tier(log, admission)])
}

impl Scene {
    fn new(admission: SsdAdmission) -> Self {
        let mut scene = Self::with(admission, Vec::new());
        // The first block finds no segment begun, waits for one, and is written; no test counts it.
        scene.save(5000..5001);
        scene.save(5000..5001);
        assert!(!scene.transfers() && scene.engine.core.busy());
        scene.end_all();
        assert_eq!((scene.stats().log.blocks, scene.engine.core.busy()), (1, false));
        scene
    }

    /// The same with blocks of an earlier life on the device.
    fn with(admission: SsdAdmission, blocks: Vec<(u32, Label)>) -> Self {
        let engine = Harness::over(core(admission), 1, BLOCK_BYTES);
        let mut scene = Self { engine, jobs: VecDeque::new(), op: 0, refs: BTreeMap::new() };
        let found = Recovered {
            device: 0,
            segment: 3,
            sequence: 0,
            blocks,
            unreadable: false,
            segments_read: 64,
            last: true,
        };
        scene.event(CoreEvent::Transferred { tier: 0, ends: vec![JobEnd::Recovered(found)] });
        scene.engine.join();
        scene
    }

    fn event(&mut self, event: CoreEvent) {
        self.engine.event(event);
        self.take_jobs();
    }

    fn ask(&mut self, request: SchedulerRequest) {
        self.engine.ask(request);
        self.take_jobs();
    }

    fn take_jobs(&mut self) {
        self.engine.out.retain(|action| match action {
            Action::Transfer { job: TierJob::Disk(job), .. } => {
                self.jobs.push_back(*job);
                false
            }
            _ => true,
        });
    }

    fn next_op(&mut self) -> u64 {
        self.op += 1;
        self.op
    }

    /// Saves `keys` under a log, and closes it. The caller ends the writes.
    fn save(&mut self, keys: Range<u32>) {
        let op = self.next_op();
        self.engine.save_done(op, keys);
        self.take_jobs();
        self.engine.copied();
        self.ask(SchedulerRequest::Close { log: 9, way: 0 });
    }

    /// The same, and ends the writes.
    fn write(&mut self, keys: Range<u32>) {
        self.save(keys);
        self.end_all();
    }

    /// Ends every job, and the jobs caused by it.
    fn end_all(&mut self) {
        while let Some(job) = self.jobs.pop_front() {
            self.end(job, Ok(()));
        }
    }

    fn end(&mut self, job: ssd::DeviceJob, result: Result<(), JobFault>) {
        let done = JobDone { device: 0, ticket: job.ticket, micros: 1, result };
        self.event(CoreEvent::Transferred { tier: 0, ends: vec![JobEnd::Disk(done)] });
    }

    fn end_well(&mut self, jobs: Vec<ssd::DeviceJob>) {
        jobs.into_iter().for_each(|job| self.end(job, Ok(())));
    }

    /// Takes the reads out of the jobs.
    fn reads(&mut self) -> Vec<ssd::DeviceJob> {
        let is_read = |job: &ssd::DeviceJob| matches!(job.work, DeviceWork::Read { .. });
        let reads = self.jobs.iter().copied().filter(is_read).collect();
        self.jobs.retain(|job| !is_read(job));
        reads
    }

    /// Fills DRAM with other blocks, until none of the earlier ones is left.
    fn flood(&mut self) {
        for from in (1000..1000 + 8 * DRAM_BLOCKS).step_by(7) {
            self.write(from..from + 7);
        }
    }

    /// A scene with blocks `keys` on the device and not in DRAM.
    fn on_ssd(keys: Range<u32>) -> Self {
        let mut scene = Self::new(SsdAdmission::All);
        scene.write(keys.clone());
        scene.flood();
        let base = &mut scene.engine.core.base;
        let space = Space { digest: NAMESPACE, block_bytes: BLOCK_BYTES };
        let namespace = base.cx.namespaces.adopt(space).unwrap();
        for key in keys {
            let key = BlockKey { namespace, group: 0, hash: hash(key) };
            let ssd: &Ssd = base.sources.tier().unwrap();
            assert_eq!(ssd.log.keeps(&key).map(u64::from), Some(BLOCK_BYTES));
            assert!(base.cx.dram.hold(&key, HolderId::NOBODY).is_none(), "it left DRAM");
        }
        scene.engine.out.clear();
        scene
    }

    fn query(&mut self, log: u32, keys: Range<u32>) -> u64 {
        self.engine.open(log, keys.clone());
        self.post_query(log, keys.len() as u32)
    }

    fn post_query(&mut self, log: u32, count: u32) -> u64 {
        let op = self.next_op();
        let query = Query::new(op, LogKeys::new(log, 0..count));
        self.ask(SchedulerRequest::Query(query));
        op
    }

    /// Returns the answers since the last look, each with its operation, and notes their slots.
    fn answers(&mut self) -> Vec<(u64, Status, u32)> {
        let mut answers = Vec::new();
        for action in std::mem::take(&mut self.engine.out) {
            match action {
                Action::Answer { op, outcome, refs, from, .. } => {
                    self.refs.extend((from..).zip(refs));
                    answers.push((op, outcome.status, outcome.value));
                }
                Action::Outcome { op, outcome: Outcome { status, value, .. }, .. } => {
                    answers.push((op, status, value));
                }
                _ => {}
            }
        }
        answers
    }

    fn leases(&self) -> u64 {
        self.engine.core.stats().leases
    }

    fn held_bytes(&self) -> u64 {
        self.engine.core.base.cx.dram.stats().bytes_leased
    }

    fn transfers(&self) -> bool {
        self.engine.core.base.sources.tier().is_some_and(Ssd::transfers)
    }

    fn stats(&self) -> SsdStats {
        self.engine.core.ssd_stats().unwrap()
    }
}

/// The first `count` blocks are on the device, and log 1 has asked for them.
fn asking(count: u32) -> (Scene, u64) {
    let mut scene = Scene::on_ssd(0..count);
    let op = scene.query(1, 0..count);
    (scene, op)
}

#[test]
fn a_saved_block_is_held_until_it_is_written() {
    let mut scene = Scene::new(SsdAdmission::All);
    scene.save(0..2);
    assert!(scene.engine.core.busy() && scene.transfers());
    assert_eq!(scene.held_bytes(), 2 * BLOCK_BYTES);
    scene.end_all();
    assert_eq!((scene.held_bytes(), scene.stats().log.blocks), (0, 3));
    assert!(!scene.engine.core.busy());
    scene.save(0..2);
    assert!(scene.jobs.is_empty(), "kept already");
}

#[test]
fn writes_wait_for_room_and_blocks_that_went_meanwhile_are_dropped() {
    let mut scene = Scene::new(SsdAdmission::All);
    scene.save(0..7);
    let held = scene.held_bytes();
    assert!((BLOCK_BYTES..7 * BLOCK_BYTES).contains(&held), "as many as the log takes: {held}");
    assert!(scene.stats().queued > 0);
    for from in (100..100 + 3 * DRAM_BLOCKS).step_by(7) {
        scene.save(from..from + 7);
    }
    scene.end_all();
    assert!(scene.stats().dropped_evicted > 0, "{:?}", scene.stats());
    assert!(!scene.engine.core.busy());
    assert_eq!(scene.held_bytes(), 0);
}

#[test]
fn a_read_and_the_wait_for_it_began_with_the_question() {
    let (mut scene, _) = asking(2);
    let since = scene.engine.now_ms;
    let reads = scene.reads();
    scene.engine.now_ms += 5;
    scene.end(reads[0], Ok(()));
    assert_eq!(scene.engine.took(), [(Timed::Read(Source::Disk), since)]);
    scene.end(reads[1], Ok(()));
    let (tier, whole) = (Timed::Query(TimedPart::Tier), Timed::Query(TimedPart::Whole));
    assert_eq!(scene.engine.took(), [(Timed::Read(Source::Disk), since), (tier, since), (whole, since)]);
}

#[test]
fn a_block_that_a_hint_has_read_was_found_on_a_disk_and_by_the_next_request_in_memory() {
    let mut scene = Scene::on_ssd(0..3);
    scene.write(0..1);
    scene.engine.open(1, 0..3);
    scene.ask(SchedulerRequest::Hint { keys: LogKeys::new(1, 0..3) });
    let reads = scene.reads();
    scene.end_well(reads);
    scene.engine.open(2, 0..3);
    for (log, found) in [(1, vec![Source::Memory, Source::Disk, Source::Disk]), (2, vec![])] {
        scene.engine.out.clear();
        scene.post_query(log, 3);
        let answer = scene.engine.out.iter().find_map(|action| match action {
            Action::Answer { outcome, sources, .. } => Some((outcome.status, outcome.value, sources)),
            _ => None,
        });
        assert_eq!(answer, Some((Status::Ok, 3, &found)));
    }
}

#[test]
fn a_prefetch_by_a_hint_brings_what_it_may_and_says_so() {
    let mut scene = Scene::on_ssd(0..3);
    scene.engine.open(1, 0..5);
    assert_eq!(scene.engine.advise(1, 900, 5, Advice::Prefetch), (Status::Absent, 3));
    scene.take_jobs();
    let reads = scene.reads();
    assert_eq!(reads.len(), 3);
    scene.end_well(reads);
    let op = scene.post_query(1, 3);
    assert_eq!(scene.answers().pop(), Some((op, Status::Ok, 3)));
    for part_keys in [1, 3, DRAM_BLOCKS] {
        let mut scene = Scene::on_ssd(0..DRAM_BLOCKS / 2);
        scene.engine.open(1, 0..DRAM_BLOCKS / 2);
        // An eighth of the pool, 28 blocks and a rest.
        let (place, blocks) = ((1, 900), DRAM_BLOCKS / 2);
        let brought = scene.engine.advise_as(place, blocks, Advice::Prefetch, false, part_keys);
        assert_eq!(brought, (Status::Clipped, 4));
    }
}

#[test]
fn a_query_waits_for_what_a_device_keeps_and_is_answered_once() {
    let mut scene = Scene::on_ssd(0..4);
    scene.write(0..2);
    scene.engine.out.clear();
    let op = scene.query(1, 0..6);
    assert_eq!(scene.answers(), [(op, Status::Pending, 2)]);
    assert_eq!((scene.refs.len(), scene.leases()), (2, 1), "blocks in DRAM are leased at once");
    let reads = scene.reads();
    assert_eq!(reads.len(), 2);
    scene.end(reads[1], Ok(()));
    assert!(scene.answers().is_empty());
    scene.end(reads[0], Ok(()));
    assert_eq!(scene.answers(), [(op, Status::Ok, 4)]);
    assert_eq!((scene.refs.len(), scene.leases()), (4, 1));
    assert_eq!(scene.held_bytes(), 4 * BLOCK_BYTES, "by the lease alone");
    scene.engine.load(1, 90, op, 0..4, LOAD_BY_ENGINE);
    scene.ask(SchedulerRequest::Close { log: 1, way: 0 });
    assert_eq!(scene.leases(), 1, "the load's");
    let stats = scene.engine.core.stats();
    assert_eq!((scene.stats().promoted_blocks, stats.waits, stats.waits_timed_out), (2, 1, 0));
}

#[test]
fn blocks_behind_the_gap_that_lie_in_dram_are_answered_too() {
    let mut scene = Scene::on_ssd(0..2);
    scene.write(2..4);
    scene.engine.out.clear();
    let op = scene.query(1, 0..5);
    assert_eq!(scene.answers(), [(op, Status::Pending, 0)]);
    assert_eq!(scene.held_bytes(), 2 * BLOCK_BYTES, "those behind the gap stay");
    let reads = scene.reads();
    scene.end_well(reads);
    assert_eq!(scene.answers(), [(op, Status::Ok, 4)]);
}

#[test]
fn a_read_that_fails_ends_the_run_there() {
    let (mut scene, op) = asking(3);
    let reads = scene.reads();
    scene.engine.out.clear();
    scene.end(reads[0], Ok(()));
    scene.end(reads[1], Err(JobFault::Corrupt("checksum")));
    assert!(scene.engine.out.iter().any(|action| matches!(action, Action::FreeSlot { .. })));
    scene.end(reads[2], Ok(()));
    assert_eq!(scene.answers(), [(op, Status::Ok, 1)]);
    let op = scene.post_query(1, 3);
    assert_eq!(scene.answers(), [(op, Status::Ok, 1)], "the log keeps it no longer");
}

#[test]
fn two_queries_share_a_read() {
    let mut scene = Scene::on_ssd(0..2);
    let ops = [scene.query(1, 0..2), scene.query(2, 0..2)];
    assert_eq!(scene.answers(), ops.map(|op| (op, Status::Pending, 0)));
    let reads = scene.reads();
    assert_eq!(reads.len(), 2);
    scene.end_well(reads);
    assert_eq!(scene.answers(), ops.map(|op| (op, Status::Ok, 2)));
    assert_eq!((scene.leases(), scene.held_bytes()), (2, 2 * BLOCK_BYTES));
}

#[test]
fn whoever_stops_waiting_leaves_the_blocks_in_dram_and_nothing_held() {
    let release = |scene: &mut Scene| scene.ask(SchedulerRequest::Release { log: 1 });
    let close = |scene: &mut Scene| scene.ask(SchedulerRequest::Close { log: 1, way: 0 });
    let salt = |scene: &mut Scene| scene.ask(SchedulerRequest::Salt { salt: [9; 16] });
    let hang_up = |scene: &mut Scene| scene.event(CoreEvent::Disconnected { session: SCHEDULER });
    let ways: [&dyn Fn(&mut Scene); 4] = [&release, &close, &salt, &hang_up];
    for (way, stop) in ways.into_iter().enumerate() {
        let (mut scene, _) = asking(3);
        let reads = scene.reads();
        scene.answers();
        scene.end(reads[0], Ok(()));
        stop(&mut scene);
        assert_eq!((scene.leases(), scene.held_bytes()), (0, 0), "{way}");
        assert!(scene.engine.core.busy(), "reads end by themselves");
        scene.end(reads[1], Ok(()));
        scene.end(reads[2], Ok(()));
        assert!(scene.answers().is_empty(), "{way}");
        assert_eq!((scene.held_bytes(), scene.stats().promoted_blocks), (0, 3), "{way}");
        assert!(!scene.engine.core.busy());
    }
}

#[test]
fn the_next_query_of_a_log_takes_over_the_reads() {
    let (mut scene, _) = asking(3);
    let op = scene.post_query(1, 2);
    let reads = scene.reads();
    assert_eq!(reads.len(), 3, "none is begun twice");
    scene.answers();
    scene.end(reads[0], Ok(()));
    scene.end(reads[1], Ok(()));
    assert_eq!(scene.answers(), [(op, Status::Ok, 2)]);
    scene.end(reads[2], Ok(()));
    assert!(scene.answers().is_empty());
}

#[test]
fn time_ends_a_wait_and_not_its_reads() {
    let (mut scene, op) = asking(2);
    let reads = scene.reads();
    scene.answers();
    scene.end(reads[0], Ok(()));
    scene.engine.now_ms += 2000;
    scene.event(CoreEvent::Tick);
    assert_eq!(scene.answers(), [(op, Status::Ok, 1)]);
    assert!(scene.transfers(), "the slot is the read's until it ends");
    scene.end(reads[1], Ok(()));
    let op = scene.post_query(1, 2);
    assert_eq!(scene.answers(), [(op, Status::Ok, 2)]);
}

#[test]
fn a_query_brings_in_a_part_of_the_pool_at_most() {
    let mut scene = Scene::new(SsdAdmission::All);
    for from in (0..28).step_by(7) {
        scene.write(from..from + 7);
    }
    scene.flood();
    scene.engine.out.clear();
    scene.engine.open(1, 0..28);
    let most = (POOL_SEGMENT * POOL_SEGMENTS / arrivals::PART / BLOCK_BYTES) as u32;
    scene.ask(SchedulerRequest::Hint { keys: LogKeys::new(1, 0..28) });
    let mut reads = scene.reads();
    assert_eq!(reads.len(), most as usize / 2, "a hint leaves room for others");
    let op = scene.post_query(1, 28);
    scene.answers();
    reads.extend(scene.reads());
    assert_eq!(reads.len(), most as usize);
    scene.end_well(reads);
    assert_eq!(scene.answers(), [(op, Status::Ok, most)]);
}

#[test]
fn a_hint_begins_the_reads_and_holds_nothing() {
    let mut scene = Scene::on_ssd(0..2);
    scene.engine.open(1, 0..2);
    scene.ask(SchedulerRequest::Hint { keys: LogKeys::new(1, 0..2) });
    scene.ask(SchedulerRequest::Hint { keys: LogKeys::new(1, 0..2) });
    let reads = scene.reads();
    assert_eq!((reads.len(), scene.held_bytes()), (2, 0));
    scene.end_well(reads);
    assert!(scene.answers().is_empty(), "a hint has no answer");
    let op = scene.post_query(1, 2);
    assert_eq!(scene.answers(), [(op, Status::Ok, 2)]);
}

#[test]
fn a_draining_sidecar_lets_nobody_wait_and_ends_its_transfers() {
    let (mut scene, op) = asking(1);
    scene.answers();
    scene.event(CoreEvent::Drain);
    assert_eq!(scene.answers(), [(op, Status::Ok, 0)]);
    assert!(scene.engine.core.busy());
    scene.end_all();
    assert!(!scene.engine.core.busy());
    scene.ask(SchedulerRequest::Hint { keys: LogKeys::new(1, 0..1) });
    assert!(scene.jobs.is_empty());
}

#[test]
fn second_hit_writes_what_was_offered_again_or_came_back() {
    let mut scene = Scene::new(SsdAdmission::SecondHit);
    scene.save(0..2);
    assert!(scene.jobs.is_empty() && !scene.engine.core.busy());
    scene.write(0..1);
    assert_eq!(scene.stats().log.blocks, 2);
    scene.flood();
    assert_eq!(scene.stats().log.blocks, 2);
    scene.write(1190..1192);
    assert_eq!(scene.stats().log.blocks, 4, "evicted not long ago");
}

#[test]
fn an_engine_is_told_what_lies_on_devices_that_work() {
    let (mut scene, mut follower) = (Scene::new(SsdAdmission::All), Follower::new());
    scene.write(0..3);
    follower.read(&mut scene.engine.core, 1000);
    assert_eq!(follower.check(&scene.engine.core, 0..6000), [4, 4]);
    scene.flood();
    follower.read(&mut scene.engine.core, 1000);
    let [memory, disk] = follower.check(&scene.engine.core, 0..6000);
    assert!(memory as u32 <= DRAM_BLOCKS && disk as u32 > 8 * DRAM_BLOCKS, "{memory} and {disk}");
    assert_eq!(follower.begun, 1);
    // A late read trips the device's breaker.
    scene.query(1, 0..3);
    for _ in 0..3 {
        scene.engine.now_ms += 4_000;
        scene.event(CoreEvent::Tick);
    }
    follower.read(&mut scene.engine.core, 1000);
    assert_eq!(follower.check(&scene.engine.core, 0..6000)[1], 0);
    assert_eq!(follower.begun, 2);
}

#[test]
fn blocks_of_earlier_lives_are_found_by_their_namespace() {
    let label = |namespace, n| Label { namespace, group: 0, hash: hash(n), bytes: BLOCK_BYTES as u32 };
    let units = |n: u32| 1 + n * 70;
    let other = NamespaceDigest([2; 16]);
    let blocks =
        vec![(units(0), label(NAMESPACE, 0)), (units(1), label(NAMESPACE, 1)), (units(2), label(other, 2))];
    let mut scene = Scene::with(SsdAdmission::All, blocks);
    let op = scene.query(1, 0..3);
    assert_eq!(scene.answers(), [(op, Status::Pending, 0)]);
    let reads = scene.reads();
    assert_eq!(reads.len(), 2, "the third is another namespace's");
    scene.end_well(reads);
    assert_eq!(scene.answers(), [(op, Status::Ok, 2)]);
}

#[test]
fn a_device_that_is_late_keeps_its_slot_and_nobody_waiting() {
    let (mut scene, op) = asking(1);
    scene.answers();
    let reads = scene.reads();
    for _ in 0..3 {
        scene.engine.now_ms += 4_000;
        scene.event(CoreEvent::Tick);
    }
    assert_eq!(scene.answers(), [(op, Status::Ok, 0)]);
    let op = scene.post_query(1, 1);
    assert_eq!(scene.answers(), [(op, Status::Ok, 0)], "it is not waited for again");
    assert!(scene.transfers());
    scene.end(reads[0], Ok(()));
    assert!(!scene.transfers());
}

#[test]
fn what_an_engine_saved_that_is_barred_goes_from_the_disk_and_does_not_come_back() {
    let mut scene = Scene::on_ssd(0..2);
    scene.write(2..4);
    scene.query(2, 0..2);
    assert_eq!(scene.answers(), [(scene.op, Status::Pending, 0)]);
    let reads = scene.reads();
    assert_eq!(reads.len(), 2, "both are on their way");
    let op = scene.next_op();
    scene.engine.open(3, 2..4);
    scene.engine.post_save(3, op, 0..2, true);
    scene.engine.fences(RANKS[0], op, op);
    scene.engine.copied();
    let save = scene.engine.comparison().expect("kept").save;
    scene.event(CoreEvent::Inspected { save, findings: Findings::Compared(found(1)) });
    scene.end_well(reads);
    scene.end_all();
    assert_eq!((scene.stats().log.blocks, scene.engine.core.stats().blocks), (0, 0));
    scene.event(CoreEvent::Tick);
    assert_eq!((scene.engine.core.stats().pool_used_bytes, scene.engine.core.busy()), (0, false));
}

#[test]
fn at_its_end_a_sidecar_writes_what_memory_has() {
    let mut scene = Scene::new(SsdAdmission::SecondHit);
    scene.save(0..3);
    assert!(scene.jobs.is_empty());
    scene.event(CoreEvent::Drain);
    assert!(!scene.engine.core.busy(), "a drain alone writes nothing: the pool may have lost its bytes");
    scene.engine.core.write_all(&mut scene.engine.out);
    scene.take_jobs();
    assert!(scene.engine.core.busy());
    scene.end_all();
    assert_eq!((scene.stats().log.blocks, scene.held_bytes(), scene.engine.core.busy()), (4, 0, false));
}

#[test]
fn a_load_waits_for_a_slow_disk_no_longer_than_a_question() {
    let mut scene = Scene::on_ssd(0..8);
    scene.event(CoreEvent::Tick);
    scene.engine.open(1, 0..8);
    let op = scene.next_op();
    let query = Query { arriving: true, ..Query::new(op, LogKeys::new(1, 0..8)) };
    scene.ask(SchedulerRequest::Query(query));
    let reads = scene.reads();
    scene.end(reads[0], Ok(()));
    assert_eq!(scene.answers(), [(op, Status::Pending, 0), (op, Status::Arriving, 8)]);
    let load = scene.next_op();
    scene.engine.load(1, load, op, 0..8, 0);
    for (passes_ms, refused) in [(900, false), (900, false), (199, false), (1, true)] {
        scene.engine.now_ms += passes_ms;
        scene.event(CoreEvent::Tick);
        // The device goes on: it is not late.
        scene.engine.out.retain(|action| matches!(action, Action::Outcome { .. }));
        assert_eq!(scene.answers() == [(load, Status::Absent, 0)], refused);
    }
    scene.end_well(reads[1..].to_vec());
    assert_eq!(scene.stats().promoted_blocks, 8, "they come nevertheless");
    let [disk] = scene.engine.core.tier_stats() else { panic!("one tier") };
    let figures = (disk.reading_blocks, disk.reading_bytes, disk.read_blocks, disk.read_bytes);
    assert_eq!((figures, disk.failed_blocks), ((0, 0, 8, 8 * BLOCK_BYTES), 0));
    assert!(disk.first > Duration::ZERO && disk.bytes_per_second() > 0);
}

#[test]
fn what_peers_have_behind_a_block_that_no_disk_reads_in_time_is_not_fetched() {
    for refuses in [false, true] {
        let mut scene = Scene::on_ssd(0..1);
        let base = &mut scene.engine.core.base;
        let peers = peer_tier(Directory::new(mesh::directory::DirectoryConfig::default()));
        base.sources.add_tier(peers, &mut base.cx.dram);
        let (peer, mut filter) = (PeerNumber(1), Filter::with_capacity(10));
        (1..4).for_each(|key| assert!(filter.insert(Digest::new(&NAMESPACE, 0, &hash(key)))));
        [MeshEvent::Joined(peer), MeshEvent::Keeps { peer, filter }]
            .into_iter()
            .for_each(|heard| scene.event(CoreEvent::Mesh(heard)));
        if refuses {
            overwhelm(&mut scene);
        }
        scene.query(1, 0..4);
        let fetches = scene
            .engine
            .out
            .iter()
            .filter(|action| matches!(action, Action::Transfer { job: TierJob::Fetch(_), .. }))
            .count();
        assert_eq!((scene.reads().len(), fetches), if refuses { (0, 0) } else { (1, 1) });
    }
}

/// Gives the device more to read than it can in time.
fn overwhelm(scene: &mut Scene) {
    let (now_ms, base) = (scene.engine.now_ms, &mut scene.engine.core.base);
    let namespace = base.cx.namespaces.adopt(Space { digest: NAMESPACE, block_bytes: BLOCK_BYTES }).unwrap();
    let ssd: &mut Ssd = base.sources.tier_mut().unwrap();
    let (log, slot) = (&mut ssd.log, SlotRef { offset: 0, generation: 1 });
    let key = BlockKey { namespace, group: 0, hash: hash(0) };
    let tickets: Vec<Ticket> = (0..2_000).map_while(|_| log.read_block(now_ms, &key, slot, 1)).collect();
    for (ticket, second) in tickets.iter().zip(1..=3) {
        log.done(now_ms + 1_000 * second, JobDone { device: 0, ticket: *ticket, micros: 1, result: Ok(()) });
    }
    assert!(log.read_block(now_ms, &key, slot, 1).is_none());
    log.drain_jobs().for_each(drop);
}
