//! The side that follows: one task for each endpoint, which connects again and again.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Code, Status, Streaming};

use super::News;
use super::back_off::BackOff;
use super::dial::{dial, within};
use super::service::inventory_client::InventoryClient;
use super::shared::Shared;
use super::wire::{FollowReply, FollowRequest, Malformed, REPLY_BYTES_MAX, Reply, WaitRequest};
use crate::digest::Thinning;
use crate::feed::{Follower, Heard, Message, Unheard, keys_max};
use crate::membership::{Endpoint, Failure, Identity};
use crate::refusals::Reason;
use crate::transport::{BootId, PeerNumber};
use shm_protocol::random::Random;

/// Changes of one peer that are taken in a second: a tenth of what the caller can apply. A peer that has more to tell is
/// read less often, and tells fewer: what came and went again is not told.
const CHANGES_PER_SECOND: u64 = 1 << 20;

/// Changes that a snapshot or a list of promises counts as in the backlog: as many as the caller takes in at once.
const WORD: usize = 1024;

/// Pauses are cut short at most this often, so that nobody who follows again and again makes this node dial in a loop.
const HURRY: Duration = Duration::from_secs(1);

/// Characters of what a peer says of a failure.
const WORDS_MAX: usize = 300;

/// What is known from the streams before.
struct Known {
    /// Of this member, in this life, up to this sequence.
    upto: Option<(PeerNumber, BootId, u64)>,
    thinning: Thinning,
}

/// The times of a member's renewals: it outgrew its filter, and all of it is asked for again. It is followed as before until then, so the
/// pause costs only blocks beyond the filter.
struct Renewals {
    back_off: BackOff,
    last: Instant,
    due: Option<Instant>,
}

/// Dials who is not followed as soon as there is a reason to: a stranger follows, who may be one of them and has begun just
/// now, or a node is lost at one of its addresses.
pub(super) async fn retry(shared: Arc<Shared>) {
    loop {
        shared.retry.notified().await;
        shared.hurry.send_replace(());
        tokio::time::sleep(HURRY).await;
    }
}

/// A peer's stream, for ever.
pub(super) async fn follow(shared: Arc<Shared>, endpoint: Endpoint, address: String, anew: Arc<Notify>) {
    let limits = shared.config.limits;
    let mut known = Known { upto: None, thinning: Thinning::NONE };
    let seed = shared.config.boot.0.get() ^ u64::from(endpoint.0);
    let mut back_off = BackOff::new(&limits, seed);
    let mut renewals = Renewals { back_off: BackOff::new(&limits, seed), last: Instant::now(), due: None };
    let mut random = Random(seed);
    let mut hurry = shared.hurry.subscribe();
    loop {
        hurry.mark_unchanged();
        let mut up = None;
        let thinned = known.thinning > Thinning::NONE;
        // Not all peers at once: each has two filters for a while.
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
        let (mut pause, news) = back_off.after(served, &failure.to_string());
        match failure {
            Failure::Unreached(why) if news => {
                shared.note(format!("the inventory of {address} is not followed: {why}"));
            }
            Failure::Unreached(_) => {}
            // Its member is followed; should that end, this endpoint is tried at once.
            Failure::Twin(..) | Failure::Elsewhere(_) => pause = limits.gone,
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = hurry.changed() => back_off.reset(),
        }
    }
}

/// One stream, until it breaks. `up` is set when it is one.
async fn stream(
    shared: &Arc<Shared>,
    endpoint: Endpoint,
    address: &str,
    known: &mut Known,
    up: &mut Option<Instant>,
) -> Result<Infallible, Failure> {
    let config = &shared.config;
    let session = shared.credentials.as_ref().map(|files| files.client(|text| shared.note(text)));
    known.upto = known.upto.filter(|(number, ..)| shared.number(endpoint) == Some(*number));
    let asked =
        FollowRequest::new(config, known.upto.map(|(_, boot, sequence)| (boot, sequence)), known.thinning);
    let channel = dial(address, session, config.limits.connect, |reason| shared.count(reason)).await?;
    let mut client = InventoryClient::new(channel).max_decoding_message_size(REPLY_BYTES_MAX);
    let mut replies = within(config.limits.connect, "the answer", async {
        let answer = client.follow(asked).await.map_err(|status| {
            if status.code() == Code::FailedPrecondition {
                shared.count(Reason::Refused);
            }
            words(&status)
        })?;
        Ok(answer.into_inner())
    })
    .await?;
    let (identity, hears_waits) = greeting(shared, &mut replies).await?;
    let Some(number) = shared.hello(endpoint, &identity)? else {
        // The node itself: this task is being ended.
        std::future::pending().await
    };
    // One that left and came back meanwhile is another member, of which nothing is known.
    known.upto = known.upto.filter(|(of, boot, _)| (*of, *boot) == (number, identity.boot));
    *up = Some(Instant::now());
    let keys_max = keys_max(config.directory_bytes, shared.sharing());
    let follower = match known.upto {
        Some((.., sequence)) => Follower::resumed(keys_max, sequence, known.thinning),
        None => Follower::new(keys_max),
    };
    let heard = hear(shared, &mut replies, known, follower, (number, identity.boot, keys_max));
    tokio::select! {
        heard = heard => heard,
        never = say_waits(shared, client), if hears_waits => match never {},
    }
}

/// Applies a member's messages to its filter until the stream ends, is silent for too long, or has a message that is no valid one.
async fn hear(
    shared: &Shared,
    replies: &mut Streaming<FollowReply>,
    known: &mut Known,
    mut follower: Follower,
    (number, boot, keys_max): (PeerNumber, BootId, usize),
) -> Result<Infallible, Failure> {
    loop {
        match reply(shared, replies).await? {
            Reply::Hello(..) => {
                shared.count(Reason::Malformed);
                return Err(Failure::Unreached("it sent two greetings".into()));
            }
            Reply::Heartbeat => {}
            Reply::Told(message) => {
                if let Message::Begin { keys, .. } = message {
                    known.use_room(keys, keys_max)?;
                }
                let heard = follower.hear(message).map_err(|unheard| known.after(unheard))?;
                known.upto = follower.known().map(|sequence| (number, boot, sequence));
                tell(shared, number, heard).await;
            }
        }
    }
}

/// Tells a member, for ever, whenever a request here waits for a block. That the member does not answer is for its stream to notice.
async fn say_waits(shared: &Shared, mut client: InventoryClient<Channel>) -> Infallible {
    let mut waits = shared.waits.subscribe();
    loop {
        if waits.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        let _ = tokio::time::timeout(shared.config.limits.connect, client.wait(WaitRequest {})).await;
    }
}

/// The member that answers the greeting, and whether it has the method `Wait`; an error where it is of another mesh.
async fn greeting(shared: &Shared, replies: &mut Streaming<FollowReply>) -> Result<(Identity, bool), String> {
    match reply(shared, replies).await? {
        Reply::Hello(mesh, identity, hears_waits) if mesh == shared.config.mesh => {
            Ok((identity, hears_waits))
        }
        Reply::Hello(mesh, ..) => {
            shared.count(Reason::Mesh);
            Err(format!("it belongs to the mesh '{mesh}': give both the same --mesh-name"))
        }
        Reply::Told(_) | Reply::Heartbeat => {
            shared.count(Reason::Malformed);
            Err("it did not send its name".into())
        }
    }
}

async fn reply(shared: &Shared, replies: &mut Streaming<FollowReply>) -> Result<Reply, String> {
    let silence = shared.config.limits.silence;
    let Ok(reply) = tokio::time::timeout(silence, replies.message()).await else {
        shared.count(Reason::Silent);
        return Err(format!("the next message took longer than {} ms", silence.as_millis()));
    };
    let reply = reply.map_err(|status| words(&status))?.ok_or("it closed the stream")?;
    reply.hear().map_err(|malformed| {
        shared.count(if let Malformed::Version(_) = malformed { Reason::Version } else { Reason::Malformed });
        format!("it sent {malformed}")
    })
}

/// What a peer, or the connection to it, says of a failure: that may be anything.
pub(super) fn words(status: &Status) -> String {
    status.message().chars().filter(|char| !char.is_control()).take(WORDS_MAX).collect()
}

/// The time that so many changes should take.
fn rest(changes: usize) -> Duration {
    Duration::from_micros(changes as u64 * 1_000_000 / CHANGES_PER_SECOND)
}

/// Tells the caller as soon as there is room for it, and then takes the time that this should take.
async fn tell(shared: &Shared, number: PeerNumber, heard: Heard) {
    match heard {
        Heard::Nothing => tokio::task::yield_now().await,
        Heard::Snapshot(filter) => {
            let room = shared.backlog.room(WORD).await;
            shared.tell(News::Snapshot { number, filter, room });
        }
        Heard::Changes(changes) => {
            let (rest, room) = (rest(changes.len()), shared.backlog.room(changes.len()).await);
            shared.tell(News::Changes { number, changes, room });
            tokio::time::sleep(rest).await;
        }
        Heard::Promises(promises) => {
            let (rest, room) = (rest(promises.len()), shared.backlog.room(WORD).await);
            shared.tell(News::Promises { number, promises, room });
            tokio::time::sleep(rest).await;
        }
    }
}

// === impl Renewals ===

impl Renewals {
    /// Returns when all is to be asked for again, after a pause. Pauses get longer where each filter is outgrown at once. A stream may break
    /// meanwhile: the next one has the same time.
    async fn next(&mut self, outgrown: &Notify) {
        let due = match self.due {
            Some(due) => due,
            None => {
                outgrown.notified().await;
                let (pause, _) = self.back_off.after(self.last.elapsed(), "it outgrew its filter");
                *self.due.insert(Instant::now() + pause)
            }
        };
        tokio::time::sleep_until(due).await;
        (self.due, self.last) = (None, Instant::now());
    }
}

// === impl Known ===

impl Known {
    /// As much of a peer's inventory as fits, where the part that was asked for has so many keys.
    fn fit(&mut self, keys: u64, max: usize) {
        let all = keys.saturating_mul(1 << self.thinning.power());
        let fits = |thinning: &Thinning| thinning.of(all) <= max as u64;
        self.thinning = (0..).map_while(Thinning::new).find(fits).unwrap_or(Thinning::MOST);
    }

    /// An inventory begins. `Err` where there is room for more of it than was asked for: twice as much would fit with a
    /// quarter to spare, so that it is not too much again soon.
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

    /// What follows from a message that could not be taken: all is asked for anew, and less of it where it is too much.
    fn after(&mut self, unheard: Unheard) -> String {
        self.upto = None;
        if let Unheard::Memory { keys, max } = unheard {
            self.fit(keys, max);
        }
        unheard.to_string()
    }
}
