//! The engine's own copies of its GPU memory: loads not made or not finished by the sidecar, and blocks for
//! the staging segment.
//!
//! Everything is made at the start, since a first launch, a free or an unlock would wait for a blocked
//! stream. The pool's file is read by system calls into locked memory, in two halves: one is filled while the
//! other is on the wire. A shortened pool file then fails the copy and kills no process.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::MemfdFlags;
use shm_protocol::handshake::BlockRegion;
use shm_protocol::region::{Access, Region};

use super::{Blocks, CopyStream, CudaError, Gpu, Registered};
use crate::host::read_all;
use crate::{CopyError, Direction};

/// Memory is locked in whole pages; the first page holds the word with the last ended batch.
const PAGE: u64 = 4096;
/// Time between two checks of awaited copies.
const POLL: Duration = Duration::from_micros(20);
/// Threads to fill a half: one reads some 10 GB/s from the pool, the bus takes five times that.
const FILL_THREADS: usize = 4;
/// For fewer bytes one thread is faster than the start of others, each of some 20 us.
const FILL_ALONE_BYTES: u64 = 2 << 20;

/// One rank's KV memory in its own process.
#[derive(Debug)]
pub struct DeviceMemory {
    here: Arc<Blocks>,
    gpu: Arc<Gpu>,
    copies: Mutex<Copies>,
    region: Arc<Region>,
    /// Bytes of each half.
    half: u64,
    blocks: u32,
}

#[derive(Debug)]
struct Copies {
    /// First field: its drop waits for its copies.
    stream: CopyStream,
    locked: Registered,
    /// Batches begun so far.
    begun: u64,
}

/// Copies blocks into the staging segment.
#[derive(Debug)]
pub struct StageStream {
    stream: CopyStream,
    _locked: Registered,
}

// === impl DeviceMemory ===

impl DeviceMemory {
    /// Makes the stream and the locked memory for KV memory at `bases`, which `regions` name by index. A
    /// batch of a load moves `batch_bytes` at most, but at least one block.
    pub fn new(
        gpu: &Arc<Gpu>,
        bases: &[u64],
        regions: &[BlockRegion],
        blocks: u32,
        batch_bytes: u64,
    ) -> Result<Self, CopyError> {
        let here = Arc::new(Blocks::own(bases.to_vec(), regions, blocks));
        let half = here.block_bytes().max(batch_bytes).next_multiple_of(PAGE);
        let bytes = lead(here.block_bytes()) + 2 * half;
        let file = rustix::fs::memfd_create("pillion-bounce", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, bytes)?;
        let region = Arc::new(Region::map(file.as_fd(), bytes as usize, Access::ReadWrite)?);
        let stream = CopyStream::new(gpu, &here, &region, bytes)?;
        let locked = Registered::new(gpu, &region, 0, bytes as usize)?;
        let copies = Mutex::new(Copies { stream, locked, begun: 0 });
        Ok(Self { here, gpu: Arc::clone(gpu), copies, region, half, blocks })
    }

    /// Bytes of this rank's part of a block.
    pub fn block_bytes(&self) -> u64 {
        self.here.block_bytes()
    }

    /// True if block `block` exists.
    pub fn holds(&self, block: u32) -> bool {
        self.here.holds(block)
    }

    pub fn batch_blocks(&self, cut: &Range<u64>) -> usize {
        ((self.half / (cut.end - cut.start)) as usize).max(1)
    }

    /// See [`crate::EngineMemory::begin_load`]. Waits while both halves are on the wire.
    pub fn begin_load(
        &self,
        pool: &OwnedFd,
        cut: &Range<u64>,
        blocks: &[(u32, u64)],
    ) -> Result<u64, CopyError> {
        self.gpu.bind()?;
        self.check(cut, blocks)?;
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        let batch = copies.begun + 1;
        // The batch before the last one used the same half.
        self.wait(&copies.stream, batch.saturating_sub(2))?;
        let first = lead(self.block_bytes()) + batch % 2 * self.half;
        self.fill(pool, cut, blocks, first)?;
        let cut_bytes = cut.end - cut.start;
        // Parts lie end to end; a block's own first byte would lie `cut.start` before its part.
        let places = (0..).zip(blocks).map(|(n, (block, _))| (*block, first + n * cut_bytes - cut.start));
        let enqueued =
            copies.stream.enqueue(Direction::ToEngine, cut, &places.collect::<Vec<_>>()).and_then(|()| {
                // SYNC POINT(bounce): the copies before the word.
                copies.stream.stream().write(&copies.locked, 0, batch)
            });
        if let Err(error) = enqueued {
            // Some copies may be on their way, into blocks about to be reported as failed.
            copies.stream.stream().synchronize()?;
            return Err(error.into());
        }
        copies.begun = batch;
        Ok(batch)
    }

    /// The number of the last ended batch. Fails with the error of a batch, if one failed.
    pub fn ended(&self) -> Result<u64, CudaError> {
        // SYNC POINT(bounce): acquire pairs with the stream's store.
        let ended = self.region.word64(0).load(Ordering::Acquire);
        let copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        self.gpu.bind()?;
        copies.stream.stream().is_idle().map(|_| ended)
    }

    /// Copies `pool` at `offset` into block `block` and waits for its end.
    pub fn load_block(&self, pool: &OwnedFd, offset: u64, block: u32) -> Result<(), CopyError> {
        self.begin_load(pool, &(0..self.block_bytes()), &[(block, offset)])?;
        let copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(copies.stream.stream().synchronize()?)
    }

    fn check(&self, cut: &Range<u64>, blocks: &[(u32, u64)]) -> Result<(), CopyError> {
        assert!(blocks.len() <= self.batch_blocks(cut), "a batch of more than fits");
        match blocks.iter().find(|(block, _)| !self.holds(*block)) {
            None => Ok(()),
            Some(&(block, offset)) => Err(CopyError::Range { block, blocks: self.blocks, offset }),
        }
    }

    fn wait(&self, stream: &CopyStream, batch: u64) -> Result<(), CudaError> {
        // SYNC POINT(bounce): as in `ended`.
        while self.region.word64(0).load(Ordering::Acquire) < batch {
            stream.stream().is_idle()?;
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Reads part `cut` of every block from the pool, end to end from byte `first` on.
    fn fill(
        &self,
        pool: &OwnedFd,
        cut: &Range<u64>,
        blocks: &[(u32, u64)],
        first: u64,
    ) -> Result<(), CopyError> {
        let bytes = cut.end - cut.start;
        let read = |from: usize, blocks: &[(u32, u64)]| -> Result<(), CopyError> {
            (from..).zip(blocks).try_for_each(|(n, (_, offset))| {
                let to = (first + n as u64 * bytes) as usize;
                read_all(pool, offset.saturating_add(cut.start), &self.region, to, bytes as usize)
            })
        };
        if blocks.len() as u64 * bytes < FILL_ALONE_BYTES {
            return read(0, blocks);
        }
        let share = blocks.len().div_ceil(FILL_THREADS);
        std::thread::scope(|scope| {
            let mut parts = (0..).step_by(share).zip(blocks.chunks(share));
            let own = parts.next();
            let started: Vec<_> = parts
                .map(|(from, part)| {
                    let thread = std::thread::Builder::new().name("pillion-fill".into());
                    thread.spawn_scoped(scope, move || read(from, part)).map_err(|_| (from, part))
                })
                .collect();
            let mut filled = own.map_or(Ok(()), |(from, part)| read(from, part));
            for thread in started {
                let part = match thread {
                    Ok(thread) => thread.join().expect("reading does not panic"),
                    // No thread is available now: this one reads the part.
                    Err((from, part)) => read(from, part),
                };
                filled = filled.and(part);
            }
            filled
        })
    }
}

/// Start of the halves: behind the word, and with enough room before them for the first byte of a block whose
/// part begins a half.
fn lead(block_bytes: u64) -> u64 {
    PAGE + block_bytes.next_multiple_of(PAGE)
}

// === impl StageStream ===

impl StageStream {
    /// A stream from `memory` into the segment `region`.
    pub fn new(memory: &DeviceMemory, region: &Arc<Region>) -> Result<Self, CudaError> {
        let (gpu, bytes) = (&memory.gpu, region.len());
        let stream = CopyStream::new(gpu, &memory.here, region, bytes as u64)?;
        Ok(Self { stream, _locked: Registered::new(gpu, region, 0, bytes)? })
    }

    /// Copies each block to its offset and waits for the end.
    pub fn copy(&self, blocks: &[(u32, u64)]) -> Result<(), CudaError> {
        let stream = self.stream.stream();
        stream.gpu().bind()?;
        let whole = 0..self.stream.block_bytes();
        let enqueued = self.stream.enqueue(Direction::ToPool, &whole, blocks);
        // Enqueued copies end before their slots are used again.
        while !stream.is_idle()? {
            std::thread::sleep(POLL);
        }
        enqueued
    }
}
