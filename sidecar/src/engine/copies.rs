//! The copies that run, and whose each is.

use std::collections::BTreeMap;

use super::{CopyId, Direction, SessionId};

/// Which operation a running copy belongs to.
#[derive(Copy, Clone, Debug)]
pub(super) struct CopyOwner {
    pub(super) scheduler: SessionId,
    pub(super) op: u64,
    pub(super) rank: u32,
    pub(super) direction: Direction,
}

/// Copies that have not ended.
#[derive(Debug, Default)]
pub(super) struct Copies {
    running: BTreeMap<CopyId, CopyOwner>,
    /// The last number that was given.
    last: CopyId,
}

// === impl Copies ===

impl Copies {
    /// A copy begins; its number.
    pub(super) fn begin(&mut self, owner: CopyOwner) -> CopyId {
        self.last += 1;
        self.running.insert(self.last, owner);
        self.last
    }

    /// It has ended; whose it was.
    pub(super) fn end(&mut self, copy: CopyId) -> CopyOwner {
        self.running.remove(&copy).expect("every copy is answered once")
    }

    pub(super) fn any(&self) -> bool {
        !self.running.is_empty()
    }
}
