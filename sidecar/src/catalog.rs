//! The namespaces that this sidecar has seen: what their engines state, and who serves them now.
//!
//! A worker is compared with them when it connects, and enters where its namespace is known then; else with its whole engine,
//! once that is bound. The data thread writes, at connects, bindings, hang-ups and ticks; the control thread reads copies.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mesh::control::FACTS_BYTES_MAX;
use mesh::control::wire::namespaces::Stated;
use serde::Serialize;
use shm_protocol::handshake::WorkerHello;
use shm_protocol::key::NamespaceDigest;
use shm_protocol::namespace::{self, Facts, WEIGHTS_LIVE};

use crate::compare::Difference;
use crate::core::{Barred, Proof, SessionId, Standing, whole};
use crate::pages::quotas::{Level, Levels};

/// The catalog as its two threads share it.
#[derive(Clone, Debug, Default)]
pub struct Shared(Arc<Mutex<Catalog>>);

/// What is known of namespaces.
#[derive(Debug, Default)]
pub struct Catalog {
    known: BTreeMap<NamespaceDigest, Known>,
    /// Worker sessions that are connected: what they serve.
    members: BTreeMap<SessionId, NamespaceDigest>,
    /// Engines connected now that a namespace is closed to.
    barred: Vec<Barred>,
    /// Those that are served.
    standings: Vec<Standing>,
    facts_bytes: usize,
    connects: u64,
}

#[derive(Debug)]
struct Known {
    facts: Arc<Facts>,
    /// Digest of the facts without the one that the sidecar adds.
    stated: NamespaceDigest,
    block_bytes: u64,
    shards: u32,
    /// The engine of each connected worker.
    engines: BTreeMap<SessionId, String>,
    /// The last connect, counted in connects.
    seen: u64,
}

/// What an engine's blocks are.
#[derive(Clone, Debug)]
pub struct Blocks {
    /// All facts of its namespace.
    pub facts: Arc<Facts>,
    /// Bytes of a block, all shards.
    pub block_bytes: u64,
    /// Distinct parts of it.
    pub shards: u32,
}

/// A namespace as the control socket shows it.
#[derive(Debug, Serialize)]
pub struct Entry {
    /// What its engines state.
    pub facts: Arc<Facts>,
    pub engines: usize,
    /// Bytes of a block, all shards.
    pub block_bytes: u64,
    /// Distinct parts of it.
    #[serde(skip)]
    pub shards: u32,
    /// Its engines that are served, and why what they save is kept: null where it is not.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub proofs: BTreeMap<String, Option<Proof>>,
    /// Engines of them that it is closed to: what they compute is not what is kept.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub barred: Vec<Closed>,
    /// What its blocks may take.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota: Option<Level>,
}

/// An engine that a namespace is closed to. The rest is what its own check found; it is absent where others' did.
#[derive(Debug, Serialize)]
pub struct Closed {
    pub engine: String,
    /// How far its KV is from what is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub difference: Option<f64>,
    /// How far it may be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<f64>,
    /// The layer that differs most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<u32>,
}

// === impl Shared ===

impl Shared {
    /// The catalog, for a moment: neither thread does anything slow with it.
    pub fn lock(&self) -> MutexGuard<'_, Catalog> {
        // Nothing under this lock can panic half-way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Catalog ===

impl Catalog {
    /// Compares a worker that wants to connect with what is known; `blocks` are its own, where they are known. Answers what its
    /// user should be told; an error refuses it.
    pub fn examine(
        &self,
        engine: &str,
        worker: &WorkerHello,
        blocks: Option<&Blocks>,
    ) -> Result<Option<String>, String> {
        let (bytes, stated) = (block_bytes(worker), stated(&worker.facts));
        let other =
            self.known.iter().find(|(_, known)| known.stated == stated && !known.has(bytes, worker.shards));
        if let Some((digest, known)) = other {
            return Err(format!(
                "namespace {digest} has blocks of {} bytes in {} shards, and this engine states the same facts with \
                 blocks of {bytes} bytes in {} shards. Add the difference to its facts, or give it a fact `salt` of \
                 its own (vLLM: pillion.salt). If the facts of the earlier engine were wrong, restart the sidecar",
                known.block_bytes, known.shards, worker.shards
            ));
        }
        let Some(Blocks { facts, .. }) = blocks else { return Ok(None) };
        match &worker.expects {
            Some(expected) if *expected != namespace::digest(facts).to_string() => {
                Err(self.explain_other(expected, facts))
            }
            _ => Ok(self.note(engine, facts)),
        }
    }

    /// What the user of an engine should be told that enters the namespace of these facts.
    pub fn note(&self, engine: &str, facts: &Facts) -> Option<String> {
        let digest = namespace::digest(facts);
        let is_first = self.known.get(&digest).is_none_or(|known| !known.serves(engine));
        is_first.then(|| self.near_miss(engine, digest, facts)).flatten()
    }

    /// Why an engine of other facts cannot be what its user says.
    fn explain_other(&self, expected: &str, facts: &Facts) -> String {
        let known = self.known.iter().find(|(digest, _)| digest.to_string() == *expected);
        let why = match known {
            Some((_, known)) => namespace::explain(facts, &known.facts),
            None => "the difference is unknown, because this sidecar has not seen that namespace".into(),
        };
        format!(
            "this engine is configured for namespace {expected}, and its facts make it {}: {why}. Change what differs, \
             or leave the namespace out of its configuration (vLLM: pillion.namespace)",
            namespace::digest(facts)
        )
    }

    /// The namespace of the same model, or of one with the same configuration, that differs least from this one, explained.
    /// An engine that starts again in a known namespace is compared with connected engines alone: what its user has changed
    /// meanwhile is over. A cache group is not compared with the engine's other ones, whose blocks are meant to be others.
    fn near_miss(&self, engine: &str, digest: NamespaceDigest, facts: &Facts) -> Option<String> {
        let is_new = !self.known.contains_key(&digest);
        let same =
            |known: &Known, name: &str| facts.get(name).is_some() && facts.get(name) == known.facts.get(name);
        let near = self.known.iter().filter(|(other, known)| {
            **other != digest
                && !known.serves_another_group_of(engine)
                && (is_new || !known.engines.is_empty())
                && ["model", "weights", "config"].iter().any(|name| same(known, name))
        });
        let distance = |known: &Known| namespace::differences(facts, &known.facts).len();
        let (other, known) = near.min_by_key(|(_, known)| (distance(known), u64::MAX - known.seen))?;
        Some(format!(
            "near miss: namespace {digest} of this engine shares no block with {other}, which {} served here: {}",
            if known.engines.is_empty() { "was" } else { "is" },
            namespace::explain(facts, &known.facts)
        ))
    }

    /// Takes in sessions of an engine's workers, which leave what they served before. Answers whether they are the first of
    /// their engine in the namespace.
    pub fn enter(&mut self, sessions: &[SessionId], engine: &str, blocks: &Blocks) -> bool {
        let Blocks { facts, block_bytes, shards } = blocks;
        let digest = namespace::digest(facts);
        let moved = sessions.iter().filter(|id| self.members.get(id).is_some_and(|served| *served != digest));
        moved.copied().collect::<Vec<_>>().into_iter().for_each(|session| self.leave(session));
        self.connects += 1;
        let seen = self.connects;
        let known = self.known.entry(digest).or_insert_with(|| {
            self.facts_bytes += bytes_of(facts);
            let (facts, stated) = (Arc::clone(facts), stated(facts));
            Known {
                facts,
                stated,
                block_bytes: *block_bytes,
                shards: *shards,
                engines: BTreeMap::new(),
                seen,
            }
        });
        known.seen = seen;
        let is_first = !known.serves(engine);
        known.engines.extend(sessions.iter().map(|session| (*session, engine.to_owned())));
        self.members.extend(sessions.iter().map(|session| (*session, digest)));
        self.forget();
        is_first
    }

    /// A session ended; a scheduler's is none of ours.
    pub fn leave(&mut self, session: SessionId) {
        let Some(digest) = self.members.remove(&session) else { return };
        let known = self.known.get_mut(&digest).expect("served namespaces are not forgotten");
        known.engines.remove(&session);
        self.forget();
    }

    /// Engines that a namespace is closed to, and those that are served, as of now.
    pub fn show_engines(&mut self, barred: Vec<Barred>, standings: Vec<Standing>) {
        (self.barred, self.standings) = (barred, standings);
    }

    pub fn entries(&self, quotas: &Levels) -> Vec<(NamespaceDigest, Entry)> {
        let entry = |(digest, known): (&NamespaceDigest, &Known)| {
            let barred = self.barred.iter().filter(|barred| barred.base == *digest);
            let standings = self.standings.iter().filter(|standing| standing.base == *digest);
            let entry = Entry {
                facts: Arc::clone(&known.facts),
                engines: known.engines.values().collect::<std::collections::BTreeSet<_>>().len(),
                block_bytes: known.block_bytes,
                shards: known.shards,
                proofs: standings.map(|standing| (standing.engine.clone(), standing.proof)).collect(),
                barred: barred.map(Closed::from).collect(),
                quota: quotas.of(*digest),
            };
            (*digest, entry)
        };
        self.known.iter().map(entry).collect()
    }

    /// What the engines of each namespace state.
    pub fn stated(&self) -> Vec<(NamespaceDigest, Stated)> {
        let stated = |known: &Known| Stated {
            facts: Arc::clone(&known.facts),
            block_bytes: known.block_bytes,
            shards: known.shards,
        };
        self.known.iter().map(|(digest, known)| (*digest, stated(known))).collect()
    }

    /// Drops the namespaces that were not served for longest, while all take too much room: a connect compares each with its own,
    /// in some milliseconds. Those of connected engines, bounded by their records, stay.
    fn forget(&mut self) {
        while self.facts_bytes > FACTS_BYTES_MAX {
            let idle = self.known.iter().filter(|(_, known)| known.engines.is_empty());
            let Some((&oldest, _)) = idle.min_by_key(|(_, known)| known.seen) else { return };
            let known = self.known.remove(&oldest).expect("found above");
            self.facts_bytes -= bytes_of(&known.facts);
        }
    }
}

// === impl Entry ===

impl Entry {
    /// That of a namespace that peers alone know.
    pub fn of_peers(stated: &Stated, quota: Option<Level>) -> Self {
        let Stated { facts, block_bytes, shards } = stated;
        let (facts, block_bytes, shards) = (Arc::clone(facts), *block_bytes, *shards);
        Self { facts, engines: 0, block_bytes, shards, proofs: BTreeMap::new(), barred: Vec::new(), quota }
    }
}

// === impl Closed ===

impl From<&Barred> for Closed {
    fn from(barred: &Barred) -> Self {
        // JSON has no infinity.
        let amount = |worst: &Difference| worst.amount.min(f64::MAX);
        Self {
            engine: barred.engine.clone(),
            difference: barred.worst.as_ref().map(amount),
            limit: barred.worst.map(|worst| worst.limit()),
            layer: barred.worst.map(|worst| worst.layer),
        }
    }
}

// === impl Known ===

impl Known {
    fn serves(&self, engine: &str) -> bool {
        self.engines.values().any(|other| other == engine)
    }

    fn serves_another_group_of(&self, engine: &str) -> bool {
        whole(engine).is_some_and(|engine| self.engines.values().any(|other| whole(other) == Some(engine)))
    }

    fn has(&self, block_bytes: u64, shards: u32) -> bool {
        (self.block_bytes, self.shards) == (block_bytes, shards)
    }
}

// === impl Blocks ===

impl Blocks {
    /// Those of a worker that says hello, unless other ranks' weights have a part in its namespace.
    pub fn of(world_size: u32, worker: &WorkerHello) -> Option<Self> {
        let live = worker.live_weights.map(|live| live.0);
        let known = world_size == 1 || live.is_none();
        known.then(|| Self {
            facts: Arc::new(namespace::complete(&worker.facts, namespace::weights_live([live]))),
            block_bytes: block_bytes(worker),
            shards: worker.shards,
        })
    }
}

/// Bytes of a worker's block, all shards.
pub fn block_bytes(worker: &WorkerHello) -> u64 {
    worker.block_bytes().expect("checked by the handshake") * u64::from(worker.shards)
}

/// What two namespaces have in common that differ in nothing but the weights that run.
fn stated(facts: &Facts) -> NamespaceDigest {
    let mut facts = facts.clone();
    facts.remove(WEIGHTS_LIVE);
    namespace::digest(&facts)
}

fn bytes_of(facts: &Facts) -> usize {
    facts.iter().map(|(name, value)| name.len() + value.len()).sum()
}

#[cfg(test)]
mod tests;
