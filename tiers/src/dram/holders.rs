//! Whose blocks make room for whose.

use super::{Dram, HolderId, Holdings, QuotaId};
use crate::entries::{Place, State};
use crate::ledger::Group;
use crate::slab::Among;

/// What a block counts to.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct Whose {
    /// Who saves it, or sent for it.
    pub holder: HolderId,
    /// The quota of its namespace.
    pub quota: Option<QuotaId>,
}

// === impl Dram: holders ===

impl Dram {
    /// A new holder: an engine that will keep blocks.
    pub fn enter(&mut self) -> HolderId {
        self.ledger.enter()
    }

    /// A holder is gone. Its leases end by [`Dram::release`]; its blocks stay.
    pub fn leave(&mut self, holder: HolderId) {
        self.ledger.leave(holder);
    }

    /// A holder was seen to be at work: for a second from now on the pool is shared with it.
    pub fn work(&mut self, holder: HolderId, now_ms: u64) {
        self.ledger.work(holder, now_ms);
    }

    /// What a holder holds now.
    pub fn holdings(&self, holder: HolderId) -> Holdings {
        self.ledger.holdings(holder)
    }

    pub fn at_work(&self) -> u64 {
        self.ledger.at_work()
    }

    /// Bytes that a holder may still have filled, leased or promised to it.
    pub fn room(&self, holder: HolderId) -> u64 {
        self.room_without(holder, 0)
    }

    /// The same if so many bytes were leased to it no more.
    pub(super) fn room_without(&self, holder: HolderId, leased: u64) -> u64 {
        let pinned = (self.stats.bytes_leased + self.ledger.filling()).saturating_sub(leased);
        self.ledger.room(holder, pinned, leased)
    }

    /// Makes a slot of a class free for a holder: of a block of those who may lose one, else of its own. Where those who may have
    /// none in this class, a segment of theirs changes its class. False if there is no room for it.
    pub(super) fn make_way(&mut self, class: usize, holder: HolderId) -> bool {
        let losers = self.ledger.losers(self.ledger.used());
        if self.evict_next(Among::Class(class), losers) {
            return true;
        }
        let beyond = self.class_beyond(class, holder, losers);
        if beyond.is_some_and(|beyond| self.steal(class, |other| other == beyond))
            || self.evict_next(Among::Class(class), Group::from(holder))
        {
            return true;
        }
        let may_steal = self.ledger.at_work() < 2 || self.ledger.is_short(holder);
        may_steal && self.steal(class, |other| other != class)
    }

    /// The class of most blocks of whoever uses the most, if that one would still use no less than `holder` with a segment less,
    /// and `holder` with one more.
    fn class_beyond(&self, class: usize, holder: HolderId, losers: Group) -> Option<usize> {
        let used = self.ledger.used();
        let least = used.of(holder) + 2 * self.config.segment_bytes;
        let others = self.ledger.ids().filter(|id| *id != holder && losers.has(*id));
        let beyond = others.filter(|id| used.of(*id) >= least).max_by_key(|id| used.of(*id))?;
        if self.ledger.at_work() < 2 { None } else { self.slab.main_class(beyond, class) }
    }

    /// Takes a segment from another class of which `is_meant` is true; whether there was one.
    fn steal(&mut self, class: usize, is_meant: impl Fn(usize) -> bool) -> bool {
        let Some(segment) = self.slab.victim(is_meant) else { return false };
        for id in self.slab.blocks(segment) {
            self.evict(id);
        }
        self.slab.withdraw(segment);
        self.slab.assign(segment, class);
        self.note_assigned(segment, class);
        true
    }

    /// Evicts the block that goes next of those that these holders have; whether there was one.
    pub(super) fn evict_next(&mut self, among: Among, losers: Group) -> bool {
        let victim = self.policy.next(&mut self.slab, among, losers);
        victim.into_iter().for_each(|id| self.evict(id));
        victim.is_some()
    }

    /// Counts the block that an entry gets.
    pub(super) fn charge(&mut self, id: u32, whose: Whose) {
        let bytes = self.slab.block_bytes(id);
        self.slab.entries.get_mut(id).claims.set_holder(whose.holder);
        self.ledger.charge(whose.holder, bytes);
        if let (Some(quota), Some(quotas)) = (whose.quota, &mut self.slab.quotas) {
            quotas.charge(id, quota, whose.holder, bytes);
        }
    }

    /// Counts the block that an entry had no more; what it counted to.
    pub(super) fn discharge(&mut self, id: u32, bytes: u64) -> Whose {
        let holder = self.slab.entries.get(id).claims.holder();
        self.ledger.discharge(holder, bytes);
        let quota = self.slab.quotas.as_mut().and_then(|quotas| quotas.discharge(id, holder, bytes));
        Whose { holder, quota }
    }

    /// A whole block is another holder's from now on.
    pub(super) fn hand_over(&mut self, id: u32, holder: HolderId) {
        let bytes = self.slab.block_bytes(id);
        self.slab.move_to(id, Place::Detached);
        let whose = self.discharge(id, bytes);
        self.charge(id, Whose { holder, ..whose });
    }

    /// Panics unless what the ledger says of every holder is what its blocks and leases are. Looks at all of them.
    pub fn audit_ledger(&self) {
        let mut counted = [Holdings::default(); 1 << u8::BITS];
        let segments = 0..self.slab.segments.len();
        for id in segments.flat_map(|segment| self.slab.used(segment)) {
            let entry = self.slab.entries.get(id);
            let holdings = &mut counted[entry.claims.holder().index()];
            match entry.state() {
                State::Filling => holdings.filling += self.slab.block_bytes(id),
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
            // Holds are counted with leases, and are listed nowhere.
            let is_right =
                said == Holdings { leased: said.leased, ..counted } && said.leased >= counted.leased;
            assert!(is_right, "{id:?}: the ledger says {said:?}, and there is {counted:?}");
        }
    }
}
