//! A pod: the product's core over slots and engine memory that hold values. Copies, searches and comparisons end at once.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use shm_protocol::handshake::{BlockRegion, Copier, Hello, Role, WorkerHello};
use shm_protocol::key::BlockHash;
use shm_protocol::message::{Outcome, Saved};
use shm_protocol::request::{SchedulerRequest, WorkerRequest};
use sidecar::compare::{BlockDifference, Number};
use sidecar::core::{
    Action, CopyDirection, Core, CoreEvent, Findings, Inspection, InspectionResult, RankBlock, RingRequest,
    SessionId,
};
use tiers::dram::{Dram, DramConfig};

use crate::rng::mix_bits;

/// A computation: 0 is correct, each fault and each wrong engine has its own number.
pub(super) type Cause = u32;
pub(super) const RIGHT: Cause = 0;
/// The computation of a wrong engine.
pub(super) const OTHER: Cause = 1;
/// The product's values.
pub(super) const REMOVALS_MAX: usize = 8;
pub(super) const DOUBT_MAX: Duration = Duration::from_secs(240);
const WITNESSES: u32 = 2;
const SAVERS_ENDED: usize = 4;
pub(super) const HOUR: Duration = Duration::from_secs(3600);
const SEGMENT_BYTES: u64 = 2 << 20;
/// Blocks in the memory of an engine.
const BLOCKS: usize = 64;

/// The KV of a block. It depends on the KV before it.
#[derive(Copy, Clone, Debug, Default)]
pub(super) struct Kv {
    word: u64,
    /// The computation of this block alone.
    own: Cause,
    /// Computations of the chain up to it, one bit each.
    causes: u64,
    /// The save that keeps it: a rank's session and a step.
    saved: (SessionId, u64),
}

/// A difference between an engine's KV and a kept chain.
#[derive(Copy, Clone, Debug)]
pub(super) struct Contradiction {
    pub(super) at: Duration,
    /// The first differing block.
    pub(super) kept: Kv,
    /// The engine's own computation of it.
    pub(super) own: Cause,
}

#[derive(Debug)]
pub(super) struct Pod {
    core: Core,
    pub(super) now: Duration,
    slots: BTreeMap<u64, Kv>,
    /// By the session of a rank.
    memories: BTreeMap<SessionId, Vec<Kv>>,
    /// Ranks of ended savers remembered by the core, the last one first.
    ended: VecDeque<SessionId>,
    outcomes: BTreeMap<(SessionId, u64), Outcome>,
    saved: Vec<(SessionId, Saved)>,
    /// By save, until the core has the result.
    differing: BTreeMap<(SessionId, u64), Contradiction>,
    /// The last contradiction with a removal, and the number of agreeing comparisons since, by the session of
    /// a scheduler.
    doubts: BTreeMap<SessionId, (Duration, u32)>,
    /// By the session of a scheduler.
    names: BTreeMap<SessionId, String>,
    pub(super) contradictions: BTreeMap<SessionId, Vec<Contradiction>>,
    removals: VecDeque<Duration>,
    /// The step of each rank.
    steps: BTreeMap<SessionId, u64>,
    /// Saves of contradicted chains: all their blocks are gone.
    refuted: BTreeSet<(SessionId, u64)>,
    /// The computations of these chains, one bit each.
    found: u64,
    /// True once the namespace began again without blocks.
    pub(super) retired: bool,
    sessions: SessionId,
    /// The last events, and the most to keep.
    pub(super) trace: VecDeque<String>,
    events: usize,
}

// === impl Kv ===

impl Kv {
    /// The KV of a key after this block.
    pub(super) fn then(self, hash: &BlockHash, own: Cause) -> Self {
        let content = hash.words().into_iter().fold(self.word, |state, word| mix_bits(state ^ word));
        let word = mix_bits(content ^ u64::from(own));
        Self { word, own, causes: self.causes | 1 << own, saved: (0, 0) }
    }

    pub(super) fn is_right(self) -> bool {
        self.causes & !(1 << RIGHT) == 0
    }

    /// The saver, by its rank's session.
    pub(super) fn saver(self) -> SessionId {
        self.saved.0
    }

    pub(super) fn is_of(self, cause: Cause) -> bool {
        self.causes & 1 << cause != 0
    }
}

// === impl Pod ===

impl Pod {
    pub(super) fn new(events: usize) -> Self {
        let (pool_bytes, segment_bytes) = (4 * SEGMENT_BYTES, SEGMENT_BYTES);
        let dram = Dram::new(DramConfig { pool_bytes, segment_bytes, lease_ttl_ms: 1000 });
        Self {
            core: Core::new(dram.expect("sizes of a pool"), &[], []),
            now: Duration::ZERO,
            slots: BTreeMap::new(),
            memories: BTreeMap::new(),
            ended: VecDeque::new(),
            outcomes: BTreeMap::new(),
            saved: Vec::new(),
            differing: BTreeMap::new(),
            doubts: BTreeMap::new(),
            names: BTreeMap::new(),
            contradictions: BTreeMap::new(),
            removals: VecDeque::new(),
            steps: BTreeMap::new(),
            refuted: BTreeSet::new(),
            found: 0,
            retired: false,
            sessions: 0,
            trace: VecDeque::new(),
            events,
        }
    }

    /// Records an event; the text is made only if events are recorded.
    pub(super) fn note(&mut self, text: impl FnOnce() -> String) {
        if self.events > 0 {
            if self.trace.len() == self.events {
                self.trace.pop_front();
            }
            self.trace.push_back(format!("{:>9} ms  {}", self.now.as_millis(), text()));
        }
    }

    /// Begins an engine's run of one rank; returns the sessions of its scheduler and its rank.
    pub(super) fn connect(&mut self, name: &str, run: [u8; 16], block_bytes: u64) -> (SessionId, SessionId) {
        let (scheduler, rank) = (self.sessions + 1, self.sessions + 2);
        self.sessions = rank;
        let regions = vec![BlockRegion { fd: 0, offset: 0, stride: block_bytes, bytes: block_bytes }];
        let (blocks, copy) = (BLOCKS as u32, Copier::Sidecar);
        let worker =
            WorkerHello { rank: 0, shard: 0, shards: 1, blocks, regions, copy, ..Default::default() };
        self.memories.insert(rank, vec![Kv::default(); BLOCKS]);
        self.names.insert(scheduler, name.to_owned());
        for (session, role) in [(rank, Role::Worker(worker)), (scheduler, Role::Scheduler { run })] {
            let hello = Box::new(Hello::new(name.to_owned(), 1, role));
            self.tell(CoreEvent::Connected { session, hello });
        }
        let request = RingRequest::Worker(WorkerRequest::Join { run, step: 0 });
        self.tell(CoreEvent::Message { session: rank, request });
        (scheduler, rank)
    }

    pub(super) fn disconnect(&mut self, sessions: (SessionId, SessionId)) {
        for session in [sessions.0, sessions.1] {
            self.tell(CoreEvent::Disconnected { session });
        }
        self.memories.remove(&sessions.1);
        self.ended.push_front(sessions.1);
        self.ended.truncate(SAVERS_ENDED);
    }

    /// Posts a scheduler's message.
    pub(super) fn ask(
        &mut self,
        session: SessionId,
        request: SchedulerRequest,
        keys: &[BlockHash],
        blocks: &[u32],
    ) {
        let request = RingRequest::Scheduler { request, keys: keys.to_vec(), blocks: blocks.to_vec() };
        self.tell(CoreEvent::Message { session, request });
    }

    /// Passes an event to the core, and carries out all that follows.
    pub(super) fn tell(&mut self, event: CoreEvent) {
        if let CoreEvent::Fences { session, start, .. } = event {
            self.steps.insert(session, start);
        }
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let compared = match event {
                CoreEvent::Inspected { save, findings: Findings::Compared(_) } => Some(save),
                _ => None,
            };
            let mut actions = Vec::new();
            self.core.handle(self.now, event, &mut actions);
            if let Some((session, op)) = compared {
                self.compared(session, op, &actions);
            }
            events.extend(actions.into_iter().filter_map(|action| self.carry_out(action)));
        }
    }

    /// Carries out an action; returns the event at its end.
    fn carry_out(&mut self, action: Action) -> Option<CoreEvent> {
        if let Action::Warn(text) = &action {
            self.note(|| text.clone());
        }
        match action {
            Action::Answer { session, op, outcome, .. } | Action::Outcome { session, op, outcome } => {
                self.outcomes.insert((session, op), outcome);
            }
            Action::Saved { session, saved } => self.end_save(session, saved),
            Action::FillSlot { slot, .. } => _ = self.slots.insert(slot.offset, Kv::default()),
            Action::FreeSlot { slot } => _ = self.slots.remove(&slot.offset),
            Action::Copy { copy, session, direction, pieces, .. } => {
                pieces.iter().for_each(|piece| self.copy(session, direction, *piece));
                return Some(CoreEvent::Copied { copy, ok: true });
            }
            Action::Inspect(inspection) => {
                let (save, found) = (inspection.save, self.compare(&inspection));
                return Some(CoreEvent::Inspected { save, findings: Findings::Compared(found) });
            }
            Action::Warn(text) if text.contains("starts again without blocks") => self.retired = true,
            Action::Close { reason, .. } => panic!("the core closed a session: {reason}"),
            _ => {}
        }
        None
    }

    fn copy(&mut self, rank: SessionId, direction: CopyDirection, piece: RankBlock) {
        let memory = self.memories.get_mut(&rank).expect("a connected rank");
        let slot = self.slots.get_mut(&piece.offset).expect("a filled slot");
        let block = &mut memory[piece.block as usize];
        match direction {
            CopyDirection::Save => *slot = Kv { saved: (rank, self.steps[&rank]), ..*block },
            CopyDirection::Load => *block = *slot,
        }
    }

    fn compare(&mut self, inspection: &Inspection) -> InspectionResult {
        let slots = inspection.pairs().iter().map(|(kept, computed)| {
            let slot = |offset| &self.slots[&offset];
            (slot(kept.offset), slot(computed.offset))
        });
        let differs: Vec<bool> = slots.map(|(kept, computed)| kept.word != computed.word).collect();
        let differing = differs.iter().filter(|differs| **differs).count() as u32;
        let first = differs.iter().position(|differs| *differs).unwrap_or_default();
        let amount = if differing == 0 { 0.0 } else { 1.0 };
        if differing > 0 {
            let (kept, computed) = inspection.pairs()[first];
            let (kept, computed) = (self.slots[&kept.offset], self.slots[&computed.offset]);
            let said = Contradiction { at: self.now, kept, own: computed.own };
            self.differing.insert(inspection.save, said);
        }
        self.note(|| format!("save {:?}: {} pairs, differing {differs:?}", inspection.save, differs.len()));
        let worst = BlockDifference { layer: 0, number: Number::Float32, amount };
        InspectionResult { differing, first: first as u32, worst }
    }

    /// Handles the core's reaction to a comparison. A contradiction removes a chain or bars its engine.
    fn compared(&mut self, session: SessionId, op: u64, actions: &[Action]) {
        let Some(said) = self.differing.remove(&(session, op)) else {
            self.doubts.entry(session).or_default().1 += 1;
            return;
        };
        self.contradictions.entry(session).or_default().push(said);
        let removes =
            |action: &Action| matches!(action, Action::Warn(text) if text.contains("are removed: engine"));
        if actions.iter().any(removes) {
            self.doubts.insert(session, (self.now, 0));
            self.removed(said.kept);
        } else {
            let name = &self.names[&session];
            assert!(self.is_barred(name), "{name} contradicts and is served: {said:?}");
        }
    }

    /// Records the removed chain of a contradicted block.
    fn removed(&mut self, Kv { saved, causes, .. }: Kv) {
        if self.memories.contains_key(&saved.0) || self.ended.contains(&saved.0) {
            self.refuted.insert(saved);
        }
        self.found |= causes & !(1 << RIGHT);
        let now = self.now;
        self.removals.retain(|at| now < *at + HOUR);
        self.removals.push_back(now);
        assert!(self.removals.len() <= REMOVALS_MAX, "more than {REMOVALS_MAX} removals within an hour");
    }

    /// Checks the end of a save. Nothing of an engine in doubt is kept, except a compared save committed
    /// before.
    fn end_save(&mut self, session: SessionId, saved: Saved) {
        let doubt = self.doubts.get(&session).filter(|(since, _)| !since.is_zero());
        let is_doubted =
            doubt.is_some_and(|(since, agreed)| self.now < *since + DOUBT_MAX && *agreed < WITNESSES);
        assert!(
            !is_doubted || saved.committed == 0 || saved.checked > 0,
            "{saved:?} of an engine in doubt was kept"
        );
        self.note(|| format!("{session}: {saved:?}"));
        self.saved.push((session, saved));
    }

    /// True if no engine has contradicted a kept chain.
    pub(super) fn is_undisputed(&self) -> bool {
        self.contradictions.is_empty()
    }

    /// True if a further contradiction removes nothing.
    pub(super) fn is_spent(&self) -> bool {
        self.removals.iter().filter(|at| self.now < **at + HOUR).count() == REMOVALS_MAX
    }

    /// The outcome of an operation.
    pub(super) fn outcome(&mut self, session: SessionId, op: u64) -> Outcome {
        self.outcomes.remove(&(session, op)).expect("all that follows was carried out")
    }

    /// The ends of a scheduler's saves since the last call.
    pub(super) fn saved(&mut self, session: SessionId) -> Vec<Saved> {
        let ends = self.saved.extract_if(.., |(of, _)| *of == session);
        ends.map(|(_, saved)| saved).collect()
    }

    /// A block in a rank's memory.
    pub(super) fn block(&mut self, rank: SessionId, block: u32) -> &mut Kv {
        &mut self.memories.get_mut(&rank).expect("a connected rank")[block as usize]
    }

    /// True if a block ought to have been removed.
    pub(super) fn is_refuted(&self, kv: Kv) -> bool {
        self.refuted.contains(&kv.saved)
    }

    /// True if a block is wrong although a chain with its fault was found before.
    pub(super) fn is_left(&self, kv: Kv) -> bool {
        kv.causes & self.found != 0
    }

    pub(super) fn is_barred(&self, name: &str) -> bool {
        self.core.barred().iter().any(|barred| barred.engine == name)
    }

    /// True if no slot holds KV of this cause.
    pub(super) fn is_free_of(&self, cause: Cause) -> bool {
        !self.slots.values().any(|kv| kv.is_of(cause))
    }
}
