//! The data thread's interface to the mesh. It passes jobs to the transports and changes to the membership
//! thread; their events come back through two channels and one eventfd.

mod carriers;
mod listing;

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use mesh::control::{self, Asker, Control, News, Room};
use mesh::digest::{Change, Digest};
use mesh::refusals::RefusalCounts;
use mesh::transport::{self, BootId, Done, Fetch, Grant, Granted, PeerNumber};
use shm_protocol::blocks::Blocks;
use shm_protocol::pool::SlotRef;
use shm_protocol::wait;
use tiers::pool::Pool;

use self::carriers::Carriers;
pub use self::listing::Known;
use crate::config::Mesh;
use crate::core::{Heard, JobEnd};
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
pub enum Told {
    Heard(Heard),
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
pub struct Peers {
    control: Control,
    carriers: Carriers,
    refusals: Arc<RefusalCounts>,
    /// Events of the transports.
    ups: mpsc::Receiver<transport::Up>,
    /// An event taken from `ups` and not handed out yet.
    next: Option<transport::Up>,
    /// Cost of the transports' events since `news` was last read.
    ahead: usize,
    /// Events of the membership thread.
    news: mpsc::Receiver<News>,
    /// Changes of a peer not handed out yet, in order.
    rest: Option<(PeerNumber, std::vec::IntoIter<Change>, Room)>,
    wake: Arc<OwnedFd>,
    /// The names of members.
    names: BTreeMap<PeerNumber, String>,
    /// Members last reported as unreachable.
    down: BTreeSet<PeerNumber>,
    /// Changes for the peers.
    changes: Vec<Change>,
    /// The next list of promises for the peers, if it changed.
    promises: Option<Vec<Digest>>,
    /// Time before which the peers get no further reminder of a waiting request.
    next_wait: Duration,
    /// Set once the membership thread was told to end.
    left: Expected,
}

// === impl Told ===

impl Told {
    /// The cost of handling it, in blocks.
    pub fn cost(&self) -> usize {
        match self {
            Self::Ends(ends) => ends.len(),
            Self::Heard(Heard::Asked { blocks, .. }) => blocks.len(),
            Self::Heard(Heard::Changed { changes, .. }) => changes.len() / 2,
            // Even a short list is dear: every waiting request may be checked.
            Self::Heard(Heard::Promises { .. }) => TURN,
            Self::Heard(_) | Self::Checksum { .. } => 1,
        }
    }
}

// === impl Peers ===

impl Peers {
    /// Starts the transports, and then the membership thread, which announces their addresses.
    pub fn start(
        mesh: &Mesh,
        epoch: u64,
        pool: &Pool,
        known: Known,
        ended: &Arc<EndSignal>,
    ) -> Result<Self, StartError> {
        let wake = Arc::new(wait::eventfd().map_err(std::io::Error::from)?);
        let ((carrying, ups), (following, news)) = (mpsc::channel(), mpsc::channel());
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
        let blocks = Blocks::new(pool.shared_region());
        let (carriers, data) = Carriers::start(mesh, boot, &blocks, &refusals, up)?;
        let node = (mesh.node.clone(), boot);
        let follow = control::Config {
            mesh: mesh.name.clone(),
            former: pool.former_epoch().map(life),
            directory_bytes: mesh.directory_bytes,
            refusals: Arc::clone(&refusals),
            listing: Arc::new(known),
            ..control::Config::new(node, mesh.listen, data, mesh.members.clone(), mesh.security.clone())
        };
        let left = Expected::default();
        let (say, ending) = (say(&following, &wake), ended.on_exit_unless(&left));
        let control = Control::start(follow, move |said| {
            let _ = &ending;
            say(said);
        })?;
        let rdma = data.rdma.map(tracing::field::display);
        tracing::info!(node = %mesh.node, control = %control.address(), tcp = %data.tcp, rdma, "in the mesh");
        let (names, down) = Default::default();
        let (next, ahead, rest, changes, promises, next_wait) = Default::default();
        Ok(Self {
            control,
            carriers,
            refusals,
            ups,
            next,
            ahead,
            news,
            rest,
            wake,
            names,
            down,
            changes,
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
    pub fn asker(&self) -> Asker {
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
        self.carriers.fetch(fetch);
    }

    pub fn cancel(&self, ticket: u64) {
        self.carriers.cancel(ticket);
    }

    /// Grants slots to a peer for reading.
    pub fn grant(&self, ask: u64, slots: impl Iterator<Item = Option<Grant>>) {
        self.carriers.grant(Granted { ask, slots: slots.collect() });
    }

    /// Requests all keys of a peer again, because its filter is too small for them.
    pub fn resync(&self, peer: PeerNumber) {
        self.control.resync(peer);
    }

    /// Queues changes for [`Peers::flush`].
    pub fn publish(&mut self, changes: Vec<Change>) {
        self.changes.extend(changes);
    }

    /// Replaces the promises sent by [`Peers::flush`].
    pub fn promise(&mut self, promises: Vec<Digest>) {
        self.promises = Some(promises);
    }

    /// Interval of batches of changes to a peer.
    pub fn pace(&self) -> Duration {
        self.control.pace()
    }

    /// Asks peers to announce blocks sooner, because a request waits for one.
    pub fn wait(&mut self, now: Duration) {
        if now >= self.next_wait {
            self.next_wait = now + WAIT_EVERY;
            self.control.wait();
        }
    }

    /// Sends the queued changes and promises to the peers.
    pub fn flush(&mut self) {
        if !self.changes.is_empty() {
            self.control.publish(std::mem::take(&mut self.changes));
        }
        self.promises.take().into_iter().for_each(|promises| self.control.promise(promises));
    }

    /// Leaves the mesh; transfers in flight end by themselves.
    pub fn drain(&self) {
        self.left.set();
        self.control.drain();
        self.carriers.drain();
    }

    /// The next event. Transports and membership take turns, so neither waits without limit for the other.
    pub fn hear(&mut self) -> Option<Told> {
        if self.ahead < TURN / 2
            && let Some(told) = self.hear_carried()
        {
            self.ahead += told.cost().max(1);
            return Some(told);
        }
        self.ahead = 0;
        self.hear_news().map(Told::Heard).or_else(|| self.hear_carried())
    }

    fn hear_carried(&mut self) -> Option<Told> {
        loop {
            let said = self.next.take().or_else(|| self.ups.try_recv().ok())?;
            if let told @ Some(_) = self.carried(said) {
                return told;
            }
        }
    }

    fn hear_news(&mut self) -> Option<Heard> {
        loop {
            if let Some((peer, rest, _)) = &mut self.rest {
                let (peer, changes) = (*peer, rest.by_ref().take(CHANGES).collect::<Vec<Change>>());
                if !changes.is_empty() {
                    return Some(Heard::Changed { peer, changes });
                }
                self.rest = None;
            }
            let news = self.news.try_recv().ok()?;
            if let heard @ Some(_) = self.take_in(news) {
                return heard;
            }
        }
    }

    fn carried(&mut self, said: transport::Up) -> Option<Told> {
        Some(match said {
            transport::Up::Done(done) => Told::Ends(self.more(done)),
            transport::Up::Asked { ask, peer, blocks } => Told::Heard(Heard::Asked { ask, peer, blocks }),
            transport::Up::Release { ask, sent } => Told::Heard(Heard::Released { ask, sent }),
            transport::Up::Checksum { slot, checksum } => Told::Checksum { slot, checksum },
            transport::Up::Connected { peer, .. } => {
                self.down.remove(&peer);
                return None;
            }
            transport::Up::PeerDown { peer, fault } => {
                // A peer is logged once, until it can be reached again.
                if let Some(peer) = self.names.get(&peer).filter(|_| self.down.insert(peer)) {
                    tracing::warn!(peer, "blocks cannot be fetched from a peer: {fault}");
                }
                return None;
            }
            transport::Up::Note(text) => {
                tracing::warn!("{text}");
                return None;
            }
        })
    }

    /// Collects the end of a block and the ends queued behind it, up to [`DONES`].
    fn more(&mut self, done: Done) -> Vec<JobEnd> {
        let mut ends = vec![JobEnd::Peer(done)];
        while ends.len() < DONES
            && let Ok(up) = self.ups.try_recv()
        {
            match up {
                transport::Up::Done(done) => ends.push(JobEnd::Peer(done)),
                other => {
                    self.next = Some(other);
                    break;
                }
            }
        }
        ends
    }

    fn take_in(&mut self, news: News) -> Option<Heard> {
        Some(match news {
            News::Joined { number, peer, rdma } => {
                let (name, address) = (peer.node.to_string(), peer.address);
                let by_rdma = self.carriers.join(number, peer, rdma);
                let way = if by_rdma { "by RDMA once both have registered their pools" } else { "over TCP" };
                tracing::info!(peer = name, %address, "a peer joined; blocks travel {way}");
                self.names.insert(number, name);
                Heard::Joined(number)
            }
            News::Left { number, why } => {
                self.carriers.leave(number);
                self.down.remove(&number);
                let peer = self.names.remove(&number);
                tracing::info!(peer, "a peer left: {why}");
                Heard::Left(number)
            }
            News::Snapshot { number: peer, filter, .. } => Heard::Keeps { peer, filter },
            News::Changes { number, changes, room } => {
                self.rest = Some((number, changes.into_iter(), room));
                return None;
            }
            News::Promises { number: peer, promises, .. } => Heard::Promises { peer, promises },
            News::Stale { number } => {
                let peer = self.name(number);
                tracing::warn!(peer, "a peer sends nothing; its last known blocks stay in use");
                Heard::Promises { peer: number, promises: Vec::new() }
            }
            News::Note(text) => {
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
        wait::signal(&wake);
    }
}

impl std::fmt::Debug for Peers {
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
            let told = Told::Heard(Heard::Promises { peer: PeerNumber(1), promises });
            assert_eq!(told.cost(), TURN);
        }
    }
}
