//! A device at work: one thread carries out jobs on a ring of its own, another reads what earlier lives left.

mod activity;
mod worker;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::EventfdFlags;
use rustix::io::Errno;
use shm_protocol::region::Region;

pub(super) use self::activity::footer_buffer;
use self::worker::Worker;
use super::recovery::Recovery;
use super::{Job, Opened, Up};
use crate::Error;
use crate::io::buf::Blocks;
use crate::io::uring::Ring;

/// The longest that dropping a device waits for its threads; a kernel that answers later keeps what it has.
const STOP_MAX: Duration = Duration::from_secs(5);

/// What a device's threads call to be heard.
pub(crate) type Tell = Arc<dyn Fn(Up) + Send + Sync>;

/// A device at work. Dropping it ends its threads: jobs in flight end first, queued ones as
/// [`Fault::Stopped`](super::Fault::Stopped).
#[derive(Debug)]
pub struct Device {
    jobs: Option<Sender<Job>>,
    wake: Arc<OwnedFd>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

// === impl Device ===

impl Device {
    /// Starts device `number`. It reads what earlier lives left, in parts, and serves jobs meanwhile. `pool` is the
    /// memory that offsets of jobs name. `up` is called on threads of the device and must not wait.
    pub fn start(
        opened: Opened,
        number: usize,
        pool: Arc<Region>,
        up: impl Fn(Up) + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        Self::start_on(opened, number, pool, up, Ring::new)
    }

    fn start_on(
        opened: Opened,
        number: usize,
        pool: Arc<Region>,
        up: impl Fn(Up) + Send + Sync + 'static,
        make: impl FnOnce(OwnedFd, Arc<OwnedFd>, Blocks) -> io::Result<Ring> + Send + 'static,
    ) -> Result<Self, Error> {
        let tell: Tell = Arc::new(up);
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let wake = Arc::new(wake.map_err(Error::os("make an eventfd"))?);
        let stop = Arc::new(AtomicBool::new(false));
        let (jobs, inbox) = mpsc::channel();

        let fd = opened.fd.try_clone().map_err(|source| Error::Os { doing: "share the device", source })?;
        let recovery = Recovery::new(fd, number, opened.layout, Arc::clone(&tell), Arc::clone(&stop));
        let (ready, started) = mpsc::sync_channel(1);
        let (layout, blocks, bell) = (opened.layout, Blocks::new(pool), Arc::clone(&wake));
        // A ring belongs to the thread that makes it.
        let work = move || {
            let ring = make(opened.fd, bell, blocks.clone());
            let (ring, made) = ring.map_or_else(|error| (None, Err(error)), |ring| (Some(ring), Ok(())));
            let _ = ready.send(made);
            if let Some(ring) = ring {
                Worker::new(number, layout, ring, blocks, inbox, tell).run();
            }
        };
        let mut device = Self { jobs: Some(jobs), wake, stop, threads: Vec::new() };
        device.spawn(format!("ssd-{number}"), work)?;
        let started = started.recv().expect("the thread answers first of all");
        started.map_err(|source| Error::Os { doing: "make a ring", source })?;
        device.spawn(format!("ssd-{number}-recovery"), move || recovery.run())?;
        Ok(device)
    }

    fn spawn(&mut self, name: String, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let thread = std::thread::Builder::new().name(name).spawn(run);
        self.threads.push(thread.map_err(|source| Error::Os { doing: "start a thread", source })?);
        Ok(())
    }

    /// Hands jobs over. Never waits.
    pub fn post(&self, jobs: impl IntoIterator<Item = Job>) {
        let Some(queue) = &self.jobs else { return };
        let sent = jobs.into_iter().fold(false, |_, job| queue.send(job).is_ok());
        if sent {
            self.ring_the_bell();
        }
    }

    fn ring_the_bell(&self) {
        // Full means that the thread will wake anyway.
        let _: Result<usize, Errno> = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.jobs = None;
        self.ring_the_bell();
        let step = Duration::from_millis(1);
        for _ in 0..STOP_MAX.as_millis() {
            if self.threads.iter().all(JoinHandle::is_finished) {
                break;
            }
            std::thread::sleep(step);
        }
        // A thread that is stuck in the kernel is left to it.
        for thread in self.threads.drain(..).filter(JoinHandle::is_finished) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
