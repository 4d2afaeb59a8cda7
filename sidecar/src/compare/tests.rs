use shm_protocol::random::Random;
use tiers::pool::BlockSum;

use super::*;

fn facts(list: &[(&str, &str)]) -> Facts {
    list.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn stated(page_form: &str, kv_dtype: &str, kv_quant: &str, bytes: u64) -> Layers {
    let facts = facts(&[("page_form", page_form), ("kv_dtype", kv_dtype), ("kv_quant", kv_quant)]);
    Layers::of_facts(&facts, bytes)
}

/// Compares two blocks of these layers.
fn compared(layers: &Layers, shards: u32, kept: &[u8], computed: &[u8]) -> BlockDifference {
    let read = |from: &[u8], at: u64, out: &mut [u8]| out.copy_from_slice(&from[at as usize..][..out.len()]);
    layers.compare(shards, |at, out| read(kept, at, out), |at, out| read(computed, at, out))
}

/// Numbers like KV: of both signs, over several orders of magnitude.
fn values(count: usize, seed: u64) -> Vec<f64> {
    let mut random = Random(seed);
    (0..count).map(|_| (0..12).map(|_| random.unit()).sum::<f64>() - 6.0).collect()
}

/// The bytes of the number nearest to `value` in this format.
fn encode(number: Number, value: f64) -> Vec<u8> {
    match number {
        Number::Float32 => (value as f32).to_le_bytes().to_vec(),
        Number::Bfloat16 => {
            let bits = (value as f32).to_bits();
            ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).to_le_bytes()[..2].to_vec()
        }
        _ => {
            let width = number.width_bytes();
            let candidates = 0..1u32 << (8 * width);
            let distance = |bits: &u32| {
                let decoded = f64::from(number.decode_number(&bits.to_le_bytes()[..width]));
                if decoded.is_finite() { (decoded - value).abs() } else { f64::MAX }
            };
            let best = candidates.min_by(|one, other| distance(one).total_cmp(&distance(other)));
            best.expect("some").to_le_bytes()[..width].to_vec()
        }
    }
}

#[test]
fn layers_are_read_as_engines_state_them() {
    let one = "layers=2 tokens=16 kernel_block=16 kv_heads=2 keys=32 values=32 dtype=bfloat16 order=kv_heads,tokens,content packing=none";
    let bytes = 16 * 2 * 64 * 2;
    let number = Number::Bfloat16;
    assert_eq!(stated(one, "auto", "0", 2 * bytes).0, [(bytes, number), (bytes, number)]);
    let two = format!(
        "{one}; layers=1 axis1=2 axis2=16 axis3=576 dtype=float32 order=axis1,axis2,axis3 packing=none"
    );
    let more = 2 * 16 * 576 * 4;
    assert_eq!(stated(&two, "auto", "0", 2 * bytes + more).0[2], (more, Number::Float32));
    let kernel =
        "layers=1 tokens=64 kernel_block=16 kv_heads=1 keys=8 values=0 dtype=float16 order=x packing=none";
    assert_eq!(stated(kernel, "auto", "none", 64 * 8 * 2).0, [(64 * 8 * 2, Number::Float16)]);
}

#[test]
fn what_says_nothing_or_does_not_fit_is_compared_by_its_bytes() {
    let float32 =
        "layers=1 tokens=2 kernel_block=2 kv_heads=1 keys=2 values=2 dtype=float32 order=x packing=none";
    for (text, bytes) in [
        ("", 32),
        ("layers=1", 32),
        ("a page", 32),
        (float32, 33),
        ("layers=x tokens=8 dtype=float32", 32),
        ("layers=0 tokens=8 dtype=float32", 32),
        ("layers=4097 tokens=1 dtype=float32", 4097 * 4),
        ("layers=4096 tokens=1 dtype=float32; layers=1 tokens=1 dtype=float32", 4097 * 4),
        ("layers=4 tokens=18446744073709551615 kv_heads=2 dtype=float32", 32),
        ("layers=1 tokens=0 dtype=float32", 32),
    ] {
        assert_eq!(stated(text, "auto", "0", bytes).0, [(bytes, Number::Byte)], "{text}");
    }
    assert_eq!(Layers::of_facts(&Facts::new(), 7).0, [(7, Number::Byte)]);
}

#[test]
fn a_dtype_means_a_number_unless_scales_lie_beside_it() {
    let read = |dtype: &str, kv_dtype: &str, quant: &str| {
        let text = format!("layers=1 tokens=8 kv_heads=1 dtype={dtype} order=x packing=none");
        let bytes = if dtype == "float32" { 32 } else { 8 };
        stated(&text, kv_dtype, quant, bytes).0[0].1
    };
    for (dtype, kv_dtype, quant, number) in [
        ("float32", "auto", "0", Number::Float32),
        ("float8_e4m3fn", "fp8", "1", Number::Float8E4m3),
        ("float8_e5m2", "fp8_e5m2", "1", Number::Float8E5m2),
        ("uint8", "fp8", "1", Number::Float8E4m3),
        ("uint8", "fp8_e4m3", "KVQuantMode.FP8_PER_TENSOR", Number::Float8E4m3),
        ("uint8", "fp8_e5m2", "1", Number::Float8E5m2),
        ("uint8", "fp8_ds_mla", "1", Number::Byte),
        ("uint8", "fp8", "3", Number::Byte),
        ("uint8", "fp8_per_token_head", "3", Number::Byte),
        ("int8", "int8_per_token_head", "2", Number::Byte),
        ("uint8", "nvfp4", "5", Number::Byte),
    ] {
        assert_eq!(read(dtype, kv_dtype, quant), number, "{dtype} {kv_dtype} {quant}");
    }
}

#[test]
fn numbers_are_decoded_by_their_standards() {
    let half = |bits: u16| Number::Float16.decode_number(&bits.to_le_bytes());
    assert_eq!(
        [half(0x3c00), half(0xc000), half(0x7bff), half(0x0400)],
        [1.0, -2.0, 65504.0, 2f32.powi(-14)]
    );
    assert_eq!([half(0x0001), half(0x8000), half(0x7c00)], [2f32.powi(-24), -0.0, f32::INFINITY]);
    assert!(half(0x7e00).is_nan() && half(0xfc00) == f32::NEG_INFINITY);
    let brain = |bits: u16| Number::Bfloat16.decode_number(&bits.to_le_bytes());
    assert_eq!([brain(0x3f80), brain(0xc0a0)], [1.0, -5.0]);
    let e4m3 = |bits: u8| Number::Float8E4m3.decode_number(&[bits]);
    assert_eq!(
        [e4m3(0x38), e4m3(0x7e), e4m3(0x01), e4m3(0x88)],
        [1.0, 448.0, 2f32.powi(-9), -(2f32.powi(-6))]
    );
    assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
    let e5m2 = |bits: u8| Number::Float8E5m2.decode_number(&[bits]);
    assert_eq!(
        [e5m2(0x3c), e5m2(0x7b), e5m2(0x01), e5m2(0x7c)],
        [1.0, 57344.0, 2f32.powi(-16), f32::INFINITY]
    );
}

#[test]
fn noise_is_below_every_limit_and_other_numbers_are_beyond() {
    for (number, noise) in [
        (Number::Float32, 1e-6),
        (Number::Float16, 5e-4),
        (Number::Bfloat16, 4e-3),
        (Number::Float8E4m3, 1e-2),
        (Number::Float8E5m2, 1e-2),
    ] {
        let (right, other, shift) = (values(512, 1), values(512, 2), values(512, 3));
        let bytes = |list: &[f64]| list.iter().flat_map(|value| encode(number, *value)).collect::<Vec<u8>>();
        let noisy: Vec<f64> =
            right.iter().zip(&shift).map(|(value, by)| value * (1.0 + noise * by)).collect();
        let near = number.difference(&bytes(&right), &bytes(&noisy));
        assert!(near > 0.0 && near < number.limit(), "{number:?}: {near}");
        let far = number.difference(&bytes(&right), &bytes(&other));
        assert!(far > 1.0, "{number:?}: {far}");
        let louder: Vec<f64> = right.iter().map(|value| value * 1.5).collect();
        let scaled = number.difference(&bytes(&right), &bytes(&louder));
        assert!((scaled - 0.5).abs() < 0.05, "{number:?}: {scaled} of a half");
    }
}

#[test]
fn what_is_no_number_must_be_equal_bit_for_bit() {
    let block = |list: &[f32]| list.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
    let nan = |payload: u32| f32::from_bits(0x7fc0_0000 | payload);
    let number = Number::Float32;
    let difference = |one: &[f32], other: &[f32]| number.difference(&block(one), &block(other));
    assert_eq!(difference(&[1.0, nan(1)], &[1.0, nan(1)]), 0.0);
    assert!(difference(&[1.0, nan(1)], &[1.0 + 1e-6, nan(1)]) < 1e-5);
    for (one, other) in [(nan(1), nan(2)), (f32::INFINITY, 1.0), (1.0, f32::NEG_INFINITY), (0.0, nan(0))] {
        assert_eq!(difference(&[1.0, one], &[1.0, other]), f64::INFINITY);
    }
    assert_eq!(
        difference(&[0.0; 4], &[0.0, 0.0, 1e-30, 0.0]),
        f64::INFINITY,
        "a zero block differs from any other"
    );
    assert_eq!(difference(&[0.0; 2], &[-0.0; 2]), 0.0);
}

#[test]
fn the_worst_layer_of_all_shards_counts() {
    let text = "layers=2 tokens=2 kv_heads=1 keys=2 values=0 dtype=float32 order=x packing=none; layers=1 axis1=8 dtype=int8 order=axis1 packing=none";
    let layers = stated(text, "auto", "0", 40);
    let kept: Vec<u8> =
        (0..2).flat_map(|_| [1f32; 8].into_iter().flat_map(f32::to_le_bytes).chain([5u8; 8])).collect();
    assert_eq!(compared(&layers, 2, &kept, &kept).amount, 0.0);
    let with = |at: usize, bytes: &[u8]| {
        let mut computed = kept.clone();
        computed[at..at + bytes.len()].copy_from_slice(bytes);
        compared(&layers, 2, &kept, &computed)
    };
    let found = with(40 + 16, &1.5f32.to_le_bytes());
    assert_eq!((found.layer, found.number, found.amount), (1, Number::Float32, 0.25));
    assert!(found.is_too_large());
    let found = with(0, &(1f32 + 1e-6).to_le_bytes());
    assert!(found.layer == 0 && found.amount > 0.0 && !found.is_too_large());
    let found = with(32, &[6; 4]);
    assert_eq!((found.layer, found.number, found.amount), (2, Number::Byte, 0.5));
    assert!(!found.is_too_large() && with(32, &[6; 8]).is_too_large());
    let deep = |layer, amount| BlockDifference { layer, number: Number::Bfloat16, amount };
    assert!(deep(0, 0.02).is_too_large() && !deep(79, 0.03).is_too_large() && deep(79, 0.12).is_too_large());
    assert_eq!(deep(79, 0.03).max(deep(1, 0.012)), deep(1, 0.012), "the larger part of its limit is worse");
    let no_number = BlockDifference { amount: f64::NAN, ..found };
    assert!(no_number.is_too_large());
}

/// A number format, bytes of finite numbers, and bytes of others.
type Case<'a> = (Number, &'a [&'a [u8]], &'a [&'a [u8]]);

#[test]
fn only_non_finite_numbers_are_noticed() {
    let finite = |number: Number, bytes: &[u8]| {
        Layers(vec![(bytes.len() as u64, number)]).are_finite(1, None, |at, out| {
            out.copy_from_slice(&bytes[at as usize..][..out.len()]);
        })
    };
    let cases: [Case<'_>; 5] = [
        (
            Number::Float32,
            &[&f32::MAX.to_le_bytes(), &[1, 0, 0, 0]],
            &[&f32::NAN.to_le_bytes(), &f32::NEG_INFINITY.to_le_bytes()],
        ),
        (Number::Bfloat16, &[&[0x7f, 0x7f], &[0, 0x80]], &[&[0x80, 0x7f], &[0xc1, 0xff]]),
        (Number::Float16, &[&[0xff, 0x7b], &[1, 0]], &[&[0, 0x7c], &[1, 0xfe]]),
        (Number::Float8E4m3, &[&[0x7e], &[0x80]], &[&[0x7f], &[0xff]]),
        (Number::Float8E5m2, &[&[0x7b], &[0x01]], &[&[0x7c], &[0xfd]]),
    ];
    for (number, right, wrong) in cases {
        for place in [0, 7, 40] {
            let with =
                |one: &[u8]| [vec![0; place * one.len()].as_slice(), one, &vec![0; 9 * one.len()]].concat();
            assert!(right.iter().all(|one| finite(number, &with(one))), "{number:?}");
            assert!(wrong.iter().all(|one| !finite(number, &with(one))), "{number:?}");
        }
    }
    assert!(finite(Number::Byte, &[0xff; 64]));
}

#[test]
fn every_layer_of_every_shard_is_searched() {
    let layers = Layers(vec![(8, Number::Bfloat16), (4, Number::Byte), (8, Number::Float32)]);
    for at in 0..40 {
        let mut block = [0; 40];
        block[at] = 0xff;
        block[at ^ 1] = 0xff;
        let read = |from: u64, out: &mut [u8]| out.copy_from_slice(&block[from as usize..][..out.len()]);
        let mut sum = BlockSum::default();
        let found = layers.are_finite(2, None, read);
        assert_eq!(layers.are_finite(2, Some(&mut sum), read), found);
        assert!(!found || sum.finish() == shm_protocol::pool::compute_checksum(&block));
        // Bytes 8 to 11 and 28 to 31 are plain bytes. The lower half of a float32 cannot make it infinite or
        // NaN.
        let (place, half) = (at % 20, (at % 20 + 4) % 4 / 2);
        let expected = (8..12).contains(&place) || place >= 12 && half == 0;
        assert_eq!(found, expected, "{at}");
    }
}
