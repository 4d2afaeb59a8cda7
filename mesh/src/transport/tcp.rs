//! Blocks over TCP: some streams to each peer, each with a thread that blocks.
//!
//! A stream goes one way: the connecting side asks, the other side answers ([`frame`]). A fetch is cut into
//! pieces. The streams of its peer take them as they have room, so a slow one takes fewer. Nothing is copied
//! between the pool and the socket, except by TLS. If the bytes do not follow on the stream (`rdma`), the
//! rest is the same: greeting, asks, grants and limits ([`carriage`]).

pub(super) mod carriage;
pub(super) mod fetch;
pub mod frame;
mod greeting;
pub(super) mod in_stream;
pub(super) mod link;
pub(super) mod piece;
pub(super) mod serve;
mod threads;
pub(super) mod wire;

use std::collections::HashMap;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use shm_protocol::blocks::Blocks;
use shm_protocol::wait;

use self::carriage::Carriage;
use self::fetch::Fetches;
use self::in_stream::InStream;
use self::link::Link;
use self::serve::Served;
use self::threads::Threads;
use super::{BootId, Fault, Fetch, Granted, NodeId, Peer, PeerNumber, Transport, Up};
use crate::Error;
use crate::listen::listen;
use crate::refusals::{Reason, RefusalCounts};
use crate::sync::{Rarely, lock};
use crate::tls::Credentials;
pub use crate::tls::{Security, Tls};

/// Default streams to each peer.
pub const STREAMS_DEFAULT: usize = 4;
/// Maximum streams to a peer: each is a thread on both sides.
pub const STREAMS_MAX: usize = 64;
/// Maximum time for dropping the transport to wait for its threads: longer than any of them waits in the
/// kernel.
const STOP_MAX: Duration = Duration::from_secs(5);

/// Settings of the TCP transport.
#[derive(Clone, Debug)]
pub struct Config {
    pub node: NodeId,
    /// This life of the node.
    pub boot: BootId,
    /// The listening address for peers.
    pub listen: SocketAddr,
    /// Streams to each peer, 1 to [`STREAMS_MAX`].
    pub streams: usize,
    /// TLS files, or plaintext.
    pub security: Security,
    /// Time limits and pauses.
    pub limits: Limits,
    /// Counts refusals by this node and refusals of this node.
    pub refusals: Arc<RefusalCounts>,
}

/// Time limits and pauses of the transport.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Limits {
    pub connect: Duration,
    /// TLS and the first frames.
    pub handshake: Duration,
    /// From an ask, or the end of the block before, to the begin of a block.
    pub first_byte: Duration,
    /// For a part of a block: 256 KiB, or the rest of it.
    pub progress: Duration,
    /// From a grant to the end of its ask, on the serving side, which holds the slots for as long. More than
    /// any fetch takes: a fetch ends after 2 s and a limit of progress, and the rest of its asks is read and
    /// dropped.
    pub whole: Duration,
    /// A stream without work is closed after this time; its serving side waits twice as long.
    pub idle: Duration,
    /// The pause after a failure; doubled at each further failure.
    pub back_off_min: Duration,
    /// The longest such pause.
    pub back_off_max: Duration,
}

/// The running transport. Dropping it ends everything: fetches as [`Fault::Stopped`](super::Fault::Stopped),
/// grants with their release.
pub struct Tcp {
    pub(super) shared: Arc<Shared>,
    address: SocketAddr,
}

/// State shared by the threads.
pub(super) struct Shared {
    pub(super) config: Config,
    carriage: Box<dyn Carriage>,
    credentials: Option<Credentials>,
    pub(super) blocks: Blocks,
    tell: Box<dyn Fn(Up) + Send + Sync>,
    members: Mutex<HashMap<PeerNumber, Arc<Link>>>,
    fetches: Fetches,
    served: Served,
    pub(super) threads: Threads,
    /// Ends the listener's wait.
    bell: OwnedFd,
    /// True if nothing new is accepted.
    draining: AtomicBool,
    stopping: AtomicBool,
    rarely: Rarely,
}

fn eventfd() -> Result<OwnedFd, Error> {
    wait::eventfd().map_err(|errno| Error::Os { doing: "make an eventfd", source: errno.into() })
}

// === impl Config ===

impl Config {
    /// Settings with four streams to each peer, listening at a free port of loopback alone.
    pub fn new(node: NodeId, boot: BootId, security: Security) -> Self {
        let listen = (Ipv4Addr::LOCALHOST, 0).into();
        let (limits, refusals) = Default::default();
        Self { node, boot, listen, streams: STREAMS_DEFAULT, security, limits, refusals }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(1),
            handshake: Duration::from_secs(2),
            first_byte: Duration::from_secs(2),
            progress: Duration::from_secs(2),
            whole: Duration::from_secs(10),
            idle: Duration::from_secs(60),
            back_off_min: Duration::from_millis(50),
            back_off_max: Duration::from_secs(5),
        }
    }
}

// === impl Tcp ===

impl Tcp {
    /// Listens, serves and fetches. `blocks` is the pool to which offsets refer. `up` is called on threads of
    /// the transport, and on the caller's thread within its calls, and must not wait.
    pub fn start(
        config: Config,
        blocks: Blocks,
        up: impl Fn(Up) + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        Self::with(Box::new(InStream), config, blocks, Box::new(up))
    }

    /// As [`Tcp::start`], for a carriage whose blocks may travel beside the streams.
    pub(super) fn with(
        carriage: Box<dyn Carriage>,
        config: Config,
        blocks: Blocks,
        tell: Box<dyn Fn(Up) + Send + Sync>,
    ) -> Result<Self, Error> {
        let credentials = config.security.credentials()?;
        let (listener, address) = listen(config.listen)?;
        let config = Config { streams: config.streams.clamp(1, STREAMS_MAX), ..config };
        let shared = Arc::new(Shared {
            config,
            carriage,
            credentials,
            blocks,
            tell,
            members: Mutex::default(),
            fetches: Fetches::default(),
            served: Served::default(),
            threads: Threads::default(),
            bell: eventfd()?,
            draining: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            rarely: Rarely::new(),
        });
        let tcp = Self { shared: Arc::clone(&shared), address };
        let threads = &shared.threads;
        let clock = Arc::clone(&shared);
        threads.spawn("mesh-clock".into(), move || clock.fetches.keep_time(&clock.stopping))?;
        let listening = Arc::clone(&shared);
        threads.spawn("mesh-listen".into(), move || serve::listen(&listening, &listener))?;
        Ok(tcp)
    }

    /// The listening address.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Transport for Tcp {
    fn join(&self, number: PeerNumber, peer: Peer) {
        self.leave(number);
        lock(&self.shared.members)
            .insert(number, Arc::new(Link::new(number, peer, self.shared.config.streams)));
    }

    fn leave(&self, number: PeerNumber) {
        let left = lock(&self.shared.members).remove(&number);
        if let Some(link) = left {
            link.close();
            self.shared.served.hang_up(|peer| peer == Some(number));
        }
    }

    fn post(&self, fetch: Fetch) {
        fetch::post(&self.shared, fetch);
    }

    fn cancel(&self, ticket: u64) {
        self.shared.fetches.cancel(ticket);
    }

    fn grant(&self, granted: Granted) {
        self.shared.served.grant(granted, &*self.shared.tell);
    }

    fn drain(&self) {
        self.shared.draining.store(true, Ordering::Relaxed);
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        let shared = &self.shared;
        shared.draining.store(true, Ordering::Relaxed);
        shared.stopping.store(true, Ordering::Relaxed);
        wait::signal(&shared.bell);
        let members: Vec<_> = lock(&shared.members).drain().map(|(_, link)| link).collect();
        members.iter().for_each(|link| link.close());
        shared.fetches.stop();
        shared.served.hang_up(|_| true);
        // A thread stuck in the kernel is abandoned.
        shared.threads.join(STOP_MAX);
    }
}

// === impl Shared ===

impl Shared {
    pub(super) fn tell(&self, up: Up) {
        (self.tell)(up);
    }

    pub(super) fn note(&self, text: String) {
        self.tell(Up::Note(text));
    }

    /// Counts a failed connection or ask.
    pub(super) fn count(&self, reason: Reason) {
        self.config.refusals.count(reason);
    }

    /// Counts a broken connection if its fault is a refusal.
    pub(super) fn count_fault(&self, fault: Fault) {
        fault.reason().into_iter().for_each(|reason| self.count(reason));
    }

    /// Logs an event as frequent as connections, at most once a second.
    pub(super) fn note_rarely(&self, text: String) {
        if self.rarely.due() {
            self.note(text);
        }
    }

    pub(super) fn draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    fn member(&self, number: PeerNumber) -> Option<Arc<Link>> {
        lock(&self.members).get(&number).cloned()
    }
}

/// Ends every wait of a thread on this connection.
fn cut(stream: &TcpStream) {
    let _ = stream.shutdown(Shutdown::Both);
}
