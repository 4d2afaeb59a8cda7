//! Queries that wait for another engine's KV: none waits longer than its engine's limit, with or without a promise.

use std::collections::BTreeMap;

use shm_protocol::message::Status;
use shm_protocol::request::{Query, SchedulerRequest};
use sidecar::core::{Action, CoreEvent, RingRequest, SessionId};

use crate::ctx::Micros;
use crate::engine::HANDOVER_WAIT_MS;

/// The longest wait of a query: for a promise, and then for a late block.
const PATIENCE: Micros = HANDOVER_WAIT_MS as Micros * 1000 + 2_000_000;

/// The operation of each log's waiting query, and the time since it waits.
#[derive(Debug, Default)]
pub(super) struct Waits(BTreeMap<(SessionId, u32), (u64, Micros)>);

// === impl Waits ===

impl Waits {
    /// Follows an event before the core handles it.
    pub(super) fn follow(&mut self, event: &CoreEvent, now: Micros) {
        match event {
            CoreEvent::Message { session, request: RingRequest::Scheduler { request, .. } } => {
                match request {
                    SchedulerRequest::Query(Query { op, keys, awaits: true, .. }) => {
                        // A further query of the log has only the rest of the time.
                        self.0.entry((*session, keys.log)).or_insert((*op, now)).0 = *op;
                    }
                    SchedulerRequest::Release { log }
                    | SchedulerRequest::Ended { log, .. }
                    | SchedulerRequest::Close { log, .. } => {
                        self.0.remove(&(*session, *log));
                    }
                    SchedulerRequest::Salt { .. } | SchedulerRequest::Weights { .. } => self.end(*session),
                    _ => {}
                }
            }
            CoreEvent::Disconnected { session } => self.end(*session),
            _ => {}
        }
    }

    /// Ends the wait of an answered query.
    pub(super) fn answered(&mut self, action: &Action) {
        if let Action::Answer { session, op, outcome, .. } | Action::Outcome { session, op, outcome } = action
            && outcome.status != Status::Pending
        {
            self.0.retain(|(asker, _), (asked, _)| *asker != *session || *asked != *op);
        }
    }

    /// Checks all waits; called right after a tick of the core.
    pub(super) fn check(&self, now: Micros) {
        for (place, (op, since)) in &self.0 {
            assert!(now <= since + PATIENCE, "query {op} of {place:?} waits for {} us", now - since);
        }
    }

    fn end(&mut self, session: SessionId) {
        self.0.retain(|(asker, _), _| *asker != session);
    }
}
