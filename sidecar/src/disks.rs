//! The SSD tier's devices as the data thread sees them: jobs go down, what they have to say comes back through a channel and
//! an eventfd.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};

use tiers::pool::Pool;
use tiers::ssd::{self, Device, Geometry, Job, Opened, Up};

use crate::config::Disk;
use crate::error::StartError;
use crate::wake::{self, EndSignal};

/// Bytes that may be on their way to one device: what the fastest drive writes in some 40 ms.
const WRITE_BYTES_MAX: u64 = 256 << 20;
/// Of a small pool, blocks on their way to all devices hold at most 1 part of so many.
const WRITE_PART: u64 = 8;
/// A cloud disk's worst second is near 1 s; what takes ten times as long is broken.
const LATE_MS: u64 = 10_000;

/// The devices, at work.
#[derive(Debug)]
pub struct Disks {
    devices: Vec<Device>,
    /// As they were given.
    names: Vec<String>,
    ups: mpsc::Receiver<Up>,
    wake: Arc<OwnedFd>,
    /// Jobs that were not handed over yet.
    jobs: Vec<Job>,
}

/// Opens and locks every disk.
pub fn open(disks: &[Disk]) -> Result<Vec<Opened>, tiers::Error> {
    disks.iter().map(|disk| Opened::open(&disk.path, disk.size.as_bytes())).collect()
}

/// What a log over these devices is made with.
pub fn log_config(opened: &[Opened], pool_bytes: u64) -> ssd::Config {
    let devices: Vec<Geometry> = opened.iter().map(Opened::geometry).collect();
    let part = pool_bytes / WRITE_PART / devices.len().max(1) as u64;
    ssd::Config { devices, write_bytes_max: part.min(WRITE_BYTES_MAX), late_ms: LATE_MS }
}

// === impl Disks ===

impl Disks {
    /// Starts the devices' threads. They read what earlier lives left, and serve meanwhile.
    pub fn start(
        opened: Vec<Opened>,
        names: &[Disk],
        pool: &Pool,
        ended: &Arc<EndSignal>,
    ) -> Result<Self, StartError> {
        let wake = Arc::new(wake::eventfd().map_err(std::io::Error::from)?);
        let (sender, ups) = mpsc::channel();
        let mut devices = Vec::new();
        for (number, (opened, name)) in opened.into_iter().zip(names).enumerate() {
            for note in opened.notes() {
                tracing::warn!(disk = %name, "{note}");
            }
            let (sender, wake, guard) = (sender.clone(), Arc::clone(&wake), ended.on_exit());
            let up = move |up| {
                // Lives as long as the device's threads do: their end is the sidecar's.
                let _ = &guard;
                // Nobody asks any more: the sidecar ends.
                let _ = sender.send(up);
                wake::signal(&wake);
            };
            devices.push(Device::start(opened, number, pool.shared_region(), up)?);
        }
        let names = names.iter().map(ToString::to_string).collect();
        Ok(Self { devices, names, ups, wake, jobs: Vec::new() })
    }

    /// Takes a job; [`Disks::flush`] hands it over.
    pub fn push(&mut self, job: Job) {
        self.jobs.push(job);
    }

    /// Hands over what was pushed, in its order.
    pub fn flush(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        for (number, device) in self.devices.iter().enumerate() {
            device.post(self.jobs.iter().filter(|job| job.device == number).copied());
        }
        self.jobs.clear();
    }

    /// What the user calls a device.
    pub fn name(&self, device: usize) -> &str {
        &self.names[device]
    }

    /// What a device says next.
    pub fn next(&self) -> Option<Up> {
        self.ups.try_recv().ok()
    }

    /// Becomes readable whenever a device says something; watched by edge, never read.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}
