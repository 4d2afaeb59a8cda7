//! Ends of steps: computed words, ended and failed loads; then the report to the policy, in vLLM's order.

use std::collections::{BTreeSet, HashMap};

use connector_shim::core::policy::RequestId;

use super::request::State;
use super::scheduler::{InFlight, MUTE_STEPS, Scheduler};
use super::{Shared, request};
use crate::ctx::Ctx;
use crate::origin::{Origin, WORDS};

// === impl Scheduler: results ===

impl Scheduler {
    /// Takes the results of all steps ended by every rank.
    pub(super) fn take_results(&mut self, shared: &mut Shared, ctx: &mut Ctx) {
        while let Some(oldest) = self.in_flight.front() {
            let number = oldest.number;
            if shared.results.iter().any(|results| results.front().is_none_or(|first| first.step != number)) {
                return;
            }
            let results: Vec<request::Results> =
                shared.results.iter_mut().filter_map(std::collections::VecDeque::pop_front).collect();
            let step = self.in_flight.pop_front().expect("looked at above");
            self.take(step, &results, shared, ctx);
        }
    }

    fn take(&mut self, step: InFlight, results: &[request::Results], shared: &mut Shared, ctx: &mut Ctx) {
        let failed: BTreeSet<u32> = results.iter().flat_map(|result| &result.failed).copied().collect();
        for (id, attempt, end) in step.work {
            match self.requests.get_mut(&id).filter(|request| request.attempt == attempt) {
                // The step has overwritten its first state.
                Some(_) if step.fails && self.model.has_states(1) => self.preempt(id, ctx),
                Some(request) if step.fails => request.fall_back(request.settled),
                Some(request) => request.settled = end,
                None => {}
            }
        }
        let ended = self.take_loads(results, &failed, shared, ctx);
        for id in self.running.clone() {
            let request = self.requests.get_mut(&id).expect("running requests exist");
            if request.settled >= request.spec.prompt {
                // The sampled token is known.
                request.known = request.known.max(request.settled + 1).min(request.spec.total);
            }
            if request.settled == request.spec.total {
                ctx.note(|| format!("{}: request {id} finished", self.model.name));
                self.end(id, ctx);
                self.leave(id);
            }
        }
        let failed: Vec<u32> = failed.into_iter().collect();
        if !failed.is_empty() {
            self.policy.loads_failed(&failed);
        }
        if !ended.is_empty() {
            self.policy.loads_ended(&ended, &failed);
        }
        if !step.fails {
            self.accept(step.number, ctx);
        }
    }

    /// Accepts the output of a step. Occasionally some steps are not reported to the policy.
    fn accept(&mut self, step: u64, ctx: &mut Ctx) {
        if ctx.knobs.faults > 0 && self.mute == 0 && ctx.rng.one_in(300) {
            self.mute = ctx.rng.pick(&[1, MUTE_STEPS]);
        }
        if self.mute > 0 {
            self.mute -= 1;
            return;
        }
        let unreported = self.unreported.split_off(&(step + 1));
        let before = std::mem::replace(&mut self.unreported, unreported);
        let mut scheduled = HashMap::new();
        if self.policy.passes_over(step) {
            scheduled.extend(before);
            scheduled.extend(self.unreported.clone());
        }
        self.policy.accept_step(step, &scheduled, Some(ctx.instant()));
    }

    /// Takes the ends of loads. Blocks not loaded are computed again, and so is all KV computed from them.
    /// Returns the policy's numbers of requests with a finished load.
    fn take_loads(
        &mut self,
        results: &[request::Results],
        failed: &BTreeSet<u32>,
        shared: &mut Shared,
        ctx: &mut Ctx,
    ) -> Vec<RequestId> {
        if !failed.is_empty() {
            ctx.hit("engine load failed, recomputed");
            ctx.note(|| format!("{}: blocks {failed:?} were not loaded", self.model.name));
        }
        for request in self.requests.values_mut() {
            let first = request.first_of(failed);
            match request.state {
                State::Running if first.is_some_and(|first| first * WORDS < request.computed) => {
                    request.fall_back(first.unwrap_or(0) * WORDS);
                }
                State::Loading | State::Leaving => {
                    let mine = request.promised.iter().map(|target| target.block);
                    request.failed.extend(mine.filter(|block| failed.contains(block)));
                }
                _ => {}
            }
        }
        let mut ended = Vec::new();
        for id in results.iter().flat_map(|result| &result.ended) {
            ended.extend(self.load_ended(*id, shared, ctx));
        }
        ended
    }

    /// Handles the end of a request's load on one rank. Returns the request's number if that was the last
    /// rank.
    fn load_ended(&mut self, id: u64, shared: &mut Shared, ctx: &mut Ctx) -> Option<RequestId> {
        let digests = self.digests();
        let request =
            self.requests.get_mut(&id).unwrap_or_else(|| panic!("request {id} ended a load unasked"));
        assert!(request.loading > 0, "a rank ended the load of request {id} twice");
        request.loading -= 1;
        if request.loading > 0 {
            return None;
        }
        for target in request.promised.iter().filter(|target| !request.failed.contains(&target.block)) {
            for (rank, kv) in shared.kvs.iter().enumerate() {
                let (digest, hash, shard) = (target.digest, target.hash, self.model.shard(rank));
                let place = || format!("request {id} on rank {rank} after its load");
                kv.check(target.block, target.words.clone(), &Origin { digest, hash, shard }, place);
            }
            shared.judge.loaded(target.block, target.digest == digests[target.group]);
        }
        let number = request.number;
        if request.state == State::Leaving {
            self.leave(id);
            return None;
        }
        assert_eq!(request.state, State::Loading, "request {id} ended a load that it did not wait for");
        let first_failed = request.first_of(&request.failed);
        // A load of several groups fails as a whole.
        let several = self.model.groups() > 1;
        let point =
            if first_failed.is_none() { "engine loaded a set" } else { "engine load of a set failed" };
        ctx.cover.add(point, several.into());
        let first_failed = first_failed.map(|first| if several { 0 } else { first });
        let computed = first_failed.map_or(request.computed, |first| request.computed.min(first * WORDS));
        (request.computed, request.settled) = (computed, computed);
        if computed > 0 {
            request.state = State::Running;
            self.running.push(id);
            self.list(id, computed);
        } else {
            ctx.hit("engine asks again after a failed load");
            request.state = State::Waiting;
            let blocks = request.take_blocks();
            self.blocks.release(&blocks);
            self.waiting.push_front(id);
        }
        Some(number)
    }
}
