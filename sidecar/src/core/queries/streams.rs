//! Streams: prompts with more blocks than their engine's part of the pool holds. The answer promises all of
//! them, and names no slot. Each load gets its slots in its turn, and gives them back at its end.
//!
//! A scheduler has one stream at a time. The rule of waits goes on to hold for the rest of a stream: if the
//! engine would compute it sooner, its loads are refused.

use std::collections::{BTreeMap, VecDeque};

use shm_protocol::key::BlockHash;
use shm_protocol::layout::STREAM_PARTS_MAX;
use shm_protocol::message::Status;
use shm_protocol::pool::SlotRef;

use super::early::writes_loads;
use super::waits::{AnsweredRun, WaitPhase};
use super::{Base, Binding, FoundRun, Queries, Question, SessionId};
use crate::core::arrivals::{Owed, SourceLane};
use crate::core::worth::{Outlook, Over};

/// The blocks read ahead for a stream take 1 of so many parts of its engine's share of the pool.
const PART: u64 = 2;
/// The slot named for a block without one: no pool has a slot there.
const NO_SLOT: SlotRef = SlotRef { offset: 0, generation: 0 };

/// A prompt on its way to an engine's memory.
#[derive(Debug)]
pub(crate) struct Stream {
    question: Question,
    /// The end of its blocks among the keys of the log.
    end: u32,
    /// Number of blocks not sent for yet.
    left: u32,
    /// Loads with such blocks, in the order of their keys.
    pub(crate) queue: VecDeque<u64>,
    /// The bytes due from its sources.
    owed: BTreeMap<SourceLane, Owed>,
    /// The last time of a part's progress, or of a wait for the engine.
    moved_ms: u64,
}

// === impl Stream ===

impl Stream {
    /// True for the stream of this query.
    pub(crate) fn has_promise(&self, op: u64) -> bool {
        self.question.op == op
    }

    /// True if its blocks end before this key of the log.
    pub(crate) fn ends_at(&self, key: u32) -> bool {
        self.end == key
    }

    /// Returns the limit of blocks read for its loads at once.
    pub(crate) fn window(&self, binding: &Binding, base: &Base) -> usize {
        window(binding, base) as usize
    }

    /// Notes blocks just sent for, due from these sources.
    pub(crate) fn note_sent(&mut self, blocks: usize, owed: BTreeMap<SourceLane, Owed>) {
        self.left = self.left.saturating_sub(blocks as u32);
        self.owed.extend(owed);
    }

    /// Notes progress of the stream, or a wait for its engine.
    pub(crate) fn note_moved(&mut self, now_ms: u64) {
        self.moved_ms = now_ms;
    }

    /// Returns the reason to refuse its rest, if there is one. `missing`: blocks on their way.
    pub(crate) fn over(&self, missing: usize, base: &Base) -> Option<Over> {
        let begin = self.end.saturating_sub(self.left + missing as u32).max(self.question.from);
        let outlook = self.question.outlook(&self.owed, self.left, begin..self.end, self.moved_ms, base);
        // Idle sources have no rate.
        let load_ms = outlook.load_ms.filter(|_| missing > 0);
        Outlook { load_ms, ..outlook }.over(base.engines[self.question.session].load_wait)
    }
}

// === impl Queries ===

impl Queries {
    /// Returns the stream of a scheduler, if it has one.
    pub(crate) fn stream(&mut self, session: SessionId) -> Option<&mut Stream> {
        self.streams.get_mut(&session)
    }

    /// Returns the schedulers with a stream.
    pub(crate) fn streaming(&self) -> Vec<SessionId> {
        self.streams.keys().copied().collect()
    }

    /// Ends the stream of a scheduler; with `log`, only a stream of this log. Returns the stream's query.
    pub(crate) fn end_stream(&mut self, session: SessionId, log: Option<u32>) -> Option<u64> {
        let is_meant = |stream: &Stream| log.is_none_or(|log| stream.question.log == log);
        self.streams.get(&session).filter(|stream| is_meant(stream))?;
        self.streams.remove(&session).map(|stream| stream.question.op)
    }

    /// Ends a stream with all of its blocks sent for, once its answer names no further load.
    pub(crate) fn end_unused_stream(&mut self, session: SessionId, log: u32) {
        let answered = self.waits.get(&(session, log)).is_some_and(super::waits::Wait::is_answered);
        let is_over = |stream: &Stream| stream.question.log == log && stream.queue.is_empty();
        if !answered && self.streams.get(&session).is_some_and(is_over) {
            self.streams.remove(&session);
        }
    }

    /// Does the same after the last blocks of a stream were sent for.
    pub(crate) fn end_sent_stream(&mut self, session: SessionId) {
        let log = self.streams.get(&session).map(|stream| stream.question.log);
        log.into_iter().for_each(|log| self.end_unused_stream(session, log));
    }

    /// Returns the number of unsent blocks of the scheduler's stream, if a question waits for its end: the rest
    /// of its run is more than the pool holds, too.
    pub(super) fn ahead_in_stream(
        &self,
        question: Question,
        rest: &[BlockHash],
        binding: &Binding,
        base: &Base,
    ) -> Option<u32> {
        let stream = self.streams.get(&question.session).filter(|_| question.streams && !question.awaits)?;
        let holdable = base.cx.dram.holdable(binding.whose.holder, binding.block_bytes());
        let reach = base.sources.reach(binding, rest, &base.cx) as u64;
        (reach > holdable).then_some(stream.left)
    }

    /// Answers a waiting query with its whole run, if the pool cannot hold it. Returns false if the query goes
    /// on to wait.
    pub(super) fn answer_streamed(&mut self, place: (SessionId, u32), base: &mut Base) -> bool {
        let Some((question, end)) = self.streamable(place, base) else { return false };
        let Some(binding) = base.engines[place.0].binding() else { return false };
        let parts_max = (window(&binding, base) / PART).max(1) * STREAM_PARTS_MAX as u64;
        let hits = u64::from(end - question.from).min(parts_max) as u32;
        let mut sources = Vec::new();
        let run = self.log(place.0, place.1).some(question.from, hits);
        base.sources.walk_run(&binding, run, &base.cx, |hash, source| sources.push((*hash, source)));
        let before = self.log(place.0, place.1).lease.map_or(0, |lease| lease.hits);
        let cx = &mut base.cx;
        // The leased blocks are held instead: each load takes its own.
        let leased = self.log(place.0, place.1).some(question.from, before).iter();
        let keys: Vec<_> = leased.map(|hash| binding.block_key(hash)).collect();
        let held = keys.iter().filter_map(|key| cx.dram.hold(key, binding.whose.holder)).collect::<Vec<_>>();
        if let Ok(Some(lease)) = self.asker(place.0).logs.take_lease(place.1) {
            lease.release_lease(place.0, cx);
        }
        let wait = self.waits.get_mut(&place).expect("found above");
        cx.took(wait.timed(), wait.since);
        wait.held.extend(held);
        let until_ms = cx.now_ms.saturating_add(cx.dram.config().lease_ttl_ms);
        wait.phase = WaitPhase::Answered { run: AnsweredRun::Streamed(hits), until_ms };
        let (owed, queue, moved_ms) = (BTreeMap::new(), VecDeque::new(), cx.now_ms);
        let stream = Stream { question, end: question.from + hits, left: hits, queue, owed, moved_ms };
        self.streams.insert(place.0, stream);
        cx.stats.streamed_answers += 1;
        question.count_wait(cx);
        let log = self.asker(place.0).logs.known_mut(place.1);
        log.brought.extend(sources);
        log.streamed = question.from + hits;
        let refs = vec![NO_SLOT; hits as usize];
        self.answer_question(question, FoundRun { known: 0, refs }, Status::Streamed, cx);
        true
    }

    /// Returns the question of a wait, and the end of its run, if it may be answered with more than the pool
    /// holds.
    fn streamable(&self, place: (SessionId, u32), base: &Base) -> Option<(Question, u32)> {
        let wait = self.waits.get(&place)?;
        let WaitPhase::ForBlocks { rest, .. } = &wait.phase else { return None };
        let question = wait.question;
        let may = question.streams && !question.awaits && question.first.is_none();
        if !may || !self.is_judged(question, base) || !writes_loads(place.0, base) {
            return None;
        }
        // A run may still grow while its window is open.
        let grows = self.log(place.0, place.1).window.is_some();
        let binding = base.engines[place.0].binding().filter(|it| !grows && !it.parentless)?;
        let holdable = base.cx.dram.holdable(binding.whose.holder, binding.block_bytes());
        let fits = u64::from(rest.beyond) <= holdable;
        (!fits && !self.streams.contains_key(&place.0)).then_some((question, rest.end))
    }
}

/// Returns the limit of blocks read ahead for a stream of this engine.
fn window(binding: &Binding, base: &Base) -> u64 {
    (base.cx.dram.share_blocks(binding.block_bytes()) / PART).max(1)
}
