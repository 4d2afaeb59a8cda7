//! The common part of both roles: the current connection, and one native thread that watches and replaces it.
//!
//! The thread sleeps in `poll` on the socket while the sidecar lives. After the sidecar's end it tries to
//! connect once a second, and stores a new connection for the session to take. It never needs the
//! interpreter.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::clock;
use crate::connection::{ConnectError, Connection, SidecarAddress};
use crate::core::endpoint::Endpoint;
use crate::core::notices::{NoticeCause, Notices};
use crate::error::{ShimError, refuse_forked};

/// Time between two attempts to connect: a restarted sidecar is found soon, an absent one costs nothing.
const RETRY: Duration = Duration::from_secs(1);

/// One process's end of a session whose connection may come and go.
#[derive(Debug)]
pub(crate) struct Client {
    shared: Arc<ClientShared>,
    owner: u32,
    generation: u64,
    connection: Option<Arc<Connection>>,
}

/// The result of [`Client::refresh_connection`].
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum ConnectionChange {
    /// The connection is the same.
    Same,
    /// The connection is gone.
    Lost,
    /// There is a new one.
    Connected,
}

#[derive(Debug)]
struct ClientShared {
    address: SidecarAddress,
    notices: Arc<Notices>,
    state: Mutex<ClientState>,
    stopped: Condvar,
}

#[derive(Debug, Default)]
struct ClientState {
    fresh: Option<Arc<Connection>>,
    watched: Option<Arc<Connection>>,
    stop: bool,
}

// === impl Client ===

impl Client {
    /// Tries to connect once, then leaves further attempts to the thread. With `strict` a refusal is an
    /// error, otherwise a notice.
    pub(crate) fn start_client(
        address: SidecarAddress,
        notices: Arc<Notices>,
        strict: bool,
    ) -> Result<Self, ShimError> {
        let shared =
            Arc::new(ClientShared { address, notices, state: Mutex::default(), stopped: Condvar::new() });
        let connection = match shared.address.connect_sidecar() {
            Ok(connection) => Some(Arc::new(connection)),
            Err(ConnectError::Refused(reason)) if strict => return Err(ShimError::Refused(reason)),
            Err(error) => {
                shared.say_failed(&error);
                None
            }
        };
        shared.lock().watched = connection.clone();
        let (thread_shared, watched) = (Arc::clone(&shared), connection.clone());
        let spawned = std::thread::Builder::new()
            .name("pillion-watchdog".into())
            .spawn(move || thread_shared.watch_connections(watched));
        if let Err(error) = spawned {
            return Err(ShimError::no_thread(&error));
        }
        let generation = u64::from(connection.is_some());
        Ok(Self { shared, owner: std::process::id(), generation, connection })
    }

    /// True in a child of the process that made the session. The child has no mapping and no thread.
    pub(crate) fn is_forked(&self) -> bool {
        refuse_forked(self.owner).is_err()
    }

    /// The connection in use.
    pub(crate) fn connection(&self) -> Option<&Arc<Connection>> {
        self.connection.as_ref()
    }

    /// How many connections there have been.
    pub(crate) fn connection_count(&self) -> u64 {
        self.generation
    }

    /// Notices for the engine's log.
    pub(crate) fn notices(&self) -> &Notices {
        &self.shared.notices
    }

    /// Finds out whether the sidecar has hung up, with `look` by a poll of the socket, otherwise by its flag;
    /// picks up a new connection.
    pub(crate) fn refresh_connection(&mut self, look: bool) -> ConnectionChange {
        let gone = self.connection.as_ref().is_some_and(|c| if look { c.is_lost() } else { c.was_lost() });
        if gone {
            self.connection = None;
        }
        if self.connection.is_none() {
            self.connection = self.shared.take_fresh();
            if self.connection.is_some() {
                self.generation += 1;
                return ConnectionChange::Connected;
            }
        }
        if gone { ConnectionChange::Lost } else { ConnectionChange::Same }
    }

    /// Hangs up on a sidecar that broke the protocol; the thread connects again.
    pub(crate) fn give_up(&mut self, text: &str) {
        self.leave_sidecar(NoticeCause::Protocol, describe_breach(text));
    }

    /// Hangs up and says why; the thread connects again.
    pub(crate) fn leave_sidecar(&mut self, cause: NoticeCause, text: String) {
        self.shared.notices.say(cause, text);
        if let Some(connection) = self.connection.take() {
            connection.hang_up();
        }
    }

    /// Ends the session permanently.
    pub(crate) fn stop(&mut self) {
        let mut state = self.shared.lock();
        state.stop = true;
        for connection in
            [state.fresh.take(), state.watched.take(), self.connection.take()].into_iter().flatten()
        {
            connection.hang_up();
        }
        drop(state);
        self.shared.stopped.notify_all();
    }
}

/// The notice about a sidecar that broke the protocol.
pub(crate) fn describe_breach(text: &str) -> String {
    format!(
        "the sidecar broke the protocol ({text}); connecting again. Install the same pillion release on both sides"
    )
}

impl Drop for Client {
    fn drop(&mut self) {
        if self.is_forked() {
            // A child does not have the mappings, and other memory may lie at their addresses: never unmap
            // them.
            std::mem::forget(self.connection.take());
            std::mem::forget(Arc::clone(&self.shared));
        } else {
            self.stop();
        }
    }
}

// === impl ClientShared ===

impl ClientShared {
    fn lock(&self) -> MutexGuard<'_, ClientState> {
        // Nothing under this lock can panic half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_fresh(&self) -> Option<Arc<Connection>> {
        self.lock().fresh.take().filter(|connection| !connection.was_lost())
    }

    fn watch_connections(&self, mut watched: Option<Arc<Connection>>) {
        let mut attempted = clock::read_clock();
        loop {
            if let Some(connection) = watched.take() {
                connection.wait_lost();
                self.say_lost();
            }
            if self.sleep_until(attempted + RETRY) {
                return;
            }
            attempted = clock::read_clock();
            match self.address.connect_sidecar() {
                Ok(connection) => watched = Some(self.hand_over(connection)),
                Err(error) => self.say_failed(&error),
            }
        }
    }

    fn hand_over(&self, connection: Connection) -> Arc<Connection> {
        let connection = Arc::new(connection);
        let release = connection.welcome.release.escape_debug().to_string();
        let mut state = self.lock();
        if state.stop {
            connection.hang_up();
            return connection;
        }
        state.fresh = Some(Arc::clone(&connection));
        state.watched = Some(Arc::clone(&connection));
        drop(state);
        self.notices.forget_causes(&[NoticeCause::Absent, NoticeCause::Refused, NoticeCause::Lost]);
        self.notices.say(
            NoticeCause::Reconnected,
            format!("connected to the sidecar at {}, release {release}", self.address.socket.display()),
        );
        connection
    }

    /// Sleeps until `time`. Returns true if the session has ended.
    fn sleep_until(&self, time: Instant) -> bool {
        let mut state = self.lock();
        loop {
            let left = time.saturating_duration_since(clock::read_clock());
            if state.stop || left.is_zero() {
                return state.stop;
            }
            state = self.stopped.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn say_lost(&self) {
        let mut state = self.lock();
        state.watched = None;
        if !state.stop {
            self.notices.forget_causes(&[NoticeCause::Reconnected]);
            self.notices.say(
                NoticeCause::Lost,
                "the sidecar closed the connection; serving without the cache until it is \
                 back",
            );
        }
    }

    fn say_failed(&self, error: &ConnectError) {
        let socket = self.address.socket.display();
        match error {
            ConnectError::Absent(errno) => {
                let remedy = match *errno {
                    Errno::ACCESS | Errno::PERM => {
                        "Run this engine as the sidecar's user, or give pillion serve a --socket-group of this one".to_owned()
                    }
                    _ => format!("Start one: pillion serve --socket {socket}. In a container, mount that folder"),
                };
                self.notices.say(
                    NoticeCause::Absent,
                    format!("no sidecar answers on {socket} ({errno}); serving without the cache and trying again every second. {remedy}"),
                );
            }
            ConnectError::Refused(reason) => {
                self.notices.say(NoticeCause::Refused, format!("the sidecar refuses this engine: {reason}"));
            }
            ConnectError::Broken(text) => self.notices.say(
                NoticeCause::Protocol,
                format!("{socket} does not answer like a sidecar of this release: {text}. Stop any other program that \
                     listens there, or install the same pillion release on both sides"),
            ),
        }
    }
}
