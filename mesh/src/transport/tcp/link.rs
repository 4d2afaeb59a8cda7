//! A peer on the fetching side: pieces waiting for its streams, and the state of the streams.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use shm_protocol::wait;

use super::piece::FetchPiece;
use super::{TcpLimits, cut};
use crate::sync::{lock_mutex, read_clock};
use crate::transport::{BootId, FetchFault, Peer, PeerNumber};

/// Maximum blocks waiting for a peer's streams: 32 GiB of 2 MiB.
pub(super) const WAITING_MAX: usize = 1 << 14;
/// A standing piece that its stream has not taken after this time, as one without a connection, is for any.
const SHARED_AFTER: Duration = Duration::from_millis(20);
/// Shortest wait of a stream for a piece.
const SHORTEST: Duration = Duration::from_millis(1);

pub(in crate::transport) struct PeerLink {
    pub(in crate::transport) number: PeerNumber,
    pub(in crate::transport) peer: Peer,
    state: Mutex<LinkState>,
    bell: Condvar,
}

struct LinkState {
    /// False once the peer has left.
    open: bool,
    waiting: VecDeque<FetchPiece>,
    /// Pieces of standing fetches, each with its stream and the time from which any stream may take it.
    standing: VecDeque<(usize, Instant, FetchPiece)>,
    /// Blocks of `waiting` and `standing`.
    waiting_blocks: usize,
    /// The stream of the next standing piece.
    next_stream: usize,
    /// The connection of each stream.
    streams: Vec<Option<Arc<TcpStream>>>,
    /// Signalled at each new piece, for streams waiting for blocks of standing asks.
    bells: Vec<Option<Arc<OwnedFd>>>,
    /// True if the streams' threads run.
    started: bool,
    /// The last failure, until the next answer, and the end of the pause after it.
    failed: Option<(FetchFault, Instant)>,
    pause: Duration,
    /// The life of the last answer, until a failure.
    boot: Option<BootId>,
}

/// The next step of a stream.
pub(super) enum NextWork {
    Piece(FetchPiece),
    /// End these pieces: the peer cannot be reached.
    Fail(Vec<FetchPiece>, FetchFault),
    /// No piece came for long.
    Idle,
    /// End the thread: the peer has left.
    Closed,
}

// === impl PeerLink ===

impl PeerLink {
    pub(super) fn new(number: PeerNumber, peer: Peer, streams: usize) -> Self {
        let state = LinkState {
            open: true,
            waiting: VecDeque::new(),
            standing: VecDeque::new(),
            waiting_blocks: 0,
            next_stream: 0,
            streams: vec![None; streams],
            bells: vec![None; streams],
            started: false,
            failed: None,
            pause: Duration::ZERO,
            boot: None,
        };
        Self { number, peer, state: Mutex::new(state), bell: Condvar::new() }
    }

    /// Starts the threads, once. Returns false if that failed; the next call tries again.
    pub(super) fn start_threads(&self, start: impl FnOnce() -> bool) -> bool {
        let mut state = lock_mutex(&self.state);
        state.started = state.started || start();
        state.started
    }

    /// Adds waiting pieces. Returns them as the error if there is no room, or the peer has left.
    pub(super) fn push_pieces(&self, pieces: Vec<FetchPiece>) -> Result<(), Vec<FetchPiece>> {
        let mut state = lock_mutex(&self.state);
        let blocks: usize = pieces.iter().map(FetchPiece::block_count).sum();
        if !state.open || state.waiting_blocks + blocks > WAITING_MAX {
            return Err(pieces);
        }
        state.waiting_blocks += blocks;
        let wake = pieces.len().min(state.streams.len());
        // A stream in its pause takes no piece, and a standing piece has a stream: all streams must wake.
        let all = state.failed.is_some() || pieces.iter().any(FetchPiece::stands);
        for piece in pieces {
            if piece.stands() {
                state.push_standing(piece);
            } else {
                state.waiting.push_back(piece);
            }
        }
        state.bells.iter().flatten().for_each(wait::signal_eventfd);
        drop(state);
        if all {
            self.bell.notify_all()
        } else {
            (0..wake).for_each(|_| self.bell.notify_one())
        }
        Ok(())
    }

    /// A waiting piece of an ordinary fetch, if there is one.
    pub(in crate::transport) fn try_next(&self) -> Option<FetchPiece> {
        lock_mutex(&self.state).pop()
    }

    /// A standing piece for this stream, if there is one.
    pub(super) fn try_standing(&self, stream: usize) -> Option<FetchPiece> {
        lock_mutex(&self.state).pop_standing(stream, read_clock())
    }

    /// The earliest time for any stream to take a waiting standing piece of another one.
    pub(super) fn next_shared(&self) -> Option<Instant> {
        lock_mutex(&self.state).standing.iter().map(|(_, from, _)| *from).min()
    }

    /// Has `bell` signalled at each new piece, until the stream's connection ends.
    pub(super) fn set_bell(&self, stream: usize, bell: &Arc<OwnedFd>) {
        lock_mutex(&self.state).bells[stream] = Some(Arc::clone(bell));
    }

    /// Waits for the next step of a stream.
    pub(super) fn next(&self, stream: usize, connected: bool, idle: Duration) -> NextWork {
        let mut state = lock_mutex(&self.state);
        let until = read_clock() + idle;
        loop {
            let now = read_clock();
            if !state.open {
                return NextWork::Closed;
            }
            let pausing = state.failed.filter(|(_, end)| !connected && now < *end);
            match pausing {
                // A connected stream may take the pieces.
                Some((_, end)) if state.is_connected() => {
                    state = self.wait_bell(state, end - now);
                    continue;
                }
                Some((fault, _)) if state.waiting_blocks > 0 => {
                    return NextWork::Fail(state.drain_pieces(), fault);
                }
                _ => {}
            }
            if let Some(piece) = state.pop().or_else(|| state.pop_standing(stream, now)) {
                return NextWork::Piece(piece);
            }
            if now >= until {
                return NextWork::Idle;
            }
            let shared = state.standing.iter().map(|(_, from, _)| *from).min();
            let wait = shared.map_or(until, |from| until.min(from));
            state = self.wait_bell(state, wait.saturating_duration_since(now).max(SHORTEST));
        }
    }

    fn wait_bell<'a>(&self, state: MutexGuard<'a, LinkState>, limit: Duration) -> MutexGuard<'a, LinkState> {
        self.bell.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Records a connected stream. Returns the life that answered if it is new; `None` if the peer has left
    /// meanwhile.
    pub(super) fn note_connected(
        &self,
        stream: usize,
        socket: Arc<TcpStream>,
        boot: BootId,
    ) -> Option<Option<BootId>> {
        let mut state = lock_mutex(&self.state);
        if !state.open {
            return None;
        }
        state.streams[stream] = Some(socket);
        let news = state.boot.replace(boot) != Some(boot);
        Some(news.then_some(boot))
    }

    /// Records the end of a stream's connection.
    pub(super) fn disconnected(&self, stream: usize) {
        let mut state = lock_mutex(&self.state);
        (state.streams[stream], state.bells[stream]) = (None, None);
    }

    /// Ends the pause after an answer: the next failure is a first one.
    pub(in crate::transport) fn answered(&self) {
        let mut state = lock_mutex(&self.state);
        state.failed = None;
        state.pause = Duration::ZERO;
    }

    /// Records a failed stream. Streams without a connection pause.
    pub(super) fn note_failure(&self, fault: FetchFault, limits: &TcpLimits) {
        let mut state = lock_mutex(&self.state);
        let now = read_clock();
        // All streams fail together at one fault of the peer.
        if state.failed.is_none_or(|(_, end)| end <= now) {
            state.pause = (state.pause * 2).clamp(limits.back_off_min, limits.back_off_max);
        }
        state.failed = Some((fault, now + state.pause));
        state.boot = None;
        drop(state);
        // Waiting pieces may have no stream to take them now.
        self.bell.notify_all();
    }

    /// True while the peer is a member.
    pub(in crate::transport) fn is_open(&self) -> bool {
        lock_mutex(&self.state).open
    }

    /// Ends everything after the peer has left: streams are cut, and waiting pieces end.
    pub(super) fn close(&self) {
        let mut state = lock_mutex(&self.state);
        state.open = false;
        state.streams.iter().flatten().for_each(|stream| cut(stream));
        let waiting = state.drain_pieces();
        drop(state);
        self.bell.notify_all();
        waiting.iter().for_each(|piece| piece.end_all(FetchFault::Stopped));
    }
}

// === impl LinkState ===

impl LinkState {
    fn is_connected(&self) -> bool {
        self.streams.iter().any(Option::is_some)
    }

    fn drain_pieces(&mut self) -> Vec<FetchPiece> {
        self.waiting_blocks = 0;
        self.waiting.drain(..).chain(self.standing.drain(..).map(|(.., piece)| piece)).collect()
    }

    /// Adds a standing piece. The streams get these in turn, so all streams carry the blocks of one commit.
    fn push_standing(&mut self, piece: FetchPiece) {
        self.standing.push_back((self.next_stream, read_clock() + SHARED_AFTER, piece));
        self.next_stream = (self.next_stream + 1) % self.streams.len();
    }

    /// The next standing piece for a stream, of an unstopped fetch.
    fn pop_standing(&mut self, stream: usize, now: Instant) -> Option<FetchPiece> {
        loop {
            let at = self.standing.iter().position(|(of, from, _)| *of == stream || *from <= now)?;
            let (.., piece) = self.standing.remove(at).expect("found above");
            self.waiting_blocks -= piece.block_count();
            if piece.is_wanted() {
                return Some(piece);
            }
        }
    }

    /// The next piece of a fetch that is not stopped.
    fn pop(&mut self) -> Option<FetchPiece> {
        loop {
            let piece = self.waiting.pop_front()?;
            self.waiting_blocks -= piece.block_count();
            if piece.is_wanted() {
                return Some(piece);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::NodeId;

    #[test]
    fn streams_that_fail_at_one_moment_are_one_failure() {
        let peer =
            Peer { node: NodeId::new("peer").unwrap(), boot: None, address: "127.0.0.1:1".parse().unwrap() };
        let link = PeerLink::new(PeerNumber(1), peer, 8);
        let (back_off_min, back_off_max) = (Duration::from_secs(60), Duration::from_secs(3600));
        let limits = TcpLimits { back_off_min, back_off_max, ..TcpLimits::default() };
        let fail = || (0..8).for_each(|_| link.note_failure(FetchFault::Short, &limits));
        let pause_is_over = || lock_mutex(&link.state).failed = Some((FetchFault::Short, read_clock()));
        let pause = || lock_mutex(&link.state).pause;
        fail();
        assert_eq!(pause(), limits.back_off_min);
        pause_is_over();
        fail();
        assert_eq!(pause(), limits.back_off_min * 2, "a further failure");
        link.answered();
        fail();
        assert_eq!(pause(), limits.back_off_min, "a first one again");
    }
}
