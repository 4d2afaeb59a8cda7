//! Checks: the compared blocks, the believed engines, and the removal of wrong ones.

use mesh::digest::Digest;
use mesh::directory::{self, Directory, Filter};
use mesh::transport::{Fetch, PeerNumber};
use tiers::ssd::{self, DeviceGeometry, DeviceWork, JobDone, LogConfig, SegmentLog};

use super::*;
use crate::compare::{BlockDifference, Number};
use crate::config::SsdAdmission;

/// Sessions of engines by number: engine 0 is the harness's own engine.
pub(super) fn scheduler(engine: u64) -> SessionId {
    SCHEDULER + 10 * engine
}

pub(super) fn rank(engine: u64) -> SessionId {
    RANKS[0] + 10 * engine
}

pub(super) fn run(engine: u64) -> [u8; 16] {
    if engine == 0 { RUN } else { [engine as u8 + 100; 16] }
}

pub(crate) fn found(differing: u32) -> InspectionResult {
    let amount = if differing == 0 { 1e-3 } else { 0.4 };
    InspectionResult {
        differing,
        first: 0,
        worst: BlockDifference { layer: 3, number: Number::Bfloat16, amount },
    }
}

impl Harness {
    /// Connects an engine of one rank; it sends the messages from now on.
    pub(super) fn begin(&mut self, engine: u64) {
        self.connect(rank(engine), Hello { engine: format!("e{engine}"), ..rank_hello(1, 0) });
        self.connect_scheduler(engine, scheduler(engine));
        self.report(rank(engine), WorkerRequest::Join { run: run(engine), step: 0 });
        self.speaker = scheduler(engine);
    }

    /// The same with a log of keys 0 and 1.
    fn begin_with_log(&mut self, engine: u64) {
        self.begin(engine);
        self.open(0, 0..2);
    }

    pub(super) fn connect_scheduler(&mut self, engine: u64, session: SessionId) {
        let name = if engine == 0 { "e".into() } else { format!("e{engine}") };
        let hello = Hello { engine: name, ..hello(1, Role::Scheduler { run: run(engine) }) };
        self.connect(session, hello);
    }

    /// Ends the copies of an engine's steps up to `step`.
    fn copy(&mut self, engine: u64, step: u64) -> Vec<RankBlock> {
        self.fences(rank(engine), step, step);
        let copies = self.copies();
        copies.iter().for_each(|copy| self.end_copy(copy.0, true));
        copies.into_iter().flat_map(|(_, _, pieces)| pieces).collect()
    }

    /// The same, and the ring is drained.
    pub(super) fn copy_all(&mut self, engine: u64, step: u64) {
        self.copy(engine, step);
        self.drained();
    }

    /// Ends the comparison asked for since the last look, and returns it.
    pub(super) fn compared(&mut self, differing: u32) -> Inspection {
        let comparison = self.comparison().expect("the keys are kept");
        self.event(CoreEvent::Inspected {
            save: comparison.save,
            findings: Findings::Compared(found(differing)),
        });
        comparison
    }

    /// Checks keys of an open log by an engine with so many different blocks.
    pub(super) fn check(
        &mut self,
        engine: u64,
        log: u32,
        op: u64,
        keys: std::ops::Range<u32>,
        differing: u32,
    ) -> Saved {
        self.post_save(log, op, keys, true);
        self.copy_all(engine, op);
        self.compared(differing);
        self.saved().expect("it has ended")
    }

    /// Another engine keeps another chain, and ends.
    fn keep_another(&mut self, op: u64) {
        self.begin(9);
        self.open(50, 500..502);
        self.post_save(50, op, 0..2, false);
        self.copy_all(9, op);
        assert_eq!(self.saved().unwrap().committed, 2);
        self.disconnect([scheduler(9), rank(9)]);
        self.speaker = SCHEDULER;
    }

    /// An engine contradicts the chain of [`Harness::keep_another`]: the chain is removed, and the engine is
    /// in doubt.
    fn doubt(&mut self, engine: u64, op: u64) {
        let removed = self.core.stats().removed_blocks;
        self.open(51, 500..502);
        assert_eq!(self.check(engine, 51, op, 0..2, 2).differing, 2);
        assert_eq!(self.core.stats().removed_blocks - removed, 2);
        self.ask(SchedulerRequest::Close { log: 51, way: 0 });
        self.out.clear();
    }

    fn warnings(&self) -> Vec<&str> {
        self.out.iter().filter_map(taken!(Action::Warn(text) => text.as_str())).collect()
    }

    pub(super) fn status(&mut self, log: u32, op: u64, count: u32) -> (Status, u32) {
        let outcome = self.query(log, op, 0, count);
        (outcome.status, outcome.value)
    }
}

#[test]
fn kept_blocks_are_compared_with_computed_ones_once_these_cannot_be_overwritten() {
    let mut engine = Harness::keeping(2, 4);
    let before = engine.core.stats();
    engine.post_save(0, 5, 2..4, true);
    engine.fences(RANKS[0], 5, 5);
    engine.fences(RANKS[1], 5, 5);
    let copies = engine.copies();
    assert_eq!(copies.iter().map(|(_, _, pieces)| pieces.len()).collect::<Vec<_>>(), [2, 2]);
    copies.iter().for_each(|copy| engine.end_copy(copy.0, true));
    assert_eq!(engine.comparison(), None, "a CANCEL may lie in the ring");
    engine.drained();
    let comparison = engine.comparison().expect("all shards were copied");
    assert_eq!((comparison.save, comparison.pairs().len(), comparison.shards), ((SCHEDULER, 5), 2, 2));
    let filled: Vec<u64> = copies[0].2.iter().map(|piece| piece.offset).collect();
    let is_filled = |slot: &SlotRef| filled.contains(&slot.offset);
    assert!(comparison.pairs().iter().all(|(kept, computed)| is_filled(computed) && !is_filled(kept)));
    assert!(engine.core.busy() && engine.saved().is_none());
    engine.event(CoreEvent::Inspected { save: comparison.save, findings: Findings::Compared(found(0)) });
    let freed: Vec<_> = comparison.pairs().iter().map(|(_, slot)| Action::FreeSlot { slot: *slot }).collect();
    assert_eq!(engine.out[..2], freed);
    let saved = engine.saved().unwrap();
    assert_eq!((saved.present, saved.checked, saved.differing, saved.committed), (2, 2, 0, 0));
    let after = engine.core.stats();
    assert_eq!((after.blocks, after.pool_used_bytes), (before.blocks, before.pool_used_bytes));
    assert_eq!((after.checks, after.checks_differing, after.checks_undecided), (1, 0, 0));
    let largest = engine.core.largest_differences().find(|(_, part)| *part > 0.0);
    assert_eq!(largest, Some((Number::Bfloat16, found(0).worst.part())));
    assert!(!engine.core.busy());
    assert_eq!(engine.status(0, 6, 4), (Status::Ok, 4));
}

#[test]
fn what_was_cancelled_or_not_copied_is_never_compared() {
    let mut engine = Harness::keeping(1, 4);
    engine.post_save(0, 5, 0..4, true);
    engine.fences(RANKS[0], 5, 5);
    let copies = engine.copies();
    engine.end_copy(copies[0].0, true);
    engine.ask(SchedulerRequest::Cancel(Cancel { op: 5, from: 1, count: 3 }));
    engine.drained();
    assert_eq!(engine.compared(0).pairs().len(), 1, "three sources were reused");
    let saved = engine.saved().unwrap();
    assert_eq!((saved.present, saved.cancelled, saved.checked), (1, 3, 1));

    engine.post_save(0, 6, 0..4, true);
    engine.fences(RANKS[0], 6, 6);
    let copies = engine.copies();
    engine.end_copy(copies[0].0, false);
    engine.drained();
    let saved = engine.saved().unwrap();
    assert_eq!((saved.dropped, saved.checked), (4, 0));
    let stats = engine.core.stats();
    assert_eq!((stats.checks, stats.checks_undecided, stats.blocks), (1, 1, 4));
    assert_eq!(engine.status(0, 7, 4), (Status::Ok, 4), "nothing is lost");
}

#[test]
fn what_is_not_kept_is_saved_and_what_has_no_room_is_left() {
    let mut engine = Harness::keeping(1, 2);
    engine.open(1, 0..4);
    engine.post_save(1, 5, 0..4, true);
    engine.copy_all(0, 5);
    engine.compared(0);
    let saved = engine.saved().unwrap();
    assert_eq!((saved.committed, saved.present, saved.checked), (2, 2, 2));

    let mut small = Harness::over(core_of(2 << 20), 1, 600_000);
    small.join();
    small.keep(3);
    assert_eq!(small.status(0, 4, 3), (Status::Ok, 3), "all three slots are leased");
    small.post_save(0, 5, 0..3, true);
    small.fences(RANKS[0], 5, 5);
    let saved = small.saved().unwrap();
    assert_eq!((saved.present, saved.checked), (3, 0), "nothing to copy, and no verdict");
    assert_eq!(small.core.stats().checks_undecided, 1);
    small.ask(SchedulerRequest::Release { log: 0 });
    small.post_save(0, 6, 0..3, true);
    let copied = small.copy(0, 6).len();
    assert_eq!(copied, 2, "the second block gave way to the first one's, and is saved over the third");
    small.drained();
    let comparison = small.comparison().unwrap();
    assert_eq!(comparison.pairs().len(), 1);
}

#[test]
fn a_comparison_keeps_its_blocks_in_place_and_no_engine_has_many() {
    let mut engine = Harness::keeping(1, 100);
    engine.post_save(0, 5, 0..100, true);
    let copied: Vec<u32> = engine.copy(0, 5).iter().map(|piece| piece.block).collect();
    assert_eq!((copied.len(), copied[63]), (64, 100));
    assert!(copied.windows(2).all(|two| two[1] - two[0] <= 2), "evenly spread: {copied:?}");
    engine.drained();
    let comparison = engine.comparison().unwrap();
    engine.post_save(0, 6, 0..100, true);
    engine.fences(RANKS[0], 6, 6);
    let saved = engine.saved().expect("its blocks are kept, and too many are being compared");
    assert_eq!((saved.present, saved.checked), (100, 0));
    // Blocks of no later query take the whole pool.
    for log in 1..140 {
        engine.open(log, 1000 * log..1000 * log + 128);
        engine.save(log, 100 + u64::from(log), 100, 1..129);
        engine.copy_all(0, 100);
        engine.out.clear();
    }
    assert!(engine.core.stats().evicted_blocks > 0);
    engine.event(CoreEvent::Inspected { save: comparison.save, findings: Findings::Compared(found(0)) });
    assert_eq!(engine.saved().unwrap().checked, 64);
    engine.ask(SchedulerRequest::Close { log: 0, way: 0 });
    assert!(!engine.core.busy());
}

#[test]
fn an_engine_that_differs_is_barred_and_what_it_saved_is_gone() {
    let mut engine = Harness::keeping(1, 4);
    engine.keep_another(2);
    engine.begin(1);
    engine.open(1, 100..110);
    engine.post_save(1, 1, 0..6, false);
    engine.copy_all(1, 1);
    assert_eq!(engine.saved().unwrap().committed, 6);
    engine.doubt(1, 2);
    engine.open(2, 0..4);
    assert_eq!(engine.query(2, 3, 0, 4).value, 4);
    engine.post_save(2, 4, 3..4, true);
    engine.copy_all(1, 4);
    let save = engine.comparison().unwrap().save;
    engine.event(CoreEvent::Inspected { save, findings: Findings::Compared(found(1)) });
    let warnings = engine.warnings();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let namespace = NAMESPACE.to_string();
    for part in
        [namespace.as_str(), "engine e1", "4.00e-1", "layer 3", "2e-2", "6 blocks", "pillion.model_id"]
    {
        assert!(warnings[0].contains(part), "{part} in {}", warnings[0]);
    }
    assert!(!warnings[0].contains("Peers"), "{}", warnings[0]);
    let saved = engine.saved().unwrap();
    assert_eq!((saved.checked, saved.differing, saved.difference, saved.limit), (1, 1, 400_000, 22_517));
    let stats = engine.core.stats();
    assert_eq!((stats.barred_engines, stats.checks_differing, stats.removed_blocks), (1, 2, 8));
    assert_eq!(stats.leases, 0);
    assert_eq!(stats.blocks, 4, "blocks of another engine stay");
    assert_eq!(engine.status(2, 6, 4), (Status::Barred, 0));
    engine.post_save(1, 7, 0..9, false);
    assert_eq!(engine.saved().unwrap().dropped, 9);
    engine.load(2, 8, 2, 0..4, 0);
    let out = &engine.out[..];
    assert!(matches!(out, [Action::Outcome { session, .. }] if *session == rank(1)), "{out:?}");
    let barred = engine.core.barred();
    assert_eq!((barred.len(), barred[0].engine.as_str(), barred[0].worst), (1, "e1", Some(found(1).worst)));
    engine.out.clear();
    engine.speaker = SCHEDULER;
    engine.open(3, 100..106);
    assert_eq!(engine.status(3, 9, 6), (Status::Ok, 0));
    assert_eq!(engine.status(0, 10, 4), (Status::Ok, 4), "the other engine is served as before");
}

#[test]
fn a_bar_lasts_for_the_run_and_for_one_namespace() {
    let mut engine = Harness::keeping(1, 2);
    engine.keep_another(2);
    engine.begin_with_log(1);
    engine.doubt(1, 1);
    assert_eq!(engine.check(1, 0, 2, 0..2, 2).differing, 2);
    assert_eq!(engine.status(0, 3, 2), (Status::Barred, 0));
    engine.ask(SchedulerRequest::Salt { salt: [5; 16] });
    assert_eq!(engine.status(0, 4, 2), (Status::Ok, 0), "its salted namespace is another");
    assert_eq!(engine.core.barred(), []);
    engine.event(CoreEvent::Disconnected { session: scheduler(1) });
    engine.connect_scheduler(1, 77);
    engine.disconnect([rank(1)]);
    engine.connect(rank(1), Hello { engine: "e1".into(), ..rank_hello(1, 0) });
    engine.report(rank(1), WorkerRequest::Join { run: run(1), step: 0 });
    engine.speaker = 77;
    engine.open(0, 0..2);
    engine.post_save(0, 1, 0..2, false);
    assert_eq!(engine.saved().unwrap().dropped, 2);
    assert_eq!(engine.status(0, 2, 2), (Status::Barred, 0), "another connection is the same run");
    assert_eq!(engine.core.barred().len(), 1);
    engine.begin_with_log(2);
    assert_eq!(engine.status(0, 2, 2), (Status::Ok, 2), "another run starts again");
}

#[test]
fn most_engines_are_believed_and_then_the_namespace_begins_anew() {
    let mut engine = Harness::keeping(1, 2);
    for (number, retired) in [(1, false), (2, true)] {
        engine.keep_another(1 + number);
        engine.begin_with_log(number);
        engine.doubt(number, 1);
        engine.query(0, 2, 0, 2);
        engine.post_save(0, 3, 1..2, true);
        engine.copy_all(number, 3);
        engine.compared(1);
        assert_eq!(engine.warnings().len(), 1 + usize::from(retired), "{:?}", engine.warnings());
        engine.out.clear();
    }
    assert_eq!(engine.core.stats().barred_engines, 3, "no engine is believed");
    assert_eq!(engine.core.barred().iter().filter(|barred| barred.worst.is_none()).count(), 1);
    engine.speaker = SCHEDULER;
    assert_eq!(engine.status(0, 5, 2), (Status::Barred, 0));
    engine.begin_with_log(3);
    assert_eq!(engine.status(0, 2, 2), (Status::Ok, 0), "a run that comes later finds it empty");
    engine.post_save(0, 3, 0..2, false);
    engine.copy_all(3, 3);
    assert_eq!(engine.saved().unwrap().committed, 2);
    engine.keep_another(4);
    engine.begin_with_log(4);
    engine.out.clear();
    engine.doubt(4, 1);
    assert_eq!(engine.status(0, 2, 2), (Status::Ok, 2));
    assert_eq!(engine.check(4, 0, 3, 0..2, 1).differing, 1);
    assert_eq!(engine.core.stats().barred_engines, 4, "one of two is not most of them");
    engine.speaker = scheduler(3);
    assert_eq!(engine.status(0, 6, 2), (Status::Ok, 2));
}

#[test]
fn what_engines_disagree_about_is_found_by_no_later_life_and_nothing_of_before_comes_back() {
    let mut engine = Harness::keeping(1, 2);
    let geometry =
        DeviceGeometry { unit_bytes: 4096, segment_bytes: 4 << 20, segments: 8, first_sequence: 7 };
    let log =
        SegmentLog::new(LogConfig { devices: vec![geometry; 2], write_bytes_max: 1 << 20, late_ms: 1000 });
    let base = &mut engine.core.base;
    let binding = base.engines[SCHEDULER].binding().unwrap();
    // Nothing of the namespace was written yet: only memory has it, and would write it later.
    base.sources.add_tier(disk_tier(log, SsdAdmission::SecondHit), &mut base.cx.dram);
    let life_end = u64::from(u32::MAX);
    for (number, bounds) in [(1, vec![life_end]), (2, vec![life_end, 7])] {
        engine.keep_another(1 + number);
        engine.begin_with_log(number);
        engine.open(51, 500..502);
        for (log, op, bounds) in [(51, 1, vec![life_end]), (0, 3, bounds)] {
            engine.query(log, 2 * op, 0, 2);
            engine.post_save(log, op, 1..2, true);
            engine.copy_all(number, op);
            engine.compared(1);
            engine.end_distrust(binding.digest, bounds);
        }
        assert!(!engine.core.busy());
        assert_eq!(engine.core.base.cx.namespaces.adopt(binding.space()).is_none(), number == 2);
    }
}

impl Harness {
    /// Ends the jobs by which both disks note the bounds of distrust, one after the other.
    fn end_distrust(&mut self, namespace: NamespaceDigest, bounds: Vec<u64>) {
        for before in bounds {
            let jobs: Vec<ssd::DeviceJob> =
                self.take(taken!(Action::Transfer { job: TierJob::Disk(job), .. } => job)).collect();
            let work: Vec<DeviceWork> = jobs.iter().map(|job| job.work).collect();
            assert_eq!(
                work,
                [DeviceWork::Distrust { namespace, before }; 2],
                "each disk notes one bound after the other"
            );
            assert!(self.core.busy(), "an orderly end waits for it");
            for ssd::DeviceJob { device, ticket, .. } in jobs {
                let done = JobDone { device, ticket, micros: 1, result: Ok(()) };
                self.event(CoreEvent::Transferred { tier: 0, ends: vec![JobEnd::Disk(done)] });
            }
        }
    }
}

/// An engine with a peer, keeping two blocks.
fn with_peer() -> Harness {
    let peers = peer_tier(Directory::new(directory::DirectoryConfig::default()));
    let core = core_over(64 << 20, &[], Some(peers));
    let mut engine = Harness::over(core, 1, SHARD_BYTES);
    engine.join();
    engine.keep(2);
    engine.event(CoreEvent::Mesh(MeshEvent::Joined(PEER)));
    engine
}

const PEER: PeerNumber = PeerNumber(1);

/// The peer keeps these blocks.
fn hear_of(engine: &mut Harness, keys: std::ops::Range<u32>) {
    let mut filter = Filter::with_capacity(1000);
    keys.for_each(|key| assert!(filter.insert(Digest::new(&NAMESPACE, GROUP, &hash(key)))));
    engine.event(CoreEvent::Mesh(MeshEvent::Keeps { peer: PEER, filter }));
}

/// Returns the number of blocks asked of the peer by a query for the first keys of a log.
fn asked_for(engine: &mut Harness, log: u32, op: u64, count: u32) -> usize {
    let query = request::Query::new(op, LogKeys::new(log, 0..count));
    engine.ask(SchedulerRequest::Query(query));
    engine
        .take(taken!(Action::Transfer { job: TierJob::Fetch(Fetch { blocks, .. }), .. } => blocks.len()))
        .sum()
}

#[test]
fn a_block_that_was_removed_does_not_come_back_from_a_peer_that_had_fetched_it() {
    let mut engine = with_peer();
    engine.keep_another(2);
    engine.begin_with_log(1);
    engine.open(1, 100..104);
    engine.post_save(1, 1, 0..4, false);
    engine.copy_all(1, 1);
    engine.doubt(1, 2);
    engine.post_save(0, 3, 0..2, true);
    engine.copy_all(1, 3);
    engine.compared(1);
    assert_eq!(engine.core.stats().removed_blocks, 6);
    let told = engine.warnings();
    let remedy =
        "requests none of these blocks from them until it restarts: run pillion ctl evict at the peers first";
    assert!(told.len() == 1 && told[0].ends_with(remedy), "{told:?}");
    assert_eq!(engine.core.peers_stats().unwrap().distrusted, 6);
    hear_of(&mut engine, 100..110);

    engine.speaker = SCHEDULER;
    engine.open(1, 100..106);
    engine.out.clear();
    assert_eq!(engine.status(1, 3, 6), (Status::Ok, 0));
    assert!(engine.out.is_empty(), "the query did not wait");
    engine.open(2, 104..106);
    assert_eq!(asked_for(&mut engine, 2, 4, 2), 2, "others come from there");
    // A run ends at a removed block.
    let run = [106, 107, 100, 108].map(hash);
    engine.ask(SchedulerRequest::Open { log: 3 });
    let append =
        Append { keys: LogKeys::new(3, 0..4), chunks: [9, 0, 0, 0, 0, 0], promised: false, tail: false };
    engine.append(append, run.to_vec());
    assert_eq!(asked_for(&mut engine, 3, 5, 4), 2);

    // A removed block saved again is found here. Once it is gone from here, no peer is asked for it: their
    // copies are the same.
    engine.post_save(1, 6, 0..1, false);
    engine.copy_all(0, 6);
    assert_eq!(engine.status(1, 7, 6), (Status::Ok, 1));
    engine.ask(SchedulerRequest::Close { log: 1, way: 0 });
    let namespace = engine.core.base.engines[SCHEDULER].binding().unwrap().namespace;
    engine.core.base.cx.dram.remove(&BlockKey { namespace, group: GROUP, hash: hash(100) });
    engine.open(1, 100..101);
    assert_eq!(engine.status(1, 8, 1), (Status::Ok, 0));
}

#[test]
fn nothing_of_a_namespace_that_began_anew_comes_from_a_peer() {
    let mut engine = with_peer();
    for number in [1, 2] {
        engine.keep_another(1 + number);
        engine.begin_with_log(number);
        engine.doubt(number, 1);
        engine.post_save(0, 3, 1..2, true);
        engine.copy_all(number, 3);
        engine.compared(1);
    }
    assert_eq!(engine.core.stats().barred_engines, 3);
    let told = engine.warnings();
    assert_eq!(told.iter().filter(|text| text.contains("requests none of it")).count(), 1, "{told:?}");
    assert!(
        told.iter().all(|text| !text.contains("these blocks")),
        "these engines had saved nothing: {told:?}"
    );
    hear_of(&mut engine, 0..10);
    engine.begin_with_log(3);
    engine.open(1, 5..8);
    for (log, count) in [(0, 2), (1, 3)] {
        assert_eq!(engine.status(log, 5, count), (Status::Ok, 0));
    }
}

#[test]
fn engines_that_lie_again_and_again_cost_the_others_nothing() {
    let mut engine = Harness::keeping(1, 2);
    for number in 1..20 {
        engine.speaker = SCHEDULER;
        if engine.status(0, 2 * number, 2).1 == 0 {
            engine.post_save(0, 2 * number + 1, 0..2, false);
            engine.copy_all(0, 2 * number + 1);
        }
        engine.begin_with_log(number);
        assert_eq!(engine.check(number, 0, 3, 0..2, 2).differing, 2);
        engine.disconnect([scheduler(number), rank(number)]);
    }
    engine.speaker = SCHEDULER;
    let stats = engine.core.stats();
    assert_eq!((stats.barred_engines, stats.removed_blocks), (0, 16), "eight of them cost two blocks each");
    assert_eq!(engine.status(0, 50, 2), (Status::Ok, 2));
}

#[test]
fn all_chains_of_one_run_are_one_witness_however_many_steps_they_are_of() {
    let mut engine = in_doubt();
    engine.begin(2);
    for (op, log) in [(2, 60), (3, 61)] {
        engine.open(log, 10 * log..10 * log + 2);
        engine.check(2, log, op, 0..2, 2);
    }
    let stats = engine.core.stats();
    assert_eq!((stats.barred_engines, stats.removed_blocks, stats.blocks), (0, 6, 2));
    // The saver of these keys is forgotten: it may be the same run.
    engine.core.transfers.forget_sources();
    engine.open(0, 0..2);
    engine.check(2, 0, 4, 0..1, 1);
    engine.keep_another(5);
    engine.speaker = scheduler(2);
    engine.open(50, 500..502);
    assert_eq!(engine.core.stats().barred_engines, 0);
    engine.check(2, 50, 6, 0..2, 2);
    assert_eq!(engine.core.stats().barred_engines, 1, "a chain of another run");
}

#[test]
fn a_key_that_was_saved_again_is_of_its_last_saver() {
    let mut engine = Harness::keeping(1, 2);
    engine.begin_with_log(1);
    assert_eq!(engine.check(1, 0, 1, 0..2, 2).differing, 2);
    // Another engine keeps these keys, and two more in the same step.
    engine.begin_with_log(2);
    engine.open(60, 600..602);
    for (op, log) in [(1, 0), (2, 60)] {
        let keys = LogKeys::new(log, 0..2);
        let save =
            request::Save { op, keys, position: 0, step: 9, checked: false, handover: false, replaced: 0 };
        engine.post(SchedulerRequest::Save(save), Vec::new(), vec![1, 2]);
    }
    engine.copy_all(2, 9);
    assert_eq!(engine.core.stats().blocks, 4);
    engine.begin_with_log(3);
    assert_eq!(engine.check(3, 0, 1, 0..2, 2).differing, 2);
    assert_eq!(engine.core.stats().blocks, 0, "the step of its last saver goes");
}

/// An engine in doubt, beside two more chains kept by engine 0.
fn in_doubt() -> Harness {
    let mut engine = Harness::keeping(1, 2);
    for (op, log) in [(2, 60), (3, 61)] {
        engine.open(log, 10 * log..10 * log + 2);
        engine.post_save(log, op, 0..2, false);
        engine.copy_all(0, op);
    }
    engine.keep_another(4);
    engine.begin_with_log(1);
    engine.doubt(1, 1);
    engine
}

#[test]
fn one_contradiction_bars_nobody_and_what_was_computed_in_that_step_goes() {
    let mut engine = Harness::keeping(1, 2);
    // One step computes two prompts, another one goes on with the first.
    engine.open(60, 600..604);
    engine.open(61, 610..612);
    for (op, log, keys, step) in [(2, 60, 0..2, 5), (3, 61, 0..2, 5), (4, 60, 2..4, 6)] {
        let save = request::Save {
            op,
            keys: LogKeys::new(log, keys),
            position: 0,
            step,
            checked: false,
            handover: false,
            replaced: 0,
        };
        engine.post(SchedulerRequest::Save(save), Vec::new(), vec![1, 2]);
    }
    engine.copy_all(0, 6);
    assert_eq!(engine.core.stats().blocks, 8);
    engine.begin_with_log(1);
    engine.open(2, 600..604);
    engine.post_save(2, 1, 0..4, true);
    engine.copy_all(1, 1);
    let save = engine.comparison().unwrap().save;
    engine.out.clear();
    engine.event(CoreEvent::Inspected {
        save,
        findings: Findings::Compared(InspectionResult { first: 1, ..found(2) }),
    });
    let [told] = engine.warnings()[..] else { panic!("{:?}", engine.warnings()) };
    for part in ["6 blocks", "engine e1", "4.00e-1", "layer 3", "2 other chains", "240 s"] {
        assert!(told.contains(part), "{part} in {told}");
    }
    let stats = engine.core.stats();
    assert_eq!((stats.barred_engines, stats.removed_blocks, stats.blocks), (0, 6, 2));
    assert_eq!(engine.status(2, 3, 4), (Status::Ok, 0), "of the same step: also before the first difference");
    assert_eq!(engine.status(0, 4, 2), (Status::Ok, 2), "it is served");
}

#[test]
fn of_a_chain_whose_end_differs_the_beginning_goes_too() {
    let mut engine = Harness::keeping(1, 2);
    engine.open(60, 600..608);
    for (op, keys) in [(2, 0..4), (3, 4..8)] {
        engine.post_save(60, op, keys, false);
        engine.copy_all(0, op);
    }
    engine.begin_with_log(1);
    engine.open(60, 600..608);
    assert_eq!(engine.check(1, 60, 1, 6..8, 2).differing, 2);
    assert_eq!((engine.status(60, 2, 8), engine.core.stats().blocks), ((Status::Ok, 0), 2));
    assert_eq!(engine.core.stats().barred_engines, 0);
}

#[test]
fn blocks_upon_a_contradicted_chain_go_whoever_saved_them() {
    let mut engine = Harness::keeping(1, 2);
    engine.open(60, 600..604);
    engine.post_save(60, 2, 0..4, false);
    engine.copy_all(0, 2);
    // Another engine computes other blocks behind the loaded beginning, twice.
    engine.begin(1);
    for (log, op, end) in [(61, 1, 702), (62, 2, 704)] {
        let keys: Vec<BlockHash> = (600..602).chain(700..end).map(hash).collect();
        engine.ask(SchedulerRequest::Open { log });
        let count = keys.len() as u32;
        let chunks = [log * 8, 0, 0, 0, 0, 0];
        engine
            .append(Append { keys: LogKeys::new(log, 0..count), chunks, promised: false, tail: false }, keys);
        engine.post_save(log, op, count - 2..count, false);
        engine.copy_all(1, op);
    }
    assert_eq!(engine.core.stats().blocks, 10);
    engine.begin(2);
    engine.open(60, 600..604);
    assert_eq!(engine.check(2, 60, 1, 0..4, 4).differing, 4);
    let stats = engine.core.stats();
    assert_eq!((stats.blocks, stats.removed_blocks), (2, 8));
}

#[test]
fn a_long_chain_goes_from_the_last_block_on_that_was_found_equal() {
    let mut engine = Harness::keeping(1, 128);
    engine.begin(1);
    engine.open(0, 0..128);
    engine.post_save(0, 1, 0..128, true);
    engine.copy_all(1, 1);
    let save = engine.comparison().unwrap().save;
    // Every second block was compared. The source is forgotten: the chain alone goes.
    engine.core.transfers.forget_sources();
    engine.event(CoreEvent::Inspected {
        save,
        findings: Findings::Compared(InspectionResult { first: 10, ..found(54) }),
    });
    assert_eq!(engine.core.stats().blocks, 20);
    assert_eq!(engine.status(0, 2, 128), (Status::Ok, 20));
}

#[test]
fn of_an_engine_in_doubt_nothing_is_kept_until_it_agrees_with_two_other_chains() {
    let mut engine = in_doubt();
    engine.open(51, 500..502);
    engine.post_save(51, 2, 0..2, false);
    assert_eq!(engine.saved().unwrap().dropped, 2);
    for (log, op) in [(60, 3), (61, 6)] {
        engine.open(log, 10 * log..10 * log + 2);
        // The same chain twice is one witness.
        for op in op..op + 2 {
            assert_eq!(engine.check(1, log, op, 0..2, 0).differing, 0);
        }
        engine.post_save(51, op + 2, 0..2, false);
        if log == 60 {
            assert_eq!(engine.saved().unwrap().dropped, 2);
        }
    }
    engine.copy_all(1, 8);
    assert_eq!(engine.saved().unwrap().committed, 2);
    let stats = engine.core.stats();
    assert_eq!((stats.saves_doubted, stats.saves_dropped, stats.barred_engines), (4, 4, 0));
    assert_eq!(engine.check(1, 0, 30, 0..2, 2).differing, 2);
    assert_eq!(engine.core.stats().barred_engines, 0, "its next contradiction is a first one");
}

#[test]
fn what_it_saved_itself_is_no_witness_and_a_doubt_ends_by_itself() {
    let mut engine = Harness::keeping(1, 2);
    engine.keep_another(2);
    engine.begin_with_log(1);
    engine.open(60, 600..602);
    engine.open(61, 610..612);
    for (op, log) in [(1, 60), (2, 61)] {
        engine.post_save(log, op, 0..2, false);
        engine.copy_all(1, op);
    }
    engine.doubt(1, 3);
    for (op, log) in [(4, 60), (5, 61)] {
        assert_eq!(engine.check(1, log, op, 0..2, 0).differing, 0);
    }
    engine.open(51, 500..502);
    engine.post_save(51, 6, 0..2, false);
    assert_eq!(engine.saved().unwrap().dropped, 2);
    engine.now_ms = 240_000;
    engine.post_save(51, 7, 0..2, false);
    engine.copy_all(1, 7);
    assert_eq!(engine.saved().unwrap().committed, 2);
}

#[test]
fn a_comparison_outlives_its_engine_and_says_nothing_then() {
    let mut engine = Harness::keeping(1, 2);
    engine.begin_with_log(1);
    engine.post_save(0, 3, 0..2, true);
    engine.copy_all(1, 3);
    let comparison = engine.comparison().unwrap();
    engine.event(CoreEvent::Disconnected { session: scheduler(1) });
    assert!(engine.core.busy(), "its slots are being read");
    engine.event(CoreEvent::Inspected { save: comparison.save, findings: Findings::Compared(found(2)) });
    assert!(!engine.core.busy() && engine.saved().is_none());
    let stats = engine.core.stats();
    assert_eq!((stats.checks, stats.blocks, stats.pool_used_bytes), (0, 2, 2 * SHARD_BYTES));
    engine.begin_with_log(2);
    engine.post_save(0, 3, 0..2, true);
    engine.copy(2, 3);
    engine.event(CoreEvent::Disconnected { session: rank(2) });
    engine.drained();
    let saved = engine.saved().unwrap();
    assert_eq!((saved.present, saved.checked), (2, 0), "no rank is left to ask");
    assert_eq!(engine.core.stats().pool_used_bytes, 2 * SHARD_BYTES);
}
