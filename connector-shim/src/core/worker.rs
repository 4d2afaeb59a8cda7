//! A rank's session: which run it takes part in, which weights it holds, which loads it waits for, and who copies them.
//!
//! A load that the sidecar was to copy and did not is a [`LoadJob`]: its host copies the blocks from the mapped pool. The mapping
//! outlives the connection, so that a dead sidecar's promises can still be kept.

pub mod link;
pub mod load;
pub(crate) mod patience;
pub(crate) mod watch;

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shm_protocol::request::WorkerRequest;

use self::link::RankLink;
use self::load::{AwaitedLoad, LoadJob, NextLoadStep, is_whole};
use self::patience::CopyPatience;
use crate::core::endpoint::Endpoint;
use crate::core::notices::{NoticeCause, Notices};
use crate::core::plan::Plan;

/// How long the pool of a sidecar's earlier life stays mapped after the next one was found: plans made before are on
/// their way for a step or two, and the memory is needed by the next sidecar.
const POOL_KEPT: Duration = Duration::from_secs(5);

/// The rank's last WEIGHTS message since its HELLO; all zero before the first.
#[derive(Copy, Clone, Debug, Default)]
struct Weights {
    number: u64,
    answers: u64,
    live: [u8; 16],
}

/// One rank's session over connections `C`, which bring pools `P`. See the module.
#[derive(Debug)]
pub struct RankSession<C, P> {
    notices: Arc<Notices>,
    /// This rank copies every load itself.
    by_engine: bool,
    /// Of this rank's part of a block.
    block_bytes: u64,
    link: Option<Arc<RankLink<C>>>,
    /// With the sidecar's life.
    pool: Option<(u64, P)>,
    earlier_pool: Option<(Instant, (u64, P))>,
    /// Loads into host memory that no step waits for, and of which the sidecar's word is awaited.
    pub awaited: Vec<AwaitedLoad<C>>,
    run: Option<[u8; 16]>,
    joined: bool,
    /// The last step begun.
    started: u64,
    weights: Weights,
    /// Whether the sidecar was told the last of them.
    has_posted_weights: bool,
    /// The first 8 bytes of the namespace that the rank was bound to last, also by a sidecar that is gone: its promises can
    /// still be kept. 0: none since the weights may have changed.
    bound: u64,
}

// === impl RankSession ===

impl<C: Deref<Target: Endpoint>, P: Clone> RankSession<C, P> {
    /// Without a connection yet. What the engine's log is to say goes to `notices`.
    pub fn new(by_engine: bool, block_bytes: u64, notices: Arc<Notices>) -> Self {
        Self {
            notices,
            by_engine,
            block_bytes,
            link: None,
            pool: None,
            earlier_pool: None,
            awaited: Vec::new(),
            run: None,
            joined: false,
            started: 0,
            weights: Weights::default(),
            has_posted_weights: true,
            bound: 0,
        }
    }

    /// Begins with a new sidecar, which is told what the rank has said before. The caller has detached the last one.
    pub fn attach(&mut self, connection: C, pool: P, now: Instant) {
        let epoch = connection.epoch();
        self.link = Some(Arc::new(RankLink::new(connection)));
        (self.joined, self.has_posted_weights) = (false, self.weights.number == 0);
        if let Some(pool) = self.pool.replace((epoch, pool)) {
            self.earlier_pool = Some((now, pool));
        }
        self.introduce();
    }

    /// Lets go of a connection that ended. What it promised by its last binding may still be loaded.
    pub fn detach(&mut self) -> Option<Arc<RankLink<C>>> {
        self.read_binding();
        self.link.take()
    }

    /// The connection in use.
    pub fn link(&self) -> Option<&Arc<RankLink<C>>> {
        self.link.as_ref()
    }

    /// How often the weights may have changed since the HELLO.
    pub fn weights(&self) -> u64 {
        self.weights.number
    }

    /// Takes part in the scheduler's run. Does nothing when this was said already on this connection.
    pub fn join(&mut self, run: [u8; 16]) {
        if self.run != Some(run) {
            self.run = Some(run);
            self.joined = false;
        }
        self.introduce();
    }

    /// States the weights that this rank holds, by a digest of a sample, in answer to the scheduler's `answers`th change; a
    /// number below the last one repeats it: then the rank found the change by itself. Until the sidecar has bound it anew
    /// every load is refused.
    pub fn set_weights(&mut self, answers: u64, live: [u8; 16]) {
        let Weights { number, answers: last, .. } = self.weights;
        self.weights = Weights { number: number + 1, answers: answers.max(last), live };
        (self.has_posted_weights, self.bound) = (false, 0);
        self.introduce();
    }

    /// Tells the sidecar what it does not know: the weights first, so that a rank which has joined holds what it stated.
    fn introduce(&mut self) {
        let Some(link) = &self.link else { return };
        if !self.has_posted_weights {
            let Weights { number, answers, live } = self.weights;
            self.has_posted_weights = link.post(WorkerRequest::Weights { number, answers, live });
        }
        if let (true, false, Some(run)) = (self.has_posted_weights, self.joined, self.run) {
            // What was said of loads up to that step may have been lost with the last connection.
            self.joined = link.post(WorkerRequest::Join { run, step: self.started });
        }
    }

    /// Step `step` has begun, and its fence is stored.
    pub fn start_step(&mut self, step: u64) {
        self.started = step;
        if let Some(link) = &self.link {
            link.retry();
        }
    }

    /// Whether the sidecar writes nothing of a plan into this rank's memory.
    pub fn copies_itself(&self, plan: &Plan) -> bool {
        self.by_engine || plan.by_engine()
    }

    /// Begins a load into host memory, which the sidecar or this process copies.
    pub fn begin_load(&mut self, plan: Plan) -> NextLoadStep<C, P> {
        let link = self.link_of(&plan).filter(|_| !self.copies_itself(&plan));
        let Some(link) = link else { return NextLoadStep::Copy(self.job(plan)) };
        let ahead = self.awaited.iter().map(|awaited| awaited.plan.blocks.len());
        let blocks = ahead.sum::<usize>() + plan.blocks.len();
        let patience = CopyPatience::of_plan(&plan, blocks as u64 * self.block_bytes);
        NextLoadStep::Await(AwaitedLoad { refused: self.refuses(&plan), plan, link, patience })
    }

    /// Looks at a load that is awaited.
    pub fn look_at_load(&mut self, mut awaited: AwaitedLoad<C>, now: Instant) -> NextLoadStep<C, P> {
        let outcome = awaited.outcome();
        if is_whole(&awaited.plan, outcome) {
            return NextLoadStep::Whole(awaited);
        }
        if outcome.is_some_and(|outcome| outcome.status.is_refusal()) {
            // Nobody writes a block of it: there is nothing to take back.
            return NextLoadStep::Copy(self.job(awaited.plan));
        }
        if outcome.is_none() && !awaited.link.connection.is_lost() && !awaited.is_late(now) {
            return NextLoadStep::Await(awaited);
        }
        let AwaitedLoad { plan, refused, link, .. } = awaited;
        link.close_gate(plan.op);
        NextLoadStep::Copy(LoadJob {
            pool: self.pool_of(&plan),
            plan,
            link: Some(link),
            rescue: true,
            refused,
        })
    }

    /// A load that this process copies.
    pub fn job(&mut self, plan: Plan) -> LoadJob<C, P> {
        let refused = self.refuses(&plan);
        LoadJob { pool: self.pool_of(&plan), link: self.link_of(&plan), plan, rescue: false, refused }
    }

    /// The connection to the sidecar that made the plan possible.
    pub fn link_of(&self, plan: &Plan) -> Option<Arc<RankLink<C>>> {
        self.link.clone().filter(|link| link.connection.epoch() == plan.epoch)
    }

    fn pool_of(&self, plan: &Plan) -> Option<P> {
        let earlier = self.earlier_pool.as_ref().map(|(_, pool)| pool);
        let found = self.pool.iter().chain(earlier).find(|(epoch, _)| *epoch == plan.epoch);
        found.map(|(_, pool)| pool.clone())
    }

    /// Loads that still need the mapping hold it themselves.
    pub fn drop_earlier_pool(&mut self, now: Instant) {
        if self.earlier_pool.as_ref().is_some_and(|(since, _)| now - *since > POOL_KEPT) {
            self.earlier_pool = None;
        }
    }

    /// Whether a plan's blocks are none of this rank's namespace. The scheduler and the ranks are bound by the sidecar one after
    /// the other, and weights may have changed since the plan was made.
    fn refuses(&mut self, plan: &Plan) -> bool {
        self.read_binding();
        let refused = plan.namespace == 0 || plan.namespace != self.bound;
        if refused {
            self.notices.say(
                NoticeCause::Mismatch,
                format!(
                    "a load of namespace {:016x} was refused by a rank of namespace {:016x}; its blocks are computed \
                     again. This is normal for loads that were planned before the weights changed. If it lasts, \
                     install the same pillion release for all roles of the engine",
                    plan.namespace.swap_bytes(),
                    self.bound.swap_bytes()
                ),
            );
        }
        refused
    }

    /// Remembers what the sidecar has bound this rank to.
    fn read_binding(&mut self) {
        if let Some(link) = &self.link {
            let bound = link.connection.memory().load_bound();
            if bound.weights == self.weights.number && bound.namespace != 0 {
                self.bound = bound.namespace;
            }
        }
    }
}
