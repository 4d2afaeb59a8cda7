//! Ends of steps: what was computed, which loads ended, which blocks were not loaded.

use std::collections::BTreeSet;

use super::request::State;
use super::scheduler::{InFlight, Scheduler};
use super::{Shared, request};
use crate::ctx::Ctx;
use crate::origin::Origin;

// === impl Scheduler: results ===

impl Scheduler {
    /// Takes the ends of all steps that every rank has ended.
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

    fn take(
        &mut self,
        InFlight { work, number, fails }: InFlight,
        results: &[request::Results],
        shared: &mut Shared,
        ctx: &mut Ctx,
    ) {
        let failed: BTreeSet<u32> = results.iter().flat_map(|result| &result.failed).copied().collect();
        for (id, attempt, end) in work {
            match self.requests.get_mut(&id) {
                Some(request) if fails && (request.attempt == attempt || number >= request.kept_from) => {
                    (request.computed, request.saved) = (request.settled, 0);
                    request.begin_attempt(u64::MAX);
                }
                Some(request) if request.attempt == attempt => request.settled = request.settled.max(end),
                _ => {}
            }
        }
        if !failed.is_empty() {
            self.loads_failed(&failed, ctx);
        }
        if fails {
            self.refused = self.step;
        } else if number > self.refused {
            self.session.accept(number);
        }
        for id in results.iter().flat_map(|result| &result.ended) {
            self.load_ended(*id, &failed, shared, ctx);
        }
        let settled: Vec<u64> = self.running.clone();
        for id in settled {
            let request = self.requests.get_mut(&id).expect("running requests exist");
            request.known = request.known.max(request.settled.min(request.total()));
            if request.settled == request.total() {
                ctx.note(|| format!("{}: request {id} finished", self.model.name));
                self.leave(id, ctx);
            }
        }
    }

    /// Blocks that are not what was asked for are computed again, and so is all that was computed on them.
    fn loads_failed(&mut self, failed: &BTreeSet<u32>, ctx: &mut Ctx) {
        ctx.hit("engine load failed, recomputed");
        ctx.note(|| format!("{}: blocks {failed:?} were not loaded", self.model.name));
        self.void_saves(ctx);
        let kept_from = self.in_flight.front().map_or(u64::MAX, |step| step.number);
        for request in self.requests.values_mut() {
            request.saved = 0;
            request.refused |= request.loaded.iter().any(|block| failed.contains(block));
            if request.state == State::Running
                && let Some(first) =
                    request.blocks[..request.computed].iter().position(|b| failed.contains(b))
            {
                request.begin_attempt(kept_from);
                request.computed = first;
                request.settled = request.settled.min(first);
            }
            if request.state == State::Loading || request.state == State::Leaving {
                request.failed.extend(request.loaded.iter().filter(|block| failed.contains(block)));
            }
        }
    }

    /// One rank has ended the load of a request.
    fn load_ended(&mut self, id: u64, failed: &BTreeSet<u32>, shared: &Shared, ctx: &mut Ctx) {
        let request =
            self.requests.get_mut(&id).unwrap_or_else(|| panic!("request {id} ended a load unasked"));
        assert!(request.loading > 0, "a rank ended the load of request {id} twice");
        request.loading -= 1;
        if request.loading > 0 {
            return;
        }
        debug_assert!(failed.iter().all(|b| !request.loaded.contains(b) || request.failed.contains(b)));
        let whole = request.promised.iter().filter(|target| !request.failed.contains(&target.block));
        for target in whole {
            for (rank, kv) in shared.kvs.iter().enumerate() {
                let (digest, hash, shard) = (target.digest, target.hash, self.model.shard(rank));
                let place = || format!("request {id} on rank {rank} after its load");
                kv.check(target.block, &Origin { digest, hash, shard }, place);
            }
        }
        if request.state == State::Leaving {
            return self.leave(id, ctx);
        }
        assert_eq!(request.state, State::Loading, "request {id} ended a load that it did not wait for");
        let first_failed = request.blocks.iter().position(|block| request.failed.contains(block));
        request.computed = first_failed.unwrap_or(request.blocks.len());
        request.settled = request.computed;
        request.state = State::Running;
        self.running.push(id);
    }
}
