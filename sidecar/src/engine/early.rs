//! Early answers: a query whose blocks are on their way is answered when the first of them is here, and its blocks are loaded
//! in parts, each as soon as it has arrived whole. The way to the engine's memory then begins while the wire is still busy.
//!
//! For engines that ask for it, where this process writes the blocks and no step waits for them: such a load may fail.
//!
//! - What was answered early is held for the time of a lease, and what a parked load has of its blocks until its end.
//! - A parked load ends as any other once its last block is here, or is refused when one of them is late or not to be had. It
//!   waits no longer than its blocks are waited for.
//! - Of a refused load nothing was written.

use shm_protocol::key::BlockKey;
use shm_protocol::message::Status;
use shm_protocol::pool::SlotRef;
use shm_protocol::request;

use super::loads::Load;
use super::members::{Scheduler, all_ranks};
use super::namespaces::Binding;
use super::waits::{Answered, Parked, Question, Waiter};
use super::{Action, Core, GROUP, SessionId};

/// Bytes on their way that are worth an early answer. A load that no step waits for costs its request about a step more, and
/// the early answer gains the time of a copy to the device: 6 ms for so many at 40 GB/s.
const BYTES_MIN: u64 = 256 << 20;
/// The same in a small pool: 1 of so many parts of what may be on its way.
const PART: u64 = 16;

// === impl Core: queries ===

impl Core {
    /// Answers a query the first of whose blocks has come, if enough of the others are still on their way.
    pub(super) fn answer_early(&mut self, now_ms: u64, place: (SessionId, u32), out: &mut Vec<Action>) {
        let Some(wait) = self.arrivals.waits.get(&place) else { return };
        let (question, open) = (wait.question, wait.open);
        // A run that ends early may still grow while its window is open.
        let may_grow = !wait.whole && self.window(place.0, place.1).is_some();
        if !question.arriving || may_grow || self.draining || !self.writes_loads(place.0) {
            return;
        }
        let Some(binding) = self.binding(place.0).filter(|it| self.is_worth_it(it, open)) else { return };
        let (slots, held, coming) = self.run(place.0, question, &binding);
        if !self.is_worth_it(&binding, coming) {
            return self.unhold(place.0, held);
        }
        let until_ms = now_ms.saturating_add(self.dram.config().lease_ttl_ms);
        let wait = self.arrivals.waits.get_mut(&place).expect("found above");
        let before = std::mem::replace(&mut wait.held, held);
        wait.answered = Some(Answered { slots: slots.clone(), until_ms });
        if let Ok(Some(lease)) = self.scheduler(place.0).logs.take_lease(place.1) {
            // Expired meanwhile, at worst.
            let _ = self.dram.release(lease.id, place.0);
        }
        self.unhold(place.0, before);
        self.stats.early_answers += 1;
        self.stats.wait_ms += now_ms.saturating_sub(question.asked_ms);
        self.end_window(now_ms, place.0, question, slots.len() as u32, out);
        self.answer_arriving(place.0, question, slots, out);
    }

    fn is_worth_it(&self, binding: &Binding, blocks: usize) -> bool {
        blocks as u64 * binding.block_bytes() >= BYTES_MIN.min(self.arrivals.bytes_max() / PART)
    }

    /// Whether every rank has joined and leaves its loads to this process.
    fn writes_loads(&self, session: SessionId) -> bool {
        let ranks = self.schedulers[&session].ranks.iter();
        ranks.into_iter().all(|rank| rank.is_some_and(|id| !self.workers[&id].by_engine))
    }

    /// The run of a question whose blocks are here or on their way: the slots of all, of those that are here, held, and how
    /// many are on their way.
    fn run(
        &mut self,
        session: SessionId,
        question: Question,
        binding: &Binding,
    ) -> (Vec<SlotRef>, Vec<SlotRef>, usize) {
        let (mut slots, mut held, mut coming) = (Vec::new(), Vec::new(), 0);
        let waiter = Waiter { session, log: Some(question.log), op: question.op };
        for hash in self.schedulers[&session].logs.known(question.log).wanted(question) {
            let key = BlockKey { namespace: binding.namespace, group: GROUP, hash: *hash };
            if let Some(slot) = self.dram.hold(&key, binding.whose.holder) {
                held.push(slot);
                slots.push(slot);
            } else if let Some(slot) = self.arrivals.join_once(&key, waiter) {
                coming += 1;
                slots.push(slot);
            } else {
                break;
            }
        }
        (slots, held, coming)
    }
}

// === impl Core: loads ===

impl Core {
    /// Whether a load names a query that was answered early.
    pub(super) fn is_early(&self, session: SessionId, asked: &request::Load) -> bool {
        let wait = self.arrivals.waits.get(&(session, asked.keys.log));
        wait.is_some_and(|wait| wait.answered.is_some() && wait.question.op == asked.lease)
    }

    /// Takes a load under an early answer: it waits for those of its blocks that are not here.
    pub(super) fn park(&mut self, session: SessionId, asked: &request::Load) -> Result<Load, Status> {
        let request::Keys { log, from, count } = asked.keys;
        if asked.flags.sync() || asked.flags.by_engine() {
            return Err(Status::LeaseUnknown);
        }
        let binding = self.binding(session).ok_or(Status::NotReady)?;
        let wait = &self.arrivals.waits[&(session, log)];
        let answered = wait.answered.as_ref().expect("the caller looked");
        let first = from.checked_sub(wait.question.from).ok_or(Status::LeaseUnknown)? as usize;
        let slots = answered.slots.get(first..first + count as usize).ok_or(Status::LeaseUnknown)?;
        let (slots, from) = (slots.to_vec(), from as usize);
        let hashes = self.schedulers[&session].logs.known(log).keys[from..from + slots.len()].to_vec();
        let waiter = Waiter { session, log: None, op: asked.op };
        let mut parked = Parked { missing: 0, held: Vec::new() };
        for (hash, named) in hashes.iter().zip(&slots) {
            let key = BlockKey { namespace: binding.namespace, group: GROUP, hash: *hash };
            let here = self.dram.hold(&key, binding.whose.holder);
            parked.held.extend(here);
            let coming = if here.is_none() { self.arrivals.join(&key, waiter) } else { None };
            parked.missing += usize::from(coming.is_some());
            if here.or(coming) != Some(*named) {
                self.unhold(session, parked.held);
                return Err(Status::Absent);
            }
        }
        self.arrivals.loads.insert((session, asked.op), parked);
        let ranks = all_ranks(self.schedulers[&session].world_size);
        Ok(Load::new(asked, None, slots, binding, ranks))
    }

    /// A block of a parked load has ended, well if it can be held.
    pub(super) fn tell_load(
        &mut self,
        now_ms: u64,
        key: (SessionId, u64),
        ended: Option<&BlockKey>,
        out: &mut Vec<Action>,
    ) {
        let Some(parked) = self.arrivals.loads.get_mut(&key) else { return };
        let holder = self.schedulers[&key.0].holder;
        let Some(here) = ended.and_then(|block| self.dram.hold(block, holder)) else {
            return self.refuse_parked(key, out);
        };
        parked.held.push(here);
        parked.missing -= 1;
        self.unpark(now_ms, key, out);
    }

    /// Begins a parked load all of whose blocks are here.
    pub(super) fn unpark(&mut self, now_ms: u64, key: (SessionId, u64), out: &mut Vec<Action>) {
        let Some(parked) = self.arrivals.loads.get(&key).filter(|parked| parked.missing == 0) else { return };
        debug_assert_eq!(parked.held.len(), self.loads[&key].slots.len(), "all of its blocks are held");
        let Scheduler { holder, world_size, .. } = self.schedulers[&key.0];
        let load = self.loads.get_mut(&key).expect("it was parked");
        // However much its engine has leased by now: what an early answer named is its load's.
        let lease = self.dram.promise_held(key.0, holder, world_size, &load.slots, now_ms);
        let Some(lease) = lease else { return self.refuse_parked(key, out) };
        self.arrivals.loads.remove(&key);
        load.lease = Some(lease);
        let over = all_ranks(world_size) & !load.open;
        for rank in (0..world_size).filter(|rank| over >> rank & 1 == 1) {
            self.dram.consume(lease, key.0, rank).expect("not all ranks have ended it");
        }
        self.scheduler_waits(key.0, key.1);
        self.dispatch_load(key.0, key.1, out);
    }

    /// A block of a parked load is not to be had: nothing of it will be written.
    fn refuse_parked(&mut self, key: (SessionId, u64), out: &mut Vec<Action>) {
        self.let_go(key);
        self.loads.remove(&key).expect("it was parked");
        self.scheduler(key.0).pending.end_load();
        self.refuse_load(key.0, key.1, Status::Absent, out);
    }

    /// A load is parked no more.
    pub(super) fn let_go(&mut self, key: (SessionId, u64)) {
        let parked = self.arrivals.loads.remove(&key);
        parked.into_iter().for_each(|parked| self.unhold(key.0, parked.held));
    }
}
