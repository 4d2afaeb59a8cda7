//! The DRAM pool's memory: a sealed memfd, or a file on tmpfs or hugetlbfs that outlives the sidecar.
//!
//! This process maps it for writing; engines get a descriptor that can only be mapped for reading. Headers are written
//! here, word by word through atomics; a block's bytes are written by the copy engine, at [`Pool::slot_ptr`], between
//! [`Pool::fill`] and [`Pool::commit`]. The layout is [`shm_protocol::pool`].

use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::{FallocateFlags, FlockOperation, MemfdFlags, Mode, OFlags, SealFlags, StatFs};
use rustix::io::Errno;
use shm_protocol::key::{BlockKey, NamespaceDigest};
use shm_protocol::pool::{self, Geometry, SlotPlace, SlotRef, header, segment, slot};
use shm_protocol::region::{Access, Region};

use crate::{Error, dram};

/// `f_type` of tmpfs, from linux/magic.h.
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// `f_type` of hugetlbfs.
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;
/// Bytes reserved by one call: a second or less, so that a signal need not wait long.
const RESERVE_BYTES: u64 = 1 << 30;
/// Unit of `st_blocks`.
const STAT_BLOCK_BYTES: u64 = 512;

/// What pool to make.
#[derive(Clone, Debug)]
pub struct Config {
    /// Bytes of all segments, as [`dram::Config::pool_bytes`].
    pub bytes: u64,
    /// Bytes of a segment, as [`dram::Config::segment_bytes`].
    pub segment_bytes: u64,
    /// A file on tmpfs or hugetlbfs; a memfd if there is none.
    pub path: Option<PathBuf>,
    /// This life of the sidecar.
    pub epoch: u64,
}

/// The memory of a DRAM tier. Shared by reference between threads; one of them decides (calls everything but
/// [`Pool::slot_ptr`]).
#[derive(Debug)]
pub struct Pool {
    region: Arc<Region>,
    fd: OwnedFd,
    segment_bytes: u64,
    life: u64,
    /// Block bytes of each segment, zero while unassigned: what this process wrote, so that it need not trust the file.
    block_bytes: Box<[AtomicU64]>,
}

// === impl Pool: making it ===

impl Pool {
    /// Makes the pool and writes its header. An existing file is initialised anew, but never shrunk.
    pub fn create(config: &Config) -> Result<Self, Error> {
        let segments = dram::segments(config.bytes, config.segment_bytes)?;
        let too_large = Error::TooLarge { bytes: config.bytes, max: pool::POOL_BYTES_MAX };
        let bytes = pool::pool_bytes(config.segment_bytes, segments).ok_or(too_large)?;
        let (fd, used_before) = match &config.path {
            Some(path) => open_file(path, bytes)?,
            None => (open_memfd(bytes)?, false),
        };
        let region =
            Region::map(fd.as_fd(), bytes as usize, Access::ReadWrite).map_err(Error::os("map memory"))?;
        let block_bytes = (0..segments).map(|_| AtomicU64::new(0)).collect();
        let region = Arc::new(region);
        let mut pool = Self { region, fd, segment_bytes: config.segment_bytes, life: 0, block_bytes };
        pool.life = pool.initialise(config.epoch, used_before)?;
        if config.path.is_none() {
            // After the mapping: FUTURE_WRITE allows this one and no other to write.
            let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
            rustix::fs::fcntl_add_seals(&pool.fd, seals).map_err(Error::os("seal the memfd"))?;
        }
        Ok(pool)
    }

    /// Writes the header page; how many sidecars have done so.
    fn initialise(&self, epoch: u64, used_before: bool) -> Result<u64, Error> {
        let word = |offset: u64| self.region.word64(offset as usize);
        let pool_before = used_before && word(header::MAGIC).load(Ordering::Relaxed) == pool::MAGIC;
        let life =
            if pool_before { word(header::LIFE).load(Ordering::Relaxed).wrapping_add(1).max(1) } else { 1 };
        word(header::VERSION).store(0, Ordering::Release);
        if used_before {
            self.forget_segments();
        }
        let boot = boot_id()?;
        let fields = [
            (header::MAGIC, pool::MAGIC),
            (header::SEGMENT_BYTES, self.segment_bytes),
            (header::SEGMENTS, self.segments()),
            (header::BOOT_ID, boot as u64),
            (header::BOOT_ID + 8, (boot >> 64) as u64),
            (header::EPOCH, epoch),
            (header::LIFE, life),
        ];
        fields.into_iter().for_each(|(field, value)| word(field).store(value, Ordering::Relaxed));
        // SYNC POINT(pool header): a reader that sees the version sees the fields above.
        word(header::VERSION).store(u64::from(pool::VERSION), Ordering::Release);
        Ok(life)
    }

    /// An earlier life's segments, or whatever lay where ours begin, must not be taken for assigned ones.
    fn forget_segments(&self) {
        for number in 0..self.segments() {
            self.segment_word(number, segment::MAGIC).store(0, Ordering::Relaxed);
        }
    }
}

fn open_memfd(bytes: u64) -> Result<OwnedFd, Error> {
    if let Some(available) = memory_available()
        && available < bytes
    {
        let place = "memory (MemAvailable of /proc/meminfo)".to_owned();
        return Err(Error::NoMemory { bytes, available, place, remedy: "free memory" });
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create(c"pillion-pool", flags).map_err(Error::os("create a memfd"))?;
    rustix::fs::ftruncate(&fd, bytes).map_err(Error::os("size the memfd"))?;
    Ok(fd)
}

/// A pool file of at least `bytes`, its memory reserved and locked for this process, and whether it existed.
fn open_file(path: &Path, bytes: u64) -> Result<(OwnedFd, bool), Error> {
    check_place(path, bytes)?;
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd =
        rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR).map_err(Error::os("open the pool file"))?;
    match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => return Err(Error::Locked(path.to_owned())),
        locked => locked.map_err(Error::os("lock the pool file"))?,
    }
    let stat = rustix::fs::fstat(&fd).map_err(Error::os("stat the pool file"))?;
    let refuse = |problem: String| Err(Error::File { path: path.to_owned(), problem });
    if stat.st_uid != rustix::process::geteuid().as_raw() {
        return refuse(format!("belongs to uid {}: remove it, or pass another --pool-path", stat.st_uid));
    }
    let found = stat.st_size as u64;
    if found > bytes {
        return refuse(format!(
            "has {found} bytes, this pool needs {bytes}: raise --dram to keep its size, or remove it"
        ));
    }
    rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR).map_err(Error::os("restrict the pool file"))?;
    reserve(&fd, bytes)?;
    Ok((fd, found > 0))
}

/// Refuses a place that cannot hold the pool, before anything is created there.
fn check_place(path: &Path, bytes: u64) -> Result<(), Error> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let fs = rustix::fs::statfs(folder).map_err(Error::os("look at the pool file's folder"))?;
    if ![TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(&kind(&fs)) {
        let problem = "is neither on tmpfs nor on hugetlbfs: pass a path under /dev/shm or a hugetlbfs mount";
        return Err(Error::File { path: path.to_owned(), problem: problem.to_owned() });
    }
    let held = rustix::fs::stat(path).map_or(0, |stat| stat.st_blocks as u64 * STAT_BLOCK_BYTES);
    let available = held.saturating_add(fs.f_bavail.saturating_mul(fs.f_bsize as u64));
    if available < bytes {
        let place = folder.display().to_string();
        let remedy = "enlarge that mount (in Kubernetes: sizeLimit of the emptyDir with medium Memory)";
        return Err(Error::NoMemory { bytes, available, place, remedy });
    }
    Ok(())
}

fn kind(fs: &StatFs) -> u64 {
    u64::from(fs.f_type as u32)
}

/// Takes all memory now: a page that a full file system could not give later would end this process by SIGBUS.
fn reserve(fd: &OwnedFd, bytes: u64) -> Result<(), Error> {
    let mut offset = 0;
    while offset < bytes {
        let len = RESERVE_BYTES.min(bytes - offset);
        match rustix::fs::fallocate(fd, FallocateFlags::empty(), offset, len) {
            Ok(()) => offset += len,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::os("reserve memory in the pool file")(errno)),
        }
    }
    Ok(())
}

fn memory_available() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// The machine's boot id, its 16 bytes in order, as a little-endian number.
fn boot_id() -> Result<u128, Error> {
    let doing = "read /proc/sys/kernel/random/boot_id";
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_err(|source| Error::Os { doing, source })?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let value = u128::from_str_radix(&digits, 16).map_err(|_| Error::os(doing)(Errno::INVAL))?;
    Ok(value.swap_bytes())
}

// === impl Pool: facts ===

impl Pool {
    /// Bytes mapped, the header included: what an engine must map.
    pub fn len(&self) -> u64 {
        self.region.len() as u64
    }

    /// Never: a pool has at least one segment.
    pub fn is_empty(&self) -> bool {
        self.block_bytes.is_empty()
    }

    /// Bytes of a segment.
    pub fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// Number of segments.
    pub fn segments(&self) -> u64 {
        self.block_bytes.len() as u64
    }

    /// The first number of a filling in this life: give it to [`dram::Dram::raise_generation`].
    pub fn first_generation(&self) -> u64 {
        pool::first_generation(self.life)
    }

    /// The mapping.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The mapping, for whoever needs it beyond the pool's life: a GPU that has its pages locked.
    pub fn shared_region(&self) -> Arc<Region> {
        Arc::clone(&self.region)
    }

    /// The descriptor this process holds, writable where the pool is a file: never to be sent.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// A descriptor for engines, opened for reading: it cannot be mapped for writing.
    pub fn read_only_fd(&self) -> Result<OwnedFd, Error> {
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        let opened = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        opened.map_err(Error::os("reopen the pool for reading"))
    }

    /// The address of `len` bytes of data at pool offset `offset`, or `None` where they do not lie in one segment.
    pub fn slot_ptr(&self, offset: u64, len: u64) -> Option<NonNull<u8>> {
        let inside = offset.checked_sub(pool::SEGMENT_ALIGN)? % self.segment_bytes;
        if len > self.segment_bytes - inside {
            return None;
        }
        self.region.bytes_at(usize::try_from(offset).ok()?, usize::try_from(len).ok()?)
    }
}

// === impl Pool: headers ===

impl Pool {
    fn segment_word(&self, number: u64, field: u64) -> &AtomicU64 {
        self.region.word64((pool::SEGMENT_ALIGN + number * self.segment_bytes + field) as usize)
    }

    fn slot_word(&self, place: &SlotPlace, field: u64) -> &AtomicU64 {
        self.region.word64((place.header + field) as usize)
    }

    /// Gives segment `number` to blocks of `block_bytes`: marks every slot free, then writes the segment's header.
    /// False, and nothing written, where there is no such segment or no such block.
    #[must_use = "a slot of a segment without header cannot be filled"]
    pub fn write_segment_header(&self, number: u64, block_bytes: u64) -> bool {
        let Ok(geometry) = Geometry::new(self.segment_bytes, block_bytes) else { return false };
        let Some(known) = usize::try_from(number).ok().and_then(|number| self.block_bytes.get(number)) else {
            return false;
        };
        self.segment_word(number, segment::MAGIC).store(0, Ordering::Relaxed);
        // SYNC POINT(segment reuse): whoever sees one of the slot headers below sees no old segment header.
        fence(Ordering::Release);
        let first = pool::SEGMENT_ALIGN + number * self.segment_bytes + pool::SEGMENT_HEADER_BYTES;
        for header in (0..u64::from(geometry.slot_count)).map(|index| first + index * pool::SLOT_HEADER_BYTES)
        {
            let words = self.region.words64(header as usize, pool::SLOT_HEADER_BYTES as usize / 8);
            words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
        self.segment_word(number, segment::BLOCK_BYTES).store(block_bytes, Ordering::Relaxed);
        self.segment_word(number, segment::SLOT_COUNT).store(geometry.slot_count.into(), Ordering::Relaxed);
        // SYNC POINT(segment header): whoever sees the magic sees the fields and free slots.
        self.segment_word(number, segment::MAGIC).store(pool::SEGMENT_MAGIC, Ordering::Release);
        known.store(block_bytes, Ordering::Relaxed);
        true
    }

    /// Where the slot at `offset` lies, by what this process wrote.
    fn place(&self, offset: u64) -> Option<(SlotPlace, u64)> {
        let number = offset.checked_sub(pool::SEGMENT_ALIGN)? / self.segment_bytes;
        let block_bytes = self.block_bytes.get(usize::try_from(number).ok()?)?.load(Ordering::Relaxed);
        let place = Geometry::new(self.segment_bytes, block_bytes).ok()?.place(offset).ok()?;
        Some((place, block_bytes))
    }

    /// The place of a slot that is still in this filling.
    fn current(&self, slot: SlotRef) -> Option<SlotPlace> {
        let (place, _) = self.place(slot.offset)?;
        let generation = self.slot_word(&place, slot::GENERATION).load(Ordering::Relaxed);
        (generation == slot.generation).then_some(place)
    }

    /// Begins a filling: from now on no reader takes the slot's bytes for a block. False where there is no such slot.
    #[must_use = "a slot that does not exist must not be written"]
    pub fn fill(&self, slot: SlotRef, namespace: NamespaceDigest, key: &BlockKey) -> bool {
        let Some((place, block_bytes)) = self.place(slot.offset) else { return false };
        self.slot_word(&place, slot::STATE).store(pool::FILLING, Ordering::Relaxed);
        // SYNC POINT(slot reuse): a reader that saw any later byte, of the header or of the block, sees FILLING or
        // another generation when it verifies again.
        fence(Ordering::Release);
        let [low, high] = namespace.words();
        let [a, b, c, d] = key.hash.words();
        let fields = [
            (slot::GENERATION, slot.generation),
            (slot::NAMESPACE, low),
            (slot::NAMESPACE + 8, high),
            (slot::HASH, a),
            (slot::HASH + 8, b),
            (slot::HASH + 16, c),
            (slot::HASH + 24, d),
            (slot::GROUP, key.group.into()),
            (slot::LENGTH, block_bytes),
            (slot::CHECKSUM, 0),
        ];
        fields
            .into_iter()
            .for_each(|(field, value)| self.slot_word(&place, field).store(value, Ordering::Relaxed));
        true
    }

    /// Ends a filling: the block's bytes, written before, are whole. False if the slot is not in this filling.
    #[must_use = "a block that was not committed is not there"]
    pub fn commit(&self, slot: SlotRef, checksum: u64) -> bool {
        let Some(place) = self.current(slot) else { return false };
        let state = self.slot_word(&place, slot::STATE);
        if state.load(Ordering::Relaxed) != pool::FILLING {
            return false;
        }
        self.slot_word(&place, slot::CHECKSUM).store(checksum, Ordering::Relaxed);
        // SYNC POINT(slot commit): a reader that sees COMMITTED with acquire sees the block's bytes and its header.
        state.store(pool::COMMITTED, Ordering::Release);
        true
    }

    /// Marks an evicted or abandoned slot free. False if the slot is not in this filling any more.
    pub fn free(&self, slot: SlotRef) -> bool {
        let Some(place) = self.current(slot) else { return false };
        self.slot_word(&place, slot::STATE).store(pool::FREE, Ordering::Release);
        true
    }
}

#[cfg(test)]
mod tests;
