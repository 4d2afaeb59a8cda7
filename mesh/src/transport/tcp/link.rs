//! A peer as it is fetched from: what waits for its streams, and how they fare.

use std::collections::VecDeque;
use std::net::TcpStream;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::piece::Piece;
use super::{Limits, cut};
use crate::sync::{lock, now};
use crate::transport::{BootId, Fault, Peer, PeerNumber};

/// Blocks that may wait for a peer's streams: 32 GiB of 2 MiB.
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
    /// Whether the streams' threads run.
    started: bool,
    /// The last failure, until something is answered again, and when it may be tried again.
    failed: Option<(Fault, Instant)>,
    pause: Duration,
    /// The life that answered last, until a failure.
    boot: Option<BootId>,
}

/// What a stream does next.
pub(super) enum Next {
    Piece(Piece),
    /// End these: the peer cannot be reached.
    Fail(Vec<Piece>, Fault),
    /// Nothing came for long.
    Idle,
    /// End: the peer has left.
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

    /// Starts the threads, once. False where that failed: it is tried again the next time.
    pub(super) fn start(&self, start: impl FnOnce() -> bool) -> bool {
        let mut state = lock(&self.state);
        state.started = state.started || start();
        state.started
    }

    /// Lets pieces wait for a stream; back where there is no room, or the peer has left.
    pub(super) fn push(&self, pieces: Vec<Piece>) -> Result<(), Vec<Piece>> {
        let mut state = lock(&self.state);
        let blocks: usize = pieces.iter().map(Piece::blocks).sum();
        if !state.open || state.waiting_blocks + blocks > WAITING_MAX {
            return Err(pieces);
        }
        state.waiting_blocks += blocks;
        let wake = pieces.len().min(state.streams.len());
        state.waiting.extend(pieces);
        // One that pauses after a failure takes nothing, so that all must hear of it.
        let all = state.failed.is_some();
        drop(state);
        if all {
            self.bell.notify_all()
        } else {
            (0..wake).for_each(|_| self.bell.notify_one())
        }
        Ok(())
    }

    /// A piece, if one waits.
    pub(in crate::transport) fn try_next(&self) -> Option<Piece> {
        lock(&self.state).pop()
    }

    /// Waits for what a stream is to do.
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
                // Another stream may do better.
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

    /// A stream is connected. The life that answered, if that is news; `None` if the peer has left meanwhile.
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

    /// A stream is not connected any more.
    pub(super) fn disconnected(&self, stream: usize) {
        lock(&self.state).streams[stream] = None;
    }

    /// Something was answered: the next failure is a first one.
    pub(in crate::transport) fn answered(&self) {
        let mut state = lock(&self.state);
        state.failed = None;
        state.pause = Duration::ZERO;
    }

    /// A stream failed: what is not connected pauses.
    pub(super) fn failed(&self, fault: Fault, limits: &Limits) {
        let mut state = lock(&self.state);
        let now = now();
        // What breaks fails all streams at about one moment.
        if state.failed.is_none_or(|(_, end)| end <= now) {
            state.pause = (state.pause * 2).clamp(limits.back_off_min, limits.back_off_max);
        }
        state.failed = Some((fault, now + state.pause));
        state.boot = None;
        drop(state);
        // Pieces may wait that nobody will take now.
        self.bell.notify_all();
    }

    /// Whether the peer is still a member.
    pub(in crate::transport) fn open(&self) -> bool {
        lock(&self.state).open
    }

    /// The peer has left: streams are cut, and what waits ends.
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

    /// The next piece of which something is still wanted.
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
