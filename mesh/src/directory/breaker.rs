//! Breakers: when requests to a faulty peer stop, and when it is tried again.

use crate::transport::{Fault, Refusal, Stage};

/// Limits for the faults of a peer.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Limits {
    /// The breaker opens at this number of strikes, regardless of successes between them: a peer with a fault
    /// in one block of ten is no better than an absent one.
    pub strikes_max: u32,
    /// Strikes are forgotten after so many milliseconds without another.
    pub forgive_ms: u64,
    /// Milliseconds within which faults count as one strike: a broken connection fails all requests over it.
    pub strike_ms: u64,
    /// Milliseconds after an answer of the peer within which a late fetch is no strike: it waited behind
    /// others, most of the time on this side.
    pub lively_ms: u64,
    /// Bytes expected within the longest time of a fetch from all giving peers together, since they share
    /// this node's link. A peer with less than an equal part of them is too slow, even if it answers: see
    /// [`super::Directory::late`].
    pub given_bytes_min: u64,
    /// Milliseconds of the breaker's first open time; doubled each time until the strikes are forgotten.
    pub wait_ms_min: u64,
    pub wait_ms_max: u64,
}

/// The effect of a block's end on the breaker.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Verdict {
    /// The peer answered correctly, even if it lacks the block.
    Good,
    Strike,
    /// The fetch took too long. A strike unless the peer has answered just before.
    Late,
    /// No effect: this side ended it, or the peer was busy.
    Nothing,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum State {
    Closed {
        strikes: u32,
    },
    /// No requests until then. From then on the peer is on trial with one fetch. If its first end is good,
    /// requests go on, with all its strikes but the last.
    Open {
        until_ms: u64,
    },
}

/// The breaker of a peer.
#[derive(Clone, Debug)]
pub(super) struct Breaker {
    state: State,
    /// The time of the last strike or good trial. Strikes are forgotten a while after it.
    struck_ms: Option<u64>,
    /// The time of the last correct answer.
    answered_ms: Option<u64>,
    /// Milliseconds of the next open time.
    wait_ms: u64,
    pub(super) trips_total: u64,
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Self {
        Self {
            strikes_max: 3,
            forgive_ms: 10_000,
            strike_ms: 50,
            lively_ms: 500,
            given_bytes_min: 64 << 20,
            wait_ms_min: 1_000,
            wait_ms_max: 30_000,
        }
    }
}

// === impl Verdict ===

impl Verdict {
    pub(super) fn of(result: &Result<u64, Fault>) -> Self {
        match result {
            Ok(_) | Err(Fault::Absent) => Self::Good,
            Err(Fault::Stopped | Fault::Refused(Refusal::Busy)) => Self::Nothing,
            Err(Fault::Timeout(Stage::Whole)) => Self::Late,
            Err(
                Fault::Corrupt
                | Fault::Short
                | Fault::Timeout(_)
                | Fault::Peer(_)
                | Fault::Malformed(_)
                | Fault::Refused(_),
            ) => Self::Strike,
        }
    }
}

// === impl Breaker ===

impl Breaker {
    pub(super) fn new(limits: &Limits) -> Self {
        let state = State::Closed { strikes: 0 };
        Self { state, struck_ms: None, answered_ms: None, wait_ms: limits.wait_ms_min, trips_total: 0 }
    }

    pub(super) fn is_open(&self) -> bool {
        matches!(self.state, State::Open { .. })
    }

    /// True if the peer may get a request while `under_way` of its blocks have not ended.
    pub(super) fn lets_pass(&self, now_ms: u64, under_way: u32) -> bool {
        match self.state {
            State::Closed { .. } => true,
            State::Open { until_ms } => until_ms <= now_ms && under_way == 0,
        }
    }

    /// Records the end of a block. While the breaker is open, ends of earlier fetches have no effect.
    pub(super) fn ended(&mut self, verdict: Verdict, now_ms: u64, limits: &Limits) {
        let since_ms =
            |then_ms: Option<u64>| then_ms.map_or(u64::MAX, |then_ms| now_ms.saturating_sub(then_ms));
        let verdict = match verdict {
            Verdict::Late if since_ms(self.answered_ms) < limits.lively_ms => Verdict::Nothing,
            Verdict::Late => Verdict::Strike,
            verdict => verdict,
        };
        if verdict == Verdict::Good {
            self.answered_ms = Some(now_ms);
        }
        let since_strike_ms = since_ms(self.struck_ms);
        let forgiven = since_strike_ms >= limits.forgive_ms;
        match (self.state, verdict) {
            (State::Closed { .. }, Verdict::Good) if forgiven => self.wait_ms = limits.wait_ms_min,
            (State::Closed { strikes }, Verdict::Strike) if since_strike_ms >= limits.strike_ms => {
                let strikes = if forgiven { 1 } else { strikes + 1 };
                (self.state, self.struck_ms) = (State::Closed { strikes }, Some(now_ms));
                if strikes >= limits.strikes_max {
                    self.trips_total += 1;
                    self.open(now_ms, limits);
                }
            }
            (State::Open { until_ms }, Verdict::Good) if until_ms <= now_ms => {
                // The first block of a slow peer comes in time, but later ones may not. The time is set back,
                // so a fault at this very moment is one more strike.
                self.state = State::Closed { strikes: limits.strikes_max.saturating_sub(1) };
                self.struck_ms = Some(now_ms.saturating_sub(limits.strike_ms));
            }
            (State::Open { until_ms }, Verdict::Strike) if until_ms <= now_ms => self.open(now_ms, limits),
            (State::Closed { .. } | State::Open { .. }, _) => {}
        }
    }

    fn open(&mut self, now_ms: u64, limits: &Limits) {
        (self.state, self.struck_ms) = (State::Open { until_ms: now_ms + self.wait_ms }, Some(now_ms));
        self.wait_ms = (self.wait_ms * 2).min(limits.wait_ms_max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        strikes_max: 3,
        forgive_ms: 500,
        strike_ms: 50,
        lively_ms: 500,
        given_bytes_min: 0,
        wait_ms_min: 1_000,
        wait_ms_max: 3_000,
    };

    fn struck(breaker: &mut Breaker, times: &[u64]) {
        times.iter().for_each(|now_ms| breaker.ended(Verdict::Strike, *now_ms, &LIMITS));
    }

    #[test]
    fn faults_of_one_moment_are_one_strike_and_a_calm_time_forgives() {
        let mut breaker = Breaker::new(&LIMITS);
        struck(&mut breaker, &[0, 0, 1, 49, 50, 60]);
        assert!(breaker.lets_pass(60, 9), "two strikes");
        struck(&mut breaker, &[550, 600]);
        assert!(breaker.lets_pass(600, 9), "two strikes");
        breaker.ended(Verdict::Nothing, 610, &LIMITS);
        breaker.ended(Verdict::Good, 650, &LIMITS);
        struck(&mut breaker, &[660]);
        assert!(breaker.is_open() && !breaker.lets_pass(660, 0), "a success between strikes forgives none");
        assert_eq!(breaker.trips_total, 1);
    }

    #[test]
    fn a_trial_is_one_fetch_and_the_wait_doubles_until_all_is_forgiven() {
        let mut breaker = Breaker::new(&LIMITS);
        struck(&mut breaker, &[0, 50, 100]);
        struck(&mut breaker, &[150]);
        breaker.ended(Verdict::Good, 200, &LIMITS);
        assert!(!breaker.lets_pass(1_099, 0), "ends of earlier fetches change nothing");
        assert!(breaker.lets_pass(1_100, 0));
        assert!(!breaker.lets_pass(1_100, 1), "one fetch at a time");
        struck(&mut breaker, &[1_200, 1_200]);
        assert!(!breaker.lets_pass(3_199, 0) && breaker.lets_pass(3_200, 0));
        struck(&mut breaker, &[3_200]);
        assert!(!breaker.lets_pass(6_199, 0) && breaker.lets_pass(6_200, 0), "no longer than the longest");
        breaker.ended(Verdict::Good, 6_200, &LIMITS);
        assert!(!breaker.is_open() && breaker.lets_pass(6_200, 100));
        struck(&mut breaker, &[6_300]);
        assert!(!breaker.lets_pass(9_299, 0), "it broke again before it was forgiven");
        breaker.ended(Verdict::Good, 9_300, &LIMITS);
        breaker.ended(Verdict::Good, 9_750, &LIMITS);
        struck(&mut breaker, &[9_800, 9_900]);
        assert!(!breaker.is_open(), "forgiven since 9 750, it has two strikes");
        struck(&mut breaker, &[10_000]);
        assert!(breaker.lets_pass(11_000, 0), "and its wait is short again");
        assert_eq!(breaker.trips_total, 3);
    }

    #[test]
    fn a_trial_that_went_well_leaves_all_strikes_but_one_for_a_while() {
        let tried = || {
            let mut breaker = Breaker::new(&LIMITS);
            struck(&mut breaker, &[0, 50, 100]);
            breaker.ended(Verdict::Good, 1_100, &LIMITS);
            assert!(!breaker.is_open());
            breaker
        };
        for struck_ms in [1_100, 1_500] {
            let mut breaker = tried();
            struck(&mut breaker, &[struck_ms]);
            assert!(!breaker.lets_pass(struck_ms + 1_999, 0), "left alone for twice as long");
        }
        let mut breaker = tried();
        breaker.ended(Verdict::Good, 1_500, &LIMITS);
        struck(&mut breaker, &[1_549]);
        assert!(!breaker.lets_pass(3_548, 0), "a success meanwhile does not shorten the wait");
        let mut breaker = tried();
        struck(&mut breaker, &[1_600]);
        assert!(!breaker.is_open(), "forgiven");
    }

    #[test]
    fn a_fetch_that_is_late_is_no_strike_while_the_peer_answers() {
        let late = Verdict::of(&Err(Fault::Timeout(Stage::Whole)));
        let mut breaker = Breaker::new(&LIMITS);
        for now_ms in (0..10_000).step_by(10) {
            breaker.ended(Verdict::Good, now_ms, &LIMITS);
            if now_ms % 100 == 0 {
                breaker.ended(late, now_ms, &LIMITS);
            }
        }
        assert_eq!(breaker.trips_total, 0);
        let answered_ms = 9_990;
        for after_ms in [499, 500, 600] {
            breaker.ended(late, answered_ms + after_ms, &LIMITS);
        }
        assert!(!breaker.is_open(), "two strikes, both after its last answer had aged");
        breaker.ended(late, answered_ms + 700, &LIMITS);
        assert!(breaker.is_open(), "a frozen peer");
        let mut silent = Breaker::new(&LIMITS);
        [0, 100, 200].into_iter().for_each(|now_ms| silent.ended(late, now_ms, &LIMITS));
        assert!(silent.is_open(), "one that never answered");
    }

    #[test]
    fn absence_and_being_busy_are_no_faults() {
        assert_eq!(Verdict::of(&Ok(1)), Verdict::Good);
        assert_eq!(Verdict::of(&Err(Fault::Absent)), Verdict::Good);
        assert_eq!(Verdict::of(&Err(Fault::Refused(Refusal::Busy))), Verdict::Nothing);
        assert_eq!(Verdict::of(&Err(Fault::Stopped)), Verdict::Nothing);
        for fault in
            [Fault::Corrupt, Fault::Short, Fault::Refused(Refusal::NotMember), Fault::Refused(Refusal::Full)]
        {
            assert_eq!(Verdict::of(&Err(fault)), Verdict::Strike);
        }
    }
}
