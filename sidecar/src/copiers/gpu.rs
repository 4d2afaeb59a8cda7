//! A rank on a GPU: a thread enqueues its copies and waits for their ends.
//!
//! A load is enqueued in batches:
//! `[wait go][wait gate][write STARTED][copies][write load word][write ENDED]`.
//!
//! - The GPU first waits for the word `go`. The CPU stores `go` once the whole batch is enqueued: so half a
//!   batch never starts, and a started batch also ends, even if the sidecar dies or freezes.
//! - The GPU then waits for the gate of the load. The engine closes the gate before it takes its blocks back.
//!   The GPU itself checks the gate, so a sidecar cannot write into these blocks when it goes on after a
//!   freeze.
//!
//! A batch behind a closed gate cannot be cancelled. After 1 s it counts as stuck, and its rank is parked:
//! the sidecar no longer serves the rank's engine, and the engine must be restarted. Other engines go on,
//! even on the same GPU, since every engine process has its own CUDA context ([`contexts`]). The slots and
//! the memory of the stuck batch are kept until it has ended. Once the engine's process has ended, nothing
//! reads its memory, so the sidecar opens the gate and the batch runs to its end.
//!
//! Ranks of one GPU share its link ([`link`]) for loads, not for saves: no engine waits for a save.
//!
//! The thread owns all memory used by the GPU, and frees it once no batch is in flight.

pub(super) mod contexts;
mod lane;
pub(super) mod link;

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvError, Sender, TryRecvError, channel};
use std::thread;
use std::time::Duration;

use copy_engine::PoolDirection;
use copy_engine::cuda::{CopyStream, CudaError, DeviceBlocks, Gpu, Imported, Registered};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::MemfdFlags;
use shm_protocol::gate;
use shm_protocol::handshake::WorkerHello;
use shm_protocol::layout::{
    GATES_BYTES, HEADER_BYTES, LOAD_WORDS, LOAD_WORDS_BYTES, gate_word, header, load_word, load_word_value,
};
use shm_protocol::region::{Access, Region};
use shm_protocol::session::SessionMemory;

use self::contexts::{ContextPlace, Contexts};
use self::lane::{BATCH_BYTES_MAX, BATCH_BYTES_SHARED, CopyEnd, GpuLane, PendingCopy};
use self::link::{LinkPlace, RankTurn};
use super::{CopyBatch, CopyEnds, Rank, RankMemory};
use crate::core::{self, SessionId};
use crate::memory::pinning::{Pinned, SLICE_BYTES};
use crate::system::clock::Clock;

/// Interval between two polls for the end of a batch in flight.
const POLL: Duration = Duration::from_micros(20);
/// A rank is parked once a batch has been in flight for this long behind a closed gate, or after the end of
/// its session. Any other batch takes milliseconds.
const STUCK: Duration = Duration::from_secs(1);
/// Interval between two checks for errors of the driver and for the end of the engine's process.
const HEALTH: Duration = Duration::from_millis(100);
/// Words of this thread's own page; each has the number of a batch.
mod own {
    /// The last batch of loads allowed to start.
    pub(super) const GO: usize = 0;
    /// The last ended batch of loads.
    pub(super) const LOADED: usize = 64;
    /// The last ended batch of saves.
    pub(super) const SAVED: usize = 128;
    pub(super) const BYTES: usize = 4096;
}

/// The data thread's handle of a rank's thread.
#[derive(Debug)]
pub(super) struct GpuRank {
    work: Sender<CopyBatch>,
    stopped: Arc<AtomicBool>,
}

/// A request to open the memory of a rank.
#[derive(Debug)]
pub(super) struct GpuRankRequest {
    pub(super) session: SessionId,
    pub(super) engine: String,
    pub(super) worker: WorkerHello,
    pub(super) memory: SessionMemory,
    pub(super) pool: Arc<Region>,
    pub(super) pinned: Arc<Pinned>,
    pub(super) link_place: LinkPlace,
    pub(super) contexts: Contexts<Gpu>,
    pub(super) ends: CopyEnds,
    /// Held until the memory is closed; see [`crate::clients::session::ClientSession::socket`].
    pub(super) _socket: Arc<OwnedFd>,
    pub(super) process: Option<OwnedFd>,
}

/// The state of a rank's thread. Its streams come first, so they are dropped before the memory in use by
/// them.
#[derive(Debug)]
struct Thread {
    load: CopyStream,
    save: CopyStream,
    loads: GpuLane,
    saves: GpuLane,
    /// Number of the last batch of loads known to have ended.
    loaded: u64,
    words: GpuWords,
    cuts: Vec<u64>,
    stopped: Arc<AtomicBool>,
    clock: Clock,
    /// The batch returned by the last call of `stuck`, and the time of the first such call.
    stuck: Option<(Stuck, Duration)>,
    parked: bool,
    /// Time of the last check for errors and for the end of the engine's process.
    looked: Duration,
    place: ContextPlace<Gpu>,
    asked: GpuRankRequest,
}

/// A batch under watch, since it may be stuck, by its number.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Stuck {
    Load(u64),
    Save(u64),
}

/// Words that streams write and wait for.
#[derive(Debug)]
struct GpuWords {
    header: Registered,
    loads: Registered,
    own: Registered,
}

// === impl GpuRank ===

impl GpuRank {
    /// Starts a rank's thread. It opens the rank's memory, a driver call of unknown length, and reports the
    /// result by [`CopyEnds::opened`]. The error names the remedy.
    pub(super) fn start_thread(asked: GpuRankRequest) -> Result<(), String> {
        let name = format!("pillion-gpu-{}", asked.worker.rank);
        let (session, ends) = (asked.session, asked.ends.clone());
        let run = move || {
            let (work, batches) = channel();
            let stopped = Arc::new(AtomicBool::new(false));
            let thread = match Thread::open_memory(asked, &stopped) {
                Ok(thread) => thread,
                Err(reason) => return ends.opened(session, Err(reason)),
            };
            ends.opened(session, Ok(Rank(RankMemory::Gpu(Arc::new(Self { work, stopped })))));
            let ran = catch_unwind(AssertUnwindSafe(|| thread.run(&batches)));
            ran.unwrap_or_else(|_| end_process("the thread of a rank ended by a panic, printed above"));
        };
        let started = thread::Builder::new().name(name).spawn(run);
        started.map(drop).map_err(|error| {
            format!(
                "no thread for this rank could be started ({error}): raise the limit \
             of processes"
            )
        })
    }

    /// Takes a batch. Returns `false` if the thread has ended.
    pub(super) fn post_batch(&self, batch: CopyBatch) -> bool {
        self.work.send(batch).is_ok()
    }

    /// Stops all batches not enqueued yet.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }
}

fn same_pid(pid: u32) -> String {
    format!(
        "this rank and the sidecar are both process {pid} of their PID namespaces, and CUDA cannot share memory between \
         equal process numbers: restart one of the two containers"
    )
}

fn no_such_gpu() -> String {
    "this rank's GPU is not visible to the sidecar: give both containers the same GPUs (NVIDIA_VISIBLE_DEVICES)".into()
}

fn unopened(error: &CudaError) -> String {
    format!(
        "the rank's GPU memory cannot be opened here ({error}): both containers need the same GPU and one host driver; \
         hostIPC is not needed"
    )
}

/// Kills this process: after an error, every CUDA context of a process is broken, so only a new process can
/// copy. A normal exit would wait for a stuck stream.
pub(super) fn end_process(reason: &str) -> ! {
    tracing::error!(reason, "the sidecar ends and must be restarted: its GPU context is broken");
    // SIGKILL skips the clean-up of the driver: it would wait for a stuck stream.
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    unreachable!("a process that was killed")
}

// === impl GpuWords ===

impl GpuWords {
    fn new(gpu: &Arc<Gpu>, memory: &SessionMemory) -> Result<Self, CudaError> {
        let session = memory.shared_region();
        let refused = |_| CudaError::missing("memfd_create", "no memory for a page of words");
        let page = rustix::fs::memfd_create("pillion-words", MemfdFlags::CLOEXEC).map_err(refused)?;
        rustix::fs::ftruncate(&page, own::BYTES as u64).map_err(refused)?;
        let page = Arc::new(Region::map(page.as_fd(), own::BYTES, Access::ReadWrite).map_err(refused)?);
        Ok(Self {
            header: Registered::new(gpu, &session, 0, HEADER_BYTES)?,
            loads: Registered::new(gpu, &session, LOAD_WORDS, LOAD_WORDS_BYTES + GATES_BYTES)?,
            own: Registered::new(gpu, &page, 0, own::BYTES)?,
        })
    }

    /// SYNC POINT(device batch): acquire; the bytes of the batch are visible.
    fn ended_batch(&self, word: usize) -> u64 {
        self.own.region().word64(word).load(Ordering::Acquire)
    }
}

// === impl Thread ===

impl Thread {
    fn open_memory(asked: GpuRankRequest, stopped: &Arc<AtomicBool>) -> Result<Self, String> {
        let worker = &asked.worker;
        let cuda = worker.cuda.as_ref().expect("the caller asked for a GPU");
        if cuda.pid == std::process::id() {
            return Err(same_pid(cuda.pid));
        }
        let gpus = asked.pinned.gpus()?;
        let gpu = gpus.iter().find(|gpu| gpu.uuid() == cuda.uuid).ok_or_else(no_such_gpu)?;
        let beside = || gpu.beside().map_err(|error| unopened(&error));
        let place = asked.contexts.enter_rank((cuda.uuid, cuda.pid), gpu, beside)?;
        let gpu = place.context();
        let open = || -> Result<_, CudaError> {
            let open =
                |a: &shm_protocol::handshake::CudaAllocation| Imported::open_handle(gpu, a.handle, a.bytes);
            let imported = cuda.allocations.iter().map(open).collect::<Result<_, _>>()?;
            let blocks = Arc::new(DeviceBlocks::imported(imported, &worker.regions, worker.blocks));
            let stream = || CopyStream::new(gpu, &blocks, &asked.pool, SLICE_BYTES as u64);
            Ok((stream()?, stream()?, GpuWords::new(gpu, &asked.memory)?))
        };
        let (load, save, words) = open().map_err(|error| unopened(&error))?;
        Ok(Self {
            load,
            save,
            loads: GpuLane::default(),
            saves: GpuLane::default(),
            loaded: 0,
            words,
            cuts: cuda.cuts.clone(),
            stopped: Arc::clone(stopped),
            clock: asked.link_place.clock,
            stuck: None,
            parked: false,
            looked: Duration::ZERO,
            place,
            asked,
        })
    }

    fn run(mut self, batches: &Receiver<CopyBatch>) {
        let mut open = true;
        while open || self.busy() {
            open = self.take_batches(batches, open);
            let worked = self.run_turn().unwrap_or_else(|error| end_process(&error.to_string()));
            if self.busy() {
                self.look_after();
            }
            if !worked && self.busy() {
                thread::sleep(POLL);
            }
        }
    }

    fn busy(&self) -> bool {
        self.loads.busy() || self.saves.busy()
    }

    /// Takes posted batches, and waits for one if the thread is idle. Returns false once no more can come.
    fn take_batches(&mut self, batches: &Receiver<CopyBatch>, open: bool) -> bool {
        if open && !self.busy() {
            match batches.recv() {
                Ok(batch) => self.accept_batch(batch),
                Err(RecvError) => return false,
            }
        }
        loop {
            match batches.try_recv() {
                Ok(batch) => self.accept_batch(batch),
                Err(TryRecvError::Empty) => return open,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn accept_batch(&mut self, batch: CopyBatch) {
        let CopyBatch { copy, direction, pieces, load_op, awaited, .. } = batch;
        let end = |piece: &core::RankBlock| piece.offset + self.block_bytes();
        let locked = pieces.iter().all(|piece| end(piece) <= self.asked.pinned.bytes());
        let blocks: Vec<_> = pieces.iter().map(|piece| (piece.block, piece.offset)).collect();
        let bytes = blocks.len() as u64 * self.block_bytes();
        let (lane, held) = match direction {
            core::CopyDirection::Load => (&mut self.loads, locked && !awaited),
            core::CopyDirection::Save => (&mut self.saves, false),
        };
        let transfer = PendingCopy::new((copy, load_op), blocks, bytes, !held, self.clock.now());
        match locked {
            true => lane.accept_copy(transfer),
            // CUDA copies unlocked memory within the call. The call would wait for `go` for ever: this thread
            // stores `go` only after the call.
            false => lane.give_up(&transfer),
        }
    }

    fn block_bytes(&self) -> u64 {
        *self.cuts.last().expect("checked by the handshake")
    }

    /// Enqueues batches and reports ended copies. Returns true if there was any work.
    fn run_turn(&mut self) -> Result<bool, CudaError> {
        if self.stopped.load(Ordering::Relaxed) {
            self.loads.give_up_all();
            self.saves.give_up_all();
        }
        let mut worked = self.enqueue_load()?;
        worked |= self.enqueue_save()?;
        let loaded = self.words.ended_batch(own::LOADED);
        if loaded != self.loaded {
            self.loaded = loaded;
            self.asked.link_place.note_ended();
        }
        let saved = self.words.ended_batch(own::SAVED);
        for end in self.loads.take_ended(loaded).into_iter().chain(self.saves.take_ended(saved)) {
            self.report(end);
            worked = true;
        }
        Ok(worked)
    }

    fn report(&self, end: CopyEnd) {
        let us = (self.clock.now() - end.since).as_micros() as u64;
        let bytes = end.blocks as u64 * self.block_bytes();
        tracing::debug!(copy = end.finished.copy, ok = end.finished.ok, bytes, us, "copied");
        self.asked.ends.report(end.finished);
    }

    fn enqueue_load(&mut self) -> Result<bool, CudaError> {
        if !self.loads.has_waiting() {
            self.asked.link_place.note_idle();
            return Ok(false);
        }
        if !self.loads.has_room() {
            return Ok(false);
        }
        let bytes_max = match self.asked.link_place.ask_turn() {
            RankTurn::Alone => BATCH_BYTES_MAX,
            RankTurn::Shared => BATCH_BYTES_SHARED,
            RankTurn::Later => return Ok(false),
        };
        let Some(mut transfer) = self.loads.next() else { return Ok(false) };
        if !gate::is_open(self.asked.memory.region(), transfer.op) {
            self.loads.give_up(&transfer);
            return Ok(true);
        }
        let step = transfer.next_step(&self.cuts, bytes_max);
        let (batch, whole) = (self.loads.batches + 1, step.blocks.end == transfer.blocks.len());
        let stream = self.load.stream();
        let GpuWords { header: fences, loads, own: page } = &self.words;
        stream.wait_at_least(page, own::GO, batch)?;
        stream.wait_at_least(loads, gate_word(transfer.op), gate::value_open_for(transfer.op))?;
        stream.write_word(fences, header::FENCE_STARTED, batch)?;
        let cut = self.byte_range(&step.cuts);
        self.load.enqueue(PoolDirection::ToEngine, &cut, &transfer.blocks[step.blocks.clone()])?;
        if whole {
            stream.write_word(loads, load_word(transfer.op), load_word_value(transfer.op, step.cuts.end))?;
        }
        stream.write_word(fences, header::FENCE_ENDED, batch)?;
        stream.write_word(page, own::LOADED, batch)?;
        // SYNC POINT(go): everything is enqueued.
        page.region().word64(own::GO).store(batch, Ordering::Release);
        self.asked.link_place.enqueued((cut.end - cut.start) * step.blocks.len() as u64);
        transfer.advance(&step);
        self.loads.fly(transfer, self.cuts.len());
        Ok(true)
    }

    fn enqueue_save(&mut self) -> Result<bool, CudaError> {
        let next = self.saves.has_room().then(|| self.saves.next()).flatten();
        let Some(mut transfer) = next else { return Ok(false) };
        let whole = [self.block_bytes()];
        let step = transfer.next_step(&whole, BATCH_BYTES_MAX);
        self.save.enqueue(PoolDirection::ToPool, &(0..whole[0]), &transfer.blocks[step.blocks.clone()])?;
        self.save.stream().write_word(&self.words.own, own::SAVED, self.saves.batches + 1)?;
        transfer.advance(&step);
        self.saves.fly(transfer, whole.len());
        Ok(true)
    }

    fn byte_range(&self, cuts: &Range<usize>) -> Range<u64> {
        let start = cuts.start.checked_sub(1).map_or(0, |before| self.cuts[before]);
        start..self.cuts[cuts.end - 1]
    }

    /// Checks on batches in flight: errors of the driver, the engine's end, and a stuck batch.
    fn look_after(&mut self) {
        let now = self.clock.now();
        if now >= self.looked + HEALTH {
            self.looked = now;
            let health = self.load.stream().is_idle().and_then(|_| self.save.stream().is_idle());
            health.unwrap_or_else(|error| end_process(&error.to_string()));
            if self.engine_ended() {
                // The engine's process has ended: nothing reads its memory, so these batches may run.
                let memory = self.asked.memory.region();
                self.loads.flying().for_each(|flight| gate::open_for_nobody(memory, flight.op));
            }
        }
        let stuck = self.stuck();
        let since = self.stuck.filter(|(before, _)| Some(*before) == stuck).map_or(now, |(_, since)| since);
        self.stuck = stuck.map(|stuck| (stuck, since));
        if now > since + STUCK && !self.parked {
            self.park();
        }
    }

    /// Parks this rank: its engine's session ends, and the engine is not served again before it restarts. The
    /// stuck batch cannot be cancelled, and its slots and memory cannot be freed before it has ended:
    /// docs/decisions/0022-each-load-has-its-own-gate-and-a-stuck-rank-is-parked.md.
    fn park(&mut self) {
        self.parked = true;
        self.place.park();
        let GpuRankRequest { session, engine, worker, ends, .. } = &self.asked;
        tracing::error!(
            session,
            engine,
            rank = worker.rank,
            "copies into this rank's memory wait behind a gate that its engine closed, and the engine is no longer \
             served: restart it"
        );
        ends.parked(*session, engine.clone());
    }

    /// True if the engine's process is known to have ended.
    fn engine_ended(&self) -> bool {
        let Some(process) = &self.asked.process else { return false };
        let mut ready = [PollFd::new(process, PollFlags::IN)];
        rustix::event::poll(&mut ready, Some(&Timespec::default())).is_ok_and(|ready| ready == 1)
    }

    /// Returns the batch to be watched as stuck: the oldest batch of loads, if its gate is closed; after the
    /// session's end also with an open gate, or the oldest batch of saves. Ends in the other direction do not
    /// prolong its time.
    fn stuck(&self) -> Option<Stuck> {
        let (load, save) = (self.loads.front(), self.saves.front());
        if self.stopped.load(Ordering::Relaxed) {
            let load = load.map(|flight| Stuck::Load(flight.batch));
            return load.or_else(|| save.map(|flight| Stuck::Save(flight.batch)));
        }
        let closed = load.filter(|flight| !gate::is_open(self.asked.memory.region(), flight.op));
        closed.map(|flight| Stuck::Load(flight.batch))
    }
}
