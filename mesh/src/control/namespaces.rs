//! Namespaces known to nodes: the answer to a peer, and the question to all members. Nothing is followed or
//! kept, except the last answer of this node for a moment, so that peers cannot make it count in a loop.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use shm_protocol::key::NamespaceDigest;
use shm_protocol::namespace::Facts;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::{Code, Status};

use super::dial::dial_address;
use super::follow::describe_status;
use super::service::inventory_client::InventoryClient;
use super::shared::ControlShared;
use super::wire::namespaces::{Listed, NamespacesReply, NamespacesRequest, NodeNamespace};
use super::wire::{MalformedReply, REPLY_BYTES_MAX};
use crate::listed::{BlocksAsk, ListedBlock};
use crate::refusals::Reason;
use crate::transport::{BootId, NodeId, PeerNumber};

/// An answer is used again for this long.
const REMEMBERED: Duration = Duration::from_secs(1);
/// Members asked at the same time: each needs a connection and a decoded reply.
const ASKED_MAX: usize = 32;
/// Maximum bytes of distinct facts in all answers together, and of the facts that a sidecar keeps of its own
/// engines: thousands of namespaces of some 1 KB.
pub const FACTS_BYTES_MAX: usize = 4 << 20;
/// Maximum namespaces in all answers together. A namespace in several answers counts several times.
const TAKEN_MAX: usize = 1 << 16;

/// All namespaces of a node, once they are counted; `None` if the count failed.
pub type Counted = Pin<Box<dyn Future<Output = Option<Vec<NodeNamespace>>> + Send>>;

/// The best blocks of a namespace, once they are listed; `None` if that failed.
pub type BlocksListed = Pin<Box<dyn Future<Output = Option<Vec<ListedBlock>>> + Send>>;

/// Lists the namespaces and the blocks known to this node.
pub trait Listing: Debug + Send + Sync {
    /// Returns all known namespaces, with their blocks counted now; `None` if the count failed. It must not
    /// block.
    fn list_namespaces(&self) -> Counted;

    /// Returns the best blocks of a namespace for this peer, if it is a member; `None` if they were not listed. It
    /// must not block.
    fn list_blocks(&self, asker: Option<PeerNumber>, asked: BlocksAsk) -> BlocksListed;
}

/// A node without namespaces.
#[derive(Debug)]
pub struct Unlisted;

/// The answer of a member.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct NamespacesAnswer {
    pub peer: NodeId,
    /// Facts of equal digests are shared between answers.
    pub namespaces: Vec<NodeNamespace>,
    /// The reason if some or all of its namespaces are missing here, with a remedy if there is one.
    pub missing: Option<String>,
}

/// Totals of the answers so far.
#[derive(Default)]
struct TakenAnswers {
    facts: BTreeMap<NamespaceDigest, Arc<Facts>>,
    facts_bytes: usize,
    taken: usize,
}

impl Listing for Unlisted {
    fn list_namespaces(&self) -> Counted {
        Box::pin(std::future::ready(Some(Vec::new())))
    }

    fn list_blocks(&self, _: Option<PeerNumber>, _: BlocksAsk) -> BlocksListed {
        Box::pin(std::future::ready(Some(Vec::new())))
    }
}

/// Returns this node's answer to a peer.
pub(super) async fn describe_namespaces(shared: &Arc<ControlShared>) -> Result<NamespacesReply, Status> {
    let shared = Arc::clone(shared);
    // The task continues if the client hangs up, so the next question does not start a second count.
    let taken = tokio::spawn(async move {
        let mut last = shared.listed.lock().await;
        if let Some((at, reply)) = &*last
            && at.elapsed() < REMEMBERED
        {
            return reply.clone();
        }
        let listed =
            tokio::time::timeout(shared.config.limits.namespaces, shared.config.listing.list_namespaces())
                .await;
        let reply = listed.ok().flatten().map(|all| NamespacesReply::new(&shared.config, all));
        *last = Some((Instant::now(), reply.clone()));
        reply
    });
    let busy =
        || Status::unavailable("its blocks were not counted in time: look at its /healthz and its log");
    taken.await.ok().flatten().ok_or_else(busy)
}

/// Asks all members and sends their answers to `reply`. Stops if nothing waits for them any more.
pub(super) async fn ask_all(shared: Arc<ControlShared>, mut reply: oneshot::Sender<Vec<NamespacesAnswer>>) {
    let limit = shared.config.limits.namespaces;
    let (until, room) = (Instant::now() + limit, Arc::new(Semaphore::new(ASKED_MAX)));
    let mut asked = JoinSet::new();
    for (node, boot, address) in shared.members() {
        let (shared, room) = (Arc::clone(&shared), Arc::clone(&room));
        asked.spawn(async move {
            let answered = async {
                let _permit = room.acquire().await;
                ask_member(&shared, (&node, boot), &address).await
            };
            let answered = tokio::time::timeout_at(until, answered).await.unwrap_or_else(|_| {
                shared.count_refusal(Reason::Silent);
                Err(format!("it did not answer within {} ms: look at its /healthz", limit.as_millis()))
            });
            (node, answered)
        });
    }
    let (mut taken, mut answers) = (TakenAnswers::default(), Vec::new());
    loop {
        tokio::select! {
            answered = asked.join_next() => match answered {
                Some(Ok((peer, answered))) => answers.push(taken.take_answer(peer, answered)),
                Some(Err(_)) => {}
                None => break,
            },
            () = reply.closed() => return,
        }
    }
    answers.sort_by(|one: &NamespacesAnswer, other| one.peer.as_str().cmp(other.peer.as_str()));
    let _ = reply.send(answers);
}

/// Asks one member.
async fn ask_member(
    shared: &ControlShared,
    (node, boot): (&NodeId, BootId),
    address: &str,
) -> Result<Listed, String> {
    let config = &shared.config;
    let session = shared.credentials.as_ref().map(|files| files.client(|text| shared.report_note(text)));
    let channel =
        dial_address(address, session, config.limits.connect, |reason| shared.count_refusal(reason)).await?;
    let mut client = InventoryClient::new(channel).max_decoding_message_size(REPLY_BYTES_MAX);
    let reply = client.namespaces(NamespacesRequest::new(config)).await.map_err(|status| {
        match status.code() {
            Code::Unimplemented => return "its release does not send its namespaces: upgrade it".into(),
            Code::FailedPrecondition => shared.count_refusal(Reason::Refused),
            // The reply exceeds the maximum length.
            Code::OutOfRange => shared.count_refusal(Reason::Malformed),
            _ => {}
        }
        describe_status(&status)
    })?;
    let listed = reply.into_inner().validate().map_err(|malformed| {
        shared.count_refusal(if let MalformedReply::Version(_) = malformed {
            Reason::Version
        } else {
            Reason::Malformed
        });
        format!("it sent {malformed}")
    })?;
    if listed.mesh != config.mesh {
        shared.count_refusal(Reason::Mesh);
        return Err(format!("it belongs to the mesh '{}': give both the same --mesh-name", listed.mesh));
    }
    if (&listed.node, listed.boot) != (node, boot) {
        shared.count_refusal(Reason::OtherLife);
        return Err(format!("{} answers there, or the node has restarted: ask again", listed.node));
    }
    if listed.wrong > 0 {
        shared.count_refusal(Reason::Malformed);
        shared.note_rarely(format!(
            "{} namespaces of {node} are dropped, because their facts do not match their digests or are invalid: run \
             the same release on every node",
            listed.wrong
        ));
    }
    Ok(listed)
}

// === impl TakenAnswers ===

impl TakenAnswers {
    /// Takes as much of a member's answer as there is room for.
    fn take_answer(&mut self, peer: NodeId, answered: Result<Listed, String>) -> NamespacesAnswer {
        let listed = match answered {
            Ok(listed) => listed,
            Err(why) => return NamespacesAnswer { peer, namespaces: Vec::new(), missing: Some(why) },
        };
        let (sent, wrong) = (listed.namespaces.len(), listed.wrong);
        let taken = listed.namespaces.into_iter().filter_map(|namespace| self.take_namespace(namespace));
        let namespaces: Vec<NodeNamespace> = taken.collect();
        let left_out = listed.left_out.saturating_add((sent - namespaces.len()) as u64);
        let missing = match (left_out, wrong) {
            (0, 0) => None,
            (left_out, 0) => {
                Some(format!("{left_out} of its namespaces are left out, because the limit is reached"))
            }
            (left_out, wrong) => Some(format!(
                "{wrong} of its namespaces are dropped, because their facts do not match their digests, and {left_out} \
                 are left out: run the same release on every node"
            )),
        };
        NamespacesAnswer { peer, namespaces, missing }
    }

    fn take_namespace(&mut self, mut namespace: NodeNamespace) -> Option<NodeNamespace> {
        if self.taken == TAKEN_MAX {
            return None;
        }
        if let Some(stated) = &mut namespace.stated {
            if let Some(known) = self.facts.get(&namespace.digest) {
                stated.facts = Arc::clone(known);
            } else {
                let bytes: usize = stated.facts.iter().map(|(name, value)| name.len() + value.len()).sum();
                let all = Some(self.facts_bytes + bytes).filter(|all| *all <= FACTS_BYTES_MAX)?;
                self.facts_bytes = all;
                self.facts.insert(namespace.digest, Arc::clone(&stated.facts));
            }
        }
        self.taken += 1;
        Some(namespace)
    }
}
