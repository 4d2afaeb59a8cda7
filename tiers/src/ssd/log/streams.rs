//! Streams of a device: blocks likely to go at about the same time share segments. So a segment due for reclamation has few
//! blocks left to move.

use crate::standing::Standing;

/// Streams of a device. Each has an open segment.
pub(super) const STREAMS: usize = 3;

/// The blocks of a segment.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum WriteStream {
    /// Blocks of one request. Few are used again.
    New,
    /// Blocks of several requests.
    Reused,
    /// Blocks that outlived their segment.
    Moved,
}

// === impl WriteStream ===

impl WriteStream {
    /// Returns the stream for the first write of a block of this standing in DRAM.
    pub(super) fn of(standing: Standing) -> Self {
        if standing != Standing::ABOVE && standing.was_used_again() { Self::Reused } else { Self::New }
    }
}
