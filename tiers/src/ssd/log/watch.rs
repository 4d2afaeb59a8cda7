//! Changes of the set of blocks on disks: [`crate::watch`].

use shm_protocol::key::BlockKey;

use super::Log;
use super::volume::Volume;

// === impl Log: watching ===

impl Log {
    /// Notes changes from now on, but not the blocks already there. The log grows until
    /// [`Log::drain_changes`], so drain it after every event.
    pub fn watch(&mut self) {
        self.watch.begin();
    }

    /// Returns the changes since the last call in their order: blocks new on a device with true, blocks gone
    /// from a device with false. The failure of a device is no change, although its blocks cannot be read:
    /// see [`Log::working`].
    pub fn drain_changes(&mut self) -> impl Iterator<Item = (BlockKey, bool)> + '_ {
        self.watch.drain()
    }

    /// Returns the number of working devices, and the number of failures so far. If either differs from
    /// before, other blocks can be read than before.
    pub fn working(&self) -> (usize, u64) {
        let closed = |volume: &&Volume| !volume.breaker.is_open();
        let trips = self.volumes.iter().map(|volume| volume.breaker.trips_total).sum();
        (self.volumes.iter().filter(closed).count(), trips)
    }
}
