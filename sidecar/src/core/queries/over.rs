//! Requests that are over: their blocks are ranked behind the answers that engines wait for, since that takes as long as an answer.

use std::collections::VecDeque;

use tiers::dram::HolderId;

use super::super::GROUP;
use super::super::context::Context;
use super::super::event::Ended;
use super::super::namespaces::Binding;
use super::key_logs::KeyLog;

/// Requests that are put off at most. Their keys lie in memory, and blocks are evicted by their ranks.
const PUT_OFF_MAX: usize = 64;

/// In the order in which they ended.
#[derive(Debug, Default)]
pub(super) struct Over(VecDeque<Request>);

#[derive(Debug)]
struct Request {
    holder: HolderId,
    /// The generation that the next filled slot had when it came.
    opened_at: u64,
    ended: Ended,
}

// === impl Over ===

impl Over {
    pub(super) fn any(&self) -> bool {
        !self.0.is_empty()
    }

    /// A request is over, whose log this was.
    pub(super) fn put_off(&mut self, binding: &Binding, log: KeyLog, cx: &mut Context) {
        if log.keys.is_empty() {
            return;
        }
        if self.0.len() == PUT_OFF_MAX {
            self.rank_next(cx);
        }
        let asked = log.first_asked.unwrap_or_default();
        let ended = Ended {
            namespace: binding.namespace,
            block_bytes: binding.block_bytes(),
            keys: log.keys,
            asked,
        };
        self.0.push_back(Request { holder: binding.whose.holder, opened_at: log.opened_at, ended });
    }

    /// Ranks the blocks of the first one.
    pub(super) fn rank_next(&mut self, cx: &mut Context) {
        if let Some(Request { holder, opened_at, ended }) = self.0.pop_front() {
            cx.dram.end_chain(holder, ended.namespace, GROUP, &ended.keys, opened_at);
            cx.ended.push(ended);
        }
    }

    /// Ranks those of all: a holder may go.
    pub(super) fn rank_all(&mut self, cx: &mut Context) {
        while self.any() {
            self.rank_next(cx);
        }
    }
}
