//! The pure core: every decision of the sidecar, as a function of (state, now, event) to actions.
//!
//! Invariants it keeps:
//! - a slot is filled by one save, read only under a lease, and reused only when no copy touches it;
//! - a block is committed only after every shard's copy ended and, after that, its scheduler's ring was drained;
//! - a copy starts only once its rank has joined the engine's run and passed the step's fence;
//! - whatever a peer sends ends at worst in that peer's session being closed with a reason.
//!
//! No clock, memory or I/O here: [`crate::runtime`] feeds events and carries actions out, in their order.

mod adoption;
mod arrivals;
mod binding;
mod checks;
mod comparison;
mod copies;
mod early;
mod event;
mod key_logs;
mod ledger;
mod loads;
mod logs;
mod members;
mod namespaces;
mod peers;
mod pending;
mod quotas;
mod saves;
mod sources;
mod ssd;
mod stats;
#[cfg(test)]
mod tests;
mod waits;
mod windows;

use std::collections::{BTreeMap, VecDeque};

use mesh::directory::Directory;
use shm_protocol::handshake::{Hello, Role};
use shm_protocol::key::BlockHash;
use shm_protocol::request::{LoadEnd, SchedulerRequest, WorkerRequest};
use tiers::dram::Dram;
use tiers::ssd::Log;

use self::adoption::Verification;
use self::arrivals::Arrivals;
pub use self::checks::Barred;
use self::checks::Checks;
pub use self::comparison::{Comparison, Found};
use self::copies::{Copies, CopyOwner};
pub use self::event::{Action, Direction, Event, Heard, Piece, Request};
pub use self::ledger::Holder;
use self::loads::Load;
use self::members::{Scheduler, Worker};
use self::peers::Peers;
pub use self::peers::{FAULT_NAMES, PeersStats};
use self::quotas::Quotas;
use self::saves::{Save, UnboundSave};
use self::ssd::Ssd;
pub use self::ssd::SsdStats;
pub use self::stats::Stats;
use self::windows::Windows;
use crate::config::SsdAdmission;
use crate::config::quotas::Quota;

/// A session, unique within an epoch.
pub type SessionId = u64;
/// A batch of copies, unique within an epoch.
pub type CopyId = u64;
/// The only cache group of version 1.
const GROUP: u32 = 0;

/// Why a peer's session must end.
type Violation = String;

#[derive(Debug)]
pub struct Core {
    dram: Dram,
    arrivals: Arrivals,
    verification: Verification,
    windows: Windows,
    ssd: Option<Ssd>,
    peers: Option<Peers>,
    schedulers: BTreeMap<SessionId, Scheduler>,
    workers: BTreeMap<SessionId, Worker>,
    namespaces: namespaces::Namespaces,
    quotas: Quotas,
    saves: BTreeMap<(SessionId, u64), Save>,
    checks: Checks,
    /// Saves of schedulers that have no binding.
    unbound: BTreeMap<(SessionId, u64), UnboundSave>,
    loads: BTreeMap<(SessionId, u64), Load>,
    copies: Copies,
    /// Schedulers' sessions with saves that the turn had no time for, the longest waiting first.
    behind: VecDeque<SessionId>,
    claims_max: usize,
    draining: bool,
    stats: Stats,
}

// === impl Core ===

impl Core {
    /// A core over an empty tier.
    pub fn new(dram: Dram) -> Self {
        Self {
            arrivals: Arrivals::new(&dram),
            verification: Verification::default(),
            dram,
            windows: Windows::default(),
            ssd: None,
            peers: None,
            schedulers: BTreeMap::new(),
            workers: BTreeMap::new(),
            namespaces: namespaces::Namespaces::default(),
            quotas: Quotas::default(),
            saves: BTreeMap::new(),
            checks: Checks::default(),
            unbound: BTreeMap::new(),
            loads: BTreeMap::new(),
            copies: Copies::default(),
            behind: VecDeque::new(),
            claims_max: ledger::CLAIMS_MAX,
            draining: false,
            stats: Stats::default(),
        }
    }

    /// The same core with an SSD tier behind the DRAM tier.
    pub fn with_ssd(mut self, log: Log, admission: SsdAdmission) -> Self {
        self.ssd = Some(Ssd::new(log, admission));
        self
    }

    /// The same core in a mesh, whose peers `directory` knows. Of a tier that is empty yet.
    pub fn with_peers(mut self, directory: Directory) -> Self {
        self.dram.watch();
        self.peers = Some(Peers::new(directory, self.dram.config().pool_bytes / arrivals::PART));
        self
    }

    /// Limits what namespaces may take, before the first block comes.
    pub fn limit(&mut self, quotas: &[Quota]) {
        self.quotas = Quotas::new(quotas, &mut self.dram);
    }

    /// Takes one event and appends what must be done.
    pub fn handle(&mut self, now_ms: u64, event: Event, out: &mut Vec<Action>) {
        self.respond(now_ms, event, out);
        self.go_on(now_ms, out);
    }

    /// Takes one event and appends what others wait for: an engine is held up by its question. [`Core::go_on`] follows.
    pub fn respond(&mut self, now_ms: u64, event: Event, out: &mut Vec<Action>) {
        self.note_work(now_ms, &event);
        match event {
            Event::Connected { session, hello } => self.connect(session, *hello, out),
            Event::Disconnected { session } => self.disconnect(session, out),
            Event::Message { session, request } => {
                if let Err(reason) = self.message(now_ms, session, request, out) {
                    out.push(Action::Close { session, reason });
                }
            }
            Event::Fences { session, start, done } => self.fences(session, start, done, out),
            Event::Copied { copy, ok } => self.copied(copy, ok, out),
            Event::Behind { session } => self.catch_up(session, out),
            Event::Drained { session, void_below } => self.commit_copied(session, void_below, out),
            Event::Compared { save, found } => self.compared(save, found, out),
            Event::Opened(opened) => {
                let Self { dram, namespaces, quotas, .. } = self;
                adoption::open_part(now_ms, opened, dram, namespaces, quotas);
            }
            Event::Verified { key, slot, whole } => self.verified(now_ms, &key, slot, whole, out),
            Event::Transferred(done) => self.transferred(now_ms, done, out),
            Event::Recovered(found) => {
                self.ssd.iter_mut().for_each(|ssd| ssd.recovered(&found, &mut self.namespaces));
            }
            Event::Mesh(heard) => self.heard(now_ms, heard, out),
            Event::Tick => {
                self.dram.expire(now_ms);
                self.apply_evictions(out);
                self.give_up_late(now_ms, out);
                self.end_due_waits(now_ms, out);
                self.look_again(now_ms, out);
            }
            Event::Drain => {
                self.draining = true;
                self.answer_waits(now_ms, out);
                self.cancel_fetches(out);
            }
        }
    }

    /// Appends what else an event brings on: blocks are sent for and written, peers are told.
    pub fn go_on(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        // Slots of removed blocks become free wherever their last hold ends.
        self.apply_evictions(out);
        self.send_for_unsent(now_ms, out);
        self.verify_ahead(out);
        self.run_ssd(out);
        self.tell_peers(out);
    }

    /// Whether copies or transfers are running, or blocks wait to be committed or written. A save whose step is not done yet
    /// is none of these.
    pub fn busy(&self) -> bool {
        self.copies.any()
            || self.checks.any()
            || self.arrivals.any()
            || self.peers.as_ref().is_some_and(Peers::granting)
            || self.ssd.as_ref().is_some_and(Ssd::busy)
            || self.schedulers.values().any(|scheduler| scheduler.pending.any_awaits_drain())
    }

    /// Whether an operation waits for this worker's fence words.
    pub fn waits_on_fences(&self, session: SessionId) -> bool {
        self.workers.get(&session).is_some_and(|worker| {
            let scheduler = worker.scheduler.and_then(|id| self.schedulers.get(&id));
            scheduler.is_some_and(|scheduler| scheduler.pending.any_waits())
        })
    }

    /// Whether time must pass for the SSD tier to go on.
    pub fn waits_for_disks(&self) -> bool {
        self.ssd.as_ref().is_some_and(Ssd::waits)
    }

    /// Figures of the SSD tier, if there is one.
    pub fn ssd_stats(&self) -> Option<SsdStats> {
        self.ssd.as_ref().map(Ssd::stats)
    }

    /// Figures of the mesh, if there is one.
    pub fn peers_stats(&self) -> Option<PeersStats> {
        self.peers.as_ref().map(|peers| peers.stats(self.lost_patience()))
    }

    /// Bytes that count to each quota, in order.
    pub fn quotas_used(&self) -> impl Iterator<Item = u64> + '_ {
        self.quotas.used(&self.dram)
    }

    /// Counters and levels, for metrics.
    pub fn stats(&self) -> Stats {
        let tier = self.dram.stats();
        Stats {
            sessions: (self.schedulers.len() + self.workers.len()) as u64,
            blocks: tier.blocks,
            pool_used_bytes: tier.bytes_used,
            leases: tier.leases,
            evicted_blocks: tier.evicted_blocks_total,
            unreachable_blocks: tier.unreachable_blocks_total,
            adopted_blocks: tier.adopted_blocks_total,
            adoption_dropped: tier.adoption_dropped_total,
            adoption_corrupt: self.verification.corrupt(),
            unverified_blocks: tier.unverified_blocks,
            removed_blocks: tier.removed_blocks_total,
            barred_engines: self.schedulers.values().filter(|scheduler| scheduler.barred.is_some()).count()
                as u64,
            ..self.stats.clone()
        }
    }

    /// Frees what was evicted, and has what was assigned anew formatted.
    fn apply_evictions(&mut self, out: &mut Vec<Action>) {
        out.extend(self.dram.drain_evicted().map(|slot| Action::FreeSlot { slot }));
        let assigned = self.dram.drain_assigned();
        out.extend(
            assigned.map(|new| Action::AssignSegment { segment: new.segment, block_bytes: new.block_bytes }),
        );
    }

    fn message(
        &mut self,
        now_ms: u64,
        session: SessionId,
        request: Request,
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        match request {
            Request::Worker(request) if self.workers.contains_key(&session) => {
                self.worker_request(session, request, out)
            }
            Request::Scheduler { request, keys, blocks } if self.schedulers.contains_key(&session) => {
                self.scheduler_request(now_ms, session, request, keys, blocks, out)
            }
            // The session was closed by an earlier message of this turn.
            _ => Ok(()),
        }
    }

    fn worker_request(
        &mut self,
        session: SessionId,
        request: WorkerRequest,
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        match request {
            WorkerRequest::Join { run, step } => self.join(session, run, step, out),
            WorkerRequest::Loaded { op, end } => {
                self.stats.load_mismatches += u64::from(end == LoadEnd::Mismatch);
                self.loaded(session, op, end == LoadEnd::Whole)
            }
            WorkerRequest::Weights { number, answers, live } => {
                self.state_weights(session, (number, answers, live), out)
            }
            // The rank's copier was told when the message was read.
            WorkerRequest::Staged { .. } => Ok(()),
        }
    }

    fn scheduler_request(
        &mut self,
        now_ms: u64,
        session: SessionId,
        request: SchedulerRequest,
        keys: Vec<BlockHash>,
        blocks: Vec<u32>,
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        self.scheduler(session).pending.see(request.op());
        match request {
            SchedulerRequest::Open { log } => self.open(session, log),
            SchedulerRequest::Append(append) => self.scheduler(session).logs.append(&append, &keys),
            SchedulerRequest::Query(query) => self.query(now_ms, session, query, out),
            SchedulerRequest::Load(load) => self.load(now_ms, session, &load, blocks, out),
            SchedulerRequest::Save(save) => self.save(session, &save, &blocks, out),
            SchedulerRequest::Cancel(cancel) => self.cancel(session, cancel, out),
            SchedulerRequest::Release { log } => self.release(session, log),
            SchedulerRequest::Close { log } => self.close(session, log),
            SchedulerRequest::Salt { salt } => self.salt(session, salt, out),
            SchedulerRequest::Weights { number } => self.unbind(session, number, out),
            SchedulerRequest::Hint { keys } => self.hint(now_ms, session, keys, out),
        }
    }

    fn copied(&mut self, copy: CopyId, ok: bool, out: &mut Vec<Action>) {
        let owner = self.copies.end(copy);
        match owner.direction {
            Direction::Save => self.save_copied(owner, ok, out),
            Direction::Load => self.load_copied(owner, ok, out),
        }
    }

    /// Refuses an operation that is under way already.
    fn check_new(&self, session: SessionId, op: u64) -> Result<(), Violation> {
        let key = (session, op);
        if self.saves.contains_key(&key) || self.loads.contains_key(&key) || self.checks.runs(key) {
            return Err(format!("operation {op} was posted twice"));
        }
        Ok(())
    }

    fn start_copy(
        &mut self,
        owner: CopyOwner,
        session: SessionId,
        pieces: Vec<Piece>,
        out: &mut Vec<Action>,
    ) {
        let copy = self.copies.begin(owner);
        let (engine, direction) = (owner.scheduler, owner.direction);
        let load_op = if direction == Direction::Load { owner.op } else { 0 };
        let awaited = self.loads.get(&(engine, load_op)).is_some_and(|load| load.sync);
        out.push(Action::Copy { copy, engine, session, direction, pieces, load_op, awaited });
    }
}

/// The keys of a session's saves and loads.
fn operations(session: SessionId) -> std::ops::RangeInclusive<(SessionId, u64)> {
    (session, 0)..=(session, u64::MAX)
}

/// The run id of a scheduler's hello.
fn run_of(hello: &Hello) -> Option<[u8; 16]> {
    match hello.role {
        Role::Scheduler { run } => Some(run),
        Role::Worker(_) => None,
    }
}
