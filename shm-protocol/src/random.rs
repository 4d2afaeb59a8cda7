//! Random-looking numbers without secrecy: splitmix64, so a seed gives the same sequence everywhere.

use std::ops::RangeInclusive;

/// A sequence of numbers, whose state is the seed.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

// === impl Random ===

impl Random {
    /// Returns the next number of the sequence.
    #[expect(clippy::should_implement_trait, reason = "no iterator: there is always another number")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a number below `limit`; `limit` must not be 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Returns a number of the range; it must not be all of `u64`.
    pub fn within(&mut self, range: RangeInclusive<u64>) -> u64 {
        range.start() + self.below(range.end() - range.start() + 1)
    }

    /// Returns a number from 0 on and below 1.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Mixes a number. Every bit of the result depends on every bit of `z`, and no two `z` have the same result.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers of <https://prng.di.unimi.it/splitmix64.c> with seed 1234567.
    #[test]
    fn the_sequence_is_that_of_splitmix64() {
        let mut random = Random(1_234_567);
        assert_eq!(
            [(); 3].map(|()| random.next()),
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn numbers_are_drawn_from_their_ranges() {
        let mut random = Random(1);
        let drawn: Vec<u64> = (0..100).map(|_| random.within(3..=5)).collect();
        assert!(
            (3..=5).all(|number| drawn.contains(&number))
                && drawn.iter().all(|number| (3..=5).contains(number))
        );
        assert!((0..100).map(|_| random.unit()).all(|unit| (0.0..1.0).contains(&unit)));
    }
}
