//! The namespaces and the best blocks of this sidecar, as peers request them.

use std::collections::BTreeMap;
use std::sync::Arc;

use mesh::control::wire::namespaces::{NodeNamespace, StatedFacts};
use mesh::control::{BlocksListed, Counted, Listing};
use mesh::listed::BlocksAsk;
use mesh::transport::PeerNumber;
use shm_protocol::key::NamespaceDigest;
use tokio::sync::oneshot;

use crate::catalog;
use crate::control::inbox::{ControlAsk, Inbox};
use crate::core::{BestBlocks, KeptCounts};

/// The catalog, and the channel for counts of the data thread's blocks.
#[derive(Debug)]
pub struct CatalogListing {
    pub inbox: Arc<Inbox>,
    pub catalog: catalog::SharedCatalog,
}

impl Listing for CatalogListing {
    fn list_namespaces(&self) -> Counted {
        let (reply, answer) = oneshot::channel();
        let asked = self.inbox.post_ask(ControlAsk::Survey(reply));
        let catalog = self.catalog.clone();
        Box::pin(async move {
            let kept = if asked { answer.await.ok()?.namespaces } else { return None };
            Some(merge_namespaces(catalog.lock().stated(), kept))
        })
    }

    fn list_blocks(&self, asker: Option<PeerNumber>, asked: BlocksAsk) -> BlocksListed {
        let (reply, answer) = oneshot::channel();
        let list = Box::new(BestBlocks::new(asker, asked));
        let asked = self.inbox.post_ask(ControlAsk::BestBlocks(list, reply));
        Box::pin(async move { if asked { answer.await.ok() } else { None } })
    }
}

/// Joins the stated facts and the kept blocks of each namespace.
fn merge_namespaces(
    stated: Vec<(NamespaceDigest, StatedFacts)>,
    mut kept: BTreeMap<NamespaceDigest, KeptCounts>,
) -> Vec<NodeNamespace> {
    let namespace = |digest, stated, KeptCounts { memory, below: disk }| NodeNamespace {
        digest,
        stated,
        memory_blocks: memory,
        disk_blocks: disk,
    };
    let known = stated.into_iter().map(|(digest, stated)| {
        let kept = kept.remove(&digest).unwrap_or_default();
        namespace(digest, Some(stated), kept)
    });
    let mut all: Vec<NodeNamespace> = known.collect();
    all.extend(kept.into_iter().map(|(digest, kept)| namespace(digest, None, kept)));
    all
}
