//! Which quota a block counts to.

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
    /// Quotas of a tier to which no block has come.
    pub(super) fn new(list: &[Quota], dram: &mut Dram) -> Self {
        let ids = list.iter().map(|quota| dram.add_quota(quota.size.as_bytes())).collect();
        Self { list: list.into(), ids }
    }

    /// The quota of a namespace. Of a salted one its engine's is asked for; only what an earlier life left of such a one counts
    /// by the salted name, since nothing tells whose it was.
    pub(super) fn of(&self, namespace: NamespaceDigest) -> Option<QuotaId> {
        quotas::of(&self.list, namespace).map(|at| self.ids[at])
    }

    /// Bytes that count to each quota, in order.
    pub(super) fn used<'a>(&'a self, dram: &'a Dram) -> impl Iterator<Item = u64> + 'a {
        self.ids.iter().map(|id| dram.quota(*id).bytes_used)
    }
}
