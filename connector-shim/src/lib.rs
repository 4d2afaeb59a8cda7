//! The engine's side of Pillion: the connector's calls in plain Rust, and the Python module and C interface
//! over them.
//!
//! Job: hold one session with the sidecar ([`scheduler`], [`worker`]), write its requests into shared memory,
//! answer "miss" whenever the sidecar is absent, slow or full, and finish loads that the sidecar cannot.
//! Their rules are in [`core`]; the simulator of the sidecar also uses them.
//! May depend on: shm-protocol, copy-engine, rustix, sha2, cudarc in `stream` alone, and pyo3 in `python`
//! alone. Never: waits without a deadline (except for a GPU's own progress, if there is no sidecar to wait
//! for), waits for space, runs an async runtime, logs (it hands notices to its caller), reads the
//! environment, or forms references to memory that the sidecar writes.

#![deny(unsafe_code)]
#![warn(missing_docs)]

// The tests' small sidecar uses this crate by its public name.
#[cfg(test)]
extern crate self as connector_shim;

pub mod adapters;
pub mod blocking;
#[cfg(feature = "c")]
#[allow(unsafe_code, reason = "exported names, and what C hands over by address (c/raw.rs)")]
#[allow(unreachable_pub, reason = "C reaches it")]
mod c;
mod client;
mod clock;
mod connection;
pub mod core;
pub mod error;
#[cfg(test)]
#[path = "../tests/peer/mod.rs"]
mod peer;
mod pool;
pub mod scheduler;
#[allow(unsafe_code, reason = "the engine's stream is known by its handle alone")]
mod stream;
pub mod worker;

#[cfg(feature = "python")]
#[allow(unsafe_code, reason = "PyO3's macros expand to unsafe code")]
mod python;
