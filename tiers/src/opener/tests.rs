use std::path::PathBuf;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::pool::{SLOT_HEADER_BYTES, SlotRef, pool_bytes, segment_offset};

use super::*;
use crate::dram::{self, Dram, Whose};
use crate::pool;

const SEGMENT: u64 = 2 << 20;
const SEGMENTS: u64 = 2;
/// Three slots to a segment.
const BLOCK: u64 = 600_000;
const SLOTS: u64 = 3;
const DIGEST: NamespaceDigest = NamespaceDigest([3; 16]);

/// A pool file, removed at the end.
struct File(PathBuf);

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn open(file: &File) -> (Pool, Dram) {
    let bytes = SEGMENTS * SEGMENT;
    let path = Some(file.0.clone());
    let config = pool::Config { bytes, segment_bytes: SEGMENT, path, hugepages: false, epoch: 1 };
    let pool = pool::tests::created(&config);
    let config = dram::Config { pool_bytes: bytes, segment_bytes: SEGMENT, lease_ttl_ms: 1 };
    let mut dram = Dram::unopened(config, 10).expect("sizes");
    dram.raise_generation(pool.first_generation());
    (pool, dram)
}

fn hash(number: u64) -> BlockHash {
    BlockHash::from_words([number, 1, 2, 3])
}

/// Carries out a filling as the sidecar does.
fn fill(pool: &Pool, dram: &mut Dram, number: u64) -> Option<SlotRef> {
    let key = BlockKey { namespace: 7, group: 0, hash: hash(number) };
    let slot = dram.begin_fill(key, BLOCK, Whose::default()).ok();
    dram.drain_evicted().for_each(|slot| assert!(pool.free(slot)));
    dram.drain_assigned().for_each(|new| assert!(pool.write_segment_header(new.segment, new.block_bytes)));
    let slot = slot?;
    assert!(pool.fill(slot, DIGEST, &key) && pool.commit(slot, 0) && dram.commit(slot));
    let checksum = pool.sum(slot).expect("it is there");
    assert!(pool.set_checksum(slot, checksum));
    Some(slot)
}

/// Adopts and verifies all slots, and returns the number of whole blocks.
fn adopt(pool: &Pool, dram: &mut Dram) -> u64 {
    let (mut opener, mut blocks) = (Opener::default(), 0);
    while let Some(opened) = opener.next(pool) {
        let Opened::Used { segment, block_bytes, first, remains } = opened else {
            let Opened::Empty { segment } = opened else { unreachable!("the other kind") };
            dram.open_empty(segment);
            continue;
        };
        if first == 0 && !dram.open_used(segment, block_bytes, 0) {
            continue;
        }
        for (index, remains) in (first..).zip(&remains) {
            blocks += u64::from(matches!(remains, Remains::Block { .. }));
            let ours = matches!(remains, Remains::Block { namespace, .. } if *namespace == DIGEST);
            dram.adopt(segment, index, remains, Some(if ours { 7 } else { 8 }), None);
        }
    }
    assert_eq!(opener.segments(), SEGMENTS);
    while let Some((_, slot)) = dram.begin_next_verification() {
        dram.end_verification(slot, pool.verify(slot));
    }
    blocks
}

/// A value written anywhere by damage or malice.
fn value() -> impl Strategy<Value = u64> {
    prop_oneof![0..4u64, Just(BLOCK), Just(u64::MAX), any::<u64>(), (0..1u64 << 42)]
}

proptest! {
    // Every case reads its filled blocks twice.
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn a_damaged_file_is_taken_over_as_far_as_it_is_whole(
        name in any::<u64>(),
        changes in prop::collection::vec((0..SEGMENTS, 0..(64 + SLOTS * SLOT_HEADER_BYTES) / 8, value()), 0..12),
    ) {
        let file = File(format!("/dev/shm/pillion-test-{}-{name:x}", std::process::id()).into());
        let (pool, mut dram) = open(&file);
        adopt(&pool, &mut dram);
        let slots: Vec<SlotRef> = (0..SEGMENTS * SLOTS).map(|n| fill(&pool, &mut dram, n).expect("room")).collect();
        let mut touched = std::collections::BTreeSet::new();
        for (segment, word, value) in &changes {
            let at = segment_offset(SEGMENT, *segment).expect("small") + word * 8;
            pool.region().word64(at as usize).store(*value, Ordering::Relaxed);
            // Words of the segment's header belong to all of its slots.
            let slot = word.checked_sub(8).map(|word| word / (SLOT_HEADER_BYTES / 8));
            touched.extend((0..SLOTS).filter(|one| slot.is_none_or(|slot| slot == *one)).map(|one| segment * SLOTS + one));
        }
        drop(pool);

        let (pool, mut dram) = open(&file);
        let blocks = adopt(&pool, &mut dram);
        prop_assert_eq!(pool.len(), pool_bytes(SEGMENT, SEGMENTS).expect("small"));
        let stats = dram.stats();
        prop_assert!(stats.blocks <= blocks);
        let found: usize = (0..SEGMENTS * SLOTS).map(|number| dram.probe(7, &[hash(number)])).sum();
        prop_assert_eq!(found as u64, stats.blocks, "a header that was changed matches no bytes");
        // A key present in a damaged slot, too, may not be found.
        let doubled = |number: &u64| changes.iter().any(|(_, _, value)| value == number);
        for (number, slot) in (0..).zip(&slots).filter(|(number, _)| !touched.contains(number) && !doubled(number)) {
            prop_assert_eq!(dram.probe(7, &[hash(number)]), 1, "block {} at {:?}", number, slot);
        }
        dram.expire(1_000);
        let filled: Vec<Option<SlotRef>> = (100..120).map(|number| fill(&pool, &mut dram, number)).collect();
        prop_assert!(filled.iter().flatten().all(|slot| slot.generation >= pool.first_generation()));
    }
}
