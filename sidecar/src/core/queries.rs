//! Queries: the key logs of each engine, the leases on them, and the waits of their questions.
//!
//! A query's leading run is followed past its end in DRAM, as long as each block lies in DRAM, is on its way
//! there, or can be had. Missing blocks are requested, and the blocks between them are held. Once everything
//! has ended, or the time is over, the answer is the leased run: never more than the question's keys, perhaps
//! less.
//!
//! A query for the last kept key is narrowed to a question for one key ([`last`]).

mod early;
mod key_logs;
mod last;
mod promises;
mod streams;
mod waits;
mod windows;

use std::collections::BTreeMap;
use std::time::Duration;

use mesh::directory::Credit;
use shm_protocol::hints::Advice;
use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::message::{Outcome, Status, WAY_LAST};
use shm_protocol::pool::SlotRef;
use shm_protocol::request::{self, Advise, LogKeys, Query};
use tiers::LeaseError;
use tiers::dram::{EndedChain, Ending, HolderId, LeaseId};

pub(super) use self::early::EarlyBlocks;
use self::key_logs::{KeyLog, KeyLogs, QueryLease};
use self::promises::EndingPromises;
pub(super) use self::streams::Stream;
use self::waits::{Sent, Wait};
use self::windows::{EnginePatience, Windows};
use super::context::Context;
use super::engines::{Engines, SchedulerRole};
use super::event::{Action, AdvicePart, FinishedRequest};
use super::hints::{AdviceProgress, advise_part, note_demotion, outcome_of};
use super::namespaces::Binding;
use super::timing::{Timed, TimedPart};
use super::{Base, SessionId, Violation};

#[derive(Debug, Default)]
pub(super) struct Queries {
    askers: BTreeMap<SessionId, QueryAsker>,
    /// Waiting queries, and those answered early: at most one for each log of a session.
    waits: BTreeMap<(SessionId, u32), Wait>,
    /// Waiting questions with blocks still to be requested, and their leased hits.
    unsent: Vec<(Question, u32)>,
    /// Questions that wait for a producer, with promised blocks perhaps still to be asked for.
    unstood: Vec<Question>,
    windows: Windows,
    promises: EndingPromises,
    /// Prompts with more blocks than the pool holds, at most one for each scheduler.
    streams: BTreeMap<SessionId, Stream>,
}

/// A scheduler, as far as its questions need it.
#[derive(Debug)]
struct QueryAsker {
    holder: HolderId,
    logs: KeyLogs,
    patience: EnginePatience,
    /// The trust in its engine's promises.
    credit: Credit,
    /// The outcome so far of a hint with parts to come.
    advice: Option<AdviceProgress>,
}

#[derive(Copy, Clone, Debug)]
struct Question {
    session: SessionId,
    op: u64,
    log: u32,
    from: u32,
    count: u32,
    /// The first key of a query for the last kept one. `from` is then the wanted key.
    first: Option<u32>,
    /// True if it may be answered while its blocks are on their way.
    arriving: bool,
    /// True if another engine computes its blocks, or is about to.
    awaits: bool,
    /// True if it may be answered with more hits than the pool holds.
    streams: bool,
    asked: Duration,
}

/// The leased hits of a query.
#[derive(Debug)]
struct FoundRun {
    /// Hits named by an earlier answer.
    known: u32,
    /// Slots of the hits behind them.
    refs: Vec<SlotRef>,
}

// === impl FoundRun ===

impl FoundRun {
    fn hits(&self) -> u32 {
        self.known + self.refs.len() as u32
    }
}

// === impl Queries ===

impl Queries {
    /// Adds a scheduler: it may ask from now on.
    pub(super) fn enter_scheduler(&mut self, session: SessionId, scheduler: &SchedulerRole) {
        let patience = EnginePatience::new(scheduler.waits);
        let (holder, logs, credit) = (scheduler.holder, KeyLogs::default(), Credit::default());
        self.askers.insert(session, QueryAsker { holder, logs, patience, credit, advice: None });
    }

    /// Removes a gone scheduler, with its questions and leases.
    pub(super) fn leave_scheduler(&mut self, session: SessionId, cx: &mut Context) {
        self.end_waits(session, cx);
        self.streams.remove(&session);
        self.promises_may_differ();
        let asker = self.askers.remove(&session).expect("it has entered");
        asker.logs.leases().for_each(|lease| lease.release_lease(session, cx));
    }

    /// Returns the other engines bound to a namespace: they may compute the blocks awaited in it.
    fn others<'a>(
        &'a self,
        session: SessionId,
        namespace: u32,
        engines: &'a Engines,
    ) -> impl Iterator<Item = SessionId> + 'a {
        let sessions = self.askers.keys().copied().filter(move |other| *other != session);
        sessions.filter(move |other| engines.bound_to(*other) == Some(namespace))
    }

    fn asker(&mut self, session: SessionId) -> &mut QueryAsker {
        self.askers.get_mut(&session).expect("the caller checked")
    }

    fn log(&self, session: SessionId, number: u32) -> &KeyLog {
        self.askers[&session].logs.known(number)
    }

    /// Returns the key logs of a scheduler.
    pub(super) fn logs(&mut self, session: SessionId) -> &mut KeyLogs {
        &mut self.asker(session).logs
    }

    /// Returns the keys named by a question.
    fn wanted_keys(&self, question: Question) -> &[BlockHash] {
        self.log(question.session, question.log).wanted_keys(question)
    }

    /// Returns the keys before those of a save (all if its blocks are compared, otherwise the last one), and
    /// the keys of the save. Fails if keys of the save were not appended.
    pub(super) fn keys_of(
        &self,
        session: SessionId,
        asked: &request::Save,
    ) -> Result<(Vec<BlockHash>, Vec<BlockHash>), Violation> {
        let LogKeys { log, from, .. } = asked.keys;
        let from = from as usize;
        let log = self.askers[&session].logs.get(log)?;
        let keys = log.keys.get(from..asked.keys.end() as usize);
        let keys = keys.ok_or_else(|| format!("query {asked:?} names keys that were not appended"))?.to_vec();
        let first = if asked.checked { 0 } else { from.saturating_sub(1) };
        Ok((log.keys[first..from].to_vec(), keys))
    }

    /// Notes an accepted SAVE.
    pub(super) fn note_save(&mut self, session: SessionId, asked: &request::Save) {
        self.logs(session).note_save(asked);
    }

    /// Returns the key replaced by a save.
    pub(super) fn replaced_key(&self, session: SessionId, asked: &request::Save) -> Option<BlockHash> {
        let place = asked.replaced.checked_sub(1)?;
        self.log(session, asked.keys.log).keys.get(place as usize).copied()
    }

    /// True if the last key of a save is the key of a prompt's tail.
    pub(super) fn ends_with_tail(&self, session: SessionId, asked: &request::Save) -> bool {
        let last = asked.keys.end().checked_sub(1).filter(|_| asked.keys.count > 0);
        last.is_some_and(|last| self.log(session, asked.keys.log).is_tail(last as usize))
    }

    /// Returns the number of a save's first keys whose blocks came in a stream.
    pub(super) fn streamed_count(&self, session: SessionId, asked: &request::Save) -> u32 {
        self.log(session, asked.keys.log).streamed.saturating_sub(asked.keys.from)
    }

    /// Returns the number of blocks kept for other engines before the request of an open log came.
    pub(super) fn kept_before(&self, session: SessionId, log: u32) -> u64 {
        self.log(session, log).kept_before
    }

    /// RELEASE: ends the lease of a log, or the wait of its query.
    pub(super) fn release_log(
        &mut self,
        session: SessionId,
        log: u32,
        cx: &mut Context,
    ) -> Result<(), Violation> {
        self.end_wait(session, log, cx);
        if let Some(lease) = self.logs(session).take_lease(log)? {
            lease.release_lease(session, cx);
        }
        Ok(())
    }

    /// Ends every lease, every wait and the stream of a session's logs.
    pub(super) fn end_leases(&mut self, session: SessionId, cx: &mut Context) {
        // Logs without a lease, of which there may be 65,536, cost nothing: each lease was paid for by a query.
        self.end_waits(session, cx);
        self.streams.remove(&session);
        for log in self.askers[&session].logs.leased() {
            self.release_log(session, log, cx).expect("a leased log is open");
        }
    }

    /// CLOSE: closes a log. Its request, if it has not ended before, asks for no more of its blocks.
    ///
    /// `way`: a number for the way the answer ended; 0: unknown. `newest_handover` returns the operation of
    /// this scheduler's newest unfinished save for another engine.
    pub(super) fn close_log(
        &mut self,
        session: SessionId,
        (log, way): (u32, u32),
        newest_handover: impl FnOnce() -> Option<u64>,
        base: &mut Base,
    ) -> Result<(), Violation> {
        self.release_log(session, log, &mut base.cx)?;
        self.end_promise(session, log, newest_handover, base);
        let is_promised = self.logs(session).promised.contains(&log);
        let closed = self.logs(session).close_log(log).filter(|log| log.ended.is_none());
        // The request of a tail goes on in another log, with the same keys before it.
        if let Some(mut log) = closed.filter(|log| is_promised || !log.tail) {
            let keys = std::mem::take(&mut log.keys);
            end_request(session, &log, keys, make_ending(way, false), base);
        }
        Ok(())
    }

    /// ENDED: ends the request of a log as [`Queries::close_log`] does. The log stays, for blocks on the
    /// engine's device.
    pub(super) fn end_log(
        &mut self,
        session: SessionId,
        (number, way): (u32, u32),
        newest_handover: impl FnOnce() -> Option<u64>,
        base: &mut Base,
    ) -> Result<(), Violation> {
        self.release_log(session, number, &mut base.cx)?;
        self.end_promise(session, number, newest_handover, base);
        let logs = self.logs(session);
        let log = logs.known_mut(number);
        if log.ended.is_some() || log.tail {
            return Err(format!("log {number} cannot end on the device: it has ended, or has a tail"));
        }
        let ending = make_ending(way, true);
        log.ended = Some(end_request(session, log, log.keys.clone(), ending, base));
        logs.has_device = true;
        Ok(())
    }

    /// LEFT: the blocks of these keys are on the engine's device no more.
    pub(super) fn leave_device(
        &mut self,
        session: SessionId,
        LogKeys { log, from, count }: LogKeys,
        base: &mut Base,
    ) -> Result<(), Violation> {
        let keys = self.askers[&session].logs.get(log)?.some(from, count);
        if let Some(binding) = base.engines[session].binding() {
            base.cx.dram.leave_device(binding.namespace, keys);
        }
        Ok(())
    }

    /// Returns the ended request of a save's log, if it has ended on the engine's device, and whether the
    /// device may have blocks with no copy.
    pub(super) fn on_device(&self, session: SessionId, log: u32) -> (Option<EndedChain>, bool) {
        (self.log(session, log).ended, self.askers[&session].logs.has_device)
    }

    pub(super) fn query(
        &mut self,
        session: SessionId,
        query: Query,
        base: &mut Base,
    ) -> Result<(), Violation> {
        let Query { op, keys: LogKeys { log, from, count }, arriving, awaits, last, streams } = query;
        self.askers[&session].logs.get(log)?;
        self.logs(session).known_mut(log).note_question(from, count);
        self.end_wait(session, log, &mut base.cx);
        let (first, asked) = (last.then_some(from), base.cx.now);
        let question = Question { session, op, log, from, count, first, arriving, awaits, streams, asked };
        let waits = self.ask_question(question, base);
        base.cx.stats.waits += u64::from(waits);
        Ok(())
    }

    /// HINT: begins to bring blocks into DRAM before a query for them. Leaves half of the room for arrivals
    /// to queries.
    pub(super) fn hint(
        &mut self,
        session: SessionId,
        keys: LogKeys,
        base: &mut Base,
    ) -> Result<(), Violation> {
        let Base { engines, sources, cx } = base;
        let log = self.askers[&session].logs.get(keys.log)?;
        let bound = engines[session].binding().filter(|_| !cx.draining && sources.any(&cx.dram));
        if let Some(binding) = bound {
            let brought = sources.bring(&binding, log.some(keys.from, keys.count), 2, false, cx);
            self.note_sources((session, keys.log), &brought.coming, cx);
            self.unhold(session, brought.held, cx);
        }
        Ok(())
    }

    /// A part of an ADVISE: keeps, lets go or fetches blocks, by a hint. Blocks of a request are let go at its end, since that
    /// is a use of them. `saved_words` returns the sorted first words of the keys of this scheduler's unfinished saves.
    pub(super) fn advise(
        &mut self,
        session: SessionId,
        &AdvicePart { advise, is_last }: &AdvicePart,
        saved_words: impl Fn() -> Vec<u64>,
        base: &mut Base,
    ) -> Result<(), Violation> {
        let Advise { op, keys: LogKeys { log: number, from, count }, advice, alone } = advise;
        let asker = self.asker(session);
        asker.logs.get(number)?;
        let log = asker.logs.known_mut(number);
        let begun = asker.advice.take();
        let is_first = begun.is_none();
        let AdviceProgress { mut found, saved } = begun.unwrap_or_default();
        log.is_alone |= alone;
        let keys = log.some(from, count).to_vec();
        let binding = base.engines[session].binding().filter(|_| !base.cx.draining);
        // Another block with such a first word is awaited without effect.
        let is_saved =
            |hash: &BlockHash| saved.get_or_init(&saved_words).binary_search(&hash.words()[0]).is_ok();
        match binding {
            None => found.missing += u64::from(count),
            Some(binding) if advice == Advice::Demote && !alone => {
                // The parts of a demotion come from the last to the first.
                let later = log.demoted.take().filter(|_| !is_first);
                let end = later.map_or(from as usize + keys.len(), |later| later.end);
                log.demoted = Some(from as usize..end);
                note_demotion(&binding, &keys, is_saved, &mut found, base);
            }
            Some(binding) => advise_part(advice, &binding, &keys, is_saved, &mut found, base),
        }
        if is_last {
            base.cx.actions.push(Action::Outcome { session, op, outcome: outcome_of(op, found) });
        } else {
            self.asker(session).advice = Some(AdviceProgress { found, saved });
        }
        Ok(())
    }

    /// Remembers the sources of a log's blocks on their way.
    fn note_sources(&mut self, (session, log): (SessionId, u32), coming: &[BlockKey], cx: &Context) {
        let log = self.asker(session).logs.known_mut(log);
        log.brought.extend(coming.iter().filter_map(|key| Some((key.hash, cx.arrivals.source(key)?))));
    }

    /// Answers a question, or lets it wait for missing blocks. True if it waits. The engine is held up until
    /// then, so missing blocks are requested afterwards.
    fn ask_question(&mut self, question: Question, base: &mut Base) -> bool {
        let scheduler = &base.engines[question.session];
        let Some(binding) = scheduler.binding().filter(|_| !base.cx.draining) else {
            answer_nothing(question, scheduler, &mut base.cx);
            base.engines.note_asked_in_vain(question.session);
            return false;
        };
        let question = self.narrow(question, &binding, base);
        let found = self.lease(question, &binding, scheduler.world_size, &mut base.cx);
        let may_ask_peers = base.sources.may_ask_peers(&binding, &base.cx);
        let may_wait =
            may_ask_peers || question.awaits && self.has_producer(question, &binding, &base.engines);
        let may_send = self.see_run(question, found.hits(), may_wait, &mut base.cx);
        let wanted = self.wanted_keys(question);
        let missing = wanted.get(found.hits() as usize..).unwrap_or_default();
        let is_whole = missing.is_empty();
        let may_arrive = may_send && base.sources.may_arrive(&binding, missing, question.awaits, &base.cx);
        if may_arrive {
            self.unsent.push((question, found.hits()));
        }
        let may_ask = may_ask_peers || question.awaits;
        let waits = may_arrive || !is_whole && may_ask && self.wait_for_producer(question, base);
        if waits {
            self.answer_question(question, found, Status::Pending, &mut base.cx);
        } else {
            self.answer_whole(question, found, &binding, base);
        }
        waits
    }

    /// Requests the missing blocks of this event's waiting questions, and those promised by peers.
    pub(super) fn send_for_unsent(&mut self, base: &mut Base) {
        for (question, hits) in std::mem::take(&mut self.unsent) {
            let Some(binding) = base.engines[question.session].binding() else { continue };
            let waits = match self.send_for(question, hits, &binding, base) {
                Sent::Waits => true,
                Sent::Nothing => self.wait_for_producer(question, base),
                Sent::Slower => false,
            };
            if !waits {
                self.answer_late(question, base);
            }
        }
        for question in std::mem::take(&mut self.unstood) {
            self.stand_for(question, base);
        }
    }

    /// Answers a query at the end of its wait, with the blocks here.
    fn answer_late(&mut self, question: Question, base: &mut Base) {
        let scheduler = &base.engines[question.session];
        match scheduler.binding().filter(|_| !base.cx.draining) {
            Some(binding) => {
                let found = self.lease(question, &binding, scheduler.world_size, &mut base.cx);
                self.answer_whole(question, found, &binding, base);
            }
            None => answer_nothing(question, scheduler, &mut base.cx),
        }
    }

    /// Answers a query that no longer waits.
    fn answer_whole(
        &mut self,
        mut question: Question,
        mut found: FoundRun,
        binding: &Binding,
        base: &mut Base,
    ) {
        self.end_window(question, found.hits(), base);
        if found.hits() == 0 && question.first.is_some() {
            question = self.narrow_below(question, binding, &base.cx);
            let world_size = base.engines[question.session].world_size;
            found = self.lease(question, binding, world_size, &mut base.cx);
        }
        self.answer_question(question, found, Status::Ok, &mut base.cx);
    }

    fn answer_question(&mut self, question: Question, found: FoundRun, status: Status, cx: &mut Context) {
        let Question { session, op, log, from, first, asked, .. } = question;
        let log = self.log(session, log);
        let (hits, chunks) = (found.hits(), log.chunks.clone());
        let before = first.filter(|_| hits > 0).map_or(0, |first| from - first);
        if status != Status::Pending {
            cx.stats.queries += 1;
            cx.stats.query_blocks += log.wanted_keys(question).len() as u64;
            cx.stats.query_hit_blocks += u64::from(hits);
            cx.took(Timed::Query(TimedPart::Whole), asked);
        }
        let outcome = Outcome { op: op as u32, value: before + hits, status };
        let (refs, from) = (found.refs, from + found.known);
        let sources = log.sources(from, refs.len());
        cx.actions.push(Action::Answer { session, op, outcome, refs, sources, chunks, from });
    }

    /// Leases the leading hits in DRAM to the question's log.
    fn lease(
        &mut self,
        question: Question,
        binding: &Binding,
        world_size: u32,
        cx: &mut Context,
    ) -> FoundRun {
        let (now_ms, dram, session) = (cx.now_ms, &mut cx.dram, question.session);
        let logs = self.logs(session);
        let log = logs.known(question.log);
        let wanted = log.wanted_keys(question);
        let mut refs = Vec::with_capacity(wanted.len());
        let namespace = binding.namespace;
        let mut known = 0;
        let same = log.lease.filter(|lease| lease.from == question.from);
        let renewed = same.filter(|lease| dram.renew(lease.id, session, now_ms).is_ok());
        let granted = if let Some(lease) = renewed {
            // More engines may be at work than at the grant.
            let fitting = dram.fitting(lease.id, session).unwrap_or(0);
            known = (lease.hits as usize).min(wanted.len()).min(fitting);
            let more = &wanted[known..];
            // An earlier answer may have named fewer hits than the lease holds: new hits follow the named
            // ones.
            let kept = dram.truncate(lease.id, session, 0, known);
            let added =
                kept.and_then(|()| dram.extend(lease.id, session, namespace, more, now_ms, &mut refs));
            added.ok().map(|_| lease.id)
        } else {
            if let Some(stale) = log.lease {
                // At worst the lease has expired meanwhile.
                let _ = dram.release(stale.id, session);
            }
            let holder = binding.whose.holder;
            dram.grant(session, holder, world_size, namespace, wanted, now_ms, &mut refs)
        };
        let leased = wanted[known..].iter().take(refs.len());
        leased.for_each(|hash| cx.prefetched.use_block(&binding.block_key(hash)));
        let (op, from, hits) = (question.op, question.from, (known + refs.len()) as u32);
        logs.lease(question.log, granted.map(|id| QueryLease { id, op, from, hits }));
        if let Some(first) = question.first {
            // Without a hit the request goes on from the engine's own state.
            logs.known_mut(question.log).read_from = if hits > 0 { from } else { first.saturating_sub(1) };
        }
        FoundRun { known: known as u32, refs }
    }

    /// Turns the lease of a log into one until every rank has ended a load. Returns it with the load's slots.
    /// Fails if the load names no live lease, or blocks outside it.
    pub(super) fn promise_lease(
        &mut self,
        session: SessionId,
        asked: &request::Load,
        cx: &mut Context,
    ) -> Result<(LeaseId, Vec<SlotRef>), Status> {
        let LogKeys { log: number, from, count } = asked.keys;
        let logs = self.logs(session);
        let log = logs.get(number).map_err(|_| Status::LeaseUnknown)?;
        let lease = log.lease.filter(|lease| lease.op == asked.lease).ok_or(Status::LeaseUnknown)?;
        let first = from.saturating_sub(lease.from) as usize;
        let slots: Vec<SlotRef> = cx.dram.slots(lease.id, session).map_err(status)?.collect();
        let slots = lease.part(&slots, from, count).ok_or(Status::LeaseUnknown)?;
        cx.dram.truncate(lease.id, session, first, slots.len()).map_err(status)?;
        cx.dram.promise(lease.id, session).map_err(status)?;
        logs.take_lease(number).map_err(|_| Status::LeaseUnknown)?;
        Ok((lease.id, slots))
    }
}

/// Answers a question of an engine without service. `NotReady` asks for another question: a draining sidecar
/// and a closed namespace give other answers.
fn answer_nothing(question: Question, scheduler: &SchedulerRole, cx: &mut Context) {
    let status = match scheduler.barred() {
        _ if cx.draining => Status::Ok,
        Some(_) => Status::Barred,
        None => Status::NotReady,
    };
    let Question { session, op, .. } = question;
    let outcome = Outcome { op: op as u32, value: 0, status };
    if !scheduler.is_probe() {
        cx.stats.queries += 1;
        cx.took(Timed::Query(TimedPart::Whole), question.asked);
    }
    cx.actions.push(Action::Outcome { session, op, outcome });
}

fn status(error: LeaseError) -> Status {
    match error {
        LeaseError::Unknown => Status::LeaseUnknown,
        LeaseError::Expired => Status::LeaseExpired,
        LeaseError::Foreign => Status::LeaseForeign,
        LeaseError::Consumed => Status::LeaseConsumed,
    }
}

fn make_ending(way: u32, on_device: bool) -> Ending {
    Ending { way, last: way == WAY_LAST, on_device, unread: 0 }
}

/// Ends a request with these keys: the tier sorts its blocks, and the forecaster learns of it.
fn end_request(
    session: SessionId,
    log: &KeyLog,
    keys: Vec<BlockHash>,
    ending: Ending,
    base: &mut Base,
) -> EndedChain {
    let Some(binding) = base.engines[session].binding().filter(|_| !log.is_alone) else {
        return EndedChain::default();
    };
    let Binding { whose, namespace, .. } = binding;
    let ending = Ending { unread: log.read_from as usize, ..ending };
    let ended = base.cx.dram.end_chain(whose.holder, namespace, &keys, ending);
    if let Some(demoted) = log.demoted.clone().and_then(|range| keys.get(range)) {
        base.cx.dram.demote_chain(whose.holder, namespace, demoted);
    }
    if let Some(part) = base.engines.part_of_set(session, &log.saved) {
        let (block_bytes, asked) = (binding.block_bytes(), log.first_asked.clone().unwrap_or_default());
        // The forecaster knows no device, and what other rooms have before a request's states.
        let ending = Ending { on_device: false, unread: 0, ..ending };
        base.cx.ended.push(FinishedRequest { namespace, block_bytes, keys, asked, ending, part });
    }
    ended
}
