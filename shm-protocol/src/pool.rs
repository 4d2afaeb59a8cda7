//! The places of all words in the DRAM pool. The sidecar writes the pool, and engines map it read-only.
//! Little-endian.
//!
//! A pool is a header page, then at [`SEGMENT_ALIGN`] fixed-size segments. A segment holds slots of one block
//! size:
//!
//! ```text
//! [segment header 64 B][slot headers, 128 B each][padding to 4096][slots, block bytes rounded up to 512 each]
//! ```
//!
//! A slot is named by the pool offset of its data; a copy needs only that. The place of its header follows
//! from the offset and the block size. Every function here is arithmetic on values possibly from a peer: a
//! wrong value is an error, never a panic. [`PoolView`] reads headers through a word accessor, so this module
//! touches no memory.

#[cfg(test)]
mod tests;
mod view;

use thiserror::Error;
use twox_hash::XxHash3_64;

pub use self::view::{PoolView, verify_slot};
use crate::key::{BlockHash, NamespaceDigest};
use crate::versions::{RELEASE_BYTES, Versions};

/// First word of a pool: `PILLPOOL` in ASCII.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PILLPOOL");
/// First word of an assigned segment: `PILLSEGM` in ASCII; any other value means unassigned.
pub const SEGMENT_MAGIC: u64 = u64::from_le_bytes(*b"PILLSEGM");
/// Version of this layout.
pub const VERSION: u32 = 2;
/// The oldest version read correctly by this release, and the oldest whose release reads this one's files.
pub const OLDEST: u32 = 2;

/// Alignment of segments' starts and sizes: a huge page, so a pool may lie on hugetlbfs and be pinned in
/// whole pages.
pub const SEGMENT_ALIGN: u64 = 2 << 20;
/// The largest segment: a header area of 2^30 / 640 slots is still far below u32 indices.
pub const SEGMENT_BYTES_MAX: u64 = 1 << 30;
/// The largest pool: 2^32 slots of the smallest stride (512 bytes), so 32 bits number every slot.
pub const POOL_BYTES_MAX: u64 = 2 << 40;
/// Bytes of the pool header page.
pub const HEADER_BYTES: u64 = 4096;
/// Bytes of a segment header.
pub const SEGMENT_HEADER_BYTES: u64 = 64;
/// Bytes of a slot header: two cache lines, so that neighbours never share one.
pub const SLOT_HEADER_BYTES: u64 = 128;
/// Alignment of slots for O_DIRECT: the largest logical block of common disks.
pub const SLOT_ALIGN: u64 = 512;
/// Alignment of a segment's first slot: a page.
pub const DATA_ALIGN: u64 = 4096;

/// Words of the pool header page.
pub mod header {
    /// u64: [`super::MAGIC`].
    pub const MAGIC: u64 = 0;
    /// u32 in a u64 word: [`super::VERSION`], stored last with release.
    pub const VERSION: u64 = 8;
    /// u64: bytes of a segment, a power of two.
    pub const SEGMENT_BYTES: u64 = 16;
    /// u64: number of segments.
    pub const SEGMENTS: u64 = 24;
    /// 16 bytes: boot id of the machine.
    pub const BOOT_ID: u64 = 32;
    /// u64: epoch of the sidecar that wrote the pool.
    pub const EPOCH: u64 = 48;
    /// u64: number of sidecars that have had this file, from 1; see [`super::first_generation`].
    pub const LIFE: u64 = 56;
    /// u64: 1 while all bytes behind this page are of this header's layout; 0 until the earlier content is
    /// emptied.
    pub const SETTLED: u64 = 64;
    /// u64: the oldest version whose reader reads this file correctly, [`super::OLDEST`] of its writer.
    pub const OLDEST: u64 = 72;
    /// 32 bytes: the writer's release, UTF-8, padded with zeros.
    pub const RELEASE: u64 = 80;
}

/// Words of a segment header.
pub mod segment {
    /// u64: [`super::SEGMENT_MAGIC`], stored last with release.
    pub const MAGIC: u64 = 0;
    /// u64: bytes of a block.
    pub const BLOCK_BYTES: u64 = 8;
    /// u32 in a u64 word: number of slots.
    pub const SLOT_COUNT: u64 = 16;
}

/// Words of a slot header.
pub mod slot {
    use std::mem::offset_of;

    use super::SlotHeader;

    /// u64: [`super::FREE`], [`super::FILLING`] or [`super::COMMITTED`].
    pub const STATE: u64 = offset_of!(SlotHeader, state) as u64;
    /// u64: number of the filling; never repeats in a pool.
    pub const GENERATION: u64 = offset_of!(SlotHeader, generation) as u64;
    /// 16 bytes: namespace digest.
    pub const NAMESPACE: u64 = offset_of!(SlotHeader, namespace) as u64;
    /// 32 bytes: block hash.
    pub const HASH: u64 = offset_of!(SlotHeader, hash) as u64;
    /// u32 in a u64 word: number of the block's bundle of cache groups; the upper half, `set`, is reserved, zero.
    pub const GROUP: u64 = offset_of!(SlotHeader, group) as u64;
    /// u64: bytes of the block; zero for a removed block that readers may still use. No later life adopts it.
    pub const LENGTH: u64 = offset_of!(SlotHeader, length) as u64;
    /// u64: [`super::compute_checksum`] of the block, xor [`super::header_checksum`] of this header; zero while unknown.
    pub const CHECKSUM: u64 = offset_of!(SlotHeader, checksum) as u64;
    /// Reserved up to the header's end. Every filling writes zeros here: a later release finds no old bytes
    /// in its fields.
    pub const PADDING: u64 = offset_of!(SlotHeader, padding) as u64;
}

/// Slot state: holds no block.
pub const FREE: u64 = 0;
/// Slot state: being written; its bytes are not valid yet.
pub const FILLING: u64 = 1;
/// Slot state: whole.
pub const COMMITTED: u64 = 2;

/// Bits for the fillings of one life of a sidecar: 2^40 is a million a second for 12 days, and 2^24 lives
/// remain.
const GENERATIONS_PER_LIFE_BITS: u32 = 40;
/// The last life of a pool: the next one would number its fillings as the first did.
pub const LIFE_MAX: u64 = (1 << (u64::BITS - GENERATIONS_PER_LIFE_BITS)) - 1;

/// The memory image of a slot header. It states the layout, and is never laid over shared memory.
#[repr(C)]
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct SlotHeader {
    /// [`FREE`], [`FILLING`] or [`COMMITTED`].
    pub state: u64,
    /// Number of the filling.
    pub generation: u64,
    /// Namespace digest.
    pub namespace: NamespaceDigest,
    /// Block hash.
    pub hash: BlockHash,
    /// Number of the block's bundle of cache groups.
    pub group: u32,
    /// Reserved, zero.
    pub set: u32,
    /// Bytes of the block.
    pub length: u64,
    /// The checksum of the block and of the words from `generation` to here, zero while it is unknown.
    pub checksum: u64,
    /// Zero.
    pub padding: [u8; 40],
}

const _: () = assert!(size_of::<SlotHeader>() as u64 == SLOT_HEADER_BYTES && align_of::<SlotHeader>() == 8);
const _: () = assert!(slot::HASH == 32 && slot::CHECKSUM == 80 && slot::PADDING == 88);
const _: () =
    assert!(header::RELEASE + RELEASE_BYTES as u64 <= HEADER_BYTES && HEADER_BYTES <= SEGMENT_ALIGN);
const _: () = assert!(segment::SLOT_COUNT + 8 <= SEGMENT_HEADER_BYTES);

/// A filled slot as messages name it.
#[repr(C)]
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash, Ord, PartialOrd)]
pub struct SlotRef {
    /// Pool offset of the slot's data.
    pub offset: u64,
    /// Number of the filling.
    pub generation: u64,
}

const _: () = assert!(size_of::<SlotRef>() == 16);

/// The content of a slot in a pool left by an earlier sidecar.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum SlotRemains {
    /// The slot is free and may be filled.
    Free,
    /// A block whose header is whole and states a checksum.
    Block {
        /// Number of the filling.
        generation: u64,
        /// Namespace digest.
        namespace: NamespaceDigest,
        /// Number of its bundle of cache groups.
        group: u32,
        /// Block hash.
        hash: BlockHash,
    },
    /// A filling without an end, a block without a checksum, or a header no sidecar writes: never to be
    /// served.
    Debris {
        /// The value of the slot's generation word.
        generation: u64,
    },
}

/// The place of a slot, derived from its data offset.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct SlotPlace {
    /// Segment number.
    pub segment: u64,
    /// Slot number in the segment.
    pub index: u32,
    /// Pool offset of the slot's header.
    pub header: u64,
}

/// A value outside of any pool layout.
#[derive(Debug, Error, Eq, PartialEq)]
pub enum LayoutError {
    /// Segment size out of range.
    #[error(
        "a pool segment has {0} bytes; it must be a power of two from {SEGMENT_ALIGN} to {SEGMENT_BYTES_MAX}"
    )]
    SegmentBytes(u64),
    /// No slot of this size fits a segment.
    #[error(
        "a block has {block_bytes} bytes; a pool with segments of {segment_bytes} bytes takes 1 to {max}"
    )]
    BlockBytes {
        /// Bytes of the block.
        block_bytes: u64,
        /// Bytes of a segment.
        segment_bytes: u64,
        /// Bytes of the largest block.
        max: u64,
    },
    /// Not the start of a slot's data.
    #[error("pool offset {0} is not the start of a slot of this block size")]
    Offset(u64),
    /// The pool has a layout this release does not read, or whose file it would spoil for its writer.
    #[error("the pool has layout {found}, and this release reads {}", own_versions())]
    Version {
        /// The versions in its header.
        found: Versions,
    },
    /// Not a pool.
    #[error(
        "the pool's {what} is {found}, expected {expected}: install the same pillion release on both sides"
    )]
    Header {
        /// Field.
        what: &'static str,
        /// Value found.
        found: u64,
        /// The fitting value.
        expected: u64,
    },
}

/// The slots of one block size in a segment.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Geometry {
    /// Bytes of a segment.
    pub segment_bytes: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Bytes from one slot to the next.
    pub stride: u64,
    /// Slots in a segment.
    pub slot_count: u32,
    /// Bytes from the segment's start to its first slot.
    pub data: u64,
}

/// Returns the layouts read by this release, for the header too.
pub fn own_versions() -> Versions {
    Versions::own(VERSION, OLDEST)
}

/// Fails unless this release reads, and may adopt, the pool with this header; `load` as in [`PoolView`].
pub fn check_versions(load: impl Fn(usize) -> u64) -> Result<(), LayoutError> {
    // SYNC POINT(pool header): the version is loaded first; a reader of the version sees the fields stored
    // before it.
    let (version, oldest) = (load(header::VERSION as usize), load(header::OLDEST as usize));
    let release = std::array::from_fn(|at| load(header::RELEASE as usize + at / 8 * 8).to_le_bytes()[at % 8]);
    let found = Versions::of_file(version, oldest, &release);
    own_versions().common(&found).map(|_| ()).ok_or(LayoutError::Version { found })
}

/// Returns the bytes of the largest block in a segment of this size.
pub const fn block_bytes_max(segment_bytes: u64) -> u64 {
    segment_bytes.saturating_sub(DATA_ALIGN)
}

/// Returns the bytes of a pool with this many segments, its header included.
pub fn pool_bytes(segment_bytes: u64, segments: u64) -> Option<u64> {
    segment_bytes.checked_mul(segments)?.checked_add(SEGMENT_ALIGN)
}

/// Returns the pool offset of a segment.
pub fn segment_offset(segment_bytes: u64, segment: u64) -> Option<u64> {
    pool_bytes(segment_bytes, segment)
}

/// Returns the first generation of a life. Fillings of a later sidecar in the same file never repeat a
/// number, so a reader with an old reference always notices.
pub fn first_generation(life: u64) -> u64 {
    (life << GENERATIONS_PER_LIFE_BITS) | 1
}

/// Returns the checksum of a block's bytes: XXH3-64.
pub fn compute_checksum(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// Returns the checksum of the fields about the block in a slot's header; `load` loads the word at an offset
/// in the header. It is mixed with the block's checksum, so no header matches the bytes of another block.
pub fn header_checksum(load: impl Fn(u64) -> u64) -> u64 {
    let mut bytes = [0; (slot::CHECKSUM - slot::GENERATION) as usize];
    let words = (slot::GENERATION..).step_by(8).zip(bytes.as_chunks_mut::<8>().0);
    words.for_each(|(field, word)| *word = load(field).to_le_bytes());
    compute_checksum(&bytes)
}

fn check_segment_bytes(segment_bytes: u64) -> Result<(), LayoutError> {
    let fits =
        segment_bytes.is_power_of_two() && (SEGMENT_ALIGN..=SEGMENT_BYTES_MAX).contains(&segment_bytes);
    if fits { Ok(()) } else { Err(LayoutError::SegmentBytes(segment_bytes)) }
}

fn data_start(slot_count: u64) -> u64 {
    (SEGMENT_HEADER_BYTES + slot_count * SLOT_HEADER_BYTES).next_multiple_of(DATA_ALIGN)
}

/// Returns the number of slots of `block_bytes` in a segment.
pub fn slot_count(segment_bytes: u64, block_bytes: u64) -> Result<u32, LayoutError> {
    Ok(Geometry::new(segment_bytes, block_bytes)?.slot_count)
}

// === impl Geometry ===

impl Geometry {
    /// Lays slots of `block_bytes` out in a segment of `segment_bytes`; fails on an invalid size.
    pub fn new(segment_bytes: u64, block_bytes: u64) -> Result<Self, LayoutError> {
        check_segment_bytes(segment_bytes)?;
        let max = block_bytes_max(segment_bytes);
        if block_bytes == 0 || block_bytes > max {
            return Err(LayoutError::BlockBytes { block_bytes, segment_bytes, max });
        }
        let stride = block_bytes.next_multiple_of(SLOT_ALIGN);
        let mut slots = (segment_bytes - SEGMENT_HEADER_BYTES) / (stride + SLOT_HEADER_BYTES);
        // The padding before the slots costs less than a page, at most seven of the smallest slots.
        while data_start(slots) + slots * stride > segment_bytes {
            slots -= 1;
        }
        let slot_count = u32::try_from(slots).map_err(|_| LayoutError::SegmentBytes(segment_bytes))?;
        Ok(Self { segment_bytes, block_bytes, stride, slot_count, data: data_start(slots) })
    }

    /// Returns the pool offset of a slot's data, if there is such a slot.
    pub fn offset(&self, segment: u64, index: u32) -> Option<u64> {
        if index >= self.slot_count {
            return None;
        }
        segment_offset(self.segment_bytes, segment)?.checked_add(self.data + u64::from(index) * self.stride)
    }

    /// Returns the slot whose data starts at `offset`; fails if there is none.
    pub fn place_of(&self, offset: u64) -> Result<SlotPlace, LayoutError> {
        let wrong = LayoutError::Offset(offset);
        let Some(inside) = offset.checked_sub(SEGMENT_ALIGN) else { return Err(wrong) };
        let (segment, rest) = (inside / self.segment_bytes, inside % self.segment_bytes);
        let Some(data) = rest.checked_sub(self.data) else { return Err(wrong) };
        let index = data / self.stride;
        if !data.is_multiple_of(self.stride) || index >= u64::from(self.slot_count) {
            return Err(wrong);
        }
        let header = offset - rest + SEGMENT_HEADER_BYTES + index * SLOT_HEADER_BYTES;
        Ok(SlotPlace { segment, index: index as u32, header })
    }
}
