//! Times of operations. The core knows the begin of each part of an operation, and the event of its end; its
//! host knows the time of the end, as it carries the actions out.

use std::time::Duration;

use shm_protocol::source::Source;
use tiers::dram::LeaseEnd;

/// A timed operation.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Timed {
    /// A question, from the turn of its reading to its answer.
    Query(Part),
    /// A LOAD, from the turn of its reading until its last rank had it. Each rank's parts are timed
    /// separately.
    Load(Part),
    /// A SAVE with copied blocks, from the turn of its reading until their commit.
    Save(Part),
    /// A prompt for another engine, from the turn with its last step seen done until that engine had loaded
    /// it.
    Handover,
    /// A save for another engine, from becoming whole until its commit: it waited only for the acceptance of
    /// its step.
    Acceptance,
    /// A block, from its request to a tier until it was in DRAM.
    Read(Source),
    /// A lease, from its grant to its end.
    Lease(LeaseEnd),
}

/// A part of an operation.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Part {
    Whole,
    /// The wait for a producer, a binding, or a step of the engine.
    Waiting,
    /// The wait for blocks of a disk or of a peer, or for a verification.
    Tier,
    /// The copy between the pool and a rank.
    Copy,
}

/// An ended operation, and its begin.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Took {
    pub what: Timed,
    pub since: Duration,
}
