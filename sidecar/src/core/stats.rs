//! What the core counts. Published as metrics by the runtime; `docs/metrics.md` lists them.

use super::worth::Over;

/// Counters since the start, and levels now.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Stats {
    pub sessions: u64,
    pub blocks: u64,
    /// Bytes of blocks kept now.
    pub pool_used_bytes: u64,
    pub leases: u64,
    /// Times that a query was answered with fewer blocks than are kept, since its engine had no room to lease more.
    pub leases_cut: u64,
    /// Blocks evicted to make room.
    pub evicted_blocks: u64,
    /// Blocks that saves found kept although their parent was not.
    pub unreachable_blocks: u64,
    /// Blocks of earlier lives of the sidecar that were verified, and kept.
    pub adopted_blocks: u64,
    /// Slots of earlier lives that held no whole block, or one without a checksum.
    pub adoption_dropped: u64,
    /// Blocks of earlier lives that were not what their checksums say.
    pub adoption_corrupt: u64,
    /// Blocks of earlier lives that are still to be verified.
    pub unverified_blocks: u64,
    pub queries: u64,
    /// Blocks asked for by queries.
    pub query_blocks: u64,
    /// Blocks found by queries.
    pub query_hit_blocks: u64,
    /// Queries that waited for blocks on their way into DRAM, or being verified there.
    pub waits: u64,
    /// Those that were answered before all they waited for was there.
    pub waits_timed_out: u64,
    /// Queries answered without blocks on their way: their engine computes these sooner.
    pub waits_slower: u64,
    /// Those that were answered while blocks of theirs were on their way.
    pub early_answers: u64,
    /// Requests that asked for a prompt which another engine computes.
    pub handover_queries: u64,
    /// Those of them that did not wait since nobody had produced blocks for some before.
    pub handover_without_producer: u64,
    /// Those of them that did not wait since as many as may did.
    pub handover_beyond_limit: u64,
    /// Those of them that waited and were answered without all blocks.
    pub handover_exhausted: u64,
    /// Prompts that an engine has promised to compute for another, and those beyond what it may promise at once.
    pub handover_promises: u64,
    pub handover_promises_refused: u64,
    /// Broken promises: waits for one, of an engine here or of a peer, without its block at the end.
    pub handover_promises_broken: u64,
    /// Blocks saved, or found kept, for another engine.
    pub handover_blocks: u64,
    /// Bytes of those that are kept now for an engine that has not loaded them.
    pub handover_kept_bytes: u64,
    /// Blocks kept no longer: another engine has loaded them, nobody has in time, or later ones needed the room.
    pub handover_loaded: u64,
    pub handover_expired: u64,
    pub handover_full: u64,
    /// Blocks of saves for another engine that were not kept: their engine reused them first, or there was no room or no copy.
    pub handover_lost_to_reuse: u64,
    pub handover_dropped: u64,
    /// Milliseconds of all waits that were answered.
    pub wait_ms: u64,
    /// Blocks posted by saves.
    pub saves_posted_blocks: u64,
    pub saved_blocks: u64,
    /// Bytes of blocks committed, all ranks.
    pub saved_bytes: u64,
    /// Blocks whose save was given up because the engine reused their source.
    pub saves_lost_to_reuse: u64,
    /// Blocks not saved for want of room, or because their copy failed.
    pub saves_dropped: u64,
    /// Those of them that found every slot, or all of their quota, leased or being filled.
    pub saves_without_room: u64,
    /// Those of them that are larger than a segment of the pool.
    pub saves_too_large: u64,
    /// Those of them whose engine has not proven what it computes.
    pub saves_unproven: u64,
    /// Those of them from an engine in doubt.
    pub saves_doubted: u64,
    /// Those of them whose step their engine did not accept.
    pub saves_unaccepted: u64,
    /// Those of them with a non-finite number.
    pub saves_not_finite: u64,
    /// Blocks with such a number, also blocks removed behind their hand-over.
    pub not_finite_blocks: u64,
    /// Checks that came to a verdict.
    pub checks: u64,
    /// Those of them whose engine computes other KV than is kept.
    pub checks_differing: u64,
    /// Checks without a verdict: the blocks were not kept any more, or there was no room for theirs.
    pub checks_undecided: u64,
    /// Engines now that a namespace is closed to.
    pub barred_engines: u64,
    /// Blocks removed because their engine was barred.
    pub removed_blocks: u64,
    /// Blocks loaded by ranks, counted once for each rank.
    pub loaded_blocks: u64,
    /// Bytes loaded by ranks.
    pub loaded_bytes: u64,
    /// Loads that a rank reported as failed.
    pub load_failures: u64,
    /// Those of them that were refused before anything was copied.
    pub load_refusals: u64,
    /// Those of them that a rank refused since they were of another namespace than its blocks.
    pub load_mismatches: u64,
}

// === impl Stats ===

impl Stats {
    /// A wait has ended without all of its blocks.
    pub(super) fn count_over(&mut self, over: Over) {
        match over {
            Over::Late => self.waits_timed_out += 1,
            Over::Slower => self.waits_slower += 1,
        }
    }
}
