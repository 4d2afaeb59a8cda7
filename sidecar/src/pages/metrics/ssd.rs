//! Metrics of the SSD tier; there are none without `--ssd`.

use prometheus::{IntCounterVec, Registry};
use tiers::ssd::{Backend, DeviceStats, FaultKind};

use super::figures::{Figure, MetricFigures, Reading, raise_counter, register_counters, register_gauges};
use crate::config::Disk;
use crate::core::SsdStats;

const COUNTERS: &[Figure<SsdStats>] =
    &[("ssd_promoted_blocks_total", "Blocks brought back from disks into DRAM.", |s| s.promoted_blocks)];

const GAUGES: &[Figure<SsdStats>] =
    &[("ssd_queued_blocks", "Blocks that wait to be written to a disk.", |s| s.queued)];

const DROPPED: &[(&str, Reading<SsdStats>)] = &[
    ("queue_full", |s| s.dropped_queue_full),
    ("evicted", |s| s.dropped_evicted),
    ("down", |s| s.dropped_down),
    ("too_large", |s| s.dropped_too_large),
];

const DEVICE_COUNTERS: &[Figure<DeviceStats>] = &[
    ("written_blocks_total", "Blocks written.", |d| d.written_blocks_total),
    ("written_bytes_total", "Bytes of blocks written.", |d| d.written_bytes_total),
    ("read_blocks_total", "Blocks read whose checksum matched.", |d| d.read_blocks_total),
    ("read_bytes_total", "Bytes of blocks read whose checksum matched.", |d| d.read_bytes_total),
    (
        "refused_reads_total",
        "Queries whose hit was cut at a block of this device, because more reads waited than it serves in 2 s.",
        |d| d.refused_reads_total,
    ),
    ("moved_blocks_total", "Blocks written a second time to keep them when their segment was reused.", |d| {
        d.moved_blocks_total
    }),
    ("moved_bytes_total", "Bytes of blocks written a second time to keep them.", |d| d.moved_bytes_total),
    (
        "evicted_blocks_total",
        "Blocks evicted to make room: other blocks were more likely to be used, or no segment was left to move them to.",
        |d| d.dropped_blocks_total,
    ),
    ("recovered_blocks_total", "Blocks of earlier runs of the sidecar that were found again.", |d| {
        d.recovered_blocks_total
    }),
    ("trips_total", "Times that the device was treated as broken.", |d| d.trips_total),
];

const DEVICE_GAUGES: &[Figure<DeviceStats>] = &[
    ("blocks", "Blocks kept on the device.", |d| d.blocks),
    ("used_bytes", "Bytes of the blocks kept on the device.", |d| d.bytes),
    ("segments", "Segments of the device's log.", |d| d.segments.into()),
    ("segments_free", "Segments without blocks.", |d| d.segments_free.into()),
    ("jobs", "Reads and writes under way.", |d| d.jobs),
    (
        "read_bytes_per_second",
        "Bytes that the device reads per second with enough to read, by the best of its last times; 0 until that is known.",
        |d| d.read_bytes_per_second,
    ),
    (
        "down",
        "1 while the device is treated as broken: its blocks are misses, and nothing is written.",
        |d| d.down.into(),
    ),
    ("recovering", "1 while the blocks of earlier runs of the sidecar are being found.", |d| {
        d.recovering.into()
    }),
];

const LEFT_OUT: &str =
    "1 if the disk could not be used at the start: fix what the log names, and restart the sidecar.";

const BACKEND: &str = "Disks, by what moves their bytes. threads: more CPU time; io_uring: needs a seccomp profile that \
     allows it, and sysctl kernel.io_uring_disabled=0.";

/// Metrics of the tier as a whole and of each device.
#[derive(Debug)]
pub(super) struct SsdMetrics {
    /// Names of the devices, by their numbers.
    names: Vec<String>,
    figures: MetricFigures<SsdStats>,
    devices: MetricFigures<DeviceStats>,
    faults: IntCounterVec,
}

// === impl SsdMetrics ===

impl SsdMetrics {
    pub(super) fn new(
        registry: &Registry,
        at_work: &[(&Disk, Backend)],
        left_out: &[Disk],
    ) -> Result<Self, prometheus::Error> {
        let name = |disk: &Disk| disk.path.display().to_string();
        let names: Vec<String> = at_work.iter().map(|(disk, _)| name(disk)).collect();
        let out = register_gauges(registry, "ssd_left_out", LEFT_OUT, &["device"])?;
        names.iter().for_each(|name| out.with_label_values(&[name]).set(0));
        left_out.iter().for_each(|disk| out.with_label_values(&[name(disk)]).set(1));
        let backends = register_gauges(registry, "ssd_backend", BACKEND, &["backend"])?;
        Backend::ALL.iter().for_each(|backend| backends.with_label_values(&[backend.name()]).set(0));
        at_work.iter().for_each(|(_, backend)| backends.with_label_values(&[backend.name()]).inc());
        Self::of_devices(registry, names)
    }

    fn of_devices(registry: &Registry, names: Vec<String>) -> Result<Self, prometheus::Error> {
        let help = "Blocks not written to a disk, by reason. queue_full: too many blocks waited; evicted: the block \
             left DRAM first; down: no disk works; too_large: the block exceeds a segment.";
        let figures = MetricFigures::new(registry, COUNTERS, GAUGES)?;
        let figures = figures.with_reasons(registry, "ssd_dropped_blocks_total", help, DROPPED)?;
        let devices = MetricFigures::labelled(registry, ("ssd", "device"), DEVICE_COUNTERS, DEVICE_GAUGES)?;
        let help = "Failed reads and writes, by kind. no_space: the file cannot grow; io: the device failed; gone: the \
             device is missing; short: the transfer ended early; corrupt: the checksum does not match; late: it took \
             too long; other: any other error.";
        let faults = register_counters(registry, "ssd_faults_total", help, &["device", "kind"])?;
        Ok(Self { names, figures, devices, faults })
    }

    /// Publishes the metrics. Called by one thread alone, so read-then-add is exact.
    pub(super) fn publish_disks(&self, stats: &SsdStats) {
        self.figures.publish(stats);
        for (name, device) in self.names.iter().zip(&stats.log.devices) {
            self.devices.show_set(name, device);
            for (kind, count) in FaultKind::ALL.into_iter().zip(device.faults) {
                raise_counter(&self.faults.with_label_values(&[name.as_str(), kind.name()]), count);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tiers::ssd;

    use super::*;

    #[test]
    fn each_device_has_its_own_and_every_label_is_there_from_the_first_look() {
        let registry = Registry::new();
        let metrics = SsdMetrics::of_devices(&registry, vec!["/a".into(), "/b".into()]).unwrap();
        let mut faults = [0; FaultKind::ALL.len()];
        faults[1] = 2;
        let devices = vec![
            DeviceStats { blocks: 3, down: true, faults, ..DeviceStats::default() },
            DeviceStats { written_bytes_total: 5, ..DeviceStats::default() },
        ];
        let log = ssd::LogStats { devices, ..ssd::LogStats::default() };
        let stats = SsdStats { log, dropped_evicted: 4, ..SsdStats::default() };
        metrics.publish_disks(&stats);
        metrics.publish_disks(&stats);
        let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
        for line in [
            "pillion_ssd_blocks{device=\"/a\"} 3",
            "pillion_ssd_down{device=\"/a\"} 1",
            "pillion_ssd_down{device=\"/b\"} 0",
            "pillion_ssd_written_bytes_total{device=\"/b\"} 5",
            "pillion_ssd_faults_total{device=\"/a\",kind=\"io\"} 2",
            "pillion_ssd_faults_total{device=\"/b\",kind=\"corrupt\"} 0",
            "pillion_ssd_dropped_blocks_total{reason=\"evicted\"} 4",
            "pillion_ssd_dropped_blocks_total{reason=\"queue_full\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
    }
}
