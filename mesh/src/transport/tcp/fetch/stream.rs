//! One stream to a peer on the fetching side, and its thread.

use std::sync::Arc;

use crate::transport::tcp::carriage::Fetching;
use crate::transport::tcp::link::{Link, Next};
use crate::transport::tcp::piece::Piece;
use crate::transport::tcp::{Shared, greeting};
use crate::transport::{Fault, Up};

/// A stream, connected or not.
pub(super) struct Stream {
    number: usize,
    shared: Arc<Shared>,
    link: Arc<Link>,
    connected: Option<Box<dyn Fetching>>,
}

// === impl Stream ===

impl Stream {
    pub(super) fn new(number: usize, shared: Arc<Shared>, link: Arc<Link>) -> Self {
        Self { number, shared, link, connected: None }
    }

    /// Runs until the peer has left.
    pub(super) fn run(mut self) {
        let idle = self.shared.config.limits.idle;
        loop {
            match self.link.next(self.connected.is_some(), idle) {
                Next::Piece(piece) => self.carry(piece),
                Next::Fail(pieces, fault) => pieces.iter().for_each(|piece| piece.end_all(fault)),
                Next::Idle => drop(self.hang_up()),
                Next::Closed => break,
            }
        }
        self.hang_up();
    }

    /// Disconnects. Returns the pieces asked for and not ended.
    fn hang_up(&mut self) -> Vec<Piece> {
        let Some(connected) = self.connected.take() else { return Vec::new() };
        self.link.disconnected(self.number);
        connected.hang_up()
    }

    /// Fetches a piece, and pieces waiting meanwhile.
    fn carry(&mut self, piece: Piece) {
        // The peer closes an idle stream: no failure.
        if self.connected.as_mut().is_some_and(|connected| !connected.quiet()) {
            self.hang_up();
        }
        if self.connected.is_none() {
            match self.connect() {
                Ok(connected) => self.connected = Some(connected),
                Err(fault) => {
                    self.failed(fault);
                    return piece.end_all(fault);
                }
            }
        }
        let Some(connected) = &mut self.connected else { return };
        if let Err(fault) = connected.run(piece) {
            // The peer has left, so the stream was stopped.
            let fault = if self.link.open() { fault } else { Fault::Stopped };
            let owed = self.hang_up();
            self.failed(fault);
            owed.iter().for_each(|piece| piece.end_all(fault));
        }
    }

    fn connect(&self) -> Result<Box<dyn Fetching>, Fault> {
        let (wire, boot) = greeting::connect(&self.shared, &self.link)?;
        let news = self.link.connected(self.number, Arc::clone(wire.stream()), boot).ok_or(Fault::Stopped)?;
        let connected = self.shared.carriage.fetch(self.number, &self.shared, &self.link, wire);
        if connected.is_err() {
            self.link.disconnected(self.number);
        } else if let Some(boot) = news {
            self.shared.tell(Up::Connected { peer: self.link.number, boot });
        }
        connected
    }

    fn failed(&self, fault: Fault) {
        self.link.failed(fault, &self.shared.config.limits);
        // The end of a lease is not a failure.
        if self.link.open() && fault != Fault::Absent {
            self.shared.count_fault(fault);
            self.shared.tell(Up::PeerDown { peer: self.link.number, fault });
        }
    }
}
