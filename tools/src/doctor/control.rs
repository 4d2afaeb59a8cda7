//! A running sidecar's engines and blocks, by its control socket.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use shm_protocol::prefill::PrefillRate;

use super::pair::PairEngine;
use super::{Finding, FindingLevel, states};
use crate::ctl::{self, ControlTarget, CtlError};

/// The sidecar's answer.
#[derive(Deserialize)]
struct NamespacesPage {
    namespaces: Vec<PageNamespace>,
    peers: Vec<PagePeer>,
}

#[derive(Deserialize)]
struct PageNamespace {
    namespace: String,
    memory_blocks: u64,
    #[serde(default)]
    disk_blocks: u64,
    #[serde(flatten)]
    engine: Option<PairEngine>,
}

#[derive(Deserialize)]
struct PagePeer {
    blocks: u64,
}

/// Hits forecast for memory of other sizes, by multiples of `--dram`.
#[derive(Deserialize)]
struct ForecastPage {
    asked_blocks: u64,
    hit_blocks: BTreeMap<String, u64>,
}

/// Rates of engines and sources.
#[derive(Deserialize)]
struct RatesPage {
    engines: Vec<EngineRate>,
    sources: Vec<SourceRate>,
}

#[derive(Deserialize)]
struct EngineRate {
    engine: String,
    token_ns: f32,
    slope_ns: f32,
    token_bytes: f64,
}

#[derive(Deserialize)]
struct SourceRate {
    source: String,
    bytes_per_second: f64,
}

/// Checks the kept blocks, and the engines of every namespace.
pub(super) fn check_namespaces(socket: &Path) -> Vec<Finding> {
    let target = ControlTarget::Unix(socket.to_owned());
    let get = |path| ctl::send_request(&target, "GET", path, "");
    match get("/namespaces") {
        Ok(page) => {
            let mut found = judge(&page);
            // An older sidecar has no such pages.
            found.extend(get("/forecast").ok().as_deref().and_then(forecast_finding));
            found.extend(get("/rates").ok().as_deref().map(weigh).unwrap_or_default());
            found
        }
        Err(error) => vec![unanswered_finding(&error)],
    }
}

/// An error with the remedy at its end.
fn unanswered_finding(error: &CtlError) -> Finding {
    let text = error.to_string();
    let (text, remedy) = text.split_once(": ").unwrap_or((&text, "look at the sidecar's log"));
    Finding::bad(FindingLevel::Warn, "control", format!("namespaces were not checked: {text}"), remedy)
}

fn judge(page: &str) -> Vec<Finding> {
    let NamespacesPage { namespaces, peers } = match serde_json::from_str(page) {
        Ok(page) => page,
        Err(error) => return vec![unanswered_finding(&CtlError::Answer(error.to_string()))],
    };
    let sum = |blocks: fn(&PageNamespace) -> u64| namespaces.iter().map(blocks).sum::<u64>();
    let known: u64 = peers.iter().map(|peer| peer.blocks).sum();
    let text = format!(
        "{} namespaces, {} blocks in memory and {} on disks; {} peers are known to keep {known}",
        namespaces.len(),
        sum(|namespace| namespace.memory_blocks),
        sum(|namespace| namespace.disk_blocks),
        peers.len()
    );
    let mut found = vec![Finding::ok("control", text)];
    let kept = namespaces.iter().filter_map(|namespace| {
        let blocks = namespace.memory_blocks + namespace.disk_blocks;
        Some((namespace.engine.as_ref()?.facts(), blocks))
    });
    found.extend(states::check_states(kept));
    for PageNamespace { namespace, engine, .. } in namespaces {
        let engine = engine.map(|engine| engine.with_name(format!("namespace {namespace}")));
        engine.iter().for_each(|engine| engine.check_engine(&mut found));
    }
    found
}

/// The hits forecast for other sizes of `--dram`; `None` before any query.
fn forecast_finding(page: &str) -> Option<Finding> {
    let ForecastPage { asked_blocks, hit_blocks } = serde_json::from_str(page).ok()?;
    let share = |(room, blocks): (&String, &u64)| {
        format!("{room}: {:.1} %", 100.0 * *blocks as f64 / asked_blocks as f64)
    };
    let shares: Vec<String> = hit_blocks.iter().map(share).collect();
    let text = format!(
        "of {asked_blocks} blocks requested, pools of other sizes would have found, by multiples of --dram, {}",
        shares.join(", ")
    );
    (asked_blocks > 0).then(|| Finding::ok("dram", text))
}

/// The worth of each disk and peer to each engine, as far as both rates are known.
fn weigh(page: &str) -> Vec<Finding> {
    let Ok(RatesPage { engines, sources }) = serde_json::from_str(page) else { return Vec::new() };
    let mut found = Vec::new();
    for EngineRate { engine, token_ns, slope_ns, token_bytes } in &engines {
        let Some(rate) = PrefillRate::new(*token_ns, *slope_ns) else { continue };
        for SourceRate { source, bytes_per_second } in &sources {
            let gives = bytes_per_second / token_bytes.max(1.0);
            let pays = match rate.even_tokens(gives) {
                Some(0) => "it pays for every prompt".to_owned(),
                Some(even) => format!("it pays for prompts longer than {even} tokens"),
                None => "it pays for no prompt, and its blocks are not waited for".to_owned(),
            };
            let computes = rate.tokens_per_second(0);
            let text = format!(
                "{source} gives {gives:.0} tokens/s to {engine}, which computes {computes:.0}: {pays}"
            );
            found.push(Finding::ok("rates", text));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_that_share_with_nobody_are_named() {
        let page = r#"{"peers": [{"peer": "b", "blocks": 7}], "namespaces": [
            {"namespace": "0a", "memory_blocks": 3, "facts": {"model": "tiny"}, "engines": 1, "block_bytes": 1},
            {"namespace": "0b", "memory_blocks": 2, "disk_blocks": 4},
            {"namespace": "0c", "memory_blocks": 0, "facts": {"none_hash": "random of e"}, "engines": 1, "block_bytes": 1,
             "barred": [{"engine": "e1"}]}]}"#;
        let found = judge(page);
        assert_eq!(
            found[0].text,
            "3 namespaces, 5 blocks in memory and 4 on disks; 1 peers are known to keep 7"
        );
        let bad: Vec<_> = found[1..].iter().map(|finding| (finding.check.as_str(), finding.level)).collect();
        assert_eq!(bad, [("barred", FindingLevel::Fail), ("none_hash", FindingLevel::Fail)], "{found:?}");
        assert!(found[1].text.contains("namespace 0c"), "{found:?}");
        assert_eq!(judge("[]")[0].level, FindingLevel::Warn);
    }

    #[test]
    fn what_more_memory_would_find_is_told_once_anything_was_asked_for() {
        let page =
            |asked: u64| format!(r#"{{"asked_blocks": {asked}, "hit_blocks": {{"0.5": 20, "2": 50}}}}"#);
        assert!(forecast_finding(&page(200)).unwrap().text.ends_with("0.5: 10.0 %, 2: 25.0 %"));
        assert_eq!(forecast_finding(&page(0)), None);
    }

    #[test]
    fn disks_and_peers_are_weighed_against_each_engine() {
        let page = r#"{"engines": [{"engine": "e", "token_ns": 50000.0, "slope_ns": 1.0, "token_bytes": 100000.0}],
            "sources": [{"source": "disk /a", "bytes_per_second": 2000000000}, {"source": "peer b", "bytes_per_second": 1000000000}]}"#;
        let texts: Vec<String> = weigh(page).into_iter().map(|finding| finding.text).collect();
        assert!(
            texts[0].ends_with(
                "disk /a gives 20000 tokens/s to e, which computes 20000: it pays for every prompt"
            )
        );
        assert!(texts[1].ends_with("it pays for prompts longer than 100000 tokens"), "{texts:?}");
        assert!(weigh("{}").is_empty());
        let flat = page.replace("\"slope_ns\": 1.0", "\"slope_ns\": 0.0");
        assert!(weigh(&flat)[1].text.contains("no prompt"));
    }

    #[test]
    fn a_socket_that_is_not_there_is_said_with_what_to_do() {
        let found = check_namespaces(Path::new("/nonexistent/p.control.sock"));
        assert_eq!((found.len(), found[0].level), (1, FindingLevel::Warn));
        assert!(found[0].remedy.as_ref().unwrap().contains("--control-socket PATH"), "{found:?}");
    }
}
