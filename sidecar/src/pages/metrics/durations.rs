//! Durations of queries, loads, saves and reads, and ages of leases.

use std::time::Duration;

use prometheus::{Histogram, HistogramOpts, HistogramVec, Registry};
use shm_protocol::source::Source;
use tiers::dram::LeaseEnd;

use crate::core::{Timed, TimedPart};

/// Bounds in seconds: from a query with all blocks in DRAM to the longest lease.
const BUCKETS: [f64; 18] = [
    20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0,
    5.0, 10.0,
];

/// Name, help, label, and the operation measured under each value of the label.
type Family = (&'static str, &'static str, &'static str, &'static [(&'static str, Timed)]);

const FAMILIES: &[Family] = &[
    (
        "query_duration_seconds",
        "Duration of queries in seconds, by part. whole: from the turn that read the query to its answer; waiting: for \
         the engine that computes the prompt; tier: for blocks of a disk or a peer, or for their verification.",
        "part",
        &[
            ("whole", Timed::Query(TimedPart::Whole)),
            ("waiting", Timed::Query(TimedPart::Waiting)),
            ("tier", Timed::Query(TimedPart::Tier)),
        ],
    ),
    (
        "load_duration_seconds",
        "Duration of loads in seconds, by part. whole: from the turn that read the load until every rank had it; tier: \
         until its blocks had arrived in DRAM; waiting: until the step of a rank; copy: the sidecar's copies for a \
         rank.",
        "part",
        &[
            ("whole", Timed::Load(TimedPart::Whole)),
            ("waiting", Timed::Load(TimedPart::Waiting)),
            ("tier", Timed::Load(TimedPart::Tier)),
            ("copy", Timed::Load(TimedPart::Copy)),
        ],
    ),
    (
        "save_duration_seconds",
        "Duration of saves that copy blocks, in seconds, by part. whole: from the turn that read the save to its end; \
         waiting: until the end of its step; copy: the copies from a rank.",
        "part",
        &[
            ("whole", Timed::Save(TimedPart::Whole)),
            ("waiting", Timed::Save(TimedPart::Waiting)),
            ("copy", Timed::Save(TimedPart::Copy)),
        ],
    ),
    (
        "handover_duration_seconds",
        "Duration of handovers between two engines of this sidecar, in seconds, by part. whole: from the end of the \
         last step that computed, as the sidecar saw it, until every rank of the other engine had loaded all blocks; \
         acceptance: from the last copy of a save until its engine accepted the step.",
        "part",
        &[("whole", Timed::Handover), ("acceptance", Timed::Acceptance)],
    ),
    (
        "block_read_duration_seconds",
        "Seconds from requesting a block of a disk or peer until it was in DRAM.",
        "source",
        &[("disk", Timed::Read(Source::Disk)), ("peer", Timed::Read(Source::Peer))],
    ),
    (
        "lease_age_seconds",
        "Age of leases at their end, in seconds. consumed: every rank loaded the blocks; released: the engine did not \
         need them; expired: --lease-ttl ended first.",
        "end",
        &[
            ("consumed", Timed::Lease(LeaseEnd::Consumed)),
            ("released", Timed::Lease(LeaseEnd::Released)),
            ("expired", Timed::Lease(LeaseEnd::Expired)),
        ],
    ),
];

/// The histograms, each with its operation.
#[derive(Debug)]
pub(super) struct Durations(Vec<(Timed, Histogram)>);

// === impl Durations ===

impl Durations {
    pub(super) fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let mut all = Vec::new();
        for (name, help, label, values) in FAMILIES {
            let opts = HistogramOpts::new(format!("pillion_{name}"), *help).buckets(BUCKETS.to_vec());
            let family = HistogramVec::new(opts, &[label])?;
            registry.register(Box::new(family.clone()))?;
            all.extend(values.iter().map(|(value, what)| (*what, family.with_label_values(&[value]))));
        }
        Ok(Self(all))
    }

    /// Counts the duration of an ended operation.
    pub(super) fn observe(&self, what: Timed, time: Duration) {
        let found = self.0.iter().find(|(timed, _)| *timed == what);
        found.into_iter().for_each(|(_, histogram)| histogram.observe(time.as_secs_f64()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_there_from_the_first_look_and_has_its_own_times() {
        let registry = Registry::new();
        let durations = Durations::new(&registry).unwrap();
        durations.observe(Timed::Load(TimedPart::Copy), Duration::from_micros(15));
        durations.observe(Timed::Load(TimedPart::Copy), Duration::from_secs(11));
        durations.observe(Timed::Lease(LeaseEnd::Expired), Duration::from_millis(1500));
        let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        for line in [
            "pillion_load_duration_seconds_bucket{part=\"copy\",le=\"0.00002\"} 1",
            "pillion_load_duration_seconds_bucket{part=\"copy\",le=\"10\"} 1",
            "pillion_load_duration_seconds_count{part=\"copy\"} 2",
            "pillion_load_duration_seconds_count{part=\"whole\"} 0",
            "pillion_lease_age_seconds_bucket{end=\"expired\",le=\"1\"} 0",
            "pillion_lease_age_seconds_sum{end=\"expired\"} 1.5",
            "pillion_block_read_duration_seconds_count{source=\"peer\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
    }
}
