//! The sidecar's DRAM pool as this process maps it: read-only, every slot checked before and after its use.
//!
//! A memfd is sealed against shrinking. A pool file is not: a read of a mapped word beyond the file's end
//! would kill this process by SIGBUS, so words are read through the descriptor. Copies read file or mapping
//! inside a system call, and this call fails instead. A file that was cut and then extended to its old length
//! gives zeros below sound headers, so the file's extent is checked too.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use copy_engine::PoolSource;
use rustix::fs::SealFlags;
use shm_protocol::pool::{PoolView, SlotRef, header, verify_slot};
use shm_protocol::region::extent::Extent;
use shm_protocol::region::{Access, Region, descriptor_bytes};

/// One life of a sidecar's pool.
#[derive(Debug)]
pub(crate) struct MappedPool {
    region: Arc<Region>,
    extent: Extent,
    /// True if the file cannot be cut.
    sealed: bool,
    /// True once the pool's header was seen to be settled.
    settled: AtomicBool,
    segment_bytes: u64,
    segments: u64,
}

// === impl MappedPool ===

impl MappedPool {
    /// Maps the pool of the handshake. Fails if its size or header is not sound.
    pub(crate) fn map(fd: &OwnedFd, bytes: u64) -> Result<Self, String> {
        let held = descriptor_bytes(fd).map_err(|errno| format!("the pool: {errno}"))?;
        if held < bytes {
            return Err(format!(
                "the pool has {held} bytes, and the sidecar stated {bytes}: install the same pillion \
                 release on both sides"
            ));
        }
        let len = usize::try_from(bytes)
            .map_err(|_| format!("a pool of {bytes} bytes is too large for this machine"))?;
        let region = Region::map(fd.as_fd(), len, Access::ReadOnly).map_err(|errno| {
            format!("the pool cannot be mapped ({errno}): raise the address space limit (ulimit -v)")
        })?;
        let sealed = rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        let file = fd.try_clone().map_err(|error| format!("the pool: {error}"))?;
        let (segment_bytes, segments) = {
            let load = load_from(&region, (!sealed).then_some(file.as_fd()));
            let view = PoolView::new(load, bytes).map_err(|error| error.to_string())?;
            (view.segment_bytes(), view.segments())
        };
        let extent = Extent::new(file, bytes);
        let (region, settled) = (Arc::new(region), AtomicBool::new(false));
        Ok(Self { region, extent, sealed, settled, segment_bytes, segments })
    }

    /// The source of copies from the pool.
    pub(crate) fn source(&self) -> PoolSource<'_> {
        PoolSource { region: &self.region, file: self.extent.file() }
    }

    /// True if the pool has lost nothing. Callers check this before and after each read.
    pub(crate) fn is_whole(&self) -> bool {
        if self.sealed {
            return true;
        }
        // A sidecar takes memory from its pool until the pool is settled, and serves nothing before that.
        let settled =
            self.settled.load(Ordering::Relaxed) || self.word_loader()(header::SETTLED as usize) == 1;
        self.settled.store(settled, Ordering::Relaxed);
        !settled || self.extent.is_whole()
    }

    /// True if the slot is whole and still holds the filling named by `slot`.
    pub(crate) fn verify_slot(&self, slot: SlotRef, block_bytes: u64) -> bool {
        verify_slot(self.word_loader(), self.segment_bytes, self.segments, slot, block_bytes)
    }

    fn word_loader(&self) -> impl Fn(usize) -> u64 {
        load_from(&self.region, (!self.sealed).then(|| self.extent.file().as_fd()))
    }
}

/// Returns a loader of words for [`PoolView`], which keeps to the mapped length. A word that cannot be read
/// is 0, and no whole slot has the state 0.
fn load_from<'a>(region: &'a Region, file: Option<BorrowedFd<'a>>) -> impl Fn(usize) -> u64 + 'a {
    move |offset| match file {
        None => region.load64(offset),
        Some(file) => {
            let mut word = [0; 8];
            let read = rustix::io::pread(file, &mut word, offset as u64);
            if read == Ok(word.len()) { u64::from_le_bytes(word) } else { 0 }
        }
    }
}
