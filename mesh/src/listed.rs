//! Lists of a node's best blocks: a question for one, and its blocks.

use shm_protocol::key::{BlockHash, NamespaceDigest};

/// Maximum blocks of a list: some 180 KB, and 8 GiB of blocks of 2 MiB.
pub const LISTED_MAX: usize = 4096;

/// A question for the best blocks of a namespace.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct BlocksAsk {
    pub namespace: NamespaceDigest,
    /// Bytes of a block, all shards.
    pub block_bytes: u64,
    /// Blocks with room at the client.
    pub blocks: u32,
}

/// A listed block.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct ListedBlock {
    pub hash: BlockHash,
    /// The place of its parent in the list: before its own.
    pub parent: Option<u32>,
    /// Expected uses while as many blocks are used as its node has room for.
    pub uses: f32,
}
