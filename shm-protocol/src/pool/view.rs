//! A pool read word by word, only through the given accessor.

use std::sync::atomic::{Ordering, fence};

use super::{
    COMMITTED, FREE, Geometry, LayoutError, MAGIC, Remains, SEGMENT_ALIGN, SEGMENT_MAGIC, SlotHeader,
    SlotPlace, SlotRef, check_segment_bytes, check_versions, first_generation, header, segment,
    segment_offset, slot,
};
use crate::key::{BlockHash, NamespaceDigest};

/// Reads a pool through `load`, which loads the u64 at a pool offset with acquire.
///
/// Every argument of `load` is a multiple of 8 below the length given to [`PoolView::new`].
#[derive(Debug)]
pub struct PoolView<F> {
    load: F,
    segment_bytes: u64,
    segments: u64,
}

// === impl PoolView ===

impl<F: Fn(usize) -> u64> PoolView<F> {
    /// Makes a view of a pool of `len` mapped bytes; fails unless its header is sound.
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

    /// Returns the bytes of a segment.
    pub fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// Returns the number of segments.
    pub fn segments(&self) -> u64 {
        self.segments
    }

    /// Returns the place of the slot at `offset`; fails unless its whole data lies inside the pool.
    pub fn place(&self, offset: u64, block_bytes: u64) -> Result<SlotPlace, LayoutError> {
        place_inside(self.segment_bytes, self.segments, offset, block_bytes)
    }

    /// Reads the header of the slot at `offset`, word by word. It is whole only between two successful
    /// [`PoolView::verify`].
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

    /// Returns the slots of a segment, or `None` if it is assigned to no block size or its header is not
    /// sound.
    pub fn geometry(&self, segment: u64) -> Option<Geometry> {
        let base = segment_offset(self.segment_bytes, segment).filter(|_| segment < self.segments)?;
        let word = |field: u64| (self.load)((base + field) as usize);
        let assigned = word(segment::MAGIC) == SEGMENT_MAGIC;
        let geometry = Geometry::new(self.segment_bytes, word(segment::BLOCK_BYTES)).ok()?;
        let sound = assigned && word(segment::SLOT_COUNT) == u64::from(geometry.slot_count);
        sound.then_some(geometry)
    }

    /// Returns the content of slot `index`, left by lives before `life` in a segment whose slots are
    /// `geometry`. The slot must not be written meanwhile.
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

    /// True if the slot is whole and of this filling. Call it before and after a copy: after two true results
    /// the copied bytes are whole too.
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

/// Does the same as [`PoolView::verify`] for a caller without a view.
pub fn verify(
    load: impl Fn(usize) -> u64,
    segment_bytes: u64,
    segments: u64,
    slot: SlotRef,
    block_bytes: u64,
) -> bool {
    let Ok(place) = place_inside(segment_bytes, segments, slot.offset, block_bytes) else { return false };
    // SYNC POINT(slot reuse): the fence before the loads orders the caller's copy before them, so a copy with
    // bytes of a later filling also sees its FILLING. The fence after them keeps the next copy behind them.
    fence(Ordering::Acquire);
    let whole = load((place.header + slot::STATE) as usize) == COMMITTED
        && load((place.header + slot::GENERATION) as usize) == slot.generation;
    fence(Ordering::Acquire);
    whole
}
