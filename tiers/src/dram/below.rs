//! What a tier below is told: which blocks go next, and which have gone, with what is known of them.

use std::collections::HashSet;

use shm_protocol::key::BlockKey;

use super::Dram;
use crate::ledger::Group;
use crate::policy::Policy;
use crate::slab::Among;
use crate::standing::SORTS;
pub use crate::standing::Standing;

/// A tier below, as far as DRAM knows it.
#[derive(Debug, Default)]
pub(super) struct Below {
    pub(super) bytes: u64,
    gone: Vec<(BlockKey, Standing)>,
}

/// A block that DRAM has and is to give up.
#[derive(Copy, Clone, Debug)]
pub struct Leaving {
    pub key: BlockKey,
    pub bytes: u64,
    pub standing: Standing,
}

/// Says of blocks elsewhere which of them goes next.
#[derive(Copy, Clone, Debug)]
pub struct Judge<'a>(&'a Policy);

// === impl Below ===

impl Below {
    #[inline]
    pub(super) fn note(&mut self, key: BlockKey, standing: Standing) {
        if self.bytes > 0 {
            self.gone.push((key, standing));
        }
    }

    /// Slots of a pool and of what lies below it, where the pool has so many.
    pub(super) fn room(&self, slots: u64, pool_bytes: u64) -> u64 {
        slots + (u128::from(slots) * u128::from(self.bytes) / u128::from(pool_bytes)) as u64
    }
}

// === impl Judge ===

impl Judge<'_> {
    /// The one that goes next of entries at lists' tails.
    pub(crate) fn least(&self, tails: impl Iterator<Item = (u32, Standing)>) -> Option<u32> {
        self.0.least(tails)
    }
}

// === impl Dram: what lies below ===

impl Dram {
    /// Blocks that DRAM gives up may be kept in so many more bytes below it: they are judged as those of one room. From now on drain
    /// [`Dram::drain_gone`] after every event.
    pub(crate) fn add_below(&mut self, bytes: u64) {
        self.below.bytes += bytes;
    }

    /// Blocks that were evicted since the last call, in that order.
    pub fn drain_gone(&mut self) -> impl Iterator<Item = (BlockKey, Standing)> + '_ {
        self.below.gone.drain(..)
    }

    /// What judges blocks below.
    pub fn judge(&self) -> Judge<'_> {
        Judge(&self.policy)
    }

    /// The blocks that go next, in that order, while `bytes` more of each size or in each quota come; `most` of each at most.
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

    /// All blocks, those that are likeliest to be used again first, and none before its parent.
    pub fn best(&self, out: &mut Vec<Leaving>) {
        let mut seen = HashSet::new();
        for sort in (0..SORTS).rev() {
            for class in &self.slab.classes {
                for holder in class.queues.holders() {
                    let first = class.queues.of(holder)[sort].head();
                    for id in std::iter::successors(first, |id| self.slab.behind(*id)) {
                        let above = std::iter::successors(Some(id), |id| self.slab.parent(*id));
                        let line: Vec<u32> = above.take_while(|id| seen.insert(*id)).collect();
                        out.extend(line.into_iter().rev().map(|id| self.leaving(id)));
                    }
                }
            }
        }
    }

    fn list_out(&self, among: Among, losers: Group, bytes: u64, most: usize, out: &mut Vec<Leaving>) {
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
        Leaving { key: entry.key(), bytes: self.slab.block_bytes(id), standing: entry.standing }
    }
}
