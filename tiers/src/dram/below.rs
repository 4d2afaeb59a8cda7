//! The interface to a tier below: the blocks to be evicted next and the evicted ones, with their standings.

use std::collections::HashSet;

use shm_protocol::key::BlockKey;

use super::Dram;
use crate::entries::FIRST_OUT;
use crate::ledger::HolderSet;
use crate::policy::Policy;
use crate::slab::Among;
pub use crate::standing::Standing;

/// The tier below, as known to DRAM.
#[derive(Debug, Default)]
pub(super) struct Below {
    pub(super) bytes: u64,
    gone: Vec<(BlockKey, Standing)>,
}

/// A kept block to be evicted soon, or to be copied to the tier below without need.
#[derive(Copy, Clone, Debug)]
pub struct Leaving {
    pub key: BlockKey,
    pub bytes: u64,
    /// [`Standing::ABOVE`] for a copy without need: it has no worth of its own.
    pub standing: Standing,
}

/// Chooses the next block to evict from a tier below.
#[derive(Copy, Clone, Debug)]
pub struct Judge<'a>(&'a Policy);

// === impl Leaving ===

impl Leaving {
    /// A block that DRAM keeps.
    pub fn copy(key: BlockKey, bytes: u64) -> Self {
        Self { key, bytes, standing: Standing::ABOVE }
    }
}

// === impl Below ===

impl Below {
    #[inline]
    pub(super) fn note_gone(&mut self, key: BlockKey, standing: Standing) {
        if self.bytes > 0 {
            self.gone.push((key, standing));
        }
    }

    /// Returns the slots of a pool with `slots` slots and of the tier below it together.
    pub(super) fn room(&self, slots: u64, pool_bytes: u64) -> u64 {
        slots + (u128::from(slots) * u128::from(self.bytes) / u128::from(pool_bytes)) as u64
    }
}

// === impl Judge ===

impl Judge<'_> {
    /// Returns the block evicted next, among entries at the tails of lists.
    pub(crate) fn least(&self, tails: impl Iterator<Item = (u32, Standing)>) -> Option<u32> {
        self.0.least(tails)
    }

    /// True if a block of the first standing has fewer expected uses than one of the second.
    pub(crate) fn is_worth_less(&self, one: Standing, other: Standing) -> bool {
        self.0.uses(one) < self.0.uses(other)
    }
}

// === impl Dram: what lies below ===

impl Dram {
    /// Adds bytes of a tier below, to keep evicted blocks: the two tiers are judged as one room. From now on
    /// drain [`Dram::drain_gone`] after every event.
    pub(crate) fn add_below(&mut self, bytes: u64) {
        self.below.bytes += bytes;
    }

    /// Returns blocks evicted since the last call, in that order.
    pub fn drain_gone(&mut self) -> impl Iterator<Item = (BlockKey, Standing)> + '_ {
        self.below.gone.drain(..)
    }

    /// Returns the judge of blocks below.
    pub fn judge(&self) -> Judge<'_> {
        Judge(&self.policy)
    }

    /// Lists the blocks evicted next, in that order, by `bytes` of new blocks of each size or in each quota;
    /// at most `most` of each.
    pub fn next_out(&self, bytes: u64, most: usize, out: &mut Vec<Leaving>) {
        let slab = &self.slab;
        let losers = self.ledger.losers(self.ledger.used());
        let classes =
            slab.classes.iter().enumerate().filter(|(_, class)| class.segments > 0 && !slab.has_fresh());
        for (at, class) in classes {
            let free = u64::from(class.free.len()) * class.geometry.block_bytes;
            self.list_out(Among::Class(at), losers, bytes.saturating_sub(free), most, out);
        }
        if let Some(quotas) = &slab.quotas {
            for quota in quotas.ids() {
                let of = quotas.get(quota);
                let free = of.bytes_max.saturating_sub(of.used.all());
                let losers = self.ledger.losers(&of.used);
                self.list_out(Among::Quota(quota), losers, bytes.saturating_sub(free), most, out);
            }
        }
    }

    /// Lists all blocks, the likeliest to be used again first, and no block before its parent.
    pub fn best(&self, out: &mut Vec<Leaving>) {
        let mut seen = HashSet::new();
        for list in (0..=FIRST_OUT).rev() {
            for class in &self.slab.classes {
                for holder in class.queues.holders() {
                    let first = class.queues.holder_lists(holder)[list].head();
                    for id in std::iter::successors(first, |id| self.slab.behind(*id)) {
                        let above = std::iter::successors(Some(id), |id| self.slab.parent(*id));
                        let line: Vec<u32> = above.take_while(|id| seen.insert(*id)).collect();
                        out.extend(line.into_iter().rev().map(|id| self.leaving(id)));
                    }
                }
            }
        }
    }

    fn list_out(&self, among: Among, losers: HolderSet, bytes: u64, most: usize, out: &mut Vec<Leaving>) {
        let mut listed = 0;
        for id in self.policy.order(&self.slab, among, losers).take(most) {
            if listed >= bytes {
                return;
            }
            let leaving = self.leaving(id);
            listed += leaving.bytes;
            out.push(leaving);
        }
    }

    fn leaving(&self, id: u32) -> Leaving {
        let entry = self.slab.entries.get(id);
        Leaving { key: entry.block_key(), bytes: self.slab.block_bytes(id), standing: entry.standing }
    }
}
