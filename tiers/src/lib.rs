//! Keeps blocks and gives them back.
//!
//! Job: which block lies in which slot ([`dram`]: index, slab, eviction, leases) and the memory of those slots
//! ([`pool`]). The two meet in the caller: [`dram::Dram`] decides, purely, and the caller carries its decisions out on
//! a [`pool::Pool`]; what an earlier life left there it hears of by an [`opener::Opener`]. What a pool of another size would find
//! is [`forecast`]'s. Below lies [`ssd`]: its
//! [`ssd::Log`] decides as purely, and its [`ssd::Device`]s carry out, each on threads of its own.
//!
//! May depend on: shm-protocol, rustix, io-uring. Never: reads the environment, evicts a leased block. Outside
//! [`ssd::Device`] never: copies a block's bytes, reads the clock, starts a thread.

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

/// The tests' rig is written against the crate's public face, and also serves tests inside.
#[cfg(test)]
extern crate self as tiers;

pub use error::{Error, FillError, LeaseError};
