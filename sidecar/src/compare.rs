//! Two blocks of one key compared as numbers: what one engine computed and what another one left under the same key.
//!
//! Neither batch size nor the order of sums is the same twice, so right KV differs by rounding. Each layer adds its own, so the
//! difference grows as the square root of the layers before it: measured alike in models of 4, 32 and 80 layers. Wrong weights, a
//! wrong rotary embedding or a wrong layout differ by more. How much of either was seen stands beside the limits
//! ([`Number::limit`]). Pure: bytes are read through the caller's eyes.

use shm_protocol::namespace::Facts;
use shm_protocol::page_form;
use tiers::pool::{BlockSum, PART_BYTES};

shm_protocol::named! {
    /// What the bytes of a layer are.
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
        /// Nothing that can be read as one number each: what differs is the share of bytes that are not equal.
        Byte = "byte",
    }
}

/// The layers of one rank's part of a block, in their order, each with its bytes and what they are.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Layers(Vec<(u64, Number)>);

/// How far two blocks differ in the layer that differs most, each measured by its limit.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Difference {
    /// The layer, counted from 0 among those that keep KV.
    pub layer: u32,
    /// What its bytes are.
    pub number: Number,
    /// Root of the mean square of the differences, relative to that of the kept numbers; of bytes the share that differs.
    /// Infinite where only one of two numbers is finite.
    pub amount: f64,
}

// === impl Number ===

impl Number {
    /// Of a layer with one before it; see [`Difference::limit`]. The table says what `benches/run gpu/limits` saw on an H200 and vLLM's
    /// CPU build, both runners, eager and compiled, prompts computed whole, in chunks, in batches and token by token, 4 to 80 layers,
    /// by the same measure: right KV at most, of so many checks; wrong KV at least.
    ///
    /// | numbers | checks | right | wrong: weights rounded to fp8 | noise of 10 % | half the rotary base | other weights |
    /// |---|---|---|---|---|---|---|
    /// | float32 | 3,406 | 9e-7 | | | 0.72 | |
    /// | float16 | 1,317 | 8e-4 | | | | |
    /// | bfloat16 | 13,632 | 6.6e-3 | 2.7e-2 | 9.4e-2 | 0.42 | 1.4 |
    /// | fp8 (e4m3) | 2,417 | 4.8e-2 | | | | |
    /// | bytes, of int8 and fp8 per token and head | 2,448 | 0.45 | 0.76 | 0.92 | 0.96 | 0.98 |
    ///
    /// May be missed, in bfloat16: a rotary base 1 % less, and noise or an adapter of 1 % of the weights, 0.8e-2 to 1.0e-2. What is
    /// empty, and e5m2, was not measured; e5m2 has half as many fractions as e4m3.
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

    fn bytes(self) -> usize {
        match self {
            Self::Float32 => 4,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Float8E4m3 | Self::Float8E5m2 | Self::Byte => 1,
        }
    }

    /// What a page of this torch dtype holds in an engine of these facts.
    fn of(dtype: &str, facts: &Facts) -> Self {
        let fact = |name: &str| facts.get(name).map_or("", String::as_str);
        // vLLM keeps fp8 as uint8. Of the quantisations only one scale for a whole tensor leaves numbers to compare.
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

    fn decode(self, bytes: &[u8]) -> f32 {
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

    /// Whether every number is finite. Bytes are no numbers, and pass.
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

    /// How far one layer's bytes differ from those kept, of the same length.
    fn difference(self, kept: &[u8], computed: &[u8]) -> f64 {
        if kept == computed {
            return 0.0;
        }
        if self == Self::Byte {
            let differing = kept.iter().zip(computed).filter(|(one, other)| one != other).count();
            return differing as f64 / kept.len() as f64;
        }
        let (mut squares, mut differences) = (0.0, 0.0);
        for (one, other) in kept.chunks_exact(self.bytes()).zip(computed.chunks_exact(self.bytes())) {
            let (a, b) = (f64::from(self.decode(one)), f64::from(self.decode(other)));
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

/// A difference or a limit, as far as that many can say.
pub fn millionths(amount: f64) -> u32 {
    (amount * 1e6).round() as u32
}

/// Zero, subnormal and normal numbers are those of binary32 with another bias of the exponent.
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
    /// As an engine's facts state them; where they say nothing that fits `shard_bytes`, one layer of mere bytes.
    pub fn of(facts: &Facts, shard_bytes: u64) -> Self {
        let stated = facts.get("page_form").and_then(|text| page_form::layers(text)).unwrap_or_default();
        let whole = stated.iter().try_fold(0u64, |bytes, layer| bytes.checked_add(layer.bytes));
        if stated.is_empty() || whole != Some(shard_bytes) {
            return Self(vec![(shard_bytes, Number::Byte)]);
        }
        Self(stated.iter().map(|layer| (layer.bytes, Number::of(layer.dtype.text(), facts))).collect())
    }

    /// Whether any layer is known as numbers.
    pub fn has_numbers(&self) -> bool {
        self.0.iter().any(|(_, number)| *number != Number::Byte)
    }

    /// Whether all numbers of a block of so many shards are finite. `read` reads from so many bytes behind the block's start. The bytes
    /// are summed in the same pass; without a sum layers of mere bytes are not read.
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

    /// Compares two blocks of so many shards. `kept` and `computed` read from so many bytes behind a block's start.
    pub fn compare(
        &self,
        shards: u32,
        kept: impl Fn(u64, &mut [u8]),
        computed: impl Fn(u64, &mut [u8]),
    ) -> Difference {
        let (mut one, mut other) = (Vec::new(), Vec::new());
        let mut worst = Difference { layer: 0, number: self.0[0].1, amount: 0.0 };
        let mut from = 0;
        for _ in 0..shards {
            for (layer, &(bytes, number)) in (0..).zip(&self.0) {
                one.resize(bytes as usize, 0);
                other.resize(bytes as usize, 0);
                kept(from, &mut one);
                computed(from, &mut other);
                from += bytes;
                worst = worst.max(Difference { layer, number, amount: number.difference(&one, &other) });
            }
        }
        worst
    }
}

// === impl Difference ===

impl Difference {
    /// How far they may differ: numbers by more, the more layers lie before.
    pub fn limit(&self) -> f64 {
        match self.number {
            Number::Byte => Number::Byte.limit(),
            number => number.limit() * f64::from(self.layer.max(1)).sqrt(),
        }
    }

    /// As a part of what it may be: above 1, these cannot be the same model's numbers.
    pub fn part(&self) -> f64 {
        self.amount / self.limit()
    }

    /// Whether these cannot be the same model's numbers.
    pub fn is_too_large(&self) -> bool {
        self.amount.is_nan() || self.part() > 1.0
    }

    /// The one that is further beyond, or nearer to, its limit.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        if other.part() > self.part() { other } else { self }
    }
}

#[cfg(test)]
mod tests;
