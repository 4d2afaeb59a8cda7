//! Hints of clients: posted at a request's begin or end, and their outcomes.

use connector_shim::core::policy::{HintEnds, Remark};
use shm_protocol::hints::{Advice, HintAction, HintEnd, RequestHints};
use shm_protocol::message::{Status, WAY_LAST};

use crate::harness::{BLOCK_TOKENS, Engine, Setup, full, key};

const PIN: &str = r#"{"hints": [{"action": "pin", "seconds": 60}]}"#;

impl Engine {
    fn arrive_hinted(&mut self, blocks: u32, params: &str) -> u64 {
        let id = self.follow(blocks * BLOCK_TOKENS, Default::default());
        self.hint(id, params);
        id
    }

    fn hint(&mut self, id: u64, params: &str) {
        let (last, read) = RequestHints::read_params(params);
        let time = self.time;
        self.policy.follow_hints(id, last, read, time);
        self.serve();
    }

    /// The outcomes known after one more step.
    fn hint_ends(&mut self) -> Vec<HintEnds> {
        self.idle();
        self.policy.take_hint_ends()
    }
}

#[test]
fn a_pin_is_posted_at_the_end_of_its_request_before_the_log_closes() {
    let mut engine = Engine::new();
    let id = engine.arrive_hinted(3, PIN);
    engine.compute(id);
    assert!(engine.sidecar().advised.is_empty() && engine.policy.has_hints(id));
    engine.finish(id);
    assert_eq!(engine.sidecar().advised, [(0, 3, Advice::Pin { seconds: 60 }, false)]);
    assert_eq!(engine.sidecar().closed, [0]);
    assert_eq!(engine.hint_ends(), [(id, vec![(Some(HintAction::Pin), HintEnd::Done)])]);
    assert!(!engine.policy.has_hints(id) && engine.hint_ends().is_empty());
}

#[test]
fn an_answer_s_last_token_is_in_no_hinted_block() {
    let mut engine = Engine::new();
    for (answer, blocks) in [(BLOCK_TOKENS, 2), (BLOCK_TOKENS + 1, 3)] {
        let id = engine.arrive_hinted(2, PIN);
        engine.compute(id);
        let request = &mut engine[id];
        (request.tokens, request.keys) = (2 * BLOCK_TOKENS + answer, (0..3).map(key).collect());
        engine.finish(id);
        let advised = engine.sidecar().advised.pop();
        assert_eq!(advised.map(|(_, count, ..)| count), Some(blocks));
    }
}

#[test]
fn a_prefetch_is_posted_when_its_request_arrives_and_told_at_its_end() {
    let mut engine = Engine::new();
    engine.sidecar().advice = Some(Status::Absent);
    let id =
        engine.arrive_hinted(3, r#"{"hints": [{"action": "prefetch", "tokens": 40}, {"action": "demote"}]}"#);
    assert_eq!(engine.sidecar().advised, [(0, 2, Advice::Prefetch, false)], "whole blocks of its tokens");
    assert!(engine.hint_ends().is_empty());
    engine.sidecar().advice = Some(Status::Clipped);
    engine.finish(id);
    assert_eq!(engine.sidecar().advised[1..], [(0, 3, Advice::Demote, false)]);
    let ends =
        vec![(Some(HintAction::Prefetch), HintEnd::Missing), (Some(HintAction::Demote), HintEnd::Clipped)];
    assert_eq!(engine.hint_ends(), [(id, ends)]);
}

#[test]
fn the_last_request_says_so_also_if_its_hints_are_refused() {
    let mut engine = Engine::new();
    for params in [r#"{"last": true}"#, r#"{"last": true, "hints": 7}"#] {
        let id = engine.arrive_hinted(2, params);
        engine.compute(id);
        engine.finish_in(id, 5);
        assert_eq!(engine.sidecar().ways.pop(), Some(WAY_LAST), "{params}");
    }
    let id = engine.arrive_hinted(2, "{}");
    engine.finish_in(id, 5);
    assert!(!engine.policy.has_hints(id), "nothing was asked for");
}

#[test]
fn refused_hints_are_said_once_a_minute_and_counted_each_time() {
    let mut engine = Engine::new();
    let refuse = |engine: &mut Engine| {
        let id = engine.arrive_hinted(2, r#"{"hints": [{"action": "keep"}]}"#);
        engine.compute(id);
        engine.finish(id);
        assert_eq!(engine.hint_ends(), [(id, vec![(None, HintEnd::Refused)])]);
        engine.policy.take_remarks()
    };
    let said = refuse(&mut engine);
    let [Remark::HintsRefused { reason, .. }] = &said[..] else { panic!("{said:?}") };
    assert!(reason.contains("pass one of retain, pin, demote, prefetch"), "{reason}");
    assert!(refuse(&mut engine).is_empty());
    engine.time += std::time::Duration::from_secs(60);
    assert_eq!(refuse(&mut engine).len(), 1);
    assert!(engine.sidecar().advised.is_empty());
}

#[test]
fn hints_without_an_answer_are_missing_and_the_request_has_ended_long_before() {
    let mut engine = Engine::new();
    engine.sidecar().advice = None;
    let id = engine.arrive_hinted(2, PIN);
    engine.finish(id);
    assert!(engine.hint_ends().is_empty());
    (0..1000).for_each(|_| _ = engine.idle());
    assert_eq!(engine.hint_ends(), [(id, vec![(Some(HintAction::Pin), HintEnd::Missing)])]);
}

#[test]
fn an_earlier_sidecar_gets_no_advice() {
    let mut engine = Engine::new();
    engine.sidecar().knows_hints(false);
    let id = engine.arrive_hinted(2, PIN);
    engine.finish(id);
    assert!(engine.sidecar().advised.is_empty());
    assert_eq!(engine.hint_ends(), [(id, vec![(Some(HintAction::Pin), HintEnd::Missing)])]);
}

#[test]
fn each_cache_group_gets_the_hint() {
    let mut setup = Setup::default();
    let mut narrow = full();
    (narrow.block_tokens, narrow.hashes_each, narrow.key_tokens) = (2 * BLOCK_TOKENS, 2, 2 * BLOCK_TOKENS);
    setup.forms.push(narrow);
    let mut engine = setup.engine();
    let id = engine.arrive_hinted(4, PIN);
    engine.finish(id);
    let advised: Vec<_> = (0..2).map(|group| engine.policy.session(group).sidecar.advised.clone()).collect();
    let pin = Advice::Pin { seconds: 60 };
    assert_eq!(advised, [vec![(0, 4, pin, false)], vec![(0, 2, pin, false)]]);
}
