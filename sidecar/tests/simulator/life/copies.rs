//! The sidecar's copies: the threads of [`sidecar::copiers`] as state machines, one word at a time. They make
//! the moves of [`shm_protocol::gate::write_unless_closed`] one by one on the session's words.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use shm_protocol::gate::{self, GateMemory};
use shm_protocol::layout::header;
use shm_protocol::session::SessionMemory;
use sidecar::core::{CopyDirection, CopyId, Inspection, RankBlock};
use tiers::pool::Pool;

use crate::connection::Socket;
use crate::ctx::{Actor, COPIERS, Ctx, Micros};
use crate::origin::{Kv, WORDS};

/// Blocks taken by a thread at once: batches of a few blocks spread over the threads.
const TASK_BLOCKS: usize = 2;

/// The memory of a worker session, alive until its last copy ended.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) kv: Rc<Kv>,
    pub(super) words: SessionMemory,
    pub(super) stopped: Cell<bool>,
    pub(super) _socket: Rc<Socket>,
}

#[derive(Debug)]
struct Batch {
    copy: CopyId,
    rank: Rc<Rank>,
    direction: CopyDirection,
    pieces: Vec<RankBlock>,
    load_op: u64,
    open: Cell<usize>,
    ok: Cell<bool>,
}

/// A thread's position in a block.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Stage {
    Begin,
    /// `FENCE_COPYING` is raised; the gate is checked next.
    Raised,
    /// This word is moved next.
    Word(usize),
}

#[derive(Debug)]
struct Task {
    batch: Rc<Batch>,
    at: usize,
    end: usize,
    stage: Stage,
}

/// Queued, running and ended work.
#[derive(Debug, Default)]
pub(super) struct Copies {
    loads: VecDeque<Task>,
    saves: VecDeque<Task>,
    threads: [Option<Task>; COPIERS],
    finished: VecDeque<(CopyId, bool)>,
    inspections: VecDeque<Inspection>,
    inspecting: [Option<Inspection>; COPIERS],
    inspected: VecDeque<Inspection>,
}

// === impl Copies ===

impl Copies {
    pub(super) fn post(
        &mut self,
        copy: CopyId,
        rank: Rc<Rank>,
        direction: CopyDirection,
        pieces: Vec<RankBlock>,
        load_op: u64,
        ctx: &mut Ctx,
    ) {
        let count = pieces.len();
        let (open, ok) = (Cell::new(count.div_ceil(TASK_BLOCKS)), Cell::new(true));
        let batch = Rc::new(Batch { copy, rank, direction, pieces, load_op, open, ok });
        let lane = if direction == CopyDirection::Load { &mut self.loads } else { &mut self.saves };
        lane.extend((0..count).step_by(TASK_BLOCKS).map(|at| {
            let end = count.min(at + TASK_BLOCKS);
            Task { batch: Rc::clone(&batch), at, end, stage: Stage::Begin }
        }));
        for thread in 0..COPIERS {
            ctx.wakes.push((Actor::Copier(thread), ctx.now + 1 + ctx.rng.below(30)));
        }
    }

    pub(super) fn inspect_blocks(&mut self, inspection: Inspection, ctx: &mut Ctx) {
        inspection.enqueue(&mut self.inspections);
        let thread = ctx.rng.below(COPIERS as u64) as usize;
        ctx.wakes.push((Actor::Copier(thread), ctx.now + 1 + ctx.rng.below(30)));
    }

    /// The next ended inspection.
    pub(super) fn inspected(&mut self) -> Option<Inspection> {
        self.inspected.pop_front()
    }

    /// Ends a batch without a rank as failed.
    pub(super) fn refuse(&mut self, copy: CopyId) {
        self.finished.push_front((copy, false));
    }

    pub(super) fn finished(&mut self) -> Option<(CopyId, bool)> {
        self.finished.pop_front()
    }

    pub(super) fn ended(&self) -> bool {
        !self.finished.is_empty() || !self.inspected.is_empty()
    }

    /// True if a thread is at work or has work.
    pub(super) fn running(&self) -> bool {
        let queued = !self.loads.is_empty() || !self.saves.is_empty();
        let inspections = !self.inspections.is_empty() || self.inspecting.iter().any(Option::is_some);
        queued || inspections || self.ended() || self.threads.iter().any(Option::is_some)
    }

    /// Makes one move of a thread. Returns the time until its next one, `None` without work.
    pub(super) fn step(&mut self, thread: usize, pool: &Pool, ctx: &mut Ctx) -> Option<Micros> {
        let waiting = || self.loads.pop_front().or_else(|| self.saves.pop_front());
        let Some(mut task) = self.threads[thread].take().or_else(waiting) else {
            match self.inspecting[thread].take() {
                Some(inspection) => {
                    // Ends of searches are taken first.
                    let searches = self.inspected.partition_point(|ended| ended.pairs().is_empty());
                    let place = if inspection.pairs().is_empty() { searches } else { self.inspected.len() };
                    self.inspected.insert(place, inspection);
                }
                None => self.inspecting[thread] = Some(self.inspections.pop_front()?),
            }
            return Some(ctx.pause(ctx.knobs.copy_us));
        };
        let moved = task.step(pool, ctx);
        if moved && task.at < task.end {
            self.threads[thread] = Some(task);
        } else {
            let batch = task.batch;
            batch.ok.set(batch.ok.get() && moved);
            batch.open.set(batch.open.get() - 1);
            if batch.open.get() == 0 {
                self.finished.push_back((batch.copy, batch.ok.get()));
            }
        }
        Some(ctx.pause(ctx.knobs.copy_us))
    }
}

// === impl Task ===

impl Task {
    /// Makes one move. Returns false if the block cannot be copied, which ends the task.
    fn step(&mut self, pool: &Pool, ctx: &mut Ctx) -> bool {
        let (rank, piece) = (&self.batch.rank, self.batch.pieces[self.at]);
        let region = rank.words.region();
        let load = self.batch.direction == CopyDirection::Load;
        match self.stage {
            Stage::Begin if rank.stopped.get() => return false,
            Stage::Begin if ctx.knobs.failing_copies > 0 && ctx.rng.one_in(ctx.knobs.failing_copies) => {
                ctx.hit("fault copy failed");
                return false;
            }
            Stage::Begin if load => {
                region.raise_copying();
                self.stage = Stage::Raised;
            }
            Stage::Begin => self.stage = Stage::Word(0),
            Stage::Raised => {
                if !gate::is_open(region, self.batch.load_op) {
                    ctx.hit("sidecar gate closed");
                    region.lower_copying();
                    return false;
                }
                self.stage = Stage::Word(0);
            }
            Stage::Word(word) => {
                self.move_word(pool, piece, word);
                self.stage = Stage::Word(word + 1);
                if word + 1 == WORDS {
                    if load {
                        region.lower_copying();
                        region.word64(header::FENCE_ENDED).fetch_add(1, Ordering::Relaxed);
                    }
                    (self.at, self.stage) = (self.at + 1, Stage::Begin);
                }
            }
        }
        true
    }

    fn move_word(&self, pool: &Pool, piece: RankBlock, word: usize) {
        let kv = &self.batch.rank.kv;
        let kept = pool.region().word64(piece.offset as usize + word * 8);
        match self.batch.direction {
            CopyDirection::Save => kept.store(kv.get(piece.block, word), Ordering::Relaxed),
            CopyDirection::Load => kv.set(piece.block, word, kept.load(Ordering::Relaxed)),
        }
    }
}
