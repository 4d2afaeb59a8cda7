//! Random numbers where any will do: splitmix64, whose state is the seed.

#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    #[expect(clippy::should_implement_trait, reason = "no iterator: there is always another number")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }
}

/// Every bit of the result depends on every bit of `z`.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
