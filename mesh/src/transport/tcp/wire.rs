//! One connection, plain or with TLS. Every call has a time limit.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::time::Timespec;
use shm_protocol::blocks::PoolBlocks;

use super::frame::{BODY_BYTES_MAX, Frame, HEAD_BYTES, Head, MalformedFrame, VERSION};
use crate::sync::read_clock;
use crate::transport::{FetchFault, FetchStage, Refusal};

/// Bytes handled at once: with their checksum they stay in a core's second-level cache. So many must move, in
/// either direction, within a limit of progress.
pub(super) const CHUNK_BYTES: usize = 256 << 10;
/// Bytes that TLS decrypts before they go to the pool, or read at once of a dropped block.
const SCRATCH_BYTES: usize = 64 << 10;

pub(in crate::transport) struct Wire {
    stream: Arc<TcpStream>,
    tls: Option<Box<rustls::Connection>>,
    /// A body; grown once.
    body: Vec<u8>,
    /// Empty until first used.
    scratch: Vec<u8>,
}

/// The reason why nothing more can be read or written.
#[derive(Debug)]
pub(in crate::transport) enum Broken {
    Timeout,
    Eof,
    Io(ErrorKind),
    Malformed(MalformedFrame),
    Tls(rustls::Error),
}

// === impl Broken ===

impl Broken {
    /// The fault for a block in this stage.
    pub(in crate::transport) fn fault(&self, stage: FetchStage) -> FetchFault {
        match self {
            Self::Timeout => FetchFault::Timeout(stage),
            Self::Eof => FetchFault::Peer(ErrorKind::UnexpectedEof),
            Self::Io(kind) => FetchFault::Peer(*kind),
            Self::Malformed(MalformedFrame::Bytes(what)) => FetchFault::Malformed(what),
            Self::Malformed(MalformedFrame::Version(version)) => {
                FetchFault::Refused(Refusal::Version(*version))
            }
            // An error during the handshake concerns the peer's identity, a later one changed bytes.
            Self::Tls(_) if stage == FetchStage::Handshake => FetchFault::Refused(Refusal::Certificate),
            Self::Tls(rustls::Error::AlertReceived(_)) => FetchFault::Refused(Refusal::Certificate),
            Self::Tls(_) => FetchFault::Malformed("records that TLS does not accept"),
        }
    }
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Self::Timeout,
            ErrorKind::UnexpectedEof => Self::Eof,
            kind => Self::Io(kind),
        }
    }
}

impl From<MalformedFrame> for Broken {
    fn from(malformed: MalformedFrame) -> Self {
        Self::Malformed(malformed)
    }
}

impl From<rustls::Error> for Broken {
    fn from(error: rustls::Error) -> Self {
        Self::Tls(error)
    }
}

// === impl Wire ===

impl Wire {
    /// A connection over `stream`, with TLS if `tls` has a session.
    pub(super) fn new(stream: Arc<TcpStream>, tls: Option<rustls::Connection>) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self { stream, tls: tls.map(Box::new), body: Vec::new(), scratch: Vec::new() })
    }

    pub(super) fn stream(&self) -> &Arc<TcpStream> {
        &self.stream
    }

    /// Completes the handshake of TLS.
    pub(super) fn handshake(&mut self, until: Instant) -> Result<(), Broken> {
        while self.tls.as_ref().is_some_and(|tls| tls.is_handshaking()) {
            self.flush_tls(until)?;
            if self.tls.as_ref().is_some_and(|tls| tls.is_handshaking()) {
                self.read_tls(until)?;
            }
        }
        self.flush_tls(until)
    }

    pub(in crate::transport) fn frame(&mut self, until: Instant) -> Result<Frame, Broken> {
        let mut head = [0; HEAD_BYTES];
        self.read_exact(&mut head, until)?;
        let head = Head::parse(&head)?;
        let mut body = std::mem::take(&mut self.body);
        body.resize(BODY_BYTES_MAX, 0);
        let read = self.read_exact(&mut body[..head.body_bytes()], until);
        let frame = read.and_then(|()| Ok(head.decode_body(&body[..head.body_bytes()])?));
        self.body = body;
        frame
    }

    /// Sends a frame; with `more`, bytes follow at once.
    pub(in crate::transport) fn send_frame(
        &mut self,
        frame: &Frame,
        more: bool,
        until: Instant,
    ) -> Result<(), Broken> {
        let mut body = std::mem::take(&mut self.body);
        body.clear();
        frame.append_to(&mut body);
        let sent = self.send_bytes(&body, more, until);
        self.body = body;
        sent
    }

    /// Sends a refusal if that needs no wait.
    pub(in crate::transport) fn send_refusal(&mut self, refusal: Refusal) {
        let refusal = if let Refusal::Version(_) = refusal { Refusal::Version(VERSION) } else { refusal };
        let _ = self.stream.set_nonblocking(true);
        let _ = self.send_frame(
            &Frame::Refused(refusal),
            false,
            read_clock() + std::time::Duration::from_secs(1),
        );
    }

    pub(super) fn send_bytes(&mut self, bytes: &[u8], more: bool, until: Instant) -> Result<(), Broken> {
        self.send_some(bytes, bytes.len(), more, until).map(drop)
    }

    /// Sends at least `least` of the bytes, and returns how many it sent. The kernel gets all at once, which
    /// costs less than part after part; it takes fewer at the time limit.
    pub(super) fn send_some(
        &mut self,
        bytes: &[u8],
        least: usize,
        more: bool,
        until: Instant,
    ) -> Result<usize, Broken> {
        let mut sent = 0;
        while sent < least {
            let rest = &bytes[sent..];
            let taken = match &mut self.tls {
                Some(tls) => tls.writer().write(rest)?,
                None => {
                    self.stream.set_write_timeout(Some(time_left(until)?))?;
                    let more = if more { SendFlags::MORE } else { SendFlags::empty() };
                    match rustix::net::send(&*self.stream, rest, SendFlags::NOSIGNAL | more) {
                        Err(Errno::INTR) => 0,
                        taken => taken.map_err(io::Error::from)?,
                    }
                }
            };
            sent += taken;
            // Bytes in TLS's buffer go out when it is full, or at the end.
            if taken == 0 || (sent == bytes.len() && !more) {
                self.flush_tls(until)?;
            }
        }
        Ok(sent)
    }

    /// Fills a part of a block, of at most [`CHUNK_BYTES`].
    pub(super) fn receive(
        &mut self,
        blocks: &PoolBlocks,
        offset: u64,
        len: usize,
        until: Instant,
    ) -> Result<(), Broken> {
        let mut at = 0;
        while at < len {
            let into = offset + at as u64;
            at += if self.tls.is_some() {
                self.with_scratch(len - at, until, |bytes| {
                    assert!(blocks.fill(into, bytes), "checked when posted")
                })?
            } else {
                self.stream.set_read_timeout(Some(time_left(until)?))?;
                match blocks.receive(&*self.stream, into, len - at) {
                    Ok(0) => return Err(Broken::Eof),
                    Err(Errno::INTR) => 0,
                    received => received.map_err(io::Error::from)?,
                }
            };
        }
        Ok(())
    }

    /// Reads and drops bytes.
    pub(super) fn discard(&mut self, len: usize, until: Instant) -> Result<(), Broken> {
        let mut left = len;
        while left > 0 {
            left -= self.with_scratch(left, until, |_| {})?;
        }
        Ok(())
    }

    /// Waits until the peer has sent something or hung up, or one of `bells` is readable. Returns false at `until`.
    pub(in crate::transport) fn wait_readable<'a>(
        &mut self,
        listen: bool,
        bells: impl IntoIterator<Item = BorrowedFd<'a>>,
        until: Instant,
    ) -> Result<bool, Broken> {
        if listen && self.buffered()? {
            return Ok(true);
        }
        let events = if listen { PollFlags::IN | PollFlags::RDHUP } else { PollFlags::RDHUP };
        let bells = bells.into_iter().map(|bell| PollFd::from_borrowed_fd(bell, PollFlags::IN));
        let mut fds: Vec<_> = std::iter::once(PollFd::new(&*self.stream, events)).chain(bells).collect();
        let limit = Timespec::try_from(until.saturating_duration_since(read_clock())).ok();
        match rustix::event::poll(&mut fds, limit.as_ref()) {
            Ok(ready) => {
                let gone = PollFlags::ERR | PollFlags::HUP | PollFlags::RDHUP;
                if fds[0].revents().intersects(gone) { Err(Broken::Eof) } else { Ok(ready > 0) }
            }
            Err(Errno::INTR) => Ok(true),
            Err(errno) => Err(io::Error::from(errno).into()),
        }
    }

    /// True if the peer's bytes can be read. Fails if it has hung up.
    pub(in crate::transport) fn readable(&mut self) -> Result<bool, Broken> {
        if self.buffered()? {
            return Ok(true);
        }
        match rustix::net::recv(&*self.stream, &mut [0u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Err(Broken::Eof),
            Ok(_) => Ok(true),
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(errno) => Err(io::Error::from(errno).into()),
        }
    }

    fn buffered(&mut self) -> Result<bool, Broken> {
        let Some(tls) = &mut self.tls else { return Ok(false) };
        Ok(tls.process_new_packets()?.plaintext_bytes_to_read() > 0)
    }

    fn read_exact(&mut self, mut into: &mut [u8], until: Instant) -> Result<(), Broken> {
        while !into.is_empty() {
            let read = self.read_some(into, until)?;
            into = &mut into[read..];
        }
        Ok(())
    }

    fn with_scratch(
        &mut self,
        len: usize,
        until: Instant,
        take: impl FnOnce(&[u8]),
    ) -> Result<usize, Broken> {
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.resize(SCRATCH_BYTES, 0);
        let read = self.read_some(&mut scratch[..len.min(SCRATCH_BYTES)], until);
        if let Ok(read) = read {
            take(&scratch[..read]);
        }
        self.scratch = scratch;
        read
    }

    /// Reads at least one byte.
    fn read_some(&mut self, into: &mut [u8], until: Instant) -> Result<usize, Broken> {
        loop {
            let read = match &mut self.tls {
                Some(tls) => tls.reader().read(into),
                None => {
                    self.stream.set_read_timeout(Some(time_left(until)?))?;
                    (&*self.stream).read(into)
                }
            };
            match read {
                Ok(0) => return Err(Broken::Eof),
                Ok(read) => return Ok(read),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock && self.tls.is_some() => {
                    self.read_tls(until)?
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn read_tls(&mut self, until: Instant) -> Result<(), Broken> {
        let Some(tls) = &mut self.tls else { return Ok(()) };
        self.stream.set_read_timeout(Some(time_left(until)?))?;
        match tls.read_tls(&mut &*self.stream) {
            Ok(0) => return Err(Broken::Eof),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            read => drop(read?),
        }
        if let Err(error) = tls.process_new_packets() {
            // The alert with the reason goes to the peer.
            let _ = tls.write_tls(&mut &*self.stream);
            return Err(error.into());
        }
        self.flush_tls(until)
    }

    fn flush_tls(&mut self, until: Instant) -> Result<(), Broken> {
        let Some(tls) = &mut self.tls else { return Ok(()) };
        while tls.wants_write() {
            self.stream.set_write_timeout(Some(time_left(until)?))?;
            match tls.write_tls(&mut &*self.stream) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                written => drop(written?),
            }
        }
        Ok(())
    }
}

/// The rest of a time limit.
fn time_left(until: Instant) -> Result<std::time::Duration, Broken> {
    let left = until.saturating_duration_since(read_clock());
    if left.is_zero() { Err(Broken::Timeout) } else { Ok(left) }
}
