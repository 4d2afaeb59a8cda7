//! Sources of blocks: the bytes a second of each under its present load, and its unended reads.
//!
//! A source serves its requests nearly in their order. So the bytes ahead of a block are those of the
//! requests up to it, without those ended since.
//!
//! A source with too little work does not show its rate. A waiter therefore judges it by its progress since the waiter's own
//! question, or since enough bytes wait to keep it busy; until then, by its rate of earlier busy times.

use std::collections::{BTreeMap, VecDeque};

use mesh::transport::PeerNumber;
use tiers::ssd::ReadPace;

/// Milliseconds of progress for a rate, and for the rate of a late source: the worst pauses of a cloud disk
/// take a second.
const RECENT_MS: u64 = 500;
const LATE_MS: u64 = 2_000;
/// Milliseconds of a slice with one mark of progress, and the age of the oldest mark: more than the longest pause of a wait.
const MARK_MS: u64 = 50;
const MARKS_MS: u64 = 3_000;

/// A source of blocks.
#[derive(Copy, Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(in crate::core) enum SourceLane {
    /// The blocks' own slots: the blocks are verified.
    Pool,
    /// A disk of the log, by number.
    Disk(usize),
    Peer(PeerNumber),
}

/// The blocks of one source, in bytes since the start.
#[derive(Clone, Debug, Default)]
pub(in crate::core) struct Flow {
    begun: u64,
    ended: u64,
    pace: ReadPace,
    /// Times of ends, and the ended bytes.
    marks: VecDeque<(u64, u64)>,
    moved_ms: u64,
    /// When its present work without a pause began, and the bytes ended by then.
    worked: (u64, u64),
    /// Since when enough bytes wait to keep it busy.
    busy_ms: Option<u64>,
    /// When its last block ended, if it has nothing to do; and the milliseconds to its first block after the
    /// last pause.
    idle_ms: Option<u64>,
    first_ms: u64,
}

/// The bytes due from a source to one waiter.
#[derive(Copy, Clone, Debug)]
pub(in crate::core) struct Owed {
    /// The place of the last block's end among all requested bytes.
    pub(super) up_to: u64,
    /// The ended bytes at the time of the request, and that time.
    ended: u64,
    since_ms: u64,
}

/// The rest of one waiter's wait for all its sources.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub(in crate::core) struct Ahead {
    /// Milliseconds until all blocks are here; `None`: a source's rate is not known yet.
    pub(in crate::core) ms: Option<f64>,
    /// Bytes a millisecond of these sources together.
    pub(in crate::core) rate: f64,
    /// When any of its sources last gave a block.
    pub(in crate::core) moved_ms: u64,
}

/// All sources.
#[derive(Debug, Default)]
pub(in crate::core) struct Flows(BTreeMap<SourceLane, Flow>);

// === impl Flow ===

impl Flow {
    fn waiting(&self) -> u64 {
        self.begun - self.ended
    }

    /// Notes a request for so many bytes. Returns the place of their end among all requested bytes.
    fn begin_bytes(&mut self, bytes: u64, now_ms: u64) -> u64 {
        // A continuing waiter asks again at the end of its last block: that is no pause.
        if self.waiting() == 0 && self.idle_ms != Some(now_ms) {
            self.worked = (now_ms, self.ended);
        }
        self.begun += bytes;
        self.pace.began(bytes, now_ms);
        self.note_busy(now_ms);
        self.begun
    }

    fn end_bytes(&mut self, bytes: u64, moved: bool, now_ms: u64) {
        self.ended += bytes;
        self.idle_ms = (self.waiting() == 0).then_some(now_ms);
        self.pace.end_read(bytes, moved, now_ms);
        self.note_busy(now_ms);
        if !moved {
            return;
        }
        self.moved_ms = now_ms;
        if self.ended - bytes == self.worked.1 {
            self.first_ms = now_ms.saturating_sub(self.worked.0);
        }
        // One mark for each slice of time: its last end.
        let _ = self.marks.pop_back_if(|(ms, _)| *ms / MARK_MS == now_ms / MARK_MS);
        self.marks.push_back((now_ms, self.ended));
        while self.marks.front().is_some_and(|(ms, _)| ms + MARKS_MS < now_ms) {
            self.marks.pop_front();
        }
    }

    fn note_busy(&mut self, now_ms: u64) {
        self.busy_ms = self.pace.is_busy().then(|| self.busy_ms.unwrap_or(now_ms));
    }

    /// Returns bytes a millisecond by the progress of the last [`RECENT_MS`], or since the last progress
    /// before, all of it after `from_ms`; of the last [`LATE_MS`] if the next block is late. `None` without
    /// any progress.
    fn recent(&self, from_ms: u64, now_ms: u64) -> Option<f64> {
        let ended = self.marks.iter().rfind(|(ms, _)| *ms <= from_ms).map_or(0, |(_, ended)| *ended);
        let begin = (from_ms, ended.max(self.worked.1));
        let marks = self.marks.iter().copied().filter(|(ms, _)| *ms > from_ms);
        let bounds: Vec<(u64, u64)> = std::iter::once(begin).chain(marks).collect();
        let &[.., before, last] = &bounds[..] else { return None };
        // A block is late after twice the time between the two last ones.
        let is_late = now_ms - last.0 > 2 * (last.0 - before.0);
        let (within_ms, until_ms) = if is_late { (LATE_MS, now_ms) } else { (RECENT_MS, last.0) };
        let is_bound = |(ms, ended): &&(u64, u64)| ms + within_ms <= now_ms && *ended < last.1;
        let bound = bounds.iter().rfind(is_bound).unwrap_or(&bounds[0]);
        Some((last.1 - bound.1) as f64 / until_ms.saturating_sub(bound.0).max(1) as f64)
    }

    /// Returns the present bytes a millisecond for a waiter since `since_ms`; those of earlier times until
    /// the source has worked for long enough.
    fn rate(&self, since_ms: u64, now_ms: u64) -> Option<f64> {
        let from_ms = self.busy_ms.map_or(since_ms, |busy_ms| since_ms.min(busy_ms)).max(self.worked.0);
        match now_ms >= from_ms + RECENT_MS {
            true => self.recent(from_ms, now_ms),
            false => self.pace.rate(),
        }
    }
}

// === impl Flows ===

impl Flows {
    /// Returns the bytes a second of a source with enough to do; 0: unknown.
    pub(in crate::core) fn bytes_per_second(&self, lane: SourceLane) -> u64 {
        self.0.get(&lane).and_then(|flow| flow.pace.rate()).map_or(0, |rate| (rate * 1e3) as u64)
    }

    pub(super) fn begin_bytes(&mut self, lane: SourceLane, bytes: u64, now_ms: u64) -> u64 {
        self.0.entry(lane).or_default().begin_bytes(bytes, now_ms)
    }

    pub(super) fn end_bytes(&mut self, lane: SourceLane, bytes: u64, moved: bool, now_ms: u64) {
        self.0.entry(lane).or_default().end_bytes(bytes, moved, now_ms);
    }

    /// Forgets a gone peer's source, unless it has unended reads: these will end.
    pub(super) fn forget_source(&mut self, lane: SourceLane) {
        if self.0.get(&lane).is_some_and(|flow| flow.waiting() == 0) {
            self.0.remove(&lane);
        }
    }

    /// Returns the bytes due from a source, up to a place.
    pub(super) fn owed(&self, lane: SourceLane, up_to: u64, now_ms: u64) -> Owed {
        Owed { up_to, ended: self.0.get(&lane).map_or(0, |flow| flow.ended), since_ms: now_ms }
    }

    /// Returns the bytes due from a source to all waiters, for a wait since `since_ms`.
    pub(in crate::core) fn owed_by(&self, lane: SourceLane, since_ms: u64) -> Owed {
        self.owed(lane, self.0.get(&lane).map_or(0, |flow| flow.begun), since_ms)
    }

    /// Returns the milliseconds until so many further bytes of each source would be here. `None`: the rate of
    /// one is unknown.
    pub(in crate::core) fn ms_for_more(&self, bytes: &BTreeMap<SourceLane, u64>, now_ms: u64) -> Option<f64> {
        let ms = |(lane, bytes): (&SourceLane, &u64)| {
            let flow = self.0.get(lane)?;
            // An idle source begins at its pace of before, with its first byte.
            let (rate, first_ms) = match flow.waiting() {
                0 => (flow.pace.rate(), flow.first_ms),
                _ => (flow.rate(now_ms, now_ms), 0),
            };
            let rate = rate.filter(|rate| *rate > 0.0)?;
            Some((flow.waiting() + bytes) as f64 / rate + first_ms as f64)
        };
        bytes.iter().map(ms).try_fold(0.0, |longest: f64, ms| Some(longest.max(ms?)))
    }

    /// Returns the rest of a wait for these sources at `now_ms`, for a waiter since `since_ms`.
    pub(in crate::core) fn ahead(
        &self,
        owed: &BTreeMap<SourceLane, Owed>,
        since_ms: u64,
        now_ms: u64,
    ) -> Ahead {
        let mut ahead = Ahead { ms: Some(0.0), ..Ahead::default() };
        for (lane, owed) in owed {
            ahead.moved_ms = ahead.moved_ms.max(owed.since_ms);
            let Some(flow) = self.0.get(lane) else { continue };
            ahead.moved_ms = ahead.moved_ms.max(flow.moved_ms);
            let left = owed.up_to.saturating_sub(flow.ended);
            let rate = flow.rate(since_ms, now_ms);
            ahead.rate += rate.unwrap_or(0.0);
            if left > 0 {
                // A source with progress for others has given its first bytes.
                let first_ms = if owed.ended < flow.ended { 0 } else { flow.first_ms };
                let ms = rate.map(|rate| left as f64 / rate + first_ms as f64);
                ahead.ms = ahead.ms.zip(ms).map(|(longest, ms)| longest.max(ms));
            }
        }
        ahead
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const DISK: SourceLane = SourceLane::Disk(0);

    fn asked(flows: &mut Flows, lane: SourceLane, mib: u64, now_ms: u64) -> BTreeMap<SourceLane, Owed> {
        let up_to = (0..mib).map(|_| flows.begin_bytes(lane, MIB, now_ms)).last().unwrap();
        BTreeMap::from([(lane, flows.owed(lane, up_to, now_ms))])
    }

    /// A source gives a MiB each `every_ms`.
    fn give(flows: &mut Flows, lane: SourceLane, times: std::ops::Range<u64>, every_ms: u64) {
        times.step_by(every_ms as usize).for_each(|ms| flows.end_bytes(lane, MIB, true, ms + every_ms));
    }

    fn ms(flows: &Flows, owed: &BTreeMap<SourceLane, Owed>, now_ms: u64) -> f64 {
        flows.ahead(owed, 0, now_ms).ms.expect("a rate")
    }

    #[test]
    fn what_is_left_takes_what_is_ahead_by_the_rate() {
        let mut flows = Flows::default();
        let others = asked(&mut flows, DISK, 1000, 0);
        assert_eq!(flows.ahead(&others, 0, 0).ms, None, "its rate is unknown");
        give(&mut flows, DISK, 0..400, 2);
        assert!((ms(&flows, &others, 400) - 1600.0).abs() < 20.0, "its first windows show the rate");
        let mine = asked(&mut flows, DISK, 100, 400);
        assert!((ms(&flows, &mine, 400) - 1800.0).abs() < 20.0, "800 of others and 100");
        give(&mut flows, DISK, 400..1400, 2);
        assert!((ms(&flows, &mine, 1400) - 800.0).abs() < 20.0);
        // It becomes four times slower.
        give(&mut flows, DISK, 1400..2400, 8);
        let left = 400.0 - 125.0;
        assert!((ms(&flows, &mine, 2400) / (left * 8.0) - 1.0).abs() < 0.1);
        assert_eq!(flows.ahead(&mine, 0, 2400).moved_ms, 2400);
    }

    #[test]
    fn a_source_that_stops_has_soon_no_rate_and_one_that_pauses_or_gives_in_bursts_keeps_its_own() {
        let mut flows = Flows::default();
        let owed = asked(&mut flows, DISK, 1000, 0);
        give(&mut flows, DISK, 0..1000, 2);
        let left = [1_000, 1_700, 2_900].map(|now_ms| ms(&flows, &owed, now_ms));
        assert!(left[1] < left[0] * 2.0, "a pause: {left:?}");
        assert!(left[2] > left[0] * 8.0, "{left:?}");
        let peer = SourceLane::Peer(PeerNumber(7));
        let owed = asked(&mut flows, peer, 1000, 0);
        for second in 1..=2 {
            (0..100).for_each(|_| flows.end_bytes(peer, MIB, true, second * 1000));
        }
        for now_ms in [2000, 2400, 2900] {
            let left = ms(&flows, &owed, now_ms);
            assert!((5_000.0..17_000.0).contains(&left), "8 s are left, not {left} ms at {now_ms}");
        }
    }

    #[test]
    fn further_bytes_come_behind_those_under_way_and_from_an_idle_source_at_its_pace() {
        let mut flows = Flows::default();
        let more = |mib: u64| BTreeMap::from([(DISK, mib * MIB)]);
        assert_eq!(flows.ms_for_more(&more(1), 0), None, "its rate is unknown");
        let owed = asked(&mut flows, DISK, 1000, 0);
        give(&mut flows, DISK, 0..1000, 2);
        let beside = flows.ms_for_more(&more(100), 1000).unwrap();
        assert!((beside - ms(&flows, &owed, 1000) - 200.0).abs() < 10.0, "{beside}");
        give(&mut flows, DISK, 1000..2000, 2);
        let idle = flows.ms_for_more(&more(100), 60_000).unwrap();
        assert!((idle - 200.0).abs() < 10.0, "{idle}");
        let other = BTreeMap::from([(DISK, MIB), (SourceLane::Disk(1), MIB)]);
        assert_eq!(flows.ms_for_more(&other, 60_000), None);
    }

    #[test]
    fn a_new_waiter_judges_a_busy_source_by_its_work_for_others_and_an_idle_one_by_its_own() {
        for (mib, known_ms) in [(100, Some(18_100.0)), (11, None)] {
            let mut flows = Flows::default();
            asked(&mut flows, DISK, mib, 0);
            give(&mut flows, DISK, 0..1_000, 100);
            let owed = asked(&mut flows, DISK, 90, 1_000);
            let left = |flows: &Flows, now_ms| flows.ahead(&owed, 1_000, now_ms).ms;
            assert_eq!(left(&flows, 1_000), known_ms, "of {mib} MiB");
            // It gives the same as before to many.
            give(&mut flows, DISK, 1_000..1_600, 10);
            let ms = left(&flows, 1_600).unwrap();
            let expected = (mib - 10 + 90 - 60) * 10;
            assert!((ms / expected as f64 - 1.0).abs() < 0.2, "{ms} in place of {expected}");
        }
    }

    #[test]
    fn the_slowest_source_decides_and_what_failed_is_no_progress() {
        let mut flows = Flows::default();
        let mut owed = asked(&mut flows, DISK, 500, 0);
        owed.extend(asked(&mut flows, SourceLane::Disk(1), 100, 0));
        give(&mut flows, DISK, 0..600, 2);
        assert_eq!(flows.ahead(&owed, 0, 600).ms, None, "the other one has given nothing");
        give(&mut flows, SourceLane::Disk(1), 0..600, 20);
        assert!((ms(&flows, &owed, 600) - 1400.0).abs() < 100.0);
        (0..70).for_each(|_| flows.end_bytes(SourceLane::Disk(1), MIB, false, 1500));
        assert_eq!(flows.ahead(&owed, 0, 1500).moved_ms, 600);
    }
}
