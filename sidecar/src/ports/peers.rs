//! The mesh as the data thread sees it: what the core wants done goes down to what carries blocks and to what keeps track
//! of members; what both have to say comes back through a channel of each and one eventfd.

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

/// Changes of a peer that are handed out at once: 0.2 to 0.5 ms of a filter's work.
const CHANGES: usize = 1024;
/// While requests wait for blocks of peers, these are told so this often; they heed it for 2 s.
const WAIT_EVERY: Duration = Duration::from_secs(1);
/// Costs as much as the data thread takes in of the mesh in a turn.
const TURN: usize = 512;
/// Ends of blocks that are handed out at once.
const DONES: usize = 256;

/// What the data thread must know.
#[derive(Debug)]
pub enum Told {
    Heard(Heard),
    /// Ends of blocks of fetches.
    Ends(Vec<JobEnd>),
    /// For the header of a granted slot.
    Checksum {
        slot: SlotRef,
        /// XXH3-64 of its block.
        checksum: u64,
    },
}

/// The mesh, at work.
pub struct Peers {
    control: Control,
    carriers: Carriers,
    refusals: Arc<RefusalCounts>,
    /// What is said by what carries blocks.
    ups: mpsc::Receiver<transport::Up>,
    /// Taken from `ups`, and its turn has not come.
    next: Option<transport::Up>,
    /// What that has cost since there was last a look at `news`.
    ahead: usize,
    /// What is said of members.
    news: mpsc::Receiver<News>,
    /// Changes of a peer that were not handed out yet, in order.
    rest: Option<(PeerNumber, std::vec::IntoIter<Change>, Room)>,
    wake: Arc<OwnedFd>,
    /// Members, by what the user calls them.
    names: BTreeMap<PeerNumber, String>,
    /// Members that were last heard of as unreachable.
    down: BTreeSet<PeerNumber>,
    /// What peers are to be told.
    changes: Vec<Change>,
    /// What they are to be told is promised, if that is something else.
    promises: Option<Vec<Digest>>,
    /// Before that they are not told again that a request waits.
    next_wait: Duration,
    /// Whether the thread that keeps track of members was told to end.
    left: Expected,
}

// === impl Told ===

impl Told {
    /// What taking it in costs, in blocks.
    pub fn cost(&self) -> usize {
        match self {
            Self::Ends(ends) => ends.len(),
            Self::Heard(Heard::Asked { blocks, .. }) => blocks.len(),
            Self::Heard(Heard::Changed { changes, .. }) => changes.len() / 2,
            // However short: every request that waits may be looked at.
            Self::Heard(Heard::Promises { .. }) => TURN,
            Self::Heard(_) | Self::Checksum { .. } => 1,
        }
    }
}

// === impl Peers ===

impl Peers {
    /// Starts what carries blocks, and then what tells the peers where.
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
        // Each lives as long as threads of its part do: their end is the sidecar's, but for one that was told to end.
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

    /// Becomes readable whenever something is said; watched by edge, never read.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Addresses of peers at which none is a member.
    pub fn endpoints_empty(&self) -> usize {
        self.control.endpoints_empty()
    }

    /// Names of --peer that did not resolve when they were last looked up.
    pub fn names_unresolved(&self) -> usize {
        self.control.names_unresolved()
    }

    /// Where peers are asked for their namespaces.
    pub fn asker(&self) -> Asker {
        self.control.asker()
    }

    /// How often peers were turned away, and this node, by reason.
    pub fn refusals(&self) -> &RefusalCounts {
        &self.refusals
    }

    /// What a member is called.
    pub fn name(&self, peer: PeerNumber) -> Option<&str> {
        self.names.get(&peer).map(String::as_str)
    }

    pub fn fetch(&self, fetch: Fetch) {
        self.carriers.fetch(fetch);
    }

    pub fn cancel(&self, ticket: u64) {
        self.carriers.cancel(ticket);
    }

    /// Lets a peer read slots.
    pub fn grant(&self, ask: u64, slots: impl Iterator<Item = Option<Grant>>) {
        self.carriers.grant(Granted { ask, slots: slots.collect() });
    }

    /// A filter is too small for what its peer has.
    pub fn resync(&self, peer: PeerNumber) {
        self.control.resync(peer);
    }

    /// Takes what peers are to be told; [`Peers::flush`] tells them.
    pub fn publish(&mut self, changes: Vec<Change>) {
        self.changes.extend(changes);
    }

    /// Takes what peers are to be told is promised, in place of what was.
    pub fn promise(&mut self, promises: Vec<Digest>) {
        self.promises = Some(promises);
    }

    /// The time between two batches of changes to a peer.
    pub fn pace(&self) -> Duration {
        self.control.pace()
    }

    /// A request waits for a block that a peer may be about to have: they are to tell this node sooner.
    pub fn wait(&mut self, now: Duration) {
        if now >= self.next_wait {
            self.next_wait = now + WAIT_EVERY;
            self.control.wait();
        }
    }

    /// Tells the peers what was taken for them.
    pub fn flush(&mut self) {
        if !self.changes.is_empty() {
            self.control.publish(std::mem::take(&mut self.changes));
        }
        self.promises.take().into_iter().for_each(|promises| self.control.promise(promises));
    }

    /// Is no member any more; what is under way ends by itself.
    pub fn drain(&self) {
        self.left.set();
        self.control.drain();
        self.carriers.drain();
    }

    /// What is said next: blocks do not wait behind what changes at peers, nor that for ever behind blocks.
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
                // Once, until it answers again.
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

    /// An end of a block, and those that came right behind it.
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

/// What says something to the data thread, and wakes it.
fn say<T: Send + 'static>(to: &mpsc::Sender<T>, wake: &Arc<OwnedFd>) -> impl Fn(T) + Send + Sync + 'static {
    let (to, wake) = (to.clone(), Arc::clone(wake));
    move |said| {
        // Nobody asks any more: the sidecar ends.
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
