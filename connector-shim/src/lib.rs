//! The engine's side of Pillion: what the connector calls, in plain Rust, and the Python module over it.
//!
//! Job: hold one session with the sidecar ([`scheduler`], [`worker`]), write its requests into shared memory, answer
//! "miss" whenever the sidecar is absent, slow or full, and finish loads that the sidecar cannot.
//! May depend on: shm-protocol, copy-engine, rustix, and pyo3 in `python` alone. Never: waits without a deadline, waits
//! for space, runs an async runtime, logs (it hands notices to its caller), reads the environment, or forms references
//! to memory that the sidecar writes.

#![deny(unsafe_code)]

mod arena;
mod client;
mod clock;
mod connection;
pub mod error;
mod log_table;
mod notices;
pub mod plan;
mod pool;
mod saves;
pub mod scheduler;
mod submission;
pub mod worker;

#[cfg(feature = "python")]
#[allow(unsafe_code, reason = "what PyO3's macros expand to")]
mod python;
