//! How a thread's end wakes others: by an eventfd.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use shm_protocol::wait::{eventfd, signal};

/// Becomes readable when a thread that must not end has ended.
#[derive(Debug)]
pub struct EndSignal(OwnedFd);

/// Gives the [`EndSignal`] on drop, also while its thread unwinds.
#[derive(Debug)]
pub struct OnExit {
    signal: Arc<EndSignal>,
    expected: Expected,
}

/// Whether a thread may end.
#[derive(Clone, Debug, Default)]
pub struct Expected(Arc<AtomicBool>);

// === impl EndSignal ===

impl EndSignal {
    /// Nothing has ended yet.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self(eventfd()?))
    }

    /// A guard for a thread.
    pub fn on_exit(self: &Arc<Self>) -> OnExit {
        self.on_exit_unless(&Expected::default())
    }

    /// A guard for a thread that may end once that is expected.
    pub fn on_exit_unless(self: &Arc<Self>, expected: &Expected) -> OnExit {
        OnExit { signal: Arc::clone(self), expected: expected.clone() }
    }
}

// === impl Expected ===

impl Expected {
    /// The thread is about to be told to end.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl AsFd for EndSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Drop for OnExit {
    fn drop(&mut self) {
        if !self.expected.0.load(Ordering::Relaxed) {
            signal(&self.signal.0);
        }
    }
}
