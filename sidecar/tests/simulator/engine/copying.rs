//! A rank's own copy of a load from the mapped pool, a word at a time. Every slot is checked before and
//! after.

use std::rc::Rc;

use connector_shim::core::worker::load;

use super::Model;
use crate::connection::{Connection, PoolMap};
use crate::ctx::{Ctx, Micros, SETTLE};
use crate::origin::{Kv, WORDS};

pub(super) type Job = load::LoadJob<Rc<Connection>, Rc<PoolMap>>;

/// A load copied by this rank.
#[derive(Debug)]
pub(super) struct Copying {
    pub(super) job: Job,
    /// The sidecar has finished its current block by this time.
    settle_by: Micros,
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

// === impl Copying ===

impl Copying {
    pub(super) fn new(job: Job, ctx: &Ctx) -> Self {
        Self { job, settle_by: ctx.now + SETTLE, at: 0, stage: Stage::Check, failed: Vec::new() }
    }

    /// Makes one move. Returns true at the end.
    pub(super) fn step(&mut self, model: &Model, rank: usize, kv: &Kv, ctx: &mut Ctx) -> bool {
        let blocks = self.job.plan.blocks.len();
        if self.at == 0 && matches!(self.stage, Stage::Check) {
            if self.job.must_settle() {
                assert!(ctx.now < self.settle_by, "the sidecar did not end a block's copy");
                ctx.hit("engine waited for a copy to end");
                return false;
            }
            if self.job.refused {
                (self.at, self.failed) = (blocks, self.job.plan.block_ids());
            }
        }
        if self.job.rescue && ctx.without_rescue {
            self.at = blocks;
        }
        if self.at < blocks {
            self.copy(model, rank, kv, ctx);
        }
        if self.at < blocks {
            return false;
        }
        self.job.report(self.failed.is_empty());
        if self.job.link.as_ref().is_some_and(|link| !link.is_reported()) {
            ctx.hit("engine loaded without room, told later");
        }
        true
    }

    fn copy(&mut self, model: &Model, rank: usize, kv: &Kv, ctx: &mut Ctx) {
        let (block, slot) = self.job.plan.blocks[self.at];
        let Some(pool) = &self.job.pool else { return self.refuse(block) };
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
