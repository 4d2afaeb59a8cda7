//! What can go wrong at start; the process should end with this text.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use thiserror::Error;

/// The transport cannot be started.
#[derive(Debug, Error)]
pub enum Error {
    /// The address cannot be had.
    #[error(
        "peers cannot be listened for at {address} ({source}): give an address of this machine that is free"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A file that TLS needs.
    #[error("the file {path} {problem}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and the remedy.
        problem: String,
    },
    /// A name that no peer can have.
    #[error("a node is named by 1 to {max} printable ASCII characters, not '{0}'", max = crate::transport::NODE_BYTES_MAX)]
    Node(String),
    /// The name that peers' certificates must carry is none.
    #[error("'{0}' cannot be the name in a certificate: give a DNS name or an IP address")]
    CertificateName(String),
    /// The kernel refused.
    #[error("cannot {doing} for the mesh: {source}")]
    Os {
        /// What was tried.
        doing: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
}
