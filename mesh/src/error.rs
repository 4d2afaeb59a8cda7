//! Errors at the start of a mesh; the process should end with their text.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use thiserror::Error;

/// The mesh cannot be started.
#[derive(Debug, Error)]
pub enum MeshError {
    /// The address is not available.
    #[error("the mesh cannot listen at {address} ({source}): pass a free address of this machine")]
    Listen { address: SocketAddr, source: io::Error },
    /// A file for TLS is unusable.
    #[error("the file {path} {problem}")]
    File {
        path: PathBuf,
        /// The fault of the file, and the remedy.
        problem: String,
    },
    /// The name is invalid for a node.
    #[error("'{0}' cannot be the name of a node: pass 1 to {max} printable ASCII characters", max = crate::transport::NODE_BYTES_MAX)]
    Node(String),
    /// The name required in peers' certificates is invalid.
    #[error("'{0}' cannot be the name in a certificate: pass a DNS name or an IP address")]
    CertificateName(String),
    /// The name is invalid for a mesh.
    #[error("'{0}' cannot be the name of a mesh: pass 1 to {max} of A-Z a-z 0-9 . _ -", max = crate::control::MESH_BYTES_MAX)]
    Mesh(String),
    /// No peer can connect to the address.
    #[error(
        "peers cannot connect to {0}: pass an address of this machine that they reach, such as the pod's IP"
    )]
    Unreachable(SocketAddr),
    /// The address of a peer or of etcd.
    #[error("'{address}' {problem}")]
    Address {
        address: String,
        /// The fault of the address, and the remedy.
        problem: &'static str,
    },
    /// The NIC is unusable.
    #[error("the NIC '{name}' {problem}; NICs with RDMA here: {present}")]
    Nic {
        name: String,
        /// The fault of the NIC.
        problem: String,
        present: String,
    },
    /// The number of NICs or queue pairs, or the time of a lease, is invalid.
    #[error("RDMA cannot be set up with {0}")]
    Queues(String),
    /// More peers are listed than can be followed.
    #[error("{0} peers are listed, of at most {max}: use etcd, or a mesh for each part", max = crate::control::MEMBERS_MAX)]
    Listed(usize),
    #[error("cannot {doing} for the mesh: {source}")]
    Os { doing: &'static str, source: io::Error },
}
