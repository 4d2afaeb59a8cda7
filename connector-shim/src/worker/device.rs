//! A rank with KV memory on a GPU: the export of this memory, and the work enqueued on the engine's stream.

use std::sync::Arc;
use std::time::Instant;

use copy_engine::cuda::{self, CudaError, DeviceMemory, Exported, Gpu, StreamEvent};
use shm_protocol::handshake::{self, CudaAllocation, CudaMemory};

use super::copies::RankCopies;
use super::link::Link;
use crate::clock;
use crate::core::worker::watch::SETTLE;
use crate::error::{ShimError, refuse_argument};
use crate::stream::{EngineStream, Probe};

/// Streams tried for rescue copies: with CUDA's default of 8 hardware queues, 9 of 39 stood behind a waiting
/// stream.
const RESCUE_STREAMS: usize = 8;
/// Bytes of a batch if this process makes every load: 0.6 ms on the wire, 1 to 3 ms to read from the pool;
/// two batches are locked memory.
const BATCH_BYTES: u64 = 32 << 20;
/// Streams of the engine whose progress is followed: its own stream and some for overlapped batches. With
/// more, memory of earlier connections is never freed.
const STREAMS_MAX: usize = 8;

/// The session's view of the engine's stream.
#[derive(Debug)]
pub(super) struct StreamDevice {
    gpu: Arc<Gpu>,
    /// Number of cuts of a load.
    cuts: usize,
    /// Loads of the last step begun for which the engine's stream waits.
    loads: Vec<StepLoad>,
    /// Connections that ended, kept because enqueued work names their words.
    retired: Vec<Retired>,
    /// Every stream with uses of words so far.
    streams: Vec<UsedStream>,
    waits: u64,
}

/// A stream, and a mark behind the last use of words on it. The stream may be destroyed by now: its handle is
/// compared, never used.
#[derive(Debug)]
struct UsedStream {
    handle: u64,
    last: Arc<StreamEvent>,
}

#[derive(Debug)]
struct StepLoad {
    op: u64,
    link: Arc<Link>,
    /// Cuts with a wait already enqueued.
    waited: usize,
}

#[derive(Debug)]
struct Retired {
    link: Arc<Link>,
    since: Instant,
    /// Marks behind the last use of its words, one on each stream; set once no new use can follow.
    passed: Option<Vec<Arc<StreamEvent>>>,
}

// === impl StreamDevice ===

impl StreamDevice {
    /// Opens this process' own access to memory whose storages begin at `pointers`. Unless only this process
    /// copies (`alone`), exports the allocations around them and rewrites the regions to count from the
    /// allocations' bases. The calling thread must have the GPU's context; `stream` is a stream of the
    /// engine.
    pub(super) fn new(
        worker: &mut handshake::WorkerHello,
        pointers: &[u64],
        cuts: Vec<u64>,
        stream: u64,
        alone: bool,
    ) -> Result<(Self, DeviceMemory), ShimError> {
        if !cuda::is_present() {
            return refuse_argument(
                "the memory is a GPU's, and libcuda.so.1 or a GPU is missing in this process",
            );
        }
        let gpu = Gpu::of_thread()?;
        let count = cuts.len();
        let bases = if alone { pointers.to_vec() } else { show(&gpu, worker, pointers, cuts)? };
        let batch_bytes = if alone { BATCH_BYTES } else { 0 };
        let memory = own_memory(&gpu, &bases, worker, stream, batch_bytes)?;
        let device =
            Self { gpu, cuts: count, loads: Vec::new(), retired: Vec::new(), streams: Vec::new(), waits: 0 };
        Ok((device, memory))
    }

    pub(super) fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Waits enqueued so far.
    pub(super) fn waits(&self) -> u64 {
        self.waits
    }

    /// Number of sync loads of the step whose last cut has no wait yet.
    pub(super) fn loading(&self) -> usize {
        self.loads.iter().filter(|load| load.waited < self.cuts).count()
    }

    /// The engine's stream of this call.
    pub(super) fn stream(&self, handle: u64) -> EngineStream {
        EngineStream::borrow(&self.gpu, handle)
    }

    /// Enqueues the store of a fence word.
    pub(super) fn write_fence(
        &mut self,
        stream: &EngineStream,
        link: &Link,
        word: usize,
        step: u64,
    ) -> Result<(), CudaError> {
        stream.write_fence(link.connection.words(), word, step)?;
        self.note_use(stream)
    }

    /// Notes a use of words on this stream just now.
    fn note_use(&mut self, stream: &EngineStream) -> Result<(), CudaError> {
        let known = self.streams.len();
        match self.streams.iter_mut().find(|used| used.handle == stream.handle()) {
            // A mark kept by an ended connection stays in its place.
            Some(used) if Arc::strong_count(&used.last) > 1 => used.last = Arc::new(stream.record()?),
            Some(used) => stream.mark(&used.last)?,
            None if known <= STREAMS_MAX => {
                self.streams.push(UsedStream { handle: stream.handle(), last: Arc::new(stream.record()?) });
            }
            None => {}
        }
        Ok(())
    }

    /// Says that a step begins: all waits of the last step were enqueued.
    pub(super) fn begin_step(&mut self, copies: &RankCopies) {
        self.loads.clear();
        if copies.is_unwatched() {
            copies.free_spent();
            self.free_retired();
        }
    }

    /// Adds a sync load. Makes the stream wait for all of it now; with `by_cuts` the layers enqueue the
    /// waits.
    pub(super) fn expect(
        &mut self,
        link: &Arc<Link>,
        op: u64,
        stream: &EngineStream,
        by_cuts: bool,
    ) -> Result<(), CudaError> {
        // The words of an ended connection are used once more: earlier marks do not cover this use.
        let ended = self.retired.iter_mut().find(|retired| Arc::ptr_eq(&retired.link, link));
        ended.into_iter().for_each(|retired| retired.passed = None);
        self.loads.push(StepLoad { op, link: Arc::clone(link), waited: 0 });
        if by_cuts { Ok(()) } else { self.wait_for_cuts(stream, self.cuts) }
    }

    /// Makes the stream wait for the first `cuts` cuts of every sync load of the step.
    pub(super) fn wait_for_cuts(&mut self, stream: &EngineStream, cuts: usize) -> Result<(), CudaError> {
        let (cuts, before) = (cuts.min(self.cuts), self.waits);
        for load in self.loads.iter_mut().filter(|load| load.waited < cuts) {
            stream.wait_for_load(load.link.connection.words(), load.op, cuts)?;
            load.waited = cuts;
            self.waits += 1;
        }
        if self.waits == before { Ok(()) } else { self.note_use(stream) }
    }

    /// Keeps an ended connection's words for the streams that may still reach them.
    pub(super) fn retire(&mut self, link: Arc<Link>) {
        self.retired.push(Retired { link, since: clock::read_clock(), passed: None });
    }

    /// Returns the ended connection to the sidecar of this epoch, while the sidecar's stream may still write.
    pub(super) fn retired_link(&self, epoch: u64) -> Option<Arc<Link>> {
        let retired = self.retired.iter().find(|retired| retired.link.connection.welcome.epoch == epoch);
        retired.map(|retired| Arc::clone(&retired.link))
    }

    /// Frees the words out of reach of all streams, those of the sidecar included. Called while no load is in
    /// progress, since unlocking memory waits for a waiting stream.
    fn free_retired(&mut self) {
        if self.streams.len() > STREAMS_MAX {
            return;
        }
        for mut retired in std::mem::take(&mut self.retired) {
            let used = Arc::strong_count(&retired.link) > 1;
            if !used && retired.passed.is_none() {
                retired.passed = Some(self.streams.iter().map(|used| Arc::clone(&used.last)).collect());
                self.retired.push(retired);
            } else if used || !retired.is_over() {
                self.retired.push(retired);
            }
        }
    }
}

// === impl Retired ===

impl Retired {
    /// True if no stream of either side uses it. A live sidecar has ended its copies within a second of the
    /// hang-up.
    fn is_over(&self) -> bool {
        let silent = self.link.connection.sidecar_is_gone() || clock::read_clock() - self.since > SETTLE;
        let passed = |marks: &Vec<Arc<StreamEvent>>| marks.iter().all(|mark| mark.passed() == Ok(true));
        silent && self.passed.as_ref().is_some_and(passed)
    }
}

/// Exports the allocations around `pointers` and lists them in `worker`. Returns their base addresses.
fn show(
    gpu: &Gpu,
    worker: &mut handshake::WorkerHello,
    pointers: &[u64],
    cuts: Vec<u64>,
) -> Result<Vec<u64>, ShimError> {
    let exports = pointers.iter().map(|pointer| cuda::export_allocation(*pointer).map_err(ShimError::Export));
    let exports = exports.collect::<Result<Vec<_>, _>>()?;
    let allocations = place_regions(worker, pointers, &exports)?;
    let named = |export: &Exported| CudaAllocation { handle: export.handle, bytes: export.bytes };
    worker.cuda = Some(CudaMemory {
        uuid: gpu.uuid(),
        pid: std::process::id(),
        allocations: allocations.iter().map(named).collect(),
        cuts,
    });
    Ok(allocations.iter().map(|allocation| allocation.base).collect())
}

/// Points every region at its allocation, each listed once, and checks that it ends inside.
fn place_regions(
    worker: &mut handshake::WorkerHello,
    pointers: &[u64],
    exports: &[Exported],
) -> Result<Vec<Exported>, ShimError> {
    let mut allocations: Vec<Exported> = Vec::new();
    let mut places = Vec::new();
    for (pointer, export) in pointers.iter().zip(exports) {
        let known = allocations.iter().position(|allocation| allocation.base == export.base);
        places.push((known.unwrap_or(allocations.len()) as u32, pointer - export.base));
        if known.is_none() {
            allocations.push(*export);
        }
    }
    for (index, region) in worker.regions.iter_mut().enumerate() {
        let (allocation, offset) = places[region.fd as usize];
        (region.fd, region.offset) = (allocation, region.offset.saturating_add(offset));
        let bytes = allocations[allocation as usize].bytes;
        if region.checked_end(worker.blocks).is_none_or(|end| end > bytes) {
            return refuse_argument(format!("region {index} ends outside its allocation of {bytes} bytes"));
        }
    }
    Ok(allocations)
}

/// Opens this process' own access to its memory, on a stream that passed the probe: it copies while the
/// engine's stream waits with copies behind. The probe uses the last block, which no one has written yet.
fn own_memory(
    gpu: &Arc<Gpu>,
    bases: &[u64],
    worker: &handshake::WorkerHello,
    stream: u64,
    batch_bytes: u64,
) -> Result<DeviceMemory, ShimError> {
    let (block, first) = (worker.blocks - 1, worker.regions[0]);
    let run = (bases[first.fd as usize] + first.offset + u64::from(block) * first.stride, first.bytes);
    let engine = EngineStream::borrow(gpu, stream);
    // Kept until the end: a freed stream would lend its hardware queue to the next one.
    let mut tried = Vec::new();
    let mut probe = None;
    for _ in 0..RESCUE_STREAMS {
        let memory = DeviceMemory::new(gpu, bases, &worker.regions, worker.blocks, batch_bytes)?;
        let probe = match &mut probe {
            Some(probe) => probe,
            None => probe.insert(Probe::new(gpu, memory.block_bytes())?),
        };
        if probe.passes(&engine, &memory, block, run)? {
            return Ok(memory);
        }
        tried.push(memory);
    }
    Err(ShimError::NoRescueStream { tried: tried.len() })
}

#[cfg(test)]
mod tests {
    use shm_protocol::handshake::{BlockRegion, Copier};

    use super::*;

    fn worker(regions: Vec<BlockRegion>) -> handshake::WorkerHello {
        handshake::WorkerHello {
            shards: 1,
            blocks: 4,
            regions,
            copy: Copier::Sidecar,
            ..handshake::WorkerHello::default()
        }
    }

    fn region(fd: u32, offset: u64) -> BlockRegion {
        BlockRegion { fd, offset, stride: 128, bytes: 100 }
    }

    fn allocation(base: u64, bytes: u64) -> Exported {
        Exported { handle: [base as u8; 64], base, bytes }
    }

    #[test]
    fn storages_in_one_allocation_name_it_once() {
        let mut worker = worker(vec![region(0, 0), region(1, 8), region(2, 0)]);
        let exports = [allocation(0x1000, 4096), allocation(0x9000, 492), allocation(0x1000, 4096)];
        let placed = place_regions(&mut worker, &[0x1000, 0x9000, 0x1800], &exports).unwrap();
        assert_eq!(placed.iter().map(|allocation| allocation.base).collect::<Vec<_>>(), [0x1000, 0x9000]);
        let places: Vec<_> = worker.regions.iter().map(|region| (region.fd, region.offset)).collect();
        assert_eq!(places, [(0, 0), (1, 8), (0, 0x800)]);
    }

    #[test]
    fn a_region_outside_its_allocation_is_refused() {
        for (offset, bytes, fits) in
            [(0, 484, true), (0, 483, false), (8, 484, false), (u64::MAX, 484, false)]
        {
            let mut worker = worker(vec![region(0, offset)]);
            let placed = place_regions(&mut worker, &[0x1000], &[allocation(0x1000, bytes)]);
            assert_eq!(placed.is_ok(), fits, "{offset} {bytes}");
        }
    }
}
