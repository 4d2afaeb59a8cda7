//! The binding of an engine: the ranks of its run together make it, until the scheduler says the weights may
//! have changed.
//!
//! Any other change of a bound engine's namespace closes its scheduler's session: requests answered under one
//! namespace are never served under another.

use std::sync::Arc;

use shm_protocol::key::NamespaceDigest;
use shm_protocol::namespace;
use shm_protocol::session::Bound;
use tiers::dram::Whose;

use super::{Binding, Engines, Form, Service, ServiceEvent, SessionId, Violation, Worker};
use crate::core::Action;
use crate::core::context::Context;

/// Salted namespaces remembered for one session: an engine names its last salt when it connects again. The
/// limit keeps one engine's resets from pushing out the namespaces of other engines.
const GENERATIONS_MAX: usize = 16;

// === impl Engines ===

impl Engines {
    /// Binds the engine of `session` once every rank has joined its run and answered its last WEIGHTS. True
    /// if the engine is bound now: saves waiting for the binding begin. Workers outside the run are no
    /// evidence: another engine may have the same name.
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
        // The ranks come first: a rank refuses a plan of an unknown namespace.
        words.push((session, word(scheduler.weights)));
        let engine = scheduler.engine.clone();
        let Some(binding) = self.serve(session, base, cx) else { return false };
        let (block_bytes, shards) = (binding.block_bytes(), binding.shards);
        cx.actions.push(Action::Bind { engine, facts, block_bytes, shards, words });
        true
    }

    /// Binds the engine of `session` to the namespace, or to the last salted form of it. It is served unless
    /// its run is barred. `None`: all ids of namespaces are used.
    fn serve(&mut self, session: SessionId, base: NamespaceDigest, cx: &mut Context) -> Option<Binding> {
        let scheduler = &self[session];
        let Form { shard_bytes, shards, parentless, .. } = scheduler.form.expect("a rank has joined");
        let digest = scheduler.salt.map_or(base, |salt| namespace::salted(base, salt));
        let whose = Whose { holder: scheduler.holder, quota: cx.quotas.of(base) };
        // Without another cache group, a hit of the engine needs all blocks.
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
    /// Fails if the number does not rise.
    pub(crate) fn ask_weights(&mut self, session: SessionId, number: u64) -> Result<(), Violation> {
        let scheduler = self.scheduler(session);
        check_number(number, scheduler.weights)?;
        (scheduler.weights, scheduler.bound) = (number, None);
        Ok(())
    }

    /// WEIGHTS of a rank: its present weights. Returns its scheduler, to be bound. Fails if the number does
    /// not rise, or an answer goes back.
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
        // Another session may have taken the rank's place.
        let host = host.filter(|(_, host)| host.ranks[rank] == Some(session));
        Ok(host.map(|(scheduler, host)| {
            host.change(ServiceEvent::GenerationEnded);
            scheduler
        }))
    }

    /// SALT: begins a new generation of the namespace `ended`. Blocks of the old one are never served to this
    /// engine again.
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

/// Checks the number of a session's WEIGHTS against the last one.
fn check_number(number: u64, last: u64) -> Result<(), Violation> {
    if number > last {
        Ok(())
    } else {
        Err(format!("WEIGHTS {number} follows WEIGHTS {last}: numbers must rise"))
    }
}
