//! Blocks by RDMA: the reading side READs them out of the owner's pool; the owner's processor moves no byte.
//!
//! Asks, grants and the end of each lease go over the streams of the TCP transport ([`super::tcp`]), with its
//! greeting, TLS, limits and back-off. Each stream has a queue pair ([`verbs`]) of the same lifetime, on a
//! NIC of either side ([`pairing`]). The owner ends a late lease by destroying the queue pair before it gives
//! the slots back, so a late READ fails instead of reading the next content of the slot.
//!
//! Until both sides have registered their pools, and permanently if one of them cannot, blocks follow on the
//! streams as over TCP: a side without a queue pair sends InStream instead, and the stream is made again once
//! in a while.
//!
//! RDMA traffic has no encryption or authentication, and a member with a live queue pair can read all of the
//! pool: see docs/decisions/0015.

mod fetch;
mod pairing;
mod serve;
mod verbs;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use shm_protocol::blocks::PoolBlocks;

use self::verbs::Nic;
use super::tcp::data_path::{ConnectedFetch, DataPath};
use super::tcp::frame::lease::{LEASE_MS_MAX, NICS_MAX, QueueEnd, QueueOffer};
use super::tcp::frame::{Frame, MalformedFrame};
use super::tcp::in_stream::InStream;
use super::tcp::link::PeerLink;
use super::tcp::piece::FetchPiece;
use super::tcp::serve::part_from;
use super::tcp::wire::Wire;
use super::tcp::{self, STREAMS_MAX, Tcp, TcpShared};
use super::{Fetch, FetchFault, FetchStage, GrantedSlots, Peer, PeerNumber, Transport, TransportEvent};
use crate::MeshError;
use crate::sync::{lock_mutex, read_clock};

/// Default queue pairs of each NIC to each peer: one reads while the other's blocks are summed.
pub const QPS_PER_PEER_DEFAULT: usize = 2;
/// Default time for a peer to read granted blocks: some hundred times the time of a piece of 4 MiB.
pub const LEASE_DEFAULT: Duration = Duration::from_secs(5);
/// Time for which a stream with blocks in it is kept before a queue pair is requested again: a connection
/// costs some milliseconds.
const AGAIN: Duration = Duration::from_secs(10);

/// Settings of the RDMA transport.
#[derive(Clone, Debug)]
pub struct RdmaConfig {
    /// Settings for asks and grants. The number of streams is ignored: there are as many as queue pairs. Its
    /// security does not cover blocks read by RDMA: any host on the path may read those.
    pub tcp: tcp::TcpConfig,
    /// Names of the NICs, such as mlx5_0; the same number on every node.
    pub nics: Vec<String>,
    /// Queue pairs of each NIC to each peer; the same number on every node.
    pub qps_per_peer: usize,
    /// Time for a peer to read granted blocks.
    pub lease: Duration,
}

/// The running transport. Dropping it ends everything, as with [`Tcp`].
pub struct Rdma {
    tcp: Tcp,
    queues: Arc<OnceLock<QueueMaker>>,
}

/// Carries blocks by RDMA once both sides can, and on the streams themselves until then.
#[derive(Default)]
struct Ways {
    /// Set once the NICs have registered the pool.
    queues: Arc<OnceLock<QueueMaker>>,
    /// Peers already noted for not having registered their pools.
    late: Mutex<BTreeSet<PeerNumber>>,
}

/// A stream with blocks in it, until a queue pair is possible.
struct Meanwhile {
    stream: Box<dyn ConnectedFetch>,
    queues: Arc<OnceLock<QueueMaker>>,
    /// The time of the next attempt to get a queue pair.
    until: Instant,
}

/// Makes queue pairs, of NICs with a registered pool.
struct QueueMaker {
    nics: Arc<[Nic]>,
    qps_per_peer: usize,
    lease: Duration,
}

/// Checks that these NICs can be used, as [`Rdma::start`] does.
pub fn check_nics(nics: &[String]) -> Result<(), MeshError> {
    verbs::open_nics(nics).map(drop)
}

// === impl RdmaConfig ===

impl RdmaConfig {
    /// Settings with two queue pairs of each of these NICs to each peer.
    pub fn new(tcp: tcp::TcpConfig, nics: Vec<String>) -> Self {
        Self { tcp, nics, qps_per_peer: QPS_PER_PEER_DEFAULT, lease: LEASE_DEFAULT }
    }

    fn check_counts(&self) -> Result<(), MeshError> {
        let count = self.nics.len();
        if !(1..=NICS_MAX).contains(&count) {
            return Err(MeshError::Queues(format!("--nics names {count} NICs: name 1 to {NICS_MAX}")));
        }
        let most = STREAMS_MAX / count;
        if !(1..=most).contains(&self.qps_per_peer) {
            let wanted = self.qps_per_peer;
            return Err(MeshError::Queues(format!(
                "--qps-per-peer is {wanted}: pass 1 to {most} with {count} NICs"
            )));
        }
        if !(1..=LEASE_MS_MAX.into()).contains(&self.lease.as_millis()) {
            let lease = self.lease;
            return Err(MeshError::Queues(format!("the lease is {lease:?}: pass 1 to {LEASE_MS_MAX} ms")));
        }
        Ok(())
    }
}

// === impl Rdma ===

impl Rdma {
    /// Opens the NICs, listens, serves and fetches: over TCP until the NICs have registered the pool in the
    /// background. `up` as for [`Tcp::start`].
    pub fn start(
        config: RdmaConfig,
        blocks: PoolBlocks,
        up: impl Fn(TransportEvent) + Send + Sync + 'static,
    ) -> Result<Self, MeshError> {
        config.check_counts()?;
        let nics = verbs::open_nics(&config.nics)?;
        let RdmaConfig { qps_per_peer, lease, .. } = config;
        let config = tcp::TcpConfig { streams: nics.len() * qps_per_peer, ..config.tcp };
        let ways = Ways::default();
        let (queues, ready) = (Arc::clone(&ways.queues), Arc::clone(&ways.queues));
        let tcp = Tcp::with(Box::new(ways), config, blocks.clone(), Box::new(up))?;
        let shared = Arc::clone(&tcp.shared);
        let register = move || match nics.iter().try_for_each(|nic| nic.register(&blocks)) {
            Ok(()) => drop(ready.set(QueueMaker { nics: nics.into(), qps_per_peer, lease })),
            Err(problem) => {
                shared.report_note(format!("all blocks travel over TCP, to and from this node: {problem}"));
            }
        };
        tcp.shared.threads.spawn("mesh-register".into(), register)?;
        Ok(Self { tcp, queues })
    }

    /// The listening address.
    pub fn listen_address(&self) -> SocketAddr {
        self.tcp.listen_address()
    }

    /// True once the NICs have registered the pool.
    pub fn ready(&self) -> bool {
        self.queues.get().is_some()
    }
}

impl Transport for Rdma {
    fn add_peer(&self, number: PeerNumber, peer: Peer) {
        self.tcp.add_peer(number, peer);
    }

    fn remove_peer(&self, number: PeerNumber) {
        self.tcp.remove_peer(number);
    }

    fn post_fetch(&self, fetch: Fetch) {
        self.tcp.post_fetch(fetch);
    }

    fn cancel(&self, ticket: u64) {
        self.tcp.cancel(ticket);
    }

    fn grant_slots(&self, granted: GrantedSlots) {
        self.tcp.grant_slots(granted);
    }

    fn drain(&self) {
        self.tcp.drain();
    }
}

// === impl QueueMaker ===

impl QueueMaker {
    /// This side's message about the queue pair of stream `number` on NIC `nic`.
    fn queue(&self, number: u16, nic: usize, end: QueueEnd, key: u32) -> QueueOffer {
        QueueOffer { pairs: self.qps_per_peer as u16, number, nics: self.nodes(), nic: nic as u16, end, key }
    }

    fn nodes(&self) -> Vec<Option<u16>> {
        self.nics.iter().map(|nic| nic.node).collect()
    }

    /// True if the peer has the same number of NICs and queue pairs.
    fn fits(&self, other: &QueueOffer) -> bool {
        (other.nics.len(), other.pairs.into()) == (self.nics.len(), self.qps_per_peer)
            && usize::from(other.number) < self.nics.len() * self.qps_per_peer
    }
}

// === impl Ways ===

impl DataPath for Ways {
    fn fetch(
        &self,
        number: usize,
        shared: &Arc<TcpShared>,
        link: &Arc<PeerLink>,
        mut wire: Wire,
    ) -> Result<Box<dyn ConnectedFetch>, FetchFault> {
        if let Some(queues) = self.queues.get() {
            if let Some(met) = fetch::meet_peer(queues, number, shared, link, &mut wire)? {
                lock_mutex(&self.late).remove(&link.number);
                return Ok(Box::new(fetch::RdmaReader::new(number, met, shared, link, wire)));
            }
            if lock_mutex(&self.late).insert(link.number) {
                let peer = &link.peer.node;
                shared.report_note(format!(
                    "blocks of {peer} travel over TCP until its NICs have registered its pool; its log says if they \
                     cannot"
                ));
            }
        } else {
            let sent =
                wire.send_frame(&Frame::InStream, false, read_clock() + shared.config.limits.handshake);
            sent.map_err(|broken| broken.fault(FetchStage::Handshake))?;
        }
        let stream = InStream.fetch(number, shared, link, wire)?;
        Ok(Box::new(Meanwhile { stream, queues: Arc::clone(&self.queues), until: read_clock() + AGAIN }))
    }

    fn serve_stream(&self, shared: &TcpShared, link: Arc<PeerLink>, mut wire: Wire) {
        let until = read_clock() + shared.config.limits.handshake;
        let in_stream = match (wire.frame(until), self.queues.get()) {
            (Ok(Frame::Queue(theirs)), Some(queues)) => {
                return serve::serve_reads(queues, &theirs, shared, &link, wire);
            }
            (Ok(Frame::Queue(_)), None) => wire.send_frame(&Frame::InStream, false, until),
            (Ok(Frame::InStream), _) => Ok(()),
            (Ok(other), _) => Err(MalformedFrame::Bytes(other.unexpected()).into()),
            (Err(broken), _) => Err(broken),
        };
        match in_stream {
            Ok(()) => InStream.serve_stream(shared, link, wire),
            Err(broken) => part_from(shared, &link, &mut wire, &broken),
        }
    }
}

// === impl Meanwhile ===

impl ConnectedFetch for Meanwhile {
    fn quiet(&mut self) -> bool {
        let over = self.queues.get().is_some() && read_clock() >= self.until;
        !over && self.stream.quiet()
    }

    fn run_piece(&mut self, piece: FetchPiece) -> Result<(), FetchFault> {
        self.stream.run_piece(piece)
    }

    fn hang_up(self: Box<Self>) -> Vec<FetchPiece> {
        self.stream.hang_up()
    }
}

#[cfg(test)]
mod tests;
