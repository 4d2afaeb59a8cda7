//! An operator's hint for the chain of a prompt.

use shm_protocol::hints::Advice;
use tiers::dram::{HintedCounts, HolderId};

use super::Base;
use super::hints::{advise_chain, count_hint};
use super::score::{ScoredKeys, find_binding};

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
