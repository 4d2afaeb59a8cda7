//! Moves KV bytes between an engine's memory and the DRAM pool.
//!
//! Job: copy blocks to the exact places given by a rank's regions, and report an incomplete copy. Linked by
//! the sidecar (saves, and loads at the engine's request) and by the shim (loads and rescue).
//! May depend on: shm-protocol (regions, mappings), libc, cudarc. Never: chooses the blocks to copy, waits
//! for a peer, or maps memory that a peer could shrink.

pub mod cuda;
pub mod host;
pub mod staging;

use std::ops::Range;
use std::os::fd::OwnedFd;

pub use host::{CopyError, HostMemory};
use shm_protocol::region::Region;
pub use staging::Staging;

/// The direction of a copy.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Direction {
    /// From the engine's memory to the pool.
    ToPool,
    /// From the pool to the engine's memory.
    ToEngine,
}

/// The pool in an engine's process.
#[derive(Copy, Clone, Debug)]
pub struct PoolSource<'a> {
    pub region: &'a Region,
    /// The file behind the mapping.
    pub file: &'a OwnedFd,
}

/// A rank's KV memory, for copies by its own process.
#[derive(Debug)]
pub enum EngineMemory {
    /// Shared memory behind descriptors.
    Host(HostMemory),
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

    /// True if block `block` exists.
    pub fn holds(&self, block: u32) -> bool {
        match self {
            Self::Host(memory) => memory.holds(block),
            Self::Cuda(memory) => memory.holds(block),
        }
    }

    /// Maximum blocks in one call of [`EngineMemory::begin_load`] for part `cut`.
    pub fn batch_blocks(&self, cut: &Range<u64>) -> usize {
        match self {
            Self::Host(_) => 1,
            Self::Cuda(memory) => memory.batch_blocks(cut),
        }
    }

    /// Begins to copy part `cut` of some blocks, each (block, offset of its copy in `pool`). Returns the
    /// batch's number: the batch has ended when [`EngineMemory::ended`] is not below it. Pool bytes that
    /// change meanwhile give torn blocks: the caller checks the slots' generations before and after. After an
    /// error no block of the batch is whole, and none is still being written.
    pub fn begin_load(
        &self,
        pool: PoolSource<'_>,
        cut: &Range<u64>,
        blocks: &[(u32, u64)],
    ) -> Result<u64, CopyError> {
        match self {
            Self::Host(memory) => {
                let mut blocks = blocks.iter();
                blocks.try_for_each(|(block, offset)| memory.load_part(pool.region, *offset, *block, cut))?;
                Ok(0)
            }
            Self::Cuda(memory) => memory.begin_load(pool.file, cut, blocks),
        }
    }

    /// The number of the last ended batch.
    pub fn ended(&self) -> Result<u64, CopyError> {
        match self {
            Self::Host(_) => Ok(0),
            Self::Cuda(memory) => Ok(memory.ended()?),
        }
    }
}
