//! What the data thread is asked from outside: to end, and what [`crate::control`] wants of it.
//!
//! The thread takes one ask between two of its turns, and of a long one a part. Whoever asks waits on a channel of its own.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use rustix::io::Errno;
use shm_protocol::key::{BlockHash, NamespaceDigest};
use shm_protocol::prefill::PrefillRate;
use shm_protocol::wait;
use tokio::sync::oneshot;

use crate::core::Kept;

/// Asks that wait; beyond it the sidecar is busy. Each is small, and taken within milliseconds.
const ASKS_MAX: usize = 32;
/// Keys of one look-up: at 1023 peers, each of whose filters is asked for each, some milliseconds.
pub const KEYS_MAX: usize = 64;

/// The channel by which an answer travels.
pub type Reply<T> = oneshot::Sender<T>;

/// What the data thread is asked for.
#[derive(Debug)]
pub enum Ask {
    /// How many blocks are kept where.
    Survey(Reply<Surveyed>),
    /// Where these blocks are, [`KEYS_MAX`] at most.
    Locate(NamespaceDigest, Vec<BlockHash>, Reply<Vec<Found>>),
    /// The rates of engines and of sources.
    Rates(Reply<KnownRates>),
    /// All blocks of a namespace go.
    Evict(NamespaceDigest, Reply<Evicted>),
}

/// What is kept here, and what peers are known to keep.
#[derive(Debug)]
pub struct Surveyed {
    pub namespaces: BTreeMap<NamespaceDigest, Kept>,
    /// Whether there are disks.
    pub disks: bool,
    /// Each member's name and blocks; `None` without a mesh.
    pub peers: Option<Vec<(String, usize)>>,
}

/// Known rates.
#[derive(Debug, Default)]
pub struct KnownRates {
    /// By engine: its rate, and the bytes of a token.
    pub engines: Vec<(String, PrefillRate, f64)>,
    /// Disks and peers, each with bytes a second.
    pub sources: Vec<(String, u64)>,
}

/// Where one block is; peers by their names.
#[derive(Debug)]
pub struct Found {
    pub memory: bool,
    pub disk: bool,
    pub peers: Vec<String>,
}

/// What came of an eviction.
#[derive(Copy, Clone, Debug)]
pub enum Evicted {
    Removed(Kept),
    /// Nothing of this namespace was ever kept here.
    Unknown,
    /// Blocks of earlier lives are still to come.
    Recovering,
}

/// Where asks go in; shared by all who ask.
#[derive(Debug)]
pub struct Inbox {
    /// Milliseconds that copies in flight may take from now on; zero while nobody asked to end.
    grace_ms: AtomicU64,
    asks: SyncSender<Ask>,
    wake: OwnedFd,
}

/// The data thread's end of it.
#[derive(Debug)]
pub struct Asks(Receiver<Ask>);

/// An inbox, and where what goes in comes out.
pub fn inbox() -> Result<(Arc<Inbox>, Asks), Errno> {
    let (asks, taken) = sync_channel(ASKS_MAX);
    let inbox = Inbox { grace_ms: AtomicU64::new(0), asks, wake: wait::eventfd()? };
    Ok((Arc::new(inbox), Asks(taken)))
}

// === impl Inbox ===

impl Inbox {
    /// The grace, once someone asked to end.
    pub fn grace(&self) -> Option<Duration> {
        let grace = self.grace_ms.load(Ordering::Relaxed);
        (grace != 0).then(|| Duration::from_millis(grace))
    }

    pub fn drain(&self, grace: Duration) {
        self.grace_ms.store((grace.as_millis() as u64).max(1), Ordering::Relaxed);
        wait::signal(&self.wake);
    }

    /// Asks the data thread, and does not wait; false where too many asks wait already, or it has ended.
    #[must_use = "who is not asked does not answer"]
    pub fn ask(&self, ask: Ask) -> bool {
        let taken = self.asks.try_send(ask).is_ok();
        wait::signal(&self.wake);
        taken
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }
}

// === impl Asks ===

impl Asks {
    pub fn take(&self) -> Option<Ask> {
        self.0.try_recv().ok()
    }
}
