//! Blocks between pods.
//!
//! Job: carry the bytes of blocks from the pool of the sidecar that keeps them into the pool of one that asks
//! ([`transport`]). Who is asked, which slots are given, and what becomes of a peer that fails, the caller decides;
//! here it is carried out, on threads of the transport's own.
//!
//! May depend on: shm-protocol, tiers (the pool's bytes), rustix, rustls. Never: evicts or commits a slot, retries a
//! block elsewhere, waits without a limit, believes a peer.

#![deny(unsafe_code)]

mod error;
pub mod transport;

pub use error::Error;
