//! An engine process's end of a session, for the shim's sessions, and the pool as mapped by an engine.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use connector_shim::core::endpoint::{Endpoint, Feature};
use shm_protocol::pool::{SlotRef, verify_slot};
use shm_protocol::region::Region;
use shm_protocol::session::SessionMemory;
use shm_protocol::wait;

/// A connected session in an engine process.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) memory: SessionMemory,
    pub(crate) epoch: u64,
    pub(crate) lease_ttl_ms: u64,
    /// True once the sidecar's end is closed.
    pub(crate) lost: Rc<Cell<bool>>,
    /// True once this end is closed.
    pub(crate) hung_up: Rc<Cell<bool>>,
    pub(crate) bell: Rc<Cell<bool>>,
    pub(crate) pool: Rc<PoolMap>,
}

/// The sidecar's end of a socket. All copies of the session share it, so it hangs up only once none of them
/// runs.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) lost: Rc<Cell<bool>>,
}

/// The pool of one life of the sidecar, mapped read-only.
#[derive(Debug)]
pub(crate) struct PoolMap {
    pub(crate) region: Region,
    pub(crate) epoch: u64,
    pub(crate) segment_bytes: u64,
    pub(crate) segments: u64,
}

// === impl Connection ===

impl Endpoint for Connection {
    fn memory(&self) -> &SessionMemory {
        &self.memory
    }

    fn epoch(&self) -> u64 {
        self.epoch
    }

    fn lease_ttl(&self) -> Duration {
        Duration::from_millis(self.lease_ttl_ms)
    }

    fn knows(&self, _: Feature) -> bool {
        true
    }

    fn ring(&self) {
        if wait::must_ring(self.memory.region()) {
            self.bell.set(true);
        }
    }

    fn is_lost(&self) -> bool {
        self.lost.get() || self.hung_up.get()
    }

    fn hang_up(&self) {
        self.hung_up.set(true);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.hung_up.set(true);
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.lost.set(true);
    }
}

// === impl PoolMap ===

impl PoolMap {
    /// True if the slot is whole and of this generation, by the product's check.
    pub(crate) fn verify(&self, slot: SlotRef, block_bytes: u64) -> bool {
        let load = |offset: usize| self.region.word64(offset).load(Ordering::Acquire);
        verify_slot(load, self.segment_bytes, self.segments, slot, block_bytes)
    }

    pub(crate) fn word(&self, offset: u64, index: usize) -> u64 {
        self.region.word64(offset as usize + index * 8).load(Ordering::Relaxed)
    }
}
