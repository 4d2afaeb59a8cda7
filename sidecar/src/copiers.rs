//! Copies of blocks between engine memory and the pool: by threads for host memory, by a GPU's copy engines for its own,
//! by the engine itself where its memory cannot be reached.
//!
//! The data thread posts a batch and never waits; its end comes back through [`Copiers::finished`] and an eventfd. The threads
//! compare blocks of the pool, too.

mod gpu;
mod host;
mod staged;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, mpsc};

use copy_engine::HostMemory;
use copy_engine::cuda::Gpu;
use shm_protocol::handshake::WorkerHello;
use shm_protocol::session::SessionMemory;
use shm_protocol::wait;
use tiers::pool::Pool;

use self::gpu::contexts::Contexts;
use self::gpu::link::Links;
use self::gpu::{Asked, GpuRank};
use self::host::{HostCopiers, HostRank};
use self::staged::StagedRank;
use crate::core::{Comparison, CopyId, Direction, Found, Piece, Scan, Searched, SessionId};
use crate::memory::pinning::Pinned;
use crate::system::wake::EndSignal;

/// The memory of a worker session.
#[derive(Clone, Debug)]
pub struct Rank(Memory);

#[derive(Clone, Debug)]
enum Memory {
    Host(Arc<HostRank>),
    Gpu(Arc<GpuRank>),
    Staged(Arc<StagedRank>),
}

/// A batch of copies of one rank.
#[derive(Debug)]
pub struct Batch {
    /// Its name in the core.
    pub copy: CopyId,
    /// Whose it is: its scheduler's session. Threads take engines in turn.
    pub engine: SessionId,
    pub direction: Direction,
    pub pieces: Vec<Piece>,
    /// Loads: the operation, which a closed gate stops.
    pub load_op: u64,
    /// A step of the engine waits for it.
    pub awaited: bool,
}

/// The end of a batch.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Finished {
    pub copy: CopyId,
    /// Whether every block is whole.
    pub ok: bool,
}

/// The end of a comparison of a save's blocks.
type Compared = ((SessionId, u64), Found);
/// The end of a search of a save's blocks.
type Scanned = ((SessionId, u64), Vec<Searched>);

/// What became of a session's rank.
#[derive(Debug)]
pub enum RankNews {
    /// Its memory was opened, or could not be: the error names the remedy.
    Opened(Result<Rank, String>),
    /// A copy of it waits for good; nothing more is copied, and what is in flight may end or not. With its engine's name.
    Parked(String),
}

/// All that copies, and what waits for it.
#[derive(Debug)]
pub struct Copiers {
    host: HostCopiers,
    pool: Arc<Pool>,
    pinned: Arc<Pinned>,
    links: Links,
    contexts: Contexts<Gpu>,
    ends: Ends,
    finished: mpsc::Receiver<Finished>,
    compared: mpsc::Receiver<Compared>,
    scanned: mpsc::Receiver<Scanned>,
    ranks: mpsc::Receiver<(SessionId, RankNews)>,
    running: usize,
}

/// Where ends of batches go.
#[derive(Clone, Debug)]
struct Ends {
    finished: mpsc::Sender<Finished>,
    compared: mpsc::Sender<Compared>,
    scanned: mpsc::Sender<Scanned>,
    ranks: mpsc::Sender<(SessionId, RankNews)>,
    wake: Arc<OwnedFd>,
}

// === impl Rank ===

impl Rank {
    /// Nothing more is copied; what runs ends within milliseconds.
    pub fn stop(&self) {
        match &self.0 {
            Memory::Host(rank) => rank.stop(),
            Memory::Gpu(rank) => rank.stop(),
            Memory::Staged(rank) => rank.stop(),
        }
    }

    /// STAGED: a block lies in the staging segment, or could not be copied there. The error is the peer's fault.
    pub fn staged(&self, tag: u64, slot: u32, ok: bool) -> Result<(), String> {
        match &self.0 {
            Memory::Host(_) | Memory::Gpu(_) => Err("a rank without a staging segment sent STAGED".into()),
            Memory::Staged(rank) => rank.staged(tag, slot, ok),
        }
    }
}

// === impl Ends ===

impl Ends {
    /// Whether anyone still asks.
    fn report(&self, finished: Finished) -> bool {
        let asked = self.finished.send(finished).is_ok();
        self.wake();
        asked
    }

    /// The same of a comparison.
    fn tell(&self, save: (SessionId, u64), found: Found) -> bool {
        let asked = self.compared.send((save, found)).is_ok();
        self.wake();
        asked
    }

    /// The same of a search.
    fn tell_scanned(&self, scanned: Scanned) -> bool {
        let asked = self.scanned.send(scanned).is_ok();
        self.wake();
        asked
    }

    /// A rank's memory is open, or cannot be opened.
    fn opened(&self, session: SessionId, rank: Result<Rank, String>) {
        self.tell_of(session, RankNews::Opened(rank));
    }

    /// A copy of a rank waits for good.
    fn parked(&self, session: SessionId, engine: String) {
        self.tell_of(session, RankNews::Parked(engine));
    }

    fn tell_of(&self, session: SessionId, news: RankNews) {
        // Nobody asks at the sidecar's end.
        let _ = self.ranks.send((session, news));
        self.wake();
    }

    fn wake(&self) {
        wait::signal(&self.wake);
    }
}

// === impl Copiers ===

impl Copiers {
    /// Starts `threads` threads that copy between host memory and `pool`. GPUs reach what of it is `pinned`.
    pub fn start(
        threads: usize,
        pool: &Arc<Pool>,
        pinned: &Arc<Pinned>,
        ended: &Arc<EndSignal>,
    ) -> std::io::Result<Self> {
        let wake = wait::eventfd()?;
        let ((sender, finished), (teller, compared)) = (mpsc::channel(), mpsc::channel());
        let (searcher, scanned) = mpsc::channel();
        let (herald, ranks) = mpsc::channel();
        let ends = Ends {
            finished: sender,
            compared: teller,
            scanned: searcher,
            ranks: herald,
            wake: Arc::new(wake),
        };
        let host = HostCopiers::start(threads, pool, &ends, ended)?;
        let (pool, pinned) = (Arc::clone(pool), Arc::clone(pinned));
        let (links, contexts) = (Links::new(), Contexts::new());
        Ok(Self { host, pool, pinned, links, contexts, ends, finished, compared, scanned, ranks, running: 0 })
    }

    /// A rank in host memory, whose fence words lie in `words`.
    pub fn host_rank(memory: HostMemory, words: SessionMemory, socket: Arc<OwnedFd>) -> Rank {
        Rank(Memory::Host(Arc::new(HostRank::new(memory, words, socket))))
    }

    /// Begins to open a rank on a GPU; [`Copiers::rank_news`] says how that went. The error names the remedy.
    pub fn open_gpu_rank(
        &self,
        (session, engine): (SessionId, &str),
        worker: &WorkerHello,
        words: &SessionMemory,
        socket: &Arc<OwnedFd>,
        process: Option<&OwnedFd>,
    ) -> Result<(), String> {
        let cuda = worker.cuda.as_ref().expect("the caller saw it");
        let process = process.map(OwnedFd::try_clone).transpose();
        GpuRank::start(Asked {
            session,
            engine: engine.into(),
            worker: worker.clone(),
            memory: words.clone(),
            pool: self.pool.shared_region(),
            pinned: Arc::clone(&self.pinned),
            seat: self.links.seat(cuda.uuid),
            contexts: self.contexts.clone(),
            ends: self.ends.clone(),
            _socket: Arc::clone(socket),
            process: process.map_err(|error| {
                format!(
                    "no descriptor for this rank could be made ({error}): raise the \
                 limit of open files"
                )
            })?,
        })
    }

    /// The next news of a rank on a GPU.
    pub fn rank_news(&self) -> Option<(SessionId, RankNews)> {
        self.ranks.try_recv().ok()
    }

    /// Ranks on GPUs whose copies wait for good.
    pub fn parked(&self) -> usize {
        self.contexts.parked()
    }

    /// Where a rank is parked, which the driver would wait for: ends the process.
    pub fn end(&self) {
        if self.parked() > 0 {
            gpu::die("copies wait behind a gate that their engine closed");
        }
    }

    /// A rank that copies loads itself, and its blocks into the segment `staging`.
    pub fn staged_rank(
        &self,
        staging: HostMemory,
        tags: OwnedFd,
        slots: u32,
        words: &SessionMemory,
        socket: Arc<OwnedFd>,
    ) -> Result<Rank, String> {
        let rank = StagedRank::start(staging, tags, slots, words, &self.pool, &self.ends, socket)?;
        Ok(Rank(Memory::Staged(Arc::new(rank))))
    }

    /// Takes a batch of a rank; if there is no room, answers its end, failed, at once.
    pub fn post(&mut self, rank: &Rank, batch: Batch) -> Option<Finished> {
        let copy = batch.copy;
        if batch.pieces.is_empty() {
            return Some(Finished { copy, ok: true });
        }
        let taken = match &rank.0 {
            Memory::Host(rank) => self.host.post(batch, Arc::clone(rank)),
            Memory::Gpu(rank) => rank.post(batch),
            Memory::Staged(rank) => rank.post(batch),
        };
        self.running += usize::from(taken);
        (!taken).then_some(Finished { copy, ok: false })
    }

    /// The next batch that ended, if one did.
    pub fn finished(&mut self) -> Option<Finished> {
        let finished = self.finished.try_recv().ok()?;
        self.running -= 1;
        Some(finished)
    }

    /// Takes blocks to be compared.
    pub fn compare(&self, comparison: Comparison) {
        self.host.compare(comparison);
    }

    /// The next comparison that ended, if one did.
    pub fn compared(&self) -> Option<Compared> {
        self.compared.try_recv().ok()
    }

    /// Takes blocks to be searched for non-finite numbers, and to be summed in the same pass if `sums`.
    pub fn scan(&self, scan: Scan, sums: bool) {
        self.host.scan(scan, sums);
    }

    /// The next end of a search, if there is one.
    pub fn scanned(&self) -> Option<Scanned> {
        self.scanned.try_recv().ok()
    }

    /// Batches that have not been reported as ended.
    pub fn running(&self) -> usize {
        self.running
    }

    /// Becomes readable at every end of a batch or a comparison; watched by edge, never read.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.ends.wake.as_fd()
    }
}
