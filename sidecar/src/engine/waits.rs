//! Questions, and who waits for what is on its way.

use shm_protocol::layout::QUERY_WAIT_MS_MAX;
use shm_protocol::pool::SlotRef;

use super::SessionId;

/// The longest that a query waits: a device reads a long prompt's blocks (2 GiB) within a second; who waits much longer
/// had better computed.
pub(super) const WAIT_MS_MAX: u64 = QUERY_WAIT_MS_MAX as u64;

#[derive(Copy, Clone, Debug)]
pub(super) struct Question {
    pub(super) op: u64,
    pub(super) log: u32,
    pub(super) from: u32,
    pub(super) count: u32,
    /// It may be answered while its blocks are on their way.
    pub(super) arriving: bool,
    pub(super) asked_ms: u64,
}

/// Who waits: a query or a load.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Waiter {
    pub(super) session: SessionId,
    pub(super) log: Option<u32>,
    pub(super) op: u64,
}

/// What a query waits for.
#[derive(Debug)]
pub(super) struct Wait {
    pub(super) question: Question,
    /// Blocks on their way that have not ended; none: it waits for a producer.
    pub(super) open: usize,
    /// Its run reaches to the end of what was asked for.
    pub(super) whole: bool,
    /// Blocks that must not be evicted before they are leased.
    pub(super) held: Vec<SlotRef>,
    /// It was answered early.
    pub(super) answered: Option<Answered>,
}

/// What a query was told early.
#[derive(Debug)]
pub(super) struct Answered {
    /// Slots of its hits.
    pub(super) slots: Vec<SlotRef>,
    /// When its blocks are held no longer.
    pub(super) until_ms: u64,
}

/// A load whose blocks have not all arrived.
#[derive(Debug)]
pub(super) struct Parked {
    /// Blocks on their way.
    pub(super) missing: usize,
    /// Those that are here.
    pub(super) held: Vec<SlotRef>,
}
