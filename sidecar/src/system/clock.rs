//! The process's clock. All threads share its origin, so their times are comparable.

use std::time::{Duration, Instant, SystemTime};

/// Time since the sidecar's start.
#[derive(Copy, Clone, Debug)]
pub struct Clock {
    origin: Instant,
}

// === impl Clock ===

impl Clock {
    /// A clock that starts now.
    #[expect(clippy::disallowed_methods, reason = "the one place where the sidecar reads the clock")]
    pub fn start_now() -> Self {
        Self { origin: Instant::now() }
    }

    /// Time since the start.
    pub fn now(&self) -> Duration {
        self.origin.elapsed()
    }
}

/// The time of day since 1970: for people and their tools alone.
#[expect(clippy::disallowed_methods, reason = "the one place where the sidecar reads the clock")]
pub fn since_1970() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// Whole milliseconds of a time.
pub fn count_millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).expect("500 million years")
}
