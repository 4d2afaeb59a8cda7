//! `pillion_scheduler_await`, `_hand_over` and `_promise`: one engine computes a request's prompt, another answers it.

use super::error::Status;
use super::scheduler::{Scheduler, call_session, tell_session};

// === exported ===

/// Says that another engine computes the blocks of this log, or is about to: its queries are unknown (-1) until these are kept, or
/// until that is not worth waiting for: 2 s at most, and 30 s while the other engine has promised them and works. Before the log's first query. Of no effect on a sidecar of an older release.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_await(scheduler: Option<&Scheduler>, log: i64) -> Status {
    tell_session(scheduler, |session| session.await_producer(log))
}

/// Says that another engine will load the blocks of this log: what is saved of it from now on stays until that has loaded it, for a
/// while. Of no effect on a sidecar of an older release.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_hand_over(scheduler: Option<&Scheduler>, log: i64) -> Status {
    tell_session(scheduler, |session| session.hand_over(log))
}

/// Says that this engine is about to compute the blocks of this log: an engine that awaits them waits until this log is closed, 30 s
/// at most, while this engine calls, or begins or ends a step, at least every 5 s. 64 logs of an engine count at once. What is saved
/// of it is handed over. As soon as the request has come, after open and before the log's first append. Of no effect on a sidecar of
/// an older release.
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
