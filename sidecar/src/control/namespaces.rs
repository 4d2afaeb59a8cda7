//! `GET /namespaces`: the namespaces known to this sidecar and to its peers.

use std::collections::BTreeMap;

use mesh::control::wire::namespaces::NodeNamespace;
use mesh::control::{NamespaceAsker, NamespacesAnswer};
use serde::Serialize;
use serde_json::{Value, json};
use shm_protocol::key::NamespaceDigest;

use super::Handler;
use super::refusals::ControlRefusal;
use super::requests::ANSWER_TIME_MAX;
use crate::catalog::CatalogEntry;
use crate::control::inbox::{ControlAsk, Surveyed};
use crate::core::KeptCounts;
use crate::pages::quotas::Levels;

/// All known data of a namespace.
#[derive(Serialize)]
struct ShownNamespace {
    namespace: String,
    /// `None` if no engine of the namespace ever connected to this sidecar or to a peer with an answer.
    #[serde(flatten)]
    entry: Option<CatalogEntry>,
    memory_blocks: u64,
    /// Blocks of `memory_blocks` without an announcement of a peer, at the last count.
    #[serde(skip_serializing_if = "Option::is_none")]
    unique_blocks: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disk_blocks: Option<u64>,
    /// Peers with this namespace.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    peers: Vec<AtPeer>,
}

/// A peer's stated blocks of a namespace.
#[derive(Serialize)]
struct AtPeer {
    peer: String,
    memory_blocks: u64,
    disk_blocks: u64,
}

/// A peer whose namespaces are missing in whole or in part, with the reason.
#[derive(Serialize)]
struct MissingAnswer {
    peer: String,
    why: String,
}

/// Namespaces by digest while the answers are merged.
struct Merged {
    disks: bool,
    shown: BTreeMap<NamespaceDigest, ShownNamespace>,
}

// === impl Handler ===

impl Handler {
    pub(super) async fn namespaces(&self) -> Result<Value, ControlRefusal> {
        // Peers count their blocks while this sidecar counts its own.
        let asked = self.parts.mesh.as_ref().map(NamespaceAsker::ask_members);
        let Surveyed { namespaces: kept, unique, disks, peers } =
            self.ask_data_thread(ANSWER_TIME_MAX, ControlAsk::Survey).await?;
        let answers = match asked {
            // An ending sidecar has left the mesh.
            Some(asked) => asked.await.unwrap_or_default(),
            None => Vec::new(),
        };
        let entries = self.parts.catalog.lock().entries(&self.parts.quotas);
        let mut merged = Merged { disks, shown: BTreeMap::new() };
        entries.into_iter().for_each(|(digest, entry)| merged.at(digest).entry = Some(entry));
        for (digest, KeptCounts { memory, below: disk }) in kept {
            let shown = merged.at(digest);
            shown.memory_blocks = memory;
            shown.unique_blocks = unique.get(&digest).copied();
            shown.disk_blocks = disks.then_some(disk);
        }
        let not_told = answers.into_iter().filter_map(|answer| merged.add_answer(answer, &self.parts.quotas));
        let not_told: Vec<MissingAnswer> = not_told.collect();
        let namespaces: Vec<ShownNamespace> = merged.shown.into_values().collect();
        let peer = |(peer, blocks)| json!({ "peer": peer, "blocks": blocks });
        let peers: Vec<Value> = peers.into_iter().flatten().map(peer).collect();
        Ok(json!({ "namespaces": namespaces, "peers": peers, "not_told": not_told }))
    }
}

// === impl Merged ===

impl Merged {
    fn at(&mut self, digest: NamespaceDigest) -> &mut ShownNamespace {
        let disk_blocks = self.disks.then_some(0);
        self.shown.entry(digest).or_insert_with(|| ShownNamespace {
            namespace: digest.to_string(),
            entry: None,
            memory_blocks: 0,
            unique_blocks: None,
            disk_blocks,
            peers: Vec::new(),
        })
    }

    /// Merges a peer's answer. Returns the reason if a part of it is missing.
    fn add_answer(&mut self, answer: NamespacesAnswer, quotas: &Levels) -> Option<MissingAnswer> {
        let NamespacesAnswer { peer, namespaces, missing } = answer;
        let peer = peer.to_string();
        let others =
            namespaces.into_iter().filter(|namespace| !self.add_namespace(&peer, namespace, quotas)).count();
        let others = (others > 0).then(|| {
            format!(
                "{others} of its namespaces have other block sizes than the same namespaces elsewhere, so their facts \
                 leave out a difference: add it to the facts"
            )
        });
        let whys: Vec<String> = missing.into_iter().chain(others).collect();
        (!whys.is_empty()).then(|| MissingAnswer { peer, why: whys.join("; ") })
    }

    /// Adds a peer's namespace. Returns false if its block size contradicts the known one.
    fn add_namespace(&mut self, peer: &str, namespace: &NodeNamespace, quotas: &Levels) -> bool {
        let NodeNamespace { digest, stated, memory_blocks, disk_blocks } = namespace;
        let shown = self.at(*digest);
        if let Some(stated) = stated {
            let entry = shown
                .entry
                .get_or_insert_with(|| CatalogEntry::of_peers(stated, quotas.of_namespace(*digest)));
            if (entry.block_bytes, entry.shards) != (stated.block_bytes, stated.shards) {
                return false;
            }
        }
        let (memory_blocks, disk_blocks) = (*memory_blocks, *disk_blocks);
        shown.peers.push(AtPeer { peer: peer.to_owned(), memory_blocks, disk_blocks });
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mesh::control::wire::namespaces::StatedFacts;
    use mesh::transport::NodeId;

    use super::*;

    fn answer(peer: &str, block_bytes: u64, memory_blocks: u64) -> NamespacesAnswer {
        let facts = Arc::new([("model".to_owned(), "tiny".to_owned())].into());
        let stated = Some(StatedFacts { facts, block_bytes, shards: 1 });
        let namespace =
            NodeNamespace { digest: NamespaceDigest([1; 16]), stated, memory_blocks, disk_blocks: 0 };
        NamespacesAnswer {
            peer: NodeId::new(peer.to_owned()).unwrap(),
            namespaces: vec![namespace],
            missing: None,
        }
    }

    #[test]
    fn peers_that_know_a_namespace_are_under_it_and_who_contradicts_is_named() {
        let mut merged = Merged { disks: false, shown: BTreeMap::new() };
        let quotas = Levels::default();
        assert!(merged.add_answer(answer("a", 64, 7), &quotas).is_none());
        assert!(merged.add_answer(answer("b", 64, 0), &quotas).is_none());
        let why = merged.add_answer(answer("c", 128, 9), &quotas).unwrap();
        assert_eq!(why.peer, "c");
        assert!(why.why.starts_with("1 of its namespaces have other block sizes"), "{}", why.why);
        let late =
            NamespacesAnswer { namespaces: Vec::new(), missing: Some("late".into()), ..answer("d", 64, 1) };
        assert_eq!(merged.add_answer(late, &quotas).unwrap().why, "late");
        let shown: Vec<Value> =
            merged.shown.values().map(|shown| serde_json::to_value(shown).unwrap()).collect();
        let peer = |peer: &str, blocks: u64| json!({"peer": peer, "memory_blocks": blocks, "disk_blocks": 0});
        let entry = json!({
            "namespace": "01".repeat(16), "facts": {"model": "tiny"}, "engines": 0, "block_bytes": 64,
            "memory_blocks": 0, "peers": [peer("a", 7), peer("b", 0)]
        });
        assert_eq!(shown, [entry]);
    }
}
