//! Queries, and what is answered.

use shm_protocol::message::{Outcome, Status};
use shm_protocol::pool::SlotRef;
use shm_protocol::request::{Keys, Query};

use super::key_logs::QueryLease;
use super::namespaces::Binding;
use super::waits::Question;
use super::{Action, Core, GROUP, SessionId, Violation};

/// What a query has found and leased.
#[derive(Debug)]
struct Found {
    /// Hits that an earlier answer named.
    known: u32,
    /// Slots of those behind them.
    refs: Vec<SlotRef>,
}

// === impl Found ===

impl Found {
    fn hits(&self) -> u32 {
        self.known + self.refs.len() as u32
    }
}

// === impl Core ===

impl Core {
    pub(super) fn open(&mut self, session: SessionId, log: u32) -> Result<(), Violation> {
        let opened_at = self.dram.generation();
        self.scheduler(session).logs.open(log, opened_at)
    }

    pub(super) fn query(
        &mut self,
        now_ms: u64,
        session: SessionId,
        query: Query,
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        let Query { op, keys: Keys { log, from, count }, arriving } = query;
        self.schedulers[&session].logs.get(log)?;
        self.end_wait(session, log);
        let question = Question { op, log, from, count, arriving, asked_ms: now_ms };
        let waits = self.ask(now_ms, session, question, out);
        self.stats.waits += u64::from(waits);
        Ok(())
    }

    /// Answers a question, or lets it wait for what it misses; whether it waits. The engine is held up until then: what is
    /// missing is sent for afterwards.
    pub(super) fn ask(
        &mut self,
        now_ms: u64,
        session: SessionId,
        question: Question,
        out: &mut Vec<Action>,
    ) -> bool {
        let Some(binding) = self.binding(session).filter(|_| !self.draining) else {
            self.answer_nothing(session, question.op, out);
            return false;
        };
        let found = self.lease(now_ms, session, &binding, question);
        let may_send = self.see_run(now_ms, session, &binding, question, found.hits());
        let next =
            self.schedulers[&session].logs.known(question.log).wanted(question).get(found.hits() as usize);
        let waits = next.copied().is_some_and(|next| {
            if may_send && self.may_arrive(now_ms, &binding, &next) {
                self.arrivals.send_for_later(session, question, found.hits());
                return true;
            }
            self.may_ask_peers(&binding) && self.wait_for_producer(now_ms, session, question)
        });
        if !waits {
            self.end_window(now_ms, session, question, found.hits(), out);
        }
        let status = if waits { Status::Pending } else { Status::Ok };
        self.answer(session, question, found, status, out);
        waits
    }

    /// Answers a query that has waited, with what is there.
    pub(super) fn answer_late(
        &mut self,
        now_ms: u64,
        session: SessionId,
        question: Question,
        out: &mut Vec<Action>,
    ) {
        match self.binding(session).filter(|_| !self.draining) {
            Some(binding) => {
                let found = self.lease(now_ms, session, &binding, question);
                self.end_window(now_ms, session, question, found.hits(), out);
                self.answer(session, question, found, Status::Ok, out);
            }
            None => self.answer_nothing(session, question.op, out),
        }
    }

    /// HINT: what will be asked for may lie in DRAM by then.
    pub(super) fn hint(
        &mut self,
        now_ms: u64,
        session: SessionId,
        keys: Keys,
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        let Keys { log, from, count } = keys;
        self.schedulers[&session].logs.get(log)?;
        let beside_dram =
            self.ssd.is_some() || self.peers.is_some() || self.dram.stats().unverified_blocks > 0;
        if self.draining || !beside_dram {
            return Ok(());
        }
        if let Some(binding) = self.binding(session) {
            // Nothing answers it, so it has no operation.
            let question = Question { op: 0, log, from, count, arriving: false, asked_ms: now_ms };
            let wanted = self.schedulers[&session].logs.known(log).wanted(question).to_vec();
            self.prefetch(now_ms, session, &binding, &wanted, out);
        }
        Ok(())
    }

    /// Leases the leading hits in DRAM to the question's log.
    fn lease(&mut self, now_ms: u64, session: SessionId, binding: &Binding, question: Question) -> Found {
        let scheduler = self.schedulers.get_mut(&session).expect("the caller checked");
        let log = scheduler.logs.known(question.log);
        let wanted = log.wanted(question);
        let mut refs = Vec::new();
        let (world_size, namespace) = (scheduler.world_size, binding.namespace);
        let mut known = 0;
        let same = log.lease.filter(|lease| lease.from == question.from);
        let renewed = same.filter(|lease| self.dram.renew(lease.id, session, now_ms).is_ok());
        let granted = if let Some(lease) = renewed {
            // Others may be at work that were not when it was granted.
            let fitting = self.dram.fitting(lease.id, session).unwrap_or(0);
            known = (lease.hits as usize).min(wanted.len()).min(fitting);
            let more = &wanted[known..];
            // An earlier answer may have named fewer hits than the lease holds: what is added follows what was named.
            let kept = self.dram.truncate(lease.id, session, 0, known);
            let added = kept.and_then(|()| {
                self.dram.extend(lease.id, session, namespace, GROUP, more, now_ms, &mut refs)
            });
            added.ok().map(|_| lease.id)
        } else {
            if let Some(stale) = log.lease {
                // Expired meanwhile, at worst.
                let _ = self.dram.release(stale.id, session);
            }
            let holder = binding.whose.holder;
            self.dram.grant(session, holder, world_size, namespace, GROUP, wanted, now_ms, &mut refs)
        };
        let (op, from, hits) = (question.op, question.from, (known + refs.len()) as u32);
        scheduler.logs.lease(question.log, granted.map(|id| QueryLease { id, op, from, hits }));
        Found { known: known as u32, refs }
    }

    fn answer(
        &mut self,
        session: SessionId,
        question: Question,
        found: Found,
        status: Status,
        out: &mut Vec<Action>,
    ) {
        let log = self.schedulers[&session].logs.known(question.log);
        let (hits, chunks) = (found.hits(), log.chunks.clone());
        if status != Status::Pending {
            self.stats.queries += 1;
            self.stats.query_blocks += log.wanted(question).len() as u64;
            self.stats.query_hit_blocks += u64::from(hits);
        }
        let outcome = Outcome { op: question.op as u32, value: hits, status };
        let (op, from) = (question.op, question.from + found.known);
        out.push(Action::Answer { session, op, outcome, refs: found.refs, chunks, from });
    }

    /// Answers a query with blocks some of which are on their way.
    pub(super) fn answer_arriving(
        &mut self,
        session: SessionId,
        question: Question,
        refs: Vec<SlotRef>,
        out: &mut Vec<Action>,
    ) {
        self.answer(session, question, Found { known: 0, refs }, Status::Arriving, out);
    }

    /// Not ready means that it is worth asking again: neither a sidecar that ends nor a namespace that is closed is.
    fn answer_nothing(&mut self, session: SessionId, op: u64, out: &mut Vec<Action>) {
        let status = match self.schedulers[&session].barred {
            _ if self.draining => Status::Ok,
            Some(_) => Status::Barred,
            None => Status::NotReady,
        };
        let outcome = Outcome { op: op as u32, value: 0, status };
        self.stats.queries += 1;
        out.push(Action::Outcome { session, op, outcome });
    }

    /// RELEASE: the lease of a log, or the answer to its query, is not needed.
    pub(super) fn release(&mut self, session: SessionId, log: u32) -> Result<(), Violation> {
        self.end_wait(session, log);
        if let Some(lease) = self.scheduler(session).logs.take_lease(log)? {
            // Expired meanwhile, at worst.
            let _ = self.dram.release(lease.id, session);
        }
        Ok(())
    }

    /// Ends every lease of a session's logs, and every wait for one.
    pub(super) fn end_leases(&mut self, session: SessionId) {
        // Logs without a lease, of which there may be 65,536, cost nothing: each lease was paid for by a query.
        self.end_waits(session);
        for log in self.schedulers[&session].logs.leased() {
            self.release(session, log).expect("a leased log is open");
        }
    }

    pub(super) fn close(&mut self, session: SessionId, log: u32) -> Result<(), Violation> {
        self.release(session, log)?;
        let binding = self.binding(session);
        let closed = self.scheduler(session).logs.close(log);
        if let (Some(log), Some(binding)) = (closed, binding) {
            self.dram.end_chain(binding.whose.holder, binding.namespace, GROUP, &log.keys, log.opened_at);
        }
        Ok(())
    }
}
