//! The pool comes into service behind the first engines, some of it in each turn.

use std::time::Duration;

use super::Runtime;
use crate::engine::Event;

/// How often memory that was not reserved yet is looked for.
pub(super) const OPENING_POLL: Duration = Duration::from_millis(5);
/// Parts that one turn takes in at most, some milliseconds: engines are answered in between.
const TURN_PARTS: usize = 8;

// === impl Runtime: opening ===

impl Runtime {
    /// Brings into service what one turn has time for; whether there was anything.
    pub(super) fn open_pool(&mut self) -> bool {
        let Some(mut opener) = self.opener.take() else { return false };
        let mut parts = 0;
        while parts < TURN_PARTS
            && let Some(opened) = opener.next(&self.pool)
        {
            self.handle(Event::Opened(opened));
            parts += 1;
        }
        let stats = self.core.stats();
        self.progress.opened(opener.segments(), stats.adopted_blocks + stats.unverified_blocks);
        if parts > 0 || self.pool.reserving() {
            self.opener = Some(opener);
        } else {
            self.report_opened();
        }
        parts > 0
    }

    fn report_opened(&self) {
        self.progress.finish();
        tracing::debug!(after_ms = self.now.as_millis() as u64, "the whole pool is in service");
    }
}
