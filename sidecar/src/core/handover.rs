//! Handovers: one engine computes a prompt, another answers it, and the blocks travel by their keys.
//!
//! A block of a handover is an arrival whose source is a save. It is loaded from its slot, once it is committed there.

use std::collections::BTreeSet;

use shm_protocol::key::BlockKey;

use super::SessionId;
use super::arrivals::Waiter;

/// What saves have begun and ended in one event, to be told to others at its end.
#[derive(Debug, Default)]
pub(super) struct Produced {
    /// Slots were taken for blocks.
    pub(super) claimed: bool,
    /// Blocks that were awaited: by whom, and whether they are kept.
    pub(super) ended: Vec<(BlockKey, Vec<Waiter>, bool)>,
    /// Namespaces in which blocks were kept, and the sessions that saved them.
    pub(super) kept: BTreeSet<(u32, SessionId)>,
}
