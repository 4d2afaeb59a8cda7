//! The transports of blocks: RDMA between two nodes with NICs, TCP otherwise.
//!
//! Both sides choose the same transport when a peer joins. The caller numbers tickets, so a cancellation may
//! go to both transports. Each transport numbers its own asks; the lowest bit of an ask names the transport
//! to the caller.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use mesh::control::DataAddresses;
use mesh::refusals::RefusalCounts;
use mesh::transport::rdma::{self, Rdma};
use mesh::transport::tcp::{self, Tcp};
use mesh::transport::{BootId, Fetch, GrantedSlots, Peer, PeerNumber, Transport, TransportEvent};
use shm_protocol::blocks::PoolBlocks;

use crate::config::Mesh;

/// The lowest bit of the asks of each transport.
const TCP: u64 = 0;
const RDMA: u64 = 1;

/// TCP, and RDMA on a node with NICs.
pub(super) struct Transports {
    tcp: Box<dyn Transport>,
    rdma: Option<Box<dyn Transport>>,
    /// Members reached over RDMA.
    by_rdma: BTreeSet<PeerNumber>,
}

// === impl Transports ===

impl Transports {
    /// Starts the transports of this node, and returns their addresses. Each gets its own `up`.
    pub(super) fn start_transports<F: Fn(TransportEvent) + Send + Sync + 'static>(
        mesh: &Mesh,
        boot: BootId,
        blocks: &PoolBlocks,
        refusals: &Arc<RefusalCounts>,
        up: impl Fn() -> F,
    ) -> Result<(Self, DataAddresses), ::mesh::MeshError> {
        let own = |listen| tcp::TcpConfig {
            listen,
            refusals: Arc::clone(refusals),
            ..tcp::TcpConfig::new(mesh.node.clone(), boot, mesh.security.clone())
        };
        let say = up();
        let config = tcp::TcpConfig { streams: mesh.tcp.streams, ..own(mesh.tcp.listen) };
        let tcp = Tcp::start(config, blocks.clone(), move |said| say(tagged(said, TCP)))?;
        let mut at = DataAddresses { tcp: tcp.listen_address(), rdma: None };
        let mut transports = Self::new(Box::new(tcp), None);
        if let Some(nics) = &mesh.rdma {
            let say = up();
            let config = rdma::RdmaConfig {
                qps_per_peer: nics.qps_per_peer,
                ..rdma::RdmaConfig::new(own(nics.listen), nics.names.clone())
            };
            let rdma = Rdma::start(config, blocks.clone(), move |said| say(tagged(said, RDMA)))?;
            at.rdma = Some(rdma.listen_address());
            transports.rdma = Some(Box::new(rdma));
        }
        Ok((transports, at))
    }

    fn new(tcp: Box<dyn Transport>, rdma: Option<Box<dyn Transport>>) -> Self {
        Self { tcp, rdma, by_rdma: BTreeSet::new() }
    }

    /// Adds a member; `rdma` is the address of its RDMA handshakes, if it has NICs. Returns true if its
    /// blocks travel over RDMA.
    pub(super) fn add_peer(&mut self, number: PeerNumber, peer: Peer, rdma: Option<SocketAddr>) -> bool {
        match (&self.rdma, rdma) {
            (Some(transport), Some(address)) => {
                self.by_rdma.insert(number);
                transport.add_peer(number, Peer { address, ..peer });
                true
            }
            _ => {
                self.tcp.add_peer(number, peer);
                false
            }
        }
    }

    /// Removes a member.
    pub(super) fn remove_peer(&mut self, number: PeerNumber) {
        self.of_peer(number).remove_peer(number);
        self.by_rdma.remove(&number);
    }

    pub(super) fn fetch(&self, fetch: Fetch) {
        self.of_peer(fetch.peer).post_fetch(fetch);
    }

    /// Cancels a fetch in both transports.
    pub(super) fn cancel(&self, ticket: u64) {
        self.all().for_each(|transport| transport.cancel(ticket));
    }

    pub(super) fn grant_slots(&self, granted: GrantedSlots) {
        let (ask, whose) = (granted.ask >> 1, granted.ask & 1);
        let transport = if whose == RDMA { self.rdma.as_ref() } else { None };
        transport.unwrap_or(&self.tcp).grant_slots(GrantedSlots { ask, ..granted });
    }

    /// Stops accepting new work.
    pub(super) fn drain(&self) {
        self.all().for_each(|transport| transport.drain());
    }

    fn of_peer(&self, peer: PeerNumber) -> &dyn Transport {
        let rdma = self.rdma.as_ref().filter(|_| self.by_rdma.contains(&peer));
        &**rdma.unwrap_or(&self.tcp)
    }

    fn all(&self) -> impl Iterator<Item = &dyn Transport> {
        std::iter::once(&self.tcp).chain(&self.rdma).map(|transport| &**transport)
    }
}

/// Tags the ask of a transport's event.
fn tagged(said: TransportEvent, whose: u64) -> TransportEvent {
    let tag = |ask: u64| ask << 1 | whose;
    match said {
        TransportEvent::Asked { ask, peer, blocks, standing } => {
            TransportEvent::Asked { ask: tag(ask), peer, blocks, standing }
        }
        TransportEvent::Withdrawn { ask } => TransportEvent::Withdrawn { ask: tag(ask) },
        TransportEvent::Release { ask, sent } => TransportEvent::Release { ask: tag(ask), sent },
        said @ (TransportEvent::Done(_)
        | TransportEvent::Checksum { .. }
        | TransportEvent::Connected { .. }
        | TransportEvent::PeerDown { .. }
        | TransportEvent::Note(_)) => said,
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;
    use std::sync::Mutex;
    use std::time::Duration;

    use mesh::transport::NodeId;

    use super::*;

    /// The calls of both transports, in order.
    type Log = Arc<Mutex<Vec<String>>>;

    struct Recorder(&'static str, Log);

    impl Recorder {
        fn note(&self, text: String) {
            self.1.lock().unwrap().push(format!("{}: {text}", self.0));
        }
    }

    impl Transport for Recorder {
        fn add_peer(&self, number: PeerNumber, peer: Peer) {
            self.note(format!("join {} at {}", number.0, peer.address));
        }
        fn remove_peer(&self, number: PeerNumber) {
            self.note(format!("leave {}", number.0));
        }
        fn post_fetch(&self, fetch: Fetch) {
            self.note(format!("fetch {} from {}", fetch.ticket, fetch.peer.0));
        }
        fn cancel(&self, ticket: u64) {
            self.note(format!("cancel {ticket}"));
        }
        fn grant_slots(&self, granted: GrantedSlots) {
            self.note(format!("grant {}", granted.ask));
        }
        fn drain(&self) {
            self.note("drain".into());
        }
    }

    fn transports(nics: bool) -> (Transports, Log) {
        let log = Log::default();
        let recorder = |name| -> Box<dyn Transport> { Box::new(Recorder(name, Arc::clone(&log))) };
        (Transports::new(recorder("tcp"), nics.then(|| recorder("rdma"))), log)
    }

    fn peer() -> Peer {
        let boot = Some(BootId(NonZeroU64::MIN));
        Peer { node: NodeId::new("a").unwrap(), boot, address: "10.0.0.1:2".parse().unwrap() }
    }

    fn fetch(ticket: u64, peer: u32) -> Fetch {
        Fetch { ticket, peer: PeerNumber(peer), blocks: Vec::new(), deadline: Duration::ZERO, standing: None }
    }

    fn take(log: &Log) -> Vec<String> {
        std::mem::take(&mut log.lock().unwrap())
    }

    const NICS_AT: &str = "10.0.0.1:3";

    #[test]
    fn blocks_travel_by_rdma_between_nodes_that_both_have_nics_and_over_tcp_between_others() {
        let (mut own, log) = transports(true);
        assert!(own.add_peer(PeerNumber(1), peer(), Some(NICS_AT.parse().unwrap())));
        assert!(!own.add_peer(PeerNumber(2), peer(), None));
        own.fetch(fetch(7, 1));
        own.fetch(fetch(8, 2));
        own.remove_peer(PeerNumber(1));
        own.remove_peer(PeerNumber(2));
        assert_eq!(
            take(&log),
            [
                "rdma: join 1 at 10.0.0.1:3",
                "tcp: join 2 at 10.0.0.1:2",
                "rdma: fetch 7 from 1",
                "tcp: fetch 8 from 2",
                "rdma: leave 1",
                "tcp: leave 2",
            ]
        );
        own.cancel(7);
        own.drain();
        assert_eq!(take(&log), ["tcp: cancel 7", "rdma: cancel 7", "tcp: drain", "rdma: drain"]);
    }

    #[test]
    fn a_node_without_nics_does_not_care_who_has_some() {
        let (mut own, log) = transports(false);
        assert!(!own.add_peer(PeerNumber(1), peer(), Some(NICS_AT.parse().unwrap())));
        own.fetch(fetch(7, 1));
        own.cancel(7);
        assert_eq!(take(&log), ["tcp: join 1 at 10.0.0.1:2", "tcp: fetch 7 from 1", "tcp: cancel 7"]);
    }

    #[test]
    fn an_answer_goes_to_the_transport_that_asked() {
        let (own, log) = transports(true);
        let mut asks = Vec::new();
        for (ask, whose) in [(5, TCP), (5, RDMA), (6, RDMA), (6, TCP)] {
            let asked = tagged(
                TransportEvent::Asked { ask, peer: PeerNumber(1), blocks: Vec::new(), standing: None },
                whose,
            );
            let TransportEvent::Asked { ask: known, .. } = asked else { panic!("{asked:?}") };
            assert!(!asks.contains(&known), "two asks have one number");
            assert_eq!(
                tagged(TransportEvent::Release { ask, sent: 1 }, whose),
                TransportEvent::Release { ask: known, sent: 1 }
            );
            asks.push(known);
            own.grant_slots(GrantedSlots { ask: known, slots: Vec::new() });
        }
        assert_eq!(take(&log), ["tcp: grant 5", "rdma: grant 5", "rdma: grant 6", "tcp: grant 6"]);
    }
}
