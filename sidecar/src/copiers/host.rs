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
use crate::core::{Comparison, Direction, Found, Piece, Scan, SessionId};
use crate::system::wake::EndSignal;

/// Blocks that one thread takes at a time: enough that taking costs nothing, few enough that a batch spreads over all
/// threads and a closed gate is soon seen.
const TASK_BLOCKS: usize = 16;
/// Blocks of an engine's saves that may wait: 16 steps of 4,096 blocks. Beyond it a save fails, which costs a hit and nothing else.
const SAVE_BLOCKS_WAITING_MAX: usize = 65_536;
/// Blocks of its loads that may wait: 2^20, all that a session's key arena can name. Beyond it a load fails.
const LOAD_BLOCKS_WAITING_MAX: usize = 1 << 20;
/// Loads go before saves, but one time in so many before those of an engine that has no load waiting: another's loads without end
/// would keep it from saving.
const SAVES_TURN: u32 = 4;

/// The memory of a worker session, alive until its last copy ended.
#[derive(Debug)]
pub(super) struct HostRank {
    memory: HostMemory,
    words: SessionMemory,
    stopped: AtomicBool,
    /// Held until the last copy ended; see [`crate::clients::session::Session::socket`].
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
    /// One for each copied save.
    /// Each with whether it is summed, too.
    scans: VecDeque<(Scan, bool)>,
    /// How often something was taken.
    taken: u32,
}

/// What a thread does next.
#[derive(Debug)]
enum Work {
    Copy(Task),
    Compare(Comparison),
    Scan(Scan, bool),
}

/// Tasks of every engine that has some, whoever is next first.
#[derive(Debug, Default)]
struct Lane(VecDeque<Queue>);

#[derive(Debug)]
struct Queue {
    engine: SessionId,
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
            tracing::warn!(copy = batch.copy, block = piece.block, %error, "a block could not be copied");
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
        let queue = lane.queue(progress.batch.engine);
        if queue.blocks + count > blocks_max {
            return false;
        }
        queue.blocks += count;
        let starts = (0..count).step_by(TASK_BLOCKS);
        queue.tasks.extend(starts.map(|from| {
            let to = count.min(from + TASK_BLOCKS);
            Task { progress: Arc::clone(&progress), from, to }
        }));
        drop(waiting);
        self.0.work.notify_all();
        true
    }

    /// Takes blocks to be searched.
    pub(super) fn scan(&self, scan: Scan, sums: bool) {
        let mut waiting = self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.scans.push_back((scan, sums));
        drop(waiting);
        self.0.work.notify_one();
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
                Work::Scan(scan, sums) => {
                    let searched = scan.carry_out(sums, |offset, out| self.pool.read(offset, out));
                    if !ends.tell_scanned((scan.save, searched)) {
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
            if let Some(work) = waiting.next() {
                return work;
            }
            waiting = self.work.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

// === impl Waiting ===

impl Waiting {
    fn next(&mut self) -> Option<Work> {
        self.taken = self.taken.wrapping_add(1);
        let loads = &self.loads;
        let of_others = |engine| !loads.has(engine);
        let save = if self.taken.is_multiple_of(SAVES_TURN) { self.saves.take(of_others) } else { None };
        let copy = save.or_else(|| self.loads.take(|_| true));
        copy.map(Work::Copy)
            .or_else(|| self.comparisons.pop_front().map(Work::Compare))
            .or_else(|| self.scans.pop_front().map(|(scan, sums)| Work::Scan(scan, sums)))
            .or_else(|| self.saves.take(|_| true).map(Work::Copy))
    }
}

// === impl Lane ===

impl Lane {
    fn has(&self, engine: SessionId) -> bool {
        self.0.iter().any(|queue| queue.engine == engine && !queue.tasks.is_empty())
    }

    /// The tasks of an engine, which come last where it had none.
    fn queue(&mut self, engine: SessionId) -> &mut Queue {
        let at = self.0.iter().position(|queue| queue.engine == engine).unwrap_or_else(|| {
            self.0.push_back(Queue { engine, tasks: VecDeque::new(), blocks: 0 });
            self.0.len() - 1
        });
        &mut self.0[at]
    }

    /// The next task of an engine that is meant; its others follow once every engine has had one.
    fn take(&mut self, is_meant: impl Fn(SessionId) -> bool) -> Option<Task> {
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

    /// Tasks of an engine that wait: its letter once for each, capital for loads.
    fn waiting(tasks: &str) -> Waiting {
        let (_fd, words) = SessionMemory::create(PROTOCOL_VERSION, 1, 1).expect("a memfd");
        let memory = HostMemory::new(Vec::new(), &[], 0, Access::ReadOnly).expect("no blocks");
        let socket = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("a descriptor");
        let rank = Arc::new(HostRank::new(memory, words, Arc::new(socket)));
        let mut waiting = Waiting::default();
        for letter in tasks.chars() {
            let engine = letter.to_ascii_lowercase() as SessionId;
            let (lane, direction) = match letter.is_ascii_uppercase() {
                true => (&mut waiting.loads, Direction::Load),
                false => (&mut waiting.saves, Direction::Save),
            };
            let batch = Batch { copy: 1, engine, direction, pieces: Vec::new(), load_op: 0, awaited: false };
            let (open, ok) = (AtomicUsize::new(1), AtomicBool::new(true));
            let progress = Arc::new(Progress { batch, rank: Arc::clone(&rank), open, ok });
            lane.queue(engine).tasks.push_back(Task { progress, from: 0, to: 0 });
        }
        waiting
    }

    /// The order in which tasks are taken.
    fn taken(tasks: &str) -> String {
        let mut waiting = waiting(tasks);
        let letters = std::iter::from_fn(|| match waiting.next()? {
            Work::Copy(Task { progress, .. }) => {
                let letter = char::from(progress.batch.engine as u8);
                let is_load = progress.batch.direction == Direction::Load;
                Some(if is_load { letter.to_ascii_uppercase() } else { letter })
            }
            Work::Compare(_) | Work::Scan(..) => unreachable!("none was posted"),
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
