//! `pillion_scheduler_await`, `_hand_over` and `_promise`: one engine computes a request's prompt, another answers it.

use super::error::Status;
use super::scheduler::{Scheduler, call_session, tell_session};

// === exported ===

/// Says that another engine computes the blocks of this log, or is about to. Queries of the log answer -1
/// (not known yet) until these blocks are kept, for at most 2 s, or at most 30 s while the other engine has
/// promised them and works. Call this before the log's first query. A sidecar of an older release ignores it.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_await(scheduler: Option<&Scheduler>, log: i64) -> Status {
    tell_session(scheduler, |session| session.await_producer(log))
}

/// Says that another engine will load the blocks of this log: saves of this log from now on stay until the
/// other engine has loaded them, for a limited time. A sidecar of an older release ignores it.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_hand_over(scheduler: Option<&Scheduler>, log: i64) -> Status {
    tell_session(scheduler, |session| session.hand_over(log))
}

/// Says that this engine is about to compute the blocks of this log for another engine. An engine that awaits
/// them waits until this log is closed, at most 30 s, while this engine makes a call, or begins or ends a
/// step, at least every 5 s. At most 64 logs of an engine count at once. Saves of this log are handed over as
/// by pillion_scheduler_hand_over. Call this as soon as the request has arrived, after open and before the
/// log's first append. A sidecar of an older release ignores it.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_promise(scheduler: Option<&Scheduler>, log: i64) -> Status {
    call_session(scheduler, |state| Ok(state.session.promise_log(log)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_needed() {
        assert_eq!(pillion_scheduler_await(None, 0), Status::Argument);
        assert_eq!(pillion_scheduler_hand_over(None, 0), Status::Argument);
        assert_eq!(pillion_scheduler_promise(None, 0), Status::Argument);
    }
}
