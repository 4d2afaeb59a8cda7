//! The policy's access to a cache group's session: a session over a socket in the product, or one of the simulator.

use std::ops::{Deref, DerefMut};

use crate::core::endpoint::Endpoint;
use crate::core::scheduler::{BlockChange, EngineSession};

/// A session, and the connections under it.
pub trait SessionHost: DerefMut<Target = EngineSession<Self::Connection>> {
    /// A connection of the session.
    type Connection: Deref<Target: Endpoint>;

    /// Connections so far.
    fn connection_count(&self) -> u64;
    /// Takes a connection made since.
    fn refresh_session(&mut self);
    /// [`EngineSession::end_step`], and a look whether the sidecar is still there.
    fn end_step(&mut self);
    /// [`EngineSession::take_changes`].
    fn take_changes(&mut self) -> Vec<BlockChange>;
}
