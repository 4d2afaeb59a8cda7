//! Poisson arrivals over the router's own placement, at simulated engines with one prompt at a time. Figures of two
//! H200: a prefill engine computes 40,000 tokens a second and 22 ms before, a hand-over takes 32 ms, and a step of answers 6 ms. So a
//! decode engine with steps of 256 tokens computes 20,600 a second, and a mixed engine with steps of 2,048 computes 35,800.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Duration;

use tokio::time::Instant;

use super::*;
use crate::prompt_times::{BegunPrompt, PromptTimes};

const START_S: f64 = 0.022;
const HAND_OVER_S: f64 = 0.032;
const PREFILL_RATE: f64 = 40_000.0;
const DECODE_RATE: f64 = 20_600.0;
const MIXED_RATE: f64 = 35_800.0;
const PROMPTS: usize = 1500;
/// The default of `--decode-prompt-share`.
const SHARE: f64 = 0.25;

/// The ways of prompts through two engines.
#[derive(Copy, Clone, Debug, PartialEq)]
enum Way {
    /// Each engine computes every other prompt.
    Mixed,
    /// The prefill engine computes all prompts.
    Apart,
    /// So many routers place every other prompt each, by this `--ttft-target`.
    Placed(usize, Option<f64>),
}

/// An engine; it computes prompts in the order of their arrival.
struct Server {
    rate: f64,
    is_free: f64,
    /// Seconds of work so far.
    busy: f64,
}

/// The knowledge of one router.
#[derive(Default)]
struct Seen {
    prefill: PromptTimes,
    decode: PromptTimes,
    budget: TimeBudget,
}

#[derive(Debug)]
struct Outcome {
    /// Seconds until first tokens, sorted.
    firsts: Vec<f64>,
    /// The share of the second engine's time with prompts.
    share: f64,
}

// === impl Server ===

impl Server {
    fn new(rate: f64) -> Self {
        Self { rate, is_free: 0.0, busy: 0.0 }
    }

    /// Returns the end of a prompt of now.
    fn compute(&mut self, tokens: u64, now: f64) -> f64 {
        let work = START_S + tokens as f64 / self.rate;
        self.busy += work;
        self.is_free = self.is_free.max(now) + work;
        self.is_free
    }
}

// === impl Seen ===

impl Seen {
    /// Returns true for the decode engine alone.
    fn is_alone(&mut self, tokens: u64, hand_over: f64, target: Option<f64>, now: Instant) -> bool {
        let Some(mut both) = self.prefill.expect_prompt(tokens, None, now) else { return false };
        both.wait += hand_over;
        let expected = self.decode.expect_prompt(tokens, self.prefill.known(now), now).expect("a line");
        let has_room = self.budget.has_room(expected.work, SHARE, now);
        let is_alone = place_prompt(Some(both), &[DecodeOffer { expected, has_room }], target).is_some();
        if is_alone {
            self.budget.spend(expected.work, SHARE, now);
        }
        is_alone
    }

    fn times(&mut self, is_alone: bool) -> &mut PromptTimes {
        if is_alone { &mut self.decode } else { &mut self.prefill }
    }
}

// === impl Outcome ===

impl Outcome {
    /// The mean in milliseconds.
    fn mean(&self) -> f64 {
        self.firsts.iter().sum::<f64>() / self.firsts.len() as f64 * 1e3
    }

    fn within(&self, target: f64) -> usize {
        self.firsts.partition_point(|first| *first <= target)
    }
}

/// A random number from 0 to 1 (SplitMix64).
fn random(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

/// Plays arrivals at this rate a second.
fn play(way: Way, rate: f64, hand_over: f64, lengths: &[u64]) -> Outcome {
    let begin = Instant::now();
    let at = |seconds: f64| begin + Duration::from_secs_f64(seconds);
    let rates = if way == Way::Mixed { [MIXED_RATE; 2] } else { [PREFILL_RATE, DECODE_RATE] };
    let (mut servers, mut now, mut seed) = (rates.map(Server::new), 0.0, 7);
    let mut routers = [Seen::default(), Seen::default()];
    let mut begun: Vec<(BegunPrompt, usize, bool)> = Vec::new();
    let (mut ends, mut firsts) = (BTreeSet::new(), Vec::new());
    for (number, tokens) in lengths.iter().copied().enumerate() {
        now += -(1.0 - random(&mut seed)).ln() / rate;
        while let Some((end, number)) = ends.first().copied().filter(|(end, _)| *end <= at(now)) {
            ends.pop_first();
            let (prompt, router, is_alone): (BegunPrompt, usize, bool) = begun[number];
            let times = routers[router].times(is_alone);
            times.learn_time(prompt, prompt.tokens, end);
            times.end_prompt(prompt, end);
        }
        let (router, is_second) = match way {
            Way::Mixed => (0, number % 2 == 1),
            Way::Apart => (0, false),
            Way::Placed(count, target) => {
                let router = number % count;
                (router, routers[router].is_alone(tokens, hand_over, target, at(now)))
            }
        };
        let end = servers[usize::from(is_second)].compute(tokens, now);
        let is_handed_over = way != Way::Mixed && !is_second;
        firsts.push(end - now + if is_handed_over { hand_over } else { 0.0 });
        if let Way::Placed(..) = way {
            let prompt = routers[router].times(is_second).begin_prompt(tokens, None, at(now));
            begun.push((prompt, router, is_second));
            ends.insert((at(end), number));
        }
    }
    firsts.sort_by(f64::total_cmp);
    Outcome { firsts, share: servers[1].busy / now }
}

/// Lengths of the prompts of a conversation service.
fn conversation() -> Vec<u64> {
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../benches/traces/mooncake-conversation.jsonl.gz");
    let text = Command::new("gzip").args(["-dc", trace]).output().expect("gzip").stdout;
    let length = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        line["input_length"].as_u64().expect("a length")
    };
    String::from_utf8(text).expect("text").lines().take(PROMPTS).map(length).collect()
}

#[test]
fn first_tokens_come_sooner_than_from_a_prefill_engine_alone_and_the_decode_engine_keeps_its_share() {
    for (name, lengths, rates) in [
        ("5,000 tokens", vec![5000; PROMPTS], [2.0, 4.0, 6.0]),
        ("conversation", conversation(), [1.0, 2.0, 2.8]),
    ] {
        for rate in rates {
            for hand_over in [HAND_OVER_S, 0.0] {
                let [mixed, apart, placed, two] =
                    [Way::Mixed, Way::Apart, Way::Placed(1, None), Way::Placed(2, None)]
                        .map(|way| play(way, rate, hand_over, &lengths));
                let means = [&mixed, &apart, &placed, &two].map(Outcome::mean);
                let case =
                    format!("{name}, {rate}/s, hand-over {hand_over}: {means:.0?} ms, {:.3}", placed.share);
                assert!(placed.mean() < apart.mean() && two.mean() <= apart.mean(), "{case}");
                let is_full = rate == rates[2];
                assert!(!is_full || placed.mean().max(two.mean()) < apart.mean() / 2.0, "{case}");
                assert!(placed.share <= SHARE * 1.05 && two.share <= 2.0 * SHARE * 1.05, "{case}");
            }
        }
    }
}

#[test]
fn more_first_tokens_come_within_a_target() {
    let (lengths, target) = (vec![5000; PROMPTS], 0.25);
    for rate in [4.0, 5.0] {
        let [free, aimed] =
            [None, Some(target)].map(|target| play(Way::Placed(1, target), rate, HAND_OVER_S, &lengths));
        assert!(aimed.within(target) > free.within(target));
        assert!(aimed.share <= SHARE * 1.05);
    }
}
