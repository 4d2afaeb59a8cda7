//! The third method, `pillion.mesh.v1.Inventory/ListBlocks`: one [`ListBlocksRequest`] and one
//! [`ListBlocksReply`] over a connection of their own.
//!
//! The server checks `version` and `mesh` as for a follower. Its reply names blocks of one namespace and one size,
//! the likeliest to be used again first, and no block before its parent. A serving node leaves out the blocks
//! announced by the client; a leaving node lists only blocks without an announcement of any peer, and each to one
//! client. A list is only ever keys: the client fetches the blocks as it fetches any.

use shm_protocol::key::{BlockHash, HASH_BYTES_MAX, NamespaceDigest};

use super::{ControlConfig, MalformedReply, VERSION, check_sender};
use crate::listed::{BlocksAsk, LISTED_MAX, ListedBlock};
use crate::transport::{BootId, NodeId};

/// The request of a client, with its name and life.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListBlocksRequest {
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The client's mesh.
    #[prost(string, tag = "2")]
    pub mesh: String,
    #[prost(string, tag = "3")]
    pub node: String,
    #[prost(fixed64, tag = "4")]
    pub boot: u64,
    #[prost(bytes = "vec", tag = "5")]
    pub namespace: Vec<u8>,
    #[prost(uint64, tag = "6")]
    pub block_bytes: u64,
    /// Blocks with room at the client.
    #[prost(uint32, tag = "7")]
    pub blocks: u32,
}

/// Blocks of a node, the likeliest to be used again first.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ListBlocksReply {
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The node's mesh.
    #[prost(string, tag = "2")]
    pub mesh: String,
    #[prost(string, tag = "3")]
    pub node: String,
    #[prost(fixed64, tag = "4")]
    pub boot: u64,
    /// The hashes of the blocks, 32 bytes each.
    #[prost(bytes = "vec", tag = "5")]
    pub hashes: Vec<u8>,
    /// For each block the number of its parent in this list, from 1; 0: the parent is not in it.
    #[prost(uint32, repeated, tag = "6")]
    pub parents: Vec<u32>,
    /// For each block its expected uses while as many blocks are used as the node has room for.
    #[prost(float, repeated, tag = "7")]
    pub uses: Vec<f32>,
}

// === impl ListBlocksRequest ===

impl ListBlocksRequest {
    /// The request of this node.
    pub(in crate::control) fn new(config: &ControlConfig, ask: &BlocksAsk) -> Self {
        Self {
            version: VERSION,
            mesh: config.mesh.clone(),
            node: config.node.as_str().into(),
            boot: config.boot.0.get(),
            namespace: ask.namespace.0.to_vec(),
            block_bytes: ask.block_bytes,
            blocks: ask.blocks,
        }
    }

    /// Returns the question of a client; `None`: its namespace is no digest.
    pub(in crate::control) fn asked(&self) -> Option<BlocksAsk> {
        let namespace = NamespaceDigest(self.namespace.as_slice().try_into().ok()?);
        let blocks = self.blocks.min(LISTED_MAX as u32);
        Some(BlocksAsk { namespace, block_bytes: self.block_bytes, blocks })
    }
}

// === impl ListBlocksReply ===

impl ListBlocksReply {
    /// The reply of this node, with at most [`LISTED_MAX`] blocks.
    pub fn new(config: &ControlConfig, listed: &[ListedBlock]) -> Self {
        let listed = &listed[..listed.len().min(LISTED_MAX)];
        Self {
            version: VERSION,
            mesh: config.mesh.clone(),
            node: config.node.as_str().into(),
            boot: config.boot.0.get(),
            hashes: listed.iter().flat_map(|block| block.hash.0).collect(),
            parents: listed.iter().map(|block| block.parent.map_or(0, |parent| parent + 1)).collect(),
            uses: listed.iter().map(|block| block.uses).collect(),
        }
    }

    /// Checks a reply. Returns the mesh, name and life of its node, and the blocks.
    pub fn validate(self) -> Result<(String, NodeId, BootId, Vec<ListedBlock>), MalformedReply> {
        let (node, boot) = check_sender(self.version, &self.mesh, self.node, self.boot)?;
        let count = self.hashes.len() / HASH_BYTES_MAX;
        if count > LISTED_MAX {
            return Err(MalformedReply::Long);
        }
        let whole = self.hashes.len().is_multiple_of(HASH_BYTES_MAX);
        if !whole || self.parents.len() != count || self.uses.len() != count {
            return Err(MalformedReply::Blocks);
        }
        let hashes = self.hashes.chunks_exact(HASH_BYTES_MAX);
        let of_block = hashes.zip(self.parents).zip(self.uses);
        let checked = (0u32..).zip(of_block).map(|(place, ((hash, parent), uses))| {
            // The number of the parent is at most the place of the block: the list has no circle.
            let sound = parent <= place && uses >= 0.0 && uses.is_finite();
            let hash = BlockHash(hash.try_into().expect("a chunk of this length"));
            sound.then_some(ListedBlock { hash, parent: parent.checked_sub(1), uses })
        });
        let blocks: Option<Vec<ListedBlock>> = checked.collect();
        Ok((self.mesh, node, boot, blocks.ok_or(MalformedReply::Blocks)?))
    }
}
