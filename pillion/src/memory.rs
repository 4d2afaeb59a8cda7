//! The engine's blocks: a file in memory, which the sidecar reads and this process reads and writes.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;

use rustix::fs::MemfdFlags;

/// Blocks of `block_bytes`, reached by system calls alone.
#[derive(Debug)]
pub(crate) struct BlockFile {
    file: File,
    block_bytes: u64,
}

// === impl BlockFile ===

impl BlockFile {
    pub(crate) fn new(blocks: u32, block_bytes: u64) -> io::Result<Self> {
        let file = File::from(rustix::fs::memfd_create("pillion-engine", MemfdFlags::CLOEXEC)?);
        file.set_len(u64::from(blocks) * block_bytes)?;
        Ok(Self { file, block_bytes })
    }

    pub(crate) fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub(crate) fn read_block(&self, block: u32) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; self.block_bytes as usize];
        self.file.read_exact_at(&mut bytes, u64::from(block) * self.block_bytes)?;
        Ok(bytes)
    }

    pub(crate) fn write_block(&self, block: u32, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all_at(bytes, u64::from(block) * self.block_bytes)
    }
}
