//! Metrics of this process, under the names common to all client libraries of Prometheus, and its version.

use procfs::ProcResult;
use procfs::process::Process;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Counter, Gauge, IntGauge, Registry};

use super::figures::{register_gauges, show_gauge};

/// Metrics read from /proc at each scrape.
#[derive(Debug)]
struct ProcessMetrics {
    cpu: Counter,
    resident: IntGauge,
    descriptors: IntGauge,
    start: Gauge,
}

/// Registers the metrics of this process.
pub(super) fn register_process(registry: &Registry) -> Result<(), prometheus::Error> {
    registry.register(Box::new(ProcessMetrics::new()?))?;
    let build = register_gauges(
        registry,
        "build_info",
        "1, with the release of this sidecar as label.",
        &["version"],
    )?;
    build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
    Ok(())
}

// === impl ProcessMetrics ===

impl ProcessMetrics {
    fn new() -> Result<Self, prometheus::Error> {
        Ok(Self {
            cpu: Counter::new(
                "process_cpu_seconds_total",
                "CPU time of the sidecar in seconds, user and kernel.",
            )?,
            resident: IntGauge::new(
                "process_resident_memory_bytes",
                "Bytes of the sidecar's memory that are in RAM, including its pool.",
            )?,
            descriptors: IntGauge::new("process_open_fds", "File descriptors that the sidecar has open.")?,
            start: Gauge::new(
                "process_start_time_seconds",
                "Start time of the sidecar, in seconds since 1970.",
            )?,
        })
    }

    fn all(&self) -> [&dyn Collector; 4] {
        [&self.cpu, &self.resident, &self.descriptors, &self.start]
    }

    fn read_process(&self) -> ProcResult<()> {
        let process = Process::myself()?;
        let (stat, ticks) = (process.stat()?, procfs::ticks_per_second() as f64);
        let cpu = (stat.utime + stat.stime) as f64 / ticks;
        self.cpu.inc_by((cpu - self.cpu.get()).max(0.0));
        show_gauge(&self.resident, stat.rss.saturating_mul(procfs::page_size()));
        show_gauge(&self.descriptors, process.fd_count()? as u64);
        self.start.set(procfs::boot_time_secs()? as f64 + stat.starttime as f64 / ticks);
        Ok(())
    }
}

impl Collector for ProcessMetrics {
    fn desc(&self) -> Vec<&Desc> {
        self.all().into_iter().flat_map(Collector::desc).collect()
    }

    /// Reads /proc. If it cannot be read, the process has no metrics.
    fn collect(&self) -> Vec<MetricFamily> {
        match self.read_process() {
            Ok(()) => self.all().into_iter().flat_map(Collector::collect).collect(),
            Err(_) => Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scrape_says_what_this_process_is_and_takes() {
        let registry = Registry::new();
        register_process(&registry).unwrap();
        let value = |name: &str| {
            let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
            let line = text.lines().find(|line| line.starts_with(name)).map(str::to_owned);
            line.and_then(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).expect(name)
        };
        assert_eq!(value(concat!("pillion_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"}")), 1.0);
        // Other tests of this process open and close files at the same time.
        let files: Vec<_> = (0..256).map(|_| std::fs::File::open("/proc/self/stat").unwrap()).collect();
        assert!(value("process_open_fds") >= files.len() as f64);
        let resident = value("process_resident_memory_bytes");
        let memory = vec![1_u8; 64 << 20];
        assert!(value("process_resident_memory_bytes") > resident + memory.len() as f64 / 2.0);
        let now = crate::system::clock::since_1970().as_secs_f64();
        let started = value("process_start_time_seconds");
        assert!((now - 86_400.0..now + 2.0).contains(&started), "{started} is not about {now}");
        let cpu = value("process_cpu_seconds_total");
        while value("process_cpu_seconds_total") <= cpu {}
    }
}
