//! The scheduler process: vLLM's scheduler, the connector's scheduler role and the shim under it, in moves so small that
//! the sidecar and the ranks act between any two.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use connector_shim::core::notices::Notices;
use connector_shim::core::scheduler::{Config, Session};
use shm_protocol::key::NamespaceDigest;
use shm_protocol::layout::SUBMISSION_SLOTS;
use shm_protocol::namespace;
use shm_protocol::request::{Cancel, Keys, Query, SchedulerRequest};

use super::request::{Order, Request, Spec, State, Work};
use super::{Change, Model, Port, Shared};
use crate::connection::Connection;
use crate::ctx::{Actor, BUDGET, Ctx, Micros};

/// Requests that one engine serves at once; more wait at its door.
const REQUESTS: usize = 4;
/// Free slots that a flooded ring may be left with, and more than the reserve.
const FLOOD_LEAVES: [u32; 5] = [0, 1, 3, 1024, 1026];

/// What the scheduler does next.
#[derive(Debug)]
pub(super) enum Phase {
    Begin,
    /// Asks about waiting requests; so many more may be admitted in this step.
    Match(usize),
    /// Finds blocks for the request at the head of the queue.
    Admit {
        hit: Option<Hit>,
        admit: usize,
    },
    /// Waits for the answer of a query for the request at the head of the queue.
    Ask {
        op: u64,
        log: i64,
        from: usize,
        began: Instant,
        admit: usize,
    },
    /// The same, for a lease that grew old while blocks were found.
    Renew {
        op: u64,
        began: Instant,
        admit: usize,
        hit: Hit,
    },
    Schedule,
}

/// An answer that promises blocks.
#[derive(Copy, Clone, Debug)]
pub(super) struct Hit {
    pub(super) from: usize,
    pub(super) count: usize,
    pub(super) sync: bool,
}

/// A step that no rank, or not every rank, has ended.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) work: Vec<(u64, u32, usize)>,
    pub(super) number: u64,
    /// The engine does not go on with what it computes.
    pub(super) fails: bool,
}

#[derive(Debug)]
pub(crate) struct Scheduler {
    pub(super) model: Rc<Model>,
    pub(super) run: [u8; 16],
    port: Port,
    pub(super) session: Session<Rc<Connection>>,
    /// What the session counted until the last step.
    pub(super) counted: [u64; 6],
    /// How often the weights changed, and which they are.
    pub(super) weights: (u64, u8),
    /// The generation of the namespace.
    salt: Option<[u8; 16]>,
    pub(super) step: u64,
    pub(super) phase: Phase,
    pub(super) requests: BTreeMap<u64, Request>,
    pub(super) waiting: VecDeque<u64>,
    pub(super) running: Vec<u64>,
    pub(super) free: Vec<u32>,
    pub(super) in_flight: VecDeque<InFlight>,
    /// The last step that was in flight when one failed: no output up to there is accepted.
    pub(super) refused: u64,
    /// Blocks that this step may overwrite.
    pub(super) overwritten: Vec<u32>,
    pub(super) orders: Vec<Order>,
    pub(super) work: Vec<Work>,
    /// Fill the ring at the next occasion.
    flood: bool,
}

// === impl Scheduler ===

impl Scheduler {
    pub(super) fn new(model: Rc<Model>, run: [u8; 16], port: Port) -> Self {
        let config = Config {
            budget: Duration::from_micros(BUDGET),
            by_engine: model.by_engine,
            early: model.early,
            part_blocks: if model.by_engine { 0 } else { 1 + model.index as u32 % 2 },
            whole_blocks: model.index as u32 % 2 * 2,
        };
        Self {
            run,
            port,
            session: Session::new(config, Arc::new(Notices::default())),
            counted: [0; 6],
            weights: (0, 0),
            salt: None,
            step: 0,
            phase: Phase::Begin,
            requests: BTreeMap::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            // Block 0 is the null block.
            free: (1..model.blocks).collect(),
            in_flight: VecDeque::new(),
            refused: 0,
            overwritten: Vec::new(),
            orders: Vec::new(),
            work: Vec::new(),
            flood: false,
            model,
        }
    }

    /// What its clients will ask again.
    pub(super) fn unfinished(self) -> impl Iterator<Item = Spec> {
        let wanted = self.requests.into_values().filter(|request| request.state != State::Leaving);
        wanted.map(|request| request.spec)
    }

    /// Whether no request is left.
    pub(super) fn idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Whether every log is closed and every save has ended.
    pub(super) fn settled(&self) -> bool {
        self.session.logs() == 0 && self.session.saving() == 0
    }

    /// Every block came back.
    pub(super) fn audit(&self) {
        let mut free = self.free.clone();
        free.sort_unstable();
        assert!(free.into_iter().eq(1..self.model.blocks), "blocks of the engine were lost");
    }

    pub(super) fn unrest(&self) -> String {
        let requests: Vec<_> = self.requests.values().map(|r| (r.spec.id, r.state, r.blocks.len())).collect();
        let (steps, logs, saving) = (self.in_flight.len(), self.session.logs(), self.session.saving());
        format!("requests {requests:?}, {steps} steps, {logs} logs, {saving} blocks being saved")
    }

    /// Breaks the protocol: its session is closed, and nobody else's.
    pub(crate) fn misbehave(&mut self, ctx: &mut Ctx) {
        let Some(ring) = self.session.submission() else { return };
        // No log has this number.
        let log = shm_protocol::layout::LOGS as u32 - 1;
        let query = Query { op: 1, keys: Keys::new(log, 0..1), arriving: false, awaits: false };
        if ring.post(SchedulerRequest::Query(query)).is_some() {
            self.session.flush();
            ctx.hit("fault violation");
        }
    }

    /// Whether it has promised a load that no rank knows of.
    pub(crate) fn plans(&self) -> bool {
        !self.orders.is_empty()
    }

    /// Whether some request waits for a load.
    pub(crate) fn loading(&self) -> bool {
        self.requests.values().any(|request| request.state == State::Loading)
    }

    /// Fills its ring, as a burst of messages to a sidecar that does not read would.
    pub(crate) fn flood(&mut self) {
        self.flood = true;
    }

    /// The namespace of what it computes now.
    pub(super) fn digest(&self) -> NamespaceDigest {
        let base = self.model.base(self.weights.1);
        self.salt.map_or(base, |salt| namespace::salted(base, salt))
    }

    /// One move; the time until the next.
    pub(crate) fn act(&mut self, shared: &mut Shared, pending: &mut VecDeque<Spec>, ctx: &mut Ctx) -> Micros {
        match std::mem::replace(&mut self.phase, Phase::Begin) {
            Phase::Begin => return self.begin(shared, pending, ctx),
            Phase::Match(admit) => self.match_next(admit, ctx),
            Phase::Admit { hit, admit } => self.admit(hit, admit, ctx),
            Phase::Ask { op, log, from, began, admit } => {
                self.await_answer((op, began), (log, from), admit, ctx);
            }
            Phase::Renew { op, began, admit, hit } => self.await_renewal(op, began, admit, hit, ctx),
            Phase::Schedule => self.finish_schedule(shared, ctx),
        }
        ctx.pause(15)
    }

    /// Takes results, lets clients in, and begins a step if there is anything to do.
    fn begin(&mut self, shared: &mut Shared, pending: &mut VecDeque<Spec>, ctx: &mut Ctx) -> Micros {
        self.take_results(shared, ctx);
        while self.requests.len() < REQUESTS
            && ctx.rng.one_in(ctx.knobs.arrivals)
            && let Some(spec) = pending.pop_front()
        {
            self.waiting.push_back(spec.id);
            self.requests.insert(spec.id, Request::new(spec));
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
        self.phase = Phase::Match(2);
        ctx.pause(10)
    }

    /// Picks up a new connection, or notices the end of one.
    pub(super) fn refresh(&mut self, ctx: &mut Ctx) {
        match self.port.refresh(ctx) {
            Change::Same => {}
            Change::Lost => self.session.detach(),
            Change::Connected => {
                let connection = self.port.connection.as_ref().expect("it has just come");
                self.session.attach(Rc::clone(connection));
            }
        }
    }

    /// A new generation of the namespace, or other weights, perhaps those that were there before.
    fn reset(&mut self, ctx: &mut Ctx) {
        let (salt, weights) = (ctx.rng.bytes16(), (self.weights.0 + 1, ctx.rng.below(2) as u8));
        let connected = self.session.connected();
        if ctx.rng.one_in(3) {
            self.session.salt(salt);
            self.salt = Some(salt);
        } else {
            self.session.weights(weights.0);
            let came_back = weights.1 == 0 && self.weights.1 != 0;
            ctx.hit(if came_back { "engine weights came back" } else { "engine weights changed" });
            self.weights = weights;
        }
        if connected && !self.session.connected() {
            ctx.hit("engine reset without room");
        }
        for request in self.requests.values_mut() {
            (request.saved, request.outdated) = (0, true);
        }
        ctx.hit("engine reset");
        ctx.note(|| format!("{}: resets its cache", self.model.name));
    }

    fn fill_ring(&mut self, ctx: &mut Ctx) {
        let Some(ring) = self.session.submission() else { return };
        let leaves = ctx.rng.pick(&FLOOD_LEAVES);
        // A CANCEL of nothing: the sidecar reads it and does nothing.
        let nothing = SchedulerRequest::Cancel(Cancel { op: 0, from: 0, count: 0 });
        let head = ring.acknowledged();
        while let Some(sequence) = ring.post(nothing)
            && SUBMISSION_SLOTS as u32 - (sequence + 1).wrapping_sub(head) > leaves
        {}
        self.session.flush();
        ctx.hit("fault full ring");
        ctx.note(|| format!("{}: fills its ring", self.model.name));
    }

    /// A client goes away.
    fn abort_one(&mut self, ctx: &mut Ctx) {
        let ids: Vec<u64> = self.requests.keys().copied().collect();
        let Some(&id) = ids.get(ctx.rng.below(ids.len().max(1) as u64) as usize) else { return };
        let request = &self.requests[&id];
        match request.state {
            State::Leaving => {}
            State::Loading => {
                // Its blocks are freed when every rank has ended the load.
                ctx.hit("engine aborted while loading");
                self.close_log(id, ctx);
                self.requests.get_mut(&id).expect("listed above").state = State::Leaving;
            }
            State::Waiting | State::Running => {
                ctx.hit("engine aborted");
                self.leave(id, ctx);
            }
        }
        ctx.note(|| format!("{}: request {id} aborted", self.model.name));
    }

    /// The request is over: its blocks may be used again at once.
    pub(super) fn leave(&mut self, id: u64, ctx: &mut Ctx) {
        self.close_log(id, ctx);
        let request = self.requests.remove(&id).expect("the caller's request");
        self.free.extend(request.blocks);
        self.waiting.retain(|other| *other != id);
        self.running.retain(|other| *other != id);
    }

    fn close_log(&mut self, id: u64, ctx: &mut Ctx) {
        let request = self.requests.get_mut(&id).expect("the caller's request");
        let Some(log) = request.log.take().filter(|log| self.session.length(*log).is_some()) else { return };
        let logs = self.session.logs();
        self.session.close(log);
        ctx.cover.add("engine close without room", u64::from(self.session.logs() == logs));
    }

    /// Tells a rank's thread to look.
    pub(super) fn wake_ranks(&self, ctx: &mut Ctx) {
        for rank in 0..self.model.world {
            ctx.wakes.push((Actor::Worker(self.model.index, rank), ctx.now + 5 + ctx.rng.below(50)));
        }
    }
}
