//! Health of the data thread: it stores the time of every turn, and the admin pages check its age.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::system::clock::{Clock, count_millis};

/// Interval of turns of an idle data thread.
pub const IDLE: Duration = Duration::from_millis(500);
/// Without a turn for this long no engine is served and `/readyz` fails. A turn takes 10 ms at most.
const READY: Duration = Duration::from_secs(2);
/// Without a turn for this long the thread counts as permanently stuck and `/healthz` fails.
const HEALTHY: Duration = Duration::from_secs(10);

/// The time of the last turn; all clones share it.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    clock: Clock,
    /// Milliseconds of `clock`; 0 before the first turn.
    last: Arc<AtomicU64>,
}

// === impl Heartbeat ===

impl Heartbeat {
    /// A heartbeat before the first turn.
    pub fn new() -> Self {
        Self { clock: Clock::start_now(), last: Arc::default() }
    }

    pub fn beat(&self) {
        self.last.store(count_millis(self.clock.now()).max(1), Ordering::Relaxed);
    }

    /// Time since the last turn began; `None` before the first turn.
    pub fn age(&self) -> Option<Duration> {
        let last = self.last.load(Ordering::Relaxed);
        (last > 0).then(|| self.clock.now().saturating_sub(Duration::from_millis(last)))
    }

    /// The reason, if no engine is served now.
    pub fn unready(&self) -> Option<String> {
        self.stuck_for(READY)
    }

    /// The reason, if the sidecar must be restarted.
    pub fn unhealthy(&self) -> Option<String> {
        self.stuck_for(HEALTHY)
    }

    fn stuck_for(&self, limit: Duration) -> Option<String> {
        let age = self.age().filter(|age| *age > limit)?;
        let text = format!("the data thread has made no turn for {:.1} s", age.as_secs_f64());
        Some(text + ": restart this sidecar if this lasts\n")
    }
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self::new()
    }
}
