//! The pool's blocks as memory of this process, to read and to fill.

use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::io::Errno;

use crate::region::Region;

/// The pool's mapping, whose blocks are named by their offsets.
///
/// The slices below are sound by this contract: code touches a slot's bytes only while it holds the slot,
/// from its grant until the job on it has ended. Nobody writes a slot during its write to a device or its
/// transfer to a peer, and nobody else reads or writes a slot during its filling. The jobs of a device, and
/// the fetches and grants of a peer, keep this contract together with the code that posts them. Engines map
/// the pool for reading alone.
///
/// A process that may open a pool file can still write a slice's bytes, or cut them off. That is outside of
/// Rust's guarantees and gives wrong bytes at worst. So readers compare a checksum made before, or call
/// [`Blocks::is_whole`].
#[derive(Clone, Debug)]
pub struct Blocks(Arc<Region>);

// === impl Blocks ===

impl Blocks {
    /// Wraps a pool mapped for writing.
    pub fn new(region: Arc<Region>) -> Self {
        Self(region)
    }

    /// Returns the length of the pool in bytes.
    pub fn len(&self) -> u64 {
        self.0.len() as u64
    }

    /// Returns false: the kernel refuses empty mappings.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// True if nothing of the pool was lost so far. A checksum of its bytes counts only if a later call
    /// returns true.
    pub fn is_whole(&self) -> bool {
        self.0.is_whole()
    }

    /// Returns the address of `len` bytes at `offset`, for the kernel or a NIC; `None` if they do not lie in
    /// the pool.
    pub fn address(&self, offset: u64, len: usize) -> Option<NonNull<u8>> {
        self.0.bytes_at(usize::try_from(offset).ok()?, len)
    }

    /// Returns the bytes of a whole block, or of a part just filled; `None` if they do not lie in the pool.
    pub fn bytes(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let address = self.address(offset, len)?;
        // SAFETY: the range lies in the mapping. Its memory is initialised (zero or written) and stays mapped
        // even after a file is cut, since the mapping is guarded. By the contract of `Blocks` no thread of
        // this process writes it while the caller has the slot, and the slice does not outlive that. A memfd
        // is sealed, so no other process can write it; for a file see `Blocks`.
        Some(unsafe { std::slice::from_raw_parts(address.as_ptr(), len) })
    }

    /// Fills a part of a block. Returns false if it does not lie in the pool.
    pub fn fill(&self, offset: u64, bytes: &[u8]) -> bool {
        let Some(address) = self.address(offset, bytes.len()) else { return false };
        // SAFETY: the range lies in the mapping, and by the contract of `Blocks` only the caller uses it;
        // `bytes` is other memory of this process, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address.as_ptr(), bytes.len()) };
        true
    }

    /// Fills a part of a block from a file at `at`. Returns the bytes moved by the one call; EFAULT if the
    /// part does not lie in the pool.
    pub fn read_at(&self, file: impl AsFd, at: u64, offset: u64, len: usize) -> Result<usize, Errno> {
        let address = self.address(offset, len).ok_or(Errno::FAULT)?;
        let (file, at) = (file.as_fd().as_raw_fd(), at as libc::off64_t);
        // SAFETY: the range lies in the mapping, and by the contract of `Blocks` only the caller uses it; the
        // call ends before the borrows of the file and of the mapping do.
        let moved = unsafe { libc::pread64(file, address.as_ptr().cast(), len, at) };
        usize::try_from(moved).map_err(|_| last_errno())
    }

    /// Fills a part of a block from a socket: all `len` bytes, or fewer if the stream ends or the socket's
    /// time limit passes. EFAULT if the part does not lie in the pool.
    pub fn receive(&self, socket: impl AsFd, offset: u64, len: usize) -> Result<usize, Errno> {
        let address = self.address(offset, len).ok_or(Errno::FAULT)?;
        let socket = socket.as_fd().as_raw_fd();
        // SAFETY: the range lies in the mapping, and by the contract of `Blocks` only the caller uses it; the
        // call ends before the borrows of the socket and of the mapping do.
        let moved = unsafe { libc::recv(socket, address.as_ptr().cast(), len, libc::MSG_WAITALL) };
        usize::try_from(moved).map_err(|_| last_errno())
    }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
