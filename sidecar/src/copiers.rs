//! The threads that copy blocks between engine memory and the pool.
//!
//! The data thread posts a batch and never waits; its end comes back through [`Copiers::finished`] and an eventfd. Loads go
//! before saves: an engine waits for the former only.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::thread;

use copy_engine::{CopyError, HostMemory};
use rustix::event::EventfdFlags;
use shm_protocol::gate;
use shm_protocol::session::SessionMemory;
use tiers::pool::Pool;

use crate::engine::{CopyId, Direction, Piece};
use crate::server::EndSignal;

/// Blocks that one thread takes at a time: enough that taking costs nothing, few enough that a batch spreads over all
/// threads and a closed gate is soon seen.
const TASK_BLOCKS: usize = 16;
/// Blocks of saves that may wait: 16 steps of 4,096 blocks. Beyond it a save fails, which costs a hit and nothing else.
const SAVE_BLOCKS_WAITING_MAX: usize = 65_536;
/// Blocks of loads that may wait: 2^20, all that a session's key arena can name. Beyond it a load fails.
const LOAD_BLOCKS_WAITING_MAX: usize = 1 << 20;

/// The memory of a worker session, alive until its last copy ended.
#[derive(Debug)]
pub struct Rank {
    memory: HostMemory,
    words: SessionMemory,
    stopped: AtomicBool,
    /// Held until the last copy ended; see [`crate::session::Session::socket`].
    _socket: Arc<OwnedFd>,
}

/// A batch of copies of one rank.
#[derive(Debug)]
pub struct Batch {
    /// Its name in the core.
    pub copy: CopyId,
    /// Whose memory.
    pub rank: Arc<Rank>,
    /// Which way.
    pub direction: Direction,
    /// The blocks.
    pub pieces: Vec<Piece>,
    /// Loads: the operation, which a closed gate stops.
    pub load_op: u64,
}

/// The end of a batch.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub struct Finished {
    /// The batch.
    pub copy: CopyId,
    /// Whether every block is whole.
    pub ok: bool,
}

/// The threads and what waits for them.
#[derive(Debug)]
pub struct Copiers {
    shared: Arc<Shared>,
    finished: mpsc::Receiver<Finished>,
    running: usize,
}

#[derive(Debug)]
struct Shared {
    pool: Arc<Pool>,
    waiting: Mutex<Waiting>,
    work: Condvar,
    wake: OwnedFd,
}

#[derive(Debug, Default)]
struct Waiting {
    loads: Lane,
    saves: Lane,
}

#[derive(Debug, Default)]
struct Lane {
    tasks: VecDeque<Task>,
    blocks: usize,
}

/// Pieces `from..to` of a batch.
#[derive(Debug)]
struct Task {
    progress: Arc<Progress>,
    from: usize,
    to: usize,
}

#[derive(Debug)]
struct Progress {
    batch: Batch,
    open: AtomicUsize,
    ok: AtomicBool,
}

// === impl Rank ===

impl Rank {
    /// A rank whose fence words lie in `words`.
    pub fn new(memory: HostMemory, words: SessionMemory, socket: Arc<OwnedFd>) -> Self {
        Self { memory, words, stopped: AtomicBool::new(false), _socket: socket }
    }

    /// No further block is copied; what runs ends within one block.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Copies a block of load `op` unless the engine has said that loads up to there must not start any more: `None`.
    fn load(&self, pool: &Pool, op: u64, piece: Piece) -> Option<Result<(), CopyError>> {
        gate::write_unless_closed(self.words.region(), op, || {
            self.memory.load_block(pool.region(), piece.offset, piece.block)
        })
    }

    fn copy(&self, pool: &Pool, batch: &Batch, piece: Piece) -> bool {
        if self.stopped.load(Ordering::Relaxed) {
            return false;
        }
        let copied = match batch.direction {
            Direction::Save => self.memory.save_block(piece.block, pool.region(), piece.offset),
            Direction::Load => match self.load(pool, batch.load_op, piece) {
                Some(copied) => copied,
                None => return false,
            },
        };
        if let Err(error) = &copied {
            tracing::warn!(copy = batch.copy, block = piece.block, %error, "block not copied");
        }
        copied.is_ok()
    }
}

// === impl Copiers ===

impl Copiers {
    /// Starts `threads` threads that copy from and to `pool`.
    pub fn start(threads: usize, pool: &Arc<Pool>, ended: &Arc<EndSignal>) -> std::io::Result<Self> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let waiting = Mutex::new(Waiting::default());
        let shared = Arc::new(Shared { pool: Arc::clone(pool), waiting, work: Condvar::new(), wake });
        let (sender, finished) = mpsc::channel();
        for number in 0..threads {
            let (shared, sender, ended) = (Arc::clone(&shared), sender.clone(), Arc::clone(ended));
            let name = format!("pillion-copy-{number}");
            thread::Builder::new().name(name).spawn(move || {
                let _ended = ended.on_exit();
                shared.copy_all(&sender);
            })?;
        }
        Ok(Self { shared, finished, running: 0 })
    }

    /// Takes a batch; if there is no room, answers its end, failed, at once.
    pub fn post(&mut self, batch: Batch) -> Option<Finished> {
        let (copy, count) = (batch.copy, batch.pieces.len());
        if count == 0 {
            return Some(Finished { copy, ok: true });
        }
        let load = batch.direction == Direction::Load;
        let progress = Arc::new(Progress {
            batch,
            open: AtomicUsize::new(count.div_ceil(TASK_BLOCKS)),
            ok: AtomicBool::new(true),
        });
        let mut waiting = self.shared.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let (lane, blocks_max) = match load {
            true => (&mut waiting.loads, LOAD_BLOCKS_WAITING_MAX),
            false => (&mut waiting.saves, SAVE_BLOCKS_WAITING_MAX),
        };
        if lane.blocks + count > blocks_max {
            return Some(Finished { copy, ok: false });
        }
        lane.blocks += count;
        let starts = (0..count).step_by(TASK_BLOCKS);
        lane.tasks.extend(starts.map(|from| {
            let to = count.min(from + TASK_BLOCKS);
            Task { progress: Arc::clone(&progress), from, to }
        }));
        drop(waiting);
        self.running += 1;
        self.shared.work.notify_all();
        None
    }

    /// The next batch that ended, if one did.
    pub fn finished(&mut self) -> Option<Finished> {
        let finished = self.finished.try_recv().ok()?;
        self.running -= 1;
        Some(finished)
    }

    /// Batches that have not been reported as ended.
    pub fn running(&self) -> usize {
        self.running
    }

    /// Becomes readable at every end of a batch; watched by edge, never read.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }
}

// === impl Shared ===

impl Shared {
    fn copy_all(&self, sender: &mpsc::Sender<Finished>) {
        loop {
            let task = self.next();
            let batch = &task.progress.batch;
            for piece in &batch.pieces[task.from..task.to] {
                if !batch.rank.copy(&self.pool, batch, *piece) {
                    task.progress.ok.store(false, Ordering::Relaxed);
                    break;
                }
            }
            // SYNC POINT(batch): the last to arrive sees every other thread's `ok`, and its bytes.
            if task.progress.open.fetch_sub(1, Ordering::AcqRel) != 1 {
                continue;
            }
            let finished = Finished { copy: batch.copy, ok: task.progress.ok.load(Ordering::Relaxed) };
            if sender.send(finished).is_err() {
                return;
            }
            // Full after 2^64 ends, and then readable all the same.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    fn next(&self) -> Task {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(task) = waiting.loads.take().or_else(|| waiting.saves.take()) {
                return task;
            }
            waiting = self.work.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

// === impl Lane ===

impl Lane {
    fn take(&mut self) -> Option<Task> {
        let task = self.tasks.pop_front()?;
        self.blocks -= task.to - task.from;
        Some(task)
    }
}
