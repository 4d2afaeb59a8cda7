//! Keys as vLLM makes them: the captured vectors of tests/golden, and the chain against itself.

use std::path::Path;

use serde_json::Value;
use shm_protocol::key::{Algorithm, Chain, ExtraForm, ExtraKey, NoneHashRule, none_hash};

fn golden(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).expect("JSON")
}

fn hex_of(value: &Value) -> Vec<u8> {
    hex::decode(value.as_str().expect("a text")).expect("hex digits")
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

fn algorithm(of: &Value) -> Algorithm {
    of["algo"].as_str().expect("a name").parse().expect("an algorithm")
}

/// Long inputs are captured by their rule.
fn tokens(case: &Value) -> Vec<u64> {
    if let Some(tokens) = case["token_ids"].as_array() {
        return tokens.iter().map(|token| token.as_u64().expect("a token")).collect();
    }
    let count = case["num_tokens"].as_u64().expect("a count");
    match case["desc"]["tokens"].as_str().expect("a rule") {
        "range(n)" => (0..count).collect(),
        "(i*2654435761)%151936 for i in range(1000)" => {
            (0..count).map(|i| (i * 2_654_435_761) % 151_936).collect()
        }
        rule => panic!("unknown rule {rule}"),
    }
}

fn extra_keys(block: &Value) -> Vec<ExtraKey> {
    let keys: Option<Vec<ExtraKey>> =
        serde_json::from_value(block["extra_keys"].clone()).expect("extra keys");
    keys.unwrap_or_default()
}

/// Every case, appended at once.
fn check(golden: &Value, rule: NoneHashRule, form: ExtraForm) -> usize {
    for none in list(&golden["none_hash"]) {
        let Some(seed) = none["seed_string"].as_str() else { continue };
        let algorithm = algorithm(none);
        let hash = none_hash(algorithm, rule, Some(seed)).expect("a seed is given");
        assert_eq!(algorithm.bytes(&hash), hex_of(&none["none_hash"]), "{none}");
    }
    for case in list(&golden["cases"]) {
        let block_tokens = case["block_size"].as_u64().expect("a size") as u32;
        let algorithm = algorithm(case);
        let mut chain = Chain::new(algorithm, &hex_of(&case["none_hash"]), block_tokens)
            .expect("a chain")
            .with_form(form);
        let blocks = list(&case["blocks"]);
        let extra: Vec<_> = blocks.iter().map(extra_keys).collect();
        chain.append_with(&tokens(case), &extra).expect("known keys");
        let hashes: Vec<_> = chain.hashes().iter().map(|hash| algorithm.bytes(hash).to_vec()).collect();
        let expected: Vec<_> = blocks.iter().map(|block| hex_of(&block["hash"])).collect();
        assert_eq!(hashes, expected, "{algorithm} {} {block_tokens}", case["name"]);
    }
    list(&golden["cases"]).len()
}

#[test]
fn vllm_0_32() {
    assert_eq!(check(&golden("vllm-0.32.json"), NoneHashRule::Since029, ExtraForm::Tagged), 130);
}
