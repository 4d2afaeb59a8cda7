//! The DRAM pool's memory: a sealed memfd, of huge or other pages, or a file on tmpfs or hugetlbfs that
//! outlives the sidecar.
//!
//! This process maps it for writing; engines get a descriptor mappable for reading alone. This module writes
//! headers, word by word through atomics. The copy engine writes a block's bytes, in [`Pool::region`],
//! between [`Pool::fill`] and [`Pool::commit`]. The layout is [`shm_protocol::pool`].

mod checksums;
mod huge;
mod place;

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use rustix::fs::SealFlags;
use shm_protocol::key::{BlockKey, NamespaceDigest};
use shm_protocol::pool::{self, Geometry, PoolView, SlotPlace, SlotRef, SlotRemains, header, segment, slot};
use shm_protocol::region::{Access, Region};

pub use self::checksums::{BlockSum, PART_BYTES};
use crate::given_up::{GivenUp, GivenUpCause};
use crate::{TierError, dram};

/// Bytes of a file reserved before it is served, a second or less; the rest follows in the background.
const RESERVE_FIRST: u64 = 1 << 30;

/// The settings of a pool.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    /// Bytes of all segments, as [`dram::DramConfig::pool_bytes`].
    pub bytes: u64,
    /// Bytes of a segment, as [`dram::DramConfig::segment_bytes`].
    pub segment_bytes: u64,
    /// A file on tmpfs or hugetlbfs; a memfd if there is none.
    pub path: Option<PathBuf>,
    /// True for huge pages: a memfd of huge pages, or a file on hugetlbfs.
    pub hugepages: bool,
    /// Epoch of this life of the sidecar.
    pub epoch: u64,
}

/// The content of the pool file at the start.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum FoundPool {
    /// A new file, or anonymous memory.
    Nothing,
    /// A pool of an earlier life, whose blocks can be adopted.
    Pool,
    /// Other content, with the cause.
    Unusable(GivenUp),
}

/// The memory of a DRAM tier, shared by reference between threads. One of them decides: it calls all methods
/// except [`Pool::region`] and those that look for checksums and compute them. Another one reserves.
#[derive(Debug)]
pub struct Pool {
    region: Arc<Region>,
    fd: OwnedFd,
    segment_bytes: u64,
    life: u64,
    found: FoundPool,
    /// Epoch of the life whose pool was taken over.
    former: Option<u64>,
    /// Bytes from the start with reserved memory.
    reserved: AtomicU64,
    /// True if no further memory can be had.
    exhausted: AtomicBool,
    /// Block bytes of each segment, zero while unassigned, as written by this process, so it need not trust
    /// the file.
    block_bytes: Box<[AtomicU64]>,
}

// === impl Pool: making it ===

impl Pool {
    /// Makes the pool and writes its header. A file's content of an earlier life stays, if this life can read
    /// it; a file is never shrunk. The rest of a file's memory is reserved later: see [`Pool::reserve_some`].
    pub fn create(config: &PoolConfig) -> Result<Self, TierError> {
        let segments = dram::count_segments(config.bytes, config.segment_bytes)?;
        let too_large = TierError::TooLarge { bytes: config.bytes, max: pool::POOL_BYTES_MAX };
        let bytes = pool::pool_bytes(config.segment_bytes, segments).ok_or(too_large)?;
        let file = match &config.path {
            Some(path) => place::open_file(path, bytes, config.hugepages)?,
            None if config.hugepages => place::open_huge_memfd(bytes)?,
            None => place::open_memfd(bytes)?,
        };
        let mut region = Region::map(file.fd.as_fd(), bytes as usize, Access::ReadWrite)
            .map_err(TierError::os("map memory"))?;
        if config.path.is_some() {
            // Opened separately: the lock ends with the pool's own descriptor.
            region.guard(place::reopen_file(&file.fd)?).map_err(TierError::os("guard the pool file"))?;
        }
        let mut pool = Self {
            region: Arc::new(region),
            fd: file.fd,
            segment_bytes: config.segment_bytes,
            life: 0,
            found: FoundPool::Nothing,
            former: None,
            reserved: AtomicU64::new(pool::SEGMENT_ALIGN),
            exhausted: AtomicBool::new(false),
            block_bytes: (0..segments).map(|_| AtomicU64::new(0)).collect(),
        };
        let boot = place::boot_id()?;
        pool.found = pool.inspect_file(file.found_bytes, boot);
        if pool.found == FoundPool::Pool && !file.found_whole {
            let reason = "memory was taken from it, or its sidecar ended before it had reserved all of it";
            pool.found = FoundPool::Unusable(GivenUp::new(GivenUpCause::Unfinished, reason));
        }
        let epoch = || pool.region.word64(header::EPOCH as usize).load(Ordering::Relaxed);
        pool.former = (pool.found == FoundPool::Pool).then(epoch);
        pool.life = pool.initialise(config.epoch, boot);
        match pool.found {
            // An engine may still read the content.
            FoundPool::Unusable(_) => {}
            _ if file.reserved => pool.reserved.store(bytes, Ordering::Relaxed),
            _ => {
                while pool.reserving() && pool.reserved_bytes() < RESERVE_FIRST {
                    pool.reserve_some()?;
                }
            }
        }
        if config.path.is_none() {
            // Sealed after the mapping: FUTURE_WRITE allows this mapping and no other to write.
            let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
            rustix::fs::fcntl_add_seals(&pool.fd, seals).map_err(TierError::os("seal the memfd"))?;
        }
        // The first look; later ones compare with it.
        pool.is_whole();
        Ok(pool)
    }

    /// Decides if the file's `len` bytes are a pool this life can take over.
    fn inspect_file(&self, len: u64, boot: u128) -> FoundPool {
        if len == 0 {
            return FoundPool::Nothing;
        }
        let word = |field: u64| self.region.word64(field as usize).load(Ordering::Acquire);
        let unusable = |cause, text: String| FoundPool::Unusable(GivenUp::new(cause, text));
        if len < pool::HEADER_BYTES || word(header::MAGIC) != pool::MAGIC {
            return unusable(GivenUpCause::Damaged, "it is not a pool file".into());
        }
        if let Err(error) = pool::check_versions(|at| word(at as u64)) {
            return unusable(GivenUpCause::Version, error.to_string());
        }
        if [word(header::BOOT_ID), word(header::BOOT_ID + 8)] != [boot as u64, (boot >> 64) as u64] {
            return unusable(
                GivenUpCause::Boot,
                "it was written before the last reboot of this machine".into(),
            );
        }
        let segment_bytes = word(header::SEGMENT_BYTES);
        if segment_bytes != self.segment_bytes {
            let expected = self.segment_bytes;
            let text = format!("its segments have {segment_bytes} bytes, and --dram needs {expected}");
            return unusable(GivenUpCause::Sizes, text);
        }
        if word(header::SETTLED) != 1 {
            return unusable(GivenUpCause::Unfinished, "a sidecar ended while it emptied the file".into());
        }
        if let Err(error) = PoolView::new(|at| word(at as u64), len) {
            return unusable(GivenUpCause::Damaged, error.to_string());
        }
        match word(header::LIFE) {
            1..pool::LIFE_MAX => FoundPool::Pool,
            life => unusable(GivenUpCause::Damaged, format!("its number of runs, {life}, is invalid")),
        }
    }

    /// Writes the header page, and returns the number of this life. A pool taken over is valid at every
    /// moment of it.
    fn initialise(&self, epoch: u64, boot: u128) -> u64 {
        let word = |offset: u64| self.region.word64(offset as usize);
        let life = match self.found {
            FoundPool::Nothing => 1,
            // Also for a pool not taken over: by the numbers its engines see that its blocks are gone.
            _ => word(header::LIFE).load(Ordering::Relaxed) % pool::LIFE_MAX + 1,
        };
        if self.found != FoundPool::Pool {
            word(header::VERSION).store(0, Ordering::Release);
        }
        // Content not taken over stays for a while, and no later life may take it for this layout's content.
        let settled = !matches!(self.found, FoundPool::Unusable(_));
        let own = pool::own_versions();
        let release = own.release_bytes();
        let words = release.as_chunks::<8>().0.iter().map(|eight| u64::from_le_bytes(*eight));
        let release = (header::RELEASE..).step_by(8).zip(words);
        let fields = [
            (header::OLDEST, own.oldest.into()),
            (header::SETTLED, settled.into()),
            (header::LIFE, life),
            (header::MAGIC, pool::MAGIC),
            (header::SEGMENT_BYTES, self.segment_bytes),
            (header::SEGMENTS, self.segments()),
            (header::BOOT_ID, boot as u64),
            (header::BOOT_ID + 8, (boot >> 64) as u64),
            (header::EPOCH, epoch),
        ];
        let fields = fields.into_iter().chain(release);
        fields.for_each(|(field, value)| word(field).store(value, Ordering::Relaxed));
        // SYNC POINT(pool header): a reader that sees the version sees the fields above.
        word(header::VERSION).store(own.version.into(), Ordering::Release);
        life
    }
}

// === impl Pool: its memory ===

impl Pool {
    /// Returns the content found at the start.
    pub fn found(&self) -> &FoundPool {
        &self.found
    }

    /// Returns the pool of an earlier life that was given up, if there was one.
    pub fn given_up(&self) -> Option<&GivenUp> {
        match &self.found {
            FoundPool::Unusable(given_up) => Some(given_up),
            FoundPool::Nothing | FoundPool::Pool => None,
        }
    }

    /// Returns the epoch of the life whose pool this one has taken over. That life has ended: it had the
    /// file's lock.
    pub fn former_epoch(&self) -> Option<u64> {
        self.former
    }

    /// Returns the bytes with reserved memory, from the pool's start. Beyond them a touch of a page that a
    /// full file system cannot give ends the process by SIGBUS.
    pub fn reserved_bytes(&self) -> u64 {
        // SYNC POINT(reserved): acquire; discarded content below is gone.
        self.reserved.load(Ordering::Acquire)
    }

    /// True if no byte of the pool was lost: other processes can cut a file at any time. Call it after reads
    /// and writes; once false, always false.
    pub fn is_whole(&self) -> bool {
        // Before a file of other content is emptied, no byte of it is in use, and emptying takes memory from
        // it.
        let emptied =
            self.reserved_bytes() > pool::SEGMENT_ALIGN || !matches!(self.found, FoundPool::Unusable(_));
        !emptied || self.region.is_whole()
    }

    /// Keeps later lives from a pool with lost bytes: zeros may lie behind sound headers by now.
    pub fn disown(&self) -> Result<(), TierError> {
        let settled = rustix::io::pwrite(&self.fd, &0_u64.to_ne_bytes(), header::SETTLED);
        settled.map(drop).map_err(TierError::os("disown the pool file"))
    }

    /// Returns the number of segments with reserved memory.
    pub fn reserved_segments(&self) -> u64 {
        (self.reserved_bytes() - pool::SEGMENT_ALIGN) / self.segment_bytes
    }

    /// True if more memory is to be reserved.
    pub fn reserving(&self) -> bool {
        self.reserved_bytes() < self.len() && !self.exhausted.load(Ordering::Relaxed)
    }

    /// Reserves the memory of one more segment, if one is missing. The first call gives back the memory of a
    /// pool this life cannot use: engines with it mapped then read zeros, and these are no header of a whole
    /// slot. One thread at a time; after an error no more memory is reserved.
    pub fn reserve_some(&self) -> Result<(), TierError> {
        let from = self.reserved.load(Ordering::Relaxed);
        if from == self.len() {
            return Ok(());
        }
        let discard = from == pool::SEGMENT_ALIGN && matches!(self.found, FoundPool::Unusable(_));
        let emptied = if discard { self.empty() } else { Ok(()) };
        let reserved = emptied.and_then(|()| place::reserve_range(&self.fd, from, self.segment_bytes));
        match &reserved {
            // SYNC POINT(reserved): release pairs with `reserved_bytes`.
            Ok(()) => self.reserved.store(from + self.segment_bytes, Ordering::Release),
            Err(_) => self.exhausted.store(true, Ordering::Relaxed),
        }
        reserved
    }

    fn empty(&self) -> Result<(), TierError> {
        place::empty_range(&self.fd, pool::SEGMENT_ALIGN, self.len() - pool::SEGMENT_ALIGN)?;
        self.region.word64(header::SETTLED as usize).store(1, Ordering::Release);
        Ok(())
    }

    /// Returns the slots of a segment left by an earlier life, which can be filled and freed from now on;
    /// `None` if the segment is empty.
    pub fn take_over(&self, number: u64) -> Option<Geometry> {
        if self.found != FoundPool::Pool {
            return None;
        }
        let geometry = self.view()?.geometry(number)?;
        self.block_bytes[number as usize].store(geometry.block_bytes, Ordering::Relaxed);
        Some(geometry)
    }

    /// Returns the content of slots in such a segment.
    pub fn remains(&self, number: u64, geometry: &Geometry, slots: Range<u32>) -> Vec<SlotRemains> {
        let Some(view) = self.view() else { return Vec::new() };
        slots.filter_map(|index| view.remains(number, geometry, index, self.life)).collect()
    }

    /// Returns a view of this process's mapping; `None` if another process has overwritten the header since.
    fn view(&self) -> Option<PoolView<impl Fn(usize) -> u64>> {
        PoolView::new(|at| self.region.word64(at).load(Ordering::Acquire), self.len()).ok()
    }
}

// === impl Pool: facts ===

impl Pool {
    /// Returns the mapped bytes, the header included: an engine must map as many.
    pub fn len(&self) -> u64 {
        self.region.len() as u64
    }

    /// Returns false: a pool has at least one segment.
    pub fn is_empty(&self) -> bool {
        self.block_bytes.is_empty()
    }

    /// Returns the bytes of a segment.
    pub fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    pub fn segments(&self) -> u64 {
        self.block_bytes.len() as u64
    }

    /// Returns the first number of a filling in this life: give it to [`dram::Dram::raise_generation`].
    pub fn first_generation(&self) -> u64 {
        pool::first_generation(self.life)
    }

    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Returns the mapping for owners beyond the pool's life: a GPU that has its pages locked.
    pub fn shared_region(&self) -> Arc<Region> {
        Arc::clone(&self.region)
    }

    /// Returns this process's descriptor, writable if the pool is a file: never send it.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns a descriptor for engines, opened for reading: it cannot be mapped for writing. A memfd cannot
    /// be reopened for writing either, since it is sealed; a file can, by its owner and root.
    pub fn read_only_fd(&self) -> Result<OwnedFd, TierError> {
        place::reopen_file(&self.fd)
    }

    /// Returns the same for a pool file, by its path on a read-only mount.
    pub fn open_view(&self, path: &Path) -> Result<OwnedFd, TierError> {
        place::open_view(path, &self.fd)
    }

    /// Copies data at pool offset `offset` out, word by word. No thread may write there meanwhile.
    pub fn read_bytes(&self, offset: u64, out: &mut [u8]) {
        let skipped = (offset % 8) as usize;
        let words = self.region.words64(offset as usize - skipped, (skipped + out.len()).div_ceil(8));
        let bytes = |word: &AtomicU64| word.load(Ordering::Relaxed).to_le_bytes();
        let (first, words) = words.split_at(usize::from(skipped > 0));
        let (start, rest) = out.split_at_mut(out.len().min((8 - skipped) % 8));
        first.iter().for_each(|word| start.copy_from_slice(&bytes(word)[skipped..skipped + start.len()]));
        // A plain loop over whole words moves 9 GB/s, one that may stop within each word 2.6.
        let (whole, end) = rest.as_chunks_mut();
        let (inner, last) = words.split_at(whole.len());
        whole.iter_mut().zip(inner).for_each(|(out, word)| *out = bytes(word));
        last.iter().for_each(|word| end.copy_from_slice(&bytes(word)[..end.len()]));
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

    /// Gives segment `number` to blocks of `block_bytes`: marks every slot free, then writes the segment's
    /// header. Returns false without a write if there is no such segment or no such block.
    #[must_use = "a slot of a segment without header cannot be filled"]
    pub fn write_segment_header(&self, number: u64, block_bytes: u64) -> bool {
        let Ok(geometry) = Geometry::new(self.segment_bytes, block_bytes) else { return false };
        let Some(known) = usize::try_from(number).ok().and_then(|number| self.block_bytes.get(number)) else {
            return false;
        };
        self.segment_word(number, segment::MAGIC).store(0, Ordering::Relaxed);
        // SYNC POINT(segment reuse): a reader of one of the slot headers below sees no old segment header.
        fence(Ordering::Release);
        let first = pool::SEGMENT_ALIGN + number * self.segment_bytes + pool::SEGMENT_HEADER_BYTES;
        for header in (0..u64::from(geometry.slot_count)).map(|index| first + index * pool::SLOT_HEADER_BYTES)
        {
            let words = self.region.words64(header as usize, pool::SLOT_HEADER_BYTES as usize / 8);
            words.iter().for_each(|word| word.store(0, Ordering::Relaxed));
        }
        self.segment_word(number, segment::BLOCK_BYTES).store(block_bytes, Ordering::Relaxed);
        self.segment_word(number, segment::SLOT_COUNT).store(geometry.slot_count.into(), Ordering::Relaxed);
        // SYNC POINT(segment header): a reader of the magic sees the fields and free slots.
        self.segment_word(number, segment::MAGIC).store(pool::SEGMENT_MAGIC, Ordering::Release);
        known.store(block_bytes, Ordering::Relaxed);
        true
    }

    /// Returns the place of the slot at `offset`, by this process's own segment table.
    fn place_of(&self, offset: u64) -> Option<(SlotPlace, u64)> {
        let number = offset.checked_sub(pool::SEGMENT_ALIGN)? / self.segment_bytes;
        let block_bytes = self.block_bytes.get(usize::try_from(number).ok()?)?.load(Ordering::Relaxed);
        let place = Geometry::new(self.segment_bytes, block_bytes).ok()?.place_of(offset).ok()?;
        Some((place, block_bytes))
    }

    /// Returns the place of a slot that is still in this filling.
    fn current(&self, slot: SlotRef) -> Option<SlotPlace> {
        let (place, _) = self.place_of(slot.offset)?;
        let generation = self.slot_word(&place, slot::GENERATION).load(Ordering::Relaxed);
        (generation == slot.generation).then_some(place)
    }

    /// Begins a filling: from now on no reader takes the slot's bytes for a block. Returns false if there is
    /// no such slot.
    #[must_use = "a slot that does not exist must not be written"]
    pub fn fill(&self, slot: SlotRef, namespace: NamespaceDigest, key: &BlockKey) -> bool {
        let Some((place, block_bytes)) = self.place_of(slot.offset) else { return false };
        self.slot_word(&place, slot::STATE).store(pool::FILLING, Ordering::Relaxed);
        // SYNC POINT(slot reuse): a reader of any later byte, of the header or of the block, sees FILLING or
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
        let padding = (slot::PADDING..pool::SLOT_HEADER_BYTES).step_by(8).map(|field| (field, 0));
        let fields = fields.into_iter().chain(padding);
        fields.for_each(|(field, value)| self.slot_word(&place, field).store(value, Ordering::Relaxed));
        true
    }

    /// Ends a filling: the block's bytes, written before, are whole. `checksum` is their checksum, zero if
    /// not known. Returns false if the slot is not in this filling.
    #[must_use = "a block that was not committed is not there"]
    pub fn commit(&self, slot: SlotRef, checksum: u64) -> bool {
        let Some(place) = self.current(slot) else { return false };
        let state = self.slot_word(&place, slot::STATE);
        if state.load(Ordering::Relaxed) != pool::FILLING {
            return false;
        }
        if checksum != 0 {
            self.store_checksum(&place, checksum);
        }
        // SYNC POINT(slot commit): a reader that sees COMMITTED with acquire sees the block's bytes and its
        // header.
        state.store(pool::COMMITTED, Ordering::Release);
        true
    }

    /// Keeps later lives from a removed block whose slot is still read, for any later checksum of it. Without
    /// effect if the slot is not in this filling any more.
    pub fn disown_slot(&self, slot: SlotRef) {
        let place = self.current(slot);
        place.iter().for_each(|place| self.slot_word(place, slot::LENGTH).store(0, Ordering::Relaxed));
    }

    /// Marks an evicted or abandoned slot free. Returns false if the slot is not in this filling any more.
    pub fn free(&self, slot: SlotRef) -> bool {
        let Some(place) = self.current(slot) else { return false };
        self.slot_word(&place, slot::STATE).store(pool::FREE, Ordering::Release);
        true
    }
}

#[cfg(test)]
pub(crate) mod tests;
