//! A rank's session: its run, its weights, the loads it waits for, and the process that copies each of them.
//!
//! A load left unfinished by the sidecar is a [`LoadJob`]: its host copies the blocks from the mapped pool.
//! The mapping outlives the connection, so that a dead sidecar's promises can still be kept.

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

/// Time for which the pool of a sidecar's earlier life stays mapped beside the next one: earlier plans are on
/// their way for a step or two, and the next sidecar needs the memory.
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
    /// True if this rank copies every load itself.
    by_engine: bool,
    /// Bytes of this rank's part of a block.
    block_bytes: u64,
    link: Option<Arc<RankLink<C>>>,
    /// The sidecar's life, and its pool.
    pool: Option<(u64, P)>,
    earlier_pool: Option<(Instant, (u64, P))>,
    /// Loads into host memory that no step waits for, while the sidecar may still copy them.
    pub awaited: Vec<AwaitedLoad<C>>,
    run: Option<[u8; 16]>,
    joined: bool,
    /// The last step begun.
    started: u64,
    weights: Weights,
    /// True if the sidecar has the last of them.
    has_posted_weights: bool,
    /// The first 8 bytes of the rank's last namespace, also after the sidecar's end: its promises can still
    /// be kept. 0: none since the weights may have changed.
    bound: u64,
}

// === impl RankSession ===

impl<C: Deref<Target: Endpoint>, P: Clone> RankSession<C, P> {
    /// A session without a connection. Notices for the engine's log go to `notices`.
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

    /// Begins with a new sidecar, and repeats this rank's weights and run to it. The caller has detached the
    /// last one.
    pub fn attach(&mut self, connection: C, pool: P, now: Instant) {
        let epoch = connection.epoch();
        self.link = Some(Arc::new(RankLink::new(connection)));
        (self.joined, self.has_posted_weights) = (false, self.weights.number == 0);
        if let Some(pool) = self.pool.replace((epoch, pool)) {
            self.earlier_pool = Some((now, pool));
        }
        self.introduce();
    }

    /// Drops an ended connection. Loads promised under its last binding may still be made.
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

    /// Takes part in the scheduler's run. Does nothing if this connection has told the sidecar already.
    pub fn join(&mut self, run: [u8; 16]) {
        if self.run != Some(run) {
            self.run = Some(run);
            self.joined = false;
        }
        self.introduce();
    }

    /// States this rank's weights, by a digest of a sample, in answer to the scheduler's `answers`th change.
    /// A number below the last one repeats it: the rank found the change by itself. Every load is refused
    /// until the sidecar has bound the rank again.
    pub fn set_weights(&mut self, answers: u64, live: [u8; 16]) {
        let Weights { number, answers: last, .. } = self.weights;
        self.weights = Weights { number: number + 1, answers: answers.max(last), live };
        (self.has_posted_weights, self.bound) = (false, 0);
        self.introduce();
    }

    /// Posts missing messages: the weights first, so that a joined rank always has the stated ones.
    fn introduce(&mut self) {
        let Some(link) = &self.link else { return };
        if !self.has_posted_weights {
            let Weights { number, answers, live } = self.weights;
            self.has_posted_weights = link.post(WorkerRequest::Weights { number, answers, live });
        }
        if let (true, false, Some(run)) = (self.has_posted_weights, self.joined, self.run) {
            // LOADED messages up to that step may have been lost with the last connection.
            self.joined = link.post(WorkerRequest::Join { run, step: self.started });
        }
    }

    /// Notes the begin of step `step`; its fence is stored.
    pub fn start_step(&mut self, step: u64) {
        self.started = step;
        if let Some(link) = &self.link {
            link.retry();
        }
    }

    /// True if the sidecar writes no block of the plan into this rank's memory.
    pub fn copies_itself(&self, plan: &Plan) -> bool {
        self.by_engine || plan.by_engine()
    }

    /// Begins a load into host memory, copied by the sidecar or by this process.
    pub fn begin_load(&mut self, plan: Plan) -> NextLoadStep<C, P> {
        let link = self.link_of(&plan).filter(|_| !self.copies_itself(&plan));
        let Some(link) = link else { return NextLoadStep::Copy(self.job(plan)) };
        let ahead = self.awaited.iter().map(|awaited| awaited.plan.blocks.len());
        let blocks = ahead.sum::<usize>() + plan.blocks.len();
        let patience = CopyPatience::of_plan(&plan, blocks as u64 * self.block_bytes);
        NextLoadStep::Await(AwaitedLoad { refused: self.refuses(&plan), plan, link, patience })
    }

    /// Looks at an awaited load.
    pub fn look_at_load(&mut self, mut awaited: AwaitedLoad<C>, now: Instant) -> NextLoadStep<C, P> {
        let outcome = awaited.outcome();
        if is_whole(&awaited.plan, outcome) {
            return NextLoadStep::Whole(awaited);
        }
        if outcome.is_some_and(|outcome| outcome.status.is_refusal()) {
            // No one writes a block of it: there is nothing to take back.
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

    /// Returns the job for a load copied by this process.
    pub fn job(&mut self, plan: Plan) -> LoadJob<C, P> {
        let refused = self.refuses(&plan);
        LoadJob { pool: self.pool_of(&plan), link: self.link_of(&plan), plan, rescue: false, refused }
    }

    /// The connection to the sidecar of this plan.
    pub fn link_of(&self, plan: &Plan) -> Option<Arc<RankLink<C>>> {
        self.link.clone().filter(|link| link.connection.epoch() == plan.epoch)
    }

    fn pool_of(&self, plan: &Plan) -> Option<P> {
        let earlier = self.earlier_pool.as_ref().map(|(_, pool)| pool);
        let found = self.pool.iter().chain(earlier).find(|(epoch, _)| *epoch == plan.epoch);
        found.map(|(_, pool)| pool.clone())
    }

    /// Unmaps the pool of an earlier life after `POOL_KEPT`. Loads in progress keep the mapping by their
    /// own references.
    pub fn drop_earlier_pool(&mut self, now: Instant) {
        if self.earlier_pool.as_ref().is_some_and(|(since, _)| now - *since > POOL_KEPT) {
            self.earlier_pool = None;
        }
    }

    /// True if a plan's blocks belong to another namespace than this rank. The sidecar binds the scheduler
    /// and the ranks one after the other, and weights may have changed since the plan was made.
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

    /// Stores the namespace of the sidecar's binding, if it is for the current weights.
    fn read_binding(&mut self) {
        if let Some(link) = &self.link {
            let bound = link.connection.memory().load_bound();
            if bound.weights == self.weights.number && bound.namespace != 0 {
                self.bound = bound.namespace;
            }
        }
    }
}
