//! Nodes of a small mesh for tests: a pool, the transport, and one thread that decides as a sidecar does.

#![allow(dead_code, reason = "each test uses its part")]

pub(crate) mod certificates;
pub(crate) mod crew;
pub(crate) mod proxy;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use mesh::refusals::{Reason, RefusalCounts};
use mesh::transport::tcp::{Security, Tcp, TcpConfig, TcpLimits};
use mesh::transport::{
    BootId, Fetch, FetchDone, FetchFault, Grant, GrantedSlots, Label, NodeId, Peer, PeerNumber,
    StandingTerms, Transport, TransportEvent,
};
use rustix::fs::MemfdFlags;
use shm_protocol::blocks::PoolBlocks;
use shm_protocol::key::{BlockHash, NamespaceDigest};
use shm_protocol::pool::{SEGMENT_ALIGN, SlotRef};
use shm_protocol::random::Random;
use shm_protocol::region::{Access, Region};
use xxhash_rust::xxh3::xxh3_64;

/// Maximum time for a test to wait for anything.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(60);
/// Long enough for every fetch of a test without limits of its own.
pub(crate) const LONG: Duration = Duration::from_secs(30);
/// Slots of a pool, and the bytes of each.
const SLOTS: (u64, u64) = (512, 512 << 10);

/// Limits beyond the reach of any test, even on a busy machine, with short pauses.
pub(crate) fn patient() -> TcpLimits {
    TcpLimits {
        connect: LONG,
        handshake: LONG,
        first_byte: LONG,
        progress: LONG,
        whole: LONG,
        idle: Duration::from_secs(60),
        back_off_min: Duration::from_millis(5),
        back_off_max: Duration::from_millis(50),
    }
}

pub(crate) fn boot(number: u64) -> BootId {
    BootId(NonZeroU64::new(number).unwrap())
}

pub(crate) fn node(name: &str) -> NodeId {
    NodeId::new(name).unwrap()
}

/// Block `number` in `bytes` bytes.
pub(crate) fn label(number: u64, bytes: u32) -> Label {
    let hash = BlockHash::from_words([number, !number, 1, 2]);
    Label { namespace: NamespaceDigest([7; 16]), group: 0, hash, bytes }
}

/// The bytes of a block: its pages differ from each other and from those of any other block.
pub(crate) fn content(label: &Label) -> Vec<u8> {
    let mut random = Random(label.hash.words()[0]);
    let page: Vec<u8> = (0..512).flat_map(|_| random.next().to_le_bytes()).collect();
    let mut bytes = page.repeat(label.bytes.div_ceil(4096) as usize);
    for (page, number) in bytes.chunks_mut(4096).zip(0u32..) {
        page[..4].copy_from_slice(&number.to_le_bytes());
    }
    bytes.truncate(label.bytes as usize);
    bytes
}

/// The way a node answers asks.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum Owner {
    /// It grants the blocks it keeps, at once.
    Grants,
    /// It waits until the test grants.
    Waits,
}

/// Events and blocks of a node.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) done: HashMap<(u64, u32), Vec<Result<u64, FetchFault>>>,
    pub(crate) down: Vec<(PeerNumber, FetchFault)>,
    pub(crate) connected: Vec<(PeerNumber, BootId)>,
    pub(crate) notes: Vec<String>,
    pub(crate) checksums: Vec<(SlotRef, u64)>,
    /// The releases of each ask, each with the number of blocks sent.
    pub(crate) released: HashMap<u64, Vec<u32>>,
    pub(crate) asked: Vec<(u64, PeerNumber, Vec<Label>)>,
    /// Standing asks, which the test grants, and those withdrawn.
    pub(crate) standing: Vec<(u64, StandingTerms)>,
    pub(crate) withdrawn: Vec<u64>,
    kept: HashMap<Label, (SlotRef, Option<u64>)>,
    /// Other bytes lie in the places of the kept blocks: none is granted.
    scribbled: bool,
    free: Vec<u64>,
}

/// The receiver of a transport's events.
pub(crate) type Tell = Box<dyn Fn(TransportEvent) + Send + Sync>;

struct Shared {
    seen: Mutex<Seen>,
    changed: Condvar,
}

pub(crate) struct Node {
    transport: Option<Arc<Box<dyn Transport>>>,
    address: SocketAddr,
    pub(crate) name: NodeId,
    pub(crate) boot: BootId,
    pub(crate) blocks: PoolBlocks,
    shared: Arc<Shared>,
    core: Option<std::thread::JoinHandle<()>>,
    ticket: u64,
    refusals: Arc<RefusalCounts>,
}

/// Memory of so many bytes as a pool.
pub(crate) fn pool(bytes: u64) -> PoolBlocks {
    let fd = rustix::fs::memfd_create("rig", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    PoolBlocks::new(Arc::new(Region::map(fd.as_fd(), bytes as usize, Access::ReadWrite).unwrap()))
}

/// A pool without its second half.
pub(crate) fn torn_pool(bytes: u64) -> PoolBlocks {
    let fd = rustix::fs::memfd_create("rig", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, bytes / 2).unwrap();
    PoolBlocks::new(Arc::new(Region::map(fd.as_fd(), bytes as usize, Access::ReadWrite).unwrap()))
}

#[expect(clippy::disallowed_methods, reason = "a test is a runtime")]
pub(crate) fn now() -> Instant {
    Instant::now()
}

pub(crate) fn wait_refused(refusals: &RefusalCounts, reason: Reason, at_least: u64) {
    let end = now() + WATCHDOG;
    while refusals.totals()[reason as usize] < at_least {
        assert!(now() < end, "{reason:?} is counted {:?}", refusals.totals());
        std::thread::sleep(Duration::from_millis(1));
    }
}

// === impl Node ===

impl Node {
    pub(crate) fn new(name: &str, security: Security, limits: TcpLimits) -> Self {
        Self::start(name, 1, security, limits, Owner::Grants)
    }

    pub(crate) fn start(name: &str, life: u64, security: Security, limits: TcpLimits, owner: Owner) -> Self {
        let refusals = Arc::<RefusalCounts>::default();
        let counted = Arc::clone(&refusals);
        let mut node = Self::over(name, life, owner, SLOTS, |name, boot, blocks, up| {
            let config = TcpConfig { limits, refusals: counted, ..TcpConfig::new(name, boot, security) };
            let tcp = Tcp::start(config, blocks, up).unwrap();
            let address = tcp.listen_address();
            (Box::new(tcp), address)
        });
        node.refusals = refusals;
        node
    }

    /// A node with so many slots of so many bytes, over the transport that `start` starts.
    pub(crate) fn over(
        name: &str,
        life: u64,
        owner: Owner,
        (slots, slot_bytes): (u64, u64),
        start: impl FnOnce(NodeId, BootId, PoolBlocks, Tell) -> (Box<dyn Transport>, SocketAddr),
    ) -> Self {
        let blocks = pool(SEGMENT_ALIGN + slot_bytes * slots);
        let free = (0..slots).rev().map(|at| SEGMENT_ALIGN + at * slot_bytes).collect();
        let shared =
            Arc::new(Shared { seen: Mutex::new(Seen { free, ..Seen::default() }), changed: Condvar::new() });
        let (sender, ups) = channel();
        let (name, boot) = (node(name), boot(life));
        let up = Box::new(move |up| drop(sender.send(up)));
        let (transport, address) = start(name.clone(), boot, blocks.clone(), up);
        let transport = Arc::new(transport);
        let (post, grants): (Sender<GrantedSlots>, Receiver<GrantedSlots>) = channel();
        let core = {
            let (shared, granting) = (Arc::clone(&shared), Arc::downgrade(&transport));
            std::thread::spawn(move || {
                for up in ups {
                    shared.hear(up, owner, &post);
                    for granted in grants.try_iter() {
                        let Some(transport) = granting.upgrade() else { return };
                        transport.grant_slots(granted);
                    }
                }
            })
        };
        let (core, refusals) = (Some(core), Arc::default());
        Self { transport: Some(transport), address, name, boot, blocks, shared, core, ticket: 0, refusals }
    }

    pub(crate) fn transport(&self) -> &dyn Transport {
        &***self.transport.as_ref().unwrap()
    }

    /// The transport for a closure that must not borrow the node. Drop it before the node.
    pub(crate) fn transport_shared(&self) -> Arc<Box<dyn Transport>> {
        Arc::clone(self.transport.as_ref().unwrap())
    }

    /// Waits for so many failed connections with this reason.
    pub(crate) fn refused(&self, reason: Reason, at_least: u64) {
        wait_refused(&self.refusals, reason, at_least);
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// This node as a peer.
    pub(crate) fn as_peer(&self) -> Peer {
        Peer { node: self.name.clone(), boot: Some(self.boot), address: self.address() }
    }

    /// Ends the transport at once. All its events have been handled at the return.
    pub(crate) fn kill(&mut self) {
        if let Some(mut transport) = self.transport.take() {
            // The deciding thread holds it for a moment while it grants.
            let transport = loop {
                match Arc::try_unwrap(transport) {
                    Ok(whole) => break whole,
                    Err(shared) => transport = shared,
                }
                std::thread::yield_now();
            };
            drop(transport);
        }
        if let Some(core) = self.core.take() {
            assert!(core.join().is_ok() || std::thread::panicking());
        }
    }

    fn slot(&self) -> u64 {
        self.shared.seen.lock().unwrap().free.pop().expect("a test needs fewer slots")
    }

    /// Keeps a block, with or without a known checksum.
    pub(crate) fn keep(&self, label: Label, known: bool) {
        let (offset, bytes) = (self.slot(), content(&label));
        assert!(self.blocks.fill(offset, &bytes));
        let slot = SlotRef { offset, generation: 1 };
        self.shared.seen.lock().unwrap().kept.insert(label, (slot, known.then(|| xxh3_64(&bytes))));
    }

    /// Writes other bytes into the slot of every kept block.
    pub(crate) fn scribble(&self) {
        self.overwrite(true, |label| vec![0xa5; label.bytes as usize]);
    }

    /// Restores the kept blocks.
    pub(crate) fn restore(&self) {
        self.overwrite(false, content);
    }

    fn overwrite(&self, scribbled: bool, bytes: impl Fn(&Label) -> Vec<u8>) {
        self.seen(|seen| {
            seen.scribbled = scribbled;
            for (label, (slot, _)) in &seen.kept {
                assert!(self.blocks.fill(slot.offset, &bytes(label)));
            }
        });
    }

    /// Begins a fetch. Returns its ticket and its slots.
    pub(crate) fn fetch(&mut self, peer: u32, labels: &[Label], deadline: Duration) -> Fetching {
        self.fetch_by(peer, labels, deadline, None)
    }

    /// Commits the blocks of standing asks, one ask after the other, and grants each.
    pub(crate) fn commit<'a>(&self, asks: impl IntoIterator<Item = &'a (u64, Vec<Label>)>) {
        for (ask, labels) in asks {
            labels.iter().for_each(|label| self.keep(*label, false));
            self.grant(*ask, labels);
        }
    }

    /// Waits for so many standing asks. Returns each with its blocks, in the order of the prompt.
    pub(crate) fn standing_asks(&self, blocks: usize) -> Vec<(u64, Vec<Label>)> {
        self.wait("standing asks", |seen| {
            let mut asks = Vec::new();
            for (ask, terms) in &seen.standing {
                let (.., labels) = seen.asked.iter().find(|asked| asked.0 == *ask)?;
                asks.push((terms.place, *ask, labels.clone()));
            }
            asks.sort_by_key(|(place, ..)| *place);
            let asked: usize = asks.iter().map(|(.., labels)| labels.len()).sum();
            (asked == blocks).then(|| asks.into_iter().map(|(_, ask, labels)| (ask, labels)).collect())
        })
    }

    /// Begins a fetch of promised blocks, the first of them at place 7 of its prompt.
    pub(crate) fn stand(&mut self, peer: u32, labels: &[Label], deadline: Duration) -> Fetching {
        let terms = StandingTerms { patience_ms: deadline.as_millis() as u32, place: 7 };
        self.fetch_by(peer, labels, deadline, Some(terms))
    }

    fn fetch_by(
        &mut self,
        peer: u32,
        labels: &[Label],
        deadline: Duration,
        standing: Option<StandingTerms>,
    ) -> Fetching {
        self.ticket += 1;
        let blocks: Vec<_> = labels.iter().map(|label| (*label, self.slot())).collect();
        let fetching = Fetching { ticket: self.ticket, blocks: blocks.clone() };
        self.transport().post_fetch(Fetch {
            ticket: self.ticket,
            peer: PeerNumber(peer),
            blocks,
            deadline,
            standing,
        });
        fetching
    }

    /// Waits for the end of each block. The slots are free again; those of arrived blocks still hold them.
    pub(crate) fn ends(&self, fetching: &Fetching) -> Vec<Result<(), FetchFault>> {
        let count = fetching.blocks.len();
        let results = self.wait("all ends", |seen| {
            let ends =
                (0..count as u32).map(|index| seen.done.get(&(fetching.ticket, index))?.first().copied());
            ends.collect::<Option<Vec<_>>>()
        });
        for ((label, offset), result) in fetching.blocks.iter().zip(&results) {
            if let Ok(checksum) = result {
                let bytes = content(label);
                assert_eq!(xxh3_64(&bytes), *checksum);
                assert!(self.blocks.bytes_at(*offset, bytes.len()).unwrap() == bytes, "byte-exact");
            }
        }
        let mut seen = self.shared.seen.lock().unwrap();
        seen.free.extend(fetching.blocks.iter().map(|(_, offset)| offset));
        results.into_iter().map(|result| result.map(drop)).collect()
    }

    /// Fetches blocks and waits for their ends.
    pub(crate) fn get(
        &mut self,
        peer: u32,
        labels: &[Label],
        deadline: Duration,
    ) -> Vec<Result<(), FetchFault>> {
        let fetching = self.fetch(peer, labels, deadline);
        self.ends(&fetching)
    }

    /// Waits until `found` returns something.
    pub(crate) fn wait<T>(&self, what: &str, mut found: impl FnMut(&mut Seen) -> Option<T>) -> T {
        let end = now() + WATCHDOG;
        let mut seen = self.shared.seen.lock().unwrap();
        loop {
            if let Some(found) = found(&mut seen) {
                return found;
            }
            let left = end.saturating_duration_since(now());
            assert!(!left.is_zero(), "{what} did not come");
            seen = self.shared.changed.wait_timeout(seen, left).unwrap().0;
        }
    }

    pub(crate) fn seen<T>(&self, look: impl FnOnce(&mut Seen) -> T) -> T {
        look(&mut self.shared.seen.lock().unwrap())
    }

    /// Grants an ask.
    pub(crate) fn grant(&self, ask: u64, labels: &[Label]) {
        let granted = self.seen(|seen| seen.grant(ask, labels));
        self.transport().grant_slots(granted);
    }

    /// Checks that every slot came back once and every grant was released once. Requires that nothing is
    /// under way.
    pub(crate) fn check_ends(&self) {
        self.seen(|seen| {
            assert!(
                seen.done.values().all(|ends| ends.len() == 1),
                "one end for each block: {:?}",
                seen.done
            );
        });
    }

    /// Waits until every ask was released, and checks that each was released once.
    pub(crate) fn check_releases(&self) {
        self.wait("all releases", |seen| {
            let all = seen.asked.iter().all(|(ask, ..)| seen.released.contains_key(ask));
            all.then_some(())
        });
        self.seen(|seen| assert!(seen.released.values().all(|released| released.len() == 1)));
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A fetch under way.
pub(crate) struct Fetching {
    pub(crate) ticket: u64,
    pub(crate) blocks: Vec<(Label, u64)>,
}

// === impl Seen ===

impl Seen {
    fn grant(&self, ask: u64, labels: &[Label]) -> GrantedSlots {
        let grant = |label| {
            if self.scribbled {
                return None;
            }
            let (slot, checksum) = *self.kept.get(label)?;
            Some(Grant { slot, checksum })
        };
        GrantedSlots { ask, slots: labels.iter().map(grant).collect() }
    }
}

// === impl Shared ===

impl Shared {
    fn hear(&self, up: TransportEvent, owner: Owner, post: &Sender<GrantedSlots>) {
        let mut seen = self.seen.lock().unwrap();
        match up {
            TransportEvent::Done(FetchDone { ticket, index, result }) => {
                seen.done.entry((ticket, index)).or_default().push(result);
            }
            TransportEvent::Asked { ask, peer, blocks, standing } => {
                if let Some(terms) = standing {
                    seen.standing.push((ask, terms));
                } else if owner == Owner::Grants {
                    post.send(seen.grant(ask, &blocks)).unwrap();
                }
                seen.asked.push((ask, peer, blocks));
            }
            TransportEvent::Withdrawn { ask } => seen.withdrawn.push(ask),
            TransportEvent::Checksum { slot, checksum } => {
                seen.checksums.push((slot, checksum));
                let kept = seen.kept.values_mut().find(|(kept, _)| *kept == slot);
                kept.unwrap().1 = Some(checksum);
            }
            TransportEvent::Release { ask, sent } => seen.released.entry(ask).or_default().push(sent),
            TransportEvent::Connected { peer, boot } => seen.connected.push((peer, boot)),
            TransportEvent::PeerDown { peer, fault } => seen.down.push((peer, fault)),
            TransportEvent::Note(text) => seen.notes.push(text),
        }
        drop(seen);
        self.changed.notify_all();
    }
}

/// Two nodes as members of each other: each is peer 1 of the other.
pub(crate) fn pair(limits: TcpLimits) -> (Node, Node) {
    let one = Node::new("one", Security::Plaintext, limits);
    let other = Node::new("other", Security::Plaintext, limits);
    acquaint(&one, &other);
    (one, other)
}

/// Both nodes keep a block of each of these sizes, and each fetches the other's three times. Every block
/// arrives, an unknown checksum (the blocks of `one`) is computed once, a known one never, and both sides
/// give back their slots.
pub(crate) fn exchange(one: &mut Node, other: &mut Node, sizes: &[u32]) {
    let labels: Vec<_> = sizes.iter().zip(1..).map(|(bytes, number)| label(number, *bytes)).collect();
    labels.iter().for_each(|label| one.keep(*label, false));
    labels.iter().for_each(|label| other.keep(*label, true));
    for _ in 0..3 {
        let (left, right) = (one.fetch(1, &labels, LONG), other.fetch(1, &labels, LONG));
        assert!(one.ends(&left).iter().chain(&other.ends(&right)).all(Result::is_ok));
    }
    one.seen(|seen| assert_eq!(seen.checksums.len(), labels.len()));
    other.seen(|seen| assert!(seen.checksums.is_empty()));
    one.seen(|seen| assert_eq!(seen.connected, [(PeerNumber(1), boot(1))]));
    for node in [&*one, &*other] {
        node.check_ends();
        node.check_releases();
    }
}

pub(crate) fn acquaint(one: &Node, other: &Node) {
    one.transport().add_peer(PeerNumber(1), other.as_peer());
    other.transport().add_peer(PeerNumber(1), one.as_peer());
}
