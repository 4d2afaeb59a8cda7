//! One stream to a peer on the fetching side, and its thread.

use std::sync::Arc;

use crate::transport::tcp::data_path::ConnectedFetch;
use crate::transport::tcp::link::{NextWork, PeerLink};
use crate::transport::tcp::piece::FetchPiece;
use crate::transport::tcp::{TcpShared, greeting};
use crate::transport::{FetchFault, TransportEvent};

/// A stream, connected or not.
pub(super) struct FetchStream {
    number: usize,
    shared: Arc<TcpShared>,
    link: Arc<PeerLink>,
    connected: Option<Box<dyn ConnectedFetch>>,
}

// === impl FetchStream ===

impl FetchStream {
    pub(super) fn new(number: usize, shared: Arc<TcpShared>, link: Arc<PeerLink>) -> Self {
        Self { number, shared, link, connected: None }
    }

    /// Runs until the peer has left.
    pub(super) fn run_stream(mut self) {
        let idle = self.shared.config.limits.idle;
        loop {
            match self.link.next(self.number, self.connected.is_some(), idle) {
                NextWork::Piece(piece) => self.carry(piece),
                NextWork::Fail(pieces, fault) => pieces.iter().for_each(|piece| piece.end_all(fault)),
                NextWork::Idle => drop(self.hang_up()),
                NextWork::Closed => break,
            }
        }
        self.hang_up();
    }

    /// Disconnects. Returns the pieces asked for and not ended.
    fn hang_up(&mut self) -> Vec<FetchPiece> {
        let Some(connected) = self.connected.take() else { return Vec::new() };
        self.link.disconnected(self.number);
        connected.hang_up()
    }

    /// Fetches a piece, and pieces waiting meanwhile.
    fn carry(&mut self, piece: FetchPiece) {
        // The peer closes an idle stream: no failure.
        if self.connected.as_mut().is_some_and(|connected| !connected.quiet()) {
            self.hang_up();
        }
        if self.connected.is_none() {
            match self.connect_stream() {
                Ok(connected) => self.connected = Some(connected),
                Err(fault) => {
                    self.note_failure(fault);
                    return piece.end_all(fault);
                }
            }
        }
        let Some(connected) = &mut self.connected else { return };
        if let Err(fault) = connected.run_piece(piece) {
            // The peer has left, so the stream was stopped.
            let fault = if self.link.is_open() { fault } else { FetchFault::Stopped };
            let owed = self.hang_up();
            self.note_failure(fault);
            owed.iter().for_each(|piece| piece.end_all(fault));
        }
    }

    fn connect_stream(&self) -> Result<Box<dyn ConnectedFetch>, FetchFault> {
        let (wire, boot) = greeting::connect_member(&self.shared, &self.link)?;
        let news = self
            .link
            .note_connected(self.number, Arc::clone(wire.stream()), boot)
            .ok_or(FetchFault::Stopped)?;
        let connected = self.shared.data_path.fetch(self.number, &self.shared, &self.link, wire);
        if connected.is_err() {
            self.link.disconnected(self.number);
        } else if let Some(boot) = news {
            self.shared.report_event(TransportEvent::Connected { peer: self.link.number, boot });
        }
        connected
    }

    fn note_failure(&self, fault: FetchFault) {
        self.link.note_failure(fault, &self.shared.config.limits);
        // The end of a lease is not a failure.
        if self.link.is_open() && fault != FetchFault::Absent {
            self.shared.count_fault(fault);
            self.shared.report_event(TransportEvent::PeerDown { peer: self.link.number, fault });
        }
    }
}
