//! The serving side of one connection, and its thread: asks come in, blocks follow.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use super::asks::{StreamAsks, read_granted};
use crate::MeshError;
use crate::sync::read_clock;
use crate::transport::tcp::frame::{Block, BlockStatus, Frame, MalformedFrame};
use crate::transport::tcp::link::PeerLink;
use crate::transport::tcp::wire::{Broken, CHUNK_BYTES, Wire};
use crate::transport::tcp::{TcpLimits, TcpShared, serve};

pub(in crate::transport::tcp) struct ServingStream<'a> {
    shared: &'a TcpShared,
    link: Arc<PeerLink>,
    wire: Wire,
    asks: StreamAsks<'a>,
}

// === impl ServingStream ===

impl<'a> ServingStream<'a> {
    pub(in crate::transport::tcp) fn new(
        shared: &'a TcpShared,
        link: Arc<PeerLink>,
        wire: Wire,
    ) -> Result<Self, MeshError> {
        let asks = StreamAsks::new(shared, Arc::clone(&link))?;
        Ok(Self { shared, link, wire, asks })
    }

    /// Serves until the peer hangs up, is late or malformed, or sends no ask for long.
    pub(in crate::transport::tcp) fn serve_stream(mut self) {
        if let Err(broken) = self.serve_frames() {
            serve::part_from(self.shared, &self.link, &mut self.wire, &broken);
        }
    }

    fn serve_frames(&mut self) -> Result<(), Broken> {
        loop {
            self.asks.collect_grants();
            while !self.asks.full() && self.wire.readable()? {
                match self.wire.frame(read_clock() + self.shared.config.limits.progress)? {
                    Frame::Ask(ask) => self.asks.take_on(ask, None),
                    Frame::Stand(terms, ask) => self.asks.take_on(ask, Some(terms)),
                    other => return Err(MalformedFrame::Bytes(other.unexpected()).into()),
                }
            }
            if self.answer_block()? {
                continue;
            }
            let until = read_clock() + self.shared.config.limits.idle * 2;
            if !self.wire.wait_readable(!self.asks.full(), [self.asks.bell().as_fd()], until)? {
                return Ok(());
            }
        }
    }

    /// Answers one block. Returns false if the caller has yet to answer.
    fn answer_block(&mut self) -> Result<bool, Broken> {
        let Some(asked) = self.asks.answered(0) else { return Ok(false) };
        let at = asked.at;
        let (shared, label) = (self.shared, asked.ask.labels[at]);
        let grant = asked.grant_at(at).and_then(|grant| read_granted(shared, &label, grant));
        let since = asked.since();
        let index = asked.ask.first + at as u32;
        let status = grant.err().unwrap_or(BlockStatus::Whole);
        let missing = Block { ticket: asked.ask.ticket, index, status, bytes: 0, checksum: 0 };
        match grant {
            Ok((bytes, checksum)) => {
                self.send_block(Block { bytes: label.bytes, checksum, ..missing }, bytes, since)?;
            }
            Err(_) => self.wire.send_frame(&Frame::Block(missing), false, self.until(since))?,
        }
        let asked = self.asks.answered(0).expect("it was answered just now");
        asked.at += 1;
        asked.sent += u32::from(grant.is_ok());
        if asked.at == asked.ask.labels.len() {
            self.asks.end_front();
        }
        Ok(true)
    }

    /// The limit for a part of an ask's block. `since` is the time at which its slots were granted.
    fn until(&self, since: Option<Instant>) -> Instant {
        let TcpLimits { progress, whole, .. } = self.shared.config.limits;
        let part = read_clock() + progress;
        since.map_or(part, |since| part.min(since + whole))
    }

    fn send_block(&mut self, block: Block, bytes: &[u8], since: Option<Instant>) -> Result<(), Broken> {
        self.wire.send_frame(&Frame::Block(block), true, self.until(since))?;
        let mut left = bytes;
        while !left.is_empty() {
            let sent = self.wire.send_some(left, CHUNK_BYTES.min(left.len()), false, self.until(since))?;
            left = &left[sent..];
        }
        Ok(())
    }
}
