//! The checksum threads: blocks are queued, and each ends some time after the one before it.

use sidecar::core::CoreEvent;

use super::Life;
use crate::ctx::{Ctx, Micros};

// === impl Life: checksums ===

impl Life {
    /// Handles one computed checksum: notes it, or passes the result of a verification to the core. Returns
    /// false if there was none.
    pub(super) fn take_checksum(&mut self, ctx: &mut Ctx) -> bool {
        if let Some((slot, _)) = self.sums.pop_front_if(|(_, due)| *due <= ctx.now) {
            if let Some(checksum) = self.pool.sum(slot) {
                assert!(self.pool.set_checksum(slot, checksum), "the slot has not changed since");
                ctx.hit("sidecar noted a checksum");
            }
            return true;
        }
        let Some((key, slot, _)) = self.verifications.pop_front_if(|(.., due)| *due <= ctx.now) else {
            return false;
        };
        let whole = self.pool.verify(slot);
        assert!(whole || ctx.changed.contains(&slot.offset), "nobody has changed {slot:?}");
        self.ledger.verified(slot, whole, self.pool.region());
        self.handle(CoreEvent::Verified { key, slot, whole }, ctx);
        true
    }

    /// Time of the next computed checksum.
    pub(super) fn next_checksum(&self) -> Option<Micros> {
        let sum = self.sums.front().map(|(_, due)| *due);
        let verification = self.verifications.front().map(|(.., due)| *due);
        sum.into_iter().chain(verification).min()
    }
}
