//! The place of a pool: anonymous memory, or a file of this process alone.

use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FallocateFlags, FlockOperation, MemfdFlags, Mode, OFlags, StatFs, StatVfsMountFlags};
use rustix::io::Errno;
use shm_protocol::pool;
use shm_protocol::region::{HUGETLBFS_MAGIC, TMPFS_MAGIC};

use super::huge;
use crate::Error;

const STAT_BLOCK_BYTES: u64 = 512;

/// Memory for a pool.
#[derive(Debug)]
pub(super) struct File {
    pub(super) fd: OwnedFd,
    /// Bytes the file had; zero if there was no file.
    pub(super) found_bytes: u64,
    /// True if all of these bytes had memory.
    pub(super) found_whole: bool,
    /// True if all pages have memory.
    pub(super) reserved: bool,
}

pub(super) fn open_memfd(bytes: u64) -> Result<File, Error> {
    if let Some(available) = memory_available()
        && available < bytes
    {
        let place = "memory (MemAvailable of /proc/meminfo)".to_owned();
        return Err(Error::NoMemory { bytes, available, place, remedy: "free memory" });
    }
    let fd = memfd(bytes, MemfdFlags::empty(), "create a memfd")?;
    Ok(File { fd, found_bytes: 0, found_whole: true, reserved: true })
}

fn memfd(bytes: u64, kind: MemfdFlags, doing: &'static str) -> Result<OwnedFd, Error> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | kind;
    let fd = rustix::fs::memfd_create(c"pillion-pool", flags).map_err(Error::os(doing))?;
    rustix::fs::ftruncate(&fd, bytes).map_err(Error::os("size the memfd"))?;
    Ok(fd)
}

/// Makes a memfd of huge pages. Its pages are reserved as those of a file: a refusal by a control group is
/// then an error, while a touch of a page would end the process.
pub(super) fn open_huge_memfd(bytes: u64) -> Result<File, Error> {
    huge::check(bytes, huge::PAGE_BYTES, 0)?;
    let fd = memfd(bytes, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB, "create a memfd of huge pages")?;
    reserve(&fd, 0, pool::SEGMENT_ALIGN)?;
    Ok(File { fd, found_bytes: 0, found_whole: true, reserved: false })
}

/// Opens a pool file of `bytes`, locked for this process, the memory of its header page reserved.
pub(super) fn open_file(path: &Path, bytes: u64, hugepages: bool) -> Result<File, Error> {
    check_place(path, bytes, hugepages)?;
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(|errno| unopened(path, errno))?;
    match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Err(Error::Locked(path.to_owned())),
        locked => locked.map_err(Error::os("lock the pool file"))?,
    }
    let stat = rustix::fs::fstat(&fd).map_err(Error::os("stat the pool file"))?;
    let refuse = |problem: String| Err(Error::File { path: path.to_owned(), problem });
    if stat.st_uid != rustix::process::geteuid().as_raw() {
        return refuse(format!("belongs to user {}: remove it, or pass another --pool-path", stat.st_uid));
    }
    let found = stat.st_size as u64;
    if found > bytes {
        return refuse(format!(
            "has {found} bytes, and --dram needs {bytes}: raise --dram to keep the file's size, or remove it"
        ));
    }
    rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR).map_err(Error::os("restrict the pool file"))?;
    let held = stat.st_blocks as u64 * STAT_BLOCK_BYTES;
    let (found_whole, reserved) = (held >= found, held >= bytes);
    if found < bytes {
        rustix::fs::ftruncate(&fd, bytes).map_err(Error::os("size the pool file"))?;
    }
    reserve(&fd, 0, pool::SEGMENT_ALIGN)?;
    Ok(File { fd, found_bytes: found, found_whole, reserved })
}

/// Opens the same file for reading.
pub(super) fn reopen(fd: &OwnedFd) -> Result<OwnedFd, Error> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let opened = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    opened.map_err(Error::os("reopen the pool for reading"))
}

/// Opens the same file as `file` for reading, by a path on a read-only mount: an engine with this descriptor
/// cannot open it again for writing, not even as root.
pub(super) fn open_view(path: &Path, file: &OwnedFd) -> Result<OwnedFd, Error> {
    let refuse = |problem: &str| Err(Error::File { path: path.to_owned(), problem: problem.to_owned() });
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let view = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| unopened(path, errno))?;
    let doing = "stat the --pool-view";
    let stat = |fd: &OwnedFd| rustix::fs::fstat(fd).map_err(Error::os(doing));
    let (seen, held) = (stat(&view)?, stat(file)?);
    if (seen.st_dev, seen.st_ino) != (held.st_dev, held.st_ino) {
        return refuse("is not the file of --pool-path: pass its path on another mount of the same volume");
    }
    let mount = rustix::fs::fstatvfs(&view).map_err(Error::os(doing))?;
    if !mount.f_flag.contains(StatVfsMountFlags::RDONLY) {
        return refuse(
            "is not on a read-only mount: mount the volume once more with readOnly (mount -o bind,ro)",
        );
    }
    Ok(view)
}

/// Makes the error for a `path` at which no file can be opened or made.
fn unopened(path: &Path, errno: Errno) -> Error {
    let remedy = match errno {
        Errno::LOOP => "pass the path of the file itself, not of a link",
        Errno::ACCESS | Errno::PERM => {
            "remove a file of another user there, and give this user write permission for the folder, in Kubernetes by \
             fsGroup"
        }
        _ => "create or mount its folder",
    };
    Error::File { path: path.to_owned(), problem: format!("cannot be opened: {errno}; {remedy}") }
}

/// Fails for a place that cannot hold the pool, before any file is created there.
fn check_place(path: &Path, bytes: u64, hugepages: bool) -> Result<(), Error> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let fs = rustix::fs::statfs(folder).map_err(|errno| unopened(path, errno))?;
    let refuse = |problem: &str| Err(Error::File { path: path.to_owned(), problem: problem.to_owned() });
    let held = rustix::fs::stat(path).map_or(0, |stat| stat.st_blocks as u64 * STAT_BLOCK_BYTES);
    match kind(&fs) {
        HUGETLBFS_MAGIC => huge::check(bytes, fs.f_bsize as u64, held)?,
        TMPFS_MAGIC if hugepages => {
            return refuse(
                "is on tmpfs: with --hugepages, pass a path on a hugetlbfs mount, or no --pool-path",
            );
        }
        TMPFS_MAGIC => {}
        _ => {
            return refuse("is not on tmpfs or hugetlbfs: pass a path under /dev/shm or a hugetlbfs mount");
        }
    }
    // For a hugetlbfs without size= the kernel reports 0 or all ones.
    let sized = kind(&fs) == TMPFS_MAGIC || !matches!(fs.f_blocks, 0 | u64::MAX);
    let available = held.saturating_add(fs.f_bavail.saturating_mul(fs.f_bsize as u64));
    if sized && available < bytes {
        let place = folder.display().to_string();
        let remedy = "enlarge that mount (in Kubernetes: sizeLimit of the emptyDir with medium Memory)";
        return Err(Error::NoMemory { bytes, available, place, remedy });
    }
    Ok(())
}

fn kind(fs: &StatFs) -> u32 {
    fs.f_type as u32
}

/// Takes the memory of `len` bytes from `start` now, and not at the first touch of a page. The size of a cut
/// file stays.
pub(super) fn reserve(fd: &OwnedFd, start: u64, len: u64) -> Result<(), Error> {
    loop {
        match rustix::fs::fallocate(fd, FallocateFlags::KEEP_SIZE, start, len) {
            Err(Errno::INTR) => {}
            reserved => return reserved.map_err(Error::os("reserve memory in the pool file")),
        }
    }
}

/// Gives back the memory of `len` bytes from `start`: they read as zeros.
pub(super) fn empty(fd: &OwnedFd, start: u64, len: u64) -> Result<(), Error> {
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(fd, punch, start, len).map_err(Error::os("empty the pool file"))
}

fn memory_available() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// Returns the machine's boot id, its 16 bytes in order, as a little-endian number.
pub(super) fn boot_id() -> Result<u128, Error> {
    let doing = "read /proc/sys/kernel/random/boot_id";
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_err(|source| Error::Os { doing, source })?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let value = u128::from_str_radix(&digits, 16).map_err(|_| Error::os(doing)(Errno::INVAL))?;
    Ok(value.swap_bytes())
}
