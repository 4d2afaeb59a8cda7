//! The times of an engine's prompts: learned from its answers, and expected for the next prompt. No I/O.
//!
//! The router may be one of several clients of an engine. The line through the fastest answers is the engine's own speed; the time of
//! other clients' prompts is in the excess of its last answers over that line.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// The last answers in the line: of prompts that waited for no other prompt of this router.
const SAMPLES_MAX: usize = 16;
/// This share of these answers came sooner than the line says: other clients' prompts only make answers later, and a prompt that
/// the engine had in its cache only makes one sooner.
const SOONER_SHARE: f64 = 0.25;
/// The weight of a new answer in a mean.
const MEAN_WEIGHT: f64 = 0.25;
/// A mean of excess halves in this time without an answer: other clients' prompts end.
const EXCESS_HALF: Duration = Duration::from_secs(10);

/// The time of a prompt at an idle engine: seconds before, and for each token.
#[derive(Copy, Clone, Debug, PartialEq)]
struct TimeLine {
    start: f64,
    per_token: f64,
}

/// The learned times of an engine.
#[derive(Copy, Clone, Debug, PartialEq)]
pub(super) struct KnownTimes {
    line: TimeLine,
    /// Mean seconds of the last answers beyond the line.
    excess: f64,
}

/// The expected seconds of one prompt at one engine.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub(super) struct ExpectedTime {
    /// Until the engine begins to compute it.
    pub(super) wait: f64,
    /// The engine's time for it.
    pub(super) work: f64,
}

/// A prompt under way.
#[derive(Copy, Clone, Debug)]
struct OpenPrompt {
    number: u64,
    /// Tokens to compute.
    tokens: f64,
    /// The expected end, if the answer does not show it.
    until: Option<Instant>,
}

/// A prompt as it came to its engine.
#[derive(Copy, Clone, Debug)]
pub(super) struct BegunPrompt {
    number: u64,
    pub(super) tokens: u64,
    begin: Instant,
    /// Tokens of this router's earlier prompts, still to compute.
    before: f64,
}

/// The prompts under way at one engine, and the times of its last ones.
#[derive(Debug, Default)]
pub(super) struct PromptTimes {
    open: VecDeque<OpenPrompt>,
    /// The last number.
    numbered: u64,
    /// The engine computes the first open prompt since this time.
    moved: Option<Instant>,
    /// Tokens and seconds of the last answers.
    samples: VecDeque<(f64, f64)>,
    line: Option<TimeLine>,
    /// Mean seconds of the last answers beyond the line and the earlier prompts, and the time of the last one.
    excess: Option<(f64, Instant)>,
}

/// A mean of durations, each new one with [`MEAN_WEIGHT`].
#[derive(Copy, Clone, Debug, Default)]
pub(super) struct MeanTime(Option<f64>);

// === impl KnownTimes ===

impl KnownTimes {
    /// The times of engines before any answer: by them the engine with the fewest tokens to compute is the soonest.
    pub(super) const ASSUMED: Self = Self { line: TimeLine { start: 0.0, per_token: 1e-4 }, excess: 0.0 };
}

// === impl ExpectedTime ===

impl ExpectedTime {
    /// Returns the seconds until the first token.
    pub(super) fn finish(self) -> f64 {
        self.wait + self.work
    }
}

// === impl TimeLine ===

impl TimeLine {
    /// Returns the line with [`SOONER_SHARE`] of the samples below it, by quantile regression: the best line goes through two samples, or
    /// through one and the origin. `None` without a sample of more than no tokens.
    fn fit(samples: &VecDeque<(f64, f64)>) -> Option<Self> {
        let through = |(tokens, seconds): (f64, f64), (others, at): (f64, f64)| {
            let per_token = (at - seconds) / (others - tokens);
            Self { start: seconds - per_token * tokens, per_token }
        };
        let ends = || samples.iter().copied();
        let lines = ends().enumerate().flat_map(|(number, one)| {
            std::iter::once((0.0, 0.0)).chain(ends().skip(number + 1)).map(move |other| through(other, one))
        });
        let loss = |line: &Self| -> f64 {
            let late = |(tokens, seconds)| seconds - line.seconds(tokens);
            ends()
                .map(late)
                .map(|late| late * if late > 0.0 { SOONER_SHARE } else { SOONER_SHARE - 1.0 })
                .sum()
        };
        let is_possible =
            |line: &Self| line.start >= 0.0 && line.per_token > 0.0 && line.per_token.is_finite();
        lines.filter(is_possible).min_by(|one, other| loss(one).total_cmp(&loss(other)))
    }

    fn seconds(self, tokens: f64) -> f64 {
        self.start + self.per_token * tokens
    }
}

// === impl PromptTimes ===

impl PromptTimes {
    /// Begins a prompt. Its engine computes it until `until` at most, `None` if the answer shows the end.
    pub(super) fn begin_prompt(&mut self, tokens: u64, until: Option<Instant>, now: Instant) -> BegunPrompt {
        let before = self.open_tokens(now);
        if self.open.is_empty() {
            self.moved = Some(now);
        }
        self.numbered += 1;
        let number = self.numbered;
        self.open.push_back(OpenPrompt { number, tokens: tokens as f64, until });
        BegunPrompt { number, tokens, begin: now, before }
    }

    /// Ends a prompt: it is computed, or given up.
    pub(super) fn end_prompt(&mut self, prompt: BegunPrompt, now: Instant) {
        if self.open.front().is_some_and(|first| first.number == prompt.number) {
            self.moved = Some(now);
        }
        self.open.retain(|open| open.number != prompt.number);
    }

    /// Learns from a prompt computed until now, of so many tokens.
    pub(super) fn learn_time(&mut self, prompt: BegunPrompt, tokens: u64, now: Instant) {
        let (seconds, tokens) = (now.saturating_duration_since(prompt.begin).as_secs_f64(), tokens as f64);
        if prompt.before == 0.0 && tokens > 0.0 {
            self.samples.truncate(SAMPLES_MAX - 1);
            self.samples.push_front((tokens, seconds));
            self.line = TimeLine::fit(&self.samples);
        }
        if let Some(line) = self.line {
            let excess = (seconds - line.seconds(prompt.before + tokens)).max(0.0);
            let before = self.excess(now);
            self.excess = Some((before + MEAN_WEIGHT * (excess - before), now));
        }
    }

    /// Returns the tokens still to compute of the prompts under way: the first one is computed since the end of the one before.
    pub(super) fn open_tokens(&mut self, now: Instant) -> f64 {
        while self.open.front().and_then(|first| first.until).is_some_and(|until| until <= now) {
            self.moved = self.open.pop_front().and_then(|first| first.until);
        }
        let (Some(first), Some(moved)) = (self.open.front(), self.moved) else { return 0.0 };
        let since = now.saturating_duration_since(moved).as_secs_f64();
        let computed = self.line.map_or(0.0, |line| (since - line.start).max(0.0) / line.per_token);
        let rest = first.tokens - computed.min(first.tokens);
        rest + self.open.iter().skip(1).map(|open| open.tokens).sum::<f64>()
    }

    /// Returns the expected time of a prompt of so many tokens; `other` is of an engine with answers, for prompts longer than all of this
    /// one. An engine without answers is expected to be like the other one. `None` without either.
    pub(super) fn expect_prompt(
        &mut self,
        tokens: u64,
        other: Option<KnownTimes>,
        now: Instant,
    ) -> Option<ExpectedTime> {
        let KnownTimes { line, excess } = self.known(now).or(other)?;
        let longest = self.samples.iter().map(|(tokens, _)| *tokens).fold(0.0, f64::max);
        let seconds = |tokens: f64| match other {
            Some(other) => {
                line.seconds(tokens.min(longest)) + other.line.per_token * (tokens - longest).max(0.0)
            }
            None => line.seconds(tokens),
        };
        let wait = seconds(self.open_tokens(now)) - line.start + excess;
        Some(ExpectedTime { wait, work: seconds(tokens as f64) })
    }

    /// Returns the learned times, `None` without answers.
    pub(super) fn known(&self, now: Instant) -> Option<KnownTimes> {
        self.line.map(|line| KnownTimes { line, excess: self.excess(now) })
    }

    /// Returns the learned tokens a second, beyond what every prompt takes.
    pub(super) fn tokens_per_second(&self) -> Option<f64> {
        self.line.map(|line| 1.0 / line.per_token)
    }

    fn excess(&self, now: Instant) -> f64 {
        self.excess.map_or(0.0, |(mean, at)| {
            let age = now.saturating_duration_since(at).as_secs_f64();
            mean * (-age / EXCESS_HALF.as_secs_f64()).exp2()
        })
    }
}

// === impl MeanTime ===

impl MeanTime {
    pub(super) fn add_time(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        let mean = self.0.get_or_insert(seconds);
        *mean += MEAN_WEIGHT * (seconds - *mean);
    }

    /// Returns the mean in seconds, `None` before the first duration.
    pub(super) fn seconds(self) -> Option<f64> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: f64 = 0.02;
    const RATE: f64 = 40_000.0;

    /// Prompts one after the other, each by its tokens and its seconds beyond those of an idle engine.
    fn learned(prompts: &[(u64, f64)]) -> (PromptTimes, Instant) {
        let (mut times, mut now) = (PromptTimes::default(), Instant::now());
        for (tokens, more) in prompts {
            let prompt = times.begin_prompt(*tokens, None, now);
            now += Duration::from_secs_f64(START + *tokens as f64 / RATE + more);
            times.learn_time(prompt, *tokens, now);
            times.end_prompt(prompt, now);
        }
        (times, now)
    }

    fn is_near(found: f64, right: f64) -> bool {
        (found - right).abs() <= right / 10.0
    }

    #[test]
    fn the_speed_is_that_of_an_idle_engine_though_others_use_it_and_one_prompt_was_cached() {
        let lengths = (0..SAMPLES_MAX as u64).map(|at| 500 + at * 700);
        // Each second answer waits for another client's prompt.
        let mut prompts: Vec<_> = lengths.zip([0.0, 0.3].into_iter().cycle()).collect();
        prompts[9].1 = -(prompts[9].0 as f64) / RATE;
        let (times, _) = learned(&prompts);
        assert!(is_near(times.tokens_per_second().unwrap(), RATE), "{:?}", times.line);
        assert!(is_near(times.line.unwrap().start, START), "{:?}", times.line);
    }

    #[test]
    fn a_prompt_waits_for_those_before_it_as_far_as_they_are_not_computed() {
        let (mut times, now) = learned(&[(1000, 0.0), (5000, 0.0), (9000, 0.0)]);
        let expect = |times: &mut PromptTimes, at| times.expect_prompt(1000, None, at).unwrap();
        assert!(expect(&mut times, now).wait < 0.001);
        assert!(is_near(expect(&mut times, now).finish(), 0.045));
        let first = times.begin_prompt(8000, None, now);
        times.begin_prompt(4000, None, now);
        assert!(is_near(expect(&mut times, now).wait, 0.3));
        let half = now + Duration::from_millis(120);
        assert!(is_near(expect(&mut times, half).wait, 0.2), "half of the first one is computed");
        let late = now + Duration::from_secs(9);
        assert!(is_near(expect(&mut times, late).wait, 0.1), "the second one has not begun");
        times.end_prompt(first, late);
        assert!(is_near(expect(&mut times, late).wait, 0.1));
        assert!(expect(&mut times, late + Duration::from_millis(121)).wait < 0.001);
    }

    #[test]
    fn an_answer_that_does_not_show_the_end_of_its_prompt_counts_until_its_expected_end() {
        let (mut times, now) = learned(&[(1000, 0.0), (5000, 0.0)]);
        let end = now + Duration::from_millis(220);
        times.begin_prompt(8000, Some(end), now);
        times.begin_prompt(4000, None, now);
        assert!(is_near(times.open_tokens(end), 4000.0));
    }

    #[test]
    fn what_other_clients_prompts_take_is_in_the_wait_and_halves_without_answers() {
        let mut prompts = vec![(1000, 0.0), (5000, 0.0), (9000, 0.0), (2000, 0.0)];
        prompts.extend([(5000, 0.4); 8]);
        let (mut times, now) = learned(&prompts);
        let wait = |times: &mut PromptTimes, at| times.expect_prompt(1000, None, at).unwrap().wait;
        let before = wait(&mut times, now);
        assert!(before > 0.25, "{before}");
        assert!(is_near(wait(&mut times, now + EXCESS_HALF), before / 2.0));
        let other = PromptTimes::default().expect_prompt(1000, times.known(now), now).unwrap();
        assert_eq!(other.wait, before, "an engine without answers is expected to be no better");
    }

    #[test]
    fn beyond_its_longest_prompt_an_engine_is_as_fast_as_another_one() {
        // By short prompts alone each token seems to take long.
        let (mut short, now) = learned(&[(300, 0.03)]);
        let (mut other, _) = learned(&[(1000, 0.0), (5000, 0.0), (9000, 0.0)]);
        let expected = short.expect_prompt(8000, other.known(now), now).unwrap().work;
        assert!(is_near(expected, 0.05 + 0.2), "{expected}");
        let (mut none, _) = learned(&[]);
        assert_eq!(none.expect_prompt(8000, None, now), None);
        let right = other.expect_prompt(8000, None, now).unwrap().work;
        assert!(is_near(none.expect_prompt(8000, other.known(now), now).unwrap().finish(), right));
    }
}
