//! A rank's forward pass: it reads the KV of earlier tokens, checked by the oracle, and writes the KV of new
//! ones.

use std::rc::Rc;

use super::Shared;
use super::request::{Fate, Step};
use super::worker::{Phase, Worker};
use crate::ctx::{Ctx, Micros};
use crate::origin::{Origin, with_noise};

// === impl Worker: the forward ===

impl Worker {
    /// Computes the work of index `at` once every rank has reached this step.
    pub(super) fn forward(
        &mut self,
        step: Rc<Step>,
        at: usize,
        shared: &mut Shared,
        ctx: &mut Ctx,
    ) -> Micros {
        shared.reached[self.number] = step.number;
        if shared.reached.iter().any(|reached| *reached < step.number) {
            self.phase = Phase::Forward(step, at);
            return ctx.pause(60);
        }
        shared.judge.reach(step.number);
        let Some(work) = step.work.get(at) else {
            self.phase = Phase::Done(step);
            return ctx.pause(100);
        };
        if shared.judge.is_sound(&step, at) {
            for target in work.reads.iter().filter(|target| target.group == self.group && !target.within) {
                let (digest, hash, shard) = (target.digest, target.hash, self.model.shard(self.rank));
                let place = || {
                    let (request, number) = (work.request, step.number);
                    format!("step {number} reads for request {request} on rank {}", self.rank)
                };
                let origin = Origin { digest, hash, shard };
                shared.kvs[self.rank].check(target.block, target.words.clone(), &origin, place);
            }
        }
        self.phase = Phase::Write(step, at, 0, 0);
        ctx.pause(50)
    }

    /// Writes one word, and usually the rest of the block's words.
    pub(super) fn write(
        &mut self,
        step: Rc<Step>,
        at: usize,
        block: usize,
        mut written: usize,
        shared: &mut Shared,
        ctx: &mut Ctx,
    ) {
        let work = &step.work[at];
        let Some(target) = work.writes.get(block) else {
            self.phase = Phase::Forward(step, at + 1);
            return;
        };
        if target.group != self.group {
            self.phase = Phase::Write(step, at, block + 1, 0);
            return;
        }
        if step.fate == Fate::Raised(self.rank) && ctx.rng.one_in(3) {
            self.phase = Phase::Done(step);
            return;
        }
        let sound = shared.judge.is_sound(&step, at);
        let right = Origin { digest: target.digest, hash: target.hash, shard: self.model.shard(self.rank) };
        let origin = if self.model.other_weights { right.of_other_weights() } else { right };
        loop {
            let word = target.words.start + written;
            let value = match sound && !target.within {
                true => with_noise(origin.word(word), ctx.rng.next()),
                false => ctx.taint(),
            };
            shared.kvs[self.rank].set(target.block, word, value);
            written += 1;
            if written == target.words.len() {
                self.phase = Phase::Write(step, at, block + 1, 0);
                return;
            }
            if ctx.rng.one_in(3) {
                self.phase = Phase::Write(step, at, block, written);
                return;
            }
        }
    }
}
