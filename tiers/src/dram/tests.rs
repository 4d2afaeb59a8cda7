mod hinted;
mod holders;
mod on_device;
mod overflow;
mod quotas;
mod ranks;
mod removal;
mod watch;

use std::collections::{BTreeMap, HashMap, HashSet};

use proptest::prelude::*;
use shm_protocol::key::{BlockHash, NamespaceDigest};
use shm_protocol::pool::SlotRemains;

use super::*;

const SEGMENT: u64 = 2 << 20;
const TTL_MS: u64 = 100;
const NOBODY: HolderId = HolderId::NOBODY;

fn hash(number: u64) -> BlockHash {
    BlockHash::from_words([number, 0, 0, number])
}

fn key(number: u64) -> BlockKey {
    BlockKey { namespace: 7, group: 0, hash: hash(number) }
}

fn tier(segments: u64) -> Dram {
    Dram::new(DramConfig { pool_bytes: segments * SEGMENT, segment_bytes: SEGMENT, lease_ttl_ms: TTL_MS })
        .expect("sizes")
}

fn begin(dram: &mut Dram, number: u64, block_bytes: u64) -> Result<SlotRef, FillError> {
    dram.begin_fill(key(number), block_bytes, BlockAccount::default())
}

/// Returns generations of the slots freed since the last call.
fn freed(dram: &mut Dram) -> Vec<u64> {
    dram.drain_evicted().map(|slot| slot.generation).collect()
}

fn fill(dram: &mut Dram, number: u64, block_bytes: u64) -> SlotRef {
    let slot = begin(dram, number, block_bytes).expect("room");
    assert!(dram.commit(slot));
    slot
}

fn fill_all(dram: &mut Dram, numbers: std::ops::Range<u64>, block_bytes: u64) {
    for number in numbers {
        fill(dram, number, block_bytes);
    }
}

fn hashes(range: std::ops::Range<u64>) -> Vec<BlockHash> {
    range.map(hash).collect()
}

// === against a model ===

#[derive(Clone, Debug)]
enum Step {
    Fill { key: u64, size: usize },
    Commit(usize),
    Abandon(usize),
    Probe { first: u64, count: u64 },
    Grant { owner: u64, workers: u32, first: u64, count: u64 },
    Extend { lease: usize, owner: u64, first: u64, count: u64 },
    Renew { lease: usize, owner: u64 },
    Promise { lease: usize, owner: u64 },
    Truncate { lease: usize, owner: u64, first: usize, count: usize },
    Consume { lease: usize, owner: u64, worker: u32 },
    Release { lease: usize, owner: u64 },
    ReleaseOwner(u64),
    Expire { after_ms: u64 },
    Hold(u64),
    Unhold(usize),
    Remove(u64),
}

/// 3, 2 and 1 slots to a segment.
const SIZES: [u64; 3] = [600_000, 900_001, 2_000_000];
const KEYS: u64 = 24;

fn step() -> impl Strategy<Value = Step> {
    let (keys, owner, lease) = (0..KEYS, 0..2u64, 0..8usize);
    let run = (0..KEYS, 1..6u64);
    prop_oneof![
        8 => (keys, 0..10usize).prop_map(|(key, size)| Step::Fill { key, size: size.saturating_sub(7) }),
        8 => (0..4usize).prop_map(Step::Commit),
        1 => (0..4usize).prop_map(Step::Abandon),
        2 => run.clone().prop_map(|(first, count)| Step::Probe { first, count }),
        4 => (owner.clone(), 1..4u32, run.clone()).prop_map(|(owner, workers, (first, count))| Step::Grant { owner, workers, first, count }),
        1 => (lease.clone(), owner.clone(), run).prop_map(|(lease, owner, (first, count))| Step::Extend { lease, owner, first, count }),
        1 => (lease.clone(), owner.clone()).prop_map(|(lease, owner)| Step::Renew { lease, owner }),
        1 => (lease.clone(), owner.clone()).prop_map(|(lease, owner)| Step::Promise { lease, owner }),
        1 => (lease.clone(), owner.clone(), 0..4usize, 0..4usize)
            .prop_map(|(lease, owner, first, count)| Step::Truncate { lease, owner, first, count }),
        4 => (lease.clone(), owner.clone(), 0..4u32).prop_map(|(lease, owner, worker)| Step::Consume { lease, owner, worker }),
        2 => (lease, owner.clone()).prop_map(|(lease, owner)| Step::Release { lease, owner }),
        1 => owner.prop_map(Step::ReleaseOwner),
        2 => (0..80u64).prop_map(|after_ms| Step::Expire { after_ms }),
        2 => (0..KEYS).prop_map(Step::Hold),
        2 => (0..4usize).prop_map(Step::Unhold),
        1 => (0..KEYS).prop_map(Step::Remove),
    ]
}

#[derive(Clone, Debug)]
struct Block {
    slot: SlotRef,
    bytes: u64,
    committed: bool,
}

#[derive(Clone, Debug)]
struct Held {
    id: LeaseId,
    owner: u64,
    awaited: HashSet<u32>,
    workers: u32,
    promised: bool,
    deadline_ms: u64,
    /// The reason why it is no longer valid.
    over: Option<LeaseError>,
    slots: Vec<SlotRef>,
}

struct Model {
    dram: Dram,
    blocks: HashMap<u64, Block>,
    leases: Vec<Held>,
    holds: Vec<SlotRef>,
    /// Removed blocks whose bytes a lease or hold keeps in place.
    removed: Vec<Block>,
    /// Slots of removed blocks not yet reported as free.
    unreported: HashSet<SlotRef>,
    segments: BTreeMap<u64, u64>,
    generation: u64,
    now_ms: u64,
    evicted: u64,
}

impl Model {
    fn new() -> Self {
        let (blocks, leases, segments) = (HashMap::new(), Vec::new(), BTreeMap::new());
        let (holds, removed, unreported) = Default::default();
        let dram = tier(3);
        Self {
            dram,
            blocks,
            leases,
            holds,
            removed,
            unreported,
            segments,
            generation: 0,
            now_ms: 0,
            evicted: 0,
        }
    }

    /// Returns the blocks with a slot.
    fn placed(&self) -> impl Iterator<Item = &Block> {
        self.blocks.values().chain(&self.removed)
    }

    /// Returns the slots kept in place by a lease or hold.
    fn leased(&self) -> HashSet<SlotRef> {
        let live = self.leases.iter().filter(|lease| lease.over.is_none());
        live.flat_map(|lease| &lease.slots).chain(&self.holds).copied().collect()
    }

    fn run(&self, first: u64, count: u64) -> Vec<SlotRef> {
        let committed = |number: u64| self.blocks.get(&number).filter(|block| block.committed);
        (first..first + count).map_while(|number| committed(number).map(|block| block.slot)).collect()
    }

    /// Returns the expected answer of a lease call, before any error particular to the call.
    fn answer(&self, lease: usize, owner: u64) -> Option<(usize, Result<(), LeaseError>)> {
        let at = lease.checked_rem(self.leases.len())?;
        let held = &self.leases[at];
        Some((
            at,
            match held.over {
                Some(LeaseError::Unknown) => Err(LeaseError::Unknown),
                _ if held.owner != owner => Err(LeaseError::Foreign),
                Some(error) => Err(error),
                None => Ok(()),
            },
        ))
    }

    fn expire(&mut self) -> usize {
        let now_ms = self.now_ms;
        let due = |lease: &&mut Held| lease.over.is_none() && !lease.promised && lease.deadline_ms <= now_ms;
        self.leases.iter_mut().filter(due).map(|lease| lease.over = Some(LeaseError::Expired)).count()
    }

    fn filling(&self, nth: usize) -> Option<u64> {
        let mut filling: Vec<u64> =
            self.blocks.iter().filter(|(_, block)| !block.committed).map(|(number, _)| *number).collect();
        filling.sort_unstable();
        (!filling.is_empty()).then(|| filling[nth % filling.len()])
    }

    fn fill(&mut self, number: u64, bytes: u64) {
        let leased = self.leased();
        let answer = self.dram.begin_fill(key(number), bytes, BlockAccount::default());
        let mut evicted: HashSet<SlotRef> = self.dram.drain_evicted().collect();
        assert!(evicted.is_disjoint(&leased), "a leased block was evicted");
        evicted.retain(|slot| !self.unreported.remove(slot));
        let before = self.blocks.len();
        self.blocks.retain(|_, block| !(block.committed && evicted.contains(&block.slot)));
        assert_eq!(before - self.blocks.len(), evicted.len(), "what is evicted was committed");
        self.evicted += evicted.len() as u64;
        for assigned in self.dram.drain_assigned() {
            self.segments.insert(assigned.segment, assigned.block_bytes);
        }
        match (answer, self.blocks.get(&number).map(|block| block.committed)) {
            (Err(FillError::Present), Some(true)) | (Err(FillError::Filling), Some(false)) => {}
            (Err(FillError::NoSpace), None) => self.check_no_space(bytes, &leased),
            (Ok(slot), None) => {
                assert!(slot.generation > self.generation, "generations grow");
                self.generation = slot.generation;
                self.blocks.insert(number, Block { slot, bytes, committed: false });
            }
            other => panic!("{other:?}"),
        }
    }

    fn segment(slot: SlotRef) -> u64 {
        (slot.offset - pool::SEGMENT_ALIGN) / SEGMENT
    }

    fn check_no_space(&self, bytes: u64, leased: &HashSet<SlotRef>) {
        assert_eq!(self.segments.len(), 3, "a segment was never used");
        for (segment, held_bytes) in &self.segments {
            let here = self.placed().filter(|block| Self::segment(block.slot) == *segment);
            let held = here.filter(|block| !block.committed || leased.contains(&block.slot)).count();
            let least = if *held_bytes == bytes {
                pool::slot_count(SEGMENT, bytes).expect("fits") as usize
            } else {
                1
            };
            assert!(held >= least, "segment {segment} had room");
        }
    }

    fn apply(&mut self, step: Step) {
        match step {
            Step::Fill { key, size } => self.fill(key, SIZES[size]),
            Step::Commit(nth) | Step::Abandon(nth) => self.end_fill(nth, matches!(step, Step::Commit(_))),
            Step::Probe { first, count } => {
                let wanted = self.run(first, count).len();
                assert_eq!(self.dram.probe(7, &hashes(first..first + count)), wanted);
                assert_eq!(self.dram.probe(8, &hashes(first..first + count)), 0, "another namespace");
            }
            Step::Grant { owner, workers, first, count } => self.grant(owner, workers, first, count),
            Step::ReleaseOwner(owner) => {
                let owned =
                    self.leases.iter_mut().filter(|lease| lease.owner == owner && lease.over.is_none());
                for lease in owned {
                    lease.over = Some(LeaseError::Unknown);
                    assert_eq!(self.dram.release(lease.id, owner), Ok(()));
                }
            }
            Step::Expire { after_ms } => {
                self.now_ms += after_ms;
                assert_eq!(self.expire(), self.dram.expire(self.now_ms));
            }
            Step::Hold(number) => {
                let wanted = self.run(number, 1).first().copied();
                assert_eq!(self.dram.hold(&key(number), NOBODY), wanted);
                self.holds.extend(wanted);
            }
            Step::Unhold(nth) if nth < self.holds.len() => {
                self.dram.unhold(self.holds.swap_remove(nth), NOBODY)
            }
            Step::Unhold(_) => {}
            Step::Remove(number) => self.remove(number),
            other => self.apply_to_lease(other),
        }
        let leased = self.leased();
        self.removed.retain(|block| leased.contains(&block.slot));
    }

    fn remove(&mut self, number: u64) {
        let known = self.blocks.get(&number).filter(|block| block.committed).cloned();
        assert_eq!(self.dram.remove(&key(number)), known.is_some());
        self.dram.end_removal();
        let Some(block) = known else { return };
        self.blocks.remove(&number);
        self.unreported.insert(block.slot);
        let loadable = |lease: &&mut Held| lease.over.is_none() && !lease.promised;
        let meant = self.leases.iter_mut().filter(|lease| lease.slots.contains(&block.slot));
        meant.filter(loadable).for_each(|lease| lease.over = Some(LeaseError::Unknown));
        self.removed.push(block);
    }

    fn end_fill(&mut self, nth: usize, commit: bool) {
        let Some(number) = self.filling(nth) else { return };
        let slot = self.blocks[&number].slot;
        let stale = SlotRef { generation: slot.generation - 1, ..slot };
        assert!(!self.dram.commit(stale) && !self.dram.abandon(stale), "another generation");
        if commit {
            assert!(self.dram.commit(slot));
            self.blocks.get_mut(&number).expect("filling").committed = true;
        } else {
            assert!(self.dram.abandon(slot));
            self.blocks.remove(&number);
        }
        assert!(!self.dram.commit(slot) && !self.dram.abandon(slot), "ended already");
    }

    fn grant(&mut self, owner: u64, workers: u32, first: u64, count: u64) {
        let slots = self.run(first, count);
        let mut out = Vec::new();
        let lease =
            self.dram.grant(owner, NOBODY, workers, 7, &hashes(first..first + count), self.now_ms, &mut out);
        assert_eq!(out, slots);
        assert_eq!(lease.is_some(), !slots.is_empty());
        let deadline_ms = self.now_ms + TTL_MS;
        let held = |id| Held {
            id,
            owner,
            awaited: (0..workers).collect(),
            workers,
            promised: false,
            deadline_ms,
            over: None,
            slots,
        };
        self.leases.extend(lease.map(held));
    }

    fn apply_to_lease(&mut self, step: Step) {
        let now_ms = self.now_ms;
        match step {
            Step::Extend { lease, owner, first, count } => {
                let Some((at, mut wanted)) = self.answer(lease, owner) else { return };
                wanted = wanted.and_then(|()| self.renewed(at));
                if wanted.is_ok() && self.leases[at].awaited.len() < self.leases[at].workers as usize {
                    wanted = Err(LeaseError::Consumed);
                }
                let slots = if wanted.is_ok() { self.run(first, count) } else { Vec::new() };
                let mut out = Vec::new();
                let run = hashes(first..first + count);
                let got = self.dram.extend(self.leases[at].id, owner, 7, &run, now_ms, &mut out);
                assert_eq!((got, &out), (wanted.map(|()| slots.len()), &slots));
                self.leases[at].slots.extend(slots);
            }
            Step::Renew { lease, owner } => {
                let Some((at, wanted)) = self.answer(lease, owner) else { return };
                let wanted = wanted.and_then(|()| self.renewed(at));
                assert_eq!(self.dram.renew(self.leases[at].id, owner, now_ms), wanted);
            }
            Step::Promise { lease, owner } => {
                let Some((at, wanted)) = self.answer(lease, owner) else { return };
                assert_eq!(self.dram.promise(self.leases[at].id, owner), wanted);
                self.leases[at].promised |= wanted.is_ok();
            }
            Step::Truncate { lease, owner, first, count } => {
                let Some((at, wanted)) = self.answer(lease, owner) else { return };
                assert_eq!(self.dram.truncate(self.leases[at].id, owner, first, count), wanted);
                if wanted.is_ok() {
                    let kept = self.leases[at].slots.iter().skip(first).take(count).copied().collect();
                    self.leases[at].slots = kept;
                }
            }
            Step::Consume { lease, owner, worker } => self.consume(lease, owner, worker),
            Step::Release { lease, owner } => {
                let Some((at, wanted)) = self.answer(lease, owner) else { return };
                assert_eq!(self.dram.release(self.leases[at].id, owner), wanted);
                if wanted.is_ok() {
                    self.leases[at].over = Some(LeaseError::Unknown);
                }
            }
            other => unreachable!("{other:?}"),
        }
    }

    /// A renewal in the model: a due lease expires, with all other due ones.
    fn renewed(&mut self, at: usize) -> Result<(), LeaseError> {
        let lease = &mut self.leases[at];
        if lease.promised || lease.deadline_ms > self.now_ms {
            lease.deadline_ms = self.now_ms + TTL_MS;
            return Ok(());
        }
        self.expire();
        Err(LeaseError::Expired)
    }

    fn consume(&mut self, lease: usize, owner: u64, worker: u32) {
        let Some((at, mut wanted)) = self.answer(lease, owner) else { return };
        let held = &mut self.leases[at];
        if wanted.is_ok() && worker >= held.workers {
            wanted = Err(LeaseError::Foreign);
        } else if wanted.is_ok() && !held.awaited.remove(&worker) {
            wanted = Err(LeaseError::Consumed);
        }
        let ended = held.awaited.is_empty();
        assert_eq!(self.dram.consume(held.id, owner, worker), wanted.map(|()| ended));
        if wanted.is_ok() && ended {
            held.over = Some(LeaseError::Consumed);
        }
    }

    fn check(&self) {
        let stats = self.dram.stats();
        let committed = self.blocks.values().filter(|block| block.committed);
        assert_eq!(stats.blocks, committed.count() as u64);
        assert_eq!(stats.filling, self.blocks.values().filter(|block| !block.committed).count() as u64);
        assert_eq!(stats.bytes_used, self.placed().map(|block| block.bytes).sum::<u64>());
        let leased = self.leased();
        let bytes_leased =
            self.placed().filter(|block| leased.contains(&block.slot)).map(|block| block.bytes);
        assert_eq!(stats.bytes_leased, bytes_leased.sum::<u64>());
        assert_eq!(stats.evicted_blocks_total, self.evicted);
        assert_eq!(stats.leases, self.leases.iter().filter(|lease| lease.over.is_none()).count() as u64);
        for number in 0..KEYS {
            let wanted = self.blocks.get(&number).filter(|block| block.committed).map(|block| block.slot);
            let found = self.dram.find_committed(7, 0, &hash(number)).map(|id| self.dram.slab.slot_ref(id));
            assert_eq!(found, wanted, "key {number}");
        }
        self.check_leased();
        self.check_disjoint();
    }

    fn check_leased(&self) {
        let live: HashSet<SlotRef> = self.placed().map(|block| block.slot).collect();
        for lease in self.leases.iter().filter(|lease| lease.over.is_none()) {
            let slots: Vec<SlotRef> = self.dram.slots(lease.id, lease.owner).expect("live").collect();
            assert_eq!(slots, lease.slots);
            assert!(slots.iter().all(|slot| live.contains(slot)), "a leased block is gone");
        }
        assert!(self.holds.iter().all(|slot| live.contains(slot)), "a held block is gone");
    }

    fn check_disjoint(&self) {
        let mut ranges: Vec<_> =
            self.placed().map(|block| (block.slot.offset, block.slot.offset + block.bytes)).collect();
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "two blocks share bytes");
        for block in self.placed() {
            let segment = Self::segment(block.slot);
            assert_eq!(
                self.segments.get(&segment),
                Some(&block.bytes),
                "a block lies in a segment of its size"
            );
            assert!(block.slot.offset + block.bytes <= pool::SEGMENT_ALIGN + (segment + 1) * SEGMENT);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]
    #[test]
    fn a_tier_does_what_its_model_does(steps in prop::collection::vec(step(), 1..120)) {
        let mut model = Model::new();
        for step in steps {
            model.apply(step);
            model.check();
        }
    }
}

// === single properties ===

#[test]
fn sizes_that_fit_no_pool_are_refused_with_the_remedy() {
    let make = |pool_bytes, segment_bytes| {
        Dram::new(DramConfig { pool_bytes, segment_bytes, lease_ttl_ms: 1 })
            .map(|_| ())
            .expect_err("refused")
            .to_string()
    };
    assert!(make(SEGMENT - 1, SEGMENT).contains("the least is 2097152"));
    assert!(make(SEGMENT, SEGMENT - 1).contains("power of two"));
    assert!(make(pool::POOL_BYTES_MAX + 1, SEGMENT).contains("lower --dram"));
    assert_eq!(count_segments(pool::POOL_BYTES_MAX, 1 << 30).expect("fits"), 2047);
    for pool_bytes in [0, 1 << 20, 1 << 30, 100 << 30, u64::MAX] {
        assert!(Geometry::new(segment_bytes_for(pool_bytes), 1).is_ok());
    }
    for block_bytes in [1, 3 << 20, 4 << 20, 60 << 20, 200 << 20] {
        let holds = |pool_bytes| Geometry::new(segment_bytes_for(pool_bytes), block_bytes).is_ok();
        let least = pool_bytes_for(block_bytes).expect("some pool has a segment for it");
        assert!(holds(least) && (least == 4 << 20 || !holds(least - 1)), "{block_bytes}: {least}");
    }
    assert_eq!(pool_bytes_for(256 << 20), None);
}

#[test]
fn blocks_that_fit_no_segment_are_refused() {
    let mut dram = tier(1);
    assert_eq!(begin(&mut dram, 1, 0), Err(FillError::Empty));
    let max = SEGMENT - 4096;
    assert_eq!(begin(&mut dram, 1, max + 1), Err(FillError::TooLarge { max }));
    assert_eq!(begin(&mut dram, 1, u64::MAX), Err(FillError::TooLarge { max }));
    assert!(begin(&mut dram, 1, max).is_ok());
    assert_eq!(begin(&mut dram, 2, max), Err(FillError::NoSpace));
}

#[test]
fn a_new_block_size_takes_a_whole_segment_from_the_largest_class() {
    let mut dram = tier(3);
    fill_all(&mut dram, 0..9, 600_000);
    let mut out = Vec::new();
    // Leases in two of three segments: only the third may go.
    let in_segment = |segment: u64| {
        (0..9).find(|number| {
            let id = dram.find_committed(7, 0, &hash(*number)).expect("kept");
            dram.slab.entries.segment(id) as u64 == segment
        })
    };
    let (first, third) = (in_segment(0).expect("some"), in_segment(2).expect("some"));
    for number in [first, third] {
        dram.grant(1, NOBODY, 1, 7, &hashes(number..number + 1), 0, &mut out).expect("a hit");
    }
    dram.drain_assigned().for_each(drop);
    let slot = fill(&mut dram, 100, 2_000_000);
    assert_eq!(Model::segment(slot), 1);
    assert_eq!(dram.drain_assigned().collect::<Vec<_>>(), [Assigned { segment: 1, block_bytes: 2_000_000 }]);
    assert_eq!(dram.drain_evicted().count(), 3);
    // Its own only slot goes before another segment's slot; with it leased and the others too, there is no
    // room.
    dram.grant(1, NOBODY, 1, 7, &hashes(100..101), 0, &mut out).expect("a hit");
    assert_eq!(begin(&mut dram, 101, 2_000_000), Err(FillError::NoSpace));
}

#[test]
fn an_expired_lease_says_so_until_its_table_entry_serves_another() {
    let mut dram = tier(1);
    fill(&mut dram, 1, 4096);
    let mut out = Vec::new();
    let mut grant = |dram: &mut Dram, now_ms| {
        dram.grant(1, NOBODY, 1, 7, &hashes(1..2), now_ms, &mut out).expect("a hit")
    };
    let old = grant(&mut dram, 0);
    assert_eq!(dram.expire(TTL_MS - 1), 0);
    assert_eq!(dram.expire(TTL_MS), 1);
    assert_eq!(dram.promise(old, 1), Err(LeaseError::Expired));
    assert_eq!(dram.promise(old, 2), Err(LeaseError::Foreign));
    for _ in 0..1024 {
        let lease = grant(&mut dram, TTL_MS);
        assert_eq!(dram.promise(old, 1), Err(LeaseError::Expired));
        dram.release(lease, 1).expect("live");
    }
    grant(&mut dram, TTL_MS);
    assert_eq!(dram.promise(old, 1), Err(LeaseError::Unknown));
    assert_eq!(dram.promise(LeaseId(0), 1), Err(LeaseError::Unknown));
    assert_eq!(dram.promise(LeaseId(u64::MAX), 1), Err(LeaseError::Unknown));
}

#[test]
fn long_runs_are_found_whole_and_end_at_the_first_miss() {
    let mut dram = tier(8);
    fill_all(&mut dram, 0..2000, 4096);
    for count in [0, 1, 31, 32, 33, 64, 1999, 2000] {
        assert_eq!(dram.probe(7, &hashes(0..count)), count as usize);
    }
    for miss in [0, 1, 31, 32, 33, 500] {
        let mut run = hashes(0..1000);
        run[miss] = hash(99_999);
        assert_eq!(dram.probe(7, &run), miss);
        let mut found = Vec::new();
        dram.lookup(7, &run, &mut found);
        assert_eq!(found.len(), 1000);
        assert!(found.iter().enumerate().all(|(at, found)| *found == (at != miss)));
    }
}

#[test]
fn generations_begin_where_the_pool_says() {
    let mut dram = tier(1);
    dram.raise_generation(1 << 40);
    dram.raise_generation(5);
    assert_eq!(fill(&mut dram, 1, 4096).generation, 1 << 40);
}

// === adoption ===

const HOLD: u64 = 50;

fn whole(number: u64, generation: u64) -> SlotRemains {
    SlotRemains::Block { generation, namespace: NamespaceDigest([1; 16]), group: 0, hash: hash(number) }
}

/// A tier of two segments, the first with the three slots of an earlier life.
fn adopted(remains: [SlotRemains; 3]) -> Dram {
    let config = DramConfig { pool_bytes: 2 * SEGMENT, segment_bytes: SEGMENT, lease_ttl_ms: TTL_MS };
    let mut dram = Dram::unopened(config, HOLD).expect("sizes");
    assert_eq!(begin(&mut dram, 1, SIZES[0]), Err(FillError::NoSpace), "nothing is in service");
    assert!(dram.open_used(0, SIZES[0], 1000));
    assert_eq!(begin(&mut dram, 1, SIZES[0]), Err(FillError::NoSpace), "no slot was looked at");
    for (index, remains) in (0..).zip(&remains) {
        assert!(dram.adopt(0, index, remains, Some(7), None));
    }
    assert!(
        !dram.adopt(0, 3, &SlotRemains::Free, None, None)
            && !dram.adopt(1, 0, &SlotRemains::Free, None, None)
    );
    dram
}

/// Verifies every adopted block as whole.
fn verify_all(dram: &mut Dram) {
    while let Some((_, slot)) = dram.begin_next_verification() {
        dram.end_verification(slot, true);
    }
    assert_eq!(dram.stats().unverified_blocks, 0);
}

#[test]
fn a_block_of_an_earlier_life_is_found_once_it_is_verified() {
    let mut dram = adopted([whole(1, 5), whole(2, 6), whole(3, 7)]);
    dram.watch();
    assert_eq!((dram.probe(7, &hashes(1..4)), dram.stats().unverified_blocks), (0, 3));
    assert_eq!(begin(&mut dram, 1, SIZES[0]), Err(FillError::Filling), "it is not saved again");
    assert!(dram.is_adopted(&key(2)) && !dram.is_adopted(&key(4)));
    let asked = dram.begin_verification(&key(2)).expect("adopted");
    assert!(!dram.is_adopted(&key(2)) && dram.begin_verification(&key(2)).is_none(), "begun once");
    let (first, slot) = dram.begin_next_verification().expect("two are left");
    assert_eq!(first, key(1), "in their order");
    dram.end_verification(slot, true);
    dram.end_verification(asked, false);
    assert_eq!(dram.drain_changes().collect::<Vec<_>>(), [(key(1), true)]);
    assert_eq!((dram.probe(7, &hashes(1..2)), dram.probe(7, &hashes(2..3))), (1, 0));
    let stats = dram.stats();
    assert_eq!((stats.blocks, stats.adopted_blocks_total, stats.unverified_blocks), (1, 1, 1));
    assert_eq!(stats.bytes_used, 2 * SIZES[0]);
    // An engine of the earlier life may still read the lost block.
    dram.expire(1000 + HOLD - 1);
    assert_eq!((dram.drain_evicted().count(), begin(&mut dram, 2, SIZES[0])), (0, Err(FillError::NoSpace)));
    dram.expire(1000 + HOLD);
    assert_eq!(freed(&mut dram), [6]);
    assert!(begin(&mut dram, 2, SIZES[0]).is_ok());
    // An unverified block keeps its slot; after the hold a changed block's slot is free at once.
    assert!(begin(&mut dram, 8, SIZES[0]).is_ok(), "the verified one goes");
    assert_eq!(freed(&mut dram), [5]);
    assert_eq!(begin(&mut dram, 9, SIZES[0]), Err(FillError::NoSpace));
    let (_, slot) = dram.begin_next_verification().expect("the last");
    dram.end_verification(slot, false);
    assert_eq!(freed(&mut dram), [7]);
    assert!(dram.begin_next_verification().is_none() && begin(&mut dram, 9, SIZES[0]).is_ok());
}

#[test]
fn blocks_of_an_earlier_life_are_found_and_stay_while_the_hold_lasts() {
    let mut dram = adopted([whole(1, 5), whole(2, 6), whole(3, 7)]);
    verify_all(&mut dram);
    assert_eq!(dram.probe(7, &hashes(1..4)), 3);
    assert_eq!((dram.stats().blocks, dram.stats().adopted_blocks_total), (3, 3));
    let mut slots = Vec::new();
    let lease = dram.grant(1, NOBODY, 1, 7, &hashes(1..2), 1000, &mut slots).expect("a hit");
    assert_eq!(slots[0].generation, 5);
    assert_eq!(dram.release(lease, 1), Ok(()));
    dram.expire(1000 + HOLD - 1);
    assert_eq!(begin(&mut dram, 9, SIZES[0]), Err(FillError::NoSpace), "an engine may read them");
    assert_eq!(begin(&mut dram, 9, SIZES[1]), Err(FillError::NoSpace), "nor is the segment given away");
    dram.expire(1000 + HOLD);
    let slot = begin(&mut dram, 9, SIZES[0]).expect("one is evicted");
    assert_eq!(freed(&mut dram), [7], "the deepest");
    assert!(dram.commit(slot));
}

#[test]
fn slots_that_held_nothing_whole_are_free_after_the_hold() {
    let mut dram = adopted([SlotRemains::Free, SlotRemains::Debris { generation: 4 }, whole(3, 7)]);
    let slot = begin(&mut dram, 9, SIZES[0]).expect("the free one");
    assert_eq!(begin(&mut dram, 10, SIZES[0]), Err(FillError::NoSpace), "a copy may be on its way there");
    assert!(dram.commit(slot));
    dram.expire(1000 + HOLD);
    assert_eq!(freed(&mut dram), [4]);
    assert!(begin(&mut dram, 10, SIZES[0]).is_ok());
    assert_eq!((dram.stats().adoption_dropped_total, dram.stats().evicted_blocks_total), (1, 0));
}

#[test]
fn what_the_hold_kept_is_freed_in_parts_and_keeps_its_segment_until_then() {
    let (small, segments) = (256, 4);
    let config = DramConfig { pool_bytes: segments * SEGMENT, segment_bytes: SEGMENT, lease_ttl_ms: TTL_MS };
    let mut dram = Dram::unopened(config, HOLD).expect("sizes");
    let slots = pool::slot_count(SEGMENT, small).expect("fits");
    for segment in 0..segments {
        assert!(dram.open_used(segment, small, 1000));
        for index in 0..slots {
            let generation = segment * 10_000 + u64::from(index) + 1;
            assert!(dram.adopt(segment, index, &SlotRemains::Debris { generation }, None, None));
        }
    }
    let all = segments as usize * slots as usize;
    dram.expire(1000 + HOLD);
    assert_eq!(dram.drain_evicted().count(), 8192);
    // Three blocks to a segment.
    let mut filled = 0..100;
    assert_eq!(filled.find(|number| begin(&mut dram, *number, SIZES[0]).is_err()), Some(6), "two are empty");
    dram.expire(1000 + HOLD);
    assert_eq!(dram.drain_evicted().count(), all - 8192);
    assert_eq!(filled.find(|number| begin(&mut dram, *number, SIZES[0]).is_err()), Some(13), "all are");
}

#[test]
fn a_key_is_kept_once_whoever_wrote_it_twice() {
    let mut dram = adopted([whole(1, 5), whole(1, 6), whole(1, 7)]);
    verify_all(&mut dram);
    assert_eq!((dram.stats().blocks, dram.stats().adoption_dropped_total), (1, 2));
    // Saved again before its segment came into service.
    dram.open_empty(1);
    let slot = begin(&mut dram, 2, SIZES[0]).expect("a new segment");
    assert!(dram.commit(slot));
    assert_eq!(dram.probe(7, &hashes(1..3)), 2);
}

#[test]
fn what_cannot_be_numbered_or_classed_is_not_kept() {
    let config = DramConfig { pool_bytes: SEGMENT, segment_bytes: SEGMENT, lease_ttl_ms: TTL_MS };
    let mut dram = Dram::unopened(config, HOLD).expect("sizes");
    assert!(!dram.open_used(0, 0, 0) && !dram.open_used(0, SEGMENT, 0));
    assert!(dram.open_used(0, SIZES[0], 0));
    assert!(dram.adopt(0, 0, &whole(1, 5), None, None), "its namespace has no number");
    assert_eq!((dram.stats().blocks, dram.stats().adoption_dropped_total), (0, 1));
}

// === holds ===

#[test]
fn a_held_block_is_not_evicted_and_the_hold_is_no_access() {
    let mut dram = tier(1);
    let slots = u64::from(pool::slot_count(SEGMENT, 600_000).expect("fits"));
    fill_all(&mut dram, 0..slots, 600_000);
    let held = dram.hold(&key(0), NOBODY).expect("kept");
    assert_eq!(dram.hold(&key(0), NOBODY), Some(held), "as often as one likes");
    assert_eq!(dram.hold(&key(99), NOBODY), None);
    fill_all(&mut dram, slots..3 * slots, 600_000);
    dram.unhold(held, NOBODY);
    fill_all(&mut dram, 3 * slots..4 * slots, 600_000);
    assert_eq!(dram.stats().bytes_leased, 600_000, "one hold is left");
    dram.unhold(held, NOBODY);
    assert_eq!(dram.stats().bytes_leased, 0);
    // An access would keep it.
    fill_all(&mut dram, 4 * slots..6 * slots, 600_000);
    assert_eq!(dram.probe(7, &hashes(0..1)), 0);
}

#[test]
fn a_held_parent_comes_back_to_the_tail_and_goes_after_its_child() {
    let mut dram = tier(1);
    let slots = u64::from(pool::slot_count(SEGMENT, 600_000).expect("fits"));
    fill(&mut dram, 0, 600_000);
    let held = dram.hold(&key(0), NOBODY).expect("kept");
    let child = dram.begin_fill(key(1), 600_000, BlockAccount::default()).expect("room");
    assert!(dram.commit_behind(child, &key(0)));
    let child = dram.hold(&key(1), NOBODY).expect("kept");
    fill_all(&mut dram, 100..100 + 2 * slots, 600_000);
    dram.unhold(child, NOBODY);
    dram.unhold(held, NOBODY);
    for there in [[true, false], [false, false]] {
        fill(&mut dram, if there[0] { 200 } else { 201 }, 600_000);
        assert_eq!([0, 1].map(|number| dram.find_committed(7, 0, &hash(number)).is_some()), there);
    }
}

#[test]
fn only_a_committed_block_is_held_and_a_returning_one_is_known() {
    let mut dram = tier(1);
    let slot = begin(&mut dram, 1, 600_000).expect("room");
    assert_eq!(dram.hold(&key(1), NOBODY), None);
    assert!(dram.commit(slot) && !dram.has_returned(slot));
    let slots = u64::from(pool::slot_count(SEGMENT, 600_000).expect("fits"));
    fill_all(&mut dram, 2..2 + 2 * slots, 600_000);
    let again = fill(&mut dram, 1, 600_000);
    assert!(dram.has_returned(again), "the ghost remembers it");
}
