//! Matching: queries under a budget, and the answers that may be used.

use shm_protocol::message::{Outcome, Status};
use shm_protocol::request::{Keys, Query, SchedulerRequest};

use super::link::Question;
use super::request::Lease;
use super::scheduler::{Hit, Phase, Scheduler};
use crate::ctx::{Ctx, Micros};

/// How long an engine asks again whose ranks have not joined: as the shim does.
const UNBOUND_WAIT: Micros = 200_000;

/// The first half of a query.
enum Asked {
    Answered(u32),
    Posted(u64),
}

// === impl Scheduler: queries ===

impl Scheduler {
    /// Asks about the request at the head of the queue, or goes on to schedule.
    pub(super) fn match_next(&mut self, admit: usize, ctx: &mut Ctx) {
        self.phase = Phase::Schedule;
        let Some(&id) = self.waiting.front().filter(|_| admit > 0 && !self.free.is_empty()) else { return };
        let request = self.requests.get_mut(&id).expect("waiting requests exist");
        // Whoever asks starts anew.
        request.outdated = false;
        let from = usize::from(request.total() > 3 && ctx.rng.one_in(4));
        // One block is left to compute; now and then less is asked for than there is.
        let mut count = (request.known.min(request.total()) - 1).saturating_sub(from);
        if ctx.rng.one_in(4) {
            count = count.saturating_sub(1 + ctx.rng.below(2) as usize);
        }
        if request.refused || count == 0 || !self.append(id) {
            self.phase = Phase::Admit { hit: None, admit };
            return;
        }
        match self.ask(id, from as u32, count as u32, ctx) {
            Asked::Answered(hits) => self.answered(from, hits, admit, ctx),
            Asked::Posted(op) => {
                self.phase = Phase::Ask { op, deadline: ctx.now + self.left, admit };
            }
        }
    }

    fn answered(&mut self, from: usize, hits: u32, admit: usize, ctx: &mut Ctx) {
        let hit = (hits > 0).then(|| {
            let sync = self.model.sync > 0 && ctx.rng.one_in(self.model.sync) && !self.is_arriving();
            Hit { from, count: hits as usize, sync }
        });
        ctx.hit(if hit.is_some() { "engine hit" } else { "engine miss" });
        self.phase = Phase::Admit { hit, admit };
    }

    /// Whether blocks of the answer to the request at the head of the queue are on their way.
    fn is_arriving(&self) -> bool {
        let request = self.waiting.front().and_then(|id| self.requests.get(id));
        let log = request.and_then(|request| request.log);
        let log = self.link.as_ref().zip(log).and_then(|(link, (_, number))| link.logs.get(&number));
        log.and_then(|log| log.lease).is_some_and(|lease| lease.arriving)
    }

    /// Brings a request's log up to date; false while there is none to be had.
    pub(super) fn append(&mut self, id: u64) -> bool {
        let Some(link) = &mut self.link else { return false };
        let request = self.requests.get_mut(&id).expect("the caller's request");
        if request.log.is_none_or(|(generation, _)| generation != self.generation) {
            (request.appended, request.saved) = (0, 0);
            request.log = link.open().map(|number| (self.generation, number));
        }
        let Some((_, log)) = request.log else { return false };
        let keys = &request.spec.keys[request.appended..request.known.min(request.spec.keys.len())];
        if !keys.is_empty() && link.append(log, keys) {
            request.appended += keys.len();
            let count = request.appended as u32;
            // Without room it is dropped.
            let _ = link.post(SchedulerRequest::Hint { keys: Keys::new(log, 0..count) });
        }
        true
    }

    fn ask(&mut self, id: u64, from: u32, count: u32, ctx: &mut Ctx) -> Asked {
        let (Some(link), Some((_, number))) = (&mut self.link, self.requests[&id].log) else {
            return Asked::Answered(0);
        };
        let log = &link.logs[&number];
        let count = count.min(log.length.saturating_sub(from));
        if count == 0 {
            return Asked::Answered(0);
        }
        let old = |lease: &Lease| ctx.now - lease.since > link.connection.lease_ttl_ms * 1000 / 2;
        if let Some(lease) =
            log.lease.filter(|lease| (lease.from, lease.asked) == (from, count) && !old(lease))
        {
            ctx.hit("engine lease reused");
            return Asked::Answered(lease.hits);
        }
        self.post_query(number, from, count, ctx).map_or(Asked::Answered(0), Asked::Posted)
    }

    fn post_query(&mut self, number: u32, from: u32, count: u32, ctx: &mut Ctx) -> Option<u64> {
        let link = self.link.as_mut()?;
        if self.stalled.is_some_and(|heartbeat| heartbeat == link.heartbeat()) || self.left == 0 {
            link.connection.ring();
            ctx.hit("engine query not asked");
            return None;
        }
        self.stalled = None;
        let op = self.next_op;
        let query = Query { op, keys: Keys { log: number, from, count }, arriving: !self.model.by_engine };
        if !link.post(SchedulerRequest::Query(query)) {
            ctx.hit("engine query without room");
            return None;
        }
        link.flush();
        link.logs.get_mut(&number).expect("the caller's log").lease = None;
        link.questions.insert(op, Question { log: number, from, count, posted: ctx.now });
        self.next_op += 1;
        Some(op)
    }

    /// Looks for the answer: `None` while it may still come. It holds `None` where it is to be asked for in a later step.
    fn look(&mut self, op: u64, deadline: Micros, ctx: &mut Ctx) -> Option<Option<u32>> {
        let Some(link) = &mut self.link else { return Some(Some(0)) };
        let Some(question) = link.questions.get(&op).copied() else { return Some(Some(0)) };
        if let Some(outcome) = link.connection.memory.load_outcome(op)
            && outcome.status != Status::Pending
        {
            self.left = deadline.saturating_sub(ctx.now);
            return Some(self.settle(op, question, outcome, ctx));
        }
        if link.connection.is_lost() {
            return Some(Some(0));
        }
        if ctx.now < deadline {
            return None;
        }
        ctx.hit("engine query timed out");
        (self.left, self.stalled) = (0, Some(link.heartbeat()));
        link.questions.remove(&op);
        if link.logs.contains_key(&question.log) {
            // The late answer would hold blocks under a lease that nobody uses.
            link.post(SchedulerRequest::Release { log: question.log });
            link.flush();
        }
        Some(Some(0))
    }

    fn settle(&mut self, op: u64, question: Question, outcome: Outcome, ctx: &mut Ctx) -> Option<u32> {
        let link = self.link.as_mut().expect("it has the answer");
        link.questions.remove(&op);
        let is_unbound = outcome.status == Status::NotReady;
        link.unbound_since = is_unbound.then(|| link.unbound_since.unwrap_or(ctx.now));
        if let Some(since) = link.unbound_since {
            ctx.hit("engine query not ready");
            if ctx.now - since < UNBOUND_WAIT {
                return None;
            }
        }
        if outcome.status == Status::Barred {
            ctx.hit("engine query barred");
        }
        let arriving = outcome.status == Status::Arriving;
        if arriving {
            ctx.hit("engine early answer");
        }
        let hits = if outcome.status == Status::Ok || arriving { outcome.value } else { 0 };
        assert!(hits <= question.count, "{hits} hits of {} keys", question.count);
        let Question { log, from, count, posted } = question;
        let Some(log) = link.logs.get_mut(&log) else { return Some(0) };
        log.lease = (hits > 0).then_some(Lease { op, from, asked: count, hits, arriving, since: posted });
        Some(hits)
    }

    pub(super) fn await_answer(&mut self, op: u64, deadline: Micros, admit: usize, ctx: &mut Ctx) {
        let from = self.link.as_ref().and_then(|link| link.questions.get(&op)).map_or(0, |asked| asked.from);
        match self.look(op, deadline, ctx) {
            Some(Some(hits)) => self.answered(from as usize, hits, admit, ctx),
            // The ranks join in this step.
            Some(None) => self.phase = Phase::Schedule,
            None => self.phase = Phase::Ask { op, deadline, admit },
        }
    }

    pub(super) fn await_renewal(&mut self, op: u64, deadline: Micros, admit: usize, hit: Hit, ctx: &mut Ctx) {
        match self.look(op, deadline, ctx) {
            Some(_) => self.post_load(hit, admit, ctx),
            None => self.phase = Phase::Renew { op, deadline, admit, hit },
        }
    }

    /// Asks again for a lease that is too old to be relied on; `None`: there is nothing to wait for.
    pub(super) fn renew(&mut self, id: u64, ctx: &mut Ctx) -> Option<u64> {
        let (_, number) = self.requests[&id].log?;
        let link = self.link.as_ref()?;
        let lease = link.logs.get(&number)?.lease?;
        if ctx.now - lease.since <= link.connection.lease_ttl_ms * 1000 / 2 {
            return None;
        }
        ctx.hit("engine lease renewed before the load");
        self.post_query(number, lease.from, lease.asked, ctx)
    }
}
