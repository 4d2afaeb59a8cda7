//! A limit for the bytes of waiting reads of a device: as much as it reads in 2 s. More would delay other
//! reads.

use std::collections::VecDeque;

use shm_protocol::layout::QUERY_WAIT_MS_MAX;

/// Bytes of reads that keep a device busy, so the bytes it then ends show its rate.
const BUSY_BYTES: u64 = 32 << 20;
/// Bytes that may always wait: enough to measure the rate again, also of a device that reads them in 20 ms.
const BYTES_MIN: u64 = 8 * BUSY_BYTES;
/// Milliseconds of a window for a rate. A shorter window, of a device with less to do, has at least the
/// minimum: the clock is the caller's own, and the caller may take several ends at once.
const WINDOW_MS: u64 = 250;
const WINDOW_MS_MIN: u64 = 10;
/// The best of so many windows counts: in some of them the device or the caller rests.
const WINDOWS: usize = 8;

/// The reads of one source.
#[derive(Clone, Debug, Default)]
pub struct ReadPace {
    /// Bytes of reads under way.
    waiting: u64,
    window: Option<PaceWindow>,
    /// Bytes read in the time of a query's longest wait, at the rates of the last windows.
    reaches: VecDeque<u64>,
}

/// A time of a busy source.
#[derive(Copy, Clone, Debug)]
struct PaceWindow {
    since_ms: u64,
    /// Bytes read by the last end.
    read: u64,
    last_ms: u64,
    /// The longest time without an end. A source may end many reads nearly at once, and its window must be
    /// longer than such a burst.
    gap_ms: u64,
    /// The bytes still to end of those that waited when they became too few to keep the source busy. Later
    /// reads do not show its rate.
    tail: Option<u64>,
}

// === impl PaceWindow ===

impl PaceWindow {
    fn new(since_ms: u64) -> Self {
        Self { since_ms, read: 0, last_ms: since_ms, gap_ms: 0, tail: None }
    }

    fn took_ms(&self) -> u64 {
        self.last_ms - self.since_ms
    }

    /// Returns the bytes read in 2 s at this rate.
    fn reach(&self) -> u64 {
        self.read * u64::from(QUERY_WAIT_MS_MAX) / self.took_ms().max(1)
    }

    fn is_whole(&self) -> bool {
        self.took_ms() >= WINDOW_MS.max(2 * self.gap_ms)
    }

    /// True if the window ended before now, since the source had too little work.
    fn has_ended(&self, now_ms: u64) -> bool {
        let pause_ms = if self.tail == Some(0) { 0 } else { WINDOW_MS_MIN };
        self.tail.is_some() && now_ms > self.last_ms + pause_ms
    }
}

// === impl ReadPace ===

impl ReadPace {
    /// True if a read would end in time when it may use 1 of `parts` of the limit. A device that was never
    /// busy has no limit.
    pub fn takes(&self, bytes: u64, parts: u64) -> bool {
        self.waiting == 0
            || self.reach().is_none_or(|reach| self.waiting + bytes <= reach.max(BYTES_MIN) / parts)
    }

    /// Returns the bytes a millisecond, by the best of the last windows; `None` if the source was never busy.
    pub fn rate(&self) -> Option<f64> {
        self.reach().map(|reach| reach as f64 / f64::from(QUERY_WAIT_MS_MAX))
    }

    /// Returns the best of the last windows and of this one, once it is long enough.
    fn reach(&self) -> Option<u64> {
        let this = self.window.filter(PaceWindow::is_whole);
        self.reaches.iter().copied().chain(this.map(|window| window.reach())).max()
    }

    /// True while enough reads wait to keep the source busy.
    pub fn is_busy(&self) -> bool {
        self.waiting > BUSY_BYTES
    }

    /// Notes the begin of a read.
    pub fn began(&mut self, bytes: u64, now_ms: u64) {
        if let Some(window) = self.window.take_if(|window| window.has_ended(now_ms)) {
            self.close_window(window);
        }
        self.waiting += bytes;
        if self.is_busy() {
            self.window.get_or_insert(PaceWindow::new(now_ms)).tail = None;
        }
    }

    /// Notes the end of a read; `moved` is true if its bytes were moved.
    pub fn end_read(&mut self, bytes: u64, moved: bool, now_ms: u64) {
        self.waiting -= bytes;
        let Some(mut window) = self.window.take().filter(|_| moved) else { return };
        if window.has_ended(now_ms) {
            return self.close_window(window);
        }
        if now_ms > window.last_ms && window.is_whole() {
            self.close_window(window);
            window = PaceWindow { tail: window.tail, ..PaceWindow::new(window.last_ms) };
        }
        window.read += bytes;
        window.gap_ms = window.gap_ms.max(now_ms - window.last_ms);
        window.last_ms = now_ms;
        window.tail = match window.tail {
            Some(tail) => Some(tail.saturating_sub(bytes)),
            None => (!self.is_busy()).then_some(self.waiting),
        };
        self.window = Some(window);
    }

    fn close_window(&mut self, window: PaceWindow) {
        if window.took_ms() >= WINDOW_MS_MIN {
            self.reaches.truncate(WINDOWS - 1);
            self.reaches.push_front(window.reach());
        }
    }

    /// Drops the window: the caller stood still, so ends meanwhile do not show the device's rate.
    pub fn stood_still(&mut self) {
        self.window = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Asks for reads of 1 MiB up to `most`, and returns the number of accepted ones.
    fn ask(pace: &mut ReadPace, most: u64, now_ms: u64) -> u64 {
        let mut taken = 0;
        while taken < most && pace.takes(MIB, 1) {
            pace.began(MIB, now_ms);
            taken += 1;
        }
        taken
    }

    /// The device reads so many MiB each millisecond, for `ms` or until no read waits.
    fn read(pace: &mut ReadPace, now_ms: &mut u64, ms: u64, mib: u64) {
        let until_ms = *now_ms + ms;
        while *now_ms < until_ms && pace.waiting > 0 {
            *now_ms += 1;
            (0..mib.min(pace.waiting / MIB)).for_each(|_| pace.end_read(MIB, true, *now_ms));
        }
    }

    #[test]
    fn no_more_waits_than_is_read_while_a_query_waits() {
        let (mut pace, mut now_ms) = (ReadPace::default(), 0);
        assert_eq!(ask(&mut pace, 10_000, 0), 10_000, "nothing is known of it");
        read(&mut pace, &mut now_ms, 9_000, 1);
        assert_eq!(
            ask(&mut pace, 10_000, now_ms),
            1_000,
            "1,000 of them still wait, and 2,000 MiB are read in 2 s"
        );
        read(&mut pace, &mut now_ms, 1_500, 1);
        assert!(!pace.takes(MIB, 4) && pace.takes(MIB, 3), "500 wait");
        assert_eq!(ask(&mut pace, 10_000, now_ms), 1_500);
    }

    #[test]
    fn a_device_that_became_slow_is_asked_for_less_and_one_that_rested_is_not() {
        let (mut pace, mut now_ms) = (ReadPace::default(), 0);
        ask(&mut pace, 10_000, 0);
        read(&mut pace, &mut now_ms, 60_000, 4);
        assert!((8_000..8_100).contains(&ask(&mut pace, 10_000, now_ms)));
        // It rests for a second, and is as it was.
        now_ms += 1_000;
        read(&mut pace, &mut now_ms, 60_000, 4);
        assert!((8_000..8_100).contains(&ask(&mut pace, 10_000, now_ms)));
        // From then on it reads in an eighth of its former rate.
        for _ in 0..1_000 {
            now_ms += 31;
            read(&mut pace, &mut now_ms, 1, 4);
        }
        assert_eq!(ask(&mut pace, 10_000, now_ms), 0, "4,000 wait, and some 250 MiB are read in 2 s");
        read(&mut pace, &mut now_ms, 60_000, 1);
        assert_eq!(pace.waiting, 0);
    }

    #[test]
    fn short_bursts_show_that_a_device_is_fast_again() {
        let mut pace = ReadPace { reaches: [1; WINDOWS].into(), ..ReadPace::default() };
        let mut now_ms = 0;
        assert_eq!(ask(&mut pace, 10_000, now_ms), 256);
        read(&mut pace, &mut now_ms, 60_000, 8);
        now_ms += 60_000;
        assert!(ask(&mut pace, 100_000, now_ms) > 10_000, "it read 224 MiB in 28 ms");
    }

    #[test]
    fn what_was_not_moved_and_a_standstill_say_nothing() {
        let busy = || {
            let mut pace = ReadPace::default();
            ask(&mut pace, 1_000, 0);
            pace
        };
        let mut pace = busy();
        pace.end_read(MIB, false, 300);
        assert!(pace.reaches.is_empty() && pace.window.is_none());
        let mut pace = busy();
        pace.stood_still();
        pace.end_read(MIB, true, 300);
        assert!(pace.reaches.is_empty());
        let mut pace = busy();
        (0..1000).for_each(|_| pace.end_read(MIB, true, 600));
        pace.began(MIB, 700);
        assert_eq!(pace.reaches, [1000 * MIB * 2000 / 600], "of the time in which the caller was away, too");
    }

    #[test]
    fn what_ends_at_once_took_all_of_the_time_since_it_was_asked_for() {
        let mut pace = ReadPace::default();
        ask(&mut pace, 64, 0);
        // The caller takes some of a burst each millisecond.
        (0..16).for_each(|number| pace.end_read(MIB, true, 300 + number / 4));
        (0..48).for_each(|number| pace.end_read(MIB, true, 640 + number / 4));
        assert!(pace.reaches.is_empty());
        pace.began(MIB, 900);
        assert_eq!(pace.reaches, [64 * MIB * 2000 / 651]);
    }

    #[test]
    fn a_block_of_any_size_is_read_where_nothing_waits() {
        let mut pace = ReadPace { reaches: [1].into(), ..ReadPace::default() };
        assert!(pace.takes(1 << 40, 2));
        pace.began(MIB, 0);
        assert!(!pace.takes(BYTES_MIN, 1));
    }

    #[test]
    fn single_reads_one_after_the_other_do_not_show_a_devices_rate() {
        let (mut pace, mut now_ms) = (ReadPace::default(), 0);
        ask(&mut pace, 1_000, now_ms);
        read(&mut pace, &mut now_ms, 60_000, 4);
        let rate = pace.rate();
        for _ in 0..1_000 {
            pace.began(MIB, now_ms);
            now_ms += 5;
            pace.end_read(MIB, true, now_ms);
        }
        assert_eq!(pace.rate(), rate, "MiB a ms");
    }
}
