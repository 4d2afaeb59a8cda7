//! The namespaces of this sidecar, as peers request them.

use std::collections::BTreeMap;
use std::sync::Arc;

use mesh::control::wire::namespaces::{Namespace, Stated};
use mesh::control::{Counted, Listing};
use shm_protocol::key::NamespaceDigest;
use tokio::sync::oneshot;

use crate::catalog;
use crate::control::inbox::{Ask, Inbox};
use crate::core::Kept;

/// The catalog, and the channel for counts of the data thread's blocks.
#[derive(Debug)]
pub struct Known {
    pub inbox: Arc<Inbox>,
    pub catalog: catalog::Shared,
}

impl Listing for Known {
    fn list(&self) -> Counted {
        let (reply, answer) = oneshot::channel();
        let asked = self.inbox.ask(Ask::Survey(reply));
        let catalog = self.catalog.clone();
        Box::pin(async move {
            let kept = if asked { answer.await.ok()?.namespaces } else { return None };
            Some(join(catalog.lock().stated(), kept))
        })
    }
}

/// Joins the stated facts and the kept blocks of each namespace.
fn join(stated: Vec<(NamespaceDigest, Stated)>, mut kept: BTreeMap<NamespaceDigest, Kept>) -> Vec<Namespace> {
    let namespace = |digest, stated, Kept { memory, below: disk }| Namespace {
        digest,
        stated,
        memory_blocks: memory,
        disk_blocks: disk,
    };
    let known = stated.into_iter().map(|(digest, stated)| {
        let kept = kept.remove(&digest).unwrap_or_default();
        namespace(digest, Some(stated), kept)
    });
    let mut all: Vec<Namespace> = known.collect();
    all.extend(kept.into_iter().map(|(digest, kept)| namespace(digest, None, kept)));
    all
}
