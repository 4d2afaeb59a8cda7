//! The pure core: it makes every decision of the sidecar, as a function of a state, a time and an event to
//! actions.
//!
//! Invariants:
//! - a slot is filled by one save or one read at a time, read by engines only under a lease, and reused only
//!   when no copy touches it;
//! - a block is committed only after every shard's copy has ended and, after these ends, its scheduler's ring
//!   was drained, and only if the scheduler accepted the block's step;
//! - a copy starts only once its rank has joined the engine's run and passed the step's fence;
//! - a client's message does no more harm than to have the client's own session closed, with a reason.
//!
//! No clock, memory or I/O here: [`crate::runtime`] feeds events and carries actions out, in their order.

mod adoption;
mod announcer;
mod arrivals;
mod best_blocks;
mod census;
mod context;
mod engines;
mod event;
mod handover;
mod hints;
mod inspection;
mod inventory;
mod namespaces;
mod operator;
mod peers;
mod prefetch;
mod prefetched;
mod queries;
mod quotas;
mod score;
mod sources;
mod ssd;
mod stats;
#[cfg(test)]
mod tests;
mod tier;
mod timing;
mod transfers;
mod worth;

use std::collections::BTreeMap;
use std::time::Duration;

use mesh::listed::ListedBlock;
use shm_protocol::ACCEPT_SINCE;
use shm_protocol::announcement::Announcement;
use shm_protocol::handshake::Hello;
use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::message::Kind;
use shm_protocol::prefill::PrefillRate;
use shm_protocol::request::{LoadEnd, SchedulerRequest, WorkerRequest};
use shm_protocol::source::Source;
use tiers::dram::{Dram, HintedCounts};

use self::announcer::Announcer;
use self::arrivals::{SourceLane, Waiter};
pub use self::best_blocks::BestBlocks;
use self::census::Census;
pub use self::census::UniqueBlocks;
use self::context::Context;
use self::engines::Engines;
pub(crate) use self::engines::find_whole_engine;
pub use self::engines::{Barred, EngineHolder, EngineStanding, EngineState, Proof};
pub use self::event::{
    Action, AdvicePart, CopyDirection, CoreEvent, FinishedRequest, JobEnd, MeshEvent, RankBlock, RingRequest,
    SetPart, TierJob,
};
use self::handover::Produced;
pub use self::inspection::{Findings, InspectedBlocks, Inspection, InspectionResult, SearchedBlock};
pub use self::inventory::{Eviction, KeptCounts, Location, Survey};
use self::namespaces::Binding;
pub use self::operator::HintTask;
pub use self::peers::{FAULT_NAMES, PeersStats, peer_tier};
use self::prefetch::Prefetches;
pub use self::prefetched::{PrefetchReason, PrefetchStats};
use self::queries::Queries;
use self::quotas::CoreQuotas;
pub use self::score::{PromptPlaces, PromptScore, ScoredKeys};
use self::sources::Sources;
pub use self::ssd::{SsdStats, disk_tier};
pub use self::stats::{CoreStats, HintStats};
use self::tier::Notice;
pub use self::tier::{NewTier, TierStats};
pub use self::timing::{Timed, TimedPart, Took};
use self::transfers::Transfers;
use crate::compare::Number;
use crate::config::quotas::NamespaceQuota;
use crate::system::clock::count_millis;

/// A session, unique within an epoch.
pub type SessionId = u64;
/// A batch of copies, unique within an epoch.
pub type CopyId = u64;

/// The reason to close a client's session.
type Violation = String;

/// The arguments of queries and transfers: the engines, the sources of blocks, and the context.
#[derive(Debug)]
struct Base {
    engines: Engines,
    sources: Sources,
    cx: Context,
}

/// Hands each event to one part of the core, and the consequences to the other parts.
#[derive(Debug)]
pub struct Core {
    base: Base,
    queries: Queries,
    transfers: Transfers,
    announcer: Announcer,
    prefetches: Prefetches,
    census: Census,
}

// === impl Core ===

impl Core {
    /// Returns a core over empty DRAM, with quotas for namespaces. It looks for blocks in `tiers`, in their
    /// order.
    pub fn new(dram: Dram, quotas: &[NamespaceQuota], tiers: impl IntoIterator<Item = NewTier>) -> Self {
        let (engines, mut sources): (_, Sources) = Default::default();
        let (queries, transfers, announcer, prefetches, census) = Default::default();
        let mut cx = Context::new(dram);
        // A tier divides its room as quotas divide DRAM.
        cx.quotas = CoreQuotas::new(quotas, &mut cx.dram);
        tiers.into_iter().for_each(|tier| sources.add_tier(tier, &mut cx.dram));
        Self { base: Base { engines, sources, cx }, queries, transfers, announcer, prefetches, census }
    }

    /// Notes disks left out of this start: a later start may find blocks on them.
    pub fn leave_out_disks(&mut self) {
        self.base.cx.unread = true;
    }

    /// Returns the core with a limit for the blocks of one event: it takes slots for no more than these.
    pub fn with_claims(mut self, claims_max: usize) -> Self {
        self.base.cx.claims_max = claims_max;
        self
    }

    /// Returns the core with this time for handovers: a block is kept so long for an engine that has not
    /// loaded it.
    pub fn with_handover_ttl(mut self, ttl_ms: u64) -> Self {
        self.base.cx.kept.set_ttl(ttl_ms);
        self
    }

    /// Begins the opening of a pool file: it may hold blocks of earlier lives, until [`Core::end_opening`].
    pub fn begin_opening(&mut self) {
        self.base.cx.opening = true;
    }

    /// Ends the opening: all of the pool is in service.
    pub fn end_opening(&mut self) {
        self.base.cx.opening = false;
    }

    /// Handles one event, and appends the actions.
    pub fn handle(&mut self, now: Duration, event: CoreEvent, out: &mut Vec<Action>) {
        self.respond(now, event, out);
        self.go_on(now, out);
    }

    /// Handles one event, and appends the actions engines wait for, such as answers. [`Core::go_on`] must
    /// follow.
    pub fn respond(&mut self, now: Duration, event: CoreEvent, out: &mut Vec<Action>) {
        let Self { base, queries, transfers, .. } = self;
        base.cx.set_now(now);
        // Timings not taken by the caller are dropped here.
        base.cx.drain_over().for_each(drop);
        base.cx.ended.clear();
        match event {
            CoreEvent::Connected { session, hello } => {
                let result = self.connect_session(session, *hello);
                self.close_unless(session, result);
            }
            CoreEvent::Disconnected { session } => self.disconnect_session(session),
            CoreEvent::Message { session, request } => {
                base.engines.note_work(base.cx.now_ms, session, &mut base.cx.dram);
                let result = self.message(session, request);
                self.close_unless(session, result);
            }
            CoreEvent::Fences { session, start, done } => {
                base.engines.note_work(base.cx.now_ms, session, &mut base.cx.dram);
                if let Some(scheduler) = base.engines.set_fences(session, start, done) {
                    transfers.dispatch(scheduler, base);
                }
            }
            CoreEvent::Copied { copy, ok } => transfers.copied(copy, ok, base),
            CoreEvent::Behind { session } => transfers.catch_up(session, base),
            CoreEvent::Drained { session, void_below } => transfers.commit_copied(session, void_below, base),
            CoreEvent::Inspected { save, findings: Findings::Compared(found) } => {
                transfers.compared(save, found, queries, base)
            }
            CoreEvent::Inspected { save, findings: Findings::Searched(searched) } => {
                let broken = searched.iter().filter(|block| !block.is_finite).map(|block| block.slot);
                transfers.scanned(save, &broken.collect::<Vec<_>>(), base)
            }
            CoreEvent::Opened(opened) => adoption::open_part(opened, base),
            CoreEvent::Verified { key, slot, whole } => {
                let waiting = base.sources.verified(&key, slot, whole, &mut base.cx);
                self.tell_waiters(waiting, Some(&key));
            }
            CoreEvent::Transferred { tier, ends } => self.transferred(tier, ends),
            CoreEvent::Mesh(event) => self.hear_mesh(event),
            CoreEvent::Tick => self.tick(),
            CoreEvent::Drain => {
                base.cx.draining = true;
                for session in queries.streaming() {
                    transfers.end_stream(session, None, queries, base);
                }
                queries.answer_waits(base);
                base.sources.tell_tiers(Notice::Draining, &mut base.cx);
            }
        }
        self.follow_saves();
        out.append(&mut self.base.cx.actions);
    }

    /// Appends the other actions of an event: requests for blocks, writes, and messages to peers and engines.
    pub fn go_on(&mut self, now: Duration, out: &mut Vec<Action>) {
        let base = &mut self.base;
        base.cx.set_now(now);
        // The slot of a removed block becomes free with its last hold, in any part of the core.
        base.cx.apply_evictions();
        self.queries.send_for_unsent(base);
        self.transfers.go_on_streams(&mut self.queries, base);
        self.prefetches.go_on(base);
        base.sources.go_on(&mut base.cx);
        base.sources.tell_changes(&mut self.announcer, &mut base.cx);
        if self.queries.tell_promises(|session, op| self.transfers.hands_over_up_to(session, op), base) {
            self.queries.review_asks(base);
        }
        out.append(&mut base.cx.actions);
    }

    fn close_unless(&mut self, session: SessionId, result: Result<(), Violation>) {
        if let Err(reason) = result {
            self.base.cx.actions.push(Action::Close { session, reason });
        }
    }
}

// === impl Core: sessions ===

impl Core {
    fn connect_session(&mut self, session: SessionId, hello: Hello) -> Result<(), Violation> {
        let joined = self.base.engines.connect_session(session, hello, &mut self.base.cx.dram)?;
        if self.base.engines.has_scheduler(session) {
            self.queries.enter_scheduler(session, &self.base.engines[session]);
            self.transfers.enter_scheduler(session);
        }
        for worker in joined {
            let result = self.admit_worker(worker, session);
            self.close_unless(worker, result);
        }
        Ok(())
    }

    fn admit_worker(&mut self, worker: SessionId, scheduler: SessionId) -> Result<(), Violation> {
        let (rank, since) = self.base.engines.admit_worker(worker, scheduler)?;
        // The rank's ended loads must end first: saves that are given up let loads begin.
        self.transfers.end_loads_of_rank((scheduler, rank), since, &mut self.base.cx);
        if self.base.engines[scheduler].lost_rank() {
            self.transfers.fail_saves(scheduler, &mut self.base);
        }
        self.bind(scheduler);
        self.transfers.dispatch(scheduler, &mut self.base);
        Ok(())
    }

    fn bind(&mut self, session: SessionId) {
        if self.base.engines.bind(session, &mut self.base.cx) {
            self.transfers.begin_unbound(session, &mut self.base);
        }
    }

    /// Ends the leases, the waits and the binding of an engine, and returns the binding.
    fn end_generation(&mut self, session: SessionId) -> Option<Binding> {
        let Self { base, queries, transfers, .. } = self;
        transfers.drop_unbound(session, &mut base.cx);
        transfers.end_stream(session, None, queries, base);
        base.cx.produced.over = true;
        queries.end_leases(session, &mut base.cx);
        base.engines.end_generation(session, &mut base.cx)
    }

    fn disconnect_session(&mut self, session: SessionId) {
        let Self { base, queries, transfers, announcer, .. } = self;
        base.cx.produced.over = true;
        if let Some((scheduler, rank)) = base.engines.remove_worker(session) {
            transfers.fail_saves(scheduler, base);
            transfers.end_loads_of_rank((scheduler, rank), u64::MAX, &mut base.cx);
        } else if base.engines.has_scheduler(session) {
            transfers.leave_scheduler(session, base);
            queries.leave_scheduler(session, &mut base.cx);
            announcer.forget_session(session);
            base.engines.remove_scheduler(session, &mut base.cx.dram);
        }
    }
}

// === impl Core: messages ===

impl Core {
    fn message(&mut self, session: SessionId, request: RingRequest) -> Result<(), Violation> {
        match request {
            RingRequest::Worker(request) if self.base.engines.has_worker(session) => {
                self.worker_request(session, request)
            }
            RingRequest::Scheduler { request, keys, blocks } if self.base.engines.has_scheduler(session) => {
                self.scheduler_request(session, request, keys, blocks)
            }
            RingRequest::Advice(part) if self.base.engines.has_scheduler(session) => {
                let Self { base, queries, transfers, .. } = self;
                transfers.see(session, part.advise.op);
                queries.advise(session, &part, || transfers.saved_words(session), base)
            }
            // The session was closed by an earlier message of this turn.
            _ => Ok(()),
        }
    }

    fn worker_request(&mut self, session: SessionId, request: WorkerRequest) -> Result<(), Violation> {
        let base = &mut self.base;
        match request {
            WorkerRequest::Join { run, step } => match base.engines.join(session, run, step)? {
                Some(scheduler) => self.admit_worker(session, scheduler),
                None => Ok(()),
            },
            WorkerRequest::Loaded { op, end } => {
                base.cx.stats.load_mismatches += u64::from(end == LoadEnd::Mismatch);
                let Some(place) = base.engines.run_place(session) else { return Ok(()) };
                self.transfers.loaded(place, op, end == LoadEnd::Whole, &mut base.cx)
            }
            WorkerRequest::Weights { number, answers, live } => {
                let scheduler = base.engines.state_weights(session, (number, answers, live))?;
                scheduler.into_iter().for_each(|scheduler| self.bind(scheduler));
                Ok(())
            }
            // The runtime gave the message to the rank's copier when it read it.
            WorkerRequest::Staged { .. } => Ok(()),
        }
    }

    fn scheduler_request(
        &mut self,
        session: SessionId,
        request: SchedulerRequest,
        keys: Vec<BlockHash>,
        blocks: Vec<u32>,
    ) -> Result<(), Violation> {
        let Self { base, queries, transfers, .. } = self;
        transfers.see(session, request.op());
        match request {
            SchedulerRequest::Open { log } => queries.logs(session).open_log(log, &base.cx)?,
            SchedulerRequest::Append(append) => {
                queries.logs(session).append_keys(&append, keys)?;
                if append.promised && base.engines[session].accepts {
                    queries.note_promise(session, append.keys.log, &mut base.cx);
                }
            }
            SchedulerRequest::Query(query) => queries.query(session, query, base)?,
            SchedulerRequest::Load(load) => transfers.begin_load(session, &load, blocks, queries, base)?,
            SchedulerRequest::Save(save) => {
                transfers.begin_save(session, &save, &blocks, queries, base)?;
                queries.note_save(session, &save);
            }
            SchedulerRequest::Cancel(cancel) => transfers.cancel(session, cancel, base),
            SchedulerRequest::Release { log } => {
                queries.release_log(session, log, &mut base.cx)?;
                transfers.note_room(session, queries);
            }
            SchedulerRequest::Close { log, way } => {
                transfers.end_stream(session, Some(log), queries, base);
                queries.close_log(session, (log, way), || transfers.newest_handover(session), base)?
            }
            SchedulerRequest::Ended { log, way } => {
                transfers.end_stream(session, Some(log), queries, base);
                queries.end_log(session, (log, way), || transfers.newest_handover(session), base)?
            }
            SchedulerRequest::Left { keys } => queries.leave_device(session, keys, base)?,
            SchedulerRequest::Salt { salt } => {
                let ended = self.end_generation(session);
                self.base.engines.salt(session, salt, ended, &mut self.base.cx);
            }
            SchedulerRequest::Weights { number } => {
                base.engines.ask_weights(session, number)?;
                self.end_generation(session);
                self.bind(session);
            }
            SchedulerRequest::Hint { keys } => queries.hint(session, keys, base)?,
            SchedulerRequest::Accept { step } => {
                if !base.engines[session].accepts {
                    return Err(format!(
                        "the message {} belongs to protocol {ACCEPT_SINCE}, and the session speaks an earlier one",
                        Kind::Accept
                    ));
                }
                transfers.accept_step(session, step, base);
            }
            // Sessions pass the parts of an ADVISE as [`RingRequest::Advice`].
            SchedulerRequest::Advise(_) => {}
            // Engines of 0.2 send the tokens of a prompt here: the sidecar must not remember them.
            SchedulerRequest::Golden(_) => {}
        }
        Ok(())
    }
}

// === impl Core: ends of waits, and time ===

impl Core {
    /// Passes the end of a block to the queries and loads waiting for it. `None`: the block is late or not
    /// kept.
    fn tell_waiters(&mut self, waiting: Vec<Waiter>, ended: Option<&BlockKey>) {
        for waiter in waiting {
            match waiter {
                Waiter::Query { session, log, op } => {
                    self.queries.end_block((session, log), op, ended, &mut self.base);
                }
                Waiter::Load { session, op } => {
                    self.transfers.end_block((session, op), ended, &mut self.base)
                }
            }
        }
    }

    /// Passes the begins and ends of this event's saves to queries and loads waiting for blocks of other
    /// engines.
    fn follow_saves(&mut self) {
        let Produced { claimed, ended, kept, over } = std::mem::take(&mut self.base.cx.produced);
        for (namespace, session) in kept {
            self.queries.restore_patience_beside(namespace, session, &self.base.engines);
        }
        for (key, waiting, is_kept) in ended {
            self.tell_waiters(waiting, is_kept.then_some(&key));
        }
        if claimed {
            self.queries.look_at_saves(&mut self.base);
        }
        if over {
            let Self { base, queries, transfers, .. } = self;
            queries.promises_may_differ();
            queries.end_vain_waits(|session| transfers.hands_over(session), base);
        }
    }

    /// Handles ended jobs of a tier. Failed reads of one call are tried another way together.
    fn transferred(&mut self, tier: usize, ends: Vec<JobEnd>) {
        if ends.iter().any(JobEnd::shows_producer) {
            self.queries.restore_patience();
        }
        for end in ends {
            let Self { base, queries, transfers, .. } = self;
            let waits = |waiter: &Waiter| match *waiter {
                Waiter::Query { session, log, op } => queries.waits(session, log, op),
                Waiter::Load { session, op } => transfers.is_deferred((session, op)),
            };
            if let Some((key, waiting)) = base.sources.end_job(tier, end, waits, &mut base.cx) {
                self.tell_waiters(waiting, Some(&key));
            }
        }
        for (key, waiting) in self.base.sources.retry(tier, &mut self.base.cx) {
            self.tell_waiters(waiting, Some(&key));
        }
    }

    /// Handles a message of the mesh. Blocks announced by a peer wake the queries waiting for them.
    fn hear_mesh(&mut self, event: MeshEvent) {
        let Self { base, queries, .. } = self;
        let Some(mesh) = base.sources.mesh_mut() else { return };
        match event {
            MeshEvent::Changed { peer, changes } => {
                mesh.change_inventory(peer, &changes, &mut base.cx);
                queries.look_at_announced(&changes, base);
            }
            MeshEvent::Asked { ask, peer, blocks, standing: Some(terms) } => {
                queries.keep_ask(ask, (peer, blocks, terms), base);
            }
            MeshEvent::Listed { peer, ask, blocks } => {
                self.prefetches.take_list(peer, ask, &blocks, &mut base.cx);
            }
            event => {
                if let MeshEvent::Left(peer) = event {
                    self.prefetches.forget_peer(peer);
                }
                mesh.apply_event(event, &mut base.cx)
            }
        }
    }

    fn tick(&mut self) {
        let cx = &mut self.base.cx;
        cx.dram.expire(cx.now_ms);
        cx.kept.expire(cx.now_ms, &mut cx.dram);
        cx.lost.expire(cx.now_ms);
        cx.apply_evictions();
        let late_saves = cx.arrivals.late_saves(cx.now_ms);
        let late = self.base.sources.tiers.iter_mut().flat_map(|tier| tier.late(cx.now_ms));
        for key in late.chain(late_saves).collect::<Vec<_>>() {
            let waiting = self.base.cx.arrivals.give_up(&key);
            self.tell_waiters(waiting, None);
        }
        self.transfers.refuse_late(&mut self.base);
        self.transfers.end_due_streams(&mut self.queries, &mut self.base);
        self.transfers.drop_unaccepted(&mut self.base);
        self.queries.end_due_waits(&mut self.base);
        self.queries.look_again(&mut self.base);
        self.queries.promises_may_differ();
        self.prefetches.ask_peers(&mut self.base);
        self.census.step(&self.base);
    }

    /// Lets tiers take as much memory as they can before the sidecar ends, the best blocks first.
    pub fn write_all(&mut self, out: &mut Vec<Action>) {
        // Hinted blocks take their places among the others.
        self.base.cx.dram.end_all_hints();
        self.base.sources.tell_tiers(Notice::Ending, &mut self.base.cx);
        out.append(&mut self.base.cx.actions);
    }
}

// === impl Core: lists of blocks for peers ===

impl Core {
    /// Looks at some more blocks for a list. Returns the list once it is whole.
    pub fn list_blocks(&mut self, mut list: Box<BestBlocks>) -> Result<Vec<ListedBlock>, Box<BestBlocks>> {
        if list.step(&self.base) { Err(list) } else { Ok(list.finish(&mut self.base)) }
    }

    /// Lets peers take the blocks that no other pod has, after [`CoreEvent::Drain`]. Returns false if no peer can,
    /// or nothing is here.
    pub fn begin_leaving(&mut self) -> bool {
        let Base { sources, cx, .. } = &mut self.base;
        let is_empty = cx.dram.stats().blocks == 0;
        sources.mesh_mut().is_some_and(|mesh| !is_empty && mesh.begin_leaving(cx))
    }

    /// True while peers take blocks, or may begin to.
    pub fn is_leaving(&self, now: Duration) -> bool {
        self.base.sources.mesh().is_some_and(|mesh| mesh.is_leaving(count_millis(now)))
    }
}

// === impl Core: requests of an operator ===

impl Core {
    /// Counts some more blocks. Returns the counts once all blocks are counted.
    pub fn survey(&self, survey: &mut Survey) -> Option<BTreeMap<NamespaceDigest, KeptCounts>> {
        let goes_on = survey.step(&self.base);
        (!goes_on).then(|| survey.result(&self.base))
    }

    /// Returns the places of each of these blocks of a namespace.
    pub fn locate(&self, namespace: NamespaceDigest, hashes: &[BlockHash]) -> Vec<Location> {
        inventory::locate_blocks(namespace, hashes, &self.base)
    }

    /// Looks at some more keys of a prompt. Returns its score once that is whole.
    pub fn follow_score(&self, score: &mut PromptScore) -> Option<PromptPlaces> {
        let goes_on = score.step(&self.base, &self.queries);
        (!goes_on).then(|| score.places(&self.base))
    }

    /// Carries an operator's hint for the next part of a chain out, and appends the actions. Returns the outcome after the
    /// last part. [`Core::go_on`] must follow.
    pub fn hint(
        &mut self,
        now: Duration,
        task: &mut HintTask,
        out: &mut Vec<Action>,
    ) -> Option<HintedCounts> {
        self.base.cx.set_now(now);
        let found = task.advise_part(&mut self.base);
        out.append(&mut self.base.cx.actions);
        found
    }

    /// Begins to evict a namespace: its blocks on their way, by saves or reads, are not kept, either. `None`:
    /// the namespace is unknown.
    pub fn begin_eviction(&mut self, namespace: NamespaceDigest) -> Option<Eviction> {
        let eviction = Eviction::new(namespace, &self.base)?;
        let numbers = eviction.numbers();
        numbers.iter().for_each(|number| self.transfers.void_saves(*number));
        self.base.cx.arrivals.distrust(|key| numbers.contains(&key.namespace));
        Some(eviction)
    }

    /// Evicts some more blocks, and appends the actions. False once all blocks are gone. [`Core::go_on`] must
    /// follow.
    pub fn evict(&mut self, eviction: &mut Eviction, out: &mut Vec<Action>) -> bool {
        let goes_on = eviction.step(&mut self.base);
        out.append(&mut self.base.cx.actions);
        goes_on
    }

    /// True while tiers still look for blocks of earlier lives, or such blocks are still to be verified.
    pub fn recovers(&self) -> bool {
        let Base { sources, cx, .. } = &self.base;
        cx.dram.stats().unverified_blocks > 0 || sources.tiers.iter().any(|tier| tier.recovers())
    }
}

// === impl Core: views for its host ===

impl Core {
    /// True while copies or transfers run, or blocks wait for their commit or write. A save waiting for its
    /// step does not count.
    pub fn busy(&self) -> bool {
        let Base { sources, cx, .. } = &self.base;
        self.transfers.busy() || cx.arrivals.any() || sources.tiers.iter().any(|tier| tier.busy())
    }

    /// True if an operation waits for this worker's fence words.
    pub fn waits_on_fences(&self, session: SessionId) -> bool {
        self.base.engines.run_place(session).is_some_and(|place| self.transfers.waits_on_fences(place.0))
    }

    /// True if a save for another engine is among those operations.
    pub fn hands_over(&self, session: SessionId) -> bool {
        self.base.engines.run_place(session).is_some_and(|place| self.transfers.hands_over(place.0))
    }

    /// True if time must pass for a tier to go on.
    pub fn waits_for_tiers(&self) -> bool {
        self.base.sources.tiers.iter().any(|tier| tier.waits())
    }

    /// Returns the time of the next look at waiting questions, if there is one.
    pub fn next_look_ms(&self) -> Option<u64> {
        self.queries.next_look_ms()
    }

    /// Returns the next announcements for a scheduler's session, `room` at most: blocks the engine could find
    /// here. `asked` is the number of the session's requests for them.
    pub fn announce(
        &mut self,
        session: SessionId,
        asked: u64,
        room: usize,
    ) -> impl Iterator<Item = Announcement> + '_ {
        self.announcer.next(session, asked, room, &mut self.base)
    }

    /// True if [`Core::announce`] has more to look at for this session.
    pub fn announces(&self, session: SessionId) -> bool {
        self.announcer.goes_on(session)
    }

    /// Notes the rate of computing prompts from the word of a scheduler's session; `None`: unknown.
    pub fn note_prefill(&mut self, session: SessionId, rate: Option<PrefillRate>) {
        self.base.engines.note_prefill(session, rate);
    }

    /// Returns the stated rates of engines by name, each with the bytes of a token.
    pub fn engine_rates(&self) -> BTreeMap<&str, (PrefillRate, f64)> {
        self.base.engines.rates()
    }

    /// Returns a session with saves left over by the last turn, if there is one: [`CoreEvent::Behind`] is for it.
    pub fn behind(&self) -> Option<SessionId> {
        self.transfers.behind()
    }

    /// Returns the number of engines at work: they share the pool, and the time of the data thread.
    pub fn at_work(&self) -> usize {
        self.base.cx.dram.at_work() as usize
    }

    /// Returns the holdings of every engine, also of engines without a rank.
    pub fn holders(&self) -> impl Iterator<Item = EngineHolder<'_>> {
        self.base.engines.holders(&self.base.cx.dram)
    }

    /// Panics if the figures of any engine differ from its blocks and leases. Looks at all blocks and leases.
    pub fn audit_ledger(&self) {
        self.base.cx.dram.audit_ledger();
    }

    /// Panics if hints keep more of an engine's blocks than they may. Looks at all such blocks.
    pub fn audit_hints(&self) {
        self.base.cx.dram.audit_hints();
    }

    /// Returns the connected engines barred from their namespace.
    pub fn barred(&self) -> Vec<Barred> {
        self.base.engines.barred()
    }

    /// Returns the served engines, each with its proof.
    pub fn standings(&self) -> Vec<EngineStanding> {
        self.base.engines.standings()
    }

    /// Returns, for each kind of number, the largest difference within its limit, as a part of the limit.
    pub fn largest_differences(&self) -> impl Iterator<Item = (Number, f64)> + '_ {
        self.transfers.largest_differences()
    }

    /// Returns the figures of the reads of each tier, by number.
    pub fn tier_stats(&self) -> &[TierStats] {
        &self.base.sources.stats
    }

    /// Returns the figures of the SSD tier, if there is one.
    pub fn ssd_stats(&self) -> Option<SsdStats> {
        self.base.sources.ssd_stats()
    }

    /// Returns the figures of the mesh, if there is one.
    pub fn peers_stats(&self) -> Option<PeersStats> {
        let mut stats = self.base.sources.mesh()?.peers_stats();
        for peer in &mut stats.peers {
            peer.bytes_per_second = self.base.cx.arrivals.flows.bytes_per_second(SourceLane::Peer(peer.peer));
        }
        stats.prefetched = self.base.cx.prefetched.stats;
        stats.unique_blocks = self.census.sum().unique;
        Some(self.queries.count_waits(stats))
    }

    /// Returns the blocks here that no peer has, and their value.
    pub fn unique_blocks(&self) -> UniqueBlocks {
        self.census.sum()
    }

    /// Returns the number of blocks of no peer in each namespace; none without a mesh.
    pub fn unique_by_namespace(&self) -> BTreeMap<NamespaceDigest, u64> {
        let mesh = self.base.sources.mesh();
        mesh.map(|_| self.census.by_namespace(&self.base)).unwrap_or_default()
    }

    /// Returns the number of the first tier with this source.
    pub fn tier_of(&self, source: Source) -> Option<usize> {
        self.base.sources.tiers.iter().position(|tier| tier.source() == source)
    }

    /// Returns the bytes counted to each quota, in order.
    pub fn quotas_used(&self) -> impl Iterator<Item = u64> + '_ {
        self.base.cx.quotas.used(&self.base.cx.dram)
    }

    /// Returns the operations ended since the event before.
    pub fn drain_over(&mut self) -> impl Iterator<Item = Took> + '_ {
        self.base.cx.drain_over()
    }

    /// Returns the requests ended since the event before.
    pub fn drain_ended(&mut self) -> impl Iterator<Item = FinishedRequest> + '_ {
        self.base.cx.ended.drain(..)
    }

    /// Returns counters and levels, for metrics.
    pub fn stats(&self) -> CoreStats {
        let Base { engines, sources, cx } = &self.base;
        let (tier, (sessions, barred)) = (cx.dram.stats(), engines.counts());
        CoreStats {
            sessions: sessions as u64,
            blocks: tier.blocks,
            pool_used_bytes: tier.bytes_used,
            leases: tier.leases,
            leases_cut: tier.leases_cut_total,
            evicted_blocks: tier.evicted_blocks_total,
            unreachable_blocks: tier.unreachable_blocks_total,
            adopted_blocks: tier.adopted_blocks_total,
            adoption_dropped: tier.adoption_dropped_total,
            adoption_corrupt: sources.verification.corrupt,
            unverified_blocks: tier.unverified_blocks,
            removed_blocks: tier.removed_blocks_total,
            barred_engines: barred as u64,
            handover_blocks: cx.kept.block_count(),
            handover_kept_bytes: cx.kept.bytes(),
            handover_loaded: cx.kept.released().loaded,
            handover_expired: cx.kept.released().expired,
            handover_full: cx.kept.released().full,
            retained_bytes: tier.retained_bytes,
            pinned_bytes: tier.pinned_bytes,
            ..cx.stats.clone()
        }
    }
}
