//! Pauses between attempts: growing, different on each node, and with each reason reported once.

use std::time::Duration;

use super::Limits;
use shm_protocol::random::Random;

/// The state of a series of attempts.
pub(super) struct BackOff {
    min: Duration,
    max: Duration,
    pause: Duration,
    told: Option<String>,
    random: Random,
}

impl BackOff {
    pub(super) fn new(limits: &Limits, seed: u64) -> Self {
        let (min, max) = (limits.back_off_min, limits.back_off_max);
        Self { min, max, pause: min, told: None, random: Random(seed) }
    }

    /// Treats the next failure as the first one.
    pub(super) fn reset(&mut self) {
        self.pause = self.min;
    }

    /// Records the end of an attempt. `served` is the time for which it worked: an attempt that works only
    /// for a moment is a failure too. Returns the pause before the next attempt, and true if `why` differs
    /// from the reason reported last.
    pub(super) fn after(&mut self, served: Duration, why: &str) -> (Duration, bool) {
        if served >= self.max {
            self.reset();
            self.told = None;
        }
        // Between half of the pause and all of it, so nodes do not come back together after they lost the
        // same peer.
        let pause = self.pause / 1024 * (512 + (self.random.next() % 512) as u32);
        self.pause = (self.pause * 2).min(self.max);
        let news = self.told.as_deref() != Some(why);
        self.told = Some(why.into());
        (pause, news)
    }
}
