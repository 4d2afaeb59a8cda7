//! The policy's remarks and records as vLLM's users read them: the event, and the remedy.

use shm_protocol::hints::{HintAction, HintEnd};
use shm_protocol::source::Source;

use crate::core::policy::{HintEnds, Remark, RequestId};
use crate::core::records::{RequestRecord, WaitPart};

/// Whether it is an error; its text; and the request named in place of `%s`, if one is.
pub(super) type PyRemark = (bool, String, Option<RequestId>);
/// The request; its tokens, those of its prompt in vLLM's own cache, and those of its hit; the same by place; its load; whether it was aborted;
/// seconds of each part; and whether outcomes of its hints are to come.
pub(super) type PyRecord = (
    RequestId,
    (u32, u32, u32),
    [u32; Source::ALL.len()],
    &'static str,
    bool,
    [f64; WaitPart::ALL.len()],
    bool,
);
/// A request, and its hints with their outcomes, by name.
pub(super) type PyHintEnds = (RequestId, Vec<(&'static str, &'static str)>);

/// The fate of a request with a failed load.
#[derive(Copy, Clone, Debug)]
pub(super) enum Loss {
    Recomputed,
    Ended,
    /// It is to end.
    Meant,
}

// === impl Loss ===

impl Loss {
    /// The fate of such requests where they are `recomputed`, or else end: as is meant by a `strict` engine.
    pub(super) fn named_by(recomputed: bool, strict: bool) -> Self {
        match (recomputed, strict) {
            (true, _) => Self::Recomputed,
            (false, false) => Self::Ended,
            (false, true) => Self::Meant,
        }
    }
}

/// The remark's text; none: it needs none.
pub(super) fn word_remark(remark: Remark, loss: Loss) -> Option<PyRemark> {
    Some(match remark {
        Remark::Stalled { steps } => {
            let text = format!(
                "vLLM reported no output of the last {steps} steps to this connector, so nothing is kept until it does: let any \
                 wrapper of the model runner or executor pass on kv_connector_worker_meta"
            );
            (true, text, None)
        }
        Remark::PassedOver { steps, step } => {
            let text = format!(
                "vLLM did not take the output of {steps} steps before step {step}, because they raised, were skipped or were \
                 refused. Nothing that they computed is kept. vLLM may still list their blocks: reset its prefix cache"
            );
            (false, text, None)
        }
        Remark::Unproven { blocks, request } => {
            let text = format!(
                "vLLM's prefix cache lists {blocks} blocks of request %s that no accepted step has filled. vLLM computes with \
                 them, so its answer may be wrong, and nothing of it is kept. A failed step leaves such blocks, and so does a \
                 preemption under --scheduling-policy priority: reset vLLM's prefix cache, and use --scheduling-policy fcfs. \
                 This line is logged once; vllm:pillion_unproven_blocks_total counts the blocks"
            );
            (false, text, Some(request))
        }
        Remark::HintsRefused { request, reason } => {
            let text = format!(
                "hints of request %s have no effect: {}. The request goes on. Such a line is logged once a minute; \
                 vllm:pillion_hints_total counts all",
                reason.replace('%', "%%")
            );
            (false, text, Some(request))
        }
        Remark::Changed => {
            let text = "the weights of the ranks have changed without a visible call, so blocks from before are not kept. Reset \
                        vLLM's prefix cache whenever you change weights";
            (false, text.to_owned(), None)
        }
        Remark::NotLoaded { blocks } => {
            let fate = match loss {
                Loss::Recomputed => " and are computed again",
                Loss::Ended => ", which ends their requests: set kv_load_failure_policy to recompute",
                Loss::Meant => return None,
            };
            (false, format!("{blocks} blocks could not be loaded{fate}"), None)
        }
    })
}

/// Outcomes of hints by name.
pub(super) fn name_hints((request, ends): HintEnds) -> PyHintEnds {
    let named =
        |(action, end): (Option<HintAction>, HintEnd)| (action.map_or("hints", HintAction::name), end.name());
    (request, ends.into_iter().map(named).collect())
}

/// A record's numbers.
pub(super) fn list_record(record: RequestRecord, hinted: bool) -> PyRecord {
    let RequestRecord { request, tokens, computed, hit, found, load, aborted, times, .. } = record;
    (
        request,
        (tokens, computed, hit),
        found,
        load.name(),
        aborted,
        times.map(|time| time.as_secs_f64()),
        hinted,
    )
}
