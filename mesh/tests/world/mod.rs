//! A mesh in virtual time: nodes replace their blocks, and observers read the feeds of all of them.
//! Everything follows from the seed.

use std::collections::{BTreeMap, HashMap};

use mesh::digest::{Change, Digest, Thinning};
use mesh::directory::{self, Directory};
use mesh::feed::{Feed, Follower, Heard, Message, Reader};
use mesh::transport::PeerNumber;
use shm_protocol::random::{Random, mix};

/// Bytes of a message beside its digests: protobuf and gRPC frames, HTTP/2, a TLS record, TCP and IP headers.
pub(crate) const FRAME_BYTES: u64 = 150;
/// Keys of one probe.
const QUERY: u64 = 64;
const PROBE_EVERY_MS: u64 = 5;
/// Time for which changes are gathered, independent of the rest between two batches.
const GATHER_MS: u64 = mesh::pace::GATHER.as_millis() as u64;

/// The size and the pace of a mesh.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) nodes: u32,
    pub(crate) blocks: u64,
    /// Number of nodes that follow all others.
    pub(crate) observers: usize,
    /// Blocks replaced by a node in a second, of a thousand.
    pub(crate) replaced_per_mille: u64,
    pub(crate) batch_ms: u64,
    /// Time of the slowest message; the fastest takes a millisecond.
    pub(crate) latency_ms_max: u64,
    pub(crate) thinning: Thinning,
    pub(crate) seed: u64,
}

/// Totals over all observers.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) messages: u64,
    pub(crate) bytes: u64,
    pub(crate) changes: u64,
    /// Times from a change to its arrival at an observer.
    pub(crate) staleness_ms: Vec<u64>,
    pub(crate) probes: u64,
    /// Candidates without the first key: they never had it, or no longer have it.
    pub(crate) named_wrongly: u64,
    pub(crate) named_late: u64,
    /// Keys of the longest run found, in probes for a node's blocks, and the keys of these probes.
    pub(crate) found: u64,
    pub(crate) asked: u64,
}

struct Node {
    feed: Feed,
    /// Blocks from `first` up to `end` are kept; a node uses each number once.
    first: u64,
    end: u64,
    /// Thousandths of a block due.
    due: u64,
    /// The time of each digest's last change.
    changed_ms: HashMap<Digest, u64>,
    readers: Vec<Reader>,
    /// The remainder of the milliseconds at which it sends its changes.
    phase_ms: u64,
}

struct Observer {
    directory: Directory,
    followers: Vec<Follower>,
    /// The arrival of the last message on its way from each node: a stream keeps its order.
    arrival_ms: Vec<u64>,
}

pub(crate) struct World {
    setup: Setup,
    now_ms: u64,
    random: Random,
    nodes: Vec<Node>,
    observers: Vec<Observer>,
    /// Keyed by time of arrival and number: node, observer, message.
    on_the_way: BTreeMap<(u64, u64), (usize, usize, Message)>,
    sent: u64,
    pub(crate) seen: Seen,
}

/// The digest of a block of a node.
pub(crate) fn digest(node: usize, number: u64) -> Digest {
    Digest(mix(((node as u64) << 40 | number).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

fn digests(message: &Message) -> u64 {
    match message {
        Message::Begin { .. } => 0,
        Message::Chunk { digests, .. } => digests.len() as u64,
        Message::Delta { removed, added, .. } => (removed.len() + added.len()) as u64,
        Message::Promises(promises) => promises.len() as u64,
    }
}

impl World {
    /// A mesh whose observers all have every snapshot.
    pub(crate) fn new(setup: Setup) -> Self {
        let random = Random(setup.seed);
        let (nodes, observers) = (Vec::new(), Vec::new());
        let on_the_way = BTreeMap::new();
        let seen = Seen::default();
        let mut world = Self { setup, now_ms: 0, random, nodes, observers, on_the_way, sent: 0, seen };
        for node in 0..setup.nodes as usize {
            let mut feed = Feed::new(1 << 16);
            let all: Vec<Change> =
                (0..setup.blocks).map(|number| Change::Added(digest(node, number))).collect();
            feed.apply(&all);
            feed.seal();
            let readers = vec![feed.reader(setup.thinning, None); setup.observers];
            let (due, phase_ms) = (world.draw(1000), world.draw(setup.batch_ms));
            let changed_ms = HashMap::new();
            world.nodes.push(Node { feed, first: 0, end: setup.blocks, due, changed_ms, readers, phase_ms });
        }
        for _ in 0..setup.observers {
            let mut directory = Directory::new(directory::Config::default());
            (0..setup.nodes).for_each(|node| directory.join(PeerNumber(node)));
            let followers = (0..setup.nodes).map(|_| Follower::new(setup.blocks as usize * 2)).collect();
            let arrival_ms = vec![0; setup.nodes as usize];
            world.observers.push(Observer { directory, followers, arrival_ms });
        }
        world.step(setup.batch_ms + setup.latency_ms_max, false);
        world.seen = Seen::default();
        world
    }

    /// Runs for a time, with replaced blocks and probes.
    pub(crate) fn run(&mut self, ms: u64) {
        self.step(ms, true);
    }

    /// Runs without new changes until everything has arrived.
    pub(crate) fn settle(&mut self) {
        self.step(GATHER_MS + 2 * self.setup.batch_ms + self.setup.latency_ms_max, false);
        assert!(self.on_the_way.is_empty());
    }

    fn step(&mut self, ms: u64, busy: bool) {
        for _ in 0..ms {
            self.now_ms += 1;
            for node in 0..self.nodes.len() {
                if busy {
                    self.replace(node);
                }
                if self.now_ms.is_multiple_of(GATHER_MS) {
                    self.nodes[node].feed.seal();
                }
                if self.now_ms % self.setup.batch_ms == self.nodes[node].phase_ms {
                    self.tell(node);
                }
            }
            while let Some(first) = self.on_the_way.first_entry()
                && first.key().0 <= self.now_ms
            {
                let (node, observer, message) = first.remove();
                self.hear(node, observer, message);
            }
            if busy && self.now_ms.is_multiple_of(PROBE_EVERY_MS) {
                (0..self.observers.len()).for_each(|observer| self.probe(observer));
            }
        }
    }

    fn draw(&mut self, range: u64) -> u64 {
        self.random.next() % range
    }

    fn replace(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        node.due += self.setup.blocks * self.setup.replaced_per_mille / 1000;
        while node.due >= 1000 {
            node.due -= 1000;
            let (gone, come) = (digest(at, node.first), digest(at, node.end));
            node.feed.apply(&[Change::Removed(gone), Change::Added(come)]);
            node.changed_ms.extend([(gone, self.now_ms), (come, self.now_ms)]);
            node.first += 1;
            node.end += 1;
        }
    }

    fn tell(&mut self, at: usize) {
        for observer in (0..self.observers.len()).filter(|observer| *observer != at) {
            let arrival_ms = self.now_ms + 1 + self.draw(self.setup.latency_ms_max);
            let last_ms = &mut self.observers[observer].arrival_ms[at];
            *last_ms = arrival_ms.max(*last_ms);
            let node = &mut self.nodes[at];
            while let Some(message) = node.feed.next(&mut node.readers[observer]) {
                self.sent += 1;
                self.on_the_way.insert((*last_ms, self.sent), (at, observer, message));
            }
        }
    }

    fn hear(&mut self, node: usize, observer: usize, message: Message) {
        let Observer { directory, followers, .. } = &mut self.observers[observer];
        self.seen.messages += 1;
        self.seen.changes += digests(&message);
        self.seen.bytes += FRAME_BYTES + digests(&message) * 8;
        match followers[node].hear(message).expect("a feed's own message") {
            Heard::Nothing | Heard::Promises(_) => {}
            Heard::Snapshot(filter) => directory.replace(PeerNumber(node as u32), filter),
            Heard::Changes(changes) => {
                let changed_ms = &self.nodes[node].changed_ms;
                let age = |change: &Change| self.now_ms - changed_ms[&change.digest()];
                self.seen.staleness_ms.extend(changes.iter().map(age));
                assert!(directory.apply(PeerNumber(node as u32), &changes), "room");
            }
        }
    }

    /// Probes once for blocks of one node, and once for blocks of none.
    fn probe(&mut self, observer: usize) {
        let at = self.draw(u64::from(self.setup.nodes)) as usize;
        let first = self.nodes[at].first + self.draw(self.setup.blocks - QUERY);
        let run = |number: u64| (number..number + QUERY).map(|number| digest(at, number)).collect::<Vec<_>>();
        let nobody = run(1 << 39 | self.draw(1 << 30));
        let found = self.ask(observer, at, first, &run(first));
        self.ask(observer, at, u64::MAX, &nobody);
        if at != observer {
            self.seen.asked += QUERY;
            self.seen.found += u64::from(found);
        }
        // A candidate may still have a block evicted a moment ago.
        if let Some(gone) = self.nodes[at].first.checked_sub(1) {
            let gone = gone - self.draw(16).min(gone);
            self.ask(observer, at, gone, &run(gone));
        }
    }

    /// The longest run found of keys at node `at` from number `first` on, or of keys without a node.
    fn ask(&mut self, observer: usize, at: usize, first: u64, keys: &[Digest]) -> u32 {
        let candidates = self.observers[observer].directory.probe(self.now_ms, keys);
        self.seen.probes += 1;
        for candidate in &candidates {
            let node = &self.nodes[at];
            let owner = candidate.peer.0 as usize == at;
            self.seen.named_wrongly += u64::from(!owner);
            self.seen.named_late += u64::from(owner && first < node.first);
        }
        candidates.first().map_or(0, |candidate| candidate.run)
    }

    /// Checks that every observer knows all blocks of every other node, and nothing else.
    pub(crate) fn assert_equal(&self) {
        for (number, observer) in self.observers.iter().enumerate() {
            for (at, peer) in observer.directory.peers().enumerate().filter(|(at, _)| *at != number) {
                let node = &self.nodes[at];
                let kept = (node.first..node.end)
                    .map(|number| digest(at, number))
                    .filter(|digest| self.setup.thinning.keeps(*digest));
                let kept: Vec<Digest> = kept.collect();
                assert_eq!(peer.keys, kept.len());
                let named = |key: &Digest| {
                    let candidates = observer.directory.probe(0, &[*key]);
                    candidates.iter().any(|candidate| candidate.peer == peer.peer)
                };
                assert!(kept.iter().all(named));
            }
        }
    }
}
