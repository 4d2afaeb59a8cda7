//! The pure core: every decision of the sidecar, as a function of (state, now, event) to actions.
//!
//! Invariants it keeps:
//! - a slot is filled by one save, read only under a lease, and reused only when no copy touches it;
//! - a block is committed only after every shard's copy ended and, after that, its scheduler's ring was drained, and only if the
//!   scheduler accepted the step that computed it;
//! - a copy starts only once its rank has joined the engine's run and passed the step's fence;
//! - whatever a peer sends ends at worst in that peer's session being closed with a reason.
//!
//! No clock, memory or I/O here: [`crate::runtime`] feeds events and carries actions out, in their order.

mod adoption;
mod announcer;
mod arrivals;
mod context;
mod engines;
mod event;
mod handover;
mod inspection;
mod inventory;
mod namespaces;
mod peers;
mod queries;
mod quotas;
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

use shm_protocol::ACCEPT_SINCE;
use shm_protocol::announcement::Announcement;
use shm_protocol::handshake::Hello;
use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::message::Kind;
use shm_protocol::prefill::PrefillRate;
use shm_protocol::request::{LoadEnd, SchedulerRequest, WorkerRequest};
use shm_protocol::source::Source;
use tiers::dram::Dram;

use self::announcer::Announcer;
use self::arrivals::{SourceLane, Waiter};
use self::context::Context;
use self::engines::Engines;
pub(crate) use self::engines::whole;
pub use self::engines::{Barred, EngineState, Holder, Proof, Standing};
pub use self::event::{Action, Direction, Ended, Event, Heard, JobEnd, Piece, Request, TierJob};
use self::handover::Produced;
pub use self::inspection::{Findings, Found, InspectedBlocks, Inspection, SearchedBlock};
pub use self::inventory::{Eviction, Kept, Location, Survey};
use self::namespaces::Binding;
pub use self::peers::{FAULT_NAMES, PeersStats, peer_tier};
use self::queries::Queries;
use self::quotas::Quotas;
use self::sources::Sources;
pub use self::ssd::{SsdStats, disk_tier};
pub use self::stats::Stats;
use self::tier::Notice;
pub use self::tier::{NewTier, TierStats};
pub use self::timing::{Part, Timed, Took};
use self::transfers::Transfers;
use crate::compare::Number;
use crate::config::quotas::Quota;

/// A session, unique within an epoch.
pub type SessionId = u64;
/// A batch of copies, unique within an epoch.
pub type CopyId = u64;

/// Why a peer's session must end.
type Violation = String;

/// What queries and transfers are given for a call: who is there, where blocks come from, and the context.
#[derive(Debug)]
struct Base {
    engines: Engines,
    sources: Sources,
    cx: Context,
}

/// Hands each event to the part that it is for, and what follows from it to the others.
#[derive(Debug)]
pub struct Core {
    base: Base,
    queries: Queries,
    transfers: Transfers,
    announcer: Announcer,
}

// === impl Core ===

impl Core {
    /// A core over empty DRAM. Namespaces have these quotas, and blocks are looked for in `tiers` in this order.
    pub fn new(dram: Dram, quotas: &[Quota], tiers: impl IntoIterator<Item = NewTier>) -> Self {
        let (engines, mut sources, queries, transfers, announcer): (_, Sources, _, _, _) = Default::default();
        let mut cx = Context::new(dram);
        // A tier divides its room as quotas divide DRAM.
        cx.quotas = Quotas::new(quotas, &mut cx.dram);
        tiers.into_iter().for_each(|tier| sources.add_tier(tier, &mut cx.dram));
        Self { base: Base { engines, sources, cx }, queries, transfers, announcer }
    }

    /// Disks were left out: what they hold may be found after another start.
    pub fn leave_out_disks(&mut self) {
        self.base.cx.unread = true;
    }

    /// The same where one event takes slots for no more blocks than this.
    pub fn with_claims(mut self, claims_max: usize) -> Self {
        self.base.cx.claims_max = claims_max;
        self
    }

    /// The same where blocks that are handed over are kept so long for an engine that has not loaded them.
    pub fn with_handover_ttl(mut self, ttl_ms: u64) -> Self {
        self.base.cx.kept.set_ttl(ttl_ms);
        self
    }

    /// A pool file may hold blocks of earlier lives, until [`Core::end_opening`].
    pub fn begin_opening(&mut self) {
        self.base.cx.opening = true;
    }

    /// All of the pool is in service.
    pub fn end_opening(&mut self) {
        self.base.cx.opening = false;
    }

    /// Takes one event and appends what must be done.
    pub fn handle(&mut self, now: Duration, event: Event, out: &mut Vec<Action>) {
        self.respond(now, event, out);
        self.go_on(now, out);
    }

    /// Takes one event and appends what others wait for: an engine is held up by its question. [`Core::go_on`] follows.
    pub fn respond(&mut self, now: Duration, event: Event, out: &mut Vec<Action>) {
        let Self { base, queries, transfers, .. } = self;
        base.cx.set_now(now);
        // Who does not ask how long things took leaves it here.
        base.cx.drain_over().for_each(drop);
        base.cx.ended.clear();
        match event {
            Event::Connected { session, hello } => {
                let result = self.connect(session, *hello);
                self.close_unless(session, result);
            }
            Event::Disconnected { session } => self.disconnect(session),
            Event::Message { session, request } => {
                base.engines.note_work(base.cx.now_ms, session, &mut base.cx.dram);
                let result = self.message(session, request);
                self.close_unless(session, result);
            }
            Event::Fences { session, start, done } => {
                base.engines.note_work(base.cx.now_ms, session, &mut base.cx.dram);
                if let Some(scheduler) = base.engines.set_fences(session, start, done) {
                    transfers.dispatch(scheduler, base);
                }
            }
            Event::Copied { copy, ok } => transfers.copied(copy, ok, base),
            Event::Behind { session } => transfers.catch_up(session, base),
            Event::Drained { session, void_below } => transfers.commit_copied(session, void_below, base),
            Event::Inspected { save, findings: Findings::Compared(found) } => {
                transfers.compared(save, found, queries, base)
            }
            Event::Inspected { save, findings: Findings::Searched(searched) } => {
                let broken = searched.iter().filter(|block| !block.is_finite).map(|block| block.slot);
                transfers.scanned(save, &broken.collect::<Vec<_>>(), base)
            }
            Event::Opened(opened) => adoption::open_part(opened, base),
            Event::Verified { key, slot, whole } => {
                let waiting = base.sources.verified(&key, slot, whole, &mut base.cx);
                self.tell(waiting, Some(&key));
            }
            Event::Transferred { tier, ends } => self.transferred(tier, ends),
            Event::Mesh(heard) => {
                if let Some(mesh) = base.sources.mesh_mut() {
                    mesh.hear(heard, &mut base.cx);
                }
            }
            Event::Tick => self.tick(),
            Event::Drain => {
                base.cx.draining = true;
                queries.answer_waits(base);
                base.sources.tell_tiers(Notice::Draining, &mut base.cx);
            }
        }
        self.follow_saves();
        out.append(&mut self.base.cx.actions);
    }

    /// Appends what else an event brings on: blocks are sent for and written, peers and engines are told.
    pub fn go_on(&mut self, now: Duration, out: &mut Vec<Action>) {
        let base = &mut self.base;
        base.cx.set_now(now);
        // Slots of removed blocks become free wherever their last hold ends.
        base.cx.apply_evictions();
        self.queries.send_for_unsent(base);
        base.sources.go_on(&mut base.cx);
        base.sources.tell(&mut self.announcer, &mut base.cx);
        self.queries.tell_promises(|session, op| self.transfers.hands_over_up_to(session, op), base);
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
    fn connect(&mut self, session: SessionId, hello: Hello) -> Result<(), Violation> {
        let joined = self.base.engines.connect(session, hello, &mut self.base.cx.dram)?;
        if self.base.engines.has_scheduler(session) {
            self.queries.enter(session, &self.base.engines[session]);
            self.transfers.enter(session);
        }
        for worker in joined {
            let result = self.admit(worker, session);
            self.close_unless(worker, result);
        }
        Ok(())
    }

    fn admit(&mut self, worker: SessionId, scheduler: SessionId) -> Result<(), Violation> {
        let (rank, since) = self.base.engines.admit(worker, scheduler)?;
        // The loads that the rank has ended must end before saves are given up, which lets loads begin.
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

    /// Ends the leases, the waits and the binding of an engine, and returns the latter.
    fn end_generation(&mut self, session: SessionId) -> Option<Binding> {
        let Self { base, queries, transfers, .. } = self;
        transfers.drop_unbound(session, &mut base.cx);
        base.cx.produced.over = true;
        queries.end_leases(session, &mut base.cx);
        base.engines.end_generation(session, &mut base.cx)
    }

    fn disconnect(&mut self, session: SessionId) {
        let Self { base, queries, transfers, announcer } = self;
        base.cx.produced.over = true;
        if let Some((scheduler, rank)) = base.engines.remove_worker(session) {
            transfers.fail_saves(scheduler, base);
            transfers.end_loads_of_rank((scheduler, rank), u64::MAX, &mut base.cx);
        } else if base.engines.has_scheduler(session) {
            transfers.leave(session, base);
            queries.leave(session, &mut base.cx);
            announcer.leave(session);
            base.engines.remove_scheduler(session, &mut base.cx.dram);
        }
    }
}

// === impl Core: messages ===

impl Core {
    fn message(&mut self, session: SessionId, request: Request) -> Result<(), Violation> {
        match request {
            Request::Worker(request) if self.base.engines.has_worker(session) => {
                self.worker_request(session, request)
            }
            Request::Scheduler { request, keys, blocks } if self.base.engines.has_scheduler(session) => {
                self.scheduler_request(session, request, keys, blocks)
            }
            // The session was closed by an earlier message of this turn.
            _ => Ok(()),
        }
    }

    fn worker_request(&mut self, session: SessionId, request: WorkerRequest) -> Result<(), Violation> {
        let base = &mut self.base;
        match request {
            WorkerRequest::Join { run, step } => match base.engines.join(session, run, step)? {
                Some(scheduler) => self.admit(session, scheduler),
                None => Ok(()),
            },
            WorkerRequest::Loaded { op, end } => {
                base.cx.stats.load_mismatches += u64::from(end == LoadEnd::Mismatch);
                let Some(place) = base.engines.place(session) else { return Ok(()) };
                self.transfers.loaded(place, op, end == LoadEnd::Whole, &mut base.cx)
            }
            WorkerRequest::Weights { number, answers, live } => {
                let scheduler = base.engines.state_weights(session, (number, answers, live))?;
                scheduler.into_iter().for_each(|scheduler| self.bind(scheduler));
                Ok(())
            }
            // The rank's copier was told when the message was read.
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
            SchedulerRequest::Open { log } => queries.logs(session).open(log, &base.cx)?,
            SchedulerRequest::Append(append) => {
                queries.logs(session).append(&append, keys)?;
                if append.promised && base.engines[session].accepts {
                    queries.note_promise(session, append.keys.log, &mut base.cx);
                }
            }
            SchedulerRequest::Query(query) => queries.query(session, query, base)?,
            SchedulerRequest::Load(load) => transfers.load(session, &load, blocks, queries, base)?,
            SchedulerRequest::Save(save) => transfers.save(session, &save, &blocks, queries, base)?,
            SchedulerRequest::Cancel(cancel) => transfers.cancel(session, cancel, base),
            SchedulerRequest::Release { log } => queries.release(session, log, &mut base.cx)?,
            SchedulerRequest::Close { log, way } => {
                queries.close(session, (log, way), || transfers.newest_handover(session), base)?
            }
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
                transfers.accept(session, step, base);
            }
            // Engines of 0.2 name the tokens of a prompt: nothing may remember them.
            SchedulerRequest::Golden(_) => {}
        }
        Ok(())
    }
}

// === impl Core: blocks that were waited for, and time ===

impl Core {
    /// Tells those who have waited for a block that it has ended, well if it is `ended`.
    fn tell(&mut self, waiting: Vec<Waiter>, ended: Option<&BlockKey>) {
        for waiter in waiting {
            match waiter {
                Waiter::Query { session, log, op } => {
                    self.queries.tell((session, log), op, ended, &mut self.base);
                }
                Waiter::Load { session, op } => self.transfers.tell((session, op), ended, &mut self.base),
            }
        }
    }

    /// Tells those who await what other engines compute what saves have begun and ended.
    fn follow_saves(&mut self) {
        let Produced { claimed, ended, kept, over } = std::mem::take(&mut self.base.cx.produced);
        for (namespace, session) in kept {
            self.queries.restore_patience_beside(namespace, session, &self.base.engines);
        }
        for (key, waiting, is_kept) in ended {
            self.tell(waiting, is_kept.then_some(&key));
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

    /// Jobs of a tier have ended. Failed reads are tried another way together.
    fn transferred(&mut self, tier: usize, ends: Vec<JobEnd>) {
        if ends.iter().any(JobEnd::shows_producer) {
            self.queries.restore_patience();
        }
        for end in ends {
            let Self { base, queries, transfers, .. } = self;
            let waits = |waiter: &Waiter| match *waiter {
                Waiter::Query { session, log, op } => queries.waits(session, log, op),
                Waiter::Load { session, op } => transfers.is_parked((session, op)),
            };
            if let Some((key, waiting)) = base.sources.ended(tier, end, waits, &mut base.cx) {
                self.tell(waiting, Some(&key));
            }
        }
        for (key, waiting) in self.base.sources.retry(tier, &mut self.base.cx) {
            self.tell(waiting, Some(&key));
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
            self.tell(waiting, None);
        }
        self.transfers.refuse_late(&mut self.base);
        self.transfers.drop_unaccepted(&mut self.base);
        self.queries.end_due_waits(&mut self.base);
        self.queries.look_again(&mut self.base);
        self.queries.promises_may_differ();
    }

    /// The sidecar is to end, and its memory with it: tiers take as much of that as they can meanwhile, the best first.
    pub fn write_all(&mut self, out: &mut Vec<Action>) {
        self.base.sources.tell_tiers(Notice::Ending, &mut self.base.cx);
        out.append(&mut self.base.cx.actions);
    }
}

// === impl Core: what an operator asks ===

impl Core {
    /// Counts some more blocks; what there is, once all are counted.
    pub fn survey(&self, survey: &mut Survey) -> Option<BTreeMap<NamespaceDigest, Kept>> {
        let goes_on = survey.step(&self.base);
        (!goes_on).then(|| survey.result(&self.base))
    }

    /// Where each of these blocks of a namespace is.
    pub fn locate(&self, namespace: NamespaceDigest, hashes: &[BlockHash]) -> Vec<Location> {
        inventory::locate(namespace, hashes, &self.base)
    }

    /// Begins to evict a namespace, of which nothing that is being saved or brought is kept; `None` where there is no such.
    pub fn begin_eviction(&mut self, namespace: NamespaceDigest) -> Option<Eviction> {
        let eviction = Eviction::new(namespace, &self.base)?;
        let numbers = eviction.numbers();
        numbers.iter().for_each(|number| self.transfers.void_saves(*number));
        self.base.cx.arrivals.distrust(|key| numbers.contains(&key.namespace));
        Some(eviction)
    }

    /// Evicts some more blocks, and appends what must be done; false once all are gone. [`Core::go_on`] follows.
    pub fn evict(&mut self, eviction: &mut Eviction, out: &mut Vec<Action>) -> bool {
        let goes_on = eviction.step(&mut self.base);
        out.append(&mut self.base.cx.actions);
        goes_on
    }

    /// Whether blocks of earlier lives are still to come into service in tiers, or to be verified.
    pub fn recovers(&self) -> bool {
        let Base { sources, cx, .. } = &self.base;
        cx.dram.stats().unverified_blocks > 0 || sources.tiers.iter().any(|tier| tier.recovers())
    }
}

// === impl Core: what others look at ===

impl Core {
    /// Whether copies or transfers are running, or blocks wait to be committed or written. A save whose step is not done yet
    /// is none of these.
    pub fn busy(&self) -> bool {
        let Base { sources, cx, .. } = &self.base;
        self.transfers.busy() || cx.arrivals.any() || sources.tiers.iter().any(|tier| tier.busy())
    }

    /// Whether an operation waits for this worker's fence words.
    pub fn waits_on_fences(&self, session: SessionId) -> bool {
        self.base.engines.place(session).is_some_and(|place| self.transfers.waits_on_fences(place.0))
    }

    /// Whether a save for another engine is among those operations.
    pub fn hands_over(&self, session: SessionId) -> bool {
        self.base.engines.place(session).is_some_and(|place| self.transfers.hands_over(place.0))
    }

    /// Whether time must pass for a tier to go on.
    pub fn waits_for_tiers(&self) -> bool {
        self.base.sources.tiers.iter().any(|tier| tier.waits())
    }

    /// When time must pass for a question to be asked again.
    pub fn next_look_ms(&self) -> Option<u64> {
        self.queries.next_look_ms()
    }

    /// What a scheduler's session that has asked for it so often is told next of the blocks that it could find, `room` announcements
    /// at most.
    pub fn announce(
        &mut self,
        session: SessionId,
        asked: u64,
        room: usize,
    ) -> impl Iterator<Item = Announcement> + '_ {
        self.announcer.next(session, asked, room, &mut self.base)
    }

    /// Whether [`Core::announce`] has more to look at for this session.
    pub fn announces(&self, session: SessionId) -> bool {
        self.announcer.goes_on(session)
    }

    /// A scheduler's engine computes prompts at this rate, as its session's word says; none: not known.
    pub fn note_prefill(&mut self, session: SessionId, rate: Option<PrefillRate>) {
        self.base.engines.note_prefill(session, rate);
    }

    /// The stated rates of engines by name, each with the bytes of a token.
    pub fn engine_rates(&self) -> BTreeMap<&str, (PrefillRate, f64)> {
        self.base.engines.rates()
    }

    /// A session with saves that the last turn had no time for, if there is one: [`Event::Behind`] is for it.
    pub fn behind(&self) -> Option<SessionId> {
        self.transfers.behind()
    }

    /// How many engines are at work: those share the pool, and what crosses the data thread.
    pub fn at_work(&self) -> usize {
        self.base.cx.dram.at_work() as usize
    }

    /// What every engine holds, those with no rank too.
    pub fn holders(&self) -> impl Iterator<Item = Holder<'_>> {
        self.base.engines.holders(&self.base.cx.dram)
    }

    /// Panics unless what is said of every engine is what the blocks and leases are. Looks at all of them.
    pub fn audit_ledger(&self) {
        self.base.cx.dram.audit_ledger();
    }

    /// Engines that are connected and that a namespace is closed to.
    pub fn barred(&self) -> Vec<Barred> {
        self.base.engines.barred()
    }

    /// Engines that are served, each with what it has shown of what it computes.
    pub fn standings(&self) -> Vec<Standing> {
        self.base.engines.standings()
    }

    /// The largest differences that were within their limits, as parts of those, each by the kind of numbers that it is of.
    pub fn largest_differences(&self) -> impl Iterator<Item = (Number, f64)> + '_ {
        self.transfers.largest_differences()
    }

    /// Figures of the reads of each tier, by number.
    pub fn tier_stats(&self) -> &[TierStats] {
        &self.base.sources.stats
    }

    /// Figures of the SSD tier, if there is one.
    pub fn ssd_stats(&self) -> Option<SsdStats> {
        self.base.sources.ssd_stats()
    }

    /// Figures of the mesh, if there is one.
    pub fn peers_stats(&self) -> Option<PeersStats> {
        let mut stats = self.base.sources.mesh()?.stats();
        for peer in &mut stats.peers {
            peer.bytes_per_second = self.base.cx.arrivals.flows.bytes_per_second(SourceLane::Peer(peer.peer));
        }
        Some(self.queries.count_waits(stats))
    }

    /// The number of the first tier with this source.
    pub fn tier_of(&self, source: Source) -> Option<usize> {
        self.base.sources.tiers.iter().position(|tier| tier.source() == source)
    }

    /// Bytes that count to each quota, in order.
    pub fn quotas_used(&self) -> impl Iterator<Item = u64> + '_ {
        self.base.cx.quotas.used(&self.base.cx.dram)
    }

    /// What is over since the event before.
    pub fn drain_over(&mut self) -> impl Iterator<Item = Took> + '_ {
        self.base.cx.drain_over()
    }

    /// Requests that are over since the event before.
    pub fn drain_ended(&mut self) -> impl Iterator<Item = Ended> + '_ {
        self.base.cx.ended.drain(..)
    }

    /// Counters and levels, for metrics.
    pub fn stats(&self) -> Stats {
        let Base { engines, sources, cx } = &self.base;
        let (tier, (sessions, barred)) = (cx.dram.stats(), engines.counts());
        Stats {
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
            handover_blocks: cx.kept.count(),
            handover_kept_bytes: cx.kept.bytes(),
            handover_loaded: cx.kept.released().loaded,
            handover_expired: cx.kept.released().expired,
            handover_full: cx.kept.released().full,
            ..cx.stats.clone()
        }
    }
}
