//! The oracle's record of the pool: the key of every slot, checked against its bytes at every use.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::pool::{self, Geometry, SlotRef, SlotRemains, slot};
use shm_protocol::region::Region;
use sidecar::core::{Action, CopyDirection, RankBlock};

use crate::origin::{Origin, WORDS};

/// The size of a model's blocks: two engines with one form and one base namespace share blocks.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Form {
    pub(crate) shards: u32,
    pub(crate) shard_bytes: u64,
}

#[derive(Debug)]
struct Slot {
    generation: u64,
    /// The slot is whole, and verified if it is of an earlier life.
    committed: bool,
    digest: NamespaceDigest,
    /// Engines of the simulator use group 0; a changed bit of a pool file can make another.
    group: u32,
    hash: BlockHash,
    form: Form,
    /// Batches reading or writing it.
    copies: u32,
}

#[derive(Debug)]
pub(crate) struct Ledger {
    segment_bytes: u64,
    forms: BTreeMap<u64, Form>,
    segments: BTreeMap<u64, Geometry>,
    slots: BTreeMap<u64, Slot>,
    /// Slots of an earlier life without a whole block, not free yet.
    debris: BTreeSet<u64>,
    /// Slots of blocks that an engine of an earlier life may still read.
    held: BTreeSet<u64>,
}

// === impl Form ===

impl Form {
    pub(crate) fn block_bytes(&self) -> u64 {
        self.shard_bytes * u64::from(self.shards)
    }
}

// === impl Ledger ===

impl Ledger {
    pub(crate) fn new(segment_bytes: u64) -> Self {
        let (forms, segments, slots) = Default::default();
        let (debris, held) = Default::default();
        Self { segment_bytes, forms, segments, slots, debris, held }
    }

    /// Adds a form; block sizes differ.
    pub(crate) fn know(&mut self, form: Form) {
        let known = self.forms.insert(form.block_bytes(), form);
        assert!(known.is_none_or(|known| known == form), "two forms of one size");
    }

    /// Brings a segment of an earlier life into service: blocks with whole headers stay until their
    /// verification. Returns the numbers of kept and dropped blocks.
    pub(crate) fn adopt(&mut self, segment: u64, block_bytes: u64, remains: &[SlotRemains]) -> (u64, u64) {
        let geometry = Geometry::new(self.segment_bytes, block_bytes).expect("an earlier life's");
        self.segments.insert(segment, geometry);
        let (mut kept, mut dropped) = (0, 0);
        for (index, remains) in (0..).zip(remains) {
            let offset = geometry.offset(segment, index).expect("below the count");
            match *remains {
                SlotRemains::Free => {}
                SlotRemains::Block { generation, namespace: digest, group, hash }
                    if !self.slots.values().any(|slot| slot.key() == (digest, group, hash)) =>
                {
                    let form = self.forms[&block_bytes];
                    let slot = Slot { generation, committed: false, digest, group, hash, form, copies: 0 };
                    self.slots.insert(offset, slot);
                    self.held.insert(offset);
                    kept += 1;
                }
                SlotRemains::Block { .. } | SlotRemains::Debris { .. } => {
                    self.debris.insert(offset);
                    dropped += 1;
                }
            }
        }
        (kept, dropped)
    }

    /// Handles the verification of an earlier life's block: it is correct, or was changed and is dropped.
    pub(crate) fn verified(&mut self, at: SlotRef, whole: bool, memory: &Region) {
        let slot = self.slots.get_mut(&at.offset).expect("a block that is verified stays in its slot");
        assert!(slot.generation == at.generation && !slot.committed, "{at:?} was verified as {slot:?}");
        if whole {
            slot.committed = true;
            slot.check(at, memory, "adopted");
        } else {
            self.slots.remove(&at.offset);
            self.debris.insert(at.offset);
        }
    }

    /// Ends the time of readers of an earlier life.
    pub(crate) fn end_hold(&mut self) {
        self.held.clear();
    }

    /// Follows a header action. Returns true if it took a segment from another block size.
    pub(crate) fn follow(&mut self, action: &Action, memory: &Region) -> bool {
        match action {
            Action::AssignSegment { segment, block_bytes } => return self.assign(*segment, *block_bytes),
            Action::FillSlot { slot, namespace, key } => self.fill(*slot, *namespace, key),
            Action::CommitSlot { slot, .. } => self.commit(*slot, memory),
            // The slot's bytes stay.
            Action::DisownSlot { .. } => {}
            Action::FreeSlot { slot } => self.free(*slot),
            _ => unreachable!("the caller chose header actions"),
        }
        false
    }

    fn assign(&mut self, segment: u64, block_bytes: u64) -> bool {
        let geometry = Geometry::new(self.segment_bytes, block_bytes).expect("the core asked for it");
        let begin = pool::segment_offset(self.segment_bytes, segment).expect("a small pool");
        let range = begin..begin + self.segment_bytes;
        assert!(
            self.debris.range(range.clone()).next().is_none(),
            "segment {segment} was given away too early"
        );
        let used = self.slots.range(range).next();
        assert!(used.is_none(), "segment {segment} was given away with {used:?} in it");
        self.segments.insert(segment, geometry).is_some()
    }

    fn fill(&mut self, slot: SlotRef, digest: NamespaceDigest, key: &BlockKey) {
        let segment = (slot.offset - pool::SEGMENT_ALIGN) / self.segment_bytes;
        let geometry = self.segments[&segment];
        assert!(geometry.place_of(slot.offset).is_ok(), "{slot:?} is no slot");
        let form = self.forms[&geometry.block_bytes];
        let (generation, group, hash) = (slot.generation, key.group, key.hash);
        let fresh = Slot { generation, committed: false, digest, group, hash, form, copies: 0 };
        assert!(!self.debris.contains(&slot.offset), "{slot:?} was filled too early");
        let before = self.slots.insert(slot.offset, fresh);
        assert!(before.is_none(), "{slot:?} was filled over {before:?}");
    }

    fn commit(&mut self, at: SlotRef, memory: &Region) {
        let slot = self.slots.get_mut(&at.offset).expect("only a slot that is filled is committed");
        assert!(slot.generation == at.generation && !slot.committed, "{at:?} committed as {slot:?}");
        assert_eq!(slot.copies, 0, "{at:?} was committed under a running copy");
        slot.committed = true;
        slot.check(at, memory, "committed");
    }

    fn free(&mut self, at: SlotRef) {
        assert!(!self.held.contains(&at.offset), "{at:?} was freed while an engine may read it");
        if self.debris.remove(&at.offset) {
            return;
        }
        let slot = self.slots.remove(&at.offset);
        let slot = slot.unwrap_or_else(|| panic!("{at:?} was freed and held nothing"));
        assert_eq!(slot.generation, at.generation, "another filling of {at:?} was freed");
        assert_eq!(slot.copies, 0, "{at:?} was freed under a running copy");
    }

    /// Counts the copies of a batch that begins.
    pub(crate) fn begin(&mut self, direction: CopyDirection, pieces: &[RankBlock]) {
        for piece in pieces {
            let slot = self.slot_of(piece);
            assert_eq!(slot.committed, direction == CopyDirection::Load, "{direction:?} of {slot:?}");
            slot.copies += 1;
        }
    }

    /// Removes the copies of an ended batch.
    pub(crate) fn end(&mut self, pieces: &[RankBlock]) {
        pieces.iter().for_each(|piece| self.slot_of(piece).copies -= 1);
    }

    fn slot_of(&mut self, piece: &RankBlock) -> &mut Slot {
        let (offset, slot) = self.slots.range_mut(..=piece.offset).next_back().expect("a copy uses a slot");
        assert!(piece.offset < offset + slot.form.block_bytes(), "a copy outside of any slot: {piece:?}");
        slot
    }

    /// Checks an answer of a query: these slots must hold these keys of `digest`. With `arriving`, some may
    /// still be filling.
    pub(crate) fn answered(
        &self,
        refs: &[SlotRef],
        digest: NamespaceDigest,
        keys: &[BlockHash],
        arriving: bool,
        memory: &Region,
    ) {
        for (at, hash) in refs.iter().zip(keys) {
            let slot = self.slots.get(&at.offset).filter(|slot| slot.generation == at.generation);
            let slot = slot.unwrap_or_else(|| panic!("a query was answered with {at:?}, which is gone"));
            assert!(slot.committed || arriving, "a query was answered with {at:?}, which is not whole");
            assert_eq!(slot.key(), (digest, 0, *hash), "wrong bytes: answered with another key");
            if slot.committed {
                slot.check(*at, memory, "granted");
            }
        }
    }

    /// Checks an ended comparison of two slots. Returns true if they are of different models. Panics unless
    /// both are whole blocks of their key.
    pub(crate) fn compared(&self, kept: SlotRef, computed: SlotRef, memory: &Region) -> bool {
        let slot = &self.slots[&kept.offset];
        assert!(slot.committed && !self.slots[&computed.offset].committed, "{kept:?} and {computed:?}");
        slot.check(kept, memory, "kept") != slot.check(computed, memory, "computed")
    }

    /// Checks the pool at rest: every slot is whole, with a matching header and the bytes of its key.
    pub(crate) fn audit(&self, memory: &Region) {
        for (&offset, slot) in &self.slots {
            let at = SlotRef { offset, generation: slot.generation };
            assert!(slot.committed, "{at:?} is still being filled: {slot:?}");
            assert_eq!(slot.copies, 0, "a copy of {at:?} never ended");
            slot.check(at, memory, "kept");
        }
        for (&segment, geometry) in &self.segments {
            for index in 0..geometry.slot_count {
                let offset = geometry.offset(segment, index).expect("below the count");
                let header = geometry.place_of(offset).expect("its own offset").header;
                let state = memory.word64((header + slot::STATE) as usize).load(Ordering::Relaxed);
                let expected = if self.slots.contains_key(&offset) { pool::COMMITTED } else { pool::FREE };
                assert_eq!(state, expected, "the header of the slot at {offset}");
            }
        }
    }

    pub(crate) fn kept(&self) -> impl Iterator<Item = (NamespaceDigest, BlockHash)> {
        self.slots.values().filter(|slot| slot.committed).map(|slot| (slot.digest, slot.hash))
    }

    pub(crate) fn committed(&self) -> u64 {
        self.slots.values().filter(|slot| slot.committed).count() as u64
    }

    pub(crate) fn filling(&self) -> bool {
        !self.debris.is_empty() || self.slots.values().any(|slot| !slot.committed)
    }

    /// The form of the block in a slot.
    pub(crate) fn form_at(&self, offset: u64) -> Form {
        self.slots[&offset].form
    }

    /// The offset of a slot's header, for a torn write.
    pub(crate) fn header(&self, at: SlotRef) -> u64 {
        let segment = (at.offset - pool::SEGMENT_ALIGN) / self.segment_bytes;
        self.segments[&segment].place_of(at.offset).expect("filled").header
    }
}

// === impl Slot ===

impl Slot {
    fn key(&self) -> (NamespaceDigest, u32, BlockHash) {
        (self.digest, self.group, self.hash)
    }

    /// Panics unless the slot holds the KV of its key. Returns for each word true if a model of other weights
    /// made it.
    fn check(&self, at: SlotRef, memory: &Region, what: &str) -> Vec<bool> {
        let mut origins = Vec::new();
        for shard in 0..self.form.shards {
            let base = (at.offset + u64::from(shard) * self.form.shard_bytes) as usize;
            let origin = Origin { digest: self.digest, hash: self.hash, shard };
            let word = |index: usize| memory.word64(base + index * 8).load(Ordering::Relaxed);
            origins.extend(origin.check(0..WORDS, || format!("{what} {at:?}"), word));
        }
        origins
    }
}
