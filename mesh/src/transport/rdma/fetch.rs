//! The reading side of one connection to a peer: asks go out, leases come in, READs bring the blocks.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shm_protocol::pool;

use super::QueueMaker;
use super::pairing::pair_nics;
use super::verbs::{self, Completion, READS_MAX};
use crate::refusals::Reason;
use crate::sync::read_clock;
use crate::transport::tcp::TcpShared;
use crate::transport::tcp::data_path::ConnectedFetch;
use crate::transport::tcp::fetch::standing::{PeerWait, StandingPieces};
use crate::transport::tcp::frame::lease::{AskId, Lent, LentPlace};
use crate::transport::tcp::frame::{ASKS_MAX, Frame};
use crate::transport::tcp::link::PeerLink;
use crate::transport::tcp::piece::{FetchPiece, PIECE_BYTES_MAX};
use crate::transport::tcp::wire::{Broken, Wire};
use crate::transport::{FetchFault, FetchStage};

/// Maximum bytes asked for and unread: the peer grants the next asks while this side reads.
const ASKED_BYTES_MAX: u64 = ASKS_MAX as u64 * PIECE_BYTES_MAX;
/// Bytes of a READ, to which the limit of progress applies.
const PART_BYTES: u32 = 1 << 20;

pub(super) struct RdmaReader {
    queue: verbs::ReadQueue,
    wire: Wire,
    shared: Arc<TcpShared>,
    link: Arc<PeerLink>,
    /// The remote key of the peer's pool.
    key: u32,
    /// Loans in the order of their asks, in which they are lent, read and given back.
    loans: VecDeque<Loan>,
    /// Pieces whose asks stand at the peer. Once it has lent a piece's blocks, the piece is a loan behind those lent before.
    standing: StandingPieces,
    /// Number of ended loans: the number of the first one above.
    ended: u64,
    /// Blocks to read, by loan and place.
    todo: VecDeque<(u64, usize)>,
    /// READs under way, in order, by loan and place.
    reads: VecDeque<(u64, usize)>,
    begun: u64,
    /// The time of the last end of a READ, or of the first one's begin.
    read_at: Instant,
    completions: Vec<Completion>,
    /// True if the next completion makes the queue's descriptor readable.
    armed: bool,
}

/// Blocks of one ask.
struct Loan {
    piece: FetchPiece,
    state: LoanState,
    /// The time at which it entered that state.
    since: Instant,
    /// READs that end before this time are within the lease: the lease began after the ask was sent.
    until: Instant,
    blocks: Vec<BlockReading>,
    /// Number of blocks still to read.
    left: usize,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum LoanState {
    Asked,
    Lent,
    /// The peer has a Read for it.
    Read,
}

/// A block being read.
struct BlockReading {
    place: LentPlace,
    /// Bytes of it with READs begun.
    begun: u32,
    /// READs of it under way.
    arriving: u32,
    /// The content of the slot if the lease stood.
    result: Option<Result<u64, FetchFault>>,
}

/// Sets up a queue pair to the peer. Returns it with the peer's remote key, or `None` if the peer has no
/// queue pairs yet.
pub(super) fn meet_peer(
    queues: &QueueMaker,
    number: usize,
    shared: &TcpShared,
    link: &PeerLink,
    wire: &mut Wire,
) -> Result<Option<(verbs::ReadQueue, u32)>, FetchFault> {
    let until = read_clock() + shared.config.limits.handshake;
    let nic = number % queues.nics.len();
    let failed = |error: std::io::Error| {
        shared.count_refusal(Reason::Resources);
        shared.note_rarely(format!("no queue pair to {} could be made: {error}", link.peer.node));
        FetchFault::Peer(error.kind())
    };
    let mut queue = verbs::ReadQueue::new(&queues.nics, nic).map_err(failed)?;
    let ours = queues.queue(number as u16, nic, queue.queue_end(), 0);
    let broken = |broken: Broken| broken.fault(FetchStage::Handshake);
    wire.send_frame(&Frame::Queue(ours), false, until).map_err(broken)?;
    let theirs = match wire.frame(until).map_err(broken)? {
        Frame::Queue(theirs) => theirs,
        Frame::InStream => return Ok(None),
        Frame::Refused(refusal) => return Err(FetchFault::Refused(refusal)),
        other => return Err(FetchFault::Malformed(other.unexpected())),
    };
    let fits = queues.fits(&theirs) && usize::from(theirs.number) == number;
    if !fits || pair_nics(&queues.nodes(), &theirs.nics)[nic] != usize::from(theirs.nic) {
        return Err(FetchFault::Malformed("a queue pair that was not requested"));
    }
    queue.connect_end(&theirs.end).map_err(failed)?;
    Ok(Some((queue, theirs.key)))
}

// === impl RdmaReader ===

impl RdmaReader {
    /// A reader over stream `number` and its queue pair.
    pub(super) fn new(
        number: usize,
        (queue, key): (verbs::ReadQueue, u32),
        shared: &Arc<TcpShared>,
        link: &Arc<PeerLink>,
        wire: Wire,
    ) -> Self {
        Self {
            queue,
            wire,
            shared: Arc::clone(shared),
            link: Arc::clone(link),
            key,
            loans: VecDeque::new(),
            standing: StandingPieces::new(number, link),
            ended: 0,
            todo: VecDeque::new(),
            reads: VecDeque::new(),
            begun: 0,
            read_at: read_clock(),
            completions: Vec::new(),
            armed: false,
        }
    }

    /// The next waiting piece, if there is room to ask for it.
    fn more(&self) -> Option<FetchPiece> {
        let unread = |loan: &&Loan| loan.state != LoanState::Read;
        let bytes: u64 = self.loans.iter().filter(unread).map(|loan| loan.piece.asked_bytes()).sum();
        let room = self.loans.len() < ASKS_MAX && bytes + PIECE_BYTES_MAX <= ASKED_BYTES_MAX;
        room.then(|| self.link.try_next()).flatten().or_else(|| self.standing.next())
    }

    fn ask_blocks(&mut self, piece: FetchPiece) -> Result<(), FetchFault> {
        let ask = piece.ask_frame();
        if piece.stands() {
            self.standing.push(piece);
        } else {
            self.loans.push_back(Loan::new(piece));
        }
        self.send_frame(&ask)
    }

    fn send_frame(&mut self, frame: &Frame) -> Result<(), FetchFault> {
        let sent = self.wire.send_frame(frame, false, read_clock() + self.shared.config.limits.progress);
        sent.map_err(|broken| broken.fault(FetchStage::Progress))
    }

    /// Handles the frames received. Returns false if there were none.
    fn take_frames(&mut self) -> Result<bool, FetchFault> {
        let mut heard = false;
        while self.readable()? {
            let until = read_clock() + self.shared.config.limits.progress;
            match self.wire.frame(until).map_err(|broken| broken.fault(FetchStage::Progress))? {
                Frame::Lent(lent) => self.lent(lent)?,
                // The queue pair ended with the lease.
                Frame::Stood(_, false) => return Err(FetchFault::Absent),
                Frame::Stood(turn, true) => self.stood(turn)?,
                Frame::Refused(refusal) => return Err(FetchFault::Refused(refusal)),
                other => return Err(FetchFault::Malformed(other.unexpected())),
            }
            heard = true;
        }
        Ok(heard)
    }

    fn readable(&mut self) -> Result<bool, FetchFault> {
        self.wire.readable().map_err(|broken| match broken {
            Broken::Eof if !self.reads.is_empty() => FetchFault::Short,
            broken => broken.fault(FetchStage::Progress),
        })
    }

    fn lent(&mut self, lent: Lent) -> Result<(), FetchFault> {
        let asked = self.loans.iter().position(|loan| loan.state == LoanState::Asked);
        let unasked = FetchFault::Malformed("a lease that was not requested");
        let at = asked.unwrap_or(self.loans.len());
        if asked.is_none_or(|at| self.loans[at].ask_id() != lent.turn) {
            let piece = self.standing.take(lent.turn.ticket, lent.turn.first).ok_or(unasked)?;
            self.loans.insert(at, Loan::new(piece));
        }
        let (loan, number) = (&mut self.loans[at], self.ended + at as u64);
        if loan.piece.block_count() != lent.places.len() {
            return Err(unasked);
        }
        loan.until = loan.since + Duration::from_millis(lent.lease_ms.into());
        loan.enter_state(LoanState::Lent);
        for (at, place) in lent.places.into_iter().enumerate() {
            let index = loan.piece.indexes.start + at as u32;
            loan.blocks.push(BlockReading { place, begun: 0, arriving: 0, result: None });
            if let Some(fault) = place.status.missing() {
                loan.piece.fetch.end_waiting(index, fault);
                loan.left -= 1;
            } else if place.bytes == loan.piece.fetch.blocks[index as usize].0.bytes {
                self.todo.push_back((number, at));
            } else {
                return Err(FetchFault::Malformed("a block of another size than was requested"));
            }
        }
        Ok(())
    }

    /// The lease of the first loan stood until the end of its READs: its blocks are whole.
    fn stood(&mut self, turn: AskId) -> Result<(), FetchFault> {
        let read = |loan: &mut Loan| loan.state == LoanState::Read && loan.ask_id() == turn;
        let loan =
            self.loans.pop_front_if(read).ok_or(FetchFault::Malformed("the end of an unknown lease"))?;
        self.ended += 1;
        for (index, block) in loan.piece.indexes.clone().zip(&loan.blocks) {
            if let Some(result) = block.result {
                loan.piece.fetch.end_block(index, result);
            }
        }
        self.link.answered();
        Ok(())
    }

    /// Begins READs as far as there is room. Returns false if there was nothing to begin.
    fn begin_reads(&mut self) -> Result<bool, FetchFault> {
        let mut begun = false;
        while self.reads.len() < READS_MAX
            && let Some((number, at)) = self.todo.front().copied()
        {
            let loan = &mut self.loans[(number - self.ended) as usize];
            let index = loan.piece.indexes.start + at as u32;
            let (fetch, block) = (&loan.piece.fetch, &mut loan.blocks[at]);
            // A block stopped before its begin has ended; a begun one ends with its READs.
            let wanted = if block.begun == 0 { fetch.begin_block(index) } else { fetch.stopped().is_none() };
            if !wanted {
                self.todo.pop_front();
                if block.arriving == 0 {
                    loan.finish_block(at, &self.shared);
                }
                continue;
            }
            let part = PART_BYTES.min(block.place.bytes - block.begun);
            let offset = fetch.blocks[index as usize].1 + u64::from(block.begun);
            let address = block.place.address + u64::from(block.begun);
            let posted = self.queue.begin_read(self.begun, offset, part, self.key, address);
            posted.map_err(|error| FetchFault::Peer(error.kind()))?;
            block.begun += part;
            block.arriving += 1;
            if block.begun == block.place.bytes {
                self.todo.pop_front();
            }
            if self.reads.is_empty() {
                self.read_at = read_clock();
            }
            self.reads.push_back((number, at));
            self.begun += 1;
            begun = true;
        }
        Ok(begun)
    }

    /// Handles ended READs. The next ones begin before the checksums of these. Returns false if none has
    /// ended.
    fn reap_reads(&mut self) -> Result<bool, FetchFault> {
        let mut completions = std::mem::take(&mut self.completions);
        self.queue.reap_completions(&mut completions);
        if completions.is_empty() {
            return Ok(false);
        }
        self.read_at = read_clock();
        let mut arrived = Vec::new();
        for completion in completions.drain(..) {
            if completion.status != 0 {
                // The frame with the end of the lease may be here already.
                self.take_frames()?;
                return Err(failure(completion.status));
            }
            let oldest = self.begun - self.reads.len() as u64;
            let read = self.reads.pop_front().filter(|_| completion.read == oldest);
            let (number, at) = read.ok_or(FetchFault::Malformed("a READ that was not begun"))?;
            let block = &mut self.loans[(number - self.ended) as usize].blocks[at];
            block.arriving -= 1;
            if block.arriving == 0 && self.todo.front() != Some(&(number, at)) {
                arrived.push((number, at));
            }
        }
        self.completions = completions;
        self.begin_reads()?;
        for (number, at) in arrived {
            self.loans[(number - self.ended) as usize].finish_block(at, &self.shared);
        }
        Ok(true)
    }

    /// Gives back loans whose blocks are read, in order.
    fn give_back(&mut self) -> Result<(), FetchFault> {
        while let Some(loan) = self.loans.iter_mut().find(|loan| loan.state != LoanState::Read) {
            if loan.state != LoanState::Lent || loan.left > 0 {
                break;
            }
            loan.enter_state(LoanState::Read);
            let turn = loan.ask_id();
            self.send_frame(&Frame::Read(turn))?;
        }
        Ok(())
    }

    /// Waits for a frame or a completion.
    fn wait_for_event(&mut self) -> Result<(), FetchFault> {
        if !self.armed {
            // Completions from before the arming are looked for once more.
            self.armed = true;
            return self.queue.arm().map_err(|error| FetchFault::Peer(error.kind()));
        }
        let limits = &self.shared.config.limits;
        let reading =
            (!self.reads.is_empty()).then(|| (self.read_at + limits.progress, FetchStage::Progress));
        let answer = self.loans.iter().filter_map(|loan| match loan.state {
            LoanState::Asked => Some((loan.since + limits.first_byte, FetchStage::FirstByte)),
            LoanState::Lent => None,
            LoanState::Read => Some((loan.since + limits.progress, FetchStage::Progress)),
        });
        // This limit holds even while READs go on.
        let held = self.loans.iter().filter_map(Loan::held_in_vain_since);
        let held = held.map(|since| (since + limits.progress, FetchStage::Progress));
        let stands = self.standing.end(limits.first_byte).map(|end| (end, FetchStage::FirstByte));
        let awaited = answer.chain(reading).chain(held).chain(stands);
        let (end, stage) = awaited.min_by_key(|(end, _)| *end).expect("something is awaited");
        // A piece may have come before there was a bell.
        let Some(PeerWait { bell, until }) = self.standing.wait(end)? else { return Ok(()) };
        let bells = [Some(self.queue.as_fd()), bell.as_deref().map(AsFd::as_fd)];
        match self.wire.wait_readable(true, bells.into_iter().flatten(), until) {
            Ok(true) => {
                self.standing.hush();
                self.queue.disarm();
                self.armed = false;
                Ok(())
            }
            // A piece of another stream may be taken.
            Ok(false) if until < end => Ok(()),
            Ok(false) => Err(FetchFault::Timeout(stage)),
            // Frames sent before the peer hung up count.
            Err(Broken::Eof) => self.readable().map(drop),
            Err(broken) => Err(broken.fault(stage)),
        }
    }
}

impl ConnectedFetch for RdmaReader {
    fn quiet(&mut self) -> bool {
        matches!(self.wire.readable(), Ok(false))
    }

    /// Asks for `piece` and waiting pieces behind it, as far as there is room, until all are read and given
    /// back.
    fn run_piece(&mut self, piece: FetchPiece) -> Result<(), FetchFault> {
        let mut next = Some(piece);
        loop {
            while let Some(piece) = next.take().or_else(|| self.more()) {
                self.ask_blocks(piece)?;
            }
            if self.loans.is_empty() && self.standing.is_empty() {
                return Ok(());
            }
            let heard = self.take_frames()?;
            let begun = self.begin_reads()?;
            let read = self.reap_reads()?;
            self.give_back()?;
            if !(heard || begun || read) {
                self.wait_for_event()?;
            }
        }
    }

    fn hang_up(self: Box<Self>) -> Vec<FetchPiece> {
        let Self { queue, loans, standing, .. } = *self;
        // Dropped first: from then on no READ writes a slot.
        drop(queue);
        loans.into_iter().map(|loan| loan.piece).chain(standing.into_pieces()).collect()
    }
}

// === impl Loan ===

impl Loan {
    /// A loan of the blocks that are asked for now, or were lent just now upon a standing ask.
    fn new(piece: FetchPiece) -> Self {
        let (since, left) = (read_clock(), piece.block_count());
        Self { piece, state: LoanState::Asked, since, until: since, blocks: Vec::new(), left }
    }

    fn ask_id(&self) -> AskId {
        AskId { ticket: self.piece.fetch.ticket, first: self.piece.indexes.start }
    }

    fn enter_state(&mut self, state: LoanState) {
        self.state = state;
        self.since = read_clock();
    }

    /// The time since which its fetch is stopped while its slots are held; `None` otherwise.
    fn held_in_vain_since(&self) -> Option<Instant> {
        let held = self.blocks.iter().any(|block| block.arriving > 0 || block.result.is_some());
        self.piece.fetch.stopped_at().filter(|_| held)
    }

    /// Ends a block without READs under way or to come.
    fn finish_block(&mut self, at: usize, shared: &TcpShared) {
        let (index, block) = (self.piece.indexes.start + at as u32, &mut self.blocks[at]);
        let (fetch, place) = (&self.piece.fetch, &block.place);
        self.left -= 1;
        if block.begun == 0 {
            return;
        }
        if block.begun < place.bytes {
            return fetch.end_block(index, Err(fetch.stopped().unwrap_or(FetchFault::Stopped)));
        }
        block.result = Some(if read_clock() >= self.until {
            Err(FetchFault::Absent)
        } else {
            let offset = fetch.blocks[index as usize].1;
            let bytes = shared.blocks.bytes_at(offset, place.bytes as usize).expect("checked when posted");
            let checksum = pool::compute_checksum(bytes);
            if checksum == place.checksum { Ok(checksum) } else { Err(FetchFault::Corrupt) }
        });
    }
}

/// The fault for a failed READ's status.
fn failure(status: u32) -> FetchFault {
    use rdma_mummy_sys::ibv_wc_status as wc;
    FetchFault::Peer(match status {
        wc::IBV_WC_RETRY_EXC_ERR | wc::IBV_WC_RESP_TIMEOUT_ERR => ErrorKind::TimedOut,
        wc::IBV_WC_REM_ACCESS_ERR | wc::IBV_WC_REM_INV_REQ_ERR => ErrorKind::PermissionDenied,
        wc::IBV_WC_WR_FLUSH_ERR => ErrorKind::ConnectionAborted,
        _ => ErrorKind::Other,
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::{FREE, Node, label};
    use super::*;
    use crate::transport::tcp::frame::BlockStatus;
    use crate::transport::tcp::piece::RunningFetch;

    #[test]
    fn slots_of_a_stopped_fetch_are_held_since_it_was_stopped() {
        let (node, begun) = (Node::start("reader"), read_clock());
        let blocks = vec![(label(), FREE)];
        let fetch =
            RunningFetch::begin_all(&node.tcp.shared, 1, blocks, None, begun + Duration::from_secs(30));
        let place = LentPlace { address: 0, checksum: 0, bytes: label().bytes, status: BlockStatus::Whole };
        let block = BlockReading { place, begun: place.bytes, arriving: 1, result: None };
        let piece = FetchPiece::new(&fetch, 0..1);
        let mut loan =
            Loan { piece, state: LoanState::Lent, since: begun, until: begun, blocks: vec![block], left: 1 };
        assert!(fetch.begin_block(0) && loan.held_in_vain_since().is_none(), "the fetch is not stopped");
        fetch.stop_early(FetchFault::Timeout(FetchStage::Whole));
        let stopped = loan.held_in_vain_since().expect("a READ writes its slot");
        assert!((begun..=read_clock()).contains(&stopped));
        loan.blocks[0].arriving = 0;
        assert!(loan.held_in_vain_since().is_none(), "its slot is given back");
        loan.blocks[0].result = Some(Ok(7));
        loan.enter_state(LoanState::Read);
        assert_eq!(loan.held_in_vain_since(), Some(stopped), "the owner has not said that the lease stood");
    }
}
