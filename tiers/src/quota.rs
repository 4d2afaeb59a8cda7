//! Quotas: limits for the bytes of some namespaces' blocks together, and the order of their evictions.
//!
//! A quota has its own queues. They hold its blocks in the order of the queues of their classes, so the
//! policy finds the quota's next block without meeting blocks of other quotas. That costs 12 bytes a slot, in
//! a tier with quotas alone.

use crate::entries::{Entry, Queues, Tables};
use crate::ledger::{HolderId, Used};
use crate::list::{Link, Links, NIL, Spot};

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
pub(crate) struct Quota {
    pub(crate) bytes_max: u64,
    /// Bytes of its blocks, those being filled too.
    pub(crate) used: Used,
    queues: Queues,
}

/// The quota of a slot's block.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Member {
    quota: u32,
    link: Link,
}

const _: () = assert!(size_of::<Member>() == 12);

/// All quotas and their members.
#[derive(Debug)]
pub(crate) struct Quotas {
    list: Vec<Quota>,
    pub(crate) members: Tables<Member>,
}

// === impl Member ===

impl Member {
    pub(crate) const NONE: Self = Self { quota: NIL, link: Link { previous: NIL, next: NIL } };

    pub(crate) fn link(&self) -> Link {
        self.link
    }
}

impl Links for Tables<Member> {
    fn link(&mut self, id: u32) -> &mut Link {
        &mut self.get_mut(id).link
    }
}

// === impl Quotas ===

impl Quotas {
    pub(crate) fn new(members: Tables<Member>) -> Self {
        Self { list: Vec::new(), members }
    }

    pub(crate) fn add(&mut self, bytes_max: u64) -> QuotaId {
        self.list.push(Quota { bytes_max, used: Used::default(), queues: Queues::default() });
        QuotaId(self.list.len() as u32 - 1)
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = QuotaId> + use<> {
        (0..self.list.len() as u32).map(QuotaId)
    }

    pub(crate) fn get(&self, quota: QuotaId) -> &Quota {
        &self.list[quota.0 as usize]
    }

    pub(crate) fn queues(&self, quota: QuotaId) -> &Queues {
        &self.get(quota).queues
    }

    /// Charges a block of no queue to a quota.
    pub(crate) fn charge(&mut self, id: u32, quota: QuotaId, holder: HolderId, bytes: u64) {
        self.members.get_mut(id).quota = quota.0;
        self.list[quota.0 as usize].used.add(holder, bytes);
    }

    /// Ends the charge of a block that has left its queue, and returns its quota.
    pub(crate) fn discharge(&mut self, id: u32, holder: HolderId, bytes: u64) -> Option<QuotaId> {
        let member = self.members.get_mut(id);
        let quota = QuotaId(std::mem::replace(&mut member.quota, NIL));
        self.list.get_mut(quota.0 as usize)?.used.take(holder, bytes);
        Some(quota)
    }

    /// Removes a block from its quota's list, when it leaves a list of its class.
    pub(crate) fn left(&mut self, id: u32, entry: &Entry) {
        let Some(quota) = self.list.get_mut(self.members.get(id).quota as usize) else { return };
        if let Some(list) = quota.queues.list(entry) {
            list.remove(&mut self.members, id);
        }
    }

    /// Adds a block to its quota's list, when it enters a list of its class.
    pub(crate) fn entered(&mut self, id: u32, entry: &Entry, spot: Spot) {
        let quota_of = |id| self.members.get(id).quota;
        let spot = spot.among(|ahead| quota_of(ahead) == quota_of(id));
        let Some(quota) = self.list.get_mut(quota_of(id) as usize) else { return };
        if let Some(list) = quota.queues.list(entry) {
            list.push(&mut self.members, id, spot);
        }
    }
}
