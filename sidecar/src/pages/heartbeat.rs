//! Whether the data thread turns: it says so at every turn, and the admin pages look how long ago that was.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::system::clock::{Clock, millis};

/// An idle data thread turns this often.
pub const IDLE: Duration = Duration::from_millis(500);
/// Without a turn for so long no engine is served: `/readyz` fails. A turn takes 10 ms at most.
const READY: Duration = Duration::from_secs(2);
/// Without a turn for so long the thread does not come back: `/healthz` fails.
const HEALTHY: Duration = Duration::from_secs(10);

/// The last turn's time, shared by those who make turns and those who look.
#[derive(Clone, Debug)]
pub struct Heartbeat {
    clock: Clock,
    /// Milliseconds of `clock`; 0: there was none yet.
    last: Arc<AtomicU64>,
}

// === impl Heartbeat ===

impl Heartbeat {
    /// Of a data thread that has not begun.
    pub fn new() -> Self {
        Self { clock: Clock::start(), last: Arc::default() }
    }

    pub fn beat(&self) {
        self.last.store(millis(self.clock.now()).max(1), Ordering::Relaxed);
    }

    /// How long ago the last turn began; `None`: there was none yet.
    pub fn age(&self) -> Option<Duration> {
        let last = self.last.load(Ordering::Relaxed);
        (last > 0).then(|| self.clock.now().saturating_sub(Duration::from_millis(last)))
    }

    /// Why no engine is served now, if so.
    pub fn unready(&self) -> Option<String> {
        self.stuck_for(READY)
    }

    /// Why the sidecar has to be started anew, if so.
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
