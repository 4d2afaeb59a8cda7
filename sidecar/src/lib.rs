//! The sidecar, `pillion serve`: one process beside the engines of a pod, which keeps their KV blocks and
//! serves them again.
//!
//! Job: decide ([`core`], without I/O), and carry decisions out: sessions of engines over shared memory
//! ([`clients`]), in the order of [`runtime::turn`] on the data thread ([`runtime`]), the namespaces seen
//! ([`catalog`]) and the check of their blocks ([`compare`]), copies ([`copiers`]) and the pool's memory
//! ([`memory`]), disks and peers ([`ports`]), metrics and health ([`pages`]), an operator's commands
//! ([`control`]), hits of other pools ([`forecaster`]), start and shutdown ([`runtime::server`], [`error`]).
//!
//! May depend on: shm-protocol, tiers, mesh, copy-engine. Never: holds unsafe code, trusts a peer's value,
//! lets one engine wait for another, reads the environment outside [`config`], calls CUDA except through
//! copy-engine, opens libpython or torch.

#![forbid(unsafe_code)]

pub mod catalog;
pub mod clients;
pub mod compare;
pub mod config;
pub mod control;
pub mod copiers;
pub mod core;
pub mod error;
pub mod forecaster;
pub mod logging;
pub mod memory;
pub mod pages;
pub mod ports;
pub mod runtime;
pub mod system;

pub use shm_protocol::named;
