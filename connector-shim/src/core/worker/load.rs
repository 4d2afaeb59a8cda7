//! One load: while the sidecar's word on it is awaited, and once this process copies it.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

use shm_protocol::message::{Outcome, Status};
use shm_protocol::request::LoadEnd;

use super::link::RankLink;
use super::patience::{CopyPatience, LoadProgress};
use crate::core::endpoint::Endpoint;
use crate::core::plan::Plan;

/// A load into host memory for which the sidecar's word is awaited.
#[derive(Debug)]
pub struct AwaitedLoad<C> {
    /// The load: its operation, and which slot goes into which block.
    pub plan: Plan,
    /// The plan is of another namespace than the rank: its blocks count as failed, whoever writes them.
    pub refused: bool,
    /// The connection that promised it.
    pub link: Arc<RankLink<C>>,
    pub(super) patience: CopyPatience,
}

/// A load that this process copies, or may come to copy.
#[derive(Debug)]
pub struct LoadJob<C, P> {
    /// The load: its operation, and which slot goes into which block.
    pub plan: Plan,
    /// What is copied from; `None` for the pool of a sidecar that this rank was never connected to.
    pub pool: Option<P>,
    /// Where LOADED goes; `None` if the sidecar that promised it is gone.
    pub link: Option<Arc<RankLink<C>>>,
    /// The sidecar may be writing a block of it.
    pub rescue: bool,
    /// The plan is of another namespace than the rank: its blocks count as failed, whoever writes them.
    pub refused: bool,
}

/// How a load goes on.
#[derive(Debug)]
pub enum NextLoadStep<C, P> {
    /// The sidecar may still bring it.
    Await(AwaitedLoad<C>),
    /// The sidecar has brought it.
    Whole(AwaitedLoad<C>),
    /// This process copies it.
    Copy(LoadJob<C, P>),
}

// === impl AwaitedLoad ===

impl<C: Deref<Target: Endpoint>> AwaitedLoad<C> {
    /// The sidecar's word.
    pub fn outcome(&self) -> Option<Outcome> {
        self.link.outcome(self.plan.op)
    }

    /// Blocks that count as failed although the sidecar has brought them.
    pub fn failed_blocks(&self) -> Vec<u32> {
        if self.refused { self.plan.block_ids() } else { Vec::new() }
    }

    /// Whether the sidecar has moved nothing for too long.
    pub(super) fn is_late(&mut self, now: Instant) -> bool {
        let ended = self.link.batches().ended;
        self.patience.is_over(LoadProgress { ended, cuts: 0 }, now)
    }
}

// === impl LoadJob ===

impl<C: Deref<Target: Endpoint>, P> LoadJob<C, P> {
    /// Host memory: whether a block that the sidecar began before the gate was closed must be awaited.
    pub fn must_settle(&self) -> bool {
        self.rescue && self.link.as_ref().is_some_and(|link| !link.is_settled())
    }

    /// Tells the sidecar that this rank's part has ended.
    pub fn report(&self, whole: bool) {
        let end = match whole {
            _ if self.refused => LoadEnd::Mismatch,
            true => LoadEnd::Whole,
            false => LoadEnd::Failed,
        };
        if let Some(link) = &self.link {
            link.post_loaded(self.plan.op, end);
        }
    }
}

/// Whether the sidecar moved every block.
pub(crate) fn is_whole(plan: &Plan, outcome: Option<Outcome>) -> bool {
    outcome.is_some_and(|o| o.status == Status::Ok && o.value as usize == plan.blocks.len())
}
