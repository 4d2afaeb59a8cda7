//! The rule for the end of waits for blocks. Pure: time is an argument.
//!
//! Spent time does not count. A wait goes on while the rest of its blocks comes before the engine would have
//! computed it. The rule is applied with each look, by the rates of the last half second. The whole run
//! counts: blocks behind a missing one are of no use.

use shm_protocol::layout::QUERY_WAIT_MS_MAX;

/// Milliseconds of a wait without a byte from any source, and of a wait while the engine's rate is not known.
pub(super) const STILL_MS_MAX: u64 = QUERY_WAIT_MS_MAX as u64;

/// A scheduler's limits for the waits of its queries.
#[derive(Copy, Clone, Debug)]
pub(super) struct LoadPatience {
    /// Milliseconds from a question on, at most.
    pub(super) most_ms: u64,
    /// Loading may take so many times as long as computing.
    pub(super) preference: f64,
}

/// The state of a wait at one time.
#[derive(Copy, Clone, Debug)]
pub(super) struct Outlook {
    /// Milliseconds since the question, and since the last byte of the sources.
    pub(super) waited_ms: u64,
    pub(super) still_ms: u64,
    /// Milliseconds until the rest is there; `None`: no rate is known yet.
    pub(super) load_ms: Option<f64>,
    /// Milliseconds of computing the rest; `None`: the engine's rate is not known.
    pub(super) compute_ms: Option<f64>,
}

/// Why a wait ends without all of its blocks.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Over {
    /// Its time is over, or its sources have stopped.
    Late,
    /// The engine computes the rest sooner than it comes.
    Slower,
}

// === impl Outlook ===

impl Outlook {
    /// Returns the reason to end the wait, if there is one.
    pub(super) fn over(&self, wait: LoadPatience) -> Option<Over> {
        let Some(compute_ms) = self.compute_ms else {
            return (self.waited_ms >= wait.most_ms.min(STILL_MS_MAX)).then_some(Over::Late);
        };
        if self.waited_ms >= wait.most_ms || self.still_ms >= STILL_MS_MAX {
            return Some(Over::Late);
        }
        let is_slower = self.load_ms.is_some_and(|load_ms| load_ms > compute_ms * wait.preference);
        is_slower.then_some(Over::Slower)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: LoadPatience = LoadPatience { most_ms: 30_000, preference: 1.0 };

    fn outlook(load_ms: f64, compute_ms: f64) -> Outlook {
        Outlook { waited_ms: 0, still_ms: 0, load_ms: Some(load_ms), compute_ms: Some(compute_ms) }
    }

    /// Returns the milliseconds until an answer, and until everything is there or computed. The source gives
    /// `rate(ms)` parts a millisecond, the engine computes `speed` parts, and so many `parts` are needed.
    fn play(parts: f64, rate: impl Fn(u64) -> f64, speed: f64, wait: LoadPatience) -> (u64, f64) {
        let (mut left, mut moved_ms) = (parts, 0);
        let mut recent = std::collections::VecDeque::new();
        for now_ms in 0.. {
            recent.push_back(left);
            if recent.len() > 501 {
                recent.pop_front();
            }
            let given = recent[0] - left;
            // The source's rate is known from before.
            let known = if now_ms < 500 { rate(0) } else { given / (recent.len() - 1) as f64 };
            let outlook = Outlook {
                waited_ms: now_ms,
                still_ms: now_ms - moved_ms,
                load_ms: (known > 0.0).then(|| left / known),
                compute_ms: Some(left / speed),
            };
            if left <= 0.0 || now_ms % 100 == 0 && outlook.over(wait).is_some() {
                return (now_ms, now_ms as f64 + left.max(0.0) / speed);
            }
            let gives = rate(now_ms);
            if gives > 0.0 {
                (left, moved_ms) = (left - gives, now_ms);
            }
        }
        unreachable!("every wait ends")
    }

    #[test]
    fn what_comes_sooner_than_it_is_computed_is_waited_for() {
        assert_eq!(outlook(999.0, 1000.0).over(WAIT), None);
        assert_eq!(outlook(1001.0, 1000.0).over(WAIT), Some(Over::Slower));
        assert_eq!(outlook(1999.0, 1000.0).over(LoadPatience { preference: 2.0, ..WAIT }), None);
        assert_eq!(outlook(1.0, 1000.0).over(LoadPatience { preference: 0.0, ..WAIT }), Some(Over::Slower));
    }

    #[test]
    fn while_the_engine_is_unknown_a_query_waits_for_2_s_and_never_beyond_its_limit() {
        let unknown = |waited_ms| Outlook { waited_ms, compute_ms: None, ..outlook(60_000.0, 0.0) };
        assert_eq!((unknown(1999).over(WAIT), unknown(2000).over(WAIT)), (None, Some(Over::Late)));
        let short = LoadPatience { most_ms: 300, ..WAIT };
        assert_eq!((unknown(299).over(short), unknown(300).over(short)), (None, Some(Over::Late)));
        let known = |waited_ms| Outlook { waited_ms, ..outlook(1.0, 1e9) };
        assert_eq!((known(29_999).over(WAIT), known(30_000).over(WAIT)), (None, Some(Over::Late)));
    }

    #[test]
    fn a_source_of_unknown_rate_has_2_s_to_give_anything() {
        let silent = |still_ms| Outlook { still_ms, load_ms: None, ..outlook(0.0, 60_000.0) };
        assert_eq!((silent(1999).over(WAIT), silent(2000).over(WAIT)), (None, Some(Over::Late)));
    }

    #[test]
    fn at_constant_rates_a_prompt_takes_what_the_faster_way_takes() {
        for speed in [0.2, 1.0, 5.0] {
            for rate in [0.1, 0.5, 0.9, 1.1, 2.0, 10.0] {
                for parts in [100.0, 1_000.0, 10_000.0] {
                    let (_, took) = play(parts, |_| rate, speed, WAIT);
                    let best = (parts / rate).min(parts / speed);
                    assert!(took <= best * 1.01 + 2.0, "{parts} at {rate} and {speed}: {took}, not {best}");
                }
            }
        }
    }

    #[test]
    fn where_a_rate_falls_the_rest_is_computed_half_a_second_later() {
        for fall_ms in [700, 2_000, 5_000] {
            for after in [0.0, 0.01, 0.3] {
                let (parts, speed) = (20_000.0, 1.0);
                let (ended, took) = play(parts, |ms| if ms < fall_ms { 2.0 } else { after }, speed, WAIT);
                let left = parts - 2.0 * fall_ms as f64;
                assert!(took <= (fall_ms as f64 + left) * 1.1 + 500.0, "{took} after {fall_ms} to {after}");
                assert!(ended <= fall_ms + 2_000, "{ended} after {fall_ms} to {after}");
            }
        }
        // It rises: nothing is lost.
        let (_, took) = play(10_000.0, |ms| if ms < 1000 { 1.1 } else { 5.0 }, 1.0, WAIT);
        assert!(took < 3_000.0, "{took}");
    }
}
