//! Blocks on their way into DRAM, from wherever they are kept, and who waits for each.
//!
//! A block of an earlier life lies in its slot and is on its way while it is verified. A block that a save is filling is on its
//! way for those who await what another engine computes, from when the first of them asked. Whoever stops waiting leaves what is on
//! its way to end by itself; its blocks stay in DRAM as any others. A slot given to an arrival is its own until its end, whoever
//! asked for it.

mod flows;

use std::collections::BTreeMap;

use mesh::transport::PeerNumber;
use shm_protocol::key::BlockKey;
use shm_protocol::layout::QUERY_WAIT_MS_MAX;
use shm_protocol::pool::SlotRef;
use shm_protocol::source::Source;
use tiers::dram::Dram;

pub(super) use self::flows::{Flows, Owed, SourceLane};
use super::SessionId;

/// The longest wait of a load for blocks, of a query for those of a save, and of a query for any if its engine's rate is unknown.
pub(super) const WAIT_MS_MAX: u64 = QUERY_WAIT_MS_MAX as u64;
/// What one query, and all that is on its way into the pool together, may take of it: 1 of so many parts. The rest is for
/// blocks in use and for saves.
pub(super) const PART: u64 = 4;

/// Who waits for a block.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Waiter {
    Query { session: SessionId, log: u32, op: u64 },
    Load { session: SessionId, op: u64 },
}

/// What has not ended.
#[derive(Debug)]
pub(super) struct Arrivals {
    /// Bytes that may be on their way.
    bytes_max: u64,
    bytes: u64,
    coming: BTreeMap<BlockKey, Coming>,
    /// How many of them saves fill.
    saved: usize,
    pub(super) flows: Flows,
}

/// A block on its way into a slot.
#[derive(Debug)]
struct Coming {
    slot: SlotRef,
    source: Source,
    bytes: u64,
    /// Its source, its bytes there, and the place of their end.
    lane: Option<(SourceLane, u64, u64)>,
    /// Nobody waits for it any more.
    late: bool,
    /// It is not to be kept: what is kept under its key was removed meanwhile.
    distrusted: bool,
    /// A save fills it, and it is awaited since then.
    saved_since_ms: Option<u64>,
    waiting: Vec<Waiter>,
}

// === impl Coming ===

impl Coming {
    fn new(slot: SlotRef) -> Self {
        let (source, waiting) = (Source::Memory, Vec::new());
        Self {
            slot,
            source,
            bytes: 0,
            lane: None,
            late: false,
            distrusted: false,
            saved_since_ms: None,
            waiting,
        }
    }
}

// === impl Arrivals ===

impl Arrivals {
    pub(super) fn new(dram: &Dram) -> Self {
        Self {
            bytes_max: dram.config().pool_bytes / PART,
            bytes: 0,
            coming: BTreeMap::new(),
            saved: 0,
            flows: Flows::default(),
        }
    }

    /// Whether a block's end is still to come.
    pub(super) fn any(&self) -> bool {
        !self.coming.is_empty()
    }

    /// Whether a block that is on its way may be waited for; by who `awaits`, also one that a save fills.
    pub(super) fn is_in_time(&self, key: &BlockKey, awaits: bool) -> Option<bool> {
        let coming = self.coming.get(key).filter(|coming| awaits || coming.saved_since_ms.is_none());
        coming.map(|coming| !coming.late)
    }

    /// The slot of one that may be waited for; `waiter` does from now on.
    pub(super) fn join(&mut self, key: &BlockKey, waiter: Waiter) -> Option<SlotRef> {
        let coming = self.coming.get_mut(key).filter(|coming| !coming.late)?;
        coming.waiting.push(waiter);
        Some(coming.slot)
    }

    /// The same for one that may wait for it already.
    pub(super) fn join_once(&mut self, key: &BlockKey, waiter: Waiter) -> Option<SlotRef> {
        let coming = self.coming.get(key)?;
        if coming.waiting.contains(&waiter) { Some(coming.slot) } else { self.join(key, waiter) }
    }

    /// Whether a block is an earlier life's, on its way because it is verified. Its slot has the header of a whole block already: an
    /// engine with a reference to it would read it, verified or not.
    pub(super) fn is_unverified(&self, key: &BlockKey) -> bool {
        let coming = self.coming.get(key);
        coming.is_some_and(|coming| coming.source == Source::Memory && coming.saved_since_ms.is_none())
    }

    /// Bytes that may be on their way.
    pub(super) fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether somebody waits for this one, of whom `waits` says that they still do.
    pub(super) fn is_wished(&self, key: &BlockKey, waits: impl Fn(&Waiter) -> bool) -> bool {
        self.coming.get(key).is_some_and(|coming| coming.waiting.iter().any(waits))
    }

    /// Where a block that is on its way was found.
    pub(super) fn source(&self, key: &BlockKey) -> Option<Source> {
        self.coming.get(key).map(|coming| coming.source)
    }

    /// A block of `bytes` is on its way into its slot.
    pub(super) fn begin(&mut self, key: BlockKey, slot: SlotRef, bytes: u64, source: Source) {
        self.bytes += bytes;
        self.insert(key, Coming { source, bytes, ..Coming::new(slot) });
    }

    /// A source was asked for a block on its way, the first source or another one than before.
    pub(super) fn send(&mut self, key: &BlockKey, lane: SourceLane, bytes: u64, now_ms: u64) {
        let Some(coming) = self.coming.get_mut(key) else { return };
        let place = self.flows.begin_bytes(lane, bytes, now_ms);
        if let Some((before, bytes, _)) = coming.lane.replace((lane, bytes, place)) {
            self.flows.end_bytes(before, bytes, false, now_ms);
        }
    }

    /// The debts of the sources of these blocks, up to the last block of each.
    pub(super) fn owed(&self, keys: &[BlockKey], now_ms: u64) -> BTreeMap<SourceLane, Owed> {
        let mut places: BTreeMap<SourceLane, u64> = BTreeMap::new();
        for (lane, _, place) in keys.iter().filter_map(|key| self.coming.get(key)?.lane) {
            places.entry(lane).and_modify(|last| *last = place.max(*last)).or_insert(place);
        }
        places.into_iter().map(|(lane, place)| (lane, self.flows.owed(lane, place, now_ms))).collect()
    }

    /// A peer is gone.
    pub(super) fn forget_peer(&mut self, peer: PeerNumber) {
        self.flows.forget_source(SourceLane::Peer(peer));
    }

    /// A block that a save fills is awaited from now on. It takes nothing of what may be on its way.
    pub(super) fn begin_saved(&mut self, key: BlockKey, slot: SlotRef, now_ms: u64) {
        self.saved += 1;
        self.insert(key, Coming { saved_since_ms: Some(now_ms), ..Coming::new(slot) });
    }

    fn insert(&mut self, key: BlockKey, coming: Coming) {
        let before = self.coming.insert(key, coming);
        assert!(before.is_none(), "a slot is filled once at a time");
    }

    /// A block has ended, well if it `moved`: whether it may be kept, and who has waited for it.
    pub(super) fn end(&mut self, key: &BlockKey, moved: bool, now_ms: u64) -> (bool, Vec<Waiter>) {
        let coming = self.coming.remove(key).expect("a block ends once");
        self.bytes -= coming.bytes;
        if let Some((lane, bytes, _)) = coming.lane {
            self.flows.end_bytes(lane, bytes, moved, now_ms);
        }
        (!coming.distrusted, coming.waiting)
    }

    /// A save has ended a block; who has awaited it, if anybody did.
    pub(super) fn end_saved(&mut self, key: &BlockKey) -> Option<Vec<Waiter>> {
        if self.saved == 0 || self.coming.get(key)?.saved_since_ms.is_none() {
            return None;
        }
        self.saved -= 1;
        self.coming.remove(key).map(|coming| coming.waiting)
    }

    /// Blocks that saves have not ended [`WAIT_MS_MAX`] after they were first awaited, each to be given up.
    pub(super) fn late_saves(&self, now_ms: u64) -> Vec<BlockKey> {
        if self.saved == 0 {
            return Vec::new();
        }
        let is_late = |coming: &Coming| {
            !coming.late
                && coming.saved_since_ms.is_some_and(|since| now_ms >= since.saturating_add(WAIT_MS_MAX))
        };
        self.coming.iter().filter(|(_, coming)| is_late(coming)).map(|(key, _)| *key).collect()
    }

    /// A block is late: whoever has waited is to be answered without it.
    pub(super) fn give_up(&mut self, key: &BlockKey) -> Vec<Waiter> {
        let Some(coming) = self.coming.get_mut(key) else { return Vec::new() };
        coming.late = true;
        std::mem::take(&mut coming.waiting)
    }

    /// Blocks that are on their way will not be kept.
    pub(super) fn distrust(&mut self, is_meant: impl Fn(&BlockKey) -> bool) {
        let meant = self.coming.iter_mut().filter(|(key, _)| is_meant(key));
        meant.for_each(|(_, coming)| coming.distrusted = true);
    }
}
