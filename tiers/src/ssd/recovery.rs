//! Reads the blocks left by earlier lives on a device, newest segment first, on a separate thread and with
//! plain reads. The device serves the blocks found so far meanwhile.
//!
//! A sealed segment is known by its footer. A segment without a footer was open when the sidecar died. It is
//! read through for block headers, and sealed now. The found headers only locate blocks: each later read
//! verifies its block.

use std::cmp::Reverse;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;

use super::format::{self, Distrusted, ENTRY_BYTES, HEADER_UNITS, Header, Trailer};
use super::opened::{self, Layout, Opened};
use super::{Label, Recovered, Tell, Up};
use crate::io::buf::Buffer;

/// Blocks reported at a time: some 0.5 ms of the index's thread.
const BATCH: usize = 2048;
/// Bytes read at a time while a segment is read through.
const WINDOW_BYTES: u64 = 256 << 10;
/// Times that an unreadable segment is tried again, after a pause: a path's failover takes some seconds.
const AGAIN_MAX: u32 = 3;
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// The content of a segment's ends.
#[derive(Copy, Clone, Debug)]
struct Remains {
    segment: u32,
    sequence: u64,
    /// Absent if the segment was not sealed.
    trailer: Option<Trailer>,
}

/// The work of reading a device.
pub(crate) struct Recovery {
    fd: OwnedFd,
    device: usize,
    layout: Layout,
    distrusted: Distrusted,
    tell: Tell,
    stop: Arc<AtomicBool>,
}

// === impl Recovery ===

impl Recovery {
    pub(crate) fn new(
        fd: OwnedFd,
        device: usize,
        opened: &Opened,
        tell: Tell,
        stop: Arc<AtomicBool>,
    ) -> Self {
        let (layout, distrusted) = (opened.layout, opened.distrusted.clone());
        Self { fd, device, layout, distrusted, tell, stop }
    }

    /// Reports all found blocks; the last report says so.
    pub(crate) fn run(self) {
        let (mut remains, unreadable) = self.remains();
        if self.stop.load(Ordering::Relaxed) {
            return;
        }
        remains.sort_by_key(|remains| Reverse(remains.sequence));
        let mut found = Recovered {
            device: self.device,
            segment: 0,
            sequence: 0,
            blocks: Vec::new(),
            unreadable: false,
            segments_read: self.layout.segments - remains.len() as u32,
            last: false,
        };
        for segment in unreadable {
            (self.tell)(Up::Recovered(Recovered { segment, unreadable: true, ..found.clone() }));
        }
        for remains in remains {
            if self.stop.load(Ordering::Relaxed) {
                return;
            }
            let (mut blocks, whole) = self.blocks(&remains);
            blocks.retain(|(_, label)| !self.distrusted.has(label.namespace, remains.sequence));
            (found.segment, found.sequence) = (remains.segment, remains.sequence);
            for part in blocks.chunks(BATCH) {
                (self.tell)(Up::Recovered(Recovered { blocks: part.to_vec(), ..found.clone() }));
            }
            if !whole {
                (self.tell)(Up::Recovered(Recovered { unreadable: true, ..found.clone() }));
            }
            found.segments_read += 1;
        }
        (self.tell)(Up::Recovered(Recovered { last: true, ..found }));
    }

    /// Reads up to the end of the file; zeros stand for the rest.
    fn read<'a>(&self, buffer: &'a mut Buffer, len: usize, at: u64) -> Result<&'a [u8], Errno> {
        let bytes = &mut buffer.bytes_mut()[..len];
        let read = opened::read_some(&self.fd, bytes, at)?;
        bytes[read..].fill(0);
        Ok(&buffer.bytes()[..len])
    }

    /// Returns the used segments, and the unreadable ones.
    fn remains(&self) -> (Vec<Remains>, Vec<u32>) {
        let mut unknown: Vec<u32> = (0..self.layout.segments).collect();
        let Ok(mut buffer) = Buffer::new(self.layout.unit()) else { return (Vec::new(), unknown) };
        let mut remains = Vec::new();
        for again in 0..=AGAIN_MAX {
            if unknown.is_empty() || self.stop.load(Ordering::Relaxed) {
                break;
            }
            if again > 0 {
                std::thread::sleep(AGAIN_AFTER);
            }
            unknown.retain(|segment| {
                if self.stop.load(Ordering::Relaxed) {
                    return true;
                }
                let ends = self.ends(&mut buffer, *segment);
                remains.extend(ends.ok().flatten());
                ends.is_err()
            });
        }
        (remains, unknown)
    }

    /// Returns the content of a segment's ends; `None` if the segment was never begun.
    fn ends(&self, buffer: &mut Buffer, segment: u32) -> Result<Option<Remains>, Errno> {
        let layout = &self.layout;
        let header = self.read(buffer, layout.unit(), layout.offset(segment, 0))?;
        let Some(sequence) = format::read_segment(header, layout.id, segment) else { return Ok(None) };
        let last = layout.offset(segment, layout.segment_units() - 1);
        let trailer = Trailer::read(self.read(buffer, layout.unit(), last)?, layout.id);
        let trailer = trailer.filter(|trailer| trailer.segment == segment && trailer.sequence == sequence);
        Ok(Some(Remains { segment, sequence, trailer }))
    }

    /// Returns the blocks found in a segment, and true if it was read to its end.
    fn blocks(&self, remains: &Remains) -> (Vec<(u32, Label)>, bool) {
        let listed = remains.trailer.and_then(|trailer| self.listed(remains.segment, &trailer));
        listed.map_or_else(
            || {
                let mut blocks = Vec::new();
                let read = self.scan(remains, &mut blocks);
                // If either fails, the next start reads the segment through again.
                let _ = read.and_then(|()| self.seal(remains, &blocks));
                (blocks, read.is_ok())
            },
            |listed| (listed, true),
        )
    }

    /// Returns the blocks of the footer, if it is whole.
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

    /// Appends the blocks whose headers lie in the segment. A torn header hides none behind it: every unit is
    /// looked at.
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
        let (buffer, at) = self.layout.footer(remains.segment, remains.sequence, &entries)?;
        let end = self.layout.offset(remains.segment, self.layout.segment_units());
        opened::write_all(&self.fd, &buffer.bytes()[..(end - at) as usize], at)
    }
}
