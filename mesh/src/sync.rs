//! The clock, mutexes, and a limit of log lines, for threads and tasks alike.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Milliseconds between two log lines.
const RARE_MS: u64 = 1000;

/// Limits log lines about events as frequent as connections to one a second.
pub(crate) struct Rarely {
    began: Instant,
    /// Time of the next line at the earliest, in milliseconds since `began`.
    next_ms: AtomicU64,
}

#[expect(clippy::disallowed_methods, reason = "limits are kept")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Locks a mutex, also a poisoned one: no guard is held over a call that can panic, so the value behind it is
/// whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl Rarely ===

impl Rarely {
    pub(crate) fn new() -> Self {
        Self { began: now(), next_ms: AtomicU64::new(0) }
    }

    /// True if a line may be logged now: for one thread, if several ask at once.
    pub(crate) fn due(&self) -> bool {
        let ms = now().saturating_duration_since(self.began).as_millis() as u64;
        let next = self.next_ms.load(Ordering::Relaxed);
        let swap = || self.next_ms.compare_exchange(next, ms + RARE_MS, Ordering::Relaxed, Ordering::Relaxed);
        ms >= next && swap().is_ok()
    }
}
