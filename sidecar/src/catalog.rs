//! The namespaces that this sidecar has seen: what their engines state, who serves them now, and a sample of their weights.
//!
//! A worker is compared with them when it connects. The data thread writes, at connects and hang-ups alone; the admin thread
//! reads copies.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use sha2::{Digest, Sha256};
use shm_protocol::handshake::Worker;
use shm_protocol::key::NamespaceDigest;
use shm_protocol::namespace::{self, Facts};

use crate::engine::SessionId;
use crate::quotas::{Level, Levels};

/// Bytes of facts that are kept: thousands of namespaces of some 1 KB, which a connect compares with its own in some
/// milliseconds. Those of connected engines, bounded by their records, stay beyond it.
const FACTS_BYTES_MAX: usize = 4 << 20;

/// The catalog as its two threads share it.
#[derive(Clone, Debug, Default)]
pub struct Shared(Arc<Mutex<Catalog>>);

/// What is known of namespaces.
#[derive(Debug, Default)]
pub struct Catalog {
    known: BTreeMap<NamespaceDigest, Known>,
    /// Worker sessions that are connected: what they serve.
    members: BTreeMap<SessionId, NamespaceDigest>,
    facts_bytes: usize,
    connects: u64,
}

#[derive(Debug)]
struct Known {
    facts: Arc<Facts>,
    block_bytes: u64,
    shards: u32,
    /// Digest of the first canary of each rank.
    canaries: BTreeMap<u32, [u8; 32]>,
    /// The engine of each connected worker.
    engines: BTreeMap<SessionId, String>,
    /// The last connect, counted in connects.
    seen: u64,
}

/// A namespace as `/namespaces` shows it.
#[derive(Debug, Serialize)]
pub struct Entry {
    /// 32 hex digits.
    pub namespace: String,
    /// What its engines state.
    pub facts: Arc<Facts>,
    /// Engines connected now.
    pub engines: usize,
    /// Bytes of a block, all shards.
    pub block_bytes: u64,
    /// What its blocks may take.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota: Option<Level>,
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
    /// Compares a worker that wants to connect with what is known. Answers what its user should be told; an error refuses it.
    pub fn examine(&self, engine: &str, worker: &Worker) -> Result<Option<String>, String> {
        let digest = namespace::digest(&worker.facts);
        if let Some(expected) = worker.expects.as_ref().filter(|expected| **expected != digest.to_string()) {
            return Err(self.explain_other(expected, &worker.facts));
        }
        let known = self.known.get(&digest);
        if let Some(reason) = known.and_then(|known| known.explain_other_size(digest, worker)) {
            return Err(reason);
        }
        let first = known.and_then(|known| known.canaries.get(&worker.rank));
        if first.zip(sample(worker)).is_some_and(|(first, ours)| *first != ours) {
            return Err(format!(
                "namespace {digest} holds KV of other weights: rank {} states the same facts as an engine before it and its \
                 live weights differ. Give each its own pillion.model_id",
                worker.rank
            ));
        }
        let is_first = known.is_none_or(|known| !known.serves(engine));
        Ok(is_first.then(|| self.near_miss(digest, &worker.facts)).flatten())
    }

    /// Why an engine of other facts cannot be what its user says.
    fn explain_other(&self, expected: &str, facts: &Facts) -> String {
        let known = self.known.iter().find(|(digest, _)| digest.to_string() == *expected);
        let why = match known {
            Some((_, known)) => namespace::explain(facts, &known.facts),
            None => "this sidecar has not seen that one, so what differs is not known".into(),
        };
        format!(
            "this engine is to join namespace {expected} (pillion.namespace) and its facts make it {}: {why}. Change what \
             differs, or leave pillion.namespace out",
            namespace::digest(facts)
        )
    }

    /// The namespace of the same model that differs least from this one, explained. An engine that starts again in a known
    /// namespace is compared with connected engines alone: what its user has changed meanwhile is over.
    fn near_miss(&self, digest: NamespaceDigest, facts: &Facts) -> Option<String> {
        let is_new = !self.known.contains_key(&digest);
        let same =
            |known: &Known, name: &str| facts.get(name).is_some() && facts.get(name) == known.facts.get(name);
        let near = self.known.iter().filter(|(other, known)| {
            **other != digest
                && (is_new || !known.engines.is_empty())
                && (same(known, "model") || same(known, "weights"))
        });
        let distance = |known: &Known| namespace::differences(facts, &known.facts).len();
        let (other, known) = near.min_by_key(|(_, known)| (distance(known), u64::MAX - known.seen))?;
        Some(format!(
            "near miss: this engine's namespace {digest} shares no block with {other}, which {} served here: {}",
            if known.engines.is_empty() { "was" } else { "is" },
            namespace::explain(facts, &known.facts)
        ))
    }

    /// Takes in a worker that is connected now. Answers whether it is the first of its engine in the namespace.
    pub fn enter(&mut self, session: SessionId, engine: &str, worker: &Worker) -> bool {
        let digest = namespace::digest(&worker.facts);
        self.connects += 1;
        let seen = self.connects;
        let known = self.known.entry(digest).or_insert_with(|| {
            self.facts_bytes += bytes_of(&worker.facts);
            let facts = Arc::new(worker.facts.clone());
            let (block_bytes, shards) = (block_bytes(worker), worker.shards);
            Known { facts, block_bytes, shards, canaries: BTreeMap::new(), engines: BTreeMap::new(), seen }
        });
        known.seen = seen;
        let is_first = !known.serves(engine);
        known.engines.insert(session, engine.to_owned());
        if let Some(sample) = sample(worker) {
            known.canaries.entry(worker.rank).or_insert(sample);
        }
        self.members.insert(session, digest);
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

    /// Everything, for `/namespaces`.
    pub fn entries(&self, quotas: &Levels) -> Vec<Entry> {
        let entry = |(digest, known): (&NamespaceDigest, &Known)| Entry {
            namespace: digest.to_string(),
            facts: Arc::clone(&known.facts),
            engines: known.engines.values().collect::<std::collections::BTreeSet<_>>().len(),
            block_bytes: known.block_bytes,
            quota: quotas.of(*digest),
        };
        self.known.iter().map(entry).collect()
    }

    /// Drops the namespaces that were not served for longest, while all take too much room.
    fn forget(&mut self) {
        while self.facts_bytes > FACTS_BYTES_MAX {
            let idle = self.known.iter().filter(|(_, known)| known.engines.is_empty());
            let Some((&oldest, _)) = idle.min_by_key(|(_, known)| known.seen) else { return };
            let known = self.known.remove(&oldest).expect("found above");
            self.facts_bytes -= bytes_of(&known.facts);
        }
    }
}

// === impl Known ===

impl Known {
    fn serves(&self, engine: &str) -> bool {
        self.engines.values().any(|other| other == engine)
    }

    /// Why a worker whose blocks have another size or other shards cannot share them, whatever its facts say.
    fn explain_other_size(&self, digest: NamespaceDigest, worker: &Worker) -> Option<String> {
        let (bytes, shards) = (block_bytes(worker), worker.shards);
        let differs = (bytes, shards) != (self.block_bytes, self.shards);
        differs.then(|| {
            format!(
                "namespace {digest} has blocks of {} bytes in {} shards and this engine's have {bytes} bytes in {shards}: its \
                 facts leave out what makes them differ. State it in them, or give this engine a pillion.model_id of its own; \
                 if the engine before it was the mistaken one, restart the sidecar",
                self.block_bytes, self.shards
            )
        })
    }
}

/// Bytes of a worker's block, all shards.
fn block_bytes(worker: &Worker) -> u64 {
    worker.block_bytes().expect("checked by the handshake") * u64::from(worker.shards)
}

fn sample(worker: &Worker) -> Option<[u8; 32]> {
    worker.canary.as_ref().map(|canary| Sha256::digest(&canary.0).into())
}

fn bytes_of(facts: &Facts) -> usize {
    facts.iter().map(|(name, value)| name.len() + value.len()).sum()
}

#[cfg(test)]
mod tests;
