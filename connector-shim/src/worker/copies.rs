//! This process' own copies, and the thread for loads that no caller waits for.
//!
//! On a GPU the thread is also the watchdog: it follows every load promised by the sidecar, and takes back,
//! copies and releases late ones. It does not use the interpreter, and makes no call that a waiting stream
//! could block.

mod fetch;
mod guard;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use copy_engine::EngineMemory;
use copy_engine::cuda::{CudaError, Gpu, StreamEvent};

use self::fetch::{BlockFetch, FetchStep};
use super::link::{Job, Link, settle_job};
use super::{EndedLoad, SlotPart};
use crate::clock;
use crate::core::endpoint::Endpoint;
use crate::core::notices::{NoticeCause, Notices};
use crate::core::plan::Plan;
use crate::core::worker::link::Batches;
use crate::core::worker::load::is_whole;
use crate::core::worker::watch::{LoadSeen, LoadWatch, WatchVerdict};

/// Time between two looks at loads in progress: a request waits for the look that finds its load's end, and a
/// look takes some microseconds.
const LOOK: Duration = Duration::from_micros(200);
/// The shorter time while this process copies, or is about to copy for a waiting stream.
const POLL: Duration = Duration::from_micros(20);

/// A load into GPU memory, followed by the thread until its end.
#[derive(Debug)]
pub(super) struct WatchedLoad {
    pub(super) job: Job,
    /// A mark behind all earlier uses of its blocks.
    pub(super) reached: Box<dyn StreamMark>,
    /// The engine's stream waits for the load: its blocks must arrive.
    pub(super) sync: bool,
    pub(super) watch: LoadWatch,
    /// This process' own copies, once they have begun.
    pub(super) fetch: Option<BlockFetch>,
}

/// A place in the engine's stream.
pub(super) trait StreamMark: std::fmt::Debug + Send {
    /// True once the stream has passed it.
    fn passed(&self) -> Result<bool, CudaError>;
}

impl StreamMark for StreamEvent {
    fn passed(&self) -> Result<bool, CudaError> {
        self.passed()
    }
}

/// An order to the thread.
#[derive(Debug)]
pub(super) enum CopierOrder {
    Copy(Job),
    Watch(Box<WatchedLoad>),
}

/// A load that the engine's stream waits for.
#[derive(Debug)]
struct StreamWait {
    link: Arc<Link>,
    op: u64,
}

#[derive(Debug, Default)]
pub(super) struct RankCounters {
    pub(super) loads: AtomicU64,
    pub(super) blocks_by_engine: AtomicU64,
    pub(super) blocks_by_sidecar: AtomicU64,
    pub(super) blocks_failed: AtomicU64,
    pub(super) bytes_loaded: AtomicU64,
    pub(super) rescues: AtomicU64,
}

/// The state shared by the thread and the session.
#[derive(Debug)]
pub(super) struct RankCopies {
    memory: EngineMemory,
    gpu: Option<Arc<Gpu>>,
    /// Ends of the cuts in which a load arrives, in bytes of this rank's part of a block.
    cuts: Vec<u64>,
    part: SlotPart,
    notices: Arc<Notices>,
    pub(super) counters: RankCounters,
    progress: CopierProgress,
    /// The session has ended and its GPU's streams are idle: memory and streams are freed, not left to the
    /// end of the process.
    frees: AtomicBool,
}

/// The progress of the thread.
#[derive(Debug, Default)]
struct CopierProgress {
    ended: Mutex<Vec<EndedLoad>>,
    /// Number of loads that the thread follows; above 0, the engine's stream may be waiting for one.
    watched: AtomicUsize,
    /// Bytes of the loads that the thread follows.
    watched_bytes: AtomicU64,
    /// Followed loads with a wait on the engine's stream.
    stream_waits: Mutex<Vec<StreamWait>>,
    /// Turns of the thread. When they stop, the driver blocks the thread.
    turns: AtomicU64,
    /// Marks of ended loads, to be freed while no stream waits.
    spent: Mutex<Vec<Box<dyn StreamMark>>>,
}

// === impl RankCopies ===

impl RankCopies {
    /// For memory of `gpu`, if it is GPU memory. `cuts` are the ends of the cuts in which its loads arrive.
    pub(super) fn new(
        memory: EngineMemory,
        gpu: Option<&Arc<Gpu>>,
        cuts: Vec<u64>,
        part: SlotPart,
        notices: Arc<Notices>,
    ) -> Self {
        let (gpu, (counters, progress)) = (gpu.cloned(), Default::default());
        Self { memory, gpu, cuts, part, notices, counters, progress, frees: AtomicBool::new(false) }
    }

    /// Starts the thread. It ends once its sender is dropped and all loads have ended.
    pub(super) fn spawn(self: &Arc<Self>) -> std::io::Result<(Sender<CopierOrder>, JoinHandle<()>)> {
        let (sender, orders) = channel();
        if self.gpu.is_some() {
            let copies = Arc::downgrade(self);
            let named = std::thread::Builder::new().name("pillion-guard".into());
            named.spawn(move || guard::watch_copies(&copies))?;
        }
        let copies = Arc::clone(self);
        let named = std::thread::Builder::new().name("pillion-copier".into());
        named.spawn(move || copies.run_orders(&orders)).map(|thread| (sender, thread))
    }

    /// Makes the threads and the session free their memory and streams of a GPU at their end. The engine's
    /// streams are idle.
    pub(super) fn free_at_end(&self) {
        // Relaxed: the threads look after the end of their channels.
        self.frees.store(true, Ordering::Relaxed);
    }

    /// True after `free_at_end`.
    pub(super) fn frees(&self) -> bool {
        self.frees.load(Ordering::Relaxed)
    }

    /// True if no stream of the engine can be waiting for a load.
    pub(super) fn is_unwatched(&self) -> bool {
        // SYNC POINT(watched): acquire pairs with the release in `follow_all`; the thread has dropped the
        // links of ended loads.
        self.progress.watched.load(Ordering::Acquire) == 0
    }

    /// Counts a load before the thread gets it. Returns the bytes of this load and of the loads ahead of it.
    pub(super) fn count_watched(&self, job: &Job, sync: bool) -> u64 {
        // Relaxed: only the session's own thread looks at it.
        self.progress.watched.fetch_add(1, Ordering::Relaxed);
        let link = job.link.clone().filter(|_| sync);
        self.stream_waits().extend(link.map(|link| StreamWait { link, op: job.plan.op }));
        let bytes = self.plan_bytes(&job.plan);
        self.progress.watched_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes
    }

    /// Bytes of this rank's part of a load.
    pub(super) fn plan_bytes(&self, plan: &Plan) -> u64 {
        plan.blocks.len() as u64 * self.memory.block_bytes()
    }

    fn stream_waits(&self) -> MutexGuard<'_, Vec<StreamWait>> {
        lock(&self.progress.stream_waits)
    }

    /// Frees the marks of ended loads; may wait for a waiting stream.
    pub(super) fn free_spent(&self) {
        lock(&self.progress.spent).clear();
    }

    /// The rank's memory.
    pub(super) fn memory(&self) -> &EngineMemory {
        &self.memory
    }

    /// Prepares the copies of a job. The result has no copies if the job's pool cannot be read, or its plan
    /// names another namespace.
    fn begin_fetch(&self, job: &Job) -> BlockFetch {
        match &job.pool {
            _ if job.refused => BlockFetch::nothing(job.plan.block_ids()),
            Some(pool) => BlockFetch::new(&self.memory, pool, self.part, &job.plan),
            None => {
                self.notices.say(
                    NoticeCause::Pool,
                    "a load names the pool of a sidecar that this rank has not connected to; \
                     its blocks are computed again",
                );
                BlockFetch::nothing(job.plan.block_ids())
            }
        }
    }

    /// Carries out a job, reports its end to the sidecar, and returns the failed blocks.
    pub(super) fn carry_out(&self, job: &Job) -> Vec<u32> {
        if job.rescue {
            self.note_rescue();
            settle_job(job);
        }
        let failed = self.fetch(job);
        job.report(failed.is_empty());
        failed
    }

    /// Copies a job's blocks, counts them, and returns the failed ones.
    fn fetch(&self, job: &Job) -> Vec<u32> {
        let mut fetch = self.begin_fetch(job);
        loop {
            match self.step_fetch(&mut fetch, job, |_| {}) {
                FetchStep::Worked => {}
                FetchStep::Waits => std::thread::sleep(POLL),
                FetchStep::Done => return self.end_fetch(fetch, job),
            }
        }
    }

    fn step_fetch(&self, fetch: &mut BlockFetch, job: &Job, delivered: impl FnMut(usize)) -> FetchStep {
        let Some(pool) = &job.pool else { return FetchStep::Done };
        let stepped = fetch.step(&self.memory, pool, self.part, &self.cuts, delivered);
        stepped
            .unwrap_or_else(|error| end_process(&format!("the GPU failed while a load was copied ({error})")))
    }

    /// Counts a job's blocks and returns the failed ones.
    fn end_fetch(&self, fetch: BlockFetch, job: &Job) -> Vec<u32> {
        let failed = fetch.failed_blocks();
        if !failed.is_empty() && !job.refused && job.pool.is_some() {
            let text = "blocks of a load were no longer in their slots, which were filled again or hold blocks of \
                 another size; they are computed again. If this lasts, raise the sidecar's --lease-ttl";
            self.notices.say(NoticeCause::Moved, text);
        }
        let copied = (job.plan.blocks.len() - failed.len()) as u64;
        self.counters.blocks_by_engine.fetch_add(copied, Ordering::Relaxed);
        self.count_load(copied, failed.len() as u64);
        failed
    }

    /// Counts a load that the sidecar copied.
    pub(super) fn count_sidecar(&self, plan: &Plan) {
        let blocks = plan.blocks.len() as u64;
        self.counters.blocks_by_sidecar.fetch_add(blocks, Ordering::Relaxed);
        self.count_load(blocks, 0);
    }

    /// Counts a load taken back from the sidecar, with a notice.
    pub(super) fn note_rescue(&self) {
        self.counters.rescues.fetch_add(1, Ordering::Relaxed);
        self.notices.say(NoticeCause::Rescue, "the engine finished a load that the sidecar did not finish");
    }

    fn count_load(&self, copied: u64, failed: u64) {
        self.counters.loads.fetch_add(1, Ordering::Relaxed);
        self.counters.blocks_failed.fetch_add(failed, Ordering::Relaxed);
        self.counters.bytes_loaded.fetch_add(copied * self.memory.block_bytes(), Ordering::Relaxed);
    }

    pub(super) fn end_load(&self, ended: EndedLoad) {
        lock(&self.progress.ended).push(ended);
    }

    /// Asynchronous loads that have ended; each is returned once.
    pub(super) fn take_ended(&self) -> Vec<EndedLoad> {
        std::mem::take(&mut *lock(&self.progress.ended))
    }

    // --- the thread ---

    fn run_orders(&self, orders: &Receiver<CopierOrder>) {
        let _guard = self.gpu.as_ref().map(|gpu| {
            if let Err(error) = gpu.bind() {
                end_process(&format!("the watchdog cannot use the GPU ({error})"));
            }
            EndsProcess
        });
        let mut followed = Vec::new();
        loop {
            self.progress.turns.fetch_add(1, Ordering::Relaxed);
            match next_order(orders, &followed) {
                Ok(CopierOrder::Copy(job)) => {
                    self.end_load(EndedLoad { op: job.plan.op, failed: self.carry_out(&job) })
                }
                Ok(CopierOrder::Watch(load)) => followed.push(*load),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) if followed.is_empty() => return,
                // The session is over, and a stream may still be waiting.
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(POLL),
            }
            self.follow_all(&mut followed);
        }
    }

    /// Looks at every load once, first at loads with a waiting stream.
    fn follow_all(&self, followed: &mut Vec<WatchedLoad>) {
        let mut copied = false;
        for sync in [true, false] {
            let over = |load: &mut WatchedLoad| {
                // One copy at a time for loads without a waiting stream, and none beside a load with one.
                if load.sync != sync || (copied && !sync) {
                    return false;
                }
                let over = self.follow(load);
                copied |= load.fetch.is_some();
                over
            };
            for ended in followed.extract_if(.., over) {
                lock(&self.progress.spent).push(ended.reached);
                self.stream_waits().retain(|stream_waits| stream_waits.op != ended.job.plan.op);
                self.progress.watched_bytes.fetch_sub(self.plan_bytes(&ended.job.plan), Ordering::Relaxed);
                drop(ended.job);
                // SYNC POINT(watched): release; the load's link is dropped before.
                self.progress.watched.fetch_sub(1, Ordering::Release);
            }
        }
    }

    /// Takes the next step of a load. Returns true if the load is over.
    fn follow(&self, load: &mut WatchedLoad) -> bool {
        if load.fetch.is_some() {
            return self.advance(load);
        }
        let seen = match load.see(self.cuts.len()) {
            Ok(seen) => seen,
            Err(error) => end_process(&format!("the GPU failed while a load was watched ({error})")),
        };
        match load.watch.next(&seen, clock::read_clock()) {
            WatchVerdict::Wait => false,
            WatchVerdict::Whole => {
                self.count_sidecar(&load.job.plan);
                // The sidecar may have reported the end only in the load's outcome: the stream's word is
                // still to be set.
                self.conclude(load, Vec::new());
                true
            }
            WatchVerdict::TakeBack => {
                self.note_rescue();
                if let Some(link) = &load.job.link {
                    link.close_gate(load.job.plan.op);
                }
                load.job.rescue = true;
                false
            }
            WatchVerdict::Copy => {
                // The engine's stream waits for these bytes, and its session has already counted them as
                // failed.
                load.job.refused &= !load.sync;
                load.fetch = Some(self.begin_fetch(&load.job));
                self.advance(load)
            }
            WatchVerdict::GiveUp => {
                end_process("the sidecar may still be writing blocks of a load that this worker revoked")
            }
        }
    }

    /// Continues this process' copies of a load. Returns true if the load is over.
    fn advance(&self, load: &mut WatchedLoad) -> bool {
        let mut fetch = load.fetch.take().expect("the caller saw it");
        let (op, sync, link) = (load.job.plan.op, load.sync, load.job.link.clone());
        let delivered = |cuts| link.iter().filter(|_| sync).for_each(|link| link.deliver(op, cuts));
        if self.step_fetch(&mut fetch, &load.job, delivered) != FetchStep::Done {
            load.fetch = Some(fetch);
            return false;
        }
        let failed = self.end_fetch(fetch, &load.job);
        let whole = failed.is_empty();
        self.conclude(load, failed);
        load.job.report(whole);
        true
    }

    /// Ends the wait for a load: the wait of the engine's stream, which must not go on without every block,
    /// or that of the session.
    fn conclude(&self, load: &WatchedLoad, failed: Vec<u32>) {
        let (op, lost) = (load.job.plan.op, failed.len());
        if !load.sync {
            self.end_load(EndedLoad {
                op,
                failed: if load.job.refused { load.job.plan.block_ids() } else { failed },
            });
        } else if lost == 0 {
            load.job.link.iter().for_each(|link| link.deliver(op, self.cuts.len()));
        } else {
            let all = load.job.plan.blocks.len();
            end_process(&format!("{lost} of {all} blocks of a promised load are lost"));
        }
    }
}

fn lock<T>(list: &Mutex<T>) -> MutexGuard<'_, T> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl WatchedLoad ===

impl WatchedLoad {
    fn see(&self, cuts: usize) -> Result<LoadSeen, CudaError> {
        let (plan, reached) = (&self.job.plan, self.reached.passed()?);
        let Some(link) = &self.job.link else {
            let batches = Batches { began: 0, ended: 0 };
            let (whole, refused, cuts) = (false, false, 0);
            return Ok(LoadSeen { reached, whole, refused, broken: true, batches, cuts, gone: true });
        };
        let outcome = link.outcome(plan.op);
        let delivered = link.delivered(plan.op);
        let whole = is_whole(plan, outcome) || (self.sync && delivered >= cuts as u64);
        let (batches, gone) = (link.batches(), link.connection.sidecar_is_gone());
        let broken = outcome.is_some() || link.connection.is_lost() || gone;
        let refused = outcome.is_some_and(|outcome| outcome.status.is_refusal());
        Ok(LoadSeen { reached, whole, refused, broken, batches, cuts: delivered, gone })
    }
}

/// Returns the next order. The wait has a time limit unless the thread follows no load.
fn next_order(
    orders: &Receiver<CopierOrder>,
    followed: &[WatchedLoad],
) -> Result<CopierOrder, RecvTimeoutError> {
    let copies = |load: &WatchedLoad| load.fetch.is_some() || (load.sync && load.watch.is_ours());
    match followed {
        [] => orders.recv().map_err(|_| RecvTimeoutError::Disconnected),
        _ => orders.recv_timeout(if followed.iter().any(copies) { POLL } else { LOOK }),
    }
}

/// Ends the process when the watchdog panics: streams would otherwise wait for ever.
struct EndsProcess;

impl Drop for EndsProcess {
    fn drop(&mut self) {
        if std::thread::panicking() {
            end_process("the watchdog met an internal error, printed above");
        }
    }
}

/// Ends the process with a message: its further results would be wrong, or would never come.
fn end_process(text: &str) -> ! {
    eprintln!(
        "pillion: FATAL: {text}. This worker ends now, so that it does not compute on wrong KV: restart it."
    );
    std::process::abort();
}

#[cfg(test)]
mod tests;
