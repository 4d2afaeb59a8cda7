//! The context of each call within the core: the DRAM tier, the time of the event, and the list of actions.

use std::time::Duration;

use shm_protocol::key::BlockKey;
use shm_protocol::pool::SlotRef;
use tiers::FillError;
use tiers::dram::Dram;

use super::arrivals::Arrivals;
use super::event::{Action, FinishedRequest};
use super::handover::{HandoverBlocks, Lost, Produced};
use super::namespaces::{Binding, Namespaces};
use super::prefetched::PrefetchedBlocks;
use super::quotas::CoreQuotas;
use super::stats::CoreStats;
use super::timing::{Timed, Took};
use crate::system::clock::count_millis;

/// Slots for so many blocks take some 10 ms, with the evictions for them.
const CLAIMS_MAX: usize = 8192;

#[derive(Debug)]
pub(super) struct Context {
    /// The time of the event; the same in whole milliseconds.
    pub(super) now: Duration,
    pub(super) now_ms: u64,
    /// The sidecar is to end: nothing new is taken.
    pub(super) draining: bool,
    /// Unknown blocks of earlier lives may still be in the pool.
    pub(super) opening: bool,
    /// A tier, or a part of one, could not be read: a later start may find unknown blocks there.
    pub(super) unread: bool,
    pub(super) dram: Dram,
    /// Blocks on their way into DRAM.
    pub(super) arrivals: Arrivals,
    /// Blocks kept in DRAM for other engines, until these have loaded them.
    pub(super) kept: HandoverBlocks,
    /// Blocks computed for other engines, and not kept.
    pub(super) lost: Lost,
    /// The begins and ends of saves in this event.
    pub(super) produced: Produced,
    pub(super) prefetched: PrefetchedBlocks,
    pub(super) namespaces: Namespaces,
    pub(super) quotas: CoreQuotas,
    /// Limit of the blocks for which one event takes slots. The others wait for the next turn.
    pub(super) claims_max: usize,
    pub(super) stats: CoreStats,
    /// The actions so far, in their order.
    pub(super) actions: Vec<Action>,
    /// Operations ended since the event before.
    pub(super) over: Vec<Took>,
    /// Changes in DRAM by this event: true for an added block. Empty between two events, and kept for its
    /// capacity.
    pub(super) changes: Vec<(BlockKey, bool)>,
    /// Requests ended since the event before.
    pub(super) ended: Vec<FinishedRequest>,
}

// === impl Context ===

impl Context {
    /// Returns the context of a core over an empty tier.
    pub(super) fn new(dram: Dram) -> Self {
        let (arrivals, kept) = (Arrivals::new(&dram), HandoverBlocks::new(&dram));
        let (now, now_ms, draining, opening, unread, lost, produced, namespaces, quotas, stats) =
            Default::default();
        let prefetched = PrefetchedBlocks::default();
        let (claims_max, actions, over, changes) = (CLAIMS_MAX, Vec::new(), Vec::new(), Vec::new());
        Self {
            now,
            now_ms,
            draining,
            opening,
            unread,
            dram,
            arrivals,
            kept,
            lost,
            produced,
            prefetched,
            namespaces,
            quotas,
            claims_max,
            stats,
            actions,
            over,
            changes,
            ended: Vec::new(),
        }
    }

    /// Sets the time of the event.
    pub(super) fn set_now(&mut self, now: Duration) {
        (self.now, self.now_ms) = (now, count_millis(now));
    }

    /// Notes the end of an operation begun at `since`.
    pub(super) fn took(&mut self, what: Timed, since: Duration) {
        self.over.push(Took { what, since });
    }

    /// Returns the operations ended so far, leases among them.
    pub(super) fn drain_over(&mut self) -> impl Iterator<Item = Took> + '_ {
        let leases = self.dram.drain_ended_leases().map(|(how, granted_ms)| Took {
            what: Timed::Lease(how),
            since: Duration::from_millis(granted_ms),
        });
        self.over.drain(..).chain(leases)
    }

    /// Frees the slots of evicted blocks, disowns the slots of removed blocks still in use, and has
    /// reassigned segments formatted.
    pub(super) fn apply_evictions(&mut self) {
        self.actions.extend(self.dram.drain_disowned().map(|slot| Action::DisownSlot { slot }));
        self.actions.extend(self.dram.drain_evicted().map(|slot| Action::FreeSlot { slot }));
        let assigned = self.dram.drain_assigned();
        self.actions.extend(
            assigned.map(|new| Action::AssignSegment { segment: new.segment, block_bytes: new.block_bytes }),
        );
    }

    /// Takes a slot for a block. Nothing is written into it before [`Context::fill`].
    pub(super) fn take_slot(&mut self, key: BlockKey, binding: &Binding) -> Result<SlotRef, FillError> {
        let taken = self.dram.begin_fill(key, binding.block_bytes(), binding.whose);
        self.apply_evictions();
        taken
    }

    /// Takes a slot for a block, and begins to fill it.
    pub(super) fn begin_fill(&mut self, key: BlockKey, binding: &Binding) -> Result<SlotRef, FillError> {
        let slot = self.take_slot(key, binding)?;
        self.fill(slot, key, binding);
        Ok(slot)
    }

    /// Takes a slot for a block of a save, and begins to fill it.
    ///
    /// If the engine has no room, the blocks it has kept the longest for others give way. For a block of a
    /// handover they also give way if no slot is left, but only blocks kept before its request came, when
    /// `kept_before` blocks had been kept.
    pub(super) fn claim(
        &mut self,
        key: BlockKey,
        binding: &Binding,
        kept_before: Option<u64>,
    ) -> Result<SlotRef, FillError> {
        let (whose, bytes) = (binding.whose, binding.block_bytes());
        self.kept.make_room(whose.holder, bytes, &mut self.dram);
        loop {
            let filled = self.begin_fill(key, binding);
            let gives_way = filled == Err(FillError::NoSpace) && self.dram.may_evict();
            let Some(before) = kept_before.filter(|_| gives_way) else { return filled };
            let Some(gone) = self.kept.make_slot(whose, bytes, before, &mut self.dram) else { return filled };
            self.lost.insert(gone, self.now_ms);
        }
    }

    /// Begins to fill a slot with a block.
    pub(super) fn fill(&mut self, slot: SlotRef, key: BlockKey, binding: &Binding) {
        self.actions.push(Action::FillSlot { slot, namespace: binding.digest, key });
    }

    /// Keeps a block here for another engine. `fenced`: when its step was first seen done; `None`: the block
    /// was found in the pool.
    pub(super) fn keep(&mut self, key: &BlockKey, binding: &Binding, fenced: Option<Duration>) {
        self.kept.keep(key, binding.whose, fenced, self.now_ms, &mut self.dram);
    }

    /// Lets a block of an engine go whose request has a later one in its place.
    pub(super) fn drop_replaced(&mut self, key: &BlockKey, binding: &Binding) {
        self.stats.replaced_blocks += u64::from(self.dram.drop_replaced(binding.whose.holder, key));
        self.apply_evictions();
    }

    /// Notes the end of a saved block. Queries and loads waiting for it get this end when the event is over.
    pub(super) fn end_saved(&mut self, key: BlockKey, kept: bool) {
        if let Some(waiting) = self.arrivals.end_saved(&key) {
            self.produced.ended.push((key, waiting, kept));
        }
    }

    /// Gives back the slot of a block that is not kept.
    pub(super) fn abandon(&mut self, slot: SlotRef) {
        self.dram.abandon(slot);
        self.actions.push(Action::FreeSlot { slot });
    }
}
