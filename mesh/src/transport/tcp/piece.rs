//! What is under way of a fetch, and the pieces that its streams share.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::Shared;
use super::frame::{Ask, Frame};
use crate::sync::now;
use crate::transport::{Done, Fault, Label, Up};

/// Bytes of a piece: enough that asking costs nothing, few enough that the streams end together.
pub(in crate::transport) const PIECE_BYTES_MAX: u64 = 4 << 20;
/// States of a block. A slot is given back by who leaves `WAITING` or `ARRIVING` for `ENDED`, thus once.
const WAITING: u8 = 0;
const ARRIVING: u8 = 1;
const ENDED: u8 = 2;

/// A fetch under way.
pub(in crate::transport) struct Running {
    pub(in crate::transport) ticket: u64,
    pub(in crate::transport) blocks: Vec<(Label, u64)>,
    states: Box<[AtomicU8]>,
    left: AtomicUsize,
    until: Instant,
    /// Why it ends early, and since when.
    stopped: OnceLock<(Fault, Instant)>,
    shared: Arc<Shared>,
}

/// Blocks of a fetch that one stream asks for together.
pub(in crate::transport) struct Piece {
    pub(in crate::transport) fetch: Arc<Running>,
    pub(in crate::transport) indexes: Range<u32>,
}

// === impl Running ===

impl Running {
    /// All of its blocks wait.
    pub(in crate::transport) fn begin_all(
        shared: &Arc<Shared>,
        ticket: u64,
        blocks: Vec<(Label, u64)>,
        until: Instant,
    ) -> Arc<Self> {
        Arc::new(Self {
            ticket,
            states: blocks.iter().map(|_| AtomicU8::new(WAITING)).collect(),
            left: AtomicUsize::new(blocks.len()),
            blocks,
            until,
            stopped: OnceLock::new(),
            shared: Arc::clone(shared),
        })
    }

    /// When it ends at the latest.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// The block's bytes are about to be written. False if it has ended.
    pub(in crate::transport) fn begin(&self, index: u32) -> bool {
        self.change(index, WAITING, ARRIVING)
    }

    /// A block that has not begun ends.
    pub(in crate::transport) fn end_waiting(&self, index: u32, fault: Fault) {
        if self.change(index, WAITING, ENDED) {
            self.tell(index, Err(fault));
        }
    }

    /// A block whose bytes were written ends.
    pub(in crate::transport) fn end(&self, index: u32, result: Result<u64, Fault>) {
        assert!(self.change(index, ARRIVING, ENDED), "one stream writes a block");
        self.tell(index, result);
    }

    /// All ends early: what has not begun now, the rest when its stream looks.
    pub(in crate::transport) fn stop(&self, fault: Fault) {
        let _ = self.stopped.set((fault, now()));
        (0..self.blocks.len() as u32).for_each(|index| self.end_waiting(index, fault));
    }

    pub(in crate::transport) fn stopped(&self) -> Option<Fault> {
        self.stopped.get().map(|(fault, _)| *fault)
    }

    #[cfg(feature = "rdma")]
    pub(in crate::transport) fn stopped_at(&self) -> Option<Instant> {
        self.stopped.get().map(|(_, at)| *at)
    }

    fn change(&self, index: u32, from: u8, to: u8) -> bool {
        // SYNC POINT(slot): who ends a block has all that its stream wrote; the caller hears of it through `tell`.
        self.states[index as usize].compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn tell(&self, index: u32, result: Result<u64, Fault>) {
        // Before it is told: who hears of the last one may use the ticket again.
        self.left.fetch_sub(1, Ordering::AcqRel);
        self.shared.tell(Up::Done(Done { ticket: self.ticket, index, result }));
    }

    pub(super) fn ended(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }
}

// === impl Piece ===

impl Piece {
    pub(in crate::transport) fn new(fetch: &Arc<Running>, indexes: Range<u32>) -> Self {
        Self { fetch: Arc::clone(fetch), indexes }
    }

    pub(in crate::transport) fn blocks(&self) -> usize {
        self.indexes.len()
    }

    /// Whether the fetch still wants it.
    pub(super) fn wanted(&self) -> bool {
        self.fetch.stopped().is_none()
    }

    /// Ends what is left of it. Nothing writes its slots any more.
    pub(super) fn end_all(&self, fault: Fault) {
        for index in self.indexes.clone() {
            if self.fetch.change(index, ARRIVING, ENDED) {
                self.fetch.tell(index, Err(self.fetch.stopped().unwrap_or(fault)));
            } else {
                self.fetch.end_waiting(index, fault);
            }
        }
    }

    fn labels(&self) -> &[(Label, u64)] {
        &self.fetch.blocks[self.indexes.start as usize..self.indexes.end as usize]
    }

    pub(in crate::transport) fn bytes(&self) -> u64 {
        self.labels().iter().map(|(label, _)| u64::from(label.bytes)).sum()
    }

    pub(in crate::transport) fn ask(&self) -> Frame {
        let labels = self.labels().iter().map(|(label, _)| *label).collect();
        Frame::Ask(Ask { ticket: self.fetch.ticket, first: self.indexes.start, labels })
    }
}
