//! The policy's remarks for the operator of the engine. The host words them, since remedies depend on the engine.

use super::requests::RequestId;

/// One fact for an operator.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Remark {
    /// The engine reported no output of the last steps, so nothing is kept until it does.
    Stalled {
        /// Number of steps.
        steps: u64,
    },
    /// The engine took the output of no step of some before `step`.
    PassedOver {
        /// Number of steps.
        steps: u64,
        /// The step with the taken output.
        step: u64,
    },
    /// The engine's own cache has given a request blocks that no accepted step has filled. Said once.
    Unproven {
        /// Number of blocks.
        blocks: u64,
        /// The request.
        request: RequestId,
    },
    /// Hints of a client were refused. Said once a minute.
    HintsRefused {
        /// The request.
        request: RequestId,
        /// The fault, and the remedy.
        reason: String,
    },
    /// Loads of blocks have failed.
    NotLoaded {
        /// Number of blocks.
        blocks: u64,
    },
    /// The namespace of the ranks has changed, although no change of the weights was noticed.
    Changed,
}
