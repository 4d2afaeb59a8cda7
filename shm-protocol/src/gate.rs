//! Gates, by which an engine takes a load back: after [`close`] and [`is_settled`] the sidecar writes no
//! block of that load any more.
//!
//! The sidecar raises `FENCE_COPYING`, then looks at the load's gate. The engine closes the gate, then looks
//! at `FENCE_COPYING`. On a GPU the sidecar's stream itself waits for the gate ([`value_open_for`]), and
//! `FENCE_STARTED` and `FENCE_ENDED` count its batches of writes: from [`DEVICE_LATENCY`] after [`close`],
//! the engine waits for the end of every started batch.
//!
//! Every load has a gate, word `op % OPERATIONS` of a table. A word only rises. A closed word is closed for
//! its smaller operations too, never for a larger one. Two loads share a word if they are `OPERATIONS`
//! operations apart: taking back the later one also takes back the earlier one, but no byte is written
//! wrongly.
//!
//! The SeqCst fences order store-then-load on both sides: either the sidecar sees the closed gate, or the
//! engine sees the copy and waits for its end. The code is generic over [`GateMemory`], so loom checks the
//! code of the product.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use crate::layout::{gate_word, header};
use crate::region::Region;

/// The fence and gate words of a worker's session.
pub trait GateMemory {
    /// A SeqCst fence.
    fn fence(&self);
    /// Adds one to `FENCE_COPYING`, relaxed.
    fn raise_copying(&self);
    /// Subtracts one from `FENCE_COPYING` with release.
    fn lower_copying(&self);
    /// Loads `FENCE_COPYING` with acquire.
    fn load_copying(&self) -> u64;
    /// Raises the gate word of load `op` to `op`, never lowers it; release.
    fn raise_gate(&self, op: u64);
    /// Loads the gate word of load `op` with acquire: the largest load of that word taken back so far, 0 if
    /// there is none.
    fn load_gate(&self, op: u64) -> u64;
}

/// Sidecar: writes one block of load `op`. Returns `None` without a write if the engine has taken the load
/// back.
pub fn write_unless_closed<T>(memory: &impl GateMemory, op: u64, write: impl FnOnce() -> T) -> Option<T> {
    memory.raise_copying();
    let written = is_open(memory, op).then(write);
    memory.lower_copying();
    written
}

/// Sidecar: true if the engine has not taken load `op` back. With `FENCE_COPYING` raised, the answer holds
/// until the copy ends.
pub fn is_open(memory: &impl GateMemory, op: u64) -> bool {
    // SYNC POINT(gate): pairs with `close`.
    memory.fence();
    memory.load_gate(op) < op
}

/// Engine: takes load `op` back. Larger operations of the same word stay open.
pub fn close(memory: &impl GateMemory, op: u64) {
    memory.raise_gate(op);
    // SYNC POINT(gate): pairs with `is_open`.
    memory.fence();
}

/// Sidecar: opens the gate of load `op` once the engine's process has ended, so a stream waiting behind it
/// goes on.
pub fn open_for_nobody(memory: &Region, op: u64) {
    // Fresh memory closes nothing.
    memory.word64(gate_word(op)).store(0, Ordering::Release);
}

/// Engine, after [`close`]: true if no block is being written. After a sidecar was killed during a write, it
/// stays false.
pub fn is_settled(memory: &impl GateMemory) -> bool {
    memory.load_copying() == 0
}

/// A thousand times the time from a stream's passing of a gate until its word is visible: a round trip was
/// measured at 3.5 us.
pub const DEVICE_LATENCY: Duration = Duration::from_millis(10);

/// The gate word of load `op` once it was taken back. Zero, as in fresh memory, closes no load.
const fn value_closed_for(op: u64) -> u64 {
    op.wrapping_neg()
}

/// The smallest value of the gate word, compared cyclically, at which load `op` may begin. A stream waits for
/// it with "greater or equal", since the word holds the negated operation.
pub const fn value_open_for(op: u64) -> u64 {
    1_u64.wrapping_sub(op)
}

// === impl GateMemory for Region ===

impl GateMemory for Region {
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
    fn raise_copying(&self) {
        self.word64(header::FENCE_COPYING).fetch_add(1, Ordering::Relaxed);
    }
    fn lower_copying(&self) {
        self.word64(header::FENCE_COPYING).fetch_sub(1, Ordering::Release);
    }
    fn load_copying(&self) -> u64 {
        self.word64(header::FENCE_COPYING).load(Ordering::Acquire)
    }
    fn raise_gate(&self, op: u64) {
        let raised = |word: u64| (word.wrapping_neg() < op).then_some(value_closed_for(op));
        // An error means the word is closed for `op` already.
        let _ = self.word64(gate_word(op)).fetch_update(Ordering::Release, Ordering::Relaxed, raised);
    }
    fn load_gate(&self, op: u64) -> u64 {
        self.word64(gate_word(op)).load(Ordering::Acquire).wrapping_neg()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PROTOCOL_VERSION;
    use crate::layout::OPERATIONS;
    use crate::session::SessionMemory;

    const APART: u64 = OPERATIONS as u64;

    #[test]
    fn the_value_a_stream_waits_for_is_reached_exactly_while_the_gate_is_open() {
        // The comparison of cuStreamWaitValue64 for "greater or equal".
        let passes = |word: u64, op: u64| word.wrapping_sub(value_open_for(op)).cast_signed() >= 0;
        for closed in [0_u64, 1, 2, 1000, u64::from(u32::MAX), 1 << 60] {
            for op in [1, 2, 3, 999, 1000, 1001, 1 << 32, (1 << 60) + 1] {
                assert_eq!(
                    passes(value_closed_for(closed), op),
                    op > closed,
                    "closed for {closed}, load {op}"
                );
            }
        }
    }

    #[test]
    fn a_gate_is_one_loads_alone() {
        let (_fd, memory) = SessionMemory::create(PROTOCOL_VERSION, 0, 0).unwrap();
        let closed = 2 * APART + 5;
        close(memory.region(), closed);
        for op in [1, 4, closed - APART + 1, closed - 1, closed + 1, closed + APART - 1] {
            assert!(is_open(memory.region(), op), "load {op} beside {closed}");
        }
        assert!(!is_open(memory.region(), closed));
        assert!(is_open(memory.region(), closed + APART), "the next load of the word");
        close(memory.region(), closed - APART);
        assert!(!is_open(memory.region(), closed), "a word never falls");
    }
}
