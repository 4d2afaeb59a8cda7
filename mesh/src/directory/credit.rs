//! Credit of the promises of one promiser: a peer, or an engine of this node.

/// A promiser has no credit after so many broken promises in a row.
const BROKEN_MAX: u32 = 3;
/// Milliseconds until one request tries such a promiser. Each further pause takes twice as long, up to the longest.
const PAUSE_MS_MIN: u64 = 10_000;
const PAUSE_MS_MAX: u64 = 60_000;

/// The awaited promises of one promiser.
#[derive(Clone, Debug, Default)]
pub struct Credit {
    /// Broken since the last kept one.
    in_row: u32,
    broken_total: u64,
    /// The last pause's length, and the time of its end.
    pause_ms: u64,
    until_ms: u64,
}

// === impl Credit ===

impl Credit {
    pub fn is_believed(&self) -> bool {
        self.in_row < BROKEN_MAX
    }

    pub fn broken_total(&self) -> u64 {
        self.broken_total
    }

    /// Returns true if a request may try a promiser without credit: one may in each pause.
    pub fn begin_trial(&mut self, now_ms: u64) -> bool {
        let is_due = self.until_ms <= now_ms;
        if is_due {
            self.begin_pause(now_ms);
        }
        is_due
    }

    /// Records a wait without the promised block at its end. Returns true if the promiser has no credit from
    /// now on.
    pub fn break_promise(&mut self, now_ms: u64) -> bool {
        self.broken_total += 1;
        self.in_row += 1;
        let is_last = self.in_row == BROKEN_MAX;
        if is_last {
            self.begin_pause(now_ms);
        }
        is_last
    }

    /// Records a wait with the promised block at its end, promised by this promiser alone.
    pub fn keep_promise(&mut self) {
        *self = Self { broken_total: self.broken_total, ..Self::default() };
    }

    fn begin_pause(&mut self, now_ms: u64) {
        self.pause_ms = (self.pause_ms * 2).clamp(PAUSE_MS_MIN, PAUSE_MS_MAX);
        self.until_ms = now_ms + self.pause_ms;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_broken_promises_in_a_row_are_believed_again_after_one_that_was_kept() {
        let mut credit = Credit::default();
        assert_eq!([0, 1].map(|now_ms| credit.break_promise(now_ms)), [false; 2]);
        credit.keep_promise();
        assert_eq!([2, 3].map(|now_ms| credit.break_promise(now_ms)), [false; 2]);
        assert!(credit.is_believed() && credit.break_promise(4) && !credit.is_believed());
        assert!(!credit.break_promise(5), "said once");
        credit.keep_promise();
        assert_eq!((credit.is_believed(), credit.broken_total()), (true, 6));
    }

    #[test]
    fn one_request_tries_in_each_pause_and_each_pause_takes_twice_as_long() {
        let mut credit = Credit::default();
        (0..3).for_each(|_| _ = credit.break_promise(0));
        let mut tried = (0..300_000).step_by(1000).filter(|now_ms| credit.begin_trial(*now_ms));
        let tried: Vec<u64> = tried.by_ref().collect();
        assert_eq!(tried, [10_000, 30_000, 70_000, 130_000, 190_000, 250_000]);
    }
}
