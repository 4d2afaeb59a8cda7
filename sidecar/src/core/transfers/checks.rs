//! The standing check: blocks computed by an engine are compared with the blocks kept under the same keys.
//!
//! An engine computes the last blocks of some hits itself and saves them with `SAVE_CHECKED`. Their keys are
//! kept, so the computed bytes go into slots no query finds, and are compared there.
//!
//! - Computed bytes come as those of any save do: after the step's fence, and compared only behind a drained
//!   ring. Cancelled blocks, and blocks not copied whole, are never compared.
//! - Until a comparison has ended, both slots are its own: the kept block is held, the other one is being
//!   filled.
//! - Without room, or if a block or a rank is gone, there is no verdict. Nothing is lost: the engine checks
//!   its next hit.
//! - [`super::doubts`] judges a contradiction. A wrong engine is barred: for the rest of its run the
//!   namespace is closed to it, over new connections too, and its own blocks are removed.
//! - If more of a namespace's connected engines are barred from it than served, and at least two are, no
//!   engine is believed: all are barred, all kept blocks are removed, and the namespace starts again for
//!   later runs. Engines without permission to save count on neither side.
//! - Bars are of this life. An engine checks its first hit of every connection, so the next life finds the
//!   same.
//!
//! A removed block is gone from DRAM and found on no disk in this life; later lives find nothing of its
//! namespace written to disks by this one. Other pods keep their fetched copies: there the first hit of every
//! engine is checked as well. The copies do not come back in this life: no peer is asked for a removed block,
//! or for any block of a namespace started again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use shm_protocol::key::{BlockHash, BlockKey, GROUP};
use shm_protocol::message::Saved;
use shm_protocol::pool::SlotRef;
use tiers::dram::HolderId;

use super::doubts::{ContradictionVerdict, DOUBT_MAX, WITNESSES};
use super::{Action, Base, Binding, Context, OpKey, Queries, SessionId, Transfers, operations};
use crate::compare::{Difference, Number, millionths};
use crate::core::engines::Proof;
use crate::core::inspection::{Found, InspectedBlocks, Inspection};
use crate::core::tier::Notice;

/// Limit of one engine's blocks under comparison at once: the most a short check of 64 tokens has.
const BLOCKS_MAX: usize = 64;
/// Limit of their bytes, unless one block is larger: the threads for copies of loads compare them, too.
const BYTES_MAX: u64 = 256 << 20;
/// The namespace of keys no engine asks for: [`crate::core::namespaces::Namespaces`] never gives it out.
const SCRATCH: u32 = u32::MAX;

/// The state of all checks.
#[derive(Debug, Default)]
pub(super) struct Checks {
    pub(super) running: BTreeMap<OpKey, Running>,
    /// Blocks under comparison, or on their way to it, by scheduler's session.
    checking: BTreeMap<SessionId, usize>,
    /// The largest difference within its limit, as a part of that limit, by [`Number`].
    pub(super) largest: [f64; Number::ALL.len()],
}

/// A running comparison, and the end of its save.
#[derive(Debug)]
pub(super) struct Running {
    binding: Binding,
    chain: SaveChain,
    pairs: Vec<Pair>,
    end: Saved,
}

/// The chain of a save, head first.
#[derive(Debug)]
pub(super) struct SaveChain {
    /// Keys before those of the save.
    pub(super) before: Vec<BlockHash>,
    pub(super) keys: Vec<BlockHash>,
}

/// A computed block, and the kept one of its key.
#[derive(Copy, Clone, Debug)]
pub(super) struct Pair {
    /// Position within the save.
    pub(super) place: u32,
    pub(super) kept: SlotRef,
    pub(super) computed: SlotRef,
}

/// A difference of an engine's KV from a kept chain.
#[derive(Debug)]
struct Contradiction {
    binding: Binding,
    /// The first differing block, and the doubtful part of its chain.
    key: BlockKey,
    chain: BTreeSet<BlockKey>,
    /// Keys of kept blocks, each a possible cause.
    suspected: BTreeSet<BlockKey>,
    worst: Difference,
}

/// Returns the limit of one engine's blocks under comparison at once.
fn blocks_max(block_bytes: u64) -> usize {
    BLOCKS_MAX.min((BYTES_MAX / block_bytes.max(1)).max(1) as usize)
}

/// True if the kept block at `place` of `count` in a checked save is compared: some of a long save, evenly
/// spread, and the last.
pub(super) fn is_chosen(place: usize, count: usize, block_bytes: u64) -> bool {
    let most = blocks_max(block_bytes);
    count <= most || (place + 1) * most / count > place * most / count
}

// === impl Checks ===

impl Checks {
    /// Forgets a gone scheduler.
    pub(super) fn forget(&mut self, session: SessionId) {
        self.checking.remove(&session);
    }

    /// Begins to check a block: holds the block kept under its key, and takes a slot for the computed one.
    /// `None`: it gets no verdict.
    pub(super) fn begin(
        &mut self,
        (session, op): OpKey,
        index: u32,
        binding: &Binding,
        key: &BlockKey,
        cx: &mut Context,
    ) -> Option<(SlotRef, SlotRef)> {
        let checking = self.checking.get(&session).copied().unwrap_or_default();
        if checking >= blocks_max(binding.block_bytes()) {
            return None;
        }
        let kept = cx.dram.hold(key, HolderId::NOBODY)?;
        let hash = BlockHash::from_words([session, op, index.into(), 0]);
        let scratch = BlockKey { namespace: SCRATCH, group: GROUP, hash };
        let Ok(computed) = cx.begin_fill(scratch, binding) else {
            cx.dram.unhold(kept, HolderId::NOBODY);
            return None;
        };
        self.checking.insert(session, checking + 1);
        Some((kept, computed))
    }

    /// Ends the check of a block, with or without a verdict.
    pub(super) fn end(&mut self, session: SessionId, kept: SlotRef, computed: SlotRef, cx: &mut Context) {
        cx.dram.unhold(kept, HolderId::NOBODY);
        cx.abandon(computed);
        if let Some(checking) = self.checking.get_mut(&session) {
            *checking -= 1;
        }
    }

    fn end_all(&mut self, session: SessionId, pairs: &[Pair], cx: &mut Context) {
        pairs.iter().for_each(|pair| self.end(session, pair.kept, pair.computed, cx));
    }
}

// === impl Running ===

impl Running {
    /// Returns the key of a pair.
    fn key(&self, pair: usize) -> BlockKey {
        self.binding.key(&self.chain.keys[self.pairs[pair].place as usize])
    }

    /// Returns the keys of the chain without a witness if a pair differs: all behind the equal pair before
    /// it, or all.
    fn doubtful(&self, pair: usize) -> BTreeSet<BlockKey> {
        let SaveChain { before, keys } = &self.chain;
        let equal = self.equal_before(pair);
        let before = if equal == 0 { &before[..] } else { &[] };
        before.iter().chain(&keys[equal..]).map(|hash| self.binding.key(hash)).collect()
    }

    /// Returns the keys of kept blocks, each a possible cause of a pair's difference: the loaded ones, and
    /// those behind the equal pair before it up to its own.
    fn suspected(&self, pair: usize) -> BTreeSet<BlockKey> {
        let SaveChain { before, keys } = &self.chain;
        let suspected = &keys[self.equal_before(pair)..=self.pairs[pair].place as usize];
        before.iter().chain(suspected).map(|hash| self.binding.key(hash)).collect()
    }

    /// Returns the number of the save's keys up to the equal pair before this one.
    fn equal_before(&self, pair: usize) -> usize {
        pair.checked_sub(1).map_or(0, |equal| self.pairs[equal].place as usize + 1)
    }
}

// === impl Transfers ===

impl Transfers {
    /// Compares the blocks of a save, copied and not cancelled. The engine gets the save's end afterwards.
    pub(super) fn compare(
        &mut self,
        save: OpKey,
        binding: Binding,
        chain: SaveChain,
        pairs: Vec<Pair>,
        end: Saved,
        base: &mut Base,
    ) {
        let Some((_, rank)) = base.engines.ranks(save.0).next() else {
            // No rank is left to state the layers of the blocks.
            base.cx.stats.checks_undecided += 1;
            self.checks.end_all(save.0, &pairs, &mut base.cx);
            return self.tell_saved(save.0, end, &mut base.cx);
        };
        let (layers, shards) = (Arc::clone(&rank.layers), binding.shards);
        let blocks = InspectedBlocks::Pairs(pairs.iter().map(|pair| (pair.kept, pair.computed)).collect());
        base.cx.actions.push(Action::Inspect(Inspection { save, blocks, shards, layers, sums: false }));
        self.checks.running.insert(save, Running { binding, chain, pairs, end });
    }

    /// Ends a comparison.
    pub(crate) fn compared(&mut self, save: OpKey, found: Found, queries: &mut Queries, base: &mut Base) {
        let running = self.checks.running.remove(&save).expect("a comparison ends once");
        let Running { binding, mut end, .. } = running;
        (end.checked, end.differing) = (running.pairs.len() as u32, found.differing);
        (end.difference, end.limit) = (millionths(found.worst.amount), millionths(found.worst.limit()));
        self.checks.end_all(save.0, &running.pairs, &mut base.cx);
        if !base.engines.has_scheduler(save.0) {
            return;
        }
        base.cx.stats.checks += 1;
        if found.differing == 0 {
            let largest = &mut self.checks.largest[found.worst.number as usize];
            *largest = largest.max(found.worst.part());
            if !base.engines.may_save(save.0) {
                base.engines.prove(save.0, binding.space(), Proof::Compared);
            }
            self.doubts.agree(save.0, base.engines[save.0].run, &running.key(running.pairs.len() - 1));
        } else {
            base.cx.stats.checks_differing += 1;
            if !base.engines.is_barred(save.0, binding.space()) {
                let first = found.first as usize;
                let (key, chain) = (running.key(first), running.doubtful(first));
                let said = Contradiction {
                    binding,
                    key,
                    chain,
                    suspected: running.suspected(first),
                    worst: found.worst,
                };
                self.contradicts(save.0, &said, queries, base);
            }
        }
        self.tell_saved(save.0, end, &mut base.cx);
    }

    /// Handles a difference of an engine's KV from the kept one. An engine without a proof is the wrong one.
    fn contradicts(
        &mut self,
        session: SessionId,
        said: &Contradiction,
        queries: &mut Queries,
        base: &mut Base,
    ) {
        let namespace = said.binding.namespace;
        let against = self.doubts.source(&said.key);
        let has_word = base.engines.may_save(session);
        if !has_word
            || self.doubts.contradict(session, namespace, against.clone(), &said.suspected, base.cx.now)
                == ContradictionVerdict::Wrong
        {
            return self.differs(session, &said.binding, said.worst, queries, base);
        }
        self.void_saves_of(session, namespace);
        let mut gone = self.doubts.saved_with(&against, namespace);
        gone.extend(&said.chain);
        self.doubts.add_descendants(&mut gone, namespace);
        let kept = base.cx.dram.stats().blocks;
        let at_peers = remove(&gone, &said.binding, base);
        base.cx.actions.push(Action::Warn(format!(
            "{} blocks of namespace {} are removed: engine {} computed other KV ({}), so it or the engine that saved them is \
             wrong. Nothing that engine {} computes is kept until it agrees with {WITNESSES} other chains, or for {} s. If it \
             contradicts a chain of another saver, the namespace is closed to it{at_peers}",
            kept - base.cx.dram.stats().blocks,
            said.binding.digest,
            base.engines[session].engine,
            described(said.worst),
            base.engines[session].engine,
            DOUBT_MAX.as_secs()
        )));
    }

    /// Bars a wrong engine, and removes its blocks.
    fn differs(
        &mut self,
        session: SessionId,
        binding: &Binding,
        worst: Difference,
        queries: &mut Queries,
        base: &mut Base,
    ) {
        self.bar(session, binding, Some(worst), queries, base);
        let recent = self.doubts.take_recent(base.engines[session].run, binding.namespace);
        let at_peers = remove(&recent, binding, base);
        base.cx.actions.push(Action::Warn(format!(
            "namespace {} is closed to engine {}: its KV differs from the kept KV by {}. {} blocks that it saved are removed. It \
             runs other weights, code or settings than the engines that saved: find the difference and restart it, or \
             give it a pillion.model_id of its own if it is right{at_peers}",
            binding.digest,
            base.engines[session].engine,
            described(worst),
            recent.len()
        )));
        self.retire(binding, queries, base);
    }

    /// Closes a namespace to an engine for the rest of its run.
    fn bar(
        &mut self,
        session: SessionId,
        binding: &Binding,
        worst: Option<Difference>,
        queries: &mut Queries,
        base: &mut Base,
    ) {
        self.void_saves_of(session, binding.namespace);
        if base.engines.bar(session, binding, worst) {
            queries.end_leases(session, &mut base.cx);
        }
    }

    fn void_saves_of(&mut self, session: SessionId, namespace: u32) {
        self.saves.range_mut(operations(session)).for_each(|(_, save)| save.void_in(namespace));
    }

    /// Voids the saves under way in a namespace: none of their blocks is kept.
    pub(crate) fn void_saves(&mut self, namespace: u32) {
        self.saves.values_mut().for_each(|save| save.void_in(namespace));
    }

    /// Starts a namespace again if most of its engines differ from the kept blocks.
    fn retire(&mut self, binding: &Binding, queries: &mut Queries, base: &mut Base) {
        let space = binding.space();
        if base.cx.namespaces.known(space) != Some(binding.namespace) {
            // The namespace was forgotten, or started again, since this engine was served in it.
            return;
        }
        let (served, barred) = (base.engines.served_in(space), base.engines.barred_from(binding.namespace));
        let believed = served.iter().filter(|session| base.engines.may_save(**session)).count();
        if barred < 2 || barred <= believed {
            return;
        }
        for session in &served {
            self.bar(*session, binding, None, queries, base);
        }
        // Saves of engines with another namespace by now are void, too.
        self.void_saves(binding.namespace);
        base.cx.namespaces.retire(space);
        base.sources.tell_tiers(Notice::Distrusted(binding, true), &mut base.cx);
        base.cx.arrivals.distrust(|key| key.namespace == binding.namespace);
        base.cx.dram.remove_namespace(binding.namespace);
        base.cx.dram.end_removal();
        base.cx.apply_evictions();
        let at_peers = kept_by_peers("it", binding, base);
        base.cx.actions.push(Action::Warn(format!(
            "namespace {} starts again without blocks: the KV of {barred} engines differs from the kept KV, and that of \
             {} does not. It is closed to all of them until they restart. They run different weights, code or settings \
             under equal facts: give each kind a pillion.model_id of its own{at_peers}",
            binding.digest,
            served.len()
        )));
    }
}

/// Removes blocks. Returns the part of a warning about peers.
fn remove(keys: &BTreeSet<BlockKey>, binding: &Binding, base: &mut Base) -> String {
    base.sources.remove(keys, &mut base.cx);
    base.sources.tell_tiers(Notice::Distrusted(binding, false), &mut base.cx);
    base.sources.tell_tiers(Notice::Refuted(keys), &mut base.cx);
    base.cx.dram.end_removal();
    base.cx.apply_evictions();
    if keys.is_empty() { String::new() } else { kept_by_peers("these blocks", binding, base) }
}

/// Returns a difference in words.
fn described(worst: Difference) -> String {
    let Difference { layer, number, amount } = worst;
    format!("{amount:.2e} in layer {layer} ({}; the limit is {:.0e})", number.name(), worst.limit())
}

/// Returns the part of a warning about peers; empty without a mesh, or for a private namespace.
fn kept_by_peers(what: &str, binding: &Binding, base: &Base) -> String {
    if base.sources.mesh().is_none() || binding.is_private() {
        return String::new();
    }
    format!(
        ". Peers may still keep {what}. This sidecar requests none of {what} from them until it restarts: run pillion \
         ctl evict at the peers first"
    )
}
