//! Asks of a peer over one connection, and the caller's answers to them, the grants.
//!
//! A grant holds the slots of its blocks until its release. The release reports to the caller how many of the
//! blocks were sent whole, and the caller then ends its hold. Each grant is released once. If the connection
//! ends early:
//!
//! - A grant collected by [`StreamAsks`] is released with the blocks sent whole until then.
//! - A grant still in the [`GrantQueue`] is released with no block sent.
//! - An ask without a grant holds no slot. The queue is closed, so `ServedStreams::deliver_grant` releases a
//!   later grant at once, with no block sent.
//! - A standing ask without a grant is withdrawn: the caller answers it at once.
//!
//! A standing ask waits aside until its grant, and is answered behind the asks granted before.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use shm_protocol::pool;

use super::GrantQueue;
use crate::MeshError;
use crate::refusals::Reason;
use crate::sync::read_clock;
use crate::transport::tcp::frame::{ASKS_MAX, AskFrame, BlockStatus, STANDING_MAX};
use crate::transport::tcp::link::PeerLink;
use crate::transport::tcp::{TcpShared, eventfd};
use crate::transport::{Grant, GrantedSlots, Label, StandingTerms, TransportEvent};

/// The asks of one connection, until each has ended. They are answered in their order. The drop at the end of
/// the connection closes the queue and releases all grants.
pub(in crate::transport) struct StreamAsks<'a> {
    shared: &'a TcpShared,
    link: Arc<PeerLink>,
    grants: Arc<GrantQueue>,
    flight: VecDeque<AskedBlocks>,
    /// Standing asks without a grant.
    standing: Vec<AskedBlocks>,
}

/// An ask of a peer, with its answer.
pub(in crate::transport) struct AskedBlocks {
    pub(in crate::transport) ask: AskFrame,
    answer: AskAnswer,
    /// Index of the next block to send.
    pub(in crate::transport) at: usize,
    /// Number of its blocks sent whole.
    pub(in crate::transport) sent: u32,
}

enum AskAnswer {
    /// The caller has not answered the ask with this number yet.
    Waiting(u64),
    Granted {
        granted: GrantedSlots,
        since: Instant,
    },
    /// Every block has this status.
    Refused(BlockStatus),
}

// === impl StreamAsks ===

impl<'a> StreamAsks<'a> {
    pub(in crate::transport) fn new(shared: &'a TcpShared, link: Arc<PeerLink>) -> Result<Self, MeshError> {
        let grants = Arc::new(GrantQueue { granted: Mutex::new(Some(Vec::new())), bell: eventfd()? });
        Ok(Self { shared, link, grants, flight: VecDeque::new(), standing: Vec::new() })
    }

    /// Returns an eventfd, readable once the caller has granted an ask.
    pub(in crate::transport) fn bell(&self) -> &OwnedFd {
        &self.grants.bell
    }

    /// Returns true if no further ask is accepted until one has ended.
    pub(in crate::transport) fn full(&self) -> bool {
        self.flight.len() >= ASKS_MAX
    }

    /// Returns true if the peer has sent as many asks, standing or not, as may wait.
    #[cfg(feature = "rdma")]
    pub(in crate::transport) fn overfull(&self) -> bool {
        self.flight.len() + self.standing.len() >= ASKS_MAX + STANDING_MAX
    }

    /// Collects the caller's grants since the last call.
    pub(in crate::transport) fn collect_grants(&mut self) {
        let _ = rustix::io::read(&self.grants.bell, &mut [0u8; 8]);
        for granted in self.grants.take_grants() {
            let named =
                |asked: &AskedBlocks| matches!(asked.answer, AskAnswer::Waiting(ask) if ask == granted.ask);
            if let Some(at) = self.standing.iter().position(named) {
                self.flight.push_back(self.standing.swap_remove(at));
            }
            let asked = self.flight.iter_mut().find(|asked| named(asked));
            let asked = asked.expect("an ask is kept until it is answered");
            asked.answer = AskAnswer::Granted { granted, since: read_clock() };
        }
    }

    /// Hands an ask to the caller, or refuses all of its blocks: this node drains, or too many asks wait.
    pub(in crate::transport) fn take_on(&mut self, ask: AskFrame, standing: Option<StandingTerms>) {
        let answer = if self.shared.draining() {
            self.shared.count_refusal(Reason::Draining);
            AskAnswer::Refused(BlockStatus::Draining)
        } else if let Some(number) = (standing.is_none() || self.standing.len() < STANDING_MAX)
            .then(|| self.shared.served.enter_ask(&self.grants, ask.labels.len()))
            .flatten()
        {
            AskAnswer::Waiting(number)
        } else {
            self.shared.count_refusal(Reason::Busy);
            AskAnswer::Refused(BlockStatus::Busy)
        };
        let up = match answer {
            AskAnswer::Waiting(number) => Some(TransportEvent::Asked {
                ask: number,
                peer: self.link.number,
                blocks: ask.labels.clone(),
                standing,
            }),
            _ => None,
        };
        let asked = AskedBlocks { ask, answer, at: 0, sent: 0 };
        if standing.is_some() && up.is_some() {
            self.standing.push(asked);
        } else {
            self.flight.push_back(asked);
        }
        if let Some(up) = up {
            self.shared.report_event(up);
        }
    }

    /// Returns the ask at position `at`, if it has an answer.
    pub(in crate::transport) fn answered(&mut self, at: usize) -> Option<&mut AskedBlocks> {
        self.flight.get_mut(at).filter(|asked| !matches!(asked.answer, AskAnswer::Waiting(_)))
    }

    /// Ends the first ask, and releases its grant.
    pub(in crate::transport) fn end_front(&mut self) {
        if let Some(asked) = self.flight.pop_front() {
            self.release_ask(&asked);
        }
    }

    fn release_ask(&self, asked: &AskedBlocks) {
        if let AskAnswer::Granted { granted, .. } = &asked.answer {
            self.shared.report_event(TransportEvent::Release { ask: granted.ask, sent: asked.sent });
        }
    }
}

impl Drop for StreamAsks<'_> {
    fn drop(&mut self) {
        let untaken = self.grants.close_queue();
        self.flight.iter().for_each(|asked| self.release_ask(asked));
        let untaken_ask = |ask: u64| untaken.iter().any(|granted| granted.ask == ask);
        for asked in &self.standing {
            if let AskAnswer::Waiting(ask) = asked.answer
                && !untaken_ask(ask)
            {
                self.shared.report_event(TransportEvent::Withdrawn { ask });
            }
        }
        untaken.iter().for_each(|granted| {
            self.shared.report_event(TransportEvent::Release { ask: granted.ask, sent: 0 })
        });
    }
}

// === impl AskedBlocks ===

impl AskedBlocks {
    /// Returns the time of its grant: its slots are held since then.
    pub(in crate::transport) fn since(&self) -> Option<Instant> {
        match self.answer {
            AskAnswer::Granted { since, .. } => Some(since),
            AskAnswer::Waiting(_) | AskAnswer::Refused(_) => None,
        }
    }

    /// Returns the grant for block `at`, or the status of a block without one. Requires an answered ask.
    pub(in crate::transport) fn grant_at(&self, at: usize) -> Result<Grant, BlockStatus> {
        match &self.answer {
            AskAnswer::Granted { granted, .. } => granted.slots[at].ok_or(BlockStatus::Absent),
            AskAnswer::Refused(status) => Err(*status),
            AskAnswer::Waiting(_) => unreachable!("asked of an answered one alone"),
        }
    }
}

/// Returns the bytes of a granted slot and their checksum. A checksum computed here is reported to the
/// caller. Fails if the pool has lost bytes: a checksum of the bytes left would declare them right.
pub(in crate::transport) fn read_granted<'a>(
    shared: &'a TcpShared,
    label: &Label,
    grant: Grant,
) -> Result<(&'a [u8], u64), BlockStatus> {
    let bytes = shared.blocks.bytes_at(grant.slot.offset, label.bytes as usize);
    let bytes = bytes.expect("a granted slot lies in the pool");
    let checksum = grant.checksum.unwrap_or_else(|| pool::compute_checksum(bytes));
    if !shared.blocks.is_whole() {
        return Err(BlockStatus::Absent);
    }
    if grant.checksum.is_none() {
        shared.report_event(TransportEvent::Checksum { slot: grant.slot, checksum });
    }
    Ok((bytes, checksum))
}
