//! A pool in the view of an engine, and of the next sidecar: an arbitrary header page and arbitrary segment
//! memory behind it.
//!
//! Input: mapped length, a slot's offset, its generation and a block's bytes (u64 each), then the pool's
//! words, repeated to the pool's length.
#![no_main]

use libfuzzer_sys::fuzz_target;
use shm_protocol::pool::{POOL_BYTES_MAX, PoolView, Remains, SlotRef, first_generation};

/// Slots checked in one segment: the first, the last and one more.
const SLOTS: [fn(u32) -> u32; 3] = [|_| 0, |count| count - 1, |count| count];

fuzz_target!(|input: &[u8]| {
    let words: Vec<u64> = input.as_chunks::<8>().0.iter().map(|eight| u64::from_le_bytes(*eight)).collect();
    let [length, offset, generation, block_bytes, pool @ ..] = &words[..] else { return };
    if pool.is_empty() {
        return;
    }
    let length = length % (2 * POOL_BYTES_MAX);
    let load = |at: usize| {
        assert!(at.is_multiple_of(8) && (at as u64) + 8 <= length, "a load at {at} of {length}");
        pool[at / 8 % pool.len()]
    };
    let Ok(view) = PoolView::new(load, length) else { return };
    let slot = SlotRef { offset: *offset, generation: *generation };
    let whole = view.verify(slot, *block_bytes);
    match view.place(*offset, *block_bytes) {
        Ok(place) => {
            assert!(place.segment < view.segments() && place.header < *offset);
            assert!(offset + block_bytes <= length, "the whole block lies inside the pool");
            view.read_header(*offset, *block_bytes).expect("the same place");
        }
        Err(_) => assert!(!whole),
    }
    for segment in [0, view.segments().saturating_sub(1), view.segments()] {
        let Some(geometry) = view.geometry(segment) else { continue };
        assert!(segment < view.segments());
        for index in SLOTS.map(|index| index(geometry.slot_count)) {
            let life = generation % (1 << 24);
            let remains = view.remains(segment, &geometry, index, life);
            assert_eq!(remains.is_some(), index < geometry.slot_count);
            if let Some(Remains::Block { generation, .. }) = remains {
                assert!(generation < first_generation(life), "a block of an earlier life");
                let offset = geometry.offset(segment, index).expect("below the count");
                assert!(view.verify(SlotRef { offset, generation }, geometry.block_bytes));
            }
        }
    }
});
