//! Blocks between pods.
//!
//! Job: know who is a member ([`membership`], [`control`]); tell the peers what is kept here and be told what they keep
//! ([`feed`]), know which of them may have a block ([`directory`], of [`digest`]s), and carry the bytes of blocks from the
//! pool of the sidecar that keeps them into the pool of one that asks ([`transport`]); count who would not have whom ([`refusals`]). What is asked for and which slots are
//! given, the caller decides; here it is carried out, on threads of their own.
//!
//! May depend on: shm-protocol, rustix, rustls; `control` alone on tokio, tonic and, with the feature `etcd`, etcd's client,
//! `transport::rdma` alone on sideway. Never: evicts or commits a slot, retries a block elsewhere, waits without a limit,
//! believes a peer.

#![deny(unsafe_code)]

mod backlog;
pub mod control;
pub mod digest;
pub mod directory;
mod error;
pub mod feed;
mod listen;
pub mod membership;
pub mod pace;
pub mod refusals;
mod sync;
pub mod tls;
pub mod transport;

pub use error::Error;
