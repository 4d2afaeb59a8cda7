//! The mesh: sidecars of several pods share blocks.
//!
//! Job: know the members ([`membership`], [`control`]); announce this node's blocks to its peers and receive
//! their announcements ([`feed`]); find peers with a block ([`directory`], of [`digest`]s); carry the bytes
//! of blocks from a peer's pool into this one ([`transport`]); count refusals ([`refusals`]). The caller
//! chooses the blocks and the slots; the mesh does the work on threads of its own.
//!
//! May depend on: shm-protocol, rustix, rustls; `control` alone on tokio, tonic and, with the feature `etcd`,
//! etcd's client, `transport::rdma` alone on sideway. Never: evicts or commits a slot, retries a block
//! elsewhere, waits without a limit, trusts a peer.

#![deny(unsafe_code)]

mod backlog;
pub mod control;
pub mod digest;
pub mod directory;
mod error;
pub mod feed;
pub mod listed;
mod listen;
pub mod membership;
pub mod pace;
pub mod refusals;
mod sync;
pub mod tls;
pub mod transport;

pub use error::MeshError;
