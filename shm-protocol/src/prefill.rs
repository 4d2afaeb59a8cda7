//! The speed at which an engine computes prompts: two numbers in a word of its scheduler's session. The
//! sidecar judges loads by them.

/// The time of a token of a prompt, by its position. Attention makes later tokens slower, in proportion to
/// those before them.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct PrefillRate {
    /// Nanoseconds of the first token.
    token_ns: f32,
    /// The further nanoseconds of a token for each token before it.
    slope_ns: f32,
}

// === impl PrefillRate ===

impl PrefillRate {
    /// Makes a rate. `None` for negative numbers, for zeros alone, and beyond a second for a token.
    pub fn new(token_ns: f32, slope_ns: f32) -> Option<Self> {
        let is_time = |ns: f32| (0.0..=1e9).contains(&ns);
        let is_rate = is_time(token_ns) && is_time(slope_ns) && token_ns + slope_ns > 0.0;
        is_rate.then_some(Self { token_ns, slope_ns })
    }

    /// Returns the word in shared memory; 0 is no rate.
    pub fn to_word(self) -> u64 {
        u64::from(self.token_ns.to_bits()) << 32 | u64::from(self.slope_ns.to_bits())
    }

    /// Reads the rate in a word, if it is one.
    pub fn from_word(word: u64) -> Option<Self> {
        Self::new(f32::from_bits((word >> 32) as u32), f32::from_bits(word as u32))
    }

    /// Returns the seconds to compute tokens `first..end` of a prompt, behind kept tokens.
    pub fn seconds(self, first: u64, end: u64) -> f64 {
        let (from, to) = (first as f64, end.max(first) as f64);
        let between = (to - from) * (f64::from(self.token_ns) + f64::from(self.slope_ns) * (from + to) / 2.0);
        between / 1e9
    }

    /// Returns the nanoseconds of the first token, and the further ones for each token before.
    pub fn nanoseconds(self) -> (f32, f32) {
        (self.token_ns, self.slope_ns)
    }

    /// Returns the length of a prompt whose computing and loading take equal time, from a source of so many
    /// tokens a second: longer prompts load sooner. `None` if no prompt does.
    pub fn even_tokens(self, tokens_per_second: f64) -> Option<u64> {
        let behind_ns = (1e9 / tokens_per_second - f64::from(self.token_ns)).max(0.0);
        let even = 2.0 * behind_ns / f64::from(self.slope_ns);
        // 0 / 0: the source is as fast as computing any token.
        if behind_ns == 0.0 { Some(0) } else { even.is_finite().then_some(even as u64) }
    }

    /// Returns the tokens a second at a position.
    pub fn tokens_per_second(self, position: u64) -> f64 {
        1e9 / (f64::from(self.token_ns) + f64::from(self.slope_ns) * position as f64).max(f64::MIN_POSITIVE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_has_both_numbers_and_no_word_is_no_rate() {
        let rate = PrefillRate::new(50_000.0, 0.84).unwrap();
        assert_eq!(PrefillRate::from_word(rate.to_word()), Some(rate));
        assert_eq!(PrefillRate::from_word(0), None);
        for word in [u64::MAX, u64::from(f32::NAN.to_bits()) << 32, u64::from((-1_f32).to_bits()), 1 << 63] {
            assert_eq!(PrefillRate::from_word(word), None, "{word:x}");
        }
    }

    #[test]
    fn later_tokens_take_longer() {
        let rate = PrefillRate::new(50_000.0, 1.0).unwrap();
        assert!((rate.seconds(0, 100_000) - 10.0).abs() < 1e-6, "5 s and 5 s of attention");
        assert!((rate.seconds(0, 40_000) + rate.seconds(40_000, 100_000) - 10.0).abs() < 1e-6);
        assert!((rate.tokens_per_second(0) - 20_000.0).abs() < 0.1);
        assert!((rate.tokens_per_second(50_000) - 10_000.0).abs() < 0.1);
        assert!(rate.seconds(5, 3).abs() < f64::EPSILON);
        assert_eq!((rate.even_tokens(20_000.0), rate.even_tokens(30_000.0)), (Some(0), Some(0)));
        let even = rate.even_tokens(10_000.0).unwrap();
        assert!((rate.seconds(0, even) - even as f64 / 10_000.0).abs() < 1e-3, "{even}");
        assert_eq!(PrefillRate::new(50_000.0, 0.0).unwrap().even_tokens(10_000.0), None);
    }
}
