//! The fetching side of one connection to a peer: asks go out, blocks follow.
//!
//! Blocks follow in the order of their asks, except those of standing asks: the peer sends all blocks of such
//! an ask once they are committed, between those of other asks. While only such asks are left, the stream waits
//! for a block or for a new piece, whichever is first.

use std::collections::VecDeque;
use std::hash::Hasher;
use std::os::fd::AsFd;
use std::sync::Arc;

use twox_hash::XxHash3_64;

use super::standing::{PeerWait, StandingPieces};
use crate::sync::read_clock;
use crate::transport::tcp::TcpShared;
use crate::transport::tcp::data_path::ConnectedFetch;
use crate::transport::tcp::frame::{ASKS_MAX, Block, BlockStatus, Frame};
use crate::transport::tcp::link::PeerLink;
use crate::transport::tcp::piece::{FetchPiece, PIECE_BYTES_MAX, RunningFetch};
use crate::transport::tcp::wire::{Broken, CHUNK_BYTES, Wire};
use crate::transport::{FetchFault, FetchStage};

/// Maximum bytes asked for and not received: two pieces, so the peer looks up the second while it sends the
/// first.
const ASKED_BYTES_MAX: u64 = 2 * PIECE_BYTES_MAX;

pub(in crate::transport::tcp) struct Exchange {
    shared: Arc<TcpShared>,
    link: Arc<PeerLink>,
    wire: Wire,
    /// Pieces asked for, in order. The range of the first one begins at the next block.
    flight: VecDeque<FetchPiece>,
    /// Pieces whose asks stand at the peer. At its first block a piece becomes the first one of `flight`.
    standing: StandingPieces,
    /// Bytes of blocks in `flight`, asked for and not received.
    asked_bytes: u64,
}

/// The result of receiving a block's bytes.
enum Received {
    /// All have arrived; their checksum.
    Whole(u64),
    /// The fetch was stopped, with so many of them left.
    Stopped(FetchFault, usize),
}

// === impl Exchange ===

impl ConnectedFetch for Exchange {
    fn quiet(&mut self) -> bool {
        matches!(self.wire.readable(), Ok(false))
    }

    /// Asks for `piece` and waiting pieces behind it, as far as there is room, until all have come.
    fn run_piece(&mut self, piece: FetchPiece) -> Result<(), FetchFault> {
        let mut next = Some(piece);
        loop {
            while let Some(piece) = next.take().or_else(|| self.more()) {
                self.ask_piece(piece)?;
            }
            if self.flight.is_empty() {
                if self.standing.is_empty() {
                    return Ok(());
                }
                if !self.wait_for_block()? {
                    continue;
                }
            }
            let block = self.block()?;
            self.begin_standing(&block);
            let next = self.flight.front().filter(|piece| piece.begins_with(block.ticket, block.index));
            let Some(piece) = next else {
                return Err(FetchFault::Malformed("a block that was not requested"));
            };
            let (index, fetch) = (piece.indexes.start, Arc::clone(&piece.fetch));
            let (label, offset) = fetch.blocks[index as usize];
            if block.status == BlockStatus::Whole && block.bytes != label.bytes {
                return Err(FetchFault::Malformed("a block of another size than was requested"));
            }
            self.asked_bytes -= u64::from(label.bytes);
            self.advance();
            self.take_block(&fetch, &block, offset)?;
        }
    }

    fn hang_up(self: Box<Self>) -> Vec<FetchPiece> {
        self.flight.into_iter().chain(self.standing.into_pieces()).collect()
    }
}

impl Exchange {
    pub(in crate::transport::tcp) fn new(
        number: usize,
        shared: Arc<TcpShared>,
        link: Arc<PeerLink>,
        wire: Wire,
    ) -> Self {
        let standing = StandingPieces::new(number, &link);
        Self { shared, link, wire, flight: VecDeque::new(), standing, asked_bytes: 0 }
    }

    /// The next waiting piece, if there is room to ask for it.
    fn more(&self) -> Option<FetchPiece> {
        let room = self.flight.len() < ASKS_MAX && self.asked_bytes + PIECE_BYTES_MAX <= ASKED_BYTES_MAX;
        let next = room.then(|| self.link.try_next()).flatten();
        next.or_else(|| self.standing.next())
    }

    fn ask_piece(&mut self, piece: FetchPiece) -> Result<(), FetchFault> {
        let ask = piece.ask_frame();
        if piece.stands() {
            self.standing.push(piece);
        } else {
            self.asked_bytes += piece.asked_bytes();
            self.flight.push_back(piece);
        }
        let sent = self.wire.send_frame(&ask, false, read_clock() + self.shared.config.limits.progress);
        sent.map_err(|broken| broken.fault(FetchStage::Progress))
    }

    /// Waits until the peer has sent something, while all asks stand. Returns false at a new piece.
    fn wait_for_block(&mut self) -> Result<bool, FetchFault> {
        let broken = |broken: Broken| broken.fault(FetchStage::FirstByte);
        let last = self.standing.end(self.shared.config.limits.first_byte).expect("one stands");
        let Some(PeerWait { bell, until }) = self.standing.wait(last)? else { return Ok(false) };
        self.wire.wait_readable(true, bell.as_deref().map(AsFd::as_fd), until).map_err(broken)?;
        self.standing.hush();
        let readable = self.wire.readable().map_err(broken)?;
        if !readable && read_clock() >= last {
            return Err(FetchFault::Timeout(FetchStage::FirstByte));
        }
        Ok(readable)
    }

    /// Makes a standing piece the first one to receive, if this is its first block.
    fn begin_standing(&mut self, block: &Block) {
        if let Some(piece) = self.standing.take(block.ticket, block.index) {
            self.asked_bytes += piece.asked_bytes();
            self.flight.push_front(piece);
        }
    }

    fn block(&mut self) -> Result<Block, FetchFault> {
        let frame = self.wire.frame(read_clock() + self.shared.config.limits.first_byte);
        match frame.map_err(|broken| broken.fault(FetchStage::FirstByte))? {
            Frame::Block(block) => Ok(block),
            Frame::Refused(refusal) => Err(FetchFault::Refused(refusal)),
            other => Err(FetchFault::Malformed(other.unexpected())),
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
    fn take_block(&mut self, fetch: &RunningFetch, block: &Block, offset: u64) -> Result<(), FetchFault> {
        let (index, len) = (block.index, block.bytes as usize);
        if let Some(fault) = block.status.missing() {
            fetch.end_waiting(index, fault);
            return Ok(());
        }
        if !fetch.begin_block(index) {
            return self.discard(len);
        }
        match self.receive(fetch, offset, len) {
            Ok(Received::Whole(checksum)) => {
                let verified = checksum == block.checksum;
                fetch.end_block(index, if verified { Ok(checksum) } else { Err(FetchFault::Corrupt) });
                Ok(())
            }
            Ok(Received::Stopped(fault, rest)) => {
                fetch.end_block(index, Err(fault));
                self.discard(rest)
            }
            Err(broken) => {
                let fault = match broken {
                    Broken::Eof => FetchFault::Short,
                    broken => broken.fault(FetchStage::Progress),
                };
                // The peer has left, so the stream was stopped.
                let cause = if self.link.is_open() { fault } else { FetchFault::Stopped };
                fetch.end_block(index, Err(fetch.stopped().unwrap_or(cause)));
                Err(fault)
            }
        }
    }

    /// Fills the slot; each part is summed while it is in the cache.
    fn receive(&mut self, fetch: &RunningFetch, offset: u64, len: usize) -> Result<Received, Broken> {
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
                read_clock() + self.shared.config.limits.progress,
            )?;
            let bytes = self.shared.blocks.bytes_at(place, chunk).expect("checked when posted");
            hash.write(bytes);
            at += chunk;
        }
        Ok(Received::Whole(hash.finish()))
    }

    /// Reads and drops bytes of an ended block: the stream stays usable.
    fn discard(&mut self, len: usize) -> Result<(), FetchFault> {
        let mut left = len;
        while left > 0 {
            let chunk = left.min(CHUNK_BYTES);
            let discarded = self.wire.discard(chunk, read_clock() + self.shared.config.limits.progress);
            discarded.map_err(|broken| broken.fault(FetchStage::Progress))?;
            left -= chunk;
        }
        Ok(())
    }
}
