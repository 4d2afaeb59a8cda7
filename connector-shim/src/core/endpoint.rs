//! The trait of a session's connection: over a socket in the product, in memory in the simulator.

use std::time::Duration;

use shm_protocol::session::SessionMemory;

/// This process' end of one connection.
pub trait Endpoint {
    /// The session's shared memory.
    fn memory(&self) -> &SessionMemory;
    /// Epoch of the sidecar: a new one after each of its starts.
    fn epoch(&self) -> u64;
    /// How long the sidecar keeps a lease.
    fn lease_ttl(&self) -> Duration;
    /// Whether the sidecar knows the flags of handovers.
    fn knows_handover(&self) -> bool;

    /// Whether the sidecar knows the key of a prompt's tail.
    fn knows_tails(&self) -> bool;
    /// Whether the sidecar knows queries for the last kept key.
    fn knows_states(&self) -> bool;
    /// Whether the sidecar knows which blocks the engine's device has.
    fn knows_devices(&self) -> bool;
    /// Whether the sidecar knows hints of clients.
    fn knows_hints(&self) -> bool;
    /// Whether the sidecar knows answers with more hits than its pool holds.
    fn knows_streams(&self) -> bool;
    /// Whether the sidecar keeps only what the engine accepted.
    fn knows_acceptance(&self) -> bool;
    /// Wakes the sidecar if it sleeps.
    fn ring(&self);
    /// True if the sidecar is gone. Looks without waiting; the answer stays true.
    fn is_lost(&self) -> bool;
    /// Hangs up. The sidecar then stops all work for this session.
    fn hang_up(&self);
}
