//! Metrics of the tiers below DRAM, each with its source as the label `tier`; without a tier there are none.

use prometheus::Registry;

use super::figures::{Figure, MetricFigures};
use crate::core::TierStats;

const COUNTERS: &[Figure<TierStats>] = &[
    ("read_blocks_total", "Blocks that came from the tier into DRAM.", |s| s.read_blocks),
    ("read_bytes_total", "Bytes of the blocks that came from the tier into DRAM.", |s| s.read_bytes),
    ("failed_blocks_total", "Blocks requested from the tier that did not come.", |s| s.failed_blocks),
];

const GAUGES: &[Figure<TierStats>] = &[
    ("reading_blocks", "Blocks on their way from the tier.", |s| s.reading_blocks),
    ("reading_bytes", "Bytes of the blocks on their way from the tier.", |s| s.reading_bytes),
    (
        "read_bytes_per_second",
        "Bytes that the tier gave per second with a read under way, since the start.",
        TierStats::bytes_per_second,
    ),
];

/// Registers the metrics of all tiers.
pub(super) fn register_tiers(registry: &Registry) -> Result<MetricFigures<TierStats>, prometheus::Error> {
    MetricFigures::labelled(registry, ("tier", "tier"), COUNTERS, GAUGES)
}
