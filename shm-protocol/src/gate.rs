//! Taking a load back from the sidecar: after [`close`] and [`is_settled`] it writes no block of it any more.
//!
//! Sidecar: raise `FENCE_COPYING`, then look at the gate. Engine: close the gate, then look at `FENCE_COPYING`.
//! Store-then-load on both sides is what the SeqCst fences order: either the sidecar sees the gate, or the engine sees
//! the copy and waits for its end. Generic over [`GateMemory`] so that loom checks exactly what the product runs.

use std::sync::atomic::{Ordering, fence};

use crate::layout::header;
use crate::proof::WITHOUT_GATE;
use crate::region::Region;

/// The two words of a worker's session.
pub trait GateMemory {
    /// A SeqCst fence.
    fn fence(&self);
    /// Adds one to `FENCE_COPYING`, relaxed.
    fn raise_copying(&self);
    /// Subtracts one from `FENCE_COPYING` with release.
    fn lower_copying(&self);
    /// Loads `FENCE_COPYING` with acquire.
    fn load_copying(&self) -> u64;
    /// Raises `FENCE_GATE` to `op`, never lowers it; release.
    fn raise_gate(&self, op: u64);
    /// Loads `FENCE_GATE` with acquire.
    fn load_gate(&self) -> u64;
}

/// Sidecar side: writes one block of load `op`, unless the engine has taken it back: `None`.
pub fn write_unless_closed<T>(memory: &impl GateMemory, op: u64, write: impl FnOnce() -> T) -> Option<T> {
    memory.raise_copying();
    // SYNC POINT(gate): pairs with `close`.
    memory.fence();
    let open = memory.load_gate() < op || WITHOUT_GATE;
    let written = open.then(write);
    memory.lower_copying();
    written
}

/// Engine side: load `op` and every earlier one is taken back.
pub fn close(memory: &impl GateMemory, op: u64) {
    memory.raise_gate(op);
    // SYNC POINT(gate): pairs with `write_unless_closed`.
    memory.fence();
}

/// Engine side, after [`close`]: whether no block is being written. A sidecar that was killed meanwhile leaves it false.
pub fn is_settled(memory: &impl GateMemory) -> bool {
    memory.load_copying() == 0
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
        self.word64(header::FENCE_GATE).fetch_max(op, Ordering::Release);
    }
    fn load_gate(&self) -> u64 {
        self.word64(header::FENCE_GATE).load(Ordering::Acquire)
    }
}
