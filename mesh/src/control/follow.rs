//! The following side: one task for each endpoint, which connects again after each failure.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use super::MemberEvent;
use super::back_off::BackOff;
use super::dial::{dial_address, run_within};
use super::service::inventory_client::InventoryClient;
use super::shared::ControlShared;
use super::wire::{
    CheckedReply, FollowReply, FollowRequest, MalformedReply, REPLY_BYTES_MAX, ServerFeatures, WaitRequest,
};
use crate::digest::Thinning;
use crate::feed::{FeedMessage, FollowError, Follower, FollowerEvent, keys_max};
use crate::membership::{FollowFailure, Identity, MemberEndpoint};
use crate::refusals::Reason;
use crate::transport::{BootId, PeerNumber};
use shm_protocol::random::Random;

/// Changes per second taken from one peer: a tenth of the caller's rate. A peer with more changes is read
/// less often and then sends fewer: it skips a block if it came and went.
const CHANGES_PER_SECOND: u64 = 1 << 20;

/// Places in the backlog for a snapshot or a list of promises: as many changes as the caller takes in at
/// once.
const WORD: usize = 1024;

/// Pauses are cut short at most this often. A peer cannot make this node dial in a loop by following again
/// and again.
const HURRY: Duration = Duration::from_secs(1);

/// Maximum characters of a peer's error text.
const WORDS_MAX: usize = 300;

/// The state of an endpoint from its earlier streams.
struct KnownStream {
    /// The member, its life, and the last sequence known of its feed.
    upto: Option<(PeerNumber, BootId, u64)>,
    thinning: Thinning,
}

/// The times of a member's renewals. A renewal requests the whole inventory again, because it outgrew its
/// filter. Until then the member is followed as before, so the pause costs only blocks beyond the filter.
struct Renewals {
    back_off: BackOff,
    last: Instant,
    due: Option<Instant>,
}

/// Cuts pauses short when an endpoint without a stream may be reachable: an unknown node follows and may be a
/// listed peer that has just started, or a member is lost at one of its addresses.
pub(super) async fn retry_dials(shared: Arc<ControlShared>) {
    loop {
        shared.retry.notified().await;
        shared.retry_now.send_replace(());
        tokio::time::sleep(HURRY).await;
    }
}

/// Follows a peer, forever. A notification of `anew` requests its whole inventory again.
pub(super) async fn follow_endpoint(
    shared: Arc<ControlShared>,
    endpoint: MemberEndpoint,
    address: String,
    anew: Arc<Notify>,
) {
    let limits = shared.config.limits;
    let mut known = KnownStream { upto: None, thinning: Thinning::NONE };
    let seed = shared.config.boot.0.get() ^ u64::from(endpoint.0);
    let mut back_off = BackOff::new(&limits, seed);
    let mut renewals = Renewals { back_off: BackOff::new(&limits, seed), last: Instant::now(), due: None };
    let mut random = Random(seed);
    let mut retry_now = shared.retry_now.subscribe();
    loop {
        retry_now.mark_unchanged();
        let mut up = None;
        let thinned = known.thinning > Thinning::NONE;
        // Spread over time, because a peer has two filters during its renewal.
        let renewal = limits.thinned / 1024 * (512 + (random.next() % 1024) as u32);
        let stream = stream(&shared, endpoint, &address, &mut known, &mut up);
        let failure = tokio::select! {
            Err(failure) = stream => failure,
            () = renewals.next(&anew) => {
                known.upto = None;
                continue;
            }
            () = tokio::time::sleep(renewal), if thinned => {
                known.upto = None;
                continue;
            }
        };
        shared.down(endpoint, &failure);
        let served = up.map_or(Duration::ZERO, |since| since.elapsed());
        let (mut pause, is_new) = back_off.pause_after(served, &failure.to_string());
        match failure {
            FollowFailure::Unreached(why) if is_new => {
                shared.report_note(format!("the inventory of {address} is not followed: {why}"));
            }
            FollowFailure::Unreached(_) => {}
            // Another endpoint follows its member. After the end of its stream this endpoint is tried at
            // once.
            FollowFailure::Twin(..) | FollowFailure::Elsewhere(_) => pause = limits.gone,
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = retry_now.changed() => back_off.reset(),
        }
    }
}

/// Runs one stream until it breaks. Sets `up` once the member is accepted.
async fn stream(
    shared: &Arc<ControlShared>,
    endpoint: MemberEndpoint,
    address: &str,
    known: &mut KnownStream,
    up: &mut Option<Instant>,
) -> Result<Infallible, FollowFailure> {
    let config = &shared.config;
    let session = shared.credentials.as_ref().map(|files| files.client(|text| shared.report_note(text)));
    known.upto = known.upto.filter(|(number, ..)| shared.number(endpoint) == Some(*number));
    let asked =
        FollowRequest::new(config, known.upto.map(|(_, boot, sequence)| (boot, sequence)), known.thinning);
    let channel =
        dial_address(address, session, config.limits.connect, |reason| shared.count_refusal(reason)).await?;
    let mut client = InventoryClient::new(channel).max_decoding_message_size(REPLY_BYTES_MAX);
    let mut replies = run_within(config.limits.connect, "the answer", async {
        let answer = client.follow(asked).await.map_err(|status| {
            if status.code() == Code::FailedPrecondition {
                shared.count_refusal(Reason::Refused);
            }
            describe_status(&status)
        })?;
        Ok(answer.into_inner())
    })
    .await?;
    let (identity, features) = greeting(shared, &mut replies).await?;
    let Some(number) = shared.hello(endpoint, &identity)? else {
        // The peer is this node itself: the membership is about to end this task.
        std::future::pending().await
    };
    // A peer is another member after it left and came back meanwhile, with an unknown inventory.
    known.upto = known.upto.filter(|(of, boot, _)| (*of, *boot) == (number, identity.boot));
    *up = Some(Instant::now());
    let ServerFeatures { hears_waits, keeps_asks, lists_blocks, engines } = features;
    shared.report_event(MemberEvent::Greeted { number, keeps_asks, lists_blocks, engines });
    let keys_max = keys_max(config.directory_bytes, shared.sharing());
    let follower = match known.upto {
        Some((.., sequence)) => Follower::resumed(keys_max, sequence, known.thinning),
        None => Follower::new(keys_max),
    };
    let event = apply_replies(shared, &mut replies, known, follower, (number, identity.boot, keys_max));
    tokio::select! {
        event = event => event,
        never = say_waits(shared, client), if hears_waits => match never {},
    }
}

/// Applies a member's messages to its filter until the stream ends, is silent for too long, or has an invalid
/// message.
async fn apply_replies(
    shared: &ControlShared,
    replies: &mut Streaming<FollowReply>,
    known: &mut KnownStream,
    mut follower: Follower,
    (number, boot, keys_max): (PeerNumber, BootId, usize),
) -> Result<Infallible, FollowFailure> {
    loop {
        match reply(shared, replies).await? {
            CheckedReply::Hello(..) => {
                shared.count_refusal(Reason::Malformed);
                return Err(FollowFailure::Unreached("it sent two greetings".into()));
            }
            CheckedReply::Heartbeat => {}
            CheckedReply::Leaving => shared.report_event(MemberEvent::Leaving { number }),
            CheckedReply::Feed(message) => {
                if let FeedMessage::Begin { keys, .. } = message {
                    known.use_room(keys, keys_max)?;
                }
                let event = follower.apply_message(message).map_err(|error| known.restart_after(error))?;
                known.upto = follower.known().map(|sequence| (number, boot, sequence));
                report_outcome(shared, number, event).await;
            }
        }
    }
}

/// Notifies a member whenever a request here waits for a block, forever. Failures are ignored: the stream of
/// the member notices them.
async fn say_waits(shared: &ControlShared, mut client: InventoryClient<Channel>) -> Infallible {
    let mut waits = shared.waits.subscribe();
    loop {
        if waits.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        let _ = tokio::time::timeout(shared.config.limits.connect, client.wait(WaitRequest {})).await;
    }
}

/// Reads a member's greeting. Returns its identity and features. Fails if the member belongs to another mesh.
async fn greeting(
    shared: &ControlShared,
    replies: &mut Streaming<FollowReply>,
) -> Result<(Identity, ServerFeatures), String> {
    match reply(shared, replies).await? {
        CheckedReply::Hello(mesh, identity, features) if mesh == shared.config.mesh => {
            Ok((identity, features))
        }
        CheckedReply::Hello(mesh, ..) => {
            shared.count_refusal(Reason::Mesh);
            Err(format!("it belongs to the mesh '{mesh}': give both the same --mesh-name"))
        }
        CheckedReply::Feed(_) | CheckedReply::Heartbeat | CheckedReply::Leaving => {
            shared.count_refusal(Reason::Malformed);
            Err("it did not send its name".into())
        }
    }
}

async fn reply(shared: &ControlShared, replies: &mut Streaming<FollowReply>) -> Result<CheckedReply, String> {
    let silence = shared.config.limits.silence;
    let Ok(reply) = tokio::time::timeout(silence, replies.message()).await else {
        shared.count_refusal(Reason::Silent);
        return Err(format!("the next message took longer than {} ms", silence.as_millis()));
    };
    let reply = reply.map_err(|status| describe_status(&status))?.ok_or("it closed the stream")?;
    reply.validate().map_err(|malformed| {
        shared.count_refusal(if let MalformedReply::Version(_) = malformed {
            Reason::Version
        } else {
            Reason::Malformed
        });
        format!("it sent {malformed}")
    })
}

/// The error text of a peer or its connection, without control characters and cut to [`WORDS_MAX`]: a peer
/// may send any text.
pub(super) fn describe_status(status: &Status) -> String {
    status.message().chars().filter(|char| !char.is_control()).take(WORDS_MAX).collect()
}

/// The least time for so many changes of one peer.
fn time_of_changes(changes: usize) -> Duration {
    Duration::from_micros(changes as u64 * 1_000_000 / CHANGES_PER_SECOND)
}

/// Hands a result to the caller once the backlog has room for it, then rests for the time its changes should
/// take.
async fn report_outcome(shared: &ControlShared, number: PeerNumber, event: FollowerEvent) {
    match event {
        FollowerEvent::Nothing => tokio::task::yield_now().await,
        FollowerEvent::Snapshot(filter) => {
            let room = shared.backlog.room(WORD).await;
            shared.report_event(MemberEvent::Snapshot { number, filter, room });
        }
        FollowerEvent::Changes(changes) => {
            let (rest, room) = (time_of_changes(changes.len()), shared.backlog.room(changes.len()).await);
            shared.report_event(MemberEvent::Changes { number, changes, room });
            tokio::time::sleep(rest).await;
        }
        FollowerEvent::Promises(promises) => {
            let (rest, room) = (time_of_changes(promises.len()), shared.backlog.room(WORD).await);
            shared.report_event(MemberEvent::Promises { number, promises, room });
            tokio::time::sleep(rest).await;
        }
    }
}

// === impl Renewals ===

impl Renewals {
    /// Returns when the whole inventory is to be requested again: after the filter was outgrown, and a pause.
    /// Pauses grow if each new filter is outgrown at once. A broken stream does not change the due time.
    async fn next(&mut self, outgrown: &Notify) {
        let due = match self.due {
            Some(due) => due,
            None => {
                outgrown.notified().await;
                let (pause, _) = self.back_off.pause_after(self.last.elapsed(), "it outgrew its filter");
                *self.due.insert(Instant::now() + pause)
            }
        };
        tokio::time::sleep_until(due).await;
        (self.due, self.last) = (None, Instant::now());
    }
}

// === impl KnownStream ===

impl KnownStream {
    /// Chooses the largest part of an inventory within `max` keys. The part requested before has `keys` keys.
    fn fit(&mut self, keys: u64, max: usize) {
        let all = keys.saturating_mul(1 << self.thinning.power());
        let fits = |thinning: &Thinning| thinning.thin_count(all) <= max as u64;
        self.thinning = (0..).map_while(Thinning::new).find(fits).unwrap_or(Thinning::MOST);
    }

    /// Checks the size of an inventory when it begins. Returns `Err` if a larger part fits by now: twice as
    /// many keys would leave a quarter of `max` free, so they are not too many again soon.
    fn use_room(&mut self, keys: u64, max: usize) -> Result<(), String> {
        if self.thinning == Thinning::NONE || keys.saturating_mul(2) > max as u64 / 4 * 3 {
            return Ok(());
        }
        self.upto = None;
        self.fit(keys, max);
        Err(format!(
            "it announces only a part of its blocks, {keys} where {max} fit now; a larger part is requested"
        ))
    }

    /// Handles a message that cannot be applied: the next stream requests everything again, or a smaller part
    /// if it does not fit. Returns the reason as text.
    fn restart_after(&mut self, error: FollowError) -> String {
        self.upto = None;
        if let FollowError::Memory { keys, max } = error {
            self.fit(keys, max);
        }
        error.to_string()
    }
}
