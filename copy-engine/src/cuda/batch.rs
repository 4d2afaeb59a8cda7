//! Copies of blocks between a GPU's KV memory and the pool, enqueued by a plan.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;
use shm_protocol::handshake::BlockRegion;
use shm_protocol::region::Region;

use super::lanes::Lanes;
use super::plan::{Piece, Pitched, Plan, plan};
use super::{CudaError, Gpu, Imported, Stream, gpu};
use crate::Direction;

/// Minimum pieces for a batch: a copy of its own costs 3 us to enqueue, and no more on the wire.
const BATCH_PIECES_MIN: usize = 16;

/// The places of a rank's blocks on its GPU.
#[derive(Debug)]
pub struct Blocks {
    bases: Vec<u64>,
    regions: Vec<BlockRegion>,
    blocks: u32,
    block_bytes: u64,
    /// Memory of other processes, open as long as copies use it.
    _imported: Vec<Imported>,
}

/// A stream for copies of blocks, with all memory its copies touch. Dropping it waits for them first.
#[derive(Debug)]
pub struct CopyStream {
    stream: Stream,
    lanes: Lanes,
    blocks: Arc<Blocks>,
    pool: Arc<Region>,
    /// Bytes of each separately locked part of the pool.
    slice_bytes: u64,
}

// === impl Blocks ===

impl Blocks {
    /// The blocks of another process, in memory opened from its handles. The handshake has checked the
    /// regions.
    pub fn imported(imported: Vec<Imported>, regions: &[BlockRegion], blocks: u32) -> Self {
        let bases = imported.iter().map(Imported::base).collect();
        Self { _imported: imported, ..Self::own(bases, regions, blocks) }
    }

    /// The blocks of this process, which keeps the memory.
    pub(super) fn own(bases: Vec<u64>, regions: &[BlockRegion], blocks: u32) -> Self {
        let block_bytes = regions.iter().map(|region| region.bytes).sum();
        Self { bases, regions: regions.to_vec(), blocks, block_bytes, _imported: Vec::new() }
    }

    /// Bytes of this rank's part of a block.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// True if block `block` exists.
    pub(super) fn holds(&self, block: u32) -> bool {
        block < self.blocks
    }
}

// === impl CopyStream ===

impl CopyStream {
    /// A new stream for copies between `blocks` and `pool`. The pool is locked in slices of `slice_bytes`
    /// from its start.
    pub fn new(
        gpu: &Arc<Gpu>,
        blocks: &Arc<Blocks>,
        pool: &Arc<Region>,
        slice_bytes: u64,
    ) -> Result<Self, CudaError> {
        let lanes = Lanes::new(gpu, blocks.regions.iter().map(|region| region.bytes))?;
        let (blocks, pool) = (Arc::clone(blocks), Arc::clone(pool));
        Ok(Self { stream: Stream::new(gpu)?, lanes, blocks, pool, slice_bytes })
    }

    /// The stream itself, for words and events around the copies.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Bytes of a block.
    pub(super) fn block_bytes(&self) -> u64 {
        self.blocks.block_bytes
    }

    /// Enqueues the copies of part `cut` of some blocks, each (block, pool offset of its first byte). Fails
    /// for blocks and offsets that do not exist, before anything is enqueued. Pool memory must be locked.
    pub fn enqueue(
        &self,
        direction: Direction,
        cut: &Range<u64>,
        blocks: &[(u32, u64)],
    ) -> Result<(), CudaError> {
        self.check(cut, blocks)?;
        let Blocks { bases, regions, .. } = &*self.blocks;
        let Plan { pitched, scattered } = plan(bases, regions, self.slice_bytes, cut, blocks);
        self.lanes.share(&self.stream, |streams| {
            for (copy, stream) in pitched.iter().zip(streams.iter().cycle()) {
                self.pitched(direction, copy, stream)?;
            }
            let share = scattered.len().div_ceil(streams.len()).max(BATCH_PIECES_MIN);
            scattered
                .chunks(share)
                .zip(streams)
                .try_for_each(|(pieces, on)| self.pieces(direction, pieces, on))
        })
    }

    fn pieces(&self, direction: Direction, pieces: &[Piece], stream: &Stream) -> Result<(), CudaError> {
        match gpu::memcpy_batch().filter(|_| pieces.len() >= BATCH_PIECES_MIN) {
            None => pieces.iter().try_for_each(|piece| self.single(direction, piece, stream)),
            Some(function) => self.batch(direction, pieces, function, stream),
        }
    }

    /// The safety of every copy below rests on this check.
    fn check(&self, cut: &Range<u64>, blocks: &[(u32, u64)]) -> Result<(), CudaError> {
        let inside = |&(block, slot): &(u32, u64)| {
            let end = slot.checked_add(cut.end);
            self.blocks.holds(block) && end.is_some_and(|end| end <= self.pool.len() as u64)
        };
        match cut.end <= self.blocks.block_bytes && blocks.iter().all(inside) {
            true => Ok(()),
            false => Err(CudaError::missing("copy", "a block or a pool offset does not exist")),
        }
    }

    fn host(&self, piece: &Piece) -> u64 {
        let at = self.pool.bytes_at(piece.host as usize, piece.bytes as usize);
        at.expect("checked before the plan was made").as_ptr() as u64
    }

    fn single(&self, direction: Direction, piece: &Piece, stream: &Stream) -> Result<(), CudaError> {
        let (host, bytes, stream) = (self.host(piece), piece.bytes as usize, stream.handle());
        let result = match direction {
            // SAFETY: both ranges exist (`check`) and live as long as `self`, whose drop waits for the streams.
            Direction::ToEngine => unsafe {
                sys::cuMemcpyHtoDAsync_v2(piece.device, host as *const _, bytes, stream)
            },
            // SAFETY: as above; the pool's bytes belong to this copy until it ends.
            Direction::ToPool => unsafe {
                sys::cuMemcpyDtoHAsync_v2(host as *mut _, piece.device, bytes, stream)
            },
        };
        CudaError::check("cuMemcpyAsync", result)
    }

    fn pitched(&self, direction: Direction, copy: &Pitched, stream: &Stream) -> Result<(), CudaError> {
        let host = self.host(&copy.first);
        let (unified, no_array) = (sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED, std::ptr::null_mut());
        let (device_side, host_side) =
            ((copy.first.device, copy.device_pitch as usize), (host, copy.host_pitch as usize));
        let (source, target) = match direction {
            Direction::ToEngine => (host_side, device_side),
            Direction::ToPool => (device_side, host_side),
        };
        let request = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: unified,
            srcHost: std::ptr::null(),
            srcDevice: source.0,
            srcArray: no_array,
            srcPitch: source.1,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: unified,
            dstHost: std::ptr::null_mut(),
            dstDevice: target.0,
            dstArray: no_array,
            dstPitch: target.1,
            WidthInBytes: copy.first.bytes as usize,
            Height: copy.rows,
        };
        // SAFETY: `request` is read during the call; every row lies in an existing block and slot (`check`),
        // which live as long as `self`, whose drop waits for the streams.
        let enqueued = unsafe { sys::cuMemcpy2DAsync_v2(&raw const request, stream.handle()) };
        CudaError::check("cuMemcpy2DAsync", enqueued)
    }

    fn batch(
        &self,
        direction: Direction,
        pieces: &[Piece],
        function: gpu::MemcpyBatch,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let mut device: Vec<u64> = pieces.iter().map(|piece| piece.device).collect();
        let mut host: Vec<u64> = pieces.iter().map(|piece| self.host(piece)).collect();
        let mut sizes: Vec<usize> = pieces.iter().map(|piece| piece.bytes as usize).collect();
        let (targets, sources) = match direction {
            Direction::ToEngine => (&mut device, &mut host),
            Direction::ToPool => (&mut host, &mut device),
        };
        let no_hint =
            sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = sys::CUmemcpyAttributes {
            srcAccessOrder: sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: no_hint,
            dstLocHint: no_hint,
            flags: 0,
        };
        let (mut first, mut failed) = (0_usize, 0_usize);
        // SAFETY: the three arrays hold `pieces.len()` entries and are read during the call; one attribute counts from piece
        // 0 on; every piece exists (`check`) and lives as long as `self`, whose drop waits for the streams.
        let enqueued = unsafe {
            function(
                targets.as_mut_ptr(),
                sources.as_mut_ptr(),
                sizes.as_mut_ptr(),
                pieces.len(),
                &raw mut attributes,
                &raw mut first,
                1,
                &raw mut failed,
                stream.handle(),
            )
        };
        CudaError::check("cuMemcpyBatchAsync", enqueued)
    }
}

impl Drop for CopyStream {
    fn drop(&mut self) {
        // A stuck stream never ends: the owner of this has seen it idle before the drop, or ends the process
        // instead.
        let _ = self.stream.synchronize();
    }
}
