//! What a call can fail with. A sidecar that is absent, slow or full is no error: the answer is then "miss".

use copy_engine::CopyError;
use shm_protocol::key::KeyError;
use thiserror::Error;

use crate::plan::PlanError;

/// A caller's mistake, or a sidecar that will not have this engine.
#[derive(Debug, Error)]
pub enum ShimError {
    /// An argument that no sidecar could serve: correct the caller.
    #[error("{0}")]
    Argument(String),
    /// A block hash that is none: correct the caller.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A plan that this release did not make: install the same release everywhere.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The engine's KV memory cannot be reached: run without the cache.
    #[error("the engine's KV memory cannot be shared: {0}")]
    Memory(#[from] CopyError),
    /// The sidecar refuses this engine: do what the text says.
    #[error("the sidecar refuses this engine: {0}")]
    Refused(String),
    /// A forked child used its parent's session: make a new one in the child.
    #[error("this session belongs to process {owner}; make a new one in this process (after the fork)")]
    Forked {
        /// The process that made the session.
        owner: u32,
    },
}

/// An argument error.
pub(crate) fn argument<T>(text: impl Into<String>) -> Result<T, ShimError> {
    Err(ShimError::Argument(text.into()))
}
