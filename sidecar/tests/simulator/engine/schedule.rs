//! vLLM's scheduler: blocks for waiting and running requests, preemption, and the step that follows.

use std::rc::Rc;

use super::request::{Fate, Order, State, Step, Work};
use super::scheduler::{Hit, InFlight, Phase, Scheduler};
use super::{Shared, request};
use crate::ctx::Ctx;

// === impl Scheduler: scheduling ===

impl Scheduler {
    /// Gives blocks to the request at the head of the queue, and promises its load.
    pub(super) fn admit(&mut self, hit: Option<Hit>, admit: usize, ctx: &mut Ctx) {
        self.phase = Phase::Schedule;
        let Some(&id) = self.waiting.front() else { return };
        let Some(mut hit) = hit else {
            self.waiting.pop_front();
            self.run(id);
            self.phase = Phase::Match(admit - 1);
            return;
        };
        if ctx.rng.one_in(8) && hit.count > 1 {
            // vLLM may want less than was found.
            hit.count -= 1;
            ctx.hit("engine load of a part");
        }
        let end = hit.from + hit.count;
        let needed = end + usize::from(hit.sync);
        if self.free.len() < needed || ctx.rng.one_in(ctx.knobs.full_steps) {
            // No blocks, or the step is full: it stays at the head, under its lease, until the next step.
            return;
        }
        let blocks: Vec<u32> = (0..needed).map(|_| self.take_block(ctx)).collect();
        self.requests.get_mut(&id).expect("waiting requests exist").blocks = blocks;
        self.waiting.pop_front();
        match self.renew(id, ctx) {
            Some(op) => {
                self.waiting.push_front(id);
                self.phase = Phase::Renew { op, began: ctx.instant(), admit, hit };
            }
            None => {
                self.waiting.push_front(id);
                self.post_load(hit, admit, ctx);
            }
        }
    }

    /// The blocks are there and the lease is fresh: LOAD.
    pub(super) fn post_load(&mut self, hit: Hit, admit: usize, ctx: &mut Ctx) {
        self.phase = Phase::Match(admit - 1);
        let id = self.waiting.pop_front().expect("it was given blocks");
        let digest = self.digest();
        let (from, end) = (hit.from, hit.from + hit.count);
        let request = self.requests.get_mut(&id).expect("waiting requests exist");
        let promised = request.targets(from..end, digest);
        request.loaded = request.blocks[from..end].to_vec();
        request.promised = promised;
        request.failed.clear();
        let (attempt, promised) = (request.attempt, request.promised.clone());
        self.overwritten.extend(&request.blocks);
        if self.model.early {
            // The load may begin as soon as it is posted.
            self.cancel(ctx);
        }
        let plans = self.load(id, hit, ctx);
        ctx.hit(match (plans.is_empty(), hit.sync) {
            (true, _) => "engine load without lease",
            (_, true) => "engine sync load",
            (_, false) => "engine async load",
        });
        let mut rest = promised.into_iter();
        let mut order = |count: usize, plan| {
            let targets = rest.by_ref().take(count).collect();
            Order { request: id, attempt, sync: hit.sync, targets, plan }
        };
        let orders: Vec<Order> = match plans.is_empty() {
            true => vec![order(hit.count, None)],
            false => plans.into_iter().map(|plan| order(plan.blocks.len(), Some(plan))).collect(),
        };
        let parts = orders.len();
        self.orders.extend(orders);
        let request = self.requests.get_mut(&id).expect("waiting requests exist");
        if hit.sync {
            (request.computed, request.settled) = (end, 0);
            request.state = State::Running;
            self.running.push(id);
        } else {
            request.state = State::Loading;
            request.loading = self.model.world * parts;
        }
        if from > 0 {
            // What lies before the hit was found in the engine's own cache; here it is computed in the same step.
            let writes = request.targets(0..from, digest);
            let (kept_from, reads) = (u64::MAX, Vec::new());
            self.work.push(Work { request: id, attempt, kept_from, outdated: false, reads, writes, end: 0 });
        }
    }

    fn run(&mut self, id: u64) {
        let request = self.requests.get_mut(&id).expect("waiting requests exist");
        request.state = State::Running;
        (request.computed, request.settled) = (0, 0);
        self.running.push(id);
    }

    fn take_block(&mut self, ctx: &mut Ctx) -> u32 {
        // The block freed last is mostly used first, so that saves in flight meet its next use.
        let last = self.free.len() - 1;
        let at = if ctx.rng.one_in(4) { ctx.rng.below(self.free.len() as u64) as usize } else { last };
        self.free.swap_remove(at)
    }

    /// Everything after matching: running requests, saves, and the step's metadata.
    pub(super) fn finish_schedule(&mut self, shared: &mut Shared, ctx: &mut Ctx) {
        self.step += 1;
        let mut scheduled = Vec::new();
        for id in self.running.clone() {
            if self.requests.get(&id).is_some_and(|request| request.state == State::Running) {
                self.schedule_one(id, &mut scheduled, ctx);
            }
        }
        self.cancel(ctx);
        for id in &scheduled {
            self.save(*id, ctx);
        }
        self.end_step(ctx);
        self.hand_over(shared, ctx);
        self.wake_ranks(ctx);
    }

    fn schedule_one(&mut self, id: u64, scheduled: &mut Vec<u64>, ctx: &mut Ctx) {
        let request = &self.requests[&id];
        let decoding = request.computed >= request.spec.prompt;
        let chunk = if decoding { 1 } else { self.model.chunk };
        let (start, end) = (request.computed, request.total().min(request.computed + chunk));
        if start == end {
            return;
        }
        while self.requests[&id].blocks.len() < end {
            if self.free.is_empty() {
                let victim = *self.running.last().expect("this one runs");
                self.preempt(victim, scheduled, ctx);
                if victim == id {
                    return;
                }
                continue;
            }
            let block = self.take_block(ctx);
            self.overwritten.push(block);
            self.requests.get_mut(&id).expect("looked up above").blocks.push(block);
        }
        let digest = self.digest();
        let request = self.requests.get_mut(&id).expect("looked up above");
        request.computed = end;
        self.work.push(Work {
            request: id,
            attempt: request.attempt,
            kept_from: request.kept_from,
            outdated: request.outdated,
            reads: request.targets(0..start, digest),
            writes: request.targets(start..end, digest),
            end,
        });
        scheduled.push(id);
    }

    /// Takes all blocks of a request; it starts anew later.
    fn preempt(&mut self, id: u64, scheduled: &mut Vec<u64>, ctx: &mut Ctx) {
        ctx.hit("engine preempted");
        ctx.note(|| format!("{}: request {id} preempted", self.model.name));
        let request = self.requests.get_mut(&id).expect("it runs");
        self.free.append(&mut request.blocks);
        (request.state, request.computed, request.settled, request.saved) = (State::Waiting, 0, 0, 0);
        request.begin_attempt(u64::MAX);
        self.running.retain(|other| *other != id);
        self.waiting.push_front(id);
        scheduled.retain(|other| *other != id);
        // What it computes in this very step is not computed; a load that was promised goes on, into blocks that are
        // written in order before whoever gets them next computes.
        self.work.retain(|work| work.request != id);
    }

    fn hand_over(&mut self, shared: &mut Shared, ctx: &mut Ctx) {
        let work = std::mem::take(&mut self.work);
        let resolved = self.step.saturating_sub(self.model.depth as u64);
        let urgent = self.session.saving() > 0;
        let orders = std::mem::take(&mut self.orders);
        let ends = work.iter().map(|work| (work.request, work.attempt, work.end)).collect();
        let urgent = urgent || !orders.is_empty();
        let fate = if orders.is_empty() && !work.is_empty() { self.fate(ctx) } else { Fate::Whole };
        let step = request::Step {
            number: self.step,
            fate,
            run: self.run,
            weights: self.weights,
            resolved,
            urgent,
            orders,
            work,
        };
        self.note_step(&step, ctx);
        let step = Rc::new(step);
        shared.queues.iter_mut().for_each(|queue| queue.push_back(Rc::clone(&step)));
        self.in_flight.push_back(InFlight { work: ends, number: self.step, fails: fate != Fate::Whole });
    }

    /// How a step goes that loads nothing.
    fn fate(&self, ctx: &mut Ctx) -> Fate {
        if ctx.knobs.faults == 0 || !ctx.rng.one_in(40) {
            return Fate::Whole;
        }
        let rank = ctx.rng.below(self.model.world as u64) as usize;
        let (point, fate) = ctx.rng.pick(&[
            ("engine step skipped", Fate::Skipped(rank)),
            ("engine step raised", Fate::Raised(rank)),
            ("engine step refused", Fate::Refused),
        ]);
        ctx.hit(point);
        ctx.note(|| format!("{}: step {} ends as {fate:?}", self.model.name, self.step));
        fate
    }

    fn note_step(&self, step: &Step, ctx: &mut Ctx) {
        if step.work.is_empty() && step.orders.is_empty() {
            return;
        }
        ctx.note(|| {
            let work = step.work.iter().map(|work| {
                let blocks: Vec<u32> = work.writes.iter().map(|target| target.block).collect();
                format!("request {} writes {blocks:?}", work.request)
            });
            let orders = step.orders.iter().map(|order| {
                let (op, sync) = (order.plan.as_ref().map(|plan| plan.op), order.sync);
                format!("request {} loads {:?} by {op:?} sync {sync}", order.request, order.blocks())
            });
            let all: Vec<String> = work.chain(orders).collect();
            format!("{}: step {}: {}", self.model.name, step.number, all.join("; "))
        });
    }
}
