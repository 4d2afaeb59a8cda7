//! Which engines may save: those that are known to compute what their namespace keeps.
//!
//! - An engine that says itself which weights run, by a sample or by its files, is believed; its checks are what finds it wrong.
//! - One that has its facts from others proves it: blocks of its pass a check, or nothing is kept that they could be compared with.
//!   Until then it loads, and nothing of it is kept.
//! - A proof is one run's in one namespace, over new connections too, and of this life.
//! - At most one engine at a time is the first: nobody is where another engine of the namespace may save, or blocks may be that
//!   are not known of (on peers, in a pool file, on disks that are still being read, were left out or read in part).

use std::collections::VecDeque;

use serde::Serialize;
use shm_protocol::key::NamespaceDigest;

use super::{Engines, Scheduler, SessionId, Space};

/// Proofs that are remembered, of runs past and present: four of every engine process that may be connected.
const PROOFS_MAX: usize = 1024;

/// Why what an engine saves is kept.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Proof {
    /// It says itself which weights it runs.
    Own,
    /// Nothing was kept when it began to save.
    First,
    /// What it computed was compared with what is kept.
    Compared,
}

/// What an engine that is served in a namespace has shown.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Standing {
    /// The namespace, as the engine's facts make it.
    pub base: NamespaceDigest,
    /// The engine's id, as its HELLO states it.
    pub engine: String,
    /// `None`: nothing, so it may not save.
    pub proof: Option<Proof>,
}

#[derive(Debug, Default)]
pub(super) struct Proofs(VecDeque<([u8; 16], Space, Proof)>);

// === impl Engines ===

impl Engines {
    /// Whether what the engine of `session` saves may be kept where it is bound.
    pub(crate) fn may_save(&self, session: SessionId) -> bool {
        self[session].proof.is_some()
    }

    /// Whether any engine that is served in a namespace may save.
    pub(crate) fn any_may_save(&self, space: Space) -> bool {
        self.served_in(space).iter().any(|session| self.may_save(*session))
    }

    /// The engine of `session` may save in a namespace for the rest of its run.
    pub(crate) fn prove(&mut self, session: SessionId, space: Space, proof: Proof) {
        if self.proofs.0.len() == PROOFS_MAX {
            self.proofs.0.pop_front();
        }
        self.proofs.0.push_back((self[session].run, space, proof));
        let scheduler = self.scheduler(session);
        if scheduler.binding().is_some_and(|bound| bound.space() == space) {
            scheduler.proof = Some(proof);
        }
    }

    /// What the engine of `session` has shown of a namespace so far. In one that nobody else has there is nothing to show.
    pub(super) fn proof(&self, session: SessionId, space: Space, is_private: bool) -> Option<Proof> {
        if is_private || !self.ranks(session).any(|(_, rank)| rank.proves && rank.live.is_none()) {
            return Some(Proof::Own);
        }
        let run = self[session].run;
        let found = self.proofs.0.iter().find(|(of, at, _)| (*of, *at) == (run, space));
        found.map(|(_, _, proof)| *proof)
    }

    /// Engines that are served, each with what it has shown.
    pub(crate) fn standings(&self) -> Vec<Standing> {
        let of_scheduler = |scheduler: &Scheduler| {
            let Scheduler { engine, proof, .. } = scheduler;
            Some(Standing { base: scheduler.binding()?.base, engine: engine.clone(), proof: *proof })
        };
        self.schedulers.values().filter_map(of_scheduler).collect()
    }
}
