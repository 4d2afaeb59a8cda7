//! The host device: an engine whose KV cache lies in shared memory, reached through its descriptors.
//!
//! Engine memory is read and written with `pread` and `pwrite`, and never mapped here: if an engine shrinks
//! its file, a copy fails, while a mapping would kill this process by SIGBUS. The pool's side is a mapping of
//! sealed memory.

use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use shm_protocol::handshake::BlockRegion;
use shm_protocol::region::{Access, Region, descriptor_bytes};
use thiserror::Error;

use crate::Direction;
use crate::cuda::CudaError;

/// An incomplete copy, or memory not fit for copies.
#[derive(Debug, Error)]
pub enum CopyError {
    /// The block or the pool range does not exist.
    #[error("a copy lies outside of memory: block {block} of {blocks}, pool offset {offset}")]
    Range {
        block: u32,
        blocks: u32,
        /// The requested offset in the pool.
        offset: u64,
    },
    /// The file ended early: its owner shrank it.
    #[error("shared memory ended after {got} of {want} bytes: it was shrunk or unregistered")]
    Short { want: usize, got: usize },
    /// The descriptor differs from the handshake's statement.
    #[error("descriptor {fd} {problem}")]
    Descriptor {
        /// Index of the descriptor.
        fd: usize,
        /// The fault of the descriptor.
        problem: &'static str,
    },
    #[error("engine memory: {0}")]
    Os(#[from] Errno),
    /// A call of the GPU's driver failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// One rank's KV memory.
#[derive(Debug)]
pub struct HostMemory {
    descriptors: Vec<OwnedFd>,
    regions: Vec<BlockRegion>,
    blocks: u32,
    block_bytes: u64,
}

// === impl HostMemory ===

impl HostMemory {
    /// Takes over the descriptors of a rank. The handshake has checked the regions. Fails if a descriptor is
    /// too small for every block, or does not permit `access`.
    pub fn new(
        descriptors: Vec<OwnedFd>,
        regions: &[BlockRegion],
        blocks: u32,
        access: Access,
    ) -> Result<Self, CopyError> {
        for (fd, descriptor) in descriptors.iter().enumerate() {
            let ends = regions.iter().filter(|region| region.fd as usize == fd);
            let needed = ends.map(|region| region.end(blocks)).max().unwrap_or(0);
            if descriptor_bytes(descriptor)? < needed {
                return Err(CopyError::Descriptor { fd, problem: "is smaller than its regions" });
            }
            let mode = rustix::fs::fcntl_getfl(descriptor)? & OFlags::RWMODE;
            let readable = mode == OFlags::RDWR || (mode == OFlags::RDONLY && access == Access::ReadOnly);
            if !readable {
                return Err(CopyError::Descriptor { fd, problem: "does not permit the copies asked for" });
            }
        }
        if regions.iter().any(|region| region.fd as usize >= descriptors.len()) {
            return Err(CopyError::Descriptor { fd: descriptors.len(), problem: "was not sent" });
        }
        let block_bytes = regions.iter().map(|region| region.bytes).sum();
        Ok(Self { descriptors, regions: regions.to_vec(), blocks, block_bytes })
    }

    /// Bytes of this rank's part of a block.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// True if block `block` exists.
    pub fn holds(&self, block: u32) -> bool {
        block < self.blocks
    }

    /// Copies block `block` from engine memory to `pool` at `offset`. The caller owns those pool bytes during
    /// the call.
    pub fn save_block(&self, block: u32, pool: &Region, offset: u64) -> Result<(), CopyError> {
        self.copy(Direction::ToPool, block, pool, offset, &(0..self.block_bytes))
    }

    /// Copies `pool` at `offset` into block `block` of engine memory. Pool bytes that change meanwhile give a torn block:
    /// the caller checks the slot's generation before and after.
    pub fn load_block(&self, pool: &Region, offset: u64, block: u32) -> Result<(), CopyError> {
        self.load_part(pool, offset, block, &(0..self.block_bytes))
    }

    /// The same for the bytes `part` of the block, and of its copy in the pool.
    pub fn load_part(
        &self,
        pool: &Region,
        offset: u64,
        block: u32,
        part: &Range<u64>,
    ) -> Result<(), CopyError> {
        self.copy(Direction::ToEngine, block, pool, offset, part)
    }

    fn copy(
        &self,
        direction: Direction,
        block: u32,
        pool: &Region,
        offset: u64,
        part: &Range<u64>,
    ) -> Result<(), CopyError> {
        let range = CopyError::Range { block, blocks: self.blocks, offset };
        if block >= self.blocks {
            return Err(range);
        }
        let start = usize::try_from(offset).ok();
        let bytes = self.block_bytes as usize;
        let Some((start, _)) = start.and_then(|at| Some((at, pool.bytes_at(at, bytes)?))) else {
            return Err(range);
        };
        let mut at = 0;
        for region in &self.regions {
            let inside = at.max(part.start)..(at + region.bytes).min(part.end);
            if inside.start < inside.end {
                let position = region.offset + u64::from(block) * region.stride + (inside.start - at);
                let descriptor = &self.descriptors[region.fd as usize];
                let bytes = (inside.end - inside.start) as usize;
                let at = start + inside.start as usize;
                match direction {
                    Direction::ToPool => read_all(descriptor, position, pool, at, bytes)?,
                    Direction::ToEngine => write_all(descriptor, position, pool, at, bytes)?,
                }
            }
            at += region.bytes;
        }
        Ok(())
    }
}

/// Reads `want` bytes at `position` of a file into `memory` at `at`. The caller has checked the range and
/// owns it during the call.
pub(crate) fn read_all(
    file: &OwnedFd,
    position: u64,
    memory: &Region,
    at: usize,
    want: usize,
) -> Result<(), CopyError> {
    assert_eq!(memory.access(), Access::ReadWrite, "reading into memory mapped read-only");
    move_all(position, memory, at, want, |here, bytes, position| {
        // SAFETY: `here` is valid for `bytes` bytes of a mapping that lives as long as `memory`; the kernel
        // writes them, so no Rust reference to them exists, and they belong to this copy until it ends.
        unsafe { libc::pread(file.as_raw_fd(), here.cast(), bytes, position) }
    })
}

/// Writes `want` bytes of `memory` at `at`, a range checked by the caller, to `position` of a file.
fn write_all(
    file: &OwnedFd,
    position: u64,
    memory: &Region,
    at: usize,
    want: usize,
) -> Result<(), CopyError> {
    move_all(position, memory, at, want, |here, bytes, position| {
        // SAFETY: as above; the kernel only reads the bytes, and tolerates that they change.
        unsafe { libc::pwrite(file.as_raw_fd(), here.cast(), bytes, position) }
    })
}

/// Calls `transfer` with the rest until it is empty.
fn move_all(
    position: u64,
    memory: &Region,
    at: usize,
    want: usize,
    transfer: impl Fn(*mut u8, usize, i64) -> isize,
) -> Result<(), CopyError> {
    let mut got = 0;
    while got < want {
        let here = memory.bytes_at(at + got, want - got).expect("checked by the caller").as_ptr();
        let position = i64::try_from(position + got as u64).map_err(|_| CopyError::Short { want, got })?;
        match usize::try_from(transfer(here, want - got, position)) {
            Ok(0) => return Err(CopyError::Short { want, got }),
            Ok(moved) => got += moved,
            Err(_) => match last_errno() {
                Errno::INTR => {}
                errno => return Err(errno.into()),
            },
        }
    }
    Ok(())
}

/// The errno of the last libc call, with its kind.
fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

    use super::*;

    fn memory(bytes: u64) -> OwnedFd {
        let fd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, bytes).unwrap();
        fd
    }

    fn two_layers() -> [BlockRegion; 2] {
        [
            BlockRegion { fd: 0, offset: 64, stride: 256, bytes: 200 },
            BlockRegion { fd: 1, offset: 0, stride: 100, bytes: 100 },
        ]
    }

    fn pool(bytes: usize) -> Region {
        Region::map(memory(bytes as u64).as_fd(), bytes, Access::ReadWrite).unwrap()
    }

    #[test]
    fn a_block_returns_byte_for_byte_and_its_neighbours_stay() {
        let (first, second) = (memory(64 + 256 * 4), memory(100 * 4));
        let pattern: Vec<u8> = (0..64 + 256 * 4).map(|i| (i % 251) as u8).collect();
        rustix::io::pwrite(&first, &pattern, 0).unwrap();
        rustix::io::pwrite(&second, &pattern[..400], 0).unwrap();
        let copies = [first.try_clone().unwrap(), second.try_clone().unwrap()];
        let memory = HostMemory::new(copies.into(), &two_layers(), 4, Access::ReadWrite).unwrap();
        let pool = pool(4096);
        memory.save_block(2, &pool, 1000).unwrap();
        memory.load_block(&pool, 1000, 3).unwrap();
        let mut after = vec![0; pattern.len()];
        rustix::io::pread(&first, &mut after, 0).unwrap();
        assert_eq!(after[64 + 768..64 + 968], pattern[64 + 512..64 + 712], "block 3 now holds block 2");
        assert_eq!(after[..64 + 768], pattern[..64 + 768], "nothing before it changed");
        assert_eq!(after[64 + 968..], pattern[64 + 968..], "nothing behind it changed");
        rustix::io::pread(&second, &mut after[..400], 0).unwrap();
        assert_eq!(after[300..400], pattern[200..300]);
    }

    #[test]
    fn a_shrunk_file_fails_the_copy_and_kills_nobody() {
        let fd = memory(64 + 256 * 4);
        let files = vec![fd.try_clone().unwrap(), memory(400)];
        let memory = HostMemory::new(files, &two_layers(), 4, Access::ReadOnly).unwrap();
        ftruncate(&fd, 700).unwrap();
        let error = memory.save_block(3, &pool(4096), 0).unwrap_err();
        assert!(matches!(error, CopyError::Short { want: 200, got: 0 }), "{error}");
    }

    #[test]
    fn ranges_and_rights_are_checked() {
        let files = || vec![memory(64 + 256 * 4), memory(400)];
        let ours = HostMemory::new(files(), &two_layers(), 4, Access::ReadOnly).unwrap();
        assert!(matches!(ours.save_block(4, &pool(4096), 0), Err(CopyError::Range { .. })));
        assert!(matches!(ours.save_block(0, &pool(4096), 4096 - 299), Err(CopyError::Range { .. })));
        assert!(matches!(ours.save_block(0, &pool(4096), u64::MAX), Err(CopyError::Range { .. })));
        let small = HostMemory::new(files(), &two_layers(), 5, Access::ReadOnly);
        assert!(matches!(small, Err(CopyError::Descriptor { fd: 0, .. })));
    }
}
