//! The protocol of inventories: messages between nodes about the blocks they keep.
//!
//! It is gRPC over HTTP/2 on the address of `--mesh-listen`, under mutual TLS 1.3 with the files of the block
//! transport, or in plaintext in a mesh so configured. A peer follows by `pillion.mesh.v1.Inventory/Follow`:
//! one [`FollowRequest`] and then a stream of [`FollowReply`] for as long as the connection lives. One
//! connection carries one such stream.
//!
//! 1. The server checks `version` and `mesh`, and refuses others with FAILED_PRECONDITION and a text with the
//!    reason.
//! 2. The first reply is [`FollowHello`], with the server's name and life. A follower hangs up if it expected
//!    another node, or another life.
//! 3. If the request names the server's life and a sequence in the memory of its feed, deltas follow from
//!    there. Otherwise [`Begin`] voids the follower's knowledge, and all digests follow in [`DigestChunk`]s,
//!    ascending; the last chunk is marked.
//! 4. A [`Delta`] has changes: before the last chunk only of digests up to the last one sent, as the later
//!    ones come in their new state. Its `after` is the sequence known to the follower; another one is a gap,
//!    and the follower requests everything again.
//! 5. A [`FollowHeartbeat`] comes if no other message came for a second. A follower hangs up after 5 s of silence,
//!    and the server closes a connection if its follower reads nothing for 5 s.
//! 6. The more followers a server has, the longer each rests between two deltas ([`crate::pace`]). A follower
//!    with a waiting request calls `pillion.mesh.v1.Inventory/Wait` beside its stream, and rests less for 2 s;
//!    changes not sent to it so far come at once. It calls only a server with `hears_waits` in its greeting:
//!    an older server accepts no call beside a stream.
//! 7. [`FollowPromises`] come to a follower with `hears_promises` in its request, behind the last chunk and all
//!    deltas before: everything promised by this node's engines, as the digests of the last two keys of each
//!    prompt. They replace the promises sent before, and end with the stream. An older follower does not
//!    request them, and an older server does not send them.
//!
//! 8. A server with `keeps_asks` in its greeting keeps standing asks: the follower may send `Stand` frames to its
//!    block transport over TCP ([`crate::transport::tcp::frame`]). An older server states nothing, and gets none.
//!
//! 9. A server with `lists_blocks` in its greeting has the method of [`blocks`]. [`FollowLeaving`] comes to a
//!    follower with `hears_leaving` in its request, once: the node is about to leave, and lists blocks that no
//!    other node has. An older follower does not request it.
//!
//! A digest is XXH3-64 over namespace digest (16 bytes), group (u32, little-endian) and hash (32 bytes) of a
//! block ([`Digest`]). With a thinning of n, only digests are sent whose n bits from bit 16 up are zero.
//!
//! 9. A greeting has the engines of the server's node ([`engines`]), for routers.
//!
//! A router follows as an observer: `observes` in its requests. It has no blocks and serves nothing. The
//! server counts observers apart from members, so they take no member's place.
//!
//! The method of [`namespaces`] returns a peer's namespaces.
//!
//! A message has at most [`REPLY_BYTES_MAX`]; a longer one, an unknown kind, or one out of order ends the
//! stream.

#![allow(clippy::large_enum_variant, reason = "the oneof as prost wants it; one at a time")]

pub mod blocks;
pub mod engines;
pub mod namespaces;

use std::net::SocketAddr;
use std::num::NonZeroU64;

use prost::Oneof;

use self::engines::{AnnouncedEngine, EngineMessage};
use super::{ControlConfig, DataAddresses, MESH_BYTES_MAX, ServedAddresses};
use crate::digest::{Digest, Thinning};
use crate::feed::{CHUNK_DIGESTS_MAX, FeedMessage};
use crate::membership::Identity;
use crate::transport::{BootId, NodeId};

/// Version of the protocol. Both sides refuse another one.
pub const VERSION: u32 = 1;
/// Maximum bytes of a request: two names and a few numbers.
pub const REQUEST_BYTES_MAX: usize = 4096;
/// Maximum bytes of a reply: a full chunk and its frame.
pub const REPLY_BYTES_MAX: usize = CHUNK_DIGESTS_MAX * size_of::<u64>() + 4096;

/// The request of a follower.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FollowRequest {
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The follower's mesh.
    #[prost(string, tag = "2")]
    pub mesh: String,
    #[prost(string, tag = "3")]
    pub node: String,
    #[prost(fixed64, tag = "4")]
    pub boot: u64,
    /// The life of the server with a feed known in part, or zero.
    #[prost(fixed64, tag = "5")]
    pub known_boot: u64,
    /// The last sequence known of the feed.
    #[prost(uint64, tag = "6")]
    pub known_sequence: u64,
    /// The thinning to use.
    #[prost(uint32, tag = "7")]
    pub thinning: u32,
    /// True if the follower understands [`FollowPromises`].
    #[prost(bool, tag = "8")]
    pub hears_promises: bool,
    /// True if the follower understands [`FollowLeaving`].
    #[prost(bool, tag = "9")]
    pub hears_leaving: bool,
    /// True if the follower is no member.
    #[prost(bool, tag = "10")]
    pub observes: bool,
}

/// A message of a server.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FollowReply {
    /// The message; a reply without one is malformed.
    #[prost(oneof = "Said", tags = "1, 2, 3, 4, 5, 6, 7")]
    pub said: Option<Said>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum Said {
    #[prost(message, tag = "1")]
    Hello(FollowHello),
    #[prost(message, tag = "2")]
    Begin(Begin),
    #[prost(message, tag = "3")]
    Chunk(DigestChunk),
    #[prost(message, tag = "4")]
    Delta(Delta),
    #[prost(message, tag = "5")]
    Heartbeat(FollowHeartbeat),
    #[prost(message, tag = "6")]
    Promises(FollowPromises),
    #[prost(message, tag = "7")]
    Leaving(FollowLeaving),
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct FollowHello {
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The server's mesh.
    #[prost(string, tag = "2")]
    pub mesh: String,
    #[prost(string, tag = "3")]
    pub node: String,
    #[prost(fixed64, tag = "4")]
    pub boot: u64,
    /// Address of the block transport over TCP: an IP address and a port.
    #[prost(string, tag = "5")]
    pub tcp: String,
    /// Address at which RDMA is set up, in the same form; empty without NICs.
    #[prost(string, tag = "6")]
    pub rdma: String,
    /// True if the server has the method `Wait`.
    #[prost(bool, tag = "7")]
    pub hears_waits: bool,
    /// True if the server keeps asks for promised blocks until these are committed: its block transport over TCP
    /// takes `Stand` frames.
    #[prost(bool, tag = "8")]
    pub keeps_asks: bool,
    /// True if the server has the method `ListBlocks`.
    #[prost(bool, tag = "9")]
    pub lists_blocks: bool,
    /// The node's engines.
    #[prost(message, repeated, tag = "10")]
    pub engines: Vec<EngineMessage>,
}

/// The parts of the protocol that a server has and an earlier one lacks.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct ServerFeatures {
    /// It has the method `Wait`.
    pub hears_waits: bool,
    /// It keeps standing asks.
    pub keeps_asks: bool,
    /// It has the method `ListBlocks`.
    pub lists_blocks: bool,
    /// The node's engines.
    pub engines: Vec<AnnouncedEngine>,
}

/// Voids all digests sent before.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Begin {
    #[prost(uint64, tag = "1")]
    pub sequence: u64,
    /// Approximate number of the digests to follow.
    #[prost(uint64, tag = "2")]
    pub keys: u64,
    #[prost(uint32, tag = "3")]
    pub thinning: u32,
}

/// The next digests, ascending.
#[derive(Clone, PartialEq, prost::Message)]
pub struct DigestChunk {
    /// The sequence at which these digests are current.
    #[prost(uint64, tag = "1")]
    pub sequence: u64,
    #[prost(fixed64, repeated, tag = "2")]
    pub digests: Vec<u64>,
    /// True for the last chunk.
    #[prost(bool, tag = "3")]
    pub last: bool,
}

/// Changes: up to [`BATCH_CHANGES_MAX`](crate::feed::BATCH_CHANGES_MAX).
#[derive(Clone, PartialEq, prost::Message)]
pub struct Delta {
    /// The sequence before the changes.
    #[prost(uint64, tag = "1")]
    pub after: u64,
    /// The sequence after the changes.
    #[prost(uint64, tag = "2")]
    pub sequence: u64,
    #[prost(fixed64, repeated, tag = "3")]
    pub removed: Vec<u64>,
    /// Digests kept from now on.
    #[prost(fixed64, repeated, tag = "4")]
    pub added: Vec<u64>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct FollowHeartbeat {}

/// The node is about to leave, and lists its best blocks.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct FollowLeaving {}

/// All promises of the node's engines: up to [`PROMISES_MAX`](crate::feed::PROMISES_MAX). No thinning applies
/// to them.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FollowPromises {
    #[prost(fixed64, repeated, tag = "1")]
    pub digests: Vec<u64>,
}

/// The follower of this connection waits for a block.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct WaitRequest {}

/// The server counts the follower as waiting.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct WaitReply {}

/// A checked reply.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum CheckedReply {
    /// The server's mesh, identity and features.
    Hello(String, Identity, ServerFeatures),
    Feed(FeedMessage),
    Heartbeat,
    Leaving,
}

/// A fault of a message.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum MalformedReply {
    #[error("bytes that are not a message")]
    Bytes,
    /// The message has an unknown kind.
    #[error("a message of an unknown kind")]
    Kind,
    #[error("version {0} of the protocol, and this is version {VERSION}: run the same release on every node")]
    Version(u32),
    /// A name, a life or an address is invalid.
    #[error("a greeting with an invalid {0}")]
    Hello(&'static str),
    #[error("a message that is too long")]
    Long,
    #[error("an invalid thinning")]
    Thinning,
    /// A part of a block in a list is missing or out of range.
    #[error("a list with an invalid block")]
    Blocks,
}

// === impl FollowRequest ===

impl FollowRequest {
    /// The request of this node. `known` is the life and the last sequence known of the server.
    pub(super) fn new(config: &ControlConfig, known: Option<(BootId, u64)>, thinning: Thinning) -> Self {
        let (known_boot, known_sequence) = known.map_or((0, 0), |(boot, sequence)| (boot.0.get(), sequence));
        Self {
            version: VERSION,
            mesh: config.mesh.clone(),
            node: config.node.as_str().into(),
            boot: config.boot.0.get(),
            known_boot,
            known_sequence,
            thinning: thinning.power().into(),
            hears_promises: !config.observes(),
            hears_leaving: !config.observes(),
            observes: config.observes(),
        }
    }
}

// === impl FollowReply ===

impl FollowReply {
    /// The greeting of a node with these addresses.
    pub(super) fn hello(config: &ControlConfig, served: &ServedAddresses) -> Self {
        let said = Said::Hello(FollowHello {
            version: VERSION,
            mesh: config.mesh.clone(),
            node: config.node.as_str().into(),
            boot: config.boot.0.get(),
            tcp: served.data.tcp.to_string(),
            rdma: served.data.rdma.map(|rdma| rdma.to_string()).unwrap_or_default(),
            hears_waits: true,
            keeps_asks: true,
            lists_blocks: true,
            engines: config.engines.iter().map(EngineMessage::from).collect(),
        });
        Self { said: Some(said) }
    }

    /// A heartbeat.
    pub(super) fn heartbeat() -> Self {
        Self { said: Some(Said::Heartbeat(FollowHeartbeat {})) }
    }

    /// The message of a node about to leave.
    pub(super) fn leaving() -> Self {
        Self { said: Some(Said::Leaving(FollowLeaving {})) }
    }

    /// Checks a reply.
    pub fn validate(self) -> Result<CheckedReply, MalformedReply> {
        let digests = |digests: Vec<u64>| digests.into_iter().map(Digest).collect();
        Ok(match self.said.ok_or(MalformedReply::Kind)? {
            Said::Hello(hello) => hello.validate()?,
            Said::Begin(Begin { sequence, keys, thinning }) => {
                CheckedReply::Feed(FeedMessage::Begin { sequence, keys, thinning: thinning_of(thinning)? })
            }
            Said::Chunk(chunk) => {
                let DigestChunk { sequence, digests: told, last } = chunk;
                CheckedReply::Feed(FeedMessage::Chunk { sequence, digests: digests(told), last })
            }
            Said::Delta(Delta { after, sequence, removed, added }) => {
                let (removed, added) = (digests(removed), digests(added));
                CheckedReply::Feed(FeedMessage::Delta { after, sequence, removed, added })
            }
            Said::Heartbeat(_) => CheckedReply::Heartbeat,
            Said::Leaving(_) => CheckedReply::Leaving,
            Said::Promises(promises) => CheckedReply::Feed(FeedMessage::Promises(digests(promises.digests))),
        })
    }

    /// Decodes and checks a reply.
    pub fn decode_and_validate(bytes: &[u8]) -> Result<CheckedReply, MalformedReply> {
        decode_reply::<Self>(bytes)?.validate()
    }
}

impl From<FeedMessage> for FollowReply {
    fn from(message: FeedMessage) -> Self {
        let words = |digests: Vec<Digest>| digests.into_iter().map(|digest| digest.0).collect();
        let said = match message {
            FeedMessage::Begin { sequence, keys, thinning } => {
                Said::Begin(Begin { sequence, keys, thinning: thinning.power().into() })
            }
            FeedMessage::Chunk { sequence, digests, last } => {
                Said::Chunk(DigestChunk { sequence, digests: words(digests), last })
            }
            FeedMessage::Delta { after, sequence, removed, added } => {
                Said::Delta(Delta { after, sequence, removed: words(removed), added: words(added) })
            }
            FeedMessage::Promises(promises) => Said::Promises(FollowPromises { digests: words(promises) }),
        };
        Self { said: Some(said) }
    }
}

impl FollowHello {
    fn validate(self) -> Result<CheckedReply, MalformedReply> {
        let (node, boot) = check_sender(self.version, &self.mesh, self.node, self.boot)?;
        let address = |text: &str, what| text.parse::<SocketAddr>().map_err(|_| MalformedReply::Hello(what));
        let tcp = address(&self.tcp, "address")?;
        let rdma = Some(&self.rdma).filter(|rdma| !rdma.is_empty());
        let rdma = rdma.map(|rdma| address(rdma, "RDMA address")).transpose()?;
        let data = DataAddresses { tcp, rdma };
        let engines = EngineMessage::check_all(&self.engines);
        let Self { hears_waits, keeps_asks, lists_blocks, .. } = self;
        let features = ServerFeatures { hears_waits, keeps_asks, lists_blocks, engines };
        Ok(CheckedReply::Hello(self.mesh, Identity { node, boot, data }, features))
    }
}

/// Checks the fields of a greeting; returns the server's name and life.
fn check_sender(
    version: u32,
    mesh: &str,
    node: String,
    boot: u64,
) -> Result<(NodeId, BootId), MalformedReply> {
    if version != VERSION {
        return Err(MalformedReply::Version(version));
    }
    if mesh.len() > MESH_BYTES_MAX {
        return Err(MalformedReply::Hello("mesh"));
    }
    let node = NodeId::new(node).map_err(|_| MalformedReply::Hello("name"))?;
    let boot = NonZeroU64::new(boot).ok_or(MalformedReply::Hello("life"))?;
    Ok((node, BootId(boot)))
}

/// Decodes a reply.
fn decode_reply<R: prost::Message + Default>(bytes: &[u8]) -> Result<R, MalformedReply> {
    if bytes.len() > REPLY_BYTES_MAX {
        return Err(MalformedReply::Long);
    }
    R::decode(bytes).map_err(|_| MalformedReply::Bytes)
}

/// Checks a thinning.
pub(super) fn thinning_of(power: u32) -> Result<Thinning, MalformedReply> {
    u8::try_from(power).ok().and_then(Thinning::new).ok_or(MalformedReply::Thinning)
}
