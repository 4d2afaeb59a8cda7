//! Asks of a member over one connection, and the caller's grants for them.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use shm_protocol::pool;

use super::Desk;
use crate::Error;
use crate::refusals::Reason;
use crate::sync::now;
use crate::transport::tcp::frame::{ASKS_MAX, Ask, Status};
use crate::transport::tcp::link::Link;
use crate::transport::tcp::{Shared, eventfd};
use crate::transport::{Grant, Granted, Label, Up};

/// Asks of one connection, in the order of their answers. Dropping them releases their grants; later grants
/// are released at once.
pub(in crate::transport) struct Asks<'a> {
    shared: &'a Shared,
    link: Arc<Link>,
    desk: Arc<Desk>,
    flight: VecDeque<Asked>,
}

/// An ask of a peer, with its answer.
pub(in crate::transport) struct Asked {
    pub(in crate::transport) ask: Ask,
    answer: Answer,
    pub(in crate::transport) at: usize,
    /// Number of its blocks sent whole.
    pub(in crate::transport) sent: u32,
}

enum Answer {
    /// The caller has not answered this ask yet.
    Waiting(u64),
    Granted {
        granted: Granted,
        since: Instant,
    },
    /// Every block has this status.
    Refused(Status),
}

// === impl Asks ===

impl<'a> Asks<'a> {
    pub(in crate::transport) fn new(shared: &'a Shared, link: Arc<Link>) -> Result<Self, Error> {
        let desk = Arc::new(Desk { granted: Mutex::new(Some(Vec::new())), bell: eventfd()? });
        Ok(Self { shared, link, desk, flight: VecDeque::new() })
    }

    /// Readable after a grant of the caller.
    pub(in crate::transport) fn bell(&self) -> &OwnedFd {
        &self.desk.bell
    }

    /// True if no ask is accepted before another one has ended.
    pub(in crate::transport) fn full(&self) -> bool {
        self.flight.len() >= ASKS_MAX
    }

    /// Takes new grants of the caller.
    pub(in crate::transport) fn hear(&mut self) {
        let _ = rustix::io::read(&self.desk.bell, &mut [0u8; 8]);
        for granted in self.desk.take() {
            let named =
                |asked: &&mut Asked| matches!(asked.answer, Answer::Waiting(ask) if ask == granted.ask);
            let asked = self.flight.iter_mut().find(named).expect("an ask is kept until it is answered");
            asked.answer = Answer::Granted { granted, since: now() };
        }
    }

    /// Hands an ask to the caller.
    pub(in crate::transport) fn take_on(&mut self, ask: Ask) {
        let answer = if self.shared.draining() {
            self.shared.count(Reason::Draining);
            Answer::Refused(Status::Draining)
        } else if let Some(number) = self.shared.served.ask(&self.desk, ask.labels.len()) {
            Answer::Waiting(number)
        } else {
            self.shared.count(Reason::Busy);
            Answer::Refused(Status::Busy)
        };
        let up = match answer {
            Answer::Waiting(number) => {
                Some(Up::Asked { ask: number, peer: self.link.number, blocks: ask.labels.clone() })
            }
            _ => None,
        };
        self.flight.push_back(Asked { ask, answer, at: 0, sent: 0 });
        if let Some(up) = up {
            self.shared.tell(up);
        }
    }

    /// The ask at position `at`, if the caller has answered it.
    pub(in crate::transport) fn answered(&mut self, at: usize) -> Option<&mut Asked> {
        self.flight.get_mut(at).filter(|asked| !matches!(asked.answer, Answer::Waiting(_)))
    }

    /// Ends the first ask.
    pub(in crate::transport) fn end(&mut self) {
        if let Some(asked) = self.flight.pop_front() {
            self.release(&asked);
        }
    }

    fn release(&self, asked: &Asked) {
        if let Answer::Granted { granted, .. } = &asked.answer {
            self.shared.tell(Up::Release { ask: granted.ask, sent: asked.sent });
        }
    }
}

impl Drop for Asks<'_> {
    fn drop(&mut self) {
        let untaken = self.desk.close();
        self.flight.iter().for_each(|asked| self.release(asked));
        untaken.iter().for_each(|granted| self.shared.tell(Up::Release { ask: granted.ask, sent: 0 }));
    }
}

// === impl Asked ===

impl Asked {
    /// The time since which slots are held for it.
    pub(in crate::transport) fn since(&self) -> Option<Instant> {
        match self.answer {
            Answer::Granted { since, .. } => Some(since),
            Answer::Waiting(_) | Answer::Refused(_) => None,
        }
    }

    /// The grant for block `at`, or the status without one. Requires an answer of the caller.
    pub(in crate::transport) fn grant(&self, at: usize) -> Result<Grant, Status> {
        match &self.answer {
            Answer::Granted { granted, .. } => granted.slots[at].ok_or(Status::Absent),
            Answer::Refused(status) => Err(*status),
            Answer::Waiting(_) => unreachable!("asked of an answered one alone"),
        }
    }
}

/// The bytes of a granted slot and their checksum; the caller gets a checksum unknown before. Fails for a
/// pool that has lost bytes: a checksum of its present bytes would call them right.
pub(in crate::transport) fn granted<'a>(
    shared: &'a Shared,
    label: &Label,
    grant: Grant,
) -> Result<(&'a [u8], u64), Status> {
    let bytes = shared.blocks.bytes(grant.slot.offset, label.bytes as usize);
    let bytes = bytes.expect("a granted slot lies in the pool");
    let checksum = grant.checksum.unwrap_or_else(|| pool::checksum(bytes));
    if !shared.blocks.is_whole() {
        return Err(Status::Absent);
    }
    if grant.checksum.is_none() {
        shared.tell(Up::Checksum { slot: grant.slot, checksum });
    }
    Ok((bytes, checksum))
}
