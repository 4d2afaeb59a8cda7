//! The policy's access to a cache group's session: a session over a socket in the product, or one of the simulator.

use std::ops::{Deref, DerefMut};

use crate::core::endpoint::Endpoint;
use crate::core::scheduler::{Change, Session};

/// A session, and the connections under it.
pub trait SessionHost: DerefMut<Target = Session<Self::Connection>> {
    /// A connection of the session.
    type Connection: Deref<Target: Endpoint>;

    /// Connections so far.
    fn generation(&self) -> u64;
    /// Takes a connection made since.
    fn refresh(&mut self);
    /// [`Session::end_step`], and a look whether the sidecar is still there.
    fn end_step(&mut self);
    /// [`Session::take_changes`].
    fn take_changes(&mut self) -> Vec<Change>;
}
