//! `GET /namespaces`: the namespaces known to this sidecar and to its peers.

use std::collections::BTreeMap;

use mesh::control::wire::namespaces::Namespace;
use mesh::control::{Answer, Asker};
use serde::Serialize;
use serde_json::{Value, json};
use shm_protocol::key::NamespaceDigest;

use super::Handler;
use super::refusals::Refused;
use super::requests::ANSWER_TIME_MAX;
use crate::catalog::Entry;
use crate::control::inbox::{Ask, Surveyed};
use crate::core::Kept;
use crate::pages::quotas::Levels;

/// All known data of a namespace.
#[derive(Serialize)]
struct Shown {
    namespace: String,
    /// `None` if no engine of the namespace ever connected to this sidecar or to a peer with an answer.
    #[serde(flatten)]
    entry: Option<Entry>,
    memory_blocks: u64,
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
struct NotTold {
    peer: String,
    why: String,
}

/// Namespaces by digest while the answers are merged.
struct Merged {
    disks: bool,
    shown: BTreeMap<NamespaceDigest, Shown>,
}

// === impl Handler ===

impl Handler {
    pub(super) async fn namespaces(&self) -> Result<Value, Refused> {
        // Peers count their blocks while this sidecar counts its own.
        let asked = self.parts.mesh.as_ref().map(Asker::ask);
        let Surveyed { namespaces: kept, disks, peers } = self.ask(ANSWER_TIME_MAX, Ask::Survey).await?;
        let answers = match asked {
            // An ending sidecar has left the mesh.
            Some(asked) => asked.await.unwrap_or_default(),
            None => Vec::new(),
        };
        let entries = self.parts.catalog.lock().entries(&self.parts.quotas);
        let mut merged = Merged { disks, shown: BTreeMap::new() };
        entries.into_iter().for_each(|(digest, entry)| merged.at(digest).entry = Some(entry));
        for (digest, Kept { memory, below: disk }) in kept {
            let shown = merged.at(digest);
            shown.memory_blocks = memory;
            shown.disk_blocks = disks.then_some(disk);
        }
        let not_told = answers.into_iter().filter_map(|answer| merged.hear(answer, &self.parts.quotas));
        let not_told: Vec<NotTold> = not_told.collect();
        let namespaces: Vec<Shown> = merged.shown.into_values().collect();
        let peer = |(peer, blocks)| json!({ "peer": peer, "blocks": blocks });
        let peers: Vec<Value> = peers.into_iter().flatten().map(peer).collect();
        Ok(json!({ "namespaces": namespaces, "peers": peers, "not_told": not_told }))
    }
}

// === impl Merged ===

impl Merged {
    fn at(&mut self, digest: NamespaceDigest) -> &mut Shown {
        let disk_blocks = self.disks.then_some(0);
        self.shown.entry(digest).or_insert_with(|| Shown {
            namespace: digest.to_string(),
            entry: None,
            memory_blocks: 0,
            disk_blocks,
            peers: Vec::new(),
        })
    }

    /// Merges a peer's answer. Returns the reason if a part of it is missing.
    fn hear(&mut self, answer: Answer, quotas: &Levels) -> Option<NotTold> {
        let Answer { peer, namespaces, missing } = answer;
        let peer = peer.to_string();
        let others = namespaces.into_iter().filter(|namespace| !self.take(&peer, namespace, quotas)).count();
        let others = (others > 0).then(|| {
            format!(
                "{others} of its namespaces have other block sizes than the same namespaces elsewhere, so their facts \
                 leave out a difference: add it to the facts"
            )
        });
        let whys: Vec<String> = missing.into_iter().chain(others).collect();
        (!whys.is_empty()).then(|| NotTold { peer, why: whys.join("; ") })
    }

    /// Adds a peer's namespace. Returns false if its block size contradicts the known one.
    fn take(&mut self, peer: &str, namespace: &Namespace, quotas: &Levels) -> bool {
        let Namespace { digest, stated, memory_blocks, disk_blocks } = namespace;
        let shown = self.at(*digest);
        if let Some(stated) = stated {
            let entry = shown.entry.get_or_insert_with(|| Entry::of_peers(stated, quotas.of(*digest)));
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

    use mesh::control::wire::namespaces::Stated;
    use mesh::transport::NodeId;

    use super::*;

    fn answer(peer: &str, block_bytes: u64, memory_blocks: u64) -> Answer {
        let facts = Arc::new([("model".to_owned(), "tiny".to_owned())].into());
        let stated = Some(Stated { facts, block_bytes, shards: 1 });
        let namespace = Namespace { digest: NamespaceDigest([1; 16]), stated, memory_blocks, disk_blocks: 0 };
        Answer { peer: NodeId::new(peer.to_owned()).unwrap(), namespaces: vec![namespace], missing: None }
    }

    #[test]
    fn peers_that_know_a_namespace_are_under_it_and_who_contradicts_is_named() {
        let mut merged = Merged { disks: false, shown: BTreeMap::new() };
        let quotas = Levels::default();
        assert!(merged.hear(answer("a", 64, 7), &quotas).is_none());
        assert!(merged.hear(answer("b", 64, 0), &quotas).is_none());
        let why = merged.hear(answer("c", 128, 9), &quotas).unwrap();
        assert_eq!(why.peer, "c");
        assert!(why.why.starts_with("1 of its namespaces have other block sizes"), "{}", why.why);
        let late = Answer { namespaces: Vec::new(), missing: Some("late".into()), ..answer("d", 64, 1) };
        assert_eq!(merged.hear(late, &quotas).unwrap().why, "late");
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
