//! Opens a device: finds its alignment, locks it, and checks or writes its superblock. Only a log of Pillion
//! is ever overwritten.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{
    AtFlags, FallocateFlags, FileType, FlockOperation, Mode, OFlags, SeekFrom, Statx, StatxFlags,
};
use rustix::io::Errno;

use super::DeviceGeometry;
use super::format::{self, DistrustedBlocks, FoundDevice, SUPER_BYTES, Super, Trailer};
use super::location::{DeviceErrors, Missing, SEGMENT_BYTES_MIN, SEGMENTS_MIN, locate_log};
use crate::TierError;
use crate::given_up::{GivenUp, GivenUpCause};
use crate::io::buf::{BUFFER_ALIGN, Buffer};

/// With about so many segments, most hold only blocks that go at about the same time: few move.
const SEGMENTS: u64 = 1024;
/// With so few segments, a log loses a small part of its blocks to one reclamation.
const SEGMENTS_FEW: u64 = 32;
/// The largest segment of a log of few segments: larger blocks than known ones fit.
const SEGMENT_BYTES_FEW: u64 = 64 << 20;
/// The largest default segment: a killed sidecar's open segment is read through in a second.
const SEGMENT_BYTES_MAX: u64 = 256 << 20;
/// Most segments of a device, about: the start reads their ends one after the other.
const SEGMENTS_MANY: u64 = 4096;
/// The smallest alignment of memory for direct I/O; every slot of the pool has it.
const MEMORY_ALIGN: u64 = shm_protocol::pool::SLOT_ALIGN;
/// The assumed alignment for a file system without STATX_DIOALIGN: no known one needs more.
const ALIGN_UNKNOWN: u64 = 4096;

/// How long the opening of a device in use is tried: longer than the kernel takes to end a dead process's
/// transfers. The holder of the lock knows that none is in flight.
const CLOSE_MAX: Duration = Duration::from_secs(10);
const CLOSE_STEP: Duration = Duration::from_millis(10);

/// A device ready to start.
#[derive(Debug)]
pub struct OpenedDevice {
    pub(crate) fd: OwnedFd,
    pub(crate) layout: Layout,
    pub(crate) distrusted: DistrustedBlocks,
    geometry: DeviceGeometry,
    given_up: Option<GivenUp>,
}

/// The content of a device, as used by this life.
#[derive(Debug)]
enum Former {
    /// This life continues the log, with these distrusted blocks.
    Kept(Super, DistrustedBlocks),
    /// This life begins a log, and gives up the former one.
    None(Option<GivenUp>),
}

/// The places of structures on a device, and the alignment of its memory.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) id: u64,
    pub(crate) unit_bytes: u64,
    pub(crate) segment_bytes: u64,
    pub(crate) segments: u32,
    /// Alignment of memory outside of this process's buffers.
    pub(crate) memory_align: u64,
}

/// Direct I/O's alignments for an opened file.
#[derive(Copy, Clone, Debug)]
struct Align {
    unit: u64,
    memory: u64,
}

/// Returns a segment size for a device, a power of two: near a 1,024th of it within 64 to 256 MiB, near a 32nd for
/// less than 2 GiB, and more for more than a TiB.
fn segment_bytes_for(bytes: u64) -> u64 {
    let least = (bytes / SEGMENTS_FEW).clamp(SEGMENT_BYTES_MIN, SEGMENT_BYTES_FEW);
    let usual = (bytes / SEGMENTS).clamp(least, SEGMENT_BYTES_MAX);
    1 << usual.max(bytes / SEGMENTS_MANY).min(format::SEGMENT_BYTES_MAX).ilog2()
}

// === impl OpenedDevice ===

impl OpenedDevice {
    /// Opens the place found by [`locate_log`] for a log of `bytes` at `path`, locks it, and checks or writes its
    /// first units. Readable blocks of an earlier life stay. Fails if the place cannot be used, or holds
    /// other data.
    pub fn open(path: &Path, bytes: u64, missing: Missing) -> Result<Self, TierError> {
        Self::open_within(path, bytes, missing, CLOSE_MAX)
    }

    fn open_within(
        path: &Path,
        bytes: u64,
        missing: Missing,
        close_max: Duration,
    ) -> Result<Self, TierError> {
        let errors = DeviceErrors(path);
        let file = locate_log(path, bytes, missing)?;
        let (fd, is_block) = open_direct(&file, &errors, close_max)?;
        let align = Align::of_device(&fd, is_block).map_err(errors.os("be asked for its alignment"))?;
        if align.unit > format::UNIT_BYTES_MAX {
            let most = format::UNIT_BYTES_MAX;
            let problem = format!(
                "transfers at least {} bytes at a time, and the most that is supported is {most}",
                align.unit
            );
            return Err(errors.because(problem, "pass another device"));
        }
        let found = find_contents(&fd, align.unit).map_err(errors.os("be read"))?;
        if found == FoundDevice::Foreign {
            return Err(errors.because(
                "holds data that is not a log of Pillion",
                "pass another path, or remove the file (of a device: wipefs --all, then zero its first MiB)",
            ));
        }
        let former = former(&fd, found, align.unit, bytes).map_err(errors.os("be read"))?;
        let (superblock, distrusted, given_up) = match former {
            Former::Kept(log, distrusted) => (Super { life: log.life + 1, ..log }, distrusted, None),
            Former::None(given_up) => {
                let log = new_log(align.unit, bytes).map_err(errors.os("be named"))?;
                (log, DistrustedBlocks::default(), given_up)
            }
        };
        make_room(&fd, is_block, bytes, &errors)?;
        write_begin(&fd, &superblock, &distrusted).map_err(errors.os("be written"))?;
        let segments = ((bytes - SUPER_BYTES) / superblock.segment_bytes) as u32;
        Ok(Self {
            fd,
            layout: Layout {
                id: superblock.id,
                unit_bytes: superblock.unit_bytes,
                segment_bytes: superblock.segment_bytes,
                segments,
                memory_align: align.memory,
            },
            distrusted,
            geometry: DeviceGeometry {
                unit_bytes: superblock.unit_bytes,
                segment_bytes: superblock.segment_bytes,
                segments,
                first_sequence: format::first_sequence(superblock.life),
            },
            given_up,
        })
    }

    pub fn geometry(&self) -> DeviceGeometry {
        self.geometry
    }

    /// Returns the log of an earlier life that was given up, if there was one.
    pub fn given_up(&self) -> Option<&GivenUp> {
        self.given_up.as_ref()
    }
}

/// Opens and locks a file, made if there is none, or a block device without another user.
fn open_direct(
    file: &Path,
    errors: &DeviceErrors<'_>,
    close_max: Duration,
) -> Result<(OwnedFd, bool), TierError> {
    let kind = rustix::fs::stat(file).map(|stat| FileType::from_raw_mode(stat.st_mode));
    let is_block = kind == Ok(FileType::BlockDevice);
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::DIRECT;
    let flags = flags | if is_block { OFlags::EXCL } else { OFlags::CREATE };
    let fd = once_free(close_max, || rustix::fs::open(file, flags, Mode::RUSR | Mode::WUSR));
    let fd = fd.map_err(|errno| match errno {
        Errno::INVAL => {
            errors.because("does not support direct I/O", "pass a path on ext4 or XFS, or a block device")
        }
        Errno::BUSY => errors.busy_device("is mounted, or held by another program"),
        errno => errors.os("be opened")(errno),
    })?;
    let locked = once_free(close_max, || rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive));
    locked.map_err(|errno| match errno {
        Errno::WOULDBLOCK => errors.busy_device("is used by another sidecar"),
        errno => errors.os("be locked")(errno),
    })?;
    Ok((fd, is_block))
}

/// Tries again for as long as the kernel may take to release a dead process's files: it closes rings, and
/// with them files, in the background.
fn once_free<T>(close_max: Duration, mut attempt: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    for _ in 0..close_max.as_millis() / CLOSE_STEP.as_millis() {
        match attempt() {
            Err(Errno::WOULDBLOCK | Errno::BUSY) => std::thread::sleep(CLOSE_STEP),
            other => return other,
        }
    }
    attempt()
}

/// Returns the content of the device's first MiB. A file system's mark may lie anywhere in it.
fn find_contents(fd: &OwnedFd, unit: u64) -> Result<FoundDevice, Errno> {
    let mut buffer = Buffer::new(SUPER_BYTES as usize)?;
    let read = read_some(fd, buffer.bytes_mut(), 0)?;
    Ok(match Super::read_unit(&buffer.bytes()[..unit as usize]) {
        FoundDevice::Empty if buffer.bytes().iter().any(|byte| *byte != 0) => FoundDevice::Foreign,
        // The file was cut within its first word.
        FoundDevice::Foreign if Super::begins(&buffer.bytes()[..read]) => FoundDevice::Damaged,
        found => found,
    })
}

/// Returns the blocks distrusted by earlier lives of a log; `None` if the list is damaged.
fn distrusted(fd: &OwnedFd, superblock: &Super) -> Result<Option<DistrustedBlocks>, Errno> {
    let unit = superblock.unit_bytes;
    let mut buffer = Buffer::new(unit as usize)?;
    read_some(fd, &mut buffer.bytes_mut()[..unit as usize], DistrustedBlocks::offset(unit))?;
    Ok(DistrustedBlocks::read_unit(&buffer.bytes()[..unit as usize], superblock.id))
}

/// Reads up to the end of `bytes` or of the file.
pub(crate) fn read_some(fd: impl AsFd, bytes: &mut [u8], at: u64) -> Result<usize, Errno> {
    let mut read = 0;
    while read < bytes.len() {
        match rustix::io::pread(&fd, &mut bytes[read..], at + read as u64) {
            Ok(0) => break,
            Ok(more) => read += more,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        // Direct I/O continues at whole units alone; a ragged end is the end of the file.
        if !(read as u64).is_multiple_of(format::UNIT_BYTES_MIN) {
            break;
        }
    }
    Ok(read)
}

/// Writes all of `bytes`.
pub(crate) fn write_all(fd: impl AsFd, bytes: &[u8], at: u64) -> Result<(), Errno> {
    let mut written = 0;
    while written < bytes.len() {
        match rustix::io::pwrite(&fd, &bytes[written..], at + written as u64) {
            Ok(0) => return Err(Errno::NOSPC),
            Ok(more) => written += more,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

/// Decides if this life can continue the found log.
fn former(fd: &OwnedFd, found: FoundDevice, unit: u64, bytes: u64) -> Result<Former, Errno> {
    let fits = |log: &Super| {
        log.unit_bytes == unit
            && log.segment_bytes.is_power_of_two()
            && (SEGMENT_BYTES_MIN..=format::SEGMENT_BYTES_MAX).contains(&log.segment_bytes)
            && (bytes - SUPER_BYTES) / log.segment_bytes >= SEGMENTS_MIN
            && log.life < u64::from(u32::MAX)
    };
    let given_up = match found {
        FoundDevice::Log(superblock) if fits(&superblock) => {
            if let Some(distrusted) = distrusted(fd, &superblock)? {
                return Ok(Former::Kept(superblock, distrusted));
            }
            let text = "has a damaged list of what engines disagreed about and starts empty";
            Some(GivenUp::new(GivenUpCause::Damaged, text))
        }
        FoundDevice::Log(_) => {
            Some(GivenUp::new(GivenUpCause::Sizes, "was made for other sizes and starts empty"))
        }
        FoundDevice::Version(found) => {
            let own = format::own_versions();
            let text = format!("has a log of {found}, and this release writes {own}: it starts empty");
            Some(GivenUp::new(GivenUpCause::Version, text))
        }
        FoundDevice::Damaged => {
            Some(GivenUp::new(GivenUpCause::Damaged, "has a damaged superblock and starts empty"))
        }
        FoundDevice::Empty | FoundDevice::Foreign => None,
    };
    Ok(Former::None(given_up))
}

/// Returns the superblock of a log's first life.
fn new_log(unit: u64, bytes: u64) -> Result<Super, Errno> {
    let mut id = [0; 8];
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty())?;
    let id = u64::from_le_bytes(id);
    let segment_bytes = segment_bytes_for(bytes);
    Ok(Super { id, unit_bytes: unit, segment_bytes, life: 1 })
}

/// Reserves a file's blocks, so it does not run out of space later; checks a device's size.
fn make_room(fd: &OwnedFd, is_block: bool, bytes: u64, errors: &DeviceErrors<'_>) -> Result<(), TierError> {
    let there = rustix::fs::seek(fd, SeekFrom::End(0)).map_err(errors.os("be measured"))?;
    if is_block {
        return match there >= bytes {
            true => Ok(()),
            false => Err(errors.because(
                format!("has only {there} bytes, not {bytes}"),
                format!("pass {there} as its size"),
            )),
        };
    }
    if there > bytes {
        rustix::fs::ftruncate(fd, bytes).map_err(errors.os("be cut"))?;
    }
    match rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, bytes) {
        Err(Errno::OPNOTSUPP) => rustix::fs::ftruncate(fd, bytes).map_err(errors.os("be extended")),
        Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => Err(errors.because(
            format!("needs {bytes} bytes, more than its file system has free"),
            "lower its size, or free space",
        )),
        other => other.map_err(errors.os("be extended")),
    }
}

/// Writes the superblock, the check's unit and the distrusted blocks, and waits until they lie on the medium:
/// no sequence is given out twice. After a power cut between the first and the last of them, the next life
/// finds the list damaged.
fn write_begin(fd: &OwnedFd, superblock: &Super, distrusted: &DistrustedBlocks) -> Result<(), Errno> {
    let (unit, list) =
        (superblock.unit_bytes as usize, DistrustedBlocks::offset(superblock.unit_bytes) as usize);
    let mut buffer = Buffer::new(list + unit)?;
    let bytes = &mut buffer.bytes_mut()[..list + unit];
    superblock.write_unit(&format::own_versions(), &mut bytes[..unit]);
    distrusted.write_unit(&mut bytes[list..], superblock.id);
    write_all(fd, bytes, 0)?;
    rustix::fs::fsync(fd)
}

// === impl Align ===

impl Align {
    /// Asks the kernel. Units are at least the file system's blocks: smaller writes to a file wait for each
    /// other, and a device with larger physical sectors would read before it writes.
    fn of_device(fd: &OwnedFd, is_block: bool) -> Result<Self, Errno> {
        if is_block {
            let logical = u64::from(rustix::fs::ioctl_blksszget(fd)?);
            let physical = u64::from(rustix::fs::ioctl_blkpbszget(fd)?);
            let memory = direct(fd)?.map_or(logical, |(memory, _)| memory);
            return Ok(Self::new(logical.max(physical), memory));
        }
        let blocks = rustix::fs::fstat(fd)?.st_blksize as u64;
        let (memory, offset) = direct(fd)?.unwrap_or((ALIGN_UNKNOWN, ALIGN_UNKNOWN));
        // Some file systems report their preferred transfer size here, maybe much more.
        let blocks = if blocks <= format::UNIT_BYTES_MAX { blocks } else { ALIGN_UNKNOWN };
        Ok(Self::new(offset.max(blocks), memory))
    }

    fn new(unit: u64, memory: u64) -> Self {
        Self { unit: unit.next_power_of_two().max(format::UNIT_BYTES_MIN), memory: memory.max(MEMORY_ALIGN) }
    }
}

/// Returns the alignment of memory and of offsets, if the kernel knows it (since 6.1, for most file systems).
fn direct(fd: &OwnedFd) -> Result<Option<(u64, u64)>, Errno> {
    let stat: Statx = match rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Err(Errno::NOSYS) => return Ok(None),
        stat => stat?,
    };
    let (memory, offset) = (u64::from(stat.stx_dio_mem_align), u64::from(stat.stx_dio_offset_align));
    Ok((stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0 && memory > 0 && offset > 0)
        .then_some((memory, offset)))
}

const _: () = assert!(ALIGN_UNKNOWN <= BUFFER_ALIGN);

// === impl Layout ===

impl Layout {
    /// Returns the footer of a segment, and its place on the device.
    pub(crate) fn footer(&self, segment: u32, sequence: u64, entries: &[u8]) -> Result<(Buffer, u64), Errno> {
        let trailer = Trailer::new(segment, sequence, entries);
        let units = format::footer_units(trailer.count, self.unit_bytes);
        let len = units as usize * self.unit();
        let mut buffer = Buffer::new(len)?;
        let bytes = &mut buffer.bytes_mut()[..len];
        bytes[..entries.len()].copy_from_slice(entries);
        trailer.write_unit(&mut bytes[len - self.unit()..], self.id);
        Ok((buffer, self.offset(segment, self.segment_units() - units)))
    }

    /// Returns the offset of a unit of a segment on the device.
    pub(crate) fn offset(&self, segment: u32, unit: u32) -> u64 {
        SUPER_BYTES + u64::from(segment) * self.segment_bytes + u64::from(unit) * self.unit_bytes
    }

    /// Returns the number of units of a segment.
    pub(crate) fn segment_units(&self) -> u32 {
        (self.segment_bytes / self.unit_bytes) as u32
    }

    /// Returns the bytes of a unit.
    pub(crate) fn unit(&self) -> usize {
        self.unit_bytes as usize
    }

    /// Returns the first bytes of a block at `offset` in the pool that direct I/O can transfer in place. The rest
    /// goes through a buffer.
    pub(crate) fn in_place(&self, offset: u64, bytes: u32) -> u32 {
        let aligned = offset.is_multiple_of(self.memory_align);
        if aligned { bytes - bytes % self.unit_bytes as u32 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_one_sidecars_and_is_waited_for() {
        let folder =
            std::env::current_exe().unwrap().with_file_name(format!("ssd-lock-{}", std::process::id()));
        let (bytes, wait) = (17 << 20, CLOSE_STEP * 2);
        let first = OpenedDevice::open_within(&folder, bytes, Missing::Create, wait).unwrap();
        let text = OpenedDevice::open_within(&folder, bytes, Missing::Create, wait).unwrap_err().to_string();
        assert!(text.contains("by another sidecar"), "{text}");
        let later = std::thread::spawn(move || {
            std::thread::sleep(CLOSE_STEP * 5);
            drop(first);
        });
        OpenedDevice::open(&folder, bytes, Missing::Create).unwrap();
        later.join().unwrap();
        std::fs::remove_file(&folder).unwrap();
    }

    #[test]
    fn segments_are_few_and_neither_small_nor_huge() {
        let found = [17 << 20, 1 << 30, 100 << 30, 1 << 40, 4 << 40, 30 << 40].map(segment_bytes_for);
        assert_eq!(found, [4 << 20, 32 << 20, 64 << 20, 256 << 20, 1 << 30, 1 << 30]);
    }

    #[test]
    fn memory_that_is_aligned_less_than_asked_for_is_not_transferred_in_place() {
        let layout =
            Layout { id: 0, unit_bytes: 4096, segment_bytes: 4 << 20, segments: 4, memory_align: 4096 };
        assert_eq!(layout.in_place(8192, 10_000), 8192);
        assert_eq!(layout.in_place(8192 + 512, 10_000), 0);
        assert_eq!(Layout { memory_align: 512, ..layout }.in_place(8192 + 512, 10_000), 8192);
        assert_eq!(layout.in_place(0, 100), 0);
    }
}
