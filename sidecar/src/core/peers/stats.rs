//! Figures of the mesh in the core.

use mesh::directory::PeerStats;
use mesh::transport::FetchFault;

use crate::core::PrefetchStats;

/// Names of the kinds of [`FetchFault`] in metrics, in the order of [`PeersStats::faults`].
pub const FAULT_NAMES: [&str; 8] =
    ["absent", "corrupt", "short", "timeout", "connection", "malformed", "refused", "stopped"];

/// Counters since the start, and levels now.
#[derive(Clone, Debug, Default)]
pub struct PeersStats {
    pub peers: Vec<PeerStats>,
    pub prefetched: PrefetchStats,
    /// Blocks in DRAM without an announcement of a peer.
    pub unique_blocks: u64,
    /// Blocks on their way from peers now.
    pub fetching: u64,
    /// Blocks no peer is asked for in this life.
    pub distrusted: u64,
    /// Bytes being read by peers now.
    pub granted_bytes: u64,
    pub fetches: u64,
    /// Fetches without a block although a request had waited for them.
    pub fruitless_fetches: u64,
    /// True while no request waits for peers, because their blocks do not come.
    pub paused: bool,
    /// Blocks brought into DRAM from peers.
    pub fetched_blocks: u64,
    pub fetched_bytes: u64,
    /// Blocks not given by one peer and asked of another.
    pub retried_blocks: u64,
    /// Blocks not given by a peer, by kind of fault.
    pub faults: [u64; FAULT_NAMES.len()],
    /// Blocks asked of peers before they were committed there.
    pub standing_blocks: u64,
    pub asks: u64,
    /// Standing asks of peers here.
    pub kept_asks: u64,
    /// Standing asks granted behind their last commit.
    pub granted_behind: u64,
    /// Blocks requested by peers.
    pub asked_blocks: u64,
    /// Requested blocks not here.
    pub absent_blocks: u64,
    /// Requested blocks here and not granted: too much was granted already.
    pub withheld_blocks: u64,
    pub served_blocks: u64,
    pub served_bytes: u64,
    /// Changes of blocks published to peers.
    pub published: u64,
    /// Outgrown filters of peers.
    pub resyncs: u64,
    /// Requests that waited for a producer.
    pub miss_waits: u64,
    /// Requests that waited and did not get their blocks.
    pub miss_waits_exhausted: u64,
    /// Engines whose requests do not wait any more.
    pub miss_wait_breakers: u64,
}

/// Returns the place of a fault in [`PeersStats::faults`].
pub(super) fn index_fault(fault: FetchFault) -> usize {
    match fault {
        FetchFault::Absent => 0,
        FetchFault::Corrupt => 1,
        FetchFault::Short => 2,
        FetchFault::Timeout(_) => 3,
        FetchFault::Peer(_) => 4,
        FetchFault::Malformed(_) => 5,
        FetchFault::Refused(_) => 6,
        FetchFault::Stopped => 7,
    }
}
