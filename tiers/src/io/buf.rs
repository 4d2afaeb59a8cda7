//! Page-aligned buffers of this process for I/O.

use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

/// Alignment of a buffer: a page, the largest alignment for direct I/O.
pub(crate) const BUFFER_ALIGN: u64 = 4096;

/// Zeroed, page-aligned memory of this process.
#[derive(Debug)]
pub(crate) struct Buffer {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to the value alone and has no thread affinity.
unsafe impl Send for Buffer {}

// === impl Buffer ===

impl Buffer {
    /// Maps at least `len` bytes.
    pub(crate) fn new(len: usize) -> Result<Self, Errno> {
        let len = len.max(1).next_multiple_of(BUFFER_ALIGN as usize);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced.
        let address =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, prot, MapFlags::PRIVATE) }?;
        let base = NonNull::new(address.cast()).expect("mmap never returns null for a chosen address");
        Ok(Self { base, len })
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes are mapped for the life of `self`, and a transfer to the kernel
        // takes the value itself.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `&mut self` makes this the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    /// Returns the address of `len` bytes at `offset`, for the kernel; `None` if they do not lie in the
    /// buffer.
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
