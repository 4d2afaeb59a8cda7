//! Finding blocks: side by side, so that what is far away is waited for once; and what using them means for what stays.

use std::hint::black_box;

use shm_protocol::key::{BlockHash, BlockKey, GROUP};
use shm_protocol::pool::SlotRef;

use super::{Dram, Ending, HolderId};
use crate::entries::{Entry, State};
use crate::index::{Bucket, NO_ENTRY, Print};

/// Keys looked up side by side, so that their cache misses overlap: more than the misses a core keeps in flight, few
/// enough that a run that ends early wastes little.
const BATCH: usize = 64;
/// Entries of slots no further apart than this lie within some cache lines, which a core loads ahead.
const NEAR: u32 = 8;

// === impl Dram: look-ups ===

impl Dram {
    /// The leading run of `hashes` that is committed, which is used as of now. No lease.
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

    /// Whether each of `hashes` is committed, one answer appended to `found` for each. No access.
    pub fn lookup(&self, namespace: u32, hashes: &[BlockHash], found: &mut Vec<bool>) {
        for batch in hashes.chunks(BATCH) {
            let ids = self.find_batch(namespace, batch);
            found.extend(ids[..batch.len()].iter().map(|id| *id != NO_ENTRY));
        }
    }

    /// A request computes on these blocks, wherever it found them: those that are committed are used as of now.
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

    /// The request with these keys is over: what is kept of them is sorted by how it ended. Blocks whose holder is gone are
    /// `holder`'s from now on.
    pub fn end_chain(&mut self, holder: HolderId, namespace: u32, hashes: &[BlockHash], ending: Ending) {
        if hashes.is_empty() || self.slab.assigned() == 0 {
            return;
        }
        let prints = hashes.iter().map(|hash| Print::new(namespace, GROUP, hash));
        let room = self.below.room(self.slots_in_service(), self.config.pool_bytes);
        let turn = self.policy.turn(prints, room, ending);
        self.chain.clear();
        let (mut depth, mut own) = (hashes.len(), 0);
        self.deepest_first(namespace, hashes, |dram, id| {
            depth -= 1;
            let Some(id) = id else { return };
            own += usize::from(depth >= turn.shared);
            let before = dram.slab.entries.get(id).claims.holder();
            if before != holder && !dram.ledger.is_here(before) {
                dram.hand_over(id, holder);
            }
            dram.chain.push(id);
        });
        self.policy.used(&mut self.slab, &self.chain, turn, own);
    }

    /// Calls `take` for every block of a chain, with its entry if it is committed, the deepest first: of what is then put at a list's
    /// head in this order, parents come to lie before their children.
    fn deepest_first(
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
            // A chain that was moved before lies in one list, each block behind its parent, and mostly in neighbouring slots. There
            // the index is not asked. Entries that lie apart it finds faster, since their cache misses overlap.
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

    /// Slots once every segment has blocks, about.
    fn slots_in_service(&self) -> u64 {
        self.slab.slots() * self.stats.segments / (self.slab.assigned() as u64).max(1)
    }

    /// Calls `take` for every block of the leading run, until it says false.
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

    /// The committed entries of up to [`BATCH`] keys. Each of the two loads that miss the cache, bucket and entry, is
    /// first done for all keys in a loop that does nothing else: then the core keeps some twenty misses in flight, and
    /// the loops that compare find everything near.
    fn find_batch(&self, namespace: u32, hashes: &[BlockHash]) -> [u32; BATCH] {
        let mut homes = [(Print::default(), Bucket::NONE); BATCH];
        for (home, hash) in homes.iter_mut().zip(hashes) {
            let print = Print::new(namespace, GROUP, hash);
            *home = (print, self.index.home(print));
        }
        let homes = &homes[..hashes.len()];
        black_box(homes.iter().fold(0, |sum, (_, home)| sum ^ home.load()));

        let mut ids = [NO_ENTRY; BATCH];
        let mut entries = [Entry::NONE; BATCH];
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
            ids[at] = self.find(namespace, GROUP, &hashes[at]).unwrap_or(NO_ENTRY);
            unsure &= unsure - 1;
        }
        ids
    }

    #[inline]
    fn committed_as(&self, id: u32, namespace: u32, group: u32, hash: &BlockHash) -> bool {
        self.slab.entries.get_or_vacant(id).is_committed_as(namespace, group, hash)
    }

    /// The slot of a block that is being filled.
    pub fn filling(&self, key: &BlockKey) -> Option<SlotRef> {
        let entries = &self.slab.entries;
        let id = self.index.find(Print::of(key), |id| entries.get(id).key() == *key)?;
        (entries.get(id).state() == State::Filling).then(|| self.slab.slot_ref(id))
    }

    #[cold]
    pub(super) fn find(&self, namespace: u32, group: u32, hash: &BlockHash) -> Option<u32> {
        let print = Print::new(namespace, group, hash);
        self.index.find(print, |id| self.committed_as(id, namespace, group, hash))
    }
}
