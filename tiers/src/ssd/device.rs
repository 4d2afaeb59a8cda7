//! A device at work: one thread carries out jobs with its own carrier, another reads the blocks left by
//! earlier lives.

mod activity;
mod worker;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use shm_protocol::blocks::Blocks;
use shm_protocol::region::Region;
use shm_protocol::wait;

use self::activity::Desk;
use self::worker::Worker;
use super::recovery::Recovery;
use super::{Job, Opened, Tell, Up};
use crate::Error;
use crate::io::carrier::{Backend, Carrier};

/// The longest wait for a device's threads on drop; a thread still in the kernel keeps its memory.
const STOP_MAX: Duration = Duration::from_secs(5);

/// A device at work. Dropping it ends its threads: jobs in flight end first, queued ones as
/// [`Fault::Stopped`](super::Fault::Stopped).
#[derive(Debug)]
pub struct Device {
    jobs: Option<Sender<Job>>,
    wake: Arc<OwnedFd>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    backend: Backend,
    ring_refused: Option<io::Error>,
}

// === impl Device ===

impl Device {
    /// Starts device `number`. It reads the blocks of earlier lives, in parts, and serves jobs meanwhile.
    /// `pool` is the memory for the offsets of jobs. The wanted backend moves bytes; without one it is
    /// io_uring, or threads if the kernel refuses io_uring. The device's threads call `up`. It must not wait,
    /// except for [`Up::Recovered`].
    pub fn start(
        opened: Opened,
        number: usize,
        pool: Arc<Region>,
        wanted: Option<Backend>,
        up: impl Fn(Up) + Send + Sync + 'static,
    ) -> Result<Self, Error> {
        Self::start_on(opened, number, pool, up, move |file, wake, blocks| {
            Carrier::new(wanted, file, wake, blocks)
        })
    }

    fn start_on(
        opened: Opened,
        number: usize,
        pool: Arc<Region>,
        up: impl Fn(Up) + Send + Sync + 'static,
        make: impl FnOnce(OwnedFd, Arc<OwnedFd>, Blocks) -> io::Result<Carrier> + Send + 'static,
    ) -> Result<Self, Error> {
        let tell: Tell = Arc::new(up);
        let wake = Arc::new(wait::eventfd().map_err(Error::os("make an eventfd"))?);
        let stop = Arc::new(AtomicBool::new(false));
        let (jobs, inbox) = mpsc::channel();

        let fd = opened.fd.try_clone().map_err(|source| Error::Os { doing: "share the device", source })?;
        let recovery = Recovery::new(fd, number, &opened, Arc::clone(&tell), Arc::clone(&stop));
        let (ready, started) = mpsc::sync_channel(1);
        let (desk, bell) = (Desk::new(&opened, Blocks::new(pool)), Arc::clone(&wake));
        // A ring belongs to its making thread.
        let work = move || match make(opened.fd, bell, desk.blocks.clone()) {
            Ok(mut carrier) => {
                let _ = ready.send(Ok((carrier.backend(), carrier.refused.take())));
                Worker::new(number, desk, carrier, inbox, tell).run();
            }
            Err(error) => drop(ready.send(Err(error))),
        };
        let backend = Backend::Threads;
        let mut device =
            Self { jobs: Some(jobs), wake, stop, threads: Vec::new(), backend, ring_refused: None };
        device.spawn(format!("ssd-{number}"), work)?;
        let started = started.recv().expect("the thread answers first of all");
        (device.backend, device.ring_refused) = started.map_err(Error::Carrier)?;
        device.spawn(format!("ssd-{number}-recovery"), move || recovery.run())?;
        Ok(device)
    }

    /// Returns the backend that moves its bytes.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// Returns the kernel's reason for refusing a ring, if no backend was wanted.
    pub fn ring_refused(&self) -> Option<&io::Error> {
        self.ring_refused.as_ref()
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
            wait::signal(&self.wake);
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.jobs = None;
        wait::signal(&self.wake);
        let step = Duration::from_millis(1);
        for _ in 0..STOP_MAX.as_millis() {
            if self.threads.iter().all(JoinHandle::is_finished) {
                break;
            }
            std::thread::sleep(step);
        }
        // A thread stuck in the kernel is left alone.
        for thread in self.threads.drain(..).filter(JoinHandle::is_finished) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
