//! Hints of clients: blocks of a chain are kept until a time, let go, or brought into DRAM.
//!
//! A hint never takes more than its engine's share, and no query or save waits for one: [`tiers::dram`] has the limits of
//! kept blocks, [`super::sources`] those of blocks on their way.

use std::cell::OnceCell;

use shm_protocol::hints::{Advice, HintAction};
use shm_protocol::key::BlockHash;
use shm_protocol::message::{Outcome, Status};
use tiers::dram::{HintTerms, HintedCounts};

use super::Base;
use super::namespaces::Binding;

/// A hint brings blocks within 1 of so many parts of the room for arrivals: the others are for queries.
const PARTS: u64 = 2;

/// A hint carried out in parts has the outcome of a whole one.
#[derive(Debug, Default)]
pub(super) struct AdviceProgress {
    /// The outcome so far.
    pub(super) found: HintedCounts,
    /// The first words of the keys of the engine's unfinished saves, at the first missing block.
    pub(super) saved: OnceCell<Vec<u64>>,
}

/// Carries advice on the next part of a chain out. Blocks `coming` from saves are kept once they are there.
pub(super) fn advise_part(
    advice: Advice,
    binding: &Binding,
    keys: &[BlockHash],
    coming: impl Fn(&BlockHash) -> bool,
    so_far: &mut HintedCounts,
    base: &mut Base,
) {
    let Binding { whose, namespace, parentless, .. } = *binding;
    let (now_ms, dram) = (base.cx.now_ms, &mut base.cx.dram);
    let found = match advice {
        // A block is of no use without those before it.
        Advice::Retain { .. } | Advice::Pin { .. } if so_far.missing > 0 && !parentless => all_missing(keys),
        Advice::Retain { seconds } | Advice::Pin { seconds } => {
            let until_ms = now_ms.saturating_add(u64::from(seconds) * 1000);
            let terms = HintTerms { until_ms, is_pinned: advice.action() == HintAction::Pin };
            dram.keep_chain(whose, (namespace, keys), (terms, now_ms), !parentless, coming)
        }
        Advice::Demote => dram.demote_chain(whose.holder, namespace, keys),
        Advice::Prefetch if so_far.missing > 0 => all_missing(keys),
        Advice::Prefetch => bring_part(binding, keys, so_far.clipped > 0, base),
    };
    count_hint(advice, found, so_far, base);
}

/// Returns the outcome of a hint without any block.
pub(super) fn all_missing(keys: &[BlockHash]) -> HintedCounts {
    HintedCounts { missing: keys.len() as u64, ..HintedCounts::default() }
}

/// Notes a chain to be demoted at the end of its request, and blocks `coming` from saves as soon as they are there.
pub(super) fn note_demotion(
    binding: &Binding,
    keys: &[BlockHash],
    coming: impl Fn(&BlockHash) -> bool,
    so_far: &mut HintedCounts,
    base: &mut Base,
) {
    let (chain, holder, now_ms) = ((binding.namespace, keys), binding.whose.holder, base.cx.now_ms);
    let found = base.cx.dram.await_demotion(holder, chain, now_ms, coming);
    count_hint(Advice::Demote, found, so_far, base);
}

/// Counts the blocks of a hint's part.
pub(super) fn count_hint(advice: Advice, found: HintedCounts, so_far: &mut HintedCounts, base: &mut Base) {
    *so_far += found;
    base.cx.stats.hints.count_blocks(advice.action(), found);
    base.cx.apply_evictions();
}

/// `is_full`: an earlier part left blocks out, so this one brings none.
fn bring_part(binding: &Binding, keys: &[BlockHash], is_full: bool, base: &mut Base) -> HintedCounts {
    let Base { sources, cx, .. } = base;
    if is_full {
        let found = sources.reach(binding, keys, cx);
        return HintedCounts { done: 0, clipped: found as u64, missing: (keys.len() - found) as u64 };
    }
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
