//! Promises: an engine that computes prompts for others says which, long before it saves the first block.
//!
//! A promise lasts until its log is closed, and holds as long as its engine works. What is promised is waited for while it holds, as
//! long as the engine that asks has said: so a prompt may wait its turn at the engine that computes it.

use super::{Base, Context, Queries, Question, SessionId};

/// Prompts that an engine may have promised at once: as many as another one may await.
const PROMISES_MAX: usize = 64;
/// An engine of which nothing was seen for so long keeps no promise. A step that is longer is not worth waiting for.
const WORKED_MS: u64 = 5000;

// === impl Queries ===

impl Queries {
    /// A session's engine computes the keys of this log for another one.
    pub(crate) fn note_promise(&mut self, session: SessionId, log: u32, cx: &mut Context) {
        let promised = &mut self.logs(session).promised;
        if promised.contains(&log) {
            return;
        }
        if promised.len() >= PROMISES_MAX {
            cx.stats.handover_promises_refused += 1;
            return;
        }
        promised.insert(log);
        cx.stats.handover_promises += 1;
    }

    /// Whether another engine is to produce the block at which a question's run ends. A block's key hangs on all before it, so a log
    /// of the same prompt has it at the same place.
    pub(super) fn is_promised(&self, question: Question, base: &Base) -> bool {
        let log = self.log(question.session, question.log);
        let Some(end) = log.window.as_ref().map(|window| window.end as usize) else { return false };
        let (Some(hash), Some(binding)) = (log.keys.get(end), base.engines[question.session].binding) else {
            return false;
        };
        let keeps_it = |session: SessionId| {
            let engine = &base.engines[session];
            session != question.session
                && engine.binding.is_some_and(|its| its.namespace == binding.namespace)
                && base.cx.now_ms < engine.worked_ms + WORKED_MS
        };
        self.askers.iter().filter(|(session, _)| keeps_it(**session)).any(|(_, asker)| {
            asker.logs.promised.iter().any(|log| asker.logs.known(*log).keys.get(end) == Some(hash))
        })
    }
}
