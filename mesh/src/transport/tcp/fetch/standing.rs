//! Pieces whose asks stand at the peer, on one connection.
//!
//! While only such asks are left, their stream waits for the peer or for a new piece, whichever is first.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shm_protocol::wait;

use crate::sync::read_clock;
use crate::transport::FetchFault;
use crate::transport::tcp::frame::STANDING_MAX;
use crate::transport::tcp::link::PeerLink;
use crate::transport::tcp::piece::FetchPiece;

/// Shortest wait for a piece of another stream.
const SHORTEST: Duration = Duration::from_millis(1);

pub(in crate::transport) struct StandingPieces {
    /// The number of the stream.
    number: usize,
    link: Arc<PeerLink>,
    pieces: Vec<FetchPiece>,
    /// Signalled at each new piece; made with the first wait.
    bell: Option<Arc<OwnedFd>>,
}

/// A wait of a stream for its peer.
pub(in crate::transport) struct PeerWait {
    /// To be waited for beside the peer; `None`: no ask stands.
    pub(in crate::transport) bell: Option<Arc<OwnedFd>>,
    pub(in crate::transport) until: Instant,
}

// === impl StandingPieces ===

impl StandingPieces {
    pub(in crate::transport) fn new(number: usize, link: &Arc<PeerLink>) -> Self {
        Self { number, link: Arc::clone(link), pieces: Vec::new(), bell: None }
    }

    pub(in crate::transport) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// The next waiting standing piece, if there is room to ask for it. Standing asks take none of the room of others.
    pub(in crate::transport) fn next(&self) -> Option<FetchPiece> {
        (self.pieces.len() < STANDING_MAX).then(|| self.link.try_standing(self.number)).flatten()
    }

    pub(in crate::transport) fn push(&mut self, piece: FetchPiece) {
        self.pieces.push(piece);
    }

    /// Takes the piece that begins with this block: the peer has granted it.
    pub(in crate::transport) fn take(&mut self, ticket: u64, first: u32) -> Option<FetchPiece> {
        let at = self.pieces.iter().position(|piece| piece.begins_with(ticket, first))?;
        Some(self.pieces.swap_remove(at))
    }

    /// Returns the time by which the peer answers all asks, with `limit` for each beyond its fetch; `None`: no ask stands.
    pub(in crate::transport) fn end(&self, limit: Duration) -> Option<Instant> {
        self.pieces.iter().map(|piece| piece.fetch.until() + limit).min()
    }

    /// Returns a wait until `until`, or the time to take a piece of another stream. `None`: there is a bell only since now, and a piece
    /// may have come before.
    pub(in crate::transport) fn wait(&mut self, until: Instant) -> Result<Option<PeerWait>, FetchFault> {
        if self.is_empty() {
            return Ok(Some(PeerWait { bell: None, until }));
        }
        let Some(bell) = self.bell.clone() else {
            let made = wait::make_eventfd();
            let bell = made.map_err(|errno| FetchFault::Peer(std::io::Error::from(errno).kind()))?;
            self.link.set_bell(self.number, self.bell.insert(Arc::new(bell)));
            return Ok(None);
        };
        let shared = self.link.next_shared();
        let until = shared.map_or(until, |from| until.min(from.max(read_clock() + SHORTEST)));
        Ok(Some(PeerWait { bell: Some(bell), until }))
    }

    /// Ends the bell's signal.
    pub(in crate::transport) fn hush(&self) {
        self.bell.iter().for_each(|bell| _ = rustix::io::read(bell, &mut [0u8; 8]));
    }

    pub(in crate::transport) fn into_pieces(self) -> Vec<FetchPiece> {
        self.pieces
    }
}
