//! One job under way: its transfers, and the checks of the bytes read by them.

use rustix::io::Errno;
use shm_protocol::blocks::PoolBlocks;

use crate::io::buf::Buffer;
use crate::io::transfer::{IoDirection, Transfer, TransferMemory};
use crate::ssd::format::{self, DistrustedBlocks, Header};
use crate::ssd::opened::{Layout, OpenedDevice};
use crate::ssd::{DevicePlace, DeviceWork, JobFault, Label};

/// The part of a job moved by a transfer; the low bits of its token.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
#[repr(u64)]
pub(crate) enum TransferPart {
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
    work: DeviceWork,
    /// Transfers in flight.
    pub(crate) pending: u32,
    pub(crate) fault: Option<JobFault>,
    /// Rounds that moved no byte.
    pub(crate) retries: u32,
    /// True during the second half of a job: a write after a read, or a read after a write.
    second: bool,
    head: Option<Buffer>,
    tail: Option<Buffer>,
}

/// Resources shared by jobs: the layout, the pool, and free buffers of a unit.
#[derive(Debug)]
pub(crate) struct DeviceContext {
    pub(crate) layout: Layout,
    pub(crate) blocks: PoolBlocks,
    /// Entries of footers to come, by segment.
    pub(crate) footers: std::collections::HashMap<u32, Footer>,
    distrusted: DistrustedBlocks,
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

// === impl DeviceContext ===

impl DeviceContext {
    pub(crate) fn new(opened: &OpenedDevice, blocks: PoolBlocks) -> Self {
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

    fn place_offset(&self, place: DevicePlace) -> u64 {
        self.layout.offset(place.segment, place.unit)
    }

    fn written(&mut self, place: DevicePlace, sequence: u64, label: &Label) {
        if let Some(footer) =
            self.footers.get_mut(&place.segment).filter(|footer| footer.sequence == sequence)
        {
            format::push_entry(&mut footer.entries, place.unit, label);
        }
    }
}

// === impl Activity ===

/// Makes a buffer, filled from its begin by `write`.
fn written(cx: &mut DeviceContext, write: impl FnOnce(&mut [u8])) -> Result<Buffer, Errno> {
    let unit = cx.layout.unit();
    let mut buffer = cx.buffer(unit)?;
    write(&mut buffer.bytes_mut()[..unit]);
    Ok(buffer)
}

fn transfer(
    direction: IoDirection,
    part: TransferPart,
    at: u64,
    memory: TransferMemory,
    len: u32,
) -> Transfer {
    Transfer { token: part as u64, direction, at, memory, len, durable: false, moved: 0 }
}

impl Activity {
    /// Begins a job; its first transfers go to `out`.
    pub(crate) fn begin_job(
        work: DeviceWork,
        cx: &mut DeviceContext,
        out: &mut Vec<Transfer>,
    ) -> Result<Self, JobFault> {
        use IoDirection::{Read, Write};
        let activity =
            Self { work, pending: 0, fault: None, retries: 0, second: false, head: None, tail: None };
        let layout = cx.layout;
        let unit = layout.unit_bytes as u32;
        match work {
            DeviceWork::Begin { segment, sequence } => {
                let buffer = written(cx, |unit| format::write_segment(unit, layout.id, segment, sequence))?;
                let at = layout.offset(segment, 0);
                out.push(transfer(Write, TransferPart::Head, at, TransferMemory::Own(buffer), unit));
            }
            DeviceWork::Write { place, sequence, label, from } => {
                let bytes = cx.blocks.bytes_at(from, label.bytes as usize).ok_or(Errno::FAULT)?;
                let header = Header { place, sequence, label, checksum: format::compute_checksum(bytes) };
                // Otherwise the bytes may not be the block's bytes, and the checksum would confirm them
                // permanently.
                if !cx.blocks.is_whole() {
                    return Err(Errno::FAULT.into());
                }
                let buffer = written(cx, |unit| header.write_unit(unit, layout.id))?;
                let head = TransferMemory::Own(buffer);
                out.push(transfer(Write, TransferPart::Head, cx.place_offset(place), head, unit));
                payload(Write, cx, place, &label, from, out)?;
            }
            DeviceWork::Read { place, label, into, .. } => {
                cx.blocks.address_of(into, label.bytes as usize).ok_or(Errno::FAULT)?;
                let head = TransferMemory::Own(cx.buffer(layout.unit())?);
                out.push(transfer(Read, TransferPart::Head, cx.place_offset(place), head, unit));
                payload(Read, cx, place, &label, into, out)?;
            }
            DeviceWork::Move { from, label, .. } => {
                let len = format::block_units(label.bytes, layout.unit_bytes) * unit;
                let buffer = TransferMemory::Own(Buffer::new(len as usize)?);
                out.push(transfer(Read, TransferPart::Head, cx.place_offset(from), buffer, len));
            }
            DeviceWork::Seal { segment, sequence } => out.push(seal(cx, segment, sequence)?),
            DeviceWork::Distrust { namespace, before } => {
                cx.distrusted.distrust_namespace(namespace, before);
                let distrusted = cx.distrusted.clone();
                let buffer = written(cx, |unit| distrusted.write_unit(unit, layout.id))?;
                let at = DistrustedBlocks::offset(layout.unit_bytes);
                let list = transfer(Write, TransferPart::Head, at, TransferMemory::Own(buffer), unit);
                out.push(Transfer { durable: true, ..list });
            }
            DeviceWork::GiveUp => unreachable!("the worker does that itself"),
            DeviceWork::Check => {
                let buffer = written(cx, |unit| unit.fill(0x5a))?;
                let at = layout.unit_bytes;
                out.push(transfer(Write, TransferPart::Head, at, TransferMemory::Own(buffer), unit));
            }
        }
        Ok(activity)
    }

    /// Notes the end of one part's transfer.
    pub(crate) fn returned(
        &mut self,
        part: TransferPart,
        memory: TransferMemory,
        result: Result<(), JobFault>,
    ) {
        if let Err(fault) = result {
            self.fault.get_or_insert(fault);
        }
        match (part, memory) {
            (TransferPart::Head, TransferMemory::Own(buffer)) => self.head = Some(buffer),
            (TransferPart::Tail, TransferMemory::Own(buffer)) => self.tail = Some(buffer),
            _ => {}
        }
    }

    /// Continues the job after all its transfers have ended: returns the next transfer, or `None` if the job
    /// is over.
    pub(crate) fn proceed(&mut self, cx: &mut DeviceContext) -> Result<Option<Transfer>, JobFault> {
        let next = match self.fault {
            Some(fault) => Err(fault),
            None => self.proceed_whole(cx),
        };
        if !matches!(next, Ok(Some(_))) {
            cx.give_back(self.head.take());
            cx.give_back(self.tail.take());
        }
        next
    }

    fn proceed_whole(&mut self, cx: &mut DeviceContext) -> Result<Option<Transfer>, JobFault> {
        match self.work {
            DeviceWork::Begin { segment, sequence } => {
                cx.footers.insert(segment, Footer { sequence, entries: Vec::new() });
                Ok(None)
            }
            DeviceWork::Write { place, sequence, label, .. } => {
                cx.written(place, sequence, &label);
                Ok(None)
            }
            DeviceWork::Read { place, sequence, label, into } => {
                self.verify_read(cx, place, sequence, &label, into).map(|()| None)
            }
            DeviceWork::Move { to, to_sequence, label, .. } if self.second => {
                cx.written(to, to_sequence, &label);
                Ok(None)
            }
            DeviceWork::Move { from, from_sequence, to, to_sequence, label } => {
                let buffer = self.head.take().expect("read");
                self.second = true;
                rewrite(cx, buffer, (from, from_sequence), (to, to_sequence), &label).map(Some)
            }
            DeviceWork::Seal { segment, .. } => {
                cx.footers.remove(&segment);
                Ok(None)
            }
            DeviceWork::Distrust { .. } | DeviceWork::GiveUp => Ok(None),
            DeviceWork::Check if self.second => {
                let unit = cx.layout.unit();
                let same = self.head.iter().all(|head| head.bytes()[..unit].iter().all(|byte| *byte == 0x5a));
                if same { Ok(None) } else { Err(JobFault::Corrupt("unit of the check")) }
            }
            DeviceWork::Check => {
                let mut buffer = self.head.take().expect("written");
                buffer.bytes_mut().fill(0);
                self.second = true;
                let unit = cx.layout.unit_bytes;
                let memory = TransferMemory::Own(buffer);
                Ok(Some(transfer(IoDirection::Read, TransferPart::Head, unit, memory, unit as u32)))
            }
        }
    }

    /// Fails unless the read bytes are the wanted block.
    fn verify_read(
        &self,
        cx: &DeviceContext,
        place: DevicePlace,
        sequence: u64,
        label: &Label,
        into: u64,
    ) -> Result<(), JobFault> {
        let head = self.head.as_ref().expect("read");
        let header = check_header(cx, head, place, sequence, label)?;
        if let Some(tail) = &self.tail {
            let body = cx.layout.in_place(into, label.bytes);
            let rest = &tail.bytes()[..(label.bytes - body) as usize];
            assert!(cx.blocks.fill(into + u64::from(body), rest), "checked when the job began");
        }
        let bytes = cx.blocks.bytes_at(into, label.bytes as usize).expect("checked when the job began");
        if format::compute_checksum(bytes) == header.checksum {
            Ok(())
        } else {
            Err(JobFault::Corrupt("checksum"))
        }
    }
}

/// Returns the header at a buffer's begin; fails unless it is the wanted one.
fn check_header(
    cx: &DeviceContext,
    head: &Buffer,
    place: DevicePlace,
    sequence: u64,
    label: &Label,
) -> Result<Header, JobFault> {
    let header = Header::read_unit(&head.bytes()[..cx.layout.unit()], cx.layout.id);
    let header = header.ok_or(JobFault::Corrupt("header"))?;
    let same = header.place == place && header.sequence == sequence && header.label == *label;
    if same { Ok(header) } else { Err(JobFault::Corrupt("label")) }
}

/// Makes the transfers of a block's bytes, behind its header.
fn payload(
    direction: IoDirection,
    cx: &mut DeviceContext,
    place: DevicePlace,
    label: &Label,
    offset: u64,
    out: &mut Vec<Transfer>,
) -> Result<(), JobFault> {
    let at = cx.place_offset(place) + cx.layout.unit_bytes;
    let body = cx.layout.in_place(offset, label.bytes);
    if body > 0 {
        out.push(transfer(direction, TransferPart::Body, at, TransferMemory::Pool(offset), body));
    }
    let rest = (label.bytes - body) as usize;
    if rest == 0 {
        return Ok(());
    }
    let whole = rest.next_multiple_of(cx.layout.unit());
    let mut buffer = cx.buffer(whole)?;
    if direction == IoDirection::Write {
        let bytes = cx.blocks.bytes_at(offset + u64::from(body), rest).ok_or(Errno::FAULT)?;
        buffer.bytes_mut()[..rest].copy_from_slice(bytes);
        buffer.bytes_mut()[rest..].fill(0);
    }
    out.push(transfer(
        direction,
        TransferPart::Tail,
        at + u64::from(body),
        TransferMemory::Own(buffer),
        whole as u32,
    ));
    Ok(())
}

/// Makes the transfer of a segment's footer.
fn seal(cx: &DeviceContext, segment: u32, sequence: u64) -> Result<Transfer, JobFault> {
    let layout = &cx.layout;
    let footer = cx.footers.get(&segment).filter(|footer| footer.sequence == sequence);
    let entries = footer.map_or(&[][..], |footer| &footer.entries);
    let (buffer, at) = layout.footer(segment, sequence, entries)?;
    let len = (layout.segment_bytes - (at - layout.offset(segment, 0))) as u32;
    Ok(transfer(IoDirection::Write, TransferPart::Head, at, TransferMemory::Own(buffer), len))
}

/// Verifies a block that was read whole, and makes the transfer to its new place.
fn rewrite(
    cx: &DeviceContext,
    mut buffer: Buffer,
    from: (DevicePlace, u64),
    to: (DevicePlace, u64),
    label: &Label,
) -> Result<Transfer, JobFault> {
    let header = check_header(cx, &buffer, from.0, from.1, label)?;
    let unit = cx.layout.unit();
    if format::compute_checksum(&buffer.bytes()[unit..unit + label.bytes as usize]) != header.checksum {
        return Err(JobFault::Corrupt("checksum"));
    }
    let moved = Header { place: to.0, sequence: to.1, ..header };
    moved.write_unit(&mut buffer.bytes_mut()[..unit], cx.layout.id);
    let len = format::block_units(label.bytes, cx.layout.unit_bytes) * unit as u32;
    Ok(transfer(
        IoDirection::Write,
        TransferPart::Head,
        cx.place_offset(to.0),
        TransferMemory::Own(buffer),
        len,
    ))
}
