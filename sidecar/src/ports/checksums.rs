//! Threads that read a pool file's blocks for their checksums, so that the next sidecar can tell whether somebody changed them
//! between the two lives.
//!
//! One computes those of blocks that were committed, behind everything else: it has the lowest priority. Blocks that cannot wait are
//! found in the pool once it has nothing else to do. Another one verifies blocks of earlier lives, which queries wait for.

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

/// Blocks that wait for their checksums, in 1.5 MiB; those beyond it are found in the pool later. As many as may wait to be written to
/// disks.
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
    /// The checksum of a block that waited; `None` of one that is not in its slot any more, or has one.
    Sum { slot: SlotRef, checksum: Option<u64> },
    /// The checksum of a block that was found in the pool.
    Found { slot: SlotRef, checksum: Option<u64> },
    /// Of the blocks that could not wait the first so many have been looked for.
    Swept(u64),
}

/// The threads, at work.
#[derive(Debug)]
pub struct Checksums {
    sums: SyncSender<SlotRef>,
    verifications: Sender<(BlockKey, SlotRef)>,
    summed: Receiver<Summed>,
    wake: Arc<OwnedFd>,
    /// Blocks that wait for their checksums.
    waiting: u64,
    /// Blocks that could not wait, so far.
    missed: Arc<AtomicU64>,
    /// How many of these have been looked for.
    swept: u64,
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
        Self::start_with(pool, guard, UNSUMMED_MAX)
    }

    fn start_with<G: Send + 'static>(
        pool: &Arc<Pool>,
        guard: impl Fn() -> G,
        waiting_max: usize,
    ) -> std::io::Result<Self> {
        let wake = Arc::new(wait::eventfd()?);
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
            verify(&to_verify, &of, &reports);
        })?;
        Ok(Self { sums, verifications, summed, wake, waiting: 0, missed, swept: 0 })
    }

    /// A block was committed.
    pub fn sum(&mut self, slot: SlotRef) {
        match self.sums.try_send(slot) {
            Ok(()) => self.waiting += 1,
            // SYNC POINT(missed): the thread that sees the number finds the block in its slot.
            Err(_) => _ = self.missed.fetch_add(1, Ordering::Release),
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
        match summed {
            Summed::Sum { .. } => self.waiting -= 1,
            Summed::Swept(missed) => self.swept = missed,
            Summed::Verified { .. } | Summed::Found { .. } => {}
        }
        Some(summed)
    }

    /// Blocks whose checksums are to come; those that could not wait are counted until the pool has been searched for all of them.
    pub fn unsummed(&self) -> u64 {
        self.waiting + self.missed.load(Ordering::Relaxed) - self.swept
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
        wait::signal(&self.wake);
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
        // SYNC POINT(missed): those that are counted here are in their slots.
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

/// The checksum of a block that has none yet: one that waited may have been found in the pool meanwhile.
fn missing_sum(pool: &Pool, slot: SlotRef) -> Option<u64> {
    pool.checksum(slot).is_none().then(|| pool.sum(slot)).flatten()
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

#[cfg(test)]
mod tests {
    use shm_protocol::key::{BlockHash, NamespaceDigest};
    use shm_protocol::pool::Geometry;
    use tiers::pool::Config;

    use super::*;

    const SEGMENT: u64 = 4 << 20;
    const BLOCK: u64 = 10_000;
    const KEY: BlockKey = BlockKey { namespace: 1, group: 0, hash: BlockHash([5; 32]) };

    fn full_pool() -> (Arc<Pool>, Vec<SlotRef>) {
        let config =
            Config { bytes: 2 * SEGMENT, segment_bytes: SEGMENT, path: None, hugepages: false, epoch: 1 };
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

    /// Carries out the data thread's part until nothing is to come; how many of each report came.
    fn take_all(checksums: &mut Checksums, pool: &Pool) -> [usize; 3] {
        let (mut waited, mut found, mut sweeps) = (0, 0, 0);
        while checksums.unsummed() > 0 {
            match checksums.take() {
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
        // A channel without room takes nothing of a thread that only looks into it.
        let mut checksums = Checksums::start_with(&pool, || (), 0).unwrap();
        slots.iter().for_each(|slot| checksums.sum(*slot));
        let [waited, found, sweeps] = take_all(&mut checksums, &pool);
        assert!(waited == 0 && found >= slots.len() && sweeps >= 1, "{waited} {found} {sweeps}");
        assert!(slots.iter().all(|slot| pool.verify(*slot)));
    }

    #[test]
    fn blocks_that_wait_are_read_once_and_the_pool_is_not_searched() {
        let (pool, slots) = full_pool();
        let mut checksums = Checksums::start(&pool, || ()).unwrap();
        slots.iter().for_each(|slot| checksums.sum(*slot));
        assert_eq!(take_all(&mut checksums, &pool), [slots.len(), 0, 0]);
        assert!(slots.iter().all(|slot| pool.verify(*slot)));
    }
}
