//! The scheduler process: vLLM's scheduler, the policy and its session, in moves so small that the sidecar
//! and the ranks act between any two.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::convert::Infallible;
use std::rc::Rc;
use std::time::{Duration, Instant};

use connector_shim::core::policy::host::SessionHost;
use connector_shim::core::policy::kinds::{GroupForm, GroupKind, GroupSet};
use connector_shim::core::policy::{
    Arrival, EnginePolicy, FoundTokens, PolicyOptions, PolicyWait, RequestId,
};
use connector_shim::core::scheduler::{LoadWait, SessionConfig};
use shm_protocol::hints::{Advice, Hint, RequestHints};
use shm_protocol::key::{BlockHash, NamespaceDigest};
use shm_protocol::layout::LOAD_WAIT_MS;
use shm_protocol::layout::SUBMISSION_SLOTS;
use shm_protocol::namespace;
use shm_protocol::prefill::PrefillRate;
use shm_protocol::request::{Cancel, LogKeys, Query, SchedulerRequest};

use super::blocks::Blocks;
use super::calls::COUNTS;
use super::line::Line;
use super::request::{Request, Spec, State, Work};
use super::{BLOCK_TOKENS, Model, Port, Second, Shared, WORD_TOKENS};
use crate::ctx::{Actor, BUDGET, Ctx, Micros};

/// Requests served at once by one engine; more wait for a place.
const REQUESTS: usize = 4;
/// Free slots left in a flooded ring: within the reserve, and above it.
const FLOOD_LEAVES: [u32; 5] = [0, 1, 3, 1024, 1026];

/// Outputs withheld from the policy in a row: more than it waits for.
pub(super) const MUTE_STEPS: u64 = 40;

/// The scheduler's next move.
#[derive(Debug)]
pub(super) enum Phase {
    Begin,
    /// Queries for waiting requests; so many more may be admitted in this step.
    Match(usize),
    /// Allocates blocks for the request at the head of the queue; `own` are its blocks in the prefix cache.
    Admit {
        own: Vec<Vec<u32>>,
        found: FoundTokens,
        admit: usize,
    },
    /// Waits for the answer to a call of the policy, for the request at the head of the queue.
    Await {
        wait: PolicyWait,
        began: Instant,
        call: Call,
        admit: usize,
    },
    Schedule,
}

/// A call of the policy with a wait.
#[derive(Debug)]
pub(super) enum Call {
    /// A query for a request with these blocks in the prefix cache, by group.
    Match(Vec<Vec<u32>>),
    /// A load into these blocks, by group. True: beside the steps; false: within one.
    Load(Vec<Vec<u32>>, bool),
}

/// A step not ended by every rank.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) work: Vec<(u64, u32, usize)>,
    pub(super) number: u64,
    /// The engine does not use its output.
    pub(super) fails: bool,
}

#[derive(Debug)]
pub(crate) struct Scheduler {
    pub(super) model: Rc<Model>,
    /// For each group.
    pub(super) runs: Rc<[[u8; 16]]>,
    pub(super) policy: EnginePolicy<Line>,
    /// The session's counters at the last step.
    pub(super) counted: [u64; COUNTS],
    /// Number of weight changes, and the current weights.
    pub(super) weights: (u64, u8),
    /// The generation of the namespace.
    salt: Option<[u8; 16]>,
    pub(super) step: u64,
    pub(super) phase: Phase,
    pub(super) requests: BTreeMap<u64, Request>,
    pub(super) waiting: VecDeque<u64>,
    /// Requests to query for in the next step.
    pub(super) later: Vec<u64>,
    pub(super) running: Vec<u64>,
    pub(super) blocks: Blocks,
    pub(super) in_flight: VecDeque<InFlight>,
    /// The requests computed by each step without a reported output, by their numbers in the policy.
    pub(super) unreported: BTreeMap<u64, Vec<RequestId>>,
    /// Outputs still to withhold from the policy.
    pub(super) mute: u64,
    /// Live requests of the last step.
    pub(super) last: BTreeSet<u64>,
    /// Requests computed by this step.
    pub(super) scheduled: Vec<u64>,
    pub(super) work: Vec<Work>,
    /// Blocks listed by this step for requests preempted in it.
    pub(super) unfilled: Vec<u32>,
    /// The generation has changed since the last step.
    pub(super) outdated: bool,
    /// Computed words of the request being admitted.
    pub(super) admitted: usize,
    /// A load is promised, and no rank knows it yet.
    pub(super) promised: bool,
    /// Fill the ring in the next step.
    flood: bool,
}

// === impl Scheduler ===

impl Scheduler {
    pub(super) fn new(model: Rc<Model>, runs: Vec<[u8; 16]>, ports: Vec<Port>, ctx: &Ctx) -> Self {
        let config = SessionConfig {
            budget: Duration::from_micros(BUDGET),
            by_engine: model.by_engine,
            early: model.early,
            part_blocks: model.machine.part_blocks(),
            streams: model.second.is_none(),
            whole_blocks: model.machine.whole_blocks(),
            last: false,
            load_wait: LoadWait { most_ms: LOAD_WAIT_MS, ..LoadWait::default() },
        };
        let options = PolicyOptions {
            loads: true,
            saves: true,
            checks: model.checks,
            tokens_per_step: WORD_TOKENS,
            keep_copies: model.keep_copies || !model.caches,
            ..PolicyOptions::default()
        };
        let full = GroupForm {
            kind: GroupKind::Full,
            block_tokens: BLOCK_TOKENS,
            hashes_each: 1,
            key_tokens: BLOCK_TOKENS,
            window: 0,
        };
        let second = model.second.map(|second| match second {
            Second::Window(blocks) => {
                let reads = blocks as u32;
                GroupForm { kind: GroupKind::Window { reads }, window: reads * BLOCK_TOKENS + 1, ..full }
            }
            Second::States => GroupForm { kind: GroupKind::State, ..full },
        });
        let lines = ports.into_iter().enumerate().map(|(group, port)| {
            let mut line = Line::new(SessionConfig { last: model.has_states(group), ..config.clone() }, port);
            PrefillRate::new(model.token_ns, 0.0).into_iter().for_each(|rate| line.tell_prefill(rate));
            line
        });
        let sessions = lines.collect();
        let set = GroupSet::new([full].into_iter().chain(second).collect(), 0);
        Self {
            runs: runs.into(),
            policy: EnginePolicy::new(options, model.machine, set, sessions, ctx.instant()),
            counted: [0; COUNTS],
            weights: (0, 0),
            salt: None,
            step: 0,
            phase: Phase::Begin,
            requests: BTreeMap::new(),
            waiting: VecDeque::new(),
            later: Vec::new(),
            running: Vec::new(),
            blocks: Blocks::new(model.blocks),
            in_flight: VecDeque::new(),
            unreported: BTreeMap::new(),
            mute: 0,
            last: BTreeSet::new(),
            scheduled: Vec::new(),
            work: Vec::new(),
            unfilled: Vec::new(),
            outdated: false,
            admitted: 0,
            promised: false,
            flood: false,
            model,
        }
    }

    /// The unfinished requests, for the next life.
    pub(super) fn unfinished(self) -> impl Iterator<Item = Spec> {
        let wanted = self.requests.into_values().filter(|request| request.state != State::Leaving);
        wanted.map(|request| request.spec)
    }

    /// True if no request is left.
    pub(super) fn idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// True if every log of a request that goes on is closed, every save has ended, and no block is held for a save.
    pub(super) fn settled(&self) -> bool {
        let mut sessions = (0..self.policy.groups()).map(|group| self.policy.view(group));
        let ended = self.policy.ended_logs();
        sessions.all(|session| session.logs() == ended && session.saving() == 0) && self.blocks.are_unused()
    }

    /// Checks that no block is in use.
    pub(super) fn audit(&self) {
        assert!(self.blocks.are_unused(), "blocks of the engine were lost");
    }

    pub(super) fn unrest(&self) -> String {
        let session = self.policy.view(0);
        let requests: Vec<_> =
            self.requests.values().map(|r| (r.spec.id, r.state, r.blocks[0].len())).collect();
        let (steps, logs, saving) = (self.in_flight.len(), session.logs(), session.saving());
        format!(
            "requests {requests:?}, {steps} steps, {logs} logs, {saving} blocks being saved, {:?}",
            self.blocks
        )
    }

    /// Breaks the protocol, so the sidecar closes this session, and only this one.
    pub(crate) fn misbehave(&mut self, ctx: &mut Ctx) {
        let Some(ring) = self.policy.session(0).submission() else { return };
        // No log has this number.
        let log = shm_protocol::layout::LOGS as u32 - 1;
        let query = Query::new(1, LogKeys::new(log, 0..1));
        if ring.post(SchedulerRequest::Query(query)).is_some() {
            self.policy.session(0).flush();
            ctx.hit("fault violation");
        }
    }

    /// True if a load is promised and unknown to all ranks.
    pub(crate) fn plans(&self) -> bool {
        self.promised
    }

    /// True if a request waits for a load.
    pub(crate) fn loading(&self) -> bool {
        self.requests.values().any(|request| request.state == State::Loading)
    }

    /// Fills the ring in the next step, like a burst of messages to a frozen sidecar.
    pub(crate) fn flood(&mut self) {
        self.flood = true;
    }

    /// The namespaces of its KV now, by group.
    pub(super) fn digests(&self) -> Vec<NamespaceDigest> {
        let bases = (0..self.model.groups()).map(|group| self.model.base(group, self.weights.1));
        bases.map(|base| self.salt.map_or(base, |salt| namespace::salt_namespace(base, salt))).collect()
    }

    /// Makes one move. Returns the time until the next.
    pub(crate) fn act(&mut self, shared: &mut Shared, pending: &mut VecDeque<Spec>, ctx: &mut Ctx) -> Micros {
        match std::mem::replace(&mut self.phase, Phase::Begin) {
            Phase::Begin => return self.begin(shared, pending, ctx),
            Phase::Match(admit) => self.match_next(admit, ctx),
            Phase::Admit { own, found, admit } => self.admit(own, found, admit, ctx),
            Phase::Await { wait, began, call, admit } => self.await_answer(wait, began, call, admit, ctx),
            Phase::Schedule => self.finish_schedule(shared, ctx),
        }
        ctx.pause(15)
    }

    /// Takes results, accepts requests, and begins a step if there is work.
    fn begin(&mut self, shared: &mut Shared, pending: &mut VecDeque<Spec>, ctx: &mut Ctx) -> Micros {
        self.take_results(shared, ctx);
        while self.requests.len() < REQUESTS
            && ctx.rng.one_in(ctx.knobs.arrivals)
            && let Some(spec) = pending.pop_front()
        {
            self.arrive(spec, ctx);
        }
        if self.in_flight.len() >= self.model.depth {
            return ctx.pause(100);
        }
        if self.requests.is_empty() && self.in_flight.is_empty() && ctx.rng.one_in(2) {
            return ctx.pause(500);
        }
        if ctx.rng.one_in(64) {
            self.abort_one(ctx);
        }
        if self.model.resets > 0 && ctx.rng.one_in(self.model.resets) {
            self.reset(ctx);
        }
        self.refresh(ctx);
        if std::mem::take(&mut self.flood) {
            self.fill_ring(ctx);
        }
        let admit = if self.schedule_running(ctx) { 2 } else { 0 };
        self.phase = Phase::Match(admit);
        ctx.pause(10)
    }

    /// Adds a request. Some engines announce it to the policy before its turn.
    fn arrive(&mut self, spec: Spec, ctx: &mut Ctx) {
        let arrival = Arrival {
            prompt: spec.prompt as u32 * WORD_TOKENS,
            reads: true,
            awaits: spec.awaits.then_some(spec.prompt as u32 * WORD_TOKENS),
            hands_over: spec.hands_over,
            tail: None,
        };
        ctx.cover.add("engine awaits another", spec.awaits.into());
        ctx.cover.add("engine hands over", spec.hands_over.into());
        let (id, number) = (spec.id, self.policy.follow_request(arrival));
        self.requests.insert(id, Request::new(spec, number, self.model.groups()));
        self.waiting.push_back(id);
        if ctx.rng.one_in(8) {
            self.hint(id, ctx);
        }
        if ctx.rng.one_in(2) {
            if self.policy.look_for_verdict() {
                self.contradicted(ctx);
            }
            if self.policy.may_announce(self.last.len()) {
                self.tell(id);
                self.policy.announce_request(number);
            }
        }
    }

    /// A client hints at the fate of its conversation's blocks.
    fn hint(&mut self, id: u64, ctx: &mut Ctx) {
        self.tell(id);
        let seconds = 1 + ctx.rng.below(5) as u32;
        let choices = [Advice::Retain { seconds }, Advice::Pin { seconds }, Advice::Demote, Advice::Prefetch];
        let hint = Hint { advice: ctx.rng.pick(&choices), tokens: None };
        let last = ctx.rng.one_in(8);
        let read = Ok(RequestHints { last, hints: vec![hint] });
        let number = self.requests[&id].number;
        self.policy.follow_hints(number, last, read, ctx.instant());
    }

    /// Gives the policy the current numbers and keys of a request.
    pub(super) fn tell(&mut self, id: u64) {
        let request = &self.requests[&id];
        let keys = request.known_keys();
        self.policy.set_now(request.number, request.now());
        let key = |index: usize, key: &mut BlockHash| {
            *key = keys[index];
            Ok::<(), Infallible>(())
        };
        let Ok(()) = self.policy.follow_keys(request.number, keys.len(), key);
    }

    /// Empties the prefix cache: loaded blocks may be wrong.
    pub(super) fn contradicted(&mut self, ctx: &mut Ctx) {
        ctx.hit("policy learns of a contradiction");
        self.blocks.forget();
    }

    /// Takes new connections, and notices hang-ups.
    pub(super) fn refresh(&mut self, ctx: &mut Ctx) {
        for group in 0..self.policy.groups() {
            let line = self.policy.session(group);
            line.refresh_session();
            line.dial(ctx);
        }
    }

    /// Begins a generation of the namespace, or changes the weights, perhaps back to earlier ones. The prefix
    /// cache is emptied only if no block is in use.
    fn reset(&mut self, ctx: &mut Ctx) {
        let (salt, weights) = (ctx.rng.bytes16(), (self.weights.0 + 1, ctx.rng.below(2) as u8));
        let connected = self.policy.view(0).is_connected();
        let held = self.policy.release_held();
        self.blocks.release(&held);
        if self.blocks.are_unused() {
            self.blocks.forget();
        } else {
            ctx.hit("engine reset beside blocks in use");
        }
        if ctx.rng.one_in(3) {
            self.policy.disown();
            (0..self.policy.groups()).for_each(|group| self.policy.session(group).salt(salt));
            self.salt = Some(salt);
        } else {
            self.policy.weights_may_have_changed();
            let came_back = weights.1 == 0 && self.weights.1 != 0;
            ctx.hit(if came_back { "engine weights came back" } else { "engine weights changed" });
            self.weights = weights;
        }
        if connected && !self.policy.view(0).is_connected() {
            ctx.hit("engine reset without room");
        }
        self.outdated = true;
        ctx.hit("engine reset");
        ctx.note(|| format!("{}: resets its cache", self.model.name));
    }

    fn fill_ring(&mut self, ctx: &mut Ctx) {
        let Some(ring) = self.policy.session(0).submission() else { return };
        let leaves = ctx.rng.pick(&FLOOD_LEAVES);
        // The sidecar reads a CANCEL of no blocks without effect.
        let nothing = SchedulerRequest::Cancel(Cancel { op: 0, from: 0, count: 0 });
        let head = ring.acknowledged();
        while let Some(sequence) = ring.post(nothing)
            && SUBMISSION_SLOTS as u32 - (sequence + 1).wrapping_sub(head) > leaves
        {}
        self.policy.session(0).flush();
        ctx.hit("fault full ring");
        ctx.note(|| format!("{}: fills its ring", self.model.name));
    }

    /// Aborts a random request.
    fn abort_one(&mut self, ctx: &mut Ctx) {
        let ids: Vec<u64> = self.requests.keys().copied().collect();
        let Some(&id) = ids.get(ctx.rng.below(ids.len().max(1) as u64) as usize) else { return };
        let request = &self.requests[&id];
        match request.state {
            State::Leaving => {}
            State::Loading => {
                // Its blocks are freed once every rank has ended the load.
                ctx.hit("engine aborted while loading");
                self.end(id, ctx);
                self.requests.get_mut(&id).expect("listed above").state = State::Leaving;
            }
            State::Waiting | State::Running => {
                ctx.hit("engine aborted");
                self.end(id, ctx);
                self.leave(id);
            }
        }
        ctx.note(|| format!("{}: request {id} aborted", self.model.name));
    }

    /// Ends the request in the policy, and holds the blocks named by it.
    pub(super) fn end(&mut self, id: u64, ctx: &mut Ctx) {
        let number = self.requests[&id].number;
        let (log, logs) = (self.policy.log(number, 0), self.policy.view(0).logs());
        let is_open = self.policy.session(0).length(log).is_some();
        // Each answer ends in one of four ways, or without a stated way (0).
        let mut hold = self.policy.end_request(number, (id % 5) as u32).hold;
        ctx.cover.add("engine close without room", (is_open && self.policy.view(0).logs() == logs).into());
        if self.model.holds {
            hold.retain(|block| self.blocks.hold(*block));
            ctx.cover.add("policy holds a block", hold.len() as u64);
            self.policy.held(&hold, ctx.instant());
        }
    }

    /// Frees the request's blocks at once.
    pub(super) fn leave(&mut self, id: u64) {
        let request = self.requests.remove(&id).expect("the caller's request");
        request.blocks.iter().for_each(|blocks| self.blocks.release(blocks));
        self.waiting.retain(|other| *other != id);
        self.running.retain(|other| *other != id);
        self.last.remove(&id);
    }

    /// Wakes the ranks' threads.
    pub(super) fn wake_ranks(&self, ctx: &mut Ctx) {
        for number in 0..self.model.members() {
            ctx.wakes.push((Actor::Worker(self.model.index, number), ctx.now + 5 + ctx.rng.below(50)));
        }
    }
}
