//! Quotas: limits for the bytes of some namespaces' blocks together, and the order of their evictions.
//!
//! A quota has its own queues. They hold its blocks in the order of the queues of their classes, so the
//! policy finds the quota's next block without meeting blocks of other quotas. That costs 12 bytes a slot, in
//! a tier with quotas alone.

use crate::entries::{PolicyLists, SlotEntry, Tables};
use crate::ledger::{HolderId, UsedBytes};
use crate::list::{LinkTable, ListLink, NIL, Spot};

#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct QuotaId(u32);

// === impl QuotaId ===

impl QuotaId {
    /// Returns its place among all quotas.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

#[derive(Debug)]
pub(crate) struct PoolQuota {
    pub(crate) bytes_max: u64,
    /// Bytes of its blocks, those being filled too.
    pub(crate) used: UsedBytes,
    queues: PolicyLists,
}

/// The quota of a slot's block.
#[derive(Copy, Clone, Debug)]
pub(crate) struct QuotaMember {
    quota: u32,
    link: ListLink,
}

const _: () = assert!(size_of::<QuotaMember>() == 12);

/// All quotas and their members.
#[derive(Debug)]
pub(crate) struct PoolQuotas {
    list: Vec<PoolQuota>,
    pub(crate) members: Tables<QuotaMember>,
}

// === impl QuotaMember ===

impl QuotaMember {
    pub(crate) const NONE: Self = Self { quota: NIL, link: ListLink { previous: NIL, next: NIL } };

    pub(crate) fn link(&self) -> ListLink {
        self.link
    }
}

impl LinkTable for Tables<QuotaMember> {
    fn link(&mut self, id: u32) -> &mut ListLink {
        &mut self.get_mut(id).link
    }
}

// === impl PoolQuotas ===

impl PoolQuotas {
    pub(crate) fn new(members: Tables<QuotaMember>) -> Self {
        Self { list: Vec::new(), members }
    }

    pub(crate) fn add_quota(&mut self, bytes_max: u64) -> QuotaId {
        self.list.push(PoolQuota { bytes_max, used: UsedBytes::default(), queues: PolicyLists::default() });
        QuotaId(self.list.len() as u32 - 1)
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = QuotaId> + use<> {
        (0..self.list.len() as u32).map(QuotaId)
    }

    pub(crate) fn get(&self, quota: QuotaId) -> &PoolQuota {
        &self.list[quota.0 as usize]
    }

    pub(crate) fn queues(&self, quota: QuotaId) -> &PolicyLists {
        &self.get(quota).queues
    }

    /// True if a slot's block is charged to a quota.
    pub(crate) fn is_member(&self, id: u32, quota: QuotaId) -> bool {
        self.members.get(id).quota == quota.0
    }

    /// Charges a block of no queue to a quota.
    pub(crate) fn charge(&mut self, id: u32, quota: QuotaId, holder: HolderId, bytes: u64) {
        self.members.get_mut(id).quota = quota.0;
        self.list[quota.0 as usize].used.add_bytes(holder, bytes);
    }

    /// Ends the charge of a block that has left its queue, and returns its quota.
    pub(crate) fn discharge(&mut self, id: u32, holder: HolderId, bytes: u64) -> Option<QuotaId> {
        let member = self.members.get_mut(id);
        let quota = QuotaId(std::mem::replace(&mut member.quota, NIL));
        self.list.get_mut(quota.0 as usize)?.used.take_bytes(holder, bytes);
        Some(quota)
    }

    /// Removes a block from its quota's list, when it leaves a list of its class.
    pub(crate) fn leave_list(&mut self, id: u32, entry: &SlotEntry) {
        let Some(quota) = self.list.get_mut(self.members.get(id).quota as usize) else { return };
        if let Some(list) = quota.queues.entry_list(entry) {
            list.remove(&mut self.members, id);
        }
    }

    /// Adds a block to its quota's list, when it enters a list of its class.
    pub(crate) fn entered(&mut self, id: u32, entry: &SlotEntry, spot: Spot) {
        let quota_of = |id| self.members.get(id).quota;
        let spot = spot.among(|ahead| quota_of(ahead) == quota_of(id));
        let Some(quota) = self.list.get_mut(quota_of(id) as usize) else { return };
        if let Some(list) = quota.queues.entry_list(entry) {
            list.push(&mut self.members, id, spot);
        }
    }
}
