//! The placement of a prompt: a prefill engine computes it for a decode engine, or a decode engine computes it alone. No I/O.
//!
//! A prompt at a decode engine alone lengthens the gaps between tokens of the engine's answers. The engine therefore spends time on a
//! prompt only to save at least as much of the client's time, and no more than the budget's share of its own time.

use std::time::Duration;

use tokio::time::Instant;

use super::prompt::Whole;
use super::prompt_times::ExpectedTime;

/// The budget's share holds over this time: after a pause of this length a decode engine may spend the share of it at once.
pub(super) const BUDGET_TIME: Duration = Duration::from_secs(10);

/// The time of a decode engine for prompts beside its answers.
#[derive(Copy, Clone, Debug, Default)]
pub(super) struct TimeBudget {
    /// Seconds spent, less the share of the time since then.
    spent: f64,
    at: Option<Instant>,
}

/// The offer of a decode engine for a prompt.
#[derive(Copy, Clone, Debug, PartialEq)]
pub(super) struct DecodeOffer {
    pub(super) expected: ExpectedTime,
    /// True if it has room in its budget, or no answer to lengthen.
    pub(super) has_room: bool,
}

/// Returns the reason for the decode engine alone, and its place among `offers`; `None` for both engines. `both` is expected from a
/// prefill engine and a decode engine together, `None` in a pool without prefill engines; `target` is of `--ttft-target`.
pub(super) fn place_prompt(
    both: Option<ExpectedTime>,
    offers: &[DecodeOffer],
    target: Option<f64>,
) -> Option<(Whole, usize)> {
    let free = offers.iter().enumerate().filter(|(_, offer)| offer.has_room);
    let finish = |offer: &DecodeOffer| offer.expected.finish();
    let (at, alone) = free.min_by(|(_, one), (_, other)| finish(one).total_cmp(&finish(other)))?;
    let Some(both) = both else { return Some((Whole::Plain, at)) };
    let saved = both.finish() - finish(alone);
    match target {
        Some(target) if both.finish() <= target => None,
        Some(_) => (saved > 0.0).then_some((Whole::Target, at)),
        None => (saved > alone.expected.work).then_some((Whole::Sooner, at)),
    }
}

// === impl TimeBudget ===

impl TimeBudget {
    /// Returns true if a prompt of this time keeps to the share.
    pub(super) fn has_room(self, work: f64, share: f64, now: Instant) -> bool {
        self.spent(share, now) + work <= share * BUDGET_TIME.as_secs_f64()
    }

    pub(super) fn spend(&mut self, work: f64, share: f64, now: Instant) {
        *self = Self { spent: self.spent(share, now) + work, at: Some(now) };
    }

    fn spent(self, share: f64, now: Instant) -> f64 {
        let since = self.at.map_or(0.0, |at| now.saturating_duration_since(at).as_secs_f64());
        (self.spent - share * since).max(0.0)
    }
}

#[cfg(test)]
mod simulation;

#[cfg(test)]
mod tests {
    use super::*;

    fn time(wait: f64, work: f64) -> ExpectedTime {
        ExpectedTime { wait, work }
    }

    fn offers(expected: &[(ExpectedTime, bool)]) -> Vec<DecodeOffer> {
        let offer = |(expected, has_room): &(ExpectedTime, bool)| DecodeOffer {
            expected: *expected,
            has_room: *has_room,
        };
        expected.iter().map(offer).collect()
    }

    #[test]
    fn a_decode_engine_computes_what_saves_at_least_its_own_time() {
        let place = |wait, alone| place_prompt(Some(time(wait, 1.0)), &offers(&[(alone, true)]), None);
        assert_eq!(place(0.0, time(0.0, 1.0)), None, "as soon at both");
        assert_eq!(place(0.9, time(0.0, 1.0)), None, "it saves less than the decode engine spends");
        assert_eq!(place(1.1, time(0.0, 1.0)), Some((Whole::Sooner, 0)));
        assert_eq!(place(1.1, time(0.2, 1.0)), None, "prompts wait there, too");
        assert_eq!(place(0.5, time(0.0, 0.5)), Some((Whole::Sooner, 0)), "it has half of the prompt");
    }

    #[test]
    fn the_soonest_engine_with_room_computes_it() {
        let three = [(time(0.0, 1.0), false), (time(1.0, 1.0), true), (time(0.5, 1.0), true)];
        assert_eq!(place_prompt(Some(time(9.0, 1.0)), &offers(&three), None), Some((Whole::Sooner, 2)));
        assert_eq!(place_prompt(Some(time(9.0, 1.0)), &offers(&three[..1]), None), None);
        assert_eq!(place_prompt(Some(time(9.0, 1.0)), &[], None), None);
        assert_eq!(
            place_prompt(None, &offers(&three[1..]), None),
            Some((Whole::Plain, 1)),
            "no prefill engine"
        );
    }

    #[test]
    fn a_target_spares_decode_engines_as_long_as_it_is_met_and_asks_the_sooner_one_then() {
        let place = |wait, alone| place_prompt(Some(time(wait, 1.0)), &offers(&[(alone, true)]), Some(3.0));
        assert_eq!(place(2.0, time(0.0, 0.1)), None, "the target is met");
        assert_eq!(place(2.1, time(0.0, 3.0)), Some((Whole::Target, 0)), "by the decode engine alone");
        assert_eq!(place(7.0, time(0.0, 5.0)), Some((Whole::Target, 0)), "by neither");
        assert_eq!(place(7.0, time(0.0, 8.5)), None, "by neither, and it is later");
        assert_eq!(place_prompt(Some(time(7.0, 1.0)), &offers(&[(time(0.0, 1.0), false)]), Some(3.0)), None);
    }

    #[test]
    fn a_budget_holds_in_every_ten_seconds() {
        let (mut budget, now) = (TimeBudget::default(), Instant::now());
        assert!(budget.has_room(2.5, 0.25, now) && !budget.has_room(2.6, 0.25, now));
        budget.spend(2.0, 0.25, now);
        assert!(budget.has_room(0.5, 0.25, now) && !budget.has_room(0.6, 0.25, now));
        let later = now + Duration::from_secs(4);
        assert!(budget.has_room(1.5, 0.25, later) && !budget.has_room(1.6, 0.25, later));
        assert!(budget.has_room(2.5, 0.25, now + BUDGET_TIME));
        assert!(!budget.has_room(2.6, 0.25, now + BUDGET_TIME * 9), "what was not spent is not kept");
    }
}
