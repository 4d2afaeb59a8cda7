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

use shm_protocol::blocks::Blocks;

use self::verbs::Nic;
use super::tcp::carriage::{Carriage, Fetching};
use super::tcp::frame::lease::{LEASE_MS_MAX, NICS_MAX, Queue, QueueEnd};
use super::tcp::frame::{Frame, Malformed};
use super::tcp::in_stream::InStream;
use super::tcp::link::Link;
use super::tcp::piece::Piece;
use super::tcp::serve::part;
use super::tcp::wire::Wire;
use super::tcp::{self, STREAMS_MAX, Shared, Tcp};
use super::{Fault, Fetch, Granted, Peer, PeerNumber, Stage, Transport, Up};
use crate::Error;
use crate::sync::{lock, now};

/// Default queue pairs of each NIC to each peer: one reads while the other's blocks are summed.
pub const QPS_PER_PEER_DEFAULT: usize = 2;
/// Default time for a peer to read granted blocks: some hundred times the time of a piece of 4 MiB.
pub const LEASE_DEFAULT: Duration = Duration::from_secs(5);
/// Time for which a stream with blocks in it is kept before a queue pair is requested again: a connection
/// costs some milliseconds.
const AGAIN: Duration = Duration::from_secs(10);

/// Settings of the RDMA transport.
#[derive(Clone, Debug)]
pub struct Config {
    /// Settings for asks and grants. The number of streams is ignored: there are as many as queue pairs. Its
    /// security does not cover blocks read by RDMA: any host on the path may read those.
    pub tcp: tcp::Config,
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
    queues: Arc<OnceLock<Queues>>,
}

/// Carries blocks by RDMA once both sides can, and on the streams themselves until then.
#[derive(Default)]
struct Ways {
    /// Set once the NICs have registered the pool.
    queues: Arc<OnceLock<Queues>>,
    /// Peers already noted for not having registered their pools.
    late: Mutex<BTreeSet<PeerNumber>>,
}

/// A stream with blocks in it, until a queue pair is possible.
struct Meanwhile {
    stream: Box<dyn Fetching>,
    queues: Arc<OnceLock<Queues>>,
    /// The time of the next attempt to get a queue pair.
    until: Instant,
}

/// Makes queue pairs, of NICs with a registered pool.
struct Queues {
    nics: Arc<[Nic]>,
    qps_per_peer: usize,
    lease: Duration,
}

/// Checks that these NICs can be used, as [`Rdma::start`] does.
pub fn check(nics: &[String]) -> Result<(), Error> {
    verbs::open(nics).map(drop)
}

// === impl Config ===

impl Config {
    /// Settings with two queue pairs of each of these NICs to each peer.
    pub fn new(tcp: tcp::Config, nics: Vec<String>) -> Self {
        Self { tcp, nics, qps_per_peer: QPS_PER_PEER_DEFAULT, lease: LEASE_DEFAULT }
    }

    fn check(&self) -> Result<(), Error> {
        let count = self.nics.len();
        if !(1..=NICS_MAX).contains(&count) {
            return Err(Error::Queues(format!("--nics names {count} NICs: name 1 to {NICS_MAX}")));
        }
        let most = STREAMS_MAX / count;
        if !(1..=most).contains(&self.qps_per_peer) {
            let wanted = self.qps_per_peer;
            return Err(Error::Queues(format!(
                "--qps-per-peer is {wanted}: pass 1 to {most} with {count} NICs"
            )));
        }
        if !(1..=LEASE_MS_MAX.into()).contains(&self.lease.as_millis()) {
            let lease = self.lease;
            return Err(Error::Queues(format!("the lease is {lease:?}: pass 1 to {LEASE_MS_MAX} ms")));
        }
        Ok(())
    }
}

// === impl Rdma ===

impl Rdma {
    /// Opens the NICs, listens, serves and fetches: over TCP until the NICs have registered the pool in the
    /// background. `up` as for [`Tcp::start`].
    pub fn start(
        config: Config,
        blocks: Blocks,
        up: impl Fn(Up) + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        config.check()?;
        let nics = verbs::open(&config.nics)?;
        let Config { qps_per_peer, lease, .. } = config;
        let config = tcp::Config { streams: nics.len() * qps_per_peer, ..config.tcp };
        let ways = Ways::default();
        let (queues, ready) = (Arc::clone(&ways.queues), Arc::clone(&ways.queues));
        let tcp = Tcp::with(Box::new(ways), config, blocks.clone(), Box::new(up))?;
        let shared = Arc::clone(&tcp.shared);
        let register = move || match nics.iter().try_for_each(|nic| nic.register(&blocks)) {
            Ok(()) => drop(ready.set(Queues { nics: nics.into(), qps_per_peer, lease })),
            Err(problem) => {
                shared.note(format!("all blocks travel over TCP, to and from this node: {problem}"));
            }
        };
        tcp.shared.threads.spawn("mesh-register".into(), register)?;
        Ok(Self { tcp, queues })
    }

    /// The listening address.
    pub fn address(&self) -> SocketAddr {
        self.tcp.address()
    }

    /// True once the NICs have registered the pool.
    pub fn ready(&self) -> bool {
        self.queues.get().is_some()
    }
}

impl Transport for Rdma {
    fn join(&self, number: PeerNumber, peer: Peer) {
        self.tcp.join(number, peer);
    }

    fn leave(&self, number: PeerNumber) {
        self.tcp.leave(number);
    }

    fn post(&self, fetch: Fetch) {
        self.tcp.post(fetch);
    }

    fn cancel(&self, ticket: u64) {
        self.tcp.cancel(ticket);
    }

    fn grant(&self, granted: Granted) {
        self.tcp.grant(granted);
    }

    fn drain(&self) {
        self.tcp.drain();
    }
}

// === impl Queues ===

impl Queues {
    /// This side's message about the queue pair of stream `number` on NIC `nic`.
    fn queue(&self, number: u16, nic: usize, end: QueueEnd, key: u32) -> Queue {
        Queue { pairs: self.qps_per_peer as u16, number, nics: self.nodes(), nic: nic as u16, end, key }
    }

    fn nodes(&self) -> Vec<Option<u16>> {
        self.nics.iter().map(|nic| nic.node).collect()
    }

    /// True if the peer has the same number of NICs and queue pairs.
    fn fits(&self, other: &Queue) -> bool {
        (other.nics.len(), other.pairs.into()) == (self.nics.len(), self.qps_per_peer)
            && usize::from(other.number) < self.nics.len() * self.qps_per_peer
    }
}

// === impl Ways ===

impl Carriage for Ways {
    fn fetch(
        &self,
        number: usize,
        shared: &Arc<Shared>,
        link: &Arc<Link>,
        mut wire: Wire,
    ) -> Result<Box<dyn Fetching>, Fault> {
        if let Some(queues) = self.queues.get() {
            if let Some(met) = fetch::meet(queues, number, shared, link, &mut wire)? {
                lock(&self.late).remove(&link.number);
                return Ok(Box::new(fetch::Reader::new(met, shared, link, wire)));
            }
            if lock(&self.late).insert(link.number) {
                let peer = &link.peer.node;
                shared.note(format!(
                    "blocks of {peer} travel over TCP until its NICs have registered its pool; its log says if they \
                     cannot"
                ));
            }
        } else {
            let sent = wire.send_frame(&Frame::InStream, false, now() + shared.config.limits.handshake);
            sent.map_err(|broken| broken.fault(Stage::Handshake))?;
        }
        let stream = InStream.fetch(number, shared, link, wire)?;
        Ok(Box::new(Meanwhile { stream, queues: Arc::clone(&self.queues), until: now() + AGAIN }))
    }

    fn serve(&self, shared: &Shared, link: Arc<Link>, mut wire: Wire) {
        let until = now() + shared.config.limits.handshake;
        let in_stream = match (wire.frame(until), self.queues.get()) {
            (Ok(Frame::Queue(theirs)), Some(queues)) => {
                return serve::serve(queues, &theirs, shared, &link, wire);
            }
            (Ok(Frame::Queue(_)), None) => wire.send_frame(&Frame::InStream, false, until),
            (Ok(Frame::InStream), _) => Ok(()),
            (Ok(other), _) => Err(Malformed::Bytes(other.unexpected()).into()),
            (Err(broken), _) => Err(broken),
        };
        match in_stream {
            Ok(()) => InStream.serve(shared, link, wire),
            Err(broken) => part(shared, &link, &mut wire, &broken),
        }
    }
}

// === impl Meanwhile ===

impl Fetching for Meanwhile {
    fn quiet(&mut self) -> bool {
        let over = self.queues.get().is_some() && now() >= self.until;
        !over && self.stream.quiet()
    }

    fn run(&mut self, piece: Piece) -> Result<(), Fault> {
        self.stream.run(piece)
    }

    fn hang_up(self: Box<Self>) -> Vec<Piece> {
        self.stream.hang_up()
    }
}

#[cfg(test)]
mod tests;
