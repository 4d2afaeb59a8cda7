//! Membership and inventories of a mesh: a thread of its own speaks gRPC to the peers, and to etcd if members
//! register there.
//!
//! The caller publishes the blocks kept on this node and receives [`MemberEvent`]; no call waits. A slow, silent or
//! faulty peer costs its own stream and nothing else: every wait has a limit, every message a size, and a
//! follower is cut off if it stops reading.

mod back_off;
mod blocks;
mod control_loop;
mod dial;
#[cfg(feature = "etcd")]
mod etcd;
mod follow;
mod names;
mod namespaces;
mod serve;
pub mod service;
mod shared;
pub mod wire;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use self::control_loop::ControlCommand;
pub use self::dial::check_address as check_peer;
#[cfg(feature = "etcd")]
pub use self::etcd::Etcd;
pub use self::names::{Resolve, System};
pub use self::namespaces::{BlocksListed, Counted, FACTS_BYTES_MAX, Listing, NamespacesAnswer, Unlisted};
pub use self::serve::OBSERVERS_MAX;
pub use self::wire::engines::{AnnouncedEngine, ENGINES_MAX, EngineUse};
pub use self::wire::namespaces::NodeNamespace;
use crate::MeshError;
pub use crate::backlog::BacklogRoom;
use crate::digest::{Digest, DigestChange};
use crate::listed::BlocksAsk;
use crate::listen::bind_listener;
pub use crate::membership::{DataAddresses, MemberEvent, Parting};
use crate::pace;
use crate::refusals::RefusalCounts;
use crate::tls::Security;
pub use crate::transport::MEMBERS_MAX;
use crate::transport::{BootId, NodeId, PeerNumber};

/// The default name of a mesh.
pub const MESH_DEFAULT: &str = "default";
/// Maximum bytes of the name of a mesh, which is part of a key in etcd.
pub const MESH_BYTES_MAX: usize = 63;
/// Default memory of all filters together: 200 million keys, enough for 400 TiB of blocks of 2 MiB.
pub const DIRECTORY_BYTES_DEFAULT: usize = 512 << 20;
/// Default time for which a registration in etcd outlives its node.
pub const TTL_DEFAULT: Duration = Duration::from_secs(10);
/// Maximum time for dropping [`Control`] to wait for its thread, which ends a call to etcd and the streams.
const STOP_MAX: Duration = Duration::from_secs(5);

/// Settings of a node in a mesh: its name, its addresses, and how it finds and follows members.
#[derive(Clone, Debug)]
pub struct ControlConfig {
    /// Name of the mesh. Nodes of another mesh are refused.
    pub mesh: String,
    pub node: NodeId,
    /// This life of the node.
    pub boot: BootId,
    /// The previous life of the node, if the caller knows it and knows its end: its registration in etcd is
    /// replaced at once.
    pub former: Option<BootId>,
    /// Addresses of the services of a member; `None` for an observer, which follows members and serves nothing.
    pub served: Option<ServedAddresses>,
    /// Engines of this node, announced to followers.
    pub engines: Vec<AnnouncedEngine>,
    /// How members are found.
    pub members: Members,
    /// Resolves listed names to addresses.
    pub resolver: Arc<dyn Resolve>,
    /// Lists the namespaces known to this node.
    pub listing: Arc<dyn Listing>,
    /// Certificates of the mesh, or plaintext.
    pub security: Security,
    /// Memory of the filters of all peers together. A peer with more keys than its share is followed only in
    /// part.
    pub directory_bytes: usize,
    /// Time limits and pauses.
    pub limits: ControlLimits,
    /// Counts refusals by this node and refusals of this node.
    pub refusals: Arc<RefusalCounts>,
}

/// The addresses at which peers reach a member.
#[derive(Clone, Debug)]
pub struct ServedAddresses {
    /// Address of the control service, on which peers follow this node. Peers get it, so they must be able to
    /// reach it.
    pub listen: SocketAddr,
    /// Addresses of the block transports of this node.
    pub data: DataAddresses,
}

/// How members are found.
#[derive(Clone, Debug)]
pub enum Members {
    /// Nodes at these `host:port` addresses of their control services. A name stands for all addresses it has
    /// at each resolution. The list may include the address of this node.
    Static(Vec<String>),
    /// Nodes registered in etcd.
    #[cfg(feature = "etcd")]
    Etcd(Etcd),
}

/// Time limits and pauses of the control thread.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct ControlLimits {
    /// Limit for a connection with its TLS session.
    pub connect: Duration,
    /// A follower gets a message at least this often.
    pub heartbeat: Duration,
    /// A follower rests between two batches for this time multiplied by the number of followers.
    pub turn: Duration,
    /// A stream without a message for this long is down, and a follower that reads nothing for this long is
    /// cut off.
    pub silence: Duration,
    /// A listed peer is no longer a member after it was down for this long, until it returns. An address
    /// without a peer for this long is reported to the operator.
    pub gone: Duration,
    /// The time from one resolution of a listed name to the next.
    pub resolve: Duration,
    /// A follower of only a part of an inventory requests it again after about this long, since there may be
    /// room for more by then.
    pub thinned: Duration,
    /// The pause after a failure; doubled at each further failure.
    pub back_off_min: Duration,
    /// The longest such pause.
    pub back_off_max: Duration,
    /// Limit for a call to etcd.
    pub etcd: Duration,
    /// Limit for a question about namespaces, from the question to all answers, and for a count of the own
    /// blocks.
    pub namespaces: Duration,
    /// Limit for a question for a member's best blocks, and for a list of the own ones.
    pub lists: Duration,
}

/// Figures of the control thread, read by the metrics.
#[derive(Debug, Default)]
struct ControlFigures {
    /// Listed addresses without a member where a node is expected.
    empty: AtomicUsize,
    /// Listed names whose last resolution failed.
    unresolved: AtomicUsize,
    /// Microseconds between two batches to a follower without a waiting request.
    pace_us: AtomicU64,
}

/// The running control thread. Dropping it leaves the mesh.
pub struct Control {
    commands: UnboundedSender<ControlCommand>,
    address: Option<SocketAddr>,
    figures: Arc<ControlFigures>,
    thread: Option<JoinHandle<()>>,
    /// Disconnected when the thread has ended.
    ended: Receiver<()>,
}

/// Asks all members for their namespaces, from any thread.
#[derive(Clone, Debug)]
pub struct NamespaceAsker(UnboundedSender<ControlCommand>);

// === impl ControlConfig ===

impl ControlConfig {
    /// Settings for a mesh of these members, with the default name and limits.
    pub fn new(
        (node, boot): (NodeId, BootId),
        listen: SocketAddr,
        data: DataAddresses,
        members: Members,
        security: Security,
    ) -> Self {
        let served = Some(ServedAddresses { listen, data });
        Self { served, ..Self::observing((node, boot), members, security) }
    }

    /// Settings for an observer of these members, with the default name and limits.
    pub fn observing((node, boot): (NodeId, BootId), members: Members, security: Security) -> Self {
        let (mesh, limits, resolver) = (MESH_DEFAULT.to_owned(), ControlLimits::default(), Arc::new(System));
        let refusals = Arc::default();
        Self {
            mesh,
            node,
            boot,
            former: None,
            served: None,
            engines: Vec::new(),
            members,
            resolver,
            listing: Arc::new(Unlisted),
            security,
            directory_bytes: DIRECTORY_BYTES_DEFAULT,
            limits,
            refusals,
        }
    }

    /// True for an observer.
    fn observes(&self) -> bool {
        self.served.is_none()
    }

    fn check_names(&self) -> Result<(), MeshError> {
        let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        let named = (1..=MESH_BYTES_MAX).contains(&self.mesh.len()) && self.mesh.bytes().all(letter);
        if !named {
            return Err(MeshError::Mesh(self.mesh.clone()));
        }
        let addresses = |served: &ServedAddresses| {
            [served.listen, served.data.tcp].into_iter().chain(served.data.rdma).collect()
        };
        for address in self.served.as_ref().map_or_else(Vec::new, addresses) {
            if address.ip().is_unspecified() {
                return Err(MeshError::Unreachable(address));
            }
        }
        match &self.members {
            Members::Static(peers) if peers.len() > MEMBERS_MAX => Err(MeshError::Listed(peers.len())),
            Members::Static(peers) => peers.iter().try_for_each(|peer| dial::check_address(peer)),
            #[cfg(feature = "etcd")]
            Members::Etcd(etcd) => etcd.check_endpoints(),
        }
    }
}

impl Default for ControlLimits {
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
            lists: blocks::LIMIT,
        }
    }
}

// === impl NamespaceAsker ===

impl NamespaceAsker {
    /// Asks all members for their namespaces. The answers come together, sorted by node name, once all
    /// members have answered or [`ControlLimits::namespaces`] is over. The channel returns `Err` if this node has
    /// left the mesh.
    pub fn ask_members(&self) -> oneshot::Receiver<Vec<NamespacesAnswer>> {
        let (reply, answers) = oneshot::channel();
        // After a drain the command is dropped, which closes the channel.
        let _ = self.0.send(ControlCommand::Namespaces(reply));
        answers
    }
}

// === impl Control ===

impl Control {
    /// Starts a thread: it finds the members and follows them, and serves followers of a member. The thread
    /// calls `up` for each [`MemberEvent`].
    pub fn start(
        mut config: ControlConfig,
        up: impl Fn(MemberEvent) + Send + Sync + 'static,
    ) -> Result<Self, MeshError> {
        config.check_names()?;
        let mut listener = None;
        if let Some(served) = &mut config.served {
            let (bound, address) = bind_listener(served.listen)?;
            (listener, served.listen) = (Some(bound), address);
        }
        let address = config.served.as_ref().map(|served| served.listen);
        let (commands, orders) = unbounded_channel();
        let (alive, ended) = channel();
        let figures = Arc::new(ControlFigures::default());
        let run = control_loop::prepare_loop(config, listener, (Box::new(up), Arc::clone(&figures)), orders)?;
        let thread = std::thread::Builder::new().name("mesh-control".into());
        let thread = thread.spawn(move || {
            run();
            drop(alive);
        });
        let thread = thread.map_err(|source| MeshError::Os { doing: "start a thread", source })?;
        Ok(Self { commands, address, figures, thread: Some(thread), ended })
    }

    /// Announces changes of the blocks kept on this node to its followers. With `at_once`, as for blocks
    /// computed for another engine, they are not gathered while a request of any follower waits.
    pub fn publish(&self, changes: Vec<DigestChange>, at_once: bool) {
        self.order(ControlCommand::Publish(changes, at_once));
    }

    /// Replaces the promises of this node's engines. Each promise is given by its last keys. Followers get
    /// the promises behind all changes published before.
    pub fn promise(&self, promises: Vec<Digest>) {
        self.order(ControlCommand::Promise(promises));
    }

    /// Requests the whole inventory of a peer again, because its filter is too full. A [`MemberEvent::Snapshot`]
    /// with more room follows.
    pub fn resync(&self, peer: PeerNumber) {
        self.order(ControlCommand::Resync(peer));
    }

    /// Asks a member for its best blocks. One [`MemberEvent::Listed`] follows.
    pub fn ask_blocks(&self, peer: PeerNumber, ask: BlocksAsk) {
        self.order(ControlCommand::AskBlocks(peer, ask));
    }

    /// Tells the followers that this node is about to leave: they may ask for blocks that no other node has.
    pub fn leave(&self) {
        self.order(ControlCommand::Leave);
    }

    /// Returns a handle to ask members for their namespaces.
    pub fn asker(&self) -> NamespaceAsker {
        NamespaceAsker(self.commands.clone())
    }

    /// Asks peers to send their changes sooner for a time, because a request here waits for a block which a
    /// peer may be about to have. Call it again every second while such a request waits. It sends a message
    /// to each peer.
    pub fn announce_wait(&self) {
        self.order(ControlCommand::Wait);
    }

    /// The time between two batches to a follower without a waiting request.
    pub fn pace(&self) -> Duration {
        Duration::from_micros(self.figures.pace_us.load(Ordering::Relaxed))
    }

    /// The address of this node's control service; `None` for an observer.
    pub fn listen_address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Listed addresses without a member where a node is expected.
    pub fn endpoints_empty(&self) -> usize {
        self.figures.empty.load(Ordering::Relaxed)
    }

    /// Listed names whose last resolution failed.
    pub fn names_unresolved(&self) -> usize {
        self.figures.unresolved.load(Ordering::Relaxed)
    }

    /// Leaves the mesh. The membership ends once etcd or the peers notice it. No [`MemberEvent`] follows.
    pub fn drain(&self) {
        self.order(ControlCommand::Drain);
    }

    /// Sends a command to the thread, which ends only after a drain.
    fn order(&self, command: ControlCommand) {
        let _ = self.commands.send(command);
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.drain();
        // A stuck thread is abandoned.
        let stuck = self.ended.recv_timeout(STOP_MAX) == Err(std::sync::mpsc::RecvTimeoutError::Timeout);
        if let (Some(thread), false) = (self.thread.take(), stuck) {
            let _ = thread.join();
        }
    }
}
