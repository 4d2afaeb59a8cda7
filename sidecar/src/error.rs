//! Why a sidecar does not start.

use std::net::SocketAddr;

use thiserror::Error;

use crate::listener::ListenError;

/// The sidecar cannot start; the text names the remedy.
#[derive(Debug, Error)]
pub enum StartError {
    /// No socket.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// No pool.
    #[error(transparent)]
    Tier(#[from] tiers::Error),
    /// No admin pages.
    #[error("cannot serve the admin pages on {address}: {source}; pass another --http ADDR")]
    Admin {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The metrics contradict each other.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The mesh cannot be joined.
    #[error(transparent)]
    Mesh(#[from] ::mesh::Error),
    /// The kernel refused threads or descriptors.
    #[error("cannot start: {0}")]
    Os(#[from] std::io::Error),
}
