//! The engine's rate of computing prompts: a line fitted to the times of its steps, by the positions of their
//! tokens.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use shm_protocol::prefill::PrefillRate;

/// Least tokens of a step that counts: with fewer, its other costs weigh too much.
const TOKENS_MIN: u32 = 256;
/// Number of such steps before the rate is known.
const STEPS_MIN: u32 = 4;
/// The weight of a step after one more step: about the last 30 steps decide, and the rate follows the load.
const FADE: f64 = 0.97;
/// A step's time counts as at most this many times longer or shorter than predicted: a stall does not change
/// the rate.
const OUTLIER: f64 = 2.0;
/// The slope is used if it explains the times better than chance: the square of three standard errors.
const SIGNIFICANT: f64 = 9.0;
/// The most steps without an output.
const OPEN_MAX: usize = 64;

/// The steps seen, and the line through them.
#[derive(Debug, Default)]
pub(super) struct PrefillFit {
    open: VecDeque<TimedStep>,
    /// Time at which the last output was taken. The next step's time begins there, if that step had been
    /// scheduled by then.
    taken: Option<Instant>,
    sums: Sums,
    seen: u32,
}

/// A step without an output yet.
#[derive(Debug)]
struct TimedStep {
    number: u64,
    begun: Instant,
    /// Tokens, and the sum of their positions. `None`: the step's time does not count.
    computed: Option<(f64, f64)>,
}

/// Sums of products over the steps: of tokens `n`, of their positions' sum `p`, and of the time `t` in nanoseconds.
#[derive(Copy, Clone, Debug, Default)]
struct Sums {
    count: f64,
    nn: f64,
    np: f64,
    pp: f64,
    nt: f64,
    pt: f64,
    tt: f64,
}

// === impl PrefillFit ===

impl PrefillFit {
    /// Notes that a step is scheduled, to compute these parts of prompts. `waits`: it also waits for
    /// something else, so its time does not count.
    pub(super) fn schedule_step(
        &mut self,
        number: u64,
        begun: Instant,
        parts: impl Iterator<Item = Range<u32>>,
        waits: bool,
    ) {
        let (mut tokens, mut positions) = (0_u32, 0.0);
        for part in parts {
            tokens += part.end - part.start;
            positions +=
                f64::from(part.end - part.start) * (f64::from(part.start) + f64::from(part.end)) / 2.0;
        }
        let computed = (tokens >= TOKENS_MIN && !waits).then_some((f64::from(tokens), positions));
        if self.open.len() == OPEN_MAX {
            self.open.pop_front();
        }
        self.open.push_back(TimedStep { number, begun, computed });
    }

    /// Notes that the engine has taken a step's output. Returns the rate, if it has changed.
    pub(super) fn take_output(&mut self, number: u64, now: Instant) -> Option<PrefillRate> {
        let before = self.taken.replace(now);
        let passed = self.open.iter().take_while(|step| step.number < number).count();
        self.open.drain(..passed);
        let step = self.open.pop_front_if(|step| step.number == number)?;
        // This time includes the time of passed-over steps.
        let (tokens, positions) = step.computed.filter(|_| passed == 0)?;
        let begun = before.map_or(step.begun, |before| before.max(step.begun));
        let mut time = now.saturating_duration_since(begun).as_nanos() as f64;
        if let Some((token, slope)) = self.line() {
            let foreseen = token * tokens + slope * positions;
            time = time.clamp(foreseen / OUTLIER, foreseen * OUTLIER);
        }
        self.sums.add_sample(tokens, positions, time);
        self.seen = self.seen.saturating_add(1);
        let (token, slope) = self.line()?;
        PrefillRate::new(token as f32, slope as f32)
    }

    /// Nanoseconds of the first token, and of the slope.
    fn line(&self) -> Option<(f64, f64)> {
        (self.seen >= STEPS_MIN).then(|| self.sums.line())
    }
}

// === impl Sums ===

impl Sums {
    fn add_sample(&mut self, n: f64, p: f64, t: f64) {
        let news = [1.0, n * n, n * p, p * p, n * t, p * t, t * t];
        let Self { count, nn, np, pp, nt, pt, tt } = self;
        for (sum, new) in [count, nn, np, pp, nt, pt, tt].into_iter().zip(news) {
            *sum = *sum * FADE + new;
        }
    }

    /// The line with the least squares of its errors; flat if a slope explains hardly more.
    fn line(&self) -> (f64, f64) {
        let Self { count, nn, np, pp, nt, pt, tt } = *self;
        let flat = nt / nn;
        let error = (tt - flat * nt).max(0.0);
        let spread = nn * pp - np * np;
        if spread <= nn * pp * 1e-6 {
            return (flat, 0.0);
        }
        let slope = (nn * pt - np * nt) / spread;
        let token = (nt - slope * np) / nn;
        let (token, slope) = if token < 0.0 { (0.0, pt / pp) } else { (token, slope) };
        let left = (tt - 2.0 * (token * nt + slope * pt)
            + token * token * nn
            + 2.0 * token * slope * np
            + slope * slope * pp)
            .max(0.0);
        let is_better = slope > 0.0 && (error - left) * (count - 2.0) > SIGNIFICANT * left;
        if is_better { (token, slope) } else { (flat, 0.0) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const CHUNK: u32 = 2048;

    /// An engine with `token` and `slope` nanoseconds computes a prompt of so many tokens, chunk by chunk, each `noise(step)` times as long.
    struct Machine {
        fit: PrefillFit,
        now: Instant,
        step: u64,
        rate: Option<PrefillRate>,
    }

    impl Machine {
        fn new() -> Self {
            Self { fit: PrefillFit::default(), now: crate::clock::read_clock(), step: 0, rate: None }
        }

        fn step(&mut self, part: Range<u32>, time: Duration) {
            self.step += 1;
            self.fit.schedule_step(self.step, self.now, std::iter::once(part), false);
            self.now += time;
            self.rate = self.fit.take_output(self.step, self.now).or(self.rate);
        }

        fn prompt(&mut self, tokens: u32, (token, slope): (f64, f64), noise: impl Fn(u64) -> f64) {
            for first in (0..tokens).step_by(CHUNK as usize) {
                let part = first..tokens.min(first + CHUNK);
                let rate = PrefillRate::new(token as f32, slope as f32).unwrap();
                let time = rate.seconds(part.start.into(), part.end.into()) * noise(self.step);
                self.step(part, Duration::from_secs_f64(time));
            }
        }

        fn seconds(&self, tokens: u64) -> f64 {
            self.rate.expect("it is known").seconds(0, tokens)
        }
    }

    fn near(found: f64, wanted: f64, part: f64) {
        assert!((found / wanted - 1.0).abs() <= part, "{found} beside {wanted}");
    }

    #[test]
    fn a_prompt_shows_both_numbers_and_decodes_and_stalls_show_none() {
        let (mut machine, line) = (Machine::new(), (50_000.0, 0.84));
        machine.prompt(3 * CHUNK, line, |_| 1.0);
        assert_eq!(machine.rate, None, "three steps");
        machine.prompt(32 * CHUNK, line, |step| 1.0 + [0.02, -0.02, 0.01][step as usize % 3]);
        let wanted = PrefillRate::new(50_000.0, 0.84).unwrap();
        near(machine.seconds(500_000), wanted.seconds(0, 500_000), 0.05);
        let known = machine.rate;
        for _ in 0..100 {
            machine.step(70_000..70_001, Duration::from_millis(8));
        }
        assert_eq!(machine.rate, known);
        machine.step(0..CHUNK, Duration::from_secs(20));
        near(machine.seconds(500_000), wanted.seconds(0, 500_000), 0.25);
    }

    #[test]
    fn noise_of_short_prompts_is_no_slope() {
        let mut machine = Machine::new();
        for round in 0..20 {
            machine.prompt(2 * CHUNK, (50_000.0, 0.0), |step| {
                1.0 + 0.1 * f64::from(((step * 7 + round * 3) % 11) as u32) / 11.0
            });
        }
        near(machine.seconds(500_000), 26.2, 0.1);
    }

    #[test]
    fn the_rate_follows_the_load() {
        let mut machine = Machine::new();
        machine.prompt(40 * CHUNK, (50_000.0, 0.5), |_| 1.0);
        machine.prompt(60 * CHUNK, (100_000.0, 1.0), |_| 1.0);
        near(machine.seconds(100_000), 15.0, 0.1);
    }

    #[test]
    fn a_step_in_flight_behind_another_has_the_time_after_it_alone() {
        let mut fit = PrefillFit::default();
        let (begin, step) = (crate::clock::read_clock(), Duration::from_millis(100));
        let part = |number: u32| std::iter::once(0..CHUNK + number);
        fit.schedule_step(1, begin, part(0), false);
        let mut rate = None;
        for number in 1..10_u32 {
            fit.schedule_step(u64::from(number) + 1, begin + step * (number - 1), part(number), false);
            rate = fit.take_output(number.into(), begin + step * number).or(rate);
        }
        near(rate.unwrap().seconds(0, CHUNK.into()), 0.1, 0.02);
        // A passed-over step took part of the next step's time.
        fit.schedule_step(11, begin + step * 9, part(0), false);
        assert_eq!(fit.take_output(11, begin + step * 100), None);
        fit.schedule_step(12, begin + step * 100, part(0), true);
        assert_eq!(fit.take_output(12, begin + step * 200), None, "it waited for a load");
    }
}
