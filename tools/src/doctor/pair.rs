//! Two engines' configurations: the differences between their namespaces.

use std::fmt;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use shm_protocol::namespace::{self, Facts};

use super::{DoctorError, FILE_BYTES_MAX, Finding, FindingLevel};

/// vLLM's policy for blocks that could not be loaded; its other policy ends the request.
const RECOMPUTE: &str = "recompute";

/// One engine's namespace entry, as the control socket shows it. A user may add the last two fields, to have
/// them checked too.
#[derive(Debug, Deserialize)]
pub(super) struct PairEngine {
    #[serde(default)]
    name: String,
    facts: Facts,
    namespace: Option<String>,
    #[serde(default)]
    barred: Vec<PairBarred>,
    kv_load_failure_policy: Option<String>,
    #[serde(rename = "PYTHONHASHSEED")]
    seed: Option<String>,
}

/// An engine barred from its namespace by its sidecar.
#[derive(Debug, Deserialize)]
struct PairBarred {
    engine: String,
    difference: Option<f64>,
    limit: Option<f64>,
}

// === impl PairBarred ===

impl fmt::Display for PairBarred {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { engine, difference, limit } = self;
        match difference.zip(*limit) {
            Some((difference, limit)) => {
                write!(f, "engine {engine}: its KV differs by {difference:.2e}, with a limit of {limit:.0e}")
            }
            None => {
                write!(f, "engine {engine}: most engines of this namespace compute other KV than was kept")
            }
        }
    }
}

// === impl PairEngine ===

impl PairEngine {
    pub(super) fn read_file(path: &Path) -> Result<Self, DoctorError> {
        let unreadable = |source| DoctorError::Unreadable { path: path.to_owned(), source };
        let malformed = |text: String| DoctorError::Malformed { path: path.to_owned(), text };
        let mut text = String::new();
        let file = std::fs::File::open(path).map_err(unreadable)?;
        file.take(FILE_BYTES_MAX).read_to_string(&mut text).map_err(unreadable)?;
        let engine: Self = serde_json::from_str(&text).map_err(|error| malformed(error.to_string()))?;
        Ok(engine.with_name(path.display().to_string()))
    }

    /// The same engine with a name for the report.
    pub(super) fn with_name(self, name: String) -> Self {
        Self { name, ..self }
    }

    /// The engine's facts.
    pub(super) fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Checks this engine alone, before any comparison.
    pub(super) fn check_engine(&self, found: &mut Vec<Finding>) {
        let name = &self.name;
        let digest = namespace::digest_facts(&self.facts).to_string();
        if let Some(stated) = self.namespace.as_ref().filter(|stated| **stated != digest) {
            let text = format!("{name} states namespace {stated}, and its facts make {digest}");
            found.push(Finding::bad(
                FindingLevel::Warn,
                "namespace",
                text,
                "pass the entry unchanged, as pillion ctl namespaces NAMESPACE prints it",
            ));
        }
        for closed in &self.barred {
            let text = format!("the namespace of {name} is closed to {closed}");
            let remedy = "its weights, code or settings differ under equal facts: find the difference and restart it, \
                 or set pillion.model_id to a text of its own";
            found.push(Finding::bad(FindingLevel::Fail, "barred", text, remedy));
        }
        let begins = |fact: &str, text| self.facts.get(fact).is_some_and(|value| value.starts_with(text));
        if begins("none_hash", "random ") {
            let text =
                format!("the hashes of {name} start from a random value, so it shares with no other engine");
            let remedy = "set PYTHONHASHSEED to the same value on every engine";
            found.push(Finding::bad(FindingLevel::Fail, "none_hash", text, remedy));
        }
        if begins("weights", "private ") {
            let text = format!("the weights of {name} cannot be digested, so it shares with no other engine");
            let remedy = "set pillion.model_id to the same text on every engine with exactly these weights";
            found.push(Finding::bad(FindingLevel::Fail, "weights", text, remedy));
        }
        if let Some(policy) = self.kv_load_failure_policy.as_ref().filter(|policy| *policy != RECOMPUTE) {
            let text = format!(
                "{name} has kv_load_failure_policy '{policy}': a block that cannot be loaded fails its request"
            );
            let remedy = "set kv_load_failure_policy to recompute in --kv-transfer-config";
            found.push(Finding::bad(FindingLevel::Fail, "kv_load_failure_policy", text, remedy));
        }
    }
}

/// The differences between two engines, the most telling first.
pub(super) fn compare_engines(one: &PairEngine, other: &PairEngine) -> Vec<Finding> {
    let mut found = Vec::new();
    one.check_engine(&mut found);
    other.check_engine(&mut found);
    if (one.seed.is_some() || other.seed.is_some()) && one.seed != other.seed {
        let shown =
            |seed: &Option<String>| seed.as_ref().map_or("not set".into(), |seed| format!("'{seed}'"));
        let text = format!("{} in {}, {} in {}", shown(&one.seed), one.name, shown(&other.seed), other.name);
        found.push(Finding::bad(
            FindingLevel::Fail,
            "PYTHONHASHSEED",
            text,
            "set it to the same value on both",
        ));
    }
    for difference in namespace::list_differences(&one.facts, &other.facts) {
        let shown = |value: Option<&str>| value.map_or("nothing".into(), |value| format!("'{value}'"));
        let (ours, theirs) = (shown(difference.ours), shown(difference.theirs));
        let text = format!("{ours} in {}, {theirs} in {}", one.name, other.name);
        found.push(Finding::bad(FindingLevel::Fail, difference.name, text, difference.remedy));
    }
    if found.is_empty() {
        found.push(Finding::ok("namespace", format!("both are {}", namespace::digest_facts(&one.facts))));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn engine(name: &str, json: &str) -> PairEngine {
        PairEngine { name: name.into(), ..serde_json::from_str(json).unwrap() }
    }

    fn levels(found: &[Finding]) -> Vec<(&str, FindingLevel)> {
        found.iter().map(|finding| (finding.check.as_str(), finding.level)).collect()
    }

    #[test]
    fn equal_facts_share() {
        let text = r#"{"facts": {"model": "tiny", "none_hash": "aa"}, "engines": 1, "kv_load_failure_policy": "recompute"}"#;
        let found = compare_engines(&engine("a", text), &engine("b", text));
        assert_eq!(levels(&found), [("namespace", FindingLevel::Ok)]);
        assert!(super::super::findings_pass(&found));
    }

    #[test]
    fn every_difference_has_its_remedy() {
        let one =
            r#"{"facts": {"model": "tiny", "none_hash": "aa", "block_tokens": "16"}, "PYTHONHASHSEED": "0"}"#;
        let other = r#"{"facts": {"model": "tiny", "none_hash": "random of e", "block_tokens": "32"},
            "kv_load_failure_policy": "fail"}"#;
        let found = compare_engines(&engine("a", one), &engine("b", other));
        let fail = FindingLevel::Fail;
        assert_eq!(
            levels(&found),
            [
                ("none_hash", fail),
                ("kv_load_failure_policy", fail),
                ("PYTHONHASHSEED", fail),
                ("none_hash", fail),
                ("block_tokens", fail),
            ]
        );
        assert!(found.iter().all(|finding| finding.remedy.is_some()));
        assert_eq!(found[4].text, "'16' in a, '32' in b");
        assert!(!super::super::findings_pass(&found));
    }

    #[test]
    fn an_engine_that_its_namespace_is_closed_to_is_named() {
        let open = r#"{"facts": {"model": "tiny"}}"#;
        let closed = r#"{"facts": {"model": "tiny"}, "barred": [
            {"engine": "e1", "difference": 0.4, "limit": 0.02, "layer": 3}, {"engine": "e2"}]}"#;
        let found = compare_engines(&engine("a", open), &engine("b", closed));
        assert_eq!(levels(&found), [("barred", FindingLevel::Fail), ("barred", FindingLevel::Fail)]);
        assert_eq!(
            found[0].text,
            "the namespace of b is closed to engine e1: its KV differs by 4.00e-1, with a limit of 2e-2"
        );
        assert!(
            found[1]
                .text
                .ends_with("engine e2: most engines of this namespace compute other KV than was kept")
        );
    }

    #[test]
    fn a_file_that_was_edited_is_noticed() {
        let edited = format!(r#"{{"namespace": "{}", "facts": {{"model": "tiny"}}}}"#, "0".repeat(32));
        let found = compare_engines(&engine("a", &edited), &engine("b", r#"{"facts": {"model": "tiny"}}"#));
        assert_eq!(levels(&found), [("namespace", FindingLevel::Warn)]);
    }
}
