//! Models with states: blocks of full attention can be used up to a kept state alone.

use std::collections::BTreeMap;

use shm_protocol::namespace::{Facts, STATE_KIND};

use super::{Finding, FindingLevel};

/// Facts with a value for each cache group of one engine.
const OF_GROUPS: [&str; 7] =
    ["block_tokens", "group_kind", "kv_quant", "layers", "page_bytes", "page_form", "state"];

/// The cache groups of one model, as far as their blocks are kept or engines state them.
#[derive(Default)]
struct Groups {
    full_blocks: u64,
    /// The least blocks of a group with states.
    states: Option<u64>,
    /// Tokens of a state's block.
    block_tokens: String,
    model: String,
}

/// Finds models with blocks of full attention and without any state. `kept`: the facts of each namespace, and
/// its blocks in memory and on disks.
pub(super) fn check_states<'a>(kept: impl Iterator<Item = (&'a Facts, u64)>) -> Vec<Finding> {
    let mut models = BTreeMap::<Facts, Groups>::new();
    for (facts, blocks) in kept {
        let common = |(name, value): (&String, &String)| {
            (!OF_GROUPS.contains(&name.as_str())).then(|| (name.clone(), value.clone()))
        };
        let groups = models.entry(facts.iter().filter_map(common).collect()).or_default();
        let fact = |name: &str| facts.get(name).cloned().unwrap_or_default();
        match fact("group_kind").as_str() {
            STATE_KIND => {
                groups.states = Some(groups.states.map_or(blocks, |least| least.min(blocks)));
                groups.block_tokens = fact("block_tokens");
            }
            "full" => (groups.full_blocks, groups.model) = (groups.full_blocks + blocks, fact("model_class")),
            _ => {}
        }
    }
    let without = models.into_values().filter(|groups| groups.full_blocks > 0 && groups.states == Some(0));
    let finding = |Groups { full_blocks, block_tokens, model, .. }| {
        let text = format!(
            "{full_blocks} blocks of full attention are kept for {model}, and no state: without one no prompt hits"
        );
        let remedy = format!(
            "ask for prompts of more than {block_tokens} tokens, or start vLLM with --prefix-match-unit 32; if \
             pillion_saves_lost_to_reuse_total or pillion_saves_dropped_total grows, give vLLM more KV memory, or the sidecar \
             more --dram"
        );
        Finding::bad(FindingLevel::Warn, "states", text, remedy)
    };
    without.map(finding).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(model: &str, kind: &str) -> Facts {
        let facts = [("model_class", model), ("group_kind", kind), ("block_tokens", "784"), ("layers", kind)];
        facts.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
    }

    /// A namespace each for full attention and two groups with states.
    fn found(model: &str, blocks: [u64; 3]) -> Vec<Finding> {
        let mut second = facts(model, STATE_KIND);
        second.insert("layers".into(), "others".into());
        let kept = [facts(model, "full"), facts(model, STATE_KIND), second];
        check_states(kept.iter().zip(blocks))
    }

    #[test]
    fn blocks_of_full_attention_without_a_state_are_a_warning() {
        let found_at =
            |blocks| found("Qwen3Next", blocks).iter().map(|finding| finding.level).collect::<Vec<_>>();
        assert_eq!(found_at([7, 0, 3]), [FindingLevel::Warn], "a hit reads a state of each group");
        assert!(found_at([7, 1, 3]).is_empty() && found_at([0, 0, 0]).is_empty());
        let finding = found("Qwen3Next", [7, 0, 0]).remove(0);
        assert!(finding.text.starts_with("7 blocks") && finding.text.contains("Qwen3Next"), "{finding:?}");
        assert!(finding.remedy.unwrap().contains("more than 784 tokens"));
    }

    /// Another model has states, and one has none.
    #[test]
    fn models_are_told_apart() {
        let (with, without) = (facts("Other", STATE_KIND), facts("Llama", "full"));
        let qwen = [facts("Qwen3Next", "full"), facts("Qwen3Next", STATE_KIND)];
        let kept = [(&with, 5), (&without, 9), (&qwen[0], 7), (&qwen[1], 0)];
        let found = check_states(kept.into_iter());
        assert_eq!(found.len(), 1);
        assert!(found[0].text.contains("7 blocks"), "{found:?}");
    }
}
