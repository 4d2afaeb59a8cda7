//! What every part of the core is given for a call: the tier, the time of the event, and the list of what must be done.

use std::time::Duration;

use shm_protocol::key::BlockKey;
use shm_protocol::pool::SlotRef;
use tiers::FillError;
use tiers::dram::Dram;

use super::arrivals::Arrivals;
use super::event::{Action, Ended};
use super::handover::{Kept, Lost, Produced};
use super::namespaces::{Binding, Namespaces};
use super::quotas::Quotas;
use super::stats::Stats;
use super::timing::{Timed, Took};
use crate::system::clock::millis;

/// Some 10 ms with what is evicted for them.
const CLAIMS_MAX: usize = 8192;

#[derive(Debug)]
pub(super) struct Context {
    /// When the event was seen; the same in whole milliseconds.
    pub(super) now: Duration,
    pub(super) now_ms: u64,
    /// The sidecar is to end: nothing new is taken.
    pub(super) draining: bool,
    /// Blocks of earlier lives may be in the pool that nobody knows of yet.
    pub(super) opening: bool,
    /// A tier, or a part of one, could not be read: a later start may find unknown blocks there.
    pub(super) unread: bool,
    pub(super) dram: Dram,
    /// What is on its way into it.
    pub(super) arrivals: Arrivals,
    /// What is kept in it for engines that have not loaded it.
    pub(super) kept: Kept,
    /// Blocks that were computed for such engines and are not kept.
    pub(super) lost: Lost,
    /// What saves have begun and ended in this event.
    pub(super) produced: Produced,
    pub(super) namespaces: Namespaces,
    pub(super) quotas: Quotas,
    /// Blocks that one event takes slots for. The others wait for the next turn.
    pub(super) claims_max: usize,
    pub(super) stats: Stats,
    /// What must be done, in this order.
    pub(super) actions: Vec<Action>,
    /// What is over since the event before.
    pub(super) over: Vec<Took>,
    /// What the event has changed in DRAM; empty between two, and kept for its capacity.
    pub(super) changes: Vec<(BlockKey, bool)>,
    /// Requests that are over since the event before.
    pub(super) ended: Vec<Ended>,
}

// === impl Context ===

impl Context {
    /// Nothing was told yet of an empty tier.
    pub(super) fn new(dram: Dram) -> Self {
        let (arrivals, kept) = (Arrivals::new(&dram), Kept::new(&dram));
        let (now, now_ms, draining, opening, unread, lost, produced, namespaces, quotas, stats) =
            Default::default();
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

    /// It is this late.
    pub(super) fn set_now(&mut self, now: Duration) {
        (self.now, self.now_ms) = (now, millis(now));
    }

    /// Something is over that began then.
    pub(super) fn took(&mut self, what: Timed, since: Duration) {
        self.over.push(Took { what, since });
    }

    /// What is over, leases among it.
    pub(super) fn drain_over(&mut self) -> impl Iterator<Item = Took> + '_ {
        let leases = self.dram.drain_ended_leases().map(|(how, granted_ms)| Took {
            what: Timed::Lease(how),
            since: Duration::from_millis(granted_ms),
        });
        self.over.drain(..).chain(leases)
    }

    /// Frees what was evicted, disowns what was removed and stays for now, and has what was assigned anew formatted.
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

    /// Takes a slot for a block, which is written into it from now on.
    pub(super) fn begin_fill(&mut self, key: BlockKey, binding: &Binding) -> Result<SlotRef, FillError> {
        let slot = self.take_slot(key, binding)?;
        self.fill(slot, key, binding);
        Ok(slot)
    }

    /// The same for a block of a save. What its engine has kept the longest for others gives way where the engine has no room, and to a
    /// block of a handover also where no slot is left: of that, what was kept before its request came, when `kept_before` blocks were.
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

    /// A block is written into its slot from now on.
    pub(super) fn fill(&mut self, slot: SlotRef, key: BlockKey, binding: &Binding) {
        self.actions.push(Action::FillSlot { slot, namespace: binding.digest, key });
    }

    /// A block that another engine will load is here: of a step that was seen to be done then, or found in the pool.
    pub(super) fn keep(&mut self, key: &BlockKey, binding: &Binding, fenced: Option<Duration>) {
        self.kept.keep(key, binding.whose, fenced, self.now_ms, &mut self.dram);
    }

    /// A save has ended a block: whoever awaits it is told at the end of this event.
    pub(super) fn end_saved(&mut self, key: BlockKey, kept: bool) {
        if let Some(waiting) = self.arrivals.end_saved(&key) {
            self.produced.ended.push((key, waiting, kept));
        }
    }

    /// Gives back a slot whose block is not kept.
    pub(super) fn abandon(&mut self, slot: SlotRef) {
        self.dram.abandon(slot);
        self.actions.push(Action::FreeSlot { slot });
    }
}
