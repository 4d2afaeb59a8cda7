//! The sidecar, `pillion serve`: one process beside the engines of a pod, which keeps their KV blocks and gives them back.
//!
//! Job: decide ([`core`], pure), and carry decisions out: sessions over shared memory ([`session`]), in the order of a
//! [`turn`] that [`runtime`] takes, the handshake ([`listener`], [`greeter`], [`refusals`]), the namespaces seen ([`catalog`]), copies ([`copiers`]) and the memory that GPUs
//! copy from ([`pinning`], [`numa`]), checksums of a pool file ([`checksums`]), the disks behind the pool ([`disks`]), the pods beside this one ([`peers`]), metrics and health ([`metrics`], [`admin`], [`heartbeat`],
//! [`progress`], [`quotas`]), life and death ([`server`], [`wake`], [`error`], [`reserve`]).
//!
//! May depend on: shm-protocol, tiers, mesh, copy-engine. Never: holds unsafe code, trusts a peer's value, lets one engine
//! wait for another, reads the environment outside [`config`], calls CUDA but through copy-engine, opens libpython or
//! torch.

#![forbid(unsafe_code)]

pub mod admin;
pub mod catalog;
pub mod checksums;
pub mod clock;
pub mod compare;
pub mod config;
pub mod connections;
pub mod control;
pub mod copiers;
pub mod core;
pub mod disks;
pub mod error;
pub mod forecaster;
pub mod greeter;
pub mod heartbeat;
pub mod inbox;
pub mod listener;
pub mod logging;
pub mod metrics;
pub mod numa;
pub mod overview;
pub mod peers;
pub mod pinning;
pub mod poller;
pub mod progress;
pub mod quotas;
pub mod refusals;
pub mod reserve;
pub mod runtime;
pub mod server;
pub mod session;
pub mod turn;
pub mod wake;
