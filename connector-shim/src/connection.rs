//! One connection: the handshake, its results, and the detection of its end.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::net::{Shutdown, sockopt};
use shm_protocol::handshake::{HandshakeError, Hello, Reply, Role, Welcome, decode_reply, encode_hello};
use shm_protocol::region::Region;
use shm_protocol::session::SessionMemory;
use shm_protocol::{ACCEPT_SINCE, transport, wait};

use crate::clock;
use crate::core::endpoint::{Endpoint, Feature};
use crate::pool::MappedPool;

/// The longest a handshake may take: the engine's start waits for it once.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(1);

/// The sidecar's socket, and the encoded HELLO for it, already checked by `Hello::check`.
#[derive(Debug)]
pub(crate) struct SidecarAddress {
    /// The sidecar's socket.
    pub(crate) socket: PathBuf,
    /// The encoded HELLO, the first record.
    record: Vec<u8>,
    /// The descriptors sent with the HELLO.
    descriptors: Vec<OwnedFd>,
    /// True if this side reads blocks from the pool.
    maps_pool: bool,
}

/// Why there is no connection.
#[derive(Debug)]
pub(crate) enum ConnectError {
    /// Nobody answers: try again.
    Absent(Errno),
    /// The sidecar said no: a person must change something.
    Refused(String),
    /// The sidecar's answer is invalid: a person must look.
    Broken(String),
}

/// One accepted connection. Closed on drop.
#[derive(Debug)]
pub struct Connection {
    /// The session's shared memory.
    pub(crate) memory: SessionMemory,
    /// The pool; schedulers do not map it.
    pub(crate) pool: Option<Arc<MappedPool>>,
    /// The sidecar's facts.
    pub(crate) welcome: Welcome,
    socket: OwnedFd,
    doorbell: OwnedFd,
    /// The sidecar's process, by a pidfd.
    sidecar: OwnedFd,
    lost: AtomicBool,
}

/// A timeout of 0: poll without waiting.
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

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

// === impl SidecarAddress ===

impl SidecarAddress {
    /// Returns an error for a hello, or a number of descriptors, that the sidecar would refuse.
    pub(crate) fn new(
        socket: PathBuf,
        hello: &Hello,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Self, HandshakeError> {
        let record = encode_hello(hello, descriptors.len())?;
        let maps_pool = matches!(hello.role, Role::Worker(_));
        Ok(Self { socket, record, descriptors, maps_pool })
    }

    /// Connects and shakes hands, within [`HANDSHAKE`].
    pub(crate) fn connect_sidecar(&self) -> Result<Connection, ConnectError> {
        let deadline = clock::read_clock() + HANDSHAKE;
        let socket = transport::connect_socket(&self.socket, HANDSHAKE)?;
        limit(&socket, deadline)?;
        let descriptors: Vec<_> = self.descriptors.iter().map(AsFd::as_fd).collect();
        transport::send_record(&socket, &self.record, &descriptors)?;
        limit(&socket, deadline)?;
        let (record, received) = transport::receive_record(&socket)?;
        if record.is_empty() {
            return Err(ConnectError::Absent(Errno::CONNRESET));
        }
        match decode_reply(&record)? {
            Reply::Refused { reason, .. } => Err(ConnectError::Refused(reason)),
            Reply::Welcome(welcome) => {
                Connection::new(socket, welcome, received, self.maps_pool).map_err(ConnectError::Broken)
            }
        }
    }
}

/// Sets the socket's timeout to the rest of the handshake's time.
fn limit(socket: &OwnedFd, deadline: Instant) -> Result<(), Errno> {
    let left = deadline.saturating_duration_since(clock::read_clock());
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
        let [memory, doorbell, pool, sidecar] = <[OwnedFd; 4]>::try_from(received)
            .map_err(|_| format!("its welcome came with {count} descriptors instead of 4"))?;
        let flags = rustix::fs::fcntl_getfl(&doorbell).map_err(|error| error.to_string())?;
        if !flags.contains(OFlags::NONBLOCK) {
            return Err("its doorbell is in blocking mode".into());
        }
        if !is_process(&sidecar) {
            return Err("the fourth descriptor of its welcome is not a process".into());
        }
        let memory = SessionMemory::open(welcome.version, memory).map_err(|error| error.to_string())?;
        let pool = match maps_pool {
            true => Some(Arc::new(MappedPool::map(&pool, welcome.pool_bytes)?)),
            false => None,
        };
        Ok(Self { memory, pool, welcome, socket, doorbell, sidecar, lost: AtomicBool::new(false) })
    }

    /// The region of the session's shared words.
    pub(crate) fn region(&self) -> &Region {
        self.memory.region()
    }

    /// True if the end of the connection was noticed already. Makes no system call.
    pub(crate) fn was_lost(&self) -> bool {
        // Relaxed: no other data depends on the flag.
        self.lost.load(Ordering::Relaxed)
    }

    /// Blocks until the sidecar is gone, or this side hung up.
    pub(crate) fn wait_lost(&self) {
        while !self.poll_lost(None) {}
    }

    /// True if the sidecar's process has ended, with its files and GPU channels: it writes nothing any more.
    pub(crate) fn sidecar_is_gone(&self) -> bool {
        has_ended(&self.sidecar)
    }

    /// Polls the socket. After the handshake it carries no data, so any event on it is the connection's end.
    fn poll_lost(&self, timeout: Option<&Timespec>) -> bool {
        let mut sockets = [PollFd::new(&self.socket, PollFlags::IN | PollFlags::RDHUP)];
        // An interrupted poll has seen nothing; the caller looks again.
        let ready = poll(&mut sockets, timeout).is_ok_and(|count| count > 0);
        if ready {
            self.lost.store(true, Ordering::Relaxed);
        }
        ready
    }
}

impl Endpoint for Connection {
    fn memory(&self) -> &SessionMemory {
        &self.memory
    }

    fn epoch(&self) -> u64 {
        self.welcome.epoch
    }

    fn lease_ttl(&self) -> Duration {
        Duration::from_millis(self.welcome.lease_ttl_ms)
    }

    fn knows(&self, feature: Feature) -> bool {
        match feature {
            Feature::Handover => self.welcome.handover,
            Feature::Tails => self.welcome.tails,
            Feature::States => self.welcome.states,
            Feature::Devices => self.welcome.devices,
            Feature::Hints => self.welcome.hints,
            Feature::Streams => self.welcome.streams,
            Feature::Acceptance => self.welcome.version >= ACCEPT_SINCE,
        }
    }

    fn ring(&self) {
        wait::ring_doorbell(self.region(), self.doorbell.as_fd());
    }

    fn is_lost(&self) -> bool {
        self.was_lost() || self.poll_lost(Some(&AT_ONCE))
    }

    fn hang_up(&self) {
        self.lost.store(true, Ordering::Relaxed);
        // A peer that hung up first gives ENOTCONN: the connection is closed already.
        let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
    }
}

/// True if a descriptor is a pidfd. Any other descriptor could report an end while the sidecar still writes.
fn is_process(descriptor: &OwnedFd) -> bool {
    let facts = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", descriptor.as_raw_fd()));
    facts.is_ok_and(|facts| facts.lines().any(|line| line.starts_with("Pid:")))
}

/// True if the process behind a pidfd has ended.
fn has_ended(process: &OwnedFd) -> bool {
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&AT_ONCE)).is_ok_and(|count| count > 0)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    #[test]
    fn the_end_of_a_process_is_seen_and_nothing_else_is_taken_for_one() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
        assert!(is_process(&process) && !has_ended(&process));
        child.kill().unwrap();
        poll(&mut [PollFd::new(&process, PollFlags::IN)], None).unwrap();
        assert!(has_ended(&process), "before anybody waited for it");
        child.wait().unwrap();
        assert!(is_process(&process) && has_ended(&process));
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        assert!(!is_process(&reader));
    }
}
