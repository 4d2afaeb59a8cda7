//! The score of a prompt: how many of its leading tokens each place has, and the time until an engine here would
//! have computed the rest. For routers.
//!
//! A score reads alone: no block counts as used, is leased or is brought, and no wait begins. It is made in
//! parts, and engines are answered in between.

use std::collections::BTreeMap;

use mesh::digest::Digest;
use mesh::transport::PeerNumber;
use shm_protocol::key::{BlockHash, NamespaceDigest};
use tiers::dram::{BlockAccount, HolderId};

use super::arrivals::SourceLane;
use super::namespaces::{Binding, Space};
use super::queries::Queries;
use super::tier::Tier;
use super::worth::Outlook;
use super::{Base, SessionId};

/// Keys of a part: each is looked for in the filter of each peer with all keys before it. With 1023 peers a part
/// takes a millisecond.
const PART_KEYS: usize = 64;
/// The number of no namespace: ids never reach it.
const NO_NAMESPACE: u32 = u32::MAX;

/// A prompt to be scored.
#[derive(Debug)]
pub struct ScoredKeys {
    pub namespace: NamespaceDigest,
    /// Bytes of a block, over all shards.
    pub block_bytes: u64,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Tokens of the prompt, those behind its last full block included.
    pub tokens: u64,
    pub keys: Vec<BlockHash>,
}

/// A score under way.
#[derive(Debug)]
pub struct PromptScore {
    prompt: ScoredKeys,
    /// The engine of the expected time, and the binding of the blocks; `None` before the first part.
    asker: Option<(Option<SessionId>, Binding)>,
    /// Number of keys looked at so far.
    at: usize,
    memory: LeadingRun,
    disk: LeadingRun,
    found: LeadingRun,
    peers: BTreeMap<PeerNumber, LeadingRun>,
    promised: usize,
    /// Number of blocks that each source would bring.
    brought: BTreeMap<SourceLane, u64>,
}

/// Leading tokens of a prompt, by place.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptPlaces {
    /// In memory.
    pub memory: u64,
    /// In memory and on disks together.
    pub disk: u64,
    /// In memory, on disks and at peers together, as a query would find them.
    pub found: u64,
    /// At each peer with any of them, in its memory; late, and sometimes wrong.
    pub peers: Vec<(PeerNumber, u64)>,
    /// Promised by an engine here or at a peer.
    pub promised: u64,
    /// Milliseconds until an idle engine here has loaded and computed the whole prompt. `None`: a rate is
    /// unknown.
    pub expected_ms: Option<f64>,
}

/// A run of leading blocks, as far as it was followed.
#[derive(Copy, Clone, Debug, Default)]
struct LeadingRun {
    blocks: usize,
    ended: bool,
}

// === impl LeadingRun ===

impl LeadingRun {
    /// Follows the run through a part from `at` on, which has its first `reach` blocks. `goes_on`: it may have
    /// those behind the part.
    fn follow(&mut self, at: usize, (reach, goes_on): (usize, bool)) {
        if !self.ended && reach > 0 {
            self.blocks = at + reach;
        }
        self.ended |= !goes_on;
    }
}

// === impl PromptScore ===

impl PromptScore {
    pub fn new(prompt: ScoredKeys) -> Self {
        let (memory, disk, found, peers, brought) = Default::default();
        Self { prompt, asker: None, at: 0, memory, disk, found, peers, promised: 0, brought }
    }

    /// Looks at some more keys. False once all runs are known.
    pub(super) fn step(&mut self, base: &Base, queries: &Queries) -> bool {
        let binding = match self.asker {
            Some((_, binding)) => binding,
            None => self.begin_runs(base, queries),
        };
        let end = (self.at + PART_KEYS).min(self.prompt.keys.len());
        let part = self.at..end;
        let mesh = base.sources.mesh().filter(|_| !binding.is_private());
        let has_promises = mesh.is_some_and(|mesh| mesh.directory().has_promises());
        // Blocks in memory and on disks are found, too.
        let has_ended = self.found.ended && self.peers.values().all(|run| run.ended);
        if part.is_empty() || has_ended && !has_promises {
            return false;
        }
        self.follow_here(part.clone(), &binding, base);
        if let Some(mesh) = mesh {
            let digests: Vec<Digest> =
                self.prompt.keys[part.clone()].iter().map(|hash| binding.block_digest(hash)).collect();
            for (peer, run) in self.peers.iter_mut().filter(|(_, run)| !run.ended) {
                run.follow(part.start, mesh.directory().leading(*peer, &digests));
            }
            let last = mesh.directory().promised_place(base.cx.now_ms, &digests);
            self.promised = last.map_or(self.promised, |last| self.promised.max(part.start + last + 1));
        }
        self.at = end;
        true
    }

    /// Begins the runs, and returns the binding of the engine that would get the prompt.
    fn begin_runs(&mut self, base: &Base, queries: &Queries) -> Binding {
        let (engine, binding) = find_binding(&self.prompt, base);
        self.promised = queries.promised_run(&binding, &self.prompt.keys, base);
        let mesh = base.sources.mesh().filter(|_| !binding.is_private());
        let peers = mesh.into_iter().flat_map(|mesh| mesh.directory().peers());
        self.peers = peers.map(|peer| (peer.peer, LeadingRun::default())).collect();
        self.asker = Some((engine, binding));
        binding
    }

    /// Follows the runs that a query here would find: blocks in memory, then on disks, then at peers.
    fn follow_here(&mut self, part: std::ops::Range<usize>, binding: &Binding, base: &Base) {
        if self.found.ended {
            return;
        }
        let (at, run) = (part.start, &self.prompt.keys[part]);
        let (mut kept, dram) = (Vec::with_capacity(run.len()), &base.cx.dram);
        dram.lookup(binding.namespace, run, &mut kept);
        let (mut memory, mut disk, mut found) = (run.len(), run.len(), run.len());
        let mut span = (0, None);
        for (place, hash) in run.iter().enumerate() {
            let key = binding.block_key(hash);
            if kept[place] || dram.is_adopted(&key) {
                continue;
            }
            memory = memory.min(place);
            let mut lane = base.sources.lane_here(binding, &run[place..=place], &base.cx);
            if lane.is_none() {
                disk = disk.min(place);
                if span.0 <= place {
                    span = span_at_peers(binding, &run[place..], base)
                        .map_or((0, None), |(reach, lane)| (place + reach, Some(lane)));
                }
                lane = span.1;
            }
            let Some(lane) = lane else {
                found = place;
                break;
            };
            *self.brought.entry(lane).or_default() += 1;
        }
        let follow = |of: &mut LeadingRun, reach: usize| of.follow(at, (reach, reach == run.len()));
        follow(&mut self.memory, memory);
        follow(&mut self.disk, disk);
        follow(&mut self.found, found);
    }

    /// Returns the tokens of so many leading blocks.
    fn count_tokens(&self, blocks: usize) -> u64 {
        (blocks as u64 * u64::from(self.prompt.block_tokens)).min(self.prompt.tokens)
    }

    /// Returns the score as far as it is known.
    pub(super) fn places(&self, base: &Base) -> PromptPlaces {
        let tokens = |run: &LeadingRun| self.count_tokens(run.blocks);
        let peers = self.peers.iter().filter(|(_, run)| run.blocks > 0);
        PromptPlaces {
            memory: tokens(&self.memory),
            disk: tokens(&self.disk),
            found: tokens(&self.found),
            peers: peers.map(|(peer, run)| (*peer, tokens(run))).collect(),
            promised: self.count_tokens(self.promised),
            expected_ms: self.expected_ms(base),
        }
    }

    /// Returns the milliseconds until the engine has the KV of the whole prompt, by the rule for the end of
    /// waits: blocks beyond memory are loaded if they come sooner than they are computed.
    fn expected_ms(&self, base: &Base) -> Option<f64> {
        let (engine, binding) = self.asker.as_ref()?;
        let engine = engine.filter(|session| base.engines.has_scheduler(*session))?;
        let rate = base.engines.prefill_rate(engine)?;
        let (all, in_memory) = (self.prompt.tokens, self.count_tokens(self.memory.blocks));
        // The last token is always computed.
        let compute_ms = |from: u64, to: u64| rate.seconds(from.min(all.saturating_sub(1)), to) * 1e3;
        let found = self.count_tokens(self.found.blocks);
        if found == in_memory {
            return Some(compute_ms(found, all));
        }
        let bytes =
            self.brought.iter().map(|(lane, blocks)| (*lane, blocks * binding.block_bytes())).collect();
        let load_ms = base.cx.arrivals.flows.ms_for_more(&bytes, base.cx.now_ms);
        let compute = Some(compute_ms(in_memory, found));
        let outlook = Outlook { waited_ms: 0, still_ms: 0, load_ms, compute_ms: compute };
        match outlook.over(base.engines[engine].load_wait) {
            Some(_) => Some(compute_ms(in_memory, all)),
            None => Some(load_ms? + compute_ms(found, all)),
        }
    }
}

/// Returns the engine that would get a prompt, if there is one, and the binding of the prompt's blocks.
pub(super) fn find_binding(prompt: &ScoredKeys, base: &Base) -> (Option<SessionId>, Binding) {
    let ScoredKeys { namespace, block_bytes, tokens, .. } = *prompt;
    let engine = base.engines.soonest_in(namespace, tokens);
    let bound = engine.and_then(|session| base.engines[session].binding());
    let binding = bound.unwrap_or_else(|| {
        let space = Space { digest: namespace, block_bytes };
        unserved_binding(space, base.cx.namespaces.known(space).unwrap_or(NO_NAMESPACE))
    });
    (engine, binding)
}

/// Returns a binding that finds the blocks of a namespace without a served engine.
fn unserved_binding(space: Space, namespace: u32) -> Binding {
    let Space { digest, block_bytes } = space;
    let whose = BlockAccount { holder: HolderId::NOBODY, quota: None };
    Binding { base: digest, digest, namespace, whose, shard_bytes: block_bytes, shards: 1, parentless: false }
}

/// Returns the length of a run's begin at peers, and the peer that would be asked first.
fn span_at_peers(binding: &Binding, run: &[BlockHash], base: &Base) -> Option<(usize, SourceLane)> {
    let span = base.sources.mesh()?.find(binding, run, 0, &base.cx)?;
    Some((span.reach, SourceLane::Peer(span.holders.first()?.peer)))
}
