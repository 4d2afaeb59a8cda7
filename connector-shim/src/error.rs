//! The errors of a call. An absent, slow or full sidecar is not an error: the answer is then "miss".

use copy_engine::CopyError;
use copy_engine::cuda::CudaError;
use shm_protocol::handshake::HandshakeError;
use shm_protocol::key::KeyError;
use thiserror::Error;

use crate::core::plan::PlanError;

/// A caller's mistake, or a sidecar's refusal.
#[derive(Debug, Error)]
pub enum ShimError {
    /// An argument is invalid for every sidecar: correct the caller.
    #[error("{0}")]
    Argument(String),
    /// The HELLO breaks a rule of the handshake: the caller must correct the named field.
    #[error(transparent)]
    Hello(#[from] HandshakeError),
    /// A block hash is invalid: correct the caller.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A plan is not of this release: install the same release everywhere.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The engine's KV memory cannot be reached: run without the cache.
    #[error("the engine's KV memory cannot be shared: {0}")]
    Memory(#[from] CopyError),
    /// The engine's GPU memory cannot be shown to another process: change the setting named in the text.
    #[error(
        "the engine's GPU memory cannot be shared with the sidecar ({0}). Memory of expandable segments and of vLLM's \
         sleep mode has no IPC handle: unset PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and run without \
         --enable-sleep-mode"
    )]
    Export(CudaError),
    /// A call of the GPU's driver failed: its context is broken, or it lacks a needed feature.
    #[error("the engine's GPU: {0}")]
    Cuda(#[from] CudaError),
    /// A copy on the engine's own stream could not be enqueued: its context is broken.
    #[error("a copy on the engine's stream was refused: CUDA error {0}")]
    Probe(u32),
    /// No stream for rescue copies runs beside a waiting engine: change the setting named in the text.
    #[error(
        "none of {tried} streams copies while the engine's stream waits, so the engine could not finish a load that the \
         sidecar abandons: set CUDA_DEVICE_MAX_CONNECTIONS=32"
    )]
    NoRescueStream {
        /// Streams tried.
        tried: usize,
    },
    /// The sidecar refuses this engine: follow the text.
    #[error("the sidecar refuses this engine: {0}")]
    Refused(String),
    /// The proof has failed: the namespace is closed to this engine.
    #[error(
        "the KV of this engine differs from the KV that namespace {0} keeps, so the namespace is closed to it: load the \
         same weights, apply the same rope, and write pages as page_form says. The log shows the difference"
    )]
    Differs(String),
    /// A forked child used a session of its parent: make a new one in the child.
    #[error("this session belongs to process {owner}: make a new one in this process (after the fork)")]
    Forked {
        /// The process that made the session.
        owner: u32,
    },
}

// === impl ShimError ===

impl ShimError {
    /// The error when the system gives no more threads.
    pub(crate) fn no_thread(error: &std::io::Error) -> Self {
        Self::Argument(format!("a thread could not be started ({error}): raise the limit of processes"))
    }
}

/// An argument error.
pub(crate) fn refuse_argument<T>(text: impl Into<String>) -> Result<T, ShimError> {
    Err(ShimError::Argument(text.into()))
}

/// Fails in a forked child: `owner` is the process that made the session.
pub(crate) fn refuse_forked(owner: u32) -> Result<(), ShimError> {
    if std::process::id() == owner { Ok(()) } else { Err(ShimError::Forked { owner }) }
}
