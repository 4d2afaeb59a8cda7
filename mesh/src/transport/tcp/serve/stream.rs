//! One connection of a peer that asks, and its thread.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use twox_hash::XxHash3_64;

use super::Desk;
use crate::Error;
use crate::transport::tcp::frame::{ASKS_MAX, Ask, Block, Frame, Malformed, Status};
use crate::transport::tcp::link::Link;
use crate::transport::tcp::wire::{Broken, CHUNK_BYTES, Wire};
use crate::transport::tcp::{Shared, eventfd, greeting, now};
use crate::transport::{Fault, Grant, Granted, Label, Stage, Up};

/// A member's connection.
pub(super) struct Stream<'a> {
    shared: &'a Shared,
    link: Arc<Link>,
    wire: Wire,
    desk: Arc<Desk>,
    /// In the order asked, in which they are answered.
    flight: VecDeque<Asked>,
}

/// What a peer has asked for.
struct Asked {
    ask: Ask,
    answer: Answer,
    /// Blocks answered.
    at: usize,
    /// Blocks of them sent whole.
    sent: u32,
}

enum Answer {
    /// The caller has not answered this ask yet.
    Waiting(u64),
    Granted(Granted),
    /// Every block has this status.
    Refused(Status),
}

// === impl Stream ===

impl<'a> Stream<'a> {
    pub(super) fn new(shared: &'a Shared, wire: Wire, link: Arc<Link>) -> Result<Self, Error> {
        let desk = Arc::new(Desk { granted: Mutex::new(Some(Vec::new())), bell: eventfd()? });
        Ok(Self { shared, link, wire, desk, flight: VecDeque::new() })
    }

    /// Until the peer hangs up, is late or malformed, or nothing was asked for long.
    pub(super) fn run(mut self) {
        let Err(broken) = self.serve() else { return };
        let fault = broken.fault(Stage::Progress);
        if let Broken::Malformed(malformed) = &broken {
            self.wire.refuse(greeting::refusal(malformed));
        }
        if matches!(fault, Fault::Malformed(_)) && self.link.open() {
            self.shared.note_rarely(format!("{} was hung up on: {fault}", self.link.peer.node));
            self.shared.tell(Up::PeerDown { peer: self.link.number, fault });
        }
    }

    fn serve(&mut self) -> Result<(), Broken> {
        loop {
            for granted in self.desk.take() {
                let named =
                    |asked: &&mut Asked| matches!(asked.answer, Answer::Waiting(ask) if ask == granted.ask);
                let asked = self.flight.iter_mut().find(named).expect("an ask is kept until it is answered");
                asked.answer = Answer::Granted(granted);
            }
            while self.flight.len() < ASKS_MAX && self.wire.readable()? {
                self.read()?;
            }
            if self.answer()? {
                continue;
            }
            let listen = self.flight.len() < ASKS_MAX;
            if !self.wire.wait(listen, &self.desk.bell, now() + self.shared.config.limits.idle * 2)? {
                return Ok(());
            }
            let _ = rustix::io::read(&self.desk.bell, &mut [0u8; 8]);
        }
    }

    /// Reads an ask and hands it to the caller.
    fn read(&mut self) -> Result<(), Broken> {
        let frame = self.wire.frame(now() + self.shared.config.limits.progress)?;
        let Frame::Ask(ask) = frame else { return Err(Malformed::Bytes(frame.unexpected()).into()) };
        let answer = if self.shared.draining() {
            Answer::Refused(Status::Draining)
        } else {
            self.shared
                .served
                .ask(&self.desk, ask.labels.len())
                .map_or(Answer::Refused(Status::Busy), Answer::Waiting)
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
        Ok(())
    }

    /// Answers one block. False where the caller must answer first.
    fn answer(&mut self) -> Result<bool, Broken> {
        let Some(asked) = self.flight.front_mut() else { return Ok(false) };
        let at = asked.at;
        let (grant, status) = match &asked.answer {
            Answer::Waiting(_) => return Ok(false),
            Answer::Granted(granted) => (granted.slots[at], Status::Absent),
            Answer::Refused(status) => (None, *status),
        };
        asked.at += 1;
        let (ticket, index, label) = (asked.ask.ticket, asked.ask.first + at as u32, asked.ask.labels[at]);
        let missing = Block { ticket, index, status, bytes: 0, checksum: 0 };
        match grant {
            Some(grant) => self.send(missing, &label, grant)?,
            None => {
                let until = now() + self.shared.config.limits.progress;
                self.wire.send_frame(&Frame::Block(missing), false, until)?;
            }
        }
        let asked = self.flight.front_mut().expect("it was answered just now");
        asked.sent += u32::from(grant.is_some());
        if asked.at == asked.ask.labels.len() {
            let ended = self.flight.pop_front();
            ended.iter().for_each(|asked| self.release(asked));
        }
        Ok(true)
    }

    fn send(&mut self, missing: Block, label: &Label, grant: Grant) -> Result<(), Broken> {
        let bytes = self.shared.blocks.bytes(grant.slot.offset, label.bytes as usize);
        let bytes = bytes.expect("a granted slot lies in the pool");
        let checksum = grant.checksum.unwrap_or_else(|| {
            let checksum = XxHash3_64::oneshot(bytes);
            self.shared.tell(Up::Checksum { slot: grant.slot, checksum });
            checksum
        });
        let progress = self.shared.config.limits.progress;
        let block = Block { status: Status::Whole, bytes: label.bytes, checksum, ..missing };
        self.wire.send_frame(&Frame::Block(block), true, now() + progress)?;
        let mut left = bytes.len();
        for chunk in bytes.chunks(CHUNK_BYTES) {
            left -= chunk.len();
            self.wire.send(chunk, left > 0, now() + progress)?;
        }
        Ok(())
    }

    fn release(&self, asked: &Asked) {
        if let Answer::Granted(granted) = &asked.answer {
            self.shared.tell(Up::Release { ask: granted.ask, sent: asked.sent });
        }
    }
}

impl Drop for Stream<'_> {
    /// However it ends: what was granted is released. What is granted from now on is released where it is granted.
    fn drop(&mut self) {
        let untaken = self.desk.close();
        self.flight.iter().for_each(|asked| self.release(asked));
        untaken.iter().for_each(|granted| self.shared.tell(Up::Release { ask: granted.ask, sent: 0 }));
    }
}
