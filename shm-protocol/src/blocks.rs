//! The pool's blocks as memory that this process reads and fills.

use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::io::Errno;

use crate::region::Region;

/// The pool, whose blocks offsets name.
///
/// Whoever touches a slot's bytes must hold the slot, from its grant until the job on it has ended: nobody writes a
/// slot that is written to a device or sent to a peer, nobody else reads or writes one that is filled. That is the
/// contract of a device's jobs, and of a peer's fetches and grants, with who posts them, and it is what makes the
/// slices below sound. Engines map the pool for reading alone. Of a pool file another process may write a slice's bytes all the
/// same, if it may open the file, or cut them off: that is outside of what Rust promises, gives wrong bytes at worst, and who
/// reads them compares a checksum made before, or asks [`Blocks::is_whole`].
#[derive(Clone, Debug)]
pub struct Blocks(Arc<Region>);

// === impl Blocks ===

impl Blocks {
    /// The blocks of a pool mapped for writing.
    pub fn new(region: Arc<Region>) -> Self {
        Self(region)
    }

    /// Bytes of the pool.
    pub fn len(&self) -> u64 {
        self.0.len() as u64
    }

    /// Never: nothing is mapped empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether nothing of the pool was lost so far: a checksum made of its bytes counts only if this says so afterwards.
    pub fn is_whole(&self) -> bool {
        self.0.is_whole()
    }

    /// Where `len` bytes at `offset` begin, for the kernel or a NIC; `None` where they do not lie in the pool.
    pub fn address(&self, offset: u64, len: usize) -> Option<NonNull<u8>> {
        self.0.bytes_at(usize::try_from(offset).ok()?, len)
    }

    /// A block that is whole, or a part that has just been filled; `None` where it does not lie in the pool.
    pub fn bytes(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let address = self.address(offset, len)?;
        // SAFETY: the range lies in the mapping, whose memory is initialised (zero or written) and stays mapped even if a file
        // is cut, since that is guarded; by the contract of `Blocks` no thread of this process writes it while the caller has
        // the slot, and the slice does not outlive that. A memfd is sealed, so no other process can; of a file see `Blocks`.
        Some(unsafe { std::slice::from_raw_parts(address.as_ptr(), len) })
    }

    /// Fills a part of a block. False where it does not lie in the pool.
    pub fn fill(&self, offset: u64, bytes: &[u8]) -> bool {
        let Some(address) = self.address(offset, bytes.len()) else { return false };
        // SAFETY: the range lies in the mapping and is the caller's own by the contract of `Blocks`; `bytes` is memory of
        // this process's own, so that the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address.as_ptr(), bytes.len()) };
        true
    }

    /// Fills a part of a block from a file at `at`; the bytes that one call moved. EFAULT where it does not lie in the pool.
    pub fn read_at(&self, file: impl AsFd, at: u64, offset: u64, len: usize) -> Result<usize, Errno> {
        let address = self.address(offset, len).ok_or(Errno::FAULT)?;
        let (file, at) = (file.as_fd().as_raw_fd(), at as libc::off64_t);
        // SAFETY: the range lies in the mapping and is the caller's own by the contract of `Blocks`; the call ends before
        // the borrows of the file and of the mapping do.
        let moved = unsafe { libc::pread64(file, address.as_ptr().cast(), len, at) };
        usize::try_from(moved).map_err(|_| last_errno())
    }

    /// Fills a part of a block from a socket: all `len` bytes, or fewer where the stream ends or the socket's time limit
    /// passes. EFAULT where it does not lie in the pool.
    pub fn receive(&self, socket: impl AsFd, offset: u64, len: usize) -> Result<usize, Errno> {
        let address = self.address(offset, len).ok_or(Errno::FAULT)?;
        let socket = socket.as_fd().as_raw_fd();
        // SAFETY: the range lies in the mapping and is the caller's own by the contract of `Blocks`; the call ends before
        // the borrows of the socket and of the mapping do.
        let moved = unsafe { libc::recv(socket, address.as_ptr().cast(), len, libc::MSG_WAITALL) };
        usize::try_from(moved).map_err(|_| last_errno())
    }
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
