//! Trying again: not at once, not all together, and without saying the same twice.

use std::time::Duration;

use super::Limits;
use shm_protocol::random::Random;

/// What is known of the attempts before.
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

    /// The next failure is the first one again.
    pub(super) fn reset(&mut self) {
        self.pause = self.min;
    }

    /// An attempt that served for so long has ended. The pause before the next one, and whether the reason is news. What
    /// serves for a moment only, again and again, is a failure too.
    pub(super) fn after(&mut self, served: Duration, why: &str) -> (Duration, bool) {
        if served >= self.max {
            self.reset();
            self.told = None;
        }
        // Half of it, and up to as much again, so that nodes which lost the same peer do not come back as one.
        let pause = self.pause / 1024 * (512 + (self.random.next() % 512) as u32);
        self.pause = (self.pause * 2).min(self.max);
        let news = self.told.as_deref() != Some(why);
        self.told = Some(why.into());
        (pause, news)
    }
}
