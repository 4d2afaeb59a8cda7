//! What binds an engine: the ranks of its run together, until its scheduler says that the weights may have changed.
//!
//! Whatever else would change the namespace of a bound engine closes its scheduler's session: requests that it has answered
//! under one namespace are never served under another.

use std::sync::Arc;

use shm_protocol::key::NamespaceDigest;
use shm_protocol::namespace;
use shm_protocol::session::Bound;
use tiers::dram::Whose;

use super::members::{Scheduler, Worker};
use super::namespaces::{Binding, Form};
use super::{Action, Core, SessionId, Violation};

/// Salted namespaces of one session that are remembered, for an engine that connects again: it names its last salt.
/// One engine's resets thus leave the others their namespaces.
const GENERATIONS_MAX: usize = 16;

// === impl Core ===

impl Core {
    /// What the engine of `session` serves, if it is bound.
    pub(super) fn binding(&self, session: SessionId) -> Option<Binding> {
        self.schedulers[&session].binding
    }

    /// Binds the engine of `session` once every rank has joined its run and answered its last WEIGHTS, and begins what waited
    /// for that. Ranks that have not joined are no evidence: another engine may go by the same name.
    pub(super) fn bind(&mut self, session: SessionId, out: &mut Vec<Action>) {
        let scheduler = &self.schedulers[&session];
        let bound = scheduler.binding.or(scheduler.barred);
        let Some(ranks) = self.ranks_of(scheduler).filter(|_| bound.is_none()) else { return };
        let live = namespace::weights_live(ranks.iter().map(|rank| rank.live));
        let facts = Arc::new(namespace::complete(&ranks[0].facts, live));
        let base = namespace::digest(&facts);
        if let Some(other) = scheduler.bound.filter(|bound| *bound != base) {
            let reason = format!(
                "its ranks make it namespace {base}, and it was bound to {other}: a rank's weights changed without its scheduler's \
                 word; what it connects as next is bound anew"
            );
            return out.push(Action::Close { session, reason });
        }
        if let Some(expected) =
            ranks.iter().filter_map(|rank| rank.expects.as_ref()).find(|it| **it != base.to_string())
        {
            return out.push(Action::Warn(format!(
                "engine {} is to join namespace {expected} (pillion.namespace) and all its ranks together make it {base}, so it \
                 is not served: state the same facts and load the same weights, or leave pillion.namespace out",
                scheduler.engine
            )));
        }
        let word = |weights| Bound { weights, live, namespace: base.words()[0] };
        let mut words: Vec<(SessionId, Bound)> = scheduler
            .ranks
            .iter()
            .flatten()
            .zip(&ranks)
            .map(|(id, rank)| (*id, word(rank.weights)))
            .collect();
        // The ranks first: a plan is refused by a rank that does not know its namespace.
        words.push((session, word(scheduler.weights)));
        let engine = scheduler.engine.clone();
        let Some(binding) = self.serve(session, base) else { return };
        let (block_bytes, shards) = (binding.block_bytes(), binding.shards);
        out.push(Action::Bind { engine, facts, block_bytes, shards, words });
        self.begin_unbound_saves(session, out);
    }

    /// Serves the namespace to the engine of `session`, or the last generation of it, unless it is closed to its run.
    fn serve(&mut self, session: SessionId, base: NamespaceDigest) -> Option<Binding> {
        let scheduler = &self.schedulers[&session];
        let Form { shard_bytes, shards, .. } = scheduler.form.expect("a rank has joined");
        let digest = scheduler.salt.map_or(base, |salt| namespace::salted(base, salt));
        let whose = Whose { holder: scheduler.holder, quota: self.quotas.of(base) };
        let mut binding = Binding { base, digest, namespace: 0, whose, shard_bytes, shards };
        binding.namespace = self.namespaces.id(binding.space())?;
        if !binding.is_private() {
            self.namespaces.share(binding.namespace, digest);
        }
        let scheduler = self.schedulers.get_mut(&session).expect("looked up above");
        scheduler.bound = Some(base);
        (scheduler.binding, scheduler.barred) = match self.checks.bars(scheduler.run, binding.space()) {
            true => (None, Some(binding)),
            false => (Some(binding), None),
        };
        Some(binding)
    }

    /// Every rank of a scheduler's run, if each is there and states the weights that the scheduler asked for last.
    fn ranks_of(&self, scheduler: &Scheduler) -> Option<Vec<&Worker>> {
        let ranks: Vec<&Worker> =
            scheduler.ranks.iter().map(|id| self.workers.get(&(*id)?)).collect::<Option<_>>()?;
        ranks.iter().all(|rank| rank.answers == scheduler.weights).then_some(ranks)
    }

    /// WEIGHTS of a scheduler: the weights may have changed. Nothing is served until every rank has answered.
    pub(super) fn unbind(
        &mut self,
        session: SessionId,
        number: u64,
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        let scheduler = self.schedulers.get_mut(&session).expect("the caller checked");
        check_number(number, scheduler.weights)?;
        (scheduler.weights, scheduler.bound) = (number, None);
        self.end_generation(session, out);
        self.bind(session, out);
        Ok(())
    }

    /// WEIGHTS of a rank: what it holds now.
    pub(super) fn state_weights(
        &mut self,
        session: SessionId,
        (number, answers, live): (u64, u64, [u8; 16]),
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        let worker = self.workers.get_mut(&session).expect("the caller looked");
        check_number(number, worker.weights)?;
        if answers < worker.answers {
            return Err(format!(
                "a rank answered WEIGHTS {answers} of its scheduler after {}",
                worker.answers
            ));
        }
        (worker.weights, worker.answers, worker.live) = (number, answers, Some(live));
        let rank = worker.rank as usize;
        let host = worker.scheduler.and_then(|id| Some((id, self.schedulers.get_mut(&id)?)));
        // A rank's place may be another session's by now.
        if let Some((scheduler, host)) = host.filter(|(_, host)| host.ranks[rank] == Some(session)) {
            (host.binding, host.barred) = (None, None);
            self.bind(scheduler, out);
        }
        Ok(())
    }

    /// SALT: a new generation of the namespace. Blocks of the old one are never served to this engine again.
    pub(super) fn salt(
        &mut self,
        session: SessionId,
        salt: [u8; 16],
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        let ended = self.end_generation(session, out);
        self.schedulers.get_mut(&session).expect("the caller checked").salt = Some(salt);
        if let Some(Binding { base, .. }) = ended {
            self.serve(session, base);
        }
        Ok(())
    }

    /// Ends the leases, the waits and the binding of an engine, and returns the latter.
    fn end_generation(&mut self, session: SessionId, out: &mut Vec<Action>) -> Option<Binding> {
        self.drop_unbound_saves(session, out);
        self.end_leases(session);
        let scheduler = self.schedulers.get_mut(&session).expect("the caller checked");
        let ended = scheduler.binding.take().or(scheduler.barred.take());
        scheduler.generations.extend(ended.filter(Binding::is_private).map(|ended| ended.space()));
        if scheduler.generations.len() > GENERATIONS_MAX {
            scheduler.generations.pop_front().into_iter().for_each(|space| self.namespaces.forget(space));
        }
        ended
    }
}

/// The number of a session's WEIGHTS, after its last one.
fn check_number(number: u64, last: u64) -> Result<(), Violation> {
    if number > last { Ok(()) } else { Err(format!("WEIGHTS {number} follows {last}: their numbers rise")) }
}
