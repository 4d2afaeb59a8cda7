//! A pod without bytes: the sidecar's core, and the rings of an engine's cache groups.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use shm_protocol::PROTOCOL_VERSION;
use shm_protocol::handshake::{BlockRegion, Copier, Hello, Role, WorkerHello};
use shm_protocol::namespace::{Facts, STATE_KIND, digest_facts};
use shm_protocol::request::WorkerRequest;
use shm_protocol::session::SessionMemory;
use sidecar::clients::session::ClientSession;
use sidecar::core::{Action, Core, CoreEvent, FinishedRequest, RingRequest, SessionId, Survey};
use tiers::dram::{Dram, DramConfig, segment_bytes_for};

use crate::{BLOCK_TOKENS, LAYERS_OF_GROUP};

const LEASE_TTL_MS: u64 = 30_000;

/// A cache group as the sidecar sees it.
#[derive(Copy, Clone, Debug)]
pub(crate) struct GroupShape {
    pub(crate) block_bytes: u64,
    pub(crate) has_states: bool,
}

/// The two sessions of a cache group. The worker has no ring: its words are handed to the core.
struct GroupSessions {
    scheduler: SessionId,
    worker: SessionId,
    client: ClientSession,
    memory: SessionMemory,
    facts: Facts,
}

/// See the module.
pub(crate) struct Pod {
    core: Core,
    groups: Vec<GroupSessions>,
    now_ms: u64,
    out: Vec<Action>,
    /// Events that follow from actions.
    events: Vec<CoreEvent>,
    /// Ended requests, by group.
    pub(crate) ended: Vec<FinishedRequest>,
}

/// The sizes of a pool of so many bytes.
pub(crate) fn pool_of(pool_bytes: u64) -> DramConfig {
    let segment_bytes = segment_bytes_for(pool_bytes * LAYERS_OF_GROUP) / LAYERS_OF_GROUP;
    DramConfig { pool_bytes, segment_bytes, lease_ttl_ms: LEASE_TTL_MS }
}

/// The run of a group's engine.
fn run(group: usize) -> [u8; 16] {
    [1 + group as u8; 16]
}

// === impl Pod ===

impl Pod {
    /// A sidecar with a pool of so many bytes, and the connected groups of one engine.
    pub(crate) fn new(pool_bytes: u64, shapes: &[GroupShape], engine_blocks: u32) -> Self {
        let core = Core::new(Dram::new(pool_of(pool_bytes)).expect("sizes of a pool"), &[], None);
        let (groups, out, events, ended) = Default::default();
        let mut pod = Self { core, groups, now_ms: 0, out, events, ended };
        for (number, shape) in shapes.iter().enumerate() {
            let sessions = GroupSessions::new(number, *shape);
            pod.connect(number, &sessions, shape.block_bytes, engine_blocks);
            pod.groups.push(sessions);
        }
        pod.carry_out();
        for group in 0..pod.groups.len() {
            let session = pod.groups[group].worker;
            let request = RingRequest::Worker(WorkerRequest::Join { run: run(group), step: 0 });
            pod.handle(CoreEvent::Message { session, request });
        }
        pod
    }

    fn connect(&mut self, number: usize, sessions: &GroupSessions, bytes: u64, blocks: u32) {
        let worker = WorkerHello {
            shards: 1,
            blocks,
            regions: vec![BlockRegion { fd: 0, offset: 0, stride: bytes, bytes }],
            copy: Copier::Sidecar,
            facts: sessions.facts.clone(),
            ..WorkerHello::default()
        };
        let scheduler = Role::Scheduler { run: run(number) };
        let roles = [(sessions.worker, Role::Worker(worker)), (sessions.scheduler, scheduler)];
        for (session, role) in roles {
            let hello = Box::new(Hello::new(format!("states group {number}"), 1, role));
            self.core.handle(self.now(), CoreEvent::Connected { session, hello }, &mut self.out);
        }
    }

    /// The session memory of a group's scheduler.
    pub(crate) fn memory(&self, group: usize) -> SessionMemory {
        self.groups[group].memory.clone()
    }

    /// Lets time pass.
    pub(crate) fn pass(&mut self, ms: u64) {
        self.now_ms += ms;
        self.handle(CoreEvent::Tick);
    }

    /// Every worker has begun and done a step.
    pub(crate) fn end_step(&mut self, step: u64) {
        for group in 0..self.groups.len() {
            let session = self.groups[group].worker;
            self.handle(CoreEvent::Fences { session, start: step, done: step });
        }
    }

    /// Reads a group's ring to its tail, and ends all copies.
    pub(crate) fn serve(&mut self, group: usize) {
        let session = self.groups[group].scheduler;
        self.groups[group].client.look_at_ring().expect("an honest engine");
        while let Some(request) =
            self.groups[group].client.read_message(usize::MAX).expect("an honest engine")
        {
            self.handle(CoreEvent::Message { session, request });
        }
        self.groups[group].client.release_read();
        self.handle(CoreEvent::Drained { session, void_below: self.groups[group].client.void_below() });
    }

    /// The kept blocks of each group.
    pub(crate) fn kept(&self) -> Vec<u64> {
        let mut survey = Survey::default();
        let counts = loop {
            if let Some(counts) = self.core.survey(&mut survey) {
                break counts;
            }
        };
        let of =
            |group: &GroupSessions| counts.get(&digest_facts(&group.facts)).map_or(0, |kept| kept.memory);
        self.groups.iter().map(of).collect()
    }

    fn now(&self) -> Duration {
        Duration::from_millis(self.now_ms)
    }

    fn handle(&mut self, event: CoreEvent) {
        self.events.push(event);
        while let Some(event) = self.events.pop() {
            self.core.handle(self.now(), event, &mut self.out);
            self.ended.extend(self.core.drain_ended());
            self.carry_out();
        }
        self.groups.iter_mut().for_each(|group| group.client.flush());
    }

    fn group(&mut self, session: SessionId) -> Option<&mut GroupSessions> {
        self.groups.iter_mut().find(|group| group.scheduler == session)
    }

    fn carry_out(&mut self) {
        for action in std::mem::take(&mut self.out) {
            self.apply(action);
        }
    }

    fn apply(&mut self, action: Action) {
        match action {
            Action::Answer { session, op, outcome, refs, sources, chunks, from } => {
                let client = &mut self.group(session).expect("a scheduler asked").client;
                client.write_refs(&chunks, from, &refs, &sources);
                client.store_outcome(op, outcome);
            }
            Action::Outcome { session, op, outcome } => {
                // A worker's load has ended: the engine of the bench takes that for granted.
                if let Some(group) = self.group(session) {
                    group.client.store_outcome(op, outcome);
                }
            }
            Action::Saved { session, saved } => {
                let client = &mut self.group(session).expect("a scheduler saves").client;
                client.push_saved(&saved).expect("fewer saves than the ring has slots");
            }
            Action::Copy { copy, .. } => self.events.push(CoreEvent::Copied { copy, ok: true }),
            Action::Inspect(inspection) => {
                let findings = inspection.carry_out(|_, out| out.fill(0));
                self.events.push(CoreEvent::Inspected { save: inspection.save, findings });
            }
            Action::Bind { words, .. } => {
                for (session, bound) in words {
                    self.group(session).into_iter().for_each(|group| group.client.show_bound(bound));
                }
            }
            Action::Close { session, reason } => panic!("session {session} was closed: {reason}"),
            Action::Warn(text) => panic!("{text}"),
            // Headers of slots: there is no memory.
            _ => {}
        }
    }
}

// === impl GroupSessions ===

impl GroupSessions {
    fn new(number: usize, shape: GroupShape) -> Self {
        let kind = if shape.has_states { STATE_KIND } else { "full" };
        let facts = [
            ("group", number.to_string()),
            ("group_kind", kind.into()),
            ("block_tokens", BLOCK_TOKENS.to_string()),
        ];
        let facts = facts.map(|(name, value)| (name.into(), value));
        let (worker, scheduler) = (2 * number as u64 + 1, 2 * number as u64 + 2);
        let (_, memory) = SessionMemory::create(PROTOCOL_VERSION, 1, scheduler).expect("a session's memory");
        let nothing = || OwnedFd::from(File::open("/dev/null").expect("/dev/null"));
        let client = ClientSession::new(memory.clone(), Arc::new(nothing()), nothing(), None);
        Self { scheduler, worker, client, memory, facts: facts.into() }
    }
}
