//! Copies of blocks between engine memory and the pool: threads copy host memory, the GPU's copy engines GPU
//! memory, and the engine itself memory out of the sidecar's reach.
//!
//! The data thread posts a batch and never waits; the end of the batch comes back through
//! [`Copiers::finished`] and an eventfd. The threads also compare blocks of the pool.

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
use self::gpu::link::GpuLinks;
use self::gpu::{GpuRank, GpuRankRequest};
use self::host::{HostCopiers, HostRank};
use self::staged::StagedRank;
use crate::core::{CopyDirection, CopyId, Findings, Inspection, RankBlock, SessionId};
use crate::memory::pinning::Pinned;
use crate::system::wake::EndSignal;

/// The memory of a worker session.
#[derive(Clone, Debug)]
pub struct Rank(RankMemory);

#[derive(Clone, Debug)]
enum RankMemory {
    Host(Arc<HostRank>),
    Gpu(Arc<GpuRank>),
    Staged(Arc<StagedRank>),
}

/// A batch of copies of one rank.
#[derive(Debug)]
pub struct CopyBatch {
    /// Its id in the core.
    pub copy: CopyId,
    /// The session of its engine's scheduler. Threads serve engines in turn.
    pub engine: SessionId,
    pub direction: CopyDirection,
    pub pieces: Vec<RankBlock>,
    /// For loads: the operation, stopped by a closed gate.
    pub load_op: u64,
    /// True if a step of the engine waits for it.
    pub awaited: bool,
}

/// The end of a batch.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Finished {
    pub copy: CopyId,
    /// True if every block is whole.
    pub ok: bool,
}

/// The end of an inspection of a save's blocks.
type Inspected = ((SessionId, u64), Findings);

/// An event of a session's rank on a GPU.
#[derive(Debug)]
pub enum RankEvent {
    /// Its memory was opened, or could not be: the error names the remedy.
    Opened(Result<Rank, String>),
    /// A copy of it is stuck behind a closed gate. Nothing more is copied, and copies in flight may never
    /// end. With its engine's name.
    Parked(String),
}

/// All copiers, and the channels of their results.
#[derive(Debug)]
pub struct Copiers {
    host: HostCopiers,
    pool: Arc<Pool>,
    pinned: Arc<Pinned>,
    links: GpuLinks,
    contexts: Contexts<Gpu>,
    ends: CopyEnds,
    finished: mpsc::Receiver<Finished>,
    inspected: mpsc::Receiver<Inspected>,
    ranks: mpsc::Receiver<(SessionId, RankEvent)>,
    running: usize,
}

/// The senders of all results.
#[derive(Clone, Debug)]
struct CopyEnds {
    finished: mpsc::Sender<Finished>,
    inspected: mpsc::Sender<Inspected>,
    ranks: mpsc::Sender<(SessionId, RankEvent)>,
    wake: Arc<OwnedFd>,
}

// === impl Rank ===

impl Rank {
    /// Stops further copies; running ones end within milliseconds.
    pub fn stop(&self) {
        match &self.0 {
            RankMemory::Host(rank) => rank.stop(),
            RankMemory::Gpu(rank) => rank.stop(),
            RankMemory::Staged(rank) => rank.stop(),
        }
    }

    /// Handles STAGED: a block lies in the staging segment, or could not be copied there. An error means the
    /// engine broke the protocol.
    pub fn staged(&self, tag: u64, slot: u32, ok: bool) -> Result<(), String> {
        match &self.0 {
            RankMemory::Host(_) | RankMemory::Gpu(_) => {
                Err("a rank without a staging segment sent STAGED".into())
            }
            RankMemory::Staged(rank) => rank.staged(tag, slot, ok),
        }
    }
}

// === impl CopyEnds ===

impl CopyEnds {
    /// Reports the end of a batch. Returns false once the receiver is gone.
    fn report(&self, finished: Finished) -> bool {
        let asked = self.finished.send(finished).is_ok();
        self.wake();
        asked
    }

    /// Reports the end of an inspection. Returns false once the receiver is gone.
    fn report_inspected(&self, inspected: Inspected) -> bool {
        let asked = self.inspected.send(inspected).is_ok();
        self.wake();
        asked
    }

    /// Reports the opened memory of a rank, or the reason of the failure.
    fn opened(&self, session: SessionId, rank: Result<Rank, String>) {
        self.tell_of(session, RankEvent::Opened(rank));
    }

    /// Reports a stuck rank.
    fn parked(&self, session: SessionId, engine: String) {
        self.tell_of(session, RankEvent::Parked(engine));
    }

    fn tell_of(&self, session: SessionId, event: RankEvent) {
        // The receiver is gone when the sidecar ends.
        let _ = self.ranks.send((session, event));
        self.wake();
    }

    fn wake(&self) {
        wait::signal_eventfd(&self.wake);
    }
}

// === impl Copiers ===

impl Copiers {
    /// Starts `threads` threads for copies between host memory and `pool`. GPUs reach the `pinned` part of
    /// the pool.
    pub fn start_copiers(
        threads: usize,
        pool: &Arc<Pool>,
        pinned: &Arc<Pinned>,
        ended: &Arc<EndSignal>,
    ) -> std::io::Result<Self> {
        let wake = wait::make_eventfd()?;
        let ((sender, finished), (teller, inspected)) = (mpsc::channel(), mpsc::channel());
        let (herald, ranks) = mpsc::channel();
        let ends = CopyEnds { finished: sender, inspected: teller, ranks: herald, wake: Arc::new(wake) };
        let host = HostCopiers::start_threads(threads, pool, &ends, ended)?;
        let (pool, pinned) = (Arc::clone(pool), Arc::clone(pinned));
        let (links, contexts) = (GpuLinks::new(), Contexts::new());
        Ok(Self { host, pool, pinned, links, contexts, ends, finished, inspected, ranks, running: 0 })
    }

    /// A rank in host memory, with its fence words in `words`.
    pub fn host_rank(memory: HostMemory, words: SessionMemory, socket: Arc<OwnedFd>) -> Rank {
        Rank(RankMemory::Host(Arc::new(HostRank::new(memory, words, socket))))
    }

    /// Starts opening a rank on a GPU; [`Copiers::next_rank_event`] has the result. The error names the remedy.
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
        GpuRank::start_thread(GpuRankRequest {
            session,
            engine: engine.into(),
            worker: worker.clone(),
            memory: words.clone(),
            pool: self.pool.shared_region(),
            pinned: Arc::clone(&self.pinned),
            link_place: self.links.enter_rank(cuda.uuid),
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

    /// The next event of a rank on a GPU.
    pub fn next_rank_event(&self) -> Option<(SessionId, RankEvent)> {
        self.ranks.try_recv().ok()
    }

    /// Number of stuck ranks on GPUs.
    pub fn parked(&self) -> usize {
        self.contexts.parked()
    }

    /// Kills the process if a rank is stuck: a normal exit would wait in the driver for its copies.
    pub fn end_if_stuck(&self) {
        if self.parked() > 0 {
            gpu::end_process("copies wait behind a gate that their engine closed");
        }
    }

    /// A rank that performs its own loads, and copies its saves into the segment `staging`.
    pub fn staged_rank(
        &self,
        staging: HostMemory,
        tags: OwnedFd,
        slots: u32,
        words: &SessionMemory,
        socket: Arc<OwnedFd>,
    ) -> Result<Rank, String> {
        let rank = StagedRank::start_thread(staging, tags, slots, words, &self.pool, &self.ends, socket)?;
        Ok(Rank(RankMemory::Staged(Arc::new(rank))))
    }

    /// Takes a batch of a rank. If it is refused, or is empty, returns its end at once.
    pub fn post_batch(&mut self, rank: &Rank, batch: CopyBatch) -> Option<Finished> {
        let copy = batch.copy;
        if batch.pieces.is_empty() {
            return Some(Finished { copy, ok: true });
        }
        let taken = match &rank.0 {
            RankMemory::Host(rank) => self.host.post_batch(batch, Arc::clone(rank)),
            RankMemory::Gpu(rank) => rank.post_batch(batch),
            RankMemory::Staged(rank) => rank.post_batch(batch),
        };
        self.running += usize::from(taken);
        (!taken).then_some(Finished { copy, ok: false })
    }

    /// The next ended batch.
    pub fn finished(&mut self) -> Option<Finished> {
        let finished = self.finished.try_recv().ok()?;
        self.running -= 1;
        Some(finished)
    }

    /// Queues blocks for a comparison or a search.
    pub fn inspect_blocks(&self, inspection: Inspection) {
        self.host.inspect_blocks(inspection);
    }

    /// The next ended inspection.
    pub fn inspected(&self) -> Option<Inspected> {
        self.inspected.try_recv().ok()
    }

    /// Batches not yet reported as ended.
    pub fn running(&self) -> usize {
        self.running
    }

    /// A descriptor, readable at every end of a batch or an inspection; edge-triggered, never read.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.ends.wake.as_fd()
    }
}
