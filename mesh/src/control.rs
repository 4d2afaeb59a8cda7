//! Who is a member, and what each keeps: a thread of its own that speaks gRPC to the peers, and to etcd where there is one.
//!
//! The caller publishes what it keeps and hears [`News`]; no call waits. A peer that is slow, silent or wrong costs its own
//! stream and nothing else: every wait has a limit, every message a size, and who does not read is cut off.

mod back_off;
mod dial;
#[cfg(feature = "etcd")]
mod etcd;
mod follow;
mod names;
mod namespaces;
mod serve;
pub mod service;
mod shared;
mod shell;
pub mod wire;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

pub use self::dial::check as check_peer;
#[cfg(feature = "etcd")]
pub use self::etcd::Etcd;
pub use self::names::{Resolve, System};
pub use self::namespaces::{Answer, Counted, FACTS_BYTES_MAX, Listing, Unlisted};
use self::shell::Command;
use crate::Error;
pub use crate::backlog::Room;
use crate::digest::{Change, Digest};
use crate::listen::listen;
pub use crate::membership::{DataAddresses, News, Parting};
use crate::pace;
use crate::refusals::RefusalCounts;
use crate::tls::Security;
pub use crate::transport::MEMBERS_MAX;
use crate::transport::{BootId, NodeId, PeerNumber};

/// The name of a mesh, unless told otherwise.
pub const MESH_DEFAULT: &str = "default";
/// Bytes of the longest name of a mesh, which is a part of a key in etcd.
pub const MESH_BYTES_MAX: usize = 63;
/// Memory of all filters, unless told otherwise: 200 million keys, as 400 TiB of blocks of 2 MiB have.
pub const DIRECTORY_BYTES_DEFAULT: usize = 512 << 20;
/// How long a registration in etcd outlives its node, unless told otherwise.
pub const TTL_DEFAULT: Duration = Duration::from_secs(10);
/// The longest that dropping [`Control`] waits for its thread: a call to etcd, and the streams.
const STOP_MAX: Duration = Duration::from_secs(5);

/// How members are found and followed.
#[derive(Clone, Debug)]
pub struct Config {
    /// The mesh: nodes of another are refused.
    pub mesh: String,
    pub node: NodeId,
    /// This life of it.
    pub boot: BootId,
    /// The life before, if the caller knows which it was and that it has ended: what it has registered is in nobody's use.
    pub former: Option<BootId>,
    /// Where peers follow what this node keeps; they are told this address, so it must be one that they reach.
    pub listen: SocketAddr,
    /// Where they get blocks.
    pub data: DataAddresses,
    /// How members are found.
    pub members: Members,
    /// What says which addresses a listed name has.
    pub resolver: Arc<dyn Resolve>,
    /// What says which namespaces this node knows.
    pub listing: Arc<dyn Listing>,
    /// Who may follow, and who may read along.
    pub security: Security,
    /// Memory of all peers' filters together: a peer that keeps more than its share is followed in part.
    pub directory_bytes: usize,
    /// How long anything may take.
    pub limits: Limits,
    /// Where it is counted whom this node turns away, and who it.
    pub refusals: Arc<RefusalCounts>,
}

/// How members are found.
#[derive(Clone, Debug)]
pub enum Members {
    /// Those at these `host:port` of their control. A name stands for all the addresses that it has, whenever it is resolved;
    /// this node's own address among them does no harm.
    Static(Vec<String>),
    /// Those that are registered.
    #[cfg(feature = "etcd")]
    Etcd(Etcd),
}

/// How long anything may take.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Limits {
    /// A connection with its TLS session.
    pub connect: Duration,
    /// A follower hears something at least this often.
    pub heartbeat: Duration,
    /// A follower rests between two batches for this time multiplied by the number of followers.
    pub turn: Duration,
    /// A stream on which nothing came for this long is down, and a follower that takes nothing for this long is cut off.
    pub silence: Duration,
    /// A listed peer that was down for this long is left, until it is back; and of an address at which there was no peer for
    /// this long an operator is told.
    pub gone: Duration,
    /// The time from one resolution of a listed name to the next.
    pub resolve: Duration,
    /// An inventory of which a part is told is asked for anew after about this long: there may be room for more by then.
    pub thinned: Duration,
    /// The pause after a failure; doubled at each further one.
    pub back_off_min: Duration,
    /// The longest such pause.
    pub back_off_max: Duration,
    /// A call to etcd.
    pub etcd: Duration,
    /// What members know of namespaces: the time from the question to all answers, and that of a count for one.
    pub namespaces: Duration,
}

/// Figures of the control thread that the metrics read.
#[derive(Debug, Default)]
struct Figures {
    /// Listed addresses at which a node is expected and none is a member.
    empty: AtomicUsize,
    /// Listed names that did not resolve when they were last looked up.
    unresolved: AtomicUsize,
    /// Microseconds between two batches to a follower that waits for nothing.
    pace_us: AtomicU64,
}

/// The thread at work.
pub struct Control {
    commands: UnboundedSender<Command>,
    address: SocketAddr,
    figures: Arc<Figures>,
    thread: Option<JoinHandle<()>>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

/// Where members are asked for their namespaces, from any thread.
#[derive(Clone, Debug)]
pub struct Asker(UnboundedSender<Command>);

// === impl Config ===

impl Config {
    /// A mesh of these members under its default name and limits.
    pub fn new(
        (node, boot): (NodeId, BootId),
        listen: SocketAddr,
        data: DataAddresses,
        members: Members,
        security: Security,
    ) -> Self {
        let (mesh, limits, resolver) = (MESH_DEFAULT.to_owned(), Limits::default(), Arc::new(System));
        let refusals = Arc::default();
        Self {
            mesh,
            node,
            boot,
            former: None,
            listen,
            data,
            members,
            resolver,
            listing: Arc::new(Unlisted),
            security,
            directory_bytes: DIRECTORY_BYTES_DEFAULT,
            limits,
            refusals,
        }
    }

    fn check(&self) -> Result<(), Error> {
        let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let named = (1..=MESH_BYTES_MAX).contains(&self.mesh.len()) && self.mesh.bytes().all(letter);
        if !named {
            return Err(Error::Mesh(self.mesh.clone()));
        }
        for address in [self.listen, self.data.tcp].into_iter().chain(self.data.rdma) {
            if address.ip().is_unspecified() {
                return Err(Error::Unreachable(address));
            }
        }
        match &self.members {
            Members::Static(peers) if peers.len() > MEMBERS_MAX => Err(Error::Listed(peers.len())),
            Members::Static(peers) => peers.iter().try_for_each(|peer| dial::check(peer)),
            #[cfg(feature = "etcd")]
            Members::Etcd(etcd) => etcd.check(),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(2),
            heartbeat: Duration::from_secs(1),
            turn: pace::TURN,
            silence: Duration::from_secs(5),
            gone: Duration::from_secs(30),
            resolve: Duration::from_secs(10),
            thinned: Duration::from_secs(3600),
            back_off_min: Duration::from_millis(100),
            back_off_max: Duration::from_secs(5),
            etcd: Duration::from_secs(3),
            namespaces: Duration::from_secs(1),
        }
    }
}

// === impl Asker ===

impl Asker {
    /// Asks all members. Their answers come together, in the order of their names, once all have answered or
    /// [`Limits::namespaces`] is over. `Err` from the channel: this node has left the mesh.
    pub fn ask(&self) -> oneshot::Receiver<Vec<Answer>> {
        let (reply, answers) = oneshot::channel();
        // Not taken after a drain: then the channel says so.
        let _ = self.0.send(Command::Namespaces(reply));
        answers
    }
}

// === impl Control ===

impl Control {
    /// Listens, finds the members and follows them, from then on. `up` is called on the thread of its own.
    pub fn start(config: Config, up: impl Fn(News) + Send + Sync + 'static) -> Result<Self, Error> {
        config.check()?;
        let (listener, address) = listen(config.listen)?;
        let (commands, orders) = unbounded_channel();
        let (alive, ended) = channel();
        let figures = Arc::new(Figures::default());
        let config = Config { listen: address, ..config };
        let run = shell::prepare(config, listener, (Box::new(up), Arc::clone(&figures)), orders)?;
        let thread = std::thread::Builder::new().name("mesh-control".into());
        let thread = thread.spawn(move || {
            run();
            drop(alive);
        });
        let thread = thread.map_err(|source| Error::Os { doing: "start a thread", source })?;
        Ok(Self { commands, address, figures, thread: Some(thread), ended })
    }

    /// What this node keeps from now on, or no more. Peers that follow hear of it.
    pub fn publish(&self, changes: Vec<Change>) {
        self.order(Command::Publish(changes));
    }

    /// Replaces the promises of this node's engines, each given by its last keys. Followers hear of these promises behind all changes
    /// that were published before.
    pub fn promise(&self, promises: Vec<Digest>) {
        self.order(Command::Promise(promises));
    }

    /// The filter of a peer got too full: all that it keeps comes anew, in a [`News::Snapshot`] with more room.
    pub fn resync(&self, peer: PeerNumber) {
        self.order(Command::Resync(peer));
    }

    /// Where members are asked for their namespaces.
    pub fn asker(&self) -> Asker {
        Asker(self.commands.clone())
    }

    /// A request here waits for a block that a peer may be about to have: peers tell this node sooner for a time. To be said again
    /// every second for as long as one waits. It costs a message to each peer, where they are so many that it matters.
    pub fn wait(&self) {
        self.order(Command::Wait);
    }

    /// The time between two batches to a follower that waits for nothing.
    pub fn pace(&self) -> Duration {
        Duration::from_micros(self.figures.pace_us.load(Ordering::Relaxed))
    }

    /// Where peers follow what this node keeps.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Listed addresses at which a node is expected and none is a member.
    pub fn endpoints_empty(&self) -> usize {
        self.figures.empty.load(Ordering::Relaxed)
    }

    /// Listed names that did not resolve when they were last looked up.
    pub fn names_unresolved(&self) -> usize {
        self.figures.unresolved.load(Ordering::Relaxed)
    }

    /// Is no member any more, as soon as etcd or the peers hear of it. Nothing more is told.
    pub fn drain(&self) {
        self.order(Command::Drain);
    }

    /// The thread is gone only after a drain.
    fn order(&self, command: Command) {
        let _ = self.commands.send(command);
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.drain();
        // One that is stuck is left to itself.
        let stuck = self.ended.recv_timeout(STOP_MAX) == Err(std::sync::mpsc::RecvTimeoutError::Timeout);
        if let (Some(thread), false) = (self.thread.take(), stuck) {
            let _ = thread.join();
        }
    }
}
