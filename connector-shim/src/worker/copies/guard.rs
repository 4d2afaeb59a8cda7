//! The end of the process when the watchdog itself is blocked.
//!
//! A kernel's first launch or an allocation may take the driver's lock and keep it until every stream has
//! gone on. Behind a waiting stream of this process it thus waits for the load, and once the load's sidecar
//! is gone the watchdog waits for the lock: no one could end these waits. This thread makes no call into the
//! driver.

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{RankCopies, StreamWait, end_process};

/// Time between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// Looks in a row at a watchdog in the same call before the process ends: ten times the duration of a rescue.
/// Looks are counted, not time, since this process may have been frozen.
const LOOKS_MAX: u32 = 30;

/// The results of the looks so far.
#[derive(Debug, Default)]
struct SeenTurns {
    turns: u64,
    looks: u32,
}

// === impl SeenTurns ===

impl SeenTurns {
    /// Takes a look. Returns true if a stream waits for a watchdog without progress.
    fn take_look(&mut self, turns: u64, may_wait: bool) -> bool {
        let moved = std::mem::replace(&mut self.turns, turns) != turns;
        self.looks = if moved || !may_wait { 0 } else { self.looks + 1 };
        self.looks >= LOOKS_MAX
    }
}

/// Looks at the watchdog of `copies` until it ends.
pub(super) fn watch_copies(copies: &Weak<RankCopies>) {
    let mut seen = SeenTurns::default();
    while let Some(copies) = copies.upgrade() {
        if seen.take_look(copies.progress.turns.load(Ordering::Relaxed), copies.may_wait()) {
            end_process("the GPU's driver delays the copies that the engine's stream waits for");
        }
        drop(copies);
        std::thread::sleep(LOOK);
    }
}

// === impl RankCopies ===

impl RankCopies {
    /// True if the engine's stream may wait for a load.
    fn may_wait(&self) -> bool {
        self.stream_waits().iter().any(|StreamWait { link, op }| link.delivered(*op) < self.cuts.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_watchdog_that_stands_still_under_a_parked_stream_ends_the_process() {
        let mut seen = SeenTurns::default();
        let stands =
            |seen: &mut SeenTurns, looks: u32, may_wait| (0..looks).any(|_| seen.take_look(7, may_wait));
        assert!(!stands(&mut seen, 3 * LOOKS_MAX, false), "no stream waits");
        assert!(!stands(&mut seen, LOOKS_MAX - 1, true));
        assert!(!seen.take_look(8, true), "it came back");
        assert!(!stands(&mut seen, LOOKS_MAX, true), "the first look saw it move");
        assert!(seen.take_look(7, true));
    }
}
