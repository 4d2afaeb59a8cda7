//! More streams for many small copies: to everything else they are one.
//!
//! - What the lanes copy begins behind all that was enqueued on the first stream, and that stream goes on behind all of it.
//! - Blocks whose runs are long have none: one stream fills the wire.

use std::sync::Arc;

use super::{CudaError, Gpu, GpuStream, StreamEvent};

/// Streams that share small copies, the first among them: one moves scattered pieces of 32 KiB at 42 GB/s, four at 48.
const LANES: usize = 4;
/// Runs that are shorter gain from it.
const SMALL_BYTES: u64 = 128 << 10;

/// The streams beside the first.
#[derive(Debug)]
pub(super) struct Lanes {
    begin: StreamEvent,
    beside: Vec<(GpuStream, StreamEvent)>,
}

// === impl Lanes ===

impl Lanes {
    /// Those for blocks of such runs.
    pub(super) fn new(gpu: &Arc<Gpu>, mut run_bytes: impl Iterator<Item = u64>) -> Result<Self, CudaError> {
        let count = if run_bytes.any(|bytes| bytes < SMALL_BYTES) { LANES - 1 } else { 0 };
        let lane = |_| Ok((GpuStream::new(gpu)?, StreamEvent::new(gpu)?));
        Ok(Self { begin: StreamEvent::new(gpu)?, beside: (0..count).map(lane).collect::<Result<_, _>>()? })
    }

    /// Lets `copies` be enqueued on several streams as if they were `first` alone, also where that fails on the way.
    pub(super) fn share(
        &self,
        first: &GpuStream,
        copies: impl FnOnce(&[&GpuStream]) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let mut streams = vec![first];
        if !self.beside.is_empty() {
            first.mark(&self.begin)?;
        }
        for (stream, _) in &self.beside {
            stream.wait_for(&self.begin)?;
            streams.push(stream);
        }
        let copied = copies(&streams);
        for (stream, end) in &self.beside {
            stream.mark(end)?;
            first.wait_for(end)?;
        }
        copied
    }
}
