//! Frames of a stream with blocks by RDMA: the ends of its queue pair, and leases of slots to read.

use super::{ASK_BLOCKS_MAX, Frame, LENT, Malformed, QUEUE, Reader, Status, status_of};
use crate::transport::Refusal;

/// Maximum NICs of a node: two for each GPU of a large host.
pub const NICS_MAX: usize = 16;
/// Maximum time of a lease: a longer one would let a hanging peer hold too many slots.
pub const LEASE_MS_MAX: u32 = 60_000;
/// Bytes of the longest body, that of a Lent.
pub(super) const BODY_BYTES_MAX: usize = 24 + ASK_BLOCKS_MAX * 24;

const UNKNOWN: u16 = u16::MAX;

/// This side's end of a queue pair, and the numbers to be equal on both sides.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Queue {
    /// Queue pairs of each NIC to a peer.
    pub pairs: u16,
    /// Number of the stream.
    pub number: u16,
    /// The NUMA node of each of this side's NICs, if known.
    pub nics: Vec<Option<u16>>,
    /// The NIC with the queue pair.
    pub nic: u16,
    /// The end for the peer to connect to.
    pub end: QueueEnd,
    /// The remote key of the lending side's pool.
    pub key: u32,
}

/// One end of a reliable connection.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct QueueEnd {
    /// Number of the queue pair, 24 bits.
    pub number: u32,
    /// Number of its first packet, 24 bits.
    pub packet: u32,
    /// The port's local id; zero on Ethernet.
    pub lid: u16,
    /// The port's MTU as verbs number it: 1 is 256 bytes, 5 is 4096.
    pub mtu: u8,
    /// Maximum READs under way at once.
    pub reads: u8,
    /// The port's global id.
    pub gid: [u8; 16],
}

/// Identifies an Ask.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Turn {
    /// The asking side's number of the fetch.
    pub ticket: u64,
    /// Number of the first block in the fetch.
    pub first: u32,
}

/// The answer to an Ask: the places of its blocks, until the lease ends.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Lent {
    pub turn: Turn,
    /// Milliseconds from now in which the blocks may be read.
    pub lease_ms: u32,
    /// The blocks, in the order asked.
    pub places: Vec<Place>,
}

/// The place of a block, or the reason why it cannot be read.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Place {
    /// Its address in the owner's memory.
    pub address: u64,
    pub checksum: u64,
    pub bytes: u32,
    /// [`Status::Whole`] if the block can be read.
    pub status: Status,
}

// === impl Queue ===

impl Queue {
    /// The refusal for a peer with other numbers: these numbers of NICs and queue pairs.
    pub fn mismatch(&self) -> Refusal {
        Refusal::Queues { nics: self.nics.len() as u8, pairs: self.pairs as u8 }
    }

    pub(super) fn encode(&self, out: &mut Vec<u8>) -> u16 {
        let end = &self.end;
        for half in [self.pairs, self.number, self.nics.len() as u16, self.nic] {
            out.extend_from_slice(&half.to_le_bytes());
        }
        out.extend_from_slice(&end.number.to_le_bytes());
        out.extend_from_slice(&end.packet.to_le_bytes());
        out.extend_from_slice(&end.lid.to_le_bytes());
        out.extend_from_slice(&[end.mtu, end.reads]);
        out.extend_from_slice(&self.key.to_le_bytes());
        out.extend_from_slice(&end.gid);
        for node in &self.nics {
            out.extend_from_slice(&node.unwrap_or(UNKNOWN).to_le_bytes());
        }
        QUEUE
    }
}

// === impl Turn ===

impl Turn {
    pub(super) fn encode(self, word: u32, kind: u16, out: &mut Vec<u8>) -> u16 {
        out.extend_from_slice(&self.ticket.to_le_bytes());
        out.extend_from_slice(&self.first.to_le_bytes());
        out.extend_from_slice(&word.to_le_bytes());
        kind
    }
}

// === impl Lent ===

impl Lent {
    pub(super) fn encode(&self, out: &mut Vec<u8>) -> u16 {
        self.turn.encode(self.places.len() as u32, LENT, out);
        out.extend_from_slice(&self.lease_ms.to_le_bytes());
        out.extend_from_slice(&0u32.to_le_bytes());
        for place in &self.places {
            out.extend_from_slice(&place.address.to_le_bytes());
            out.extend_from_slice(&place.checksum.to_le_bytes());
            out.extend_from_slice(&place.bytes.to_le_bytes());
            out.extend_from_slice(&(place.status as u32).to_le_bytes());
        }
        LENT
    }
}

// === impl Reader ===

impl Reader<'_> {
    pub(super) fn queue(&mut self) -> Result<Queue, Malformed> {
        let (pairs, number, count, nic) = (self.u16()?, self.u16()?, self.u16()?, self.u16()?);
        let (queue_pair, packet, lid, [mtu, reads]) = (self.u32()?, self.u32()?, self.u16()?, self.take()?);
        let (key, gid) = (self.u32()?, self.take()?);
        let end = QueueEnd { number: queue_pair, packet, lid, mtu, reads, gid };
        let wide = (queue_pair | packet) >> 24 != 0;
        if wide || !(1..=5).contains(&mtu) || reads == 0 {
            return Err(Malformed::Bytes("an invalid queue pair"));
        }
        if !(1..=NICS_MAX).contains(&count.into()) || nic >= count || !(1..=255).contains(&pairs) {
            return Err(Malformed::Bytes("invalid NICs"));
        }
        let node = |node| (node != UNKNOWN).then_some(node);
        let nics = (0..count).map(|_| self.u16().map(node)).collect::<Result<_, _>>()?;
        Ok(Queue { pairs, number, nics, nic, end, key })
    }

    fn turn(&mut self) -> Result<(Turn, u32), Malformed> {
        Ok((Turn { ticket: self.u64()?, first: self.u32()? }, self.u32()?))
    }

    pub(super) fn lent(&mut self) -> Result<Lent, Malformed> {
        let ((turn, count), lease_ms, zero) = (self.turn()?, self.u32()?, self.u32()?);
        if zero != 0 || !(1..=LEASE_MS_MAX).contains(&lease_ms) {
            return Err(Malformed::Bytes("a lease of an invalid length"));
        }
        if !(1..=ASK_BLOCKS_MAX as u32).contains(&count) {
            return Err(Malformed::Bytes("a Lent of zero or too many blocks"));
        }
        let places = (0..count).map(|_| self.place()).collect::<Result<_, _>>()?;
        Ok(Lent { turn, lease_ms, places })
    }

    fn place(&mut self) -> Result<Place, Malformed> {
        let (address, checksum) = (self.u64()?, self.u64()?);
        let (bytes, status) = (self.u32()?, status_of(self.u32()?)?);
        let outside = address.checked_add(bytes.into()).is_none();
        if outside || (status == Status::Whole) != (bytes > 0) {
            return Err(Malformed::Bytes("a place that contradicts itself"));
        }
        Ok(Place { address, checksum, bytes, status })
    }

    pub(super) fn read(&mut self) -> Result<Turn, Malformed> {
        match self.turn()? {
            (turn, 0) => Ok(turn),
            _ => Err(Malformed::Bytes("an invalid Read")),
        }
    }

    pub(super) fn stood(&mut self) -> Result<Frame, Malformed> {
        match self.turn()? {
            (turn, stood @ 0..=1) => Ok(Frame::Stood(turn, stood == 1)),
            _ => Err(Malformed::Bytes("an invalid Stood")),
        }
    }
}
