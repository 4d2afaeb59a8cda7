//! What carries blocks between the pools of two sidecars.
//!
//! The caller decides and never waits: it posts [`Fetch`]es and answers what [`Up`] brings. To it a fetch from a peer is
//! what a read from an SSD is: slots are filled, and one [`Done`] for each block says what came of it.
//!
//! - A slot given to a fetch is the fetch's until its `Done`, whatever became of the peer, the stream or the query.
//! - Granted slots are the transport's until it says [`Up::Release`], which it does exactly once for every grant.
//! - Every byte that arrives is verified against the checksum that the owner states.
//! - Nothing waits for ever: every fetch ends by its time, whatever the peer does.

#[cfg(feature = "rdma")]
pub mod rdma;
pub mod tcp;

use std::fmt;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::time::Duration;

pub use shm_protocol::key::Label;
use shm_protocol::pool::SlotRef;
use thiserror::Error;

use crate::Error;
use crate::refusals::Reason;

/// Bytes of the longest name of a node: that of the longest DNS name.
pub const NODE_BYTES_MAX: usize = 253;
/// Members that a node knows of, and the most that it serves: each costs a stream, its filter and 256 KiB.
pub const MEMBERS_MAX: usize = 1024;

/// A node's name, the same in all its lives: its pod's name, or host:port.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct NodeId(String);

/// A life of a node, drawn at its start: a message of another life is refused.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub struct BootId(pub NonZeroU64);

/// Names a peer between the caller and the transport.
#[derive(Copy, Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PeerNumber(pub u32);

/// A member of the mesh.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Peer {
    pub node: NodeId,
    /// The life of it that is a member; `None` where the membership is a static list, which knows none.
    pub boot: Option<BootId>,
    /// Where it serves blocks.
    pub address: SocketAddr,
}

/// Blocks wanted from a peer. An end comes for each of them, at the latest when `deadline` and then one
/// [`tcp::Limits::progress`] have passed.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Fetch {
    /// The name that [`Done`] answers with; not used again before all of its ends have come.
    pub ticket: u64,
    pub peer: PeerNumber,
    /// What is wanted, and where in the pool it goes: the slot is the fetch's until its [`Done`].
    pub blocks: Vec<(Label, u64)>,
    /// How long it may take in all.
    pub deadline: Duration,
}

/// One block of a fetch has ended, in any order, as they arrive: the slot is the caller's again.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Done {
    pub ticket: u64,
    /// The block's number in it.
    pub index: u32,
    /// The checksum (XXH3-64) of the block that the slot now holds, or why it holds none.
    pub result: Result<u64, Fault>,
}

/// Why a block did not come. Each is a miss, and counted.
#[derive(Copy, Clone, Debug, Eq, Error, PartialEq)]
pub enum Fault {
    /// The owner has it no more, or never had.
    #[error("the peer has no such block")]
    Absent,
    /// Other bytes arrived than the owner stated.
    #[error("the block's checksum does not match")]
    Corrupt,
    /// The stream ended in the middle of the block.
    #[error("the peer closed the connection within a block")]
    Short,
    #[error("{0} took too long")]
    Timeout(Stage),
    #[error("the connection failed: {0}")]
    Peer(ErrorKind),
    /// The peer's bytes are none that a peer sends.
    #[error("the peer sent {0}")]
    Malformed(&'static str),
    /// This side or the other will not.
    #[error("refused: {0}")]
    Refused(Refusal),
    /// The caller cancelled it, or the peer left, or the transport was stopped.
    #[error("the fetch was stopped")]
    Stopped,
}

shm_protocol::named! {
    /// What took too long.
    pub enum Stage {
        Connect = "connecting",
        /// TLS and the first frames.
        Handshake = "the handshake",
        /// From asking to an answer.
        FirstByte = "the answer",
        Progress = "a part of a block",
        Whole = "the fetch",
    }
}

/// Why one side will not.
#[derive(Copy, Clone, Debug, Eq, Error, PartialEq)]
pub enum Refusal {
    /// Another version of the protocol.
    #[error("the peer runs another release (its protocol is version {0}): run the same on every node")]
    Version(u16),
    /// Another node answers at this address.
    #[error("another node answers at this address")]
    OtherNode,
    /// Another life than the one that was meant: it was restarted.
    #[error("the node was restarted")]
    OtherBoot,
    /// The one that asks is no member, or no more.
    #[error("not a member, or no longer one")]
    NotMember,
    /// A certificate is missing, expired or not of the mesh's authority.
    #[error("the certificate is not accepted")]
    Certificate,
    /// As much is under way as may be.
    #[error("too many requests are under way")]
    Busy,
    /// As many connections are served as may be.
    #[error(
        "the limit of connections is reached: lower --tcp-streams, or --qps-per-peer with --nics, on every node"
    )]
    Full,
    /// It is about to end.
    #[error("the sidecar is ending")]
    Draining,
    /// Bytes that are none of the protocol.
    #[error("malformed")]
    Malformed,
    /// Both sides must have as many NICs and queue pairs; these are the other's.
    #[error(
        "the peer has {nics} NICs for RDMA and {pairs} queue pairs of each to a peer: pass the same number of both on \
         every node"
    )]
    Queues {
        nics: u8,
        /// Queue pairs of each.
        pairs: u8,
    },
}

/// What a transport tells its caller. It is called on threads of the transport and must not wait.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Up {
    /// A block of a fetch has ended.
    Done(Done),
    /// A peer wants blocks: answered by one [`Granted`], soon.
    Asked {
        ask: u64,
        peer: PeerNumber,
        /// What it asks for.
        blocks: Vec<Label>,
    },
    /// The checksum of a granted slot, which nobody knew: for its header. Comes before its [`Up::Release`].
    Checksum {
        slot: SlotRef,
        /// XXH3-64 of the block.
        checksum: u64,
    },
    /// The slots of a grant are the caller's again.
    Release {
        ask: u64,
        /// Blocks of it that were sent whole.
        sent: u32,
    },
    /// A peer answered at a new connection, in this life of it.
    Connected {
        peer: PeerNumber,
        /// The life that answered.
        boot: BootId,
    },
    /// A connection to a peer could not be made, or broke. What was asked over it ends by itself.
    PeerDown { peer: PeerNumber, fault: Fault },
    /// Something an operator should know.
    Note(String),
}

/// The answer to [`Up::Asked`]: one entry for each block, `None` where it is absent.
#[derive(Clone, Debug)]
pub struct Granted {
    pub ask: u64,
    /// Slots held until [`Up::Release`].
    pub slots: Vec<Option<Grant>>,
}

/// A slot that may be read.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Grant {
    /// The slot, which holds the block that was asked for, in its length.
    pub slot: SlotRef,
    /// XXH3-64 of it, where it is known.
    pub checksum: Option<u64>,
}

/// What carries blocks. No call waits.
pub trait Transport: Send + Sync {
    /// A member: it may be fetched from, and may ask. One of that number before it has left.
    fn join(&self, number: PeerNumber, peer: Peer);
    /// A member no more, or fenced: what is under way with it ends, and it is refused from now on.
    fn leave(&self, number: PeerNumber);
    /// Begins a fetch. What cannot be begun ends at once.
    fn post(&self, fetch: Fetch);
    /// Ends a fetch early, as [`Fault::Stopped`]: blocks whose bytes are arriving within [`tcp::Limits::progress`], the
    /// others at once.
    fn cancel(&self, ticket: u64);
    fn grant(&self, granted: Granted);
    /// Takes on nothing new from now on, in either direction. What is under way ends by itself.
    fn drain(&self);
}

// === impl NodeId ===

impl NodeId {
    /// A name, if it can be one.
    pub fn new(name: impl Into<String>) -> Result<Self, Error> {
        let name = name.into();
        let fits =
            (1..=NODE_BYTES_MAX).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
        if fits { Ok(Self(name)) } else { Err(Error::Node(name)) }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

// === impl Fault ===

impl Fault {
    /// The refusal that it is; `None` where nobody was reached, or a block was not to be had.
    fn reason(self) -> Option<Reason> {
        match self {
            Self::Timeout(Stage::Handshake) => Some(Reason::Silent),
            Self::Timeout(Stage::FirstByte | Stage::Progress | Stage::Whole) => Some(Reason::Slow),
            Self::Malformed(_) => Some(Reason::Malformed),
            Self::Refused(refusal) => Some(refusal.into()),
            Self::Timeout(Stage::Connect)
            | Self::Absent
            | Self::Corrupt
            | Self::Short
            | Self::Peer(_)
            | Self::Stopped => None,
        }
    }
}

impl From<Refusal> for Reason {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Version(_) => Self::Version,
            Refusal::OtherNode | Refusal::OtherBoot => Self::OtherLife,
            Refusal::NotMember => Self::NotMember,
            Refusal::Certificate => Self::Certificate,
            Refusal::Busy => Self::Busy,
            Refusal::Full => Self::Full,
            Refusal::Draining => Self::Draining,
            Refusal::Malformed => Self::Malformed,
            Refusal::Queues { .. } => Self::Queues,
        }
    }
}
