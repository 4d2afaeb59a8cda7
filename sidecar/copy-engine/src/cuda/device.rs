//! The engine's own copies into its GPU memory: what a rank falls back to when the sidecar does not finish a load.
//!
//! Everything is made at the start, since a first launch, a free or an unlock would wait for a parked stream. A block is
//! read by a system call into locked staging memory, so that a pool file that was cut fails the copy and kills nobody.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fs::MemfdFlags;
use shm_protocol::handshake::BlockRegion;
use shm_protocol::region::{Access, Region};

use super::{Blocks, CopyStream, Gpu, Registered};
use crate::{CopyError, Direction, HostMemory};

/// Staging memory is locked in whole pages.
const PAGE: u64 = 4096;

/// One rank's KV memory in its own process.
#[derive(Debug)]
pub struct DeviceMemory {
    /// One copy at a time: staging is one block large.
    copies: Mutex<Copies>,
    block_bytes: u64,
    blocks: u32,
}

#[derive(Debug)]
struct Copies {
    /// First, so that it is dropped first, which waits for its copies.
    stream: CopyStream,
    _locked: Registered,
    /// The same memory as a block of the host device.
    staging: HostMemory,
}

// === impl DeviceMemory ===

impl DeviceMemory {
    /// Makes stream and staging for memory at `bases`, which `regions` name by index.
    pub fn new(
        gpu: &Arc<Gpu>,
        bases: &[u64],
        regions: &[BlockRegion],
        blocks: u32,
    ) -> Result<Self, CopyError> {
        let here = Arc::new(Blocks::own(bases.to_vec(), regions, blocks));
        let block_bytes = here.block_bytes();
        let bytes = block_bytes.next_multiple_of(PAGE);
        let staging = rustix::fs::memfd_create("pillion-staging", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&staging, bytes)?;
        let region = Arc::new(Region::map(staging.as_fd(), bytes as usize, Access::ReadWrite)?);
        let one_block = BlockRegion { fd: 0, offset: 0, stride: block_bytes, bytes: block_bytes };
        let copies = Copies {
            stream: CopyStream::new(gpu, &here, &region, bytes)?,
            _locked: Registered::new(gpu, &region, 0, bytes as usize)?,
            staging: HostMemory::new(vec![staging], &[one_block], 1, Access::ReadWrite)?,
        };
        Ok(Self { copies: Mutex::new(copies), block_bytes, blocks })
    }

    /// Bytes of this rank's part of a block.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Copies `pool` at `offset` into block `block` and waits for its end. Pool bytes that change meanwhile give a torn
    /// block: the caller checks the slot's generation before and after.
    pub fn load_block(&self, pool: &Region, offset: u64, block: u32) -> Result<(), CopyError> {
        if block >= self.blocks {
            return Err(CopyError::Range { block, blocks: self.blocks, offset });
        }
        let copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        copies.staging.load_block(pool, offset, 0)?;
        copies.stream.stream().gpu().bind()?;
        copies.stream.enqueue(Direction::ToEngine, &(0..self.block_bytes), &[(block, 0)])?;
        Ok(copies.stream.stream().synchronize()?)
    }
}
