//! A check that a file still has every byte, though other processes can cut it.
//!
//! A file cut and made as long as before reads as zeros there, without a fault. Bytes cut off take no memory
//! any more until a process touches them. A file in service only gains memory, so a file that has lost memory
//! was cut, or a hole was punched into it.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A file, and the most memory it was seen to have.
#[derive(Debug)]
pub struct Extent {
    file: OwnedFd,
    bytes: u64,
    /// Memory in units of `st_blocks`.
    held: AtomicU64,
    lost: AtomicBool,
}

// === impl Extent ===

impl Extent {
    /// Watches a file of `bytes` bytes. The file must give none of its memory back from the first
    /// [`Extent::is_whole`] on.
    pub fn new(file: OwnedFd, bytes: u64) -> Self {
        Self { file, bytes, held: AtomicU64::new(0), lost: AtomicBool::new(false) }
    }

    /// Returns the file.
    pub fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// True if nothing of the file was lost so far; once false, always false. Bytes read between two calls
    /// with a true result are bytes of the file, with one exception: a page cut off in between and touched
    /// again goes unnoticed, unless other pages were cut with it and not touched.
    pub fn is_whole(&self) -> bool {
        // SYNC POINT(extent): loaded before the size is read, so memory gained by the file meanwhile is no
        // loss.
        let before = self.held.load(Ordering::Acquire);
        let Ok(stat) = rustix::fs::fstat(&self.file) else { return false };
        let (bytes, held) =
            (u64::try_from(stat.st_size).unwrap_or(0), u64::try_from(stat.st_blocks).unwrap_or(0));
        if bytes < self.bytes || held < before {
            self.lost.store(true, Ordering::Relaxed);
        }
        // SYNC POINT(extent): release; a thread that loads the number sees a file with that much memory.
        self.held.fetch_max(held, Ordering::Release);
        !self.lost.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};

    use super::*;

    const BYTES: u64 = 64 << 10;

    fn file() -> OwnedFd {
        let fd = memfd_create("extent", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, BYTES).unwrap();
        fd
    }

    #[test]
    fn a_file_that_gains_memory_is_whole() {
        let file = file();
        let extent = Extent::new(file.try_clone().unwrap(), BYTES);
        assert!(extent.is_whole());
        fallocate(&file, FallocateFlags::KEEP_SIZE, 0, BYTES).unwrap();
        assert!(extent.is_whole());
        ftruncate(&file, 2 * BYTES).unwrap();
        assert!(extent.is_whole(), "longer is not less");
    }

    #[test]
    fn what_is_lost_stays_lost() {
        type Damage = fn(&OwnedFd);
        let damages: [(&str, Damage); 3] = [
            ("cut", |file| ftruncate(file, BYTES - 4096).unwrap()),
            ("cut and made longer again", |file| {
                ftruncate(file, BYTES - 4096).unwrap();
                ftruncate(file, BYTES).unwrap();
            }),
            ("punched", |file| {
                let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(file, punch, 8192, 4096).unwrap();
            }),
        ];
        for (name, damage) in damages {
            let file = file();
            fallocate(&file, FallocateFlags::KEEP_SIZE, 0, BYTES).unwrap();
            let extent = Extent::new(file.try_clone().unwrap(), BYTES);
            assert!(extent.is_whole(), "{name}");
            damage(&file);
            assert!(!extent.is_whole(), "{name}");
            std::os::unix::fs::FileExt::write_all_at(&File::from(file), &[1; BYTES as usize], 0).unwrap();
            assert!(!extent.is_whole(), "{name}, and written again");
        }
    }
}
