//! What is done where the watchdog itself is held up: the process ends.
//!
//! A kernel's first launch or an allocation may take the driver's lock and keep it until every stream has gone on. Behind a
//! parked stream of this process it thus waits for the load, and once the load's sidecar is gone the watchdog waits for the
//! lock: nobody would ever end that. This thread makes no call into the driver.

use std::sync::Weak;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Copies, Parked, end_process};

/// Time between two looks.
const LOOK: Duration = Duration::from_secs(1);
/// Looks in a row that find the watchdog in the same call: ten times what a rescue takes. Looks are counted, not time, since
/// this process may have been frozen.
const LOOKS_MAX: u32 = 30;

/// What the looks so far have come to.
#[derive(Debug, Default)]
struct Seen {
    turns: u64,
    looks: u32,
}

// === impl Seen ===

impl Seen {
    /// Takes a look; whether a parked stream waits for a watchdog that does not come back.
    fn look(&mut self, turns: u64, parked: bool) -> bool {
        let moved = std::mem::replace(&mut self.turns, turns) != turns;
        self.looks = if moved || !parked { 0 } else { self.looks + 1 };
        self.looks >= LOOKS_MAX
    }
}

/// Looks at the watchdog of `copies` until that ends.
pub(super) fn watch(copies: &Weak<Copies>) {
    let mut seen = Seen::default();
    while let Some(copies) = copies.upgrade() {
        if seen.look(copies.progress.turns.load(Ordering::Relaxed), copies.is_parked()) {
            end_process("the GPU's driver delays the copies that the engine's stream waits for");
        }
        drop(copies);
        std::thread::sleep(LOOK);
    }
}

// === impl Copies ===

impl Copies {
    /// Whether the engine's stream may wait for a load.
    fn is_parked(&self) -> bool {
        self.parked().iter().any(|Parked { link, op }| link.delivered(*op) < self.cuts.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_watchdog_that_stands_still_under_a_parked_stream_ends_the_process() {
        let mut seen = Seen::default();
        let stands = |seen: &mut Seen, looks: u32, parked| (0..looks).any(|_| seen.look(7, parked));
        assert!(!stands(&mut seen, 3 * LOOKS_MAX, false), "nothing is parked");
        assert!(!stands(&mut seen, LOOKS_MAX - 1, true));
        assert!(!seen.look(8, true), "it came back");
        assert!(!stands(&mut seen, LOOKS_MAX, true), "the first look saw it move");
        assert!(seen.look(7, true));
    }
}
