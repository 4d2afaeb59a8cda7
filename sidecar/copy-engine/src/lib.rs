//! Moves KV bytes between an engine's memory and the DRAM pool.
//!
//! Job: copy blocks, exactly as placed by a rank's regions, and say when a copy could not be made whole. Linked by the
//! sidecar (saves, and loads where it is asked to) and by the shim (loads and rescue).
//! May depend on: shm-protocol (regions, mappings), libc, cudarc. Never: decides what is copied, waits for a peer, or maps
//! memory that a peer could shrink.

pub mod cuda;
pub mod host;

pub use host::{CopyError, HostMemory};
use shm_protocol::region::Region;

/// Which way bytes go.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Direction {
    /// From the engine's memory to the pool.
    ToPool,
    /// From the pool to the engine's memory.
    ToEngine,
}

/// A rank's KV memory as its own process copies into it.
#[derive(Debug)]
pub enum EngineMemory {
    /// Shared memory behind descriptors.
    Host(HostMemory),
    /// A GPU's.
    Cuda(cuda::DeviceMemory),
}

// === impl EngineMemory ===

impl EngineMemory {
    /// Bytes of this rank's part of a block.
    pub fn block_bytes(&self) -> u64 {
        match self {
            Self::Host(memory) => memory.block_bytes(),
            Self::Cuda(memory) => memory.block_bytes(),
        }
    }

    /// Copies `pool` at `offset` into block `block` and returns at its end; see the two memories.
    pub fn load_block(&self, pool: &Region, offset: u64, block: u32) -> Result<(), CopyError> {
        match self {
            Self::Host(memory) => memory.load_block(pool, offset, block),
            Self::Cuda(memory) => memory.load_block(pool, offset, block),
        }
    }
}
