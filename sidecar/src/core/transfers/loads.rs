//! Loads: leased slots stay until every rank has ended its part.
//!
//! A load under an early answer waits (`Deferred`) while some of its blocks are on their way; the arrived ones
//! are held until its end. It goes on as any other load once its last block is here. It is refused if a block
//! is late or not to be had: then nothing of it was written. Blocks of a stream are sent for later
//! ([`streams`]).

mod phases;
mod streams;

use std::ops::ControlFlow::{Break, Continue};
use std::time::Duration;

use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::message::{Outcome, Status};
use shm_protocol::pool::SlotRef;
use shm_protocol::request;

use self::phases::{LoadEvent, LoadPart, LoadPhase, PartEvent};
use super::{
    Action, Base, Binding, Context, CopyDirection, CopyOwner, OpKey, Queries, RankBlock, SessionId,
    Transfers, Violation, operations,
};
use crate::core::arrivals::{WAIT_MS_MAX, Waiter};
use crate::core::queries::EarlyBlocks;
use crate::core::timing::{Timed, TimedPart};

/// One LOAD message, until every rank has ended it.
#[derive(Debug)]
pub(super) struct RunningLoad {
    phase: LoadPhase,
    /// The parts of the ranks, by rank.
    parts: Vec<LoadPart>,
    /// Operation of the query for its blocks: the parts of one prompt share it.
    promise: u64,
    posted: Duration,
    /// When its blocks were sent for.
    sent: Duration,
    /// True if it belongs to a stream.
    streamed: bool,
    /// The blocks that came for it, as a part of a stream.
    brought: Vec<BlockKey>,
    /// True if the stream ends with it: its last block is the parent of the engine's next one, and stays.
    ends_stream: bool,
    step: u64,
    /// True if it may begin when the step before its own is done.
    early: bool,
    /// True if its step waits for it.
    pub(super) sync: bool,
    blocks: Vec<u32>,
    /// The slots of its blocks, as far as these were sent for.
    slots: Vec<SlotRef>,
    binding: Binding,
    /// The last fence of another engine's blocks, among those loaded by ended parts of the same prompt.
    fenced: Option<Duration>,
}

/// The blocks of a new load, and its place in a stream.
struct PromisedBlocks {
    phase: LoadPhase,
    slots: Vec<SlotRef>,
    binding: Binding,
    streamed: bool,
    ends_stream: bool,
}

// === impl RunningLoad ===

impl RunningLoad {
    fn is_deferred(&self) -> bool {
        matches!(self.phase, LoadPhase::Deferred { .. })
    }

    /// True if it has blocks that were not sent for.
    fn has_rest(&self) -> bool {
        matches!(&self.phase, LoadPhase::Deferred { rest, .. } if !rest.is_empty())
    }

    /// Returns the number of its blocks on their way.
    fn missing(&self) -> usize {
        if let LoadPhase::Deferred { missing, .. } = self.phase { missing } else { 0 }
    }

    /// True if some rank waits for the begin of its copy.
    fn is_unstarted(&self) -> bool {
        self.parts.contains(&LoadPart::Unstarted)
    }

    fn has_copies(&self) -> bool {
        self.parts.iter().any(|part| part.has_copy())
    }
}

// === impl Transfers ===

impl Transfers {
    pub(crate) fn begin_load(
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
        let ranks = base.engines[session].world_size as usize;
        let PromisedBlocks { phase, slots, binding, streamed, ends_stream } =
            match promise_blocks(session, asked, queries, base) {
                Ok(promised) => promised,
                Err(status) => {
                    refuse_load(key, status, base);
                    return Ok(());
                }
            };
        let load = RunningLoad {
            phase,
            parts: vec![if asked.flags.by_engine() { LoadPart::Left } else { LoadPart::Unstarted }; ranks],
            promise: asked.lease,
            posted: base.cx.now,
            sent: base.cx.now,
            streamed,
            brought: Vec::new(),
            ends_stream,
            step: asked.step,
            early: asked.flags.early(),
            sync: asked.flags.sync(),
            blocks,
            slots,
            binding,
            fenced: None,
        };
        let is_deferred = load.is_deferred();
        if !is_deferred && load.is_unstarted() {
            self.pending(session).waiting.insert(asked.op);
        }
        self.loads.insert(key, load);
        self.pending(session).loads += 1;
        // These parts were reported before the load was read.
        for (rank, ok) in self.pending(session).take_early(asked.op) {
            self.change_part(key, rank, PartEvent::Reported(ok), &mut base.cx);
        }
        // These ranks began the load's step before their present session.
        for (_, worker) in base.engines.ranks(session).filter(|(_, worker)| worker.since >= asked.step) {
            self.change_part(key, worker.rank, PartEvent::Reported(false), &mut base.cx);
        }
        if streamed {
            self.moved_streams.insert(session);
        }
        match is_deferred {
            true => self.unpark(key, base),
            false => self.dispatch_load(key, base),
        }
        Ok(())
    }

    /// Starts the copies of a load on every joined rank whose memory may be written for its step.
    pub(super) fn dispatch_load(&mut self, key: OpKey, base: &mut Base) {
        let Some(load) = self.loads.get_mut(&key) else { return };
        let LoadPhase::Leased { ready: since, .. } = load.phase else { return };
        let mut ready = Vec::new();
        for (session, worker) in base.engines.ranks(key.0) {
            let rank = worker.rank;
            let part = &mut load.parts[rank as usize];
            if *part != LoadPart::Unstarted {
                continue;
            }
            let free = load.early && worker.done.saturating_add(1) >= load.step;
            if !worker.by_engine && worker.start < load.step && !free {
                continue;
            }
            // The copier must not meet such a block: a GPU's batch with an address outside its memory ends
            // the sidecar.
            let is_beyond = !worker.by_engine && load.blocks.iter().any(|block| *block >= worker.blocks);
            let copies = !worker.by_engine && !is_beyond;
            *part = part.after(if copies { PartEvent::CopyStarted } else { PartEvent::Left });
            if is_beyond {
                let outcome = Outcome { op: key.1 as u32, value: 0, status: Status::Failed };
                base.cx.actions.push(Action::Outcome { session, op: key.1, outcome });
            }
            if !copies {
                continue;
            }
            let offset = u64::from(worker.shard) * load.binding.shard_bytes;
            let moves = load.slots.iter().zip(&load.blocks);
            let pieces =
                moves.map(|(slot, &block)| RankBlock { block, offset: slot.offset + offset }).collect();
            base.cx.took(Timed::Load(TimedPart::Waiting), since);
            ready.push((CopyOwner { key, rank, direction: CopyDirection::Load }, session, pieces));
        }
        if !load.is_unstarted() {
            self.pending(key.0).waiting.remove(&key.1);
        }
        for (owner, session, pieces) in ready {
            self.start_copy(owner, session, pieces, &mut base.cx);
        }
    }

    pub(super) fn load_copied(&mut self, owner: CopyOwner, ok: bool, base: &mut Base) {
        let CopyOwner { key, rank, .. } = owner;
        let value = self.loads.get(&key).expect("a load outlives its copies").slots.len() as u32;
        let status = if ok { Status::Ok } else { Status::Failed };
        let joined = base.engines.ranks(key.0).find(|(_, worker)| worker.rank == rank);
        if let Some((session, _)) = joined {
            let outcome = Outcome { op: key.1 as u32, value, status };
            base.cx.actions.push(Action::Outcome { session, op: key.1, outcome });
        }
        let is_gone = joined.is_none();
        self.change_part(key, rank, PartEvent::CopyEnded(ok), &mut base.cx);
        if is_gone {
            self.change_part(key, rank, PartEvent::Reported(false), &mut base.cx);
        }
    }

    /// LOADED: a rank has ended its part itself, well or not. Fails beyond the limit of early reports.
    pub(crate) fn loaded(
        &mut self,
        (session, rank): (SessionId, u32),
        op: u64,
        ok: bool,
        cx: &mut Context,
    ) -> Result<(), Violation> {
        if self.loads.contains_key(&(session, op)) {
            self.change_part((session, op), rank, PartEvent::Reported(ok), cx);
        } else if let Some(pending) = self.pending.get_mut(&session) {
            pending.report_early(op, rank, ok)?;
        }
        Ok(())
    }

    /// Takes a rank's part of a load into its next phase. The load ends with its last part. Without effect if
    /// there is no such load.
    fn change_part(&mut self, key: OpKey, rank: u32, event: PartEvent, cx: &mut Context) {
        let Some(load) = self.loads.get_mut(&key) else { return };
        let before = load.parts[rank as usize];
        let part = before.after(event);
        load.parts[rank as usize] = part;
        if let LoadPhase::Orphan { .. } = load.phase {
            if !load.has_copies() {
                self.change_load(key, LoadEvent::CopiesEnded, cx);
            }
            return;
        }
        let (is_unstarted, over) = (load.is_unstarted(), load.parts.iter().all(|part| part.has_ended()));
        if let (LoadPart::Ended { well }, false) = (part, before.has_ended()) {
            let blocks = load.slots.len() as u64;
            if well {
                cx.stats.loaded_blocks += blocks;
                cx.stats.loaded_bytes += blocks * load.binding.shard_bytes;
            } else {
                cx.stats.load_failures += 1;
            }
            if let LoadPhase::Leased { lease, .. } = load.phase {
                let ended = cx.dram.consume(lease, key.0, rank);
                debug_assert_eq!(
                    ended.ok(),
                    Some(over),
                    "a promised lease lasts until every rank consumed it"
                );
            }
            if over {
                self.change_load(key, LoadEvent::PartsEnded(well), cx);
            }
        }
        if !is_unstarted {
            self.pending(key.0).waiting.remove(&key.1);
        }
    }

    /// Takes a load into its next phase, or to its end. No other code ends a load.
    fn change_load(&mut self, key: OpKey, event: LoadEvent, cx: &mut Context) {
        let load = self.loads.remove(&key).expect("the caller found it");
        match load.phase.after(event) {
            Continue(phase) => {
                self.loads.insert(key, RunningLoad { phase, ..load });
            }
            Break(phase) => self.finish_load(key.0, event, RunningLoad { phase, ..load }, cx),
        }
    }

    /// Ends the holds of a load.
    fn finish_load(&mut self, session: SessionId, event: LoadEvent, load: RunningLoad, cx: &mut Context) {
        let holder = load.binding.whose.holder;
        if let LoadEvent::PartsEnded(well) = event {
            cx.took(Timed::Load(TimedPart::Whole), load.posted);
            if well {
                let fenced = cx.kept.loaded(&load.slots, holder, &mut cx.dram);
                self.hand_over(session, load.promise, load.fenced.max(fenced), cx);
            }
        }
        match load.phase {
            LoadPhase::Deferred { held, .. } => {
                held.into_iter().for_each(|slot| cx.dram.unhold(slot, holder));
            }
            LoadPhase::Orphan { lease } => {
                let released = cx.dram.release(lease, session);
                debug_assert!(released.is_ok(), "a promised lease does not expire");
            }
            LoadPhase::Leased { .. } => {}
        }
        // The prompt is larger than the pool: others use the room better.
        let given_back = load.brought.len() - usize::from(load.ends_stream).min(load.brought.len());
        load.brought[..given_back].iter().for_each(|key| _ = cx.dram.give_back(key));
        if load.streamed {
            self.moved_streams.insert(session);
        }
        self.pending.get_mut(&session).into_iter().for_each(|pending| pending.loads -= 1);
    }

    /// Ends a part of a prompt with this last fence, if its blocks came from another engine. The handover
    /// ends with the last part of the prompt.
    fn hand_over(&mut self, session: SessionId, promise: u64, fenced: Option<Duration>, cx: &mut Context) {
        let Some(since) = fenced else { return };
        let mut parts = self.loads.range_mut(operations(session)).map(|(_, load)| load);
        match parts.find(|load| load.promise == promise) {
            Some(part) => part.fenced = part.fenced.max(fenced),
            None => cx.took(Timed::Handover, since),
        }
    }

    /// Ends a rank's part of all loads up to step `last`, once no copy for it runs: the rank is gone, or has
    /// begun that step before its present session.
    pub(crate) fn end_loads_of_rank(
        &mut self,
        (session, rank): (SessionId, u32),
        last: u64,
        cx: &mut Context,
    ) {
        let ended = self.loads.range(operations(session)).filter(|(_, load)| load.step <= last);
        let keys: Vec<OpKey> = ended.map(|(key, _)| *key).collect();
        for key in keys {
            self.change_part(key, rank, PartEvent::Reported(false), cx);
        }
    }

    /// Ends the loads of a gone engine. Its leases end as soon as no copy of this process reads them.
    pub(super) fn abandon_loads(&mut self, session: SessionId, cx: &mut Context) {
        let keys: Vec<OpKey> = self.loads.range(operations(session)).map(|(key, _)| *key).collect();
        for key in keys {
            self.change_load(key, LoadEvent::EngineLost, cx);
            if self.loads.get(&key).is_some_and(|orphan| !orphan.has_copies()) {
                self.change_load(key, LoadEvent::CopiesEnded, cx);
            }
        }
    }

    /// True if a load waits for blocks.
    pub(crate) fn is_deferred(&self, key: OpKey) -> bool {
        self.loads.get(&key).is_some_and(RunningLoad::is_deferred)
    }

    /// Handles the end of a block awaited by a load. The load is refused if the block cannot be held.
    pub(crate) fn end_block(&mut self, key: OpKey, ended: Option<&BlockKey>, base: &mut Base) {
        let Some(load) = self.loads.get_mut(&key) else { return };
        let LoadPhase::Deferred { missing, held, .. } = &mut load.phase else { return };
        if load.streamed {
            self.moved_streams.insert(key.0);
        }
        let holder = load.binding.whose.holder;
        let Some(here) = ended.and_then(|block| base.cx.dram.hold(block, holder)) else {
            return self.refuse_deferred(key, base);
        };
        held.push(here);
        *missing -= 1;
        self.unpark(key, base);
    }

    /// Begins a load once all of its blocks are here.
    fn unpark(&mut self, key: OpKey, base: &mut Base) {
        let Some(load) = self.loads.get(&key) else { return };
        let LoadPhase::Deferred { missing: 0, held, rest } = &load.phase else { return };
        if !rest.is_empty() {
            return;
        }
        debug_assert_eq!(held.len(), load.slots.len(), "all of its blocks are held");
        let (holder, scheduler) = (load.binding.whose.holder, &base.engines[key.0]);
        // The engine's other leases do not matter: blocks of an early answer are for their load.
        let lease =
            base.cx.dram.promise_held(key.0, holder, scheduler.world_size, &load.slots, base.cx.now_ms);
        let Some(lease) = lease else { return self.refuse_deferred(key, base) };
        base.cx.took(Timed::Load(TimedPart::Tier), load.posted);
        for (rank, _) in (0..).zip(&load.parts).filter(|(_, part)| part.has_ended()) {
            base.cx.dram.consume(lease, key.0, rank).expect("not all ranks have ended it");
        }
        self.change_load(key, LoadEvent::Arrived(lease, base.cx.now), &mut base.cx);
        self.pending(key.0).waiting.insert(key.1);
        self.dispatch_load(key, base);
    }

    /// Refuses loads that have waited for blocks as long as a question may. The blocks still arrive. Blocks of
    /// a stream have this time from when the last of them was sent for.
    pub(crate) fn refuse_late(&mut self, base: &mut Base) {
        let is_late = |load: &RunningLoad| {
            let is_sent = load.is_deferred() && !load.has_rest();
            is_sent && base.cx.now >= load.sent + Duration::from_millis(WAIT_MS_MAX)
        };
        let late: Vec<OpKey> =
            self.loads.iter().filter(|(_, load)| is_late(load)).map(|(key, _)| *key).collect();
        late.into_iter().for_each(|key| self.refuse_deferred(key, base));
    }

    /// Refuses a load, because one of its blocks is not to be had. Nothing of it will be written. In a
    /// stream the loads behind it are refused, too.
    fn refuse_deferred(&mut self, key: OpKey, base: &mut Base) {
        let Some(load) = self.loads.get(&key).filter(|load| load.is_deferred()) else { return };
        let (promise, streamed) = (load.promise, load.streamed);
        self.change_load(key, LoadEvent::Refused, &mut base.cx);
        refuse_load(key, Status::Absent, base);
        if streamed {
            self.refuse_parts(key, promise, base);
        }
    }
}

/// Returns the blocks of a load, held or leased as far as they are here. Fails if no answer promised them.
fn promise_blocks(
    session: SessionId,
    asked: &request::Load,
    queries: &mut Queries,
    base: &mut Base,
) -> Result<PromisedBlocks, Status> {
    let early = queries.early(session, asked).transpose()?;
    let binding = base.engines[session].binding().ok_or(Status::NotReady)?;
    let whole = |phase, slots| PromisedBlocks { phase, slots, binding, streamed: false, ends_stream: false };
    Ok(match early {
        Some(EarlyBlocks::Streamed(rest)) => {
            let stream = queries.stream(session).filter(|stream| stream.has_promise(asked.lease));
            let stream = stream.ok_or(Status::Absent)?;
            stream.queue.push_back(asked.op);
            let phase = LoadPhase::Deferred { missing: 0, held: Vec::new(), rest };
            let ends_stream = stream.ends_at(asked.keys.end());
            PromisedBlocks { phase, slots: Vec::new(), binding, streamed: true, ends_stream }
        }
        Some(EarlyBlocks::Named(named)) => {
            let waiter = Waiter::Load { session, op: asked.op };
            let phase = park(&named, waiter, &binding, &mut base.cx)?;
            whole(phase, named.into_iter().map(|(_, slot)| slot).collect())
        }
        None => {
            let (lease, slots) = queries.promise_lease(session, asked, &mut base.cx)?;
            whole(LoadPhase::Leased { lease, ready: base.cx.now }, slots)
        }
    })
}

/// Takes a load under an early answer: it waits for those of its `named` blocks still on their way. Fails if
/// a block is elsewhere than in its named slot.
fn park(
    named: &[(BlockHash, SlotRef)],
    waiter: Waiter,
    binding: &Binding,
    cx: &mut Context,
) -> Result<LoadPhase, Status> {
    let (mut missing, mut held, holder) = (0, Vec::new(), binding.whose.holder);
    let Context { dram, arrivals, .. } = cx;
    for (hash, slot) in named {
        let key = binding.block_key(hash);
        let here = dram.hold(&key, holder);
        held.extend(here);
        let coming = if here.is_none() { arrivals.join_waiter(&key, waiter) } else { None };
        missing += usize::from(coming.is_some());
        if here.or(coming) != Some(*slot) {
            held.into_iter().for_each(|slot| dram.unhold(slot, holder));
            return Err(Status::Absent);
        }
    }
    Ok(LoadPhase::Deferred { missing, held, rest: Vec::new() })
}

/// Reports a refused load to ranks waiting for this process; the others find out by the slots' generations.
fn refuse_load((session, op): OpKey, status: Status, base: &mut Base) {
    base.cx.stats.load_failures += 1;
    base.cx.stats.load_refusals += 1;
    let outcome = Outcome { op: op as u32, value: 0, status };
    let ranks = base.engines.ranks(session);
    base.cx.actions.extend(ranks.map(|(rank, _)| Action::Outcome { session: rank, op, outcome }));
}
