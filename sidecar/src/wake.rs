//! How threads wake each other: eventfds, and what the data thread is told through them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::EventfdFlags;
use rustix::io::Errno;

/// What the data thread is told from outside.
#[derive(Debug)]
pub struct Control {
    /// Milliseconds that copies in flight may take from now on; zero while nobody asked to end.
    grace_ms: AtomicU64,
    wake: OwnedFd,
}

/// Becomes readable when a thread that must not end has ended.
#[derive(Debug)]
pub struct EndSignal(OwnedFd);

/// Gives the [`EndSignal`] on drop, also while its thread unwinds.
#[derive(Debug)]
pub struct OnExit(Arc<EndSignal>);

// === impl Control ===

impl Control {
    /// Nobody has asked yet.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self { grace_ms: AtomicU64::new(0), wake: eventfd()? })
    }

    /// The grace, once someone asked to end.
    pub fn grace(&self) -> Option<Duration> {
        let grace = self.grace_ms.load(Ordering::Relaxed);
        (grace != 0).then(|| Duration::from_millis(grace))
    }

    pub fn drain(&self, grace: Duration) {
        self.grace_ms.store((grace.as_millis() as u64).max(1), Ordering::Relaxed);
        signal(&self.wake);
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

// === impl EndSignal ===

impl EndSignal {
    /// Nothing has ended yet.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self(eventfd()?))
    }

    /// A guard for a thread.
    pub fn on_exit(self: &Arc<Self>) -> OnExit {
        OnExit(Arc::clone(self))
    }
}

impl AsFd for EndSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for OnExit {
    fn drop(&mut self) {
        signal(&self.0);
    }
}

/// A descriptor by which one thread wakes another.
pub fn eventfd() -> Result<OwnedFd, Errno> {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

pub fn signal(eventfd: impl AsFd) {
    // Full means readable, which is all that is wanted.
    let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
}
