//! The thread: one runtime, on which the membership's steps are carried out.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::{Notify, watch};
use tokio::task::AbortHandle;

use super::{Config, Members, News, etcd, follow, serve};
use crate::Error;
use crate::digest::Change;
use crate::feed::Feed;
use crate::membership::{Identity, Membership, Registration, Seat, Step};
use crate::tls::{Credentials, Security};
use crate::transport::{NodeId, PeerNumber};

/// Changes that a follower may have missed and still go on: 8 MiB, some seconds of the fastest changes there are.
const REMEMBERED_CHANGES: usize = 1 << 20;
/// Changes are gathered for so long before they are told.
const GATHER: Duration = Duration::from_millis(5);
/// How often the membership is told the time.
const TICK: Duration = Duration::from_millis(250);

/// Names that are resolved at a time: the system's resolver blocks a thread for each.
const NAMES_MAX: usize = 32;

/// What the caller orders. The queue has no limit because the thread that empties it never waits.
pub(super) enum Command {
    Publish(Vec<Change>),
    Resync(PeerNumber),
    Drain,
}

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
    /// Somebody follows who is no member that is heard of.
    pub(super) stranger: Notify,
    /// Changes when pauses between attempts to follow are to end.
    pub(super) hurry: watch::Sender<()>,
    began: Instant,
    /// When something was noted rarely for the last time.
    noted_ms: AtomicU64,
}

struct Following {
    task: AbortHandle,
    /// All is to be asked for anew.
    anew: Arc<Notify>,
}

#[expect(clippy::disallowed_methods, reason = "limits are kept")]
fn now() -> Instant {
    Instant::now()
}

/// What a mutex guards stays whole when a task panics: no guard is held over a call that can.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Everything that can fail is done here; what comes back is the thread.
pub(super) fn prepare(
    config: Config,
    listener: std::net::TcpListener,
    up: Box<dyn Fn(News) + Send + Sync>,
    orders: UnboundedReceiver<Command>,
) -> Result<impl FnOnce() + Send + 'static, Error> {
    let credentials = match &config.security {
        Security::Tls(files) => Some(Credentials::read(files.clone())?),
        Security::Plaintext => None,
    };
    let unable = |source| Error::Os { doing: "start a runtime", source };
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().max_blocking_threads(NAMES_MAX).build().map_err(unable)?;
    let listener = {
        let _entered = runtime.enter();
        TcpListener::from_std(listener).map_err(unable)?
    };
    let gone_ms = config.limits.gone.as_millis() as u64;
    let shared = Arc::new(Shared {
        membership: Mutex::new(Membership::new((config.node.clone(), config.boot), gone_ms)),
        config,
        credentials,
        feed: Mutex::new(Feed::new(REMEMBERED_CHANGES)),
        published: watch::Sender::new(()),
        up,
        streams: Mutex::default(),
        stranger: Notify::new(),
        hurry: watch::Sender::new(()),
        began: now(),
        noted_ms: AtomicU64::new(0),
    });
    Ok(move || {
        runtime.block_on(run(shared, listener, orders));
        // A name that is being resolved has a thread of its own, which is not waited for.
        runtime.shutdown_background();
    })
}

/// Until the caller has enough.
async fn run(shared: Arc<Shared>, listener: TcpListener, mut orders: UnboundedReceiver<Command>) {
    tokio::spawn(serve::listen(Arc::clone(&shared), listener));
    tokio::spawn(follow::greet_strangers(Arc::clone(&shared)));
    let leaving = Arc::new(Notify::new());
    let registrar = match &shared.config.members {
        Members::Static(peers) => {
            let steps = lock(&shared.membership).listed(peers);
            shared.carry_out(steps);
            None
        }
        Members::Etcd(etcd) => {
            let leaving = Arc::clone(&leaving);
            Some(tokio::spawn(etcd::register(Arc::clone(&shared), etcd.clone(), leaving)))
        }
    };
    let mut clock = tokio::time::interval(TICK);
    let mut seal = None;
    loop {
        let due = async {
            match seal {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            order = orders.recv() => match order {
                Some(Command::Publish(changes)) => {
                    lock(&shared.feed).apply(&changes);
                    seal.get_or_insert_with(|| tokio::time::Instant::from_std(now() + GATHER));
                }
                Some(Command::Resync(number)) => shared.resync(number),
                Some(Command::Drain) | None => break,
            },
            () = due => {
                seal = None;
                lock(&shared.feed).seal();
                shared.published.send_replace(());
            }
            _ = clock.tick() => {
                let steps = lock(&shared.membership).tick(shared.now_ms());
                shared.carry_out(steps);
            }
        }
    }
    for (_, following) in lock(&shared.streams).drain() {
        following.task.abort();
    }
    if let Some(registrar) = registrar {
        leaving.notify_one();
        let _ = tokio::time::timeout(shared.config.limits.etcd, registrar).await;
    }
}

// === impl Shared ===

impl Shared {
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

    /// It is down.
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

    /// No more.
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
                    let task = follow::follow(Arc::clone(self), seat, address, Arc::clone(&anew));
                    let task = tokio::spawn(task).abort_handle();
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

    fn resync(&self, number: PeerNumber) {
        let seat = lock(&self.membership).seat(number);
        if let Some(following) =
            seat.and_then(|seat| lock(&self.streams).get(&seat).map(|one| Arc::clone(&one.anew)))
        {
            following.notify_one();
        }
    }
}
