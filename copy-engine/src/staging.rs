//! A rank's staging segment: the rank puts blocks into it for a sidecar without access to its memory.
//!
//! The segment belongs to the rank, is sealed to its size, and goes to the sidecar for reading only. Its
//! first page has a word for each slot: the tag of the request whose bytes the slot holds.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rustix::fs::{MemfdFlags, SealFlags};
use shm_protocol::handshake::BlockRegion;
use shm_protocol::layout::{STAGING_SLOTS_MAX, STAGING_WORDS_BYTES, staging_word};
use shm_protocol::message::Stage;
use shm_protocol::region::{Access, Region};

use crate::cuda::StageStream;
use crate::{CopyError, EngineMemory};

/// Bytes of a segment: a GPU fills it in 1.2 ms while the sidecar empties it in 4 to 8 ms, so a larger one
/// would not be faster.
const BYTES: u64 = 64 << 20;
/// Minimum slots: one is filled while another is emptied, and both sides may run ahead by one.
pub const SLOTS_MIN: u32 = 4;
/// Slots begin on whole pages.
const PAGE: u64 = 4096;

/// The segment, and on a GPU the stream that fills it.
#[derive(Debug)]
pub struct Staging {
    /// First field, so its copies end before the memory is freed.
    stream: Option<StageStream>,
    file: OwnedFd,
    region: Arc<Region>,
    slots: u32,
    block_bytes: u64,
}

// === impl Staging ===

impl Staging {
    /// A segment for blocks of `memory`, with fewer slots if memory is short.
    pub fn new(memory: &EngineMemory) -> Result<Self, CopyError> {
        let wanted = (BYTES / memory.block_bytes()).clamp(SLOTS_MIN.into(), STAGING_SLOTS_MAX as u64) as u32;
        Self::with_slots(memory, wanted).or_else(|_| Self::with_slots(memory, SLOTS_MIN))
    }

    fn with_slots(memory: &EngineMemory, slots: u32) -> Result<Self, CopyError> {
        let block_bytes = memory.block_bytes();
        let bytes = STAGING_WORDS_BYTES as u64 + u64::from(slots) * stride(block_bytes);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("pillion-staging", flags)?;
        rustix::fs::ftruncate(&file, bytes)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let region = Arc::new(Region::map(file.as_fd(), bytes as usize, Access::ReadWrite)?);
        let stream = match memory {
            EngineMemory::Host(_) => None,
            EngineMemory::Cuda(memory) => Some(StageStream::new(memory, &region)?),
        };
        Ok(Self { stream, file, region, slots, block_bytes })
    }

    /// The number of slots.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// The place of the slots, in the form of the handshake.
    pub fn place(&self) -> BlockRegion {
        let (stride, bytes) = (stride(self.block_bytes), self.block_bytes);
        BlockRegion { fd: 0, offset: STAGING_WORDS_BYTES as u64, stride, bytes }
    }

    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Copies blocks of `memory` into their slots and waits for the end. Returns true for each whole block.
    /// The caller checks the slots, and each occurs once.
    pub fn fill(&self, memory: &EngineMemory, stages: &[Stage]) -> Vec<bool> {
        for stage in stages {
            self.region.word64(staging_word(stage.slot)).store(stage.tag, Ordering::Relaxed);
        }
        // SYNC POINT(tag): the words before the bytes; the sidecar reads them after.
        fence(Ordering::SeqCst);
        let offset =
            |stage: &Stage| STAGING_WORDS_BYTES as u64 + u64::from(stage.slot) * stride(self.block_bytes);
        match (&self.stream, memory) {
            (Some(stream), _) => {
                let blocks: Vec<_> = stages.iter().map(|stage| (stage.block, offset(stage))).collect();
                vec![stream.copy(&blocks).is_ok(); stages.len()]
            }
            (None, EngineMemory::Host(memory)) => {
                let copied =
                    |stage: &Stage| memory.save_block(stage.block, &self.region, offset(stage)).is_ok();
                stages.iter().map(copied).collect()
            }
            (None, EngineMemory::Cuda(_)) => unreachable!("made with the memory's stream"),
        }
    }
}

fn stride(block_bytes: u64) -> u64 {
    block_bytes.next_multiple_of(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostMemory;

    fn memory(block_bytes: u64, blocks: u32) -> EngineMemory {
        let file = rustix::fs::memfd_create("kv", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, block_bytes * u64::from(blocks)).unwrap();
        for block in 0..blocks {
            let bytes = vec![block as u8 + 1; block_bytes as usize];
            rustix::io::pwrite(&file, &bytes, u64::from(block) * block_bytes).unwrap();
        }
        let region = BlockRegion { fd: 0, offset: 0, stride: block_bytes, bytes: block_bytes };
        EngineMemory::Host(HostMemory::new(vec![file], &[region], blocks, Access::ReadWrite).unwrap())
    }

    #[test]
    fn a_slot_holds_its_block_and_its_tag_and_its_neighbours_stay() {
        let memory = memory(5000, 3);
        let staging = Staging::with_slots(&memory, 4).unwrap();
        let stage = |tag, block, slot| Stage { tag, block, slot };
        let whole = staging.fill(&memory, &[stage(9, 2, 1), stage(10, 3, 3), stage(11, 0, 2)]);
        assert_eq!(whole, [true, false, true], "there is no block 3");
        let place = staging.place();
        for (slot, (tag, byte)) in [(0, 0), (9, 3), (11, 1), (10, 0)].into_iter().enumerate() {
            let mut bytes = vec![0xee; place.stride as usize];
            let at = place.offset + slot as u64 * place.stride;
            rustix::io::pread(staging.file(), &mut bytes, at).unwrap();
            let (block, rest) = bytes.split_at(5000);
            assert!(block.iter().all(|b| *b == byte) && rest.iter().all(|b| *b == 0), "slot {slot}");
            assert_eq!(staging.region.word64(staging_word(slot as u32)).load(Ordering::Relaxed), tag);
        }
    }

    #[test]
    fn large_blocks_get_few_slots_and_small_ones_no_more_than_there_are_words() {
        for (block_bytes, slots) in [(64 << 20, SLOTS_MIN), (2 << 20, 32), (512, STAGING_SLOTS_MAX as u32)] {
            assert_eq!(Staging::new(&memory(block_bytes, 1)).unwrap().slots(), slots, "{block_bytes}");
        }
    }
}
