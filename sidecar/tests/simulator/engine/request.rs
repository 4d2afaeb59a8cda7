//! What passes between an engine's parts: requests, steps, plans, results.

use std::collections::BTreeSet;

use connector_shim::core::plan::Plan;
use shm_protocol::key::{BlockHash, NamespaceDigest};

/// What a client asks for.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    pub(crate) id: u64,
    /// Keys of all blocks that it will fill.
    pub(crate) keys: Vec<BlockHash>,
    /// How many of them the prompt fills; the others are decoded.
    pub(crate) prompt: usize,
}

/// Where a request stands.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum State {
    Waiting,
    Loading,
    Running,
    /// Aborted while its blocks are written by a load.
    Leaving,
}

/// A request as the scheduler and the connector see it.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) spec: Spec,
    pub(super) state: State,
    /// Goes up whenever what was computed is void.
    pub(super) attempt: u32,
    /// The first step in flight when a failed load began this attempt. The attempt keeps blocks of these steps.
    pub(super) kept_from: u64,
    pub(super) blocks: Vec<u32>,
    /// Blocks computed or loaded, steps in flight included.
    pub(super) computed: usize,
    /// The same without them.
    pub(super) settled: usize,
    /// Blocks whose tokens, and so keys, are known.
    pub(super) known: usize,
    /// The session's handle of its log.
    pub(super) log: Option<i64>,
    pub(super) saved: usize,
    pub(super) loaded: Vec<u32>,
    /// Keys and namespace of those, for the oracle.
    pub(super) promised: Vec<Target>,
    pub(super) refused: bool,
    pub(super) outdated: bool,
    /// Parts of its load that have not ended, on every rank.
    pub(super) loading: usize,
    pub(super) failed: BTreeSet<u32>,
}

/// A block and what it is to hold.
#[derive(Copy, Clone, Debug)]
pub(crate) struct Target {
    pub(crate) block: u32,
    pub(crate) hash: BlockHash,
    pub(crate) digest: NamespaceDigest,
}

/// What a step computes for one request.
#[derive(Clone, Debug)]
pub(super) struct Work {
    pub(super) request: u64,
    pub(super) attempt: u32,
    /// `kept_from` of its request when the step was scheduled.
    pub(super) kept_from: u64,
    /// Its KV belongs to two generations of the namespace.
    pub(super) outdated: bool,
    /// Blocks that the forward reads.
    pub(super) reads: Vec<Target>,
    pub(super) writes: Vec<Target>,
    /// Blocks computed once it is done; zero for what lies before a load.
    pub(super) end: usize,
}

/// A load in a step's metadata; without a plan it is lost.
#[derive(Clone, Debug)]
pub(super) struct Order {
    pub(super) request: u64,
    pub(super) attempt: u32,
    pub(super) sync: bool,
    /// What it brings, block by block of the plan.
    pub(super) targets: Vec<Target>,
    pub(super) plan: Option<Plan>,
}

/// How a step goes.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum Fate {
    Whole,
    /// This rank never does it.
    Skipped(usize),
    /// This rank stops in the middle of it.
    Raised(usize),
    /// Every rank does it, and what they computed is worthless.
    Refused,
}

#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(super) number: u64,
    pub(super) fate: Fate,
    pub(super) run: [u8; 16],
    /// How often the weights changed, and which the engine holds now.
    pub(super) weights: (u64, u8),
    pub(super) resolved: u64,
    pub(super) urgent: bool,
    pub(super) orders: Vec<Order>,
    pub(super) work: Vec<Work>,
}

/// What a rank says at the end of a step.
#[derive(Clone, Debug, Default)]
pub(crate) struct Results {
    pub(super) step: u64,
    /// Requests whose asynchronous load ended.
    pub(super) ended: Vec<u64>,
    /// Blocks that were not loaded.
    pub(super) failed: BTreeSet<u32>,
}

// === impl Order ===

impl Order {
    /// Blocks of the engine.
    pub(super) fn blocks(&self) -> Vec<u32> {
        self.targets.iter().map(|target| target.block).collect()
    }
}

// === impl Request ===

impl Request {
    pub(super) fn new(spec: Spec) -> Self {
        Self {
            state: State::Waiting,
            attempt: 0,
            kept_from: u64::MAX,
            blocks: Vec::new(),
            computed: 0,
            settled: 0,
            known: spec.prompt,
            log: None,
            saved: 0,
            loaded: Vec::new(),
            promised: Vec::new(),
            refused: false,
            outdated: false,
            loading: 0,
            failed: BTreeSet::new(),
            spec,
        }
    }

    /// Blocks `range` and what they are to hold in namespace `digest`.
    pub(super) fn targets(&self, range: std::ops::Range<usize>, digest: NamespaceDigest) -> Vec<Target> {
        range.map(|at| Target { block: self.blocks[at], hash: self.spec.keys[at], digest }).collect()
    }

    pub(super) fn total(&self) -> usize {
        self.spec.keys.len()
    }

    /// Begins the next attempt, upon blocks of steps from `kept_from` on.
    pub(super) fn begin_attempt(&mut self, kept_from: u64) {
        (self.attempt, self.kept_from) = (self.attempt + 1, kept_from);
    }
}
