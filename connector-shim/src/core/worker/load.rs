//! One load: while the sidecar may copy it, and once this process copies it.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Instant;

use shm_protocol::message::{Outcome, Status};
use shm_protocol::request::LoadEnd;

use super::link::RankLink;
use super::patience::{CopyPatience, LoadProgress};
use crate::core::endpoint::Endpoint;
use crate::core::plan::Plan;

/// A load into host memory that the sidecar may still copy.
#[derive(Debug)]
pub struct AwaitedLoad<C> {
    /// The load: its operation, its blocks and their slots.
    pub plan: Plan,
    /// The plan is of another namespace than the rank: its blocks count as failed in every case.
    pub refused: bool,
    /// The connection to the sidecar of the plan.
    pub link: Arc<RankLink<C>>,
    pub(super) patience: CopyPatience,
}

/// A load that this process copies, or may come to copy.
#[derive(Debug)]
pub struct LoadJob<C, P> {
    /// The load: its operation, its blocks and their slots.
    pub plan: Plan,
    /// The source of the copies; `None` for the pool of a sidecar without an earlier connection to this rank.
    pub pool: Option<P>,
    /// The connection for LOADED; `None` if the sidecar of the plan is gone.
    pub link: Option<Arc<RankLink<C>>>,
    /// The sidecar may be writing a block of it.
    pub rescue: bool,
    /// The plan is of another namespace than the rank: its blocks count as failed in every case.
    pub refused: bool,
}

/// The next step of a load.
#[derive(Debug)]
pub enum NextLoadStep<C, P> {
    /// Wait: the sidecar may still copy it.
    Await(AwaitedLoad<C>),
    /// The sidecar has copied it.
    Whole(AwaitedLoad<C>),
    /// This process copies it.
    Copy(LoadJob<C, P>),
}

// === impl AwaitedLoad ===

impl<C: Deref<Target: Endpoint>> AwaitedLoad<C> {
    /// The sidecar's answer to the load; `None` until it has ended.
    pub fn outcome(&self) -> Option<Outcome> {
        self.link.outcome(self.plan.op)
    }

    /// Blocks that count as failed although the sidecar has copied them.
    pub fn failed_blocks(&self) -> Vec<u32> {
        if self.refused { self.plan.block_ids() } else { Vec::new() }
    }

    /// True if the sidecar has moved nothing for too long.
    pub(super) fn is_late(&mut self, now: Instant) -> bool {
        let ended = self.link.batches().ended;
        self.patience.is_over(LoadProgress { ended, cuts: 0 }, now)
    }
}

// === impl LoadJob ===

impl<C: Deref<Target: Endpoint>, P> LoadJob<C, P> {
    /// Host memory: true if the sidecar may still write a block that it began before the gate was closed.
    pub fn must_settle(&self) -> bool {
        self.rescue && self.link.as_ref().is_some_and(|link| !link.is_settled())
    }

    /// Reports the end of this rank's part to the sidecar.
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

/// True if the sidecar moved every block.
pub(crate) fn is_whole(plan: &Plan, outcome: Option<Outcome>) -> bool {
    outcome.is_some_and(|o| o.status == Status::Ok && o.value as usize == plan.blocks.len())
}
