//! The sessions of engines: schedulers, workers, the run they share, and the namespace they serve.
//!
//! Other modules read an engine's fields, and change them by the methods here alone.

mod bars;
mod binding;
mod proofs;
mod service;
mod sets;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::{Index, Range};
use std::sync::Arc;

use shm_protocol::ACCEPT_SINCE;
use shm_protocol::handshake::{self, Copier, Hello, PROBE_RUN, Role, WorkerHello};
use shm_protocol::key::{self, NamespaceDigest};
use shm_protocol::layout::{AWAIT_MS, LOAD_PREFERENCE, PROMISED_WAIT_MS_MAX, QUERY_WAIT_MS_MAX};
use shm_protocol::namespace::{self, Facts};
use shm_protocol::prefill::PrefillRate;
use tiers::dram::{Dram, HolderId, Holdings};

pub use self::bars::Barred;
use self::bars::Bars;
use self::proofs::Proofs;
pub use self::proofs::{EngineStanding, Proof};
use self::service::{Service, ServiceEvent};
use super::namespaces::{Binding, Form, Space};
use super::worth::LoadPatience;
use super::{SessionId, Violation};
use crate::compare::Layers;

/// The sessions of all engines.
#[derive(Debug, Default)]
pub(super) struct Engines {
    schedulers: BTreeMap<SessionId, SchedulerRole>,
    workers: BTreeMap<SessionId, WorkerRole>,
    bars: Bars,
    proofs: Proofs,
}

/// The holdings of one engine.
#[derive(Debug)]
pub struct EngineHolder<'a> {
    /// The engine's own name for itself.
    pub engine: &'a str,
    pub state: EngineState,
    pub holdings: Holdings,
    /// Its rate of computing prompts, if known.
    pub prefill: Option<PrefillRate>,
}

/// The service a connected engine gets from the sidecar.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum EngineState {
    /// Its blocks are found and kept.
    Serving,
    /// Nothing yet, and it has not asked: its ranks join in its first step.
    Idle,
    /// Nothing, though it asks: some ranks have not joined, or have not stated their weights.
    Unbound,
    /// Nothing: it is barred from its namespace.
    Barred,
}

/// Limits for the waits of a scheduler's requests for a producer, an engine computing their blocks; in
/// milliseconds.
#[derive(Copy, Clone, Debug)]
pub(super) struct Waits {
    /// For a producer on another node, without a sign of one; 0: no wait.
    pub(super) miss: u64,
    /// For a producer named by the request, until it promises a missing block or brings one.
    pub(super) promise: u64,
    /// For a producer with a promise of the missing block.
    pub(super) handover: u64,
}

/// The scheduler role of one engine run.
#[derive(Debug)]
pub(super) struct SchedulerRole {
    pub(super) engine: String,
    /// The tier's id for its holdings.
    pub(super) holder: HolderId,
    pub(super) run: [u8; 16],
    pub(super) world_size: u32,
    /// It states the accepted steps. Saves of an engine of an earlier version are never kept.
    pub(super) accepts: bool,
    /// The limits for the waits of its requests for a producer.
    pub(super) waits: Waits,
    /// The limits for their waits for blocks of disks and peers.
    pub(super) load_wait: LoadPatience,
    /// Its last stated rate of computing prompts.
    prefill: Option<PrefillRate>,
    service: Service,
    /// The reason to keep its saves in the namespace it is bound to; `None`: they are not kept.
    pub(super) proof: Option<Proof>,
    /// The form of this run's blocks: stated by the first rank that joins, for as long as the run lasts.
    form: Option<Form>,
    /// Digest of its table of cache groups.
    groups: Option<[u8; 16]>,
    /// Number of its last WEIGHTS.
    weights: u64,
    /// The namespace, before any salt, it was bound to since then: no other takes its place in this session.
    bound: Option<NamespaceDigest>,
    salt: Option<[u8; 16]>,
    /// Its bindings by earlier salts, oldest first.
    generations: VecDeque<Binding>,
    /// Sessions of the ranks that have joined this run.
    ranks: Vec<Option<SessionId>>,
    /// When it or one of its ranks was last seen to work.
    pub(super) worked_ms: u64,
    /// True if the engine has asked for blocks while no namespace was served to it.
    asked_in_vain: bool,
}

#[derive(Debug)]
pub(super) struct WorkerRole {
    pub(super) rank: u32,
    pub(super) shard: u32,
    pub(super) shards: u32,
    pub(super) blocks: u32,
    /// The layers of its part of a block.
    pub(super) layers: Arc<Layers>,
    /// It copies its loads itself, even if a LOAD says otherwise.
    pub(super) by_engine: bool,
    /// The last step begun by the rank before this session: its reports on loads up to this step may be lost.
    pub(super) since: u64,
    /// The last step whose loads may be written.
    pub(super) start: u64,
    /// The last step whose KV is written.
    pub(super) done: u64,
    engine: String,
    world_size: u32,
    shard_bytes: u64,
    facts: Arc<Facts>,
    /// Digest of the facts as stated.
    stated: NamespaceDigest,
    expects: Option<String>,
    groups: Option<[u8; 16]>,
    /// It has its facts from elsewhere, and must prove its KV unless it states its weights.
    proves: bool,
    /// Digest of its weights, as last stated.
    live: Option<[u8; 16]>,
    /// Number of its last WEIGHTS, and of the scheduler's WEIGHTS answered by it.
    weights: u64,
    answers: u64,
    run: Option<[u8; 16]>,
    scheduler: Option<SessionId>,
    /// The one scheduler's session whose loads this session has answered: the next scheduler numbers its
    /// loads from 1.
    followed: Option<SessionId>,
}

/// Returns the engine of a cache group, by the group's name: `ENGINE group N`.
pub(crate) fn find_whole_engine(engine: &str) -> Option<&str> {
    let (whole, number) = engine.rsplit_once(" group ")?;
    number.parse::<u32>().is_ok().then_some(whole)
}

// === impl SchedulerRole ===

impl SchedulerRole {
    /// True for `pillion bench` and `pillion doctor`, which count as no engine.
    pub(super) fn is_probe(&self) -> bool {
        self.run == PROBE_RUN
    }

    /// True if it serves one cache group of several.
    fn is_group(&self) -> bool {
        find_whole_engine(&self.engine).is_some()
    }
}

// === impl WorkerRole ===

impl WorkerRole {
    fn new(engine: String, world_size: u32, groups: Option<[u8; 16]>, hello: WorkerHello) -> Self {
        let shard_bytes = hello.block_bytes().expect("checked by the handshake");
        Self {
            rank: hello.rank,
            shard: hello.shard,
            shards: hello.shards,
            blocks: hello.blocks,
            layers: Arc::new(Layers::of_facts(&hello.facts, shard_bytes)),
            by_engine: hello.copy == Copier::Engine,
            since: 0,
            start: 0,
            done: 0,
            engine,
            world_size,
            shard_bytes,
            proves: hello.must_prove(),
            stated: namespace::digest_facts(&hello.facts),
            facts: Arc::new(hello.facts),
            expects: hello.expects,
            groups,
            live: hello.live_weights.map(|live| live.0),
            weights: 0,
            answers: 0,
            run: None,
            scheduler: None,
            followed: None,
        }
    }

    fn form(&self) -> Form {
        let parentless = namespace::has_parentless_blocks(&self.facts);
        Form { stated: self.stated, shard_bytes: self.shard_bytes, shards: self.shards, parentless }
    }
}

// === impl Engines ===

impl Index<SessionId> for Engines {
    type Output = SchedulerRole;

    /// Returns a scheduler. The caller has checked the session.
    fn index(&self, session: SessionId) -> &SchedulerRole {
        &self.schedulers[&session]
    }
}

impl Engines {
    pub(super) fn has_scheduler(&self, session: SessionId) -> bool {
        self.schedulers.contains_key(&session)
    }

    pub(super) fn has_worker(&self, session: SessionId) -> bool {
        self.workers.contains_key(&session)
    }

    /// Returns the number of sessions of both roles without probes, and of engines barred from their
    /// namespace.
    pub(super) fn counts(&self) -> (usize, usize) {
        let barred = self.schedulers.values().filter(|scheduler| scheduler.barred().is_some());
        let engines = self.schedulers.values().filter(|scheduler| !scheduler.is_probe());
        (engines.count() + self.workers.len(), barred.count())
    }

    /// Returns the number of the namespace served to a scheduler's session, if there is one.
    pub(super) fn bound_to(&self, session: SessionId) -> Option<u32> {
        Some(self.schedulers.get(&session)?.binding()?.namespace)
    }

    /// Returns the bindings of served engines, one for each published namespace and size of blocks.
    pub(super) fn bindings(&self) -> Vec<Binding> {
        let engines = self.schedulers.values().filter(|scheduler| !scheduler.is_probe());
        let bindings = engines.filter_map(SchedulerRole::binding).filter(|binding| !binding.is_private());
        let by_space: BTreeMap<Space, Binding> = bindings.map(|binding| (binding.space(), binding)).collect();
        by_space.into_values().collect()
    }

    /// Returns the seconds in which a served engine computes a block at the begin of a prompt, by the number of its
    /// namespace. Of a model with several cache groups, which are computed together, the first group counts.
    pub(super) fn block_seconds(&self) -> BTreeMap<u32, f64> {
        let is_first = |engine: &str| find_whole_engine(engine).is_none() || engine.ends_with(" group 0");
        let of = |(session, scheduler): (&SessionId, &SchedulerRole)| {
            let (rate, binding) = scheduler.prefill.zip(scheduler.binding())?;
            let tokens = self.block_tokens(*session).filter(|_| is_first(&scheduler.engine))?;
            Some((binding.namespace, rate.seconds(0, tokens.into())))
        };
        self.schedulers.iter().filter_map(of).collect()
    }

    /// Returns the ids of salted namespaces, each with its unsalted namespace.
    pub(super) fn private_namespaces(&self) -> BTreeMap<u32, NamespaceDigest> {
        let of = |scheduler: &'_ SchedulerRole| {
            let now = scheduler.binding().or(scheduler.barred()).filter(Binding::is_private);
            now.into_iter().chain(scheduler.generations.iter().copied()).collect::<Vec<_>>()
        };
        self.schedulers.values().flat_map(of).map(|bound| (bound.namespace, bound.base)).collect()
    }

    pub(super) fn holders<'a>(&'a self, dram: &'a Dram) -> impl Iterator<Item = EngineHolder<'a>> {
        let mut seen = BTreeSet::new();
        let holder = move |scheduler: &'a SchedulerRole| {
            let is_new = seen.insert(scheduler.holder);
            EngineHolder {
                engine: find_whole_engine(&scheduler.engine).unwrap_or(&scheduler.engine),
                state: scheduler.state(),
                holdings: if is_new { dram.holdings(scheduler.holder) } else { Holdings::default() },
                prefill: scheduler.prefill,
            }
        };
        self.schedulers.values().filter(|scheduler| !scheduler.is_probe()).map(holder)
    }

    /// Returns the ranks joined to a scheduler's run, each with its session; none if the scheduler is gone.
    pub(super) fn ranks(&self, scheduler: SessionId) -> impl Iterator<Item = (SessionId, &WorkerRole)> {
        let ranks = self.schedulers.get(&scheduler).map(|scheduler| scheduler.ranks.iter().flatten());
        ranks.into_iter().flatten().map(|id| (*id, &self.workers[id]))
    }

    /// Notes the rate of a scheduler's engine for computing prompts.
    pub(super) fn note_prefill(&mut self, session: SessionId, rate: Option<PrefillRate>) {
        self.schedulers.get_mut(&session).into_iter().for_each(|scheduler| scheduler.prefill = rate);
    }

    /// Returns the stated rates of engines by name, each with the bytes of a token in all cache groups.
    pub(super) fn rates(&self) -> BTreeMap<&str, (PrefillRate, f64)> {
        let mut rates: BTreeMap<&str, (PrefillRate, f64)> = BTreeMap::new();
        for (session, scheduler) in &self.schedulers {
            let Some((rate, binding)) = scheduler.prefill.zip(scheduler.binding()) else { continue };
            let Some(tokens) = self.block_tokens(*session) else { continue };
            let name = find_whole_engine(&scheduler.engine).unwrap_or(&scheduler.engine);
            let (_, bytes) = rates.entry(name).or_insert((rate, 0.0));
            *bytes += binding.block_bytes() as f64 / f64::from(tokens);
        }
        rates
    }

    /// Returns the tokens of a block, as stated by the ranks of an engine.
    fn block_tokens(&self, scheduler: SessionId) -> Option<u32> {
        let (_, worker) = self.ranks(scheduler).next()?;
        key::read_block_tokens(&worker.facts).ok()
    }

    /// Returns the limits for the waits of a scheduler's queries, for a test to change.
    #[cfg(test)]
    pub(super) fn load_wait_mut(&mut self, session: SessionId) -> &mut LoadPatience {
        &mut self.schedulers.get_mut(&session).expect("it is connected").load_wait
    }

    /// Returns the milliseconds of computing the tokens of these keys of a prompt, behind kept ones. `None`:
    /// the engine's rate or the tokens of a block are unknown.
    pub(super) fn compute_ms(&self, scheduler: SessionId, keys: Range<u32>) -> Option<f64> {
        let rate = self.schedulers.get(&scheduler)?.prefill?;
        let tokens = self.block_tokens(scheduler)?;
        let token = |key: u32| u64::from(key) * u64::from(tokens);
        Some(rate.seconds(token(keys.start), token(keys.end)) * 1e3)
    }

    /// Returns the stated rate of a scheduler's engine for computing prompts.
    pub(super) fn prefill_rate(&self, scheduler: SessionId) -> Option<PrefillRate> {
        self.schedulers.get(&scheduler)?.prefill
    }

    /// Returns the served engine of a namespace that computes a prompt of so many tokens soonest. Engines of
    /// unknown rate come last.
    pub(super) fn soonest_in(&self, namespace: NamespaceDigest, tokens: u64) -> Option<SessionId> {
        let serves = |scheduler: &SchedulerRole| scheduler.binding().is_some_and(|it| it.base == namespace);
        let served =
            self.schedulers.iter().filter(|(_, scheduler)| !scheduler.is_probe() && serves(scheduler));
        let seconds = |rate: Option<PrefillRate>| rate.map_or(f64::INFINITY, |rate| rate.seconds(0, tokens));
        let soonest =
            served.min_by(|(_, one), (_, other)| seconds(one.prefill).total_cmp(&seconds(other.prefill)));
        soonest.map(|(session, _)| *session)
    }

    /// Returns the name of a scheduler's engine.
    pub(super) fn name(&self, scheduler: SessionId) -> Option<&str> {
        let engine = &self.schedulers.get(&scheduler)?.engine;
        Some(find_whole_engine(engine).unwrap_or(engine))
    }

    /// True if every rank has joined a scheduler's run, and `is` holds for each.
    pub(super) fn every_rank(&self, scheduler: SessionId, is: impl Fn(&WorkerRole) -> bool) -> bool {
        self[scheduler].ranks.iter().all(|id| id.is_some_and(|id| is(&self.workers[&id])))
    }

    /// Returns the scheduler's session and the rank of a worker, if its scheduler has connected.
    pub(super) fn run_place(&self, worker: SessionId) -> Option<(SessionId, u32)> {
        let worker = self.workers.get(&worker)?;
        Some((worker.scheduler?, worker.rank))
    }

    fn scheduler(&mut self, session: SessionId) -> &mut SchedulerRole {
        self.schedulers.get_mut(&session).expect("the caller checked")
    }

    /// Adds a session. Returns, for a scheduler, the workers already joined to its run. Fails if the run has
    /// another scheduler.
    pub(super) fn connect_session(
        &mut self,
        session: SessionId,
        hello: Hello,
        dram: &mut Dram,
    ) -> Result<Vec<SessionId>, Violation> {
        let waits = Waits {
            miss: hello.miss_wait_ms.unwrap_or(0).into(),
            // Only an open window can be extended by a promise.
            promise: hello.promise_wait_ms.unwrap_or(AWAIT_MS).max(1).into(),
            handover: hello.handover_wait_ms.unwrap_or(PROMISED_WAIT_MS_MAX).into(),
        };
        let load_wait = LoadPatience {
            most_ms: hello.wait_max_ms.unwrap_or(QUERY_WAIT_MS_MAX).into(),
            preference: f64::from(hello.load_preference.unwrap_or(LOAD_PREFERENCE)) / 1e3,
        };
        let accepts =
            handshake::agree_version(&hello.versions()).is_ok_and(|version| version >= ACCEPT_SINCE);
        let Hello { engine, world_size, groups, role, .. } = hello;
        let groups = groups.map(|groups| groups.0);
        let run = match role {
            Role::Worker(worker) => {
                self.workers.insert(session, WorkerRole::new(engine, world_size, groups, worker));
                return Ok(Vec::new());
            }
            Role::Scheduler { run } => run,
        };
        // The ranks of a run follow one scheduler: after a move to another one, the first would not see their
        // sessions end.
        if run != PROBE_RUN && self.schedulers.values().any(|other| other.run == run) {
            return Err(
                "another scheduler serves this run: give each run of an engine an id of its own".into()
            );
        }
        let whole = find_whole_engine(&engine);
        let same = self
            .schedulers
            .values()
            .find(|other| whole.is_some() && self::find_whole_engine(&other.engine) == whole);
        let holder = same.map_or_else(|| dram.enter_holder(), |other| other.holder);
        let scheduler = SchedulerRole {
            engine,
            holder,
            run,
            world_size,
            accepts,
            waits,
            load_wait,
            prefill: None,
            service: Service::Unbound { lost_rank: false },
            proof: None,
            form: None,
            groups,
            weights: 0,
            bound: None,
            salt: None,
            generations: VecDeque::new(),
            ranks: vec![None; world_size as usize],
            worked_ms: 0,
            asked_in_vain: false,
        };
        self.schedulers.insert(session, scheduler);
        let joined = self.workers.iter().filter(|(_, worker)| worker.run == Some(run));
        Ok(joined.map(|(id, _)| *id).collect())
    }

    /// JOIN: adds a worker to a run. `since` is the last step begun before its session. Returns the run's
    /// scheduler, if it has connected. Fails for a probe's run, and for a worker of another run.
    pub(super) fn join(
        &mut self,
        session: SessionId,
        run: [u8; 16],
        since: u64,
    ) -> Result<Option<SessionId>, Violation> {
        if run == PROBE_RUN {
            return Err("a worker joins the run of 16 zero bytes, which is a probe's; draw 16 random bytes for the run".into());
        }
        let worker = self.workers.get_mut(&session).expect("the caller looked");
        if worker.run.is_some_and(|joined| joined != run) {
            return Err("the worker has joined another run before: open a new session for each run".into());
        }
        (worker.run, worker.since) = (Some(run), since);
        Ok(self.schedulers.iter().find(|(_, scheduler)| scheduler.run == run).map(|(id, _)| *id))
    }

    /// Makes a worker the rank of its run's scheduler, unbound until [`Engines::bind`]. Returns the rank, and
    /// the last step begun by it before this session. If it replaces another session, the scheduler has lost
    /// this rank. Fails if the worker does not match the scheduler or the run's other ranks.
    pub(super) fn admit_worker(
        &mut self,
        worker: SessionId,
        scheduler: SessionId,
    ) -> Result<(u32, u64), Violation> {
        let member = self.workers.get_mut(&worker).expect("the caller found it");
        let host = self.schedulers.get_mut(&scheduler).expect("the caller found it");
        if member.engine != host.engine || member.world_size != host.world_size {
            return Err("the worker and the scheduler of its run name different engines: start both with one engine id".into());
        }
        let (rank, form) = (member.rank, member.form());
        if member.groups != host.groups {
            let shown =
                |groups: Option<[u8; 16]>| groups.map_or("none".into(), |it| NamespaceDigest(it).to_string());
            return Err(format!(
                "rank {rank} states cache groups {} and its scheduler {}, so the engine's roles do not see the same KV \
                 cache: run the same vLLM and Pillion release in both, and restart the engine",
                shown(member.groups),
                shown(host.groups)
            ));
        }
        let agreed = *host.form.get_or_insert(form);
        if form != agreed {
            return Err(format!(
                "rank {rank} joins with {form}, and the other ranks of its run have {agreed}: start every rank of an \
                 engine from one configuration, and restart the engine after a change of it"
            ));
        }
        if member.followed.is_some_and(|followed| followed != scheduler) {
            return Err(
                "the scheduler of its run has connected again: its ranks must connect again, too".into()
            );
        }
        (member.scheduler, member.followed) = (Some(scheduler), Some(scheduler));
        let before = host.ranks[rank as usize].replace(worker);
        // The new session may hold other weights than the replaced one, and needs the words of the binding.
        host.change(ServiceEvent::RankJoined { replaces: before.is_some_and(|other| other != worker) });
        Ok((rank, member.since))
    }

    /// Sets a worker's fence words. Returns its scheduler, if it has one.
    pub(super) fn set_fences(&mut self, session: SessionId, start: u64, done: u64) -> Option<SessionId> {
        let worker = self.workers.get_mut(&session)?;
        (worker.start, worker.done) = (start, done);
        worker.scheduler
    }

    /// Counts the engine of a session as being at work, if it is served: a scheduler without ranks takes no
    /// share.
    pub(super) fn note_work(&mut self, now_ms: u64, session: SessionId, dram: &mut Dram) {
        let scheduler = self.workers.get(&session).map_or(Some(session), |worker| worker.scheduler);
        let Some(scheduler) = scheduler.and_then(|id| self.schedulers.get_mut(&id)) else { return };
        scheduler.worked_ms = now_ms;
        if scheduler.binding().is_some() {
            dram.work(scheduler.holder, now_ms);
        }
    }

    /// Notes a question for blocks by a scheduler without a served namespace.
    pub(super) fn note_asked_in_vain(&mut self, session: SessionId) {
        self.scheduler(session).asked_in_vain = true;
    }

    /// Removes a worker. Returns its scheduler and rank, if the rank has no session now.
    pub(super) fn remove_worker(&mut self, session: SessionId) -> Option<(SessionId, u32)> {
        let worker = self.workers.remove(&session)?;
        let scheduler = worker.scheduler?;
        let host = self.schedulers.get_mut(&scheduler)?;
        host.ranks[worker.rank as usize].take_if(|rank| *rank == session)?;
        host.change(ServiceEvent::RankLost);
        Some((scheduler, worker.rank))
    }

    pub(super) fn remove_scheduler(&mut self, session: SessionId, dram: &mut Dram) {
        let scheduler = self.schedulers.remove(&session).expect("the caller checked");
        if self.schedulers.values().all(|other| other.holder != scheduler.holder) {
            dram.leave_holder(scheduler.holder);
        }
        // Also workers replaced by another session of their rank.
        for worker in self.workers.values_mut().filter(|worker| worker.scheduler == Some(session)) {
            worker.scheduler = None;
        }
    }
}
