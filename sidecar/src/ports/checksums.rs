//! Threads that compute checksums of a pool file's blocks, so the next sidecar can find blocks changed
//! between the two lives.
//!
//! One thread computes checksums of committed blocks at the lowest priority. If its queue is full, a block is
//! skipped and found later by a search of the pool. Another thread verifies blocks of earlier lives; queries
//! wait for it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender, TryRecvError};
use std::thread;
use std::time::Duration;

use shm_protocol::key::BlockKey;
use shm_protocol::pool::SlotRef;
use shm_protocol::wait;
use tiers::pool::Pool;

/// Blocks queued for their checksums, 1.5 MiB; a search of the pool finds the rest later. The queue is as
/// long as that for writes to disks.
const UNSUMMED_MAX: usize = 65_536;
/// Interval of polls for committed blocks: waking the thread for each would cost the data thread a system
/// call.
const SUM_POLL: Duration = Duration::from_millis(20);
/// Blocks between two wake-ups of the data thread.
const WAKE_BLOCKS: usize = 8;
/// The lowest priority.
const NICE: i32 = 19;

/// A thread's report.
#[derive(Copy, Clone, Debug)]
pub enum Summed {
    /// A block of an earlier life was compared with its checksum.
    Verified {
        key: BlockKey,
        slot: SlotRef,
        /// True if its bytes match its checksum.
        whole: bool,
    },
    /// The checksum of a queued block; `None` if the block has left its slot or already has a checksum.
    Sum { slot: SlotRef, checksum: Option<u64> },
    /// The checksum of a block found by a search of the pool.
    Found { slot: SlotRef, checksum: Option<u64> },
    /// The pool was searched for the first so many skipped blocks.
    Swept(u64),
}

/// The running threads.
#[derive(Debug)]
pub struct Checksums {
    sums: SyncSender<SlotRef>,
    verifications: Sender<(BlockKey, SlotRef)>,
    summed: Receiver<Summed>,
    wake: Arc<OwnedFd>,
    /// Queued blocks without a report.
    waiting: u64,
    /// Blocks skipped so far.
    missed: Arc<AtomicU64>,
    /// Skipped blocks covered by finished searches.
    swept: u64,
}

/// A thread's channel to the data thread.
#[derive(Clone, Debug)]
struct Reports {
    sender: Sender<Summed>,
    wake: Arc<OwnedFd>,
}

// === impl Checksums ===

impl Checksums {
    /// Starts the threads, each with a `guard`. They end after this value is dropped.
    pub fn start_threads<G: Send + 'static>(
        pool: &Arc<Pool>,
        guard: impl Fn() -> G,
    ) -> std::io::Result<Self> {
        Self::start_with(pool, guard, UNSUMMED_MAX)
    }

    fn start_with<G: Send + 'static>(
        pool: &Arc<Pool>,
        guard: impl Fn() -> G,
        waiting_max: usize,
    ) -> std::io::Result<Self> {
        let wake = Arc::new(wait::make_eventfd()?);
        let (sender, summed) = mpsc::channel();
        let (sums, to_sum) = mpsc::sync_channel(waiting_max);
        let (verifications, to_verify) = mpsc::channel();
        let reports = Reports { sender, wake: Arc::clone(&wake) };
        let missed = Arc::new(AtomicU64::new(0));
        let (held, of, back, counted) = (guard(), Arc::clone(pool), reports.clone(), Arc::clone(&missed));
        thread::Builder::new().name("pillion-sum".into()).spawn(move || {
            let _held = held;
            sum(&to_sum, &counted, &of, &back);
        })?;
        let (held, of) = (guard(), Arc::clone(pool));
        thread::Builder::new().name("pillion-verify".into()).spawn(move || {
            let _held = held;
            verify_blocks(&to_verify, &of, &reports);
        })?;
        Ok(Self { sums, verifications, summed, wake, waiting: 0, missed, swept: 0 })
    }

    /// Queues a committed block for its checksum, or counts it as skipped.
    pub fn sum(&mut self, slot: SlotRef) {
        match self.sums.try_send(slot) {
            Ok(()) => self.waiting += 1,
            // SYNC POINT(missed): a thread that reads this count finds the block in its slot.
            Err(_) => _ = self.missed.fetch_add(1, Ordering::Release),
        }
    }

    /// Queues the verification of a block.
    pub fn verify_block(&self, key: BlockKey, slot: SlotRef) {
        // The thread ends with this value or with the sidecar.
        let _ = self.verifications.send((key, slot));
    }

    /// The next report.
    pub fn take_summed(&mut self) -> Option<Summed> {
        let summed = self.summed.try_recv().ok()?;
        match summed {
            Summed::Sum { .. } => self.waiting -= 1,
            Summed::Swept(missed) => self.swept = missed,
            Summed::Verified { .. } | Summed::Found { .. } => {}
        }
        Some(summed)
    }

    /// Blocks without checksums. A skipped block is counted until the pool has been searched for it.
    pub fn unsummed(&self) -> u64 {
        self.waiting + self.missed.load(Ordering::Relaxed) - self.swept
    }

    /// A descriptor, readable at each report; edge-triggered, never read.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

// === impl Reports ===

impl Reports {
    /// Sends reports until `next` has none. Wakes the data thread once for [`WAKE_BLOCKS`] reports, and at
    /// the end.
    fn tell_all(&self, mut next: impl FnMut() -> Option<Summed>) {
        let mut told = 0;
        while let Some(summed) = next() {
            // The receiver is gone when the sidecar ends.
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
        wait::signal_eventfd(&self.wake);
    }
}

// === the threads ===

fn sum(slots: &Receiver<SlotRef>, missed: &AtomicU64, pool: &Pool, reports: &Reports) {
    if let Err(error) = rustix::process::nice(NICE) {
        tracing::warn!(%error, "checksums are computed at the sidecar's own priority, because a lower one was refused");
    }
    let mut swept = 0;
    loop {
        let mut ended = false;
        reports.tell_all(|| match slots.try_recv() {
            Ok(slot) => Some(Summed::Sum { slot, checksum: missing_sum(pool, slot) }),
            Err(error) => {
                ended = error == TryRecvError::Disconnected;
                None
            }
        });
        if ended {
            return;
        }
        // SYNC POINT(missed): all blocks counted here are in their slots.
        let counted = missed.load(Ordering::Acquire);
        if counted == swept {
            thread::sleep(SUM_POLL);
            continue;
        }
        let found = (0..pool.segments()).flat_map(|number| pool.unsummed(number));
        let mut found = found.map(|slot| Summed::Found { slot, checksum: missing_sum(pool, slot) });
        let mut end = std::iter::once(Summed::Swept(counted));
        reports.tell_all(|| found.next().or_else(|| end.next()));
        swept = counted;
    }
}

/// The checksum of a block without one: a search may have reached a queued block first.
fn missing_sum(pool: &Pool, slot: SlotRef) -> Option<u64> {
    pool.checksum(slot).is_none().then(|| pool.sum(slot)).flatten()
}

fn verify_blocks(blocks: &Receiver<(BlockKey, SlotRef)>, pool: &Pool, reports: &Reports) {
    while let Ok(first) = blocks.recv() {
        let mut first = Some(first);
        reports.tell_all(|| {
            let (key, slot) = first.take().or_else(|| blocks.try_recv().ok())?;
            Some(Summed::Verified { key, slot, whole: pool.verify(slot) })
        });
    }
}

#[cfg(test)]
mod tests {
    use shm_protocol::key::{BlockHash, NamespaceDigest};
    use shm_protocol::pool::Geometry;
    use tiers::pool::PoolConfig;

    use super::*;

    const SEGMENT: u64 = 4 << 20;
    const BLOCK: u64 = 10_000;
    const KEY: BlockKey = BlockKey { namespace: 1, group: 0, hash: BlockHash([5; 32]) };

    fn full_pool() -> (Arc<Pool>, Vec<SlotRef>) {
        let config =
            PoolConfig { bytes: 2 * SEGMENT, segment_bytes: SEGMENT, path: None, hugepages: false, epoch: 1 };
        let pool = Pool::create(&config).unwrap();
        let geometry = Geometry::new(SEGMENT, BLOCK).unwrap();
        let mut slots = Vec::new();
        for segment in 0..2 {
            assert!(pool.write_segment_header(segment, BLOCK));
            for index in 0..geometry.slot_count {
                let offset = geometry.offset(segment, index).unwrap();
                let slot = SlotRef { offset, generation: pool.first_generation() + slots.len() as u64 };
                assert!(pool.fill(slot, NamespaceDigest([1; 16]), &KEY) && pool.commit(slot, 0));
                slots.push(slot);
            }
        }
        (Arc::new(pool), slots)
    }

    /// Plays the data thread until no checksum is missing. Returns the numbers of queued blocks, found blocks
    /// and searches.
    fn take_all(checksums: &mut Checksums, pool: &Pool) -> [usize; 3] {
        let (mut waited, mut found, mut sweeps) = (0, 0, 0);
        while checksums.unsummed() > 0 {
            match checksums.take_summed() {
                Some(Summed::Sum { slot, checksum }) => {
                    waited += 1;
                    checksum.into_iter().for_each(|sum| assert!(pool.set_checksum(slot, sum)));
                }
                Some(Summed::Found { slot, checksum }) => {
                    found += 1;
                    checksum.into_iter().for_each(|sum| assert!(pool.set_checksum(slot, sum)));
                }
                Some(Summed::Swept(_)) => sweeps += 1,
                Some(Summed::Verified { .. }) => unreachable!("nothing was adopted"),
                None => thread::yield_now(),
            }
        }
        [waited, found, sweeps]
    }

    #[test]
    fn a_block_that_cannot_wait_gets_its_checksum_all_the_same() {
        let (pool, slots) = full_pool();
        // A channel without capacity accepts nothing, as the thread only polls it.
        let mut checksums = Checksums::start_with(&pool, || (), 0).unwrap();
        slots.iter().for_each(|slot| checksums.sum(*slot));
        let [waited, found, sweeps] = take_all(&mut checksums, &pool);
        assert!(waited == 0 && found >= slots.len() && sweeps >= 1, "{waited} {found} {sweeps}");
        assert!(slots.iter().all(|slot| pool.verify(*slot)));
    }

    #[test]
    fn blocks_that_wait_are_read_once_and_the_pool_is_not_searched() {
        let (pool, slots) = full_pool();
        let mut checksums = Checksums::start_threads(&pool, || ()).unwrap();
        slots.iter().for_each(|slot| checksums.sum(*slot));
        assert_eq!(take_all(&mut checksums, &pool), [slots.len(), 0, 0]);
        assert!(slots.iter().all(|slot| pool.verify(*slot)));
    }
}
