//! vLLM's scheduler: blocks for running and waiting requests, preemption, and the next step.

use std::rc::Rc;

use connector_shim::core::policy::{
    BegunRequest, Changes, Due, FoundTokens, LostLoad, OfferedState, PlannedStep, RequestId, RequestLoad,
    StepPart,
};

use super::blocks::NULL_BLOCK;
use super::request::{Fate, Order, Request, State, Step, Target, Work};
use super::scheduler::{InFlight, Phase, Scheduler};
use super::{BLOCK_TOKENS, Shared, WORD_TOKENS, request};
use crate::ctx::Ctx;
use crate::origin::WORDS;

// === impl Scheduler: scheduling ===

impl Scheduler {
    /// Schedules the running requests. Returns true if waiting requests may be admitted too.
    pub(super) fn schedule_running(&mut self, ctx: &mut Ctx) -> bool {
        let mut room = true;
        for id in self.running.clone() {
            if self.requests.get(&id).is_some_and(|request| request.state == State::Running) {
                self.resume(id);
                room &= self.schedule_one(id, ctx);
            }
        }
        room
    }

    /// Begins a request after the end of its load: vLLM allocates for it once more.
    fn resume(&mut self, id: u64) {
        let request = &self.requests[&id];
        if request.reported_blocks.is_none() {
            let number = request.number;
            self.tell(id);
            assert_eq!(self.policy.allocated(number, 0), None, "request {id} has no other load");
        }
    }

    /// Gives blocks to the request at the head of the queue; `own` are its blocks in the prefix cache.
    pub(super) fn admit(&mut self, own: Vec<Vec<u32>>, found: FoundTokens, admit: usize, ctx: &mut Ctx) {
        self.phase = Phase::Schedule;
        let id = *self.waiting.front().expect("it was asked about");
        let FoundTokens::Tokens(tokens, beside) = found else { unreachable!("the caller looked") };
        let mut external = (tokens / WORD_TOKENS) as usize;
        if external > 1 && !self.model.has_states(1) && ctx.rng.one_in(8) {
            // vLLM may want less than was found; with several groups whole blocks.
            let less = ctx.rng.within(1, external as u64 - 1) as usize;
            let less = if self.model.groups() > 1 { less / WORDS * WORDS } else { less };
            external -= less;
            ctx.cover.add("engine load of a part", u64::from(less > 0));
        }
        let request = self.requests.get_mut(&id).expect("waiting requests exist");
        let had = own[0].len();
        let computed = had * WORDS + external;
        assert!(computed < request.known, "request {id} has no token left to compute");
        (request.computed, request.settled) = (computed, computed);
        let beside = beside && external > 0;
        let end = if beside { computed } else { request.next_end(&self.model) };
        request.offered = computed / WORDS;
        let mut own = own;
        let mut fresh = 0;
        for (group, own) in own.iter_mut().enumerate() {
            // Blocks before the window are not allocated.
            let read = self.model.first_read(group, computed);
            let before = read.min(had);
            own[..before].fill(NULL_BLOCK);
            own.resize(own.len().max(read), NULL_BLOCK);
            fresh += end.div_ceil(WORDS) - own.len();
        }
        let is_full = external > 0 && ctx.rng.one_in(ctx.knobs.full_steps);
        if is_full || !self.blocks.has_room(fresh, &own) {
            // It stays at the head, with its lease, until the next step.
            (request.computed, request.settled) = (0, 0);
            return;
        }
        own.iter().flatten().for_each(|block| self.blocks.share(*block));
        request.reported_blocks = None;
        request.blocks = own;
        for blocks in &mut request.blocks {
            let fresh = end.div_ceil(WORDS) - blocks.len();
            blocks.extend((0..fresh).map(|_| self.blocks.take(ctx)));
        }
        let digests = self.digests();
        let request = self.requests.get_mut(&id).expect("waiting requests exist");
        let first = computed - external;
        let promised = digests.into_iter().enumerate().flat_map(|(group, digest)| {
            request.targets(group, first..computed.next_multiple_of(WORDS), digest)
        });
        request.promised = promised.collect();
        request.failed.clear();
        // vLLM counts no token of the request as computed until the allocation has ended.
        (request.computed, request.settled) = (0, 0);
        let external = external as u32 * WORD_TOKENS;
        self.admitted = computed;
        self.allocated(id, external, beside, admit, ctx);
    }

    /// Computes the request at the head of the queue in this step.
    pub(super) fn run_first(&mut self, admit: usize, ctx: &mut Ctx) {
        self.phase = Phase::Match(admit - 1);
        let id = self.waiting.pop_front().expect("it was given blocks");
        let request = self.requests.get_mut(&id).expect("waiting requests exist");
        request.state = State::Running;
        (request.computed, request.settled) = (self.admitted, self.admitted);
        self.running.push(id);
        self.schedule_one(id, ctx);
    }

    /// Schedules a request. Returns true if it took no blocks of another request.
    fn schedule_one(&mut self, id: u64, ctx: &mut Ctx) -> bool {
        let request = &self.requests[&id];
        let (start, end) = (request.computed, request.next_end(&self.model));
        if start == end {
            return true;
        }
        self.free_passed(id, ctx);
        let (mut alone, groups) = (true, self.model.groups());
        let lacks =
            |request: &Request| (0..groups).find(|group| request.blocks[*group].len() < end.div_ceil(WORDS));
        while let Some(group) = lacks(&self.requests[&id]) {
            if self.blocks.is_empty() {
                alone = false;
                let last = self.running.len() - 1;
                let at = if self.model.priorities { ctx.rng.below(last as u64 + 1) as usize } else { last };
                let victim = self.running[at];
                self.preempt(victim, ctx);
                if victim == id {
                    return false;
                }
                continue;
            }
            let block = self.blocks.take(ctx);
            self.requests.get_mut(&id).expect("looked up above").blocks[group].push(block);
        }
        self.list(id, end);
        let (digests, request) = (self.digests(), &self.requests[&id]);
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        for (group, digest) in digests.into_iter().enumerate() {
            if self.model.has_states(group) {
                reads.extend(request.state(group, start, digest));
                writes.extend(request.state(group, end, digest));
                continue;
            }
            let first = self.model.first_read(group, start) * WORDS;
            reads.extend(request.targets(group, first..start, digest));
            writes.extend(request.targets(group, start..end, digest));
        }
        self.work.push(Work { request: id, attempt: request.attempt, reads, writes, end });
        self.scheduled.push(id);
        alone
    }

    /// Frees a request's blocks before the window of its next token.
    fn free_passed(&mut self, id: u64, ctx: &mut Ctx) {
        let request = self.requests.get_mut(&id).expect("looked up by the caller");
        for group in 1..request.blocks.len() {
            let read = self.model.first_read(group, request.settled);
            let passed = &mut request.blocks[group][..read];
            ctx.cover.add(
                "engine freed a block before a window",
                u64::from(passed.iter().any(|block| *block != NULL_BLOCK)),
            );
            self.blocks.release(passed);
            passed.fill(NULL_BLOCK);
        }
    }

    /// Lists the blocks filled by the first `words` words of a request, if their keys are known.
    pub(super) fn list(&mut self, id: u64, words: usize) {
        let request = &self.requests[&id];
        for (group, blocks) in request.blocks.iter().enumerate().filter(|_| self.model.caches) {
            let full = blocks.iter().zip(request.known_keys()).take(words / WORDS);
            // A state is whole only at the end of a step.
            let first = if self.model.has_states(group) { request.offered } else { 0 };
            for (block, key) in full.skip(first).filter(|(block, _)| **block != NULL_BLOCK) {
                self.blocks.list(group, *block, *key);
            }
        }
    }

    /// Takes all blocks of a request; it begins again later.
    pub(super) fn preempt(&mut self, id: u64, ctx: &mut Ctx) {
        ctx.hit("engine preempted");
        ctx.note(|| format!("{}: request {id} preempted", self.model.name));
        let request = self.requests.get_mut(&id).expect("it runs");
        request.state = State::Waiting;
        request.fall_back(0);
        request.preemptions += 1;
        let blocks = request.take_blocks();
        self.blocks.release(&blocks);
        self.running.retain(|other| *other != id);
        self.waiting.push_front(id);
        self.scheduled.retain(|other| *other != id);
        // This step computes nothing of the request, although its blocks are listed. A promised load
        // continues; its blocks are written before their next owner computes.
        let dropped = self.work.extract_if(.., |work| work.request == id).flat_map(|work| work.writes);
        let dropped: Vec<u32> = dropped.map(|target| target.block).collect();
        ctx.cover.add(
            "engine listed a block that no step fills",
            dropped.iter().filter(|b| self.blocks.lists(**b)).count() as u64,
        );
        self.unfilled.extend(dropped);
    }

    /// Ends the step: the policy saves and plans, then the ranks get the step.
    pub(super) fn finish_schedule(&mut self, shared: &mut Shared, ctx: &mut Ctx) {
        let later = std::mem::take(&mut self.later);
        later.into_iter().rev().for_each(|id| self.waiting.push_front(id));
        let changes = self.changes(ctx);
        let voided = self.policy.view(0).stats()["saves_voided"];
        let opened = self.policy.begin_step(changes, ctx.instant());
        self.note_remarks(ctx);
        ctx.cover.add("policy gives a held block back", opened.released.len() as u64);
        self.blocks.release(&opened.released);
        if opened.contradicted {
            self.contradicted(ctx);
        } else {
            let voided = self.policy.view(0).stats()["saves_voided"] - voided;
            ctx.cover.add("engine saves voided by a step", voided);
        }
        let numbers: Vec<(RequestId, u64)> =
            self.requests.iter().map(|(id, request)| (request.number, *id)).collect();
        let mut due = Vec::new();
        for request in opened.due {
            let (_, id) = *numbers
                .iter()
                .find(|(number, _)| *number == request)
                .expect("only a request that is not over is due");
            self.tell(id);
            let scheduled = self.work.iter().find(|work| work.request == id);
            let scheduled =
                scheduled.map(|work| (work.end - self.requests[&id].computed) as u32 * WORD_TOKENS);
            due.push(Due { request, scheduled });
        }
        let named = self.blocks.next_taken(opened.named);
        ctx.cover.add("engine named blocks to be reused next", named.len() as u64);
        let step = self.policy.end_step(&due, self.scheduled.len(), &named);
        self.note_policy(&step, ctx);
        self.refresh(ctx);
        self.hand_over(step, shared, ctx);
        self.wake_ranks(ctx);
    }

    /// Returns the step's changes of the block tables.
    fn changes(&mut self, ctx: &mut Ctx) -> Changes {
        let mut changes = Changes::default();
        for id in self.scheduled.clone() {
            if self.requests[&id].reported_blocks.is_none() {
                self.tell(id);
            }
            let request = self.requests.get_mut(&id).expect("scheduled requests exist");
            let (number, blocks) = (Some(request.number), &request.blocks);
            match request.reported_blocks.replace(blocks[0].len()) {
                None => {
                    let computed = request.computed as u32 * WORD_TOKENS;
                    changes.begun.push(BegunRequest { request: number, blocks: blocks.clone(), computed });
                }
                Some(reported_blocks) if reported_blocks < blocks[0].len() => {
                    let grown = blocks.iter().map(|blocks| blocks[reported_blocks..].to_vec()).collect();
                    changes.grown.push((number, grown));
                }
                Some(_) => {}
            }
            if self.model.has_states(1) {
                changes.offered.extend(self.offer_states(id));
            }
        }
        ctx.cover.add("engine offered a state", changes.offered.len() as u64);
        changes
    }

    /// The request's states at the ends of blocks: made by this step, or by the step before if their tokens
    /// were unknown then.
    fn offer_states(&mut self, id: u64) -> Vec<OfferedState> {
        let end = self.work.iter().find(|work| work.request == id).map_or(0, |work| work.end);
        let request = self.requests.get_mut(&id).expect("scheduled requests exist");
        let whole = end.min(request.known) / WORDS;
        let places = request.offered..whole.max(request.offered);
        request.offered = places.end;
        let blocks = places.map(|at| (at, request.blocks[1][at])).filter(|(_, block)| *block != NULL_BLOCK);
        let offer = |(at, block): (usize, u32)| OfferedState {
            request: request.number,
            group: 1,
            block,
            boundary: (at as u32 + 1) * BLOCK_TOKENS,
        };
        blocks.map(offer).collect()
    }

    /// Returns the loads of a group's ranks in a step.
    fn orders(&mut self, group: usize, part: StepPart, ctx: &mut Ctx) -> Vec<Order> {
        let mut orders = Vec::new();
        for RequestLoad { request, plan, sync } in part.loads {
            for (holds, point) in [
                (plan.arriving(), "engine load in parts"),
                (plan.streamed(), "engine load of a stream"),
                (self.model.early, "engine early load"),
                (self.model.by_engine, "engine load by engine"),
                (!self.model.by_engine, "engine load by sidecar"),
                (sync, "engine sync load"),
                (!sync, "engine async load"),
            ] {
                ctx.cover.add(point, u64::from(holds));
            }
            let (request, targets) = self.targets_of(request, &plan.block_ids());
            orders.push(Order { request, group, sync, targets, plan: Some(plan) });
        }
        for LostLoad { request, blocks, sync } in part.lost {
            ctx.hit("engine load without lease");
            let (request, targets) = self.targets_of(request, &blocks);
            orders.push(Order { request, group, sync, targets, plan: None });
        }
        for order in orders.iter().filter(|order| !order.sync) {
            let request = self.requests.get_mut(&order.request).expect("it waits for its load");
            request.loading += self.model.world;
        }
        orders
    }

    fn targets_of(&self, number: RequestId, blocks: &[u32]) -> (u64, Vec<Target>) {
        let (id, request) = self
            .requests
            .iter()
            .find(|(_, request)| request.number == number)
            .expect("it was promised a load");
        let of = |block: &u32| request.promised.iter().find(|target| target.block == *block);
        (*id, blocks.iter().map(|block| of(block).expect("a block of its load").clone()).collect())
    }

    fn hand_over(&mut self, step: PlannedStep, shared: &mut Shared, ctx: &mut Ctx) {
        self.step = step.step;
        let urgent = step.parts.iter().any(|part| part.urgent);
        let mut orders = Vec::new();
        for (group, part) in step.parts.into_iter().enumerate() {
            orders.extend(self.orders(group, part, ctx));
        }
        self.promised = false;
        let work = std::mem::take(&mut self.work);
        for work in &work {
            self.requests.get_mut(&work.request).expect("scheduled requests exist").computed = work.end;
        }
        let resolved = self.step.saturating_sub(self.model.depth as u64);
        let ends = work.iter().map(|work| (work.request, work.attempt, work.end)).collect();
        let fate = if orders.is_empty() && !work.is_empty() { self.fate(ctx) } else { Fate::Whole };
        let outdated =
            if std::mem::take(&mut self.outdated) { (1..self.model.blocks).collect() } else { Vec::new() };
        let step = request::Step {
            number: self.step,
            fate,
            runs: Rc::clone(&self.runs),
            weights: self.weights,
            resolved,
            urgent,
            outdated,
            unfilled: std::mem::take(&mut self.unfilled),
            orders,
            work,
        };
        self.note_step(&step, ctx);
        let step = Rc::new(step);
        shared.queues.iter_mut().for_each(|queue| queue.push_back(Rc::clone(&step)));
        shared.judge.post(step);
        self.in_flight.push_back(InFlight { work: ends, number: self.step, fails: fate != Fate::Whole });
        let scheduled = std::mem::take(&mut self.scheduled);
        self.unreported.insert(self.step, scheduled.iter().map(|id| self.requests[id].number).collect());
        self.last = scheduled.into_iter().collect();
    }

    /// The outcome of a step without loads.
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
