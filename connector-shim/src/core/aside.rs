//! The loads and blocks that an engine counts on in the scheduled step. After an internal error of the policy
//! the engine goes on without a cache, and no request waits for ever for a load.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Display;
use std::ops::Range;

use super::policy::{LostLoad, PlannedStep, RequestId, StepPart};

/// First number for requests after the error: no earlier request has such a number.
const FIRST_NUMBER: RequestId = 1 << 62;

/// The engine's expectations while the policy works, and the host's answers after its error. See the module.
#[derive(Debug)]
pub struct Aside {
    /// Tokens of a block, by group.
    sizes: Vec<u32>,
    /// The step being scheduled.
    step: u64,
    weights: u64,
    /// The questions answered for the step, by request: the tokens that the request had, and true if a load
    /// was to run beside the steps.
    asked: HashMap<RequestId, (u32, bool)>,
    /// The request of the last allocation, if the engine takes tokens of the cache for it.
    takes: Option<RequestId>,
    /// The loads counted on in the step, with their blocks by group.
    promised: Vec<(RequestId, Vec<Vec<u32>>)>,
    held: BTreeSet<u32>,
    /// Steps with loads perhaps not begun by the ranks.
    open_loads: Vec<u64>,
    numbers: RequestId,
    /// The error, until the host takes it.
    error: Option<String>,
}

impl Aside {
    /// Begins without an error. `sizes`: tokens of a block, by group.
    pub fn new(sizes: Vec<u32>) -> Self {
        Self {
            sizes,
            step: 1,
            weights: 0,
            asked: HashMap::new(),
            takes: None,
            promised: Vec::new(),
            held: BTreeSet::new(),
            open_loads: Vec::new(),
            numbers: FIRST_NUMBER,
            error: None,
        }
    }

    // --- while the policy decides ---

    /// Notes the answer to a question. The request had `had` tokens; with `beside` a load was to run beside
    /// the steps.
    pub fn asked(&mut self, id: RequestId, had: u32, beside: bool) {
        self.asked.insert(id, (had, beside));
    }

    /// Notes that the engine has allocated blocks for a request, and takes `external` tokens of the cache.
    pub fn allocated(&mut self, id: RequestId, external: u32) {
        self.takes = (external > 0).then_some(id);
    }

    /// Notes the blocks named for an allocation. Without tokens of the cache they are for another connector's
    /// load, and do not count.
    pub fn name_blocks(&mut self, id: RequestId, blocks: &[Vec<u32>]) {
        // Null blocks stand for the blocks before a window.
        let real = |blocks: &Vec<u32>| blocks.iter().copied().filter(|block| *block > 0).collect();
        if self.takes.take_if(|takes| *takes == id).is_some() {
            self.promised.push((id, blocks.iter().map(real).collect()));
        }
    }

    /// Notes that the engine holds these blocks.
    pub fn held(&mut self, blocks: &[u32]) {
        self.held.extend(blocks);
    }

    /// Notes that the engine gives these blocks back.
    pub fn released(&mut self, blocks: &[u32]) {
        self.held.retain(|block| !blocks.contains(block));
    }

    /// Notes the policy's plan of the step.
    pub fn scheduled(&mut self, step: &PlannedStep) {
        (self.step, self.weights) = (step.step + 1, step.weights);
        self.open_loads.clone_from(&step.open_loads);
        if step.parts.iter().any(|part| !part.loads.is_empty() || !part.lost.is_empty()) {
            self.open_loads.push(step.step);
        }
        self.asked.clear();
        self.promised.clear();
    }

    // --- after the error ---

    /// Notes the policy's error.
    pub fn fail(&mut self, error: &impl Display) {
        self.error = Some(format!(
            "PILLION STAYS OUT: its scheduler role met an internal error: {error}. vLLM goes on as if no connector were \
             configured. Restart the engine to use the cache again, and report the error with the lines above it"
        ));
    }

    /// Takes the error, for the engine's log.
    pub fn take_error(&mut self) -> Option<String> {
        self.error.take()
    }

    /// Returns a new number for a request.
    pub fn number(&mut self) -> RequestId {
        self.numbers += 1;
        self.numbers
    }

    /// Returns the ranges of blocks for the engine to name, if it counts on a load for this request.
    pub fn wanted_blocks(&self, id: RequestId) -> Option<Vec<Range<usize>>> {
        let (had, _) = self.asked.get(&id).filter(|_| self.takes == Some(id))?;
        Some(self.sizes.iter().map(|size| (had / size) as usize..usize::MAX).collect())
    }

    /// Takes all held blocks: the engine is to give them back.
    pub fn release_held(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.held).into_iter().collect()
    }

    /// Plans a step without loads. The loads that the engine counts on are reported as failed.
    pub fn plan_step(&mut self) -> PlannedStep {
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

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: RequestId = 1;
    const OTHER: RequestId = 2;

    fn lost(step: &PlannedStep) -> Vec<Vec<(RequestId, Vec<u32>, bool)>> {
        let told = |lost: &LostLoad| (lost.request, lost.blocks.clone(), lost.sync);
        step.parts.iter().map(|part| part.lost.iter().map(told).collect()).collect()
    }

    /// Null blocks, and blocks for another connector's load, are not reported.
    #[test]
    fn loads_counted_on_are_reported_as_failed_once() {
        let mut aside = Aside::new(vec![16, 32]);
        aside.asked(ONE, 64, false);
        aside.allocated(ONE, 32);
        assert_eq!(aside.wanted_blocks(ONE), Some(vec![4..usize::MAX, 2..usize::MAX]));
        aside.name_blocks(ONE, &[vec![5, 6], vec![0, 7]]);
        aside.asked(OTHER, 0, true);
        aside.allocated(OTHER, 0);
        assert_eq!(aside.wanted_blocks(OTHER), None);
        aside.name_blocks(OTHER, &[vec![8], vec![9]]);
        let step = aside.plan_step();
        assert_eq!(lost(&step), [[(ONE, vec![5, 6], true)], [(ONE, vec![7], true)]]);
        assert_eq!(step.step, 1);
        let next = aside.plan_step();
        assert_eq!((lost(&next), next.step), (vec![vec![], vec![]], 2));
    }

    /// The policy had planned it.
    #[test]
    fn loads_of_earlier_steps_are_open_and_not_told_again() {
        let mut aside = Aside::new(vec![16]);
        aside.asked(ONE, 0, false);
        aside.allocated(ONE, 16);
        aside.name_blocks(ONE, &[vec![5]]);
        let mut step =
            PlannedStep { step: 7, parts: vec![StepPart::default()], weights: 3, ..PlannedStep::default() };
        step.parts[0].lost.push(LostLoad { request: ONE, blocks: vec![5], sync: true });
        aside.scheduled(&step);
        let next = aside.plan_step();
        assert_eq!((next.step, next.weights, &next.open_loads[..]), (8, 3, &[7][..]));
        assert_eq!(lost(&next), [vec![]]);
    }

    #[test]
    fn held_blocks_are_given_back() {
        let mut aside = Aside::new(vec![16]);
        aside.held(&[3, 4, 5]);
        aside.released(&[4]);
        assert_eq!((aside.release_held(), aside.release_held()), (vec![3, 5], vec![]));
    }
}
