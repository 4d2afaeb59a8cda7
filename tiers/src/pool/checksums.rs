//! Checksums of blocks: stored in the slots' headers, and computed again from the slots' bytes.
//!
//! A header states its block's checksum mixed with the header's own checksum.

use std::fmt;
use std::hash::Hasher;
use std::sync::atomic::{Ordering, fence};

use shm_protocol::pool::{COMMITTED, Geometry, SlotPlace, SlotRef, header_checksum, slot};
use twox_hash::XxHash3_64;

use super::Pool;

/// Bytes read and summed at once: they stay in a core's first-level cache or the next.
pub const PART_BYTES: usize = 32 << 10;

/// The checksum of a block's bytes, part by part.
#[derive(Clone, Default)]
pub struct BlockSum(XxHash3_64);

// === impl BlockSum ===

impl BlockSum {
    /// Adds the next bytes.
    pub fn add_part(&mut self, bytes: &[u8]) {
        self.0.write(bytes);
    }

    /// Returns the checksum of all bytes.
    pub fn finish(&self) -> u64 {
        self.0.finish()
    }
}

impl fmt::Debug for BlockSum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BlockSum").field(&self.finish()).finish()
    }
}

// === impl Pool: noting checksums ===

impl Pool {
    /// Returns the checksum of the block in a slot; `None` if it was not computed since the slot was filled,
    /// or the slot is filled again.
    pub fn checksum(&self, slot: SlotRef) -> Option<u64> {
        let place = self.current(slot)?;
        let stated = self.slot_word(&place, slot::CHECKSUM).load(Ordering::Relaxed);
        (stated != 0).then(|| stated ^ self.header_checksum(&place))
    }

    /// Stores the checksum of a whole block. Returns false if the slot is not in this filling any more.
    #[must_use = "a slot that was filled again has another block"]
    pub fn set_checksum(&self, slot: SlotRef, checksum: u64) -> bool {
        let place = self.current(slot);
        place.iter().for_each(|place| self.store_checksum(place, checksum));
        place.is_some()
    }

    /// Returns the whole blocks of segment `number` saved by this life and without a checksum. Any thread may
    /// call it, so some slots may be filled again meanwhile.
    pub fn unsummed(&self, number: u64) -> Vec<SlotRef> {
        let known = usize::try_from(number).ok().and_then(|number| self.block_bytes.get(number));
        let block_bytes = known.map_or(0, |known| known.load(Ordering::Relaxed));
        let Ok(geometry) = Geometry::new(self.segment_bytes, block_bytes) else { return Vec::new() };
        let unsummed = |index| {
            let offset = geometry.offset(number, index)?;
            let place = geometry.place(offset).ok()?;
            // SYNC POINT(slot commit): a reader of COMMITTED sees the header of that filling.
            let committed = self.slot_word(&place, slot::STATE).load(Ordering::Acquire) == COMMITTED;
            let generation = self.slot_word(&place, slot::GENERATION).load(Ordering::Relaxed);
            let summed = self.slot_word(&place, slot::CHECKSUM).load(Ordering::Relaxed) != 0;
            // The bytes of an earlier life's block without a checksum may have changed since.
            let saved_here = generation >= self.first_generation();
            (committed && saved_here && !summed).then_some(SlotRef { offset, generation })
        };
        (0..geometry.slot_count).filter_map(unsummed).collect()
    }

    pub(super) fn store_checksum(&self, place: &SlotPlace, checksum: u64) {
        let stated = checksum ^ self.header_checksum(place);
        self.slot_word(place, slot::CHECKSUM).store(stated, Ordering::Relaxed);
    }

    fn header_checksum(&self, place: &SlotPlace) -> u64 {
        header_checksum(|field| self.slot_word(place, field).load(Ordering::Relaxed))
    }
}

// === impl Pool: computing checksums ===

impl Pool {
    /// Computes the checksum of the block in a slot, in any thread. The slot may be filled again meanwhile,
    /// so the bytes are read by system calls. Returns `None` if such a filling has begun, or bytes of the
    /// pool are lost. A filling may still begin until [`Pool::set_checksum`].
    pub fn sum(&self, slot: SlotRef) -> Option<u64> {
        self.current(slot)?;
        let (_, block_bytes) = self.place(slot.offset)?;
        let (mut sum, mut part, mut summed) = (BlockSum::default(), [0; PART_BYTES], 0);
        while summed < block_bytes {
            let wanted = PART_BYTES.min((block_bytes - summed) as usize);
            let read = || rustix::io::pread(&self.fd, &mut part[..wanted], slot.offset + summed);
            let bytes = rustix::io::retry_on_intr(read).ok().filter(|bytes| *bytes > 0)?;
            sum.add_part(&part[..bytes]);
            summed += bytes as u64;
        }
        // SYNC POINT(slot reuse): a reader of a byte of a later filling sees that filling's generation.
        fence(Ordering::Acquire);
        (self.current(slot).is_some() && self.is_whole()).then(|| sum.finish())
    }

    /// True if the bytes of a slot, not being filled, match the checksum in its header; in any thread.
    pub fn verify(&self, slot: SlotRef) -> bool {
        self.sum(slot).is_some_and(|checksum| self.checksum(slot) == Some(checksum))
    }
}
