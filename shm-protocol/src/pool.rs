//! Where everything lies in the DRAM pool, which the sidecar writes and engines map read-only. Little-endian.
//!
//! A pool is a header page, then at [`SEGMENT_ALIGN`] fixed-size segments. A segment holds slots of one block size:
//!
//! ```text
//! [segment header 64 B][slot headers, 128 B each][padding to 4096][slots, block bytes rounded up to 512 each]
//! ```
//!
//! A slot is named by the pool offset of its data, which is all that a copy needs; its header follows from the
//! offset and the block size. Every function here is arithmetic on values that may come from a peer: a wrong one is
//! an error, never a panic. [`PoolView`] reads headers through a word accessor, so nothing here touches memory.

use std::sync::atomic::{Ordering, fence};

use thiserror::Error;
use twox_hash::XxHash3_64;

use crate::key::{BlockHash, NamespaceDigest};
use crate::versions::{RELEASE_BYTES, Versions};

/// First word of a pool: `PILLPOOL` in ASCII.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PILLPOOL");
/// First word of an assigned segment: `PILLSEGM` in ASCII; anything else means unassigned.
pub const SEGMENT_MAGIC: u64 = u64::from_le_bytes(*b"PILLSEGM");
/// Version of this layout.
pub const VERSION: u32 = 2;
/// The oldest version that this release reads rightly, and whose release reads what this one writes.
pub const OLDEST: u32 = 2;

/// Segments start and are sized in multiples of a huge page, so that a pool may lie on hugetlbfs and be pinned in
/// whole pages.
pub const SEGMENT_ALIGN: u64 = 2 << 20;
/// The largest segment: a header area of 2^30 / 640 slots is still far below u32 indices.
pub const SEGMENT_BYTES_MAX: u64 = 1 << 30;
/// The largest pool: 2^32 slots of the smallest stride (512 bytes), so that 32 bits number every slot.
pub const POOL_BYTES_MAX: u64 = 2 << 40;
/// Bytes of the pool header page.
pub const HEADER_BYTES: u64 = 4096;
/// Bytes of a segment header.
pub const SEGMENT_HEADER_BYTES: u64 = 64;
/// Bytes of a slot header: two cache lines, so that neighbours never share one.
pub const SLOT_HEADER_BYTES: u64 = 128;
/// Slots start at multiples of this, the largest logical block of common disks, for O_DIRECT.
pub const SLOT_ALIGN: u64 = 512;
/// The first slot of a segment starts at a multiple of a page.
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
    /// u64: how many sidecars have had this file, from 1; see [`super::first_generation`].
    pub const LIFE: u64 = 56;
    /// u64: 1 while all behind this page is of this header's layout; 0 until what was there before is emptied.
    pub const SETTLED: u64 = 64;
    /// u64: the oldest version whose reader reads this file rightly, [`super::OLDEST`] of its writer.
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
    /// u64: bytes of the block.
    pub const LENGTH: u64 = offset_of!(SlotHeader, length) as u64;
    /// u64: [`super::checksum`] of the block, xor [`super::header_checksum`] of this header; zero while unknown.
    pub const CHECKSUM: u64 = offset_of!(SlotHeader, checksum) as u64;
    /// Reserved up to the header's end. Every filling writes zeros here: a later release finds nothing old in its fields.
    pub const PADDING: u64 = offset_of!(SlotHeader, padding) as u64;
}

/// Slot state: holds nothing.
pub const FREE: u64 = 0;
/// Slot state: being written; its bytes mean nothing yet.
pub const FILLING: u64 = 1;
/// Slot state: whole.
pub const COMMITTED: u64 = 2;

/// Fillings that one life of a sidecar may number: 2^40 is a million a second for 12 days, and 2^24 lives remain.
const GENERATIONS_PER_LIFE_BITS: u32 = 40;
/// The last life that a pool can have: the one after it would number its fillings as the first did.
pub const LIFE_MAX: u64 = (1 << (u64::BITS - GENERATIONS_PER_LIFE_BITS)) - 1;

/// The memory image of a slot header; states the layout, is never laid over shared memory.
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

/// A filled slot as it is named on the wire.
#[repr(C)]
#[derive(Copy, Clone, Debug, Eq, PartialEq, Hash, Ord, PartialOrd)]
pub struct SlotRef {
    /// Pool offset of the slot's data.
    pub offset: u64,
    /// Number of the filling.
    pub generation: u64,
}

const _: () = assert!(size_of::<SlotRef>() == 16);

/// What a sidecar finds in a slot of a pool that an earlier one has left.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Remains {
    /// Nothing; the slot may be filled.
    Free,
    /// A block that is whole by its header, which states a checksum.
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
    /// A filling that never ended, a block without a checksum, or a header that no sidecar writes: never to be served.
    Debris {
        /// What stands where the number of the filling does.
        generation: u64,
    },
}

/// Where a slot lies, derived from its data offset.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct SlotPlace {
    /// Segment number.
    pub segment: u64,
    /// Slot number in the segment.
    pub index: u32,
    /// Pool offset of the slot's header.
    pub header: u64,
}

/// A value that fits no pool layout.
#[derive(Debug, Error, Eq, PartialEq)]
pub enum LayoutError {
    /// Segment size out of range.
    #[error(
        "a pool segment of {0} bytes; it must be a power of two from {SEGMENT_ALIGN} to {SEGMENT_BYTES_MAX}"
    )]
    SegmentBytes(u64),
    /// No slot of this size fits a segment.
    #[error("a block of {block_bytes} bytes; a pool with segments of {segment_bytes} takes 1 to {max}")]
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
    /// A layout that this release does not read, or whose file it would spoil for its writer.
    #[error("the pool's layout is {found}, this release's {}", own_versions())]
    Version {
        /// What its header states.
        found: Versions,
    },
    /// Not a pool.
    #[error(
        "the pool's {what} is {found}, expected {expected}: both sides must run the same pillion release"
    )]
    Header {
        /// Field.
        what: &'static str,
        /// Value found.
        found: u64,
        /// Value that fits.
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

/// The layouts that this release reads; written into the header.
pub fn own_versions() -> Versions {
    Versions::own(VERSION, OLDEST)
}

/// Whether this release reads, and may adopt, the pool with this header; `load` as in [`PoolView`].
pub fn check_versions(load: impl Fn(usize) -> u64) -> Result<(), LayoutError> {
    // SYNC POINT(pool header): the version is loaded first; whoever sees it sees the fields that were stored before it.
    let (version, oldest) = (load(header::VERSION as usize), load(header::OLDEST as usize));
    let release = std::array::from_fn(|at| load(header::RELEASE as usize + at / 8 * 8).to_le_bytes()[at % 8]);
    let found = Versions::of_file(version, oldest, &release);
    own_versions().common(&found).map(|_| ()).ok_or(LayoutError::Version { found })
}

/// Bytes of the largest block that fits a segment.
pub const fn block_bytes_max(segment_bytes: u64) -> u64 {
    segment_bytes.saturating_sub(DATA_ALIGN)
}

/// Bytes of a pool with this many segments, its header included.
pub fn pool_bytes(segment_bytes: u64, segments: u64) -> Option<u64> {
    segment_bytes.checked_mul(segments)?.checked_add(SEGMENT_ALIGN)
}

/// Pool offset of a segment.
pub fn segment_offset(segment_bytes: u64, segment: u64) -> Option<u64> {
    pool_bytes(segment_bytes, segment)
}

/// The first generation of a life: fillings of a later sidecar in the same file never repeat a number, so that a
/// reader who still holds an old reference always notices.
pub fn first_generation(life: u64) -> u64 {
    (life << GENERATIONS_PER_LIFE_BITS) | 1
}

/// The checksum of a block's bytes: XXH3-64.
pub fn checksum(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// The checksum of what a slot's header says of its block; `load` loads the word at an offset in the header. It is mixed with the
/// block's checksum, so that no header matches the bytes of another block.
pub fn header_checksum(load: impl Fn(u64) -> u64) -> u64 {
    let mut bytes = [0; (slot::CHECKSUM - slot::GENERATION) as usize];
    let words = (slot::GENERATION..).step_by(8).zip(bytes.as_chunks_mut::<8>().0);
    words.for_each(|(field, word)| *word = load(field).to_le_bytes());
    checksum(&bytes)
}

fn check_segment_bytes(segment_bytes: u64) -> Result<(), LayoutError> {
    let fits =
        segment_bytes.is_power_of_two() && (SEGMENT_ALIGN..=SEGMENT_BYTES_MAX).contains(&segment_bytes);
    if fits { Ok(()) } else { Err(LayoutError::SegmentBytes(segment_bytes)) }
}

fn data_start(slot_count: u64) -> u64 {
    (SEGMENT_HEADER_BYTES + slot_count * SLOT_HEADER_BYTES).next_multiple_of(DATA_ALIGN)
}

/// Slots of `block_bytes` in a segment.
pub fn slot_count(segment_bytes: u64, block_bytes: u64) -> Result<u32, LayoutError> {
    Ok(Geometry::new(segment_bytes, block_bytes)?.slot_count)
}

// === impl Geometry ===

impl Geometry {
    /// The slots of `block_bytes` in a segment of `segment_bytes`.
    pub fn new(segment_bytes: u64, block_bytes: u64) -> Result<Self, LayoutError> {
        check_segment_bytes(segment_bytes)?;
        let max = block_bytes_max(segment_bytes);
        if block_bytes == 0 || block_bytes > max {
            return Err(LayoutError::BlockBytes { block_bytes, segment_bytes, max });
        }
        let stride = block_bytes.next_multiple_of(SLOT_ALIGN);
        let mut slots = (segment_bytes - SEGMENT_HEADER_BYTES) / (stride + SLOT_HEADER_BYTES);
        // The padding before the slots costs less than a page, which is at most seven of the smallest slots.
        while data_start(slots) + slots * stride > segment_bytes {
            slots -= 1;
        }
        let slot_count = u32::try_from(slots).map_err(|_| LayoutError::SegmentBytes(segment_bytes))?;
        Ok(Self { segment_bytes, block_bytes, stride, slot_count, data: data_start(slots) })
    }

    /// Pool offset of a slot's data, if there is such a slot.
    pub fn offset(&self, segment: u64, index: u32) -> Option<u64> {
        if index >= self.slot_count {
            return None;
        }
        segment_offset(self.segment_bytes, segment)?.checked_add(self.data + u64::from(index) * self.stride)
    }

    /// The slot whose data starts at `offset`.
    pub fn place(&self, offset: u64) -> Result<SlotPlace, LayoutError> {
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

/// Reads a pool through `load`, which loads the u64 at a pool offset with acquire.
///
/// `load` is only ever called with multiples of 8 below the length given to [`PoolView::new`].
#[derive(Debug)]
pub struct PoolView<F> {
    load: F,
    segment_bytes: u64,
    segments: u64,
}

// === impl PoolView ===

impl<F: Fn(usize) -> u64> PoolView<F> {
    /// A view of a pool of `len` mapped bytes, once its header is found sound.
    pub fn new(load: F, len: u64) -> Result<Self, LayoutError> {
        let expect = |what, found, expected| match found == expected {
            true => Ok(()),
            false => Err(LayoutError::Header { what, found, expected }),
        };
        if len < SEGMENT_ALIGN {
            return Err(LayoutError::Header { what: "length", found: len, expected: SEGMENT_ALIGN });
        }
        check_versions(&load)?;
        expect("magic", load(header::MAGIC as usize), MAGIC)?;
        let segment_bytes = load(header::SEGMENT_BYTES as usize);
        check_segment_bytes(segment_bytes)?;
        let segments = load(header::SEGMENTS as usize);
        let fitting = (len - SEGMENT_ALIGN) / segment_bytes;
        if segments > fitting {
            return Err(LayoutError::Header { what: "segment count", found: segments, expected: fitting });
        }
        Ok(Self { load, segment_bytes, segments })
    }

    /// Bytes of a segment.
    pub fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// Number of segments.
    pub fn segments(&self) -> u64 {
        self.segments
    }

    /// Where the slot at `offset` lies, its whole data inside the pool.
    pub fn place(&self, offset: u64, block_bytes: u64) -> Result<SlotPlace, LayoutError> {
        place_inside(self.segment_bytes, self.segments, offset, block_bytes)
    }

    /// The header of the slot at `offset`, word by word: whole only between two successful [`PoolView::verify`].
    pub fn read_header(&self, offset: u64, block_bytes: u64) -> Result<SlotHeader, LayoutError> {
        let base = self.place(offset, block_bytes)?.header;
        let word = |field: u64| (self.load)((base + field) as usize);
        let words = |field: u64| [0, 8, 16, 24].map(|step| word(field + step));
        Ok(SlotHeader {
            state: word(slot::STATE),
            generation: word(slot::GENERATION),
            namespace: NamespaceDigest::from_words([word(slot::NAMESPACE), word(slot::NAMESPACE + 8)]),
            hash: BlockHash::from_words(words(slot::HASH)),
            group: word(slot::GROUP) as u32,
            set: (word(slot::GROUP) >> 32) as u32,
            length: word(slot::LENGTH),
            checksum: word(slot::CHECKSUM),
            padding: [0; 40],
        })
    }

    /// The slots of a segment, or `None` where it is assigned to no block size or its header is not sound.
    pub fn geometry(&self, segment: u64) -> Option<Geometry> {
        let base = segment_offset(self.segment_bytes, segment).filter(|_| segment < self.segments)?;
        let word = |field: u64| (self.load)((base + field) as usize);
        let assigned = word(segment::MAGIC) == SEGMENT_MAGIC;
        let geometry = Geometry::new(self.segment_bytes, word(segment::BLOCK_BYTES)).ok()?;
        let sound = assigned && word(segment::SLOT_COUNT) == u64::from(geometry.slot_count);
        sound.then_some(geometry)
    }

    /// What lives before `life` have left in slot `index` of a segment whose slots are `geometry`. Nobody may write it
    /// meanwhile.
    pub fn remains(&self, segment: u64, geometry: &Geometry, index: u32, life: u64) -> Option<Remains> {
        let offset = geometry.offset(segment, index)?;
        let slot = self.read_header(offset, geometry.block_bytes).ok()?;
        let SlotHeader { generation, namespace, group, hash, checksum, .. } = slot;
        let numbered = (first_generation(1)..first_generation(life)).contains(&generation);
        let sound = numbered && slot.set == 0 && slot.length == geometry.block_bytes;
        Some(match slot.state {
            FREE => Remains::Free,
            COMMITTED if sound && checksum != 0 => Remains::Block { generation, namespace, group, hash },
            _ => Remains::Debris { generation },
        })
    }

    /// Whether the slot is whole and of this filling. Call it before and after a copy: if both say yes, so were the
    /// bytes in between.
    pub fn verify(&self, slot: SlotRef, block_bytes: u64) -> bool {
        verify(&self.load, self.segment_bytes, self.segments, slot, block_bytes)
    }
}

fn place_inside(
    segment_bytes: u64,
    segments: u64,
    offset: u64,
    block_bytes: u64,
) -> Result<SlotPlace, LayoutError> {
    let place = Geometry::new(segment_bytes, block_bytes)?.place(offset)?;
    if place.segment < segments { Ok(place) } else { Err(LayoutError::Offset(offset)) }
}

/// [`PoolView::verify`] for a caller who holds the pool's facts without a view.
pub fn verify(
    load: impl Fn(usize) -> u64,
    segment_bytes: u64,
    segments: u64,
    slot: SlotRef,
    block_bytes: u64,
) -> bool {
    let Ok(place) = place_inside(segment_bytes, segments, slot.offset, block_bytes) else { return false };
    // SYNC POINT(slot reuse): the fence before the loads orders the caller's copy before them, so that a copy which
    // saw bytes of a later filling also sees its FILLING; the one after keeps the next copy behind them.
    fence(Ordering::Acquire);
    let whole = load((place.header + slot::STATE) as usize) == COMMITTED
        && load((place.header + slot::GENERATION) as usize) == slot.generation;
    fence(Ordering::Acquire);
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENT: u64 = 4 << 20;

    #[test]
    fn slots_fill_a_segment_and_never_leave_it() {
        for segment_bytes in [SEGMENT_ALIGN, SEGMENT, 64 << 20, SEGMENT_BYTES_MAX] {
            for block_bytes in [1, 511, 512, 513, 4096, 10_000, 1 << 20, block_bytes_max(segment_bytes)] {
                let geometry = Geometry::new(segment_bytes, block_bytes).expect("fits");
                let end = geometry.data + u64::from(geometry.slot_count) * geometry.stride;
                assert!(geometry.slot_count >= 1 && end <= segment_bytes);
                assert!(
                    geometry.data.is_multiple_of(DATA_ALIGN) && geometry.stride.is_multiple_of(SLOT_ALIGN)
                );
                let more = u64::from(geometry.slot_count) + 1;
                assert!(data_start(more) + more * geometry.stride > segment_bytes, "one more does not fit");
            }
        }
    }

    #[test]
    fn only_starts_of_slots_are_places() {
        let geometry = Geometry::new(SEGMENT, 10_000).expect("fits");
        let mut headers = std::collections::BTreeSet::new();
        for segment in 0..3 {
            for index in 0..geometry.slot_count {
                let offset = geometry.offset(segment, index).expect("a slot");
                let place = geometry.place(offset).expect("its own");
                assert_eq!((place.segment, place.index), (segment, index));
                assert!(headers.insert(place.header) && place.header.is_multiple_of(64));
                assert!(
                    place.header + SLOT_HEADER_BYTES <= SEGMENT_ALIGN + segment * SEGMENT + geometry.data
                );
                assert_eq!(geometry.place(offset + 1), Err(LayoutError::Offset(offset + 1)));
                assert_eq!(geometry.place(offset + 512), Err(LayoutError::Offset(offset + 512)));
            }
            assert_eq!(geometry.offset(segment, geometry.slot_count), None);
        }
        assert_eq!(geometry.offset(u64::MAX, 0), None);
        for hostile in [0, 1, SEGMENT_ALIGN - 1, SEGMENT_ALIGN, u64::MAX, u64::MAX - SEGMENT] {
            assert!(geometry.place(hostile).is_err());
        }
    }

    #[test]
    fn sizes_that_fit_nothing_are_refused() {
        for segment_bytes in [0, 1, SEGMENT_ALIGN - 1, 3 << 20, SEGMENT_BYTES_MAX * 2, u64::MAX] {
            assert_eq!(slot_count(segment_bytes, 512), Err(LayoutError::SegmentBytes(segment_bytes)));
        }
        for block_bytes in [0, block_bytes_max(SEGMENT) + 1, u64::MAX] {
            assert!(matches!(slot_count(SEGMENT, block_bytes), Err(LayoutError::BlockBytes { .. })));
        }
    }

    /// A pool of plain words, to be read as an engine reads the real one.
    fn words(fields: &[(u64, u64)]) -> impl Fn(usize) -> u64 + use<> {
        let fields: std::collections::HashMap<u64, u64> = fields.iter().copied().collect();
        move |offset| fields.get(&(offset as u64)).copied().unwrap_or(0)
    }

    /// The header of a pool of two segments.
    const SOUND: [(u64, u64); 5] = [
        (header::MAGIC, MAGIC),
        (header::VERSION, VERSION as u64),
        (header::OLDEST, OLDEST as u64),
        (header::SEGMENT_BYTES, SEGMENT),
        (header::SEGMENTS, 2),
    ];

    /// The same words, one of them another.
    fn with<const N: usize>(mut words: [(u64, u64); N], field: u64, value: u64) -> [(u64, u64); N] {
        words.iter_mut().filter(|(other, _)| *other == field).for_each(|(_, old)| *old = value);
        words
    }

    #[test]
    fn a_view_refuses_a_header_that_does_not_fit_its_mapping() {
        let (sound, len) = (SOUND, pool_bytes(SEGMENT, 2).expect("small"));
        assert!(PoolView::new(words(&sound), len).is_ok());
        assert!(PoolView::new(words(&sound), len - 1).is_err(), "shorter than its segments");
        assert!(PoolView::new(words(&sound), 0).is_err());
        for (field, _) in sound {
            for wrong in [0, 3, u64::MAX] {
                let fields = with(sound, field, wrong);
                let empty = field == header::SEGMENTS && wrong == 0;
                // A later release's file that this one reads, and an earlier one's.
                let related = [(header::VERSION, 3), (header::OLDEST, 0)].contains(&(field, wrong));
                assert_eq!(PoolView::new(words(&fields), len).is_ok(), empty || related, "{field} {wrong}");
            }
        }
    }

    #[test]
    fn only_whole_blocks_of_earlier_lives_remain() {
        let geometry = Geometry::new(SEGMENT, 10_000).expect("fits");
        let base = segment_offset(SEGMENT, 1).expect("small");
        let header = geometry.place(geometry.offset(1, 2).expect("a slot")).expect("its own").header;
        let [magic, version, oldest, segment_bytes, segments] = SOUND;
        let sound = [
            magic,
            version,
            oldest,
            segment_bytes,
            segments,
            (base + segment::MAGIC, SEGMENT_MAGIC),
            (base + segment::BLOCK_BYTES, 10_000),
            (base + segment::SLOT_COUNT, geometry.slot_count.into()),
            (header + slot::STATE, COMMITTED),
            (header + slot::GENERATION, first_generation(2) + 7),
            (header + slot::GROUP, 3),
            (header + slot::LENGTH, 10_000),
            (header + slot::CHECKSUM, 9),
        ];
        let len = pool_bytes(SEGMENT, 2).expect("small");
        let with =
            |field, value| PoolView::new(words(&with(sound, field, value)), len).expect("a sound pool");
        let remains = |view: &PoolView<_>| view.remains(1, &geometry, 2, 3).expect("a slot");
        let whole = with(0, MAGIC);
        assert_eq!((whole.geometry(1), whole.geometry(0), whole.geometry(2)), (Some(geometry), None, None));
        assert!(matches!(remains(&whole), Remains::Block { group: 3, .. }), "{:?}", remains(&whole));
        assert_eq!(whole.remains(1, &geometry, 3, 3), Some(Remains::Free));
        assert_eq!(whole.remains(2, &geometry, 2, 3), None);
        for (field, wrong) in [
            (slot::STATE, FILLING),
            (slot::STATE, 3),
            (slot::GENERATION, 0),
            (slot::GENERATION, first_generation(3)),
            (slot::GENERATION, u64::MAX),
            (slot::GROUP, 1 << 32),
            (slot::LENGTH, 10_001),
            (slot::CHECKSUM, 0),
        ] {
            let found = remains(&with(header + field, wrong));
            assert!(matches!(found, Remains::Debris { .. }), "{field} {wrong}: {found:?}");
        }
        for (field, wrong) in [(segment::MAGIC, 0), (segment::BLOCK_BYTES, 0), (segment::SLOT_COUNT, 1)] {
            assert_eq!(with(base + field, wrong).geometry(1), None, "{field} {wrong}");
        }
    }

    #[test]
    fn a_slot_verifies_only_committed_in_its_generation_and_inside_the_pool() {
        let geometry = Geometry::new(SEGMENT, 10_000).expect("fits");
        let slot = SlotRef { offset: geometry.offset(1, 2).expect("a slot"), generation: 5 };
        let header = geometry.place(slot.offset).expect("a slot").header;
        let pool = |state| words(&[(header + slot::STATE, state), (header + slot::GENERATION, 5)]);
        assert!(verify(pool(COMMITTED), SEGMENT, 2, slot, 10_000));
        assert!(!verify(pool(FILLING), SEGMENT, 2, slot, 10_000));
        assert!(!verify(pool(FREE), SEGMENT, 2, slot, 10_000));
        assert!(!verify(pool(COMMITTED), SEGMENT, 1, slot, 10_000), "past the last segment");
        assert!(!verify(pool(COMMITTED), SEGMENT, 2, SlotRef { generation: 4, ..slot }, 10_000));
        assert!(!verify(pool(COMMITTED), SEGMENT, 2, SlotRef { offset: slot.offset + 8, ..slot }, 10_000));
        assert!(!verify(pool(COMMITTED), 0, 2, slot, 10_000));
    }
}
