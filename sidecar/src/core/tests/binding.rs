//! The binding of an engine, and its end.

use shm_protocol::handshake::PROBE_RUN;
use shm_protocol::namespace;

use super::*;

const LIVE: [u8; 16] = [0xa; 16];
const TUNED: [u8; 16] = [0xb; 16];

/// An engine with weights sampled by its ranks.
fn joined(world_size: u32) -> Harness {
    let mut engine = with(world_size, |worker| worker.live_weights = Some(Digest(LIVE)));
    engine.join();
    engine
}

/// An engine with changed hellos of its ranks, not joined yet.
fn with(world_size: u32, change: impl Fn(&mut WorkerHello)) -> Harness {
    let mut engine = Harness::unjoined(world_size);
    for rank in 0..world_size {
        let session = RANKS[rank as usize];
        engine.disconnect([session]);
        engine.connect(session, changed(rank_hello(world_size, rank), &change));
    }
    engine
}

impl Harness {
    fn weights(&mut self, number: u64) {
        self.ask(SchedulerRequest::Weights { number });
    }

    fn holds(&mut self, rank: usize, number: u64, answers: u64, live: [u8; 16]) {
        self.report(RANKS[rank], WorkerRequest::Weights { number, answers, live });
    }

    /// Returns the words shown to the processes since the last look, the last ones of each.
    fn shown(&mut self) -> BTreeMap<SessionId, Bound> {
        self.take(taken!(Action::Bind { words, .. } => words)).flatten().collect()
    }
}

#[test]
fn equal_weights_give_the_old_namespace_back_and_others_another() {
    let mut engine = joined(1);
    let live = namespace::weights_live([Some(LIVE)]);
    let word = namespace::digest(&namespace::complete(&Facts::new(), live)).words()[0];
    let first = Bound { weights: 0, live, namespace: word };
    assert_eq!(engine.shown(), BTreeMap::from([(RANKS[0], first), (SCHEDULER, first)]));
    engine.keep(2);
    assert_eq!(engine.query(0, 2, 0, 2).value, 2);
    engine.weights(1);
    assert_eq!(engine.query(0, 3, 0, 2).status, Status::NotReady, "its weights are not stated");
    assert_eq!(engine.core.stats().leases, 0);
    engine.out.clear();
    engine.holds(0, 1, 1, TUNED);
    let shown = engine.shown();
    assert_eq!((shown[&RANKS[0]].weights, shown[&SCHEDULER].weights), (1, 1));
    assert_ne!(shown[&SCHEDULER].namespace, word);
    let miss = engine.query(0, 4, 0, 2);
    assert_eq!((miss.status, miss.value), (Status::Ok, 0));
    engine.weights(5);
    engine.holds(0, 2, 5, LIVE);
    let shown = engine.shown();
    assert_eq!(shown[&RANKS[0]], Bound { weights: 2, ..first });
    assert_eq!(shown[&SCHEDULER], Bound { weights: 5, ..first });
    assert_eq!(engine.query(0, 6, 0, 2).value, 2);
}

#[test]
fn one_late_rank_keeps_the_engine_unbound_and_an_early_answer_waits_for_its_question() {
    let mut engine = joined(2);
    engine.keep(2);
    engine.weights(1);
    engine.holds(1, 1, 1, LIVE);
    assert_eq!(engine.query(0, 2, 0, 2).status, Status::NotReady);
    engine.holds(0, 1, 1, LIVE);
    assert_eq!(engine.query(0, 3, 0, 2).value, 2);
    engine.holds(0, 2, 2, TUNED);
    assert_eq!(engine.query(0, 4, 0, 2).status, Status::NotReady, "its scheduler's ring is read later");
    assert_eq!(engine.closed(), None);
    engine.weights(2);
    engine.holds(1, 2, 2, TUNED);
    assert_eq!(engine.query(0, 5, 0, 2).status, Status::Ok);
}

#[test]
fn the_order_of_the_ranks_is_part_of_the_weights() {
    let namespace = |lives: [[u8; 16]; 2]| {
        let mut engine = Harness::unjoined(2);
        lives.into_iter().enumerate().for_each(|(rank, live)| engine.holds(rank, 1, 0, live));
        engine.join();
        engine.shown()[&SCHEDULER].namespace
    };
    assert_ne!(namespace([LIVE, TUNED]), namespace([TUNED, LIVE]));
    assert_eq!(namespace([LIVE, TUNED]), namespace([LIVE, TUNED]));
}

#[test]
fn absent_weights_are_not_equal() {
    let namespace = |lives: &[usize]| {
        let mut engine = Harness::unjoined(2);
        lives.iter().for_each(|&rank| engine.holds(rank, 1, 0, LIVE));
        engine.join();
        engine.shown()[&SCHEDULER]
    };
    let (none, one, other, both) = (namespace(&[]), namespace(&[0]), namespace(&[1]), namespace(&[0, 1]));
    assert_eq!(none, Bound { weights: 0, live: None, namespace: NAMESPACE.words()[0] });
    let all = std::collections::BTreeSet::from([none, one, other, both].map(|it| it.namespace));
    assert_eq!(all.len(), 4);
}

#[test]
fn a_rank_whose_weights_changed_by_themselves_closes_its_schedulers_session() {
    let mut engine = joined(2);
    engine.holds(0, 1, 0, LIVE);
    assert_eq!(engine.closed(), None, "it looked, and they are the same");
    engine.holds(1, 1, 0, TUNED);
    let reason = engine.closed().unwrap();
    assert!(reason.contains("without a message of its scheduler"), "{reason}");
    engine.open(0, 0..1);
    assert_eq!(engine.query(0, 1, 0, 1).status, Status::NotReady);
    // A new session of the rank does not help, either.
    engine.event(Event::Disconnected { session: RANKS[1] });
    let hello = changed(rank_hello(2, 1), |worker| worker.live_weights = Some(Digest(TUNED)));
    engine.connect(RANKS[1], hello);
    engine.join_from(RANKS[1], 0);
    assert!(engine.closed().is_some());
}

#[test]
fn a_session_that_takes_a_ranks_place_is_bound_by_what_it_holds() {
    for (live, closes) in [(LIVE, false), (TUNED, true)] {
        let mut engine = joined(1);
        engine.out.clear();
        let again = changed(rank_hello(1, 0), |worker| worker.live_weights = Some(Digest(live)));
        engine.connect(9, again);
        engine.join_from(9, 0);
        match closes {
            true => assert!(engine.closed().is_some()),
            false => assert!(engine.shown().contains_key(&9)),
        }
    }
}

#[test]
fn a_save_that_waits_for_the_binding_ends_with_the_weights() {
    let mut engine = Harness::unjoined(1);
    engine.open(0, 0..2);
    engine.save(0, 1, 1, 1..3);
    engine.weights(1);
    assert_eq!(engine.saved().unwrap().dropped, 2);
}

#[test]
fn an_engine_that_is_to_join_another_namespace_is_not_served_and_told_so() {
    let mut engine = with(2, |worker| worker.expects = Some("0".repeat(32)));
    engine.join();
    let warned = engine.take(taken!(Action::Warn(text) => text)).next();
    let (text, ours) = (warned.unwrap(), NAMESPACE.to_string());
    assert!(text.contains("pillion.namespace") && text.contains(&ours), "{text}");
    engine.open(0, 0..1);
    assert_eq!(engine.query(0, 1, 0, 1).status, Status::NotReady);
    let mut engine = with(2, |worker| worker.expects = Some(NAMESPACE.to_string()));
    engine.join();
    engine.open(0, 0..1);
    assert_eq!(engine.query(0, 1, 0, 1).status, Status::Ok);
}

#[test]
fn roles_that_see_other_cache_groups_do_not_meet() {
    let mut engine = Harness::unjoined(1);
    engine.event(Event::Disconnected { session: RANKS[0] });
    let hello = Hello { groups: Some(Digest(LIVE)), ..rank_hello(1, 0) };
    engine.connect(RANKS[0], hello);
    engine.join();
    let reason = engine.closed().unwrap();
    assert!(reason.contains(&NamespaceDigest(LIVE).to_string()) && reason.contains("none"), "{reason}");
}

#[test]
fn numbers_of_weights_rise() {
    let wrong: [fn(&mut Harness); 3] = [
        |engine| engine.weights(1),
        |engine| engine.holds(0, 1, 2, LIVE),
        |engine| engine.holds(0, 2, 0, LIVE),
    ];
    for wrong in wrong {
        let mut engine = joined(1);
        engine.weights(1);
        engine.holds(0, 1, 1, LIVE);
        assert_eq!(engine.closed(), None);
        wrong(&mut engine);
        let reason = engine.closed().unwrap();
        assert!(reason.contains("WEIGHTS"), "{reason}");
    }
}

#[test]
fn what_a_lost_rank_was_to_save_is_not_copied_from_the_memory_of_the_next() {
    for gone_first in [true, false] {
        let mut engine = Harness::engine(1);
        engine.open(0, 0..2);
        if gone_first {
            engine.disconnect([RANKS[0]]);
        }
        engine.save(0, 1, 5, 1..3);
        engine.connect(9, rank_hello(1, 0));
        engine.join_from(9, 0);
        if !gone_first {
            engine.disconnect([RANKS[0]]);
        }
        engine.fences(9, 6, 6);
        engine.drained();
        assert!(!engine.out.iter().any(|action| matches!(action, Action::Copy { .. })), "{:?}", engine.out);
        assert_eq!(engine.saved().unwrap().dropped, 2);
        engine.save(0, 2, 7, 1..3);
        engine.fences(9, 7, 7);
        engine.copied();
        assert_eq!(engine.saved().unwrap().committed, 2, "its own blocks are kept");
    }
}

#[test]
fn the_ranks_of_a_scheduler_that_connects_anew_connect_anew_too() {
    let mut engine = Harness::keeping(1, 2);
    engine.disconnect([SCHEDULER]);
    engine.connect(77, hello(1, Role::Scheduler { run: RUN }));
    engine.speaker = 77;
    let reason = engine.closed().unwrap();
    assert!(reason.contains("connected again"), "{reason}");
    engine.disconnect([RANKS[0]]);
    engine.open(0, 0..2);
    assert_eq!(
        engine.query(0, 1, 0, 2).status,
        Status::NotReady,
        "its loads would have ids of loads that have ended"
    );
    engine.connect(RANKS[0], rank_hello(1, 0));
    engine.join_from(RANKS[0], 0);
    assert_eq!(engine.closed(), None);
    assert_eq!(engine.query(0, 2, 0, 2).value, 2);
}

#[test]
fn probes_count_as_no_engine_and_no_rank_joins_one() {
    let mut engine = Harness::engine(1);
    let before = (engine.core.stats(), engine.core.holders().count());
    for probe in [40, 41] {
        let role = Role::Scheduler { run: PROBE_RUN };
        engine.connect(probe, Hello::new("pillion bench".into(), 1, role));
        engine.speaker = probe;
        engine.open(0, 0..1);
        assert_eq!(engine.query(0, 1, 0, 1).status, Status::NotReady);
        assert_eq!(engine.took(), []);
    }
    assert_eq!(engine.closed(), None);
    assert_eq!((engine.core.stats(), engine.core.holders().count()), before);
    engine.connect(42, Hello { engine: "pillion bench".into(), ..rank_hello(1, 0) });
    engine.report(42, WorkerRequest::Join { run: PROBE_RUN, step: 0 });
    assert!(engine.closed().is_some_and(|reason| reason.contains("a probe's")));
}
