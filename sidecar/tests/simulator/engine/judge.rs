//! Excused KV: words differing from their keys because a step or a load of the engine failed. The engine may
//! read such words; KV computed from them may not be kept.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::rc::Rc;

use super::request::{Fate, Step, Target, Work};
use crate::origin::WORDS;

#[derive(Debug, Default)]
pub(crate) struct Judge {
    /// Steps not reached by every rank.
    open: VecDeque<Rc<Step>>,
    /// Words of blocks.
    excused: BTreeSet<(u32, usize)>,
    /// Blocks not loaded, by the step waiting for them.
    unloaded: BTreeSet<(u64, u32)>,
    /// The last judged step, and for each piece of its work true if it computes the KV of its keys.
    sound: (u64, Vec<bool>),
}

// === impl Judge ===

impl Judge {
    /// Adds a scheduled step.
    pub(super) fn post(&mut self, step: Rc<Step>) {
        self.open.push_back(step);
    }

    /// Records a block missing from a rank's step.
    pub(super) fn not_loaded(&mut self, step: u64, block: u32) {
        self.unloaded.insert((step, block));
    }

    /// Records a block filled by a load between steps: with the correct KV, or with KV of an earlier
    /// generation.
    pub(super) fn loaded(&mut self, block: u32, right: bool) {
        self.write(block, 0..WORDS, right);
    }

    fn write(&mut self, block: u32, words: Range<usize>, right: bool) {
        for word in words {
            if right {
                self.excused.remove(&(block, word));
            } else {
                self.excused.insert((block, word));
            }
        }
    }

    /// Judges all steps up to this one: every rank has reached its forward pass.
    pub(super) fn reach(&mut self, step: u64) {
        while let Some(next) = self.open.pop_front_if(|open| open.number <= step) {
            self.judge(&next);
        }
    }

    /// Returns true if the work of index `at` computes the KV of its keys, in the step reached last.
    pub(super) fn is_sound(&self, step: &Step, at: usize) -> bool {
        assert_eq!(self.sound.0, step.number, "ranks compute together");
        self.sound.1[at]
    }

    fn judge(&mut self, step: &Step) {
        for block in step.outdated.iter().chain(&step.unfilled) {
            self.write(*block, 0..WORDS, false);
        }
        for target in step.orders.iter().filter(|order| order.sync).flat_map(|order| &order.targets) {
            let right = !self.unloaded.contains(&(step.number, target.block));
            self.loaded(target.block, right);
        }
        self.unloaded.retain(|(number, _)| *number > step.number);
        let sound = step.work.iter().map(|work| self.judge_work(work, step.fate)).collect();
        self.sound = (step.number, sound);
    }

    fn judge_work(&mut self, work: &Work, fate: Fate) -> bool {
        let is_excused =
            |target: &Target| target.words.clone().any(|word| self.excused.contains(&(target.block, word)));
        let sound = fate == Fate::Whole && !work.reads.iter().any(is_excused);
        work.writes.iter().for_each(|target| self.write(target.block, target.words.clone(), sound));
        sound
    }
}
