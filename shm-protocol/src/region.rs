//! A shared mapping whose words are reached through atomics alone.
//!
//! Both processes write this memory, so the code forms no `&T` or `&mut T` to plain data over it. Words are
//! `AtomicU32`/`AtomicU64`, and the copy engine reaches bulk KV bytes by raw pointers.

pub mod extent;
mod guard;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::mm::{Advice, MapFlags, ProtFlags};

use self::guard::Guard;

/// `f_type` of tmpfs and of every memfd: linux/magic.h.
pub const TMPFS_MAGIC: u32 = 0x0102_1994;
/// `f_type` of hugetlbfs.
pub const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;

/// The access of a mapping.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Access {
    /// Loads only, through [`Region::load64`]. A store would fault, and an atomic load stronger than relaxed
    /// may be compiled to a store.
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
    /// Set for a file that other processes can cut.
    guard: Option<Guard>,
}

// SAFETY: the mapping belongs to the value alone and stays in place until drop. Every access goes through
// atomics, or through raw pointers whose users state their own contract.
unsafe impl Send for Region {}
// SAFETY: the same; shared use of the atomics needs no further synchronisation.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `len` bytes of `fd` from its start. A touch of a byte beyond the file's end ends the process by
    /// SIGBUS. So the caller checks the file's size, and ensures that the size stays: a memfd has a shrink
    /// seal, or no other process has it. A file that other processes can cut is guarded ([`Region::guard`]),
    /// or its mapping is reached inside system calls alone, since these fail instead.
    pub fn map(fd: BorrowedFd<'_>, len: usize, access: Access) -> Result<Self, rustix::io::Errno> {
        let prot = match access {
            Access::ReadOnly => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: the kernel chooses the address, so no existing mapping is replaced.
        let address = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }?;
        // SAFETY: the range was mapped by the line above and no other code knows of it; DONTFORK changes no
        // byte.
        let advised = unsafe { rustix::mm::madvise(address, len, Advice::LinuxDontFork) };
        let base = NonNull::new(address.cast()).expect("mmap never returns null for a chosen address");
        let region = Self { base, len, access, guard: None };
        advised.map(|()| region)
    }

    /// Guards this writable mapping of a file that other processes can cut, until the value is dropped. A
    /// touch of a page beyond the file's end replaces the whole mapping by this process's own memory, zeros
    /// at first.
    pub fn guard(&mut self, file: OwnedFd) -> Result<(), rustix::io::Errno> {
        assert_eq!(self.access, Access::ReadWrite, "the memory in its place is writable");
        self.guard = Some(Guard::new(self.base.as_ptr() as usize, self.len, file)?);
        Ok(())
    }

    /// True if nothing of a guarded mapping was lost so far. Bytes read before this call count only if it
    /// returns true.
    pub fn is_whole(&self) -> bool {
        self.guard.as_ref().is_none_or(Guard::is_whole)
    }

    /// Returns the mapped bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns false: the kernel refuses empty mappings.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the access given to [`Region::map`].
    pub fn access(&self) -> Access {
        self.access
    }

    /// Returns the 32-bit word at `offset`. Panics on a wrong offset: callers pass their own, checked
    /// offsets.
    pub fn word32(&self, offset: usize) -> &AtomicU32 {
        assert!(
            offset.is_multiple_of(4) && offset.checked_add(4).is_some_and(|end| end <= self.len),
            "word32 {offset}"
        );
        // SAFETY: `offset + 4 <= len`, so the address is inside the mapping.
        let pointer = unsafe { self.base.as_ptr().add(offset) };
        // SAFETY: aligned (the mapping is page aligned and offset is a multiple of 4), valid for the life of
        // `self`, and this process reaches the word through atomics alone.
        unsafe { AtomicU32::from_ptr(pointer.cast()) }
    }

    /// Returns the 64-bit word at `offset`; panics as [`Region::word32`] does.
    pub fn word64(&self, offset: usize) -> &AtomicU64 {
        &self.words64(offset, 1)[0]
    }

    /// Loads the 64-bit word at `offset` with acquire, also of a read-only mapping; panics as
    /// [`Region::word32`] does.
    pub fn load64(&self, offset: usize) -> u64 {
        let value = self.word64(offset).load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        value
    }

    /// Returns `count` consecutive 64-bit words at `offset`; panics as [`Region::word32`] does.
    pub fn words64(&self, offset: usize, count: usize) -> &[AtomicU64] {
        let end = count.checked_mul(8).and_then(|bytes| offset.checked_add(bytes));
        assert!(
            offset.is_multiple_of(8) && end.is_some_and(|end| end <= self.len),
            "words64 {offset}+{count}"
        );
        // SAFETY: `offset` lies inside the mapping by the assertion above.
        let pointer = unsafe { self.base.as_ptr().add(offset) };
        // SAFETY: aligned, in bounds for `count` words, valid for the life of `self`; AtomicU64 has the
        // layout of u64 and allows shared mutation, by this process and by others.
        unsafe { std::slice::from_raw_parts(pointer.cast::<AtomicU64>(), count) }
    }

    /// Returns the address of `len` bytes at `offset`, or `None` if they do not lie inside. For bulk copies
    /// only: the bytes may change under the reader, and the copying code states why that is harmless.
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
        // The guard ends before the range can be mapped again.
        self.guard = None;
        // SAFETY: the range was mapped by `map`; the borrow rules leave no reference from an accessor alive
        // here.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "munmap of an own mapping");
    }
}

/// Returns the size of a descriptor's file in bytes.
pub fn descriptor_bytes(fd: impl AsFd) -> Result<u64, rustix::io::Errno> {
    Ok(u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0))
}
