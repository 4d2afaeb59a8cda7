//! The second method, `pillion.mesh.v1.Inventory/Namespaces`: one [`NamespacesRequest`] and one
//! [`NamespacesReply`] over a connection of their own.
//!
//! The server checks `version` and `mesh` as for a follower. Its reply has at most [`REPLY_BYTES_MAX`]:
//! namespaces with the fewest blocks are left out first, and counted. A release without the method answers
//! UNIMPLEMENTED.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use prost::Message as _;
use shm_protocol::handshake::{FACTS_MAX, RANKS_MAX};
use shm_protocol::key::NamespaceDigest;
use shm_protocol::namespace::{self, Facts};

use super::{ControlConfig, MalformedReply, REPLY_BYTES_MAX, VERSION, check_sender, decode_reply};
use crate::transport::{BootId, NodeId};

/// Room for the other fields of a reply: two names and a few numbers.
const FRAME_BYTES: usize = 1024;
/// The tag and the length before a namespace.
const NAMESPACE_FRAME_BYTES: usize = 8;

/// The request of a client, with its name and life.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NamespacesRequest {
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The client's mesh.
    #[prost(string, tag = "2")]
    pub mesh: String,
    #[prost(string, tag = "3")]
    pub node: String,
    #[prost(fixed64, tag = "4")]
    pub boot: u64,
    /// True if the client is no member.
    #[prost(bool, tag = "5")]
    pub observes: bool,
}

/// The namespaces known to a node.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NamespacesReply {
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The node's mesh.
    #[prost(string, tag = "2")]
    pub mesh: String,
    #[prost(string, tag = "3")]
    pub node: String,
    #[prost(fixed64, tag = "4")]
    pub boot: u64,
    #[prost(message, repeated, tag = "5")]
    pub namespaces: Vec<NamespaceMessage>,
    /// Number of namespaces left out for lack of room.
    #[prost(uint64, tag = "6")]
    pub left_out: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct NamespaceMessage {
    #[prost(bytes = "vec", tag = "1")]
    pub digest: Vec<u8>,
    /// Empty if no engine of the namespace has connected in the node's life; then `block_bytes` and `shards`
    /// are zero.
    #[prost(btree_map = "string, string", tag = "2")]
    pub facts: BTreeMap<String, String>,
    /// Bytes of a block, all shards together.
    #[prost(uint64, tag = "3")]
    pub block_bytes: u64,
    #[prost(uint32, tag = "4")]
    pub shards: u32,
    #[prost(uint64, tag = "5")]
    pub memory_blocks: u64,
    #[prost(uint64, tag = "6")]
    pub disk_blocks: u64,
    // Tag 7 had tokens of prompts until 0.2.
}

/// A namespace known to a node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NodeNamespace {
    pub digest: NamespaceDigest,
    /// `None` if no engine of the namespace has connected in the node's life.
    pub stated: Option<StatedFacts>,
    /// Blocks in memory.
    pub memory_blocks: u64,
    pub disk_blocks: u64,
}

/// Statements of a namespace's engines.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct StatedFacts {
    /// Their digest is the digest of the namespace.
    pub facts: Arc<Facts>,
    /// Bytes of a block, all shards together.
    pub block_bytes: u64,
    pub shards: u32,
}

/// A checked reply.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Listed {
    pub mesh: String,
    pub node: NodeId,
    pub boot: BootId,
    /// Each digest occurs once.
    pub namespaces: Vec<NodeNamespace>,
    /// Number of namespaces dropped: facts of another digest, too many of them, blocks of no size, or a
    /// repeated digest.
    pub wrong: usize,
    /// Number of namespaces left out by the server for lack of room.
    pub left_out: u64,
}

// === impl NamespacesRequest ===

impl NamespacesRequest {
    /// The request of this node.
    pub(in crate::control) fn new(config: &ControlConfig) -> Self {
        let node = config.node.as_str().into();
        let (mesh, boot, observes) = (config.mesh.clone(), config.boot.0.get(), config.observes());
        Self { version: VERSION, mesh, node, boot, observes }
    }
}

// === impl NamespacesReply ===

impl NamespacesReply {
    /// The reply of this node, with the namespaces of most blocks first. The others are left out when there
    /// is no more room.
    pub(in crate::control) fn new(config: &ControlConfig, mut all: Vec<NodeNamespace>) -> Self {
        all.sort_by_key(|namespace| std::cmp::Reverse(namespace.memory_blocks + namespace.disk_blocks));
        let (mut namespaces, mut left_out, mut room) = (Vec::new(), 0, REPLY_BYTES_MAX - FRAME_BYTES);
        for told in all.into_iter().map(NamespaceMessage::from) {
            match room.checked_sub(told.encoded_len() + NAMESPACE_FRAME_BYTES) {
                Some(rest) => {
                    room = rest;
                    namespaces.push(told);
                }
                None => left_out += 1,
            }
        }
        let node = config.node.as_str().into();
        let (mesh, boot) = (config.mesh.clone(), config.boot.0.get());
        Self { version: VERSION, mesh, node, boot, namespaces, left_out }
    }

    /// Checks a reply.
    pub fn validate(self) -> Result<Listed, MalformedReply> {
        let (node, boot) = check_sender(self.version, &self.mesh, self.node, self.boot)?;
        let (told, mut seen) = (self.namespaces.len(), BTreeSet::new());
        let sound = self.namespaces.into_iter().filter_map(NamespaceMessage::validate);
        let namespaces: Vec<_> = sound.filter(|namespace| seen.insert(namespace.digest)).collect();
        let wrong = told - namespaces.len();
        Ok(Listed { mesh: self.mesh, node, boot, namespaces, wrong, left_out: self.left_out })
    }

    /// Decodes and checks a reply.
    pub fn decode_and_validate(bytes: &[u8]) -> Result<Listed, MalformedReply> {
        decode_reply::<Self>(bytes)?.validate()
    }
}

// === impl NamespaceMessage ===

impl NamespaceMessage {
    fn validate(self) -> Option<NodeNamespace> {
        let Self { digest, facts, block_bytes, shards, memory_blocks, disk_blocks } = self;
        let digest = NamespaceDigest(digest.try_into().ok()?);
        let stated = if facts.is_empty() {
            (block_bytes == 0 && shards == 0).then_some(None)?
        } else {
            let divided = (1..=RANKS_MAX).contains(&shards) && block_bytes.is_multiple_of(shards.into());
            let sound = divided && block_bytes > 0 && facts.len() <= FACTS_MAX;
            (sound && namespace::digest_facts(&facts) == digest).then_some(())?;
            Some(StatedFacts { facts: Arc::new(facts), block_bytes, shards })
        };
        Some(NodeNamespace { digest, stated, memory_blocks, disk_blocks })
    }
}

impl From<NodeNamespace> for NamespaceMessage {
    fn from(namespace: NodeNamespace) -> Self {
        let NodeNamespace { digest, stated, memory_blocks, disk_blocks } = namespace;
        let (facts, block_bytes, shards) = stated.map_or_else(Default::default, |stated| {
            (Arc::unwrap_or_clone(stated.facts), stated.block_bytes, stated.shards)
        });
        Self { digest: digest.0.to_vec(), facts, block_bytes, shards, memory_blocks, disk_blocks }
    }
}
