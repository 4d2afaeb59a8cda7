//! The quotas of blocks, by namespace.

use shm_protocol::key::NamespaceDigest;
use tiers::dram::{Dram, QuotaId};

use crate::config::quotas::{self, Quota};

/// The quotas, each with the tier's name for it.
#[derive(Debug, Default)]
pub(super) struct Quotas {
    list: Vec<Quota>,
    ids: Vec<QuotaId>,
}

// === impl Quotas ===

impl Quotas {
    /// Returns the quotas of a tier before its first block.
    pub(super) fn new(list: &[Quota], dram: &mut Dram) -> Self {
        let ids = list.iter().map(|quota| dram.add_quota(quota.size.as_bytes())).collect();
        Self { list: list.into(), ids }
    }

    /// Returns the quota of a namespace. Callers pass the unsalted namespace of an engine. A salted one comes
    /// only from blocks of an earlier life, whose engine is unknown.
    pub(super) fn of(&self, namespace: NamespaceDigest) -> Option<QuotaId> {
        quotas::of(&self.list, namespace).map(|at| self.ids[at])
    }

    /// Returns the bytes counted to each quota, in order.
    pub(super) fn used<'a>(&'a self, dram: &'a Dram) -> impl Iterator<Item = u64> + 'a {
        self.ids.iter().map(|id| dram.quota(*id).bytes_used)
    }
}
