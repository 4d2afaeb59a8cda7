//! A rank: the connector's worker role, the shim under it, and their two threads.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use connector_shim::core::endpoint::Endpoint;
use connector_shim::core::notices::Notices;
use connector_shim::core::worker::{self, load};
use shm_protocol::layout::header;
use shm_protocol::request::{LoadEnd, WorkerRequest};

use super::copying::Copying;
use super::request::{Fate, Results, Step};
use super::{Change, Model, Port, Shared};
use crate::connection::{Connection, PoolMap};
use crate::ctx::{Actor, Ctx, Micros};
use crate::origin::Origin;

type Awaited = load::AwaitedLoad<Rc<Connection>>;
type Next = load::NextLoadStep<Rc<Connection>, Rc<PoolMap>>;

/// A rank's next move.
#[derive(Debug)]
pub(super) enum Phase {
    Idle,
    /// Begins the load of this index.
    Loads(Rc<Step>, usize),
    /// Waits for the sidecar's end of a synchronous load.
    Await(Rc<Step>, usize, Box<Awaited>),
    /// Copies a synchronous load itself.
    Copy(Rc<Step>, usize, Box<Copying>),
    /// Waits for the other ranks, then computes.
    Forward(Rc<Step>, usize),
    /// Writes block and word of this piece of work.
    Write(Rc<Step>, usize, usize, usize),
    Done(Rc<Step>),
}

#[derive(Debug)]
pub(crate) struct Worker {
    /// Its index among the workers of all ranks and groups.
    pub(super) number: usize,
    pub(super) group: usize,
    pub(super) rank: usize,
    pub(super) model: Rc<Model>,
    port: Port,
    session: worker::RankSession<Rc<Connection>, Rc<PoolMap>>,
    /// Number of weight changes last known.
    weights: u64,
    pub(super) phase: Phase,
    /// Requests with loads begun here, by their operations.
    loads: BTreeMap<u64, u64>,
    /// Loads for the copying thread.
    copies: VecDeque<Copying>,
    ended: Vec<u64>,
    failed: BTreeSet<u32>,
    /// Last step computed with missing blocks: its fence is withheld until its saves are void.
    spoiled: u64,
    flood: bool,
}

// === impl Worker ===

impl Worker {
    pub(super) fn new(number: usize, model: Rc<Model>, port: Port) -> Self {
        let session =
            worker::RankSession::new(model.by_engine, model.form.shard_bytes, Arc::new(Notices::default()));
        Self {
            number,
            group: number / model.world,
            rank: number % model.world,
            model,
            port,
            session,
            weights: 0,
            phase: Phase::Idle,
            loads: BTreeMap::new(),
            copies: VecDeque::new(),
            ended: Vec::new(),
            failed: BTreeSet::new(),
            spoiled: 0,
            flood: false,
        }
    }

    /// True if every load has ended and was reported to the sidecar.
    pub(super) fn settled(&self) -> bool {
        let told = self.session.link().is_none_or(|link| link.is_reported());
        told && self.session.awaited.is_empty() && self.copies.is_empty()
    }

    /// True if it waits for a load or copies one.
    pub(crate) fn loading(&self) -> bool {
        let sync = matches!(self.phase, Phase::Await(..) | Phase::Copy(..));
        sync || !self.session.awaited.is_empty() || !self.copies.is_empty()
    }

    pub(crate) fn flood(&mut self) {
        self.flood = true;
    }

    /// Makes one move of the rank's main thread. Returns the time until the next.
    pub(crate) fn act(&mut self, shared: &mut Shared, ctx: &mut Ctx) -> Micros {
        match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Idle => return self.begin(shared, ctx),
            Phase::Loads(step, at) => self.look_at_load(step, at, shared, ctx),
            Phase::Await(step, at, awaited) => return self.wait(step, at, *awaited, shared, ctx),
            Phase::Copy(step, at, mut copying) => {
                if copying.step(&self.model, self.rank, &shared.kvs[self.rank], ctx) {
                    self.sync_load_ended(&step, at, &copying.failed, shared);
                    self.phase = Phase::Loads(step, at + 1);
                } else {
                    self.phase = Phase::Copy(step, at, copying);
                }
                return ctx.pause(ctx.knobs.copy_us);
            }
            Phase::Forward(step, at) => return self.forward(step, at, shared, ctx),
            Phase::Write(step, at, block, word) => self.write(step, at, block, word, shared, ctx),
            Phase::Done(step) => {
                shared.written[self.number] = step.number;
                let mut groups = shared.written.iter().skip(self.rank).step_by(self.model.world);
                if groups.any(|written| *written < step.number) {
                    self.phase = Phase::Done(step);
                    return ctx.pause(60);
                }
                self.end_step(&step, shared, ctx);
            }
        }
        ctx.pause(10)
    }

    fn begin(&mut self, shared: &mut Shared, ctx: &mut Ctx) -> Micros {
        let Some(step) = shared.queues[self.number].pop_front() else {
            self.refresh(ctx);
            return ctx.pause(150);
        };
        self.refresh(ctx);
        if step.resolved >= self.spoiled {
            self.spoiled = 0;
        }
        if std::mem::take(&mut self.flood) {
            self.fill_ring(ctx);
        }
        let again = self.model.resets > 0 && ctx.rng.one_in(50);
        if again || step.weights.0 > self.weights {
            // A rank may load its current weights again without a change at its scheduler.
            self.weights = step.weights.0;
            self.session.set_weights(step.weights.0, super::live(step.weights.1));
        }
        self.session.join(step.runs[self.group]);
        if step.fate == Fate::Skipped(self.rank) {
            shared.reached[self.number] = step.number;
            self.report(&step, shared, ctx);
            return ctx.pause(10);
        }
        if let Some(link) = self.session.link() {
            link.store(header::FENCE_START, step.number);
        }
        self.session.start_step(step.number);
        self.phase = Phase::Loads(step, 0);
        ctx.pause(10)
    }

    /// Fills the ring with reports of no load.
    fn fill_ring(&self, ctx: &mut Ctx) {
        let Some(link) = self.session.link() else { return };
        while link.post(WorkerRequest::Loaded { op: 0, end: LoadEnd::Whole }) {}
        ctx.hit("fault full ring");
    }

    fn refresh(&mut self, ctx: &mut Ctx) {
        self.session.drop_earlier_pool(ctx.rank_instant());
        let change = self.port.look();
        self.port.dial(ctx);
        if change != Change::Same {
            self.session.detach();
        }
        if change == Change::Connected {
            let connection = self.port.connection.clone().expect("it has just come");
            let pool = Rc::clone(&connection.pool);
            self.session.attach(connection, pool, ctx.rank_instant());
        }
    }

    fn look_at_load(&mut self, step: Rc<Step>, at: usize, shared: &mut Shared, ctx: &mut Ctx) {
        let Some(order) = step.orders.get(at).cloned() else {
            self.phase = Phase::Forward(step, 0);
            return;
        };
        let (request, sync) = (order.request, order.sync);
        self.phase = Phase::Loads(Rc::clone(&step), at + 1);
        if order.group != self.group {
            return;
        }
        let Some(plan) = order.plan else {
            self.failed.extend(order.blocks());
            match sync {
                true => self.spoil(&step, &order.blocks(), shared),
                false => self.ended.push(request),
            }
            return;
        };
        self.loads.insert(plan.op, request);
        let next = self.session.begin_load(plan);
        if let Next::Await(Awaited { refused: true, .. }) | Next::Copy(load::LoadJob { refused: true, .. }) =
            next
        {
            ctx.hit("engine load of another namespace");
        }
        if sync && let Next::Await(awaited) = &next {
            awaited.link.connection.ring();
        }
        self.go_on(next, sync.then_some((step, at)), shared, ctx);
    }

    /// Checks a load awaited from the sidecar.
    fn look(&mut self, awaited: Awaited, ctx: &mut Ctx) -> Next {
        let next = self.session.look_at_load(awaited, ctx.rank_instant());
        if let Next::Copy(job) = &next {
            let link = job.link.as_ref();
            let failed = link.is_some_and(|link| link.outcome(job.plan.op).is_some());
            let lost = link.is_some_and(|link| link.connection.is_lost());
            ctx.hit(match (job.rescue, failed, lost) {
                (false, ..) => "engine load refused",
                (_, true, _) => "engine rescue after a failed copy",
                (_, _, true) => "engine rescue after a hang-up",
                _ => "engine rescue after the deadline",
            });
        }
        next
    }

    /// Continues a load; `step` is the step that waits for it, if one does.
    fn go_on(&mut self, next: Next, step: Option<(Rc<Step>, usize)>, shared: &mut Shared, ctx: &mut Ctx) {
        match (next, step) {
            (Next::Await(awaited), Some((step, at))) => {
                self.phase = Phase::Await(step, at, Box::new(awaited));
            }
            (Next::Await(awaited), None) => self.session.awaited.push(awaited),
            (Next::Whole(awaited), Some((step, at))) => {
                self.sync_load_ended(&step, at, &awaited.failed_blocks(), shared);
                self.phase = Phase::Loads(step, at + 1);
            }
            (Next::Whole(awaited), None) => self.load_ended(awaited.plan.op, awaited.failed_blocks()),
            (Next::Copy(job), step) => {
                let epoch = self.session.link().map(|link| link.connection.epoch);
                if job.pool.as_ref().is_some_and(|pool| epoch.is_some_and(|epoch| epoch != pool.epoch)) {
                    ctx.hit("engine rescue from an earlier pool");
                }
                let copying = Copying::new(job, ctx);
                match step {
                    Some((step, at)) => self.phase = Phase::Copy(step, at, Box::new(copying)),
                    None => {
                        self.copies.push_back(copying);
                        let at = ctx.now + 1 + ctx.rng.below(30);
                        ctx.wakes.push((Actor::Rescuer(self.model.index, self.number), at));
                    }
                }
            }
        }
    }

    fn load_ended(&mut self, op: u64, failed: Vec<u32>) {
        self.ended.push(self.loads[&op]);
        self.failed.extend(failed);
    }

    /// Waits for a synchronous load by the sidecar.
    fn wait(
        &mut self,
        step: Rc<Step>,
        at: usize,
        awaited: Awaited,
        shared: &mut Shared,
        ctx: &mut Ctx,
    ) -> Micros {
        let next = self.look(awaited, ctx);
        self.go_on(next, Some((step, at)), shared, ctx);
        ctx.pause(50)
    }

    /// The oracle: every block reported as loaded must hold its key's KV.
    fn sync_load_ended(&mut self, step: &Step, at: usize, failed: &[u32], shared: &mut Shared) {
        let (request, targets) = (step.orders[at].request, &step.orders[at].targets);
        for target in targets.iter().filter(|target| !failed.contains(&target.block)) {
            let (digest, hash, shard) = (target.digest, target.hash, self.model.shard(self.rank));
            let place = || format!("request {request} on rank {} before its step", self.rank);
            let origin = Origin { digest, hash, shard };
            shared.kvs[self.rank].check(target.block, target.words.clone(), &origin, place);
        }
        if !failed.is_empty() {
            self.failed.extend(failed);
            self.spoil(step, failed, shared);
        }
    }

    /// Records blocks missing from this step.
    fn spoil(&mut self, step: &Step, blocks: &[u32], shared: &mut Shared) {
        self.spoiled = self.spoiled.max(step.number);
        blocks.iter().for_each(|block| shared.judge.not_loaded(step.number, *block));
    }

    fn end_step(&mut self, step: &Step, shared: &mut Shared, ctx: &mut Ctx) {
        if step.fate == Fate::Raised(self.rank) {
            ctx.note(|| format!("{}: rank {} raises in step {}", self.model.name, self.rank, step.number));
        } else if self.spoiled > 0 {
            ctx.hit("engine fence withheld");
        } else if let Some(link) = self.session.link() {
            link.store(header::FENCE_DONE, step.number);
            if step.urgent {
                link.connection.ring();
            }
        }
        self.report(step, shared, ctx);
    }

    /// Reports the end of the step to the scheduler.
    fn report(&mut self, step: &Step, shared: &mut Shared, ctx: &mut Ctx) {
        for awaited in std::mem::take(&mut self.session.awaited) {
            let next = self.look(awaited, ctx);
            self.go_on(next, None, shared, ctx);
        }
        let (ended, failed) = (std::mem::take(&mut self.ended), std::mem::take(&mut self.failed));
        shared.results[self.number].push_back(Results { step: step.number, ended, failed });
        ctx.wakes.push((Actor::Scheduler(self.model.index), ctx.now + 5 + ctx.rng.below(60)));
    }

    /// Makes one move of the copying thread. Returns the time until the next, `None` without work.
    pub(crate) fn copy(&mut self, shared: &Shared, ctx: &mut Ctx) -> Option<Micros> {
        let copying = self.copies.front_mut()?;
        if copying.step(&self.model, self.rank, &shared.kvs[self.rank], ctx) {
            let Copying { job, failed, .. } = self.copies.pop_front().expect("looked at above");
            self.load_ended(job.plan.op, failed);
        }
        Some(ctx.pause(ctx.knobs.copy_us))
    }
}
