//! How long operations take. The core knows when a part of one began, and that it is over; the time of its end is known to whoever
//! carries out what the core wants done.

use std::time::Duration;

use shm_protocol::source::Source;
use tiers::dram::LeaseEnd;

/// What took its time.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Timed {
    /// From the turn that read a question to its answer.
    Query(Part),
    /// From the turn that read a LOAD until its last rank had it. The parts of each rank are their own.
    Load(Part),
    /// From the turn that read a SAVE until its blocks were committed, where blocks of it were copied.
    Save(Part),
    /// From the turn that saw the last step of a prompt for another engine done until that engine had loaded the prompt.
    Handover,
    /// From the turn in which a save for another engine was whole until its blocks were committed: it waited for its step to be
    /// accepted, and for nothing else.
    Acceptance,
    /// A block, from being asked of a tier until it was in DRAM.
    Read(Source),
    /// A lease, from its grant to its end.
    Lease(LeaseEnd),
}

/// Which part of an operation.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Part {
    Whole,
    /// For a producer, a binding, or a step of the engine.
    Waiting,
    /// For blocks of a disk or of a peer, or to be verified.
    Tier,
    /// Between the pool and a rank.
    Copy,
}

/// Something that is over.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Took {
    pub what: Timed,
    pub since: Duration,
}
