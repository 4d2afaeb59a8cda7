//! An engine on the policy, one request after another: the steps of vLLM's scheduler with `mamba_cache_mode` `align`, and no cache of its
//! own.

use std::cell::RefCell;
use std::collections::HashMap;
use std::convert::Infallible;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use connector_shim::core::endpoint::{Endpoint, Feature};
use connector_shim::core::notices::Notices;
use connector_shim::core::policy::host::SessionHost;
use connector_shim::core::policy::kinds::{GroupForm, GroupKind, GroupSet};
use connector_shim::core::policy::{
    Arrival, BegunRequest, Changes, Due, EnginePolicy, FoundTokens, Machine, Now, OfferedState,
    PolicyOptions, PolicyWait, RequestId,
};
use connector_shim::core::scheduler::{BlockChange, EngineSession, LoadWait, SessionConfig};
use shm_protocol::key::BlockHash;
use shm_protocol::session::SessionMemory;

use crate::pod::{GroupShape, Pod};
use crate::trace::Request;

/// Time of a step.
const STEP_MS: u64 = 10;
const BUDGET: Duration = Duration::from_millis(2);

/// The blocks of a model and of its engine.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) groups: Vec<GroupShape>,
    pub(crate) block_tokens: u32,
    /// The most tokens computed by a step.
    pub(crate) step_tokens: u32,
    /// The most tokens of a request.
    pub(crate) tokens_max: u32,
}

/// The states made by the engine and kept by the policy.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum States {
    /// Those of vLLM's steps; checkpoints so many tokens apart stay.
    Pillion(u32),
    /// One at every block boundary, and all stay.
    Every,
}

/// A connection in this process.
pub(crate) struct Wire(SessionMemory);

/// A group's session, and the pod behind it.
pub(crate) struct Host {
    session: EngineSession<Rc<Wire>>,
    pod: Rc<RefCell<Pod>>,
    group: usize,
}

/// See the module.
pub(crate) struct Engine {
    policy: EnginePolicy<Host>,
    pub(crate) pod: Rc<RefCell<Pod>>,
    shape: Shape,
    states: States,
    time: Instant,
}

/// A request as it goes on.
struct Running<'a> {
    id: RequestId,
    request: &'a Request,
    /// Block tables, by group.
    blocks: Vec<Vec<u32>>,
    computed: u32,
    /// The boundary at which the policy wants a state.
    junction: u32,
}

// === impl Shape ===

impl Shape {
    fn blocks_max(&self) -> u32 {
        self.tokens_max.div_ceil(self.block_tokens)
    }

    /// Number of blocks in the engine: block 0, and those of the longest request.
    fn engine_blocks(&self) -> u32 {
        1 + self.blocks_max() * self.groups.len() as u32
    }

    /// The block at a place of a group's table.
    fn block(&self, group: usize, place: u32) -> u32 {
        1 + group as u32 * self.blocks_max() + place
    }
}

// === impl Wire ===

impl Endpoint for Wire {
    fn memory(&self) -> &SessionMemory {
        &self.0
    }

    fn epoch(&self) -> u64 {
        1
    }

    fn lease_ttl(&self) -> Duration {
        Duration::from_secs(30)
    }

    fn knows(&self, feature: Feature) -> bool {
        !matches!(feature, Feature::Hints | Feature::Streams)
    }

    fn ring(&self) {}

    fn is_lost(&self) -> bool {
        false
    }

    fn hang_up(&self) {}
}

// === impl Host ===

impl Host {
    fn new(pod: &Rc<RefCell<Pod>>, group: usize, has_states: bool) -> Self {
        let config = SessionConfig {
            budget: BUDGET,
            by_engine: false,
            early: false,
            part_blocks: 0,
            whole_blocks: 0,
            last: has_states,
            streams: false,
            load_wait: LoadWait::default(),
        };
        let mut session = EngineSession::new(config, Arc::new(Notices::default()));
        session.attach(Rc::new(Wire(pod.borrow().memory(group))));
        Self { session, pod: Rc::clone(pod), group }
    }

    /// The sidecar reads and answers every posted message.
    fn serve(&mut self) {
        self.session.flush();
        self.pod.borrow_mut().serve(self.group);
    }
}

impl Deref for Host {
    type Target = EngineSession<Rc<Wire>>;

    fn deref(&self) -> &Self::Target {
        &self.session
    }
}

impl DerefMut for Host {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.session
    }
}

impl SessionHost for Host {
    type Connection = Rc<Wire>;

    fn connection_count(&self) -> u64 {
        1
    }

    fn refresh_session(&mut self) {}

    fn end_step(&mut self) {
        self.session.end_step().expect("an honest sidecar");
    }

    fn take_changes(&mut self) -> Vec<BlockChange> {
        self.session.take_changes().0
    }
}

// === impl Engine ===

impl Engine {
    pub(crate) fn new(shape: &Shape, pool_bytes: u64, states: States) -> Self {
        let pod = Rc::new(RefCell::new(Pod::new(pool_bytes, &shape.groups, shape.engine_blocks())));
        let form = |group: &GroupShape| GroupForm {
            kind: if group.has_states { GroupKind::State } else { GroupKind::Full },
            block_tokens: shape.block_tokens,
            hashes_each: 1,
            key_tokens: shape.block_tokens,
            window: 0,
        };
        let checkpoint = match states {
            States::Pillion(tokens) => tokens,
            States::Every => shape.block_tokens,
        };
        let set = GroupSet::new(shape.groups.iter().map(form).collect(), checkpoint);
        let host = |(number, group): (usize, &GroupShape)| Host::new(&pod, number, group.has_states);
        let hosts = shape.groups.iter().enumerate().map(host).collect();
        let options =
            PolicyOptions { loads: true, saves: true, tokens_per_step: 1, ..PolicyOptions::default() };
        let block_bytes = shape.groups[0].block_bytes;
        let machine = Machine { on_gpu: true, recomputes: true, block_bytes, ..Machine::default() };
        #[expect(clippy::disallowed_methods, reason = "where the engine's own time begins")]
        let time = Instant::now();
        let policy = EnginePolicy::new(options, machine, set, hosts, time);
        Self { policy, pod, shape: shape.clone(), states, time }
    }

    /// Serves a request. Returns the tokens of its prompt found in the cache.
    pub(crate) fn serve_request(&mut self, request: &Request) -> u32 {
        let arrival = Arrival { prompt: request.prompt, reads: true, ..Arrival::default() };
        let id = self.policy.follow_request(arrival);
        let blocks = vec![Vec::new(); self.shape.groups.len()];
        let mut running = Running { id, request, blocks, computed: 0, junction: 0 };
        self.tell(&running, request.prompt);
        let time = self.time;
        let found = match self.until(|policy| policy.matched(id, 0, true, time)) {
            FoundTokens::Tokens(found, _) => found,
            FoundTokens::Later => panic!("all blocks are in memory"),
        };
        running.junction = self.policy.junction(id);
        self.allocate(&mut running, found);
        // All tokens but the last have KV.
        while running.computed + 1 < request.total {
            self.compute(&mut running);
        }
        self.policy.end_request(id, request.way);
        self.serve();
        found
    }

    /// Gives the request its blocks, and loads the found tokens.
    fn allocate(&mut self, running: &mut Running<'_>, found: u32) {
        let (size, all) = (self.shape.block_tokens, running.request.total.div_ceil(self.shape.block_tokens));
        for (group, blocks) in running.blocks.iter_mut().enumerate() {
            let first =
                if self.shape.groups[group].has_states { (found / size).saturating_sub(1) } else { 0 };
            *blocks = (0..all)
                .map(|place| if place < first { 0 } else { self.shape.block(group, place) })
                .collect();
        }
        let (id, time) = (running.id, self.time);
        if let Some(wanted) = self.policy.allocated(id, found) {
            let named = running.blocks.iter().zip(wanted);
            let named: Vec<Vec<u32>> = named.map(|(blocks, range)| blocks[range].to_vec()).collect();
            self.until(|policy| policy.load_blocks(id, &named, time));
            self.step(Changes::default(), None);
            self.policy.loads_ended(&[id], &[]);
        }
        running.computed = found;
        let begun = BegunRequest { request: Some(id), blocks: running.blocks.clone(), computed: found };
        self.compute_with(running, Changes { begun: vec![begun], ..Changes::default() });
    }

    fn compute(&mut self, running: &mut Running<'_>) {
        self.compute_with(running, Changes::default());
    }

    /// A step that computes the request up to its next stop, and makes a state if that is a block's end.
    fn compute_with(&mut self, running: &mut Running<'_>, mut changes: Changes) {
        let (size, end) = (self.shape.block_tokens, self.next_stop(running));
        if end.is_multiple_of(size) {
            let groups = self.shape.groups.iter().enumerate().filter(|(_, shape)| shape.has_states);
            let offer = |(group, _)| OfferedState {
                request: running.id,
                group,
                block: self.shape.block(group, end / size - 1),
                boundary: end,
            };
            changes.offered = groups.map(offer).collect();
        }
        self.step(changes, Some((running, end)));
        running.computed = end;
    }

    /// The end of the next step: of a prompt as vLLM's `_mamba_block_aligned_split` has it, of an answer the next block's end.
    fn next_stop(&self, running: &Running<'_>) -> u32 {
        let Running { request, computed: first, .. } = running;
        let (first, prompt, size) = (*first, request.prompt, self.shape.block_tokens);
        let boundary = (first / size + 1) * size;
        if first >= prompt || self.states == States::Every {
            let end = if first >= prompt { request.total - 1 } else { prompt };
            return boundary.min(end);
        }
        let mut end = prompt.min(first + self.shape.step_tokens);
        if end < prompt {
            end -= end % size;
        }
        let begun = if first.is_multiple_of(size) { 0 } else { boundary };
        let stops = [begun, (prompt - 1) / size * size, running.junction];
        stops.into_iter().filter(|stop| (first + 1..end).contains(stop)).min().unwrap_or(end)
    }

    /// A step up to this token of a request, or one without tokens.
    fn step(&mut self, changes: Changes, computes: Option<(&Running<'_>, u32)>) {
        self.time += Duration::from_millis(STEP_MS);
        let tell = |engine: &mut Self| {
            if let Some((running, end)) = computes {
                engine.tell(running, end.max(running.request.prompt));
            }
        };
        tell(self);
        let opened = self.policy.begin_step(changes, self.time);
        let due: Vec<Due> = opened
            .due
            .iter()
            .filter_map(|id| {
                let (running, end) = computes.filter(|(running, _)| running.id == *id)?;
                Some(Due { request: *id, scheduled: Some(end - running.computed) })
            })
            .collect();
        let step = self.policy.end_step(&due, usize::from(computes.is_some()), &[]);
        assert!(step.parts.iter().all(|part| part.lost.is_empty()), "a lease was lost");
        self.serve();
        self.pod.borrow_mut().end_step(step.step);
        self.policy.accept_step(step.step, &HashMap::new(), Some(self.time));
        self.serve();
        self.pod.borrow_mut().pass(STEP_MS);
        self.policy.take_remarks();
    }

    /// Every sidecar reads its ring.
    fn serve(&mut self) {
        (0..self.shape.groups.len()).for_each(|group| self.policy.session(group).serve());
    }

    /// Hands in the request's numbers with so many known tokens.
    fn tell(&mut self, running: &Running<'_>, tokens: u32) {
        let now = Now { tokens, computed: running.computed, ..Now::default() };
        self.policy.set_now(running.id, now);
        let keys = &running.request.keys;
        let count = keys.len().min((tokens / self.shape.block_tokens) as usize);
        let key = |index: usize, key: &mut BlockHash| {
            *key = keys[index];
            Ok::<(), Infallible>(())
        };
        let Ok(()) = self.policy.follow_keys(running.id, count, key);
    }

    fn until<T>(&mut self, mut call: impl FnMut(&mut EnginePolicy<Host>) -> Result<T, PolicyWait>) -> T {
        loop {
            match call(&mut self.policy) {
                Ok(done) => return done,
                Err(PolicyWait::Answer { group, op }) => {
                    let time = self.time;
                    let session = self.policy.session(group);
                    session.serve();
                    let hits = session.look_for_answer(op, time, time).expect("the sidecar has answered");
                    self.policy.answered(hits);
                }
                Err(PolicyWait::Linger { .. }) => panic!("no other engine computes blocks"),
            }
        }
    }
}
