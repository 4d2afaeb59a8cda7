//! The engine's stream: stores of fence words and waits for load words in its order, and the proof that
//! copies on another stream pass it.
//!
//! The only unsafe code of this crate beside `c/raw.rs`. A stream is borrowed for one call, by the handle of
//! that call.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use copy_engine::CopyError;
use copy_engine::cuda::{CudaError, DeviceMemory, Gpu, GpuStream, Registered, StreamEvent};
use cudarc::driver::sys;
use rustix::fs::MemfdFlags;
use shm_protocol::layout;
use shm_protocol::region::{Access, Region};
use shm_protocol::session::SessionMemory;

use crate::error::ShimError;

/// The longest time of a rescue copy of one block while the engine's stream waits: a thousand times its usual
/// time.
const PROBE: Duration = Duration::from_secs(1);
/// Memory is locked in whole pages; the first page of a probe holds its word.
const PAGE: usize = 4096;

/// The pages of a session with the words of streams. They must outlive every enqueued write or wait.
#[derive(Debug)]
pub(crate) struct SessionWords {
    header: Registered,
    loads: Registered,
}

/// A stream of the engine, for the length of one call.
#[derive(Debug)]
pub(crate) struct EngineStream {
    stream: GpuStream,
    handle: u64,
}

/// A word for the engine's stream to wait for, and a block's bytes for the copies behind the wait and beside
/// it.
#[derive(Debug)]
pub(crate) struct Probe {
    file: OwnedFd,
    region: Arc<Region>,
    locked: Registered,
    block_bytes: usize,
    /// The word's next value.
    round: u64,
}

// === impl SessionWords ===

impl SessionWords {
    /// Locks the pages and shows them to the GPU.
    pub(crate) fn new(gpu: &Arc<Gpu>, memory: &SessionMemory) -> Result<Self, CudaError> {
        let region = memory.shared_region();
        let header = Registered::new(gpu, &region, 0, layout::HEADER_BYTES)?;
        let loads = Registered::new(gpu, &region, layout::LOAD_WORDS, layout::LOAD_WORDS_BYTES)?;
        Ok(Self { header, loads })
    }
}

// === impl EngineStream ===

impl EngineStream {
    /// Returns the stream with this handle; 0 is the default stream.
    pub(crate) fn borrow(gpu: &Arc<Gpu>, handle: u64) -> Self {
        // SAFETY: the engine states in this very call that the handle is its current stream, on the GPU whose primary
        // context it uses (the one `gpu` retains); the value ends with the call, and no handle is kept to be borrowed again.
        let stream = unsafe { GpuStream::borrow(gpu, handle) };
        Self { stream, handle }
    }

    /// Enqueues the store of a fence word of the header page.
    pub(crate) fn write_fence(&self, words: &SessionWords, word: usize, step: u64) -> Result<(), CudaError> {
        // SYNC POINT(step): the driver makes the KV written before visible with the word.
        self.stream.write_word(&words.header, word, step)
    }

    /// Enqueues the wait for the first `cuts` cuts of load `op`.
    pub(crate) fn wait_for_load(&self, words: &SessionWords, op: u64, cuts: usize) -> Result<(), CudaError> {
        // SYNC POINT(load word): pairs with the sidecar's stream, or with `Link::deliver`.
        self.stream.wait_at_least(&words.loads, layout::load_word(op), layout::load_word_value(op, cuts))
    }

    /// Returns a mark behind all work enqueued so far.
    pub(crate) fn record(&self) -> Result<StreamEvent, CudaError> {
        self.stream.record()
    }

    /// Moves a mark behind all work enqueued so far.
    pub(crate) fn mark(&self, event: &StreamEvent) -> Result<(), CudaError> {
        self.stream.mark(event)
    }

    /// The stream's handle.
    pub(crate) fn handle(&self) -> u64 {
        self.handle
    }

    /// Blocks until all enqueued work has passed.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        self.stream.synchronize()
    }
}

// === impl Probe ===

impl Probe {
    pub(crate) fn new(gpu: &Arc<Gpu>, block_bytes: u64) -> Result<Self, ShimError> {
        let block_bytes = block_bytes as usize;
        let bytes = PAGE + block_bytes.next_multiple_of(PAGE);
        let file = rustix::fs::memfd_create("pillion-probe", MemfdFlags::CLOEXEC).map_err(CopyError::from)?;
        rustix::fs::ftruncate(&file, bytes as u64).map_err(CopyError::from)?;
        let region = Region::map(file.as_fd(), bytes, Access::ReadWrite).map_err(CopyError::from)?;
        let region = Arc::new(region);
        let locked = Registered::new(gpu, &region, 0, bytes)?;
        Ok(Self { file, region, locked, block_bytes, round: 0 })
    }

    /// Returns true if `memory` can copy into block `block` while `stream` waits with copies queued behind
    /// the wait. `run` is the address and the length of that block's first run of bytes in GPU memory. No one
    /// may use the block yet.
    pub(crate) fn passes(
        &mut self,
        stream: &EngineStream,
        memory: &DeviceMemory,
        block: u32,
        run: (u64, u64),
    ) -> Result<bool, ShimError> {
        self.round += 1;
        stream.stream.wait_at_least(&self.locked, 0, self.round)?;
        let parked = self.copies_behind(stream, run);
        let passed = parked.map(|()| self.copies_beside(memory, block));
        // Released in every case, to let the stream go on: only this process uses the word.
        self.region.word64(0).store(self.round, Ordering::Release);
        stream.synchronize()?;
        passed?
    }

    /// Enqueues a copy in and a copy out on the engine's stream.
    fn copies_behind(&self, stream: &EngineStream, run: (u64, u64)) -> Result<(), ShimError> {
        let (device, bytes) = (run.0, (run.1 as usize).min(self.block_bytes));
        let host = self.region.bytes_at(PAGE, bytes).expect("a probe holds a block").as_ptr();
        let handle = stream.handle as sys::CUstream;
        // SAFETY: `device` begins a run of at least `bytes` in the engine's live KV memory, which no one uses
        // yet; `host` is locked memory of this probe, which lives until `passes` has seen the stream idle;
        // the handle is as in `borrow`.
        let inward = unsafe { sys::cuMemcpyHtoDAsync_v2(device, host.cast(), bytes, handle) };
        // SAFETY: as above; no Rust reference to the probe's bytes exists.
        let outward = unsafe { sys::cuMemcpyDtoHAsync_v2(host.cast(), device, bytes, handle) };
        match [inward, outward].into_iter().find(|result| *result != sys::CUresult::CUDA_SUCCESS) {
            None => Ok(()),
            Some(error) => Err(ShimError::Probe(error as u32)),
        }
    }

    /// Returns true if a copy by `memory` ends while the stream waits. Another thread makes the copy, since
    /// it may not return.
    fn copies_beside(&self, memory: &DeviceMemory, block: u32) -> Result<bool, ShimError> {
        let (sender, ended) = channel();
        std::thread::scope(|scope| {
            let copier = std::thread::Builder::new().name("pillion-probe".into());
            let copier = copier.spawn_scoped(scope, move || {
                let copied = memory.load_block(&self.file, PAGE as u64, block);
                // The receiver waits, or has given up.
                let _ = sender.send(copied);
            });
            copier.map_err(|error| ShimError::no_thread(&error))?;
            let copied = ended.recv_timeout(PROBE);
            // The scope joins the thread; its copy ends at the latest once the word is released.
            self.region.word64(0).store(self.round, Ordering::Release);
            match copied {
                Ok(copied) => Ok(copied.map(|()| true)?),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(false),
            }
        })
    }
}
