//! What changes of the blocks on disks: [`crate::watch`].

use shm_protocol::key::BlockKey;

use super::Log;
use super::volume::Volume;

// === impl Log: watching ===

impl Log {
    /// Notes from now on what changes: blocks that are there already are never told of. The log grows until
    /// [`Log::drain_changes`], so drain it after every event.
    pub fn watch(&mut self) {
        self.watch.begin();
    }

    /// Blocks that lie on a device since the last call, with true, and those that do not any more, with false, in the order in
    /// which that happened. That a device fails, and its blocks cannot be read, is no change: see [`Log::working`].
    pub fn drain_changes(&mut self) -> impl Iterator<Item = (BlockKey, bool)> + '_ {
        self.watch.drain()
    }

    /// Devices whose blocks can be read, and how often one of them failed: once either differs, other blocks can be read than before.
    pub fn working(&self) -> (usize, u64) {
        let closed = |volume: &&Volume| !volume.breaker.is_open();
        let trips = self.volumes.iter().map(|volume| volume.breaker.trips_total).sum();
        (self.volumes.iter().filter(closed).count(), trips)
    }
}
