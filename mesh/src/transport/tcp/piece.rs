//! A running fetch of blocks from a peer, and its pieces, shared by the streams to the peer.
//!
//! Each block of a fetch first waits, then arrives (a stream writes its bytes into its slot), and then has
//! ended. The caller gives the slot back once the end of the block is reported. An early stop of the fetch
//! therefore ends waiting blocks at once, but an arriving block only when its stream notices the stop or
//! breaks: until then the stream may still write into the slot.
//!
//! Several threads may try to end one block. Each tries an atomic change of the block's state; only one
//! change succeeds, and only its thread reports the end.

use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::TcpShared;
use super::frame::{AskFrame, Frame};
use crate::sync::read_clock;
use crate::transport::{FetchDone, FetchFault, Label, StandingTerms, TransportEvent};

/// Maximum bytes of a piece: enough to make the cost of an ask negligible, and few enough for all streams of
/// a fetch to end at nearly the same time.
pub(in crate::transport) const PIECE_BYTES_MAX: u64 = 4 << 20;
/// State of a block without a byte in its slot.
const WAITING: u8 = 0;
/// State of a block while one stream writes into its slot.
const ARRIVING: u8 = 1;
/// State of an ended block. The thread of this change reports the end.
const ENDED: u8 = 2;

/// A running fetch.
pub(in crate::transport) struct RunningFetch {
    pub(in crate::transport) ticket: u64,
    pub(in crate::transport) blocks: Vec<(Label, u64)>,
    states: Box<[AtomicU8]>,
    /// Number of blocks without an end yet.
    left: AtomicUsize,
    /// Latest time of its end.
    until: Instant,
    standing: Option<StandingTerms>,
    /// The fault and the time of its early stop.
    stopped: OnceLock<(FetchFault, Instant)>,
    shared: Arc<TcpShared>,
}

/// The blocks of a fetch in one ask. One stream carries them.
pub(in crate::transport) struct FetchPiece {
    pub(in crate::transport) fetch: Arc<RunningFetch>,
    pub(in crate::transport) indexes: Range<u32>,
}

// === impl RunningFetch ===

impl RunningFetch {
    /// Returns a fetch with all its blocks waiting.
    pub(in crate::transport) fn begin_all(
        shared: &Arc<TcpShared>,
        ticket: u64,
        blocks: Vec<(Label, u64)>,
        standing: Option<StandingTerms>,
        until: Instant,
    ) -> Arc<Self> {
        Arc::new(Self {
            ticket,
            states: blocks.iter().map(|_| AtomicU8::new(WAITING)).collect(),
            left: AtomicUsize::new(blocks.len()),
            blocks,
            until,
            standing,
            stopped: OnceLock::new(),
            shared: Arc::clone(shared),
        })
    }

    /// Returns the latest time of its end.
    pub(super) fn until(&self) -> Instant {
        self.until
    }

    /// Marks a block as arriving, before a stream writes its bytes. Returns false if the block has ended.
    pub(in crate::transport) fn begin_block(&self, index: u32) -> bool {
        self.change(index, WAITING, ARRIVING)
    }

    /// Ends a waiting block; no effect on any other block.
    pub(in crate::transport) fn end_waiting(&self, index: u32, fault: FetchFault) {
        if self.change(index, WAITING, ENDED) {
            self.report_end(index, Err(fault));
        }
    }

    /// Ends an arriving block. The caller is its stream, and writes no more of its bytes.
    pub(in crate::transport) fn end_block(&self, index: u32, result: Result<u64, FetchFault>) {
        assert!(self.change(index, ARRIVING, ENDED), "one stream writes a block");
        self.report_end(index, result);
    }

    /// Stops the fetch early: waiting blocks end now, with this fault. An arriving block ends once its stream
    /// notices the stop. The fault of the first stop counts.
    pub(in crate::transport) fn stop_early(&self, fault: FetchFault) {
        let _ = self.stopped.set((fault, read_clock()));
        (0..self.blocks.len() as u32).for_each(|index| self.end_waiting(index, fault));
    }

    /// Returns the fault of the early stop, if there was one.
    pub(in crate::transport) fn stopped(&self) -> Option<FetchFault> {
        self.stopped.get().map(|(fault, _)| *fault)
    }

    #[cfg(feature = "rdma")]
    pub(in crate::transport) fn stopped_at(&self) -> Option<Instant> {
        self.stopped.get().map(|(_, at)| *at)
    }

    fn change(&self, index: u32, from: u8, to: u8) -> bool {
        // SYNC POINT(slot): the thread that ends a block acquires all bytes that its stream wrote.
        // `report_event` hands them on to the caller.
        self.states[index as usize].compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    fn report_end(&self, index: u32, result: Result<u64, FetchFault>) {
        // The count falls before the report: after the report of the last end the caller may use the ticket
        // again.
        self.left.fetch_sub(1, Ordering::AcqRel);
        self.shared.report_event(TransportEvent::Done(FetchDone { ticket: self.ticket, index, result }));
    }

    pub(super) fn has_ended(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }
}

// === impl FetchPiece ===

impl FetchPiece {
    pub(in crate::transport) fn new(fetch: &Arc<RunningFetch>, indexes: Range<u32>) -> Self {
        Self { fetch: Arc::clone(fetch), indexes }
    }

    pub(in crate::transport) fn block_count(&self) -> usize {
        self.indexes.len()
    }

    /// Returns true unless the fetch was stopped.
    pub(super) fn is_wanted(&self) -> bool {
        self.fetch.stopped().is_none()
    }

    /// Ends its waiting and its arriving blocks. No stream may write into their slots any more.
    pub(super) fn end_all(&self, fault: FetchFault) {
        for index in self.indexes.clone() {
            if self.fetch.change(index, ARRIVING, ENDED) {
                self.fetch.report_end(index, Err(self.fetch.stopped().unwrap_or(fault)));
            } else {
                self.fetch.end_waiting(index, fault);
            }
        }
    }

    fn labels(&self) -> &[(Label, u64)] {
        &self.fetch.blocks[self.indexes.start as usize..self.indexes.end as usize]
    }

    pub(in crate::transport) fn asked_bytes(&self) -> u64 {
        self.labels().iter().map(|(label, _)| u64::from(label.bytes)).sum()
    }

    pub(in crate::transport) fn ask_frame(&self) -> Frame {
        let labels = self.labels().iter().map(|(label, _)| *label).collect();
        let ask = AskFrame { ticket: self.fetch.ticket, first: self.indexes.start, labels };
        match self.fetch.standing {
            Some(terms) => {
                let place = terms.place + self.indexes.start;
                Frame::Stand(StandingTerms { place, ..terms }, ask)
            }
            None => Frame::Ask(ask),
        }
    }

    /// True if its ask stands at the peer until the blocks are committed.
    pub(in crate::transport) fn stands(&self) -> bool {
        self.fetch.standing.is_some()
    }

    /// True if a Block with this ticket and index is its next one.
    pub(super) fn begins_with(&self, ticket: u64, index: u32) -> bool {
        (self.fetch.ticket, self.indexes.start) == (ticket, index)
    }
}
