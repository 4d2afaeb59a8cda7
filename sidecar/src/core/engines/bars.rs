//! Namespaces closed to runs, because their engines' KV differs from the kept KV.

use std::collections::VecDeque;

use shm_protocol::key::NamespaceDigest;

use super::{Binding, Engines, Scheduler, ServiceEvent, SessionId, Space};
use crate::compare::Difference;

/// Limit of remembered bars, of past and present runs: four for every engine process that may be connected.
const BARS_MAX: usize = 1024;

/// An engine barred from a namespace.
#[derive(Clone, Debug, PartialEq)]
pub struct Barred {
    /// The namespace, as made by the engine's facts.
    pub base: NamespaceDigest,
    /// The engine's id, as its HELLO states it.
    pub engine: String,
    /// The difference found by its own check; `None`: checks of other engines barred it.
    pub worst: Option<Difference>,
}

#[derive(Debug, Default)]
pub(super) struct Bars(VecDeque<Bar>);

/// A namespace closed to a run.
#[derive(Debug)]
struct Bar {
    run: [u8; 16],
    space: Space,
    /// The id of the namespace at the time.
    namespace: u32,
    worst: Option<Difference>,
    /// The engine counts as a witness against the kept blocks: it was allowed to save.
    votes: bool,
}

// === impl Bars ===

impl Bars {
    fn of(&self, run: [u8; 16], space: Space) -> Option<&Bar> {
        self.0.iter().find(|bar| bar.run == run && bar.space == space)
    }
}

// === impl Engines ===

impl Engines {
    /// True if a namespace is closed to the run of a scheduler.
    pub(crate) fn is_barred(&self, session: SessionId, space: Space) -> bool {
        self.bars.of(self[session].run, space).is_some()
    }

    /// Closes a namespace to an engine for the rest of its run. True if the engine was served in it.
    pub(crate) fn bar(&mut self, session: SessionId, binding: &Binding, worst: Option<Difference>) -> bool {
        let (space, namespace) = (binding.space(), binding.namespace);
        let (run, votes) = (self[session].run, self.may_save(session));
        let bar = Bar { run, space, namespace, worst, votes };
        if self.bars.0.len() == BARS_MAX {
            self.bars.0.pop_front();
        }
        self.bars.0.push_back(bar);
        let scheduler = self.scheduler(session);
        let is_served = scheduler.binding().is_some_and(|bound| bound.space() == space);
        if is_served {
            scheduler.change(ServiceEvent::Closed);
        }
        is_served
    }

    /// Returns the engines served in a namespace.
    pub(crate) fn served_in(&self, space: Space) -> Vec<SessionId> {
        let serves = |scheduler: &Scheduler| scheduler.binding().is_some_and(|bound| bound.space() == space);
        let served = self.schedulers.iter().filter(|(_, scheduler)| serves(scheduler));
        served.map(|(session, _)| *session).collect()
    }

    /// Returns the number of connected runs barred from the namespace of this id, without runs never allowed
    /// to save.
    pub(crate) fn barred_from(&self, namespace: u32) -> usize {
        let connected = |bar: &&Bar| self.schedulers.values().any(|scheduler| scheduler.run == bar.run);
        self.bars.0.iter().filter(|bar| bar.votes && bar.namespace == namespace).filter(connected).count()
    }

    pub(crate) fn barred(&self) -> Vec<Barred> {
        let of_scheduler = |scheduler: &Scheduler| {
            let barred = scheduler.barred()?;
            let bar = self.bars.of(scheduler.run, barred.space())?;
            Some(Barred { base: barred.base, engine: scheduler.engine.clone(), worst: bar.worst })
        };
        self.schedulers.values().filter_map(of_scheduler).collect()
    }
}
