//! The form of a namespace's keys, as its facts state it.

use std::collections::BTreeMap;

use super::{Algorithm, Chain, ExtraForm, KeyError};

/// Returns the tokens of a block by the facts of a namespace.
pub fn read_block_tokens(facts: &BTreeMap<String, String>) -> Result<u32, KeyError> {
    let tokens = stated(facts, "block_tokens")?;
    tokens
        .parse()
        .ok()
        .filter(|tokens| *tokens > 0)
        .ok_or_else(|| KeyError::BlockTokensFact(tokens.to_owned()))
}

fn stated<'a>(facts: &'a BTreeMap<String, String>, name: &'static str) -> Result<&'a str, KeyError> {
    facts.get(name).map(String::as_str).ok_or(KeyError::Unstated(name))
}

// === impl Chain ===

impl Chain {
    /// Makes the empty chain of a namespace, and returns its algorithm with it. Fails if a fact is missing, or if
    /// it is of use to one engine alone.
    pub fn of_facts(facts: &BTreeMap<String, String>) -> Result<(Algorithm, Self), KeyError> {
        let algorithm = Algorithm::of_fact(stated(facts, "hash_algorithm")?)?;
        let form: ExtraForm = stated(facts, "extra_keys")?.parse()?;
        let none_hash = stated(facts, "none_hash")?;
        let first = hex::decode(none_hash).map_err(|_| KeyError::NoneHashFact(none_hash.to_owned()))?;
        Ok((algorithm, Self::new(algorithm, &first, read_block_tokens(facts)?)?.with_form(form)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{NoneHashRule, none_hash};
    use super::*;

    #[test]
    fn facts_make_the_chain_of_their_engines_or_name_the_missing_one() {
        let first = none_hash(Algorithm::Sha256Cbor, NoneHashRule::Since029, Some("7")).unwrap();
        let named = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let facts = BTreeMap::from([
            named("hash_algorithm", "sha256_cbor"),
            named("none_hash", &hex::encode(first.0)),
            named("extra_keys", "tagged"),
            named("block_tokens", "4"),
        ]);
        let (algorithm, mut chain) = Chain::of_facts(&facts).unwrap();
        let mut same = Chain::new(algorithm, &first.0, 4).unwrap();
        let tokens: Vec<u32> = (0..9).collect();
        chain.append(&tokens);
        same.append(&tokens);
        assert_eq!((chain.hashes(), chain.hashes().len()), (same.hashes(), 2));
        for name in facts.keys() {
            let mut fewer = facts.clone();
            fewer.remove(name);
            assert!(Chain::of_facts(&fewer).unwrap_err().to_string().contains(&format!("states no {name}")));
        }
        let with = |name: &str, value: &str| {
            let mut others = facts.clone();
            others.extend([named(name, value)]);
            Chain::of_facts(&others).unwrap_err().to_string()
        };
        assert!(with("none_hash", "random of e").contains("set PYTHONHASHSEED"));
        for wrong in ["", "x", "0", "-1"] {
            assert!(with("block_tokens", wrong).contains(&format!("block_tokens is '{wrong}'")), "{wrong}");
        }
    }
}
