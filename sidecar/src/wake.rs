//! How a thread's end wakes others: by an eventfd.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use shm_protocol::wait::{eventfd, signal};

/// Becomes readable when a thread that must not end has ended.
#[derive(Debug)]
pub struct EndSignal(OwnedFd);

/// Gives the [`EndSignal`] on drop, also while its thread unwinds.
#[derive(Debug)]
pub struct OnExit(Arc<EndSignal>);

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
