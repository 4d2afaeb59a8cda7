//! Loads: a promise that leased slots stay until every rank has them.
//!
//! A load under an early answer is parked as long as some of its blocks are on their way; those that have come are held until its end.
//! It ends as any other once its last block is here, or is refused when one of them is late or not to be had. Of a refused
//! load nothing was written.

use std::time::Duration;

use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::message::{Outcome, Status};
use shm_protocol::pool::SlotRef;
use shm_protocol::request;
use tiers::dram::{Dram, LeaseId};

use super::{
    Action, Base, Binding, Context, CopyOwner, Direction, OpKey, Piece, Queries, SessionId, Transfers,
    Violation, operations,
};
use crate::core::arrivals::{WAIT_MS_MAX, Waiter};
use crate::core::timing::{Part, Timed};

/// One LOAD message, until every rank ended it.
#[derive(Debug)]
pub(super) struct Load {
    hold: Hold,
    /// Operation of the query that promised its blocks: the parts of one prompt share it.
    promise: u64,
    posted: Duration,
    /// When its blocks were here.
    ready: Duration,
    step: u64,
    /// It may begin when the step before its own is done.
    early: bool,
    /// Its step waits for it.
    pub(super) sync: bool,
    blocks: Vec<u32>,
    slots: Vec<SlotRef>,
    binding: Binding,
    /// Ranks that have not ended it.
    open: u64,
    /// Ranks whose copy by this process has not been started; none where the ranks copy for themselves.
    unstarted: u64,
    /// Ranks with a copy running.
    running: u64,
    /// Ranks that reported its end while their copy ran, and those of them that reported it well.
    reported: (u64, u64),
    /// The last fence of blocks that ended parts of the same prompt have loaded from another engine.
    fenced: Option<Duration>,
    /// The engine is gone; the lease is kept for the running copies alone.
    orphan: bool,
}

/// What keeps a load's blocks where they are.
#[derive(Debug)]
enum Hold {
    Leased(LeaseId),
    /// Blocks of it are on their way, so many; those that are here are held.
    Parked {
        missing: usize,
        held: Vec<SlotRef>,
    },
}

// === impl Load ===

impl Load {
    fn new(
        now: Duration,
        asked: &request::Load,
        blocks: Vec<u32>,
        hold: Hold,
        slots: Vec<SlotRef>,
        binding: Binding,
        ranks: u64,
    ) -> Self {
        Self {
            hold,
            promise: asked.lease,
            posted: now,
            ready: now,
            step: asked.step,
            early: asked.flags.early(),
            sync: asked.flags.sync(),
            blocks,
            slots,
            binding,
            open: ranks,
            unstarted: if asked.flags.by_engine() { 0 } else { ranks },
            running: 0,
            reported: (0, 0),
            fenced: None,
            orphan: false,
        }
    }

    fn is_parked(&self) -> bool {
        matches!(self.hold, Hold::Parked { .. })
    }

    /// It needs its blocks no more: ends the holds of a parked one.
    fn unhold(self, dram: &mut Dram) {
        if let Hold::Parked { held, .. } = self.hold {
            held.into_iter().for_each(|slot| dram.unhold(slot, self.binding.whose.holder));
        }
    }
}

// === impl Transfers ===

impl Transfers {
    pub(crate) fn load(
        &mut self,
        session: SessionId,
        asked: &request::Load,
        blocks: Vec<u32>,
        queries: &mut Queries,
        base: &mut Base,
    ) -> Result<(), Violation> {
        let key = (session, asked.op);
        self.check_new(key)?;
        self.pending[&session].check_load()?;
        let (bound, ranks) = (base.engines[session].binding, base.engines[session].all_ranks());
        let promised = match queries.early(session, asked) {
            Some(named) => named.and_then(|named| {
                let binding = bound.ok_or(Status::NotReady)?;
                let waiter = Waiter::Load { session, op: asked.op };
                let hold = park(&named, waiter, &binding, &mut base.cx)?;
                let slots = named.into_iter().map(|(_, slot)| slot).collect();
                Ok(Load::new(base.cx.now, asked, blocks, hold, slots, binding, ranks))
            }),
            None => bound.ok_or(Status::NotReady).and_then(|binding| {
                let (lease, slots) = queries.promise(session, asked, &mut base.cx)?;
                Ok(Load::new(base.cx.now, asked, blocks, Hold::Leased(lease), slots, binding, ranks))
            }),
        };
        let load = match promised {
            Ok(load) => load,
            Err(status) => {
                refuse(key, status, base);
                return Ok(());
            }
        };
        let is_parked = load.is_parked();
        if !is_parked && load.unstarted != 0 {
            self.pending(session).waiting.insert(asked.op);
        }
        self.loads.insert(key, load);
        self.pending(session).loads += 1;
        // Parts that were reported before the load was read.
        for (rank, ok) in self.pending(session).take_early(asked.op) {
            self.report(key, rank, ok, &mut base.cx);
        }
        // Parts of ranks that began the load's step before their present session.
        for (_, worker) in base.engines.ranks(session).filter(|(_, worker)| worker.since >= asked.step) {
            self.report(key, worker.rank, false, &mut base.cx);
        }
        match is_parked {
            true => self.unpark(key, base),
            false => self.dispatch_load(key, base),
        }
        Ok(())
    }

    /// Starts the copies of a load on every rank that has joined and whose forward of that step may begin.
    pub(super) fn dispatch_load(&mut self, key: OpKey, base: &mut Base) {
        let Some(load) = self.loads.get_mut(&key) else { return };
        let mut ready = Vec::new();
        let unstarted = load.unstarted;
        for (session, worker) in base.engines.ranks(key.0) {
            let rank = worker.rank;
            if unstarted >> rank & 1 == 0 {
                continue;
            }
            let free = load.early && worker.done.saturating_add(1) >= load.step;
            if !worker.by_engine && worker.start < load.step && !free {
                continue;
            }
            load.unstarted &= !(1 << rank);
            if worker.by_engine {
                continue;
            }
            // Not the copier's to find: a GPU's batch that names memory which is not there ends the sidecar.
            if load.blocks.iter().any(|block| *block >= worker.blocks) {
                let outcome = Outcome { op: key.1 as u32, value: 0, status: Status::Failed };
                base.cx.actions.push(Action::Outcome { session, op: key.1, outcome });
                continue;
            }
            let offset = u64::from(worker.shard) * load.binding.shard_bytes;
            let moves = load.slots.iter().zip(&load.blocks);
            let pieces = moves.map(|(slot, &block)| Piece { block, offset: slot.offset + offset }).collect();
            load.running |= 1 << rank;
            base.cx.took(Timed::Load(Part::Waiting), load.ready);
            ready.push((CopyOwner { key, rank, direction: Direction::Load }, session, pieces));
        }
        if load.unstarted == 0 {
            self.pending(key.0).waiting.remove(&key.1);
        }
        for (owner, session, pieces) in ready {
            self.start_copy(owner, session, pieces, &mut base.cx);
        }
    }

    pub(super) fn load_copied(&mut self, owner: CopyOwner, ok: bool, base: &mut Base) {
        let CopyOwner { key, rank, .. } = owner;
        let load = self.loads.get_mut(&key).expect("a load outlives its copies");
        load.running &= !(1 << rank);
        let value = load.slots.len() as u32;
        let (reported, well) = (load.reported.0 >> rank & 1 == 1, load.reported.1 >> rank & 1 == 1);
        if load.orphan {
            if load.running == 0 {
                self.drop_load(key, &mut base.cx);
            }
            return;
        }
        let status = if ok { Status::Ok } else { Status::Failed };
        let joined = base.engines.ranks(key.0).find(|(_, worker)| worker.rank == rank);
        if let Some((session, _)) = joined {
            let outcome = Outcome { op: key.1 as u32, value, status };
            base.cx.actions.push(Action::Outcome { session, op: key.1, outcome });
        }
        // A failed copy leaves the rank's part open: the rank finishes it from the leased slots, and says so.
        if ok || reported || joined.is_none() {
            self.end_load(key, rank, ok || well, &mut base.cx);
        }
    }

    /// LOADED: a rank has ended its part itself, well or not.
    pub(crate) fn loaded(
        &mut self,
        (session, rank): (SessionId, u32),
        op: u64,
        ok: bool,
        cx: &mut Context,
    ) -> Result<(), Violation> {
        if self.loads.contains_key(&(session, op)) {
            self.report((session, op), rank, ok, cx);
        } else if let Some(pending) = self.pending.get_mut(&session) {
            pending.report_early(op, rank, ok)?;
        }
        Ok(())
    }

    /// A rank needs nothing of a load any more. Its slots stay until no copy of this process reads them.
    fn report(&mut self, key: OpKey, rank: u32, ok: bool, cx: &mut Context) {
        let Some(load) = self.loads.get_mut(&key) else { return };
        load.unstarted &= !(1 << rank);
        let is_running = load.running >> rank & 1 == 1;
        if is_running {
            load.reported.0 |= 1 << rank;
            load.reported.1 |= u64::from(ok) << rank;
        }
        if load.unstarted == 0 {
            self.pending(key.0).waiting.remove(&key.1);
        }
        if !is_running {
            self.end_load(key, rank, ok, cx);
        }
    }

    /// One rank has ended its part of a load; the lease ends with the last.
    fn end_load(&mut self, key: OpKey, rank: u32, ok: bool, cx: &mut Context) {
        let Some(load) = self.loads.get_mut(&key) else { return };
        if load.open >> rank & 1 == 0 {
            return;
        }
        load.open &= !(1 << rank);
        let blocks = load.slots.len() as u64;
        if ok {
            cx.stats.loaded_blocks += blocks;
            cx.stats.loaded_bytes += blocks * load.binding.shard_bytes;
        } else {
            cx.stats.load_failures += 1;
        }
        if let Hold::Leased(lease) = load.hold {
            let ended = cx.dram.consume(lease, key.0, rank);
            debug_assert_eq!(
                ended.ok(),
                Some(load.open == 0),
                "a promised lease lasts until every rank consumed it"
            );
        }
        if load.open == 0 {
            let load = self.loads.remove(&key).expect("found above");
            cx.took(Timed::Load(Part::Whole), load.posted);
            if ok {
                let fenced = cx.kept.loaded(&load.slots, load.binding.whose.holder, &mut cx.dram);
                self.hand_over(key.0, load.promise, load.fenced.max(fenced), cx);
            }
            load.unhold(&mut cx.dram);
            self.pending.get_mut(&key.0).into_iter().for_each(|pending| pending.loads -= 1);
        }
    }

    /// A load is over whose prompt's blocks have this last fence, if they came from another engine: the prompt is handed over with its
    /// last part.
    fn hand_over(&mut self, session: SessionId, promise: u64, fenced: Option<Duration>, cx: &mut Context) {
        let Some(since) = fenced else { return };
        let mut parts = self.loads.range_mut(operations(session)).map(|(_, load)| load);
        match parts.find(|load| load.promise == promise) {
            Some(part) => part.fenced = part.fenced.max(fenced),
            None => cx.took(Timed::Handover, since),
        }
    }

    /// A rank is gone, or is there again after it began step `last`: it needs nothing of loads up to there any more, once
    /// no copy for it runs.
    pub(crate) fn end_loads_of_rank(
        &mut self,
        (session, rank): (SessionId, u32),
        last: u64,
        cx: &mut Context,
    ) {
        let ended = self.loads.range(operations(session)).filter(|(_, load)| load.step <= last);
        let keys: Vec<OpKey> = ended.map(|(key, _)| *key).collect();
        for key in keys {
            self.report(key, rank, false, cx);
        }
    }

    /// The engine is gone: its leases end as soon as no copy of this process reads them.
    pub(super) fn abandon_loads(&mut self, session: SessionId, cx: &mut Context) {
        let keys: Vec<OpKey> = self.loads.range(operations(session)).map(|(key, _)| *key).collect();
        for key in keys {
            let load = self.loads.get_mut(&key).expect("listed above");
            load.orphan = true;
            if load.running == 0 {
                self.drop_load(key, cx);
            }
        }
    }

    fn drop_load(&mut self, key: OpKey, cx: &mut Context) {
        let load = self.loads.remove(&key).expect("the caller found it");
        if let Hold::Leased(lease) = load.hold {
            let released = cx.dram.release(lease, key.0);
            debug_assert!(released.is_ok(), "a promised lease does not expire");
        }
        load.unhold(&mut cx.dram);
    }

    /// Whether a load waits for blocks.
    pub(crate) fn is_parked(&self, key: OpKey) -> bool {
        self.loads.get(&key).is_some_and(Load::is_parked)
    }

    /// A block of a parked load has ended, well if it can be held.
    pub(crate) fn tell(&mut self, key: OpKey, ended: Option<&BlockKey>, base: &mut Base) {
        let Some(load) = self.loads.get_mut(&key) else { return };
        let Hold::Parked { missing, held } = &mut load.hold else { return };
        let holder = load.binding.whose.holder;
        let Some(here) = ended.and_then(|block| base.cx.dram.hold(block, holder)) else {
            return self.refuse_parked(key, base);
        };
        held.push(here);
        *missing -= 1;
        self.unpark(key, base);
    }

    /// Begins a parked load all of whose blocks are here.
    fn unpark(&mut self, key: OpKey, base: &mut Base) {
        let Some(load) = self.loads.get_mut(&key) else { return };
        let Hold::Parked { missing: 0, held } = &load.hold else { return };
        debug_assert_eq!(held.len(), load.slots.len(), "all of its blocks are held");
        let (holder, scheduler) = (load.binding.whose.holder, &base.engines[key.0]);
        // However much its engine has leased by now: what an early answer named is its load's.
        let lease =
            base.cx.dram.promise_held(key.0, holder, scheduler.world_size, &load.slots, base.cx.now_ms);
        let Some(lease) = lease else { return self.refuse_parked(key, base) };
        (load.hold, load.ready) = (Hold::Leased(lease), base.cx.now);
        base.cx.took(Timed::Load(Part::Tier), load.posted);
        let over = scheduler.all_ranks() & !load.open;
        for rank in (0..scheduler.world_size).filter(|rank| over >> rank & 1 == 1) {
            base.cx.dram.consume(lease, key.0, rank).expect("not all ranks have ended it");
        }
        self.pending(key.0).waiting.insert(key.1);
        self.dispatch_load(key, base);
    }

    /// Time passed: loads that have waited for blocks as long as a question may are refused. The blocks come nevertheless.
    pub(crate) fn refuse_late(&mut self, base: &mut Base) {
        let is_late =
            |load: &Load| load.is_parked() && base.cx.now >= load.posted + Duration::from_millis(WAIT_MS_MAX);
        let late: Vec<OpKey> =
            self.loads.iter().filter(|(_, load)| is_late(load)).map(|(key, _)| *key).collect();
        late.into_iter().for_each(|key| self.refuse_parked(key, base));
    }

    /// A block of a parked load is not to be had: nothing of it will be written.
    fn refuse_parked(&mut self, key: OpKey, base: &mut Base) {
        self.loads.remove(&key).expect("it was parked").unhold(&mut base.cx.dram);
        self.pending(key.0).loads -= 1;
        refuse(key, Status::Absent, base);
    }
}

/// Takes a load under an early answer that `named` these blocks: it waits for those that are not here.
fn park(
    named: &[(BlockHash, SlotRef)],
    waiter: Waiter,
    binding: &Binding,
    cx: &mut Context,
) -> Result<Hold, Status> {
    let (mut missing, mut held, holder) = (0, Vec::new(), binding.whose.holder);
    let Context { dram, arrivals, .. } = cx;
    for (hash, slot) in named {
        let key = binding.key(hash);
        let here = dram.hold(&key, holder);
        held.extend(here);
        let coming = if here.is_none() { arrivals.join(&key, waiter) } else { None };
        missing += usize::from(coming.is_some());
        if here.or(coming) != Some(*slot) {
            held.into_iter().for_each(|slot| dram.unhold(slot, holder));
            return Err(Status::Absent);
        }
    }
    Ok(Hold::Parked { missing, held })
}

/// Tells the ranks that wait for this process; the others find out by the slots' generations.
fn refuse((session, op): OpKey, status: Status, base: &mut Base) {
    base.cx.stats.load_failures += 1;
    base.cx.stats.load_refusals += 1;
    let outcome = Outcome { op: op as u32, value: 0, status };
    let ranks = base.engines.ranks(session);
    base.cx.actions.extend(ranks.map(|(rank, _)| Action::Outcome { session: rank, op, outcome }));
}
