//! What may take how much: a quota's blocks make room for its next ones.
//!
//! Which namespaces count to a quota is the caller's to say, with every block. A quota is a limit and no reservation: below it
//! a block takes its room from whoever the policy names.

use super::{Dram, FillError, QuotaId};
use crate::policy::Among;

/// Blocks that one filling evicts at most for its quota: one, unless block sizes differ or an earlier life had a larger quota.
/// Bounds such a filling to some 50 us; the next ones go on.
const EVICTIONS_MAX: u32 = 64;

/// How full a quota is.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct QuotaStats {
    /// Bytes that its blocks may take.
    pub bytes_max: u64,
    /// Bytes that they take, those being filled too.
    pub bytes_used: u64,
}

// === impl Dram: quotas ===

impl Dram {
    /// A further quota, before the first block comes.
    pub fn add_quota(&mut self, bytes_max: u64) -> QuotaId {
        self.slab.quotas_mut().add(bytes_max)
    }

    /// How full a quota is.
    pub fn quota(&self, quota: QuotaId) -> QuotaStats {
        let quota = self.slab.quotas.as_ref().expect("an id was given out with a quota").get(quota);
        QuotaStats { bytes_max: quota.bytes_max, bytes_used: quota.bytes_used }
    }

    /// Evicts of a quota's blocks until there is room in it for another.
    pub(super) fn make_room(&mut self, quota: QuotaId, block_bytes: u64) -> Result<(), FillError> {
        let QuotaStats { bytes_max, .. } = self.quota(quota);
        let bytes_before_max = bytes_max.checked_sub(block_bytes).ok_or(FillError::NoSpace)?;
        for _ in 0..EVICTIONS_MAX {
            if self.quota(quota).bytes_used <= bytes_before_max {
                return Ok(());
            }
            if self.hold.lasts() {
                return Err(FillError::NoSpace);
            }
            let victim = self.policy.next(&mut self.slab, Among::Quota(quota)).ok_or(FillError::NoSpace)?;
            self.evict(victim);
        }
        let made = self.quota(quota).bytes_used <= bytes_before_max;
        if made { Ok(()) } else { Err(FillError::NoSpace) }
    }

    /// Counts the block that an entry gets.
    pub(super) fn charge(&mut self, id: u32, quota: Option<QuotaId>) {
        let Some(quota) = quota else { return };
        let bytes = self.slab.block_bytes(id);
        let quotas = self.slab.quotas.as_mut().expect("an id was given out with a quota");
        quotas.charge(id, quota, bytes);
    }

    /// Counts the block that an entry had no more.
    pub(super) fn discharge(&mut self, id: u32, bytes: u64) {
        if let Some(quotas) = &mut self.slab.quotas {
            quotas.discharge(id, bytes);
        }
    }
}
