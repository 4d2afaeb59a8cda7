//! The policy's remarks for the operator of the engine. The host words them, since remedies depend on the engine.

use super::requests::RequestId;

/// One fact for an operator.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Remark {
    /// The engine reported no output of the last steps, so nothing is kept until it does.
    Stalled {
        /// How many steps.
        steps: u64,
    },
    /// The engine took the output of no step of some before `step`.
    PassedOver {
        /// How many.
        steps: u64,
        /// The step with the taken output.
        step: u64,
    },
    /// The engine's own cache has given a request blocks not filled by any accepted step. Said once.
    Unproven {
        /// How many.
        blocks: u64,
        /// The request.
        request: RequestId,
    },
    /// Loads of blocks have failed.
    NotLoaded {
        /// How many blocks.
        blocks: u64,
    },
    /// The ranks compute with something else than before, although nothing was seen to change it.
    Changed,
}
