//! All commands of `pillion` but `pillion serve` and `pillion route`.
//!
//! Job: ask a running sidecar ([`ctl`]) and show its figures live ([`top`]), find faults of a host or a pair of engines ([`doctor`]),
//! measure the machine ([`bench`]), derive keys without an engine ([`keys`]), name an engine's facts ([`facts`]), add sidecars to pods
//! ([`inject`]) and the connector to engines ([`connector`]), and list all options ([`reference`]).
//!
//! May depend on: sidecar, tiers, mesh, copy-engine, shm-protocol. Never: holds unsafe code, ends the process.

#![forbid(unsafe_code)]

pub mod bench;
pub mod connector;
pub mod ctl;
pub mod doctor;
pub mod facts;
pub mod inject;
pub mod keys;
pub mod reference;
pub mod top;
