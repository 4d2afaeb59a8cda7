//! Reserves the memory of a large pool file after the sidecar's start; the reserved part is served meanwhile.
//! The kernel takes memory from the node of the calling CPU, so the calls run on CPUs near a GPU; GPUs of
//! several nodes share the pool piece by piece.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use tiers::dram::HOLD_MS;
use tiers::pool::Pool;

use crate::memory::pinning::Pinned;
use crate::pages::progress::StartProgress;

/// Interval of polls for reserved memory.
const POLL: Duration = Duration::from_millis(10);
/// Interval of log lines with the progress.
const REPORT: Duration = Duration::from_secs(5);

/// Starts the threads for reserving the missing memory and for reporting. They end when the pool is dropped.
pub fn start_reserving(
    pool: &Arc<Pool>,
    pinned: &Arc<Pinned>,
    progress: &Arc<StartProgress>,
) -> std::io::Result<()> {
    let given_up = pool.given_up().is_some();
    if let Some(reason) = pool.given_up() {
        tracing::warn!(%reason, "the pool file is not adopted, and the sidecar starts empty");
    }
    let (pool, progress) = (Arc::downgrade(pool), Arc::clone(progress));
    let (weak, pinned) = (Weak::clone(&pool), Arc::clone(pinned));
    thread::Builder::new().name("pillion-reserve".into()).spawn(move || {
        if given_up {
            // An engine of the earlier life may still copy from the pool.
            thread::sleep(Duration::from_millis(HOLD_MS));
        }
        reserve(&weak, &pinned);
    })?;
    thread::Builder::new().name("pillion-report".into()).spawn(move || report(&pool, &progress))?;
    Ok(())
}

fn reserve(pool: &Weak<Pool>, pinned: &Pinned) {
    let near = match pool.upgrade().is_some_and(|pool| pool.reserving()) {
        true => pinned.near(),
        false => return,
    };
    let mut nodes = near.iter().cycle();
    while let Some(pool) = pool.upgrade().filter(|pool| pool.reserving()) {
        let near = nodes.next();
        // A new thread for each piece: a thread bound to the CPUs of one node could not be bound to those of
        // another.
        let reserved = thread::scope(|scope| {
            let bound = || {
                near.inspect(|near| near.bind_thread());
                pool.reserve_some()
            };
            let bound = thread::Builder::new().name("pillion-reserve".into()).spawn_scoped(scope, bound);
            match bound {
                Ok(bound) => bound.join().expect("reserving does not panic"),
                // No new thread is available, so this thread reserves the piece.
                Err(_) => pool.reserve_some(),
            }
        });
        if let Err(error) = reserved {
            let (reserved, wanted) = (pool.reserved_bytes(), pool.len());
            tracing::error!(%error, reserved, wanted, "the pool stays smaller than --dram: enlarge its mount or its \
                 container's limit, or lower --dram");
        }
    }
}

fn report(pool: &Weak<Pool>, progress: &StartProgress) {
    loop {
        thread::sleep(REPORT);
        match progress.progress_text().filter(|_| pool.strong_count() > 0) {
            Some(progress) => tracing::info!(progress, "still starting, already serving"),
            None => return,
        }
    }
}

/// Waits until the pool's memory is reserved up to `end`. Returns false if it never will be.
pub fn wait_reserved(pool: &Weak<Pool>, end: u64) -> bool {
    loop {
        match pool.upgrade() {
            Some(pool) if pool.reserved_bytes() >= end => return true,
            Some(pool) if pool.reserving() => {}
            _ => return false,
        }
        thread::sleep(POLL);
    }
}
