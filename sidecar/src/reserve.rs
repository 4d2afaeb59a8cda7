//! Reserves the memory of a large pool file behind the sidecar's start: what is reserved is served meanwhile.

use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use tiers::dram::HOLD_MS;
use tiers::pool::{Found, Pool};

use crate::progress::Progress;

/// How often whoever waits for memory looks.
const POLL: Duration = Duration::from_millis(10);
/// How often the log tells how far it is.
const REPORT: Duration = Duration::from_secs(5);

/// Starts the threads that reserve what is missing and report it. They end with the pool.
pub fn start(pool: &Arc<Pool>, progress: &Arc<Progress>) -> std::io::Result<()> {
    let found = pool.found().clone();
    if let Found::Unusable(reason) = &found {
        tracing::warn!(reason, "the pool file is not adopted: starting empty");
    }
    let (pool, progress) = (Arc::downgrade(pool), Arc::clone(progress));
    let weak = Weak::clone(&pool);
    thread::Builder::new().name("pillion-reserve".into()).spawn(move || {
        if let Found::Unusable(_) = found {
            // An engine of the earlier life may be copying from it.
            thread::sleep(Duration::from_millis(HOLD_MS));
        }
        reserve(&weak);
    })?;
    thread::Builder::new().name("pillion-report".into()).spawn(move || report(&pool, &progress))?;
    Ok(())
}

fn reserve(pool: &Weak<Pool>) {
    while let Some(pool) = pool.upgrade().filter(|pool| pool.reserving()) {
        if let Err(error) = pool.reserve_some() {
            let (reserved, wanted) = (pool.reserved_bytes(), pool.len());
            tracing::error!(%error, reserved, wanted, "the pool stays smaller: enlarge its mount or its container's limit, or lower --dram");
        }
    }
}

fn report(pool: &Weak<Pool>, progress: &Progress) {
    loop {
        thread::sleep(REPORT);
        match progress.text().filter(|_| pool.strong_count() > 0) {
            Some(progress) => tracing::info!(progress, "still starting, and serving"),
            None => return,
        }
    }
}

/// Waits until the pool's memory is there up to `end`; false if it will not be.
pub fn wait(pool: &Weak<Pool>, end: u64) -> bool {
    loop {
        match pool.upgrade() {
            Some(pool) if pool.reserved_bytes() >= end => return true,
            Some(pool) if pool.reserving() => {}
            _ => return false,
        }
        thread::sleep(POLL);
    }
}
