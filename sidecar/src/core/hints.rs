//! Hints of clients: blocks of a chain are kept until a time, let go, or brought into DRAM.
//!
//! A hint never takes more than its engine's share, and no query or save waits for one: [`tiers::dram`] has the limits of
//! kept blocks, [`super::sources`] those of blocks on their way.

use shm_protocol::hints::{Advice, HintAction};
use shm_protocol::key::BlockHash;
use shm_protocol::message::{Outcome, Status};
use tiers::dram::{HintTerms, HintedCounts, HolderId};

use super::Base;
use super::namespaces::Binding;
use super::score::{ScoredKeys, find_binding};

/// A hint brings blocks within 1 of so many parts of the room for arrivals: the others are for queries.
const PARTS: u64 = 2;

/// Blocks of hints by action, and there done, clipped and missing.
#[derive(Copy, Clone, Debug, Default, Eq, PartialEq)]
pub struct HintStats([HintedCounts; HintAction::ALL.len()]);

// === impl HintStats ===

impl HintStats {
    /// Returns the counts of each action.
    pub fn by_action(&self) -> impl Iterator<Item = (HintAction, HintedCounts)> + '_ {
        HintAction::ALL.into_iter().zip(self.0)
    }

    fn count(&mut self, action: HintAction, found: HintedCounts) {
        let counts = &mut self.0[action as usize];
        counts.done += found.done;
        counts.clipped += found.clipped;
        counts.missing += found.missing;
    }
}

/// Carries advice on a chain out. Of its blocks those `coming` from saves are kept once they are there.
pub(super) fn advise_chain(
    advice: Advice,
    binding: &Binding,
    keys: &[BlockHash],
    coming: impl Fn(&BlockHash) -> bool,
    base: &mut Base,
) -> HintedCounts {
    let Binding { whose, namespace, parentless, .. } = *binding;
    let (now_ms, dram) = (base.cx.now_ms, &mut base.cx.dram);
    let found = match advice {
        Advice::Retain { seconds } | Advice::Pin { seconds } => {
            let until_ms = now_ms.saturating_add(u64::from(seconds) * 1000);
            let terms = HintTerms { until_ms, is_pinned: advice.action() == HintAction::Pin };
            dram.keep_chain(whose, (namespace, keys), (terms, now_ms), !parentless, coming)
        }
        Advice::Demote => dram.demote_chain(whose.holder, namespace, keys),
        Advice::Prefetch => bring_chain(binding, keys, base),
    };
    count_hint(advice, found, base);
    found
}

/// Carries an operator's advice out. Kept blocks count as of an engine of their own, also without any engine, so they stay
/// when engines restart; fetched ones count for the engine that would get the prompt.
pub(super) fn advise_operator(advice: Advice, chain: &ScoredKeys, base: &mut Base) -> HintedCounts {
    let missing = HintedCounts { missing: chain.keys.len() as u64, ..HintedCounts::default() };
    if base.cx.draining {
        return missing;
    }
    let (engine, mut binding) = find_binding(chain, base);
    match advice {
        Advice::Prefetch if engine.is_none() => {
            count_hint(advice, missing, base);
            return missing;
        }
        Advice::Prefetch => {}
        _ => binding.whose.holder = HolderId::NOBODY,
    }
    advise_chain(advice, &binding, &chain.keys, |_| false, base)
}

/// Notes a chain to be demoted at the end of its request: of its blocks those `coming` from saves once they are there.
pub(super) fn note_demotion(
    binding: &Binding,
    keys: &[BlockHash],
    coming: impl Fn(&BlockHash) -> bool,
    base: &mut Base,
) -> HintedCounts {
    let (chain, holder, now_ms) = ((binding.namespace, keys), binding.whose.holder, base.cx.now_ms);
    let found = base.cx.dram.await_demotion(holder, chain, now_ms, coming);
    count_hint(Advice::Demote, found, base);
    found
}

fn count_hint(advice: Advice, found: HintedCounts, base: &mut Base) {
    base.cx.stats.hints.count(advice.action(), found);
    base.cx.apply_evictions();
}

fn bring_chain(binding: &Binding, keys: &[BlockHash], base: &mut Base) -> HintedCounts {
    let Base { sources, cx, .. } = base;
    let brought = sources.bring(binding, keys, PARTS, false, cx);
    let done = brought.held.len() + brought.coming.len();
    brought.held.into_iter().for_each(|slot| cx.dram.unhold(slot, binding.whose.holder));
    let found = sources.reach(binding, keys, cx).max(done);
    HintedCounts { done: done as u64, clipped: (found - done) as u64, missing: (keys.len() - found) as u64 }
}

/// Returns the answer of an operation for these blocks.
pub(super) fn outcome_of(op: u64, found: HintedCounts) -> Outcome {
    let status = match found {
        HintedCounts { clipped: 1.., .. } => Status::Clipped,
        HintedCounts { missing: 1.., .. } => Status::Absent,
        _ => Status::Ok,
    };
    Outcome { op: op as u32, value: found.done as u32, status }
}
