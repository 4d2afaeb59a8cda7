//! Loads: a promise that leased slots stay until every rank has them.

use shm_protocol::message::{Outcome, Status};
use shm_protocol::pool::SlotRef;
use shm_protocol::request::{self, Keys};
use tiers::LeaseError;
use tiers::dram::LeaseId;

use super::key_logs::part;
use super::members::all_ranks;
use super::namespaces::Binding;
use super::{Action, CopyOwner, Core, Direction, Piece, SessionId, Violation, operations};

/// One LOAD message, until every rank ended it.
#[derive(Debug)]
pub(super) struct Load {
    /// `None`: it is parked.
    pub(super) lease: Option<LeaseId>,
    step: u64,
    /// It may begin when the step before its own is done.
    early: bool,
    /// Its step waits for it.
    pub(super) sync: bool,
    blocks: Vec<u32>,
    pub(super) slots: Vec<SlotRef>,
    pub(super) binding: Binding,
    /// Ranks that have not ended it.
    pub(super) open: u64,
    /// Ranks whose copy by this process has not been started; none where the ranks copy for themselves.
    unstarted: u64,
    /// Ranks with a copy running.
    running: u64,
    /// Ranks that reported its end while their copy ran, and those of them that reported it well.
    reported: (u64, u64),
    /// The engine is gone; the lease is kept for the running copies alone.
    orphan: bool,
}

// === impl Load ===

impl Load {
    /// Without its blocks yet.
    pub(super) fn new(
        asked: &request::Load,
        lease: Option<LeaseId>,
        slots: Vec<SlotRef>,
        binding: Binding,
        ranks: u64,
    ) -> Self {
        Self {
            lease,
            step: asked.step,
            early: asked.flags.early(),
            sync: asked.flags.sync(),
            blocks: Vec::new(),
            slots,
            binding,
            open: ranks,
            unstarted: if asked.flags.by_engine() { 0 } else { ranks },
            running: 0,
            reported: (0, 0),
            orphan: false,
        }
    }
}

// === impl Core ===

impl Core {
    pub(super) fn load(
        &mut self,
        now_ms: u64,
        session: SessionId,
        asked: &request::Load,
        blocks: Vec<u32>,
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        let op = asked.op;
        self.check_new(session, op)?;
        self.schedulers[&session].pending.check_load()?;
        let promised = match self.is_early(session, asked) {
            true => self.park(session, asked),
            false => self.promise(session, asked),
        };
        match promised {
            Ok(mut load) => {
                load.blocks = blocks;
                let is_parked = load.lease.is_none();
                if !is_parked && load.unstarted != 0 {
                    self.scheduler_waits(session, op);
                }
                self.loads.insert((session, op), load);
                self.scheduler(session).pending.begin_load();
                self.take_early(session, op);
                self.end_missed(session, asked);
                match is_parked {
                    true => self.unpark(now_ms, (session, op), out),
                    false => self.dispatch_load(session, op, out),
                }
            }
            Err(status) => self.refuse_load(session, op, status, out),
        }
        Ok(())
    }

    /// Turns the lease of a log into one that lasts until every rank ended the load.
    fn promise(&mut self, session: SessionId, asked: &request::Load) -> Result<Load, Status> {
        let Keys { log: number, from, count } = asked.keys;
        let binding = self.binding(session).ok_or(Status::NotReady)?;
        let ranks = all_ranks(self.schedulers[&session].world_size);
        let log = self.schedulers[&session].logs.get(number).map_err(|_| Status::LeaseUnknown)?;
        let lease = log.lease.filter(|lease| lease.op == asked.lease).ok_or(Status::LeaseUnknown)?;
        let first = from.saturating_sub(lease.from) as usize;
        let slots: Vec<SlotRef> = self.dram.slots(lease.id, session).map_err(status)?.collect();
        let slots = part(&slots, &lease, from, count).ok_or(Status::LeaseUnknown)?;
        self.dram.truncate(lease.id, session, first, slots.len()).map_err(status)?;
        self.dram.promise(lease.id, session).map_err(status)?;
        self.scheduler(session).logs.take_lease(number).map_err(|_| Status::LeaseUnknown)?;
        Ok(Load::new(asked, Some(lease.id), slots, binding, ranks))
    }

    /// Tells the ranks that wait for this process; the others find out by the slots' generations.
    pub(super) fn refuse_load(&mut self, session: SessionId, op: u64, status: Status, out: &mut Vec<Action>) {
        self.stats.load_failures += 1;
        self.stats.load_refusals += 1;
        let outcome = Outcome { op: op as u32, value: 0, status };
        let ranks = self.schedulers[&session].ranks.iter().flatten();
        out.extend(ranks.map(|&rank| Action::Outcome { session: rank, op, outcome }));
    }

    /// Starts the copies of a load on every rank that has joined and whose forward of that step may begin.
    pub(super) fn dispatch_load(&mut self, session: SessionId, op: u64, out: &mut Vec<Action>) {
        let Some(load) = self.loads.get_mut(&(session, op)) else { return };
        let scheduler = self.schedulers.get_mut(&session).expect("its waiting operations end with it");
        let mut ready = Vec::new();
        let unstarted = load.unstarted;
        for rank in (0..scheduler.world_size).filter(|rank| unstarted >> rank & 1 == 1) {
            let Some(worker_id) = scheduler.ranks[rank as usize] else { continue };
            let worker = &self.workers[&worker_id];
            if worker.by_engine {
                load.unstarted &= !(1 << rank);
                continue;
            }
            let free = load.early && worker.done.saturating_add(1) >= load.step;
            if worker.start < load.step && !free {
                continue;
            }
            load.unstarted &= !(1 << rank);
            let offset = u64::from(worker.shard) * load.binding.shard_bytes;
            let moves = load.slots.iter().zip(&load.blocks);
            let pieces = moves.map(|(slot, &block)| Piece { block, offset: slot.offset + offset }).collect();
            load.running |= 1 << rank;
            ready.push((rank, worker_id, pieces));
        }
        if load.unstarted == 0 {
            scheduler.pending.start(op);
        }
        for (rank, worker_id, pieces) in ready {
            let owner = CopyOwner { scheduler: session, op, rank, direction: Direction::Load };
            self.start_copy(owner, worker_id, pieces, out);
        }
    }

    pub(super) fn load_copied(&mut self, owner: CopyOwner, ok: bool, out: &mut Vec<Action>) {
        let key = (owner.scheduler, owner.op);
        let load = self.loads.get_mut(&key).expect("a load outlives its copies");
        load.running &= !(1 << owner.rank);
        let value = load.slots.len() as u32;
        let (reported, well) =
            (load.reported.0 >> owner.rank & 1 == 1, load.reported.1 >> owner.rank & 1 == 1);
        if load.orphan {
            if load.running == 0 {
                self.drop_load(key);
            }
            return;
        }
        let status = if ok { Status::Ok } else { Status::Failed };
        let rank = self.schedulers[&owner.scheduler].ranks[owner.rank as usize];
        if let Some(session) = rank {
            let outcome = Outcome { op: owner.op as u32, value, status };
            out.push(Action::Outcome { session, op: owner.op, outcome });
        }
        // A failed copy leaves the rank's part open: the rank finishes it from the leased slots, and says so.
        if ok || reported || rank.is_none() {
            self.end_load(key, owner.rank, ok || well);
        }
    }

    /// LOADED: a rank has ended its part itself, well or not.
    pub(super) fn loaded(&mut self, session: SessionId, op: u64, ok: bool) -> Result<(), Violation> {
        let worker = &self.workers[&session];
        let rank = worker.rank;
        let Some(scheduler) = worker.scheduler else { return Ok(()) };
        let key = (scheduler, op);
        if self.loads.contains_key(&key) {
            self.report(key, rank, ok);
        } else if let Some(host) = self.schedulers.get_mut(&scheduler) {
            host.pending.report_early(op, rank, ok)?;
        }
        Ok(())
    }

    /// Ends the parts of ranks that began the load's step before their present session.
    fn end_missed(&mut self, session: SessionId, asked: &request::Load) {
        let sessions = self.schedulers[&session].ranks.iter().flatten();
        let missed = sessions.map(|id| &self.workers[id]).filter(|worker| worker.since >= asked.step);
        let ranks: Vec<u32> = missed.map(|worker| worker.rank).collect();
        ranks.into_iter().for_each(|rank| self.report((session, asked.op), rank, false));
    }

    /// Ends the parts of a load that were reported before it was read.
    fn take_early(&mut self, session: SessionId, op: u64) {
        for (rank, ok) in self.scheduler(session).pending.take_early(op) {
            self.report((session, op), rank, ok);
        }
    }

    /// A rank needs nothing of a load any more. Its slots stay until no copy of this process reads them.
    fn report(&mut self, key: (SessionId, u64), rank: u32, ok: bool) {
        let Some(load) = self.loads.get_mut(&key) else { return };
        load.unstarted &= !(1 << rank);
        if load.unstarted == 0 {
            let scheduler = self.schedulers.get_mut(&key.0).expect("its loads end with it");
            scheduler.pending.start(key.1);
        }
        if load.running >> rank & 1 == 1 {
            load.reported.0 |= 1 << rank;
            load.reported.1 |= u64::from(ok) << rank;
        } else {
            self.end_load(key, rank, ok);
        }
    }

    /// One rank has ended its part of a load; the lease ends with the last.
    fn end_load(&mut self, key: (SessionId, u64), rank: u32, ok: bool) {
        let Some(load) = self.loads.get_mut(&key) else { return };
        if load.open >> rank & 1 == 0 {
            return;
        }
        load.open &= !(1 << rank);
        let blocks = load.slots.len() as u64;
        if ok {
            self.stats.loaded_blocks += blocks;
            self.stats.loaded_bytes += blocks * load.binding.shard_bytes;
        } else {
            self.stats.load_failures += 1;
        }
        if let Some(lease) = load.lease {
            let ended = self.dram.consume(lease, key.0, rank);
            debug_assert_eq!(
                ended.ok(),
                Some(load.open == 0),
                "a promised lease lasts until every rank consumed it"
            );
        }
        if load.open == 0 {
            self.loads.remove(&key);
            self.let_go(key);
            if let Some(scheduler) = self.schedulers.get_mut(&key.0) {
                scheduler.pending.end_load();
            }
        }
    }

    /// A rank is gone, or is there again after it began step `last`: it needs nothing of loads up to there any more, once
    /// no copy for it runs.
    pub(super) fn end_loads_of_rank(&mut self, session: SessionId, rank: u32, last: u64) {
        let ended = self.loads.range(operations(session)).filter(|(_, load)| load.step <= last);
        let keys: Vec<(SessionId, u64)> = ended.map(|(key, _)| *key).collect();
        for key in keys {
            self.report(key, rank, false);
        }
    }

    /// The engine is gone: its leases end as soon as no copy of this process reads them.
    pub(super) fn abandon_loads(&mut self, session: SessionId) {
        let keys: Vec<(SessionId, u64)> =
            self.loads.range(operations(session)).map(|(key, _)| *key).collect();
        for key in keys {
            let load = self.loads.get_mut(&key).expect("listed above");
            load.orphan = true;
            if load.running == 0 {
                self.drop_load(key);
            }
        }
    }

    fn drop_load(&mut self, key: (SessionId, u64)) {
        let load = self.loads.remove(&key).expect("the caller found it");
        let released = load.lease.map(|lease| self.dram.release(lease, key.0));
        debug_assert!(released.is_none_or(|it| it.is_ok()), "a promised lease does not expire");
        self.let_go(key);
    }
}

fn status(error: LeaseError) -> Status {
    match error {
        LeaseError::Unknown => Status::LeaseUnknown,
        LeaseError::Expired => Status::LeaseExpired,
        LeaseError::Foreign => Status::LeaseForeign,
        LeaseError::Consumed => Status::LeaseConsumed,
    }
}
