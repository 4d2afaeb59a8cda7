//! `pillion_scheduler_await` and `_hand_over`: one engine computes a request's prompt, another answers it.

use super::error::Status;
use super::scheduler::{Scheduler, tell};

// === exported ===

/// Says that another engine computes the blocks of this log, or is about to: its queries are unknown (-1) until these are kept, or
/// until that is not worth waiting for, 2 s at most. Before the log's first query. Of no effect on a sidecar of an older release.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_await(scheduler: Option<&Scheduler>, log: i64) -> Status {
    tell(scheduler, |session| session.await_producer(log))
}

/// Says that another engine will load the blocks of this log: what is saved of it from now on stays until that has loaded it, for a
/// while. Of no effect on a sidecar of an older release.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_hand_over(scheduler: Option<&Scheduler>, log: i64) -> Status {
    tell(scheduler, |session| session.hand_over(log))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_needed() {
        assert_eq!(pillion_scheduler_await(None, 0), Status::Argument);
        assert_eq!(pillion_scheduler_hand_over(None, 0), Status::Argument);
    }
}
