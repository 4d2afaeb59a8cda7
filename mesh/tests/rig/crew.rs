//! Control planes of nodes for tests: the blocks each publishes, and the events it gets of the others.

use std::collections::{HashMap, HashSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use mesh::control::{
    AnnouncedEngine, Control, ControlConfig, ControlLimits, DataAddresses, Listing, MemberEvent, Members,
    NamespacesAnswer, Parting, Resolve, System, Unlisted,
};
use mesh::digest::{Digest, DigestChange};
use mesh::directory::Filter;
use mesh::listed::{BlocksAsk, ListedBlock};
use mesh::refusals::{Reason, RefusalCounts};
use mesh::tls::Security;
use mesh::transport::{NodeId, Peer, PeerNumber};
use shm_protocol::random::mix_bits;

use super::{LONG, WATCHDOG, boot, node, now};

/// Limits beyond the reach of any test, even on a busy machine, with short pauses.
pub(crate) fn patient() -> ControlLimits {
    ControlLimits {
        connect: LONG,
        heartbeat: Duration::from_millis(50),
        turn: mesh::pace::TURN,
        silence: LONG,
        gone: LONG,
        resolve: Duration::from_millis(50),
        thinned: LONG,
        back_off_min: Duration::from_millis(5),
        back_off_max: Duration::from_millis(50),
        etcd: LONG,
        namespaces: LONG,
        lists: LONG,
    }
}

/// An address of loopback for one test alone, from the process and a counter.
pub(crate) fn address() -> SocketAddr {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = std::process::id() << 8 | (COUNT.fetch_add(1, Ordering::Relaxed) + 1);
    (Ipv4Addr::from(127 << 24 | number & 0x00ff_ffff), 17_311).into()
}

pub(crate) fn digest(number: u64) -> Digest {
    Digest(mix_bits(number))
}

pub(crate) fn added(numbers: std::ops::Range<u64>) -> Vec<DigestChange> {
    numbers.map(|number| DigestChange::Added(digest(number))).collect()
}

pub(crate) fn removed(numbers: std::ops::Range<u64>) -> Vec<DigestChange> {
    numbers.map(|number| DigestChange::Removed(digest(number))).collect()
}

/// Settings of a node.
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) name: &'static str,
    pub(crate) life: u64,
    /// The life before, known to have ended.
    pub(crate) former: Option<u64>,
    pub(crate) listen: SocketAddr,
    pub(crate) members: Members,
    pub(crate) resolver: Arc<dyn Resolve>,
    pub(crate) listing: Arc<dyn Listing>,
    pub(crate) security: Security,
    pub(crate) limits: ControlLimits,
    pub(crate) mesh: &'static str,
    pub(crate) directory_bytes: usize,
    pub(crate) engines: Vec<AnnouncedEngine>,
    /// True for an observer.
    pub(crate) observes: bool,
}

/// A member as known to a node.
pub(crate) struct Member {
    pub(crate) peer: Peer,
    pub(crate) rdma: Option<SocketAddr>,
    pub(crate) filter: Option<Filter>,
    /// The last keys of the prompts promised by this member, and the number of messages with promises.
    pub(crate) promises: (Vec<Digest>, u32),
    /// It states that it keeps standing asks.
    pub(crate) keeps_asks: bool,
    /// The number of its messages that it leaves, and its lists of blocks.
    pub(crate) leaving: u32,
    pub(crate) lists: Vec<(BlocksAsk, Vec<ListedBlock>)>,
    pub(crate) engines: Vec<AnnouncedEngine>,
    overfull: bool,
    /// Its inventory was requested again.
    resync: bool,
    pub(crate) snapshots: u32,
    pub(crate) stale: u32,
    pub(crate) batches: u32,
}

/// All events of a node.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) members: HashMap<PeerNumber, Member>,
    pub(crate) left: Vec<(PeerNumber, NodeId, Parting)>,
    pub(crate) notes: Vec<String>,
    numbers: HashSet<PeerNumber>,
}

pub(crate) struct Crew {
    pub(crate) control: Option<Control>,
    pub(crate) name: NodeId,
    refusals: Arc<RefusalCounts>,
    shared: Arc<(Mutex<Seen>, Condvar)>,
}

// === impl Plan ===

impl Plan {
    pub(crate) fn new(name: &'static str, listen: SocketAddr, members: Members) -> Self {
        Self {
            name,
            life: 1,
            former: None,
            listen,
            members,
            resolver: Arc::new(System),
            listing: Arc::new(Unlisted),
            security: Security::Plaintext,
            limits: patient(),
            mesh: "test",
            directory_bytes: 64 << 20,
            engines: Vec::new(),
            observes: false,
        }
    }

    /// A node that lists the addresses in `all`.
    pub(crate) fn listing(name: &'static str, listen: SocketAddr, all: &[SocketAddr]) -> Self {
        Self::new(name, listen, Members::Static(all.iter().map(SocketAddr::to_string).collect()))
    }

    pub(crate) fn config(&self) -> ControlConfig {
        let port = |after| SocketAddr::new(self.listen.ip(), self.listen.port() + after);
        let data = DataAddresses { tcp: port(1), rdma: Some(port(2)) };
        let own = (node(self.name), boot(self.life));
        let (members, security) = (self.members.clone(), self.security.clone());
        let base = match self.observes {
            true => ControlConfig::observing(own, members, security),
            false => ControlConfig::new(own, self.listen, data, members, security),
        };
        ControlConfig {
            mesh: self.mesh.into(),
            engines: self.engines.clone(),
            former: self.former.map(boot),
            directory_bytes: self.directory_bytes,
            limits: self.limits,
            resolver: Arc::clone(&self.resolver),
            listing: Arc::clone(&self.listing),
            ..base
        }
    }

    pub(crate) fn start(&self) -> Crew {
        let shared = Arc::new((Mutex::new(Seen::default()), Condvar::new()));
        let told = Arc::clone(&shared);
        let config = self.config();
        let refusals = Arc::clone(&config.refusals);
        let control = Control::start(config, move |news| {
            told.0.lock().unwrap().hear(news);
            told.1.notify_all();
        });
        Crew { control: Some(control.unwrap()), name: node(self.name), refusals, shared }
    }
}

// === impl Crew ===

impl Crew {
    pub(crate) fn control(&self) -> &Control {
        self.control.as_ref().unwrap()
    }

    pub(crate) fn publish(&self, changes: Vec<DigestChange>) {
        self.control().publish(changes, false);
    }

    /// The namespaces of its members.
    pub(crate) fn ask(&self) -> Vec<NamespacesAnswer> {
        self.control().asker().ask_members().blocking_recv().expect("it is in the mesh")
    }

    /// Ends the node, without notice to other nodes but etcd.
    pub(crate) fn stop(&mut self) {
        self.control = None;
    }

    pub(crate) fn wait<T>(&self, what: &str, mut found: impl FnMut(&Seen) -> Option<T>) -> T {
        let end = now() + WATCHDOG;
        let mut seen = self.shared.0.lock().unwrap();
        loop {
            seen.ask_anew(self.control());
            if let Some(found) = found(&seen) {
                return found;
            }
            let left = end.saturating_duration_since(now());
            assert!(!left.is_zero(), "{}: {what} did not come; notes: {:#?}", self.name, seen.notes);
            seen = self.shared.1.wait_timeout(seen, left).unwrap().0;
        }
    }

    pub(crate) fn seen<T>(&self, look: impl FnOnce(&Seen) -> T) -> T {
        look(&self.shared.0.lock().unwrap())
    }

    /// Waits for a life of a node to be a member.
    pub(crate) fn joined(&self, name: &str, life: u64) -> PeerNumber {
        self.wait(&format!("{name} in life {life}"), |seen| seen.number(name, life))
    }

    /// Waits until a member has left.
    pub(crate) fn left(&self, number: PeerNumber) -> Parting {
        self.wait(&format!("the parting of {number:?}"), |seen| {
            seen.left.iter().find(|(left, ..)| *left == number).map(|(.., why)| *why)
        })
    }

    /// Waits until a member is known to keep `these`, and not `those`.
    pub(crate) fn keeps(&self, number: PeerNumber, these: std::ops::Range<u64>, those: std::ops::Range<u64>) {
        self.wait(&format!("what {number:?} keeps"), |seen| {
            let filter = seen.members.get(&number)?.filter.as_ref()?;
            let keeps = these.clone().all(|number| filter.contains(digest(number)));
            // A filter has rare false positives.
            let wrong = those.clone().filter(|number| filter.contains(digest(*number))).count() as u64;
            (keeps && wrong * 100 <= those.end - those.start).then_some(())
        });
    }

    /// Waits for so many failed connections with this reason.
    pub(crate) fn refused(&self, reason: Reason, at_least: u64) {
        super::wait_refused(&self.refusals, reason, at_least);
    }

    pub(crate) fn noted(&self, what: &str) {
        self.wait(what, |seen| seen.notes.iter().any(|note| note.contains(what)).then_some(()));
    }
}

// === impl Seen ===

impl Seen {
    pub(crate) fn number(&self, name: &str, life: u64) -> Option<PeerNumber> {
        let who = |member: &&Member| member.peer.node == node(name) && member.peer.boot == Some(boot(life));
        self.members.iter().find(|(_, member)| who(member)).map(|(number, _)| *number)
    }

    /// Requests the inventories of overfull filters again, as the data thread does.
    fn ask_anew(&mut self, control: &Control) {
        for (number, member) in
            self.members.iter_mut().filter(|(_, member)| member.overfull && !member.resync)
        {
            control.resync(*number);
            member.resync = true;
        }
    }

    /// Checks the promises of the interface with every event.
    fn hear(&mut self, news: MemberEvent) {
        match news {
            MemberEvent::Joined { number, peer, rdma } => {
                assert!(self.numbers.insert(number), "a number is used once");
                let alone = self.members.values().all(|member| member.peer.node != peer.node);
                assert!(alone, "no two members have one name");
                let member = Member {
                    peer,
                    rdma,
                    filter: None,
                    promises: Default::default(),
                    keeps_asks: false,
                    leaving: 0,
                    lists: Vec::new(),
                    engines: Vec::new(),
                    overfull: false,
                    resync: false,
                    snapshots: 0,
                    stale: 0,
                    batches: 0,
                };
                self.members.insert(number, member);
            }
            MemberEvent::Greeted { number, keeps_asks, engines, .. } => {
                let member = self.member(number);
                (member.keeps_asks, member.engines) = (keeps_asks, engines);
            }
            MemberEvent::Left { number, why } => {
                let member = self.members.remove(&number).expect("who leaves was there");
                self.left.push((number, member.peer.node, why));
            }
            MemberEvent::Snapshot { number, filter, .. } => {
                let member = self.member(number);
                (member.filter, member.overfull, member.resync) = (Some(filter), false, false);
                member.snapshots += 1;
            }
            MemberEvent::Changes { number, changes, .. } => {
                let member = self.member(number);
                member.batches += 1;
                let filter = member.filter.as_mut().expect("all comes before what changes");
                for change in changes {
                    member.overfull |= match change {
                        _ if member.overfull => true,
                        DigestChange::Added(digest) => !filter.insert(digest),
                        DigestChange::Removed(digest) => {
                            assert!(filter.remove(digest), "a removed block was there");
                            false
                        }
                    };
                }
            }
            MemberEvent::Promises { number, promises, .. } => {
                let member = self.member(number);
                assert!(member.filter.is_some(), "promises come behind the inventory");
                member.promises = (promises, member.promises.1 + 1);
            }
            MemberEvent::Stale { number } => self.member(number).stale += 1,
            MemberEvent::Leaving { number } => self.member(number).leaving += 1,
            MemberEvent::Listed { number, ask, blocks } => self.member(number).lists.push((ask, blocks)),
            MemberEvent::Note(text) => self.notes.push(text),
        }
    }

    fn member(&mut self, number: PeerNumber) -> &mut Member {
        self.members.get_mut(&number).expect("nothing is told of who is no member")
    }
}
