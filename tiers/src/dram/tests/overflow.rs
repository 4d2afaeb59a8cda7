//! A full pool evicts no more than a new block needs.

use super::*;

/// One in so many blocks beyond the room.
const PART: u64 = 100;

#[test]
fn one_percent_past_capacity_evicts_one_percent() {
    for block_bytes in [4096, 10_000, 65_536, 600_000, 900_001] {
        let mut dram = tier(100);
        let slots = 100 * u64::from(pool::slot_count(SEGMENT, block_bytes).expect("fits"));
        fill_all(&mut dram, 0..slots, block_bytes);
        assert_eq!(dram.stats().evicted_blocks_total, 0, "{block_bytes}");
        fill_all(&mut dram, slots..slots + slots / PART, block_bytes);
        assert_eq!(dram.stats().evicted_blocks_total, slots / PART, "{block_bytes}");
    }
}

#[test]
fn one_percent_of_mixed_sizes_evicts_one_percent() {
    const SIZES: [u64; 4] = [4096, 10_000, 65_536, 600_000];
    let mut dram = tier(100);
    let size = |number: u64| SIZES[number as usize % SIZES.len()];
    // A pool is full if no size has a free slot left: all of them evict.
    let (mut evicting, mut next) = (0, 0);
    while evicting < SIZES.len() {
        let before = dram.stats().evicted_blocks_total;
        fill(&mut dram, next, size(next));
        evicting = if dram.stats().evicted_blocks_total > before { evicting + 1 } else { 0 };
        next += 1;
    }
    let full = dram.stats();
    let more = next..next + full.blocks / PART;
    for number in more.clone() {
        fill(&mut dram, number, size(number));
    }
    let stats = dram.stats();
    assert_eq!(stats.evicted_blocks_total - full.evicted_blocks_total, more.end - more.start);
    assert_eq!((stats.blocks, stats.bytes_used), (full.blocks, full.bytes_used));
}
