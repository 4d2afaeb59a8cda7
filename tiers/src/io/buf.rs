//! Memory that I/O reads and writes: page-aligned buffers of our own, and blocks in the DRAM pool.

use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use shm_protocol::region::Region;

/// What a buffer of our own is aligned to: a page, the most that direct I/O asks for.
pub(crate) const BUFFER_ALIGN: u64 = 4096;

/// Zeroed memory of our own, page-aligned.
#[derive(Debug)]
pub(crate) struct Buffer {
    base: NonNull<u8>,
    len: usize,
}

/// The pool, whose blocks offsets name.
///
/// Who touches a slot's bytes must have been given the slot, and has it until it says that it has ended: nobody writes a
/// slot that is written to a device or sent to a peer, nobody else reads or writes one that is filled. That is the
/// contract of [`crate::ssd::Work`], and of a peer's fetches and grants, with who posts them, and it is what makes the
/// slices below sound. Engines map the pool for reading alone. Of a pool file another process may write a slice's bytes all the
/// same, if it may open the file, or cut them off: that is outside of what Rust promises, gives wrong bytes at worst, and who
/// reads them compares a checksum made before, or asks [`Blocks::is_whole`].
#[derive(Clone, Debug)]
pub struct Blocks(Arc<Region>);

// SAFETY: the mapping belongs to the value alone and has no thread affinity.
unsafe impl Send for Buffer {}

// === impl Buffer ===

impl Buffer {
    /// Maps at least `len` bytes.
    pub(crate) fn new(len: usize) -> Result<Self, Errno> {
        let len = len.max(1).next_multiple_of(BUFFER_ALIGN as usize);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the address is the kernel's to choose, so no existing mapping is replaced.
        let address =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, prot, MapFlags::PRIVATE) }?;
        let base = NonNull::new(address.cast()).expect("mmap never returns null for a chosen address");
        Ok(Self { base, len })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes are mapped for the life of `self`, and whoever hands a buffer to the kernel
        // hands over the value itself.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes this the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    /// Where `len` bytes at `offset` begin, for the kernel; `None` where they do not lie in it.
    pub(crate) fn address(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: `offset <= len` of the mapping by the check above.
        Some(unsafe { self.base.add(offset) })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new`, and the borrow rules leave no slice of it alive.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping");
    }
}

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
    pub(crate) fn read_at(&self, file: impl AsFd, at: u64, offset: u64, len: usize) -> Result<usize, Errno> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_aligned_zeroed_and_whole_pages() {
        let mut buffer = Buffer::new(5000).unwrap();
        assert_eq!(buffer.len(), 8192);
        assert_eq!(buffer.address(0, 8192).unwrap().as_ptr() as u64 % BUFFER_ALIGN, 0);
        assert_eq!(buffer.address(4096, 4097), None);
        assert!(buffer.bytes().iter().all(|byte| *byte == 0));
        buffer.bytes_mut()[8191] = 7;
        assert_eq!(buffer.bytes()[8191], 7);
    }
}
