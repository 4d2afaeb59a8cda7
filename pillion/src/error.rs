//! The errors of a call, each with its remedy.

use std::io;

use connector_shim::error::ShimError;
use shm_protocol::hints::HintError;
use shm_protocol::page_form::PageFormError;
use thiserror::Error;

/// The reason of a failed call. A missing, slow or full sidecar is no error: a load finds nothing then.
#[derive(Debug, Error)]
pub enum EngineError {
    /// The sidecar cannot be asked for its namespaces.
    #[error("{at} cannot be asked for namespaces ({why}): {remedy}")]
    Control {
        /// The control socket, or the address.
        at: String,
        /// The failure.
        why: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// No namespace agrees with the stated facts.
    #[error("{0}")]
    NoNamespace(String),
    /// Several namespaces agree with the stated facts.
    #[error("{0}")]
    SeveralNamespaces(String),
    /// The digest of weights cannot be made.
    #[error("{0}")]
    Weights(String),
    /// No strides describe the pages of the namespace.
    #[error(transparent)]
    Pages(#[from] PageFormError),
    /// There is no sidecar to join.
    #[error("no sidecar answers at {0}: start one with `pillion serve --socket {0}`")]
    Absent(String),
    /// The engine's arguments are wrong, there is no room, the sidecar refuses the engine, or its proof has failed.
    #[error(transparent)]
    Engine(#[from] ShimError),
    /// A hint's action does not have this time.
    #[error(transparent)]
    Hint(#[from] HintError),
    /// K or V does not fit the pages.
    #[error("{0}")]
    Shape(String),
    /// The engine's memory cannot be made, read or written.
    #[error("the engine's memory: {0}")]
    Memory(#[from] io::Error),
}
