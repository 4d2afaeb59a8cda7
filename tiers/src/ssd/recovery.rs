//! Reads what earlier lives left on a device, newest segment first, on a thread of its own and with plain reads: the
//! device serves what was found so far meanwhile.
//!
//! A sealed segment is known by its footer. One without, which was open when the sidecar died, is read through for block
//! headers, and sealed now. Nothing here is trusted further than for a look: who reads a block verifies it.

use std::cmp::Reverse;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use super::device::{Tell, footer_buffer};
use super::format::{self, ENTRY_BYTES, HEADER_UNITS, Header, Trailer};
use super::opened::{self, Layout};
use super::{Label, Recovered, Up};
use crate::io::buf::Buffer;

/// Blocks told of at a time: some 0.5 ms of the thread that keeps the index.
const BATCH: usize = 2048;
/// Bytes read at a time while a segment is read through.
const WINDOW_BYTES: u64 = 256 << 10;

/// What the ends of a segment say.
#[derive(Copy, Clone, Debug)]
struct Remains {
    segment: u32,
    sequence: u64,
    /// Absent where the segment was not sealed.
    trailer: Option<Trailer>,
}

/// The work of reading a device.
pub(crate) struct Recovery {
    fd: OwnedFd,
    device: usize,
    layout: Layout,
    tell: Tell,
    stop: Arc<AtomicBool>,
}

// === impl Recovery ===

impl Recovery {
    pub(crate) fn new(fd: OwnedFd, device: usize, layout: Layout, tell: Tell, stop: Arc<AtomicBool>) -> Self {
        Self { fd, device, layout, tell, stop }
    }

    /// Tells of everything that is found; the last telling says so.
    pub(crate) fn run(self) {
        let mut remains = self.remains();
        remains.sort_by_key(|remains| Reverse(remains.sequence));
        let empty = self.layout.segments - remains.len() as u32;
        for (done, remains) in remains.iter().enumerate() {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let blocks = self.blocks(remains);
            let read = empty + done as u32;
            for part in blocks.chunks(BATCH) {
                self.found(remains, part.to_vec(), read);
            }
        }
        let last = Recovered {
            device: self.device,
            segment: 0,
            sequence: 0,
            blocks: Vec::new(),
            segments_read: self.layout.segments,
            last: true,
        };
        (self.tell)(Up::Recovered(last));
    }

    fn found(&self, remains: &Remains, blocks: Vec<(u32, Label)>, segments_read: u32) {
        let Remains { segment, sequence, .. } = *remains;
        let found = Recovered { device: self.device, segment, sequence, blocks, segments_read, last: false };
        (self.tell)(Up::Recovered(found));
    }

    /// Reads as far as the file goes; zeros stand for the rest.
    fn read<'a>(&self, buffer: &'a mut Buffer, len: usize, at: u64) -> Result<&'a [u8], Errno> {
        let bytes = &mut buffer.bytes_mut()[..len];
        let read = opened::read_some(&self.fd, bytes, at)?;
        bytes[read..].fill(0);
        Ok(&buffer.bytes()[..len])
    }

    /// Segments in which something was begun.
    fn remains(&self) -> Vec<Remains> {
        let Ok(mut buffer) = Buffer::new(self.layout.unit()) else { return Vec::new() };
        let segments = (0..self.layout.segments).take_while(|_| !self.stop.load(Ordering::Relaxed));
        segments.filter_map(|segment| self.ends(&mut buffer, segment)).collect()
    }

    fn ends(&self, buffer: &mut Buffer, segment: u32) -> Option<Remains> {
        let layout = &self.layout;
        let header = self.read(buffer, layout.unit(), layout.offset(segment, 0)).ok()?;
        let sequence = format::read_segment(header, layout.id, segment)?;
        let trailer = self.read(buffer, layout.unit(), layout.offset(segment, layout.segment_units() - 1));
        let trailer = trailer.ok().and_then(|trailer| Trailer::read(trailer, layout.id));
        let trailer = trailer.filter(|trailer| trailer.segment == segment && trailer.sequence == sequence);
        Some(Remains { segment, sequence, trailer })
    }

    fn blocks(&self, remains: &Remains) -> Vec<(u32, Label)> {
        let listed = remains.trailer.and_then(|trailer| self.listed(remains.segment, &trailer));
        listed.unwrap_or_else(|| {
            let mut blocks = Vec::new();
            // Where either fails, the next start reads the segment through again.
            let _ = self.scan(remains, &mut blocks).and_then(|()| self.seal(remains, &blocks));
            blocks
        })
    }

    /// What the footer lists, if it is whole.
    fn listed(&self, segment: u32, trailer: &Trailer) -> Option<Vec<(u32, Label)>> {
        let layout = &self.layout;
        let units = format::footer_units(trailer.count, layout.unit_bytes);
        let first = layout.segment_units().checked_sub(units)?;
        let len = (units - 1) as usize * layout.unit();
        let mut buffer = Buffer::new(len).ok()?;
        let entries = self.read(&mut buffer, len, layout.offset(segment, first)).ok()?;
        let entries = &entries[..trailer.count as usize * ENTRY_BYTES];
        trailer.lists(entries).then(|| format::read_entries(entries).collect())
    }

    /// Appends the blocks whose headers lie in the segment. A torn one hides none behind it: every unit is looked at.
    fn scan(&self, remains: &Remains, blocks: &mut Vec<(u32, Label)>) -> Result<(), Errno> {
        let layout = &self.layout;
        let window = (WINDOW_BYTES / layout.unit_bytes).max(1) as u32;
        let mut buffer = Buffer::new(window as usize * layout.unit())?;
        let mut unit = HEADER_UNITS;
        while unit < layout.segment_units() {
            if self.stop.load(Ordering::Relaxed) {
                return Err(Errno::CANCELED);
            }
            let units = window.min(layout.segment_units() - unit);
            let at = layout.offset(remains.segment, unit);
            let bytes = self.read(&mut buffer, units as usize * layout.unit(), at)?;
            let end = unit + units;
            while unit < end {
                let skip = (units - (end - unit)) as usize * layout.unit();
                let header = Header::read(&bytes[skip..skip + layout.unit()], layout.id);
                let here = |header: &Header| {
                    header.place.segment == remains.segment
                        && header.place.unit == unit
                        && header.sequence == remains.sequence
                };
                match header.filter(here) {
                    Some(header) => {
                        blocks.push((unit, header.label));
                        unit += format::block_units(header.label.bytes, layout.unit_bytes);
                    }
                    None => unit += 1,
                }
            }
        }
        Ok(())
    }

    fn seal(&self, remains: &Remains, blocks: &[(u32, Label)]) -> Result<(), Errno> {
        let mut entries = Vec::with_capacity(blocks.len() * ENTRY_BYTES);
        blocks.iter().for_each(|(unit, label)| format::push_entry(&mut entries, *unit, label));
        let (buffer, at) = footer_buffer(&self.layout, remains.segment, remains.sequence, &entries)?;
        let end = self.layout.offset(remains.segment, self.layout.segment_units());
        opened::write_all(&self.fd, &buffer.bytes()[..(end - at) as usize], at)
    }
}
