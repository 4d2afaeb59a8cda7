//! Blocks of hints, by action and outcome.

use prometheus::{IntCounterVec, Registry};
use shm_protocol::hints::HintEnd;
use tiers::dram::HintedCounts;

use super::figures::{raise_counter, register_counters};
use crate::core::HintStats;

const HELP: &str = "Blocks named by hints of clients, by action and outcome. done: also if the block is still being saved; \
     clipped: the engine's limit left it out; missing: it is nowhere.";

/// The counters of all actions.
#[derive(Debug)]
pub(super) struct HintMetrics(IntCounterVec);

// === impl HintMetrics ===

impl HintMetrics {
    /// Registers the counters, each with a zero.
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let counters = register_counters(registry, "hint_blocks_total", HELP, &["action", "outcome"])?;
        let metrics = Self(counters);
        metrics.publish_hints(&HintStats::default());
        Ok(metrics)
    }

    /// Publishes the counts.
    pub(super) fn publish_hints(&self, stats: &HintStats) {
        for (action, HintedCounts { done, clipped, missing }) in stats.by_action() {
            for (end, blocks) in
                [(HintEnd::Done, done), (HintEnd::Clipped, clipped), (HintEnd::Missing, missing)]
            {
                raise_counter(&self.0.with_label_values(&[action.name(), end.name()]), blocks);
            }
        }
    }
}
