//! What can go wrong at start; the process should end with this text.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use thiserror::Error;

/// The mesh cannot be started.
#[derive(Debug, Error)]
pub enum Error {
    /// The address cannot be had.
    #[error("the mesh cannot listen at {address} ({source}): pass a free address of this machine")]
    Listen { address: SocketAddr, source: io::Error },
    /// A file that TLS needs.
    #[error("the file {path} {problem}")]
    File {
        path: PathBuf,
        /// What is wrong with it, and the remedy.
        problem: String,
    },
    /// A name that no peer can have.
    #[error("'{0}' cannot be the name of a node: pass 1 to {max} printable ASCII characters", max = crate::transport::NODE_BYTES_MAX)]
    Node(String),
    /// The name that peers' certificates must carry is none.
    #[error("'{0}' cannot be the name in a certificate: pass a DNS name or an IP address")]
    CertificateName(String),
    /// A mesh cannot be named so.
    #[error("'{0}' cannot be the name of a mesh: pass 1 to {max} of A-Z a-z 0-9 . _ -", max = crate::control::MESH_BYTES_MAX)]
    Mesh(String),
    /// An address that no peer can connect to.
    #[error(
        "peers cannot connect to {0}: pass an address of this machine that they reach, such as the pod's IP"
    )]
    Unreachable(SocketAddr),
    /// The address of a peer or of etcd.
    #[error("'{address}' {problem}")]
    Address {
        address: String,
        /// What is wrong with it, and the remedy.
        problem: &'static str,
    },
    /// A NIC that cannot be used.
    #[error("the NIC '{name}' {problem}; NICs with RDMA here: {present}")]
    Nic {
        name: String,
        /// What is wrong with it.
        problem: String,
        present: String,
    },
    /// A number of NICs or queue pairs, or a lease, that cannot be.
    #[error("RDMA cannot be set up with {0}")]
    Queues(String),
    /// More peers than are followed.
    #[error("{0} peers are listed, of at most {max}: use etcd, or a mesh for each part", max = crate::control::MEMBERS_MAX)]
    Listed(usize),
    #[error("cannot {doing} for the mesh: {source}")]
    Os { doing: &'static str, source: io::Error },
}
