//! Compares two blocks of one key as numbers: the block computed by one engine, and the kept block of another
//! engine.
//!
//! Batch sizes and the order of sums vary, so correct KV differs by rounding. Each layer adds its own
//! rounding, and the difference grows as the square root of the number of layers before it; models of 4, 32
//! and 80 layers agree. Wrong weights, a wrong rotary embedding or a wrong layout differ by more. The
//! measured differences of both kinds stand beside the limits ([`Number::limit`]). This module has no I/O:
//! callers pass functions that read the bytes.

use shm_protocol::namespace::Facts;
use shm_protocol::page_form;
use tiers::pool::{BlockSum, PART_BYTES};

shm_protocol::named! {
    /// The number format of a layer's bytes.
    #[derive(Ord, PartialOrd)]
    pub enum Number {
        Float32 = "float32",
        Float16 = "float16",
        /// The upper half of binary32.
        Bfloat16 = "bfloat16",
        /// 4 bits of exponent, 3 of mantissa, no infinity.
        Float8E4m3 = "float8_e4m3",
        /// The upper half of binary16.
        Float8E5m2 = "float8_e5m2",
        /// Not one number for each element. The difference is the share of unequal bytes.
        Byte = "byte",
    }
}

/// The layers of one rank's shard of a block in their order, each with its bytes and number format.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Layers(Vec<(u64, Number)>);

/// The difference of two blocks in their worst layer, relative to the limit of each layer.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct BlockDifference {
    /// Number of the layer, from 0, among the layers with KV.
    pub layer: u32,
    /// The layer's number format.
    pub number: Number,
    /// Root mean square of the differences, divided by that of the kept numbers; for `Byte` the share of
    /// unequal bytes. Infinite if two unequal numbers are not both finite.
    pub amount: f64,
}

// === impl Number ===

impl Number {
    /// The largest difference of correct KV in the first layers; [`BlockDifference::limit`] extends it to deeper
    /// layers. The table has results of `benches/run gpu/limits` on an H200 and vLLM's CPU build: both
    /// runners, eager and compiled, prompts computed whole, in chunks, in batches and token by token, 4 to 80
    /// layers, by the same measure. Column `right` has the largest difference of correct KV in all checks,
    /// the columns after it the smallest difference of wrong KV.
    ///
    /// | numbers | checks | right | wrong: weights rounded to fp8 | noise of 10 % | half the rotary base | other weights |
    /// |---|---|---|---|---|---|---|
    /// | float32 | 3,406 | 9e-7 | | | 0.72 | |
    /// | float16 | 1,317 | 8e-4 | | | | |
    /// | bfloat16 | 13,632 | 6.6e-3 | 2.7e-2 | 9.4e-2 | 0.42 | 1.4 |
    /// | fp8 (e4m3) | 2,417 | 4.8e-2 | | | | |
    /// | bytes, of int8 and fp8 per token and head | 2,448 | 0.45 | 0.76 | 0.92 | 0.96 | 0.98 |
    ///
    /// Bfloat16 may miss a rotary base that is 1 % less, and noise or an adapter of 1 % of the weights, with
    /// differences of 0.8e-2 to 1.0e-2. Empty cells and e5m2 were not measured; e5m2 has half as many
    /// fractions as e4m3.
    pub fn limit(self) -> f64 {
        match self {
            Self::Float32 => 1e-4,
            Self::Float16 => 2e-3,
            Self::Bfloat16 => 1.3e-2,
            Self::Float8E4m3 => 1e-1,
            Self::Float8E5m2 => 2e-1,
            Self::Byte => 0.75,
        }
    }

    fn width_bytes(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Float8E4m3 | Self::Float8E5m2 | Self::Byte => 1,
        }
    }

    /// The format of a page of this torch dtype, in an engine of these facts.
    fn of_dtype(dtype: &str, facts: &Facts) -> Self {
        let fact = |name: &str| facts.get(name).map_or("", String::as_str);
        // vLLM stores fp8 as uint8. A page can be compared as numbers only if it has no scales or one scale
        // for the whole tensor.
        let scaled = matches!(
            fact("kv_quant"),
            "" | "none" | "0" | "1" | "KVQuantMode.NONE" | "KVQuantMode.FP8_PER_TENSOR"
        );
        match (dtype, fact("kv_dtype")) {
            ("float32", _) => Self::Float32,
            ("float16", _) => Self::Float16,
            ("bfloat16", _) => Self::Bfloat16,
            ("float8_e4m3fn", _) if scaled => Self::Float8E4m3,
            ("float8_e5m2", _) if scaled => Self::Float8E5m2,
            ("uint8", "fp8" | "fp8_e4m3") if scaled => Self::Float8E4m3,
            ("uint8", "fp8_e5m2") if scaled => Self::Float8E5m2,
            _ => Self::Byte,
        }
    }

    fn decode_number(self, bytes: &[u8]) -> f32 {
        let half = |low: u8, high: u8| u16::from_le_bytes([low, high]);
        match (self, bytes) {
            (Self::Float32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Self::Float16, &[a, b]) => binary16(half(a, b)),
            (Self::Bfloat16, &[a, b]) => f32::from_bits(u32::from(half(a, b)) << 16),
            (Self::Float8E4m3, &[a]) => e4m3(a),
            (Self::Float8E5m2, &[a]) => binary16(half(0, a)),
            _ => unreachable!("cut to its size, and a byte is no number"),
        }
    }

    /// True if every number is finite. Always true for `Byte`.
    fn are_finite(self, bytes: &[u8]) -> bool {
        // The exponent of infinity and NaN has all bits set; e4m3 has no infinity, and one NaN.
        let byte = |mask: u8| bytes.iter().fold(true, |finite, byte| finite & (byte & mask != mask));
        let half = |mask: u16| {
            let halves = bytes.as_chunks().0.iter().map(|half| u16::from_le_bytes(*half));
            halves.fold(true, |finite, half| finite & (half & mask != mask))
        };
        match self {
            Self::Float32 => {
                let words = bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
                words.fold(true, |finite, word| finite & (word & 0x7f80_0000 != 0x7f80_0000))
            }
            Self::Float16 => half(0x7c00),
            Self::Bfloat16 => half(0x7f80),
            Self::Float8E4m3 => byte(0x7f),
            Self::Float8E5m2 => byte(0x7c),
            Self::Byte => true,
        }
    }

    /// The difference of a layer's computed bytes from its kept bytes, of the same length.
    fn difference(self, kept: &[u8], computed: &[u8]) -> f64 {
        if kept == computed {
            return 0.0;
        }
        if self == Self::Byte {
            let differing = kept.iter().zip(computed).filter(|(one, other)| one != other).count();
            return differing as f64 / kept.len() as f64;
        }
        let (mut squares, mut differences) = (0.0, 0.0);
        for (one, other) in
            kept.chunks_exact(self.width_bytes()).zip(computed.chunks_exact(self.width_bytes()))
        {
            let (a, b) = (f64::from(self.decode_number(one)), f64::from(self.decode_number(other)));
            if one == other {
                squares += if a.is_finite() { a * a } else { 0.0 };
            } else if a.is_finite() && b.is_finite() {
                squares += a * a;
                differences += (a - b) * (a - b);
            } else {
                return f64::INFINITY;
            }
        }
        if differences == 0.0 { 0.0 } else { (differences / squares).sqrt() }
    }
}

/// A difference or a limit in millionths, capped at `u32::MAX`.
pub fn count_millionths(amount: f64) -> u32 {
    (amount * 1e6).round() as u32
}

/// Zero, subnormal and normal numbers are binary32 numbers with another exponent bias.
fn binary16(bits: u16) -> f32 {
    const BIAS: f32 = f32::from_bits((127 + 112) << 23);
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let value = match bits & 0x7c00 {
        0x7c00 => f32::from_bits(magnitude | 0x7f80_0000),
        _ => f32::from_bits(magnitude) * BIAS,
    };
    if bits & 0x8000 == 0 { value } else { -value }
}

fn e4m3(bits: u8) -> f32 {
    const BIAS: f32 = f32::from_bits((127 + 120) << 23);
    let value = match bits & 0x7f {
        0x7f => f32::NAN,
        magnitude => f32::from_bits(u32::from(magnitude) << 20) * BIAS,
    };
    if bits & 0x80 == 0 { value } else { -value }
}

// === impl Layers ===

impl Layers {
    /// The layers stated by an engine's facts; one layer of plain bytes if the facts state no layers of
    /// `shard_bytes` bytes in all.
    pub fn of_facts(facts: &Facts, shard_bytes: u64) -> Self {
        let stated =
            facts.get("page_form").and_then(|text| page_form::parse_layers(text)).unwrap_or_default();
        let whole = stated.iter().try_fold(0u64, |bytes, layer| bytes.checked_add(layer.bytes));
        if stated.is_empty() || whole != Some(shard_bytes) {
            return Self(vec![(shard_bytes, Number::Byte)]);
        }
        Self(
            stated
                .iter()
                .map(|layer| (layer.bytes, Number::of_dtype(layer.dtype.as_text(), facts)))
                .collect(),
        )
    }

    /// True if any layer has a number format other than bytes.
    pub fn has_numbers(&self) -> bool {
        self.0.iter().any(|(_, number)| *number != Number::Byte)
    }

    /// True if all numbers of a block of `shards` shards are finite. `read` fills its buffer from an offset
    /// in the block. The bytes are also added to `sum`; without it, layers of plain bytes are not read.
    pub fn are_finite(
        &self,
        shards: u32,
        mut sum: Option<&mut BlockSum>,
        read: impl Fn(u64, &mut [u8]),
    ) -> bool {
        let (mut part, mut from) = ([0; PART_BYTES], 0);
        for &(bytes, number) in (0..shards).flat_map(|_| &self.0) {
            let end = from + bytes;
            if number == Number::Byte && sum.is_none() {
                from = end;
            }
            while from < end {
                let part = &mut part[..(end - from).min(PART_BYTES as u64) as usize];
                read(from, part);
                if !number.are_finite(part) {
                    return false;
                }
                if let Some(sum) = &mut sum {
                    sum.add_part(part);
                }
                from += part.len() as u64;
            }
        }
        true
    }

    /// Compares two blocks of `shards` shards. `kept` and `computed` fill a buffer from an offset in their
    /// block.
    pub fn compare(
        &self,
        shards: u32,
        kept: impl Fn(u64, &mut [u8]),
        computed: impl Fn(u64, &mut [u8]),
    ) -> BlockDifference {
        let (mut one, mut other) = (Vec::new(), Vec::new());
        let mut worst = BlockDifference { layer: 0, number: self.0[0].1, amount: 0.0 };
        let mut from = 0;
        for _ in 0..shards {
            for (layer, &(bytes, number)) in (0..).zip(&self.0) {
                one.resize(bytes as usize, 0);
                other.resize(bytes as usize, 0);
                kept(from, &mut one);
                computed(from, &mut other);
                from += bytes;
                worst = worst.max(BlockDifference { layer, number, amount: number.difference(&one, &other) });
            }
        }
        worst
    }
}

// === impl BlockDifference ===

impl BlockDifference {
    /// The largest allowed difference: for numbers it grows with the square root of the layer's number.
    pub fn limit(&self) -> f64 {
        match self.number {
            Number::Byte => Number::Byte.limit(),
            number => number.limit() * f64::from(self.layer.max(1)).sqrt(),
        }
    }

    /// The difference divided by its limit. Above 1 the two blocks are of different models.
    pub fn part(&self) -> f64 {
        self.amount / self.limit()
    }

    /// True if the blocks cannot be of the same model.
    pub fn is_too_large(&self) -> bool {
        self.amount.is_nan() || self.part() > 1.0
    }

    /// The difference with the larger part of its limit.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        if other.part() > self.part() { other } else { self }
    }
}

#[cfg(test)]
mod tests;
