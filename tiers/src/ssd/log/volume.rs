//! One device as seen by the log: its segments, and the place of the next block.

use std::collections::VecDeque;

use super::DeviceStats;
use super::breaker::DeviceBreaker;
use super::distrusts::Distrusts;
use super::pace::ReadPace;
use super::streams::{STREAMS, WriteStream};
use crate::ssd::format::{self, HEADER_UNITS};
use crate::ssd::{DeviceGeometry, DevicePlace, DeviceWork};

/// Number of free segments below which one is reclaimed: a 16th of all, 4 at most.
const FREE_PART: u32 = 16;
const FREE_MAX: u32 = 4;
/// The part of the room for blocks: the more of it is used, the more reclamation moves.
const USED_PART: (u64, u64) = (19, 20);
/// A log of fewer segments has one stream: open segments would take too much of it.
pub(super) const STREAMED_MIN: u32 = 32;
/// The part of a segment's units that must be gone for its reclamation to move the others. Each reclamation
/// gains that part once, so at most seven bytes move for each byte written. A segment's end too short for a
/// block is no gain.
const GAINED_PART: u32 = 8;

/// The use of a segment.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub(super) enum SegmentUse {
    /// Empty; or not known yet, while the device is being recovered.
    #[default]
    Free,
    /// Its header is written or being written: the next blocks go into it.
    Next,
    /// New blocks of its stream go into it.
    Open,
    /// Full; its last writes, then its footer, are on their way.
    Closing,
    /// Full, and only read.
    Sealed,
}

#[derive(Clone, Debug, Default)]
pub(super) struct VolumeSegment {
    pub(super) used_for: SegmentUse,
    pub(super) sequence: u64,
    /// Units given out, with its header.
    units: u32,
    /// Blocks given a place: the footer must have room for them.
    count: u32,
    /// Jobs reading in it.
    pub(super) reads: u32,
    /// Jobs writing blocks in it.
    writes: u32,
    /// Entries given a place in it; some are elsewhere by now, or vacant.
    pub(super) blocks: Vec<u32>,
    /// Units of the blocks that lie in it and have room.
    live: u32,
    /// True if it may hold unreadable blocks of earlier lives.
    unread: bool,
}

#[derive(Debug)]
pub(super) struct Volume {
    pub(super) unit_bytes: u64,
    pub(super) segment_units: u32,
    pub(super) segments: Vec<VolumeSegment>,
    free: VecDeque<u32>,
    /// Segments with blocks, by sequence; closing ones come last.
    full: VecDeque<u32>,
    /// The open segment of each stream.
    open: [Option<u32>; STREAMS],
    /// The next segment, and true once its header is written.
    next: Option<(u32, bool)>,
    pub(super) reclaiming: Option<u32>,
    /// Units moved by the present reclamation.
    pub(super) moved_units: u32,
    pub(super) moves: u32,
    /// The first sequence of this life.
    first_sequence: u64,
    pub(super) next_sequence: u64,
    /// Jobs under way, and the time when the last one ended or the first of them began.
    pub(super) flights: u64,
    pub(super) moved_ms: u64,
    /// Bytes of writes under way.
    pub(super) write_bytes: u64,
    pub(super) breaker: DeviceBreaker,
    pub(super) pace: ReadPace,
    pub(super) distrusts: Distrusts,
    pub(super) recovering: bool,
    pub(super) stats: DeviceStats,
}

// === impl Volume ===

impl Volume {
    pub(super) fn new(geometry: &DeviceGeometry) -> Self {
        Self {
            unit_bytes: geometry.unit_bytes,
            segment_units: (geometry.segment_bytes / geometry.unit_bytes) as u32,
            segments: vec![VolumeSegment::default(); geometry.segments as usize],
            free: VecDeque::new(),
            full: VecDeque::new(),
            open: [None; STREAMS],
            next: None,
            reclaiming: None,
            moved_units: 0,
            moves: 0,
            first_sequence: geometry.first_sequence,
            next_sequence: geometry.first_sequence,
            flights: 0,
            moved_ms: 0,
            write_bytes: 0,
            breaker: DeviceBreaker::new(),
            pace: ReadPace::default(),
            distrusts: Distrusts::default(),
            recovering: true,
            stats: DeviceStats { segments: geometry.segments, ..DeviceStats::default() },
        }
    }

    /// True if it takes blocks now.
    pub(super) fn takes(&self) -> bool {
        !self.recovering && !self.breaker.is_open()
    }

    /// Returns its bytes of writes under way, and, to decide between equals, the bytes written for its size.
    pub(super) fn pending_load(&self) -> (u64, u64) {
        (self.write_bytes, self.stats.written_bytes_total / u64::from(self.stats.segments))
    }

    pub(super) fn free_segments(&self) -> u32 {
        self.free.len() as u32
    }

    pub(super) fn segment(&mut self, number: u32) -> &mut VolumeSegment {
        &mut self.segments[number as usize]
    }

    /// Returns the units of a block with its header.
    pub(super) fn units(&self, bytes: u32) -> u32 {
        format::block_units(bytes, self.unit_bytes)
    }

    /// Returns the units of a block's share of a segment with blocks of its size alone, the unused end
    /// included.
    pub(super) fn share(&self, bytes: u32) -> u32 {
        let room = self.segment_units - HEADER_UNITS - format::footer_units(0, self.unit_bytes);
        let each = u64::from(self.units(bytes)) * self.unit_bytes + format::ENTRY_BYTES as u64;
        let blocks = u64::from(room) * self.unit_bytes / each;
        self.segment_units.div_ceil(blocks.max(1) as u32)
    }

    /// True if an empty segment has room for one block of so many units.
    pub(super) fn could_hold(&self, units: u32) -> bool {
        units.saturating_add(HEADER_UNITS + format::footer_units(1, self.unit_bytes)) <= self.segment_units
    }

    fn fits(&self, segment: u32, units: u32) -> bool {
        let segment = &self.segments[segment as usize];
        let footer = format::footer_units(segment.count + 1, self.unit_bytes);
        segment.units + units + footer <= self.segment_units
    }

    /// Returns the number of streams.
    fn streams(&self) -> usize {
        if self.stats.segments < STREAMED_MIN { 1 } else { STREAMS }
    }

    /// Returns the place of a stream's open segment.
    fn place_of(&self, stream: WriteStream) -> usize {
        (stream as usize).min(self.streams() - 1)
    }

    /// True if a stream has a place of so many units now. Opens the next segment if necessary, and begins another
    /// one.
    pub(super) fn has_room(&mut self, stream: WriteStream, units: u32, out: &mut Vec<DeviceWork>) -> bool {
        let stream = self.place_of(stream);
        if self.open[stream].is_none_or(|open| !self.fits(open, units))
            && let Some((next, true)) = self.next
        {
            self.next = None;
            if let Some(open) = self.open[stream].replace(next) {
                self.segment(open).used_for = SegmentUse::Closing;
                self.full.push_back(open);
                self.seal_if_over(open, out);
            }
            self.segment(next).used_for = SegmentUse::Open;
        }
        self.begin_next(out);
        self.open[stream].is_some_and(|open| self.fits(open, units))
    }

    /// True if the next segment is reserved for moves of a reclamation, and the stream's open one is too full for
    /// a block of so many units.
    pub(super) fn spares_next(&self, stream: WriteStream, units: u32) -> bool {
        let fits = self.open[self.place_of(stream)].is_some_and(|open| self.fits(open, units));
        self.reclaiming.is_some() && self.free.is_empty() && !fits
    }

    fn begin_next(&mut self, out: &mut Vec<DeviceWork>) {
        if self.next.is_some() {
            return;
        }
        let Some(number) = self.free.pop_front() else { return };
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let segment = self.segment(number);
        debug_assert!(segment.reads == 0 && segment.writes == 0 && segment.live == 0);
        segment.blocks.clear();
        (segment.used_for, segment.sequence) = (SegmentUse::Next, sequence);
        (segment.units, segment.count, segment.unread) = (HEADER_UNITS, 0, false);
        self.next = Some((number, false));
        out.push(DeviceWork::Begin { segment: number, sequence });
    }

    /// Notes the end of the write of the next segment's header.
    pub(super) fn begun(&mut self, number: u32, well: bool) {
        if well {
            self.next = Some((number, true));
        } else {
            self.next = None;
            self.segment(number).used_for = SegmentUse::Free;
            self.free.push_back(number);
        }
    }

    /// True if the next segment's header is being written.
    pub(super) fn awaits_next(&self) -> bool {
        matches!(self.next, Some((_, false)))
    }

    /// Gives out an existing place.
    pub(super) fn take_place(&mut self, stream: WriteStream, units: u32) -> DevicePlace {
        let number = self.open[self.place_of(stream)].expect("asked before");
        let segment = self.segment(number);
        let place = DevicePlace { segment: number, unit: segment.units };
        segment.units += units;
        segment.count += 1;
        segment.writes += 1;
        place
    }

    /// Notes the end of a write of a block in a segment.
    pub(super) fn written(&mut self, number: u32, out: &mut Vec<DeviceWork>) {
        self.segment(number).writes -= 1;
        self.seal_if_over(number, out);
    }

    fn seal_if_over(&mut self, number: u32, out: &mut Vec<DeviceWork>) {
        let segment = self.segment(number);
        if segment.used_for == SegmentUse::Closing && segment.writes == 0 {
            out.push(DeviceWork::Seal { segment: number, sequence: segment.sequence });
        }
    }

    /// Notes the end of the write of a footer. After a failure the next start reads the segment through.
    pub(super) fn sealed(&mut self, number: u32) {
        self.segment(number).used_for = SegmentUse::Sealed;
    }

    /// Returns the segment to reclaim: the present one, or a new one if there are too few free ones.
    pub(super) fn due_for_reclamation(&mut self) -> Option<u32> {
        if !self.takes() {
            return None;
        }
        if self.reclaiming.is_none() && self.free_segments() < self.free_min() {
            let full = self.full.iter().copied().enumerate();
            let sealed =
                full.filter(|(_, number)| self.segments[*number as usize].used_for == SegmentUse::Sealed);
            // Among equal ones, the oldest.
            let gaining = sealed.clone().filter(|(_, number)| self.gains(*number));
            let best = gaining.min_by_key(|(_, number)| self.segments[*number as usize].live);
            // Unreadable segments go before those of this life.
            let is_of_this_life =
                |(_, number): &(usize, u32)| self.segments[*number as usize].sequence >= self.first_sequence;
            let unread = sealed.clone().find(|(_, number)| self.segments[*number as usize].unread);
            let chosen = best.filter(is_of_this_life).and(unread).or(best);
            if let Some((at, number)) = chosen.or_else(|| sealed.min()) {
                self.moved_units = if chosen.is_some() { 0 } else { self.segment_units };
                self.full.remove(at);
                self.reclaiming = Some(number);
            }
        }
        self.reclaiming
    }

    /// True if enough of a segment is gone for its reclamation to make room. After a start there may be no
    /// segment for moved blocks.
    fn gains(&self, number: u32) -> bool {
        let segment = &self.segments[number as usize];
        let has_next = self.next.is_some() || !self.free.is_empty();
        let gone = segment.units - HEADER_UNITS - segment.live;
        !segment.unread && (segment.live == 0 || has_next && gone >= self.segment_units / GAINED_PART)
    }

    fn free_min(&self) -> u32 {
        (self.stats.segments / FREE_PART).clamp(1, FREE_MAX)
    }

    /// Returns the most units of blocks with room: those of segments except the free ones, the next one and, of
    /// several streams, the open ones but one.
    pub(super) fn units_max(&self) -> u64 {
        let segments = self.stats.segments.saturating_sub(self.streams() as u32 + self.free_min()).max(1);
        u64::from(segments) * u64::from(self.segment_units) * USED_PART.0 / USED_PART.1
    }

    /// Returns the most units moved by one reclamation.
    pub(super) fn moved_units_max(&self) -> u32 {
        self.segment_units - self.segment_units / GAINED_PART
    }

    /// Counts a block placed in a segment.
    pub(super) fn place_block(&mut self, segment: u32, entry: u32, units: u32) {
        let segment = self.segment(segment);
        segment.blocks.push(entry);
        segment.live += units;
    }

    /// Counts a block of a segment that has room again.
    pub(super) fn settle(&mut self, segment: u32, units: u32) {
        self.segment(segment).live += units;
    }

    /// Counts a block that left a segment or gave its room up.
    pub(super) fn unsettle(&mut self, segment: u32, units: u32) {
        self.segment(segment).live -= units;
    }

    /// Frees the segment under reclamation if no block is left in it and no job reads it.
    pub(super) fn reclaimed(&mut self) {
        let Some(number) = self.reclaiming else { return };
        let segment = self.segment(number);
        if segment.blocks.is_empty() && segment.live == 0 && segment.reads == 0 {
            segment.blocks = Vec::new();
            segment.used_for = SegmentUse::Free;
            self.free.push_back(number);
            self.reclaiming = None;
        }
    }

    /// Counts a block of an earlier life in a segment.
    pub(super) fn remains(&mut self, number: u32, sequence: u64, units: u32) {
        let segment = self.segment(number);
        if segment.used_for == SegmentUse::Free {
            (segment.used_for, segment.sequence) = (SegmentUse::Sealed, sequence);
            segment.units = HEADER_UNITS;
            self.full.push_back(number);
        }
        self.segment(number).units += units;
    }

    /// Marks a segment with unreadable blocks, which a later life may find: it is reused after those of
    /// earlier lives with gains, and before those of this life.
    pub(super) fn unreadable(&mut self, number: u32) {
        let segment = self.segment(number);
        segment.unread = true;
        if segment.used_for == SegmentUse::Free {
            (segment.used_for, segment.units) = (SegmentUse::Sealed, HEADER_UNITS);
            self.full.push_back(number);
        }
    }

    /// Ends the recovery.
    pub(super) fn recovered(&mut self) {
        let Self { full, segments, .. } = self;
        full.make_contiguous().sort_by_key(|number| {
            let segment = &segments[*number as usize];
            (segment.unread, segment.sequence)
        });
        let free = |number: &u32| self.segments[*number as usize].used_for == SegmentUse::Free;
        self.free = (0..self.stats.segments).filter(free).collect();
        self.recovering = false;
    }
}
