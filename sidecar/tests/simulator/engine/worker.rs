//! A rank: the connector's worker role and the shim under it, and the two threads that they run on.

use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;

use connector_shim::core::endpoint::Endpoint;
use connector_shim::core::plan::Plan;
use shm_protocol::layout::header;
use shm_protocol::request::WorkerRequest;

use super::load::{Awaited, Job, WorkerLink};
use super::request::{Results, Step};
use super::{Change, Model, Port, Shared};
use crate::connection::PoolMap;
use crate::ctx::{ARRIVAL_DEADLINE, Actor, Ctx, LOAD_DEADLINE, Micros, POOL_KEPT};
use crate::origin::Origin;

/// What a rank does next.
#[derive(Debug)]
pub(super) enum Phase {
    Idle,
    /// Looks at the load of this index.
    Loads(Rc<Step>, usize),
    /// Waits for the sidecar's word on a synchronous load.
    Await(Rc<Step>, usize, Box<Awaited>),
    /// Copies a synchronous load itself.
    Copy(Rc<Step>, usize, Box<Job>),
    /// Waits for the other ranks, then computes.
    Forward(Rc<Step>, usize),
    /// Writes block and word of this piece of work.
    Write(Rc<Step>, usize, usize, usize),
    Done(Rc<Step>),
}

#[derive(Debug)]
pub(crate) struct Worker {
    pub(super) rank: usize,
    pub(super) model: Rc<Model>,
    port: Port,
    pub(super) link: Option<Rc<WorkerLink>>,
    joined: Option<[u8; 16]>,
    /// The last step begun: a new session is told, since reports on the last one may be lost.
    started: u64,
    /// What it was told last: how often the weights changed, and which it holds.
    weights: (u64, u8),
    /// Whether the sidecar was told too.
    told: bool,
    /// The namespace that it was bound to last; 0: none since the weights changed.
    bound: u64,
    pool: Option<Rc<PoolMap>>,
    earlier_pool: Option<(Micros, Rc<PoolMap>)>,
    pub(super) phase: Phase,
    awaited: Vec<Awaited>,
    /// Loads that the other thread copies.
    jobs: VecDeque<Job>,
    ended: Vec<u64>,
    failed: BTreeSet<u32>,
    /// Last step computed on blocks that were not loaded: its fence is withheld until its saves are void.
    spoiled: u64,
    flood: bool,
}

// === impl Worker ===

impl Worker {
    pub(super) fn new(rank: usize, model: Rc<Model>, port: Port) -> Self {
        Self {
            rank,
            model,
            port,
            link: None,
            joined: None,
            started: 0,
            weights: (0, 0),
            told: true,
            bound: 0,
            pool: None,
            earlier_pool: None,
            phase: Phase::Idle,
            awaited: Vec::new(),
            jobs: VecDeque::new(),
            ended: Vec::new(),
            failed: BTreeSet::new(),
            spoiled: 0,
            flood: false,
        }
    }

    /// Whether every load has ended and the sidecar was told.
    pub(super) fn settled(&self) -> bool {
        let told = self.link.as_ref().is_none_or(|link| link.all_reported());
        told && self.awaited.is_empty() && self.jobs.is_empty()
    }

    /// Whether it waits for a load, or copies one.
    pub(crate) fn loading(&self) -> bool {
        let sync = matches!(self.phase, Phase::Await(..) | Phase::Copy(..));
        sync || !self.awaited.is_empty() || !self.jobs.is_empty()
    }

    pub(crate) fn flood(&mut self) {
        self.flood = true;
    }

    /// One move of the rank's own thread; the time until the next.
    pub(crate) fn act(&mut self, shared: &mut Shared, ctx: &mut Ctx) -> Micros {
        match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Idle => return self.begin(shared, ctx),
            Phase::Loads(step, at) => self.look_at_load(step, at, shared, ctx),
            Phase::Await(step, at, awaited) => return self.wait(step, at, awaited, shared, ctx),
            Phase::Copy(step, at, mut job) => {
                if job.step(&self.model, self.rank, &shared.kvs[self.rank], ctx) {
                    self.sync_load_ended(&step, at, &job.failed, shared);
                    self.phase = Phase::Loads(step, at + 1);
                } else {
                    self.phase = Phase::Copy(step, at, job);
                }
                return ctx.pause(ctx.knobs.copy_us);
            }
            Phase::Forward(step, at) => return self.forward(step, at, shared, ctx),
            Phase::Write(step, at, block, word) => self.write(step, at, block, word, shared, ctx),
            Phase::Done(step) => self.end_step(&step, shared, ctx),
        }
        ctx.pause(10)
    }

    fn begin(&mut self, shared: &mut Shared, ctx: &mut Ctx) -> Micros {
        let Some(step) = shared.queues[self.rank].pop_front() else {
            self.refresh(ctx);
            return ctx.pause(150);
        };
        self.refresh(ctx);
        if step.resolved >= self.spoiled {
            self.spoiled = 0;
        }
        if step.weights.0 > self.weights.0 {
            (self.weights, self.told, self.bound) = (step.weights, false, 0);
        }
        if let Some(link) = &self.link {
            if std::mem::take(&mut self.flood) {
                link.flood(ctx);
            }
            self.told = self.told || link.state_weights(self.weights);
            if self.told
                && self.joined != Some(step.run)
                && link.post(WorkerRequest::Join { run: step.run, step: self.started })
            {
                self.joined = Some(step.run);
            }
            link.store(header::FENCE_START, step.number);
            link.retry();
        }
        self.started = step.number;
        self.phase = Phase::Loads(step, 0);
        ctx.pause(10)
    }

    fn refresh(&mut self, ctx: &mut Ctx) {
        if self.earlier_pool.as_ref().is_some_and(|(since, _)| ctx.now - since > POOL_KEPT) {
            self.earlier_pool = None;
        }
        match self.port.refresh(ctx) {
            Change::Same => {}
            Change::Lost => self.link = None,
            Change::Connected => {
                let connection = self.port.connection.as_ref().expect("it has just come");
                let pool = Rc::clone(&connection.pool);
                self.link = Some(Rc::new(WorkerLink::new(connection)));
                if let Some(earlier) = self.pool.replace(pool) {
                    self.earlier_pool = Some((ctx.now, earlier));
                }
                // The run is known from the step before, if there was one.
                let run = self.joined.take();
                self.told = self.weights.0 == 0;
                if let (Some(run), Some(link)) = (run, &self.link) {
                    self.told = self.told || link.state_weights(self.weights);
                    self.joined = link.post(WorkerRequest::Join { run, step: self.started }).then_some(run);
                }
            }
        }
    }

    /// The connection to the sidecar that made the plan possible.
    fn link_of(&self, plan: &Plan) -> Option<Rc<WorkerLink>> {
        self.link.clone().filter(|link| link.connection.epoch == plan.epoch)
    }

    fn pool_of(&self, plan: &Plan, ctx: &mut Ctx) -> Option<Rc<PoolMap>> {
        let earlier = self.earlier_pool.as_ref().map(|(_, pool)| pool);
        let current = self.pool.as_ref().filter(|pool| pool.epoch == plan.epoch);
        if current.is_none() && earlier.is_some_and(|pool| pool.epoch == plan.epoch) {
            ctx.hit("engine rescue from an earlier pool");
        }
        current.or(earlier.filter(|pool| pool.epoch == plan.epoch)).cloned()
    }

    fn look_at_load(&mut self, step: Rc<Step>, at: usize, shared: &mut Shared, ctx: &mut Ctx) {
        let Some(order) = step.orders.get(at).cloned() else {
            self.phase = Phase::Forward(step, 0);
            return;
        };
        let (request, sync, blocks) = (order.request, order.sync, order.blocks());
        self.phase = Phase::Loads(Rc::clone(&step), at + 1);
        let Some(plan) = order.plan else {
            self.failed.extend(&blocks);
            if sync {
                self.spoil(&step, at, shared)
            } else {
                self.ended.push(request)
            }
            return;
        };
        let (link, refused) = (self.link_of(&plan), self.refuses(&plan, ctx));
        if let Some(link) = link.clone().filter(|_| !plan.by_engine()) {
            let deadline = ctx.now + if plan.arriving() { ARRIVAL_DEADLINE } else { LOAD_DEADLINE };
            let awaited = Awaited { request, plan, refused, link, deadline };
            awaited.link.connection.ring();
            match sync {
                true => self.phase = Phase::Await(step, at, Box::new(awaited)),
                false => self.awaited.push(awaited),
            }
            return;
        }
        let pool = self.pool_of(&plan, ctx);
        let job = Job::new(request, (plan, refused), pool, link);
        match sync {
            true => self.phase = Phase::Copy(step, at, Box::new(job)),
            false => self.submit(job, ctx),
        }
    }

    /// Whether a plan is of another namespace than this rank.
    fn refuses(&mut self, plan: &Plan, ctx: &mut Ctx) -> bool {
        let namespace = self.link.as_ref().map_or(0, |link| link.connection.namespace(self.weights.0));
        if namespace != 0 {
            self.bound = namespace;
        }
        let refused = plan.namespace == 0 || plan.namespace != self.bound;
        if refused {
            ctx.hit("engine load of another namespace");
        }
        refused
    }

    fn submit(&mut self, job: Job, ctx: &mut Ctx) {
        self.jobs.push_back(job);
        ctx.wakes.push((Actor::Rescuer(self.model.index, self.rank), ctx.now + 1 + ctx.rng.below(30)));
    }

    /// Waits for a synchronous load by the sidecar.
    fn wait(
        &mut self,
        step: Rc<Step>,
        at: usize,
        awaited: Box<Awaited>,
        shared: &mut Shared,
        ctx: &mut Ctx,
    ) -> Micros {
        match awaited.look(ctx) {
            None => self.phase = Phase::Await(step, at, awaited),
            Some(Ok(())) => {
                self.sync_load_ended(&step, at, &awaited.failed(), shared);
                self.phase = Phase::Loads(step, at + 1);
            }
            Some(Err(why)) => {
                ctx.hit(why);
                let pool = self.pool_of(&awaited.plan, ctx);
                self.phase = Phase::Copy(step, at, Box::new(awaited.rescue(pool, ctx)));
            }
        }
        ctx.pause(50)
    }

    /// The oracle: every block that counts as loaded holds what was asked for.
    fn sync_load_ended(&mut self, step: &Step, at: usize, failed: &[u32], shared: &mut Shared) {
        let (request, targets) = (step.orders[at].request, &step.orders[at].targets);
        for target in targets.iter().filter(|target| !failed.contains(&target.block)) {
            let (digest, hash, shard) = (target.digest, target.hash, self.model.shard(self.rank));
            let place = || format!("request {request} on rank {} before its step", self.rank);
            shared.kvs[self.rank].check(target.block, &Origin { digest, hash, shard }, place);
        }
        if !failed.is_empty() {
            self.failed.extend(failed);
            self.spoil(step, at, shared);
        }
    }

    /// This step computes on blocks that were not loaded.
    fn spoil(&mut self, step: &Step, at: usize, shared: &mut Shared) {
        self.spoiled = self.spoiled.max(step.number);
        shared.broken.insert((step.orders[at].request, step.orders[at].attempt));
    }

    fn end_step(&mut self, step: &Step, shared: &mut Shared, ctx: &mut Ctx) {
        if self.spoiled > 0 {
            ctx.hit("engine fence withheld");
        } else if let Some(link) = &self.link {
            link.store(header::FENCE_DONE, step.number);
            if step.urgent {
                link.connection.ring();
            }
        }
        for awaited in std::mem::take(&mut self.awaited) {
            match awaited.look(ctx) {
                None => self.awaited.push(awaited),
                Some(Ok(())) => {
                    self.failed.extend(awaited.failed());
                    self.ended.push(awaited.request);
                }
                Some(Err(why)) => {
                    ctx.hit(why);
                    let pool = self.pool_of(&awaited.plan, ctx);
                    let job = awaited.rescue(pool, ctx);
                    self.submit(job, ctx);
                }
            }
        }
        let (ended, failed) = (std::mem::take(&mut self.ended), std::mem::take(&mut self.failed));
        shared.results[self.rank].push_back(Results { step: step.number, ended, failed });
        ctx.wakes.push((Actor::Scheduler(self.model.index), ctx.now + 5 + ctx.rng.below(60)));
    }

    /// One move of the thread that copies; the time until the next, none while there is nothing to do.
    pub(crate) fn copy(&mut self, shared: &Shared, ctx: &mut Ctx) -> Option<Micros> {
        let job = self.jobs.front_mut()?;
        if job.step(&self.model, self.rank, &shared.kvs[self.rank], ctx) {
            let job = self.jobs.pop_front().expect("looked at above");
            self.ended.push(job.request);
            self.failed.extend(job.failed);
        }
        Some(ctx.pause(ctx.knobs.copy_us))
    }
}
