//! Lists of a node's best blocks: the answer to a peer, and the question to a member.

use std::sync::Arc;
use std::time::Duration;

use tonic::Status;

use super::MemberEvent;
use super::dial::dial_address;
use super::follow::describe_status;
use super::service::inventory_client::InventoryClient;
use super::shared::ControlShared;
use super::wire::REPLY_BYTES_MAX;
use super::wire::blocks::{ListBlocksReply, ListBlocksRequest};
use crate::listed::{BlocksAsk, ListedBlock};
use crate::refusals::Reason;
use crate::transport::PeerNumber;

/// After a list the node makes no other for so many times as long as this one took: peers cannot keep its data
/// thread busy.
const RESTS: u32 = 4;

/// Returns this node's answer to a peer, one peer after the other.
pub(super) async fn describe_blocks(
    shared: &Arc<ControlShared>,
    asker: Option<PeerNumber>,
    asked: BlocksAsk,
) -> Result<ListBlocksReply, Status> {
    let (shared, limit) = (Arc::clone(shared), shared.config.limits.lists);
    let (reply, answer) = tokio::sync::oneshot::channel();
    // The task goes on if the client hangs up: its rest is for the others' sake.
    tokio::spawn(async move {
        let _one = shared.listing_blocks.lock().await;
        if reply.is_closed() {
            return;
        }
        let began = tokio::time::Instant::now();
        let listed = tokio::time::timeout(limit, shared.config.listing.list_blocks(asker, asked)).await;
        let _ = reply.send(listed.ok().flatten().map(|blocks| ListBlocksReply::new(&shared.config, &blocks)));
        tokio::time::sleep(began.elapsed() * RESTS).await;
    });
    let busy = || Status::unavailable("its blocks were not listed in time: look at its /healthz and its log");
    answer.await.ok().flatten().ok_or_else(busy)
}

/// Asks a member, and reports its blocks: none if it does not answer rightly.
pub(super) async fn ask_blocks(shared: Arc<ControlShared>, number: PeerNumber, ask: BlocksAsk) {
    let limit = shared.config.limits.lists;
    let asked = tokio::time::timeout(limit, ask_member(&shared, number, &ask)).await;
    let asked = asked.unwrap_or_else(|_| {
        shared.count_refusal(Reason::Silent);
        Err(format!("it did not answer within {} ms", limit.as_millis()))
    });
    let blocks = asked.unwrap_or_else(|why| {
        shared.note_rarely(format!("a peer's best blocks are not fetched: {why}"));
        Vec::new()
    });
    shared.report_event(MemberEvent::Listed { number, ask, blocks });
}

async fn ask_member(
    shared: &ControlShared,
    number: PeerNumber,
    ask: &BlocksAsk,
) -> Result<Vec<ListedBlock>, String> {
    let config = &shared.config;
    let (expected, boot, address) = shared.member(number).ok_or("it has left the mesh")?;
    let session = shared.credentials.as_ref().map(|files| files.client(|text| shared.report_note(text)));
    let channel =
        dial_address(&address, session, config.limits.connect, |reason| shared.count_refusal(reason)).await?;
    let mut client = InventoryClient::new(channel).max_decoding_message_size(REPLY_BYTES_MAX);
    let request = ListBlocksRequest::new(config, ask);
    let reply = client.list_blocks(request).await.map_err(|status| describe_status(&status))?;
    let (mesh, node, life, blocks) = reply.into_inner().validate().map_err(|malformed| {
        shared.count_refusal(Reason::Malformed);
        format!("{expected} sent {malformed}")
    })?;
    if mesh != config.mesh || (&node, life) != (&expected, boot) {
        shared.count_refusal(Reason::OtherLife);
        return Err(format!("{node} answers for {expected}, or it has restarted"));
    }
    Ok(blocks)
}

/// The time limit of a question for blocks, from the question to the list.
pub(super) const LIMIT: Duration = Duration::from_secs(5);
