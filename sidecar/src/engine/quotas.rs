//! Which quota a block counts to.

use shm_protocol::key::NamespaceDigest;
use tiers::dram::QuotaId;

use super::Core;
use crate::config::quotas::{self, Quota};

/// The quotas, each with the tier's name for it.
#[derive(Debug, Default)]
pub(super) struct Quotas {
    list: Vec<Quota>,
    ids: Vec<QuotaId>,
}

// === impl Core ===

impl Core {
    /// Limits what namespaces may take, before the first block comes.
    pub fn limit(&mut self, quotas: &[Quota]) {
        let ids = quotas.iter().map(|quota| self.dram.add_quota(quota.size.as_bytes())).collect();
        self.quotas = Quotas { list: quotas.into(), ids };
    }

    /// The quota of a namespace. Of a salted one its engine's is asked for; only what an earlier life left of such a one counts
    /// by the salted name, since nothing tells whose it was.
    pub(super) fn quota_of(&self, namespace: NamespaceDigest) -> Option<QuotaId> {
        quotas::of(&self.quotas.list, namespace).map(|at| self.quotas.ids[at])
    }

    /// Bytes that count to each quota, in order.
    pub fn quotas_used(&self) -> impl Iterator<Item = u64> + '_ {
        self.quotas.ids.iter().map(|id| self.dram.quota(*id).bytes_used)
    }
}
