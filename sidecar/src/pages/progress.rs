//! Progress of the start of a large pool and of the recovery of disks, for `/readyz` and the log; engines are
//! already served.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Written by the data thread, read by the admin pages.
#[derive(Debug)]
pub struct StartProgress {
    segments: u64,
    opened: AtomicU64,
    blocks: AtomicU64,
    finished: AtomicBool,
    disks: DisksProgress,
}

#[derive(Debug, Default)]
struct DisksProgress {
    segments: AtomicU64,
    read: AtomicU64,
    blocks: AtomicU64,
    recovering: AtomicBool,
}

// === impl StartProgress ===

impl StartProgress {
    /// The progress of a pool of `segments` segments.
    pub fn new(segments: u64) -> Self {
        let zero = || AtomicU64::new(0);
        let finished = AtomicBool::new(false);
        Self { segments, opened: zero(), blocks: zero(), finished, disks: DisksProgress::default() }
    }

    /// Sets the number of segments in service, and of blocks of earlier lives in them.
    pub fn opened(&self, segments: u64, blocks: u64) {
        self.opened.store(segments, Ordering::Relaxed);
        self.blocks.store(blocks, Ordering::Relaxed);
    }

    /// Marks the pool as completely in service.
    pub fn finish(&self) {
        self.finished.store(true, Ordering::Relaxed);
    }

    /// Sets the number of segments on disks, of read segments, and of blocks of earlier lives in them.
    pub fn recovered(&self, segments: u64, read: u64, blocks: u64, recovering: bool) {
        self.disks.segments.store(segments, Ordering::Relaxed);
        self.disks.read.store(read, Ordering::Relaxed);
        self.disks.blocks.store(blocks, Ordering::Relaxed);
        self.disks.recovering.store(recovering, Ordering::Relaxed);
    }

    /// One or two lines while the start is unfinished.
    pub fn progress_text(&self) -> Option<String> {
        let word = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let pool = (!self.finished.load(Ordering::Relaxed)).then(|| {
            let (opened, blocks) = (word(&self.opened), word(&self.blocks));
            format!("pool: {opened} of {} segments in service, {blocks} blocks found", self.segments)
        });
        let disks = self.disks.recovering.load(Ordering::Relaxed).then(|| {
            let DisksProgress { segments, read, blocks, .. } = &self.disks;
            format!("ssd: {} of {} segments read, {} blocks found", word(read), word(segments), word(blocks))
        });
        let lines: Vec<String> = pool.into_iter().chain(disks).collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    }
}
