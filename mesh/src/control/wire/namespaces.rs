//! The second method, `pillion.mesh.v1.Inventory/Namespaces`: one [`NamespacesRequest`] and one [`NamespacesReply`] over a
//! connection of their own.
//!
//! The server looks at `version` and `mesh` as it does for a follower. Its reply has at most [`REPLY_BYTES_MAX`]: what is
//! kept least is left out first, and counted. A release without the method answers UNIMPLEMENTED.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use prost::Message as _;
use shm_protocol::handshake::{FACTS_MAX, RANKS_MAX};
use shm_protocol::key::NamespaceDigest;
use shm_protocol::namespace::{self, Facts};

use super::{Config, Malformed, REPLY_BYTES_MAX, VERSION, decode, greeter};
use crate::transport::{BootId, NodeId};

/// Room for all of a reply but its namespaces: two names and a few numbers.
const FRAME_BYTES: usize = 1024;
/// The tag and the length before a namespace.
const NAMESPACE_FRAME_BYTES: usize = 8;

/// What who asks says of itself.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NamespacesRequest {
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The mesh that it is of.
    #[prost(string, tag = "2")]
    pub mesh: String,
    #[prost(string, tag = "3")]
    pub node: String,
    #[prost(fixed64, tag = "4")]
    pub boot: u64,
}

/// What a node knows of namespaces.
#[derive(Clone, PartialEq, prost::Message)]
pub struct NamespacesReply {
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The mesh that it is of.
    #[prost(string, tag = "2")]
    pub mesh: String,
    #[prost(string, tag = "3")]
    pub node: String,
    #[prost(fixed64, tag = "4")]
    pub boot: u64,
    #[prost(message, repeated, tag = "5")]
    pub namespaces: Vec<NamespaceTold>,
    /// Namespaces for which there was no room.
    #[prost(uint64, tag = "6")]
    pub left_out: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct NamespaceTold {
    #[prost(bytes = "vec", tag = "1")]
    pub digest: Vec<u8>,
    /// None where no engine of it has connected in the node's life; then `block_bytes` and `shards` are zero.
    #[prost(btree_map = "string, string", tag = "2")]
    pub facts: BTreeMap<String, String>,
    /// Of a block, all shards.
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

/// What a node knows of a namespace.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Namespace {
    pub digest: NamespaceDigest,
    /// `None` where no engine of it has connected in the node's life.
    pub stated: Option<Stated>,
    /// Blocks that are kept in memory.
    pub memory_blocks: u64,
    pub disk_blocks: u64,
}

/// What the engines of a namespace state.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Stated {
    /// Their digest is the namespace's.
    pub facts: Arc<Facts>,
    /// Of a block, all shards.
    pub block_bytes: u64,
    pub shards: u32,
}

/// A reply, looked at.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Listed {
    pub mesh: String,
    pub node: NodeId,
    pub boot: BootId,
    /// No digest is among them twice.
    pub namespaces: Vec<Namespace>,
    /// Namespaces that were dropped: facts of another digest, too many of them, blocks of no size, or told twice.
    pub wrong: usize,
    /// Namespaces for which there was no room.
    pub left_out: u64,
}

// === impl NamespacesRequest ===

impl NamespacesRequest {
    /// That of this node.
    pub(in crate::control) fn new(config: &Config) -> Self {
        let node = config.node.as_str().into();
        Self { version: VERSION, mesh: config.mesh.clone(), node, boot: config.boot.0.get() }
    }
}

// === impl NamespacesReply ===

impl NamespacesReply {
    /// What this node knows: as many as there is room for, those first of which it keeps most.
    pub(in crate::control) fn new(config: &Config, mut all: Vec<Namespace>) -> Self {
        all.sort_by_key(|namespace| std::cmp::Reverse(namespace.memory_blocks + namespace.disk_blocks));
        let (mut namespaces, mut left_out, mut room) = (Vec::new(), 0, REPLY_BYTES_MAX - FRAME_BYTES);
        for told in all.into_iter().map(NamespaceTold::from) {
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

    /// What arrived, looked at.
    pub fn hear(self) -> Result<Listed, Malformed> {
        let (node, boot) = greeter(self.version, &self.mesh, self.node, self.boot)?;
        let (told, mut seen) = (self.namespaces.len(), BTreeSet::new());
        let sound = self.namespaces.into_iter().filter_map(NamespaceTold::hear);
        let namespaces: Vec<_> = sound.filter(|namespace| seen.insert(namespace.digest)).collect();
        let wrong = told - namespaces.len();
        Ok(Listed { mesh: self.mesh, node, boot, namespaces, wrong, left_out: self.left_out })
    }

    /// The bytes that arrived, looked at.
    pub fn decode_and_hear(bytes: &[u8]) -> Result<Listed, Malformed> {
        decode::<Self>(bytes)?.hear()
    }
}

// === impl NamespaceTold ===

impl NamespaceTold {
    fn hear(self) -> Option<Namespace> {
        let Self { digest, facts, block_bytes, shards, memory_blocks, disk_blocks } = self;
        let digest = NamespaceDigest(digest.try_into().ok()?);
        let stated = if facts.is_empty() {
            (block_bytes == 0 && shards == 0).then_some(None)?
        } else {
            let divided = (1..=RANKS_MAX).contains(&shards) && block_bytes.is_multiple_of(shards.into());
            let sound = divided && block_bytes > 0 && facts.len() <= FACTS_MAX;
            (sound && namespace::digest(&facts) == digest).then_some(())?;
            Some(Stated { facts: Arc::new(facts), block_bytes, shards })
        };
        Some(Namespace { digest, stated, memory_blocks, disk_blocks })
    }
}

impl From<Namespace> for NamespaceTold {
    fn from(namespace: Namespace) -> Self {
        let Namespace { digest, stated, memory_blocks, disk_blocks } = namespace;
        let (facts, block_bytes, shards) = stated.map_or_else(Default::default, |stated| {
            (Arc::unwrap_or_clone(stated.facts), stated.block_bytes, stated.shards)
        });
        Self { digest: digest.0.to_vec(), facts, block_bytes, shards, memory_blocks, disk_blocks }
    }
}
