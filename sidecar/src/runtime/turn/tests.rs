//! The order of two engines' messages around a long hint.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use shm_protocol::PROTOCOL_VERSION;
use shm_protocol::hints::Advice;
use shm_protocol::layout::QUERY_KEYS;
use shm_protocol::message::{Kind, Message};
use shm_protocol::request::{Advise, LogKeys, SchedulerRequest};
use shm_protocol::ring::Producer;
use shm_protocol::session::{RegionRing, Ring, SessionMemory};

use super::{Host, Turn, TurnSource, Violation, fall_asleep};
use crate::clients::session::ClientSession;
use crate::core::{AdvicePart, CoreEvent, RingRequest, SessionId};

const HINTING: SessionId = 1;
const NEIGHBOUR: SessionId = 2;
const ROUND: usize = 8192;

/// Two schedulers, and the events that a core would get.
struct Host2 {
    sessions: BTreeMap<SessionId, ClientSession>,
    rings: BTreeMap<SessionId, Producer<RegionRing>>,
    turn_cost: usize,
    events: Vec<CoreEvent>,
}

impl Host2 {
    fn new(turn_cost: usize) -> Self {
        let (mut sessions, mut rings) = (BTreeMap::new(), BTreeMap::new());
        for id in [HINTING, NEIGHBOUR] {
            let (_, memory) = SessionMemory::create(PROTOCOL_VERSION, 1, id).expect("memory");
            let nothing = || OwnedFd::from(File::open("/dev/null").expect("/dev/null"));
            rings.insert(id, Producer::new(memory.ring(Ring::Submission)));
            sessions.insert(id, ClientSession::new(memory, Arc::new(nothing()), nothing(), None));
        }
        Self { sessions, rings, turn_cost, events: Vec::new() }
    }

    fn post(&mut self, id: SessionId, request: SchedulerRequest) {
        let ring = self.rings.get_mut(&id).expect("both have rings");
        ring.push(&Message::from(request).encode_slot());
        ring.publish();
    }

    fn hint(&mut self, advice: Advice, keys: std::ops::Range<u32>) {
        let advise = Advise { op: 1, keys: LogKeys::new(0, keys), advice, alone: true };
        self.post(HINTING, SchedulerRequest::Advise(advise));
    }

    /// Plays a whole turn. Returns its events.
    fn play(&mut self, turn: &mut Turn) -> Vec<CoreEvent> {
        while turn.step(self) {}
        std::mem::take(&mut self.events)
    }
}

impl Host for Host2 {
    fn take_one(&mut self, _: TurnSource) -> usize {
        0
    }

    fn sessions(&mut self) -> impl Iterator<Item = (SessionId, &mut ClientSession)> {
        self.sessions.iter_mut().map(|(id, session)| (*id, session))
    }

    fn session(&mut self, id: SessionId) -> Option<&mut ClientSession> {
        self.sessions.get_mut(&id)
    }

    fn costs(&mut self) -> (usize, usize) {
        (self.turn_cost, ROUND)
    }

    fn handle(&mut self, event: CoreEvent) {
        self.events.push(event);
    }

    fn behind(&self) -> Option<SessionId> {
        None
    }

    fn was_touched(&mut self) -> bool {
        true
    }

    fn refuse_session(&mut self, session: SessionId, violation: Violation) {
        panic!("session {session}: {violation}");
    }

    fn tick(&mut self) {}
}

fn parts(events: &[CoreEvent]) -> Vec<AdvicePart> {
    let part = |event: &CoreEvent| match event {
        CoreEvent::Message { session: HINTING, request: RingRequest::Advice(part) } => Some(*part),
        _ => None,
    };
    events.iter().filter_map(part).collect()
}

fn kinds(events: &[CoreEvent], id: SessionId) -> Vec<Kind> {
    let kind = |event: &CoreEvent| match event {
        CoreEvent::Message { session, request: RingRequest::Scheduler { request, .. } } if *session == id => {
            Some(Message::from(*request).kind)
        }
        _ => None,
    };
    events.iter().filter_map(kind).collect()
}

fn drained(events: &[CoreEvent], id: SessionId) -> bool {
    events.iter().any(|event| matches!(event, CoreEvent::Drained { session, .. } if *session == id))
}

#[test]
fn a_neighbour_is_answered_between_the_parts_of_the_longest_hint() {
    for (advice, turn_cost) in [(Advice::Pin { seconds: 1 }, 2 * QUERY_KEYS), (Advice::Demote, ROUND / 2)] {
        let mut host = Host2::new(turn_cost);
        let (mut turn, mut seen) = (Turn::default(), Vec::new());
        host.hint(advice, 0..QUERY_KEYS as u32);
        host.post(HINTING, SchedulerRequest::Close { log: 0, way: 0 });
        loop {
            host.post(NEIGHBOUR, SchedulerRequest::Release { log: 3 });
            let events = host.play(&mut turn);
            assert_eq!(kinds(&events, NEIGHBOUR), [Kind::Release], "in each turn");
            let [part] = parts(&events)[..] else { panic!("one part in a turn: {events:?}") };
            assert!(part.advise.keys.count as usize * 8 <= ROUND.min(turn_cost));
            seen.push(part);
            if part.is_last {
                break;
            }
            assert_eq!(kinds(&events, HINTING), [], "nothing before the last part");
            assert!(!drained(&events, HINTING) && turn.backlog() == [HINTING] && !fall_asleep(&mut host));
        }
        let events = host.play(&mut turn);
        assert!(drained(&events, HINTING) && fall_asleep(&mut host));
        if advice == Advice::Demote {
            seen.reverse();
        }
        let ends = seen.iter().scan(0, |end, part| {
            let LogKeys { from, count, .. } = part.advise.keys;
            let follows = from == *end;
            *end += count;
            Some(follows)
        });
        assert!(ends.clone().all(|follows| follows), "each key once");
        assert_eq!(seen.iter().map(|part| part.advise.keys.count).sum::<u32>(), QUERY_KEYS as u32);
    }
}

#[test]
fn messages_behind_a_hint_keep_their_order() {
    let mut host = Host2::new(2 * QUERY_KEYS);
    let mut turn = Turn::default();
    host.hint(Advice::Prefetch, 0..2000);
    host.hint(Advice::Prefetch, 0..0);
    host.post(HINTING, SchedulerRequest::Close { log: 0, way: 0 });
    let first = host.play(&mut turn);
    assert_eq!((parts(&first).len(), kinds(&first, HINTING)), (1, vec![]));
    let second = host.play(&mut turn);
    let ends: Vec<bool> = parts(&second).iter().map(|part| part.is_last).collect();
    assert_eq!((ends, kinds(&second, HINTING)), (vec![true, true], vec![Kind::Close]));
}
