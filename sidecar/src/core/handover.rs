//! Handovers: one engine computes a prompt, another answers it, and the blocks travel by their keys.
//!
//! A block of a handover arrives from a save: it is loaded from its slot once it is committed there. From
//! then on it is kept, as by a lease of its saver, until another engine has loaded it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use shm_protocol::key::{BlockHash, BlockKey, GROUP};
use shm_protocol::pool::SlotRef;
use tiers::dram::{BlockAccount, Dram, HolderId};

use super::SessionId;
use super::arrivals::Waiter;

/// Milliseconds for which a block is kept for an engine that has not loaded it.
pub(super) const TTL_MS: u64 = 30_000;
/// All kept blocks take 1 of so many parts of the pool at most: the rest is for saves, and for requests
/// without a handover.
const PART: u64 = 2;
/// Stale entries left among the ends of one kind, beside one entry for each block: each time the same block
/// is kept again leaves one.
const STALE_MAX: usize = 1024;
/// Limit of remembered lost blocks: those of 64 prompts of 4,096 tokens, 16 to a block.
const LOST_MAX: usize = 1 << 14;

/// The begins and ends of saves in one event, for other parts at the end of the event.
#[derive(Debug, Default)]
pub(super) struct Produced {
    /// Slots were taken for blocks, or asks for promised blocks have ended.
    pub(super) claimed: bool,
    /// Awaited blocks that have ended, each with its waiters, and true if it is kept.
    pub(super) ended: Vec<(BlockKey, Vec<Waiter>, bool)>,
    /// The namespaces of newly kept blocks, each with the session of the saver.
    pub(super) kept: BTreeSet<(u32, SessionId)>,
    /// An engine, a promise or a save for another engine has ended.
    pub(super) over: bool,
}

/// Blocks kept for engines until these load them: one hold on each, of its saver.
#[derive(Debug)]
pub(super) struct HandoverBlocks {
    ttl_ms: u64,
    bytes_max: u64,
    bytes: u64,
    /// Number of blocks kept so far; a block kept again counts again.
    count: u64,
    /// Kept blocks by their slot's offset.
    blocks: BTreeMap<u64, KeptBlock>,
    /// Offsets and ends of kept blocks by kind, in order. An entry is stale if its block is not kept, or has
    /// another end or kind by now.
    ends: Vec<(Kind, VecDeque<(u64, u64)>)>,
    released: Released,
}

/// Owner, quota and bytes of a block: a slot of one kind can be used for any block of this kind.
type Kind = (BlockAccount, u64);

#[derive(Debug)]
struct KeptBlock {
    key: BlockKey,
    slot: SlotRef,
    /// Number of blocks kept before it.
    before: u64,
    kind: Kind,
    until_ms: u64,
    /// When its step was first seen done; `None` if its save found it in the pool.
    fenced: Option<Duration>,
}

/// Blocks kept no longer, by reason.
#[derive(Copy, Clone, Debug, Default)]
pub(super) struct Released {
    /// Another engine has loaded them.
    pub(super) loaded: u64,
    /// No engine has loaded them in time.
    pub(super) expired: u64,
    /// Later blocks needed their room.
    pub(super) full: u64,
}

/// Blocks computed for another engine and not kept: a wait for one cannot succeed. Only the last ones are
/// remembered, for some time.
#[derive(Debug, Default)]
pub(super) struct Lost {
    /// When each block is forgotten, in milliseconds.
    blocks: BTreeMap<BlockKey, u64>,
    /// The keys of `blocks` and their times, the earliest first. A key lost again has a later time in
    /// `blocks`: only the entry with this time forgets it.
    ends: VecDeque<(BlockKey, u64)>,
}

// === impl HandoverBlocks ===

impl HandoverBlocks {
    pub(super) fn new(dram: &Dram) -> Self {
        let (bytes, count, blocks, ends, released) = Default::default();
        Self {
            ttl_ms: TTL_MS,
            bytes_max: dram.config().pool_bytes / PART,
            bytes,
            count,
            blocks,
            ends,
            released,
        }
    }

    pub(super) fn set_ttl(&mut self, ttl_ms: u64) {
        self.ttl_ms = ttl_ms;
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn block_count(&self) -> u64 {
        self.count
    }

    pub(super) fn released(&self) -> Released {
        self.released
    }

    /// Keeps a committed block from now on, or again. If there is too much, the blocks kept the longest go.
    pub(super) fn keep(
        &mut self,
        key: &BlockKey,
        whose: BlockAccount,
        fenced: Option<Duration>,
        now_ms: u64,
        dram: &mut Dram,
    ) {
        let Some(slot) = dram.hold(key, whose.holder) else { return };
        let kind = (whose, dram.block_bytes(slot).expect("it is held"));
        let end = (slot.offset, now_ms.saturating_add(self.ttl_ms));
        let is_new = !is_kept(&self.blocks, kind, end);
        if self.blocks.contains_key(&slot.offset) {
            self.release_block(slot.offset, dram);
        }
        self.bytes += kind.1;
        let kept = KeptBlock { key: *key, slot, before: self.count, kind, until_ms: end.1, fenced };
        self.count += 1;
        self.blocks.insert(slot.offset, kept);
        if is_new {
            self.note_end(kind, end);
        }
        while self.bytes > self.bytes_max && self.give_way(|_| true, dram).is_some() {}
    }

    /// Adds a block's new end to its kind.
    fn note_end(&mut self, kind: Kind, end: (u64, u64)) {
        let Some((_, ends)) = self.ends.iter_mut().find(|(other, _)| *other == kind) else {
            return self.ends.push((kind, VecDeque::from([end])));
        };
        ends.push_back(end);
        if ends.len() > 2 * self.blocks.len() + STALE_MAX {
            ends.retain(|end| is_kept(&self.blocks, kind, *end));
        }
    }

    /// Gives up the blocks a holder has kept the longest, until it has room to save a block of `bytes`.
    pub(super) fn make_room(&mut self, holder: HolderId, bytes: u64, dram: &mut Dram) {
        let is_its = |(whose, _): Kind| whose.holder == holder;
        while self.bytes > 0 && dram.room(holder) < bytes && self.give_way(is_its, dram).is_some() {}
    }

    /// Gives up the block of a kind kept the longest, if it was one of the first `before`. Returns its key. A
    /// later one may be of the very prompt in need of room: blocks are of no use without those before them.
    pub(super) fn make_slot(
        &mut self,
        whose: BlockAccount,
        bytes: u64,
        before: u64,
        dram: &mut Dram,
    ) -> Option<BlockKey> {
        let is_meant = |kind| kind == (whose, bytes);
        let (at, _) = self.oldest(is_meant)?;
        let (offset, _) = self.ends[at].1[0];
        if self.blocks[&offset].before >= before {
            return None;
        }
        self.give_way(is_meant, dram)
    }

    /// Gives up the block kept the longest for later ones, if there is one. Returns its key.
    fn give_way(&mut self, is_meant: impl Fn(Kind) -> bool, dram: &mut Dram) -> Option<BlockKey> {
        let released = self.release_oldest(is_meant, dram);
        self.released.full += u64::from(released.is_some());
        released
    }

    /// Ends the keeping of blocks loaded by another engine than their saver. Returns the latest time at which
    /// a step of one was first seen done.
    pub(super) fn loaded(&mut self, slots: &[SlotRef], by: HolderId, dram: &mut Dram) -> Option<Duration> {
        let mut fenced = None;
        for slot in slots {
            let kept =
                self.blocks.get(&slot.offset).filter(|kept| kept.slot == *slot && kept.kind.0.holder != by);
            if let Some(kept) = kept {
                fenced = fenced.max(kept.fenced);
                self.release_block(slot.offset, dram);
                self.released.loaded += 1;
            }
        }
        fenced
    }

    /// Gives up blocks not loaded in time.
    pub(super) fn expire(&mut self, now_ms: u64, dram: &mut Dram) {
        while self.oldest(|_| true).is_some_and(|(_, until_ms)| until_ms <= now_ms)
            && self.release_oldest(|_| true, dram).is_some()
        {
            self.released.expired += 1;
        }
    }

    /// Returns the block kept the longest of these kinds: the place of its kind in the list, and its end.
    fn oldest(&mut self, is_meant: impl Fn(Kind) -> bool) -> Option<(usize, u64)> {
        for (kind, ends) in &mut self.ends {
            while ends.pop_front_if(|end| !is_kept(&self.blocks, *kind, *end)).is_some() {}
        }
        self.ends.retain(|(_, ends)| !ends.is_empty());
        let ends = self.ends.iter().enumerate().filter(|(_, (kind, _))| is_meant(*kind));
        ends.map(|(at, (_, ends))| (at, ends[0].1)).min_by_key(|(_, until_ms)| *until_ms)
    }

    /// Gives up the block kept the longest of these kinds, if there is one. Returns its key.
    fn release_oldest(&mut self, is_meant: impl Fn(Kind) -> bool, dram: &mut Dram) -> Option<BlockKey> {
        let (at, _) = self.oldest(is_meant)?;
        let (offset, _) = self.ends[at].1.pop_front().expect("looked at above");
        Some(self.release_block(offset, dram))
    }

    fn release_block(&mut self, offset: u64, dram: &mut Dram) -> BlockKey {
        let kept = self.blocks.remove(&offset).expect("the caller found it");
        let (whose, bytes) = kept.kind;
        self.bytes -= bytes;
        dram.unhold(kept.slot, whose.holder);
        kept.key
    }

    #[cfg(test)]
    pub(super) fn ends_len(&self) -> usize {
        self.ends.iter().map(|(_, ends)| ends.len()).sum()
    }
}

/// True if an entry among the ends of a kind is of a block kept until then.
fn is_kept(blocks: &BTreeMap<u64, KeptBlock>, kind: Kind, (offset, until_ms): (u64, u64)) -> bool {
    blocks.get(&offset).is_some_and(|kept| kept.kind == kind && kept.until_ms == until_ms)
}

// === impl Lost ===

impl Lost {
    /// Notes the blocks of a save that are not in the pool: they are lost.
    pub(super) fn note_lost(&mut self, namespace: u32, hashes: &[BlockHash], now_ms: u64, dram: &Dram) {
        let mut found = Vec::with_capacity(hashes.len());
        dram.lookup(namespace, hashes, &mut found);
        for (hash, _) in hashes.iter().zip(found).filter(|(_, found)| !found) {
            self.insert(BlockKey { namespace, group: GROUP, hash: *hash }, now_ms);
        }
    }

    /// Notes a lost block. Only waiters for a block found nowhere look at it.
    pub(super) fn insert(&mut self, key: BlockKey, now_ms: u64) {
        let until_ms = now_ms.saturating_add(TTL_MS);
        self.blocks.insert(key, until_ms);
        self.ends.push_back((key, until_ms));
        if self.ends.len() > LOST_MAX {
            self.forget_oldest();
        }
    }

    pub(super) fn has(&self, key: &BlockKey) -> bool {
        self.blocks.contains_key(key)
    }

    pub(super) fn expire(&mut self, now_ms: u64) {
        while self.ends.front().is_some_and(|(_, until_ms)| *until_ms <= now_ms) {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        let (key, until_ms) = self.ends.pop_front().expect("the caller saw one");
        if self.blocks.get(&key) == Some(&until_ms) {
            self.blocks.remove(&key);
        }
    }
}
