//! Calls of the policy by vLLM's scheduler for waiting requests, and the waits for answers.

use std::time::Instant;

use connector_shim::core::endpoint::Endpoint;
use connector_shim::core::policy::{FoundTokens, PlannedStep, PolicyWait, Remark};
use connector_shim::core::scheduler::{AskedQuery, PENDING};
use shm_protocol::key::BlockHash;
use shm_protocol::message::Status;

use super::BLOCK_TOKENS;
use super::blocks::NULL_BLOCK;
use super::request::State;
use super::scheduler::{Call, Phase, Scheduler};
use crate::ctx::Ctx;
use crate::origin::WORDS;

/// The session's counters, and their points of coverage.
const COUNTED: [(&str, &str); COUNTS] = [
    ("queries_late", "engine query answered later"),
    ("queries_timed_out", "engine query timed out"),
    ("queries_not_asked", "engine query not asked"),
    ("queries_without_room", "engine query without room"),
    ("queries_answered_early", "engine early answer"),
    ("queries_from_lease", "engine lease reused"),
    ("saves", "engine save"),
    ("saves_without_room", "engine save without room"),
    ("saves_voided", "engine saves voided"),
];
pub(super) const COUNTS: usize = 9;

// === impl Scheduler: calls of the policy ===

impl Scheduler {
    /// Queries for the request at the head of the queue, or continues with the schedule.
    pub(super) fn match_next(&mut self, admit: usize, ctx: &mut Ctx) {
        self.phase = Phase::Schedule;
        let Some(&id) = self.waiting.front().filter(|_| admit > 0 && !self.blocks.is_empty()) else { return };
        let request = &self.requests[&id];
        let mut own = vec![Vec::new(); self.model.groups()];
        if self.model.caches {
            // One token is left to compute.
            own = self.own_blocks(&request.known_keys()[..(request.known - 1) / WORDS]);
            ctx.cover.add("engine hit of its own cache", u64::from(!own[0].is_empty()));
        }
        self.tell(id);
        self.call(Call::Match(own), admit, ctx);
    }

    /// The prefix cache's blocks, for each group, of the longest run of leading keys with all needed blocks.
    fn own_blocks(&self, keys: &[BlockHash]) -> Vec<Vec<u32>> {
        let mut first = self.blocks.find(0, keys);
        let mut own = vec![Vec::new(); self.model.groups()];
        for (group, own) in own.iter_mut().enumerate().skip(1) {
            let blocks = |end: usize| {
                let read = self.model.first_read(group, end * WORDS);
                let rest = keys[read..end].iter().map(|key| self.blocks.find_one(group, key));
                (0..read).map(|_| Some(NULL_BLOCK)).chain(rest).collect::<Option<Vec<u32>>>()
            };
            let found = (0..=first.len()).rev().find_map(|end| Some((end, blocks(end)?)));
            let (end, blocks) = found.expect("no block is always there");
            first.truncate(end);
            *own = blocks;
        }
        own[0] = first;
        own
    }

    /// Calls the policy for the request at the head of the queue.
    fn call(&mut self, call: Call, admit: usize, ctx: &mut Ctx) {
        let id = *self.waiting.front().expect("the caller looked");
        let (number, now) = (self.requests[&id].number, ctx.instant());
        let wait = match &call {
            Call::Match(own) => {
                let (computed, alone) =
                    (own[0].len() as u32 * BLOCK_TOKENS, self.last.iter().all(|last| *last == id));
                self.policy.matched(number, computed, alone, now).map(Some)
            }
            Call::Load(blocks, _) => self.policy.load_blocks(number, blocks, now).map(|()| None),
        };
        match (wait, call) {
            (Err(wait), call) => {
                let renews = matches!((&wait, &call), (PolicyWait::Answer { .. }, Call::Load(..)));
                ctx.cover.add("engine lease renewed before the load", renews.into());
                self.phase = Phase::Await { wait, began: now, call, admit };
            }
            (Ok(Some(found)), Call::Match(own)) => self.found(id, own, found, admit, ctx),
            (Ok(_), Call::Load(_, beside)) => self.loaded(beside, admit, ctx),
            (Ok(None), Call::Match(_)) => unreachable!("a question has an answer"),
        }
    }

    fn found(&mut self, id: u64, own: Vec<Vec<u32>>, found: FoundTokens, admit: usize, ctx: &mut Ctx) {
        let number = self.requests[&id].number;
        match found {
            FoundTokens::Later => {
                ctx.cover.add("policy puts a load off", self.policy.is_put_off(number).into());
                let request = self.requests.get_mut(&id).expect("it was asked about");
                let refused = self.policy.is_refused(number);
                ctx.cover.add("policy has a request step aside", refused.into());
                assert!(!(refused && request.aside), "request {id} steps aside twice in a row");
                request.aside = refused;
                self.waiting.pop_front();
                self.later.push(id);
                self.phase = Phase::Match(admit);
                return;
            }
            FoundTokens::Tokens(tokens, _) => {
                self.requests.get_mut(&id).expect("it was asked about").aside = false;
                ctx.hit(if tokens > 0 { "engine hit" } else { "engine miss" });
            }
        }
        self.phase = Phase::Admit { own, found, admit };
    }

    /// Calls the policy to load the hit.
    pub(super) fn allocated(&mut self, id: u64, external: u32, beside: bool, admit: usize, ctx: &mut Ctx) {
        self.tell(id);
        let request = &self.requests[&id];
        match self.policy.allocated(request.number, external) {
            Some(ranges) => {
                let blocks = request.blocks.iter().zip(ranges).map(|(blocks, range)| blocks[range].to_vec());
                self.call(Call::Load(blocks.collect(), beside), admit, ctx);
            }
            None => {
                assert_eq!(external, 0, "request {id} was promised {external} tokens");
                self.run_first(admit, ctx);
            }
        }
    }

    fn loaded(&mut self, beside: bool, admit: usize, ctx: &mut Ctx) {
        self.promised = true;
        if !beside {
            return self.run_first(admit, ctx);
        }
        let id = self.waiting.pop_front().expect("it was given blocks");
        let request = self.requests.get_mut(&id).expect("waiting requests exist");
        (request.state, request.computed) = (State::Loading, self.admitted);
        self.phase = Phase::Match(admit - 1);
    }

    /// Counts the outcome of a query, if the answer alone does not show it.
    fn note_outcome(&self, group: usize, op: u64, ctx: &mut Ctx) {
        let connection = self.policy.view(group).connection();
        match connection.and_then(|connection| connection.memory().load_outcome(op)).map(|o| o.status) {
            Some(Status::NotReady) => ctx.hit("engine query not ready"),
            Some(Status::Barred) => ctx.hit("engine query barred"),
            Some(Status::Pending) => ctx.hit("engine query waits for a producer"),
            _ => {}
        }
    }

    pub(super) fn await_answer(
        &mut self,
        wait: PolicyWait,
        began: Instant,
        call: Call,
        admit: usize,
        ctx: &mut Ctx,
    ) {
        let now = ctx.instant();
        let mut next = wait;
        let hits = match wait {
            PolicyWait::Answer { group, op } => {
                let hits = self.policy.session(group).look_for_answer(op, began, now);
                if hits.is_some() {
                    self.note_outcome(group, op, ctx);
                }
                hits
            }
            PolicyWait::Linger { group, log, first, count, within } => {
                ctx.hit("policy lingers");
                let session = self.policy.session(group);
                match session.ask_query(log, first, count, now) {
                    AskedQuery::Answered(PENDING) => (now - began >= within).then_some(PENDING),
                    AskedQuery::Answered(hits) => Some(hits),
                    AskedQuery::Posted(op) => {
                        next = PolicyWait::Answer { group, op };
                        None
                    }
                }
            }
        };
        let Some(hits) = hits else {
            let began = if matches!((wait, next), (PolicyWait::Linger { .. }, PolicyWait::Answer { .. })) {
                now
            } else {
                began
            };
            self.phase = Phase::Await { wait: next, began, call, admit };
            return;
        };
        self.policy.answered(hits);
        self.call(call, admit, ctx);
    }

    /// Records the coverage of the policy's step.
    pub(super) fn note_policy(&mut self, step: &PlannedStep, ctx: &mut Ctx) {
        let stats = self.policy.view(0).stats();
        for (counted, (name, point)) in self.counted.iter_mut().zip(COUNTED) {
            ctx.cover.add(point, stats[name] - *counted);
            *counted = stats[name];
        }
        ctx.cover.add("policy names open loads", u64::from(!step.open_loads.is_empty()));
        ctx.cover.add("policy names passed steps", u64::from(!step.passed.is_empty()));
        self.note_remarks(ctx);
    }

    pub(super) fn note_remarks(&mut self, ctx: &mut Ctx) {
        for remark in self.policy.take_remarks() {
            let point = match remark {
                Remark::Stalled { .. } => "policy is told of no output",
                Remark::PassedOver { .. } => "policy sees steps passed over",
                Remark::Unproven { .. } => "policy doubts the engine's own cache",
                Remark::NotLoaded { .. } => "policy is told of failed loads",
                Remark::Changed => unreachable!("the policy learns of each change"),
                Remark::HintsRefused { .. } => unreachable!("all hints keep the schema"),
            };
            ctx.hit(point);
        }
    }
}
