//! Transports: they carry blocks between the pools of two sidecars.
//!
//! The caller decides and never waits: it posts [`Fetch`]es and answers events of [`TransportEvent`]. A fetch from a peer
//! looks like a read from an SSD: slots are filled, and each block ends with one [`FetchDone`].
//!
//! - A slot given to a fetch belongs to it until its `FetchDone`, even if the peer, the stream or the query is
//!   gone.
//! - Granted slots belong to the transport until it sends [`TransportEvent::Release`], exactly once for every grant.
//! - Every byte received is verified against the checksum stated by the owner.
//! - Every wait has a limit: every fetch ends by its time, even if the peer does nothing.

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

use crate::MeshError;
use crate::refusals::Reason;

/// Maximum bytes of a node's name: the longest DNS name.
pub const NODE_BYTES_MAX: usize = 253;
/// Maximum members known to a node and served by it: each costs a stream, its filter and 256 KiB.
pub const MEMBERS_MAX: usize = 1024;

/// The name of a node, the same in all its lives: the name of its pod, or host:port.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct NodeId(String);

/// A life of a node, drawn at its start. A message of another life is refused.
#[derive(Copy, Clone, Debug, Eq, Hash, PartialEq)]
pub struct BootId(pub NonZeroU64);

/// The number of a peer between the caller and the transport.
#[derive(Copy, Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct PeerNumber(pub u32);

/// A member of the mesh.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Peer {
    pub node: NodeId,
    /// The member's life; `None` if it is unknown, as in a static list.
    pub boot: Option<BootId>,
    /// The address of its block transport.
    pub address: SocketAddr,
}

/// Blocks to fetch from a peer. Each of them ends, at the latest when `deadline` and then one
/// [`tcp::TcpLimits::progress`] have passed.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Fetch {
    /// Returned in each [`FetchDone`]; not used again before all blocks have ended.
    pub ticket: u64,
    pub peer: PeerNumber,
    /// Each block with its slot in the pool. The slot belongs to the fetch until its [`FetchDone`].
    pub blocks: Vec<(Label, u64)>,
    /// Time limit of the whole fetch.
    pub deadline: Duration,
    /// The terms for blocks that the peer has promised, and may commit later. The peer must have stated that it
    /// keeps standing asks; the blocks then follow each other in the promised prompt.
    pub standing: Option<StandingTerms>,
}

/// The terms of an ask for promised blocks: it stands at the owner until they are committed.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct StandingTerms {
    /// Milliseconds for which the ask may stand.
    pub patience_ms: u32,
    /// Place of the first block among all blocks of the promised prompt.
    pub place: u32,
}

/// The end of a block of a fetch, in any order. The slot belongs to the caller again.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct FetchDone {
    pub ticket: u64,
    /// The block's number in the fetch.
    pub index: u32,
    /// The checksum (XXH3-64) of the block now in the slot, or the reason why it holds none.
    pub result: Result<u64, FetchFault>,
}

/// The reason why a block did not arrive. Each is a miss, and counted.
#[derive(Copy, Clone, Debug, Eq, Error, PartialEq)]
pub enum FetchFault {
    /// The owner no longer has the block, or never had it.
    #[error("the peer has no such block")]
    Absent,
    /// The bytes differ from the checksum stated by the owner.
    #[error("the block's checksum does not match")]
    Corrupt,
    /// The stream ended in the middle of the block.
    #[error("the peer closed the connection within a block")]
    Short,
    #[error("{0} took too long")]
    Timeout(FetchStage),
    #[error("the connection failed: {0}")]
    Peer(ErrorKind),
    /// The bytes are not from this protocol.
    #[error("the peer sent {0}")]
    Malformed(&'static str),
    /// This side or the peer refused.
    #[error("refused: {0}")]
    Refused(Refusal),
    /// The caller cancelled the fetch, the peer left, or the transport was stopped.
    #[error("the fetch was stopped")]
    Stopped,
}

shm_protocol::named! {
    /// The stage of a fetch that took too long.
    pub enum FetchStage {
        Connect = "connecting",
        /// TLS and the first frames.
        Handshake = "the handshake",
        /// From a request to its answer.
        FirstByte = "the answer",
        Progress = "a part of a block",
        Whole = "the fetch",
    }
}

/// The reason for a refusal.
#[derive(Copy, Clone, Debug, Eq, Error, PartialEq)]
pub enum Refusal {
    /// The peer has another version of the protocol.
    #[error("the peer runs another release (its protocol is version {0}): run the same on every node")]
    Version(u16),
    /// Another node answers at this address.
    #[error("another node answers at this address")]
    OtherNode,
    /// Another life of the node answers: it was restarted.
    #[error("the node was restarted")]
    OtherBoot,
    /// The client is not a member, or no longer one.
    #[error("not a member, or no longer one")]
    NotMember,
    /// A certificate is missing, expired or not of the mesh's authority.
    #[error("the certificate is not accepted")]
    Certificate,
    /// The limit of requests under way is reached.
    #[error("too many requests are under way")]
    Busy,
    /// The limit of connections is reached.
    #[error(
        "the limit of connections is reached: lower --tcp-streams, or --qps-per-peer with --nics, on every node"
    )]
    Full,
    /// The node is about to end.
    #[error("the sidecar is ending")]
    Draining,
    /// The bytes are not from this protocol.
    #[error("malformed")]
    Malformed,
    /// Both sides must have the same number of NICs and queue pairs; these are the numbers of the peer.
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

/// Events of a transport for its caller. They are sent on threads of the transport, and the receiver must not
/// wait.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum TransportEvent {
    /// A block of a fetch has ended.
    Done(FetchDone),
    /// A peer requests blocks. The caller answers with one [`GrantedSlots`]: soon, or within the patience of a
    /// standing ask.
    Asked {
        ask: u64,
        peer: PeerNumber,
        /// The requested blocks.
        blocks: Vec<Label>,
        standing: Option<StandingTerms>,
    },
    /// The connection of a standing ask has ended. The caller answers it at once, unless it has already.
    Withdrawn { ask: u64 },
    /// The checksum of a granted slot, unknown until now: for its header. Comes before its [`TransportEvent::Release`].
    Checksum {
        slot: SlotRef,
        /// XXH3-64 of the block.
        checksum: u64,
    },
    /// The slots of a grant belong to the caller again.
    Release {
        ask: u64,
        /// Number of its blocks sent whole.
        sent: u32,
    },
    /// A peer answered on a new connection, in this life.
    Connected {
        peer: PeerNumber,
        /// The life that answered.
        boot: BootId,
    },
    /// A connection to a peer could not be made, or broke. Its requests end by themselves.
    PeerDown { peer: PeerNumber, fault: FetchFault },
    /// A text for the operator.
    Note(String),
}

/// The answer to [`TransportEvent::Asked`]: one entry for each block, `None` for an absent one.
#[derive(Clone, Debug)]
pub struct GrantedSlots {
    pub ask: u64,
    /// Slots held until [`TransportEvent::Release`].
    pub slots: Vec<Option<Grant>>,
}

/// A slot to be read by a peer.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Grant {
    /// The slot with the requested block, of the requested length.
    pub slot: SlotRef,
    /// XXH3-64 of the block, if known.
    pub checksum: Option<u64>,
}

/// A transport of blocks. No call waits.
pub trait Transport: Send + Sync {
    /// Adds a member: it may be fetched from, and may request blocks. An earlier peer of that number has
    /// left.
    fn add_peer(&self, number: PeerNumber, peer: Peer);
    /// Removes a member: its fetches and requests end, and it is refused from now on.
    fn remove_peer(&self, number: PeerNumber);
    /// Begins a fetch. Blocks that cannot begin end at once.
    fn post_fetch(&self, fetch: Fetch);
    /// Ends a fetch early, as [`FetchFault::Stopped`]: blocks already arriving within [`tcp::TcpLimits::progress`],
    /// the others at once.
    fn cancel(&self, ticket: u64);
    fn grant_slots(&self, granted: GrantedSlots);
    /// Accepts nothing new from now on, in either direction. Work under way ends by itself.
    fn drain(&self);
}

// === impl NodeId ===

impl NodeId {
    /// Checks a name. Fails if it is empty, too long or has other characters than printable ASCII.
    pub fn new(name: impl Into<String>) -> Result<Self, MeshError> {
        let name = name.into();
        let fits =
            (1..=NODE_BYTES_MAX).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
        if fits { Ok(Self(name)) } else { Err(MeshError::Node(name)) }
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

// === impl FetchFault ===

impl FetchFault {
    /// The reason to count; `None` if the peer was not reached, or only a block was missing.
    fn reason(self) -> Option<Reason> {
        match self {
            Self::Timeout(FetchStage::Handshake) => Some(Reason::Silent),
            Self::Timeout(FetchStage::FirstByte | FetchStage::Progress | FetchStage::Whole) => {
                Some(Reason::Slow)
            }
            Self::Malformed(_) => Some(Reason::Malformed),
            Self::Refused(refusal) => Some(refusal.into()),
            Self::Timeout(FetchStage::Connect)
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
