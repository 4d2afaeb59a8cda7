//! A worker's session: shows KV memory to the sidecar, stores fence words, and carries out loads.
//!
//! If the sidecar does not finish a load, this process finishes it from the mapped pool, and checks every
//! slot before and after its copy. The mapping outlives the connection, so that a dead sidecar's promises can
//! still be kept.
//!
//! On host memory the engine's thread stores the fences and waits for sync loads. On a GPU both are enqueued
//! on the engine's stream, and a thread (the watchdog) ends every wait.

mod copies;
mod device;
mod link;
mod memory;
mod stager;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::Duration;

use copy_engine::cuda::{CudaError, StreamEvent};
use shm_protocol::handshake::{self, Copier, Hello, HelloDigest, Role};
use shm_protocol::key::NamespaceDigest;
use shm_protocol::layout::header;
use shm_protocol::message::LOAD_SYNC;
use shm_protocol::namespace::{self, Facts};
use shm_protocol::session::Bound;
use shm_protocol::wait;

use self::copies::{CopierOrder, RankCopies, WatchedLoad};
use self::device::StreamDevice;
use self::link::{Job, Link, Next, RankConnection, Session};
pub use self::memory::RegionMemory;
use self::memory::{OpenedMemory, open_memory};
use crate::client::{Client, ConnectionChange};
use crate::clock;
use crate::connection::{Connection, SidecarAddress};
use crate::core::endpoint::Endpoint;
use crate::core::notices::{NoticeCause, Notices};
use crate::core::plan::Plan;
use crate::core::worker::patience::CopyPatience;
pub use crate::core::worker::patience::LOAD_DEADLINE;
use crate::core::worker::watch::LoadWatch;
pub use crate::core::worker::watch::SETTLE;
use crate::error::{ShimError, refuse_argument};
use crate::scheduler::{SLEEP_TURN, draw_random16};

/// Time between two looks for ends of loads in an idle session.
const FINISHED_LOOK: Duration = Duration::from_micros(50);

/// Settings of a new session.
#[derive(Debug)]
pub struct WorkerSetup {
    /// The sidecar's socket.
    pub socket: PathBuf,
    /// `engine_id` of vLLM's configuration.
    pub engine: String,
    /// Ranks of the engine.
    pub world_size: u32,
    /// This rank's memory and facts. The session fills in the fields for a GPU.
    pub worker: handshake::WorkerHello,
    /// The memory of the regions.
    pub memory: RegionMemory,
    /// True if the sidecar does not reach the memory: this process copies loads itself, and copies saves into
    /// a segment for the sidecar. Implied on a GPU if `worker.copy` is the engine.
    pub staged: bool,
    /// Digest of the engine's table of cache groups, if its scheduler states one.
    pub groups: Option<[u8; 16]>,
}

/// The result of [`RankClient::begin_load`].
#[derive(Debug, Eq, PartialEq)]
pub enum Begun {
    /// The load has begun and no step waits for it: [`RankClient::finished`] returns its end.
    Later,
    /// The engine's stream waits for the load. The blocks listed here count as failed even if they arrive.
    OnStream(Vec<u32>),
    /// The load has not begun: call [`RankClient::load_behind`].
    No(Plan),
}

/// An asynchronous load that ended.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct EndedLoad {
    /// Operation of its LOAD.
    pub op: u64,
    /// Blocks that the load did not fill.
    pub failed: Vec<u32>,
}

/// The offset of this rank's part in a slot, and the bytes of a whole slot: the parts lie side by side.
#[derive(Copy, Clone, Debug)]
struct SlotPart {
    offset: u64,
    slot_bytes: u64,
}

/// One rank's session. See the module.
#[derive(Debug)]
pub struct RankClient {
    client: Client,
    session: Session,
    /// The GPU with the memory; `None` with host memory.
    device: Option<StreamDevice>,
    copies: Arc<RankCopies>,
    copier: Option<Sender<CopierOrder>>,
    /// The stager thread, which gets every connection; `None` without staged saves.
    stager: Option<Sender<Arc<Link>>>,
    /// The copier and the stager thread. They read and write the rank's memory.
    threads: Vec<JoinHandle<()>>,
    facts: Facts,
    /// Digest of the rank's weights.
    live: Option<[u8; 16]>,
    /// The last namespace returned, and the binding that named it.
    named: Option<(Bound, (NamespaceDigest, Facts))>,
}

// === impl RankClient ===

impl RankClient {
    /// Connects to the sidecar; without one, retries in the background. Fails for invalid arguments, and when
    /// the sidecar refuses.
    pub fn new(options: WorkerSetup) -> Result<Self, ShimError> {
        let WorkerSetup { socket, engine, world_size, worker, memory, staged, groups } = options;
        let by_engine = worker.copy == Copier::Engine;
        let staged = staged || (by_engine && matches!(memory, RegionMemory::Gpu { .. }));
        let (facts, live) = (worker.facts.clone(), worker.live_weights.map(|live| live.0));
        let role = Role::Worker(worker);
        let mut hello = Hello { groups: groups.map(HelloDigest), ..Hello::new(engine, world_size, role) };
        // The hello's fields decide how the memory is opened, so they must be sound before. The address
        // checks the hello again in its final form, with allocations or a staging segment.
        hello.check(memory.memory_count())?;
        let Role::Worker(worker) = &mut hello.role else { unreachable!("made as a worker") };
        let OpenedMemory { memory, device, cuts, staging, descriptors } =
            open_memory(worker, memory, staged)?;
        let part = SlotPart {
            offset: memory.block_bytes() * u64::from(worker.shard),
            slot_bytes: memory.block_bytes() * u64::from(worker.shards),
        };
        let address = SidecarAddress::new(socket, &hello, descriptors)?;
        let notices = Arc::new(Notices::default());
        let gpu = device.as_ref().map(StreamDevice::gpu);
        let block_bytes = memory.block_bytes();
        let copies = Arc::new(RankCopies::new(memory, gpu, cuts, part, Arc::clone(&notices)));
        // A wait may be enqueued only if a thread can end it.
        let copier = device.is_some().then(|| copies.spawn()).transpose();
        let (copier, mut threads) = split(copier.map_err(|error| ShimError::no_thread(&error))?);
        let client = Client::start_client(address, Arc::clone(&notices), true)?;
        // The sidecar must have taken the rank before: on a GPU the segment stays until the process ends.
        let stager = staging.map(|staging| stager::spawn_stager(&copies, staging, &notices)).transpose();
        let (stager, stages) = split(stager.map_err(|error| ShimError::no_thread(&error))?);
        threads.extend(stages);
        let mut worker = Self {
            client,
            session: Session::new(by_engine, block_bytes, notices),
            device,
            copies,
            copier,
            stager,
            threads,
            facts,
            live,
            named: None,
        };
        worker.attach_connection();
        Ok(worker)
    }

    /// True while a sidecar is connected, as far as is known.
    pub fn is_connected(&self) -> bool {
        self.session.link().is_some()
    }

    /// Connections so far.
    pub fn connection_count(&self) -> u64 {
        self.client.connection_count()
    }

    /// The namespace of this rank's blocks, with its facts: the namespace of the binding, or, if no other
    /// rank's weights have a part in it, the one in the sidecar's WELCOME. `None` while neither is known, or
    /// since the weights may have changed.
    pub fn namespace(&mut self) -> Option<&(NamespaceDigest, Facts)> {
        let connection = &self.session.link()?.connection;
        let bound = connection.memory.load_bound();
        if self.named.as_ref().is_none_or(|(words, _)| *words != bound) {
            self.named = self.name(connection, bound).map(|named| (bound, named));
        }
        self.named.as_ref().map(|(_, named)| named)
    }

    fn name(&self, connection: &Connection, bound: Bound) -> Option<(NamespaceDigest, Facts)> {
        let is_bound = bound.namespace != 0;
        let live = if is_bound { bound.live } else { namespace::weights_live([self.live]) };
        let facts = namespace::complete_facts(&self.facts, live);
        let digest = namespace::digest_facts(&facts);
        // The two words may come from two different bindings.
        let is_named = match is_bound {
            true => digest.words()[0] == bound.namespace && bound.weights == self.session.weights(),
            false => digest.to_string() == connection.welcome.namespace && self.session.weights() == 0,
        };
        is_named.then_some((digest, facts))
    }

    /// Takes part in the scheduler's run. Does nothing if this connection has told the sidecar already.
    pub fn join(&mut self, run: [u8; 16]) {
        self.refresh_connection();
        self.session.join(run);
    }

    /// States this rank's weights, by a digest of a sample, in answer to the scheduler's `answers`th change.
    /// A number below the last one repeats that one: the rank found the change by itself. Without a sample
    /// its blocks are from now on not shared. Every load is refused until the sidecar has bound the rank
    /// again.
    pub fn set_weights(&mut self, answers: u64, live: Option<[u8; 16]>) -> Result<(), ShimError> {
        let Some(live) = live.or_else(draw_random16) else {
            return refuse_argument(
                "the system gives no random bytes for weights without a sample; state a digest of them",
            );
        };
        self.session.set_weights(answers, live);
        self.named = None;
        Ok(())
    }

    /// Says that step `step` begins: its loads may be written. On a GPU this holds once `stream` reaches this
    /// call.
    pub fn start_step(&mut self, step: u64, stream: u64) {
        self.refresh_connection();
        if let Some(device) = &mut self.device {
            device.begin_step(&self.copies);
        }
        self.store(header::FENCE_START, step, stream);
        self.session.start_step(step);
    }

    /// Says that the KV of step `step` is written; on a GPU, once `stream` reaches this call. `wake`: a load
    /// or save waits for it.
    pub fn done(&mut self, step: u64, wake: bool, stream: u64) {
        self.store(header::FENCE_DONE, step, stream);
        if wake && let Some(link) = self.session.link() {
            link.connection.ring();
        }
    }

    /// Begins this rank's part of a load. `load_on` begins a synchronous one.
    pub fn begin_load(&mut self, plan: Plan, stream: u64, by_cuts: bool) -> Result<Begun, ShimError> {
        if plan.flags & LOAD_SYNC != 0 {
            return self.load_on(plan, stream, by_cuts);
        }
        self.load_later(plan, stream)?;
        Ok(Begun::Later)
    }

    /// Makes the engine's stream wait for a plan's blocks: with `by_cuts` cut by cut, otherwise for all of
    /// them now. Hands the plan back if there is no connection to its sidecar, this process copies the
    /// blocks, or the memory is host memory: the caller then calls [`RankClient::load_behind`]. No stream
    /// ever waits for copies that this process has yet to enqueue: a kernel's first launch or an allocation
    /// behind the wait would keep the driver from them.
    fn load_on(&mut self, plan: Plan, stream: u64, by_cuts: bool) -> Result<Begun, ShimError> {
        if self.session.copies_itself(&plan) {
            return Ok(Begun::No(plan));
        }
        let Some((link, device)) = self.link_of(&plan).zip(self.device.as_mut()) else {
            return Ok(Begun::No(plan));
        };
        let stream = device.stream(stream);
        let reached = stream.record()?;
        device.expect(&link, plan.op, &stream, by_cuts)?;
        link.connection.ring();
        Ok(Begun::OnStream(self.follow(plan, reached, true)))
    }

    /// Makes `stream` wait for cut `cut` of every load of the step, and for all cuts before it.
    pub fn wait_cut(&mut self, cut: usize, stream: u64) -> Result<(), ShimError> {
        if let Some(device) = &mut self.device {
            let stream = device.stream(stream);
            device.wait_for_cuts(&stream, cut.saturating_add(1))?;
        }
        Ok(())
    }

    /// Number of loads of the step whose last cut has no wait yet.
    pub fn loading(&self) -> usize {
        self.device.as_ref().map_or(0, StreamDevice::loading)
    }

    /// Blocks until the engine's stream has passed all its work: its blocks are then free for this thread's
    /// copies.
    pub fn synchronize(&mut self, stream: u64) -> Result<(), ShimError> {
        let stream = self.device.as_mut().map(|device| device.stream(stream));
        Ok(stream.map_or(Ok(()), |stream| stream.synchronize())?)
    }

    /// Loads the blocks of a plan handed back by [`RankClient::begin_load`], once `stream` has passed all its
    /// work. Returns the failed blocks.
    pub fn load_behind(&mut self, plan: Plan, stream: u64) -> Result<Vec<u32>, ShimError> {
        self.synchronize(stream)?;
        Ok(self.load_now(plan))
    }

    /// Loads a plan's blocks now and returns the failed ones.
    pub fn load_now(&mut self, plan: Plan) -> Vec<u32> {
        if self.device.is_some() {
            let job = self.job(plan);
            return self.copies.carry_out(&job);
        }
        let mut next = self.session.begin_load(plan);
        if let Next::Await(awaited) = &next {
            awaited.link.connection.ring();
        }
        loop {
            match next {
                Next::Whole(awaited) => {
                    self.copies.count_sidecar(&awaited.plan);
                    return awaited.failed_blocks();
                }
                Next::Copy(job) => return self.copies.carry_out(&job),
                Next::Await(awaited) => {
                    let region = awaited.link.connection.region();
                    wait::sleep_turn(region, SLEEP_TURN, || awaited.outcome().is_some());
                    next = self.session.look_at_load(awaited, clock::read_clock());
                }
            }
        }
    }

    /// Begins to load a plan's blocks, which are free once `stream` reaches this call;
    /// [`RankClient::finished`] returns the load's end.
    pub fn load_later(&mut self, plan: Plan, stream: u64) -> Result<(), ShimError> {
        if let Some(device) = &mut self.device {
            let reached = device.stream(stream).record()?;
            self.follow(plan, reached, false);
        } else {
            let next = self.session.begin_load(plan);
            self.go_on(next);
        }
        Ok(())
    }

    /// Takes the next step of an asynchronous load into host memory.
    fn go_on(&mut self, next: Next) {
        match next {
            Next::Await(awaited) => self.session.awaited.push(awaited),
            Next::Whole(awaited) => {
                self.copies.count_sidecar(&awaited.plan);
                self.copies.end_load(EndedLoad { op: awaited.plan.op, failed: awaited.failed_blocks() });
            }
            Next::Copy(job) => self.submit(CopierOrder::Copy(job)),
        }
    }

    /// Gives a load into GPU memory to the thread, and returns the blocks that count as failed in any case. A
    /// synchronous load has none: its blocks come, as old as the blocks in vLLM itself, and vLLM could not
    /// take back the results of the next step.
    fn follow(&mut self, plan: Plan, reached: StreamEvent, sync: bool) -> Vec<u32> {
        let promised = !self.session.copies_itself(&plan);
        let job = self.job(plan);
        let is_theirs = promised && job.link.is_some();
        let bytes = self.copies.count_watched(&job, sync);
        let watch = if is_theirs {
            LoadWatch::promised(CopyPatience::of_plan(&job.plan, bytes))
        } else {
            LoadWatch::ours()
        };
        let failed = if job.refused && !sync { job.plan.block_ids() } else { Vec::new() };
        let load = WatchedLoad { job, reached: Box::new(reached), sync, watch, fetch: None };
        self.submit(CopierOrder::Watch(Box::new(load)));
        failed
    }

    /// Loads begun by [`RankClient::load_later`] that have ended; each is returned once.
    pub fn finished(&mut self) -> Vec<EndedLoad> {
        self.session.drop_earlier_pool(clock::read_clock());
        for awaited in std::mem::take(&mut self.session.awaited) {
            let next = self.session.look_at_load(awaited, clock::read_clock());
            self.go_on(next);
        }
        self.copies.take_ended()
    }

    /// Returns ended loads as [`RankClient::finished`] does, as soon as there is one; empty once `within` has
    /// passed.
    pub fn finished_within(&mut self, within: Duration) -> Vec<EndedLoad> {
        let began = clock::read_clock();
        loop {
            let ended = self.finished();
            if !ended.is_empty() || clock::read_clock() - began >= within {
                return ended;
            }
            std::thread::sleep(FINISHED_LOOK);
        }
    }

    fn job(&mut self, plan: Plan) -> Job {
        let link = self.link_of(&plan);
        Job { link, ..self.session.job(plan) }
    }

    /// Hands an order to the copier thread. On host memory the first order starts it.
    fn submit(&mut self, order: CopierOrder) {
        if self.copier.is_none() {
            let (copier, thread) = split(self.copies.spawn().ok());
            self.copier = copier;
            self.threads.extend(thread);
        }
        let unsent = match &self.copier {
            Some(copier) => copier.send(order).err().map(|unsent| unsent.0),
            None => Some(order),
        };
        match unsent {
            None => {}
            // No thread could be started: this thread makes the copy, late.
            Some(CopierOrder::Copy(job)) => {
                let failed = self.copies.carry_out(&job);
                self.copies.end_load(EndedLoad { op: job.plan.op, failed });
            }
            Some(CopierOrder::Watch(_)) => {
                unreachable!("the watchdog outlives the session, or ends the process")
            }
        }
    }

    /// Returns the connection to the sidecar of this plan. On a GPU it may also be an ended one, as long as
    /// the sidecar's stream may still write the plan's blocks: the load must be taken back from that sidecar.
    fn link_of(&self, plan: &Plan) -> Option<Arc<Link>> {
        let link = self.session.link_of(plan);
        link.or_else(|| self.device.as_ref()?.retired_link(plan.epoch))
    }

    /// Stores a fence word: at once on host memory, in the order of the engine's stream on a GPU.
    fn store(&mut self, word: usize, step: u64, stream: u64) {
        match (self.session.link(), &mut self.device) {
            (None, _) => {}
            (Some(link), None) => link.store(word, step),
            (Some(link), Some(device)) => {
                if let Err(error) = device.write_fence(&device.stream(stream), link, word, step) {
                    self.leave_sidecar(error);
                }
            }
        }
    }

    fn refresh_connection(&mut self) {
        self.session.drop_earlier_pool(clock::read_clock());
        match self.client.refresh_connection(false) {
            ConnectionChange::Same => {}
            ConnectionChange::Lost => self.part(),
            ConnectionChange::Connected => self.attach_connection(),
        }
    }

    fn attach_connection(&mut self) {
        self.part();
        let Some(connection) = self.client.connection().cloned() else { return };
        let pool = connection.pool.clone().expect("workers map the pool");
        if let Some(note) = &connection.welcome.note {
            self.client.notices().forget_causes(&[NoticeCause::Note]);
            self.client.notices().say(NoticeCause::Note, note.as_str());
        }
        match RankConnection::new(connection, self.device.as_ref().map(StreamDevice::gpu)) {
            Ok(connection) => self.session.attach(connection, pool, clock::read_clock()),
            Err(error) => return self.leave_sidecar(error),
        }
        self.named = None;
        // The stager may be gone: then nothing is staged, and the sidecar drops these saves at its deadline.
        let link = self.session.link().into_iter();
        link.zip(&self.stager).for_each(|(link, stager)| _ = stager.send(Arc::clone(link)));
    }

    /// Gives up a connection that ended.
    fn part(&mut self) {
        if let (Some(link), Some(device)) = (self.session.detach(), &mut self.device) {
            device.retire(link);
        }
    }

    /// Hangs up because the GPU's driver refused the shared words, which every step needs.
    fn leave_sidecar(&mut self, error: CudaError) {
        let text =
            format!("the GPU's driver refuses the words shared with the sidecar ({error}); connecting again");
        self.client.leave_sidecar(NoticeCause::Gpu, text);
        self.part();
    }

    /// Counters since the start, by name.
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
        let waits = self.device.as_ref().map_or(0, StreamDevice::waits);
        let numbers = numbers.into_iter().map(|(name, number)| (name, number.load(Ordering::Relaxed)));
        numbers.chain([("waits", waits)]).collect()
    }

    /// Messages for the log, each handed over once.
    pub fn take_notices(&self) -> Vec<String> {
        self.client.notices().take_texts()
    }

    /// Ends the session permanently, and returns once none of its threads reads or writes the rank's memory.
    /// Returns `false` after `within`: the caller must then keep the memory. On a GPU the engine's streams
    /// must be idle.
    pub fn end_session(&mut self, within: Duration) -> bool {
        let began = clock::read_clock();
        self.copies.free_at_end();
        self.disconnect();
        (self.copier, self.stager) = (None, None);
        while self.threads.iter().any(|thread| !thread.is_finished()) {
            if clock::read_clock() - began >= within {
                return false;
            }
            std::thread::sleep(FINISHED_LOOK);
        }
        true
    }

    /// Ends the session permanently. Loads in progress end by themselves.
    pub fn disconnect(&mut self) {
        self.client.stop();
        self.part();
    }
}

/// Splits the result of a spawn into the sender of the thread's work, and the thread; empty if none was
/// started.
fn split<T>(spawned: Option<(Sender<T>, JoinHandle<()>)>) -> (Option<Sender<T>>, Vec<JoinHandle<()>>) {
    spawned.map_or_else(Default::default, |(sender, thread)| (Some(sender), vec![thread]))
}

impl Drop for RankClient {
    fn drop(&mut self) {
        if self.client.is_forked() {
            // A child does not have the mappings, and other memory may lie at their addresses: never unmap
            // them.
            let nothing = Session::new(false, 0, Arc::default());
            std::mem::forget(std::mem::replace(&mut self.session, nothing));
        }
        let is_idle = self.copies.frees() && self.threads.iter().all(JoinHandle::is_finished);
        if let Some(device) = self.device.take().filter(|_| !is_idle) {
            // Streams may still reach its words and its staging memory, or the driver may be gone already.
            std::mem::forget((device, self.session.detach(), Arc::clone(&self.copies)));
        }
    }
}
