//! The memory and the disks of one sidecar: the place of each kept block, its eviction, and its leases.
//!
//! Job: the slot of each block ([`dram`]: index, slab, eviction, leases) and the memory of those slots
//! ([`pool`]). The two meet in the caller: [`dram::Dram`] decides, purely, and the caller carries its
//! decisions out on a [`pool::Pool`]; an [`opener::Opener`] finds the blocks an earlier life left there.
//! [`forecast`] predicts the hits of other pool sizes. Below lies [`ssd`]: its [`ssd::SegmentLog`] decides as
//! purely, and its [`ssd::SsdDevice`]s carry out, each on its own threads.
//!
//! May depend on: shm-protocol, rustix, io-uring. Never: reads the environment, evicts a leased block.
//! Outside [`ssd::SsdDevice`] never: copies a block's bytes, reads the clock, starts a thread.

#![deny(unsafe_code)]

pub mod dram;
mod entries;
mod error;
pub mod forecast;
pub mod given_up;
mod index;
mod io;
mod lease;
mod ledger;
mod list;
pub mod opener;
mod policy;
pub mod pool;
mod quota;
mod slab;
pub mod ssd;
mod standing;
mod watch;

/// The tests' rig uses the crate's public interface, and also serves tests inside the crate.
#[cfg(test)]
extern crate self as tiers;

pub use error::{FillError, LeaseError, TierError};
