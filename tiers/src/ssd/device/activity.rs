//! One job under way: its transfers, and the checks of the bytes read by them.

use rustix::io::Errno;
use shm_protocol::blocks::Blocks;

use crate::io::buf::Buffer;
use crate::io::transfer::{Direction, Memory, Transfer};
use crate::ssd::format::{self, Distrusted, Header};
use crate::ssd::opened::{Layout, Opened};
use crate::ssd::{Fault, Label, Place, Work};

/// The part of a job moved by a transfer; the low bits of its token.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
#[repr(u64)]
pub(crate) enum Part {
    /// A buffer with a structure of the format at its begin.
    Head = 0,
    /// A block's bytes, in place.
    Body = 1,
    /// The rest of a block's bytes, too unaligned for direct I/O in place.
    Tail = 2,
}

/// Bits of a token for the part.
pub(crate) const PART_BITS: u32 = 2;

/// A job under way.
#[derive(Debug)]
pub(crate) struct Activity {
    work: Work,
    /// Transfers in flight.
    pub(crate) pending: u32,
    pub(crate) fault: Option<Fault>,
    /// Rounds that moved no byte.
    pub(crate) retries: u32,
    /// True during the second half of a job: a write after a read, or a read after a write.
    second: bool,
    head: Option<Buffer>,
    tail: Option<Buffer>,
}

/// Resources shared by jobs: the layout, the pool, and free buffers of a unit.
#[derive(Debug)]
pub(crate) struct Desk {
    pub(crate) layout: Layout,
    pub(crate) blocks: Blocks,
    /// Entries of footers to come, by segment.
    pub(crate) footers: std::collections::HashMap<u32, Footer>,
    distrusted: Distrusted,
    units: Vec<Buffer>,
}

/// The blocks written into a segment in this life.
#[derive(Debug)]
pub(crate) struct Footer {
    sequence: u64,
    entries: Vec<u8>,
}

/// Most free buffers of one unit kept: about one for each job at a time.
const UNITS_KEPT: usize = 64;

// === impl Desk ===

impl Desk {
    pub(crate) fn new(opened: &Opened, blocks: Blocks) -> Self {
        let (layout, distrusted) = (opened.layout, opened.distrusted.clone());
        Self { layout, blocks, footers: std::collections::HashMap::new(), distrusted, units: Vec::new() }
    }

    fn buffer(&mut self, bytes: usize) -> Result<Buffer, Errno> {
        match self.units.pop_if(|unit| unit.len() >= bytes) {
            Some(unit) => Ok(unit),
            None => Buffer::new(bytes),
        }
    }

    fn give_back(&mut self, buffer: Option<Buffer>) {
        let unit = |buffer: &Buffer| buffer.len() as u64 <= self.layout.unit_bytes.max(4096);
        if let Some(buffer) = buffer.filter(unit)
            && self.units.len() < UNITS_KEPT
        {
            self.units.push(buffer);
        }
    }

    fn place(&self, place: Place) -> u64 {
        self.layout.offset(place.segment, place.unit)
    }

    fn written(&mut self, place: Place, sequence: u64, label: &Label) {
        if let Some(footer) =
            self.footers.get_mut(&place.segment).filter(|footer| footer.sequence == sequence)
        {
            format::push_entry(&mut footer.entries, place.unit, label);
        }
    }
}

// === impl Activity ===

/// Makes a buffer, filled from its begin by `write`.
fn written(desk: &mut Desk, write: impl FnOnce(&mut [u8])) -> Result<Buffer, Errno> {
    let unit = desk.layout.unit();
    let mut buffer = desk.buffer(unit)?;
    write(&mut buffer.bytes_mut()[..unit]);
    Ok(buffer)
}

fn transfer(direction: Direction, part: Part, at: u64, memory: Memory, len: u32) -> Transfer {
    Transfer { token: part as u64, direction, at, memory, len, durable: false, moved: 0 }
}

impl Activity {
    /// Begins a job; its first transfers go to `out`.
    pub(crate) fn begin(work: Work, desk: &mut Desk, out: &mut Vec<Transfer>) -> Result<Self, Fault> {
        let activity =
            Self { work, pending: 0, fault: None, retries: 0, second: false, head: None, tail: None };
        let layout = desk.layout;
        let unit = layout.unit_bytes as u32;
        match work {
            Work::Begin { segment, sequence } => {
                let buffer = written(desk, |unit| format::write_segment(unit, layout.id, segment, sequence))?;
                let at = layout.offset(segment, 0);
                out.push(transfer(Direction::Write, Part::Head, at, Memory::Own(buffer), unit));
            }
            Work::Write { place, sequence, label, from } => {
                let bytes = desk.blocks.bytes(from, label.bytes as usize).ok_or(Errno::FAULT)?;
                let header = Header { place, sequence, label, checksum: format::checksum(bytes) };
                // Otherwise the bytes may not be the block's bytes, and the checksum would confirm them
                // permanently.
                if !desk.blocks.is_whole() {
                    return Err(Errno::FAULT.into());
                }
                let buffer = written(desk, |unit| header.write(unit, layout.id))?;
                let head = Memory::Own(buffer);
                out.push(transfer(Direction::Write, Part::Head, desk.place(place), head, unit));
                payload(Direction::Write, desk, place, &label, from, out)?;
            }
            Work::Read { place, label, into, .. } => {
                desk.blocks.address(into, label.bytes as usize).ok_or(Errno::FAULT)?;
                let head = Memory::Own(desk.buffer(layout.unit())?);
                out.push(transfer(Direction::Read, Part::Head, desk.place(place), head, unit));
                payload(Direction::Read, desk, place, &label, into, out)?;
            }
            Work::Move { from, label, .. } => {
                let len = format::block_units(label.bytes, layout.unit_bytes) * unit;
                let buffer = Memory::Own(Buffer::new(len as usize)?);
                out.push(transfer(Direction::Read, Part::Head, desk.place(from), buffer, len));
            }
            Work::Seal { segment, sequence } => out.push(seal(desk, segment, sequence)?),
            Work::Distrust { namespace, before } => {
                desk.distrusted.add(namespace, before);
                let distrusted = desk.distrusted.clone();
                let buffer = written(desk, |unit| distrusted.write(unit, layout.id))?;
                let at = Distrusted::offset(layout.unit_bytes);
                let list = transfer(Direction::Write, Part::Head, at, Memory::Own(buffer), unit);
                out.push(Transfer { durable: true, ..list });
            }
            Work::GiveUp => unreachable!("the worker does that itself"),
            Work::Check => {
                let buffer = written(desk, |unit| unit.fill(0x5a))?;
                let at = layout.unit_bytes;
                out.push(transfer(Direction::Write, Part::Head, at, Memory::Own(buffer), unit));
            }
        }
        Ok(activity)
    }

    /// Notes the end of one part's transfer.
    pub(crate) fn returned(&mut self, part: Part, memory: Memory, result: Result<(), Fault>) {
        if let Err(fault) = result {
            self.fault.get_or_insert(fault);
        }
        match (part, memory) {
            (Part::Head, Memory::Own(buffer)) => self.head = Some(buffer),
            (Part::Tail, Memory::Own(buffer)) => self.tail = Some(buffer),
            _ => {}
        }
    }

    /// Continues the job after all its transfers have ended: returns the next transfer, or `None` if the job
    /// is over.
    pub(crate) fn proceed(&mut self, desk: &mut Desk) -> Result<Option<Transfer>, Fault> {
        let next = match self.fault {
            Some(fault) => Err(fault),
            None => self.proceed_whole(desk),
        };
        if !matches!(next, Ok(Some(_))) {
            desk.give_back(self.head.take());
            desk.give_back(self.tail.take());
        }
        next
    }

    fn proceed_whole(&mut self, desk: &mut Desk) -> Result<Option<Transfer>, Fault> {
        match self.work {
            Work::Begin { segment, sequence } => {
                desk.footers.insert(segment, Footer { sequence, entries: Vec::new() });
                Ok(None)
            }
            Work::Write { place, sequence, label, .. } => {
                desk.written(place, sequence, &label);
                Ok(None)
            }
            Work::Read { place, sequence, label, into } => {
                self.verify(desk, place, sequence, &label, into).map(|()| None)
            }
            Work::Move { to, to_sequence, label, .. } if self.second => {
                desk.written(to, to_sequence, &label);
                Ok(None)
            }
            Work::Move { from, from_sequence, to, to_sequence, label } => {
                let buffer = self.head.take().expect("read");
                self.second = true;
                rewrite(desk, buffer, (from, from_sequence), (to, to_sequence), &label).map(Some)
            }
            Work::Seal { segment, .. } => {
                desk.footers.remove(&segment);
                Ok(None)
            }
            Work::Distrust { .. } | Work::GiveUp => Ok(None),
            Work::Check if self.second => {
                let unit = desk.layout.unit();
                let same = self.head.iter().all(|head| head.bytes()[..unit].iter().all(|byte| *byte == 0x5a));
                if same { Ok(None) } else { Err(Fault::Corrupt("unit of the check")) }
            }
            Work::Check => {
                let mut buffer = self.head.take().expect("written");
                buffer.bytes_mut().fill(0);
                self.second = true;
                let unit = desk.layout.unit_bytes;
                let memory = Memory::Own(buffer);
                Ok(Some(transfer(Direction::Read, Part::Head, unit, memory, unit as u32)))
            }
        }
    }

    /// Fails unless the read bytes are the wanted block.
    fn verify(
        &self,
        desk: &Desk,
        place: Place,
        sequence: u64,
        label: &Label,
        into: u64,
    ) -> Result<(), Fault> {
        let head = self.head.as_ref().expect("read");
        let header = check(desk, head, place, sequence, label)?;
        if let Some(tail) = &self.tail {
            let body = desk.layout.in_place(into, label.bytes);
            let rest = &tail.bytes()[..(label.bytes - body) as usize];
            assert!(desk.blocks.fill(into + u64::from(body), rest), "checked when the job began");
        }
        let bytes = desk.blocks.bytes(into, label.bytes as usize).expect("checked when the job began");
        if format::checksum(bytes) == header.checksum { Ok(()) } else { Err(Fault::Corrupt("checksum")) }
    }
}

/// Returns the header at a buffer's begin; fails unless it is the wanted one.
fn check(desk: &Desk, head: &Buffer, place: Place, sequence: u64, label: &Label) -> Result<Header, Fault> {
    let header = Header::read(&head.bytes()[..desk.layout.unit()], desk.layout.id);
    let header = header.ok_or(Fault::Corrupt("header"))?;
    let same = header.place == place && header.sequence == sequence && header.label == *label;
    if same { Ok(header) } else { Err(Fault::Corrupt("label")) }
}

/// Makes the transfers of a block's bytes, behind its header.
fn payload(
    direction: Direction,
    desk: &mut Desk,
    place: Place,
    label: &Label,
    offset: u64,
    out: &mut Vec<Transfer>,
) -> Result<(), Fault> {
    let at = desk.place(place) + desk.layout.unit_bytes;
    let body = desk.layout.in_place(offset, label.bytes);
    if body > 0 {
        out.push(transfer(direction, Part::Body, at, Memory::Pool(offset), body));
    }
    let rest = (label.bytes - body) as usize;
    if rest == 0 {
        return Ok(());
    }
    let whole = rest.next_multiple_of(desk.layout.unit());
    let mut buffer = desk.buffer(whole)?;
    if direction == Direction::Write {
        let bytes = desk.blocks.bytes(offset + u64::from(body), rest).ok_or(Errno::FAULT)?;
        buffer.bytes_mut()[..rest].copy_from_slice(bytes);
        buffer.bytes_mut()[rest..].fill(0);
    }
    out.push(transfer(direction, Part::Tail, at + u64::from(body), Memory::Own(buffer), whole as u32));
    Ok(())
}

/// Makes the transfer of a segment's footer.
fn seal(desk: &Desk, segment: u32, sequence: u64) -> Result<Transfer, Fault> {
    let layout = &desk.layout;
    let footer = desk.footers.get(&segment).filter(|footer| footer.sequence == sequence);
    let entries = footer.map_or(&[][..], |footer| &footer.entries);
    let (buffer, at) = layout.footer(segment, sequence, entries)?;
    let len = (layout.segment_bytes - (at - layout.offset(segment, 0))) as u32;
    Ok(transfer(Direction::Write, Part::Head, at, Memory::Own(buffer), len))
}

/// Verifies a block that was read whole, and makes the transfer to its new place.
fn rewrite(
    desk: &Desk,
    mut buffer: Buffer,
    from: (Place, u64),
    to: (Place, u64),
    label: &Label,
) -> Result<Transfer, Fault> {
    let header = check(desk, &buffer, from.0, from.1, label)?;
    let unit = desk.layout.unit();
    if format::checksum(&buffer.bytes()[unit..unit + label.bytes as usize]) != header.checksum {
        return Err(Fault::Corrupt("checksum"));
    }
    let moved = Header { place: to.0, sequence: to.1, ..header };
    moved.write(&mut buffer.bytes_mut()[..unit], desk.layout.id);
    let len = format::block_units(label.bytes, desk.layout.unit_bytes) * unit as u32;
    Ok(transfer(Direction::Write, Part::Head, desk.place(to.0), Memory::Own(buffer), len))
}
