//! Sleeping and waking across the process boundary without a lost wake-up and, mostly, without a system call.
//!
//! Engine to sidecar: the engine publishes, then looks at `SIDECAR_ASLEEP`. The sidecar sets that word, then
//! looks at every tail before it blocks on its eventfd. Sidecar to engine: the sidecar stores the word, then
//! looks at `ENGINE_WAITING`. The engine sets that word, then looks at the stored word before it blocks on
//! the futex. The SeqCst fences order store-then-load on both sides. The code is generic over [`WaitMemory`],
//! so loom checks the code of the product.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use rustix::event::EventfdFlags;
use rustix::io::Errno;
use rustix::thread::futex;
use rustix::time::Timespec;

use crate::layout::header;
use crate::region::Region;

/// The shared words of the two directions; one of them is a futex.
pub trait WaitMemory {
    /// A SeqCst fence: every earlier store comes before every later load, for both sides.
    fn fence(&self);
    /// Loads `SIDECAR_ASLEEP`, relaxed.
    fn load_asleep(&self) -> u32;
    /// Stores `SIDECAR_ASLEEP`, relaxed.
    fn store_asleep(&self, asleep: u32);
    /// Loads `ENGINE_WAITING`, relaxed.
    fn load_waiting(&self) -> u32;
    /// Stores `ENGINE_WAITING`, relaxed.
    fn store_waiting(&self, waiting: u32);
    /// Loads `SIGNAL` with acquire.
    fn load_signal(&self) -> u32;
    /// Adds one to `SIGNAL` with release.
    fn raise_signal(&self);
    /// Sleeps on `SIGNAL` while it is `seen`, until a wake or the time-out; may return early without a
    /// reason.
    fn futex_wait(&self, seen: u32, timeout: Duration);
    /// Wakes all sleepers on `SIGNAL`.
    fn futex_wake(&self);
}

/// Engine, after publishing: wakes the sidecar if it sleeps.
pub fn ring_doorbell(region: &Region, doorbell: BorrowedFd<'_>) {
    if must_ring(region) {
        signal(doorbell);
    }
}

/// Makes a descriptor through which any thread, of this process or another, wakes its poller.
pub fn eventfd() -> Result<OwnedFd, Errno> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// Wakes the thread polling an eventfd.
pub fn signal(eventfd: impl AsFd) {
    // A full counter (EAGAIN) is readable too, and the poller needs no more. A peer's death shows on the
    // socket.
    let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
}

/// Engine, after publishing: true if the sidecar sleeps, or is about to, without having seen the published
/// words.
pub fn must_ring(memory: &impl WaitMemory) -> bool {
    // SYNC POINT(asleep): the tail's store comes before this load in the one order of SeqCst fences.
    memory.fence();
    memory.load_asleep() != 0
}

/// Sidecar: states whether it is about to sleep. After `true`, look at every tail once more before sleeping.
pub fn set_asleep(memory: &impl WaitMemory, asleep: bool) {
    memory.store_asleep(u32::from(asleep));
    // SYNC POINT(asleep): pairs with `must_ring`.
    memory.fence();
}

/// Sidecar, after storing words or completions: wakes the engine thread if one sleeps.
pub fn wake_engine(memory: &impl WaitMemory) {
    // SYNC POINT(waiting): the word's store comes before this load.
    memory.fence();
    if memory.load_waiting() != 0 {
        memory.raise_signal();
        memory.futex_wake();
    }
}

/// Engine: sleeps until `ready` returns true, the sidecar signals, or `timeout` passes. This is one turn; the
/// caller loops. Only one thread of a session may wait at a time.
pub fn sleep_turn(memory: &impl WaitMemory, timeout: Duration, mut ready: impl FnMut() -> bool) -> bool {
    let seen = memory.load_signal();
    memory.store_waiting(1);
    // SYNC POINT(waiting): pairs with `wake_engine`.
    memory.fence();
    if !ready() {
        memory.futex_wait(seen, timeout);
    }
    memory.store_waiting(0);
    ready()
}

// === impl WaitMemory for Region ===

impl WaitMemory for Region {
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }
    fn load_asleep(&self) -> u32 {
        self.word32(header::SIDECAR_ASLEEP).load(Ordering::Relaxed)
    }
    fn store_asleep(&self, asleep: u32) {
        self.word32(header::SIDECAR_ASLEEP).store(asleep, Ordering::Relaxed);
    }
    fn load_waiting(&self) -> u32 {
        self.word32(header::ENGINE_WAITING).load(Ordering::Relaxed)
    }
    fn store_waiting(&self, waiting: u32) {
        self.word32(header::ENGINE_WAITING).store(waiting, Ordering::Relaxed);
    }
    fn load_signal(&self) -> u32 {
        self.word32(header::SIGNAL).load(Ordering::Acquire)
    }
    fn raise_signal(&self) {
        self.word32(header::SIGNAL).fetch_add(1, Ordering::Release);
    }
    fn futex_wait(&self, seen: u32, timeout: Duration) {
        let limit = Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        // A changed word, a signal and a time-out all mean: look again. Shared futex: the two sides are two
        // processes.
        let _ = futex::wait(self.word32(header::SIGNAL), futex::Flags::empty(), seen, Some(&limit));
    }
    fn futex_wake(&self) {
        // The kernel reads the count as a signed number.
        let _ = futex::wake(self.word32(header::SIGNAL), futex::Flags::empty(), i32::MAX as u32);
    }
}
