//! Brings the pool into service while engines are already served, one part in each turn.

use std::time::Duration;

use super::Runtime;
use crate::core::CoreEvent;

/// Interval of polls for newly reserved memory.
pub(super) const OPENING_POLL: Duration = Duration::from_millis(5);

// === impl Runtime: opening ===

impl Runtime {
    /// Brings one part into service. Returns false if there was none.
    pub(super) fn open_part(&mut self) -> bool {
        let Some(opener) = &mut self.opener else { return false };
        if let Some(opened) = opener.next(&self.pool) {
            let segments = opener.segments();
            self.handle(CoreEvent::Opened(opened));
            let stats = self.core.stats();
            self.progress.opened(segments, stats.adopted_blocks + stats.unverified_blocks);
            return true;
        }
        if !self.pool.reserving() {
            self.opener = None;
            self.core.end_opening();
            self.report_opened();
        }
        false
    }

    fn report_opened(&self) {
        self.progress.finish();
        tracing::debug!(after_ms = self.now.as_millis() as u64, "the whole pool is in service");
    }
}
