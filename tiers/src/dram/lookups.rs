//! Finding blocks side by side, so their cache misses overlap; and recording uses of blocks.

use std::hint::black_box;

use shm_protocol::key::{BlockHash, BlockKey, GROUP};
use shm_protocol::pool::SlotRef;

use super::{Dram, EndedChain, Ending, HolderId};
use crate::entries::{SlotEntry, SlotState};
use crate::index::{Bucket, KeyPrint, NO_ENTRY};

/// Keys looked up side by side, so their cache misses overlap: more than a core's misses in flight, and few
/// enough so an early end of a run wastes little.
pub(super) const BATCH: usize = 64;
/// Entries of slots no further apart than this lie within some cache lines; a core prefetches these.
const NEAR: u32 = 8;

// === impl Dram: look-ups ===

impl Dram {
    /// Returns the length of the leading committed run of `hashes`, and records its use. No lease.
    pub fn probe(&mut self, namespace: u32, hashes: &[BlockHash]) -> usize {
        self.chain.clear();
        self.leading_hits(namespace, hashes, |dram, id| {
            dram.chain.push(id);
            true
        });
        self.chain.reverse();
        self.policy.touch(&mut self.slab, &self.chain);
        self.chain.len()
    }

    /// Appends an answer for each of `hashes` to `found`: true if it is committed. No access.
    pub fn lookup(&self, namespace: u32, hashes: &[BlockHash], found: &mut Vec<bool>) {
        for batch in hashes.chunks(BATCH) {
            let ids = self.find_batch(namespace, batch);
            found.extend(ids[..batch.len()].iter().map(|id| *id != NO_ENTRY));
        }
    }

    /// Records the use of these blocks by a request, for every source of the blocks: the committed ones are
    /// used as of now.
    pub fn use_run(&mut self, namespace: u32, hashes: &[BlockHash]) {
        let mut child_kept = false;
        self.chain.clear();
        self.deepest_first(namespace, hashes, |dram, id| {
            dram.stats.unreachable_blocks_total += u64::from(child_kept && id.is_none());
            child_kept = id.is_some();
            dram.chain.extend(id);
        });
        self.policy.touch(&mut self.slab, &self.chain);
    }

    /// Ends the request with these keys: its kept blocks are sorted by its ending. Blocks whose holder is
    /// gone belong to `holder` from now on. Returns what a later copy of its blocks needs to know.
    pub fn end_chain(
        &mut self,
        holder: HolderId,
        namespace: u32,
        hashes: &[BlockHash],
        ending: Ending,
    ) -> EndedChain {
        if hashes.is_empty() || self.slab.assigned() == 0 {
            return EndedChain::default();
        }
        let prints = hashes.iter().map(|hash| KeyPrint::new(namespace, GROUP, hash));
        let room = self.below.room(self.slots_in_service(), self.config.pool_bytes);
        let turn = self.policy.end_turn(prints, room, holder, ending);
        self.chain.clear();
        let (mut depth, mut own) = (hashes.len(), 0);
        let unread = if ending.last { 0 } else { ending.unread };
        self.deepest_first(namespace, hashes, |dram, id| {
            depth -= 1;
            let Some(id) = id.filter(|_| depth >= unread) else { return };
            own += usize::from(depth >= turn.shared);
            let before = dram.slab.entries.get(id).claims.holder();
            if before != holder && !dram.ledger.is_here(before) {
                dram.hand_over(id, holder);
            }
            dram.chain.push(id);
        });
        if ending.last {
            let chain = std::mem::take(&mut self.chain);
            self.end_hints_for(holder, &chain);
            self.chain = chain;
        }
        self.policy.used(&mut self.slab, &self.chain, turn, own);
        self.policy.ended_chain(turn)
    }

    /// Calls `take` for every block of a chain, the deepest first, with its entry if it is committed. In this
    /// order of moves to a list's head, parents come to lie before their children.
    pub(super) fn deepest_first(
        &mut self,
        namespace: u32,
        hashes: &[BlockHash],
        mut take: impl FnMut(&mut Self, Option<u32>),
    ) {
        let mut rest = hashes;
        while !rest.is_empty() {
            let (before, batch) = rest.split_at(rest.len().saturating_sub(BATCH));
            let ids = self.find_batch(namespace, batch);
            for id in ids[..batch.len()].iter().rev() {
                take(self, (*id != NO_ENTRY).then_some(*id));
            }
            rest = before;
            // A chain moved before lies in one list, each block behind its parent, and mostly in neighbouring
            // slots. There the code follows the links without the index. For entries further apart the index
            // is faster, since its cache misses overlap.
            let mut child = ids[0];
            let mut ahead = self.slab.entries.get_or_vacant(child).link.previous;
            while let Some((hash, before)) = rest.split_last() {
                let entry = self.slab.entries.get_or_vacant(ahead);
                if ahead.abs_diff(child) > NEAR || !entry.is_committed_as(namespace, GROUP, hash) {
                    break;
                }
                (child, ahead, rest) = (ahead, entry.link.previous, before);
                take(self, Some(child));
            }
        }
    }

    /// Estimates the number of slots with blocks in every segment.
    fn slots_in_service(&self) -> u64 {
        self.slab.slots() * self.stats.segments / (self.slab.assigned() as u64).max(1)
    }

    /// Calls `take` for every block of the leading run, until it returns false.
    pub(super) fn leading_hits(
        &mut self,
        namespace: u32,
        hashes: &[BlockHash],
        mut take: impl FnMut(&mut Self, u32) -> bool,
    ) {
        for batch in hashes.chunks(BATCH) {
            let ids = self.find_batch(namespace, batch);
            for id in &ids[..batch.len()] {
                if *id == NO_ENTRY || !take(self, *id) {
                    return;
                }
            }
        }
    }

    /// Returns the committed entries of up to [`BATCH`] keys. Each of the two loads outside of the cache,
    /// bucket and entry, first runs for all keys in a loop of its own. Then the core keeps some twenty misses
    /// in flight, and the comparing loops find all words near.
    pub(super) fn find_batch(&self, namespace: u32, hashes: &[BlockHash]) -> [u32; BATCH] {
        let mut homes = [(KeyPrint::default(), Bucket::NONE); BATCH];
        for (home, hash) in homes.iter_mut().zip(hashes) {
            let print = KeyPrint::new(namespace, GROUP, hash);
            *home = (print, self.index.home(print));
        }
        let homes = &homes[..hashes.len()];
        black_box(homes.iter().fold(0, |sum, (_, home)| sum ^ home.load_word()));

        let mut ids = [NO_ENTRY; BATCH];
        let mut entries = [SlotEntry::NONE; BATCH];
        let mut unsure = 0u64;
        for (at, (print, home)) in homes.iter().enumerate() {
            let glance = home.glance(*print);
            unsure |= u64::from(glance.unsure) << at;
            ids[at] = glance.entry;
            entries[at] = self.slab.entries.get_or_vacant(glance.entry);
        }
        let entries = &entries[..hashes.len()];
        black_box(entries.iter().fold(0, |sum, entry| sum ^ entry.generation));

        for (at, (entry, hash)) in entries.iter().zip(hashes).enumerate() {
            let different = !entry.is_committed_as(namespace, GROUP, hash);
            unsure |= u64::from(different & (ids[at] != NO_ENTRY)) << at;
            ids[at] |= u32::from(different).wrapping_neg();
        }
        while unsure != 0 {
            let at = unsure.trailing_zeros() as usize;
            ids[at] = self.find_committed(namespace, GROUP, &hashes[at]).unwrap_or(NO_ENTRY);
            unsure &= unsure - 1;
        }
        ids
    }

    #[inline]
    fn committed_as(&self, id: u32, namespace: u32, group: u32, hash: &BlockHash) -> bool {
        self.slab.entries.get_or_vacant(id).is_committed_as(namespace, group, hash)
    }

    /// True if a block is committed. No access.
    pub fn is_kept(&self, key: &BlockKey) -> bool {
        self.find_committed(key.namespace, key.group, &key.hash).is_some()
    }

    /// Returns the slot of a block being filled.
    pub fn filling(&self, key: &BlockKey) -> Option<SlotRef> {
        let entries = &self.slab.entries;
        let id = self.index.find_entry(KeyPrint::of_key(key), |id| entries.get(id).block_key() == *key)?;
        (entries.get(id).state() == SlotState::Filling).then(|| self.slab.slot_ref(id))
    }

    #[cold]
    pub(super) fn find_committed(&self, namespace: u32, group: u32, hash: &BlockHash) -> Option<u32> {
        let print = KeyPrint::new(namespace, group, hash);
        self.index.find_entry(print, |id| self.committed_as(id, namespace, group, hash))
    }
}
