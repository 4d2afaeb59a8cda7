//! Quotas: limits of bytes, within which a quota's blocks make room for its next ones.
//!
//! The caller states the quota of every block's namespace. A quota is a limit and no reservation: below it a
//! block's room comes from any holder chosen by the policy.

use super::{Dram, FillError, HolderId, QuotaId};
use crate::ledger::Group;
use crate::quota::Quota;
use crate::slab::Among;

/// Most blocks evicted by one filling for its quota: one is enough, unless block sizes differ or an earlier
/// life had a larger quota. It bounds such a filling to some 50 us; the next fillings go on.
const EVICTIONS_MAX: u32 = 64;

/// The fill level of a quota.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct QuotaStats {
    /// The limit for the bytes of its blocks.
    pub bytes_max: u64,
    /// The bytes of its blocks, those being filled too.
    pub bytes_used: u64,
}

// === impl Dram: quotas ===

impl Dram {
    /// Adds a quota, before the first block comes.
    pub fn add_quota(&mut self, bytes_max: u64) -> QuotaId {
        self.slab.quotas_mut().add(bytes_max)
    }

    /// Returns the fill level of a quota.
    pub fn quota(&self, quota: QuotaId) -> QuotaStats {
        let quota = self.quota_of(quota);
        QuotaStats { bytes_max: quota.bytes_max, bytes_used: quota.used.all() }
    }

    pub(crate) fn quotas(&self) -> impl Iterator<Item = QuotaStats> + '_ {
        let ids = self.slab.quotas.iter().flat_map(|quotas| quotas.ids());
        ids.map(|id| self.quota(id))
    }

    fn quota_of(&self, quota: QuotaId) -> &Quota {
        self.slab.quotas.as_ref().expect("an id was given out with a quota").get(quota)
    }

    /// Evicts blocks of a quota until it has room for another block of a holder. A quota is shared as the
    /// pool is.
    pub(super) fn make_room(
        &mut self,
        quota: QuotaId,
        block_bytes: u64,
        holder: HolderId,
    ) -> Result<(), FillError> {
        let QuotaStats { bytes_max, .. } = self.quota(quota);
        let bytes_before_max = bytes_max.checked_sub(block_bytes).ok_or(FillError::NoSpace)?;
        for _ in 0..EVICTIONS_MAX {
            if self.quota(quota).bytes_used <= bytes_before_max {
                return Ok(());
            }
            if self.hold.lasts() {
                return Err(FillError::NoSpace);
            }
            let losers = self.ledger.losers(&self.quota_of(quota).used);
            let among = Among::Quota(quota);
            if !self.evict_next(among, losers) && !self.evict_next(among, Group::from(holder)) {
                return Err(FillError::NoSpace);
            }
        }
        let made = self.quota(quota).bytes_used <= bytes_before_max;
        if made { Ok(()) } else { Err(FillError::NoSpace) }
    }
}
