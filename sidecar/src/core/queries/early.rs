//! Early answers: a query with blocks on their way is answered once the first of them is here, and its blocks
//! are loaded in parts, each as soon as all of it has arrived. Copies to the engine's memory then begin while
//! other blocks still arrive.
//!
//! They are for engines that ask for them, if this process writes the blocks and no step waits for them: such
//! a load may fail. Blocks of an early answer are held for the time of a lease.

use shm_protocol::key::BlockHash;
use shm_protocol::message::Status;
use shm_protocol::pool::SlotRef;
use shm_protocol::request;

use super::waits::{AnsweredRun, WaitPhase};
use super::{Base, Binding, Context, FoundRun, Queries, Question, SessionId};

/// Bytes on their way worth an early answer. A load without a waiting step costs its request about a step
/// more, and the early answer gains the time of a copy to the device: 6 ms for so many at 40 GB/s.
const BYTES_MIN: u64 = 256 << 20;
/// The same in a small pool: 1 of so many parts of the limit for arrivals.
const PART: u64 = 16;

/// The blocks of a load under an early answer.
#[derive(Debug)]
pub(crate) enum EarlyBlocks {
    /// Each with the slot named for it.
    Named(Vec<(BlockHash, SlotRef)>),
    /// No slot was named: they are fetched for the load.
    Streamed(Vec<BlockHash>),
}

// === impl Queries ===

impl Queries {
    /// Answers a query whose first missing block has come, if enough of the others are still on their way.
    pub(super) fn answer_early(&mut self, place: (SessionId, u32), base: &mut Base) {
        let Some(wait) = self.waits.get(&place) else { return };
        let WaitPhase::ForBlocks { open, whole, .. } = wait.phase else { return };
        let question = wait.question;
        // An incomplete run may still grow while its window is open.
        let may_grow = !whole && self.log(place.0, place.1).window.is_some();
        if !question.arriving || may_grow || !writes_loads(place.0, base) || !self.ends_soon(wait, base) {
            return;
        }
        let least = BYTES_MIN.min(base.cx.arrivals.bytes_max() / PART);
        // An engine asks for blocks of another engine at the end of the other's step: only copies are left.
        let at_once = question.awaits && whole;
        let is_worth_it = |binding: &Binding, blocks: usize| {
            blocks > 0 && (at_once || blocks as u64 * binding.block_bytes() >= least)
        };
        let Some(binding) = base.engines[place.0].binding().filter(|it| is_worth_it(it, open)) else {
            return;
        };
        let (slots, held, coming) = self.find_run(question, &binding, &mut base.cx);
        if !is_worth_it(&binding, coming) {
            return self.unhold(place.0, held, &mut base.cx);
        }
        let until_ms = base.cx.now_ms.saturating_add(base.cx.dram.config().lease_ttl_ms);
        let wait = self.waits.get_mut(&place).expect("found above");
        base.cx.took(wait.timed(), wait.since);
        let before = std::mem::replace(&mut wait.held, held);
        wait.phase = WaitPhase::Answered { run: AnsweredRun::Named(slots.clone()), until_ms };
        if let Ok(Some(lease)) = self.asker(place.0).logs.take_lease(place.1) {
            lease.release_lease(place.0, &mut base.cx);
        }
        self.unhold(place.0, before, &mut base.cx);
        base.cx.stats.early_answers += 1;
        question.count_wait(&mut base.cx);
        self.end_window(question, slots.len() as u32, base);
        self.answer_question(question, FoundRun { known: 0, refs: slots }, Status::Arriving, &mut base.cx);
    }

    /// Returns the part of a question's run here or on its way: all its slots, the held slots of the blocks
    /// here, and the number of blocks on their way.
    fn find_run(
        &self,
        question: Question,
        binding: &Binding,
        cx: &mut Context,
    ) -> (Vec<SlotRef>, Vec<SlotRef>, usize) {
        let (mut slots, mut held, mut coming) = (Vec::new(), Vec::new(), 0);
        for hash in self.wanted_keys(question) {
            let key = binding.block_key(hash);
            if let Some(slot) = cx.dram.hold(&key, binding.whose.holder) {
                held.push(slot);
                slots.push(slot);
            } else if cx.arrivals.is_unverified(&key) {
                // No engine learns the slot of an unverified block: the answer waits.
                return (slots, held, 0);
            } else if cx.arrivals.is_in_time(&key, question.awaits).is_some()
                && let Some(slot) = cx.arrivals.join_once(&key, question.waiter())
            {
                coming += 1;
                slots.push(slot);
            } else {
                break;
            }
        }
        (slots, held, coming)
    }

    /// Returns the blocks of a load under an early answer. `None`: the load names no query answered early.
    pub(crate) fn early(
        &self,
        session: SessionId,
        asked: &request::Load,
    ) -> Option<Result<EarlyBlocks, Status>> {
        let request::LogKeys { log, from, count } = asked.keys;
        let wait = self.waits.get(&(session, log)).filter(|wait| wait.question.op == asked.lease)?;
        let WaitPhase::Answered { run, .. } = &wait.phase else { return None };
        let first = from.checked_sub(wait.question.from).map(|first| first as usize);
        let part = first.map(|first| first..first + count as usize);
        // Such a load may fail: no step may wait for it, and no engine may copy it.
        let part = part.filter(|_| !asked.flags.sync() && !asked.flags.by_engine());
        let keys = self.log(session, log).some(from, count);
        let blocks = part.and_then(|part| match run {
            AnsweredRun::Named(slots) => {
                let named = keys.iter().copied().zip(slots.get(part)?.iter().copied());
                Some(EarlyBlocks::Named(named.collect()))
            }
            AnsweredRun::Streamed(hits) => {
                (part.end <= *hits as usize).then(|| EarlyBlocks::Streamed(keys.to_vec()))
            }
        });
        Some(blocks.ok_or(Status::LeaseUnknown))
    }
}

/// True if every rank of a scheduler has joined, and leaves its loads to this process.
pub(super) fn writes_loads(session: SessionId, base: &Base) -> bool {
    !base.cx.draining && base.engines.every_rank(session, |rank| !rank.by_engine)
}
