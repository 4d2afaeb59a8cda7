//! Holders of blocks, and evictions of other holders' blocks for a holder's new block.

use shm_protocol::pool::Geometry;

use super::{Dram, HolderId, Holdings, QuotaId};
use crate::entries::{ListPlace, SlotState};
use crate::ledger::HolderSet;
use crate::slab::Among;

/// The holder and the quota charged for a block.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct BlockAccount {
    /// The engine saving the block, or waiting for it from a tier below.
    pub holder: HolderId,
    /// The quota of its namespace.
    pub quota: Option<QuotaId>,
}

// === impl Dram: holders ===

impl Dram {
    /// Registers a new holder, an engine.
    pub fn enter_holder(&mut self) -> HolderId {
        self.ledger.enter_holder()
    }

    /// Ends a holder, and its hints. Its leases end by [`Dram::release`]; its blocks stay, on no device.
    pub fn leave_holder(&mut self, holder: HolderId) {
        self.end_hints(holder);
        self.policy.lose_device(&mut self.slab, holder);
        self.ledger.leave_holder(holder);
    }

    /// Notes that a holder was at work: for a second from now on it has a share of the pool.
    pub fn work(&mut self, holder: HolderId, now_ms: u64) {
        if self.ledger.work(holder, now_ms) {
            self.trim_hinted();
        }
    }

    /// Returns the bytes of a holder.
    pub fn holdings(&self, holder: HolderId) -> Holdings {
        self.ledger.holdings(holder)
    }

    pub fn at_work(&self) -> u64 {
        self.ledger.at_work()
    }

    /// Returns the further bytes a holder may have filled, leased or promised.
    pub fn room(&self, holder: HolderId) -> u64 {
        self.room_without(holder, 0)
    }

    /// Returns the blocks of this size in a holder's share of the pool, as many holders as are at work now.
    pub fn share_blocks(&self, block_bytes: u64) -> u64 {
        self.slots_of(block_bytes) / self.at_work().max(1)
    }

    /// Returns the further blocks of this size that a holder may have filled, leased or held now, beside all
    /// those that are.
    pub fn holdable(&self, holder: HolderId, block_bytes: u64) -> u64 {
        let pinned = self.stats.bytes_leased + self.ledger.filling();
        let free = self.slots_of(block_bytes).saturating_sub(pinned.div_ceil(block_bytes));
        free.min(self.room(holder) / block_bytes)
    }

    fn slots_of(&self, block_bytes: u64) -> u64 {
        let geometry = Geometry::new(self.config.segment_bytes, block_bytes);
        geometry.map_or(0, |geometry| self.stats.segments * u64::from(geometry.slot_count))
    }

    /// Returns the same as if `leased` fewer bytes were leased to it.
    pub(super) fn room_without(&self, holder: HolderId, leased: u64) -> u64 {
        let pinned = (self.stats.bytes_leased + self.ledger.filling()).saturating_sub(leased);
        self.ledger.room(holder, pinned, leased)
    }

    /// Makes a slot of a class free for a holder: by evicting a block of the holders who may lose one,
    /// otherwise one of its own. If those holders have none in this class, a segment of theirs changes its
    /// class. Hints of others give way to a holder short of its share. Returns false if there is no room.
    pub(super) fn make_way(&mut self, class: usize, holder: HolderId) -> bool {
        while !self.make_way_beside_hints(class, holder) {
            if !self.end_hints_beside(holder) {
                return false;
            }
        }
        true
    }

    fn make_way_beside_hints(&mut self, class: usize, holder: HolderId) -> bool {
        let losers = self.ledger.losers(self.ledger.used());
        if self.evict_next(Among::Class(class), losers) {
            return true;
        }
        let beyond = self.class_beyond(class, holder, losers);
        if beyond.is_some_and(|beyond| self.steal(class, |other| other == beyond))
            || self.evict_next(Among::Class(class), HolderSet::from(holder))
        {
            return true;
        }
        let may_steal = self.ledger.at_work() < 2 || self.ledger.is_short(holder);
        may_steal && self.steal(class, |other| other != class)
    }

    /// Returns the main class of the holder with the most bytes. `None` if that holder would have fewer bytes than
    /// `holder` after losing a segment to it.
    fn class_beyond(&self, class: usize, holder: HolderId, losers: HolderSet) -> Option<usize> {
        let used = self.ledger.used();
        let least = used.of_holder(holder) + 2 * self.config.segment_bytes;
        let others = self.ledger.ids().filter(|id| *id != holder && losers.has(*id));
        let beyond = others.filter(|id| used.of_holder(*id) >= least).max_by_key(|id| used.of_holder(*id))?;
        if self.ledger.at_work() < 2 { None } else { self.slab.main_class(beyond, class) }
    }

    /// Takes a segment from another class accepted by `is_meant`. Returns false if there is none.
    fn steal(&mut self, class: usize, is_meant: impl Fn(usize) -> bool) -> bool {
        let Some(segment) = self.slab.victim(is_meant) else { return false };
        for id in self.slab.committed_blocks(segment) {
            self.evict(id);
        }
        self.slab.withdraw(segment);
        self.slab.assign(segment, class);
        self.note_assigned(segment, class);
        true
    }

    /// Evicts the next block of these holders. Returns false if there is none.
    pub(super) fn evict_next(&mut self, among: Among, losers: HolderSet) -> bool {
        let mut victim = self.policy.next(&mut self.slab, among, losers);
        while victim.is_none() && self.end_retained(among, losers) {
            victim = self.policy.next(&mut self.slab, among, losers);
        }
        victim.into_iter().for_each(|id| self.evict(id));
        victim.is_some()
    }

    /// Charges an entry's new block to its holder and quota.
    pub(super) fn charge(&mut self, id: u32, whose: BlockAccount) {
        let bytes = self.slab.block_bytes(id);
        self.slab.entries.get_mut(id).claims.set_holder(whose.holder);
        self.ledger.charge(whose.holder, bytes);
        if let (Some(quota), Some(quotas)) = (whose.quota, &mut self.slab.quotas) {
            quotas.charge(id, quota, whose.holder, bytes);
        }
    }

    /// Ends the charge of an entry's block, and returns its holder and quota.
    pub(super) fn discharge(&mut self, id: u32, bytes: u64) -> BlockAccount {
        let holder = self.slab.entries.get(id).claims.holder();
        self.ledger.discharge(holder, bytes);
        let quota = self.slab.quotas.as_mut().and_then(|quotas| quotas.discharge(id, holder, bytes));
        BlockAccount { holder, quota }
    }

    /// Changes the holder of a whole block.
    pub(super) fn hand_over(&mut self, id: u32, holder: HolderId) {
        let bytes = self.slab.block_bytes(id);
        self.slab.move_to(id, ListPlace::Detached);
        let whose = self.discharge(id, bytes);
        self.charge(id, BlockAccount { holder, ..whose });
    }

    /// Panics unless the ledger's numbers of every holder match its blocks and leases. Looks at all of them.
    pub fn audit_ledger(&self) {
        let mut counted = [Holdings::default(); 1 << u8::BITS];
        let segments = 0..self.slab.segments.len();
        for id in segments.flat_map(|segment| self.slab.used(segment)) {
            let entry = self.slab.entries.get(id);
            let holdings = &mut counted[entry.claims.holder().index()];
            match entry.state() {
                SlotState::Filling => holdings.filling += self.slab.block_bytes(id),
                _ => holdings.kept += self.slab.block_bytes(id),
            }
        }
        for lease in self.leases.live() {
            let holdings = &mut counted[lease.holder.index()];
            match lease.is_promised {
                true => holdings.promised += self.bytes_of(lease.entries),
                false => holdings.leased += self.bytes_of(lease.entries),
            }
        }
        for id in self.ledger.ids() {
            let (said, counted) = (self.holdings(id), counted[id.index()]);
            // Holds are counted with leases, and no list has them.
            let is_right =
                said == Holdings { leased: said.leased, ..counted } && said.leased >= counted.leased;
            assert!(is_right, "{id:?}: the ledger says {said:?}, and there is {counted:?}");
        }
    }
}
