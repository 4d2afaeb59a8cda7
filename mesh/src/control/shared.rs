//! The state shared by the tasks of a control thread: the membership, whose steps are carried out here, and
//! the feed of this node.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use super::wire::namespaces::NamespacesReply;
use super::{ControlConfig, ControlFigures, MemberEvent};
use crate::backlog::Backlog;
use crate::feed::Feed;
#[cfg(feature = "etcd")]
use crate::membership::Registration;
use crate::membership::{FollowFailure, Identity, MemberEndpoint, Membership, MembershipStep};
use crate::pace::FollowerPace;
use crate::refusals::Reason;
use crate::sync::{Rarely, lock_mutex, read_clock};
use crate::tls::Credentials;
use crate::transport::{BootId, NodeId, PeerNumber};

/// Maximum changes missed by a follower that can resume: 8 MiB, some seconds at the highest rate.
const REMEMBERED_CHANGES: usize = 1 << 20;

/// The state shared by the tasks.
pub(super) struct ControlShared {
    pub(super) config: ControlConfig,
    pub(super) credentials: Option<Credentials>,
    pub(super) feed: Mutex<Feed>,
    /// Changes whenever the feed has another batch.
    pub(super) published: watch::Sender<()>,
    /// The last answer about this node's namespaces, and its time.
    pub(super) listed: tokio::sync::Mutex<LastReply>,
    /// Held while a list of this node's best blocks is made, and for a rest behind it.
    pub(super) listing_blocks: tokio::sync::Mutex<()>,
    pub(super) backlog: Backlog,
    up: Up,
    figures: Arc<ControlFigures>,
    pace: Mutex<FollowerPace>,
    membership: Mutex<Membership>,
    streams: Mutex<HashMap<MemberEndpoint, Following>>,
    follow: Follow,
    /// Notified when an endpoint without a stream may be reachable: an unknown node follows, or a lost node
    /// had answered at another address, too.
    pub(super) retry: Notify,
    /// Changes to end the pauses between attempts to follow.
    pub(super) retry_now: watch::Sender<()>,
    /// Changes when a request here waits for a block, and peers are to be notified.
    pub(super) waits: watch::Sender<()>,
    /// True once this node is about to leave.
    pub(super) leaving: watch::Sender<bool>,
    /// Followers already logged for having the name of a live member: the name and life of each.
    pub(super) reported_twins: Mutex<BTreeSet<(String, u64)>>,
    began: Instant,
    rarely: Rarely,
}

/// An answer of this node, with its time; without a reply if the blocks were not counted in time.
type LastReply = Option<(tokio::time::Instant, Option<NamespacesReply>)>;
type Up = Box<dyn Fn(MemberEvent) + Send + Sync>;
/// The caller's side: its callback, and the figures it reads.
pub(super) type Seen = (Up, Arc<ControlFigures>);

/// Starts to follow an endpoint at an address, until the task is aborted; a notification requests the whole
/// inventory again.
pub(super) type Follow = fn(Arc<ControlShared>, MemberEndpoint, String, Arc<Notify>) -> AbortHandle;

struct Following {
    task: AbortHandle,
    /// Requests the whole inventory again.
    anew: Arc<Notify>,
}

// === impl ControlShared ===

impl ControlShared {
    pub(super) fn new(
        config: ControlConfig,
        credentials: Option<Credentials>,
        (up, figures): Seen,
        follow: Follow,
    ) -> Arc<Self> {
        let pace = FollowerPace::new(config.limits.turn);
        figures.show(&pace);
        let gone_ms = config.limits.gone.as_millis() as u64;
        Arc::new(Self {
            membership: Mutex::new(Membership::new((config.node.clone(), config.boot), gone_ms)),
            config,
            credentials,
            feed: Mutex::new(Feed::new(REMEMBERED_CHANGES)),
            published: watch::Sender::new(()),
            listed: tokio::sync::Mutex::default(),
            listing_blocks: tokio::sync::Mutex::default(),
            backlog: Backlog::new(),
            up,
            figures,
            pace: Mutex::new(pace),
            streams: Mutex::default(),
            follow,
            retry: Notify::new(),
            retry_now: watch::Sender::new(()),
            waits: watch::Sender::new(()),
            leaving: watch::Sender::new(false),
            reported_twins: Mutex::default(),
            began: read_clock(),
            rarely: Rarely::new(),
        })
    }

    /// Ends all streams to peers.
    pub(super) fn unfollow_all(&self) {
        lock_mutex(&self.streams).drain().for_each(|(_, following)| following.task.abort());
    }

    pub(super) fn report_event(&self, event: MemberEvent) {
        (self.up)(event);
    }

    pub(super) fn report_note(&self, text: String) {
        self.report_event(MemberEvent::Note(text));
    }

    /// Counts a failed connection.
    pub(super) fn count_refusal(&self, reason: Reason) {
        self.config.refusals.count_refusal(reason);
    }

    /// Logs an event as frequent as connections, at most once a second. Returns true if it was logged.
    pub(super) fn note_rarely(&self, text: String) -> bool {
        let is_due = self.rarely.due();
        if is_due {
            self.report_note(text);
        }
        is_due
    }

    fn now_ms(&self) -> u64 {
        read_clock().saturating_duration_since(self.began).as_millis() as u64
    }

    /// Announces the gathered changes and promises to all followers.
    pub(super) fn seal_changes(&self) {
        lock_mutex(&self.feed).seal();
        self.published.send_replace(());
    }

    // === pace ===

    pub(super) fn add_follower(&self) -> u64 {
        let mut pace = lock_mutex(&self.pace);
        let follower = pace.add_follower();
        self.figures.show(&pace);
        follower
    }

    pub(super) fn remove_follower(&self, follower: u64) {
        let mut pace = lock_mutex(&self.pace);
        pace.remove_follower(follower);
        self.figures.show(&pace);
    }

    /// Marks a follower as waiting for a block.
    pub(super) fn note_wait(&self, follower: u64) {
        lock_mutex(&self.pace).note_wait(follower, self.now_ms());
    }

    /// The time between two batches to a follower.
    pub(super) fn follower_rest(&self, follower: u64) -> Duration {
        lock_mutex(&self.pace).follower_rest(follower, self.now_ms())
    }

    /// True if any follower has a waiting request.
    pub(super) fn any_waits(&self) -> bool {
        lock_mutex(&self.pace).count_waiting(self.now_ms()) > 0
    }

    // === membership ===

    /// Sets the addresses of a listed name.
    pub(super) fn resolved(self: &Arc<Self>, name: &str, addresses: BTreeSet<SocketAddr>) {
        let steps = lock_mutex(&self.membership).resolved(self.now_ms(), name, addresses);
        self.carry_out(steps);
    }

    /// Counts a listed name as unresolved if `is_one`, and otherwise as resolved again.
    pub(super) fn count_unresolved(&self, is_one: bool) {
        let count = &self.figures.unresolved;
        if is_one {
            count.fetch_add(1, Ordering::Relaxed)
        } else {
            count.fetch_sub(1, Ordering::Relaxed)
        };
    }

    pub(super) fn tick(self: &Arc<Self>) {
        let steps = lock_mutex(&self.membership).tick(self.now_ms());
        self.carry_out(steps);
    }

    /// The member at an endpoint.
    pub(super) fn number(&self, endpoint: MemberEndpoint) -> Option<PeerNumber> {
        lock_mutex(&self.membership).number(endpoint)
    }

    /// True if the membership knows this life of a node.
    pub(super) fn knows(&self, node: &str, boot: u64) -> bool {
        lock_mutex(&self.membership).knows(node, boot)
    }

    /// The number of this life of a node, if it is a member.
    pub(super) fn number_of(&self, node: &str, boot: u64) -> Option<PeerNumber> {
        lock_mutex(&self.membership).number_of(node, boot)
    }

    /// The name, life and control address of a followed member.
    pub(super) fn member(&self, number: PeerNumber) -> Option<(NodeId, BootId, String)> {
        let membership = lock_mutex(&self.membership);
        let mut followed = membership.followed().into_iter();
        followed.find(|(node, boot, _)| membership.number_of(node.as_str(), boot.0.get()) == Some(number))
    }

    /// The live member with this name, if another life claims it.
    pub(super) fn name_holder(&self, node: &str, boot: u64) -> Option<String> {
        lock_mutex(&self.membership).name_holder(node, boot)
    }

    /// The followed members: the name, life and control address of each.
    pub(super) fn members(&self) -> Vec<(NodeId, BootId, String)> {
        lock_mutex(&self.membership).followed()
    }

    /// The number of peers among which the directory's memory is divided.
    pub(super) fn sharing(&self) -> usize {
        lock_mutex(&self.membership).sharing()
    }

    /// Marks the stream of an endpoint as up. Returns its member, if there is one, or the reason to end the
    /// stream.
    pub(super) fn hello(
        self: &Arc<Self>,
        endpoint: MemberEndpoint,
        identity: &Identity,
    ) -> Result<Option<PeerNumber>, FollowFailure> {
        let steps = lock_mutex(&self.membership).hello(self.now_ms(), endpoint, identity);
        let steps = steps.inspect_err(|failure| {
            failure.reason().into_iter().for_each(|reason| self.count_refusal(reason))
        })?;
        self.carry_out(steps);
        Ok(self.number(endpoint))
    }

    pub(super) fn down(self: &Arc<Self>, endpoint: MemberEndpoint, why: &FollowFailure) {
        let steps = lock_mutex(&self.membership).down(self.now_ms(), endpoint, why);
        self.carry_out(steps);
    }

    fn carry_out(self: &Arc<Self>, steps: impl IntoIterator<Item = MembershipStep>) {
        self.figures.empty.store(lock_mutex(&self.membership).empty(), Ordering::Relaxed);
        for step in steps {
            match step {
                MembershipStep::Tell(event) => self.report_event(event),
                MembershipStep::Follow(endpoint, address) => {
                    let anew = Arc::new(Notify::new());
                    let task = (self.follow)(Arc::clone(self), endpoint, address, Arc::clone(&anew));
                    lock_mutex(&self.streams).insert(endpoint, Following { task, anew });
                }
                MembershipStep::Unfollow(endpoint) => {
                    if let Some(following) = lock_mutex(&self.streams).remove(&endpoint) {
                        following.task.abort();
                    }
                }
                MembershipStep::Retry => self.retry.notify_one(),
            }
        }
    }

    /// Requests the whole inventory of a member again.
    pub(super) fn resync(&self, number: PeerNumber) {
        let endpoint = lock_mutex(&self.membership).endpoint(number);
        if let Some(following) = endpoint
            .and_then(|endpoint| lock_mutex(&self.streams).get(&endpoint).map(|one| Arc::clone(&one.anew)))
        {
            following.notify_one();
        }
    }
}

#[cfg(feature = "etcd")]
impl ControlShared {
    /// Replaces all registrations.
    pub(super) fn registered(self: &Arc<Self>, all: Vec<Registration>) {
        let steps = lock_mutex(&self.membership).registered(all);
        self.carry_out(steps);
    }

    /// Adds a registration.
    pub(super) fn put_registration(self: &Arc<Self>, one: Registration) {
        let steps = lock_mutex(&self.membership).put_registration(one);
        self.carry_out(steps);
    }

    pub(super) fn delete(self: &Arc<Self>, node: &NodeId, revision: i64) {
        let steps = lock_mutex(&self.membership).delete(node, revision);
        self.carry_out(steps);
    }
}

// === impl ControlFigures ===

impl ControlFigures {
    fn show(&self, pace: &FollowerPace) {
        self.pace_us.store(pace.longest().as_micros() as u64, Ordering::Relaxed);
    }
}
