//! Threads that read a pool file's blocks for their checksums, so that the next sidecar can tell whether somebody changed them
//! between the two lives.
//!
//! One computes those of blocks that were committed, behind everything else: it has the lowest priority, and a block that
//! cannot wait is left without. Another one verifies blocks of earlier lives, which queries wait for.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender, SyncSender, TryRecvError};
use std::thread;
use std::time::Duration;

use shm_protocol::key::BlockKey;
use shm_protocol::pool::SlotRef;
use tiers::pool::Pool;

use crate::wake;

/// Blocks that wait for their checksums, in 1.5 MiB; beyond it a block gets none, and the next sidecar drops it. As many as may wait
/// to be written to disks.
const UNSUMMED_MAX: usize = 65_536;
/// How often blocks that were committed are looked for: waking the thread for each would cost the data thread a system call.
const SUM_POLL: Duration = Duration::from_millis(20);
/// Blocks between two wake-ups of the data thread.
const WAKE_BLOCKS: usize = 8;
/// The lowest priority that there is.
const NICE: i32 = 19;

/// A thread's report of one block.
#[derive(Copy, Clone, Debug)]
pub enum Summed {
    /// A block of an earlier life was compared with its checksum.
    Verified {
        key: BlockKey,
        slot: SlotRef,
        /// Whether its bytes are what its checksum says.
        whole: bool,
    },
    /// A block's checksum; `None` of a block that is not in its slot any more.
    Sum { slot: SlotRef, checksum: Option<u64> },
}

/// The threads, at work.
#[derive(Debug)]
pub struct Checksums {
    sums: SyncSender<SlotRef>,
    verifications: Sender<(BlockKey, SlotRef)>,
    summed: Receiver<Summed>,
    wake: Arc<OwnedFd>,
    /// Blocks whose checksums are to come.
    unsummed: u64,
    /// Blocks that were left without, because too many waited.
    given_up: u64,
}

/// A thread's way back.
#[derive(Clone, Debug)]
struct Reports {
    sender: Sender<Summed>,
    wake: Arc<OwnedFd>,
}

// === impl Checksums ===

impl Checksums {
    /// Starts the threads; each holds a `guard` as long as it runs, which is as long as this value is there.
    pub fn start<G: Send + 'static>(pool: &Arc<Pool>, guard: impl Fn() -> G) -> std::io::Result<Self> {
        let wake = Arc::new(wake::eventfd()?);
        let (sender, summed) = mpsc::channel();
        let (sums, to_sum) = mpsc::sync_channel(UNSUMMED_MAX);
        let (verifications, to_verify) = mpsc::channel();
        let reports = Reports { sender, wake: Arc::clone(&wake) };
        let (held, of, back) = (guard(), Arc::clone(pool), reports.clone());
        thread::Builder::new().name("pillion-sum".into()).spawn(move || {
            let _held = held;
            sum(&to_sum, &of, &back);
        })?;
        let (held, of) = (guard(), Arc::clone(pool));
        thread::Builder::new().name("pillion-verify".into()).spawn(move || {
            let _held = held;
            verify(&to_verify, &of, &reports);
        })?;
        Ok(Self { sums, verifications, summed, wake, unsummed: 0, given_up: 0 })
    }

    /// A block was committed.
    pub fn sum(&mut self, slot: SlotRef) {
        match self.sums.try_send(slot) {
            Ok(()) => self.unsummed += 1,
            Err(_) => self.given_up += 1,
        }
    }

    /// Compares a block with its checksum, behind those that were given before.
    pub fn verify(&self, key: BlockKey, slot: SlotRef) {
        // The thread ends with this value, or with the sidecar.
        let _ = self.verifications.send((key, slot));
    }

    /// What was computed next.
    pub fn take(&mut self) -> Option<Summed> {
        let summed = self.summed.try_recv().ok()?;
        self.unsummed -= u64::from(matches!(summed, Summed::Sum { .. }));
        Some(summed)
    }

    /// Blocks whose checksums are to come.
    pub fn unsummed(&self) -> u64 {
        self.unsummed
    }

    /// Blocks that were left without a checksum.
    pub fn given_up(&self) -> u64 {
        self.given_up
    }

    /// Becomes readable when something was computed; watched by edge, never read.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

// === impl Reports ===

impl Reports {
    /// Computes and tells, until nothing more is `next`. The data thread is woken for some blocks at a time, and for the last.
    fn tell_all(&self, mut next: impl FnMut() -> Option<Summed>) {
        let mut told = 0;
        while let Some(summed) = next() {
            // Nobody asks any more: the sidecar ends.
            let _ = self.sender.send(summed);
            told += 1;
            if told % WAKE_BLOCKS == 0 {
                self.wake();
            }
        }
        if told % WAKE_BLOCKS > 0 {
            self.wake();
        }
    }

    fn wake(&self) {
        // Full means readable, which is all that is wanted.
        wake::signal(&self.wake);
    }
}

// === the threads ===

fn sum(slots: &Receiver<SlotRef>, pool: &Pool, reports: &Reports) {
    if let Err(error) = rustix::process::nice(NICE) {
        tracing::warn!(%error, "checksums are computed at the priority of the sidecar");
    }
    loop {
        let mut ended = false;
        reports.tell_all(|| match slots.try_recv() {
            Ok(slot) => Some(Summed::Sum { slot, checksum: pool.sum(slot) }),
            Err(error) => {
                ended = error == TryRecvError::Disconnected;
                None
            }
        });
        if ended {
            return;
        }
        thread::sleep(SUM_POLL);
    }
}

fn verify(blocks: &Receiver<(BlockKey, SlotRef)>, pool: &Pool, reports: &Reports) {
    while let Ok(first) = blocks.recv() {
        let mut first = Some(first);
        reports.tell_all(|| {
            let (key, slot) = first.take().or_else(|| blocks.try_recv().ok())?;
            Some(Summed::Verified { key, slot, whole: pool.verify(slot) })
        });
    }
}
