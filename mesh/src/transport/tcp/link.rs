//! A peer on the fetching side: pieces waiting for its streams, and the state of the streams.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::piece::Piece;
use super::{Limits, cut};
use crate::sync::{lock, now};
use crate::transport::{BootId, Fault, Peer, PeerNumber};

/// Maximum blocks waiting for a peer's streams: 32 GiB of 2 MiB.
pub(super) const WAITING_MAX: usize = 1 << 14;

pub(in crate::transport) struct Link {
    pub(in crate::transport) number: PeerNumber,
    pub(in crate::transport) peer: Peer,
    state: Mutex<State>,
    bell: Condvar,
}

struct State {
    /// False once the peer has left.
    open: bool,
    waiting: VecDeque<Piece>,
    waiting_blocks: usize,
    /// The connection of each stream.
    streams: Vec<Option<Arc<TcpStream>>>,
    /// True if the streams' threads run.
    started: bool,
    /// The last failure, until the next answer, and the end of the pause after it.
    failed: Option<(Fault, Instant)>,
    pause: Duration,
    /// The life of the last answer, until a failure.
    boot: Option<BootId>,
}

/// The next step of a stream.
pub(super) enum Next {
    Piece(Piece),
    /// End these pieces: the peer cannot be reached.
    Fail(Vec<Piece>, Fault),
    /// No piece came for long.
    Idle,
    /// End the thread: the peer has left.
    Closed,
}

// === impl Link ===

impl Link {
    pub(super) fn new(number: PeerNumber, peer: Peer, streams: usize) -> Self {
        let state = State {
            open: true,
            waiting: VecDeque::new(),
            waiting_blocks: 0,
            streams: vec![None; streams],
            started: false,
            failed: None,
            pause: Duration::ZERO,
            boot: None,
        };
        Self { number, peer, state: Mutex::new(state), bell: Condvar::new() }
    }

    /// Starts the threads, once. Returns false if that failed; the next call tries again.
    pub(super) fn start(&self, start: impl FnOnce() -> bool) -> bool {
        let mut state = lock(&self.state);
        state.started = state.started || start();
        state.started
    }

    /// Adds waiting pieces. Returns them as the error if there is no room, or the peer has left.
    pub(super) fn push(&self, pieces: Vec<Piece>) -> Result<(), Vec<Piece>> {
        let mut state = lock(&self.state);
        let blocks: usize = pieces.iter().map(Piece::blocks).sum();
        if !state.open || state.waiting_blocks + blocks > WAITING_MAX {
            return Err(pieces);
        }
        state.waiting_blocks += blocks;
        let wake = pieces.len().min(state.streams.len());
        state.waiting.extend(pieces);
        // A stream in its pause takes no piece, so all streams must wake.
        let all = state.failed.is_some();
        drop(state);
        if all {
            self.bell.notify_all()
        } else {
            (0..wake).for_each(|_| self.bell.notify_one())
        }
        Ok(())
    }

    /// A waiting piece, if there is one.
    pub(in crate::transport) fn try_next(&self) -> Option<Piece> {
        lock(&self.state).pop()
    }

    /// Waits for the next step of a stream.
    pub(super) fn next(&self, connected: bool, idle: Duration) -> Next {
        let mut state = lock(&self.state);
        let until = now() + idle;
        loop {
            let now = now();
            if !state.open {
                return Next::Closed;
            }
            let pausing = state.failed.filter(|(_, end)| !connected && now < *end);
            match pausing {
                // A connected stream may take the pieces.
                Some((_, end)) if state.connected() => {
                    state = self.wait(state, end - now);
                    continue;
                }
                Some((fault, _)) if !state.waiting.is_empty() => {
                    state.waiting_blocks = 0;
                    return Next::Fail(state.waiting.drain(..).collect(), fault);
                }
                _ => {}
            }
            if let Some(piece) = state.pop() {
                return Next::Piece(piece);
            }
            if now >= until {
                return Next::Idle;
            }
            state = self.wait(state, until - now);
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, limit: Duration) -> MutexGuard<'a, State> {
        self.bell.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Records a connected stream. Returns the life that answered if it is new; `None` if the peer has left
    /// meanwhile.
    pub(super) fn connected(
        &self,
        stream: usize,
        socket: Arc<TcpStream>,
        boot: BootId,
    ) -> Option<Option<BootId>> {
        let mut state = lock(&self.state);
        if !state.open {
            return None;
        }
        state.streams[stream] = Some(socket);
        let news = state.boot.replace(boot) != Some(boot);
        Some(news.then_some(boot))
    }

    /// Records the end of a stream's connection.
    pub(super) fn disconnected(&self, stream: usize) {
        lock(&self.state).streams[stream] = None;
    }

    /// Ends the pause after an answer: the next failure is a first one.
    pub(in crate::transport) fn answered(&self) {
        let mut state = lock(&self.state);
        state.failed = None;
        state.pause = Duration::ZERO;
    }

    /// Records a failed stream. Streams without a connection pause.
    pub(super) fn failed(&self, fault: Fault, limits: &Limits) {
        let mut state = lock(&self.state);
        let now = now();
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
    pub(in crate::transport) fn open(&self) -> bool {
        lock(&self.state).open
    }

    /// Ends everything after the peer has left: streams are cut, and waiting pieces end.
    pub(super) fn close(&self) {
        let mut state = lock(&self.state);
        state.open = false;
        state.waiting_blocks = 0;
        state.streams.iter().flatten().for_each(|stream| cut(stream));
        let waiting: Vec<_> = state.waiting.drain(..).collect();
        drop(state);
        self.bell.notify_all();
        waiting.iter().for_each(|piece| piece.end_all(Fault::Stopped));
    }
}

// === impl State ===

impl State {
    fn connected(&self) -> bool {
        self.streams.iter().any(Option::is_some)
    }

    /// The next piece of a fetch that is not stopped.
    fn pop(&mut self) -> Option<Piece> {
        loop {
            let piece = self.waiting.pop_front()?;
            self.waiting_blocks -= piece.blocks();
            if piece.wanted() {
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
        let link = Link::new(PeerNumber(1), peer, 8);
        let (back_off_min, back_off_max) = (Duration::from_secs(60), Duration::from_secs(3600));
        let limits = Limits { back_off_min, back_off_max, ..Limits::default() };
        let fail = || (0..8).for_each(|_| link.failed(Fault::Short, &limits));
        let pause_is_over = || lock(&link.state).failed = Some((Fault::Short, now()));
        let pause = || lock(&link.state).pause;
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
