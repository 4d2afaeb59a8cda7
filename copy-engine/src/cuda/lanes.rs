//! Additional streams for many small copies; callers see one stream.
//!
//! - Copies of the lanes begin behind everything enqueued on the first stream so far, and that stream goes on
//!   behind all of them.
//! - Blocks with long runs have no lanes: one stream fills the wire.

use std::sync::Arc;

use super::{CudaError, Event, Gpu, Stream};

/// Streams for small copies, including the first: one moves scattered pieces of 32 KiB at 42 GB/s, four at
/// 48.
const LANES: usize = 4;
/// Shorter runs gain from lanes.
const SMALL_BYTES: u64 = 128 << 10;

/// The streams beside the first.
#[derive(Debug)]
pub(super) struct Lanes {
    begin: Event,
    beside: Vec<(Stream, Event)>,
}

// === impl Lanes ===

impl Lanes {
    /// The lanes for blocks with such runs.
    pub(super) fn new(gpu: &Arc<Gpu>, mut run_bytes: impl Iterator<Item = u64>) -> Result<Self, CudaError> {
        let count = if run_bytes.any(|bytes| bytes < SMALL_BYTES) { LANES - 1 } else { 0 };
        let lane = |_| Ok((Stream::new(gpu)?, Event::new(gpu)?));
        Ok(Self { begin: Event::new(gpu)?, beside: (0..count).map(lane).collect::<Result<_, _>>()? })
    }

    /// Lets `copies` enqueue on several streams as if they were `first` alone, even if it fails partway.
    pub(super) fn share(
        &self,
        first: &Stream,
        copies: impl FnOnce(&[&Stream]) -> Result<(), CudaError>,
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
