//! What binds an engine: the ranks of its run together, until its scheduler says that the weights may have changed.
//!
//! Whatever else would change the namespace of a bound engine closes its scheduler's session: requests that it has answered
//! under one namespace are never served under another.

use std::sync::Arc;

use shm_protocol::key::NamespaceDigest;
use shm_protocol::namespace;
use shm_protocol::session::Bound;
use tiers::dram::Whose;

use super::{Binding, Engines, Form, Service, ServiceEvent, SessionId, Violation, Worker};
use crate::core::Action;
use crate::core::context::Context;

/// Salted namespaces of one session that are remembered, for an engine that connects again: it names its last salt.
/// One engine's resets thus leave the others their namespaces.
const GENERATIONS_MAX: usize = 16;

// === impl Engines ===

impl Engines {
    /// Binds the engine of `session` once every rank has joined its run and answered its last WEIGHTS; whether what waited for
    /// that begins now. Ranks that have not joined are no evidence: another engine may go by the same name.
    pub(crate) fn bind(&mut self, session: SessionId, cx: &mut Context) -> bool {
        let scheduler = &self[session];
        let is_bound = !matches!(scheduler.service, Service::Unbound { .. });
        if is_bound || !self.every_rank(session, |rank| rank.answers == scheduler.weights) {
            return false;
        }
        let ranks: Vec<(SessionId, &Worker)> = self.ranks(session).collect();
        let live = namespace::weights_live(ranks.iter().map(|(_, rank)| rank.live));
        let facts = Arc::new(namespace::complete(&ranks[0].1.facts, live));
        let base = namespace::digest(&facts);
        if let Some(other) = scheduler.bound.filter(|bound| *bound != base) {
            let reason = format!(
                "the facts of its ranks now make namespace {base}, and it was bound to {other}: weights of a rank \
                 changed without a message of its scheduler. It is bound again when it reconnects"
            );
            cx.actions.push(Action::Close { session, reason });
            return false;
        }
        let mut expected = ranks.iter().filter_map(|(_, rank)| rank.expects.as_ref());
        if let Some(expected) = expected.find(|it| **it != base.to_string()) {
            cx.actions.push(Action::Warn(format!(
                "engine {} is not served: it is configured for namespace {expected} (pillion.namespace), and its ranks \
                 together make it {base}. State the same facts and load the same weights, or leave pillion.namespace \
                 out",
                scheduler.engine
            )));
            return false;
        }
        let word = |weights| Bound { weights, live, namespace: base.words()[0] };
        let mut words: Vec<(SessionId, Bound)> =
            ranks.iter().map(|(id, rank)| (*id, word(rank.weights))).collect();
        // The ranks first: a plan is refused by a rank that does not know its namespace.
        words.push((session, word(scheduler.weights)));
        let engine = scheduler.engine.clone();
        let Some(binding) = self.serve(session, base, cx) else { return false };
        let (block_bytes, shards) = (binding.block_bytes(), binding.shards);
        cx.actions.push(Action::Bind { engine, facts, block_bytes, shards, words });
        true
    }

    /// Serves the namespace to the engine of `session`, or the last generation of it, unless it is closed to its run.
    fn serve(&mut self, session: SessionId, base: NamespaceDigest, cx: &mut Context) -> Option<Binding> {
        let scheduler = &self[session];
        let Form { shard_bytes, shards, parentless, .. } = scheduler.form.expect("a rank has joined");
        let digest = scheduler.salt.map_or(base, |salt| namespace::salted(base, salt));
        let whose = Whose { holder: scheduler.holder, quota: cx.quotas.of(base) };
        // Of an engine that has no other group a hit needs all blocks.
        let parentless = parentless && scheduler.is_group();
        let mut binding = Binding { base, digest, namespace: 0, whose, shard_bytes, shards, parentless };
        binding.namespace = cx.namespaces.id(binding.space())?;
        if !binding.is_private() {
            cx.namespaces.share(binding.namespace, digest);
        }
        let is_barred = self.is_barred(session, binding.space());
        let proof = self.proof(session, binding.space(), binding.is_private());
        let scheduler = self.scheduler(session);
        (scheduler.bound, scheduler.proof) = (Some(base), proof);
        scheduler.change(ServiceEvent::Bound { binding, is_barred });
        Some(binding)
    }

    /// WEIGHTS of a scheduler: the weights may have changed. Nothing is served until every rank has answered.
    pub(crate) fn ask_weights(&mut self, session: SessionId, number: u64) -> Result<(), Violation> {
        let scheduler = self.scheduler(session);
        check_number(number, scheduler.weights)?;
        (scheduler.weights, scheduler.bound) = (number, None);
        Ok(())
    }

    /// WEIGHTS of a rank: what it holds now. Its scheduler, which is to be bound.
    pub(crate) fn state_weights(
        &mut self,
        session: SessionId,
        (number, answers, live): (u64, u64, [u8; 16]),
    ) -> Result<Option<SessionId>, Violation> {
        let worker = self.workers.get_mut(&session).expect("the caller looked");
        check_number(number, worker.weights)?;
        if answers < worker.answers {
            return Err(format!(
                "a rank answered WEIGHTS {answers} of its scheduler after WEIGHTS {}",
                worker.answers
            ));
        }
        (worker.weights, worker.answers, worker.live) = (number, answers, Some(live));
        let rank = worker.rank as usize;
        let host = worker.scheduler.and_then(|id| Some((id, self.schedulers.get_mut(&id)?)));
        // A rank's place may be another session's by now.
        let host = host.filter(|(_, host)| host.ranks[rank] == Some(session));
        Ok(host.map(|(scheduler, host)| {
            host.change(ServiceEvent::GenerationEnded);
            scheduler
        }))
    }

    /// SALT: a new generation of the namespace that was `ended`. Blocks of the old one are never served to this engine again.
    pub(crate) fn salt(
        &mut self,
        session: SessionId,
        salt: [u8; 16],
        ended: Option<Binding>,
        cx: &mut Context,
    ) {
        self.scheduler(session).salt = Some(salt);
        if let Some(Binding { base, .. }) = ended {
            self.serve(session, base, cx);
        }
    }

    /// Ends the binding of an engine, and returns it.
    pub(crate) fn end_generation(&mut self, session: SessionId, cx: &mut Context) -> Option<Binding> {
        let scheduler = self.scheduler(session);
        let ended = scheduler.binding().or(scheduler.barred());
        scheduler.change(ServiceEvent::GenerationEnded);
        scheduler.generations.extend(ended.filter(Binding::is_private));
        if scheduler.generations.len() > GENERATIONS_MAX {
            scheduler.generations.pop_front().into_iter().for_each(|old| cx.namespaces.forget(old.space()));
        }
        ended
    }
}

/// The number of a session's WEIGHTS, after its last one.
fn check_number(number: u64, last: u64) -> Result<(), Violation> {
    if number > last {
        Ok(())
    } else {
        Err(format!("WEIGHTS {number} follows WEIGHTS {last}: numbers must rise"))
    }
}
