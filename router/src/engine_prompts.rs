//! The router's knowledge of the prompts at one engine: their times, its budget for them, its hand-overs, and lost prompts.
//! No I/O.

use std::time::Duration;

use tokio::time::Instant;

use super::body::Fields;
use super::placement::{DecodeOffer, TimeBudget};
use super::prompt_times::{KnownTimes, MeanTime, PromptTimes};

/// After a lost prompt no prompt is expected at its engine for this long; twice as long after each further one.
const LOST_PAUSE: Duration = Duration::from_secs(1);
const LOST_PAUSE_MAX: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct EnginePrompts {
    pub(super) times: PromptTimes,
    pub(super) budget: TimeBudget,
    /// From a prefill engine's answer to the first token here.
    pub(super) hand_over: MeanTime,
    lost: LostPrompts,
}

/// The prompts in a row expected at the engine, and computed there.
#[derive(Copy, Clone, Debug, Default)]
struct LostPrompts {
    until: Option<Instant>,
    pause: Duration,
}

/// A prompt of a decode engine alone.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct AlonePrompt {
    /// Tokens of the whole prompt.
    pub(super) tokens: u64,
    /// True if the answer's beginning shows the end of the computation.
    pub(super) is_stream: bool,
    /// The number of the engine for it; `None` for the first one by its load.
    pub(super) engine: Option<u32>,
    /// True if the engine should have all but a short part.
    pub(super) is_held: bool,
}

// === impl AlonePrompt ===

impl AlonePrompt {
    /// Returns a prompt of so many tokens, of a request with these fields.
    pub(super) fn of_request(fields: &Fields, tokens: u64) -> Self {
        Self { tokens, is_stream: fields.get("stream") == Some("true"), ..Self::default() }
    }
}

// === impl EnginePrompts ===

impl EnginePrompts {
    /// Returns the offer to compute a prompt alone, `None` without known times; `other` is of an engine with answers. With
    /// `is_idle` the engine has no answers to lengthen.
    pub(super) fn offer_prompt(
        &mut self,
        tokens: u64,
        other: Option<KnownTimes>,
        share: f64,
        is_idle: bool,
        now: Instant,
    ) -> Option<DecodeOffer> {
        let expected = self.times.expect_prompt(tokens, other, now)?;
        let has_room = is_idle || self.budget.has_room(expected.work, share, now);
        Some(DecodeOffer { expected, has_room })
    }

    /// Returns true if the engine is expected to have its earlier prompts.
    pub(super) fn is_trusted(&self, now: Instant) -> bool {
        self.lost.until.is_none_or(|until| until <= now)
    }

    /// Judges a prompt expected there by its time: it was lost if half of its known tokens take no longer. Without known times nothing is
    /// judged.
    pub(super) fn judge_held(&mut self, whole: u64, unknown: u64, took: Duration, now: Instant) {
        let computed = unknown + whole.saturating_sub(unknown) / 2;
        let Some(expected) = self.times.expect_prompt(computed, None, now) else { return };
        if took.as_secs_f64() <= expected.finish() {
            self.lost = LostPrompts::default();
        } else if self.is_trusted(now) {
            let pause = (self.lost.pause * 2).clamp(LOST_PAUSE, LOST_PAUSE_MAX);
            self.lost = LostPrompts { until: Some(now + pause), pause };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_lost_a_prompt_is_not_expected_to_have_one_for_a_time() {
        let (mut prompts, mut now) = (EnginePrompts::default(), Instant::now());
        let after = |seconds: f64| Duration::from_secs_f64(seconds);
        prompts.judge_held(8000, 100, after(9.0), now);
        assert!(prompts.is_trusted(now), "its times are not known");
        let begun = prompts.times.begin_prompt(4000, None, now);
        prompts.times.learn_time(begun, 4000, now + after(0.1));
        prompts.times.end_prompt(begun, now);
        // Half of the known tokens and the new ones take .101 s.
        prompts.judge_held(8000, 100, after(0.09), now);
        assert!(prompts.is_trusted(now));
        for pause in [1, 2, 4, 8, 16, 32, 60, 60].map(Duration::from_secs) {
            prompts.judge_held(8000, 100, after(0.2), now);
            // Another one of the same time.
            prompts.judge_held(8000, 100, after(0.2), now);
            assert!(!prompts.is_trusted(now + pause - Duration::from_millis(1)));
            now += pause;
            assert!(prompts.is_trusted(now));
        }
        prompts.judge_held(8000, 100, after(0.01), now);
        prompts.judge_held(8000, 100, after(0.2), now);
        assert!(prompts.is_trusted(now + LOST_PAUSE), "one that was there ends the row");
    }
}
