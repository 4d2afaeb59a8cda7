//! Ranks in host memory: threads copy a few blocks at a time.
//!
//! Loads go before saves, because an engine waits for loads alone. The few comparisons of blocks go between
//! them: until one ends, an engine with different KV is still served.

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

use super::{CopyBatch, CopyEnds, Finished};
use crate::core::{CopyDirection, Inspection, RankBlock, SessionId};
use crate::system::wake::EndSignal;

/// Blocks taken by a thread at once: enough to make the lock cheap, few enough to spread a batch over all
/// threads and to see a closed gate soon.
const TASK_BLOCKS: usize = 16;
/// Queued blocks of an engine's saves: 16 steps of 4,096 blocks. Further saves fail, which only costs hits.
const SAVE_BLOCKS_WAITING_MAX: usize = 65_536;
/// Queued blocks of an engine's loads: 2^20, as many as a session's key arena can name. Further loads fail.
const LOAD_BLOCKS_WAITING_MAX: usize = 1 << 20;
/// Every fourth task is a save of an engine without queued loads, if there is one: otherwise endless loads of
/// another engine would keep it from saving.
const SAVES_TURN: u32 = 4;

/// The memory of a worker session, alive until its last copy ended.
#[derive(Debug)]
pub(super) struct HostRank {
    memory: HostMemory,
    words: SessionMemory,
    stopped: AtomicBool,
    /// Held until the last copy ended; see [`crate::clients::session::ClientSession::socket`].
    _socket: Arc<OwnedFd>,
}

/// The threads and their queues.
#[derive(Debug)]
pub(super) struct HostCopiers(Arc<HostShared>);

#[derive(Debug)]
struct HostShared {
    pool: Arc<Pool>,
    waiting: Mutex<WaitingTasks>,
    work: Condvar,
}

#[derive(Debug, Default)]
struct WaitingTasks {
    loads: TaskLane,
    saves: TaskLane,
    /// Comparisons, bounded by the core for each engine, then a search for each copied save.
    inspections: VecDeque<Inspection>,
    /// Number of tasks taken.
    taken: u32,
}

/// A thread's next work.
#[derive(Debug)]
enum HostWork {
    Copy(CopyTask),
    Inspect(Inspection),
}

/// The queues of engines with tasks, the next engine first.
#[derive(Debug, Default)]
struct TaskLane(VecDeque<EngineQueue>);

#[derive(Debug)]
struct EngineQueue {
    engine: SessionId,
    tasks: VecDeque<CopyTask>,
    blocks: usize,
}

/// Pieces `from..to` of a batch.
#[derive(Debug)]
struct CopyTask {
    progress: Arc<BatchProgress>,
    from: usize,
    to: usize,
}

#[derive(Debug)]
struct BatchProgress {
    batch: CopyBatch,
    rank: Arc<HostRank>,
    open: AtomicUsize,
    ok: AtomicBool,
}

// === impl HostRank ===

impl HostRank {
    /// A rank with its fence words in `words`.
    pub(super) fn new(memory: HostMemory, words: SessionMemory, socket: Arc<OwnedFd>) -> Self {
        Self { memory, words, stopped: AtomicBool::new(false), _socket: socket }
    }

    /// Stops further blocks; running copies end within one block.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Copies a block of load `op`. Returns `None` if the engine closed the gate for loads up to `op`.
    fn load_piece(&self, pool: &Pool, op: u64, piece: RankBlock) -> Option<Result<(), CopyError>> {
        let words = self.words.region();
        let copied = gate::write_unless_closed(words, op, || {
            self.memory.load_block(pool.region(), piece.offset, piece.block)
        });
        if copied.is_some() {
            // The engine only checks that the word changes.
            words.word64(header::FENCE_ENDED).fetch_add(1, Ordering::Relaxed);
        }
        copied
    }

    fn copy(&self, pool: &Pool, batch: &CopyBatch, piece: RankBlock) -> bool {
        if self.stopped.load(Ordering::Relaxed) {
            return false;
        }
        let copied = match batch.direction {
            CopyDirection::Save => self.memory.save_block(piece.block, pool.region(), piece.offset),
            CopyDirection::Load => match self.load_piece(pool, batch.load_op, piece) {
                Some(copied) => copied,
                None => return false,
            },
        };
        if let Err(error) = &copied {
            tracing::warn!(copy = batch.copy, block = piece.block, %error, "a block could not be copied");
        }
        copied.is_ok()
    }
}

// === impl HostCopiers ===

impl HostCopiers {
    /// Starts `threads` threads for copies from and to `pool`.
    pub(super) fn start_threads(
        threads: usize,
        pool: &Arc<Pool>,
        ends: &CopyEnds,
        ended: &Arc<EndSignal>,
    ) -> std::io::Result<Self> {
        let waiting = Mutex::new(WaitingTasks::default());
        let shared = Arc::new(HostShared { pool: Arc::clone(pool), waiting, work: Condvar::new() });
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

    /// Queues a batch of at least one block. Returns `false` if there is no room.
    pub(super) fn post_batch(&self, batch: CopyBatch, rank: Arc<HostRank>) -> bool {
        let count = batch.pieces.len();
        let load = batch.direction == CopyDirection::Load;
        let open = AtomicUsize::new(count.div_ceil(TASK_BLOCKS));
        let progress = Arc::new(BatchProgress { batch, rank, open, ok: AtomicBool::new(true) });
        let mut waiting = self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let (lane, blocks_max) = match load {
            true => (&mut waiting.loads, LOAD_BLOCKS_WAITING_MAX),
            false => (&mut waiting.saves, SAVE_BLOCKS_WAITING_MAX),
        };
        let queue = lane.queue(progress.batch.engine);
        if queue.blocks + count > blocks_max {
            return false;
        }
        queue.blocks += count;
        let starts = (0..count).step_by(TASK_BLOCKS);
        queue.tasks.extend(starts.map(|from| {
            let to = count.min(from + TASK_BLOCKS);
            CopyTask { progress: Arc::clone(&progress), from, to }
        }));
        drop(waiting);
        self.0.work.notify_all();
        true
    }

    /// Queues blocks for a comparison or a search.
    pub(super) fn inspect_blocks(&self, inspection: Inspection) {
        let mut waiting = self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        inspection.enqueue(&mut waiting.inspections);
        drop(waiting);
        self.0.work.notify_one();
    }
}

// === impl HostShared ===

impl HostShared {
    fn work_all(&self, ends: &CopyEnds) {
        loop {
            let task = match self.next() {
                HostWork::Copy(task) => task,
                HostWork::Inspect(inspection) => {
                    // Notices a loss of the pool, as before a copy. The data thread checks the pool again
                    // afterwards.
                    self.pool.is_whole();
                    let findings = inspection.carry_out(|offset, out| self.pool.read_bytes(offset, out));
                    if !ends.report_inspected((inspection.save, findings)) {
                        return;
                    }
                    continue;
                }
            };
            let BatchProgress { batch, rank, open, ok } = &*task.progress;
            // Notices a loss of the pool, and remembers it. After the copy a page that was cut off would
            // exist again, empty.
            self.pool.is_whole();
            for piece in &batch.pieces[task.from..task.to] {
                if !rank.copy(&self.pool, batch, *piece) {
                    ok.store(false, Ordering::Relaxed);
                    break;
                }
            }
            ok.fetch_and(self.pool.is_whole(), Ordering::Relaxed);
            // SYNC POINT(batch): the last thread to arrive sees the `ok` and the bytes of all others.
            if open.fetch_sub(1, Ordering::AcqRel) != 1 {
                continue;
            }
            if !ends.report(Finished { copy: batch.copy, ok: ok.load(Ordering::Relaxed) }) {
                return;
            }
        }
    }

    fn next(&self) -> HostWork {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(work) = waiting.next() {
                return work;
            }
            waiting = self.work.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

// === impl WaitingTasks ===

impl WaitingTasks {
    fn next(&mut self) -> Option<HostWork> {
        self.taken = self.taken.wrapping_add(1);
        let loads = &self.loads;
        let of_others = |engine| !loads.has_tasks(engine);
        let save = if self.taken.is_multiple_of(SAVES_TURN) { self.saves.take_task(of_others) } else { None };
        let copy = save.or_else(|| self.loads.take_task(|_| true));
        copy.map(HostWork::Copy)
            .or_else(|| self.inspections.pop_front().map(HostWork::Inspect))
            .or_else(|| self.saves.take_task(|_| true).map(HostWork::Copy))
    }
}

// === impl TaskLane ===

impl TaskLane {
    fn has_tasks(&self, engine: SessionId) -> bool {
        self.0.iter().any(|queue| queue.engine == engine && !queue.tasks.is_empty())
    }

    /// The queue of an engine; a new one is last.
    fn queue(&mut self, engine: SessionId) -> &mut EngineQueue {
        let at = self.0.iter().position(|queue| queue.engine == engine).unwrap_or_else(|| {
            self.0.push_back(EngineQueue { engine, tasks: VecDeque::new(), blocks: 0 });
            self.0.len() - 1
        });
        &mut self.0[at]
    }

    /// The next task of an engine accepted by `is_meant`. The engine goes last then.
    fn take_task(&mut self, is_meant: impl Fn(SessionId) -> bool) -> Option<CopyTask> {
        self.0.retain(|queue| !queue.tasks.is_empty());
        let at = self.0.iter().position(|queue| is_meant(queue.engine))?;
        let mut queue = self.0.remove(at)?;
        let task = queue.tasks.pop_front()?;
        queue.blocks -= task.to - task.from;
        self.0.push_back(queue);
        Some(task)
    }
}

#[cfg(test)]
mod tests {
    use shm_protocol::PROTOCOL_VERSION;
    use shm_protocol::region::Access;

    use super::*;

    /// Queued tasks: a letter names the engine of each, a capital letter for loads.
    fn waiting(tasks: &str) -> WaitingTasks {
        let (_fd, words) = SessionMemory::create(PROTOCOL_VERSION, 1, 1).expect("a memfd");
        let memory = HostMemory::new(Vec::new(), &[], 0, Access::ReadOnly).expect("no blocks");
        let socket = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("a descriptor");
        let rank = Arc::new(HostRank::new(memory, words, Arc::new(socket)));
        let mut waiting = WaitingTasks::default();
        for letter in tasks.chars() {
            let engine = letter.to_ascii_lowercase() as SessionId;
            let (lane, direction) = match letter.is_ascii_uppercase() {
                true => (&mut waiting.loads, CopyDirection::Load),
                false => (&mut waiting.saves, CopyDirection::Save),
            };
            let batch =
                CopyBatch { copy: 1, engine, direction, pieces: Vec::new(), load_op: 0, awaited: false };
            let (open, ok) = (AtomicUsize::new(1), AtomicBool::new(true));
            let progress = Arc::new(BatchProgress { batch, rank: Arc::clone(&rank), open, ok });
            lane.queue(engine).tasks.push_back(CopyTask { progress, from: 0, to: 0 });
        }
        waiting
    }

    /// The order of the tasks taken.
    fn taken(tasks: &str) -> String {
        let mut waiting = waiting(tasks);
        let letters = std::iter::from_fn(|| match waiting.next()? {
            HostWork::Copy(CopyTask { progress, .. }) => {
                let letter = char::from(progress.batch.engine as u8);
                let is_load = progress.batch.direction == CopyDirection::Load;
                Some(if is_load { letter.to_ascii_uppercase() } else { letter })
            }
            HostWork::Inspect(_) => unreachable!("none was posted"),
        });
        letters.collect()
    }

    #[test]
    fn engines_take_turns_whoever_has_posted_more() {
        assert_eq!(taken("aaaaaabbc"), "abcabaaaa");
        assert_eq!(taken("AAAABB"), "ABABAA");
    }

    #[test]
    fn loads_without_end_leave_another_engine_its_saves() {
        assert_eq!(taken("aaAAAAAAAAAA"), "AAAAAAAAAAaa", "an engine alone loads first");
        assert_eq!(taken("bbAAAAAAAAAA"), "AAAbAAAbAAAA");
    }
}
