//! What the tasks of a control share: the membership, whose steps are carried out here, and what this node publishes.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use super::{Config, News};
use crate::feed::Feed;
use crate::membership::{Identity, Membership, Registration, Seat, Step};
use crate::tls::Credentials;
use crate::transport::{NodeId, PeerNumber};

/// Changes that a follower may have missed and still go on: 8 MiB, some seconds of the fastest changes there are.
const REMEMBERED_CHANGES: usize = 1 << 20;

/// What the tasks share.
pub(super) struct Shared {
    pub(super) config: Config,
    pub(super) credentials: Option<Credentials>,
    pub(super) feed: Mutex<Feed>,
    /// Changes whenever the feed has another batch.
    pub(super) published: watch::Sender<()>,
    up: Box<dyn Fn(News) + Send + Sync>,
    membership: Mutex<Membership>,
    streams: Mutex<HashMap<Seat, Following>>,
    follow: Follow,
    /// Somebody follows who is no member that is heard of.
    pub(super) stranger: Notify,
    /// Changes when pauses between attempts to follow are to end.
    pub(super) hurry: watch::Sender<()>,
    began: Instant,
    /// When something was noted rarely for the last time.
    noted_ms: AtomicU64,
}

/// Follows a seat at an address, until it is aborted; a wake-up asks for all anew.
pub(super) type Follow = fn(Arc<Shared>, Seat, String, Arc<Notify>) -> AbortHandle;

struct Following {
    task: AbortHandle,
    /// All is to be asked for anew.
    anew: Arc<Notify>,
}

#[expect(clippy::disallowed_methods, reason = "limits are kept")]
pub(super) fn now() -> Instant {
    Instant::now()
}

/// What a mutex guards stays whole when a task panics: no guard is held over a call that can.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl Shared ===

impl Shared {
    pub(super) fn new(
        config: Config,
        credentials: Option<Credentials>,
        up: Box<dyn Fn(News) + Send + Sync>,
        follow: Follow,
    ) -> Arc<Self> {
        let gone_ms = config.limits.gone.as_millis() as u64;
        Arc::new(Self {
            membership: Mutex::new(Membership::new((config.node.clone(), config.boot), gone_ms)),
            config,
            credentials,
            feed: Mutex::new(Feed::new(REMEMBERED_CHANGES)),
            published: watch::Sender::new(()),
            up,
            streams: Mutex::default(),
            follow,
            stranger: Notify::new(),
            hurry: watch::Sender::new(()),
            began: now(),
            noted_ms: AtomicU64::new(0),
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

    /// Notes something that happens as often as somebody connects: at most once a second.
    pub(super) fn note_rarely(&self, text: String) {
        let ms = self.now_ms() + 1000;
        if ms >= self.noted_ms.load(Ordering::Relaxed) + 1000 {
            self.noted_ms.store(ms, Ordering::Relaxed);
            self.note(text);
        }
    }

    fn now_ms(&self) -> u64 {
        now().saturating_duration_since(self.began).as_millis() as u64
    }

    // === membership ===

    pub(super) fn listed(self: &Arc<Self>, peers: &[String]) {
        let steps = lock(&self.membership).listed(peers);
        self.carry_out(steps);
    }

    pub(super) fn tick(self: &Arc<Self>) {
        let steps = lock(&self.membership).tick(self.now_ms());
        self.carry_out(steps);
    }

    /// The member on a seat.
    pub(super) fn number(&self, seat: Seat) -> Option<PeerNumber> {
        lock(&self.membership).number(seat)
    }

    /// Whether this life of a node is heard of.
    pub(super) fn knows(&self, node: &str, boot: u64) -> bool {
        lock(&self.membership).knows(node, boot)
    }

    /// How many peers are followed, or tried.
    pub(super) fn followed(&self) -> usize {
        lock(&self.streams).len()
    }

    /// The stream of a seat is up: which member's it is, if anybody's, or why it is not wanted.
    pub(super) fn hello(
        self: &Arc<Self>,
        seat: Seat,
        identity: &Identity,
    ) -> Result<Option<PeerNumber>, String> {
        let steps = lock(&self.membership).hello(seat, identity)?;
        self.carry_out(steps);
        Ok(self.number(seat))
    }

    pub(super) fn down(self: &Arc<Self>, seat: Seat) {
        let step = lock(&self.membership).down(self.now_ms(), seat);
        self.carry_out(step);
    }

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

    fn carry_out(self: &Arc<Self>, steps: impl IntoIterator<Item = Step>) {
        for step in steps {
            match step {
                Step::Tell(news) => self.tell(news),
                Step::Follow(seat, address) => {
                    let anew = Arc::new(Notify::new());
                    let task = (self.follow)(Arc::clone(self), seat, address, Arc::clone(&anew));
                    lock(&self.streams).insert(seat, Following { task, anew });
                }
                Step::Unfollow(seat) => {
                    if let Some(following) = lock(&self.streams).remove(&seat) {
                        following.task.abort();
                    }
                }
            }
        }
    }

    /// All of a member is asked for anew.
    pub(super) fn resync(&self, number: PeerNumber) {
        let seat = lock(&self.membership).seat(number);
        if let Some(following) =
            seat.and_then(|seat| lock(&self.streams).get(&seat).map(|one| Arc::clone(&one.anew)))
        {
            following.notify_one();
        }
    }
}
