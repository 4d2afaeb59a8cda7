//! Frames of the TCP transport. Little-endian, of bounded length, and verified before use.
//!
//! ```text
//! head  [magic u32][version u16][kind u16][body bytes u32][zero u32][check u64: XXH3-64 of the 16 bytes before and the body]
//! body  Hello    [boot u64][boot wanted of the other u64, 0 = any][node bytes u16][node wanted bytes u16][both names]
//!       Welcome  [boot u64]
//!       Refused  [reason u32][version of who refuses u16][its NICs u8][its queue pairs of each NIC u8]
//!       Ask      [ticket u64][first index u32][count u32] count x [namespace 16][hash 32][group u32][bytes u32]
//!       Block    [ticket u64][index u32][status u32][bytes u32][zero u32][checksum u64], then `bytes` of the block
//!       Queue    [pairs of each NIC u16][number u16][NICs u16][NIC u16][queue pair u32][first packet u32][local id u16]
//!                [MTU code u8][READs at once u8][key u32][gid 16], then for each NIC [NUMA node u16, 0xffff = unknown]
//!       Lent     [ticket u64][first index u32][count u32][lease ms u32][zero u32] count x [address u64][checksum u64][bytes u32][status u32]
//!       Read     [ticket u64][first index u32][zero u32]
//!       Stood    [ticket u64][first index u32][1 if it stood, 0 if not u32]
//!       InStream nothing
//!       Stand    [patience ms u32][place in the prompt u32], then the body of an Ask
//! ```
//!
//! The connecting side sends Hello, and gets Welcome or Refused. Then it sends Asks, and gets one Block for
//! each block, in the order asked. A block's bytes lie outside the frame, with their checksum in it. A Stand is
//! an Ask for promised blocks. It waits for them at the other side and lets later Asks pass; the Blocks of both
//! are told apart by ticket and index. The connecting side sends it only to a node whose inventory greeting
//! states that the node keeps standing asks, and only without RDMA. With
//! RDMA, both sides send Queue first, an Ask is answered by Lent, and after the READs of its blocks, Read by
//! Stood ([`lease`]). If one side sends InStream instead, blocks follow on the stream as above. The head and
//! Refused are the same in every version, so a peer of another version understands its refusal.

pub mod lease;
#[cfg(test)]
mod tests;

use std::hash::Hasher;
use std::num::NonZeroU64;

use shm_protocol::key::{BlockHash, NamespaceDigest};
use shm_protocol::pool::SEGMENT_BYTES_MAX;
use thiserror::Error;
use twox_hash::XxHash3_64;

use self::lease::{AskId, Lent, QueueOffer};
use crate::transport::{BootId, FetchFault, Label, NODE_BYTES_MAX, NodeId, Refusal, StandingTerms};

pub const MAGIC: u32 = u32::from_le_bytes(*b"PILM");
/// Version of these frames. Another version is refused.
pub const VERSION: u16 = 1;
/// Bytes of a head.
pub const HEAD_BYTES: usize = 24;
/// Maximum blocks of one Ask: enough to keep a stream busy with the smallest blocks, in a frame of at most 15
/// KiB.
pub const ASK_BLOCKS_MAX: usize = 256;
/// Maximum Asks of a stream without a whole answer.
pub const ASKS_MAX: usize = 4;
/// Maximum Stands of a stream whose blocks are not all committed.
pub const STANDING_MAX: usize = 256;
/// Maximum bytes of a body: a Stand has the longest.
pub const BODY_BYTES_MAX: usize = TERMS_BYTES + ASK_FIXED_BYTES + ASK_BLOCKS_MAX * LABEL_BYTES;
/// Longest patience of a Stand, in milliseconds.
pub const PATIENCE_MS_MAX: u32 = 60_000;

const ASK_FIXED_BYTES: usize = 16;
const TERMS_BYTES: usize = 8;
const LABEL_BYTES: usize = 56;
const CHECKED_BYTES: usize = 16;
const _: () = assert!(20 + 2 * NODE_BYTES_MAX <= BODY_BYTES_MAX && lease::BODY_BYTES_MAX <= BODY_BYTES_MAX);

const HELLO: u16 = 1;
const WELCOME: u16 = 2;
const REFUSED: u16 = 3;
const ASK: u16 = 4;
const BLOCK: u16 = 5;
const QUEUE: u16 = 6;
const LENT: u16 = 7;
const READ: u16 = 8;
const STOOD: u16 = 9;
const IN_STREAM: u16 = 10;
const STAND: u16 = 11;

/// The head of a frame, before its body has arrived.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Head {
    kind: u16,
    body_bytes: u32,
    check: u64,
    checked: [u8; CHECKED_BYTES],
}

#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Frame {
    /// The connecting node, and the node it expects.
    Hello(HelloFrame),
    /// The life of the answering node.
    Welcome(BootId),
    Refused(Refusal),
    Ask(AskFrame),
    /// An Ask for promised blocks.
    Stand(StandingTerms, AskFrame),
    /// One block, or the reason why it does not follow.
    Block(Block),
    /// This side's end of a queue pair.
    Queue(QueueOffer),
    /// The places of an Ask's blocks.
    Lent(Lent),
    /// The blocks of a Lent have been read: its lease may end.
    Read(AskId),
    /// True if the lease stood until that Read.
    Stood(AskId, bool),
    /// Sent instead of a Queue: this side has no queue pair, so blocks follow on the stream.
    InStream,
}

/// The connecting node, and the node it expects.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct HelloFrame {
    pub node: NodeId,
    pub boot: BootId,
    /// The node it expects.
    pub wanted_node: NodeId,
    /// The life it expects.
    pub wanted_boot: Option<BootId>,
}

/// Blocks requested, numbered from `first`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct AskFrame {
    /// The asking side's number of the fetch.
    pub ticket: u64,
    /// Number of the first block in the fetch.
    pub first: u32,
    pub labels: Vec<Label>,
}

/// One block, or the reason why it does not follow.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Block {
    pub ticket: u64,
    /// The block's number in the fetch.
    pub index: u32,
    pub status: BlockStatus,
    pub bytes: u32,
    pub checksum: u64,
}

/// The state of a block in an answer.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum BlockStatus {
    Whole,
    /// There is no such block.
    Absent,
    /// The node is about to end.
    Draining,
    /// The limit of requests under way is reached.
    Busy,
}

/// Bytes that are not a frame. Nothing more can be read from the stream.
#[derive(Copy, Clone, Debug, Eq, Error, PartialEq)]
pub enum MalformedFrame {
    /// The bytes are from another protocol, or were lost or changed on the way.
    #[error("{0}")]
    Bytes(&'static str),
    /// A frame of another version.
    #[error("frames of version {0}")]
    Version(u16),
}

/// Reads a body field by field; every read is checked.
struct FrameReader<'a>(&'a [u8]);

// === impl Head ===

impl Head {
    /// Parses a head and checks it as far as possible without its body.
    pub fn parse(bytes: &[u8; HEAD_BYTES]) -> Result<Self, MalformedFrame> {
        let mut reader = FrameReader(bytes);
        let checked = *bytes.first_chunk().expect("a head is longer");
        let (magic, version, kind) = (reader.u32()?, reader.u16()?, reader.u16()?);
        let (body_bytes, zero, check) = (reader.u32()?, reader.u32()?, reader.u64()?);
        if magic != MAGIC || zero != 0 {
            return Err(MalformedFrame::Bytes("bytes that are not a frame"));
        }
        if version != VERSION && kind != REFUSED {
            return Err(MalformedFrame::Version(version));
        }
        if body_bytes as usize > BODY_BYTES_MAX {
            return Err(MalformedFrame::Bytes("a frame that is too long"));
        }
        Ok(Self { kind, body_bytes, check, checked })
    }

    /// Bytes of the body that follows: at most [`BODY_BYTES_MAX`].
    pub fn body_bytes(&self) -> usize {
        self.body_bytes as usize
    }

    /// Checks a body and decodes the frame of this head.
    pub fn decode_body(&self, body: &[u8]) -> Result<Frame, MalformedFrame> {
        if body.len() != self.body_bytes() || compute_check(&self.checked, body) != self.check {
            return Err(MalformedFrame::Bytes("a frame whose checksum does not match"));
        }
        let mut reader = FrameReader(body);
        let frame = match self.kind {
            HELLO => Frame::Hello(reader.hello()?),
            WELCOME => Frame::Welcome(reader.boot()?.ok_or(MalformedFrame::Bytes("an invalid life"))?),
            REFUSED => Frame::Refused(reader.refusal()?),
            ASK => Frame::Ask(reader.read_ask()?),
            STAND => Frame::Stand(reader.read_terms()?, reader.read_ask()?),
            BLOCK => Frame::Block(reader.block()?),
            QUEUE => Frame::Queue(reader.queue()?),
            LENT => Frame::Lent(reader.lent()?),
            READ => Frame::Read(reader.read_read_frame()?),
            STOOD => reader.stood()?,
            IN_STREAM => Frame::InStream,
            _ => return Err(MalformedFrame::Bytes("a frame of an unknown kind")),
        };
        if !reader.0.is_empty() {
            return Err(MalformedFrame::Bytes("a frame that is longer than its content"));
        }
        Ok(frame)
    }
}

fn compute_check(checked: &[u8; CHECKED_BYTES], body: &[u8]) -> u64 {
    let mut hash = XxHash3_64::new();
    hash.write(checked);
    hash.write(body);
    hash.finish()
}

// === impl Frame ===

impl Frame {
    /// Appends the frame. It has at most [`ASK_BLOCKS_MAX`] blocks.
    pub fn append_to(&self, out: &mut Vec<u8>) {
        let begin = out.len();
        out.extend_from_slice(&[0; HEAD_BYTES]);
        let kind = match self {
            Self::Hello(hello) => hello.append_body(out),
            Self::Welcome(boot) => {
                out.extend_from_slice(&boot.0.get().to_le_bytes());
                WELCOME
            }
            Self::Refused(refusal) => encode_refusal(*refusal, out),
            Self::Ask(ask) => ask.append_body(out),
            Self::Stand(terms, ask) => {
                out.extend_from_slice(&terms.patience_ms.to_le_bytes());
                out.extend_from_slice(&terms.place.to_le_bytes());
                ask.append_body(out);
                STAND
            }
            Self::Block(block) => block.append_body(out),
            Self::Queue(queue) => queue.append_body(out),
            Self::Lent(lent) => lent.append_body(out),
            Self::Read(turn) => turn.append_body(0, READ, out),
            Self::Stood(turn, stood) => turn.append_body((*stood).into(), STOOD, out),
            Self::InStream => IN_STREAM,
        };
        let (head, body) = out[begin..].split_at_mut(HEAD_BYTES);
        assert!(body.len() <= BODY_BYTES_MAX, "a frame is bounded where it is made");
        head[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        head[4..6].copy_from_slice(&VERSION.to_le_bytes());
        head[6..8].copy_from_slice(&kind.to_le_bytes());
        head[8..12].copy_from_slice(&(body.len() as u32).to_le_bytes());
        let check = compute_check(head.first_chunk().expect("a head is longer"), body);
        head[CHECKED_BYTES..].copy_from_slice(&check.to_le_bytes());
    }

    /// Names this frame in the fault of a peer that sent it unexpectedly.
    pub fn unexpected(&self) -> &'static str {
        match self {
            Self::Hello(_) => "a Hello out of turn",
            Self::Welcome(_) => "a Welcome out of turn",
            Self::Refused(_) => "a refusal",
            Self::Ask(_) => "an Ask out of turn",
            Self::Stand(..) => "a Stand out of turn",
            Self::Block(_) => "a Block out of turn",
            Self::Queue(_) => "a Queue out of turn",
            Self::Lent(_) => "a Lent out of turn",
            Self::Read(_) => "a Read out of turn",
            Self::Stood(..) => "a Stood out of turn",
            Self::InStream => "an InStream out of turn",
        }
    }
}

impl HelloFrame {
    fn append_body(&self, out: &mut Vec<u8>) -> u16 {
        let (node, wanted) = (self.node.as_str(), self.wanted_node.as_str());
        out.extend_from_slice(&self.boot.0.get().to_le_bytes());
        out.extend_from_slice(&self.wanted_boot.map_or(0, |boot| boot.0.get()).to_le_bytes());
        out.extend_from_slice(&(node.len() as u16).to_le_bytes());
        out.extend_from_slice(&(wanted.len() as u16).to_le_bytes());
        out.extend_from_slice(node.as_bytes());
        out.extend_from_slice(wanted.as_bytes());
        HELLO
    }
}

impl AskFrame {
    fn append_body(&self, out: &mut Vec<u8>) -> u16 {
        out.extend_from_slice(&self.ticket.to_le_bytes());
        out.extend_from_slice(&self.first.to_le_bytes());
        out.extend_from_slice(&(self.labels.len() as u32).to_le_bytes());
        for label in &self.labels {
            out.extend_from_slice(&label.namespace.0);
            out.extend_from_slice(&label.hash.0);
            out.extend_from_slice(&label.group.to_le_bytes());
            out.extend_from_slice(&label.bytes.to_le_bytes());
        }
        ASK
    }
}

impl Block {
    fn append_body(&self, out: &mut Vec<u8>) -> u16 {
        out.extend_from_slice(&self.ticket.to_le_bytes());
        out.extend_from_slice(&self.index.to_le_bytes());
        out.extend_from_slice(&(self.status as u32).to_le_bytes());
        out.extend_from_slice(&self.bytes.to_le_bytes());
        out.extend_from_slice(&0u32.to_le_bytes());
        out.extend_from_slice(&self.checksum.to_le_bytes());
        BLOCK
    }
}

/// The wire has this order: a new reason goes to the end.
const REASONS: [Refusal; 10] = [
    Refusal::Malformed,
    Refusal::Version(0),
    Refusal::OtherNode,
    Refusal::OtherBoot,
    Refusal::NotMember,
    Refusal::Certificate,
    Refusal::Busy,
    Refusal::Draining,
    Refusal::Queues { nics: 0, pairs: 0 },
    Refusal::Full,
];

fn encode_refusal(refusal: Refusal, out: &mut Vec<u8>) -> u16 {
    let same = |reason: &Refusal| std::mem::discriminant(reason) == std::mem::discriminant(&refusal);
    let code = REASONS.iter().position(same).expect("every reason has a number");
    out.extend_from_slice(&(code as u32).to_le_bytes());
    let version = if let Refusal::Version(version) = refusal { version } else { VERSION };
    out.extend_from_slice(&version.to_le_bytes());
    let (nics, pairs) = if let Refusal::Queues { nics, pairs } = refusal { (nics, pairs) } else { (0, 0) };
    out.extend_from_slice(&[nics, pairs]);
    REFUSED
}

// === impl BlockStatus ===

impl BlockStatus {
    /// The fault of a block that does not follow; `None` if it follows.
    pub(in crate::transport) fn missing(self) -> Option<FetchFault> {
        match self {
            Self::Whole => None,
            Self::Absent => Some(FetchFault::Absent),
            Self::Draining => Some(FetchFault::Refused(Refusal::Draining)),
            Self::Busy => Some(FetchFault::Refused(Refusal::Busy)),
        }
    }
}

// === impl FrameReader ===

impl FrameReader<'_> {
    fn take_bytes<const N: usize>(&mut self) -> Result<[u8; N], MalformedFrame> {
        let short = MalformedFrame::Bytes("a frame that is shorter than its content");
        let (taken, rest) = self.0.split_first_chunk().ok_or(short)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u16(&mut self) -> Result<u16, MalformedFrame> {
        self.take_bytes().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, MalformedFrame> {
        self.take_bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, MalformedFrame> {
        self.take_bytes().map(u64::from_le_bytes)
    }

    fn boot(&mut self) -> Result<Option<BootId>, MalformedFrame> {
        Ok(NonZeroU64::new(self.u64()?).map(BootId))
    }

    fn node(&mut self, len: u16) -> Result<NodeId, MalformedFrame> {
        let wrong = MalformedFrame::Bytes("an invalid name");
        let (name, rest) = self.0.split_at_checked(len.into()).ok_or(wrong)?;
        self.0 = rest;
        let name = std::str::from_utf8(name).map_err(|_| wrong)?;
        NodeId::new(name).map_err(|_| wrong)
    }

    fn hello(&mut self) -> Result<HelloFrame, MalformedFrame> {
        let boot = self.boot()?.ok_or(MalformedFrame::Bytes("an invalid life"))?;
        let wanted_boot = self.boot()?;
        let (node, wanted) = (self.u16()?, self.u16()?);
        Ok(HelloFrame { boot, wanted_boot, node: self.node(node)?, wanted_node: self.node(wanted)? })
    }

    fn refusal(&mut self) -> Result<Refusal, MalformedFrame> {
        let (code, version, [nics, pairs]) = (self.u32()?, self.u16()?, self.take_bytes()?);
        Ok(match REASONS.get(code as usize) {
            Some(Refusal::Version(_)) => Refusal::Version(version),
            Some(Refusal::Queues { .. }) => Refusal::Queues { nics, pairs },
            Some(reason) => *reason,
            None => return Err(MalformedFrame::Bytes("a refusal without a known reason")),
        })
    }

    fn read_terms(&mut self) -> Result<StandingTerms, MalformedFrame> {
        let (patience_ms, place) = (self.u32()?, self.u32()?);
        if patience_ms > PATIENCE_MS_MAX || place.checked_add(ASK_BLOCKS_MAX as u32).is_none() {
            return Err(MalformedFrame::Bytes("a Stand with invalid terms"));
        }
        Ok(StandingTerms { patience_ms, place })
    }

    fn read_ask(&mut self) -> Result<AskFrame, MalformedFrame> {
        let (ticket, first, count) = (self.u64()?, self.u32()?, self.u32()?);
        if !(1..=ASK_BLOCKS_MAX as u32).contains(&count) || first.checked_add(count).is_none() {
            return Err(MalformedFrame::Bytes("an Ask of zero or too many blocks"));
        }
        let labels = (0..count).map(|_| self.label()).collect::<Result<_, _>>()?;
        Ok(AskFrame { ticket, first, labels })
    }

    fn label(&mut self) -> Result<Label, MalformedFrame> {
        let (namespace, hash) = (NamespaceDigest(self.take_bytes()?), BlockHash(self.take_bytes()?));
        let (group, bytes) = (self.u32()?, self.u32()?);
        if bytes == 0 || u64::from(bytes) > SEGMENT_BYTES_MAX {
            return Err(MalformedFrame::Bytes("a block of an invalid size"));
        }
        Ok(Label { namespace, group, hash, bytes })
    }

    fn block(&mut self) -> Result<Block, MalformedFrame> {
        let (ticket, index, status) = (self.u64()?, self.u32()?, self.u32()?);
        let (bytes, zero, checksum) = (self.u32()?, self.u32()?, self.u64()?);
        let status = status_of(status)?;
        if zero != 0 || (status == BlockStatus::Whole) != (bytes > 0) {
            return Err(MalformedFrame::Bytes("a Block that contradicts itself"));
        }
        Ok(Block { ticket, index, status, bytes, checksum })
    }
}

fn status_of(code: u32) -> Result<BlockStatus, MalformedFrame> {
    let statuses = [BlockStatus::Whole, BlockStatus::Absent, BlockStatus::Draining, BlockStatus::Busy];
    statuses.get(code as usize).copied().ok_or(MalformedFrame::Bytes("a block of unknown status"))
}
