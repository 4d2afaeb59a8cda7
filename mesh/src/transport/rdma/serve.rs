//! The serving side of one connection, and its thread: it lends slots, and takes them back in time.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::pairing::pair;
use super::{Queues, verbs};
use crate::refusals::Reason;
use crate::sync::now;
use crate::transport::tcp::Shared;
use crate::transport::tcp::frame::lease::{Lent, Place, Queue, Turn};
use crate::transport::tcp::frame::{Ask, Frame, Malformed, Status};
use crate::transport::tcp::link::Link;
use crate::transport::tcp::serve::asks::{Asked, Asks, granted};
use crate::transport::tcp::serve::part;
use crate::transport::tcp::wire::{Broken, Wire};
use crate::transport::{Label, Refusal};

/// A member's connection. Its queue pair is dropped first: from then on no released slot can be read.
struct Lender<'a> {
    _queue: verbs::Queue,
    asks: Asks<'a>,
    /// The ends of the leases of the first asks.
    lent: VecDeque<Instant>,
    lease: Duration,
    shared: &'a Shared,
}

/// The reason for the end of a connection.
enum End {
    /// No ask came for long.
    Idle,
    /// The lease of this ask ended before the peer had read its blocks.
    Late(Turn),
}

/// Serves until the peer hangs up, is late or malformed, or sends no ask for long.
pub(super) fn serve(queues: &Queues, theirs: &Queue, shared: &Shared, link: &Arc<Link>, mut wire: Wire) {
    let queue = match meet(queues, theirs, shared, link, &mut wire) {
        Ok(Some(queue)) => queue,
        Ok(None) => return,
        Err(broken) => return part(shared, link, &mut wire, &broken),
    };
    let asks = match Asks::new(shared, Arc::clone(link)) {
        Ok(asks) => asks,
        Err(error) => {
            shared.count(Reason::Resources);
            return shared.note(error.to_string());
        }
    };
    let mut lender = Lender { _queue: queue, asks, lent: VecDeque::new(), lease: queues.lease, shared };
    let end = lender.serve(&mut wire);
    drop(lender);
    match end {
        Ok(End::Idle) => {}
        Ok(End::Late(turn)) => {
            shared.count(Reason::Slow);
            shared.note_rarely(format!(
                "{} had not read its lent blocks when their lease ended",
                link.peer.node
            ));
            tell_late(shared, &mut wire, turn);
        }
        Err(broken) => part(shared, link, &mut wire, &broken),
    }
}

/// Makes the queue pair for a peer's queue pair. Returns `None` if the peer was refused.
fn meet(
    queues: &Queues,
    theirs: &Queue,
    shared: &Shared,
    link: &Link,
    wire: &mut Wire,
) -> Result<Option<verbs::Queue>, Broken> {
    let until = now() + shared.config.limits.handshake;
    let mut refuse = |refusal: Refusal, reason, why: String| {
        wire.refuse(refusal);
        shared.count(reason);
        shared.note_rarely(format!("{} was refused: {why}", link.peer.node));
        Ok(None)
    };
    if !queues.fits(theirs) {
        let ours = Refusal::Queues { nics: queues.nics.len() as u8, pairs: queues.qps_per_peer as u8 };
        return refuse(ours, Reason::Queues, theirs.mismatch().to_string());
    }
    let nic = pair(&theirs.nics, &queues.nodes())[usize::from(theirs.nic)];
    let made = verbs::Queue::new(&queues.nics, nic).and_then(|mut queue| {
        queue.lend(&theirs.end)?;
        Ok(queue)
    });
    match made {
        Ok(queue) => {
            let ours = queues.queue(theirs.number, nic, queue.end(), queues.nics[nic].key());
            wire.send_frame(&Frame::Queue(ours), false, until)?;
            Ok(Some(queue))
        }
        Err(error) => {
            refuse(Refusal::Busy, Reason::Resources, format!("a queue pair could not be made ({error})"))
        }
    }
}

/// Sends the end of a lease, and waits until the peer has hung up: a socket closed with unread bytes is
/// reset, and the peer would not get the frame.
fn tell_late(shared: &Shared, wire: &mut Wire, turn: Turn) {
    let until = now() + shared.config.limits.progress;
    if wire.send_frame(&Frame::Stood(turn, false), false, until).is_ok() {
        while wire.frame(until).is_ok() {}
    }
}

fn turn_of(ask: &Ask) -> Turn {
    Turn { ticket: ask.ticket, first: ask.first }
}

// === impl Lender ===

impl Lender<'_> {
    fn serve(&mut self, wire: &mut Wire) -> Result<End, Broken> {
        let limits = self.shared.config.limits;
        loop {
            self.asks.hear();
            while wire.readable()? {
                match wire.frame(now() + limits.progress)? {
                    Frame::Ask(ask) if !self.asks.full() => self.asks.take_on(ask),
                    Frame::Ask(_) => return Err(Malformed::Bytes("more Asks than may wait").into()),
                    Frame::Read(turn) => {
                        if !self.take_back(turn)? {
                            return Ok(End::Late(turn));
                        }
                        wire.send_frame(&Frame::Stood(turn, true), false, now() + limits.progress)?;
                    }
                    other => return Err(Malformed::Bytes(other.unexpected()).into()),
                }
            }
            if self.lend(wire)? {
                continue;
            }
            let end = self.lent.front().copied();
            if end.is_some_and(|end| end <= now()) {
                let late = self.asks.answered(0).expect("a lent block was granted");
                return Ok(End::Late(turn_of(&late.ask)));
            }
            let until = end.unwrap_or_else(|| now() + limits.idle * 2);
            if !wire.wait(true, self.asks.bell(), until)? && end.is_none() {
                return Ok(End::Idle);
            }
        }
    }

    /// Sends the places of the next ask's blocks. Returns false if the caller has yet to grant it.
    fn lend(&mut self, wire: &mut Wire) -> Result<bool, Broken> {
        let shared = self.shared;
        let Some(asked) = self.asks.answered(self.lent.len()) else { return Ok(false) };
        let places: Vec<_> =
            asked.ask.labels.iter().enumerate().map(|(at, label)| place(shared, asked, at, label)).collect();
        let turn = turn_of(&asked.ask);
        // The lease begins before the peer gets it.
        self.lent.push_back(now() + self.lease);
        let lent = Lent { turn, lease_ms: self.lease.as_millis() as u32, places };
        wire.send_frame(&Frame::Lent(lent), false, now() + shared.config.limits.progress)?;
        Ok(true)
    }

    /// Ends the first lease after the peer has read its blocks. Returns false if it was over.
    fn take_back(&mut self, turn: Turn) -> Result<bool, Broken> {
        let lent = self.lent.pop_front();
        let asked = self.asks.answered(0).filter(|asked| turn_of(&asked.ask) == turn);
        let (Some(end), Some(asked)) = (lent, asked) else {
            return Err(Malformed::Bytes("a Read of blocks that were not lent").into());
        };
        if end <= now() {
            return Ok(false);
        }
        asked.sent = (0..asked.ask.labels.len()).filter(|at| asked.grant(*at).is_ok()).count() as u32;
        self.asks.end();
        Ok(true)
    }
}

fn place(shared: &Shared, asked: &Asked, at: usize, label: &Label) -> Place {
    match asked.grant(at).and_then(|grant| granted(shared, label, grant)) {
        Ok((bytes, checksum)) => {
            let address = bytes.as_ptr() as u64;
            Place { address, checksum, bytes: label.bytes, status: Status::Whole }
        }
        Err(status) => Place { address: 0, checksum: 0, bytes: 0, status },
    }
}
