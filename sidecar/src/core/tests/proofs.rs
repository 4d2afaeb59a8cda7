//! Proofs: the engines with kept saves.

use mesh::directory::{self, Directory};
use shm_protocol::handshake::WEIGHTS_LIVE;
use shm_protocol::namespace;
use shm_protocol::pool::Remains;
use tiers::ssd::Recovered;

use super::checks::{rank, run, scheduler};
use super::*;
use crate::config::SsdAdmission;

const LIVE: [u8; 16] = [0xa; 16];

impl Harness {
    /// Connects an engine of one rank with facts from elsewhere; it sends the messages from now on.
    fn begin_unproven(&mut self, engine: u64) {
        self.connect_unproven(engine, scheduler(engine), rank(engine));
    }

    fn connect_unproven(&mut self, engine: u64, session: SessionId, rank: SessionId) {
        let hello = Hello { engine: format!("e{engine}"), ..rank_hello(1, 0) };
        self.connect(rank, changed(hello, |worker| worker.proves = true));
        self.connect_scheduler(engine, session);
        self.report(rank, WorkerRequest::Join { run: run(engine), step: 0 });
        self.speaker = session;
        self.open(0, 0..4);
        self.open(1, 100..104);
    }

    /// Saves keys of log 1, kept by no engine.
    fn save_new(&mut self, engine: u64, op: u64) -> Saved {
        self.end_save(engine, op, false)
    }

    /// Saves all of log 1 and returns the save's end. It ends at once if there is nothing to copy.
    fn end_save(&mut self, engine: u64, op: u64, checked: bool) -> Saved {
        self.out.clear();
        self.post_save(1, op, 0..4, checked);
        self.fences(rank(engine), op, op);
        if !self.out.iter().any(|action| matches!(action, Action::Saved { .. })) {
            self.copied();
        }
        self.saved().expect("it has ended")
    }

    fn proof(&self, engine: &str) -> Option<Proof> {
        let standings = self.core.standings();
        standings.into_iter().find(|standing| standing.engine == engine).expect("it is served").proof
    }
}

#[test]
fn an_engine_that_has_shown_nothing_loads_and_nothing_of_it_is_kept() {
    let mut engine = Harness::engine(1);
    engine.keep(4);
    engine.begin_unproven(1);
    assert_eq!((engine.proof("e"), engine.proof("e1")), (Some(Proof::Own), None));
    assert_eq!(engine.status(0, 1, 4), (Status::Ok, 4), "it may load");
    let saved = engine.save_new(1, 2);
    assert_eq!((saved.committed, saved.dropped, saved.unproven), (0, 4, 4));
    engine.post_save(0, 3, 0..4, false);
    assert_eq!(engine.saved().unwrap().present, 4, "kept blocks stay");
    let saved = engine.end_save(1, 4, true);
    assert_eq!((saved.checked, saved.dropped, saved.unproven), (0, 4, 4), "there is nothing to compare with");
    let stats = engine.core.stats();
    assert_eq!((stats.blocks, stats.saves_unproven, stats.saves_dropped), (4, 8, 8));
}

#[test]
fn an_engine_whose_blocks_are_those_kept_may_save_for_the_rest_of_its_run() {
    let mut engine = Harness::engine(1);
    engine.keep(4);
    engine.begin_unproven(1);
    let saved = engine.check(1, 0, 1, 0..1, 0);
    assert_eq!((saved.checked, saved.differing), (1, 0));
    assert_eq!(engine.proof("e1"), Some(Proof::Compared));
    assert_eq!(engine.save_new(1, 2).committed, 4);
    engine.event(Event::Disconnected { session: scheduler(1) });
    engine.event(Event::Disconnected { session: rank(1) });
    engine.connect_unproven(1, 77, 78);
    assert_eq!(engine.proof("e1"), Some(Proof::Compared), "another connection is the same run");
    engine.begin_unproven(2);
    assert_eq!(engine.proof("e2"), None, "another run is another engine");
}

#[test]
fn an_engine_whose_blocks_differ_is_closed_out_and_outvotes_nobody() {
    let mut engine = Harness::engine(1);
    engine.keep(4);
    for number in 1..4 {
        engine.begin_unproven(number);
        assert_eq!(engine.check(number, 0, 1, 0..1, 1).differing, 1);
        assert_eq!(engine.status(0, 2, 4), (Status::Barred, 0));
        engine.post_save(1, 3, 0..4, false);
        assert_eq!(engine.saved().unwrap().dropped, 4);
    }
    engine.speaker = SCHEDULER;
    assert_eq!(
        engine.status(0, 5, 4),
        (Status::Ok, 4),
        "three of four are barred, and none of them could save"
    );
    assert_eq!(engine.core.stats().blocks, 4);
}

#[test]
fn the_first_of_a_namespace_may_save_and_one_alone_is_the_first() {
    let mut engine = Harness::engine(1);
    engine.event(Event::Disconnected { session: SCHEDULER });
    engine.begin_unproven(1);
    engine.begin_unproven(2);
    // Both save before either has a block in the pool.
    engine.post_save(1, 1, 0..4, false);
    engine.speaker = scheduler(1);
    engine.post_save(0, 1, 0..4, false);
    assert_eq!((engine.proof("e1"), engine.proof("e2")), (None, Some(Proof::First)));
    assert_eq!(engine.saved().unwrap().unproven, 4);
    // Engine 2 leaves before any block was kept.
    engine.event(Event::Disconnected { session: scheduler(2) });
    engine.speaker = scheduler(1);
    assert_eq!(engine.save_new(1, 2).committed, 4);
    assert_eq!(engine.proof("e1"), Some(Proof::First));
    engine.event(Event::Disconnected { session: scheduler(1) });
    engine.begin_unproven(3);
    assert_eq!(engine.save_new(3, 1).present, 4, "it finds the blocks of the first");
    engine.post_save(0, 2, 0..4, false);
    assert_eq!(engine.saved().unwrap().unproven, 4);
}

#[test]
fn nobody_is_the_first_beside_an_engine_that_may_save() {
    let mut engine = Harness::engine(1);
    engine.begin_unproven(1);
    assert_eq!(engine.save_new(1, 1).unproven, 4, "the other one may have computed the missing blocks");
}

#[test]
fn nobody_is_the_first_where_blocks_may_be_that_are_not_known_of() {
    let unproven = |core: Core| {
        let mut engine = Harness::over(core, 1, SHARD_BYTES);
        engine.event(Event::Disconnected { session: SCHEDULER });
        engine.begin_unproven(1);
        engine
    };
    let config = Config { pool_bytes: 64 << 20, segment_bytes: 2 << 20, lease_ttl_ms: 1000 };
    let core = |tier| Core::new(Dram::new(config).unwrap(), &[], tier);
    let peers = peer_tier(Directory::new(directory::Config::default()));
    assert_eq!(unproven(core(Some(peers))).save_new(1, 1).unproven, 4, "peers may have some");

    let mut opening = core(None);
    opening.begin_opening();
    let mut engine = unproven(opening);
    assert_eq!(engine.save_new(1, 1).unproven, 4, "the pool file may hold some");
    engine.core.end_opening();
    assert_eq!(engine.save_new(1, 2).committed, 4, "it holds none");

    let mut lacking = core(None);
    lacking.leave_out_disks();
    assert_eq!(unproven(lacking).save_new(1, 1).unproven, 4, "a disk that was left out may hold some");

    for unreadable in [true, false] {
        let geometry =
            tiers::ssd::Geometry { unit_bytes: 4096, segment_bytes: 4 << 20, segments: 8, first_sequence: 7 };
        let over = tiers::ssd::Config { devices: vec![geometry], write_bytes_max: 1 << 20, late_ms: 1000 };
        let log = tiers::ssd::Log::new(over);
        let mut engine = unproven(core(Some(disk_tier(log, SsdAdmission::All))));
        assert_eq!(engine.save_new(1, 1).unproven, 4, "the disk is still being read");
        let all = Recovered {
            device: 0,
            segment: 3,
            sequence: 0,
            blocks: Vec::new(),
            unreadable,
            segments_read: 8,
            last: true,
        };
        engine.event(Event::Transferred { tier: 0, ends: vec![JobEnd::Recovered(all)] });
        let unproven = if unreadable { 4 } else { 0 };
        assert_eq!(engine.save_new(1, 2).unproven, unproven, "a part that could not be read may hold some");
    }

    let mut engine = unproven(Core::new(Dram::unopened(config, 0).unwrap(), &[], []));
    let kept = Remains::Block { generation: 1, namespace: NAMESPACE, hash: hash(7), group: 0 };
    let used = Opened::Used { segment: 0, block_bytes: SHARD_BYTES, first: 0, remains: vec![kept] };
    engine.event(Event::Opened(used));
    assert_eq!(engine.save_new(1, 1).unproven, 4, "an earlier life has left a block");
}

#[test]
fn a_copied_sample_is_none_and_an_own_one_is() {
    let mut engine = Harness::unjoined(1);
    engine.event(Event::Disconnected { session: RANKS[0] });
    engine.connect(RANKS[0], changed(rank_hello(1, 0), |worker| worker.live_weights = Some(Digest(LIVE))));
    engine.join();
    engine.keep(4);
    assert_eq!(engine.proof("e"), Some(Proof::Own));
    let live = NamespaceDigest(namespace::weights_live([Some(LIVE)]).unwrap()).to_string();
    let copied = |worker: &mut WorkerHello| worker.facts = [(WEIGHTS_LIVE.to_owned(), live.clone())].into();
    engine.connect(rank(1), changed(Hello { engine: "e1".into(), ..rank_hello(1, 0) }, copied));
    engine.connect_scheduler(1, scheduler(1));
    engine.report(rank(1), WorkerRequest::Join { run: run(1), step: 0 });
    engine.speaker = scheduler(1);
    engine.open(0, 0..4);
    engine.open(1, 100..104);
    assert_eq!(engine.status(0, 1, 4), (Status::Ok, 4), "it is in the same namespace");
    assert_eq!((engine.proof("e1"), engine.save_new(1, 2).unproven), (None, 4));
    engine.ask(SchedulerRequest::Weights { number: 1 });
    engine.report(rank(1), WorkerRequest::Weights { number: 1, answers: 1, live: [0xb; 16] });
    assert_eq!(engine.proof("e1"), Some(Proof::Own), "it states its weights, in a namespace of their own");
}

#[test]
fn tokens_that_an_engine_of_0_2_names_are_remembered_nowhere() {
    let mut engine = Harness::engine(1);
    engine.keep(4);
    engine.out.clear();
    let named = request::Golden { count: 3, position: 0 };
    engine.post(SchedulerRequest::Golden(named), Vec::new(), Vec::new());
    assert_eq!(engine.out, []);
}

#[test]
fn an_engine_that_joins_an_evicted_namespace_proves_by_what_was_saved_since() {
    let mut engine = Harness::engine(1);
    engine.keep(4);
    engine.begin_unproven(1);
    let mut eviction = engine.core.begin_eviction(NAMESPACE).expect("it keeps blocks");
    while engine.core.evict(&mut eviction, &mut engine.out) {}
    assert_eq!(eviction.removed().memory, 4);
    assert_eq!(engine.status(0, 1, 4), (Status::Ok, 0), "a miss");
    let saved = engine.end_save(1, 2, true);
    assert_eq!((saved.checked, saved.unproven), (0, 4), "nothing is left to compare with");
    assert_eq!((engine.proof("e1"), engine.save_new(1, 3).unproven), (None, 4));
    engine.speaker = SCHEDULER;
    engine.keep(4);
    engine.speaker = scheduler(1);
    assert_eq!(engine.check(1, 0, 4, 0..1, 0).checked, 1);
    assert_eq!((engine.proof("e1"), engine.save_new(1, 5).committed), (Some(Proof::Compared), 4));
}
