//! A fetch under way, and its pieces, which the streams share.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::Shared;
use super::frame::{Ask, Frame};
use crate::sync::now;
use crate::transport::{Done, Fault, Label, Up};

/// Maximum bytes of a piece: enough to make the cost of an ask negligible, few enough for the streams to end
/// together.
pub(in crate::transport) const PIECE_BYTES_MAX: u64 = 4 << 20;
/// States of a block. Its slot is given back by the change from `WAITING` or `ARRIVING` to `ENDED`, thus
/// once.
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
    /// The fault of its early end, and its time.
    stopped: OnceLock<(Fault, Instant)>,
    shared: Arc<Shared>,
}

/// Blocks of a fetch in one ask.
pub(in crate::transport) struct Piece {
    pub(in crate::transport) fetch: Arc<Running>,
    pub(in crate::transport) indexes: Range<u32>,
}

// === impl Running ===

impl Running {
    /// A fetch with all its blocks waiting.
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

    /// The time of its end at the latest.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// Marks a block as arriving, before its bytes are written. Returns false if it has ended.
    pub(in crate::transport) fn begin(&self, index: u32) -> bool {
        self.change(index, WAITING, ARRIVING)
    }

    /// Ends a block before its begin.
    pub(in crate::transport) fn end_waiting(&self, index: u32, fault: Fault) {
        if self.change(index, WAITING, ENDED) {
            self.tell(index, Err(fault));
        }
    }

    /// Ends a block after its bytes were written.
    pub(in crate::transport) fn end(&self, index: u32, result: Result<u64, Fault>) {
        assert!(self.change(index, ARRIVING, ENDED), "one stream writes a block");
        self.tell(index, result);
    }

    /// Ends everything early: waiting blocks now, arriving ones when their stream looks.
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
        // SYNC POINT(slot): the end of a block acquires all bytes its stream wrote; `tell` hands it to the
        // caller.
        self.states[index as usize].compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn tell(&self, index: u32, result: Result<u64, Fault>) {
        // Before the call: after the last end the caller may use the ticket again.
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

    /// True if the fetch is not stopped.
    pub(super) fn wanted(&self) -> bool {
        self.fetch.stopped().is_none()
    }

    /// Ends the rest of its blocks. No stream may write their slots any more.
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
