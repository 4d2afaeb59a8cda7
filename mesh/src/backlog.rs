//! Changes of peers not taken in by the caller so far: while they are many, the streams of peers are not
//! read. A peer with an unread stream sends fewer changes: it skips a block if it came and went.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum changes in the backlog: 64 batches of the caller, some tens of milliseconds.
const CHANGES_MAX: usize = 1 << 16;

/// Counts the changes of all peers not taken in by the caller so far.
#[derive(Debug)]
pub(crate) struct Backlog(Arc<Semaphore>);

/// A part of the backlog. Dropped once the caller has taken in the changes.
#[derive(Debug)]
pub struct Room {
    _permit: OwnedSemaphorePermit,
}

// === impl Backlog ===

impl Backlog {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Semaphore::new(CHANGES_MAX)))
    }

    /// Waits for room for so many changes, or for the whole backlog if they are more. Waiting peers get it in
    /// turn.
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
