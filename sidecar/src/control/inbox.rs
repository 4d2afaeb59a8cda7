//! Requests to the data thread from outside: to end, and those of [`crate::control`].
//!
//! The data thread takes one request between two turns; a long request is cut into several. Each client waits
//! on its own channel.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use mesh::listed::ListedBlock;
use rustix::io::Errno;
use shm_protocol::hints::Advice;
use shm_protocol::key::{BlockHash, NamespaceDigest};
use shm_protocol::prefill::PrefillRate;
use shm_protocol::wait;
use tiers::dram::HintedCounts;
use tokio::sync::oneshot;

use crate::core::{BestBlocks, KeptCounts, PromptPlaces, PromptScore, ScoredKeys};

/// Queued requests; beyond this number the sidecar is busy. Each is small and taken within milliseconds.
const ASKS_MAX: usize = 32;
/// Keys of one look-up. With 1023 peers it takes some milliseconds, as each key is looked up in each peer's
/// filter.
pub const KEYS_MAX: usize = 64;

/// The channel of an answer.
pub type Reply<T> = oneshot::Sender<T>;

/// A request to the data thread.
#[derive(Debug)]
pub enum ControlAsk {
    /// Counts of blocks in each place.
    Survey(Reply<Surveyed>),
    /// The places of these blocks, at most [`KEYS_MAX`].
    Locate(NamespaceDigest, Vec<BlockHash>, Reply<Vec<FoundBlock>>),
    /// The rates of engines and of sources.
    Rates(Reply<KnownRates>),
    /// Some more keys of a prompt's score.
    Score(Box<PromptScore>, Reply<ScoreStep>),
    /// A hint for a chain.
    Hint(Box<ScoredKeys>, Advice, Reply<HintedCounts>),
    /// A list of the best blocks of a namespace, for a peer.
    BestBlocks(Box<BestBlocks>, Reply<Vec<ListedBlock>>),
    /// Eviction of all blocks of a namespace.
    Evict(NamespaceDigest, Reply<Evicted>),
}

/// Blocks kept here, and the known blocks of peers.
#[derive(Debug)]
pub struct Surveyed {
    pub namespaces: BTreeMap<NamespaceDigest, KeptCounts>,
    /// Blocks in memory without an announcement of a peer; none without a mesh.
    pub unique: BTreeMap<NamespaceDigest, u64>,
    /// True if the sidecar has disks.
    pub disks: bool,
    /// Each member's name and number of blocks; `None` without a mesh.
    pub peers: Option<Vec<(String, usize)>>,
}

/// Known rates.
#[derive(Debug, Default)]
pub struct KnownRates {
    /// Each engine with its rate and the bytes of a token.
    pub engines: Vec<(String, PrefillRate, f64)>,
    /// Disks and peers, each with bytes a second.
    pub sources: Vec<(String, u64)>,
}

/// The places of one block; peers by name.
#[derive(Debug)]
pub struct FoundBlock {
    pub memory: bool,
    pub disk: bool,
    pub peers: Vec<String>,
}

/// A whole score, with the tokens at each peer by name.
pub type NamedPlaces = (PromptPlaces, BTreeMap<String, u64>);

/// A score after some more keys.
#[derive(Debug)]
pub struct ScoreStep {
    pub score: Box<PromptScore>,
    /// `None`: it goes on.
    pub places: Option<NamedPlaces>,
}

/// The result of an eviction.
#[derive(Copy, Clone, Debug)]
pub enum Evicted {
    Removed(KeptCounts),
    /// The sidecar never kept a block of this namespace.
    Unknown,
    /// Blocks of earlier lives are still being recovered.
    Recovering,
}

/// The sending side of requests; shared by all clients.
#[derive(Debug)]
pub struct Inbox {
    /// Milliseconds left for copies in flight after a request to end; zero without such a request.
    grace_ms: AtomicU64,
    /// Nanoseconds that scores have taken, also those whose client has gone.
    scored_ns: AtomicU64,
    asks: SyncSender<ControlAsk>,
    wake: OwnedFd,
}

/// The data thread's receiving side.
#[derive(Debug)]
pub struct InboxAsks(Receiver<ControlAsk>);

/// Creates an inbox and its receiving side.
pub fn make_inbox() -> Result<(Arc<Inbox>, InboxAsks), Errno> {
    let (asks, taken) = sync_channel(ASKS_MAX);
    let (grace_ms, scored_ns) = Default::default();
    let inbox = Inbox { grace_ms, scored_ns, asks, wake: wait::make_eventfd()? };
    Ok((Arc::new(inbox), InboxAsks(taken)))
}

// === impl Inbox ===

impl Inbox {
    /// Time for copies in flight, once a client requested the end.
    pub fn grace(&self) -> Option<Duration> {
        let grace = self.grace_ms.load(Ordering::Relaxed);
        (grace != 0).then(|| Duration::from_millis(grace))
    }

    /// Counts time of the data thread for a score.
    pub fn count_scored(&self, took: Duration) {
        self.scored_ns.fetch_add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns the time of the data thread for all scores.
    pub fn scored(&self) -> Duration {
        Duration::from_nanos(self.scored_ns.load(Ordering::Relaxed))
    }

    pub fn request_drain(&self, grace: Duration) {
        self.grace_ms.store((grace.as_millis() as u64).max(1), Ordering::Relaxed);
        wait::signal_eventfd(&self.wake);
    }

    /// Queues a request without waiting. Returns false if the queue is full or the data thread has ended.
    #[must_use = "a request refused here gets no answer"]
    pub fn post_ask(&self, ask: ControlAsk) -> bool {
        let taken = self.asks.try_send(ask).is_ok();
        wait::signal_eventfd(&self.wake);
        taken
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

// === impl InboxAsks ===

impl InboxAsks {
    pub fn take_ask(&self) -> Option<ControlAsk> {
        self.0.try_recv().ok()
    }
}
