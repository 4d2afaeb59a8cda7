//! Taking a load back from the sidecar: after [`close`] and [`is_settled`] it writes no block of it any more.
//!
//! Sidecar: raise `FENCE_COPYING`, then look at the load's gate. Engine: close that gate, then look at `FENCE_COPYING`.
//! On a GPU the sidecar's stream looks at the gate itself ([`value_open_for`]), and `FENCE_STARTED` and `FENCE_ENDED` say
//! what it writes: [`DEVICE_LATENCY`] after [`close`], every batch that began must end.
//!
//! Every load has a gate of its own, word `op % OPERATIONS` of a table. A word only rises, and a closed one is closed for the
//! smaller operations of that word as well, never for a larger one. So two loads of one word at once, which are
//! `OPERATIONS` operations apart, cost a load that is taken back with another, and never a byte.
//!
//! Store-then-load on both sides is what the SeqCst fences order: either the sidecar sees the gate, or the engine sees
//! the copy and waits for its end. Generic over [`GateMemory`] so that loom checks exactly what the product runs.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use crate::layout::{gate_word, header};
use crate::region::Region;

/// The words of a worker's session.
pub trait GateMemory {
    /// A SeqCst fence.
    fn fence(&self);
    /// Adds one to `FENCE_COPYING`, relaxed.
    fn raise_copying(&self);
    /// Subtracts one from `FENCE_COPYING` with release.
    fn lower_copying(&self);
    /// Loads `FENCE_COPYING` with acquire.
    fn load_copying(&self) -> u64;
    /// Raises the gate word of load `op` to it, never lowers it; release.
    fn raise_gate(&self, op: u64);
    /// Loads the gate word of load `op` with acquire: the last load of that word which was taken back, 0 if none was.
    fn load_gate(&self, op: u64) -> u64;
}

/// Sidecar side: writes one block of load `op`, unless the engine has taken it back: `None`.
pub fn write_unless_closed<T>(memory: &impl GateMemory, op: u64, write: impl FnOnce() -> T) -> Option<T> {
    memory.raise_copying();
    let written = is_open(memory, op).then(write);
    memory.lower_copying();
    written
}

/// Sidecar side: whether the engine has not taken load `op` back. With `FENCE_COPYING` raised that stays so for the copy.
pub fn is_open(memory: &impl GateMemory, op: u64) -> bool {
    // SYNC POINT(gate): pairs with `close`.
    memory.fence();
    memory.load_gate(op) < op
}

/// Engine side: load `op` is taken back, and no other.
pub fn close(memory: &impl GateMemory, op: u64) {
    memory.raise_gate(op);
    // SYNC POINT(gate): pairs with `is_open`.
    memory.fence();
}

/// Sidecar side, once the engine's process has ended: whatever waits behind the gate of load `op` passes.
pub fn open_for_nobody(memory: &Region, op: u64) {
    // Fresh memory closes nothing.
    memory.word64(gate_word(op)).store(0, Ordering::Release);
}

/// Engine side, after [`close`]: whether no block is being written. A sidecar that was killed meanwhile leaves it false.
pub fn is_settled(memory: &impl GateMemory) -> bool {
    memory.load_copying() == 0
}

/// A thousand times what a stream needs from passing the gate to its word being visible: measured at 3.5 us a round trip.
pub const DEVICE_LATENCY: Duration = Duration::from_millis(10);

/// What a gate word holds once load `op` was taken back: zero, as fresh memory is, closes none.
const fn value_closed_for(op: u64) -> u64 {
    op.wrapping_neg()
}

/// The smallest value of its gate word, compared cyclically, at which load `op` may begin: a stream waits for it with
/// "greater or equal", since the word holds the negated operation.
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
        // An error is a word that says so already.
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
        // What cuStreamWaitValue64 computes for "greater or equal".
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
