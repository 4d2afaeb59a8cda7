//! Handles results of disks, and publishes their metrics.

use shm_protocol::source::Source;
use tiers::ssd::DeviceEvent;

use super::Runtime;
use crate::core::{CoreEvent, JobEnd};
use crate::ports::disks::DisksPort;

/// Blocks of an earlier life with the cost of one ended transfer, about 8 us.
const RECOVERED_AT_ONCE: usize = 32;

// === impl Runtime: disks ===

impl Runtime {
    /// Passes ended jobs of a tier to the core.
    pub(super) fn end_jobs(&mut self, source: Source, ends: Vec<JobEnd>) {
        let tier = self.core.tier_of(source).expect("the core has their tier");
        self.handle(CoreEvent::Transferred { tier, ends });
    }

    /// Handles one result of a disk. Returns its cost, 0 if there was none.
    pub(super) fn take_transfer(&mut self) -> usize {
        let Some(up) = self.disks.as_mut().and_then(DisksPort::take_event) else { return 0 };
        let mut cost = 1;
        match up {
            DeviceEvent::Done(done) => self.end_jobs(Source::Disk, vec![JobEnd::Disk(done)]),
            DeviceEvent::Recovered(found) => {
                let last = found.last.then_some(found.device);
                cost += found.blocks.len() / RECOVERED_AT_ONCE;
                self.end_jobs(Source::Disk, vec![JobEnd::Recovered(found)]);
                if let Some(device) = last {
                    self.report_recovered(device);
                }
            }
            DeviceEvent::Note(text) => tracing::warn!("{text}"),
        }
        if !self.core.waits_for_tiers() {
            // The next tick may come much later, so the metrics are published now.
            self.show_disks();
        }
        cost
    }

    fn report_recovered(&self, device: usize) {
        let (Some(stats), Some(disks)) = (self.core.ssd_stats(), &self.disks) else { return };
        let blocks = stats.log.devices[device].recovered_blocks_total;
        let (disk, after_ms) = (disks.disk(device), self.now.as_millis() as u64);
        tracing::info!(%disk, blocks, after_ms, "the blocks of a disk are found again");
    }

    /// Publishes the metrics of the disks. It reads every transfer in flight, so it runs at each tick, not in
    /// each turn.
    pub(super) fn show_disks(&mut self) {
        let Some(stats) = self.core.ssd_stats() else { return };
        self.disks.iter_mut().for_each(|disks| disks.tell_down(&stats.log.devices));
        self.metrics.publish_ssd(&stats);
        let sum = |figure: fn(&tiers::ssd::DeviceStats) -> u64| stats.log.devices.iter().map(figure).sum();
        let recovering = stats.log.devices.iter().any(|device| device.recovering);
        self.progress.recovered(
            sum(|device| device.segments.into()),
            sum(|device| device.segments_read.into()),
            sum(|device| device.recovered_blocks_total),
            recovering,
        );
    }
}
