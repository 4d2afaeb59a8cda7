//! Engine processes: their connections, hellos and sessions.

pub mod greeter;
pub mod listener;
pub mod refusals;
pub mod session;
