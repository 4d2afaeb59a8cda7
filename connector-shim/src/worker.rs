//! A worker's session: shows KV memory to the sidecar, stores fence words, and carries out loads.
//!
//! A load that the sidecar was to copy and did not is finished here, from the mapped pool, every slot checked before and
//! after its copy. The mapping outlives the connection, so that a dead sidecar's promises can still be kept.
//!
//! On host memory the engine's thread stores the fences and waits for sync loads. On a GPU both are enqueued on the
//! engine's stream, and a thread sees to it that no wait stays for ever.

mod copies;
mod device;
mod link;
mod memory;
mod patience;
mod stager;
mod watch;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use copy_engine::cuda::{CudaError, Event};
use shm_protocol::handshake::{self, Copier, Digest, Hello, Role};
use shm_protocol::key::NamespaceDigest;
use shm_protocol::layout::{QUERY_WAIT_MS_MAX, header};
use shm_protocol::namespace::{self, Facts};
use shm_protocol::request::WorkerRequest;
use shm_protocol::session::Bound;

use self::copies::{Copies, Job, Load, Order, is_whole};
use self::device::Device;
use self::link::Link;
pub use self::link::SETTLE;
pub use self::memory::Memory;
use self::memory::{Opened, open_memory};
use self::patience::Patience;
use self::watch::Watch;
use crate::client::{Change, Client};
use crate::clock;
use crate::connection::{Address, Connection};
use crate::core::endpoint::Endpoint;
use crate::core::notices::{Cause, Notices};
use crate::core::plan::Plan;
use crate::error::{ShimError, argument};
use crate::pool::Pool;

/// How long a copy by the sidecar is waited for without progress before the engine copies itself: a hundred times what the
/// largest load takes, and short enough for a request that waits.
pub const LOAD_DEADLINE: Duration = Duration::from_secs(2);
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
    /// This rank's memory and facts. What is a GPU's is filled in here.
    pub worker: handshake::Worker,
    /// What the regions name.
    pub memory: Memory,
    /// Whether the sidecar does not reach the memory: this process copies loads itself, and what is saved into a segment
    /// that the sidecar reads. Implied on a GPU where `worker.copy` is the engine.
    pub staged: bool,
    /// Digest of the engine's table of cache groups, if its scheduler states one.
    pub groups: Option<[u8; 16]>,
}

/// What [`Worker::load_on`] made of a plan.
#[derive(Debug, Eq, PartialEq)]
pub enum Begun {
    /// The engine's stream waits for it. These blocks count as failed all the same.
    OnStream(Vec<u32>),
    /// Nothing: [`Worker::load_now`] is to be called.
    No(Plan),
}

/// What a rank has said of its weights since its HELLO.
#[derive(Copy, Clone, Debug, Default)]
struct Weights {
    number: u64,
    answers: u64,
    live: [u8; 16],
}

/// An asynchronous load that ended.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Ended {
    /// Operation of its LOAD.
    pub op: u64,
    /// Blocks that do not hold what was asked for.
    pub failed: Vec<u32>,
}

/// Where this rank's part of a slot begins, and the bytes of a whole slot: the parts lie side by side.
#[derive(Copy, Clone, Debug)]
struct Part {
    offset: u64,
    slot_bytes: u64,
}

/// A load into host memory for which the sidecar's word is awaited.
#[derive(Debug)]
struct Awaited {
    plan: Plan,
    refused: bool,
    link: Arc<Link>,
    patience: Patience,
}

/// One rank's session. See the module.
#[derive(Debug)]
pub struct Worker {
    client: Client,
    link: Option<Arc<Link>>,
    /// Where the memory is a GPU's.
    device: Option<Device>,
    copies: Arc<Copies>,
    pool: Option<Arc<Pool>>,
    earlier_pool: Option<(Instant, Arc<Pool>)>,
    awaited: Vec<Awaited>,
    copier: Option<Sender<Order>>,
    /// Where saves are staged: who is given every connection.
    stager: Option<Sender<Arc<Link>>>,
    /// This rank copies every load itself.
    by_engine: bool,
    run: Option<[u8; 16]>,
    joined: bool,
    /// The last step begun.
    started: u64,
    facts: Facts,
    /// Digest of the weights that it loaded.
    live: Option<[u8; 16]>,
    weights: Weights,
    /// Whether the sidecar was told the last of them.
    told: bool,
    /// The first 8 bytes of the namespace that the rank was bound to last, also by a sidecar that is gone: its promises can
    /// still be kept. 0: none since the weights may have changed.
    bound: u64,
    /// The namespace that was told last, and the words that it was made of.
    named: Option<(Bound, (NamespaceDigest, Facts))>,
}

// === impl Worker ===

impl Worker {
    /// Connects, or leaves that to the background. Fails for impossible arguments, and when the sidecar refuses.
    pub fn new(options: Options) -> Result<Self, ShimError> {
        let Options { socket, engine, world_size, worker, memory, staged, groups } = options;
        let by_engine = worker.copy == Copier::Engine;
        let staged = staged || (by_engine && matches!(memory, Memory::Gpu { .. }));
        let (facts, live) = (worker.facts.clone(), worker.live_weights.map(|live| live.0));
        let role = Role::Worker(worker);
        let mut hello = Hello { groups: groups.map(Digest), ..Hello::new(engine, world_size, role) };
        // The memory is opened by what the hello says of it, so that must be sound before. The address checks the hello
        // as it goes out, when it names allocations or a staging segment instead.
        hello.check(memory.count())?;
        let Role::Worker(worker) = &mut hello.role else { unreachable!("made as a worker's") };
        let Opened { memory, device, cuts, staging, descriptors } = open_memory(worker, memory, staged)?;
        let part = Part {
            offset: memory.block_bytes() * u64::from(worker.shard),
            slot_bytes: memory.block_bytes() * u64::from(worker.shards),
        };
        let address = Address::new(socket, &hello, descriptors)?;
        let notices = Arc::new(Notices::default());
        let gpu = device.as_ref().map(Device::gpu);
        let copies = Arc::new(Copies::new(memory, gpu, cuts, part, Arc::clone(&notices)));
        // A wait may be enqueued only where somebody can end it.
        let copier = device.is_some().then(|| copies.spawn()).transpose();
        let copier = copier.map_err(|error| ShimError::no_thread(&error))?;
        let client = Client::start(address, Arc::clone(&notices), true)?;
        // Not before the sidecar took the rank: on a GPU the segment stays until the process ends.
        let stager = staging.map(|staging| stager::spawn(&copies, staging, &notices)).transpose();
        let stager = stager.map_err(|error| ShimError::no_thread(&error))?;
        let mut session = Self {
            client,
            link: None,
            device,
            copies,
            pool: None,
            earlier_pool: None,
            awaited: Vec::new(),
            copier,
            stager,
            by_engine,
            run: None,
            joined: false,
            started: 0,
            facts,
            live,
            weights: Weights::default(),
            told: true,
            bound: 0,
            named: None,
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

    /// The namespace of this rank's blocks, with the facts that make it: what it is bound to, or, where no other rank's weights
    /// have a part in it, what the sidecar named in its WELCOME. `None` while neither is known, or since the weights may have
    /// changed.
    pub fn namespace(&mut self) -> Option<&(NamespaceDigest, Facts)> {
        let connection = &self.link.as_ref()?.connection;
        let bound = connection.memory.load_bound();
        if self.named.as_ref().is_none_or(|(words, _)| *words != bound) {
            self.named = self.name(connection, bound).map(|named| (bound, named));
        }
        self.named.as_ref().map(|(_, named)| named)
    }

    fn name(&self, connection: &Connection, bound: Bound) -> Option<(NamespaceDigest, Facts)> {
        let is_bound = bound.namespace != 0;
        let live = if is_bound { bound.live } else { namespace::weights_live([self.live]) };
        let facts = namespace::complete(&self.facts, live);
        let digest = namespace::digest(&facts);
        // The words may be those of two moments.
        let is_named = match is_bound {
            true => digest.words()[0] == bound.namespace && bound.weights == self.weights.number,
            false => digest.to_string() == connection.welcome.namespace && self.weights.number == 0,
        };
        is_named.then_some((digest, facts))
    }

    /// Takes part in the scheduler's run. Does nothing when this was said already on this connection.
    pub fn join(&mut self, run: [u8; 16]) {
        self.refresh();
        if self.run != Some(run) {
            self.run = Some(run);
            self.joined = false;
        }
        self.introduce();
    }

    /// States the weights that this rank holds, by a digest of a sample, in answer to the scheduler's `answers`th change; a
    /// number below the last one repeats it: then the rank found the change by itself. Without a sample its blocks are from now on
    /// shared with nobody. Until the sidecar has bound it anew every load is refused.
    pub fn set_weights(&mut self, answers: u64, live: Option<[u8; 16]>) -> Result<(), ShimError> {
        let live = live.map_or_else(random16, Ok)?;
        let Weights { number, answers: last, .. } = self.weights;
        self.weights = Weights { number: number + 1, answers: answers.max(last), live };
        (self.told, self.bound, self.named) = (false, 0, None);
        self.introduce();
        Ok(())
    }

    /// Step `step` begins: its loads may be written. On a GPU, once `stream` gets there.
    pub fn start(&mut self, step: u64, stream: u64) {
        self.refresh();
        self.started = step;
        if let Some(device) = &mut self.device {
            device.begin_step(&self.copies);
        }
        self.store(header::FENCE_START, step, stream);
        if let Some(link) = &self.link {
            link.retry();
        }
    }

    /// The KV of step `step` is written; on a GPU, once `stream` gets there. `ring`: something waits for that.
    pub fn done(&mut self, step: u64, ring: bool, stream: u64) {
        self.store(header::FENCE_DONE, step, stream);
        if ring && let Some(link) = &self.link {
            link.connection.ring();
        }
    }

    /// Makes the engine's stream wait for a plan's blocks, cut by cut where `overlap`, else for all of them now. Hands the
    /// plan back where nobody promised them in time, this process copies them, or the memory is the host's: then
    /// [`Worker::load_now`] is called. No stream ever waits for copies that this process is still to enqueue: a kernel's first
    /// launch or an allocation behind it would keep the driver from them.
    pub fn load_on(&mut self, plan: Plan, stream: u64, overlap: bool) -> Result<Begun, ShimError> {
        if self.copies_itself(&plan) {
            return Ok(Begun::No(plan));
        }
        let Some((link, device)) = self.link_of(&plan).zip(self.device.as_mut()) else {
            return Ok(Begun::No(plan));
        };
        let stream = device.stream(stream);
        let reached = stream.record()?;
        device.expect(&link, plan.op, &stream, overlap)?;
        link.connection.ring();
        Ok(Begun::OnStream(self.follow(plan, reached, true)))
    }

    /// Makes `stream` wait for cut `cut` of every load of the step, and for those before it.
    pub fn wait_group(&mut self, cut: usize, stream: u64) -> Result<(), ShimError> {
        if let Some(device) = &mut self.device {
            let stream = device.stream(stream);
            device.wait(&stream, cut.saturating_add(1))?;
        }
        Ok(())
    }

    /// Loads of the step whose last cut is still to be waited for.
    pub fn loading(&self) -> usize {
        self.device.as_ref().map_or(0, Device::loading)
    }

    /// Blocks until the engine's stream has passed all that it was given: its blocks are then free for this thread's copies.
    pub fn synchronize(&mut self, stream: u64) -> Result<(), ShimError> {
        let stream = self.device.as_mut().map(|device| device.stream(stream));
        Ok(stream.map_or(Ok(()), |stream| stream.synchronize())?)
    }

    /// Loads a plan's blocks now and returns those that failed.
    pub fn load_now(&mut self, plan: Plan) -> Vec<u32> {
        if !self.copies_itself(&plan)
            && self.device.is_none()
            && let Some(link) = self.link_of(&plan)
        {
            let (outcome, refused) =
                (link.wait(plan.op, patience(&plan, self.awaited_bytes(&plan))), self.refuses(&plan));
            if is_whole(&plan, outcome) {
                self.copies.count_sidecar(&plan);
                return if refused { plan.block_ids() } else { Vec::new() };
            }
            let job = self.rescue(plan, refused, link);
            return self.copies.carry_out(&job);
        }
        let job = self.job(plan);
        self.copies.carry_out(&job)
    }

    /// Begins to load a plan's blocks, free once `stream` gets there; [`Worker::finished`] tells the end.
    pub fn load_later(&mut self, plan: Plan, stream: u64) -> Result<(), ShimError> {
        if let Some(device) = &mut self.device {
            let reached = device.stream(stream).record()?;
            self.follow(plan, reached, false);
        } else if !self.copies_itself(&plan)
            && let Some(link) = self.link_of(&plan)
        {
            let (patience, refused) = (patience(&plan, self.awaited_bytes(&plan)), self.refuses(&plan));
            self.awaited.push(Awaited { plan, refused, link, patience });
        } else {
            let job = self.job(plan);
            self.submit(Order::Copy(job));
        }
        Ok(())
    }

    /// Whether the sidecar writes nothing of a plan into this rank's memory.
    fn copies_itself(&self, plan: &Plan) -> bool {
        self.by_engine || plan.by_engine()
    }

    /// Whether a plan's blocks are none of this rank's namespace. The scheduler and the ranks are bound by the sidecar one after
    /// the other, and weights may have changed since the plan was made.
    fn refuses(&mut self, plan: &Plan) -> bool {
        self.read_binding();
        let refused = plan.namespace == 0 || plan.namespace != self.bound;
        if refused {
            self.client.notices().say(
                Cause::Mismatch,
                format!(
                    "a load of namespace {:016x} was refused: this rank's is {:016x}; its blocks are computed again. Loads that \
                     were planned before the weights changed end so; if it goes on, the engine's roles run different releases",
                    plan.namespace.swap_bytes(),
                    self.bound.swap_bytes()
                ),
            );
        }
        refused
    }

    /// Remembers what the sidecar has bound this rank to.
    fn read_binding(&mut self) {
        if let Some(link) = &self.link {
            let bound = link.connection.memory.load_bound();
            if bound.weights == self.weights.number && bound.namespace != 0 {
                self.bound = bound.namespace;
            }
        }
    }

    /// Gives a load into GPU memory to the thread, and returns the blocks that count as failed whatever comes.
    fn follow(&mut self, plan: Plan, reached: Event, sync: bool) -> Vec<u32> {
        let promised = !self.copies_itself(&plan);
        let job = self.job(plan);
        let is_theirs = promised && job.link.is_some();
        let bytes = self.copies.count_watched(&job, sync);
        let watch = if is_theirs { Watch::promised(patience(&job.plan, bytes)) } else { Watch::ours() };
        let failed = if job.refused { job.plan.block_ids() } else { Vec::new() };
        let load = Load { job, reached: Box::new(reached), sync, watch, fetch: None };
        self.submit(Order::Watch(Box::new(load)));
        failed
    }

    /// Loads begun by [`Worker::load_later`] that ended, each once.
    pub fn finished(&mut self) -> Vec<Ended> {
        self.drop_earlier_pool();
        for awaited in std::mem::take(&mut self.awaited) {
            self.look_at(awaited);
        }
        self.copies.take_ended()
    }

    fn look_at(&mut self, awaited: Awaited) {
        let Awaited { plan, refused, link, mut patience } = awaited;
        let outcome = link.outcome(plan.op);
        if is_whole(&plan, outcome) {
            self.copies.count_sidecar(&plan);
            let failed = if refused { plan.block_ids() } else { Vec::new() };
            self.copies.end(Ended { op: plan.op, failed });
        } else if outcome.is_some_and(|outcome| outcome.status.is_refusal()) {
            // Nobody writes a block of it: there is nothing to take back.
            let job = self.job(plan);
            self.submit(Order::Copy(job));
        } else if outcome.is_some() || link.connection.is_lost() || link.is_late(&mut patience) {
            let job = self.rescue(plan, refused, link);
            self.submit(Order::Copy(job));
        } else {
            self.awaited.push(Awaited { plan, refused, link, patience });
        }
    }

    /// Host memory: bytes of a load, and of those ahead of it.
    fn awaited_bytes(&self, plan: &Plan) -> u64 {
        let plans = self.awaited.iter().map(|awaited| &awaited.plan).chain([plan]);
        plans.map(|plan| self.copies.bytes(plan)).sum()
    }

    /// Takes a load into host memory away from the sidecar.
    fn rescue(&self, plan: Plan, refused: bool, link: Arc<Link>) -> Job {
        self.copies.note_rescue();
        link.close_gate(plan.op);
        let pool = self.pool_of(&plan);
        Job { plan, pool, link: Some(link), rescue: true, refused }
    }

    fn job(&mut self, plan: Plan) -> Job {
        let refused = self.refuses(&plan);
        Job { pool: self.pool_of(&plan), link: self.link_of(&plan), plan, rescue: false, refused }
    }

    /// Hands an order to the thread, which on host memory starts with the first one.
    fn submit(&mut self, order: Order) {
        if self.copier.is_none() {
            self.copier = self.copies.spawn().ok();
        }
        let unsent = match &self.copier {
            Some(copier) => copier.send(order).err().map(|unsent| unsent.0),
            None => Some(order),
        };
        match unsent {
            None => {}
            // No thread to be had: better late than never.
            Some(Order::Copy(job)) => {
                let failed = self.copies.carry_out(&job);
                self.copies.end(Ended { op: job.plan.op, failed });
            }
            Some(Order::Watch(_)) => unreachable!("the watchdog outlives the session, or ends the process"),
        }
    }

    /// The connection to the sidecar that made the plan possible; on a GPU also one that ended, as long as that sidecar's
    /// stream may be writing the plan's blocks: the load must be taken back from it.
    fn link_of(&self, plan: &Plan) -> Option<Arc<Link>> {
        let link = self.link.clone().filter(|link| link.connection.welcome.epoch == plan.epoch);
        link.or_else(|| self.device.as_ref()?.retired_link(plan.epoch))
    }

    fn pool_of(&self, plan: &Plan) -> Option<Arc<Pool>> {
        let earlier = self.earlier_pool.as_ref().map(|(_, pool)| pool);
        self.pool.iter().chain(earlier).find(|pool| pool.epoch() == plan.epoch).cloned()
    }

    /// Stores a fence word: at once on host memory, in the order of the engine's stream on a GPU.
    fn store(&mut self, word: usize, step: u64, stream: u64) {
        match (&self.link, &mut self.device) {
            (None, _) => {}
            (Some(link), None) => {
                // SYNC POINT(step): release pairs with the sidecar's acquire; the KV written before is visible with it.
                link.connection.region().word64(word).store(step, Ordering::Release);
            }
            (Some(link), Some(device)) => {
                if let Err(error) = device.write_fence(&device.stream(stream), link, word, step) {
                    self.leave(error);
                }
            }
        }
    }

    fn refresh(&mut self) {
        self.drop_earlier_pool();
        match self.client.refresh(false) {
            Change::Same => {}
            Change::Lost => self.part(),
            Change::Connected => self.connect(),
        }
    }

    fn connect(&mut self) {
        self.part();
        let Some(connection) = self.client.connection().cloned() else { return };
        match Link::new(&connection, self.device.as_ref().map(Device::gpu)) {
            Ok(link) => self.give_link(Arc::new(link)),
            Err(error) => return self.leave(error),
        }
        (self.joined, self.told, self.named) = (false, self.weights.number == 0, None);
        if let Some(note) = &connection.welcome.note {
            self.client.notices().forget(&[Cause::Note]);
            self.client.notices().say(Cause::Note, note.as_str());
        }
        if let Some(pool) = self.pool.replace(connection.pool.clone().expect("workers map the pool")) {
            self.earlier_pool = Some((clock::now(), pool));
        }
        self.introduce();
    }

    fn give_link(&mut self, link: Arc<Link>) {
        // A stager that is gone has nothing to answer: its saves are dropped by the sidecar's deadline.
        self.stager.iter().for_each(|stager| _ = stager.send(Arc::clone(&link)));
        self.link = Some(link);
    }

    /// Lets go of a connection that ended. What it promised by its last binding may still be loaded.
    fn part(&mut self) {
        self.read_binding();
        if let (Some(link), Some(device)) = (self.link.take(), &mut self.device) {
            device.retire(link);
        }
    }

    /// Hangs up because the GPU's driver refused something that every step needs.
    fn leave(&mut self, error: CudaError) {
        let text =
            format!("the GPU's driver refuses the words shared with the sidecar ({error}); connecting anew");
        self.client.leave(Cause::Gpu, text);
        self.part();
    }

    /// Tells the sidecar what it does not know: the weights first, so that a rank which has joined holds what it stated.
    fn introduce(&mut self) {
        let Some(link) = &self.link else { return };
        if !self.told {
            let Weights { number, answers, live } = self.weights;
            self.told = link.post(WorkerRequest::Weights { number, answers, live });
        }
        if let (true, false, Some(run)) = (self.told, self.joined, self.run) {
            // What was said of loads up to that step may have been lost with the last connection.
            self.joined = link.post(WorkerRequest::Join { run, step: self.started });
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
        let waits = self.device.as_ref().map_or(0, Device::waits);
        let numbers = numbers.into_iter().map(|(name, number)| (name, number.load(Ordering::Relaxed)));
        numbers.chain([("waits", waits)]).collect()
    }

    /// Messages for the log, each handed over once.
    pub fn take_notices(&self) -> Vec<String> {
        self.client.notices().take()
    }

    /// Ends the session for good. Loads in progress end by themselves.
    pub fn disconnect(&mut self) {
        self.client.stop();
        self.part();
    }
}

fn random16() -> Result<[u8; 16], ShimError> {
    let mut bytes = [0; 16];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(16) => Ok(bytes),
        _ => {
            argument("the system gives no random bytes for weights without a sample; state a digest of them")
        }
    }
}

/// With a load that has so many bytes in it and ahead of it. Its blocks may be on their way for as long as a query may wait.
fn patience(plan: &Plan, bytes: u64) -> Patience {
    let arrival = Duration::from_millis(u64::from(QUERY_WAIT_MS_MAX));
    Patience::new(if plan.arriving() { arrival } else { Duration::ZERO }, bytes)
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.client.is_forked() {
            // The mappings are not there in a child, and something else may lie at their addresses: never unmap them.
            std::mem::forget((self.pool.take(), self.earlier_pool.take(), self.link.take()));
            std::mem::forget(std::mem::take(&mut self.awaited));
        }
        if let Some(device) = self.device.take() {
            // Streams may still reach its words and its staging memory, or the driver be gone already.
            std::mem::forget((device, self.link.take(), Arc::clone(&self.copies)));
        }
    }
}
