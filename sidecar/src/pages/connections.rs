//! The connections of an HTTP server: a bounded number; a new one replaces the oldest without a request.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use tokio::sync::Notify;

/// All connections of one server.
#[derive(Debug)]
pub struct Connections {
    most: usize,
    state: Mutex<ConnectionsState>,
}

#[derive(Debug, Default)]
struct ConnectionsState {
    open: usize,
    /// Connections without a current request, the oldest first.
    idle: BTreeMap<u64, Arc<Notify>>,
    next: u64,
}

/// An admitted connection, until it is dropped.
#[derive(Debug)]
pub struct Admitted {
    all: Arc<Connections>,
    closing: Arc<Notify>,
    /// Its number among the connections without a request.
    idle: Mutex<Option<u64>>,
}

// === impl Connections ===

impl Connections {
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self { most, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, ConnectionsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits a connection. At the limit it tells the oldest one without a request to close; `None` if all
    /// have requests.
    pub fn admit(self: &Arc<Self>) -> Option<Admitted> {
        let mut state = self.state();
        if state.open >= self.most {
            let (_, oldest) = state.idle.pop_first()?;
            oldest.notify_one();
            state.open -= 1;
        }
        state.open += 1;
        let closing = Arc::default();
        let idle = Mutex::new(Some(state.add_idle(&closing)));
        Some(Admitted { all: Arc::clone(self), closing, idle })
    }
}

// === impl ConnectionsState ===

impl ConnectionsState {
    fn add_idle(&mut self, closing: &Arc<Notify>) -> u64 {
        self.next += 1;
        self.idle.insert(self.next, Arc::clone(closing));
        self.next
    }
}

// === impl Admitted ===

impl Admitted {
    /// Completes once the connection must close.
    pub fn closing(&self) -> impl Future<Output = ()> + 'static {
        let closing = Arc::clone(&self.closing);
        async move { closing.notified().await }
    }

    /// Marks the connection as serving a request.
    pub fn set_busy(&self) {
        let mut state = self.all.state();
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        // A connection told to close is no longer counted, even if a request came.
        if idle.is_some_and(|number| state.idle.remove(&number).is_some()) {
            *idle = None;
        }
    }

    /// Marks the connection as idle after an answer.
    pub fn set_idle(&self) {
        let mut state = self.all.state();
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.is_none() {
            *idle = Some(state.add_idle(&self.closing));
        }
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.set_busy();
        let mut state = self.all.state();
        // A connection told to close is still marked idle here, and was subtracted already.
        if self.idle.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
            state.open -= 1;
        }
    }
}

/// The output of `work`, or `None` if `end` comes first.
pub async fn run_until<T>(work: impl Future<Output = T>, end: impl Future<Output = ()>) -> Option<T> {
    let (mut work, mut end) = (pin!(work), pin!(end));
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => end.as_mut().poll(context).map(|()| None),
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_closing(connection: &Admitted) -> bool {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let told = async {
            tokio::time::timeout(std::time::Duration::from_secs(1), connection.closing()).await.is_ok()
        };
        runtime.unwrap().block_on(told)
    }

    #[test]
    fn the_oldest_without_a_request_makes_room_and_none_with_one() {
        let all = Connections::new(3);
        let connections: Vec<_> = (0..3).map(|_| all.admit().unwrap()).collect();
        connections[0].set_busy();
        let fourth = all.admit().unwrap();
        assert!(is_closing(&connections[1]) && !is_closing(&connections[0]) && !is_closing(&connections[2]));
        connections[1].set_busy();
        connections[1].set_idle();
        connections[2].set_busy();
        fourth.set_busy();
        assert!(all.admit().is_none(), "each has a request");
        connections[0].set_idle();
        let fifth = all.admit().unwrap();
        assert!(is_closing(&connections[0]));
        drop((connections, fourth, fifth));
        let state = all.state();
        assert_eq!((state.open, state.idle.len()), (0, 0));
    }
}
