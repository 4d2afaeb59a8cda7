//! The loads of one step: those it waits for, those in the background, and those put off.

use std::collections::HashSet;
use std::time::Duration;

use super::requests::RequestId;

/// [`LoadMode::Auto`] loads synchronously when the copy is predicted to take no longer than this, 4 GB, unless the engine says how long.
/// The step computes layer by layer behind the copy, and an asynchronous load costs its request a step more. Measured beside
/// eleven other requests: 912 tokens/s so, 886 with a limit of 2 ms (benches/gpu/results/2026-11-21-h200.jsonl).
const AUTO_SYNC_MS: u64 = 100;
/// An engine decoding the prompts of others is there for even gaps between tokens.
const AUTO_SYNC_CONSUMER_MS: u64 = 2;
/// Bytes copied in a millisecond over PCIe, for this prediction: scattered pieces of 32 KiB were measured at 42 GB/s, whole blocks at 54.
pub const BYTES_PER_MS: u64 = 40_000_000;
/// The capacity of one step of a GPU: new tokens to compute, and milliseconds of synchronous copies. Requests arriving together then begin
/// one after the other instead of all waiting for the last one's KV and prompt: first tokens of conversations came after 190 ms so, 288
/// before (benches/gpu/results/2026-11-21-h200.jsonl).
const STEP_NEW_TOKENS: u32 = 512;
const STEP_COPY_MS: u64 = 10;
/// Beside a full step a load begins in the background, to spare a later step the wait: so many at once, since each holds blocks without any
/// computation on them. Measured: 914 tokens/s with none, 932 with 1, 889 with 3.
const BACKGROUND_LOADS: usize = 1;
/// A prompt of another engine with a copy of at most this time, and short enough for a step to wait for beside other requests, is loaded by
/// the step going on with it, once all of it is there. A load between steps would begin earlier, but it is seen to have ended two steps
/// later, behind an engine's pauses of 1 ms. On a host answers came 5 to 10 ms sooner from parts, of 250 to 2,900 tokens.
const WHOLE_MS: u64 = 8;
/// How long an otherwise idle step waits for blocks of another engine: vLLM looks once in a millisecond.
pub(super) const LINGER: Duration = Duration::from_millis(2);
/// Bytes of each part of a save for another engine, and of a load of blocks still on their way: a millisecond on the wire, and enough for a
/// copy. A host copies a quarter of it in about this time.
const PART_BYTES: u64 = 16 << 20;
const HOST_PART_BYTES: u64 = 4 << 20;

shm_protocol::named! {
    /// The engine's mode of loading.
    #[derive(Default)]
    pub enum LoadMode {
        /// A step waits for short copies, and for any where nothing else runs.
        #[default]
        Auto = "auto",
        /// The step waits.
        Sync = "sync",
        /// The request waits, and others run.
        Async = "async",
    }
}

/// The facts of an engine for the pace of its loads.
#[derive(Copy, Clone, Debug, Default)]
pub struct Machine {
    /// The mode of its loads.
    pub load: LoadMode,
    /// A step may wait for a load. Before a step begins, the engine's prefix cache has the hashes of the blocks it loads and computes, and
    /// the step behind it may be in flight. Both would outlast a failed load: if its request is aborted or preempted, nobody computes those
    /// blocks again. On a GPU with copies by the sidecar, the engine's stream goes on over whole loads alone.
    pub waits: bool,
    /// True if KV lies in a GPU's memory.
    pub on_gpu: bool,
    /// True if its ranks copy loads themselves.
    pub by_engine: bool,
    /// True if it decodes prompts computed by other engines.
    pub consumer: bool,
    /// True if the engine computes a request after its load has failed.
    pub recomputes: bool,
    /// The longest predicted copy, in ms, a step waits for beside other requests.
    pub sync_ms: Option<u64>,
    /// Bytes of one rank's part of a block.
    pub block_bytes: u64,
}

/// The limits of loads by mode, and the loads and tokens of the next step so far.
#[derive(Debug)]
pub(super) struct Pacing {
    load: LoadMode,
    /// True if a step may wait for a load ([`Machine::waits`]).
    may_wait: bool,
    /// The most blocks loaded synchronously by [`LoadMode::Auto`] beside other requests.
    sync_blocks: u32,
    /// With more blocks of synchronous loads than this, a step takes no further load of the kind.
    step_blocks_max: u32,
    /// True if nothing was computed in the last step, and nothing is to be in this one so far.
    idle: bool,
    /// Blocks of this step's synchronous loads, and new tokens of its requests, so far.
    step_blocks: u32,
    step_tokens: u32,
    /// Requests with a load in the background.
    background: HashSet<RequestId>,
}

// === impl Machine ===

impl Machine {
    fn blocks_in(&self, ms: u64) -> u32 {
        u32::try_from(ms * BYTES_PER_MS / self.block_bytes.max(1)).unwrap_or(u32::MAX)
    }

    fn sync_blocks(&self) -> u32 {
        let by_role = if self.consumer { AUTO_SYNC_CONSUMER_MS } else { AUTO_SYNC_MS };
        self.blocks_in(self.sync_ms.unwrap_or(by_role))
    }

    /// Blocks of each part of a prompt saved for another engine.
    pub fn blocks_of_part(&self) -> u32 {
        let bytes = if self.on_gpu { PART_BYTES } else { HOST_PART_BYTES };
        u32::try_from(bytes.div_ceil(self.block_bytes.max(1))).unwrap_or(u32::MAX)
    }

    /// Blocks in a part of a load. 0: loads wait until all blocks are there, because the engine cannot load
    /// in parts, or a load must not fail.
    pub fn part_blocks(&self) -> u32 {
        let may_fail = self.load != LoadMode::Sync && self.recomputes;
        if may_fail && !self.by_engine { self.blocks_of_part() } else { 0 }
    }

    /// The most blocks of another engine's prompt loaded as a whole, not in parts.
    pub fn whole_blocks(&self) -> u32 {
        let waits = self.waits && self.load != LoadMode::Async;
        if waits { self.blocks_in(WHOLE_MS).min(self.sync_blocks()) } else { 0 }
    }
}

// === impl Pacing ===

impl Pacing {
    pub(super) fn new(machine: &Machine) -> Self {
        Self {
            load: machine.load,
            may_wait: machine.waits,
            sync_blocks: machine.sync_blocks(),
            step_blocks_max: machine.blocks_in(STEP_COPY_MS),
            idle: true,
            step_blocks: 0,
            step_tokens: 0,
            background: HashSet::new(),
        }
    }

    /// Notes that ranks copy loads themselves, although the sidecar was to: their loads can fail.
    pub(super) fn ranks_copy(&mut self) {
        self.may_wait = false;
    }

    /// True if a step waits for a load of so many blocks. `alone`: no other request is computed beside it.
    /// `None`: not in this step.
    pub(super) fn synchronous(&self, blocks: u32, alone: bool) -> Option<bool> {
        let too_long = self.load == LoadMode::Auto && blocks > self.sync_blocks && !alone;
        if !self.may_wait || self.load == LoadMode::Async || too_long {
            return Some(false);
        }
        // The first request always fits into the step.
        if self.step_blocks <= self.step_blocks_max && self.step_tokens <= STEP_NEW_TOKENS {
            return Some(true);
        }
        let put_off = self.load == LoadMode::Sync || self.background.len() >= BACKGROUND_LOADS;
        if put_off { None } else { Some(false) }
    }

    /// The longest wait of this step for another engine: only once, and only if nothing waits for the step.
    pub(super) fn linger(&mut self) -> Option<Duration> {
        if !self.idle || !self.background.is_empty() {
            return None;
        }
        self.idle = false;
        Some(LINGER)
    }

    /// Notes that a request was given memory in this step.
    pub(super) fn take_in(&mut self) {
        self.idle = false;
    }

    /// Notes the begin of a load; with `sync` its request is computed in this step.
    pub(super) fn begin_load(&mut self, id: RequestId, blocks: u32, new_tokens: u32, sync: bool) {
        if sync {
            self.step_blocks += blocks;
            self.step_tokens += new_tokens;
        } else {
            self.background.insert(id);
        }
    }

    /// Notes that a request without a load (any more) is computed in this step.
    pub(super) fn compute(&mut self, id: RequestId, new_tokens: u32) {
        if self.background.remove(&id) {
            self.step_tokens += new_tokens;
        }
    }

    /// Begins the next step, without requests. `idle`: this step computed nothing.
    pub(super) fn end_step(&mut self, idle: bool) {
        (self.step_blocks, self.step_tokens, self.idle) = (0, 0, idle);
    }

    /// Forgets a request that is over.
    pub(super) fn forget_request(&mut self, id: RequestId) {
        self.background.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK_BYTES: u64 = 2 << 20;

    /// A GPU with copies by the sidecar.
    fn gpu() -> Machine {
        let by_facts = Machine { waits: true, on_gpu: true, recomputes: true, ..Machine::default() };
        Machine { block_bytes: BLOCK_BYTES, ..by_facts }
    }

    #[test]
    fn answers_come_early_only_where_a_load_may_fail() {
        assert_eq!(gpu().part_blocks(), 8);
        assert_eq!(Machine { recomputes: false, ..gpu() }.part_blocks(), 0);
        assert_eq!(Machine { load: LoadMode::Sync, ..gpu() }.part_blocks(), 0);
        assert_eq!(Machine { by_engine: true, ..gpu() }.part_blocks(), 0);
        assert_eq!(Machine { on_gpu: false, ..gpu() }.part_blocks(), 2);
    }

    /// Beside other requests; alone it delays nobody.
    #[test]
    fn an_engine_that_answers_what_others_compute_waits_for_short_copies_alone() {
        for (consumer, sync_ms, longest_ms) in [(false, None, 100), (true, None, 2), (true, Some(5), 5)] {
            let pacing = Pacing::new(&Machine { consumer, sync_ms, ..gpu() });
            let longest = (longest_ms * BYTES_PER_MS / BLOCK_BYTES) as u32;
            assert_eq!(pacing.synchronous(longest, false), Some(true));
            assert_eq!(pacing.synchronous(longest + 1, false), Some(false));
            assert_eq!(pacing.synchronous(longest + 1, true), Some(true));
        }
    }

    /// 8 ms of copying at 40 GB/s, or a step's longest wait beside others if shorter, and only where a step may wait.
    #[test]
    fn short_prompts_of_another_engine_are_loaded_by_a_step() {
        assert_eq!(gpu().whole_blocks(), 152);
        assert_eq!(Machine { consumer: true, ..gpu() }.whole_blocks(), 38);
        assert_eq!(Machine { load: LoadMode::Async, ..gpu() }.whole_blocks(), 0);
        assert_eq!(Machine { waits: false, ..gpu() }.whole_blocks(), 0);
    }
}
