//! The breaker of a device: it stops the use of a failing device, and tries it again later.

/// Faults in a row of one direction after which a device is taken for broken.
const FAULTS_MAX: u32 = 4;
/// The first wait before a tripped device is tried, milliseconds.
const WAIT_MS_MIN: u64 = 1_000;
/// The longest wait: a replaced device is unused for at most so long.
const WAIT_MS_MAX: u64 = 60_000;
/// Successful jobs since the last trip after which the wait is at its minimum again.
const GOOD_JOBS: u32 = 64;

/// The direction of a job's bytes.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Way {
    Read,
    Write,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum State {
    /// The device is in use.
    Closed,
    /// The device is not in use until then.
    Open { until_ms: u64 },
    /// The device is not in use, and a check is under way.
    Trying,
}

/// The breaker of a device.
#[derive(Clone, Debug)]
pub(super) struct Breaker {
    state: State,
    /// Faults in a row, of reads and of writes: a full device still reads well.
    faults: [u32; 2],
    wait_ms: u64,
    good: u32,
    pub(super) trips_total: u64,
}

// === impl Breaker ===

impl Breaker {
    pub(super) fn new() -> Self {
        Self { state: State::Closed, faults: [0; 2], wait_ms: WAIT_MS_MIN, good: 0, trips_total: 0 }
    }

    /// True if the device is not in use.
    pub(super) fn is_open(&self) -> bool {
        self.state != State::Closed
    }

    /// Counts a successful job.
    pub(super) fn good(&mut self, way: Way) {
        self.faults[way as usize] = 0;
        self.good = self.good.saturating_add(1);
        if self.good >= GOOD_JOBS {
            self.wait_ms = WAIT_MS_MIN;
        }
    }

    /// Counts a failed job. Returns true if the device is taken for broken from now on.
    pub(super) fn fault(&mut self, way: Way, now_ms: u64) -> bool {
        let faults = &mut self.faults[way as usize];
        *faults += 1;
        *faults >= FAULTS_MAX && self.trip(now_ms)
    }

    /// Takes the device for broken. Returns false if it was so before. Each wait is longer than the one
    /// before.
    pub(super) fn trip(&mut self, now_ms: u64) -> bool {
        self.good = 0;
        let trips = self.state == State::Closed;
        if trips {
            self.trips_total += 1;
            self.leave_alone(now_ms);
        }
        trips
    }

    fn leave_alone(&mut self, now_ms: u64) {
        self.state = State::Open { until_ms: now_ms + self.wait_ms };
        self.wait_ms = (self.wait_ms * 2).min(WAIT_MS_MAX);
    }

    /// True if a check should begin now; then it is under way.
    pub(super) fn try_again(&mut self, now_ms: u64) -> bool {
        let due = matches!(self.state, State::Open { until_ms } if until_ms <= now_ms);
        if due {
            self.state = State::Trying;
        }
        due
    }

    pub(super) fn checked(&mut self, well: bool, now_ms: u64) {
        if well {
            self.state = State::Closed;
            self.faults = [0; 2];
        } else {
            self.leave_alone(now_ms);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_in_a_row_trip_it_and_waits_double_until_the_device_proves_well() {
        let mut breaker = Breaker::new();
        for _ in 1..FAULTS_MAX {
            breaker.fault(Way::Write, 0);
            breaker.good(Way::Read);
        }
        assert!(!breaker.is_open());
        breaker.fault(Way::Write, 0);
        assert!(breaker.is_open());
        assert!(!breaker.try_again(WAIT_MS_MIN - 1));
        assert!(breaker.try_again(WAIT_MS_MIN));
        assert!(!breaker.try_again(u64::MAX), "one check at a time");
        breaker.checked(false, 10_000);
        assert!(!breaker.try_again(10_000 + 2 * WAIT_MS_MIN - 1));
        assert!(breaker.try_again(10_000 + 2 * WAIT_MS_MIN));
        breaker.checked(true, 20_000);
        assert!(!breaker.is_open());
        breaker.trip(20_000);
        assert!(!breaker.try_again(20_000 + 4 * WAIT_MS_MIN - 1), "it failed again at once");
        assert!(breaker.try_again(20_000 + 4 * WAIT_MS_MIN));
        breaker.checked(true, 30_000);
        (0..GOOD_JOBS).for_each(|_| breaker.good(Way::Read));
        breaker.trip(30_000);
        assert!(breaker.try_again(30_000 + WAIT_MS_MIN));
        assert_eq!(breaker.trips_total, 3);
    }
}
