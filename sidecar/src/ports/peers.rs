//! The data thread's interface to the mesh. It passes jobs to the transports and changes to the membership
//! thread; their events come back through two channels and one eventfd.

mod listing;
mod transports;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use mesh::control::{self, BacklogRoom, Control, MemberEvent, NamespaceAsker};
use mesh::digest::{Digest, DigestChange};
use mesh::listed::BlocksAsk;
use mesh::refusals::RefusalCounts;
use mesh::transport::{self, BootId, Fetch, FetchDone, Grant, GrantedSlots, PeerNumber};
use shm_protocol::blocks::PoolBlocks;
use shm_protocol::pool::SlotRef;
use shm_protocol::wait;
use tiers::pool::Pool;

pub use self::listing::CatalogListing;
use self::transports::Transports;
use crate::config::Mesh;
use crate::core::{JobEnd, MeshEvent};
use crate::error::StartError;
use crate::system::wake::{EndSignal, Expected};

/// Changes of one peer handed out at once: 0.2 to 0.5 ms of work on its filter.
const CHANGES: usize = 1024;
/// Interval of reminders to peers while requests wait for their blocks; a peer heeds one for 2 s.
const WAIT_EVERY: Duration = Duration::from_secs(1);
/// Largest cost of mesh events in a turn of the data thread.
const TURN: usize = 512;
/// Ended blocks handed out at once.
const DONES: usize = 256;

/// An event of the mesh for the data thread.
#[derive(Debug)]
pub enum PeersEvent {
    Mesh(MeshEvent),
    /// Ends of fetched blocks.
    Ends(Vec<JobEnd>),
    /// The checksum for the header of a granted slot.
    Checksum {
        slot: SlotRef,
        /// XXH3-64 of its block.
        checksum: u64,
    },
}

/// The running mesh.
pub struct PeersPort {
    control: Control,
    transports: Transports,
    refusals: Arc<RefusalCounts>,
    /// Events of the transports.
    ups: mpsc::Receiver<transport::TransportEvent>,
    /// An event taken from `ups` and not handed out yet.
    next: Option<transport::TransportEvent>,
    /// Cost of the transports' events since `member_events` was last read.
    ahead: usize,
    /// Events of the membership thread.
    member_events: mpsc::Receiver<MemberEvent>,
    /// Changes of a peer not handed out yet, in order.
    rest: Option<(PeerNumber, std::vec::IntoIter<DigestChange>, BacklogRoom)>,
    wake: Arc<OwnedFd>,
    /// The names of members.
    names: BTreeMap<PeerNumber, String>,
    /// Members last reported as unreachable.
    down: BTreeSet<PeerNumber>,
    /// Changes for the peers, and true if these are not to be gathered while a peer waits.
    changes: Vec<DigestChange>,
    at_once: bool,
    /// The next list of promises for the peers, if it changed.
    promises: Option<Vec<Digest>>,
    /// Time before which the peers get no further reminder of a waiting request.
    next_wait: Duration,
    /// Set once the membership thread was told to end.
    left: Expected,
}

// === impl PeersEvent ===

impl PeersEvent {
    /// The cost of handling it, in blocks.
    pub fn cost(&self) -> usize {
        match self {
            Self::Ends(ends) => ends.len(),
            Self::Mesh(MeshEvent::Asked { blocks, .. }) => blocks.len(),
            Self::Mesh(MeshEvent::Changed { changes, .. }) => changes.len() / 2,
            Self::Mesh(MeshEvent::Listed { blocks, .. }) => blocks.len() / 8,
            // Even a short list is dear: every waiting request may be checked.
            Self::Mesh(MeshEvent::Promises { .. }) => TURN,
            Self::Mesh(_) | Self::Checksum { .. } => 1,
        }
    }
}

// === impl PeersPort ===

impl PeersPort {
    /// Starts the transports, and then the membership thread, which announces their addresses.
    pub fn start_mesh(
        mesh: &Mesh,
        epoch: u64,
        pool: &Pool,
        known: CatalogListing,
        ended: &Arc<EndSignal>,
    ) -> Result<Self, StartError> {
        let wake = Arc::new(wait::make_eventfd().map_err(std::io::Error::from)?);
        let ((carrying, ups), (following, member_events)) = (mpsc::channel(), mpsc::channel());
        let life = |epoch| BootId(NonZeroU64::new(epoch).unwrap_or(NonZeroU64::MIN));
        let boot = life(epoch);
        // Held by the threads of each part. The sidecar ends when they do, unless they were told to end.
        let up = || {
            let (say, ending) = (say(&carrying, &wake), ended.on_exit());
            move |said| {
                let _ = &ending;
                say(said);
            }
        };
        let refusals = Arc::default();
        let blocks = PoolBlocks::new(pool.shared_region());
        let (transports, data) = Transports::start_transports(mesh, boot, &blocks, &refusals, up)?;
        let node = (mesh.node.clone(), boot);
        let follow = control::ControlConfig {
            mesh: mesh.name.clone(),
            former: pool.former_epoch().map(life),
            directory_bytes: mesh.directory_bytes,
            refusals: Arc::clone(&refusals),
            listing: Arc::new(known),
            engines: mesh.engines.clone(),
            ..control::ControlConfig::new(
                node,
                mesh.listen,
                data,
                mesh.members.clone(),
                mesh.security.clone(),
            )
        };
        let left = Expected::default();
        let (say, ending) = (say(&following, &wake), ended.on_exit_unless(&left));
        let control = Control::start(follow, move |said| {
            let _ = &ending;
            say(said);
        })?;
        let rdma = data.rdma.map(tracing::field::display);
        let listen = control.listen_address().map(tracing::field::display);
        tracing::info!(node = %mesh.node, control = listen, tcp = %data.tcp, rdma, "in the mesh");
        let (names, down) = Default::default();
        let (next, ahead, rest, changes, at_once, promises, next_wait) = Default::default();
        Ok(Self {
            control,
            transports,
            refusals,
            ups,
            next,
            ahead,
            member_events,
            rest,
            wake,
            names,
            down,
            changes,
            at_once,
            promises,
            next_wait,
            left,
        })
    }

    /// A descriptor, readable at each event; edge-triggered, never read.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Number of addresses of peers without a member.
    pub fn endpoints_empty(&self) -> usize {
        self.control.endpoints_empty()
    }

    /// Number of names of --peer that did not resolve at the last look-up.
    pub fn names_unresolved(&self) -> usize {
        self.control.names_unresolved()
    }

    /// The handle for requests to peers for their namespaces.
    pub fn asker(&self) -> NamespaceAsker {
        self.control.asker()
    }

    /// Counts of refusals of peers and by peers, by reason.
    pub fn refusals(&self) -> &RefusalCounts {
        &self.refusals
    }

    /// The name of a member.
    pub fn name(&self, peer: PeerNumber) -> Option<&str> {
        self.names.get(&peer).map(String::as_str)
    }

    pub fn fetch(&self, fetch: Fetch) {
        self.transports.fetch(fetch);
    }

    pub fn cancel(&self, ticket: u64) {
        self.transports.cancel(ticket);
    }

    /// Grants slots to a peer for reading.
    pub fn grant_slots(&self, ask: u64, slots: impl Iterator<Item = Option<Grant>>) {
        self.transports.grant_slots(GrantedSlots { ask, slots: slots.collect() });
    }

    /// Requests all keys of a peer again, because its filter is too small for them.
    pub fn resync(&self, peer: PeerNumber) {
        self.control.resync(peer);
    }

    /// Asks a peer for its best blocks.
    pub fn ask_blocks(&self, peer: PeerNumber, ask: BlocksAsk) {
        self.control.ask_blocks(peer, ask);
    }

    /// Tells the peers that this sidecar is about to leave; [`PeersPort::drain`] follows.
    pub fn leave(&self) {
        self.control.leave();
    }

    /// Queues changes for [`PeersPort::flush_changes`].
    pub fn push_changes(&mut self, changes: Vec<DigestChange>, at_once: bool) {
        self.changes.extend(changes);
        self.at_once |= at_once;
    }

    /// Replaces the promises sent by [`PeersPort::flush_changes`].
    pub fn push_promises(&mut self, promises: Vec<Digest>) {
        self.promises = Some(promises);
    }

    /// Interval of batches of changes to a peer.
    pub fn pace(&self) -> Duration {
        self.control.pace()
    }

    /// Asks peers to announce blocks sooner, because a request waits for one.
    pub fn announce_wait(&mut self, now: Duration) {
        if now >= self.next_wait {
            self.next_wait = now + WAIT_EVERY;
            self.control.announce_wait();
        }
    }

    /// Sends the queued changes and promises to the peers.
    pub fn flush_changes(&mut self) {
        if !self.changes.is_empty() {
            self.control.publish(std::mem::take(&mut self.changes), std::mem::take(&mut self.at_once));
        }
        self.promises.take().into_iter().for_each(|promises| self.control.promise(promises));
    }

    /// Leaves the mesh; transfers in flight end by themselves.
    pub fn drain(&self) {
        self.left.set_expected();
        self.control.drain();
        self.transports.drain();
    }

    /// The next event. Transports and membership take turns, so neither waits without limit for the other.
    pub fn next_event(&mut self) -> Option<PeersEvent> {
        if self.ahead < TURN / 2
            && let Some(event) = self.next_transport_event()
        {
            self.ahead += event.cost().max(1);
            return Some(event);
        }
        self.ahead = 0;
        self.next_member_event().map(PeersEvent::Mesh).or_else(|| self.next_transport_event())
    }

    fn next_transport_event(&mut self) -> Option<PeersEvent> {
        loop {
            let said = self.next.take().or_else(|| self.ups.try_recv().ok())?;
            if let event @ Some(_) = self.carried(said) {
                return event;
            }
        }
    }

    fn next_member_event(&mut self) -> Option<MeshEvent> {
        loop {
            if let Some((peer, rest, _)) = &mut self.rest {
                let (peer, changes) = (*peer, rest.by_ref().take(CHANGES).collect::<Vec<DigestChange>>());
                if !changes.is_empty() {
                    return Some(MeshEvent::Changed { peer, changes });
                }
                self.rest = None;
            }
            let event = self.member_events.try_recv().ok()?;
            if let event @ Some(_) = self.take_in(event) {
                return event;
            }
        }
    }

    fn carried(&mut self, said: transport::TransportEvent) -> Option<PeersEvent> {
        Some(match said {
            transport::TransportEvent::Done(done) => PeersEvent::Ends(self.more(done)),
            transport::TransportEvent::Asked { ask, peer, blocks, standing } => {
                PeersEvent::Mesh(MeshEvent::Asked { ask, peer, blocks, standing })
            }
            transport::TransportEvent::Withdrawn { ask } => PeersEvent::Mesh(MeshEvent::Withdrawn { ask }),
            transport::TransportEvent::Release { ask, sent } => {
                PeersEvent::Mesh(MeshEvent::Released { ask, sent })
            }
            transport::TransportEvent::Checksum { slot, checksum } => PeersEvent::Checksum { slot, checksum },
            transport::TransportEvent::Connected { peer, .. } => {
                self.down.remove(&peer);
                return None;
            }
            transport::TransportEvent::PeerDown { peer, fault } => {
                // A peer is logged once, until it can be reached again.
                if let Some(peer) = self.names.get(&peer).filter(|_| self.down.insert(peer)) {
                    tracing::warn!(peer, "blocks cannot be fetched from a peer: {fault}");
                }
                return None;
            }
            transport::TransportEvent::Note(text) => {
                tracing::warn!("{text}");
                return None;
            }
        })
    }

    /// Collects the end of a block and the ends queued behind it, up to [`DONES`].
    fn more(&mut self, done: FetchDone) -> Vec<JobEnd> {
        let mut ends = vec![JobEnd::Peer(done)];
        while ends.len() < DONES
            && let Ok(up) = self.ups.try_recv()
        {
            match up {
                transport::TransportEvent::Done(done) => ends.push(JobEnd::Peer(done)),
                other => {
                    self.next = Some(other);
                    break;
                }
            }
        }
        ends
    }

    fn take_in(&mut self, event: MemberEvent) -> Option<MeshEvent> {
        Some(match event {
            MemberEvent::Joined { number, peer, rdma } => {
                let (name, address) = (peer.node.to_string(), peer.address);
                let by_rdma = self.transports.add_peer(number, peer, rdma);
                let way = if by_rdma { "by RDMA once both have registered their pools" } else { "over TCP" };
                tracing::info!(peer = name, %address, "a peer joined; blocks travel {way}");
                self.names.insert(number, name);
                MeshEvent::Joined(number)
            }
            MemberEvent::Greeted { number: peer, keeps_asks, lists_blocks, .. } => {
                MeshEvent::Greeted { peer, keeps_asks, lists_blocks }
            }
            MemberEvent::Leaving { number } => {
                tracing::info!(peer = self.name(number), "a peer is about to leave, and lists its blocks");
                MeshEvent::Leaving(number)
            }
            MemberEvent::Listed { number: peer, ask, blocks } => MeshEvent::Listed { peer, ask, blocks },
            MemberEvent::Left { number, why } => {
                self.transports.remove_peer(number);
                self.down.remove(&number);
                let peer = self.names.remove(&number);
                tracing::info!(peer, "a peer left: {why}");
                MeshEvent::Left(number)
            }
            MemberEvent::Snapshot { number: peer, filter, .. } => MeshEvent::Keeps { peer, filter },
            MemberEvent::Changes { number, changes, room } => {
                self.rest = Some((number, changes.into_iter(), room));
                return None;
            }
            MemberEvent::Promises { number: peer, promises, .. } => MeshEvent::Promises { peer, promises },
            MemberEvent::Stale { number } => {
                let peer = self.name(number);
                tracing::warn!(peer, "a peer sends nothing; its last known blocks stay in use");
                MeshEvent::Promises { peer: number, promises: Vec::new() }
            }
            MemberEvent::Note(text) => {
                tracing::warn!("{text}");
                return None;
            }
        })
    }
}

/// Makes a function that sends an event to the data thread and wakes it.
fn say<T: Send + 'static>(to: &mpsc::Sender<T>, wake: &Arc<OwnedFd>) -> impl Fn(T) + Send + Sync + 'static {
    let (to, wake) = (to.clone(), Arc::clone(wake));
    move |said| {
        // The receiver is gone when the sidecar ends.
        let _ = to.send(said);
        wait::signal_eventfd(&wake);
    }
}

impl std::fmt::Debug for PeersPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Peers").field("names", &self.names).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_promised_is_a_turn_s_work_however_short_it_is() {
        for promises in [Vec::new(), vec![Digest(1)]] {
            let event = PeersEvent::Mesh(MeshEvent::Promises { peer: PeerNumber(1), promises });
            assert_eq!(event.cost(), TURN);
        }
    }
}
