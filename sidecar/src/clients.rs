//! Engine processes: their connections, hellos and sessions.

pub mod handshakes;
pub mod listener;
pub mod refusals;
pub mod session;
