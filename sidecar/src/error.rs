//! Reasons why a sidecar does not start or does not end cleanly.

use std::net::SocketAddr;

use thiserror::Error;

use crate::clients::listener::ListenError;

/// The sidecar cannot start; the text names the remedy.
#[derive(Debug, Error)]
pub enum StartError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    Tier(#[from] tiers::TierError),
    #[error("cannot serve the pages of --http at {address} ({source}): pass another --http IP:PORT")]
    Admin { address: SocketAddr, source: std::io::Error },
    #[error("cannot listen at {address} ({source}): pass another {option} IP:PORT")]
    Control { option: &'static str, address: SocketAddr, source: std::io::Error },
    /// A file is larger than the process's limit of file sizes.
    #[error(
        "{file} takes a file of {needed} bytes, and this process may make files of {limit} bytes at most (RLIMIT_FSIZE): raise \
         that limit, with ulimit -f unlimited in the shell that starts it or LimitFSIZE=infinity in its systemd unit"
    )]
    FileSize { file: String, needed: u64, limit: u64 },
    /// The metrics contradict each other.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The mesh cannot be joined.
    #[error(transparent)]
    Mesh(#[from] ::mesh::MeshError),
    /// The kernel refused threads or descriptors.
    #[error("cannot start: {0}")]
    Os(#[from] std::io::Error),
}

/// The sidecar was asked to end, and its work in flight is lost.
#[derive(Debug, Error)]
pub enum DrainError {
    #[error("the data thread ended with a panic, shown above: report it with the log")]
    Panicked,
    #[error("the data thread is stuck, so work in flight was not completed")]
    StandsStill,
}
