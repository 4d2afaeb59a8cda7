//! The serving side of one connection, and its thread: it lends slots, and takes them back in time.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::pairing::pair_nics;
use super::{QueueMaker, verbs};
use crate::refusals::Reason;
use crate::sync::read_clock;
use crate::transport::tcp::TcpShared;
use crate::transport::tcp::frame::lease::{AskId, Lent, LentPlace, QueueOffer};
use crate::transport::tcp::frame::{AskFrame, BlockStatus, Frame, MalformedFrame};
use crate::transport::tcp::link::PeerLink;
use crate::transport::tcp::serve::asks::{AskedBlocks, StreamAsks, read_granted};
use crate::transport::tcp::serve::part_from;
use crate::transport::tcp::wire::{Broken, Wire};
use crate::transport::{Label, Refusal};

/// A member's connection. Its queue pair is dropped first: from then on no released slot can be read.
struct Lender<'a> {
    _queue: verbs::ReadQueue,
    asks: StreamAsks<'a>,
    /// The ends of the leases of the first asks.
    lent: VecDeque<Instant>,
    lease: Duration,
    shared: &'a TcpShared,
}

/// The reason for the end of a connection.
enum LendingEnd {
    /// No ask came for long.
    Idle,
    /// The lease of this ask ended before the peer had read its blocks.
    Late(AskId),
}

/// Serves until the peer hangs up, is late or malformed, or sends no ask for long.
pub(super) fn serve_reads(
    queues: &QueueMaker,
    theirs: &QueueOffer,
    shared: &TcpShared,
    link: &Arc<PeerLink>,
    mut wire: Wire,
) {
    let queue = match meet(queues, theirs, shared, link, &mut wire) {
        Ok(Some(queue)) => queue,
        Ok(None) => return,
        Err(broken) => return part_from(shared, link, &mut wire, &broken),
    };
    let asks = match StreamAsks::new(shared, Arc::clone(link)) {
        Ok(asks) => asks,
        Err(error) => {
            shared.count_refusal(Reason::Resources);
            return shared.report_note(error.to_string());
        }
    };
    let mut lender = Lender { _queue: queue, asks, lent: VecDeque::new(), lease: queues.lease, shared };
    let end = lender.serve_asks(&mut wire);
    drop(lender);
    match end {
        Ok(LendingEnd::Idle) => {}
        Ok(LendingEnd::Late(turn)) => {
            shared.count_refusal(Reason::Slow);
            shared.note_rarely(format!(
                "{} had not read its lent blocks when their lease ended",
                link.peer.node
            ));
            tell_late(shared, &mut wire, turn);
        }
        Err(broken) => part_from(shared, link, &mut wire, &broken),
    }
}

/// Makes the queue pair for a peer's queue pair. Returns `None` if the peer was refused.
fn meet(
    queues: &QueueMaker,
    theirs: &QueueOffer,
    shared: &TcpShared,
    link: &PeerLink,
    wire: &mut Wire,
) -> Result<Option<verbs::ReadQueue>, Broken> {
    let until = read_clock() + shared.config.limits.handshake;
    let mut refuse = |refusal: Refusal, reason, why: String| {
        wire.send_refusal(refusal);
        shared.count_refusal(reason);
        shared.note_rarely(format!("{} was refused: {why}", link.peer.node));
        Ok(None)
    };
    if !queues.fits(theirs) {
        let ours = Refusal::Queues { nics: queues.nics.len() as u8, pairs: queues.qps_per_peer as u8 };
        return refuse(ours, Reason::Queues, theirs.mismatch().to_string());
    }
    let nic = pair_nics(&theirs.nics, &queues.nodes())[usize::from(theirs.nic)];
    let made = verbs::ReadQueue::new(&queues.nics, nic).and_then(|mut queue| {
        queue.lend(&theirs.end)?;
        Ok(queue)
    });
    match made {
        Ok(queue) => {
            let ours = queues.queue(theirs.number, nic, queue.queue_end(), queues.nics[nic].remote_key());
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
fn tell_late(shared: &TcpShared, wire: &mut Wire, turn: AskId) {
    let until = read_clock() + shared.config.limits.progress;
    if wire.send_frame(&Frame::Stood(turn, false), false, until).is_ok() {
        while wire.frame(until).is_ok() {}
    }
}

fn turn_of(ask: &AskFrame) -> AskId {
    AskId { ticket: ask.ticket, first: ask.first }
}

// === impl Lender ===

impl Lender<'_> {
    fn serve_asks(&mut self, wire: &mut Wire) -> Result<LendingEnd, Broken> {
        let limits = self.shared.config.limits;
        loop {
            self.asks.collect_grants();
            while wire.readable()? {
                match wire.frame(read_clock() + limits.progress)? {
                    Frame::Ask(ask) if !self.asks.overfull() => self.asks.take_on(ask, None),
                    Frame::Stand(terms, ask) if !self.asks.overfull() => self.asks.take_on(ask, Some(terms)),
                    Frame::Ask(_) | Frame::Stand(..) => {
                        return Err(MalformedFrame::Bytes("more Asks than may wait").into());
                    }
                    Frame::Read(turn) => {
                        if !self.take_back(turn)? {
                            return Ok(LendingEnd::Late(turn));
                        }
                        wire.send_frame(&Frame::Stood(turn, true), false, read_clock() + limits.progress)?;
                    }
                    other => return Err(MalformedFrame::Bytes(other.unexpected()).into()),
                }
            }
            if self.lend(wire)? {
                continue;
            }
            let end = self.lent.front().copied();
            if end.is_some_and(|end| end <= read_clock()) {
                let late = self.asks.answered(0).expect("a lent block was granted");
                return Ok(LendingEnd::Late(turn_of(&late.ask)));
            }
            let until = end.unwrap_or_else(|| read_clock() + limits.idle * 2);
            if !wire.wait_readable(true, [self.asks.bell().as_fd()], until)? && end.is_none() {
                return Ok(LendingEnd::Idle);
            }
        }
    }

    /// Sends the places of the next ask's blocks. Returns false if the caller has yet to grant it.
    fn lend(&mut self, wire: &mut Wire) -> Result<bool, Broken> {
        let shared = self.shared;
        let Some(asked) = self.asks.answered(self.lent.len()) else { return Ok(false) };
        let places: Vec<_> = asked
            .ask
            .labels
            .iter()
            .enumerate()
            .map(|(at, label)| lend_place(shared, asked, at, label))
            .collect();
        let turn = turn_of(&asked.ask);
        // The lease begins before the peer gets it.
        self.lent.push_back(read_clock() + self.lease);
        let lent = Lent { turn, lease_ms: self.lease.as_millis() as u32, places };
        wire.send_frame(&Frame::Lent(lent), false, read_clock() + shared.config.limits.progress)?;
        Ok(true)
    }

    /// Ends the first lease after the peer has read its blocks. Returns false if it was over.
    fn take_back(&mut self, turn: AskId) -> Result<bool, Broken> {
        let lent = self.lent.pop_front();
        let asked = self.asks.answered(0).filter(|asked| turn_of(&asked.ask) == turn);
        let (Some(end), Some(asked)) = (lent, asked) else {
            return Err(MalformedFrame::Bytes("a Read of blocks that were not lent").into());
        };
        if end <= read_clock() {
            return Ok(false);
        }
        asked.sent = (0..asked.ask.labels.len()).filter(|at| asked.grant_at(*at).is_ok()).count() as u32;
        self.asks.end_front();
        Ok(true)
    }
}

fn lend_place(shared: &TcpShared, asked: &AskedBlocks, at: usize, label: &Label) -> LentPlace {
    match asked.grant_at(at).and_then(|grant| read_granted(shared, label, grant)) {
        Ok((bytes, checksum)) => {
            let address = bytes.as_ptr() as u64;
            LentPlace { address, checksum, bytes: label.bytes, status: BlockStatus::Whole }
        }
        Err(status) => LentPlace { address: 0, checksum: 0, bytes: 0, status },
    }
}
