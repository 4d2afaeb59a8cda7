//! The loads and blocks an engine counts on in the scheduled step. After an internal error of the policy the engine goes on without a cache,
//! and no request waits for a load without an end.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Display;
use std::ops::Range;

use crate::core::policy::{LostLoad, PlannedStep, RequestId, StepPart};

/// Numbers of requests that arrive after the error: no other request has them.
const FIRST_NUMBER: RequestId = 1 << 62;

/// See the module.
#[derive(Debug)]
pub(super) struct Aside {
    /// Tokens of a block, by group.
    sizes: Vec<u32>,
    /// The step being scheduled, and how often the weights may have changed.
    step: u64,
    weights: u64,
    /// By the questions for the step: the tokens the request had, and whether a load was to be beside the steps.
    asked: HashMap<RequestId, (u32, bool)>,
    /// The loads counted on in the step.
    promised: Vec<(RequestId, Vec<Vec<u32>>)>,
    held: BTreeSet<u32>,
    /// Steps with loads perhaps not begun by ranks.
    open_loads: Vec<u64>,
    numbers: RequestId,
    /// The error, until it is told.
    error: Option<String>,
}

impl Aside {
    pub(super) fn new(sizes: Vec<u32>) -> Self {
        Self {
            sizes,
            step: 1,
            weights: 0,
            asked: HashMap::new(),
            promised: Vec::new(),
            held: BTreeSet::new(),
            open_loads: Vec::new(),
            numbers: FIRST_NUMBER,
            error: None,
        }
    }

    // --- while the policy decides ---

    pub(super) fn asked(&mut self, id: RequestId, had: u32, beside: bool) {
        self.asked.insert(id, (had, beside));
    }

    /// The engine hands over these blocks for a load.
    pub(super) fn promised(&mut self, id: RequestId, blocks: &[Vec<u32>]) {
        // Null blocks stand for those before a window.
        let real = |blocks: &Vec<u32>| blocks.iter().copied().filter(|block| *block > 0).collect();
        self.promised.push((id, blocks.iter().map(real).collect()));
    }

    pub(super) fn held(&mut self, blocks: &[u32]) {
        self.held.extend(blocks);
    }

    pub(super) fn released(&mut self, blocks: &[u32]) {
        self.held.retain(|block| !blocks.contains(block));
    }

    pub(super) fn scheduled(&mut self, step: &PlannedStep) {
        (self.step, self.weights) = (step.step + 1, step.weights);
        self.open_loads.clone_from(&step.open_loads);
        if step.parts.iter().any(|part| !part.loads.is_empty() || !part.lost.is_empty()) {
            self.open_loads.push(step.step);
        }
        self.asked.clear();
        self.promised.clear();
    }

    // --- after the error ---

    /// The policy has met this error.
    pub(super) fn fail(&mut self, error: &impl Display) {
        self.error = Some(format!(
            "PILLION STAYS OUT: its scheduler role met an internal error: {error}. vLLM goes on as if no connector were \
             configured. Restart the engine to use the cache again, and report the error with the lines above it"
        ));
    }

    pub(super) fn take_error(&mut self) -> Option<String> {
        self.error.take()
    }

    /// A request's number.
    pub(super) fn number(&mut self) -> RequestId {
        self.numbers += 1;
        self.numbers
    }

    /// The blocks to name of a load that the engine counts on.
    pub(super) fn wanted(&self, id: RequestId, external: u32) -> Option<Vec<Range<usize>>> {
        let (had, _) = self.asked.get(&id).filter(|_| external > 0)?;
        Some(self.sizes.iter().map(|size| (had / size) as usize..usize::MAX).collect())
    }

    /// The blocks to give back: all of them.
    pub(super) fn release_held(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.held).into_iter().collect()
    }

    /// A step without loads: those counted on are reported as failed.
    pub(super) fn plan_step(&mut self) -> PlannedStep {
        let mut parts = vec![StepPart::default(); self.sizes.len()];
        for (request, blocks) in self.promised.drain(..) {
            let sync = self.asked.get(&request).is_some_and(|(_, beside)| !beside);
            for (part, blocks) in parts.iter_mut().zip(blocks) {
                part.lost.push(LostLoad { request, blocks, sync });
            }
        }
        self.asked.clear();
        let step = self.step;
        self.step += 1;
        let open_loads = self.open_loads.clone();
        PlannedStep { step, parts, open_loads, weights: self.weights, ..PlannedStep::default() }
    }
}
