//! Keys as vLLM makes them: the captured vectors of tests/golden, and the chain against a slow encoder.

use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};
use sha2::Digest;
use shm_protocol::key::{
    Algorithm, Chain, Derivation, ExtraForm, ExtraKey, KeyError, NoneHashRule, none_hash,
};

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

/// Returns the tokens of a case. Long inputs are captured by their rule.
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

/// Derivation without a seed fails if vLLM made its first hash from random bytes.
fn check_none_hash(none: &Value, rule: NoneHashRule) {
    let (algorithm, expected) = (algorithm(none), hex_of(&none["none_hash"]));
    let seeds = [none["PYTHONHASHSEED"].as_str(), none["seed_string"].as_str()];
    for seed in &seeds[..1 + usize::from(seeds[1].is_some())] {
        match none_hash(algorithm, rule, *seed) {
            Ok(hash) => assert_eq!(algorithm.bytes(&hash), expected, "{none}"),
            Err(error) => {
                assert_eq!(error, KeyError::RandomNoneHash(algorithm));
                let cryptographic = algorithm.hash_bytes() == 32;
                assert!(seed.is_none() && !(cryptographic && rule == NoneHashRule::Since029), "{none}");
            }
        }
    }
}

/// Compares every case, appended at once, and returns their number.
fn check(golden: &Value, rule: NoneHashRule, form: ExtraForm) -> usize {
    for none in list(&golden["none_hash"]) {
        check_none_hash(none, rule);
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

#[test]
fn vllm_0_30_has_bare_extra_keys() {
    assert_eq!(check(&golden("vllm-0.30.json"), NoneHashRule::Since029, ExtraForm::Bare), 112);
}

#[test]
fn vllm_0_28_has_the_older_none_hash() {
    assert_eq!(check(&golden("vllm-0.28.json"), NoneHashRule::Before029, ExtraForm::Bare), 112);
}

fn derive(request: &Value) -> Result<Value, String> {
    let request: Derivation = serde_json::from_value(request.clone()).map_err(|error| error.to_string())?;
    let derived = request.derive().map_err(|error| error.to_string())?;
    Ok(serde_json::to_value(derived).expect("JSON"))
}

#[test]
fn a_coarser_block_has_its_last_hash_and_the_tail_goes_on() {
    let request = |size: u32, count: u32, hashed: Option<u32>, group: u32| {
        json!({"algo": "xxhash_cbor", "seed": "0", "rule": "0.29", "form": "tagged", "block_size": size,
            "token_ids": (0..count).collect::<Vec<_>>(), "extra_keys": null, "group": group, "hash_block_size": hashed})
    };
    let fine = derive(&request(4, 30, None, 0)).expect("keys");
    assert_eq!(list(&fine["hashes"]).len(), 7);
    let coarse = derive(&request(12, 30, Some(4), 0)).expect("keys");
    assert_eq!(coarse["hashes"], json!([fine["hashes"][2], fine["hashes"][5]]));
    assert_eq!(coarse["tail"], fine["tail"]);
    let whole = derive(&request(12, 28, Some(4), 0)).expect("keys");
    assert_eq!(whole["tail"], fine["hashes"][6], "tokens remain, and they are whole hashed blocks");
    assert_eq!(derive(&request(12, 24, Some(4), 0)).expect("keys")["tail"], Value::Null);
    let grouped = derive(&request(12, 30, Some(4), 258)).expect("keys");
    let suffixed = |hash: &Value| format!("{}00000102", hash.as_str().expect("hex"));
    assert_eq!(grouped["hashes"][1], suffixed(&fine["hashes"][5]));
    assert_eq!(grouped["tail"], suffixed(&fine["tail"]));
    assert_eq!(grouped["none_hash"], fine["none_hash"]);
}

#[test]
fn a_question_that_has_no_answer_says_why() {
    let good = json!({"algo": "sha256", "block_size": 2, "token_ids": [1, 2, 3]});
    assert!(derive(&good).is_ok());
    let cases = [
        ("algo", json!("md5"), "pass one of xxhash_cbor"),
        ("algo", json!("xxhash"), "set PYTHONHASHSEED"),
        ("rule", json!("0.28"), "set PYTHONHASHSEED"),
        ("rule", json!("0.27"), "pass one of 0.29"),
        ("form", json!("old"), "pass one of tagged"),
        ("seed", json!("0".repeat(300)), "has 300 bytes"),
        ("block_size", json!(0), "1 to 4096"),
        ("block_size", json!(4097), "1 to 4096"),
        ("hash_block_size", json!(0), "1 to 4096"),
        ("hash_block_size", json!(4), "must be a multiple"),
        ("token_ids", json!([-1]), "-1"),
        ("tokens", json!([]), "unknown field"),
        ("extra_keys", json!([]), "0 blocks are given for 1 full blocks"),
        ("extra_keys", json!([null, null, null]), "3 blocks are given for 1 full"),
        ("extra_keys", json!([["a name"]]), "has no tag"),
        ("extra_keys", json!([[["lora", "a", "p"], ["cache_salt", "s"]]]), "sha256_cbor"),
        ("extra_keys", json!([[["lora", "a", "a"]]]), "sha256_cbor"),
        ("extra_keys", json!([[["lora", "a", "b".repeat(5000)]]]), "5005 bytes"),
        ("extra_keys", json!([[["loro", "a", "b"]]]), "'loro' is not a kind"),
        ("extra_keys", json!([[["lora"]]]), "an extra key has"),
        ("extra_keys", json!([[{"bytes": "0"}]]), "not hex digits"),
        ("extra_keys", json!([[{"byte": "00"}]]), "{\"bytes\": hex}"),
    ];
    for (field, value, expected) in cases {
        let mut request = good.clone();
        request[field] = value;
        let error = derive(&request).expect_err(field);
        assert!(error.contains(expected), "{field}: {error}");
    }
}

/// Canonical CBOR by a library, for a block with tagged extra keys.
fn slowly_encoded(parent: &[u8], tokens: &[u64], extra: &[ExtraKey]) -> Vec<u8> {
    use ciborium::Value::{Array, Bytes, Integer, Null, Text};
    let key = |key: &ExtraKey| match key.clone() {
        ExtraKey::Lora { name, path } => Array(vec![Text("lora".into()), Text(name), Text(path)]),
        ExtraKey::Multimodal { identifier, offset } => {
            Array(vec![Text("mm".into()), Text(identifier), Integer(offset.into())])
        }
        ExtraKey::CacheSalt(salt) => Array(vec![Text("cache_salt".into()), Text(salt)]),
        ExtraKey::PromptEmbeds(digest) => Array(vec![Text("prompt_embeds".into()), Bytes(digest)]),
        ExtraKey::Text(_) => unreachable!("never tagged"),
    };
    let extra = if extra.is_empty() { Null } else { Array(extra.iter().map(key).collect()) };
    let tokens = Array(tokens.iter().map(|token| Integer((*token).into())).collect());
    let mut bytes = Vec::new();
    ciborium::into_writer(&Array(vec![Bytes(parent.to_vec()), tokens, extra]), &mut bytes).expect("a vector");
    bytes
}

/// Tokens of every width.
fn any_token() -> impl Strategy<Value = u64> {
    (any::<u64>(), 0..64u32).prop_map(|(token, shift)| token >> shift)
}

fn any_key() -> impl Strategy<Value = ExtraKey> {
    let text = || prop::collection::vec(any::<char>(), 0..300).prop_map(String::from_iter);
    prop_oneof![
        (text(), text()).prop_map(|(name, path)| ExtraKey::Lora { name, path }),
        (text(), any::<i64>(), 0..64u32).prop_map(|(identifier, offset, shift)| ExtraKey::Multimodal {
            identifier,
            offset: offset >> shift
        }),
        text().prop_map(ExtraKey::CacheSalt),
        prop::collection::vec(any::<u8>(), 0..70).prop_map(ExtraKey::PromptEmbeds),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    /// A slow encoder gives the same hashes.
    #[test]
    fn cbor_is_canonical(
        tokens in prop::collection::vec(any_token(), 1..70),
        size in 1..40usize,
        keys in prop::collection::vec(prop::collection::vec(any_key(), 0..4), 70),
    ) {
        let mut chain = Chain::new(Algorithm::Sha256Cbor, &[9; 32], size as u32).expect("a chain");
        chain.append_with(&tokens, &keys).expect("known keys");
        let mut parent = vec![9; 32];
        let mut expected = Vec::new();
        for (block, keys) in tokens.chunks(size).zip(&keys) {
            parent = sha2::Sha256::digest(slowly_encoded(&parent, block, keys)).to_vec();
            expected.push(parent.clone());
        }
        let full = tokens.len() / size;
        let mut hashes: Vec<Vec<u8>> = chain.hashes().iter().map(|hash| hash.0.to_vec()).collect();
        prop_assert_eq!(hashes.len(), full);
        hashes.extend(chain.tail_with(&keys[full]).expect("known keys").map(|hash| hash.0.to_vec()));
        prop_assert_eq!(hashes, expected);
    }

    /// The hashes are the same for any split of the tokens.
    #[test]
    fn any_split_is_the_same_chain(
        tokens in prop::collection::vec(any_token(), 0..200),
        cuts in prop::collection::vec(0..200usize, 0..8),
        size in 1..20u32,
        algorithm in prop::sample::select(
            vec![Algorithm::XxhashCbor, Algorithm::Sha256Cbor, Algorithm::Sha256, Algorithm::Xxhash]
        ),
    ) {
        let keys: Vec<_> = (0..200).map(|offset| [ExtraKey::Multimodal { identifier: "i".into(), offset }]).collect();
        let empty = Chain::new(algorithm, &[3; 16], size).expect("a chain");
        let mut whole = empty.clone();
        whole.append_with(&tokens, &keys).expect("known keys");
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(tokens.len())).collect();
        cuts.extend([0, tokens.len()]);
        cuts.sort_unstable();
        let mut split = empty;
        for ends in cuts.windows(2) {
            split.append_with(&tokens[ends[0]..ends[1]], &keys[split.hashes().len()..]).expect("known keys");
        }
        prop_assert_eq!(split.hashes(), whole.hashes());
        prop_assert_eq!(split.hashes().len(), tokens.len() / size as usize);
        prop_assert_eq!(split.tail(), whole.tail());
        prop_assert_eq!(split.tail().is_some(), tokens.len() % size as usize > 0);
    }
}
