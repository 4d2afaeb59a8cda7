//! Who belongs together: schedulers, workers, the run they share and the namespace they serve.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

use shm_protocol::handshake::{Copier, Hello, RANKS_MAX, Role};
use shm_protocol::key::NamespaceDigest;
use shm_protocol::namespace;
use tiers::dram::QuotaId;

use super::logs::Log;
use super::windows::Patience;
use super::{Action, Core, SessionId, Violation, run_of};

/// Namespaces that are remembered, of engines past and present: at 40 bytes each, 3 MB.
const NAMESPACES_MAX: usize = 65_536;

/// Salted namespaces of one session that are remembered, for an engine that connects again: it names its last salt.
/// One engine's resets thus leave the others their namespaces.
const GENERATIONS_MAX: usize = 16;

/// The scheduler role of one engine run.
#[derive(Debug)]
pub(super) struct Scheduler {
    pub(super) engine: String,
    pub(super) run: [u8; 16],
    pub(super) world_size: u32,
    pub(super) patience: Patience,
    /// What the blocks of this run are: the first rank that joins says it, for as long as the run lasts.
    form: Option<Form>,
    /// What is served to it, while every rank takes part.
    pub(super) binding: Option<Binding>,
    pub(super) salt: Option<[u8; 16]>,
    /// Namespaces of earlier salts, oldest first.
    generations: VecDeque<Space>,
    /// Sessions of the ranks that have joined this run.
    pub(super) ranks: Vec<Option<SessionId>>,
    pub(super) logs: BTreeMap<u32, Log>,
    /// Logs with a lease.
    pub(super) leased: BTreeSet<u32>,
    /// Saves and loads that have not ended.
    pub(super) saves: usize,
    pub(super) loads: usize,
    /// Keys in all logs; bounded by the arena that holds them.
    pub(super) keys: usize,
    /// Operations, in order, that some rank has not started yet.
    pub(super) waiting: BTreeSet<u64>,
    /// Saves whose copies ended and that wait for a drained ring.
    pub(super) copied: Vec<u64>,
    /// The newest operation read from its ring.
    pub(super) newest: u64,
    /// LOADED of ranks whose rings were read before this one's LOAD: operation, rank, well.
    pub(super) early: Vec<(u64, u32, bool)>,
}

/// What the blocks of one rank are: ranks of one run agree on it.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
struct Form {
    namespace: NamespaceDigest,
    shard_bytes: u64,
    shards: u32,
}

/// Blocks of one namespace and one size. Blocks of another size, left by an earlier life or a mistaken engine, are found by
/// nobody who could not load them.
#[derive(Copy, Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Space {
    pub(super) digest: NamespaceDigest,
    pub(super) block_bytes: u64,
}

/// What an engine's blocks are.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) struct Binding {
    pub(super) base: NamespaceDigest,
    pub(super) digest: NamespaceDigest,
    pub(super) namespace: u32,
    /// What its blocks count to: the same for every salt.
    pub(super) quota: Option<QuotaId>,
    pub(super) shard_bytes: u64,
    pub(super) shards: u32,
}

/// One rank.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) engine: String,
    pub(super) world_size: u32,
    pub(super) rank: u32,
    pub(super) shard: u32,
    pub(super) shards: u32,
    pub(super) blocks: u32,
    pub(super) shard_bytes: u64,
    /// It copies its loads itself, whatever a LOAD says.
    pub(super) by_engine: bool,
    pub(super) namespace: NamespaceDigest,
    pub(super) run: Option<[u8; 16]>,
    pub(super) scheduler: Option<SessionId>,
    /// The last step that the rank began before this session: what it reported of loads up to there may be lost.
    pub(super) since: u64,
    pub(super) start: u64,
    pub(super) done: u64,
}

/// Short ids of the namespaces seen in this epoch.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    /// The id of each, and when it was last asked for, counted in questions.
    ids: BTreeMap<Space, (u32, u64)>,
    /// Digests of those whose blocks peers are told of, by id. Kept when a namespace is forgotten: its blocks are still there,
    /// and peers are to be told when they go. The first [`NAMESPACES_MAX`] of an epoch.
    shared: BTreeMap<u32, NamespaceDigest>,
    next: u32,
    asked: u64,
}

// === impl Namespaces ===

impl Namespaces {
    /// Ids never repeat, so that blocks of a forgotten namespace are found by nobody and go by their age.
    fn id(&mut self, space: Space) -> Option<u32> {
        self.asked += 1;
        if let Some((id, asked)) = self.ids.get_mut(&space) {
            *asked = self.asked;
            return Some(*id);
        }
        if self.ids.len() >= NAMESPACES_MAX {
            let oldest = self.ids.iter().min_by_key(|(_, (_, asked))| *asked).map(|(space, _)| *space);
            oldest.map(|space| self.ids.remove(&space));
        }
        let id = self.next;
        self.next = self.next.checked_add(1)?;
        self.ids.insert(space, (id, self.asked));
        Some(id)
    }

    /// The id of a namespace whose blocks were found in the pool; `None` rather than forget another for it.
    pub(super) fn adopt(&mut self, space: Space) -> Option<u32> {
        let known = self.ids.contains_key(&space) || self.ids.len() < NAMESPACES_MAX;
        let id = if known { self.id(space) } else { None };
        id.iter().for_each(|id| self.share(*id, space.digest));
        id
    }

    /// Peers may have blocks of this namespace, and may be told of those that are here.
    fn share(&mut self, id: u32, digest: NamespaceDigest) {
        if self.shared.len() < NAMESPACES_MAX {
            self.shared.insert(id, digest);
        }
    }

    /// The digest of a namespace whose blocks peers are told of.
    pub(super) fn shared(&self, id: u32) -> Option<&NamespaceDigest> {
        self.shared.get(&id)
    }

    /// The id of a namespace that has one.
    pub(super) fn known(&self, space: Space) -> Option<u32> {
        self.ids.get(&space).map(|(id, _)| *id)
    }

    fn forget(&mut self, space: Space) {
        self.ids.remove(&space);
    }
}

// === impl Form ===

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { namespace, shard_bytes, shards } = self;
        write!(f, "blocks of {shards} shards of {shard_bytes} bytes in namespace {namespace}")
    }
}

// === impl Binding ===

impl Binding {
    /// Bytes of a whole block, all shards.
    pub(super) fn block_bytes(&self) -> u64 {
        self.shard_bytes * u64::from(self.shards)
    }

    /// Whether no other engine can have these blocks.
    pub(super) fn is_private(&self) -> bool {
        self.digest != self.base
    }

    fn space(&self) -> Space {
        Space { digest: self.digest, block_bytes: self.block_bytes() }
    }
}

// === impl Worker ===

impl Worker {
    fn form(&self) -> Form {
        Form { namespace: self.namespace, shard_bytes: self.shard_bytes, shards: self.shards }
    }
}

// === impl Core ===

impl Core {
    pub(super) fn connect(
        &mut self,
        session: SessionId,
        hello: Hello,
        namespace: Option<NamespaceDigest>,
        out: &mut Vec<Action>,
    ) {
        let run = run_of(&hello);
        let Hello { engine, world_size, miss_wait_ms, role, .. } = hello;
        if let (Role::Worker(worker), Some(namespace)) = (role, namespace) {
            let shard_bytes = worker.block_bytes().expect("checked by the handshake");
            let worker = Worker {
                engine,
                world_size,
                rank: worker.rank,
                shard: worker.shard,
                shards: worker.shards,
                blocks: worker.blocks,
                shard_bytes,
                by_engine: worker.copy == Copier::Engine,
                namespace,
                run: None,
                scheduler: None,
                since: 0,
                start: 0,
                done: 0,
            };
            self.workers.insert(session, worker);
        } else if let Some(run) = run {
            self.add_scheduler(session, engine, (run, world_size), Patience::new(miss_wait_ms), out);
        }
    }

    fn add_scheduler(
        &mut self,
        session: SessionId,
        engine: String,
        (run, world_size): ([u8; 16], u32),
        patience: Patience,
        out: &mut Vec<Action>,
    ) {
        // The ranks of a run follow one scheduler: were they handed on, the first would keep sessions that end unseen.
        if self.schedulers.values().any(|other| other.run == run) {
            let reason =
                "another scheduler serves this run; each run of an engine needs an id of its own".into();
            out.push(Action::Close { session, reason });
            return;
        }
        let scheduler = Scheduler {
            engine,
            run,
            world_size,
            patience,
            form: None,
            binding: None,
            salt: None,
            generations: VecDeque::new(),
            ranks: vec![None; world_size as usize],
            logs: BTreeMap::new(),
            leased: BTreeSet::new(),
            saves: 0,
            loads: 0,
            keys: 0,
            waiting: BTreeSet::new(),
            copied: Vec::new(),
            newest: 0,
            early: Vec::new(),
        };
        self.schedulers.insert(session, scheduler);
        let joined = self.workers.iter().filter(|(_, worker)| worker.run == Some(run));
        let joined: Vec<SessionId> = joined.map(|(id, _)| *id).collect();
        for worker in joined {
            if let Err(reason) = self.admit(worker, session, out) {
                out.push(Action::Close { session: worker, reason });
            }
        }
    }

    /// What the engine of `session` serves, once every rank has joined its run. Ranks that have not are no evidence: another
    /// engine may go by the same name.
    pub(super) fn binding(&mut self, session: SessionId) -> Option<Binding> {
        let scheduler = &self.schedulers[&session];
        if scheduler.binding.is_none() && scheduler.ranks.iter().all(Option::is_some) {
            let Form { namespace: base, shard_bytes, shards } = scheduler.form.expect("a rank has joined");
            let digest = scheduler.salt.map_or(base, |salt| namespace::salted(base, salt));
            let quota = self.quota_of(base);
            let mut bound = Binding { base, digest, namespace: 0, quota, shard_bytes, shards };
            bound.namespace = self.namespaces.id(bound.space())?;
            if !bound.is_private() {
                self.namespaces.share(bound.namespace, digest);
            }
            self.schedulers.get_mut(&session).expect("looked up above").binding = Some(bound);
        }
        self.schedulers[&session].binding
    }

    /// JOIN: a worker takes part in a run. The scheduler may not have connected yet.
    pub(super) fn join(
        &mut self,
        session: SessionId,
        run: [u8; 16],
        since: u64,
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        let worker = self.workers.get_mut(&session).expect("the caller looked");
        if worker.run.is_some_and(|joined| joined != run) {
            return Err("a worker joins one run in the life of its session".into());
        }
        (worker.run, worker.since) = (Some(run), since);
        let scheduler = self.schedulers.iter().find(|(_, scheduler)| scheduler.run == run).map(|(id, _)| *id);
        match scheduler {
            Some(scheduler) => self.admit(session, scheduler, out),
            None => Ok(()),
        }
    }

    fn admit(
        &mut self,
        worker: SessionId,
        scheduler: SessionId,
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        let member = self.workers.get_mut(&worker).expect("the caller found it");
        let host = self.schedulers.get_mut(&scheduler).expect("the caller found it");
        if member.engine != host.engine || member.world_size != host.world_size {
            return Err("the worker names another engine than the scheduler whose run it joins".into());
        }
        let (rank, since, form) = (member.rank, member.since, member.form());
        let agreed = *host.form.get_or_insert(form);
        if form != agreed {
            return Err(format!(
                "rank {rank} joins with {form} in a run whose ranks have {agreed}; start every rank of an engine from one \
                 configuration, and an engine whose configuration changed anew"
            ));
        }
        member.scheduler = Some(scheduler);
        host.ranks[rank as usize] = Some(worker);
        self.begin_unbound_saves(scheduler, out);
        self.end_loads_of_rank(scheduler, rank, since);
        self.dispatch(scheduler, out);
        Ok(())
    }

    /// SALT: a new generation of the namespace. Blocks of the old one are never served to this engine again.
    pub(super) fn salt(
        &mut self,
        session: SessionId,
        salt: [u8; 16],
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        self.drop_unbound_saves(session, out);
        // Logs without a lease, of which there may be 65,536, cost nothing: each lease was paid for by a query.
        self.end_waits(session);
        for log in self.schedulers[&session].leased.clone() {
            self.release(session, log)?;
        }
        let scheduler = self.schedulers.get_mut(&session).expect("the caller checked");
        scheduler.salt = Some(salt);
        if let Some(ended) = scheduler.binding.take().filter(Binding::is_private) {
            scheduler.generations.push_back(ended.space());
        }
        if scheduler.generations.len() > GENERATIONS_MAX {
            scheduler.generations.pop_front().into_iter().for_each(|space| self.namespaces.forget(space));
        }
        Ok(())
    }

    pub(super) fn fences(&mut self, session: SessionId, start: u64, done: u64, out: &mut Vec<Action>) {
        let Some(worker) = self.workers.get_mut(&session) else { return };
        (worker.start, worker.done) = (start, done);
        if let Some(scheduler) = worker.scheduler {
            self.dispatch(scheduler, out);
        }
    }

    /// Starts, for every waiting operation, the copies whose rank has joined and passed the fence.
    pub(super) fn dispatch(&mut self, session: SessionId, out: &mut Vec<Action>) {
        let Some(scheduler) = self.schedulers.get(&session) else { return };
        let waiting: Vec<u64> = scheduler.waiting.iter().copied().collect();
        for op in waiting {
            self.dispatch_save(session, op, out);
            self.dispatch_load(session, op, out);
        }
    }

    pub(super) fn disconnect(&mut self, session: SessionId, out: &mut Vec<Action>) {
        if let Some(worker) = self.workers.remove(&session) {
            self.lose_worker(&worker, session, out);
        } else if self.schedulers.contains_key(&session) {
            self.lose_scheduler(session, out);
        }
    }

    fn lose_worker(&mut self, worker: &Worker, session: SessionId, out: &mut Vec<Action>) {
        let Some(scheduler) = worker.scheduler else { return };
        let Some(host) = self.schedulers.get_mut(&scheduler) else { return };
        if host.ranks[worker.rank as usize] != Some(session) {
            return;
        }
        host.ranks[worker.rank as usize] = None;
        host.binding = None;
        self.fail_saves_of_rank(scheduler, worker.rank, out);
        self.end_loads_of_rank(scheduler, worker.rank, u64::MAX);
    }

    fn lose_scheduler(&mut self, session: SessionId, out: &mut Vec<Action>) {
        self.abandon_saves(session, out);
        self.abandon_loads(session);
        self.end_waits(session);
        let scheduler = self.schedulers.remove(&session).expect("the caller checked");
        for log in scheduler.logs.into_values() {
            if let Some(lease) = log.lease {
                // Expired meanwhile, at worst.
                let _ = self.dram.release(lease.id, session);
            }
        }
        // Also those whose place another session of their rank took.
        for worker in self.workers.values_mut().filter(|worker| worker.scheduler == Some(session)) {
            worker.scheduler = None;
        }
    }
}

/// Every rank of an engine, one bit each.
pub(super) fn all_ranks(world_size: u32) -> u64 {
    assert!((1..=RANKS_MAX).contains(&world_size), "checked by the handshake");
    u64::MAX >> (RANKS_MAX - world_size)
}
