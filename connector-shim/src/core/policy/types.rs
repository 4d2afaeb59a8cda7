//! Values between an engine and its policy.

use std::time::Duration;

use shm_protocol::key::Algorithm;
use shm_protocol::message::WAY_LAST;

use super::checks::CheckRate;
use super::requests::RequestId;
use crate::core::plan::Plan;

/// Basis and prime of FNV-1a, 32 bits.
const FNV_BASIS: u32 = 0x811c_9dc5;
const FNV_PRIME: u32 = 0x0100_0193;

/// An engine's settings for its cache.
#[derive(Copy, Clone, Debug)]
pub struct PolicyOptions {
    /// Whether the engine loads blocks.
    pub loads: bool,
    /// Whether the engine saves blocks.
    pub saves: bool,
    /// How often hits are checked.
    pub checks: CheckRate,
    /// The most tokens that this engine may compute of a prompt that another engine should have handed over:
    /// a request with more ends. `None`: no limit.
    pub strict_tokens: Option<u32>,
    /// True if the engine shortens each hit of its own cache by a block, for a drafter.
    pub drops_last_block: bool,
    /// The most tokens of a decoding request computed in a step.
    pub tokens_per_step: u32,
    /// Another connector loads blocks, too.
    pub beside_others: bool,
    /// True if a copy of a block in the engine's own cache is kept like any other. Otherwise such copies go
    /// first, and blocks are offered again before the engine reuses them.
    pub keep_copies: bool,
    /// The hash algorithm of block announcements to routers; `None`: no announcements; an inner `None`: an
    /// unknown algorithm.
    pub events: Option<Option<Algorithm>>,
}

/// An answer to wait for: the host waits, passes the answer on ([`super::EnginePolicy::answered`]), and calls again.
#[derive(Copy, Clone, Debug)]
pub enum PolicyWait {
    /// The answer to a query of a group's session.
    Answer {
        /// The group.
        group: usize,
        /// The query.
        op: u64,
    },
    /// A better answer than a pending one, for a limited time.
    Linger {
        /// The group.
        group: usize,
        /// The key log of the question.
        log: i64,
        /// The index of the first key asked for.
        first: u32,
        /// The number of keys asked for.
        count: u32,
        /// The longest wait.
        within: Duration,
    },
}

/// The sidecar's service for the engine.
#[derive(Copy, Clone, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum ServedState {
    /// There is no sidecar, or it refuses the engine.
    Away,
    /// Blocks are found, and none are kept: the engine reports no step's output as taken.
    Unaccepted,
    /// The sidecar does not know the namespace of the engine's ranks yet.
    Unbound,
    /// Blocks are found and kept.
    Serving,
}

/// A request beginning on a block table in a step, perhaps not for the first time.
#[derive(Clone, Debug)]
pub struct BegunRequest {
    /// The request; none: it is not followed.
    pub request: Option<RequestId>,
    /// The request's blocks, by group.
    pub blocks: Vec<Vec<u32>>,
    /// Tokens held by these blocks.
    pub computed: u32,
}

/// A state made by a step: it is whole in its block once the step is done, and only until the block is written again.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct OfferedState {
    /// The request.
    pub request: RequestId,
    /// The group.
    pub group: usize,
    /// The block with the state.
    pub block: u32,
    /// The number of tokens that the state stands for.
    pub boundary: u32,
}

/// A step's changes to requests and blocks. Lists of blocks by group have the groups of the set first; blocks of further groups, that
/// are not kept, count as written.
#[derive(Clone, Debug, Default)]
pub struct Changes {
    /// Requests beginning in the step.
    pub begun: Vec<BegunRequest>,
    /// Further blocks, by group, of continuing requests.
    pub grown: Vec<(Option<RequestId>, Vec<Vec<u32>>)>,
    /// Blocks filled by other means than computing tokens.
    pub filled: Vec<u32>,
    /// Blocks copied before the step computes anything, each pair from the first to the second.
    pub copied: Vec<(u32, u32)>,
    /// Outputs of encoders, by the engine's identifiers.
    pub encoded: Vec<String>,
    /// The states made by the step.
    pub offered: Vec<OfferedState>,
}

/// The work of a step before its numbers are known.
#[derive(Clone, Debug, Default)]
pub struct OpenedStep {
    /// Requests to hand in the numbers of ([`super::Due`]).
    pub due: Vec<RequestId>,
    /// Blocks no longer held.
    pub released: Vec<u32>,
    /// Blocks of before may be wrong: no request may find them in the engine's own cache.
    pub contradicted: bool,
    /// Number of blocks, reused next by the engine, to hand in; 0: none, as mostly.
    pub named: u32,
}

/// A load of a request.
#[derive(Clone, Debug)]
pub struct RequestLoad {
    /// The request.
    pub request: RequestId,
    /// The copies: slots of the cache, and blocks of the engine.
    pub plan: Plan,
    /// True if the step waits for it.
    pub sync: bool,
}

/// A load that lost its lease before it could be planned: ranks report it as failed.
#[derive(Clone, Debug)]
pub struct LostLoad {
    /// The request.
    pub request: RequestId,
    /// The blocks not loaded.
    pub blocks: Vec<u32>,
    /// True if the step would have waited for it.
    pub sync: bool,
}

/// The work of a group's ranks in a step.
#[derive(Clone, Debug, Default)]
pub struct StepPart {
    /// Loads of the ranks.
    pub loads: Vec<RequestLoad>,
    /// Loads to report as failed.
    pub lost: Vec<LostLoad>,
    /// True if the sidecar waits for the step's fences.
    pub urgent: bool,
}

/// The work of the ranks in a step.
#[derive(Clone, Debug, Default)]
pub struct PlannedStep {
    /// The step's number, from 1 on.
    pub step: u64,
    /// Parts of the step, by group.
    pub parts: Vec<StepPart>,
    /// True if the last block of a synchronous load is partly full: the step itself writes behind its loaded
    /// part.
    pub fills_tail: bool,
    /// True if a session waits for the output of this step, or of an earlier one.
    pub asks: bool,
    /// Earlier steps with loads perhaps not begun by all ranks.
    pub open_loads: Vec<u64>,
    /// Steps passed over by the engine: the reports of ranks with these steps are lost.
    pub passed: Vec<u64>,
    /// How often the weights may have changed.
    pub weights: u64,
}

/// The end of a request.
#[derive(Clone, Debug, Default)]
pub struct EndedRequest {
    /// Tokens of its prompt kept for another engine that goes on with it; `None`: no engine does.
    pub handed_over: Option<u32>,
    /// Blocks to hold until they are saved, as far as the engine can ([`super::EnginePolicy::held`]).
    pub hold: Vec<u32>,
}

// === impl Changes ===

impl Default for PolicyOptions {
    fn default() -> Self {
        Self {
            loads: false,
            saves: false,
            checks: CheckRate::default(),
            strict_tokens: None,
            drops_last_block: false,
            tokens_per_step: 0,
            beside_others: false,
            keep_copies: true,
            events: None,
        }
    }
}

impl Changes {
    /// True if the step has the state's block in a table of another request, or of another group.
    pub(super) fn gives_away(&self, state: &OfferedState) -> bool {
        let begun = self.begun.iter().map(|begun| (begun.request, &begun.blocks));
        let mut tables = begun.chain(self.grown.iter().map(|(request, blocks)| (*request, blocks)));
        tables.any(|(request, table)| {
            let mut groups = table.iter().enumerate();
            groups.any(|(group, blocks)| {
                (request, group) != (Some(state.request), state.group) && blocks.contains(&state.block)
            })
        })
    }
}

// === impl PolicyWait ===

impl PolicyWait {
    /// The longest wait, if there is a limit.
    pub fn within(&self) -> Option<Duration> {
        if let Self::Linger { within, .. } = self { Some(*within) } else { None }
    }
}

// === impl PlannedStep ===

impl PlannedStep {
    /// The step after this one, still empty.
    pub(super) fn clone_for_next(&self) -> Self {
        Self { step: self.step + 1, parts: vec![StepPart::default(); self.parts.len()], ..Self::default() }
    }
}

/// Returns a number, never 0 or [`WAY_LAST`], for the way in which an answer ended. It is made from the engine's number of
/// the reason, and from the last two tokens if the model ended the answer: a call of a tool ends otherwise
/// than a sentence. From these numbers the sidecar learns which requests come back soon.
pub fn way_of_end(reason: u32, tokens: &[u32]) -> u32 {
    let words = [reason].into_iter().chain(tokens.iter().copied());
    let digest = words.fold(FNV_BASIS, |digest, word| (digest ^ word).wrapping_mul(FNV_PRIME));
    digest.clamp(1, WAY_LAST - 1)
}
