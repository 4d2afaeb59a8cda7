//! What nodes say to each other about what they keep: the protocol.
//!
//! gRPC over HTTP/2 on the address of `--mesh-listen`; under mutual TLS (1.3) with the files that carry blocks too, unless
//! the mesh is told to be plaintext. A peer follows by `pillion.mesh.v1.Inventory/Follow`: one [`FollowRequest`] and then a
//! stream of [`FollowReply`] for as long as the connection lives. One connection carries one such stream.
//!
//! 1. The server looks at `version` and `mesh`, and refuses others with FAILED_PRECONDITION and a text that says why.
//! 2. The first reply is [`Hello`]: who answers. A follower that meant another node, or another life, hangs up.
//! 3. If the request names the life that answers and a sequence that its feed remembers, deltas follow from there. Else
//!    [`Begin`] voids what the follower knew, and the digests follow in [`Chunk`]s, ascending, of which the last says so.
//! 4. A [`Delta`] tells what changed: before the last chunk only of digests up to the last one told, as the later ones come
//!    in their new state. Its `after` is the sequence that the follower is at; another one is a gap, and the follower asks
//!    anew.
//! 5. A [`Heartbeat`] comes when nothing else did for a second. A follower hangs up after 5 s of silence, and is hung up on
//!    when it takes nothing for 5 s.
//!
//! 6. The more followers a server has, the longer each rests between two deltas ([`crate::pace`]). One that waits for a block says so
//!    by `pillion.mesh.v1.Inventory/Wait`, beside its stream, and rests less for 2 s; it is what it has not been told that comes at
//!    once. Only a server whose greeting has `hears_waits` is asked: an older one takes no call beside a stream.
//!
//! 7. [`Promises`] come to a follower whose request has `hears_promises`, behind the last chunk and all deltas before: all that this
//!    node's engines have promised to compute, of each prompt the digests of its last two keys. They replace those told before, and
//!    end with the stream. An older follower does not ask for them, and an older server does not tell them.
//!
//! Digests are XXH3-64 over namespace digest (16 bytes), group (u32, little-endian) and hash (32 bytes) of a block
//! ([`Digest`]). A thinning of n means that only digests are told of which n bits from bit 16 up are zero.
//!
//! What namespaces a peer knows is asked by another method, of [`namespaces`].
//!
//! A message has at most [`REPLY_BYTES_MAX`]; a longer one, an unknown kind, or one out of order ends the stream.

#![allow(clippy::large_enum_variant, reason = "the oneof as prost wants it; one at a time")]

pub mod namespaces;

use std::net::SocketAddr;
use std::num::NonZeroU64;

use prost::Oneof;

use super::{Config, DataAddresses, MESH_BYTES_MAX};
use crate::digest::{Digest, Thinning};
use crate::feed::{CHUNK_DIGESTS_MAX, Message};
use crate::membership::Identity;
use crate::transport::{BootId, NodeId};

/// Another version is refused by both sides.
pub const VERSION: u32 = 1;
/// Bytes of a request at most: two names and a few numbers.
pub const REQUEST_BYTES_MAX: usize = 4096;
/// Bytes of a reply at most: a full chunk and its frame.
pub const REPLY_BYTES_MAX: usize = CHUNK_DIGESTS_MAX * size_of::<u64>() + 4096;

/// What a follower asks for.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FollowRequest {
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The mesh that it is of.
    #[prost(string, tag = "2")]
    pub mesh: String,
    #[prost(string, tag = "3")]
    pub node: String,
    #[prost(fixed64, tag = "4")]
    pub boot: u64,
    /// The life of the server whose feed it knows in part, or zero.
    #[prost(fixed64, tag = "5")]
    pub known_boot: u64,
    /// The sequence up to which it knows it.
    #[prost(uint64, tag = "6")]
    pub known_sequence: u64,
    /// The thinning that it wants.
    #[prost(uint32, tag = "7")]
    pub thinning: u32,
    /// Whether it knows [`Promises`].
    #[prost(bool, tag = "8")]
    pub hears_promises: bool,
}

/// What a server says.
#[derive(Clone, PartialEq, prost::Message)]
pub struct FollowReply {
    /// One of them; none is malformed.
    #[prost(oneof = "Said", tags = "1, 2, 3, 4, 5, 6")]
    pub said: Option<Said>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum Said {
    #[prost(message, tag = "1")]
    Hello(Hello),
    #[prost(message, tag = "2")]
    Begin(Begin),
    #[prost(message, tag = "3")]
    Chunk(Chunk),
    #[prost(message, tag = "4")]
    Delta(Delta),
    #[prost(message, tag = "5")]
    Heartbeat(Heartbeat),
    #[prost(message, tag = "6")]
    Promises(Promises),
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Hello {
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The mesh that it is of.
    #[prost(string, tag = "2")]
    pub mesh: String,
    #[prost(string, tag = "3")]
    pub node: String,
    #[prost(fixed64, tag = "4")]
    pub boot: u64,
    /// Where it serves blocks over TCP: an IP address and a port.
    #[prost(string, tag = "5")]
    pub tcp: String,
    /// Where RDMA is arranged with it, in the same form; empty if it has no NICs.
    #[prost(string, tag = "6")]
    pub rdma: String,
    /// Whether it has the method `Wait`.
    #[prost(bool, tag = "7")]
    pub hears_waits: bool,
}

/// What was told before is void.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Begin {
    #[prost(uint64, tag = "1")]
    pub sequence: u64,
    /// About as many digests follow.
    #[prost(uint64, tag = "2")]
    pub keys: u64,
    #[prost(uint32, tag = "3")]
    pub thinning: u32,
}

/// The next digests, ascending.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Chunk {
    /// The sequence as of which they are kept.
    #[prost(uint64, tag = "1")]
    pub sequence: u64,
    #[prost(fixed64, repeated, tag = "2")]
    pub digests: Vec<u64>,
    /// Whether these were the last.
    #[prost(bool, tag = "3")]
    pub last: bool,
}

/// What has changed: up to [`BATCH_CHANGES_MAX`](crate::feed::BATCH_CHANGES_MAX).
#[derive(Clone, PartialEq, prost::Message)]
pub struct Delta {
    /// The sequence that the changes follow.
    #[prost(uint64, tag = "1")]
    pub after: u64,
    /// The sequence that they lead to.
    #[prost(uint64, tag = "2")]
    pub sequence: u64,
    #[prost(fixed64, repeated, tag = "3")]
    pub removed: Vec<u64>,
    /// Kept from now on.
    #[prost(fixed64, repeated, tag = "4")]
    pub added: Vec<u64>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Heartbeat {}

/// All that is promised: up to [`PROMISES_MAX`](crate::feed::PROMISES_MAX). Of thinnings they know nothing.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Promises {
    #[prost(fixed64, repeated, tag = "1")]
    pub digests: Vec<u64>,
}

/// The follower of this connection waits for a block.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct WaitRequest {}

/// It is heard: the follower counts as one that waits.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct WaitReply {}

/// A reply, looked at.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Reply {
    /// Who answers, of which mesh, and whether it hears who waits.
    Hello(String, Identity, bool),
    Told(Message),
    Heartbeat,
}

/// What a reply should not be.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Malformed {
    #[error("bytes that are not a message")]
    Bytes,
    /// None of the kinds.
    #[error("a message of an unknown kind")]
    Kind,
    #[error("version {0} of the protocol, and this is version {VERSION}: run the same release on every node")]
    Version(u32),
    /// A name, a life or an address that is none.
    #[error("a greeting with an invalid {0}")]
    Hello(&'static str),
    #[error("a message that is too long")]
    Long,
    #[error("an invalid thinning")]
    Thinning,
}

// === impl FollowRequest ===

impl FollowRequest {
    /// What this node asks for, if of that life it knows that much.
    pub(super) fn new(config: &Config, known: Option<(BootId, u64)>, thinning: Thinning) -> Self {
        let (known_boot, known_sequence) = known.map_or((0, 0), |(boot, sequence)| (boot.0.get(), sequence));
        Self {
            version: VERSION,
            mesh: config.mesh.clone(),
            node: config.node.as_str().into(),
            boot: config.boot.0.get(),
            known_boot,
            known_sequence,
            thinning: thinning.power().into(),
            hears_promises: true,
        }
    }
}

// === impl FollowReply ===

impl FollowReply {
    /// Who this node is.
    pub(super) fn hello(config: &Config) -> Self {
        let said = Said::Hello(Hello {
            version: VERSION,
            mesh: config.mesh.clone(),
            node: config.node.as_str().into(),
            boot: config.boot.0.get(),
            tcp: config.data.tcp.to_string(),
            rdma: config.data.rdma.map(|rdma| rdma.to_string()).unwrap_or_default(),
            hears_waits: true,
        });
        Self { said: Some(said) }
    }

    /// That it is there.
    pub(super) fn heartbeat() -> Self {
        Self { said: Some(Said::Heartbeat(Heartbeat {})) }
    }

    /// What arrived, looked at.
    pub fn hear(self) -> Result<Reply, Malformed> {
        let digests = |digests: Vec<u64>| digests.into_iter().map(Digest).collect();
        Ok(match self.said.ok_or(Malformed::Kind)? {
            Said::Hello(hello) => hello.hear()?,
            Said::Begin(Begin { sequence, keys, thinning }) => {
                Reply::Told(Message::Begin { sequence, keys, thinning: thinning_of(thinning)? })
            }
            Said::Chunk(chunk) => {
                let Chunk { sequence, digests: told, last } = chunk;
                Reply::Told(Message::Chunk { sequence, digests: digests(told), last })
            }
            Said::Delta(Delta { after, sequence, removed, added }) => {
                let (removed, added) = (digests(removed), digests(added));
                Reply::Told(Message::Delta { after, sequence, removed, added })
            }
            Said::Heartbeat(_) => Reply::Heartbeat,
            Said::Promises(promises) => Reply::Told(Message::Promises(digests(promises.digests))),
        })
    }

    /// The bytes that arrived, looked at.
    pub fn decode_and_hear(bytes: &[u8]) -> Result<Reply, Malformed> {
        decode::<Self>(bytes)?.hear()
    }
}

impl From<Message> for FollowReply {
    fn from(message: Message) -> Self {
        let words = |digests: Vec<Digest>| digests.into_iter().map(|digest| digest.0).collect();
        let said = match message {
            Message::Begin { sequence, keys, thinning } => {
                Said::Begin(Begin { sequence, keys, thinning: thinning.power().into() })
            }
            Message::Chunk { sequence, digests, last } => {
                Said::Chunk(Chunk { sequence, digests: words(digests), last })
            }
            Message::Delta { after, sequence, removed, added } => {
                Said::Delta(Delta { after, sequence, removed: words(removed), added: words(added) })
            }
            Message::Promises(promises) => Said::Promises(Promises { digests: words(promises) }),
        };
        Self { said: Some(said) }
    }
}

impl Hello {
    fn hear(self) -> Result<Reply, Malformed> {
        let (node, boot) = greeter(self.version, &self.mesh, self.node, self.boot)?;
        let address = |text: &str, what| text.parse::<SocketAddr>().map_err(|_| Malformed::Hello(what));
        let tcp = address(&self.tcp, "address")?;
        let rdma = Some(&self.rdma).filter(|rdma| !rdma.is_empty());
        let rdma = rdma.map(|rdma| address(rdma, "RDMA address")).transpose()?;
        let data = DataAddresses { tcp, rdma };
        Ok(Reply::Hello(self.mesh, Identity { node, boot, data }, self.hears_waits))
    }
}

/// Who answers, if the version is this one and mesh, name and life are such.
fn greeter(version: u32, mesh: &str, node: String, boot: u64) -> Result<(NodeId, BootId), Malformed> {
    if version != VERSION {
        return Err(Malformed::Version(version));
    }
    if mesh.len() > MESH_BYTES_MAX {
        return Err(Malformed::Hello("mesh"));
    }
    let node = NodeId::new(node).map_err(|_| Malformed::Hello("name"))?;
    let boot = NonZeroU64::new(boot).ok_or(Malformed::Hello("life"))?;
    Ok((node, BootId(boot)))
}

/// The reply in these bytes.
fn decode<R: prost::Message + Default>(bytes: &[u8]) -> Result<R, Malformed> {
    if bytes.len() > REPLY_BYTES_MAX {
        return Err(Malformed::Long);
    }
    R::decode(bytes).map_err(|_| Malformed::Bytes)
}

/// A thinning, if it is one.
pub(super) fn thinning_of(power: u32) -> Result<Thinning, Malformed> {
    u8::try_from(power).ok().and_then(Thinning::new).ok_or(Malformed::Thinning)
}
