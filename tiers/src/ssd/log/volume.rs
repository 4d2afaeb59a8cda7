//! One device as the log sees it: its segments, and where the next block goes.

use std::collections::VecDeque;

use super::DeviceStats;
use super::breaker::Breaker;
use super::distrusts::Distrusts;
use super::pace::Pace;
use crate::ssd::format::{self, HEADER_UNITS};
use crate::ssd::{Geometry, Place, Work};

/// Free segments below which the oldest one is reclaimed: a 16th of all, 4 at most.
const FREE_PART: u32 = 16;
const FREE_MAX: u32 = 4;
/// The part of the room that blocks may take: what cleaning moves grows with it.
const USED_PART: (u64, u64) = (4, 5);
/// The part of a segment that blocks which went must take for its reclamation to move the others: each takes that part of what was
/// written, once, so that at most seven bytes move for each byte written. A segment's end that no block fits is no gain.
const GAINED_PART: u32 = 8;

/// What a segment is used for.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub(super) enum Use {
    /// Nothing; or not known yet, while the device is being recovered.
    #[default]
    Free,
    /// Its header is being written, or was: blocks go into it next.
    Next,
    /// Blocks go into it.
    Open,
    /// Full; its last writes, then its footer, are on their way.
    Closing,
    /// Full, and read alone.
    Sealed,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Segment {
    pub(super) used_for: Use,
    pub(super) sequence: u64,
    /// Units that were given out, its header's among them.
    units: u32,
    /// Blocks given a place, which the footer must have room for.
    count: u32,
    /// Jobs that read in it.
    pub(super) reads: u32,
    /// Jobs that write blocks in it.
    writes: u32,
    /// Entries that got a place in it; some are elsewhere by now, or vacant.
    pub(super) blocks: Vec<u32>,
    /// Units of blocks that lie in it.
    live: u32,
    /// Whether it may hold blocks of earlier lives that could not be read.
    unread: bool,
}

#[derive(Debug)]
pub(super) struct Volume {
    pub(super) unit_bytes: u64,
    pub(super) segment_units: u32,
    pub(super) segments: Vec<Segment>,
    free: VecDeque<u32>,
    /// Segments with blocks, by sequence; those that are closing come last.
    full: VecDeque<u32>,
    open: Option<u32>,
    /// The segment that comes next, and whether its header is written.
    next: Option<(u32, bool)>,
    pub(super) reclaiming: Option<u32>,
    /// Units that the present reclamation has moved.
    pub(super) moved_units: u32,
    pub(super) moves: u32,
    /// The first sequence of this life.
    first_sequence: u64,
    pub(super) next_sequence: u64,
    /// Jobs under way, and when the last one ended or the first of them began.
    pub(super) flights: u64,
    pub(super) moved_ms: u64,
    /// Bytes of writes under way.
    pub(super) write_bytes: u64,
    pub(super) breaker: Breaker,
    pub(super) pace: Pace,
    pub(super) distrusts: Distrusts,
    pub(super) recovering: bool,
    pub(super) stats: DeviceStats,
}

// === impl Volume ===

impl Volume {
    pub(super) fn new(geometry: &Geometry) -> Self {
        Self {
            unit_bytes: geometry.unit_bytes,
            segment_units: (geometry.segment_bytes / geometry.unit_bytes) as u32,
            segments: vec![Segment::default(); geometry.segments as usize],
            free: VecDeque::new(),
            full: VecDeque::new(),
            open: None,
            next: None,
            reclaiming: None,
            moved_units: 0,
            moves: 0,
            first_sequence: geometry.first_sequence,
            next_sequence: geometry.first_sequence,
            flights: 0,
            moved_ms: 0,
            write_bytes: 0,
            breaker: Breaker::new(),
            pace: Pace::default(),
            distrusts: Distrusts::default(),
            recovering: true,
            stats: DeviceStats { segments: geometry.segments, ..DeviceStats::default() },
        }
    }

    /// Whether it takes blocks at all now.
    pub(super) fn takes(&self) -> bool {
        !self.recovering && !self.breaker.is_open()
    }

    /// What it has to do, and for who is as busy, what it has done for its size.
    pub(super) fn load(&self) -> (u64, u64) {
        (self.write_bytes, self.stats.written_bytes_total / u64::from(self.stats.segments))
    }

    pub(super) fn free_segments(&self) -> u32 {
        self.free.len() as u32
    }

    pub(super) fn segment(&mut self, number: u32) -> &mut Segment {
        &mut self.segments[number as usize]
    }

    /// Units of a block with its header.
    pub(super) fn units(&self, bytes: u32) -> u32 {
        format::block_units(bytes, self.unit_bytes)
    }

    /// Units of a segment that a block takes where all are of its size: what no further one fits is theirs, too.
    pub(super) fn share(&self, bytes: u32) -> u32 {
        let room = self.segment_units - HEADER_UNITS - format::footer_units(0, self.unit_bytes);
        let each = u64::from(self.units(bytes)) * self.unit_bytes + format::ENTRY_BYTES as u64;
        let blocks = u64::from(room) * self.unit_bytes / each;
        self.segment_units.div_ceil(blocks.max(1) as u32)
    }

    /// Whether an empty segment holds so many units of one block.
    pub(super) fn could_hold(&self, units: u32) -> bool {
        units.saturating_add(HEADER_UNITS + format::footer_units(1, self.unit_bytes)) <= self.segment_units
    }

    fn fits(&self, segment: u32, units: u32) -> bool {
        let segment = &self.segments[segment as usize];
        let footer = format::footer_units(segment.count + 1, self.unit_bytes);
        segment.units + units + footer <= self.segment_units
    }

    /// Whether a place of so many units is there now. Brings the next segment into use if it must, and on its way.
    pub(super) fn has_room(&mut self, units: u32, out: &mut Vec<Work>) -> bool {
        if self.open.is_none_or(|open| !self.fits(open, units))
            && let Some((next, true)) = self.next
        {
            self.next = None;
            if let Some(open) = self.open.replace(next) {
                self.segment(open).used_for = Use::Closing;
                self.full.push_back(open);
                self.seal_if_over(open, out);
            }
            self.segment(next).used_for = Use::Open;
        }
        self.begin_next(out);
        self.open.is_some_and(|open| self.fits(open, units))
    }

    /// Whether the next segment is for what a reclamation moves, and the open one is too full for a block of so many units.
    pub(super) fn spares_next(&self, units: u32) -> bool {
        let fits = self.open.is_some_and(|open| self.fits(open, units));
        self.reclaiming.is_some() && self.free.is_empty() && !fits
    }

    fn begin_next(&mut self, out: &mut Vec<Work>) {
        if self.next.is_some() {
            return;
        }
        let Some(number) = self.free.pop_front() else { return };
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let segment = self.segment(number);
        debug_assert!(segment.reads == 0 && segment.writes == 0 && segment.live == 0);
        segment.blocks.clear();
        (segment.used_for, segment.sequence) = (Use::Next, sequence);
        (segment.units, segment.count, segment.unread) = (HEADER_UNITS, 0, false);
        self.next = Some((number, false));
        out.push(Work::Begin { segment: number, sequence });
    }

    /// The header of the next segment was written, or not.
    pub(super) fn begun(&mut self, number: u32, well: bool) {
        if well {
            self.next = Some((number, true));
        } else {
            self.next = None;
            self.segment(number).used_for = Use::Free;
            self.free.push_back(number);
        }
    }

    /// Whether the next segment is on its way.
    pub(super) fn awaits_next(&self) -> bool {
        matches!(self.next, Some((_, false)))
    }

    /// Gives out a place that is there.
    pub(super) fn take_place(&mut self, units: u32) -> Place {
        let number = self.open.expect("asked before");
        let segment = self.segment(number);
        let place = Place { segment: number, unit: segment.units };
        segment.units += units;
        segment.count += 1;
        segment.writes += 1;
        place
    }

    /// A job that wrote a block in a segment has ended.
    pub(super) fn written(&mut self, number: u32, out: &mut Vec<Work>) {
        self.segment(number).writes -= 1;
        self.seal_if_over(number, out);
    }

    fn seal_if_over(&mut self, number: u32, out: &mut Vec<Work>) {
        let segment = self.segment(number);
        if segment.used_for == Use::Closing && segment.writes == 0 {
            out.push(Work::Seal { segment: number, sequence: segment.sequence });
        }
    }

    /// A footer was written, or not: then the segment is read through at the next start.
    pub(super) fn sealed(&mut self, number: u32) {
        self.segment(number).used_for = Use::Sealed;
    }

    /// The segment whose turn it is to be reclaimed: the one at hand, or the oldest, if there are too few free ones.
    pub(super) fn due_for_reclamation(&mut self) -> Option<u32> {
        if !self.takes() {
            return None;
        }
        if self.reclaiming.is_none() && self.free_segments() < self.free_min() {
            let full = self.full.iter().copied().enumerate();
            let sealed = full.filter(|(_, number)| self.segments[*number as usize].used_for == Use::Sealed);
            // Of those that are alike the oldest.
            let gaining = sealed.clone().filter(|(_, number)| self.gains(*number));
            let best = gaining.min_by_key(|(_, number)| self.segments[*number as usize].live);
            // What could not be read goes before what was written since.
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

    /// Whether enough of a segment went for its reclamation to make room. After a start there may be no segment to move anything to.
    fn gains(&self, number: u32) -> bool {
        let segment = &self.segments[number as usize];
        let has_next = self.next.is_some() || !self.free.is_empty();
        let gone = segment.units - HEADER_UNITS - segment.live;
        !segment.unread && (segment.live == 0 || has_next && gone >= self.segment_units / GAINED_PART)
    }

    fn free_min(&self) -> u32 {
        (self.stats.segments / FREE_PART).clamp(1, FREE_MAX)
    }

    /// Units that blocks may take: of segments that are neither next nor kept free.
    pub(super) fn units_max(&self) -> u64 {
        let segments = self.stats.segments.saturating_sub(1 + self.free_min()).max(1);
        u64::from(segments) * u64::from(self.segment_units) * USED_PART.0 / USED_PART.1
    }

    /// Units that one reclamation may move.
    pub(super) fn moved_units_max(&self) -> u32 {
        self.segment_units - self.segment_units / GAINED_PART
    }

    /// A block got a place in a segment.
    pub(super) fn settle(&mut self, segment: u32, entry: u32, units: u32) {
        let segment = self.segment(segment);
        segment.blocks.push(entry);
        segment.live += units;
    }

    /// It lies there no more.
    pub(super) fn unsettle(&mut self, segment: u32, units: u32) {
        self.segment(segment).live -= units;
    }

    /// The segment at hand is free again if nothing is left in it and nobody reads it.
    pub(super) fn reclaimed(&mut self) {
        let Some(number) = self.reclaiming else { return };
        let segment = self.segment(number);
        if segment.live == 0 && segment.reads == 0 {
            segment.blocks = Vec::new();
            segment.used_for = Use::Free;
            self.free.push_back(number);
            self.reclaiming = None;
        }
    }

    /// A segment of an earlier life holds a block of so many units.
    pub(super) fn remains(&mut self, number: u32, sequence: u64, units: u32) {
        let segment = self.segment(number);
        if segment.used_for == Use::Free {
            (segment.used_for, segment.sequence) = (Use::Sealed, sequence);
            segment.units = HEADER_UNITS;
            self.full.push_back(number);
        }
        self.segment(number).units += units;
    }

    /// A segment may hold blocks that could not be read, and a later life may find: it is used again after those of earlier lives
    /// that gain, and before those of this life.
    pub(super) fn unreadable(&mut self, number: u32) {
        let segment = self.segment(number);
        segment.unread = true;
        if segment.used_for == Use::Free {
            (segment.used_for, segment.units) = (Use::Sealed, HEADER_UNITS);
            self.full.push_back(number);
        }
    }

    /// Nothing is left to be recovered.
    pub(super) fn recovered(&mut self) {
        let Self { full, segments, .. } = self;
        full.make_contiguous().sort_by_key(|number| {
            let segment = &segments[*number as usize];
            (segment.unread, segment.sequence)
        });
        let free = |number: &u32| self.segments[*number as usize].used_for == Use::Free;
        self.free = (0..self.stats.segments).filter(free).collect();
        self.recovering = false;
    }
}
