//! Data passed between an engine's parts: requests, steps, plans, results.

use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

use connector_shim::core::plan::Plan;
use connector_shim::core::policy::{Now, RequestId};
use shm_protocol::key::{BlockHash, NamespaceDigest};

use super::blocks::NULL_BLOCK;
use super::{Model, WORD_TOKENS};
use crate::origin::WORDS;

/// A client's request.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) id: u64,
    /// Keys of all blocks of the request; the last block may be partly full.
    pub(crate) keys: Vec<BlockHash>,
    /// Words of its prompt, and of prompt and answer.
    pub(crate) prompt: usize,
    pub(crate) total: usize,
    /// Another engine computes its prompt.
    pub(crate) awaits: bool,
    /// Another engine continues the request.
    pub(crate) hands_over: bool,
}

/// The state of a request.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum State {
    Waiting,
    Loading,
    Running,
    /// Aborted while a load writes its blocks.
    Leaving,
}

/// A request in the scheduler. Its lengths are in words.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) spec: Spec,
    /// Its number in the policy.
    pub(super) number: RequestId,
    pub(super) state: State,
    /// Grows whenever the work of steps in flight becomes void.
    pub(super) attempt: u32,
    pub(super) preemptions: u32,
    /// The blocks of each group, equally many; before a window they are null blocks.
    pub(super) blocks: Vec<Vec<u32>>,
    /// The number of its leading blocks with offered or loaded states.
    pub(super) offered: usize,
    /// Number of its blocks known to the policy; `None`: the request begins in its next step.
    pub(super) reported_blocks: Option<usize>,
    /// Words computed or loaded, steps in flight included.
    pub(super) computed: usize,
    /// The same without steps in flight.
    pub(super) settled: usize,
    /// Words with known tokens.
    pub(super) known: usize,
    /// The blocks of its load, for the oracle.
    pub(super) promised: Vec<Target>,
    /// Unfinished parts of its load, over all ranks.
    pub(super) loading: usize,
    pub(super) failed: BTreeSet<u32>,
    /// Its load has failed, and the policy deferred it at its last query.
    pub(super) aside: bool,
}

/// Words of a block of a group, and the key of their KV.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) group: usize,
    pub(crate) block: u32,
    pub(crate) words: Range<usize>,
    /// The state covers only a part of the block's tokens, and has no key.
    pub(crate) within: bool,
    pub(crate) hash: BlockHash,
    pub(crate) digest: NamespaceDigest,
}

/// The work of a step for one request.
#[derive(Clone, Debug)]
pub(super) struct Work {
    pub(super) request: u64,
    pub(super) attempt: u32,
    /// Words read by the forward pass.
    pub(super) reads: Vec<Target>,
    pub(super) writes: Vec<Target>,
    /// Number of computed words after the step.
    pub(super) end: usize,
}

/// A load in a step's metadata; a load without a plan is lost.
#[derive(Clone, Debug)]
pub(super) struct Order {
    pub(super) request: u64,
    pub(super) group: usize,
    pub(super) sync: bool,
    /// Its blocks and keys, in the order of the plan.
    pub(super) targets: Vec<Target>,
    pub(super) plan: Option<Plan>,
}

/// The outcome of a step.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Fate {
    Whole,
    /// This rank skips the step.
    Skipped(usize),
    /// This rank stops in the middle of it.
    Raised(usize),
    /// Every rank computes it, and its output is refused.
    Refused,
}

#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(super) number: u64,
    pub(super) fate: Fate,
    /// For each group.
    pub(super) runs: Rc<[[u8; 16]]>,
    /// Number of weight changes, and the current weights.
    pub(super) weights: (u64, u8),
    pub(super) resolved: u64,
    pub(super) urgent: bool,
    /// Blocks filled in another generation of the namespace.
    pub(super) outdated: Vec<u32>,
    /// Blocks listed by this step but not filled by it.
    pub(super) unfilled: Vec<u32>,
    pub(super) orders: Vec<Order>,
    pub(super) work: Vec<Work>,
}

/// A rank's report at the end of a step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Results {
    pub(super) step: u64,
    /// Requests with an ended asynchronous load.
    pub(super) ended: Vec<u64>,
    /// Blocks not loaded.
    pub(super) failed: BTreeSet<u32>,
}

// === impl Order ===

impl Order {
    /// Block ids of the engine.
    pub(super) fn blocks(&self) -> Vec<u32> {
        self.targets.iter().map(|target| target.block).collect()
    }
}

// === impl Request ===

impl Request {
    pub(super) fn new(spec: Spec, number: RequestId, groups: usize) -> Self {
        Self {
            number,
            state: State::Waiting,
            attempt: 0,
            preemptions: 0,
            blocks: vec![Vec::new(); groups],
            offered: 0,
            reported_blocks: None,
            computed: 0,
            settled: 0,
            known: spec.prompt,
            promised: Vec::new(),
            loading: 0,
            failed: BTreeSet::new(),
            aside: false,
            spec,
        }
    }

    /// Returns the places and keys of the words `range` in a group with namespace `digest`, except those in
    /// null blocks.
    pub(super) fn targets(&self, group: usize, range: Range<usize>, digest: NamespaceDigest) -> Vec<Target> {
        let blocks = range.start / WORDS..range.end.div_ceil(WORDS);
        let target = |at: usize| {
            let first = at * WORDS;
            let words = range.start.max(first) - first..range.end.min(first + WORDS) - first;
            let (block, hash) = (self.blocks[group][at], self.spec.keys[at]);
            Target { group, block, words, within: false, hash, digest }
        };
        blocks.map(target).filter(|target| target.block != NULL_BLOCK).collect()
    }

    /// Returns the place and key of the state after so many words, in a group with namespace `digest`.
    pub(super) fn state(&self, group: usize, words: usize, digest: NamespaceDigest) -> Option<Target> {
        let at = words.checked_sub(1)? / WORDS;
        let (block, hash) = (self.blocks[group][at], self.spec.keys[at]);
        assert_ne!(block, NULL_BLOCK, "the null block has no state");
        Some(Target { group, block, words: 0..WORDS, within: !words.is_multiple_of(WORDS), hash, digest })
    }

    /// Takes its blocks of all groups.
    pub(super) fn take_blocks(&mut self) -> Vec<u32> {
        self.blocks.iter_mut().flat_map(std::mem::take).collect()
    }

    /// The index of its first block among `blocks`, in any group.
    pub(super) fn first_of(&self, blocks: &BTreeSet<u32>) -> Option<usize> {
        let first = |of: &Vec<u32>| of.iter().position(|block| blocks.contains(block));
        self.blocks.iter().filter_map(first).min()
    }

    /// Returns the keys of the blocks with known tokens.
    pub(super) fn known_keys(&self) -> &[BlockHash] {
        &self.spec.keys[..self.known / WORDS]
    }

    /// Returns the end of the words computed by the next step. With states a step ends at the end of a block.
    pub(super) fn next_end(&self, model: &Model) -> usize {
        let end = if self.computed < self.known {
            self.known.min(self.computed + model.chunk)
        } else {
            self.computed + 1
        };
        let most = if model.has_states(1) { (self.computed + 1).next_multiple_of(WORDS) } else { usize::MAX };
        end.min(self.spec.total).min(most)
    }

    /// Returns its numbers for the policy.
    pub(super) fn now(&self) -> Now {
        let tokens = |words: usize| words as u32 * WORD_TOKENS;
        Now {
            tokens: tokens(self.known),
            computed: tokens(self.computed),
            preemptions: self.preemptions,
            ..Now::default()
        }
    }

    /// Falls back to this many computed words; the work of steps in flight is void.
    pub(super) fn fall_back(&mut self, words: usize) {
        (self.computed, self.settled) = (words, words);
        self.attempt += 1;
    }
}
