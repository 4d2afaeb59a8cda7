//! The only source of randomness: SplitMix64, so a seed gives the same run everywhere.

use shm_protocol::random::Random;
pub(crate) use shm_protocol::random::mix;

/// A seeded stream of numbers.
#[derive(Clone, Debug)]
pub(crate) struct Rng(Random);

// === impl Rng ===

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(Random(mix(seed ^ 0x5049_4c4c_494f_4e21)))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.next()
    }

    /// Below `limit`, which is not zero.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u64
    }

    /// From `low` to `high`, both included.
    pub(crate) fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// True once in `of` calls.
    pub(crate) fn one_in(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    pub(crate) fn bytes16(&mut self) -> [u8; 16] {
        (u128::from(self.next()) << 64 | u128::from(self.next())).to_le_bytes()
    }
}
