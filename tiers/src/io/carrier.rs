//! Carries the transfers of one file: by io_uring, or by threads if the kernel refuses a ring.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use shm_protocol::blocks::Blocks;

use super::threads::Threads;
use super::transfer::Transfer;
use super::uring::Ring;

shm_protocol::named! {
    /// The means of moving bytes between a device and memory.
    pub enum Backend {
        IoUring = "io_uring",
        /// Threads that each wait for one transfer.
        Threads = "threads",
    }
}

/// Replaces the kernel's answer in tests.
#[cfg(test)]
pub(crate) type Inject = Box<dyn FnMut(&Transfer, i32) -> i32 + Send>;

enum Means {
    Ring(Box<Ring>),
    Threads(Threads),
}

/// Carries the transfers of one file.
pub(crate) struct Carrier {
    means: Means,
    /// The reason for threads in place of a ring, if no backend was wanted.
    pub(crate) refused: Option<io::Error>,
    #[cfg(test)]
    pub(crate) inject: Option<Inject>,
}

// === impl Carrier ===

impl Carrier {
    /// Makes a carrier of `file`'s transfers for the calling thread alone. A write to the eventfd `wake` ends
    /// a wait. Without a wanted backend it is a ring, or threads if the kernel refuses the ring.
    pub(crate) fn new(
        wanted: Option<Backend>,
        file: OwnedFd,
        wake: Arc<OwnedFd>,
        blocks: Blocks,
    ) -> io::Result<Self> {
        let file = Arc::new(file);
        let ring = || {
            Ring::new(Arc::clone(&file), Arc::clone(&wake), blocks.clone())
                .map(|ring| Means::Ring(Box::new(ring)))
        };
        let threads =
            || Threads::new(Arc::clone(&file), Arc::clone(&wake), blocks.clone()).map(Means::Threads);
        let (means, refused) = match wanted {
            Some(Backend::IoUring) => (ring()?, None),
            Some(Backend::Threads) => (threads()?, None),
            None => match ring() {
                Ok(ring) => (ring, None),
                Err(error) => (threads()?, Some(error)),
            },
        };
        Ok(Self {
            means,
            refused,
            #[cfg(test)]
            inject: None,
        })
    }

    pub(crate) fn backend(&self) -> Backend {
        match &self.means {
            Means::Ring(_) => Backend::IoUring,
            Means::Threads(_) => Backend::Threads,
        }
    }

    /// Takes a note for the operator's log, once.
    pub(crate) fn take_note(&mut self) -> Option<String> {
        match &mut self.means {
            Means::Ring(ring) => ring.take_note(),
            Means::Threads(_) => None,
        }
    }

    /// Hands a transfer over; gives it back if too many are in flight. The kernel has it after the next
    /// [`Carrier::flush`] at the latest.
    pub(crate) fn push(&mut self, transfer: Transfer) -> Result<(), Transfer> {
        match &mut self.means {
            Means::Ring(ring) => ring.push(transfer),
            Means::Threads(threads) => threads.push(transfer),
        }
    }

    /// Submits pushed transfers to the kernel, and takes completed ones.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        match &mut self.means {
            Means::Ring(ring) => ring.flush(),
            Means::Threads(_) => Ok(()),
        }
    }

    /// Does the same as [`Carrier::flush`], and waits until a transfer has completed, the eventfd was
    /// written, or `limit` has passed.
    pub(crate) fn wait(&mut self, limit: Option<Duration>) -> io::Result<()> {
        match &mut self.means {
            Means::Ring(ring) => ring.wait(limit),
            Means::Threads(threads) => threads.wait(limit),
        }
    }

    /// Returns the next completed transfer, with the bytes moved in this round.
    pub(crate) fn reap(&mut self) -> Option<(Transfer, Result<u32, Errno>)> {
        let (transfer, answer) = match &mut self.means {
            Means::Ring(ring) => ring.reap(),
            Means::Threads(threads) => threads.reap(),
        }?;
        #[cfg(test)]
        let answer = self.inject.as_mut().map_or(answer, |inject| inject(&transfer, answer));
        let moved = match u32::try_from(answer) {
            Ok(moved) if moved <= transfer.len - transfer.moved => Ok(moved),
            // More bytes than wanted are impossible, so such an answer is not trusted.
            Ok(_) => Err(Errno::IO),
            Err(_) => Err(Errno::from_raw_os_error(answer.wrapping_neg())),
        };
        Some((transfer, moved))
    }
}
