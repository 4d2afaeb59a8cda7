//! The namespaces seen by this sidecar: the facts stated by their engines, and the engines that serve them
//! now.
//!
//! A worker is compared with them when it connects. It enters at once if its namespace is known then,
//! otherwise with its whole engine, once that is bound. The data thread writes at connects, bindings,
//! hang-ups and ticks; the control thread reads copies.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mesh::control::FACTS_BYTES_MAX;
use mesh::control::wire::namespaces::StatedFacts;
use serde::Serialize;
use shm_protocol::handshake::WorkerHello;
use shm_protocol::key::NamespaceDigest;
use shm_protocol::namespace::{self, Facts, WEIGHTS_LIVE};

use crate::compare::BlockDifference;
use crate::core::{Barred, EngineStanding, Proof, SessionId, find_whole_engine};
use crate::pages::quotas::{Levels, QuotaLevel};

/// The catalog as shared by the data thread and the control thread.
#[derive(Clone, Debug, Default)]
pub struct SharedCatalog(Arc<Mutex<Catalog>>);

/// Known namespaces, the sessions that serve them, and the standing of their engines.
#[derive(Debug, Default)]
pub struct Catalog {
    known: BTreeMap<NamespaceDigest, CatalogNamespace>,
    /// The namespace of each connected worker session.
    members: BTreeMap<SessionId, NamespaceDigest>,
    /// Connected engines barred from a namespace.
    barred: Vec<Barred>,
    /// Engines that are served.
    standings: Vec<EngineStanding>,
    facts_bytes: usize,
    connects: u64,
}

#[derive(Debug)]
struct CatalogNamespace {
    facts: Arc<Facts>,
    /// Digest of the facts without `weights_live`, which the sidecar adds.
    stated: NamespaceDigest,
    block_bytes: u64,
    shards: u32,
    /// The engine of each connected worker.
    engines: BTreeMap<SessionId, String>,
    /// Number of the last connect, counted over all namespaces.
    seen: u64,
}

/// The facts of an engine's namespace and the size of its blocks.
#[derive(Clone, Debug)]
pub struct EngineBlocks {
    /// All facts of the namespace.
    pub facts: Arc<Facts>,
    /// Bytes of a block, over all shards.
    pub block_bytes: u64,
    /// Shards of a block.
    pub shards: u32,
}

/// A namespace as the control socket shows it.
#[derive(Debug, Serialize)]
pub struct CatalogEntry {
    /// Facts stated by its engines.
    pub facts: Arc<Facts>,
    pub engines: usize,
    /// Bytes of a block, over all shards.
    pub block_bytes: u64,
    /// Shards of a block.
    #[serde(skip)]
    pub shards: u32,
    /// Its served engines, each with the reason why its saves are kept; null if its saves are not kept.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub proofs: BTreeMap<String, Option<Proof>>,
    /// Its connected engines that are barred: their KV differs from the kept KV.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub barred: Vec<BarredEngine>,
    /// Its quota, and the bytes in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota: Option<QuotaLevel>,
}

/// An engine barred from a namespace. The other fields come from this engine's own check; they are absent if
/// it was barred by the checks of others.
#[derive(Debug, Serialize)]
pub struct BarredEngine {
    pub engine: String,
    /// Difference between its KV and the kept KV.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub difference: Option<f64>,
    /// Largest difference allowed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<f64>,
    /// Number of the layer with the largest difference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<u32>,
}

// === impl SharedCatalog ===

impl SharedCatalog {
    /// Locks the catalog. Each thread holds the lock only for short work in memory.
    pub fn lock(&self) -> MutexGuard<'_, Catalog> {
        // Nothing under this lock can panic half-way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Catalog ===

impl Catalog {
    /// Compares a connecting worker with the known namespaces; `blocks` are the worker's blocks, if they are
    /// known already. Returns a hint for the engine's user, if there is one. An error refuses the worker:
    /// other engines with the same facts have blocks of another size, or the worker expects another
    /// namespace.
    pub fn examine(
        &self,
        engine: &str,
        worker: &WorkerHello,
        blocks: Option<&EngineBlocks>,
    ) -> Result<Option<String>, String> {
        let (bytes, stated) = (block_bytes(worker), stated(&worker.facts));
        let other = self
            .known
            .iter()
            .find(|(_, known)| known.stated == stated && !known.matches_sizes(bytes, worker.shards));
        if let Some((digest, known)) = other {
            return Err(format!(
                "namespace {digest} has blocks of {} bytes in {} shards, and this engine states the same facts with \
                 blocks of {bytes} bytes in {} shards. Add the difference to its facts, or give it a fact `salt` of \
                 its own (vLLM: pillion.salt). If the facts of the earlier engine were wrong, restart the sidecar",
                known.block_bytes, known.shards, worker.shards
            ));
        }
        let Some(EngineBlocks { facts, .. }) = blocks else { return Ok(None) };
        match &worker.expects {
            Some(expected) if *expected != namespace::digest_facts(facts).to_string() => {
                Err(self.explain_other(expected, facts))
            }
            _ => Ok(self.note_near_miss(engine, facts)),
        }
    }

    /// A hint for the user of an engine that enters the namespace of these facts: the nearest other
    /// namespace, if no session of the engine serves this one.
    pub fn note_near_miss(&self, engine: &str, facts: &Facts) -> Option<String> {
        let digest = namespace::digest_facts(facts);
        let is_first = self.known.get(&digest).is_none_or(|known| !known.serves(engine));
        is_first.then(|| self.near_miss(engine, digest, facts)).flatten()
    }

    /// Explains why an engine of these facts is not in the namespace expected by its configuration.
    fn explain_other(&self, expected: &str, facts: &Facts) -> String {
        let known = self.known.iter().find(|(digest, _)| digest.to_string() == *expected);
        let why = match known {
            Some((_, known)) => namespace::explain_differences(facts, &known.facts),
            None => "the difference is unknown, because this sidecar has not seen that namespace".into(),
        };
        format!(
            "this engine is configured for namespace {expected}, and its facts make it {}: {why}. Change what differs, \
             or leave the namespace out of its configuration (vLLM: pillion.namespace)",
            namespace::digest_facts(facts)
        )
    }

    /// Names the nearest other namespace of the same model, weights or configuration, and explains the
    /// difference. An engine that returns to a known namespace is compared only with namespaces of connected
    /// engines, because a mistake made meanwhile was corrected. Namespaces of the engine's own other cache
    /// groups are left out: they differ by design.
    fn near_miss(&self, engine: &str, digest: NamespaceDigest, facts: &Facts) -> Option<String> {
        let is_new = !self.known.contains_key(&digest);
        let same = |known: &CatalogNamespace, name: &str| {
            facts.get(name).is_some() && facts.get(name) == known.facts.get(name)
        };
        let near = self.known.iter().filter(|(other, known)| {
            **other != digest
                && !known.serves_another_group_of(engine)
                && (is_new || !known.engines.is_empty())
                && ["model", "weights", "config"].iter().any(|name| same(known, name))
        });
        let distance = |known: &CatalogNamespace| namespace::list_differences(facts, &known.facts).len();
        let (other, known) = near.min_by_key(|(_, known)| (distance(known), u64::MAX - known.seen))?;
        Some(format!(
            "near miss: namespace {digest} of this engine shares no block with {other}, which {} served here: {}",
            if known.engines.is_empty() { "was" } else { "is" },
            namespace::explain_differences(facts, &known.facts)
        ))
    }

    /// Adds worker sessions of an engine to their namespace, and removes them from their previous one.
    /// Returns true if they are the engine's first sessions in the namespace.
    pub fn enter_sessions(&mut self, sessions: &[SessionId], engine: &str, blocks: &EngineBlocks) -> bool {
        let EngineBlocks { facts, block_bytes, shards } = blocks;
        let digest = namespace::digest_facts(facts);
        let moved = sessions.iter().filter(|id| self.members.get(id).is_some_and(|served| *served != digest));
        moved.copied().collect::<Vec<_>>().into_iter().for_each(|session| self.leave_session(session));
        self.connects += 1;
        let seen = self.connects;
        let known = self.known.entry(digest).or_insert_with(|| {
            self.facts_bytes += bytes_of(facts);
            let (facts, stated) = (Arc::clone(facts), stated(facts));
            CatalogNamespace {
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
        self.forget_idle();
        is_first
    }

    /// Removes a session that ended. Sessions of schedulers are not in the catalog.
    pub fn leave_session(&mut self, session: SessionId) {
        let Some(digest) = self.members.remove(&session) else { return };
        let known = self.known.get_mut(&digest).expect("served namespaces are not forgotten");
        known.engines.remove(&session);
        self.forget_idle();
    }

    /// Replaces the lists of barred and served engines.
    pub fn show_engines(&mut self, barred: Vec<Barred>, standings: Vec<EngineStanding>) {
        (self.barred, self.standings) = (barred, standings);
    }

    pub fn entries(&self, quotas: &Levels) -> Vec<(NamespaceDigest, CatalogEntry)> {
        let entry = |(digest, known): (&NamespaceDigest, &CatalogNamespace)| {
            let barred = self.barred.iter().filter(|barred| barred.base == *digest);
            let standings = self.standings.iter().filter(|standing| standing.base == *digest);
            let entry = CatalogEntry {
                facts: Arc::clone(&known.facts),
                engines: known.engines.values().collect::<std::collections::BTreeSet<_>>().len(),
                block_bytes: known.block_bytes,
                shards: known.shards,
                proofs: standings.map(|standing| (standing.engine.clone(), standing.proof)).collect(),
                barred: barred.map(BarredEngine::from).collect(),
                quota: quotas.of_namespace(*digest),
            };
            (*digest, entry)
        };
        self.known.iter().map(entry).collect()
    }

    /// The blocks of each namespace, and true while an engine of it is connected.
    pub fn blocks(&self) -> impl Iterator<Item = (NamespaceDigest, EngineBlocks, bool)> + '_ {
        self.known.iter().map(|(digest, known)| {
            let CatalogNamespace { facts, block_bytes, shards, .. } = known;
            let blocks =
                EngineBlocks { facts: Arc::clone(facts), block_bytes: *block_bytes, shards: *shards };
            (*digest, blocks, !known.engines.is_empty())
        })
    }

    /// The facts and block sizes of each namespace.
    pub fn stated(&self) -> Vec<(NamespaceDigest, StatedFacts)> {
        let stated = |known: &CatalogNamespace| StatedFacts {
            facts: Arc::clone(&known.facts),
            block_bytes: known.block_bytes,
            shards: known.shards,
        };
        self.known.iter().map(|(digest, known)| (*digest, stated(known))).collect()
    }

    /// Drops the namespaces without engines, the least recently served first, while all facts take more than
    /// `FACTS_BYTES_MAX`: a connect compares its facts with all of them, which takes some milliseconds.
    /// Namespaces of connected engines stay; the number of sessions bounds them.
    fn forget_idle(&mut self) {
        while self.facts_bytes > FACTS_BYTES_MAX {
            let idle = self.known.iter().filter(|(_, known)| known.engines.is_empty());
            let Some((&oldest, _)) = idle.min_by_key(|(_, known)| known.seen) else { return };
            let known = self.known.remove(&oldest).expect("found above");
            self.facts_bytes -= bytes_of(&known.facts);
        }
    }
}

// === impl CatalogEntry ===

impl CatalogEntry {
    /// The entry of a namespace that only peers have.
    pub fn of_peers(stated: &StatedFacts, quota: Option<QuotaLevel>) -> Self {
        let StatedFacts { facts, block_bytes, shards } = stated;
        let (facts, block_bytes, shards) = (Arc::clone(facts), *block_bytes, *shards);
        Self { facts, engines: 0, block_bytes, shards, proofs: BTreeMap::new(), barred: Vec::new(), quota }
    }
}

// === impl BarredEngine ===

impl From<&Barred> for BarredEngine {
    fn from(barred: &Barred) -> Self {
        // JSON has no infinity.
        let amount = |worst: &BlockDifference| worst.amount.min(f64::MAX);
        Self {
            engine: barred.engine.clone(),
            difference: barred.worst.as_ref().map(amount),
            limit: barred.worst.map(|worst| worst.limit()),
            layer: barred.worst.map(|worst| worst.layer),
        }
    }
}

// === impl CatalogNamespace ===

impl CatalogNamespace {
    fn serves(&self, engine: &str) -> bool {
        self.engines.values().any(|other| other == engine)
    }

    fn serves_another_group_of(&self, engine: &str) -> bool {
        find_whole_engine(engine)
            .is_some_and(|engine| self.engines.values().any(|other| find_whole_engine(other) == Some(engine)))
    }

    fn matches_sizes(&self, block_bytes: u64, shards: u32) -> bool {
        (self.block_bytes, self.shards) == (block_bytes, shards)
    }
}

// === impl EngineBlocks ===

impl EngineBlocks {
    /// The blocks of a worker from its handshake; `None` if its namespace also depends on the weights of
    /// other ranks.
    pub fn of_worker(world_size: u32, worker: &WorkerHello) -> Option<Self> {
        let live = worker.live_weights.map(|live| live.0);
        let known = world_size == 1 || live.is_none();
        known.then(|| Self {
            facts: Arc::new(namespace::complete_facts(&worker.facts, namespace::weights_live([live]))),
            block_bytes: block_bytes(worker),
            shards: worker.shards,
        })
    }
}

/// Bytes of a worker's block, over all shards.
pub fn block_bytes(worker: &WorkerHello) -> u64 {
    worker.block_bytes().expect("checked by the handshake") * u64::from(worker.shards)
}

/// Digest of the facts without the live weights: two namespaces share it if they differ only in these
/// weights.
fn stated(facts: &Facts) -> NamespaceDigest {
    let mut facts = facts.clone();
    facts.remove(WEIGHTS_LIVE);
    namespace::digest_facts(&facts)
}

fn bytes_of(facts: &Facts) -> usize {
    facts.iter().map(|(name, value)| name.len() + value.len()).sum()
}

#[cfg(test)]
mod tests;
