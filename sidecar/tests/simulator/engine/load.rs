//! Loads on a rank: the wait for the sidecar's word, and the copy by the rank itself, from the mapped pool, every slot
//! checked before and after.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use connector_shim::core::endpoint::Endpoint;
use connector_shim::core::plan::Plan;
use connector_shim::core::submission::Submission;
use shm_protocol::gate;
use shm_protocol::message::{Outcome, Status};
use shm_protocol::request::{LoadEnd, WorkerRequest};

use super::Model;
use crate::connection::{Connection, PoolMap};
use crate::ctx::{Ctx, Micros, SETTLE};
use crate::origin::{Kv, WORDS};

/// A rank's connection, shared with the loads that were promised on it.
#[derive(Debug)]
pub(super) struct WorkerLink {
    pub(super) connection: Rc<Connection>,
    submission: RefCell<Submission>,
    /// Ends of loads that found no room.
    unreported: RefCell<Vec<WorkerRequest>>,
}

/// A load whose copy by the sidecar is awaited.
#[derive(Debug)]
pub(super) struct Awaited {
    pub(super) request: u64,
    pub(super) plan: Plan,
    /// It is of another namespace: its blocks count as failed.
    pub(super) refused: bool,
    pub(super) link: Rc<WorkerLink>,
    pub(super) deadline: Micros,
}

/// A load that this rank copies.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) request: u64,
    pub(super) plan: Plan,
    refused: bool,
    pub(super) pool: Option<Rc<PoolMap>>,
    pub(super) link: Option<Rc<WorkerLink>>,
    /// The sidecar may be writing a block of it until then.
    settle_by: Option<Micros>,
    at: usize,
    stage: Stage,
    pub(super) failed: Vec<u32>,
}

#[derive(Copy, Clone, Debug)]
enum Stage {
    Check,
    Word(usize),
    CheckAgain,
}

// === impl WorkerLink ===

impl WorkerLink {
    pub(super) fn new(connection: &Rc<Connection>) -> Self {
        let submission = RefCell::new(Submission::new(&connection.memory));
        Self { connection: Rc::clone(connection), submission, unreported: RefCell::default() }
    }

    pub(super) fn post(&self, request: WorkerRequest) -> bool {
        let mut submission = self.submission.borrow_mut();
        let posted = submission.post(request).is_some();
        submission.flush(&self.connection);
        posted
    }

    /// Says which weights the rank holds, in answer to its scheduler; whether there was room.
    pub(super) fn state_weights(&self, (number, weights): (u64, u8)) -> bool {
        self.post(WorkerRequest::Weights { number, answers: number, live: super::live(weights) })
    }

    fn post_loaded(&self, op: u64, end: LoadEnd, ctx: &mut Ctx) {
        let loaded = WorkerRequest::Loaded { op, end };
        if !self.post(loaded) {
            ctx.hit("engine loaded without room, told later");
            self.unreported.borrow_mut().push(loaded);
        }
    }

    /// Posts what found no room before.
    pub(super) fn retry(&self) {
        for loaded in self.unreported.take() {
            if !self.post(loaded) {
                self.unreported.borrow_mut().push(loaded);
            }
        }
    }

    pub(super) fn all_reported(&self) -> bool {
        self.unreported.borrow().is_empty()
    }

    /// Fills the ring with reports of no load.
    pub(super) fn flood(&self, ctx: &mut Ctx) {
        let nothing = WorkerRequest::Loaded { op: 0, end: LoadEnd::Whole };
        let mut submission = self.submission.borrow_mut();
        while submission.post(nothing).is_some() {}
        submission.flush(&self.connection);
        ctx.hit("fault full ring");
    }

    pub(super) fn outcome(&self, op: u64) -> Option<Outcome> {
        self.connection.memory.load_outcome(op).filter(|outcome| outcome.status != Status::Pending)
    }

    pub(super) fn store(&self, word: usize, step: u64) {
        self.connection.word(word).store(step, Ordering::Release);
    }
}

// === impl Awaited ===

impl Awaited {
    /// Whether the sidecar moved every block, or, if it will not, why; `None` while it may.
    pub(super) fn look(&self, ctx: &Ctx) -> Option<Result<(), &'static str>> {
        match self.link.outcome(self.plan.op) {
            Some(outcome) if outcome.status == Status::Ok => {
                assert_eq!(outcome.value as usize, self.plan.blocks.len(), "OK means every block");
                Some(Ok(()))
            }
            Some(outcome) if outcome.status.is_refusal() => Some(Err("engine load refused")),
            Some(_) => Some(Err("engine rescue after a failed copy")),
            None if self.link.connection.is_lost() => Some(Err("engine rescue after a hang-up")),
            None if ctx.now >= self.deadline => Some(Err("engine rescue after the deadline")),
            None => None,
        }
    }

    /// Blocks that count as failed although the sidecar moved them.
    pub(super) fn failed(&self) -> Vec<u32> {
        if self.refused { self.plan.block_ids() } else { Vec::new() }
    }

    /// Takes the load away from the sidecar, if it has it.
    pub(super) fn rescue(self, pool: Option<Rc<PoolMap>>, ctx: &mut Ctx) -> Job {
        if self.link.outcome(self.plan.op).is_some_and(|outcome| outcome.status.is_refusal()) {
            return Job::new(self.request, (self.plan, self.refused), pool, Some(self.link));
        }
        let connection = &self.link.connection;
        gate::close(connection.memory.region(), self.plan.op);
        let mut job = Job::new(self.request, (self.plan, self.refused), pool, Some(self.link));
        job.settle_by = Some(ctx.now + SETTLE);
        job
    }
}

// === impl Job ===

impl Job {
    pub(super) fn new(
        request: u64,
        (plan, refused): (Plan, bool),
        pool: Option<Rc<PoolMap>>,
        link: Option<Rc<WorkerLink>>,
    ) -> Self {
        Self {
            request,
            plan,
            refused,
            pool,
            link,
            settle_by: None,
            at: 0,
            stage: Stage::Check,
            failed: Vec::new(),
        }
    }

    /// One move; true at the end.
    pub(super) fn step(&mut self, model: &Model, rank: usize, kv: &Kv, ctx: &mut Ctx) -> bool {
        if self.must_settle(ctx) {
            return false;
        }
        if self.refused && self.at < self.plan.blocks.len() {
            (self.at, self.failed) = (self.plan.blocks.len(), self.plan.block_ids());
        }
        if self.settle_by.is_some() && ctx.without_rescue {
            self.at = self.plan.blocks.len();
        }
        if self.at < self.plan.blocks.len() {
            self.copy(model, rank, kv, ctx);
        }
        if self.at < self.plan.blocks.len() {
            return false;
        }
        if let Some(link) = &self.link {
            let end = match self.failed.is_empty() {
                _ if self.refused => LoadEnd::Mismatch,
                true => LoadEnd::Whole,
                false => LoadEnd::Failed,
            };
            link.post_loaded(self.plan.op, end, ctx);
        }
        true
    }

    /// Whether the sidecar is in the middle of a block that it began before the gate was closed.
    fn must_settle(&self, ctx: &mut Ctx) -> bool {
        let (Some(by), Some(link)) = (self.settle_by, &self.link) else { return false };
        let copying = !gate::is_settled(link.connection.memory.region());
        let wait =
            copying && !link.connection.is_lost() && self.at == 0 && matches!(self.stage, Stage::Check);
        if wait {
            assert!(ctx.now < by, "the sidecar did not end a block's copy");
            ctx.hit("engine waited for a copy to end");
        }
        wait
    }

    fn copy(&mut self, model: &Model, rank: usize, kv: &Kv, ctx: &mut Ctx) {
        let (block, slot) = self.plan.blocks[self.at];
        let Some(pool) = &self.pool else { return self.refuse(block) };
        let whole = |pool: &PoolMap| pool.verify(slot, model.form.block_bytes());
        match self.stage {
            Stage::Check if !whole(pool) => {
                ctx.hit("engine slot refused before the copy");
                self.refuse(block);
            }
            Stage::Check => self.stage = Stage::Word(0),
            Stage::Word(word) => {
                let shard = u64::from(model.shard(rank)) * model.form.shard_bytes;
                kv.set(block, word, pool.word(slot.offset + shard, word));
                self.stage = if word + 1 == WORDS { Stage::CheckAgain } else { Stage::Word(word + 1) };
            }
            Stage::CheckAgain if !whole(pool) => {
                ctx.hit("engine slot refused after the copy");
                self.refuse(block);
            }
            Stage::CheckAgain => (self.at, self.stage) = (self.at + 1, Stage::Check),
        }
    }

    fn refuse(&mut self, block: u32) {
        self.failed.push(block);
        (self.at, self.stage) = (self.at + 1, Stage::Check);
    }
}
