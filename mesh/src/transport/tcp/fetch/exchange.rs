//! The fetching side of one connection to a peer: asks go out, blocks follow.

use std::collections::VecDeque;
use std::hash::Hasher;
use std::sync::Arc;

use twox_hash::XxHash3_64;

use crate::sync::now;
use crate::transport::tcp::Shared;
use crate::transport::tcp::carriage::Fetching;
use crate::transport::tcp::frame::{ASKS_MAX, Block, Frame, Status};
use crate::transport::tcp::link::Link;
use crate::transport::tcp::piece::{PIECE_BYTES_MAX, Piece, Running};
use crate::transport::tcp::wire::{Broken, CHUNK_BYTES, Wire};
use crate::transport::{Fault, Stage};

/// Maximum bytes asked for and not received: two pieces, so the peer looks up the second while it sends the
/// first.
const ASKED_BYTES_MAX: u64 = 2 * PIECE_BYTES_MAX;

pub(in crate::transport::tcp) struct Exchange {
    shared: Arc<Shared>,
    link: Arc<Link>,
    wire: Wire,
    /// Pieces asked for, in order. The range of the first one begins at the next block.
    flight: VecDeque<Piece>,
    /// Bytes of blocks asked for and not received.
    asked_bytes: u64,
}

/// The result of receiving a block's bytes.
enum Received {
    /// All have arrived; their checksum.
    Whole(u64),
    /// The fetch was stopped, with so many of them left.
    Stopped(Fault, usize),
}

// === impl Exchange ===

impl Fetching for Exchange {
    fn quiet(&mut self) -> bool {
        matches!(self.wire.readable(), Ok(false))
    }

    /// Asks for `piece` and waiting pieces behind it, as far as there is room, until all have come.
    fn run(&mut self, piece: Piece) -> Result<(), Fault> {
        let mut next = Some(piece);
        loop {
            while let Some(piece) = next.take().or_else(|| self.more()) {
                self.ask(piece)?;
            }
            let Some(piece) = self.flight.front() else { return Ok(()) };
            let (index, fetch) = (piece.indexes.start, Arc::clone(&piece.fetch));
            let block = self.block()?;
            let (label, offset) = fetch.blocks[index as usize];
            if (block.ticket, block.index) != (fetch.ticket, index) {
                return Err(Fault::Malformed("a block that was not requested"));
            }
            if block.status == Status::Whole && block.bytes != label.bytes {
                return Err(Fault::Malformed("a block of another size than was requested"));
            }
            self.asked_bytes -= u64::from(label.bytes);
            self.advance();
            self.take(&fetch, &block, offset)?;
        }
    }

    fn hang_up(self: Box<Self>) -> Vec<Piece> {
        self.flight.into()
    }
}

impl Exchange {
    pub(in crate::transport::tcp) fn new(shared: Arc<Shared>, link: Arc<Link>, wire: Wire) -> Self {
        Self { shared, link, wire, flight: VecDeque::new(), asked_bytes: 0 }
    }

    /// The next waiting piece, if there is room to ask for it.
    fn more(&self) -> Option<Piece> {
        let room = self.flight.len() < ASKS_MAX && self.asked_bytes + PIECE_BYTES_MAX <= ASKED_BYTES_MAX;
        room.then(|| self.link.try_next()).flatten()
    }

    fn ask(&mut self, piece: Piece) -> Result<(), Fault> {
        self.asked_bytes += piece.bytes();
        let ask = piece.ask();
        self.flight.push_back(piece);
        let sent = self.wire.send_frame(&ask, false, now() + self.shared.config.limits.progress);
        sent.map_err(|broken| broken.fault(Stage::Progress))
    }

    fn block(&mut self) -> Result<Block, Fault> {
        let frame = self.wire.frame(now() + self.shared.config.limits.first_byte);
        match frame.map_err(|broken| broken.fault(Stage::FirstByte))? {
            Frame::Block(block) => Ok(block),
            Frame::Refused(refusal) => Err(Fault::Refused(refusal)),
            other => Err(Fault::Malformed(other.unexpected())),
        }
    }

    /// Moves on to the next block.
    fn advance(&mut self) {
        let Some(piece) = self.flight.front_mut() else { return };
        piece.indexes.start += 1;
        if piece.indexes.is_empty() {
            self.flight.pop_front();
            self.link.answered();
        }
    }

    /// Handles a Block frame and its bytes.
    fn take(&mut self, fetch: &Running, block: &Block, offset: u64) -> Result<(), Fault> {
        let (index, len) = (block.index, block.bytes as usize);
        if let Some(fault) = block.status.missing() {
            fetch.end_waiting(index, fault);
            return Ok(());
        }
        if !fetch.begin(index) {
            return self.discard(len);
        }
        match self.receive(fetch, offset, len) {
            Ok(Received::Whole(checksum)) => {
                let verified = checksum == block.checksum;
                fetch.end(index, if verified { Ok(checksum) } else { Err(Fault::Corrupt) });
                Ok(())
            }
            Ok(Received::Stopped(fault, rest)) => {
                fetch.end(index, Err(fault));
                self.discard(rest)
            }
            Err(broken) => {
                let fault = match broken {
                    Broken::Eof => Fault::Short,
                    broken => broken.fault(Stage::Progress),
                };
                // The peer has left, so the stream was stopped.
                let cause = if self.link.open() { fault } else { Fault::Stopped };
                fetch.end(index, Err(fetch.stopped().unwrap_or(cause)));
                Err(fault)
            }
        }
    }

    /// Fills the slot; each part is summed while it is in the cache.
    fn receive(&mut self, fetch: &Running, offset: u64, len: usize) -> Result<Received, Broken> {
        let mut hash = XxHash3_64::new();
        let mut at = 0;
        while at < len {
            if let Some(fault) = fetch.stopped() {
                return Ok(Received::Stopped(fault, len - at));
            }
            let chunk = CHUNK_BYTES.min(len - at);
            let place = offset + at as u64;
            self.wire.receive(
                &self.shared.blocks,
                place,
                chunk,
                now() + self.shared.config.limits.progress,
            )?;
            let bytes = self.shared.blocks.bytes(place, chunk).expect("checked when posted");
            hash.write(bytes);
            at += chunk;
        }
        Ok(Received::Whole(hash.finish()))
    }

    /// Reads and drops bytes of an ended block: the stream stays usable.
    fn discard(&mut self, len: usize) -> Result<(), Fault> {
        let mut left = len;
        while left > 0 {
            let chunk = left.min(CHUNK_BYTES);
            let discarded = self.wire.discard(chunk, now() + self.shared.config.limits.progress);
            discarded.map_err(|broken| broken.fault(Stage::Progress))?;
            left -= chunk;
        }
        Ok(())
    }
}
