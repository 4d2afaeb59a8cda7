//! A device at work: one thread carries out jobs with its own transfer queue, another reads the blocks left by
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

use shm_protocol::blocks::PoolBlocks;
use shm_protocol::region::Region;
use shm_protocol::wait;

use self::activity::DeviceContext;
use self::worker::DeviceWorker;
use super::recovery::Recovery;
use super::{DeviceEvent, DeviceJob, OpenedDevice, Tell};
use crate::TierError;
use crate::io::transfer_queue::{Backend, TransferQueue};

/// The longest wait for a device's threads on drop; a thread still in the kernel keeps its memory.
const STOP_MAX: Duration = Duration::from_secs(5);

/// A device at work. Dropping it ends its threads: jobs in flight end first, queued ones as
/// [`Fault::Stopped`](super::JobFault::Stopped).
#[derive(Debug)]
pub struct SsdDevice {
    jobs: Option<Sender<DeviceJob>>,
    wake: Arc<OwnedFd>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    backend: Backend,
    ring_refused: Option<io::Error>,
}

// === impl SsdDevice ===

impl SsdDevice {
    /// Starts device `number`. It reads the blocks of earlier lives, in parts, and serves jobs meanwhile.
    /// `pool` is the memory for the offsets of jobs. The wanted backend moves bytes; without one it is
    /// io_uring, or threads if the kernel refuses io_uring. The device's threads call `up`. It must not wait,
    /// except for [`DeviceEvent::Recovered`].
    pub fn start(
        opened: OpenedDevice,
        number: usize,
        pool: Arc<Region>,
        wanted: Option<Backend>,
        up: impl Fn(DeviceEvent) + Send + Sync + 'static,
    ) -> Result<Self, TierError> {
        Self::start_on(opened, number, pool, up, move |file, wake, blocks| {
            TransferQueue::new(wanted, file, wake, blocks)
        })
    }

    fn start_on(
        opened: OpenedDevice,
        number: usize,
        pool: Arc<Region>,
        up: impl Fn(DeviceEvent) + Send + Sync + 'static,
        make: impl FnOnce(OwnedFd, Arc<OwnedFd>, PoolBlocks) -> io::Result<TransferQueue> + Send + 'static,
    ) -> Result<Self, TierError> {
        let tell: Tell = Arc::new(up);
        let wake = Arc::new(wait::make_eventfd().map_err(TierError::os("make an eventfd"))?);
        let stop = Arc::new(AtomicBool::new(false));
        let (jobs, inbox) = mpsc::channel();

        let fd =
            opened.fd.try_clone().map_err(|source| TierError::Os { doing: "share the device", source })?;
        let recovery = Recovery::new(fd, number, &opened, Arc::clone(&tell), Arc::clone(&stop));
        let (ready, started) = mpsc::sync_channel(1);
        let (context, bell) = (DeviceContext::new(&opened, PoolBlocks::new(pool)), Arc::clone(&wake));
        // A ring belongs to its making thread.
        let work = move || match make(opened.fd, bell, context.blocks.clone()) {
            Ok(mut transfers) => {
                let _ = ready.send(Ok((transfers.backend(), transfers.refused.take())));
                DeviceWorker::new(number, context, transfers, inbox, tell).run();
            }
            Err(error) => drop(ready.send(Err(error))),
        };
        let backend = Backend::Threads;
        let mut device =
            Self { jobs: Some(jobs), wake, stop, threads: Vec::new(), backend, ring_refused: None };
        device.spawn(format!("ssd-{number}"), work)?;
        let started = started.recv().expect("the thread answers first of all");
        (device.backend, device.ring_refused) = started.map_err(TierError::Transfers)?;
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

    fn spawn(&mut self, name: String, run: impl FnOnce() + Send + 'static) -> Result<(), TierError> {
        let thread = std::thread::Builder::new().name(name).spawn(run);
        self.threads.push(thread.map_err(|source| TierError::Os { doing: "start a thread", source })?);
        Ok(())
    }

    /// Hands jobs over. Never waits.
    pub fn post_jobs(&self, jobs: impl IntoIterator<Item = DeviceJob>) {
        let Some(queue) = &self.jobs else { return };
        let sent = jobs.into_iter().fold(false, |_, job| queue.send(job).is_ok());
        if sent {
            wait::signal_eventfd(&self.wake);
        }
    }
}

impl Drop for SsdDevice {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.jobs = None;
        wait::signal_eventfd(&self.wake);
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
