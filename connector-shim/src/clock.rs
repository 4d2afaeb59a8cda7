//! The monotonic clock, read in one place.

use std::time::Instant;

/// Now.
#[allow(clippy::disallowed_methods, reason = "this client keeps the deadlines of the engine's calls itself")]
pub(crate) fn read_clock() -> Instant {
    Instant::now()
}
