//! The threads that compute checksums: blocks wait their turn, and each ends some time after the one before it.

use sidecar::core::Event;

use super::Life;
use crate::ctx::{Ctx, Micros};

// === impl Life: checksums ===

impl Life {
    /// Whether a checksum was computed; it is noted, or the core is told what came of the comparison.
    pub(super) fn take_checksum(&mut self, ctx: &mut Ctx) -> bool {
        if let Some((slot, _)) = self.sums.pop_front_if(|(_, due)| *due <= ctx.now) {
            if let Some(checksum) = self.pool.sum(slot) {
                assert!(self.pool.set_checksum(slot, checksum), "nothing came between");
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
        self.handle(Event::Verified { key, slot, whole }, ctx);
        true
    }

    /// When the next one is computed.
    pub(super) fn next_checksum(&self) -> Option<Micros> {
        let sum = self.sums.front().map(|(_, due)| *due);
        let verification = self.verifications.front().map(|(.., due)| *due);
        sum.into_iter().chain(verification).min()
    }
}
