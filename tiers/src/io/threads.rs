//! Transfers between one file and memory by threads, each with one transfer at a time, for kernels without
//! io_uring. A transfer in flight owns its memory, as in a ring.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use shm_protocol::blocks::Blocks;
use shm_protocol::wait;

use super::transfer::{Direction, Memory, TRANSFERS_MAX, Transfer};

/// Transfers of a device at a time: so many blocks of some hundred KiB keep a fast device busy.
const THREADS: usize = 8;

/// The threads of one file.
pub(crate) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    in_flight: usize,
}

struct Shared {
    file: Arc<OwnedFd>,
    blocks: Blocks,
    /// Written after each completed transfer.
    wake: Arc<OwnedFd>,
    queue: Mutex<Queue>,
    /// Signalled for a new transfer, and when the queue is closed.
    called: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Transfer>,
    /// Completed transfers, with the kernel's answers.
    back: VecDeque<(Transfer, i32)>,
    closed: bool,
}

// === impl Threads ===

impl Threads {
    /// Starts threads for `file`. A write to the eventfd `wake` ends a wait.
    pub(crate) fn new(file: Arc<OwnedFd>, wake: Arc<OwnedFd>, blocks: Blocks) -> io::Result<Self> {
        let shared = Shared { file, blocks, wake, queue: Mutex::default(), called: Condvar::new() };
        let mut threads = Self { shared: Arc::new(shared), threads: Vec::new(), in_flight: 0 };
        for number in 0..THREADS {
            let shared = Arc::clone(&threads.shared);
            let named = std::thread::Builder::new().name(format!("ssd-io-{number}"));
            threads.threads.push(named.spawn(move || shared.serve())?);
        }
        Ok(threads)
    }

    /// Hands a transfer over; gives it back if too many are in flight.
    pub(crate) fn push(&mut self, transfer: Transfer) -> Result<(), Transfer> {
        if self.in_flight == TRANSFERS_MAX {
            return Err(transfer);
        }
        self.in_flight += 1;
        self.shared.queue().waiting.push_back(transfer);
        self.shared.called.notify_one();
        Ok(())
    }

    /// Waits until a transfer has completed, the eventfd was written, or `limit` has passed.
    pub(crate) fn wait(&mut self, limit: Option<Duration>) -> io::Result<()> {
        let limit = limit.map(|limit| Timespec::try_from(limit).expect("seconds, not ages"));
        let wake = &*self.shared.wake;
        match rustix::event::poll(&mut [PollFd::new(wake, PollFlags::IN)], limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        // The count does not matter: the waiting thread looks at all queues afterwards.
        let _ = rustix::io::read(wake, &mut [0u8; 8]);
        Ok(())
    }

    /// Returns the next completed transfer, with the kernel's answer.
    pub(crate) fn reap(&mut self) -> Option<(Transfer, i32)> {
        let back = self.shared.queue().back.pop_front()?;
        self.in_flight -= 1;
        Some(back)
    }
}

impl Drop for Threads {
    /// A thread stuck in the kernel keeps its transfer and the file; the others end.
    fn drop(&mut self) {
        self.shared.queue().closed = true;
        self.shared.called.notify_all();
        if self.in_flight == 0 {
            self.threads.drain(..).for_each(|thread| drop(thread.join()));
        }
    }
}

// === impl Shared ===

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().expect("nothing panics while it has the queue")
    }

    fn serve(&self) {
        while let Some(mut transfer) = self.next() {
            let moved = self.carry(&mut transfer);
            let answer = moved.map_or_else(|errno| -errno.raw_os_error(), |moved| moved as i32);
            self.queue().back.push_back((transfer, answer));
            wait::signal(&self.wake);
        }
    }

    /// Returns the next transfer; `None` once the queue is closed.
    fn next(&self) -> Option<Transfer> {
        let queue = self.called.wait_while(self.queue(), |queue| !queue.closed && queue.waiting.is_empty());
        let mut queue = queue.expect("nothing panics while it has the queue");
        if queue.closed { None } else { queue.waiting.pop_front() }
    }

    /// Returns the bytes moved by the kernel in one call, at most the rest of the transfer.
    fn carry(&self, transfer: &mut Transfer) -> Result<usize, Errno> {
        let moved = self.move_some(transfer)?;
        if transfer.durable {
            rustix::fs::fdatasync(&*self.file)?;
        }
        Ok(moved)
    }

    fn move_some(&self, transfer: &mut Transfer) -> Result<usize, Errno> {
        let (skip, end) = (transfer.moved as usize, transfer.len as usize);
        let at = transfer.at + u64::from(transfer.moved);
        match (transfer.direction, &mut transfer.memory) {
            (Direction::Read, Memory::Own(buffer)) => {
                rustix::io::pread(&*self.file, &mut buffer.bytes_mut()[skip..end], at)
            }
            (Direction::Write, Memory::Own(buffer)) => {
                rustix::io::pwrite(&*self.file, &buffer.bytes()[skip..end], at)
            }
            (Direction::Read, Memory::Pool(offset)) => {
                self.blocks.read_at(&*self.file, at, *offset + skip as u64, end - skip)
            }
            (Direction::Write, Memory::Pool(offset)) => {
                let bytes = self.blocks.bytes(*offset + skip as u64, end - skip).ok_or(Errno::FAULT)?;
                rustix::io::pwrite(&*self.file, bytes, at)
            }
        }
    }
}
