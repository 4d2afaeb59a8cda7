//! The rules of both roles' sessions, without clocks, threads and system calls.
//!
//! Nothing here reads a clock, sleeps, starts a thread, opens a descriptor or makes a system call, except
//! through an [`Endpoint`]. Time is an argument. Memory shared with the sidecar is accessed through
//! shm-protocol's types. There are two hosts: this crate's `scheduler` and `worker`, and the sidecar's
//! simulator.
//!
//! [`Endpoint`]: endpoint::Endpoint

mod arena;
pub mod aside;
pub mod endpoint;
pub mod layer_waits;
mod log_table;
pub mod notices;
pub mod options;
pub mod plan;
pub mod policy;
pub mod rank_loads;
pub mod records;
pub mod regions;
pub mod reports;
mod saves;
pub mod scheduler;
pub mod submission;
pub mod worker;
