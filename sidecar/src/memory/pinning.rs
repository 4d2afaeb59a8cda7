//! Prepares GPUs: makes a context on each, and locks the pool's pages in memory for their copy engines.
//!
//! A thread does this from the pool's start upwards while engines are already served: blocks on GPUs are kept
//! in the locked part alone. Several threads first touch the pages, because locking untouched ones takes ten
//! times as long. They run on CPUs near the GPU, so the pages lie on its NUMA node; GPUs of several nodes
//! share the pool slice by slice. Without a GPU the thread ends at once and touches no page.
//!
//! Pages stay locked and contexts stay until the process ends: releasing them would only delay its end.

use std::num::NonZero;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

use copy_engine::cuda::{self, Gpu, Registered};
use shm_protocol::region::Region;

use crate::config::{Size, UseGpu};
use crate::memory::numa::Near;
use crate::pages::metrics::PinningMetrics;

/// Bytes locked by one call. A call delays this process's other copies by 2.2 ms (p99, measured). A copy must
/// not cross the end of a slice, because the driver registers each slice separately.
pub const SLICE_BYTES: usize = 64 << 20;
/// Zeroing fresh pages takes about 0.3 s for each GiB on one thread; eight threads reach the memory's
/// bandwidth. Half of the cores are left to engines starting at this time.
const TOUCH_THREADS_MAX: usize = 8;
/// The smallest page size of supported machines; larger pages are touched more than once.
const PAGE_BYTES: usize = 4096;

/// The locked bytes of the pool, and the usable GPUs.
#[derive(Debug)]
pub struct Pinned {
    bytes: AtomicU64,
    gpus: Mutex<Option<Gpus>>,
    known: Condvar,
}

/// The usable GPUs, or the reason why there are none.
type Gpus = Result<Vec<Arc<Gpu>>, String>;

/// Settles the GPUs on drop: after a panic no caller waits for them any longer.
struct Settled<'a>(&'a Pinned);

// === impl Pinned ===

impl Pinned {
    /// Starts the thread, unless GPUs are switched off. `too_little` is logged if there is a GPU. `reserved`
    /// waits until the pool's memory is reserved up to an offset, and returns false if it never will be.
    pub fn start_thread(
        gpu: UseGpu,
        too_little: Option<String>,
        pool: Arc<Region>,
        reserved: impl Fn(u64) -> bool + Send + 'static,
        metrics: PinningMetrics,
    ) -> std::io::Result<Arc<Self>> {
        let pinned = Arc::new(Self::new());
        if gpu == UseGpu::Off {
            pinned.set_gpus(Err("the sidecar was started with --gpu off".into()));
            return Ok(pinned);
        }
        let shared = Arc::clone(&pinned);
        thread::Builder::new().name("pillion-pin".into()).spawn(move || {
            let _settled = Settled(&shared);
            if let Some(text) = too_little.filter(|_| cuda::is_present()) {
                tracing::warn!("{text}");
            }
            shared.run(&pool, reserved, &metrics);
        })?;
        Ok(pinned)
    }

    fn new() -> Self {
        Self { bytes: AtomicU64::new(0), gpus: Mutex::new(None), known: Condvar::new() }
    }

    /// The GPUs with their contexts. Waits until the contexts are made, which takes seconds on some machines.
    /// The error names the remedy.
    pub fn gpus(&self) -> Result<Vec<Arc<Gpu>>, String> {
        let gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        let known = self.known.wait_while(gpus, |gpus| gpus.is_none());
        known.unwrap_or_else(PoisonError::into_inner).clone().expect("waited for")
    }

    /// The CPUs near the GPUs, each node once. Waits like [`Pinned::gpus`].
    pub fn near(&self) -> Vec<Near> {
        let mut nodes = Vec::new();
        for near in self.gpus().iter().flatten().filter_map(|gpu| Near::device(gpu.pci_address())) {
            if !nodes.contains(&near) {
                nodes.push(near);
            }
        }
        nodes
    }

    /// Bytes locked from the pool's start.
    pub fn bytes(&self) -> u64 {
        // SYNC POINT(pinned): acquire; the driver has registered every page below.
        self.bytes.load(Ordering::Acquire)
    }

    fn set_gpus(&self, gpus: Gpus) {
        self.gpus.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(gpus);
        self.known.notify_all();
    }

    fn run(&self, pool: &Arc<Region>, reserved: impl Fn(u64) -> bool, metrics: &PinningMetrics) {
        if !cuda::is_present() {
            let remedy = "give its container the engine's GPUs and the driver's libraries";
            return self.set_gpus(Err(format!("the sidecar sees no GPU: {remedy}")));
        }
        let gpus = usable();
        if let Err(reason) = &gpus {
            tracing::warn!(reason, "engines on GPUs are not served");
        }
        self.set_gpus(gpus.clone());
        let Ok(gpus) = gpus else { return };
        // One GPU's call locks the pages for all GPUs. They are never unlocked: see the module's
        // documentation.
        let lock = |start, len| Registered::new(&gpus[0], pool, start, len).map(std::mem::forget);
        let locked = self.lock_all(pool, reserved, &self.near(), metrics, lock);
        std::mem::forget(gpus);
        match locked {
            Ok(()) => tracing::info!(pool = %size(self.bytes()), "the pool is locked in memory for the GPUs"),
            Err(error) => tracing::warn!(
                %error, locked = %size(self.bytes()), pool = %size(pool.len() as u64),
                "locking the pool in memory for the GPUs failed: the rest of the pool keeps no blocks of GPUs. Lower \
                 --dram, or raise this container's limits of memory and of locked memory (ulimit -l)"
            ),
        }
    }

    /// Touches and locks slice after slice until one fails or its memory cannot be reserved.
    fn lock_all<E>(
        &self,
        pool: &Region,
        reserved: impl Fn(u64) -> bool,
        near: &[Near],
        metrics: &PinningMetrics,
        mut lock: impl FnMut(usize, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let threads = (cores / 2).clamp(1, TOUCH_THREADS_MAX);
        for start in (0..pool.len()).step_by(SLICE_BYTES) {
            let end = pool.len().min(start + SLICE_BYTES);
            if !reserved(end as u64) {
                break;
            }
            let near = near.get(start / SLICE_BYTES % near.len().max(1));
            touch_all(pool, start, end, threads, near);
            if let Err(error) = lock(start, end - start) {
                metrics.failures.inc();
                return Err(error);
            }
            // SYNC POINT(pinned): release pairs with `bytes`.
            self.bytes.store(end as u64, Ordering::Release);
            metrics.bytes.set(end as i64);
        }
        Ok(())
    }
}

impl Drop for Settled<'_> {
    fn drop(&mut self) {
        self.0.set_gpus(Err(
            "the thread that looks for GPUs ended with a panic: report it with the sidecar's log".into(),
        ));
    }
}

/// The GPUs usable by this process, at least one; otherwise the reason.
fn usable() -> Gpus {
    let remedy = "check its compute mode (nvidia-smi -c DEFAULT ends exclusive mode) and its free memory";
    let seen =
        Gpu::all().map_err(|error| format!("the sidecar cannot use the GPUs that it sees: {error}"))?;
    let count = seen.len();
    let mut gpus = Vec::new();
    for (ordinal, gpu) in seen.into_iter().enumerate() {
        match gpu {
            Ok(gpu) => gpus.push(gpu),
            Err(error) => tracing::warn!(ordinal, %error, "a GPU cannot be used: {remedy}"),
        }
    }
    match gpus.is_empty() {
        true => Err(format!("the sidecar can use none of the {count} GPUs that it sees: {remedy}")),
        false => Ok(gpus),
    }
}

fn size(bytes: u64) -> Size {
    Size::new(bytes)
}

/// Touches the pages from `start` to `end`, with several threads on the CPUs in `near`.
fn touch_all(pool: &Region, start: usize, end: usize, threads: usize, near: Option<&Near>) {
    let part = (end - start).div_ceil(threads).next_multiple_of(PAGE_BYTES);
    thread::scope(|scope| {
        for from in (start..end).step_by(part) {
            let to = end.min(from + part);
            let thread = thread::Builder::new().name("pillion-touch".into());
            let bound = move || {
                near.inspect(|near| near.bind_thread());
                touch(pool, from, to);
            };
            if thread.spawn_scoped(scope, bound).is_err() {
                // No new thread is available, so this thread touches the part.
                touch(pool, from, to);
            }
        }
    });
}

/// Makes every page from `start` to `end` exist without changing a byte: the pool may hold blocks already.
fn touch(pool: &Region, start: usize, end: usize) {
    for word in (start..end).step_by(PAGE_BYTES).map(|at| pool.word64(at)) {
        let value = word.load(Ordering::Relaxed);
        // A compiler may drop `fetch_or(0)`. A failed exchange means another thread wrote the word, so the
        // page exists.
        let _ = word.compare_exchange(value, value, Ordering::Relaxed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use prometheus::Registry;
    use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
    use shm_protocol::region::Access;

    use super::*;
    use crate::pages::metrics::Metrics;

    const POOL_BYTES: usize = 2 * SLICE_BYTES + 3 * PAGE_BYTES;

    fn pool() -> (OwnedFd, Region) {
        let fd = memfd_create("pool", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, POOL_BYTES as u64).unwrap();
        let region = Region::map(fd.as_fd(), POOL_BYTES, Access::ReadWrite).unwrap();
        (fd, region)
    }

    fn metrics() -> PinningMetrics {
        Metrics::new(&Registry::new(), POOL_BYTES as u64).unwrap().pinning()
    }

    #[test]
    fn every_page_is_touched_before_it_is_locked_and_keeps_its_bytes() {
        let (fd, region) = pool();
        let words =
            || (0..POOL_BYTES).step_by(PAGE_BYTES * 7).map(|at| (at as u64 ^ 0xa5, region.word64(at)));
        words().for_each(|(value, word)| word.store(value, Ordering::Relaxed));
        let (pinned, metrics, mut slices) = (Pinned::new(), metrics(), Vec::new());
        let locked = pinned.lock_all(
            &region,
            |_| true,
            &[],
            &metrics,
            |start, len| {
                assert_eq!(pinned.bytes(), start as u64, "`bytes` grows only after the lock");
                assert!(fstat(&fd).unwrap().st_blocks as usize * 512 >= start + len);
                slices.push((start, len));
                Ok(())
            },
        );
        assert_eq!(locked, Ok::<_, ()>(()));
        let last = (2 * SLICE_BYTES, 3 * PAGE_BYTES);
        assert_eq!(slices, [(0, SLICE_BYTES), (SLICE_BYTES, SLICE_BYTES), last]);
        assert_eq!((pinned.bytes(), metrics.bytes.get()), (POOL_BYTES as u64, POOL_BYTES as i64));
        assert!(words().all(|(value, word)| word.load(Ordering::Relaxed) == value));
    }

    #[test]
    fn the_first_slice_that_fails_is_the_last_one_tried() {
        let (_fd, region) = pool();
        let (pinned, metrics, mut calls) = (Pinned::new(), metrics(), 0);
        let locked = pinned.lock_all(
            &region,
            |_| true,
            &[],
            &metrics,
            |start, _| {
                calls += 1;
                if start == 0 { Ok(()) } else { Err("no more") }
            },
        );
        assert_eq!((locked, calls, pinned.bytes()), (Err("no more"), 2, SLICE_BYTES as u64));
        assert_eq!((metrics.bytes.get(), metrics.failures.get()), (SLICE_BYTES as i64, 1));
    }

    #[test]
    fn an_uneven_share_reaches_the_last_page() {
        let (fd, region) = pool();
        touch_all(&region, 0, 7 * PAGE_BYTES, 3, None);
        assert_eq!(fstat(&fd).unwrap().st_blocks as usize * 512, 7 * PAGE_BYTES);
    }

    #[test]
    fn a_switched_off_gpu_is_said_and_nothing_is_touched() {
        let (fd, region) = pool();
        let pinned = Pinned::start_thread(UseGpu::Off, None, Arc::new(region), |_| true, metrics()).unwrap();
        assert!(pinned.gpus().unwrap_err().contains("--gpu off"));
        assert_eq!((pinned.bytes(), fstat(&fd).unwrap().st_blocks), (0, 0));
    }

    #[test]
    fn a_panic_leaves_nobody_waiting() {
        let pinned = Arc::new(Pinned::new());
        let waiting = Arc::clone(&pinned);
        let waiting = thread::spawn(move || waiting.gpus());
        drop(Settled(&pinned));
        assert!(waiting.join().unwrap().unwrap_err().contains("panic"));
        pinned.set_gpus(Ok(Vec::new()));
        assert!(pinned.gpus().is_err(), "the first result stays");
    }
}
