//! Prompts whose keys a sidecar derives from its engine's facts.

use shm_protocol::key::{BlockHash, Chain, NoneHashRule, none_hash};
use shm_protocol::namespace::Facts;

/// Tokens of a block.
pub(crate) const TOKENS: usize = 16;

/// Facts of an engine whose keys anybody can derive.
pub(crate) fn facts(model: &str) -> Facts {
    let algorithm = "xxhash_cbor".parse().unwrap();
    let first = none_hash(algorithm, NoneHashRule::Since029, Some("0")).unwrap();
    let first: String = algorithm.vllm_hash(&first).iter().map(|byte| format!("{byte:02x}")).collect();
    let tokens = TOKENS.to_string();
    let stated = [
        ("model", model),
        ("hash_algorithm", "xxhash_cbor+sha256"),
        ("none_hash", &first),
        ("extra_keys", "tagged"),
        ("block_tokens", &tokens),
    ];
    stated.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The keys of a prompt's full blocks.
pub(crate) fn keys_of(tokens: &[u32]) -> Vec<BlockHash> {
    let (_, mut chain) = Chain::of_facts(&facts("")).unwrap();
    chain.append(tokens);
    chain.hashes().to_vec()
}
