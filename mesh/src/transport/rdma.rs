//! Blocks by RDMA: the side that asks READs them out of the owner's pool, whose processor moves no byte.
//!
//! Asks, grants and the end of each lease go over the streams of the TCP transport ([`super::tcp`]): its greeting, TLS,
//! limits and back-off are these. Each stream has a queue pair ([`verbs`]), which lives and dies with it, on a NIC of
//! either side ([`pairing`]). The owner ends a lease that is late by destroying the queue pair before it gives the slots
//! back, so that a late READ fails instead of reading what lies there next.
//!
//! Until both sides have registered their pools, and for good where one of them cannot, blocks follow on the streams as
//! over TCP: a side without a queue pair says so in its place, and the stream is made anew once in a while.
//!
//! What travels by RDMA is neither encrypted nor authenticated, and a member whose queue pair stands can read all of the
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

/// Queue pairs of each NIC to each peer, unless told otherwise: one reads while the other's blocks are summed.
pub const QPS_PER_PEER_DEFAULT: usize = 2;
/// How long a peer may read what was granted, unless told otherwise: some hundred times what a piece of 4 MiB takes.
pub const LEASE_DEFAULT: Duration = Duration::from_secs(5);
/// How long a stream on which blocks follow is kept before a queue pair is asked for again: a connection costs some
/// milliseconds.
const AGAIN: Duration = Duration::from_secs(10);

/// How blocks are carried.
#[derive(Clone, Debug)]
pub struct Config {
    /// How asks and grants travel: over as many streams as there are queue pairs, whatever number this gives. Its security
    /// does not hold for blocks read by RDMA: anybody on the way may read those.
    pub tcp: tcp::Config,
    /// Names of the NICs, such as mlx5_0; as many on every node.
    pub nics: Vec<String>,
    /// Queue pairs of each NIC to each peer; as many on every node.
    pub qps_per_peer: usize,
    /// How long a peer may read what was granted.
    pub lease: Duration,
}

/// The transport at work. Dropping it ends everything, as it does [`Tcp`].
pub struct Rdma {
    tcp: Tcp,
    queues: Arc<OnceLock<Queues>>,
}

/// By RDMA as soon as that can be, and on the streams themselves until then.
#[derive(Default)]
struct Ways {
    /// Once the NICs have registered the pool.
    queues: Arc<OnceLock<Queues>>,
    /// Peers of which it was noted that they have not registered theirs.
    late: Mutex<BTreeSet<PeerNumber>>,
}

/// A stream on which blocks follow.
struct Meanwhile {
    stream: Box<dyn Fetching>,
    queues: Arc<OnceLock<Queues>>,
    /// When there may be a queue pair instead.
    until: Instant,
}

/// What makes the queue pairs, of NICs that have registered the pool.
struct Queues {
    nics: Arc<[Nic]>,
    qps_per_peer: usize,
    lease: Duration,
}

/// Whether these NICs can be used: as [`Rdma::start`] finds them.
pub fn check(nics: &[String]) -> Result<(), Error> {
    verbs::open(nics).map(drop)
}

// === impl Config ===

impl Config {
    /// Two queue pairs of each of these NICs to each peer.
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
    /// Opens the NICs and listens, and serves and fetches from then on: over TCP until they have registered the pool, which
    /// goes on behind. `up` as for [`Tcp::start`].
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

    /// Where peers connect to.
    pub fn address(&self) -> SocketAddr {
        self.tcp.address()
    }

    /// Whether the NICs have registered the pool.
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
    /// What this side says of the queue pair that stream `number` has on NIC `nic`.
    fn queue(&self, number: u16, nic: usize, end: QueueEnd, key: u32) -> Queue {
        Queue { pairs: self.qps_per_peer as u16, number, nics: self.nodes(), nic: nic as u16, end, key }
    }

    fn nodes(&self) -> Vec<Option<u16>> {
        self.nics.iter().map(|nic| nic.node).collect()
    }

    /// Whether the other side has as many of everything.
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
