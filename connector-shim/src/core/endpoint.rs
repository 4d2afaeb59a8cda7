//! The trait of a session's connection: over a socket in the product, in memory in the simulator.

use std::time::Duration;

use shm_protocol::session::SessionMemory;

/// A feature of the protocol, unknown to earlier sidecars.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Feature {
    /// Flags of handovers.
    Handover,
    /// The key of a prompt's tail.
    Tails,
    /// Queries for the last kept key.
    States,
    /// Blocks on the engine's device.
    Devices,
    /// Hints of clients.
    Hints,
    /// Answers with more hits than the pool holds.
    Streams,
    /// Saves kept once the engine accepted their step.
    Acceptance,
}

/// This process' end of one connection.
pub trait Endpoint {
    /// The session's shared memory.
    fn memory(&self) -> &SessionMemory;
    /// Epoch of the sidecar: a new one after each of its starts.
    fn epoch(&self) -> u64;
    /// How long the sidecar keeps a lease.
    fn lease_ttl(&self) -> Duration;
    /// Whether the sidecar's release knows a feature of the protocol.
    fn knows(&self, feature: Feature) -> bool;
    /// Wakes the sidecar if it sleeps.
    fn ring(&self);
    /// True if the sidecar is gone. Looks without waiting; the answer stays true.
    fn is_lost(&self) -> bool;
    /// Hangs up. The sidecar then stops all work for this session.
    fn hang_up(&self);
}
