//! Streams: ordered writes of words, waits for words, and events.

use std::sync::Arc;

use cudarc::driver::sys;

use super::{CudaError, Gpu, Registered};

/// A queue of the GPU, owned or borrowed from the engine.
#[derive(Debug)]
pub struct Stream {
    gpu: Arc<Gpu>,
    handle: sys::CUstream,
    owned: bool,
}

/// A position in a stream.
#[derive(Debug)]
pub struct Event {
    gpu: Arc<Gpu>,
    handle: sys::CUevent,
}

// SAFETY: handles may be used from any thread; the driver locks by itself.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}
// SAFETY: as above.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

// === impl Stream ===

impl Stream {
    /// A stream that waits for no other.
    pub fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        gpu.bind()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: `handle` is valid to be written.
        CudaError::check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut handle, flags) })?;
        Ok(Self { gpu: Arc::clone(gpu), handle, owned: true })
    }

    /// The engine's stream; 0 is its default one.
    ///
    /// # Safety
    /// `handle` is a stream of `gpu`'s primary context and is not destroyed while the result lives.
    pub unsafe fn borrow(gpu: &Arc<Gpu>, handle: u64) -> Self {
        Self { gpu: Arc::clone(gpu), handle: handle as sys::CUstream, owned: false }
    }

    /// The GPU of the stream.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    pub(super) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// Enqueues the store of a word; everything enqueued before is visible with it.
    pub fn write(&self, words: &Registered, offset: usize, value: u64) -> Result<(), CudaError> {
        let address = words.device_address(offset);
        // SAFETY: the address is registered memory, aligned to 8 bytes by the callers' layouts (the driver checks too).
        let enqueued = unsafe { sys::cuStreamWriteValue64_v2(self.handle, address, value, 0) };
        CudaError::check("cuStreamWriteValue64", enqueued)
    }

    /// Enqueues a wait until a word is at least `value`, compared cyclically.
    pub fn wait_at_least(&self, words: &Registered, offset: usize, value: u64) -> Result<(), CudaError> {
        let address = words.device_address(offset);
        let flags = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: as in `write`.
        let enqueued = unsafe { sys::cuStreamWaitValue64_v2(self.handle, address, value, flags) };
        CudaError::check("cuStreamWaitValue64", enqueued)
    }

    /// An event behind everything enqueued so far.
    pub fn record(&self) -> Result<Event, CudaError> {
        let event = Event::new(&self.gpu)?;
        self.mark(&event)?;
        Ok(event)
    }

    /// Moves an event behind everything enqueued so far.
    pub fn mark(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both handles live.
        CudaError::check("cuEventRecord", unsafe { sys::cuEventRecord(event.handle, self.handle) })
    }

    /// Lets later work of this stream begin once the event's current position was reached.
    pub(super) fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both handles live.
        CudaError::check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.handle, event.handle, 0) })
    }

    /// Blocks until everything enqueued has passed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the handle lives.
        CudaError::check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.handle) })
    }

    /// True if everything enqueued has passed. Fails with the error of a copy, if one failed.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        // SAFETY: the handle lives.
        match unsafe { sys::cuStreamQuery(self.handle) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => CudaError::check("cuStreamQuery", result).map(|()| true),
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned && self.gpu.bind().is_ok() {
            // SAFETY: made by `new` and destroyed once; the driver lets enqueued work end.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.handle) };
        }
    }
}

// === impl Event ===

impl Event {
    pub(super) fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        gpu.bind()?;
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: `handle` is valid to be written.
        CudaError::check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut handle, flags) })?;
        Ok(Self { gpu: Arc::clone(gpu), handle })
    }

    /// True if its position in the stream was reached.
    pub fn passed(&self) -> Result<bool, CudaError> {
        // SAFETY: the handle lives.
        match unsafe { sys::cuEventQuery(self.handle) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => CudaError::check("cuEventQuery", result).map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            // SAFETY: made by `new` and destroyed once; the driver keeps it until the streams waiting for it
            // have passed.
            let _ = unsafe { sys::cuEventDestroy_v2(self.handle) };
        }
    }
}
