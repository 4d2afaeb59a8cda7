//! The sidecar's metrics for Prometheus. The data thread writes atomics; the admin thread reads them.

mod durations;
pub mod figures;
pub mod given_up;
mod hints;
mod holders;
mod peers;
mod process;
mod reads;
mod ssd;

use mesh::refusals::RefusalCounts;
use mesh::transport::PeerNumber;
use std::time::Duration;

use prometheus::{Counter, Gauge, GaugeVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry};
use tiers::ssd::Backend;

use self::durations::Durations;
use self::figures::{
    Figure, MetricFigures, Reading, counters_of, register_counter, register_gauge, show_gauge,
};
use self::hints::HintMetrics;
use self::holders::HoldersMetrics;
use self::peers::PeersMetrics;
use self::ssd::SsdMetrics;
use crate::compare::Number;
use crate::config::Disk;
use crate::core::{CoreStats, EngineHolder, PeersStats, SsdStats, TierStats, Timed};
use crate::pages::quotas::Levels;

shm_protocol::named! {
    /// Reason of a session's end; the label of `pillion_sessions_closed_total`.
    pub enum CloseReason {
        /// The engine process ended or closed its socket.
        HangUp = "hang_up",
        /// The engine wrote a value against the protocol.
        Malformed = "malformed",
        /// Its messages are well formed and contradict each other or the engine's other sessions.
        Rejected = "rejected",
        /// Copies into its memory wait behind a gate closed by its engine.
        Parked = "parked",
    }
}

/// All metrics of the sidecar.
#[derive(Debug)]
pub struct Metrics {
    figures: MetricFigures<CoreStats>,
    durations: Durations,
    wait_seconds: Counter,
    differences: GaugeVec,
    pool_bytes: IntGauge,
    pool_lost: IntGauge,
    pool_unsummed: IntGauge,
    parked: IntGauge,
    unique_value: Gauge,
    closed: IntCounterVec,
    pinning: PinningMetrics,
    quotas: Levels,
    hints: HintMetrics,
    holders: HoldersMetrics,
    tiers: MetricFigures<TierStats>,
    ssd: Option<SsdMetrics>,
    peers: Option<PeersMetrics>,
}

/// The metrics of the thread that locks the pool for GPUs.
#[derive(Clone, Debug)]
pub struct PinningMetrics {
    /// Bytes locked so far.
    pub bytes: IntGauge,
    /// Slices that could not be locked; the first failure ends the attempt.
    pub failures: IntCounter,
}

const COUNTERS: &[Figure<CoreStats>] = &[
    ("queries_total", "Queries answered.", |s| s.queries),
    ("query_blocks_total", "Blocks asked for by queries.", |s| s.query_blocks),
    ("query_hit_blocks_total", "Blocks found by queries.", |s| s.query_hit_blocks),
    (
        "query_waits_total",
        "Queries that waited for blocks from a disk or a peer, or for the verification of blocks.",
        |s| s.waits,
    ),
    (
        "query_waits_timed_out_total",
        "Queries answered before all blocks that they waited for had arrived.",
        |s| s.waits_timed_out,
    ),
    (
        "query_waits_slower_total",
        "Queries answered before all blocks that they waited for had arrived, because the engine computes the rest sooner.",
        |s| s.waits_slower,
    ),
    (
        "query_early_answers_total",
        "Queries answered while some of their blocks were still on the way.",
        |s| s.early_answers,
    ),
    ("query_streamed_answers_total", "Queries answered with more blocks than the pool holds.", |s| {
        s.streamed_answers
    }),
    ("handover_queries_total", "Requests that asked for a prompt which another engine computes.", |s| {
        s.handover_queries
    }),
    ("handover_promises_total", "Prompts that an engine promised to compute for another engine.", |s| {
        s.handover_promises
    }),
    (
        "handover_promises_refused_total",
        "Prompts that an engine could not promise because 64 of its promises were open. A request for one waits as for \
         an unpromised prompt (pillion.promise_wait_ms).",
        |s| s.handover_promises_refused,
    ),
    (
        "handover_promises_broken_total",
        "Waits for a prompt that an engine here or at a peer had promised, which ended without the promised block. After \
         three in a row, requests do not wait for promises of that engine or peer; one tries after 10 s, later after up to 60 s.",
        |s| s.handover_promises_broken,
    ),
    ("handover_blocks_total", "Blocks saved, or found already kept, for another engine.", |s| {
        s.handover_blocks
    }),
    (
        "handover_exhausted_total",
        "Requests for another engine's prompt whose wait ended without it, so that their own engine computes it.",
        |s| s.handover_exhausted,
    ),
    (
        "handover_without_producer_total",
        "Requests for another engine's prompt that did not wait: no other engine of their namespace is here or at a \
         peer, or three earlier waits ended without blocks and none was saved since.",
        |s| s.handover_without_producer,
    ),
    (
        "handover_beyond_limit_total",
        "Requests for another engine's prompt that did not wait: 64 requests of their engine were already waiting.",
        |s| s.handover_beyond_limit,
    ),
    (
        "leases_cut_total",
        "Queries that found fewer blocks than are kept because their engine already leases all of its share; raise \
         --dram.",
        |s| s.leases_cut,
    ),
    ("saves_posted_blocks_total", "Blocks that engines asked to save.", |s| s.saves_posted_blocks),
    (
        "saves_leaving_blocks_total",
        "Those of them saved before the engine reused their blocks, with `pillion.keep_copies` = `no`. Kept ones were not copied again.",
        |s| s.saves_leaving_blocks,
    ),
    (
        "replaced_blocks_total",
        "Evicted states of answers, each once a later state of its answer was saved.",
        |s| s.replaced_blocks,
    ),
    ("saved_blocks_total", "Blocks saved.", |s| s.saved_blocks),
    ("saved_bytes_total", "Bytes of saved blocks, all ranks together.", |s| s.saved_bytes),
    ("saves_lost_to_reuse_total", "Blocks not saved because the engine reused their memory first.", |s| {
        s.saves_lost_to_reuse
    }),
    (
        "saves_unaccepted_total",
        "Blocks not saved because their engine did not accept the output of their step, or runs a release before 0.3.0.",
        |s| s.saves_unaccepted,
    ),
    (
        "not_finite_blocks_total",
        "Blocks not kept because of a NaN or an infinite number in them: their engine computes wrong KV.",
        |s| s.not_finite_blocks,
    ),
    ("loaded_blocks_total", "Blocks loaded, counted once for each rank.", |s| s.loaded_blocks),
    ("loaded_bytes_total", "Bytes loaded by ranks.", |s| s.loaded_bytes),
    ("load_failures_total", "Loads that a rank could not complete.", |s| s.load_failures),
    ("load_refusals_total", "Loads that failed because they had no lease or a block did not arrive.", |s| {
        s.load_refusals
    }),
    (
        "load_mismatches_total",
        "Loads that failed because they were planned for another namespace than the rank serves.",
        |s| s.load_mismatches,
    ),
    ("evicted_blocks_total", "Blocks evicted to make room.", |s| s.evicted_blocks),
    ("unreachable_blocks_total", "Blocks that saves found kept although their parent block was not.", |s| {
        s.unreachable_blocks
    }),
    ("adopted_blocks_total", "Blocks taken over from the pool file of an earlier sidecar.", |s| {
        s.adopted_blocks
    }),
    (
        "removed_blocks_total",
        "Blocks removed because the KV of the engine that saved them is not trusted.",
        |s| s.removed_blocks,
    ),
    ("checks_total", "Checks that compared an engine's own KV with kept blocks.", |s| s.checks),
    ("checks_differing_total", "Checks that found a larger difference than rounding explains.", |s| {
        s.checks_differing
    }),
    (
        "checks_undecided_total",
        "Checks without a verdict because no block was kept to compare with, or there was no \
         room.",
        |s| s.checks_undecided,
    ),
    (
        "adoption_dropped_total",
        "Slots of an earlier sidecar's pool file that were dropped: they held no whole block, or \
         no checksum of it.",
        |s| s.adoption_dropped,
    ),
    (
        "adoption_corrupt_total",
        "Blocks of an earlier sidecar's pool file that were dropped because their bytes have \
         changed since.",
        |s| s.adoption_corrupt,
    ),
];

const GAUGES: &[Figure<CoreStats>] = &[
    ("blocks", "Blocks kept in memory.", |s| s.blocks),
    ("pool_used_bytes", "Bytes of the blocks kept in memory.", |s| s.pool_used_bytes),
    (
        "adoption_unverified_blocks",
        "Blocks of an earlier sidecar that cannot be found until they are verified.",
        |s| s.unverified_blocks,
    ),
    ("sessions", "Engine processes connected.", |s| s.sessions),
    ("handover_kept_bytes", "Bytes kept for engines that have not loaded them yet.", |s| {
        s.handover_kept_bytes
    }),
    ("hint_retained_bytes", "Bytes that hints let go after all others, once for each engine.", |s| {
        s.retained_bytes
    }),
    ("hint_pinned_bytes", "Bytes that hints keep from eviction, once for each engine.", |s| s.pinned_bytes),
    ("leases", "Queries whose blocks are held for a load.", |s| s.leases),
    (
        "barred_engines",
        "Connected engines barred from their namespace because their KV differs; see pillion ctl \
         namespaces.",
        |s| s.barred_engines,
    ),
];

/// Reasons why blocks were not saved; the label of `pillion_saves_dropped_total`.
const SAVES_DROPPED: &[(&str, Reading<CoreStats>)] = &[
    ("no_room", |s| s.saves_without_room),
    ("too_large", |s| s.saves_too_large),
    ("unproven", |s| s.saves_unproven),
    ("doubted", |s| s.saves_doubted),
    ("not_finite", |s| s.saves_not_finite),
    // The total grows at the end of a save, the other reasons before.
    ("not_copied", |s| {
        let known = s.saves_without_room
            + s.saves_too_large
            + s.saves_unproven
            + s.saves_doubted
            + s.saves_not_finite;
        s.saves_dropped.saturating_sub(known + s.saves_unaccepted)
    }),
];

/// Reasons why blocks are no longer kept for another engine; the label of `pillion_handover_released_total`.
const RELEASED: &[(&str, Reading<CoreStats>)] =
    &[("loaded", |s| s.handover_loaded), ("expired", |s| s.handover_expired), ("full", |s| s.handover_full)];
/// Reasons why blocks for another engine were never kept; the label of `pillion_handover_lost_total`.
const LOST: &[(&str, Reading<CoreStats>)] =
    &[("reuse", |s| s.handover_lost_to_reuse), ("dropped", |s| s.handover_dropped)];

// HELP texts of counters with the label `reason`.
const DROPPED_HELP: &str = "Blocks not saved, by reason. no_room: every slot is leased or being filled, raise --dram or the \
     quota; too_large: the block exceeds a pool segment, raise --dram; not_copied: the engine left, too many \
     saves waited, or the step or copy failed; unproven: the engine has not passed its KV check yet.";
const RELEASED_HELP: &str = "Blocks no longer kept for another engine, by reason. loaded: that engine has them; expired: \
     --handover-ttl ended first; full: half of the pool, or all of a quota, was kept for engines, raise --dram \
     or --quota.";
const LOST_HELP: &str = "Blocks for another engine that were not kept, by reason. reuse: their engine reused the memory \
     before they were copied; dropped: there was no room, the copy failed, or their step was not accepted.";

// === impl Metrics ===

impl Metrics {
    /// Registers all metrics in `registry`.
    pub fn new(registry: &Registry, pool_bytes: u64) -> Result<Self, prometheus::Error> {
        process::register_process(registry)?;
        let figures = MetricFigures::new(registry, COUNTERS, GAUGES)?
            .with_reasons(registry, "saves_dropped_total", DROPPED_HELP, SAVES_DROPPED)?
            .with_reasons(registry, "handover_released_total", RELEASED_HELP, RELEASED)?
            .with_reasons(registry, "handover_lost_total", LOST_HELP, LOST)?;
        let waited = "Seconds that queries waited for blocks from a disk or a peer, or for the verification of blocks.";
        let wait_seconds = Counter::new("pillion_query_wait_seconds_total", waited)?;
        registry.register(Box::new(wait_seconds.clone()))?;
        let largest = "Largest difference found by a check that passed, as a fraction of its limit, by number format; 0 \
             before the first check.";
        let differences = GaugeVec::new(Opts::new("pillion_check_difference_max", largest), &["numbers"])?;
        registry.register(Box::new(differences.clone()))?;
        Number::ALL.iter().for_each(|number| differences.with_label_values(&[number.name()]).set(0.0));
        let size = register_gauge(registry, "pool_bytes", "Bytes of the DRAM pool.")?;
        show_gauge(&size, pool_bytes);
        let lost = register_gauge(
            registry,
            "pool_lost",
            "1 after the pool file was truncated while in use: nothing is kept until the \
                 sidecar restarts.",
        )?;
        let unsummed = "Blocks of the pool file without a checksum yet; if this sidecar were killed, the next one would \
             drop them.";
        let unsummed = register_gauge(registry, "pool_unsummed_blocks", unsummed)?;
        let parked = "Ranks no longer served because their engine closed the gate of copies into their memory; restart \
             that engine.";
        let parked = register_gauge(registry, "parked_ranks", parked)?;
        let help = "Seconds of computing expected to be lost with this sidecar's memory: for each block that no peer has, \
             the time to compute it times its expected uses, at most 1, while as many blocks are used as there is room for.";
        let unique_value = Gauge::new("pillion_unique_value_seconds", help)?;
        registry.register(Box::new(unique_value.clone()))?;
        let (ended, whys) = (
            "Sessions ended, by reason. hang_up: the engine process ended or closed its socket; \
             malformed: it wrote a message that no engine of this version writes; rejected: its messages contradict \
             each other or the engine's other sessions; parked: its engine closed the gate of copies into its memory.",
            CloseReason::ALL.map(CloseReason::name),
        );
        let closed = counters_of(registry, "sessions_closed_total", ended, "reason", &whys)?;
        let pinning = PinningMetrics {
            bytes: register_gauge(
                registry,
                "pool_pinned_bytes",
                "Bytes of the pool that are locked in memory for GPUs.",
            )?,
            failures: register_counter(
                registry,
                "pool_pin_failures_total",
                "Parts of the pool that could not be locked in memory; the first failure ends the attempt.",
            )?,
        };
        let quotas = Levels::default();
        Ok(Self {
            figures,
            durations: Durations::new(registry)?,
            wait_seconds,
            differences,
            pool_bytes: size,
            pool_lost: lost,
            pool_unsummed: unsummed,
            parked,
            unique_value,
            closed,
            pinning,
            quotas,
            hints: HintMetrics::new(registry)?,
            holders: HoldersMetrics::new(registry)?,
            tiers: reads::register_tiers(registry)?,
            ssd: None,
            peers: None,
        })
    }

    /// Adds quotas.
    pub fn with_quotas(self, quotas: Levels) -> Self {
        Self { quotas, ..self }
    }

    /// Adds the SSD tier, with the disks in use and the unusable disks.
    pub fn with_ssd(
        self,
        registry: &Registry,
        at_work: &[(&Disk, Backend)],
        left_out: &[Disk],
    ) -> Result<Self, prometheus::Error> {
        Ok(Self { ssd: Some(SsdMetrics::new(registry, at_work, left_out)?), ..self })
    }

    /// Adds the mesh.
    pub fn with_peers(self, registry: &Registry) -> Result<Self, prometheus::Error> {
        Ok(Self { peers: Some(PeersMetrics::new(registry)?), ..self })
    }

    /// The metrics of the thread that locks the pool.
    pub fn pinning(&self) -> PinningMetrics {
        self.pinning.clone()
    }

    /// Publishes the core's metrics. Called by the data thread alone, so read-then-add is exact.
    pub fn publish(&self, stats: &CoreStats) {
        self.figures.publish(stats);
        self.hints.publish_hints(&stats.hints);
        self.wait_seconds.inc_by((stats.wait_ms as f64 / 1e3 - self.wait_seconds.get()).max(0.0));
    }

    /// Counts the duration of an operation.
    pub fn took(&self, what: Timed, time: Duration) {
        self.durations.observe(what, time);
    }

    /// Publishes the largest differences of passed checks, relative to their limits.
    pub fn publish_differences(&self, largest: impl Iterator<Item = (Number, f64)>) {
        largest.for_each(|(number, part)| self.differences.with_label_values(&[number.name()]).set(part));
    }

    /// Publishes the bytes used of each quota.
    pub fn publish_quotas(&self, used: impl Iterator<Item = u64>) {
        self.quotas.publish_levels(used);
    }

    /// Publishes the holdings of each engine.
    pub fn publish_holders<'a>(&mut self, holders: impl Iterator<Item = EngineHolder<'a>>) {
        self.holders.publish_holders(holders);
    }

    /// Publishes the metrics of every tier.
    pub fn publish_tiers(&self, stats: &[TierStats]) {
        stats.iter().for_each(|tier| self.tiers.show_set(tier.source.name(), tier));
    }

    /// Publishes the metrics of the SSD tier.
    pub fn publish_ssd(&self, stats: &SsdStats) {
        if let Some(metrics) = &self.ssd {
            metrics.publish_disks(stats);
        }
    }

    /// Publishes the metrics of the mesh: `stats` from the core; `listed`, the numbers of addresses of --peer
    /// without a member and of unresolved names; `name` returns a member's name.
    pub fn publish_peers<'a>(
        &mut self,
        stats: &PeersStats,
        listed: (usize, usize),
        name: impl Fn(PeerNumber) -> Option<&'a str>,
    ) {
        if let Some(metrics) = &mut self.peers {
            metrics.publish_peers(stats, listed, name);
        }
    }

    /// Publishes the interval of batches of changes to a peer.
    pub fn publish_pace(&self, pace: Duration) {
        if let Some(metrics) = &self.peers {
            metrics.publish_pace(pace);
        }
    }

    /// Publishes the counts of refusals of peers and by peers.
    pub fn publish_refusals(&self, refusals: &RefusalCounts) {
        if let Some(metrics) = &self.peers {
            metrics.publish_refusals(refusals);
        }
    }

    /// Counts a session's end.
    pub fn session_closed(&self, reason: CloseReason) {
        self.closed.with_label_values(&[reason.name()]).inc();
    }

    /// Publishes the loss of the pool file.
    pub fn pool_lost(&self) {
        self.pool_lost.set(1);
    }

    /// Publishes the number of blocks without a checksum.
    pub fn publish_unsummed(&self, blocks: u64) {
        show_gauge(&self.pool_unsummed, blocks);
    }

    /// Publishes the number of stuck ranks.
    pub fn publish_parked(&self, ranks: usize) {
        show_gauge(&self.parked, ranks as u64);
    }

    /// Publishes the seconds of computing expected to be lost with this sidecar's memory.
    pub fn publish_unique_value(&self, seconds: f64) {
        self.unique_value.set(seconds);
    }

    /// Bytes of the pool.
    pub fn pool_bytes(&self) -> i64 {
        self.pool_bytes.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_figures_are_totals_and_not_sums_of_totals() {
        let registry = Registry::new();
        let metrics = Metrics::new(&registry, 7).unwrap();
        let dropped =
            CoreStats { saves_dropped: 9, saves_without_room: 4, saves_too_large: 2, ..CoreStats::default() };
        let stats = CoreStats { queries: 3, blocks: 5, wait_ms: 1500, ..dropped };
        metrics.publish(&stats);
        metrics.publish(&stats);
        metrics.session_closed(CloseReason::HangUp);
        metrics.publish_differences([(Number::Bfloat16, 0.25)].into_iter());
        let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        for line in [
            "pillion_queries_total 3",
            "pillion_blocks 5",
            "pillion_query_wait_seconds_total 1.5",
            "pillion_check_difference_max{numbers=\"bfloat16\"} 0.25",
            "pillion_check_difference_max{numbers=\"float32\"} 0",
            "pillion_saves_dropped_total{reason=\"no_room\"} 4",
            "pillion_saves_dropped_total{reason=\"not_copied\"} 3",
            "pillion_pool_bytes 7",
            "pillion_pool_pinned_bytes 0",
            "pillion_pool_pin_failures_total 0",
            "pillion_sessions_closed_total{reason=\"hang_up\"} 1",
            "pillion_sessions_closed_total{reason=\"rejected\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
    }
}
