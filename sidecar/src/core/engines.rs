//! Who belongs together: schedulers, workers, the run they share and the namespace they serve.
//!
//! Others look at an engine as it is, and change it by the methods here alone.

mod bars;
mod binding;
mod proofs;
mod service;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::{Index, Range};
use std::sync::Arc;

use shm_protocol::ACCEPT_SINCE;
use shm_protocol::handshake::{self, Copier, Hello, PROBE_RUN, Role, WorkerHello};
use shm_protocol::key::NamespaceDigest;
use shm_protocol::layout::{AWAIT_MS, LOAD_PREFERENCE, PROMISED_WAIT_MS_MAX, QUERY_WAIT_MS_MAX};
use shm_protocol::namespace::{self, Facts};
use shm_protocol::prefill::PrefillRate;
use tiers::dram::{Dram, HolderId, Holdings};

pub use self::bars::Barred;
use self::bars::Bars;
use self::proofs::Proofs;
pub use self::proofs::{Proof, Standing};
use self::service::{Service, ServiceEvent};
use super::namespaces::{Binding, Form, Space};
use super::worth::LoadPatience;
use super::{SessionId, Violation};
use crate::compare::Layers;

/// The fact with the tokens of a block.
const BLOCK_TOKENS: &str = "block_tokens";

/// The sessions of all engines.
#[derive(Debug, Default)]
pub(super) struct Engines {
    schedulers: BTreeMap<SessionId, Scheduler>,
    workers: BTreeMap<SessionId, Worker>,
    bars: Bars,
    proofs: Proofs,
}

/// What one engine holds.
#[derive(Debug)]
pub struct Holder<'a> {
    /// As it calls itself.
    pub engine: &'a str,
    pub state: EngineState,
    pub holdings: Holdings,
    /// Its rate of computing prompts, if known.
    pub prefill: Option<PrefillRate>,
}

/// What an engine that is connected gets of the sidecar.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum EngineState {
    /// Its blocks are found and kept.
    Serving,
    /// Nothing yet, and it has not asked: its ranks join in its first step.
    Idle,
    /// Nothing: it asks, and ranks of it have not joined, or have not said what they compute with.
    Unbound,
    /// Nothing: its namespace is closed to it.
    Barred,
}

/// How long a scheduler's requests wait for a producer, in milliseconds.
#[derive(Copy, Clone, Debug)]
pub(super) struct Waits {
    /// On another node, where nobody said that there is one; 0: not at all.
    pub(super) miss: u64,
    /// That was said to be there, until it promises what is missing, or brings a block of it.
    pub(super) promise: u64,
    /// That has promised it.
    pub(super) handover: u64,
}

/// The scheduler role of one engine run.
#[derive(Debug)]
pub(super) struct Scheduler {
    pub(super) engine: String,
    /// By which the tier counts what it holds.
    pub(super) holder: HolderId,
    pub(super) run: [u8; 16],
    pub(super) world_size: u32,
    /// It says which steps it accepted. What one of an earlier version saves is never kept.
    pub(super) accepts: bool,
    /// How long its requests wait for a producer.
    pub(super) waits: Waits,
    /// And for blocks of disks and peers.
    pub(super) load_wait: LoadPatience,
    /// Its last stated rate of computing prompts.
    prefill: Option<PrefillRate>,
    service: Service,
    /// Why what it saves is kept where it is bound; `None`: it is not.
    pub(super) proof: Option<Proof>,
    /// What the blocks of this run are: the first rank that joins says it, for as long as the run lasts.
    form: Option<Form>,
    /// Digest of its table of cache groups.
    groups: Option<[u8; 16]>,
    /// Number of its last WEIGHTS.
    weights: u64,
    /// The namespace, before any salt, that it was bound to since then: no other takes its place in this session.
    bound: Option<NamespaceDigest>,
    salt: Option<[u8; 16]>,
    /// What earlier salts bound it to, oldest first.
    generations: VecDeque<Binding>,
    /// Sessions of the ranks that have joined this run.
    ranks: Vec<Option<SessionId>>,
    /// When it or a rank of it was last seen to work.
    pub(super) worked_ms: u64,
    /// Whether the engine has asked for blocks while no namespace was served to it.
    asked_in_vain: bool,
}

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) rank: u32,
    pub(super) shard: u32,
    pub(super) shards: u32,
    pub(super) blocks: u32,
    /// What its part of a block is made of.
    pub(super) layers: Arc<Layers>,
    /// It copies its loads itself, whatever a LOAD says.
    pub(super) by_engine: bool,
    /// The last step that the rank began before this session: what it reported of loads up to there may be lost.
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
    /// It has its facts from others, unless it said which weights it holds.
    proves: bool,
    /// Digest of the weights that it holds, as it said last.
    live: Option<[u8; 16]>,
    /// Number of its last WEIGHTS, and of the scheduler's that this answered.
    weights: u64,
    answers: u64,
    run: Option<[u8; 16]>,
    scheduler: Option<SessionId>,
    /// The one scheduler's session whose loads its session has answered: the next one numbers its own from 1.
    followed: Option<SessionId>,
}

/// The engine of which this is a cache group, by the name that groups have: `ENGINE group N`.
pub(crate) fn whole(engine: &str) -> Option<&str> {
    let (whole, number) = engine.rsplit_once(" group ")?;
    number.parse::<u32>().is_ok().then_some(whole)
}

// === impl Scheduler ===

impl Scheduler {
    /// True for `pillion bench` and `pillion doctor`, which count as no engine.
    pub(super) fn is_probe(&self) -> bool {
        self.run == PROBE_RUN
    }

    /// Whether it serves one cache group of several.
    fn is_group(&self) -> bool {
        whole(&self.engine).is_some()
    }
}

// === impl Worker ===

impl Worker {
    fn new(engine: String, world_size: u32, groups: Option<[u8; 16]>, hello: WorkerHello) -> Self {
        let shard_bytes = hello.block_bytes().expect("checked by the handshake");
        Self {
            rank: hello.rank,
            shard: hello.shard,
            shards: hello.shards,
            blocks: hello.blocks,
            layers: Arc::new(Layers::of(&hello.facts, shard_bytes)),
            by_engine: hello.copy == Copier::Engine,
            since: 0,
            start: 0,
            done: 0,
            engine,
            world_size,
            shard_bytes,
            proves: hello.must_prove(),
            stated: namespace::digest(&hello.facts),
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
    type Output = Scheduler;

    /// A scheduler whose session the caller has looked at.
    fn index(&self, session: SessionId) -> &Scheduler {
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

    /// Sessions of both roles but probes, and engines that a namespace is closed to.
    pub(super) fn counts(&self) -> (usize, usize) {
        let barred = self.schedulers.values().filter(|scheduler| scheduler.barred().is_some());
        let engines = self.schedulers.values().filter(|scheduler| !scheduler.is_probe());
        (engines.count() + self.workers.len(), barred.count())
    }

    /// Number of the namespace that is served to a scheduler's session, if one is.
    pub(super) fn bound_to(&self, session: SessionId) -> Option<u32> {
        Some(self.schedulers.get(&session)?.binding()?.namespace)
    }

    /// Ids of namespaces that salts made of others, with those.
    pub(super) fn private_namespaces(&self) -> BTreeMap<u32, NamespaceDigest> {
        let of = |scheduler: &'_ Scheduler| {
            let now = scheduler.binding().or(scheduler.barred()).filter(Binding::is_private);
            now.into_iter().chain(scheduler.generations.iter().copied()).collect::<Vec<_>>()
        };
        self.schedulers.values().flat_map(of).map(|bound| (bound.namespace, bound.base)).collect()
    }

    pub(super) fn holders<'a>(&'a self, dram: &'a Dram) -> impl Iterator<Item = Holder<'a>> {
        let mut seen = BTreeSet::new();
        let holder = move |scheduler: &'a Scheduler| {
            let is_new = seen.insert(scheduler.holder);
            Holder {
                engine: whole(&scheduler.engine).unwrap_or(&scheduler.engine),
                state: scheduler.state(),
                holdings: if is_new { dram.holdings(scheduler.holder) } else { Holdings::default() },
                prefill: scheduler.prefill,
            }
        };
        self.schedulers.values().filter(|scheduler| !scheduler.is_probe()).map(holder)
    }

    /// The ranks that have joined a scheduler's run, each with its session; none where the scheduler is gone.
    pub(super) fn ranks(&self, scheduler: SessionId) -> impl Iterator<Item = (SessionId, &Worker)> {
        let ranks = self.schedulers.get(&scheduler).map(|scheduler| scheduler.ranks.iter().flatten());
        ranks.into_iter().flatten().map(|id| (*id, &self.workers[id]))
    }

    /// A scheduler's engine computes prompts at this rate.
    pub(super) fn note_prefill(&mut self, session: SessionId, rate: Option<PrefillRate>) {
        self.schedulers.get_mut(&session).into_iter().for_each(|scheduler| scheduler.prefill = rate);
    }

    /// The stated rates of engines by name, each with the bytes of a token in all cache groups.
    pub(super) fn rates(&self) -> BTreeMap<&str, (PrefillRate, f64)> {
        let mut rates: BTreeMap<&str, (PrefillRate, f64)> = BTreeMap::new();
        for (session, scheduler) in &self.schedulers {
            let Some((rate, binding)) = scheduler.prefill.zip(scheduler.binding()) else { continue };
            let Some(tokens) = self.block_tokens(*session) else { continue };
            let name = whole(&scheduler.engine).unwrap_or(&scheduler.engine);
            let (_, bytes) = rates.entry(name).or_insert((rate, 0.0));
            *bytes += binding.block_bytes() as f64 / f64::from(tokens.max(1));
        }
        rates
    }

    /// Tokens of a block, as the ranks of an engine state them.
    fn block_tokens(&self, scheduler: SessionId) -> Option<u32> {
        let (_, worker) = self.ranks(scheduler).next()?;
        worker.facts.get(BLOCK_TOKENS)?.parse().ok()
    }

    /// How long a scheduler's queries wait, to be changed by a test.
    #[cfg(test)]
    pub(super) fn load_wait_mut(&mut self, session: SessionId) -> &mut LoadPatience {
        &mut self.schedulers.get_mut(&session).expect("it is connected").load_wait
    }

    /// Milliseconds of computing the tokens of these keys of a prompt, behind kept ones; none: the engine's rate or the tokens of a block
    /// are not known.
    pub(super) fn compute_ms(&self, scheduler: SessionId, keys: Range<u32>) -> Option<f64> {
        let rate = self.schedulers.get(&scheduler)?.prefill?;
        let tokens = self.block_tokens(scheduler)?;
        let token = |key: u32| u64::from(key) * u64::from(tokens);
        Some(rate.seconds(token(keys.start), token(keys.end)) * 1e3)
    }

    /// The name of a scheduler's engine.
    pub(super) fn name(&self, scheduler: SessionId) -> Option<&str> {
        let engine = &self.schedulers.get(&scheduler)?.engine;
        Some(whole(engine).unwrap_or(engine))
    }

    /// Whether every rank has joined a scheduler's run and is so.
    pub(super) fn every_rank(&self, scheduler: SessionId, is: impl Fn(&Worker) -> bool) -> bool {
        self[scheduler].ranks.iter().all(|id| id.is_some_and(|id| is(&self.workers[&id])))
    }

    /// The session and the rank of a worker's run, if its scheduler has connected.
    pub(super) fn place(&self, worker: SessionId) -> Option<(SessionId, u32)> {
        let worker = self.workers.get(&worker)?;
        Some((worker.scheduler?, worker.rank))
    }

    fn scheduler(&mut self, session: SessionId) -> &mut Scheduler {
        self.schedulers.get_mut(&session).expect("the caller checked")
    }

    /// A session begins. Of a scheduler's: the workers that have joined its run already.
    pub(super) fn connect(
        &mut self,
        session: SessionId,
        hello: Hello,
        dram: &mut Dram,
    ) -> Result<Vec<SessionId>, Violation> {
        let waits = Waits {
            miss: hello.miss_wait_ms.unwrap_or(0).into(),
            // A window must be open to be extended.
            promise: hello.promise_wait_ms.unwrap_or(AWAIT_MS).max(1).into(),
            handover: hello.handover_wait_ms.unwrap_or(PROMISED_WAIT_MS_MAX).into(),
        };
        let load_wait = LoadPatience {
            most_ms: hello.wait_max_ms.unwrap_or(QUERY_WAIT_MS_MAX).into(),
            preference: f64::from(hello.load_preference.unwrap_or(LOAD_PREFERENCE)) / 1e3,
        };
        let accepts = handshake::agree(&hello.versions()).is_ok_and(|version| version >= ACCEPT_SINCE);
        let Hello { engine, world_size, groups, role, .. } = hello;
        let groups = groups.map(|groups| groups.0);
        let run = match role {
            Role::Worker(worker) => {
                self.workers.insert(session, Worker::new(engine, world_size, groups, worker));
                return Ok(Vec::new());
            }
            Role::Scheduler { run } => run,
        };
        // The ranks of a run follow one scheduler: were they handed on, the first would keep sessions that end unseen.
        if run != PROBE_RUN && self.schedulers.values().any(|other| other.run == run) {
            return Err(
                "another scheduler serves this run: give each run of an engine an id of its own".into()
            );
        }
        let whole = whole(&engine);
        let same =
            self.schedulers.values().find(|other| whole.is_some() && self::whole(&other.engine) == whole);
        let holder = same.map_or_else(|| dram.enter(), |other| other.holder);
        let scheduler = Scheduler {
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

    /// JOIN: a worker takes part in a run, having begun the step `since` before its session. The run's scheduler, which may not have
    /// connected yet.
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

    /// Takes a worker that has joined the run of a scheduler into it, unbound until [`Engines::bind`]. Returns its rank and the last
    /// step that the rank began before this session. A scheduler in whose run it takes another session's place has lost that rank.
    pub(super) fn admit(&mut self, worker: SessionId, scheduler: SessionId) -> Result<(u32, u64), Violation> {
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
        // It may hold other weights than a session in whose place it comes, and is to be shown the words.
        host.change(ServiceEvent::RankJoined { replaces: before.is_some_and(|other| other != worker) });
        Ok((rank, member.since))
    }

    /// A worker's fence words; its scheduler, if it has one.
    pub(super) fn set_fences(&mut self, session: SessionId, start: u64, done: u64) -> Option<SessionId> {
        let worker = self.workers.get_mut(&session)?;
        (worker.start, worker.done) = (start, done);
        worker.scheduler
    }

    /// Whoever says something or has done a step is at work, once it is served: a scheduler without ranks takes no share.
    pub(super) fn note_work(&mut self, now_ms: u64, session: SessionId, dram: &mut Dram) {
        let scheduler = self.workers.get(&session).map_or(Some(session), |worker| worker.scheduler);
        let Some(scheduler) = scheduler.and_then(|id| self.schedulers.get_mut(&id)) else { return };
        scheduler.worked_ms = now_ms;
        if scheduler.binding().is_some() {
            dram.work(scheduler.holder, now_ms);
        }
    }

    /// A scheduler that nothing is served to has asked for blocks.
    pub(super) fn note_asked_in_vain(&mut self, session: SessionId) {
        self.scheduler(session).asked_in_vain = true;
    }

    /// A worker is gone. The scheduler and the rank that it leaves without one.
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
            dram.leave(scheduler.holder);
        }
        // Also those whose place another session of their rank took.
        for worker in self.workers.values_mut().filter(|worker| worker.scheduler == Some(session)) {
            worker.scheduler = None;
        }
    }
}
