//! One connection: the handshake, what came with it, and how its end is noticed.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{Shutdown, sockopt};
use shm_protocol::handshake::{HandshakeError, Hello, Reply, Role, Welcome, decode_reply, encode};
use shm_protocol::region::Region;
use shm_protocol::session::SessionMemory;
use shm_protocol::{transport, wait};

use crate::clock;
use crate::pool::Pool;

/// The longest a handshake may take: the engine's start waits for it once.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(1);

/// Whom to connect to, and what to say there.
#[derive(Debug)]
pub(crate) struct Address {
    /// The sidecar's socket.
    pub(crate) socket: PathBuf,
    /// The first record.
    pub(crate) hello: Hello,
    /// The descriptors sent with it.
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// Why there is no connection.
#[derive(Debug)]
pub(crate) enum ConnectError {
    /// Nobody answers: try again.
    Absent(Errno),
    /// The sidecar said no: a person must change something.
    Refused(String),
    /// The sidecar's answer makes no sense: a person must look.
    Broken(String),
}

/// One accepted connection. Closed on drop.
#[derive(Debug)]
pub(crate) struct Connection {
    /// The session's shared memory.
    pub(crate) memory: SessionMemory,
    /// The pool; schedulers do not map it.
    pub(crate) pool: Option<Arc<Pool>>,
    /// The sidecar's facts.
    pub(crate) welcome: Welcome,
    socket: OwnedFd,
    doorbell: OwnedFd,
    lost: AtomicBool,
}

// === impl ConnectError ===

impl From<Errno> for ConnectError {
    fn from(errno: Errno) -> Self {
        Self::Absent(errno)
    }
}

impl From<HandshakeError> for ConnectError {
    fn from(error: HandshakeError) -> Self {
        match error {
            HandshakeError::Version { .. } => Self::Refused(error.to_string()),
            _ => Self::Broken(error.to_string()),
        }
    }
}

// === impl Address ===

impl Address {
    /// Connects and shakes hands, within [`HANDSHAKE`].
    pub(crate) fn connect(&self) -> Result<Connection, ConnectError> {
        let deadline = clock::now() + HANDSHAKE;
        let socket = transport::connect(&self.socket, HANDSHAKE)?;
        limit(&socket, deadline)?;
        let descriptors: Vec<_> = self.descriptors.iter().map(AsFd::as_fd).collect();
        transport::send(&socket, &encode(&self.hello), &descriptors)?;
        limit(&socket, deadline)?;
        let (record, received) = transport::receive(&socket)?;
        if record.is_empty() {
            return Err(ConnectError::Absent(Errno::CONNRESET));
        }
        match decode_reply(&record)? {
            Reply::Refused { reason, .. } => Err(ConnectError::Refused(reason)),
            Reply::Welcome(welcome) => {
                let maps_pool = matches!(self.hello.role, Role::Worker(_));
                Connection::new(socket, welcome, received, maps_pool).map_err(ConnectError::Broken)
            }
        }
    }
}

/// Gives the socket's next call what is left of the handshake's time.
fn limit(socket: &OwnedFd, deadline: Instant) -> Result<(), Errno> {
    let left = deadline.saturating_duration_since(clock::now());
    if left.is_zero() {
        return Err(Errno::TIMEDOUT);
    }
    sockopt::set_socket_timeout(socket, sockopt::Timeout::Send, Some(left))?;
    sockopt::set_socket_timeout(socket, sockopt::Timeout::Recv, Some(left))
}

// === impl Connection ===

impl Connection {
    fn new(
        socket: OwnedFd,
        welcome: Welcome,
        received: Vec<OwnedFd>,
        maps_pool: bool,
    ) -> Result<Self, String> {
        let count = received.len();
        let [memory, doorbell, pool] = <[OwnedFd; 3]>::try_from(received)
            .map_err(|_| format!("{count} descriptors came with its welcome instead of 3"))?;
        let flags = rustix::fs::fcntl_getfl(&doorbell).map_err(|error| error.to_string())?;
        if !flags.contains(OFlags::NONBLOCK) {
            return Err("its doorbell could make whoever rings it wait".into());
        }
        let memory = SessionMemory::open(memory).map_err(|error| error.to_string())?;
        let pool = match maps_pool {
            true => Some(Arc::new(Pool::map(&pool, welcome.pool_bytes, welcome.epoch)?)),
            false => None,
        };
        Ok(Self { memory, pool, welcome, socket, doorbell, lost: AtomicBool::new(false) })
    }

    /// The shared words.
    pub(crate) fn region(&self) -> &Region {
        self.memory.region()
    }

    /// Wakes the sidecar if it sleeps.
    pub(crate) fn ring(&self) {
        wait::ring_doorbell(self.region(), self.doorbell.as_fd());
    }

    /// Whether the sidecar is gone. Looks without waiting; the answer stays yes.
    pub(crate) fn is_lost(&self) -> bool {
        self.was_lost() || self.look(Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))
    }

    /// Whether its end was noticed already, without a system call.
    pub(crate) fn was_lost(&self) -> bool {
        // Relaxed: the flag stands for nothing but itself.
        self.lost.load(Ordering::Relaxed)
    }

    /// Blocks until the sidecar is gone, or this side hung up.
    pub(crate) fn wait_lost(&self) {
        while !self.look(None) {}
    }

    /// Hangs up. The sidecar stops everything it does for this session.
    pub(crate) fn hang_up(&self) {
        self.lost.store(true, Ordering::Relaxed);
        // A peer that hung up first (ENOTCONN) has what we want already.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }

    /// After the handshake the socket carries nothing: whatever there is to read is the end.
    fn look(&self, timeout: Option<&Timespec>) -> bool {
        let mut sockets = [PollFd::new(&self.socket, PollFlags::IN | PollFlags::RDHUP)];
        // An interrupted poll has seen nothing; the caller looks again.
        let ready = poll(&mut sockets, timeout).is_ok_and(|count| count > 0);
        if ready {
            self.lost.store(true, Ordering::Relaxed);
        }
        ready
    }
}
