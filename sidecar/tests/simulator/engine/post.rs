//! What a step posts: loads under a lease, CANCEL before a block is used again, saves of what is full.

use std::ops::Range;

use shm_protocol::message::{LOAD_ARRIVING, LOAD_BY_ENGINE, LOAD_EARLY, LOAD_SYNC};
use shm_protocol::request::{self, Keys, LoadFlags, SchedulerRequest};

use super::request::{Lease, Plan};
use super::scheduler::{Hit, Scheduler};
use crate::ctx::Ctx;

// === impl Scheduler: posting ===

impl Scheduler {
    /// Posts the load of a request's hit, in parts where its blocks are on their way; `None` where no lease covers it: then
    /// nothing may be loaded.
    pub(super) fn try_load(&mut self, id: u64, hit: Hit, ctx: &mut Ctx) -> Option<Vec<Plan>> {
        let (_, number) = self.requests[&id].log?;
        let link = self.link.as_mut().filter(|link| !link.connection.is_lost())?;
        let lease = link.logs[&number].lease.filter(|lease| !(hit.sync && lease.arriving))?;
        let (from, count) = (hit.from as u32, hit.count as u32);
        if from < lease.from || from + count > lease.from + lease.hits {
            return None;
        }
        let part = if lease.arriving { 1 + self.next_op as usize % 2 } else { hit.count };
        let parts = (0..hit.count).step_by(part).map(|at| (at, part.min(hit.count - at)));
        let plans = parts.map(|(at, count)| self.post_part(id, hit, &lease, at..at + count, ctx));
        let plans: Option<Vec<Plan>> = plans.collect();
        let link = self.link.as_mut()?;
        if lease.arriving {
            ctx.hit("engine load in parts");
            // Without room it ends with the log, or by its age.
            let _ = link.post(SchedulerRequest::Release { log: number });
        }
        if self.model.early {
            link.flush();
        }
        if plans.is_some() {
            link.logs.get_mut(&number).expect("looked up above").lease = None;
        }
        plans
    }

    /// Posts the load of blocks `range` of a request's hit.
    fn post_part(
        &mut self,
        id: u64,
        hit: Hit,
        lease: &Lease,
        range: Range<usize>,
        ctx: &mut Ctx,
    ) -> Option<Plan> {
        let request = &self.requests[&id];
        let (_, number) = request.log?;
        let link = self.link.as_mut()?;
        let log = &link.logs[&number];
        let slots = range.clone().map(|at| hit.from + at).map(|key| {
            let chunk = log.chunks[key / shm_protocol::layout::CHUNK_KEYS];
            link.connection.memory.read_ref(chunk, key % shm_protocol::layout::CHUNK_KEYS)
        });
        let blocks = request.promised[range.clone()].iter().copied().zip(slots).collect();
        let by_engine = self.model.by_engine;
        let early = self.model.early;
        let flags = if hit.sync { LOAD_SYNC } else { 0 }
            | if by_engine { LOAD_BY_ENGINE } else { 0 }
            | if early { LOAD_EARLY } else { 0 }
            | if lease.arriving { LOAD_ARRIVING } else { 0 };
        let op = self.next_op;
        let keys = Keys { log: number, from: (hit.from + range.start) as u32, count: range.len() as u32 };
        let (flags, step, lease_op) = (LoadFlags::new(flags), self.step + 1, lease.op);
        let load = |position| {
            SchedulerRequest::Load(request::Load { op, keys, position, step, lease: lease_op, flags })
        };
        // A part without room is not to be told from one that the sidecar does not carry out: its ranks do what they can.
        if !link.post_with_blocks(&request.loaded[range], load) && !lease.arriving {
            return None;
        }
        if early {
            ctx.hit("engine early load");
        }
        self.next_op += 1;
        ctx.hit(if by_engine { "engine load by engine" } else { "engine load by sidecar" });
        let (epoch, namespace) = (link.connection.epoch, link.connection.namespace(self.weights.0));
        Some(Plan { op, epoch, namespace, by_engine, arriving: lease.arriving, blocks })
    }

    /// Gives up unfinished saves whose source this step may overwrite.
    pub(super) fn cancel(&mut self, ctx: &mut Ctx) {
        let blocks = std::mem::take(&mut self.overwritten);
        let Some(link) = &mut self.link else { return };
        let cancels = link.saves.cancel(blocks.into_iter());
        if !cancels.is_empty() {
            ctx.hit("engine block reused while saved");
        }
        for cancel in cancels {
            if !link.post(SchedulerRequest::Cancel(cancel)) {
                // This word covers all of them, those still listed too.
                ctx.hit("engine cancel without room");
                link.void_saves_below(self.next_op);
                return;
            }
        }
    }

    /// Saves the blocks of a request that are full after this step and whose keys are known.
    pub(super) fn save(&mut self, id: u64, ctx: &mut Ctx) {
        let request = &self.requests[&id];
        if request.outdated {
            return;
        }
        let full = request.computed.min(request.known).min(request.blocks.len());
        if full <= request.saved || !self.append(id) {
            return;
        }
        let request = self.requests.get_mut(&id).expect("looked up above");
        if full > request.appended {
            return;
        }
        let (from, blocks) = (request.saved, request.blocks[request.saved..full].to_vec());
        request.saved = full;
        let (_, log) = request.log.expect("it was appended to");
        let link = self.link.as_mut().expect("the log is its");
        let (op, step) = (self.next_op, self.step);
        let (from, count) = (from as u32, blocks.len() as u32);
        let keys = Keys { log, from, count };
        let checked = ctx.rng.one_in(2);
        let save = |position| SchedulerRequest::Save(request::Save { op, keys, position, step, checked });
        if !link.saves.has_room() || !link.post_with_blocks(&blocks, save) {
            return ctx.hit("engine save without room");
        }
        ctx.hit("engine save");
        self.next_op += 1;
        link.saves.begin(op, blocks);
    }

    /// Publishes, reaps, reclaims, and looks whether the sidecar is still there.
    pub(super) fn end_step(&mut self, ctx: &mut Ctx) {
        if let Some(link) = &mut self.link {
            link.retry_closes();
            link.flush();
            link.reap();
            link.reclaim();
        }
        self.refresh(ctx);
    }

    /// KV computed on blocks that were not loaded must never be kept: every unfinished save is given up.
    pub(super) fn void_saves(&mut self, ctx: &mut Ctx) {
        if let Some(link) = &mut self.link
            && link.saves.blocks() > 0
        {
            ctx.hit("engine saves voided");
            link.void_saves_below(self.next_op);
        }
    }
}
