//! Who belongs together: schedulers, workers, the run they share and the namespace they serve.

use std::collections::VecDeque;
use std::sync::Arc;

use shm_protocol::handshake::{Copier, Hello, RANKS_MAX, Role};
use shm_protocol::key::NamespaceDigest;
use shm_protocol::namespace::{self, Facts};
use tiers::dram::HolderId;

use super::key_logs::KeyLogs;
use super::namespaces::{Binding, Form, Space};
use super::pending::Pending;
use super::windows::Patience;
use super::{Action, Core, SessionId, Violation, run_of};
use crate::compare::PageForm;

/// The scheduler role of one engine run.
#[derive(Debug)]
pub(super) struct Scheduler {
    pub(super) engine: String,
    /// By which the tier counts what it holds.
    pub(super) holder: HolderId,
    pub(super) run: [u8; 16],
    pub(super) world_size: u32,
    pub(super) patience: Patience,
    /// What the blocks of this run are: the first rank that joins says it, for as long as the run lasts.
    pub(super) form: Option<Form>,
    /// Digest of its table of cache groups.
    groups: Option<[u8; 16]>,
    /// Number of its last WEIGHTS.
    pub(super) weights: u64,
    /// The namespace, before any salt, that it was bound to since then: no other takes its place in this session.
    pub(super) bound: Option<NamespaceDigest>,
    /// What is served to it, while every rank takes part.
    pub(super) binding: Option<Binding>,
    /// What would be, but is closed to this run; see [`super::checks`].
    pub(super) barred: Option<Binding>,
    pub(super) salt: Option<[u8; 16]>,
    /// Namespaces of earlier salts, oldest first.
    pub(super) generations: VecDeque<Space>,
    /// Sessions of the ranks that have joined this run.
    pub(super) ranks: Vec<Option<SessionId>>,
    pub(super) logs: KeyLogs,
    pub(super) pending: Pending,
}

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) engine: String,
    pub(super) world_size: u32,
    pub(super) rank: u32,
    pub(super) shard: u32,
    pub(super) shards: u32,
    pub(super) blocks: u32,
    pub(super) shard_bytes: u64,
    /// What its part of a block is made of.
    pub(super) page: Arc<PageForm>,
    /// It copies its loads itself, whatever a LOAD says.
    pub(super) by_engine: bool,
    pub(super) facts: Arc<Facts>,
    /// Digest of the facts as stated.
    stated: NamespaceDigest,
    pub(super) expects: Option<String>,
    groups: Option<[u8; 16]>,
    /// Digest of the weights that it holds, as it said last.
    pub(super) live: Option<[u8; 16]>,
    /// Number of its last WEIGHTS, and of the scheduler's that this answered.
    pub(super) weights: u64,
    pub(super) answers: u64,
    pub(super) run: Option<[u8; 16]>,
    pub(super) scheduler: Option<SessionId>,
    /// The last step that the rank began before this session: what it reported of loads up to there may be lost.
    pub(super) since: u64,
    pub(super) start: u64,
    pub(super) done: u64,
}

// === impl Worker ===

impl Worker {
    fn form(&self) -> Form {
        Form { stated: self.stated, shard_bytes: self.shard_bytes, shards: self.shards }
    }
}

// === impl Core ===

impl Core {
    pub(super) fn connect(&mut self, session: SessionId, hello: Hello, out: &mut Vec<Action>) {
        let run = run_of(&hello);
        let Hello { engine, world_size, miss_wait_ms, groups, role, .. } = hello;
        let groups = groups.map(|groups| groups.0);
        if let Role::Worker(worker) = role {
            let shard_bytes = worker.block_bytes().expect("checked by the handshake");
            let worker = Worker {
                engine,
                world_size,
                rank: worker.rank,
                shard: worker.shard,
                shards: worker.shards,
                blocks: worker.blocks,
                shard_bytes,
                page: Arc::new(PageForm::of(&worker.facts, shard_bytes)),
                by_engine: worker.copy == Copier::Engine,
                stated: namespace::digest(&worker.facts),
                facts: Arc::new(worker.facts),
                expects: worker.expects,
                groups,
                live: worker.live_weights.map(|live| live.0),
                weights: 0,
                answers: 0,
                run: None,
                scheduler: None,
                since: 0,
                start: 0,
                done: 0,
            };
            self.workers.insert(session, worker);
        } else if let Some(run) = run {
            let patience = Patience::new(miss_wait_ms);
            self.add_scheduler(session, engine, (run, world_size, groups), patience, out);
        }
    }

    fn add_scheduler(
        &mut self,
        session: SessionId,
        engine: String,
        (run, world_size, groups): ([u8; 16], u32, Option<[u8; 16]>),
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
            holder: self.dram.enter(),
            run,
            world_size,
            patience,
            form: None,
            groups,
            weights: 0,
            bound: None,
            binding: None,
            barred: None,
            salt: None,
            generations: VecDeque::new(),
            ranks: vec![None; world_size as usize],
            logs: KeyLogs::default(),
            pending: Pending::default(),
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

    /// A scheduler whose session the caller has looked at.
    pub(super) fn scheduler(&mut self, session: SessionId) -> &mut Scheduler {
        self.schedulers.get_mut(&session).expect("the caller checked")
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
        if member.groups != host.groups {
            let shown =
                |groups: Option<[u8; 16]>| groups.map_or("none".into(), |it| NamespaceDigest(it).to_string());
            return Err(format!(
                "rank {rank} states cache groups {} and its scheduler {}: the engine's roles do not see the same KV cache; run the \
                 same vLLM and Pillion release in both, and start the engine anew",
                shown(member.groups),
                shown(host.groups)
            ));
        }
        let agreed = *host.form.get_or_insert(form);
        if form != agreed {
            return Err(format!(
                "rank {rank} joins with {form} in a run whose ranks have {agreed}; start every rank of an engine from one \
                 configuration, and an engine whose configuration changed anew"
            ));
        }
        member.scheduler = Some(scheduler);
        // It may hold other weights than a session in whose place it comes, and is to be shown the words.
        (host.ranks[rank as usize], host.binding) = (Some(worker), None);
        self.bind(scheduler, out);
        self.end_loads_of_rank(scheduler, rank, since);
        self.dispatch(scheduler, out);
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
        let mut left = self.claims_max;
        for op in scheduler.pending.waiting() {
            left -= self.dispatch_save(session, op, left, out);
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
        (host.binding, host.barred) = (None, None);
        self.fail_saves(scheduler, out);
        self.end_loads_of_rank(scheduler, worker.rank, u64::MAX);
    }

    fn lose_scheduler(&mut self, session: SessionId, out: &mut Vec<Action>) {
        self.abandon_saves(session, out);
        self.abandon_loads(session);
        self.end_waits(session);
        let scheduler = self.schedulers.remove(&session).expect("the caller checked");
        self.dram.leave(scheduler.holder);
        self.checks.forget(session);
        for lease in scheduler.logs.leases() {
            // Expired meanwhile, at worst.
            let _ = self.dram.release(lease.id, session);
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
