//! Changes of peers that the caller was told of and has not taken in: while they are many, peers' streams are not read. A peer whose
//! stream is not read tells fewer changes: a block that came and went again is not told of.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Changes that the caller may have before it: 64 batches of what it takes in at once, some tens of milliseconds.
const CHANGES_MAX: usize = 1 << 16;

/// Counts the changes of all peers that the caller has not taken in.
#[derive(Debug)]
pub(crate) struct Backlog(Arc<Semaphore>);

/// A part of what the caller may have before it. Dropped once it was taken in.
#[derive(Debug)]
pub struct Room {
    _permit: OwnedSemaphorePermit,
}

// === impl Backlog ===

impl Backlog {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(CHANGES_MAX)))
    }

    /// Room for so many changes, or for all there is, as soon as there is: each waits its turn.
    pub(crate) async fn room(&self, changes: usize) -> Room {
        let part = changes.min(CHANGES_MAX) as u32;
        Room { _permit: Arc::clone(&self.0).acquire_many_owned(part).await.expect("it is never closed") }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<T>(work: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
        work.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn who_tells_waits_until_enough_was_taken_in() {
        let backlog = Backlog::new();
        let Poll::Ready(most) = poll(pin!(backlog.room(CHANGES_MAX - 10))) else { panic!("there is room") };
        let Poll::Ready(few) = poll(pin!(backlog.room(10))) else { panic!("there is room") };
        let mut next = pin!(backlog.room(CHANGES_MAX * 2));
        let mut last = pin!(backlog.room(1));
        assert!(poll(next.as_mut()).is_pending());
        drop(most);
        assert!(poll(next.as_mut()).is_pending(), "not enough");
        assert!(poll(last.as_mut()).is_pending(), "it came later");
        drop(few);
        assert!(poll(next.as_mut()).is_ready());
    }
}
