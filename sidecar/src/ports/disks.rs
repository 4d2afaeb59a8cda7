//! The data thread's interface to the devices of the SSD tier: jobs go to them, and results come back through
//! a channel and an eventfd.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use shm_protocol::wait;
use tiers::pool::Pool;
use tiers::ssd::{self, Backend, DeviceEvent, DeviceGeometry, DeviceJob, Missing, OpenedDevice, SsdDevice};

use crate::config::{Disk, SsdIo};
use crate::error::StartError;
use crate::system::clock::Clock;
use crate::system::wake::EndSignal;

/// Bytes in flight to one device: about 40 ms of writing of the fastest drive.
const WRITE_BYTES_MAX: u64 = 256 << 20;
/// All writes in flight hold at most 1/8 of a small pool.
const WRITE_PART: u64 = 8;
/// A cloud disk's slowest requests take nearly 1 s. A disk that takes ten times as long is broken.
const LATE_MS: u64 = 10_000;

/// Queued reports of recovered blocks, 2 MiB. A large disk has millions of blocks.
const FOUND_MAX: usize = 16;
/// Ended jobs handled before each such report, which takes the data thread as long as many of them.
const ENDS_MAX: u32 = 32;

/// Time to open a disk before the log names it: longer than the kernel needs to end the transfers of a dead
/// process.
const OPEN_SLOW: Duration = Duration::from_secs(15);
/// Time to open a disk before the sidecar starts without it.
const OPEN_MAX: Duration = Duration::from_secs(60);

/// The running devices.
#[derive(Debug)]
pub struct DisksPort {
    /// Dropped before the devices: their threads may wait for room in it, and end only once it is gone.
    ups: Ups,
    devices: Vec<SsdDevice>,
    /// The disks as configured.
    disks: Vec<Disk>,
    wake: Arc<OwnedFd>,
    /// Jobs not yet handed to a device.
    jobs: Vec<DeviceJob>,
    /// For each disk, true if the log last said that the disk is not used.
    down: Vec<bool>,
}

/// Results of the devices in two channels. The channel of ended jobs is unbounded, so a device never waits.
/// The threads that read recovered blocks wait for room in a bounded one, so the data thread has at most
/// [`FOUND_MAX`] reports to handle.
#[derive(Debug)]
struct Ups {
    ends: mpsc::Receiver<DeviceEvent>,
    found: mpsc::Receiver<DeviceEvent>,
    /// Ended jobs taken since the last report of recovered blocks.
    ends_taken: u32,
}

/// The disks of a start.
#[derive(Debug, Default)]
pub struct FoundDisks {
    pub opened: Vec<(Disk, OpenedDevice)>,
    /// Unusable disks.
    pub left_out: Vec<Disk>,
}

/// Opens and locks the disks. An unusable disk is left out and logged; with `required` it is an error. With a
/// pool file, a disk that hangs or is locked by another process is an error too: transfers between disk and
/// pool may still be in flight.
pub fn open_disks(
    disks: &[Disk],
    required: bool,
    has_pool_file: bool,
) -> Result<FoundDisks, tiers::TierError> {
    let fatal = |error: &tiers::TierError| {
        let may_transfer =
            matches!(error, tiers::TierError::DeviceBusy { .. } | tiers::TierError::DeviceHangs { .. });
        required || (has_pool_file && may_transfer)
    };
    let mut found = FoundDisks::default();
    if required {
        // All disks are checked before the first write.
        disks.iter().try_for_each(|disk| locate_disk(disk).map(drop))?;
    }
    let opening: Vec<_> = disks.iter().map(begin_to_open).collect();
    let (clock, patience) = (Clock::start_now(), (OPEN_SLOW, OPEN_MAX));
    for (disk, opening) in disks.iter().zip(opening) {
        match end_of(&opening, disk, clock, patience) {
            Ok(opened) => found.opened.push((disk.clone(), opened)),
            Err(error) if fatal(&error) => return Err(error),
            Err(error) => {
                tracing::error!(
                    "{error}. Blocks are kept without this disk until the sidecar restarts; with --ssd-required it \
                     would not have started"
                );
                found.left_out.push(disk.clone());
            }
        }
    }
    Ok(found)
}

/// Opens a disk on a new thread. If the call hangs, the thread is left behind.
fn begin_to_open(disk: &Disk) -> mpsc::Receiver<Result<OpenedDevice, tiers::TierError>> {
    let (sender, opened) = mpsc::sync_channel(1);
    let (disk, name) = (disk.clone(), "ssd-open".to_owned());
    let open =
        move || drop(sender.send(OpenedDevice::open(&disk.path, disk.size.as_bytes(), missing(&disk))));
    // Without a thread the channel has no sender, and the disk counts as not opened.
    let _ = thread::Builder::new().name(name).spawn(open);
    opened
}

/// The result of opening a disk since the clock's start; an error if it hangs. After the first of the two
/// times the log names the disk.
fn end_of(
    opening: &mpsc::Receiver<Result<OpenedDevice, tiers::TierError>>,
    disk: &Disk,
    clock: Clock,
    (slow, most): (Duration, Duration),
) -> Result<OpenedDevice, tiers::TierError> {
    let within = |limit: Duration| opening.recv_timeout(limit.saturating_sub(clock.now()));
    let hangs = || Err(tiers::TierError::DeviceHangs { path: disk.path.clone(), seconds: most.as_secs() });
    within(slow).unwrap_or_else(|_| {
        tracing::warn!(%disk, "a disk has not opened yet; the sidecar waits up to {} s in all", most.as_secs());
        within(most).unwrap_or_else(|_| hangs())
    })
}

/// The path of a disk's log. Nothing is written.
pub fn locate_disk(disk: &Disk) -> Result<PathBuf, tiers::TierError> {
    ssd::locate_log(&disk.path, disk.size.as_bytes(), missing(disk))
}

fn missing(disk: &Disk) -> Missing {
    if disk.create { Missing::Create } else { Missing::Refuse }
}

/// The configuration of a log over these devices.
pub fn log_config(opened: &[(Disk, OpenedDevice)], pool_bytes: u64) -> ssd::LogConfig {
    let devices: Vec<DeviceGeometry> = opened.iter().map(|(_, opened)| opened.geometry()).collect();
    let part = pool_bytes / WRITE_PART / devices.len().max(1) as u64;
    ssd::LogConfig { devices, write_bytes_max: part.min(WRITE_BYTES_MAX), late_ms: LATE_MS }
}

/// A channel for results of devices, and the function that sends them.
fn channel() -> (impl Fn(DeviceEvent) + Clone + Send + Sync, Ups) {
    let (ended, ends) = mpsc::channel();
    let (recovered, found) = mpsc::sync_channel(FOUND_MAX);
    let say = move |up| {
        // The receiver is gone when the sidecar ends.
        let _ = if matches!(up, DeviceEvent::Recovered(_)) { recovered.send(up) } else { ended.send(up) };
    };
    (say, Ups { ends, found, ends_taken: 0 })
}

// === impl Ups ===

impl Ups {
    /// The next result. A report of recovered blocks takes a turn of the data thread, so [`ENDS_MAX`] ended
    /// jobs come first.
    fn take_event(&mut self) -> Option<DeviceEvent> {
        if self.ends_taken < ENDS_MAX
            && let Ok(end) = self.ends.try_recv()
        {
            self.ends_taken += 1;
            return Some(end);
        }
        self.ends_taken = 0;
        self.found.try_recv().or_else(|_| self.ends.try_recv()).ok()
    }
}

// === impl DisksPort ===

impl DisksPort {
    /// Starts the threads of the devices. They read the blocks of earlier lives while they serve jobs.
    pub fn start_devices(
        opened: Vec<(Disk, OpenedDevice)>,
        pool: &Pool,
        io: SsdIo,
        ended: &Arc<EndSignal>,
    ) -> Result<Self, StartError> {
        let wake = Arc::new(wait::make_eventfd().map_err(std::io::Error::from)?);
        let (mut devices, mut disks) = (Vec::new(), Vec::new());
        // Declared after the devices and so dropped first: if one device fails to start, threads of the
        // others do not wait for room.
        let (say, ups) = channel();
        for (number, (disk, opened)) in opened.into_iter().enumerate() {
            if let Some(given_up) = opened.given_up() {
                tracing::warn!(%disk, "{given_up}");
            }
            disks.push(disk);
            let (say, wake, guard) = (say.clone(), Arc::clone(&wake), ended.on_exit());
            let up = move |up| {
                // Held by the device's threads: the sidecar ends when they do.
                let _ = &guard;
                say(up);
                wait::signal_eventfd(&wake);
            };
            devices.push(SsdDevice::start(opened, number, pool.shared_region(), io.wanted_backend(), up)?);
        }
        if let Some(error) = devices.iter().find_map(SsdDevice::ring_refused) {
            tracing::warn!(
                "the kernel refuses io_uring ({error}), so threads read and write the disks, which costs more CPU time: \
                 let the container's seccomp profile allow io_uring_setup, io_uring_enter and io_uring_register, and \
                 set sysctl kernel.io_uring_disabled=0; or pass --ssd-io threads"
            );
        }
        let down = vec![false; disks.len()];
        Ok(Self { ups, devices, disks, wake, jobs: Vec::new(), down })
    }

    /// The disks in the order of their numbers, each with its kind of I/O.
    pub fn at_work(&self) -> impl Iterator<Item = (&Disk, Backend)> {
        self.disks.iter().zip(self.devices.iter().map(SsdDevice::backend))
    }

    /// Queues a job for [`DisksPort::flush_jobs`].
    pub fn push_job(&mut self, job: DeviceJob) {
        self.jobs.push(job);
    }

    /// Hands the queued jobs to their devices, in order.
    pub fn flush_jobs(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        for (number, device) in self.devices.iter().enumerate() {
            device.post_jobs(self.jobs.iter().filter(|job| job.device == number).copied());
        }
        self.jobs.clear();
    }

    /// Logs each disk that is newly out of use or newly back in use.
    pub fn tell_down(&mut self, stats: &[ssd::DeviceStats]) {
        for ((disk, told), device) in self.disks.iter().zip(&mut self.down).zip(stats) {
            match (std::mem::replace(told, device.down), device.down) {
                (false, true) => tracing::warn!(
                    %disk,
                    "a disk fails or hangs: its blocks are misses until it works again. It is tried after a second and \
                     then less often; pillion_ssd_faults_total names the kind of failure. After replacing the disk, \
                     restart the sidecar"
                ),
                (true, false) => tracing::info!(%disk, "a disk works again"),
                _ => {}
            }
        }
    }

    /// The disk of a device.
    pub fn disk(&self, device: usize) -> &Disk {
        &self.disks[device]
    }

    /// The next result of a device.
    pub fn take_event(&mut self) -> Option<DeviceEvent> {
        self.ups.take_event()
    }

    /// A descriptor, readable at each result; edge-triggered, never read.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use tiers::ssd::Recovered;

    use super::*;

    #[test]
    fn a_disk_that_hangs_is_an_error_and_one_that_is_slow_is_opened() {
        let disk: Disk = "/mnt/disk/log:1GiB".parse().unwrap();
        let (slow, most) = (Duration::from_millis(1), Duration::from_millis(20));
        let (sender, opening) = mpsc::sync_channel(1);
        let error = end_of(&opening, &disk, Clock::start_now(), (slow, most)).unwrap_err().to_string();
        assert!(error.contains("--ssd /mnt/disk/log did not open"), "{error}");
        sender.send(Err(tiers::TierError::Locked("/mnt".into()))).unwrap();
        let other = end_of(&opening, &disk, Clock::start_now(), (Duration::ZERO, WATCHDOG)).unwrap_err();
        assert!(matches!(other, tiers::TierError::Locked(_)), "the late result counts: {other}");
    }

    #[test]
    fn what_earlier_lives_left_waits_for_the_data_thread_and_ends_of_jobs_do_not() {
        let (say, mut ups) = channel();
        let found = |segment: u32| {
            let blocks = Vec::new();
            let (sequence, unreadable, segments_read, last) = (1, false, 0, false);
            DeviceEvent::Recovered(Recovered {
                device: 0,
                segment,
                sequence,
                blocks,
                unreadable,
                segments_read,
                last,
            })
        };
        let tell =
            move |say: &dyn Fn(DeviceEvent), count: u32| (0..count).for_each(|segment| say(found(segment)));
        tell(&say, FOUND_MAX as u32);
        let waits = thread::spawn({
            let say = say.clone();
            move || tell(&say, 2)
        });
        (0..1000).for_each(|number| say(DeviceEvent::Note(number.to_string())));
        thread::sleep(Duration::from_millis(100));
        assert!(!waits.is_finished(), "the channel of recovered blocks is full");
        for part in 0..2 {
            let ends = part * ENDS_MAX..(part + 1) * ENDS_MAX;
            ends.for_each(|number| assert_eq!(ups.take_event(), Some(DeviceEvent::Note(number.to_string()))));
            assert_eq!(ups.take_event(), Some(found(part)));
        }
        waits.join().unwrap();
        while ups.ends.try_recv().is_ok() {}
        assert_eq!(
            [ups.take_event(), ups.take_event()],
            [Some(found(2)), Some(found(3))],
            "nothing else is there"
        );
        let waits = thread::spawn(move || tell(&say, FOUND_MAX as u32));
        drop(ups);
        waits.join().unwrap();
    }

    const WATCHDOG: Duration = Duration::from_secs(60);
}
