//! The SSD tier's devices as the data thread sees them: jobs go down, what they have to say comes back through a channel and
//! an eventfd.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use shm_protocol::wait;
use tiers::pool::Pool;
use tiers::ssd::{self, Backend, Device, Geometry, Job, Missing, Opened, Up};

use crate::config::{Disk, SsdIo};
use crate::error::StartError;
use crate::system::clock::Clock;
use crate::system::wake::EndSignal;

/// Bytes that may be on their way to one device: what the fastest drive writes in some 40 ms.
const WRITE_BYTES_MAX: u64 = 256 << 20;
/// Of a small pool, blocks on their way to all devices hold at most 1 part of so many.
const WRITE_PART: u64 = 8;
/// A cloud disk's worst second is near 1 s; what takes ten times as long is broken.
const LATE_MS: u64 = 10_000;

/// Parts of what earlier lives left that wait for the data thread at most: 2 MiB. A large disk has millions of blocks.
const FOUND_MAX: usize = 16;
/// Ends of jobs that come before the next such part, which takes the data thread as long as many of them.
const ENDS_MAX: u32 = 32;

/// How long a disk may take to open before the log names it: longer than the kernel takes to end what a dead process had in flight.
const OPEN_SLOW: Duration = Duration::from_secs(15);
/// How long it may take at all: one that hangs is no reason to serve nobody.
const OPEN_MAX: Duration = Duration::from_secs(60);

/// The devices, at work.
#[derive(Debug)]
pub struct Disks {
    /// Gone before the devices, whose threads end only once they do not wait for it.
    ups: Ups,
    devices: Vec<Device>,
    /// As they were given.
    disks: Vec<Disk>,
    wake: Arc<OwnedFd>,
    /// Jobs that were not handed over yet.
    jobs: Vec<Job>,
    /// Those that the log was last told to be left alone.
    down: Vec<bool>,
}

/// News of the devices, in two channels. No worker of a device waits for room in that of ended jobs; the threads that read what earlier
/// lives left on a disk wait for room in theirs, so that the data thread is never behind by more than [`FOUND_MAX`] parts.
#[derive(Debug)]
struct Ups {
    ends: mpsc::Receiver<Up>,
    found: mpsc::Receiver<Up>,
    /// Ends that were taken since the last part of what earlier lives left.
    ends_taken: u32,
}

/// The disks of a start.
#[derive(Debug, Default)]
pub struct Found {
    pub opened: Vec<(Disk, Opened)>,
    /// Those that cannot be used.
    pub left_out: Vec<Disk>,
}

/// Opens and locks the disks. One that cannot be used is left out, and the log says why, unless `required`. One that another
/// process holds, or that hangs, ends the start of a sidecar with a pool file, too: transfers between the two may still be under way.
pub fn open(disks: &[Disk], required: bool, has_pool_file: bool) -> Result<Found, tiers::Error> {
    let fatal = |error: &tiers::Error| {
        let may_transfer =
            matches!(error, tiers::Error::DeviceBusy { .. } | tiers::Error::DeviceHangs { .. });
        required || (has_pool_file && may_transfer)
    };
    let mut found = Found::default();
    if required {
        // All of them before anything is written to the first.
        disks.iter().try_for_each(|disk| locate(disk).map(drop))?;
    }
    let opening: Vec<_> = disks.iter().map(begin_to_open).collect();
    let (clock, patience) = (Clock::start(), (OPEN_SLOW, OPEN_MAX));
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

/// Opens a disk on a thread of its own, which is left to the kernel where that hangs.
fn begin_to_open(disk: &Disk) -> mpsc::Receiver<Result<Opened, tiers::Error>> {
    let (sender, opened) = mpsc::sync_channel(1);
    let (disk, name) = (disk.clone(), "ssd-open".to_owned());
    let open = move || drop(sender.send(Opened::open(&disk.path, disk.size.as_bytes(), missing(&disk))));
    // Without a thread the channel has no sender, which counts as a disk that does not open.
    let _ = thread::Builder::new().name(name).spawn(open);
    opened
}

/// What came of a disk that is being opened since the clock's start; an error where it hangs. Of the times the first is that after
/// which the log says so.
fn end_of(
    opening: &mpsc::Receiver<Result<Opened, tiers::Error>>,
    disk: &Disk,
    clock: Clock,
    (slow, most): (Duration, Duration),
) -> Result<Opened, tiers::Error> {
    let within = |limit: Duration| opening.recv_timeout(limit.saturating_sub(clock.now()));
    let hangs = || Err(tiers::Error::DeviceHangs { path: disk.path.clone(), seconds: most.as_secs() });
    within(slow).unwrap_or_else(|_| {
        tracing::warn!(%disk, "a disk has not opened yet; the sidecar waits up to {} s in all", most.as_secs());
        within(most).unwrap_or_else(|_| hangs())
    })
}

/// Where a disk's log lies; nothing is written.
pub fn locate(disk: &Disk) -> Result<PathBuf, tiers::Error> {
    ssd::locate(&disk.path, disk.size.as_bytes(), missing(disk))
}

fn missing(disk: &Disk) -> Missing {
    if disk.create { Missing::Create } else { Missing::Refuse }
}

/// What a log over these devices is made with.
pub fn log_config(opened: &[(Disk, Opened)], pool_bytes: u64) -> ssd::Config {
    let devices: Vec<Geometry> = opened.iter().map(|(_, opened)| opened.geometry()).collect();
    let part = pool_bytes / WRITE_PART / devices.len().max(1) as u64;
    ssd::Config { devices, write_bytes_max: part.min(WRITE_BYTES_MAX), late_ms: LATE_MS }
}

/// A channel of what devices say, and the end that they call.
fn channel() -> (impl Fn(Up) + Clone + Send + Sync, Ups) {
    let (ended, ends) = mpsc::channel();
    let (recovered, found) = mpsc::sync_channel(FOUND_MAX);
    let say = move |up| {
        // Nobody asks any more: the sidecar ends.
        let _ = if matches!(up, Up::Recovered(_)) { recovered.send(up) } else { ended.send(up) };
    };
    (say, Ups { ends, found, ends_taken: 0 })
}

// === impl Ups ===

impl Ups {
    /// The next piece of news. A part of what earlier lives left costs a turn of the data thread, so [`ENDS_MAX`] ended jobs come first.
    fn take(&mut self) -> Option<Up> {
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

// === impl Disks ===

impl Disks {
    /// Starts the devices' threads. They read what earlier lives left, and serve meanwhile.
    pub fn start(
        opened: Vec<(Disk, Opened)>,
        pool: &Pool,
        io: SsdIo,
        ended: &Arc<EndSignal>,
    ) -> Result<Self, StartError> {
        let wake = Arc::new(wait::eventfd().map_err(std::io::Error::from)?);
        let (mut devices, mut disks) = (Vec::new(), Vec::new());
        // Behind the devices: where one of them does not start, threads of the others do not wait for this any more.
        let (say, ups) = channel();
        for (number, (disk, opened)) in opened.into_iter().enumerate() {
            if let Some(given_up) = opened.given_up() {
                tracing::warn!(%disk, "{given_up}");
            }
            disks.push(disk);
            let (say, wake, guard) = (say.clone(), Arc::clone(&wake), ended.on_exit());
            let up = move |up| {
                // Lives as long as the device's threads do: their end is the sidecar's.
                let _ = &guard;
                say(up);
                wait::signal(&wake);
            };
            devices.push(Device::start(opened, number, pool.shared_region(), io.wanted(), up)?);
        }
        if let Some(error) = devices.iter().find_map(Device::ring_refused) {
            tracing::warn!(
                "the kernel refuses io_uring ({error}), so threads read and write the disks, which costs more CPU time: \
                 let the container's seccomp profile allow io_uring_setup, io_uring_enter and io_uring_register, and \
                 set sysctl kernel.io_uring_disabled=0; or pass --ssd-io threads"
            );
        }
        let down = vec![false; disks.len()];
        Ok(Self { ups, devices, disks, wake, jobs: Vec::new(), down })
    }

    /// The disks, in the order of their numbers, with what moves their bytes.
    pub fn at_work(&self) -> impl Iterator<Item = (&Disk, Backend)> {
        self.disks.iter().zip(self.devices.iter().map(Device::backend))
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

    /// Says in the log of which devices it is new that they are left alone, or are not.
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

    /// What a device says next.
    pub fn take(&mut self) -> Option<Up> {
        self.ups.take()
    }

    /// Becomes readable whenever a device says something; watched by edge, never read.
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
        let error = end_of(&opening, &disk, Clock::start(), (slow, most)).unwrap_err().to_string();
        assert!(error.contains("--ssd /mnt/disk/log did not open"), "{error}");
        sender.send(Err(tiers::Error::Locked("/mnt".into()))).unwrap();
        let other = end_of(&opening, &disk, Clock::start(), (Duration::ZERO, WATCHDOG)).unwrap_err();
        assert!(matches!(other, tiers::Error::Locked(_)), "what came of it in the end: {other}");
    }

    #[test]
    fn what_earlier_lives_left_waits_for_the_data_thread_and_ends_of_jobs_do_not() {
        let (say, mut ups) = channel();
        let found = |segment: u32| {
            let blocks = Vec::new();
            let (sequence, unreadable, segments_read, last) = (1, false, 0, false);
            Up::Recovered(Recovered { device: 0, segment, sequence, blocks, unreadable, segments_read, last })
        };
        let tell = move |say: &dyn Fn(Up), count: u32| (0..count).for_each(|segment| say(found(segment)));
        tell(&say, FOUND_MAX as u32);
        let waits = thread::spawn({
            let say = say.clone();
            move || tell(&say, 2)
        });
        (0..1000).for_each(|number| say(Up::Note(number.to_string())));
        thread::sleep(Duration::from_millis(100));
        assert!(!waits.is_finished(), "more than may wait are told of");
        for part in 0..2 {
            let ends = part * ENDS_MAX..(part + 1) * ENDS_MAX;
            ends.for_each(|number| assert_eq!(ups.take(), Some(Up::Note(number.to_string()))));
            assert_eq!(ups.take(), Some(found(part)));
        }
        waits.join().unwrap();
        while ups.ends.try_recv().is_ok() {}
        assert_eq!([ups.take(), ups.take()], [Some(found(2)), Some(found(3))], "nothing else is there");
        let waits = thread::spawn(move || tell(&say, FOUND_MAX as u32));
        drop(ups);
        waits.join().unwrap();
    }

    const WATCHDOG: Duration = Duration::from_secs(60);
}
