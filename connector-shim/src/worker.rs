//! A worker's session: shows KV memory to the sidecar, stores fence words, and carries out loads.
//!
//! A load that the sidecar was to copy and did not is finished here, from the mapped pool, every slot checked before and
//! after its copy. The mapping outlives the connection, so that a dead sidecar's promises can still be kept.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use copy_engine::HostMemory;
use rustix::fs::{Mode, OFlags};
use shm_protocol::gate;
use shm_protocol::handshake::{self, BlockRegion, Copier, Hello, Role};
use shm_protocol::layout::header;
use shm_protocol::message::{Kind, Message, Outcome, Status};
use shm_protocol::pool::SlotRef;
use shm_protocol::proof::WITHOUT_RESCUE;
use shm_protocol::region::Access;
use shm_protocol::{PROTOCOL_VERSION, wait};

use crate::client::{Change, Client};
use crate::clock;
use crate::connection::{Address, Connection};
use crate::error::{ShimError, argument};
use crate::notices::{Cause, Notices};
use crate::plan::Plan;
use crate::pool::Pool;
use crate::scheduler::{SLEEP_TURN, check_engine};
use crate::submission::Submission;

/// How long a copy by the sidecar is waited for before the engine copies itself: a hundred times what the largest load
/// takes, and short enough for a request that waits.
pub const LOAD_DEADLINE: Duration = Duration::from_secs(2);
/// How long the end of a block's copy by the sidecar is waited for once the gate is closed. A copy takes less than a
/// millisecond, but a runnable thread was seen to wait 3 s for a busy core. A sidecar frozen half-way through a block is
/// given up after it: `pillion.copy=sidecar` on host memory has no better guarantee.
pub const SETTLE: Duration = Duration::from_secs(5);
/// Time between two looks meanwhile.
const SETTLE_POLL: Duration = Duration::from_micros(50);
/// How long the pool of a sidecar's earlier life stays mapped after the next one was found: plans made before are on
/// their way for a step or two, and the memory is needed by the next sidecar.
const POOL_KEPT: Duration = Duration::from_secs(5);

/// What a new session needs to know.
#[derive(Debug)]
pub struct Options {
    /// The sidecar's socket.
    pub socket: PathBuf,
    /// `engine_id` of vLLM's configuration.
    pub engine: String,
    /// Ranks of the engine.
    pub world_size: u32,
    /// This rank's memory and facts.
    pub worker: handshake::Worker,
    /// The descriptors that the regions name, open for reading and writing.
    pub descriptors: Vec<OwnedFd>,
}

/// An asynchronous load that ended.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Ended {
    /// Operation of its LOAD.
    pub op: u64,
    /// Blocks that do not hold what was asked for.
    pub failed: Vec<u32>,
}

/// A connection as the calling thread and the copier share it.
#[derive(Debug)]
struct Link {
    connection: Arc<Connection>,
    out: Mutex<Outbox>,
}

#[derive(Debug)]
struct Outbox {
    submission: Submission,
    /// Ends of loads that found no room: posted as soon as there is some, since the sidecar keeps their slots until then.
    unreported: Vec<Message>,
}

/// A load for which the sidecar's word is awaited.
#[derive(Debug)]
struct Awaited {
    plan: Plan,
    link: Arc<Link>,
    deadline: Instant,
}

/// A load that this process copies.
#[derive(Debug)]
struct Job {
    plan: Plan,
    pool: Option<Arc<Pool>>,
    /// Where LOADED goes; `None` if the sidecar that promised it is gone.
    link: Option<Arc<Link>>,
    /// The sidecar may be writing a block of it.
    rescue: bool,
}

#[derive(Debug, Default)]
struct Counters {
    loads: AtomicU64,
    blocks_by_engine: AtomicU64,
    blocks_by_sidecar: AtomicU64,
    blocks_failed: AtomicU64,
    bytes_loaded: AtomicU64,
    rescues: AtomicU64,
}

/// What the copier thread shares with the session.
#[derive(Debug)]
struct Copies {
    memory: HostMemory,
    /// Where this rank's part of a slot begins, and the bytes of a whole slot: the parts lie side by side.
    shard_offset: u64,
    slot_bytes: u64,
    counters: Counters,
    ended: Mutex<Vec<Ended>>,
    notices: Arc<Notices>,
}

/// One rank's session. See the module.
#[derive(Debug)]
pub struct Worker {
    client: Client,
    link: Option<Arc<Link>>,
    copies: Arc<Copies>,
    pool: Option<Arc<Pool>>,
    earlier_pool: Option<(Instant, Arc<Pool>)>,
    awaited: Vec<Awaited>,
    copier: Option<Sender<Job>>,
    run: Option<[u8; 16]>,
    joined: bool,
    /// The last step begun.
    started: u64,
    namespace: String,
}

// === impl Link ===

impl Link {
    fn new(connection: &Arc<Connection>) -> Self {
        let out = Outbox { submission: Submission::new(connection), unreported: Vec::new() };
        Self { out: Mutex::new(out), connection: Arc::clone(connection) }
    }

    fn out(&self) -> MutexGuard<'_, Outbox> {
        // A panic between two posts leaves a sound ring.
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn post(&self, message: &Message) -> bool {
        let mut out = self.out();
        let posted = out.submission.post(message).is_some();
        out.submission.flush(&self.connection);
        posted
    }

    fn post_loaded(&self, op: u64, status: Status) {
        let message = Message { op, flags: status as u8, ..Message::new(Kind::Loaded) };
        if !self.post(&message) {
            self.out().unreported.push(message);
        }
    }

    /// Posts what found no room before.
    fn retry(&self) {
        let unreported = std::mem::take(&mut self.out().unreported);
        for message in unreported {
            if !self.post(&message) {
                self.out().unreported.push(message);
            }
        }
    }

    /// Forbids the sidecar to begin load `op`, or any before it.
    fn close_gate(&self, op: u64) {
        gate::close(self.connection.region(), op);
    }

    /// After the gate was closed: waits until the sidecar writes no block any more. A hang-up says so too: its end of the
    /// socket is closed after its last copy.
    fn settle(&self) {
        let deadline = clock::now() + SETTLE;
        let settled = || gate::is_settled(self.connection.region());
        while !settled() && !self.connection.is_lost() && clock::now() < deadline {
            std::thread::sleep(SETTLE_POLL);
        }
    }

    /// Waits for the sidecar's word on load `op`.
    fn wait(&self, op: u64) -> Option<Outcome> {
        let deadline = clock::now() + LOAD_DEADLINE;
        let region = self.connection.region();
        self.connection.ring();
        loop {
            let outcome = self.outcome(op);
            let left = deadline.saturating_duration_since(clock::now());
            if outcome.is_some() || left.is_zero() || self.connection.is_lost() {
                return outcome;
            }
            wait::sleep_turn(region, left.min(SLEEP_TURN), || self.outcome(op).is_some());
        }
    }

    /// What became of load `op`, once it has ended.
    fn outcome(&self, op: u64) -> Option<Outcome> {
        self.connection.memory.load_outcome(op).filter(|outcome| outcome.status != Status::Pending)
    }
}

// === impl Copies ===

impl Copies {
    /// Copies every block of the plan and returns those that are not what was asked for.
    fn copy(&self, plan: &Plan, pool: Option<&Pool>) -> Vec<u32> {
        let Some(pool) = pool else {
            self.notices.say(Cause::Pool, "a load names the pool of a sidecar that this rank was never connected to; its blocks are computed again");
            return plan.blocks.iter().map(|(block, _)| *block).collect();
        };
        let copied = |block: u32, slot: SlotRef| {
            pool.verify(slot, self.slot_bytes)
                && self.memory.load_block(pool.region(), slot.offset + self.shard_offset, block).is_ok()
                && pool.verify(slot, self.slot_bytes)
        };
        plan.blocks.iter().filter(|(block, slot)| !copied(*block, *slot)).map(|(block, _)| *block).collect()
    }

    /// Carries out a job, tells the sidecar, and returns the failed blocks.
    fn carry_out(&self, job: &Job) -> Vec<u32> {
        if job.rescue
            && let Some(link) = &job.link
        {
            link.settle();
        }
        let failed = match job.rescue && WITHOUT_RESCUE {
            true => Vec::new(),
            false => self.copy(&job.plan, job.pool.as_deref()),
        };
        let copied = (job.plan.blocks.len() - failed.len()) as u64;
        self.counters.blocks_by_engine.fetch_add(copied, Ordering::Relaxed);
        self.count(copied, failed.len() as u64);
        if let Some(link) = &job.link {
            link.post_loaded(job.plan.op, if failed.is_empty() { Status::Ok } else { Status::Failed });
        }
        failed
    }

    fn count(&self, copied: u64, failed: u64) {
        self.counters.loads.fetch_add(1, Ordering::Relaxed);
        self.counters.blocks_failed.fetch_add(failed, Ordering::Relaxed);
        self.counters.bytes_loaded.fetch_add(copied * self.memory.block_bytes(), Ordering::Relaxed);
    }

    fn end(&self, ended: Ended) {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).push(ended);
    }

    fn run(&self, jobs: &Receiver<Job>) {
        for job in jobs {
            self.end(Ended { op: job.plan.op, failed: self.carry_out(&job) });
        }
    }
}

// === impl Worker ===

impl Worker {
    /// Connects, or leaves that to the background. Fails for impossible arguments, and when the sidecar refuses.
    pub fn new(options: Options) -> Result<Self, ShimError> {
        let Options { socket, engine, world_size, worker, descriptors } = options;
        check_engine(&engine, world_size)?;
        check_worker(&worker, world_size, descriptors.len())?;
        let sent = descriptors.iter().map(|fd| export(fd, worker.copy)).collect::<Result<_, _>>()?;
        let memory = HostMemory::new(descriptors, &worker.regions, worker.blocks, Access::ReadWrite)?;
        let shard_offset = memory.block_bytes() * u64::from(worker.shard);
        let slot_bytes = memory.block_bytes() * u64::from(worker.shards);
        let hello = Hello { version: PROTOCOL_VERSION, engine, world_size, role: Role::Worker(worker) };
        let notices = Arc::new(Notices::default());
        let client = Client::start(Address { socket, hello, descriptors: sent }, notices, true)?;
        let (counters, ended) = Default::default();
        let notices = client.share_notices();
        let copies = Arc::new(Copies { memory, shard_offset, slot_bytes, counters, ended, notices });
        let mut session = Self {
            client,
            link: None,
            copies,
            pool: None,
            earlier_pool: None,
            awaited: Vec::new(),
            copier: None,
            run: None,
            joined: false,
            started: 0,
            namespace: String::new(),
        };
        session.connect();
        Ok(session)
    }

    /// Refuses a forked child; to be called before anything else by whoever may be one.
    pub fn check_process(&self) -> Result<(), ShimError> {
        self.client.check_process()
    }

    /// Whether a sidecar is there, as far as is known.
    pub fn connected(&self) -> bool {
        self.link.is_some()
    }

    /// Connections so far.
    pub fn generation(&self) -> u64 {
        self.client.generation()
    }

    /// The namespace of this rank's blocks, 32 hex digits; empty while no sidecar has named it.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Takes part in the scheduler's run. Does nothing when this was said already on this connection.
    pub fn join(&mut self, run: [u8; 16]) {
        self.refresh();
        if self.run != Some(run) {
            self.run = Some(run);
            self.joined = false;
        }
        self.post_join();
    }

    /// Step `step` begins: its loads may be written.
    pub fn start(&mut self, step: u64) {
        self.refresh();
        self.started = step;
        self.store(header::FENCE_START, step);
        if let Some(link) = &self.link {
            link.retry();
        }
    }

    /// The KV of step `step` is written. `ring`: something waits for that.
    pub fn done(&mut self, step: u64, ring: bool) {
        self.store(header::FENCE_DONE, step);
        if ring && let Some(link) = &self.link {
            link.connection.ring();
        }
    }

    /// Loads a plan's blocks now and returns those that failed.
    pub fn load_now(&mut self, plan: Plan) -> Vec<u32> {
        if !plan.by_engine()
            && let Some(link) = self.link_of(&plan)
        {
            let outcome = link.wait(plan.op);
            if is_whole(&plan, outcome) {
                self.count_sidecar(&plan);
                return Vec::new();
            }
            let job = self.rescue(plan, link);
            return self.copies.carry_out(&job);
        }
        let job = self.job(plan);
        self.copies.carry_out(&job)
    }

    /// Begins to load a plan's blocks; [`Worker::finished`] tells the end.
    pub fn load_later(&mut self, plan: Plan) {
        if !plan.by_engine()
            && let Some(link) = self.link_of(&plan)
        {
            self.awaited.push(Awaited { plan, link, deadline: clock::now() + LOAD_DEADLINE });
            return;
        }
        let job = self.job(plan);
        self.submit(job);
    }

    /// Loads begun by [`Worker::load_later`] that ended, each once.
    pub fn finished(&mut self) -> Vec<Ended> {
        self.drop_earlier_pool();
        for awaited in std::mem::take(&mut self.awaited) {
            self.look_at(awaited);
        }
        std::mem::take(&mut *self.copies.ended.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn look_at(&mut self, awaited: Awaited) {
        let Awaited { plan, link, deadline } = awaited;
        let outcome = link.outcome(plan.op);
        if is_whole(&plan, outcome) {
            self.count_sidecar(&plan);
            self.copies.end(Ended { op: plan.op, failed: Vec::new() });
        } else if outcome.is_some() || link.connection.is_lost() || clock::now() >= deadline {
            let job = self.rescue(plan, link);
            self.submit(job);
        } else {
            self.awaited.push(Awaited { plan, link, deadline });
        }
    }

    fn count_sidecar(&self, plan: &Plan) {
        let blocks = plan.blocks.len() as u64;
        self.copies.counters.blocks_by_sidecar.fetch_add(blocks, Ordering::Relaxed);
        self.copies.count(blocks, 0);
    }

    /// Takes a load away from the sidecar.
    fn rescue(&self, plan: Plan, link: Arc<Link>) -> Job {
        self.copies.counters.rescues.fetch_add(1, Ordering::Relaxed);
        self.client
            .notices()
            .say(Cause::Rescue, "a load that the sidecar did not finish was finished by the engine");
        link.close_gate(plan.op);
        let pool = self.pool_of(&plan);
        Job { plan, pool, link: Some(link), rescue: true }
    }

    fn job(&self, plan: Plan) -> Job {
        Job { pool: self.pool_of(&plan), link: self.link_of(&plan), plan, rescue: false }
    }

    /// Hands a job to the copier thread, which starts with the first one.
    fn submit(&mut self, job: Job) {
        let job = match &self.copier {
            Some(copier) => copier.send(job).err().map(|unsent| unsent.0),
            None => {
                let (sender, jobs) = channel();
                let copies = Arc::clone(&self.copies);
                let started = std::thread::Builder::new()
                    .name("pillion-copier".into())
                    .spawn(move || copies.run(&jobs));
                match started {
                    Ok(_) => {
                        let unsent = sender.send(job).err().map(|unsent| unsent.0);
                        self.copier = Some(sender);
                        unsent
                    }
                    Err(_) => Some(job),
                }
            }
        };
        // No thread to be had: better late than never.
        if let Some(job) = job {
            let failed = self.copies.carry_out(&job);
            self.copies.end(Ended { op: job.plan.op, failed });
        }
    }

    /// The connection to the sidecar that made the plan possible.
    fn link_of(&self, plan: &Plan) -> Option<Arc<Link>> {
        self.link.clone().filter(|link| link.connection.welcome.epoch == plan.epoch)
    }

    fn pool_of(&self, plan: &Plan) -> Option<Arc<Pool>> {
        let earlier = self.earlier_pool.as_ref().map(|(_, pool)| pool);
        self.pool.iter().chain(earlier).find(|pool| pool.epoch() == plan.epoch).cloned()
    }

    fn store(&self, word: usize, step: u64) {
        if let Some(link) = &self.link {
            // SYNC POINT(step): release pairs with the sidecar's acquire; the KV written before is visible with it.
            link.connection.region().word64(word).store(step, Ordering::Release);
        }
    }

    fn refresh(&mut self) {
        self.drop_earlier_pool();
        match self.client.refresh(false) {
            Change::Same => {}
            Change::Lost => self.link = None,
            Change::Connected => self.connect(),
        }
    }

    fn connect(&mut self) {
        let Some(connection) = self.client.connection() else { return };
        self.link = Some(Arc::new(Link::new(connection)));
        self.joined = false;
        self.namespace.clone_from(&connection.welcome.namespace);
        if let Some(pool) = self.pool.replace(connection.pool.clone().expect("workers map the pool")) {
            self.earlier_pool = Some((clock::now(), pool));
        }
        self.post_join();
    }

    fn post_join(&mut self) {
        if let (false, Some(run), Some(link)) = (self.joined, self.run, &self.link) {
            // What was said of loads up to that step may have been lost with the last connection.
            let join = Message { step: self.started, ..Message::new(Kind::Join) };
            self.joined = link.post(&join.with_bytes16(run));
        }
    }

    /// Loads that still need the mapping hold it themselves.
    fn drop_earlier_pool(&mut self) {
        if self.earlier_pool.as_ref().is_some_and(|(since, _)| clock::now() - *since > POOL_KEPT) {
            self.earlier_pool = None;
        }
    }

    /// Numbers since the start, by name.
    pub fn stats(&self) -> BTreeMap<&'static str, u64> {
        let c = &self.copies.counters;
        let numbers = [
            ("loads", &c.loads),
            ("blocks_by_engine", &c.blocks_by_engine),
            ("blocks_by_sidecar", &c.blocks_by_sidecar),
            ("blocks_failed", &c.blocks_failed),
            ("bytes_loaded", &c.bytes_loaded),
            ("rescues", &c.rescues),
        ];
        numbers.into_iter().map(|(name, number)| (name, number.load(Ordering::Relaxed))).collect()
    }

    /// Messages for the log, each handed over once.
    pub fn take_notices(&self) -> Vec<String> {
        self.client.notices().take()
    }

    /// Ends the session for good. Loads in progress end by themselves.
    pub fn disconnect(&mut self) {
        self.client.stop();
        self.link = None;
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.client.is_forked() {
            // The mappings are not there in a child, and something else may lie at their addresses: never unmap them.
            std::mem::forget((self.pool.take(), self.earlier_pool.take(), self.link.take()));
            std::mem::forget(std::mem::take(&mut self.awaited));
        }
    }
}

/// Whether the sidecar moved every block.
fn is_whole(plan: &Plan, outcome: Option<Outcome>) -> bool {
    outcome.is_some_and(|o| o.status == Status::Ok && o.value as usize == plan.blocks.len())
}

/// What is sent to the sidecar: where the engine copies, a descriptor that cannot be written through.
fn export(descriptor: &OwnedFd, copier: Copier) -> Result<OwnedFd, ShimError> {
    let mode = match copier {
        Copier::Engine => OFlags::RDONLY,
        Copier::Sidecar => OFlags::RDWR,
    };
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(descriptor));
    let opened = rustix::fs::open(path, mode | OFlags::CLOEXEC, Mode::empty());
    Ok(opened.map_err(copy_engine::CopyError::from)?)
}

/// The rules of the handshake, told before anything is sent.
fn check_worker(worker: &handshake::Worker, world_size: u32, descriptors: usize) -> Result<(), ShimError> {
    let fits = |region: &BlockRegion| {
        let last = u64::from(worker.blocks - 1).checked_mul(region.stride);
        let end = last.and_then(|at| at.checked_add(region.offset)?.checked_add(region.bytes));
        (region.fd as usize) < descriptors
            && region.bytes > 0
            && region.stride >= region.bytes
            && end.is_some_and(|end| end <= i64::MAX as u64)
    };
    let rules = [
        (worker.rank < world_size, "rank must be below world_size"),
        ((1..=world_size).contains(&worker.shards), "shards must be 1 to world_size"),
        (worker.shard < worker.shards, "shard must be below shards"),
        (worker.blocks > 0, "there must be at least one block"),
        (worker.facts.len() <= handshake::FACTS_MAX, "there may be at most 256 facts"),
        (descriptors <= handshake::DESCRIPTORS_MAX, "there may be at most 64 descriptors"),
        ((1..=handshake::REGIONS_MAX).contains(&worker.regions.len()), "there must be 1 to 1,024 regions"),
    ];
    if let Some((_, rule)) = rules.iter().find(|(holds, _)| !holds) {
        return argument(*rule);
    }
    match worker.regions.iter().position(|region| !fits(region)) {
        Some(index) => {
            argument(format!("region {index} is not inside its descriptor, or its stride is below its bytes"))
        }
        None => Ok(()),
    }
}
