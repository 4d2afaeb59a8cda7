//! Figures of the core. The runtime publishes them as metrics; `docs/metrics.md` lists them.

use shm_protocol::hints::HintAction;
use tiers::dram::HintedCounts;

use super::worth::Over;

/// Counters since the start, and levels now.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct CoreStats {
    pub sessions: u64,
    pub blocks: u64,
    /// Bytes of blocks kept now.
    pub pool_used_bytes: u64,
    pub leases: u64,
    /// Queries answered with fewer blocks than kept, because their engine had no room to lease more.
    pub leases_cut: u64,
    /// Blocks evicted to make room.
    pub evicted_blocks: u64,
    /// Blocks found kept by saves although their parent was not.
    pub unreachable_blocks: u64,
    /// Blocks of earlier lives, verified and kept.
    pub adopted_blocks: u64,
    /// Slots of earlier lives with no whole block, or with one without a checksum.
    pub adoption_dropped: u64,
    /// Blocks of earlier lives with bytes other than their checksums say.
    pub adoption_corrupt: u64,
    /// Blocks of earlier lives still to be verified.
    pub unverified_blocks: u64,
    pub queries: u64,
    /// Blocks asked for by queries.
    pub query_blocks: u64,
    /// Blocks found by queries.
    pub query_hit_blocks: u64,
    /// Queries that waited for blocks on their way into DRAM, or under verification there.
    pub waits: u64,
    /// Waiting queries answered before all awaited blocks were there.
    pub waits_timed_out: u64,
    /// Queries answered without blocks on their way: their engine computes these sooner.
    pub waits_slower: u64,
    /// Queries answered while some of their blocks were on their way.
    pub early_answers: u64,
    /// Queries answered with more blocks than the pool holds.
    pub streamed_answers: u64,
    /// Requests for a prompt computed by another engine.
    pub handover_queries: u64,
    /// Handover requests without a wait, because no engine had produced blocks for earlier ones.
    pub handover_without_producer: u64,
    /// Handover requests without a wait, because as many as may were waiting.
    pub handover_beyond_limit: u64,
    /// Handover requests answered without all blocks after a wait.
    pub handover_exhausted: u64,
    /// Prompts promised by an engine to another, and those refused beyond its limit.
    pub handover_promises: u64,
    pub handover_promises_refused: u64,
    /// Broken promises: waits for one, of an engine here or of a peer, without its block at the end.
    pub handover_promises_broken: u64,
    /// Blocks saved, or found kept, for another engine.
    pub handover_blocks: u64,
    /// Bytes of the blocks kept now for engines that have not loaded them.
    pub handover_kept_bytes: u64,
    /// Blocks kept no longer: loaded by another engine, loaded by none in time, or in the way of later ones.
    pub handover_loaded: u64,
    pub handover_expired: u64,
    pub handover_full: u64,
    /// Blocks of saves for another engine that were not kept: their engine reused them first, or there was no
    /// room or no copy.
    pub handover_lost_to_reuse: u64,
    pub handover_dropped: u64,
    /// Milliseconds of all answered waits.
    pub wait_ms: u64,
    /// Blocks posted by saves.
    pub saves_posted_blocks: u64,
    /// Those of them about to leave an engine's device.
    pub saves_leaving_blocks: u64,
    /// Blocks that went since a later one of their request was saved in their place.
    pub replaced_blocks: u64,
    pub saved_blocks: u64,
    /// Bytes of blocks committed, all ranks.
    pub saved_bytes: u64,
    /// Blocks of saves given up because the engine reused their source.
    pub saves_lost_to_reuse: u64,
    /// Blocks not saved for want of room, or because their copy failed.
    pub saves_dropped: u64,
    /// Dropped blocks without a slot: every slot, or all of their quota, was leased or being filled.
    pub saves_without_room: u64,
    /// Dropped blocks larger than a segment of the pool.
    pub saves_too_large: u64,
    /// Dropped blocks of an engine without a proof.
    pub saves_unproven: u64,
    /// Dropped blocks of an engine in doubt.
    pub saves_doubted: u64,
    /// Dropped blocks of a step not accepted by their engine.
    pub saves_unaccepted: u64,
    /// Dropped blocks with a non-finite number.
    pub saves_not_finite: u64,
    /// Blocks with a non-finite number, also blocks removed after their handover.
    pub not_finite_blocks: u64,
    /// Checks with a verdict.
    pub checks: u64,
    /// Checks of an engine with other KV than the kept one.
    pub checks_differing: u64,
    /// Checks without a verdict: the blocks were no longer kept, or there was no room for the computed ones.
    pub checks_undecided: u64,
    /// Engines barred from their namespace now.
    pub barred_engines: u64,
    /// Blocks removed because their engine was barred.
    pub removed_blocks: u64,
    /// Blocks loaded by ranks, counted once for each rank.
    pub loaded_blocks: u64,
    /// Bytes loaded by ranks.
    pub loaded_bytes: u64,
    /// Loads reported as failed by a rank.
    pub load_failures: u64,
    /// Failed loads refused before anything was copied.
    pub load_refusals: u64,
    /// Failed loads refused by a rank, because they were of another namespace than its blocks.
    pub load_mismatches: u64,
    /// Blocks of hints.
    pub hints: HintStats,
    /// Bytes of blocks kept by hints now, once for each engine.
    pub retained_bytes: u64,
    pub pinned_bytes: u64,
}

/// Blocks of hints by action, and there done, clipped and missing.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct HintStats([HintedCounts; HintAction::ALL.len()]);

// === impl CoreStats ===

impl CoreStats {
    /// Counts a wait ended without all of its blocks.
    pub(super) fn count_over(&mut self, over: Over) {
        match over {
            Over::Late => self.waits_timed_out += 1,
            Over::Slower => self.waits_slower += 1,
        }
    }
}

// === impl HintStats ===

impl HintStats {
    /// Returns the counts of each action.
    pub fn by_action(&self) -> impl Iterator<Item = (HintAction, HintedCounts)> + '_ {
        HintAction::ALL.into_iter().zip(self.0)
    }

    pub(super) fn count_blocks(&mut self, action: HintAction, found: HintedCounts) {
        self.0[action as usize] += found;
    }
}
