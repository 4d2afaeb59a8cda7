//! Keeps blocks and gives them back.
//!
//! Job: which block lies in which slot ([`dram`]: index, slab, eviction, leases) and the memory of those slots
//! ([`pool`]). The two meet in the caller: [`dram::Dram`] decides, purely, and the caller carries its decisions out on
//! a [`pool::Pool`]; what an earlier life left there it hears of by an [`opener::Opener`].
//!
//! May depend on: shm-protocol, rustix. Never: copies a block's bytes, reads the clock or the environment, starts a
//! thread, evicts a leased block.

#![forbid(unsafe_code)]

pub mod dram;
mod error;
mod index;
mod lease;
mod list;
pub mod opener;
mod policy;
pub mod pool;
mod quota;
mod sketch;
mod slab;

pub use error::{Error, FillError, LeaseError};
