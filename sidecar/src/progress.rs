//! How far the start of a large pool has come, while engines are served already: for `/readyz` and the log.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Written by the data thread, read by the admin pages.
#[derive(Debug)]
pub struct Progress {
    segments: u64,
    opened: AtomicU64,
    blocks: AtomicU64,
    finished: AtomicBool,
}

// === impl Progress ===

impl Progress {
    /// Of a pool of `segments`.
    pub fn new(segments: u64) -> Self {
        let zero = || AtomicU64::new(0);
        Self { segments, opened: zero(), blocks: zero(), finished: AtomicBool::new(false) }
    }

    /// So many segments are in service now, with so many blocks of earlier lives.
    pub fn opened(&self, segments: u64, blocks: u64) {
        self.opened.store(segments, Ordering::Relaxed);
        self.blocks.store(blocks, Ordering::Relaxed);
    }

    /// Nothing more is to come.
    pub fn finish(&self) {
        self.finished.store(true, Ordering::Relaxed);
    }

    /// One line while something is still to come.
    pub fn text(&self) -> Option<String> {
        if self.finished.load(Ordering::Relaxed) {
            return None;
        }
        let (opened, blocks) = (self.opened.load(Ordering::Relaxed), self.blocks.load(Ordering::Relaxed));
        Some(format!("pool: {opened} of {} segments in service, {blocks} blocks adopted", self.segments))
    }
}
