//! Permission to save: blocks of an engine are kept once its KV is known to match its namespace.
//!
//! - An engine stating its own weights, by a sample or by its files, is believed; only checks find it wrong.
//! - An engine with facts from elsewhere must prove its KV: its blocks pass a check, or there is no kept
//!   block to compare them with. Until then it loads, and nothing of it is kept.
//! - A proof is for one run in one namespace, over new connections too, and for this life.
//! - At most one engine at a time is the first. No engine is if another one of the namespace may save, or
//!   unknown blocks of it may exist (on peers, in a pool file, on disks still being read, left out or read in
//!   part).

use std::collections::VecDeque;

use serde::Serialize;
use shm_protocol::key::NamespaceDigest;

use super::{Engines, Scheduler, SessionId, Space};

/// Limit of remembered proofs, of past and present runs: four for every engine process that may be connected.
const PROOFS_MAX: usize = 1024;

/// The reason to keep an engine's saves.
#[derive(Copy, Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Proof {
    /// The engine states its own weights.
    Own,
    /// Nothing was kept when it began to save.
    First,
    /// Its KV was compared with kept KV.
    Compared,
}

/// The proof of an engine served in a namespace.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Standing {
    /// The namespace, as made by the engine's facts.
    pub base: NamespaceDigest,
    /// The engine's id, as its HELLO states it.
    pub engine: String,
    /// `None`: no proof yet, so it may not save.
    pub proof: Option<Proof>,
}

#[derive(Debug, Default)]
pub(super) struct Proofs(VecDeque<([u8; 16], Space, Proof)>);

// === impl Engines ===

impl Engines {
    /// True if saves of the engine of `session` may be kept in the namespace it is bound to.
    pub(crate) fn may_save(&self, session: SessionId) -> bool {
        self[session].proof.is_some()
    }

    /// True if any engine served in a namespace may save.
    pub(crate) fn any_may_save(&self, space: Space) -> bool {
        self.served_in(space).iter().any(|session| self.may_save(*session))
    }

    /// Lets the engine of `session` save in a namespace for the rest of its run.
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

    /// Returns the proof of the engine of `session` in a namespace so far. A private namespace needs none.
    pub(super) fn proof(&self, session: SessionId, space: Space, is_private: bool) -> Option<Proof> {
        if is_private || !self.ranks(session).any(|(_, rank)| rank.proves && rank.live.is_none()) {
            return Some(Proof::Own);
        }
        let run = self[session].run;
        let found = self.proofs.0.iter().find(|(of, at, _)| (*of, *at) == (run, space));
        found.map(|(_, _, proof)| *proof)
    }

    /// Returns the served engines, each with its proof.
    pub(crate) fn standings(&self) -> Vec<Standing> {
        let of_scheduler = |scheduler: &Scheduler| {
            let Scheduler { engine, proof, .. } = scheduler;
            Some(Standing { base: scheduler.binding()?.base, engine: engine.clone(), proof: *proof })
        };
        self.schedulers.values().filter_map(of_scheduler).collect()
    }
}
