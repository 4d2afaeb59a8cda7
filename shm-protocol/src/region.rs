//! A shared mapping whose words are only ever reached through atomics.
//!
//! Both processes write this memory, so no `&T` or `&mut T` to plain data is formed over it: words are
//! `AtomicU32`/`AtomicU64`, and bulk KV bytes are reached by raw pointers that the copy engine owns.

pub mod extent;
mod guard;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use self::guard::Guard;

/// `f_type` of tmpfs, which also holds every memfd: linux/magic.h.
pub const TMPFS_MAGIC: u32 = 0x0102_1994;
/// `f_type` of hugetlbfs.
pub const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;

/// How a region is mapped.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Access {
    /// Loads only, through [`Region::load64`]: a store would fault, and what is more than a relaxed load may be one in disguise.
    ReadOnly,
    /// Loads and stores.
    ReadWrite,
}

/// One shared mapping of a descriptor, unmapped on drop and absent from forked children.
#[derive(Debug)]
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    access: Access,
    /// Of a file that others can cut.
    guard: Option<Guard>,
}

// SAFETY: the mapping belongs to the value alone, stays in place until drop, and every access goes through
// atomics or through raw pointers whose users state their own contract.
unsafe impl Send for Region {}
// SAFETY: as above; shared use of the atomics needs no further synchronisation.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `len` bytes of `fd` from its start. A touch of a byte that the file has not ends the process by SIGBUS. So the caller
    /// checks its size, and that it stays: a memfd has a shrink seal, or is nobody else's; a file that others can cut is guarded
    /// ([`Region::guard`]), or its mapping is reached inside system calls alone, which fail instead.
    pub fn map(fd: BorrowedFd<'_>, len: usize, access: Access) -> Result<Self, rustix::io::Errno> {
        let prot = match access {
            Access::ReadOnly => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: the address is the kernel's to choose, so no existing mapping is replaced.
        let address = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }?;
        // SAFETY: the range was mapped by the line above and nothing else knows of it; DONTFORK changes no byte.
        let advised = unsafe { rustix::mm::madvise(address, len, Advice::LinuxDontFork) };
        let base = NonNull::new(address.cast()).expect("mmap never returns null for a chosen address");
        let region = Self { base, len, access, guard: None };
        advised.map(|()| region)
    }

    /// Guards the mapping, which is writable, of a file that others can cut, for the life of the value: a page that the file
    /// has not any more is memory of this process's own once it is touched, zeros at first, and so is all the rest then.
    pub fn guard(&mut self, file: OwnedFd) -> Result<(), rustix::io::Errno> {
        assert_eq!(self.access, Access::ReadWrite, "what replaces it is writable");
        self.guard = Some(Guard::new(self.base.as_ptr() as usize, self.len, file)?);
        Ok(())
    }

    /// Whether nothing of a guarded mapping was lost so far: bytes read of it before this call count only if it says so.
    pub fn is_whole(&self) -> bool {
        self.guard.as_ref().is_none_or(Guard::is_whole)
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is mapped (never true: the kernel refuses empty mappings).
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How the region was mapped.
    pub fn access(&self) -> Access {
        self.access
    }

    /// The 32-bit word at `offset`. Offsets are this program's own, already checked: a wrong one panics.
    pub fn word32(&self, offset: usize) -> &AtomicU32 {
        assert!(
            offset.is_multiple_of(4) && offset.checked_add(4).is_some_and(|end| end <= self.len),
            "word32 {offset}"
        );
        // SAFETY: `offset + 4 <= len`, so the address is inside the mapping.
        let pointer = unsafe { self.base.as_ptr().add(offset) };
        // SAFETY: aligned (the mapping is page aligned and offset is a multiple of 4), valid for the life of `self`,
        // and the word is only reached through atomics in this process.
        unsafe { AtomicU32::from_ptr(pointer.cast()) }
    }

    /// The 64-bit word at `offset`; panics as [`Region::word32`] does.
    pub fn word64(&self, offset: usize) -> &AtomicU64 {
        &self.words64(offset, 1)[0]
    }

    /// Loads the 64-bit word at `offset` with acquire, of a mapping that may be read-only; panics as [`Region::word32`] does.
    pub fn load64(&self, offset: usize) -> u64 {
        let value = self.word64(offset).load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        value
    }

    /// `count` consecutive 64-bit words at `offset`; panics as [`Region::word32`] does.
    pub fn words64(&self, offset: usize, count: usize) -> &[AtomicU64] {
        let end = count.checked_mul(8).and_then(|bytes| offset.checked_add(bytes));
        assert!(
            offset.is_multiple_of(8) && end.is_some_and(|end| end <= self.len),
            "words64 {offset}+{count}"
        );
        // SAFETY: `offset` lies inside the mapping by the assertion above.
        let pointer = unsafe { self.base.as_ptr().add(offset) };
        // SAFETY: aligned, in bounds for `count` words, valid for the life of `self`; AtomicU64 has the layout of u64
        // and allows shared mutation, by this process and by others.
        unsafe { std::slice::from_raw_parts(pointer.cast::<AtomicU64>(), count) }
    }

    /// The address of `len` bytes at `offset`, or `None` where they do not lie inside. For bulk copies only: the
    /// bytes may change under the reader, and whoever copies states why that is harmless.
    pub fn bytes_at(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: `offset <= len` of the mapping by the check above.
        Some(unsafe { self.base.add(offset) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // Before the range can be another's.
        self.guard = None;
        // SAFETY: the range was mapped by `map`; the borrow rules leave no accessor's reference alive here.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping");
    }
}

/// Bytes behind a descriptor.
pub fn descriptor_bytes(fd: impl AsFd) -> Result<u64, rustix::io::Errno> {
    Ok(u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0))
}
