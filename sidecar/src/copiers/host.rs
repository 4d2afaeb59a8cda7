//! Ranks in host memory: threads that copy a few blocks at a time.
//!
//! Loads go before saves: an engine waits for the former only. Comparisons of blocks, which are few, go between: until one
//! ends, an engine that computes other KV is served.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

use copy_engine::{CopyError, HostMemory};
use shm_protocol::gate;
use shm_protocol::layout::header;
use shm_protocol::session::SessionMemory;
use tiers::pool::Pool;

use super::{Batch, Ends, Finished};
use crate::engine::{Comparison, Direction, Found, Piece};
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
pub(super) struct HostRank {
    memory: HostMemory,
    words: SessionMemory,
    stopped: AtomicBool,
    /// Held until the last copy ended; see [`crate::session::Session::socket`].
    _socket: Arc<OwnedFd>,
}

/// The threads and what waits for them.
#[derive(Debug)]
pub(super) struct HostCopiers(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    pool: Arc<Pool>,
    waiting: Mutex<Waiting>,
    work: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    loads: Lane,
    saves: Lane,
    /// The core lets no engine have many.
    comparisons: VecDeque<Comparison>,
}

/// What a thread does next.
#[derive(Debug)]
enum Work {
    Copy(Task),
    Compare(Comparison),
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
    rank: Arc<HostRank>,
    open: AtomicUsize,
    ok: AtomicBool,
}

// === impl HostRank ===

impl HostRank {
    /// A rank whose fence words lie in `words`.
    pub(super) fn new(memory: HostMemory, words: SessionMemory, socket: Arc<OwnedFd>) -> Self {
        Self { memory, words, stopped: AtomicBool::new(false), _socket: socket }
    }

    /// No further block is copied; what runs ends within one block.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Copies a block of load `op` unless the engine has said that loads up to there must not start any more: `None`.
    fn load(&self, pool: &Pool, op: u64, piece: Piece) -> Option<Result<(), CopyError>> {
        let words = self.words.region();
        let copied = gate::write_unless_closed(words, op, || {
            self.memory.load_block(pool.region(), piece.offset, piece.block)
        });
        if copied.is_some() {
            // The engine looks only whether it moves.
            words.word64(header::FENCE_ENDED).fetch_add(1, Ordering::Relaxed);
        }
        copied
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

// === impl HostCopiers ===

impl HostCopiers {
    /// Starts `threads` threads that copy from and to `pool`.
    pub(super) fn start(
        threads: usize,
        pool: &Arc<Pool>,
        ends: &Ends,
        ended: &Arc<EndSignal>,
    ) -> std::io::Result<Self> {
        let waiting = Mutex::new(Waiting::default());
        let shared = Arc::new(Shared { pool: Arc::clone(pool), waiting, work: Condvar::new() });
        for number in 0..threads {
            let (shared, ends, ended) = (Arc::clone(&shared), ends.clone(), Arc::clone(ended));
            let name = format!("pillion-copy-{number}");
            thread::Builder::new().name(name).spawn(move || {
                let _ended = ended.on_exit();
                shared.work_all(&ends);
            })?;
        }
        Ok(Self(shared))
    }

    /// Takes a batch of at least one block; `false` if there is no room.
    pub(super) fn post(&self, batch: Batch, rank: Arc<HostRank>) -> bool {
        let count = batch.pieces.len();
        let load = batch.direction == Direction::Load;
        let open = AtomicUsize::new(count.div_ceil(TASK_BLOCKS));
        let progress = Arc::new(Progress { batch, rank, open, ok: AtomicBool::new(true) });
        let mut waiting = self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let (lane, blocks_max) = match load {
            true => (&mut waiting.loads, LOAD_BLOCKS_WAITING_MAX),
            false => (&mut waiting.saves, SAVE_BLOCKS_WAITING_MAX),
        };
        if lane.blocks + count > blocks_max {
            return false;
        }
        lane.blocks += count;
        let starts = (0..count).step_by(TASK_BLOCKS);
        lane.tasks.extend(starts.map(|from| {
            let to = count.min(from + TASK_BLOCKS);
            Task { progress: Arc::clone(&progress), from, to }
        }));
        drop(waiting);
        self.0.work.notify_all();
        true
    }

    /// Takes blocks to be compared.
    pub(super) fn compare(&self, comparison: Comparison) {
        let mut waiting = self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.comparisons.push_back(comparison);
        drop(waiting);
        self.0.work.notify_one();
    }
}

// === impl Shared ===

impl Shared {
    fn work_all(&self, ends: &Ends) {
        loop {
            let task = match self.next() {
                Work::Copy(task) => task,
                Work::Compare(comparison) => {
                    let found = self.compare(&comparison);
                    if !ends.tell(comparison.save, found) {
                        return;
                    }
                    continue;
                }
            };
            let Progress { batch, rank, open, ok } = &*task.progress;
            // A loss is remembered. Without this look a page that was cut off would be back, empty, once it was copied.
            self.pool.is_whole();
            for piece in &batch.pieces[task.from..task.to] {
                if !rank.copy(&self.pool, batch, *piece) {
                    ok.store(false, Ordering::Relaxed);
                    break;
                }
            }
            ok.fetch_and(self.pool.is_whole(), Ordering::Relaxed);
            // SYNC POINT(batch): the last to arrive sees every other thread's `ok`, and its bytes.
            if open.fetch_sub(1, Ordering::AcqRel) != 1 {
                continue;
            }
            if !ends.report(Finished { copy: batch.copy, ok: ok.load(Ordering::Relaxed) }) {
                return;
            }
        }
    }

    /// Neither slot of a pair is written before the end was told. Whoever takes the verdict asks whether the pool is whole.
    fn compare(&self, comparison: &Comparison) -> Found {
        // As before a copy.
        self.pool.is_whole();
        comparison.carry_out(|offset, out| self.pool.read(offset, out))
    }

    fn next(&self) -> Work {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(load) = waiting.loads.take() {
                return Work::Copy(load);
            }
            if let Some(comparison) = waiting.comparisons.pop_front() {
                return Work::Compare(comparison);
            }
            if let Some(save) = waiting.saves.take() {
                return Work::Copy(save);
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
