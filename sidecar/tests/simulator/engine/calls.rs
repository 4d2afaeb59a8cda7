//! What the connector calls on the shim's session: queries under a budget, loads under a lease, CANCEL before a block is used
//! again, saves of what is full.

use std::time::Instant;

use connector_shim::core::endpoint::Endpoint;
use connector_shim::core::plan::Plan;
use connector_shim::core::scheduler::{Asked, PENDING};
use connector_shim::error::ShimError;
use shm_protocol::key::BlockHash;
use shm_protocol::message::Status;

use super::scheduler::{Hit, Phase, Scheduler};
use crate::ctx::Ctx;

/// The session's own counts, and the points that they reach.
const COUNTED: [(&str, &str); 6] = [
    ("queries_timed_out", "engine query timed out"),
    ("queries_not_asked", "engine query not asked"),
    ("queries_without_room", "engine query without room"),
    ("queries_answered_early", "engine early answer"),
    ("queries_from_lease", "engine lease reused"),
    ("saves_without_room", "engine save without room"),
];

// === impl Scheduler: calls of the session ===

impl Scheduler {
    /// Asks about the request at the head of the queue, or goes on to schedule.
    pub(super) fn match_next(&mut self, admit: usize, ctx: &mut Ctx) {
        self.phase = Phase::Schedule;
        let Some(&id) = self.waiting.front().filter(|_| admit > 0 && !self.free.is_empty()) else { return };
        let request = self.requests.get_mut(&id).expect("waiting requests exist");
        // Whoever asks starts anew.
        request.outdated = false;
        let from = usize::from(request.total() > 3 && ctx.rng.one_in(4));
        // One block is left to compute; now and then less is asked for than there is.
        let mut count = (request.known.min(request.total()) - 1).saturating_sub(from);
        if ctx.rng.one_in(4) {
            count = count.saturating_sub(1 + ctx.rng.below(2) as usize);
        }
        let log = if request.refused || count == 0 { None } else { self.append(id, ctx) };
        let Some((log, _)) = log else {
            self.phase = Phase::Admit { hit: None, admit };
            return;
        };
        match self.session.ask(log, from as u32, count as u32, ctx.instant()) {
            Asked::Answered(hits) => self.answered(log, from, hits, admit, ctx),
            Asked::Posted(op) => self.phase = Phase::Ask { op, log, from, began: ctx.instant(), admit },
        }
    }

    fn answered(&mut self, log: i64, from: usize, hits: i64, admit: usize, ctx: &mut Ctx) {
        if hits == PENDING {
            // It is asked again in the next step.
            self.phase = Phase::Schedule;
            return;
        }
        let hit = (hits > 0).then(|| {
            let arriving = self.session.arriving(log);
            let sync = self.model.sync > 0 && ctx.rng.one_in(self.model.sync) && !arriving;
            Hit { from, count: hits as usize, sync }
        });
        ctx.hit(if hit.is_some() { "engine hit" } else { "engine miss" });
        self.phase = Phase::Admit { hit, admit };
    }

    /// Brings a request's log up to date: its handle and length. `None` while there is none to be had.
    fn append(&mut self, id: u64, ctx: &mut Ctx) -> Option<(i64, usize)> {
        let log = self.requests[&id].log;
        if log.is_none_or(|log| self.session.length(log).is_none()) {
            self.refresh(ctx);
            let log = self.session.open(None);
            if ctx.rng.one_in(8) {
                ctx.hit("engine awaits another");
                self.session.await_producer(log);
            }
            if ctx.rng.one_in(3) {
                ctx.hit("engine hands over");
                self.session.hand_over(log);
            }
            if ctx.rng.one_in(6) {
                ctx.hit("engine promises");
                self.session.promise(log).expect("it has no keys yet");
            }
            let request = self.requests.get_mut(&id).expect("the caller's request");
            (request.log, request.saved) = ((log >= 0).then_some(log), 0);
        }
        let request = &self.requests[&id];
        let log = request.log?;
        let (keys, length) = (&request.spec.keys, self.session.length(log)?);
        let known = request.known.min(keys.len()) as u32;
        if length < known {
            let key =
                |index: u32, key: &mut BlockHash| key.set(&keys[index as usize].0).map_err(ShimError::from);
            let length = self.session.append(log, length, known - length, key).expect("from its length on");
            self.session.hint(log, 0, length);
        }
        Some((log, self.session.length(log)? as usize))
    }

    /// What the sidecar's word on a query is, where that is not told by the answer alone.
    fn note_outcome(&self, op: u64, ctx: &mut Ctx) {
        let connection = self.session.connection();
        match connection.and_then(|connection| connection.memory().load_outcome(op)).map(|o| o.status) {
            Some(Status::NotReady) => ctx.hit("engine query not ready"),
            Some(Status::Barred) => ctx.hit("engine query barred"),
            Some(Status::Pending) => ctx.hit("engine query waits for a producer"),
            _ => {}
        }
    }

    pub(super) fn await_answer(
        &mut self,
        (op, began): (u64, Instant),
        (log, from): (i64, usize),
        admit: usize,
        ctx: &mut Ctx,
    ) {
        match self.session.look(op, began, ctx.instant()) {
            Some(hits) => {
                self.note_outcome(op, ctx);
                self.answered(log, from, hits, admit, ctx);
            }
            None => self.phase = Phase::Ask { op, log, from, began, admit },
        }
    }

    pub(super) fn await_renewal(&mut self, op: u64, began: Instant, admit: usize, hit: Hit, ctx: &mut Ctx) {
        match self.session.look(op, began, ctx.instant()) {
            Some(_) => self.post_load(hit, admit, ctx),
            None => self.phase = Phase::Renew { op, began, admit, hit },
        }
    }

    /// Asks again for a lease that is too old to be relied on; `None`: there is nothing to wait for.
    pub(super) fn renew(&mut self, id: u64, ctx: &mut Ctx) -> Option<u64> {
        let op = self.session.renew(self.requests[&id].log?, ctx.instant())?;
        ctx.hit("engine lease renewed before the load");
        Some(op)
    }

    /// Posts the load of a request's hit. Empty where no lease covers it: then nothing may be loaded.
    pub(super) fn load(&mut self, id: u64, hit: Hit, ctx: &mut Ctx) -> Vec<Plan> {
        let request = &self.requests[&id];
        let Some(log) = request.log else { return Vec::new() };
        let arriving = self.session.arriving(log);
        let plans = self.session.load(log, hit.from as u32, &request.loaded, self.step + 1, hit.sync);
        if !plans.is_empty() {
            for (holds, point) in [
                (arriving, "engine load in parts"),
                (self.model.early, "engine early load"),
                (self.model.by_engine, "engine load by engine"),
                (!self.model.by_engine, "engine load by sidecar"),
            ] {
                ctx.cover.add(point, u64::from(holds));
            }
        }
        plans
    }

    /// Gives up unfinished saves whose source this step may overwrite.
    pub(super) fn cancel(&mut self, ctx: &mut Ctx) {
        let blocks = std::mem::take(&mut self.overwritten);
        let voided = self.session.stats()["saves_voided"];
        if self.session.overwrite(blocks.into_iter()) > 0 {
            ctx.hit("engine block reused while saved");
        }
        ctx.cover.add("engine cancel without room", self.session.stats()["saves_voided"] - voided);
    }

    /// Saves the blocks of a request that are full after this step and whose keys are known.
    pub(super) fn save(&mut self, id: u64, ctx: &mut Ctx) {
        let request = &self.requests[&id];
        if request.outdated {
            return;
        }
        let full = request.computed.min(request.known).min(request.blocks.len());
        if full <= request.saved {
            return;
        }
        let Some((log, _)) = self.append(id, ctx).filter(|(_, length)| full <= *length) else { return };
        let request = self.requests.get_mut(&id).expect("looked up above");
        let (from, blocks) = (request.saved, request.blocks[request.saved..full].to_vec());
        request.saved = full;
        if self.session.save(log, from as u32, blocks, self.step, ctx.rng.one_in(2)) {
            ctx.hit("engine save");
        }
    }

    pub(super) fn end_step(&mut self, ctx: &mut Ctx) {
        self.session.end_step().expect("an honest sidecar");
        self.refresh(ctx);
        let stats = self.session.stats();
        for (counted, (name, point)) in self.counted.iter_mut().zip(COUNTED) {
            ctx.cover.add(point, stats[name] - *counted);
            *counted = stats[name];
        }
    }

    /// KV computed on blocks that were not loaded must never be kept: every unfinished save is given up.
    pub(super) fn void_saves(&mut self, ctx: &mut Ctx) {
        ctx.cover.add("engine saves voided", u64::from(self.session.saving() > 0));
        self.session.void_saves();
    }
}
