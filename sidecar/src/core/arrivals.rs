//! Arrivals: blocks on their way into DRAM from any source, and the queries and loads waiting for each.
//!
//! A block of an earlier life lies in its slot already, and is on its way while it is verified. A block being
//! filled by a save is on its way from the first question of an engine waiting for it. If all its waiters
//! leave, a block still arrives, and stays in DRAM as any other. The slot of an arrival belongs to it until
//! its end.

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

/// The longest wait of a load for blocks, of a query for blocks of a save, and of a query for any blocks if
/// its engine's rate is unknown.
pub(super) const WAIT_MS_MAX: u64 = QUERY_WAIT_MS_MAX as u64;
/// One query, and all arrivals together, may take 1 of so many parts of the pool. The rest is for blocks in
/// use and for saves.
pub(super) const PART: u64 = 4;

/// An operation waiting for a block.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Waiter {
    Query { session: SessionId, log: u32, op: u64 },
    Load { session: SessionId, op: u64 },
}

/// All blocks on their way.
#[derive(Debug)]
pub(super) struct Arrivals {
    /// Limit of bytes on their way.
    bytes_max: u64,
    bytes: u64,
    coming: BTreeMap<BlockKey, Coming>,
    /// Number of arrivals filled by saves.
    saved: usize,
    /// Bytes of standing arrivals.
    standing_bytes: u64,
    pub(super) flows: Flows,
}

/// A block on its way into a slot.
#[derive(Debug)]
struct Coming {
    slot: SlotRef,
    source: Source,
    bytes: u64,
    /// Its source, its bytes there, and the place of their end among all bytes of the source.
    lane: Option<(SourceLane, u64, u64)>,
    /// It is late, and its waiters were answered without it.
    late: bool,
    /// It is asked for at its source, which may have it much later: no operation waits for it.
    standing: bool,
    /// It will not be kept: the block kept under its key was removed meanwhile.
    distrusted: bool,
    /// When it was first awaited, if a save fills it.
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
            standing: false,
            distrusted: false,
            saved_since_ms: None,
            waiting,
        }
    }

    fn is_in_time(&self) -> bool {
        !self.late && !self.standing
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
            standing_bytes: 0,
            flows: Flows::default(),
        }
    }

    /// True if any block is on its way.
    pub(super) fn any(&self) -> bool {
        !self.coming.is_empty()
    }

    /// Returns whether a block on its way can be waited for; `None` if it is not on its way. A block being
    /// filled by a save counts with `awaits` alone.
    pub(super) fn is_in_time(&self, key: &BlockKey, awaits: bool) -> Option<bool> {
        let coming = self.coming.get(key).filter(|coming| awaits || coming.saved_since_ms.is_none());
        coming.map(Coming::is_in_time)
    }

    /// Lets `waiter` wait for a block. Returns its slot; `None` if the block is late or not on its way.
    pub(super) fn join_waiter(&mut self, key: &BlockKey, waiter: Waiter) -> Option<SlotRef> {
        let coming = self.coming.get_mut(key).filter(|coming| coming.is_in_time())?;
        coming.waiting.push(waiter);
        Some(coming.slot)
    }

    /// Does the same for an operation that may already wait for the block.
    pub(super) fn join_once(&mut self, key: &BlockKey, waiter: Waiter) -> Option<SlotRef> {
        let coming = self.coming.get(key)?;
        if coming.waiting.contains(&waiter) { Some(coming.slot) } else { self.join_waiter(key, waiter) }
    }

    /// True for a block of an earlier life under verification. Its slot already has the header of a whole
    /// block: an engine with a reference to the slot would read the unverified block.
    pub(super) fn is_unverified(&self, key: &BlockKey) -> bool {
        let coming = self.coming.get(key);
        coming.is_some_and(|coming| coming.source == Source::Memory && coming.saved_since_ms.is_none())
    }

    /// Returns the limit of bytes on their way.
    pub(super) fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// True if `waits` holds for one of the block's waiters.
    pub(super) fn is_wished(&self, key: &BlockKey, waits: impl Fn(&Waiter) -> bool) -> bool {
        self.coming.get(key).is_some_and(|coming| coming.waiting.iter().any(waits))
    }

    /// Returns the source of a block on its way.
    pub(super) fn source(&self, key: &BlockKey) -> Option<Source> {
        self.coming.get(key).map(|coming| coming.source)
    }

    /// Notes a block of `bytes` on its way into its slot.
    pub(super) fn begin_arrival(&mut self, key: BlockKey, slot: SlotRef, bytes: u64, source: Source) {
        self.bytes += bytes;
        self.insert(key, Coming { source, bytes, ..Coming::new(slot) });
    }

    /// Notes a block asked for at its source before the source has it.
    pub(super) fn begin_standing(&mut self, key: BlockKey, slot: SlotRef, bytes: u64) {
        (self.bytes, self.standing_bytes) = (self.bytes + bytes, self.standing_bytes + bytes);
        self.insert(key, Coming { source: Source::Peer, bytes, standing: true, ..Coming::new(slot) });
    }

    pub(super) fn is_standing(&self, key: &BlockKey) -> bool {
        self.coming.get(key).is_some_and(|coming| coming.standing)
    }

    /// Notes that the source has a standing block now: it is on its way.
    pub(super) fn end_standing(&mut self, key: &BlockKey) {
        if let Some(coming) = self.coming.get_mut(key).filter(|coming| coming.standing) {
            coming.standing = false;
            self.standing_bytes -= coming.bytes;
        }
    }

    /// Returns the bytes of further blocks that may stand: all of them have a part of the limit.
    pub(super) fn standing_room(&self) -> u64 {
        (self.bytes_max / PART).saturating_sub(self.standing_bytes)
    }

    /// Notes a request to a source for a block on its way: to the first source, or to another one than
    /// before.
    pub(super) fn send_for(&mut self, key: &BlockKey, lane: SourceLane, bytes: u64, now_ms: u64) {
        let Some(coming) = self.coming.get_mut(key) else { return };
        let place = self.flows.begin_bytes(lane, bytes, now_ms);
        if let Some((before, bytes, _)) = coming.lane.replace((lane, bytes, place)) {
            self.flows.end_bytes(before, bytes, false, now_ms);
        }
    }

    /// Returns the bytes due from each source of these blocks, up to its last one of them.
    pub(super) fn owed(&self, keys: &[BlockKey], now_ms: u64) -> BTreeMap<SourceLane, Owed> {
        let mut places: BTreeMap<SourceLane, u64> = BTreeMap::new();
        for (lane, _, place) in keys.iter().filter_map(|key| self.coming.get(key)?.lane) {
            places.entry(lane).and_modify(|last| *last = place.max(*last)).or_insert(place);
        }
        places.into_iter().map(|(lane, place)| (lane, self.flows.owed(lane, place, now_ms))).collect()
    }

    /// Forgets a gone peer.
    pub(super) fn forget_peer(&mut self, peer: PeerNumber) {
        self.flows.forget_source(SourceLane::Peer(peer));
    }

    /// Notes that a block being filled by a save is awaited from now on. Its bytes do not count against the
    /// limit.
    pub(super) fn begin_saved(&mut self, key: BlockKey, slot: SlotRef, now_ms: u64) {
        self.saved += 1;
        self.insert(key, Coming { saved_since_ms: Some(now_ms), ..Coming::new(slot) });
    }

    fn insert(&mut self, key: BlockKey, coming: Coming) {
        let before = self.coming.insert(key, coming);
        assert!(before.is_none(), "a slot is filled once at a time");
    }

    /// Ends an arrival; `moved`: its bytes came. Returns true if the block may be kept, and its waiters.
    pub(super) fn end_arrival(&mut self, key: &BlockKey, moved: bool, now_ms: u64) -> (bool, Vec<Waiter>) {
        self.end_standing(key);
        let coming = self.coming.remove(key).expect("a block ends once");
        self.bytes -= coming.bytes;
        if let Some((lane, bytes, _)) = coming.lane {
            self.flows.end_bytes(lane, bytes, moved, now_ms);
        }
        (!coming.distrusted, coming.waiting)
    }

    /// Ends the arrival of a saved block. Returns its waiters; `None` if it was not awaited.
    pub(super) fn end_saved(&mut self, key: &BlockKey) -> Option<Vec<Waiter>> {
        if self.saved == 0 || self.coming.get(key)?.saved_since_ms.is_none() {
            return None;
        }
        self.saved -= 1;
        self.coming.remove(key).map(|coming| coming.waiting)
    }

    /// Returns the saved blocks not here [`WAIT_MS_MAX`] after they were first awaited, to be given up.
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

    /// Gives a late block up. Returns its waiters, to be answered without it.
    pub(super) fn give_up(&mut self, key: &BlockKey) -> Vec<Waiter> {
        let Some(coming) = self.coming.get_mut(key) else { return Vec::new() };
        coming.late = true;
        std::mem::take(&mut coming.waiting)
    }

    /// Marks blocks on their way: they will not be kept.
    pub(super) fn distrust(&mut self, is_meant: impl Fn(&BlockKey) -> bool) {
        let meant = self.coming.iter_mut().filter(|(key, _)| is_meant(key));
        meant.for_each(|(_, coming)| coming.distrusted = true);
    }
}
