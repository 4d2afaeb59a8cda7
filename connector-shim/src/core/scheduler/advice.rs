//! Advice on the blocks of a log, and its outcomes.

use std::ops::Deref;

use shm_protocol::hints::{Advice, HintEnd};
use shm_protocol::layout::OPERATIONS;
use shm_protocol::message::Status;
use shm_protocol::request::{self, LogKeys, SchedulerRequest};

use super::EngineSession;
use crate::core::endpoint::{Endpoint, Feature};

// === impl EngineSession: advice ===

impl<C: Deref<Target: Endpoint>> EngineSession<C> {
    /// Posts advice on the first `count` keys of a log, and returns its operation. `alone`: the log is of no request.
    /// `None`: no sidecar that knows hints, no keys, or no room.
    pub fn advise(&mut self, handle: i64, count: u32, advice: Advice, alone: bool) -> Option<u64> {
        let link = self.link.as_mut().filter(|link| link.connection.knows(Feature::Hints))?;
        let (log, of) = link.logs.get(handle)?;
        let keys = LogKeys { log, from: 0, count: of.askable(0, count) };
        let op = self.next_op;
        if keys.count == 0 {
            return None;
        }
        link.submission.post(SchedulerRequest::Advise(request::Advise { op, keys, advice, alone }))?;
        link.flush();
        self.next_op += 1;
        Some(op)
    }

    /// Returns the outcome of advice; `None` while it is not known.
    pub fn take_advised(&mut self, op: u64) -> Option<HintEnd> {
        let Some(link) = &self.link else { return Some(HintEnd::Missing) };
        if self.next_op - op >= OPERATIONS as u64 {
            // A later operation has its word.
            return Some(HintEnd::Missing);
        }
        Some(match link.connection.memory().load_outcome(op)?.status {
            Status::Ok => HintEnd::Done,
            Status::Clipped => HintEnd::Clipped,
            _ => HintEnd::Missing,
        })
    }
}
