//! Eventfds to signal the end of a thread.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use shm_protocol::wait::{make_eventfd, signal_eventfd};

/// Becomes readable when a required thread has ended.
#[derive(Debug)]
pub struct EndSignal(OwnedFd);

/// Signals [`EndSignal`] on drop, also while its thread unwinds.
#[derive(Debug)]
pub struct OnExit {
    signal: Arc<EndSignal>,
    expected: Expected,
}

/// Set before an expected end of a thread.
#[derive(Clone, Debug, Default)]
pub struct Expected(Arc<AtomicBool>);

// === impl EndSignal ===

impl EndSignal {
    /// A signal before the end of any thread.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self(make_eventfd()?))
    }

    /// A guard for a thread.
    pub fn on_exit(self: &Arc<Self>) -> OnExit {
        self.on_exit_unless(&Expected::default())
    }

    /// A guard for a thread that may end once `expected` is set.
    pub fn on_exit_unless(self: &Arc<Self>, expected: &Expected) -> OnExit {
        OnExit { signal: Arc::clone(self), expected: expected.clone() }
    }
}

// === impl Expected ===

impl Expected {
    /// Marks the end as expected; called before the thread is stopped.
    pub fn set_expected(&self) {
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
            signal_eventfd(&self.signal.0);
        }
    }
}
