//! An operator's hint for the chain of a prompt.

use shm_protocol::hints::Advice;
use tiers::dram::{HintedCounts, HolderId};

use super::Base;
use super::hints::{advise_part, all_missing, count_hint};
use super::score::{ScoredKeys, find_binding};

/// Keys of one part: less than 1 ms.
const PART_KEYS: usize = 1024;

/// A hint that is carried out in parts. Kept blocks count as of an engine of their own, also without any engine, so they stay
/// when engines restart; fetched ones count for the engine that would get the prompt.
#[derive(Debug)]
pub struct HintTask {
    advice: Advice,
    chain: Box<ScoredKeys>,
    /// Number of keys already looked at: the first ones, or the last ones of a demotion.
    done_keys: usize,
    found: HintedCounts,
}

// === impl HintTask ===

impl HintTask {
    pub fn new(advice: Advice, chain: Box<ScoredKeys>) -> Self {
        Self { advice, chain, done_keys: 0, found: HintedCounts::default() }
    }

    /// Returns the outcome after the last part.
    pub(super) fn advise_part(&mut self, base: &mut Base) -> Option<HintedCounts> {
        let (all, begin) = (self.chain.keys.len(), self.done_keys);
        let end = all.min(begin + PART_KEYS);
        let keys = match self.advice {
            Advice::Demote => &self.chain.keys[all - end..all - begin],
            _ => &self.chain.keys[begin..end],
        };
        self.done_keys = end;
        let (engine, mut binding) = find_binding(&self.chain, base);
        match self.advice {
            _ if base.cx.draining => self.found += all_missing(keys),
            Advice::Prefetch if engine.is_none() => {
                count_hint(self.advice, all_missing(keys), &mut self.found, base);
            }
            advice => {
                if advice != Advice::Prefetch {
                    binding.whose.holder = HolderId::NOBODY;
                }
                advise_part(advice, &binding, keys, |_| false, &mut self.found, base);
            }
        }
        (end == all).then_some(self.found)
    }
}
