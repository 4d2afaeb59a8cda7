//! What a running sidecar says of its engines, by its control socket.

use std::path::Path;

use serde::Deserialize;

use super::pair::Engine;
use super::{Finding, Level};
use crate::ctl::{self, CtlError, Target};

/// As the sidecar answers it.
#[derive(Deserialize)]
struct Page {
    namespaces: Vec<Namespace>,
    peers: Vec<Peer>,
}

#[derive(Deserialize)]
struct Namespace {
    namespace: String,
    memory_blocks: u64,
    #[serde(default)]
    disk_blocks: u64,
    #[serde(flatten)]
    engine: Option<Engine>,
}

#[derive(Deserialize)]
struct Peer {
    blocks: u64,
}

/// Looks at what is kept, and at the engines of every namespace.
pub(super) fn look(socket: &Path) -> Vec<Finding> {
    match ctl::request(&Target::Unix(socket.to_owned()), "GET", "/namespaces", "") {
        Ok(page) => judge(&page),
        Err(error) => vec![unheard(&error)],
    }
}

/// An error whose text ends with the remedy.
fn unheard(error: &CtlError) -> Finding {
    let text = error.to_string();
    let (text, remedy) = text.split_once(": ").unwrap_or((&text, "look at the sidecar's log"));
    Finding::bad(Level::Warn, "control", format!("namespaces are not looked at: {text}"), remedy)
}

fn judge(page: &str) -> Vec<Finding> {
    let Page { namespaces, peers } = match serde_json::from_str(page) {
        Ok(page) => page,
        Err(error) => return vec![unheard(&CtlError::Answer(error.to_string()))],
    };
    let sum = |blocks: fn(&Namespace) -> u64| namespaces.iter().map(blocks).sum::<u64>();
    let known: u64 = peers.iter().map(|peer| peer.blocks).sum();
    let text = format!(
        "{} namespaces, {} blocks in memory and {} on disks; {} peers are known to keep {known}",
        namespaces.len(),
        sum(|namespace| namespace.memory_blocks),
        sum(|namespace| namespace.disk_blocks),
        peers.len()
    );
    let mut found = vec![Finding::ok("control", text)];
    for Namespace { namespace, engine, .. } in namespaces {
        let engine = engine.map(|engine| engine.named(format!("namespace {namespace}")));
        engine.iter().for_each(|engine| engine.look(&mut found));
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
        assert_eq!(bad, [("barred", Level::Fail), ("none_hash", Level::Fail)], "{found:?}");
        assert!(found[1].text.contains("namespace 0c"), "{found:?}");
        assert_eq!(judge("[]")[0].level, Level::Warn);
    }

    #[test]
    fn a_socket_that_is_not_there_is_said_with_what_to_do() {
        let found = look(Path::new("/nonexistent/p.control.sock"));
        assert_eq!((found.len(), found[0].level), (1, Level::Warn));
        assert!(found[0].remedy.as_ref().unwrap().contains("--control-socket PATH"), "{found:?}");
    }
}
