//! An engine on the policy: one request after another, in the order of an engine's calls.

use std::collections::{BTreeMap, HashMap};
use std::ops::{Index, IndexMut};
use std::time::{Duration, Instant};

use connector_shim::core::policy::kinds::{GroupForm, GroupKind, GroupSet};
use connector_shim::core::policy::{
    Adapter, Arrival, BegunRequest, Changes, Due, EndedRequest, EnginePolicy, FoundTokens, Machine, Now,
    OpenedStep, PlannedStep, PolicyOptions, PolicyWait, RequestId,
};
use connector_shim::core::scheduler::{LoadWait, SessionConfig};
use shm_protocol::key::{Algorithm, BlockHash};

use crate::sidecar::{Host, Saves, Sidecar};

pub(crate) const BLOCK_TOKENS: u32 = 16;
const BLOCK_BYTES: u64 = 1024;

/// The facts of an engine, and its options.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) options: PolicyOptions,
    pub(crate) machine: Machine,
    pub(crate) forms: Vec<GroupForm>,
    pub(crate) checkpoint: u32,
}

/// A request as the engine has it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Request {
    pub(crate) tokens: u32,
    pub(crate) computed: u32,
    pub(crate) preemptions: u32,
    pub(crate) adapter: Adapter,
    pub(crate) keys: Vec<BlockHash>,
    /// By group.
    pub(crate) blocks: Vec<Vec<u32>>,
}

/// How a request begins on its blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Begin {
    /// Tokens held by its blocks.
    pub(crate) found: u32,
    /// The engine's own cache lists them, and nothing is loaded.
    pub(crate) listed: bool,
    /// Its blocks in the first group; empty: blocks never used before.
    pub(crate) blocks: Vec<u32>,
    /// The most tokens computed by the step.
    pub(crate) most: Option<u32>,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) policy: EnginePolicy<Host>,
    pub(crate) time: Instant,
    /// Outputs of encoders in the next step.
    pub(crate) encoded: Vec<String>,
    /// Blocks to be reused next, named with the next step.
    pub(crate) named: Vec<u32>,
    pub(crate) opened: OpenedStep,
    /// Blocks of before may be wrong, by the policy's answer at the last request's arrival.
    pub(crate) contradicted: bool,
    requests: BTreeMap<RequestId, Request>,
    /// Requests with hits but without allocated blocks, and their hits.
    asked: HashMap<RequestId, FoundTokens>,
    groups: usize,
    free: u32,
    /// The requests of each step without a taken output.
    open: HashMap<u64, Vec<RequestId>>,
    running: Vec<RequestId>,
}

/// The key of a block in every prompt.
pub(crate) fn key(block: usize) -> BlockHash {
    BlockHash([block as u8; 32])
}

pub(crate) fn full() -> GroupForm {
    GroupForm {
        kind: GroupKind::Full,
        block_tokens: BLOCK_TOKENS,
        hashes_each: 1,
        key_tokens: BLOCK_TOKENS,
        window: 0,
    }
}

// === impl Setup ===

impl Default for Setup {
    /// Ranks copy in host memory.
    fn default() -> Self {
        let options =
            PolicyOptions { loads: true, saves: true, tokens_per_step: 1, ..PolicyOptions::default() };
        let machine = Machine { by_engine: true, block_bytes: BLOCK_BYTES, ..Machine::default() };
        Self { options, machine, forms: vec![full()], checkpoint: 0 }
    }
}

impl Setup {
    /// A GPU; its sidecar copies.
    pub(crate) fn on_gpu() -> Self {
        let machine = Machine { waits: true, on_gpu: true, block_bytes: BLOCK_BYTES, ..Machine::default() };
        Self { machine, ..Self::default() }
    }

    pub(crate) fn checking(every: u32) -> Self {
        let mut setup = Self::default();
        setup.options.checks.every = every;
        setup
    }

    pub(crate) fn engine(self) -> Engine {
        let set = GroupSet::new(self.forms, self.checkpoint);
        let groups = set.forms.len();
        let config = |form: &GroupForm| SessionConfig {
            budget: Duration::from_millis(2),
            by_engine: self.machine.by_engine,
            early: false,
            part_blocks: self.machine.part_blocks(),
            streams: false,
            whole_blocks: if set.several() { 0 } else { self.machine.whole_blocks() },
            last: form.kind == GroupKind::State,
            load_wait: LoadWait::default(),
        };
        let hosts = set.forms.iter().map(|form| Host::new(config(form))).collect();
        #[expect(clippy::disallowed_methods, reason = "where a test's own time begins")]
        let time = Instant::now();
        Engine {
            policy: EnginePolicy::new(self.options, self.machine, set, hosts, time),
            time,
            encoded: Vec::new(),
            named: Vec::new(),
            opened: OpenedStep::default(),
            contradicted: false,
            requests: BTreeMap::new(),
            asked: HashMap::new(),
            groups,
            free: 1,
            open: HashMap::new(),
            running: Vec::new(),
        }
    }
}

// === impl Engine ===

impl Index<RequestId> for Engine {
    type Output = Request;

    fn index(&self, id: RequestId) -> &Request {
        &self.requests[&id]
    }
}

impl IndexMut<RequestId> for Engine {
    fn index_mut(&mut self, id: RequestId) -> &mut Request {
        self.requests.get_mut(&id).unwrap()
    }
}

impl Engine {
    pub(crate) fn new() -> Self {
        Setup::default().engine()
    }

    /// The sidecar of the first group.
    pub(crate) fn sidecar(&mut self) -> &mut Sidecar {
        &mut self.policy.session(0).sidecar
    }

    /// Saves of the first group since the last call.
    pub(crate) fn take_saves(&mut self) -> Saves {
        self.sidecar().take_saves()
    }

    /// Blocks saved since the last call.
    pub(crate) fn take_saved(&mut self) -> Vec<u32> {
        self.take_saves().into_iter().flat_map(|(_, _, blocks)| blocks).collect()
    }

    /// How often every unfinished save was given up.
    pub(crate) fn voided(&mut self) -> u64 {
        self.policy.session(0).stats()["saves_voided"]
    }

    /// The first group's session is bound.
    pub(crate) fn bind(&mut self, namespace: u64) {
        self.policy.session(0).bind(namespace);
    }

    /// Every sidecar reads the posted requests.
    pub(crate) fn serve(&mut self) {
        (0..self.groups).for_each(|group| self.policy.session(group).serve());
    }

    // --- requests ---

    pub(crate) fn arrive(&mut self, tokens: u32) -> RequestId {
        self.arrive_as(tokens, Arrival::default())
    }

    /// A request to be continued by another engine.
    pub(crate) fn arrive_to_decode(&mut self, tokens: u32) -> RequestId {
        self.arrive_as(tokens, Arrival { hands_over: true, ..Arrival::default() })
    }

    /// A request for a prompt with so many tokens saved by another engine.
    pub(crate) fn arrive_awaiting(&mut self, tokens: u32, saved: u32) -> RequestId {
        self.arrive_as(tokens, Arrival { awaits: Some(saved), ..Arrival::default() })
    }

    /// A request with its whole prompt so far, which may be served from the cache; its tokens are numbered.
    pub(crate) fn arrive_as(&mut self, tokens: u32, arrival: Arrival) -> RequestId {
        let id = self.follow(tokens, arrival);
        if let Some(range) = self.policy.tail_tokens(id) {
            let tokens: Vec<u64> = range.map(u64::from).collect();
            let tail = self.policy.tail(id, Algorithm::Sha256Cbor, &tokens);
            self.policy.set_tail(id, tail);
        }
        self.announce(id);
        id
    }

    /// The same, where keys depend on more than tokens: then nothing has the key of a tail.
    pub(crate) fn follow(&mut self, tokens: u32, arrival: Arrival) -> RequestId {
        let id = self.policy.follow_request(Arrival { prompt: tokens, reads: true, ..arrival });
        let keys = (0..(tokens / BLOCK_TOKENS) as usize).map(key).collect();
        self.requests.insert(id, Request { tokens, keys, ..Request::default() });
        self.tell(id);
        id
    }

    pub(crate) fn announce(&mut self, id: RequestId) {
        self.contradicted = self.policy.look_for_verdict();
        self.tell(id);
        let running = self.running.len();
        if self.policy.may_announce(running) {
            self.policy.announce_request(id);
        }
        self.serve();
    }

    /// Tells the policy the request's present numbers and keys.
    fn tell(&mut self, id: RequestId) {
        let Request { tokens, computed, preemptions, adapter, ref keys, .. } = self.requests[&id];
        self.policy.set_now(id, Now { tokens, computed, preemptions, adapter });
        let told = self.policy.follow_keys(id, keys.len(), |index, key| {
            *key = keys[index];
            Ok::<(), ()>(())
        });
        told.unwrap();
    }

    /// The tokens for the engine to take from the cache; none: it is to ask again.
    pub(crate) fn ask(&mut self, id: RequestId) -> Option<u32> {
        match self.matched(id, 0) {
            FoundTokens::Tokens(tokens, _) => Some(tokens),
            FoundTokens::Later => None,
        }
    }

    pub(crate) fn matched(&mut self, id: RequestId, computed: u32) -> FoundTokens {
        self.tell(id);
        self.serve();
        let alone = self.running.iter().all(|running| *running == id);
        let time = self.time;
        let found = self.until(|policy| policy.matched(id, computed, alone, time));
        self.asked.insert(id, found);
        self.serve();
        found
    }

    fn until<T>(&mut self, mut call: impl FnMut(&mut EnginePolicy<Host>) -> Result<T, PolicyWait>) -> T {
        loop {
            let wait = match call(&mut self.policy) {
                Ok(done) => return done,
                Err(wait) => wait,
            };
            let (PolicyWait::Answer { group, .. } | PolicyWait::Linger { group, .. }) = wait;
            let hits = self.policy.session(group).wait(wait, self.time);
            self.policy.answered(hits);
        }
    }

    /// The request is given blocks, and takes so many tokens of the cache beyond its own.
    pub(crate) fn allocate(&mut self, id: RequestId, external: u32) {
        self.tell(id);
        self.asked.remove(&id);
        if self[id].blocks.is_empty() {
            let count = self[id].tokens.div_ceil(BLOCK_TOKENS);
            self[id].blocks = (0..self.groups).map(|_| self.free_blocks(count)).collect();
        }
        let Some(wanted) = self.policy.allocated(id, external) else { return };
        let blocks = &self[id].blocks;
        let named = blocks.iter().zip(wanted);
        let named: Vec<Vec<u32>> =
            named.map(|(blocks, range)| blocks[range.start..range.end.min(blocks.len())].to_vec()).collect();
        let time = self.time;
        self.until(|policy| policy.load_blocks(id, &named, time));
        self.serve();
    }

    /// Blocks never used before.
    pub(crate) fn free_blocks(&mut self, count: u32) -> Vec<u32> {
        let first = self.free;
        self.free += count;
        (first..self.free).collect()
    }

    /// The first tokens of the request come from the cache, as hits: beside a step without tokens, or with the next one.
    pub(crate) fn load(&mut self, id: RequestId, tokens: u32) {
        let found = self.asked.get(&id).copied().unwrap_or_else(|| {
            let hits = self.sidecar().hits.replace(tokens.div_ceil(BLOCK_TOKENS));
            let found = self.matched(id, 0);
            self.sidecar().hits = hits;
            found
        });
        let FoundTokens::Tokens(found, beside) = found else { panic!("the cache knows later") };
        assert!(found >= tokens, "only {found} of {tokens} tokens were found");
        self.allocate(id, tokens);
        if beside {
            self.idle();
            self.policy.loads_ended(&[id], &[]);
        }
    }

    /// The request is over, in an unknown way.
    pub(crate) fn finish(&mut self, id: RequestId) -> EndedRequest {
        self.finish_in(id, 0)
    }

    /// The request is over, and its answer ended in this way.
    pub(crate) fn finish_in(&mut self, id: RequestId, way: u32) -> EndedRequest {
        self.running.retain(|running| *running != id);
        self.tell(id);
        let ended = self.policy.end_request(id, way);
        self.serve();
        ended
    }

    // --- steps ---

    /// A step to compute the request's prompt.
    pub(crate) fn compute(&mut self, id: RequestId) -> PlannedStep {
        self.begin(id, Begin::default())
    }

    /// The same, behind loaded first tokens.
    pub(crate) fn compute_behind(&mut self, id: RequestId, found: u32) -> PlannedStep {
        self.begin(id, Begin { found, ..Begin::default() })
    }

    pub(crate) fn begin(&mut self, id: RequestId, how: Begin) -> PlannedStep {
        let Begin { found, listed, blocks, most } = how;
        self[id].blocks = if blocks.is_empty() { Vec::new() } else { vec![blocks] };
        if found > 0 && !listed {
            self.load(id, found);
        } else {
            self.allocate(id, 0);
        }
        self[id].computed = found;
        let begun = BegunRequest { request: Some(id), blocks: self[id].blocks.clone(), computed: found };
        let tokens = (self[id].tokens - found).min(most.unwrap_or(u32::MAX));
        self.step(vec![begun], &[(id, tokens)])
    }

    /// A step to compute the rest of the request's tokens.
    pub(crate) fn go_on(&mut self, id: RequestId) -> PlannedStep {
        let tokens = self[id].tokens - self[id].computed;
        self.step(Vec::new(), &[(id, tokens)])
    }

    /// A step to compute a token of an existing block for each of them. The engine's numbers stay as they are.
    pub(crate) fn decode(&mut self, ids: &[RequestId]) -> PlannedStep {
        let computed: Vec<u32> = ids.iter().map(|id| self[*id].computed).collect();
        let scheduled: Vec<_> = ids.iter().map(|id| (*id, 1)).collect();
        let step = self.step(Vec::new(), &scheduled);
        ids.iter().zip(computed).for_each(|(id, computed)| self[*id].computed = computed);
        step
    }

    /// A step without tokens.
    pub(crate) fn idle(&mut self) -> PlannedStep {
        self.step(Vec::new(), &[])
    }

    /// A step: requests begin on blocks, and so many tokens of requests are computed.
    pub(crate) fn step(&mut self, begun: Vec<BegunRequest>, scheduled: &[(RequestId, u32)]) -> PlannedStep {
        let encoded = std::mem::take(&mut self.encoded);
        self.step_with(Changes { begun, encoded, ..Changes::default() }, scheduled)
    }

    pub(crate) fn step_with(&mut self, changes: Changes, scheduled: &[(RequestId, u32)]) -> PlannedStep {
        changes.begun.iter().filter_map(|begun| begun.request).for_each(|id| self.tell(id));
        self.opened = self.policy.begin_step(changes, self.time);
        let tokens: HashMap<_, _> = scheduled.iter().copied().collect();
        let due = self.opened.due.clone();
        due.iter().for_each(|id| self.tell(*id));
        let due: Vec<_> =
            due.iter().map(|id| Due { request: *id, scheduled: tokens.get(id).copied() }).collect();
        let step = self.policy.end_step(&due, scheduled.len(), &std::mem::take(&mut self.named));
        self.serve();
        self.running = scheduled.iter().map(|(id, _)| *id).collect();
        self.open.insert(step.step, self.running.clone());
        for (id, tokens) in scheduled {
            if let Some(request) = self.requests.get_mut(id) {
                request.computed += tokens;
            }
        }
        step
    }

    /// The engine takes the output of a step.
    pub(crate) fn take(&mut self, step: &PlannedStep) {
        let mut scheduled = HashMap::new();
        if self.policy.passes_over(step.step) {
            self.requests.iter().for_each(|(id, request)| self.policy.progress(*id, request.computed));
            scheduled.clone_from(&self.open);
        }
        self.policy.accept_step(step.step, &scheduled, Some(self.time));
        self.open.retain(|open, _| *open > step.step);
        self.serve();
    }
}
