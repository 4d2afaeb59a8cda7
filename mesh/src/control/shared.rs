//! What the tasks of a control share: the membership, whose steps are carried out here, and what this node publishes.

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use super::wire::namespaces::NamespacesReply;
use super::{Config, Figures, News};
use crate::backlog::Backlog;
use crate::feed::Feed;
#[cfg(feature = "etcd")]
use crate::membership::Registration;
use crate::membership::{Endpoint, Failure, Identity, Membership, Step};
use crate::pace::{self, Pace};
use crate::refusals::Reason;
use crate::sync::{Rarely, lock, now};
use crate::tls::Credentials;
use crate::transport::{BootId, NodeId, PeerNumber};

/// Changes that a follower may have missed and still go on: 8 MiB, some seconds of the fastest changes there are.
const REMEMBERED_CHANGES: usize = 1 << 20;

/// What the tasks share.
pub(super) struct Shared {
    pub(super) config: Config,
    pub(super) credentials: Option<Credentials>,
    pub(super) feed: Mutex<Feed>,
    /// Changes whenever the feed has another batch.
    pub(super) published: watch::Sender<()>,
    /// What peers were told last of this node's namespaces, and when.
    pub(super) listed: tokio::sync::Mutex<Told>,
    pub(super) backlog: Backlog,
    up: Up,
    figures: Arc<Figures>,
    pace: Mutex<Pace>,
    membership: Mutex<Membership>,
    streams: Mutex<HashMap<Endpoint, Following>>,
    follow: Follow,
    /// Who is not followed may be reached now: a stranger follows, or a node was lost that answered at another address, too.
    pub(super) retry: Notify,
    /// Changes when pauses between attempts to follow are to end.
    pub(super) hurry: watch::Sender<()>,
    /// Changes when peers are to hear that a request here waits for a block.
    pub(super) waits: watch::Sender<()>,
    /// The name and life of each follower in the log for having the name of a live member.
    pub(super) told_twins: Mutex<BTreeSet<(String, u64)>>,
    began: Instant,
    rarely: Rarely,
}

/// An answer of this node; without a reply where its blocks could not be counted.
type Told = Option<(tokio::time::Instant, Option<NamespacesReply>)>;
type Up = Box<dyn Fn(News) + Send + Sync>;
/// Where the caller sees what becomes of the mesh: what it is told, and the figures that it looks at.
pub(super) type Seen = (Up, Arc<Figures>);

/// Follows an endpoint at an address, until it is aborted; a wake-up asks for all anew.
pub(super) type Follow = fn(Arc<Shared>, Endpoint, String, Arc<Notify>) -> AbortHandle;

struct Following {
    task: AbortHandle,
    /// All is to be asked for anew.
    anew: Arc<Notify>,
}

// === impl Shared ===

impl Shared {
    pub(super) fn new(
        config: Config,
        credentials: Option<Credentials>,
        (up, figures): Seen,
        follow: Follow,
    ) -> Arc<Self> {
        let pace = Pace::new(config.limits.turn);
        figures.show(&pace);
        let gone_ms = config.limits.gone.as_millis() as u64;
        Arc::new(Self {
            membership: Mutex::new(Membership::new((config.node.clone(), config.boot), gone_ms)),
            config,
            credentials,
            feed: Mutex::new(Feed::new(REMEMBERED_CHANGES)),
            published: watch::Sender::new(()),
            listed: tokio::sync::Mutex::default(),
            backlog: Backlog::new(),
            up,
            figures,
            pace: Mutex::new(pace),
            streams: Mutex::default(),
            follow,
            retry: Notify::new(),
            hurry: watch::Sender::new(()),
            waits: watch::Sender::new(()),
            told_twins: Mutex::default(),
            began: now(),
            rarely: Rarely::new(),
        })
    }

    /// Nobody is followed any more.
    pub(super) fn unfollow_all(&self) {
        lock(&self.streams).drain().for_each(|(_, following)| following.task.abort());
    }

    pub(super) fn tell(&self, news: News) {
        (self.up)(news);
    }

    pub(super) fn note(&self, text: String) {
        self.tell(News::Note(text));
    }

    /// Counts a connection that came to nothing.
    pub(super) fn count(&self, reason: Reason) {
        self.config.refusals.count(reason);
    }

    /// Notes something as frequent as connections: at most once a second. Returns whether it did.
    pub(super) fn note_rarely(&self, text: String) -> bool {
        let is_due = self.rarely.due();
        if is_due {
            self.note(text);
        }
        is_due
    }

    fn now_ms(&self) -> u64 {
        now().saturating_duration_since(self.began).as_millis() as u64
    }

    // === pace ===

    pub(super) fn enter(&self) -> u64 {
        let mut pace = lock(&self.pace);
        let follower = pace.enter();
        self.figures.show(&pace);
        follower
    }

    pub(super) fn leave(&self, follower: u64) {
        let mut pace = lock(&self.pace);
        pace.leave(follower);
        self.figures.show(&pace);
    }

    /// A follower waits for a block.
    pub(super) fn wait(&self, follower: u64) {
        lock(&self.pace).wait(follower, self.now_ms());
    }

    /// How long a follower rests between two batches.
    pub(super) fn rest(&self, follower: u64) -> Duration {
        lock(&self.pace).rest(follower, self.now_ms())
    }

    /// Peers are to hear that a request here waits, where they may have so many followers that it makes a difference.
    pub(super) fn say_that_one_waits(&self) {
        if pace::rest(self.config.limits.turn, self.sharing()) > pace::GATHER {
            self.waits.send_replace(());
        }
    }

    // === membership ===

    /// A listed name has these addresses now.
    pub(super) fn resolved(self: &Arc<Self>, name: &str, addresses: BTreeSet<SocketAddr>) {
        let steps = lock(&self.membership).resolved(self.now_ms(), name, addresses);
        self.carry_out(steps);
    }

    /// A listed name resolved before and `is_one` that does not any more, or the other way round.
    pub(super) fn count_unresolved(&self, is_one: bool) {
        let count = &self.figures.unresolved;
        if is_one {
            count.fetch_add(1, Ordering::Relaxed)
        } else {
            count.fetch_sub(1, Ordering::Relaxed)
        };
    }

    pub(super) fn tick(self: &Arc<Self>) {
        let steps = lock(&self.membership).tick(self.now_ms());
        self.carry_out(steps);
    }

    /// The member at an endpoint.
    pub(super) fn number(&self, endpoint: Endpoint) -> Option<PeerNumber> {
        lock(&self.membership).number(endpoint)
    }

    /// Whether this life of a node is heard of.
    pub(super) fn knows(&self, node: &str, boot: u64) -> bool {
        lock(&self.membership).knows(node, boot)
    }

    /// The live holder of a name, claimed by another life.
    pub(super) fn name_holder(&self, node: &str, boot: u64) -> Option<String> {
        lock(&self.membership).name_holder(node, boot)
    }

    /// Members: the name and life of each, and where it is followed.
    pub(super) fn members(&self) -> Vec<(NodeId, BootId, String)> {
        lock(&self.membership).followed()
    }

    /// Among how many peers the directory's memory is divided.
    pub(super) fn sharing(&self) -> usize {
        lock(&self.membership).sharing()
    }

    /// The stream of an endpoint is up: which member's it is, if anybody's, or why it is not wanted.
    pub(super) fn hello(
        self: &Arc<Self>,
        endpoint: Endpoint,
        identity: &Identity,
    ) -> Result<Option<PeerNumber>, Failure> {
        let steps = lock(&self.membership).hello(self.now_ms(), endpoint, identity);
        let steps = steps
            .inspect_err(|failure| failure.reason().into_iter().for_each(|reason| self.count(reason)))?;
        self.carry_out(steps);
        Ok(self.number(endpoint))
    }

    pub(super) fn down(self: &Arc<Self>, endpoint: Endpoint, why: &Failure) {
        let steps = lock(&self.membership).down(self.now_ms(), endpoint, why);
        self.carry_out(steps);
    }

    fn carry_out(self: &Arc<Self>, steps: impl IntoIterator<Item = Step>) {
        self.figures.empty.store(lock(&self.membership).empty(), Ordering::Relaxed);
        for step in steps {
            match step {
                Step::Tell(news) => self.tell(news),
                Step::Follow(endpoint, address) => {
                    let anew = Arc::new(Notify::new());
                    let task = (self.follow)(Arc::clone(self), endpoint, address, Arc::clone(&anew));
                    lock(&self.streams).insert(endpoint, Following { task, anew });
                }
                Step::Unfollow(endpoint) => {
                    if let Some(following) = lock(&self.streams).remove(&endpoint) {
                        following.task.abort();
                    }
                }
                Step::Retry => self.retry.notify_one(),
            }
        }
    }

    /// All of a member is asked for anew.
    pub(super) fn resync(&self, number: PeerNumber) {
        let endpoint = lock(&self.membership).endpoint(number);
        if let Some(following) =
            endpoint.and_then(|endpoint| lock(&self.streams).get(&endpoint).map(|one| Arc::clone(&one.anew)))
        {
            following.notify_one();
        }
    }
}

#[cfg(feature = "etcd")]
impl Shared {
    /// These are registered, and no others.
    pub(super) fn registered(self: &Arc<Self>, all: Vec<Registration>) {
        let steps = lock(&self.membership).registered(all);
        self.carry_out(steps);
    }

    /// This one is registered.
    pub(super) fn put(self: &Arc<Self>, one: Registration) {
        let steps = lock(&self.membership).put(one);
        self.carry_out(steps);
    }

    pub(super) fn delete(self: &Arc<Self>, node: &NodeId, revision: i64) {
        let steps = lock(&self.membership).delete(node, revision);
        self.carry_out(steps);
    }
}

// === impl Figures ===

impl Figures {
    fn show(&self, pace: &Pace) {
        self.pace_us.store(pace.longest().as_micros() as u64, Ordering::Relaxed);
    }
}
