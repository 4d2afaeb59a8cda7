//! Queries, and loads under their leases.

use std::ops::Deref;
use std::time::{Duration, Instant};

use shm_protocol::layout::{
    OPERATIONS, PROMISED_WAIT_MS_MAX, QUERY_KEYS, QUERY_WAIT_MS_MAX, STREAM_PARTS_MAX,
};
use shm_protocol::message::{
    LOAD_ARRIVING, LOAD_BY_ENGINE, LOAD_EARLY, LOAD_STREAMED, LOAD_SYNC, Outcome, Status,
};
use shm_protocol::request::{Load, LoadFlags, LogKeys, Query, SchedulerRequest};
use shm_protocol::source::Source;

use super::EngineSession;
use super::link::PostedQuery;
use crate::core::endpoint::{Endpoint, Feature};
use crate::core::log_table::LogLease;
use crate::core::notices::NoticeCause;
use crate::core::plan::Plan;

/// Time for which queries are pending while the ranks have not joined; later queries are misses. Ranks join
/// in their first step after a start, or after the sidecar's restart, and a pending query makes the engine
/// run one: a few milliseconds, and up to some tens if many ranks wait for each other. A rank that stays out
/// delays each connection by this time, once.
pub const UNBOUND_WAIT: Duration = Duration::from_millis(200);
/// The longest wait of a pending query while the sidecar's heartbeat stands still. A working sidecar looks at
/// its queries every 100 ms; the rest is a wait for a core.
const PENDING_MAX: Duration = Duration::from_millis(QUERY_WAIT_MS_MAX as u64 + 1000);
/// The same for a query that the sidecar has not read: it reads its rings at once, and its longest turn takes some
/// tens of milliseconds.
const UNREAD_MAX: Duration = Duration::from_millis(200);
/// Time for an answer beyond the engine's own limit, and for a first sign that a query was read.
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// The longest wait for another engine's keys while the sidecar's heartbeat moves: the sidecar's own limit
/// for promised keys, and [`PENDING_MAX`] more.
const AWAITING_MAX: Duration = Duration::from_millis(PROMISED_WAIT_MS_MAX as u64).saturating_add(PENDING_MAX);
/// The most parts of a load: a few long requests must leave room among the 4,096 unanswered operations.
const PARTS_MAX: usize = 64;
/// The fewest parts of a load with more blocks than the pool holds.
const STREAM_PARTS_MIN: usize = 16;
/// The answer "not known yet: ask again".
pub const PENDING: i64 = -1;

/// The result of a query's first half.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum AskedQuery {
    /// Hits, or [`PENDING`].
    Answered(i64),
    /// The operation of a posted query: call [`EngineSession::look_for_answer`] for it.
    Posted(u64),
}

// === impl EngineSession: queries ===

impl<C: Deref<Target: Endpoint>> EngineSession<C> {
    /// Asks for the leading hits of keys `start..start + count`: returns a known answer, or posts the query.
    pub fn ask_query(&mut self, handle: i64, start: u32, count: u32, now: Instant) -> AskedQuery {
        self.counters.queries += 1;
        let Some(link) = &mut self.link else { return AskedQuery::Answered(0) };
        let Some((_, log)) = link.logs.get(handle) else { return AskedQuery::Answered(0) };
        let count = log.askable(start, count);
        if count == 0 {
            return AskedQuery::Answered(0);
        }
        if let Some(lease) = log.lease
            && (lease.from, lease.asked) == (start, count)
            && !lease.is_old(link.connection.lease_ttl(), now)
        {
            self.counters.queries_from_lease += 1;
            return AskedQuery::Answered(lease.hits.into());
        }
        if let Some(op) = log.pending
            && let Some(question) = link.questions.get_mut(&op)
            && (question.from, question.count) == (start, count)
            && self.next_op - op < OPERATIONS as u64
        {
            return match std::mem::take(&mut question.ahead) {
                true => AskedQuery::Posted(op),
                false => {
                    AskedQuery::Answered(self.take_answer(op, now).unwrap_or_else(|| self.pend(op, now)))
                }
            };
        }
        self.post_query(handle, start, count, now).map_or(AskedQuery::Answered(0), AskedQuery::Posted)
    }

    /// Posts the query of a later [`EngineSession::ask_query`], unless its answer is known or pending: the
    /// sidecar works on it during other queries.
    pub fn ask_ahead(&mut self, handle: i64, start: u32, count: u32, now: Instant) {
        let Some(link) = &mut self.link else { return };
        let Some((_, log)) = link.logs.get(handle) else { return };
        let count = log.askable(start, count);
        let pending = log.pending.and_then(|op| link.questions.get(&op));
        let known = log.lease.map(|lease| (lease.from, lease.asked));
        if [known, pending.map(|question| (question.from, question.count))].contains(&Some((start, count))) {
            return;
        }
        if let Some(op) = self.post_query(handle, start, count, now) {
            let link = self.link.as_mut().expect("the query was posted to it");
            link.questions.get_mut(&op).expect("it was posted").ahead = true;
            link.log(handle).pending = Some(op);
        }
    }

    /// Announces a later query of keys `start..start + count` to the sidecar, which then fetches them from
    /// disk. Does not wait; without room nothing is posted.
    pub fn hint(&mut self, handle: i64, start: u32, count: u32) {
        let Some(link) = &mut self.link else { return };
        let Some((number, log)) = link.logs.get(handle) else { return };
        let count = log.askable(start, count);
        if count > 0 {
            let keys = LogKeys { log: number, from: start, count };
            link.submission.post(SchedulerRequest::Hint { keys });
            link.flush();
        }
    }

    /// Posts a query without waiting. `None` is a miss: no sidecar or a stalled one, no such keys, or no room.
    pub fn post_query(&mut self, handle: i64, start: u32, count: u32, now: Instant) -> Option<u64> {
        let link = self.link.as_mut()?;
        let (number, log) = link.logs.get(handle)?;
        let awaits = log.awaits;
        let last = self.config.last;
        let is_known = !last || link.connection.knows(Feature::States);
        if count == 0 || count as usize > QUERY_KEYS || start.checked_add(count)? > log.length || !is_known {
            return None;
        }
        let awaits = awaits && link.connection.knows(Feature::Handover);
        let patience = if awaits { PENDING_MAX } else { Duration::ZERO };
        let is_stalled = self
            .stalled
            .is_some_and(|(heartbeat, waited)| heartbeat == link.heartbeat() && waited >= patience);
        if is_stalled {
            // A sleeping sidecar shows no new heartbeat: wake it.
            link.connection.ring();
            self.counters.queries_not_asked += 1;
            return None;
        }
        let op = self.next_op;
        let keys = LogKeys { log: number, from: start, count };
        let arriving = self.config.part_blocks > 0 && !(awaits && count <= self.config.whole_blocks);
        let streams =
            self.config.streams && arriving && !awaits && !last && link.connection.knows(Feature::Streams);
        let query = Query { op, keys, arriving, awaits, last, streams };
        if link.submission.post(SchedulerRequest::Query(query)).is_none() {
            self.counters.queries_without_room += 1;
            return None;
        }
        link.flush();
        let log = link.log(handle);
        log.lease = None;
        if let Some(superseded) = log.pending.take() {
            link.questions.remove(&superseded);
        }
        let heartbeat = (link.heartbeat(), now);
        let question = PostedQuery {
            log: handle,
            from: start,
            count,
            awaits,
            ahead: false,
            is_read: false,
            posted: now,
            heartbeat,
        };
        link.questions.insert(op, question);
        self.next_op += 1;
        Some(op)
    }

    /// Looks for the answer of query `op`, awaited since `began`. The end of the sidecar is a miss. At the end of
    /// the step's budget the query is pending: a miss would cost its whole prompt. A query for another engine's
    /// keys is pending at once. `None`: not answered yet.
    pub fn look_for_answer(&mut self, op: u64, began: Instant, now: Instant) -> Option<i64> {
        let left = self.left.saturating_sub(now - began);
        if let Some(hits) = self.take_answer(op, now) {
            self.left = left;
            return Some(hits);
        }
        let link = self.link.as_ref()?;
        if link.connection.is_lost() {
            link.connection.hang_up();
            return Some(0);
        }
        if link.questions.get(&op).is_some_and(|asked| asked.awaits) {
            return Some(self.pend(op, now));
        }
        if left.is_zero() {
            (self.left, self.late) = (left, Some(link.heartbeat()));
            self.counters.queries_late += 1;
            return Some(self.pend(op, now));
        }
        None
    }

    /// The operation of the log's pending query.
    pub fn pending(&mut self, handle: i64) -> Option<u64> {
        self.link.as_mut()?.logs.get(handle)?.1.pending
    }

    /// The time left in this step for all waits of queries together.
    pub fn budget_left(&self) -> Duration {
        self.left
    }

    /// Takes the wait of a query off the step's budget.
    pub fn spend(&mut self, spent: Duration) {
        self.left = self.left.saturating_sub(spent);
    }

    fn time_out(&mut self, op: u64, within: Duration) {
        self.left = Duration::ZERO;
        self.counters.queries_timed_out += 1;
        self.notices.say(
            NoticeCause::Budget,
            format!(
                "a query was not answered within {} ms and counts as a miss: the sidecar hangs, or gets no CPU. Give it \
                 more CPU, and look at its log",
                within.as_millis()
            ),
        );
        let Some(link) = &mut self.link else { return };
        self.stalled = Some((link.heartbeat(), within));
        if let Some(question) = link.questions.remove(&op)
            && let Some((number, _)) = link.logs.get(question.log)
        {
            // A late answer would hold blocks under an unused lease.
            link.submission.post(SchedulerRequest::Release { log: number });
            link.flush();
        }
    }

    /// Moves the answer of query `op`, if there is one, into its log. A query that is not known (any more) is
    /// a miss.
    pub fn take_answer(&mut self, op: u64, now: Instant) -> Option<i64> {
        let Some(link) = &mut self.link else { return Some(0) };
        let Some(question) = link.questions.get(&op).copied() else { return Some(0) };
        let outcome = link.connection.memory().load_outcome(op)?;
        let is_unbound = outcome.status == Status::NotReady;
        link.unbound_since = is_unbound.then(|| link.unbound_since.unwrap_or(now));
        if link.unbound_since.is_some_and(|since| now - since < UNBOUND_WAIT) {
            // The word will not change: the next call posts another query.
            link.questions.remove(&op);
            return Some(PENDING);
        }
        if outcome.status == Status::Pending {
            link.questions.get_mut(&op).expect("found above").is_read = true;
            return Some(self.pend(op, now));
        }
        link.questions.remove(&op);
        let hits = self.settle_query(op, question, outcome);
        self.counters.hit_blocks += u64::from(hits);
        Some(hits.into())
    }

    /// Makes query `op` pending. Returns [`PENDING`], or a miss if it has waited longer than any sidecar
    /// takes.
    fn pend(&mut self, op: u64, now: Instant) -> i64 {
        let load_wait = Duration::from_millis(self.config.load_wait.most_ms.into());
        let Some(link) = &mut self.link else { return 0 };
        let heartbeat = link.heartbeat();
        let Some(question) = link.questions.get_mut(&op) else { return 0 };
        if question.heartbeat.0 != heartbeat {
            question.heartbeat = (heartbeat, now);
        }
        let (most, still_max) = match (question.awaits, question.is_read) {
            (true, _) => (AWAITING_MAX, PENDING_MAX),
            (false, true) => (load_wait + ANSWER_MAX, PENDING_MAX),
            (false, false) => (ANSWER_MAX, UNREAD_MAX),
        };
        let (still_since, posted) = (question.heartbeat.1, question.posted);
        let reached = |since: Instant, limit: Duration| (now - since >= limit).then_some(limit);
        if let Some(limit) = reached(still_since, still_max).or_else(|| reached(posted, most)) {
            self.time_out(op, limit);
            return 0;
        }
        if let Some((_, log)) = link.logs.get(question.log) {
            log.pending = Some(op);
        }
        PENDING
    }

    fn settle_query(&mut self, op: u64, question: PostedQuery, outcome: Outcome) -> u32 {
        match outcome.status {
            Status::NotReady => self.notices.say(
                NoticeCause::NotReady,
                "queries of this engine count as misses, because some of its ranks have not joined: a rank stayed out, \
                 did not state its weights after they may have changed, or the ranks state different facts. Look at \
                 the logs of the workers and of the sidecar",
            ),
            Status::Barred => self.notices.say(
                NoticeCause::Barred,
                "PILLION STAYS OUT: KV of this engine differs from the kept KV of its namespace, so Pillion is off for it \
                 until its weights change or it restarts, and its saved blocks are removed. Its weights, code or settings \
                 differ under equal facts from those of the engines that saved: find the difference, which the sidecar's \
                 log names, and restart it, or set pillion.model_id to a text of its own",
            ),
            _ => {}
        }
        let streamed = outcome.status == Status::Streamed && self.config.streams;
        let arriving = streamed || outcome.status == Status::Arriving && self.config.part_blocks > 0;
        self.counters.queries_answered_early += u64::from(arriving);
        let is_hit = outcome.status == Status::Ok || arriving;
        let hits = if is_hit { outcome.value.min(question.count) } else { 0 };
        let Some((_, log)) = self.link.as_mut().and_then(|link| link.logs.get(question.log)) else {
            return 0;
        };
        let (from, asked, since) = (question.from, question.count, question.posted);
        let first = if self.config.last { (from + hits).saturating_sub(1) } else { from };
        let lease = LogLease { op, from, asked, hits, first, arriving, streamed, since };
        log.pending = None;
        log.lease = (hits > 0).then_some(lease);
        hits
    }

    /// True if blocks of the log's last answer were still on their way: they must not be loaded
    /// synchronously.
    pub fn arriving(&mut self, handle: i64) -> bool {
        let log = self.link.as_mut().and_then(|link| link.logs.get(handle));
        log.and_then(|(_, log)| log.lease).is_some_and(|lease| lease.arriving)
    }

    /// The number of blocks among hits `start..start + count` from each of [`Source::ALL`]; zeros if the log
    /// has no lease of them.
    pub fn sources(&mut self, handle: i64, start: u32, count: u32) -> [u32; Source::ALL.len()] {
        let mut blocks = [0; Source::ALL.len()];
        let Some(link) = &mut self.link else { return blocks };
        let Some((_, log)) = link.logs.get(handle) else { return blocks };
        let end = start.saturating_add(count);
        if log.lease.is_some_and(|lease| lease.first <= start && end <= lease.from + lease.hits) {
            for (chunk, index) in (start..end).map(|key| log.key_place(key)) {
                blocks[link.connection.memory().read_source(chunk, index) as usize] += 1;
            }
        }
        blocks
    }

    /// True if the log's lease is too old to be relied on: call [`EngineSession::renew`] before a load.
    pub fn must_renew(&mut self, handle: i64, now: Instant) -> bool {
        self.old_lease(handle, now).is_some()
    }

    /// Asks again for the keys of an old lease. Returns the operation, if a query was posted.
    pub fn renew(&mut self, handle: i64, now: Instant) -> Option<u64> {
        let lease = self.old_lease(handle, now)?;
        let asked = if self.config.last { 1 } else { lease.asked };
        match self.ask_query(handle, lease.first, asked, now) {
            AskedQuery::Posted(op) => Some(op),
            AskedQuery::Answered(_) => None,
        }
    }

    /// The log's lease, if it is old.
    fn old_lease(&mut self, handle: i64, now: Instant) -> Option<LogLease> {
        let link = self.link.as_mut()?;
        let ttl = link.connection.lease_ttl();
        link.logs.get(handle)?.1.lease.filter(|lease| lease.is_old(ttl, now))
    }

    /// Posts the load of keys `start..` into `blocks` and returns its plan, even if the sidecar has died
    /// since the query. Blocks on their way are loaded in parts, each with its own plan; a part ends as soon
    /// as its blocks are there. Empty if no lease covers the keys: the engine must not load them.
    pub fn post_load(&mut self, handle: i64, start: u32, blocks: &[u32], step: u64, sync: bool) -> Vec<Plan> {
        let Some(lease) = self.lease_over(handle, start, blocks.len(), sync) else {
            self.counters.loads_without_lease += 1;
            return Vec::new();
        };
        self.counters.loads += 1;
        let flag = |set: bool, flag: u8| if set { flag } else { 0 };
        let flags = flag(sync, LOAD_SYNC)
            | flag(self.config.by_engine, LOAD_BY_ENGINE)
            | flag(self.config.early, LOAD_EARLY)
            | flag(lease.arriving, LOAD_ARRIVING)
            | flag(lease.streamed, LOAD_STREAMED);
        let flags = LoadFlags::new(flags);
        let part = self.part_of_load(lease, blocks.len());
        let link = self.link.as_mut().expect("it has the lease");
        let (log, _) = link.logs.get(handle).expect("it has the lease");
        let mut plans = Vec::new();
        for (blocks, from) in blocks.chunks(part).zip((start..).step_by(part)) {
            let keys = LogKeys { log, from, count: blocks.len() as u32 };
            let load = Load { op: self.next_op, keys, position: 0, step, lease: lease.op, flags };
            plans.push(link.post_load(handle, load, blocks));
            self.next_op += 1;
        }
        if lease.arriving {
            // A load in parts does not end the lease.
            self.release_lease(handle);
        }
        let link = self.link.as_mut().expect("it had the lease");
        link.log(handle).lease = None;
        if self.config.early {
            link.flush();
        }
        plans
    }

    /// The blocks of each part of a load.
    fn part_of_load(&self, lease: LogLease, blocks: usize) -> usize {
        let usual = self.config.part_blocks as usize;
        match (lease.streamed, lease.arriving) {
            // More than the pool holds: several parts must fit into it at once.
            (true, _) => blocks.div_ceil(STREAM_PARTS_MAX).max(usual.min(blocks / STREAM_PARTS_MIN)),
            (_, true) => blocks.div_ceil(PARTS_MAX).max(usual),
            _ => blocks,
        }
    }

    /// The log's lease, if it covers `count` keys from `start` on. A synchronous load belongs to this step's
    /// answer, which has had half a lease's life left; after a failed renewal the step would lack blocks that
    /// it counts on.
    fn lease_over(&mut self, handle: i64, start: u32, count: usize, sync: bool) -> Option<LogLease> {
        let lease =
            self.link.as_mut()?.logs.get(handle)?.1.lease.filter(|lease| !(sync && lease.arriving))?;
        let count = u32::try_from(count).ok().filter(|count| *count > 0)?;
        let end = start.checked_add(count)?;
        (lease.first <= start && end <= lease.from + lease.hits).then_some(lease)
    }
}
