//! Blocks by RDMA: the side that asks READs them out of the owner's pool, whose processor moves no byte.
//!
//! Asks, grants and the end of each lease go over the streams of the TCP transport ([`super::tcp`]): its greeting, TLS,
//! limits and back-off are these. Each stream has a queue pair ([`verbs`]), which lives and dies with it, on a NIC of
//! either side ([`pairing`]). The owner ends a lease that is late by destroying the queue pair before it gives the slots
//! back, so that a late READ fails instead of reading what lies there next.
//!
//! What travels by RDMA is neither encrypted nor authenticated, and a member whose queue pair stands can read all of the
//! pool: see docs/decisions/0015.

mod fetch;
mod pairing;
mod serve;
mod verbs;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tiers::Blocks;

use self::verbs::Nic;
use super::tcp::carriage::{Carriage, Fetching};
use super::tcp::fetch::refuse;
use super::tcp::frame::lease::{LEASE_MS_MAX, NICS_MAX, Queue, QueueEnd};
use super::tcp::link::Link;
use super::tcp::wire::Wire;
use super::tcp::{self, Limits, STREAMS_MAX, Security, Shared, Tcp};
use super::{BootId, Fault, Fetch, Granted, NodeId, Peer, PeerNumber, Refusal, Transport, Up};
use crate::Error;

/// Queue pairs of each NIC to each peer, unless told otherwise: one reads while the other's blocks are summed.
pub const QPS_PER_PEER_DEFAULT: usize = 2;
/// How long a peer may read what was granted, unless told otherwise: some hundred times what a piece of 4 MiB takes.
pub const LEASE_DEFAULT: Duration = Duration::from_secs(5);

/// How blocks are carried.
#[derive(Clone, Debug)]
pub struct Config {
    /// This node.
    pub node: NodeId,
    /// This life of it.
    pub boot: BootId,
    /// Where peers connect to, over TCP.
    pub listen: SocketAddr,
    /// Names of the NICs, such as mlx5_0; as many on every node.
    pub nics: Vec<String>,
    /// Queue pairs of each NIC to each peer; as many on every node.
    pub qps_per_peer: usize,
    /// How long a peer may read what was granted.
    pub lease: Duration,
    /// Who may connect, and who may read along on the streams. Blocks themselves anybody on the way may read.
    pub security: Security,
    /// How long anything may take.
    pub limits: Limits,
}

/// The transport at work. Dropping it ends everything, as it does [`Tcp`].
pub struct Rdma {
    tcp: Tcp,
    nics: Arc<[Nic]>,
}

/// What makes the queue pairs.
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
    /// Two queue pairs of each of these NICs to each peer, reached at any free port of loopback alone.
    pub fn new(node: NodeId, boot: BootId, nics: Vec<String>, security: Security) -> Self {
        Self {
            node,
            boot,
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            nics,
            qps_per_peer: QPS_PER_PEER_DEFAULT,
            lease: LEASE_DEFAULT,
            security,
            limits: Limits::default(),
        }
    }

    fn check(&self) -> Result<(), Error> {
        let count = self.nics.len();
        if !(1..=NICS_MAX).contains(&count) {
            return Err(Error::Queues(format!("{count} NICs are named: name 1 to {NICS_MAX}")));
        }
        let most = STREAMS_MAX / count;
        if !(1..=most).contains(&self.qps_per_peer) {
            let wanted = self.qps_per_peer;
            return Err(Error::Queues(format!(
                "{wanted} queue pairs of each NIC to a peer: give 1 to {most} with {count} NICs"
            )));
        }
        if !(1..=LEASE_MS_MAX.into()).contains(&self.lease.as_millis()) {
            let lease = self.lease;
            return Err(Error::Queues(format!("a lease of {lease:?}: give 1 to {LEASE_MS_MAX} ms")));
        }
        Ok(())
    }
}

// === impl Rdma ===

impl Rdma {
    /// Opens the NICs and listens; serves and fetches once they have registered the pool, which goes on behind: until then
    /// it answers that it is busy. `up` as for [`Tcp::start`].
    pub fn start(
        config: Config,
        blocks: Blocks,
        up: impl Fn(Up) + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        config.check()?;
        let nics: Arc<[Nic]> = verbs::open(&config.nics)?.into();
        let Config { node, boot, listen, qps_per_peer, lease, security, limits, .. } = config;
        let queues = Queues { nics: Arc::clone(&nics), qps_per_peer, lease };
        let streams = nics.len() * qps_per_peer;
        let config = tcp::Config { node, boot, listen, streams, security, limits };
        let tcp = Tcp::with(Box::new(queues), config, blocks.clone(), Box::new(up))?;
        let (shared, registering) = (Arc::clone(&tcp.shared), Arc::clone(&nics));
        let register = move || {
            for nic in registering.iter() {
                if let Err(problem) = nic.register(&blocks) {
                    return shared.note(format!("no block will travel by RDMA: {problem}"));
                }
            }
        };
        tcp.shared.threads.spawn("mesh-register".into(), register)?;
        Ok(Self { tcp, nics })
    }

    /// Where peers connect to.
    pub fn address(&self) -> SocketAddr {
        self.tcp.address()
    }

    /// Whether the NICs have registered the pool.
    pub fn ready(&self) -> bool {
        self.nics.iter().all(|nic| nic.key().is_some())
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
        if self.ready() {
            self.tcp.post(fetch);
        } else {
            refuse(&self.tcp.shared, &fetch, Refusal::Busy);
        }
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

impl Carriage for Queues {
    fn fetch(
        &self,
        number: usize,
        shared: &Arc<Shared>,
        link: &Arc<Link>,
        wire: Wire,
    ) -> Result<Box<dyn Fetching>, Fault> {
        Ok(Box::new(fetch::Reader::connect(self, number, shared, link, wire)?))
    }

    fn serve(&self, shared: &Shared, link: Arc<Link>, wire: Wire) {
        serve::serve(self, shared, &link, wire);
    }
}
