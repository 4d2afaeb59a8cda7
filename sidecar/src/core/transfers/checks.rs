//! The standing check: what an engine has computed itself is compared with what is kept under the same keys.
//!
//! An engine computes the last blocks of some hits itself and saves them with `SAVE_CHECKED`. Their keys are kept, so the
//! computed bytes go into slots that nobody finds, and are compared there.
//!
//! - Computed bytes come as those of any save do: after the step's fence, and compared only behind a drained ring. What was
//!   cancelled, or not copied whole, is never compared.
//! - Until a comparison has ended, both slots are its own: the kept block is held, the other one is being filled.
//! - Without room, or where a block or a rank is gone, there is no verdict. Nothing is lost: the engine checks its next hit.
//! - What is kept is believed against one engine. That one is barred: for the rest of its run the namespace is closed to it,
//!   over new connections too, and what it saved itself is removed. What others saved stays, so an engine that is wrong, or
//!   lies, costs itself alone.
//! - Where more of the connected engines of a namespace are barred from it than served, and at least two are, nobody is
//!   believed: all are barred, all that is kept is removed, and for runs that come later the namespace begins anew. Engines
//!   that may not save count on neither side.
//! - Bars are of this life. An engine checks its first hit of every connection, so the next life finds the same.
//!
//! A removed block is gone from DRAM and found on no disk of this life, and no later life finds anything of its namespace that this
//! one wrote to disks. Other pods keep what they have fetched: there the first hit of every engine is checked as well. It does not come
//! back from them in this life: nobody is asked for a removed block, nor for any of a namespace that has begun anew.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use shm_protocol::key::{BlockHash, BlockKey, GROUP};
use shm_protocol::message::Saved;
use shm_protocol::pool::SlotRef;
use tiers::dram::HolderId;

use super::{Action, Base, Binding, Context, OpKey, Queries, SessionId, Transfers, operations};
use crate::compare::{Difference, Number, millionths};
use crate::core::comparison::{Comparison, Found};
use crate::core::engines::Proof;
use crate::core::tier::Notice;

/// Blocks of one engine that are compared at once: the 64 tokens that a check is allowed to cost, a token each.
const BLOCKS_MAX: usize = 64;
/// Bytes of the same, unless one block is larger: threads that copy loads compare them, too.
const BYTES_MAX: u64 = 256 << 20;
/// Blocks that an engine committed last: those that go if it is barred. 2.6 MB of keys for each engine; of one that saved more
/// without being found out, the oldest stay.
const RECENT_MAX: usize = 65_536;
/// The namespace of keys that nobody asks for: [`crate::core::namespaces::Namespaces`] never gives it out.
const SCRATCH: u32 = u32::MAX;

/// The state of all checks.
#[derive(Debug, Default)]
pub(super) struct Checks {
    pub(super) running: BTreeMap<OpKey, Running>,
    records: BTreeMap<SessionId, Record>,
    /// The largest difference that was within its limit, as a part of that, by [`Number`].
    pub(super) largest: [f64; Number::ALL.len()],
}

/// A comparison that has not ended, and the end of its save.
#[derive(Debug)]
pub(super) struct Running {
    binding: Binding,
    pairs: Vec<(SlotRef, SlotRef)>,
    end: Saved,
}

/// What is known of a scheduler's session.
#[derive(Debug, Default)]
struct Record {
    /// Blocks that are compared, or will be once they are copied.
    checking: usize,
    /// Blocks that it committed last, oldest first.
    recent: VecDeque<BlockKey>,
}

// === impl Checks ===

impl Checks {
    /// A save has committed these blocks, deepest first.
    pub(super) fn committed(&mut self, session: SessionId, keys: impl Iterator<Item = BlockKey>) {
        let recent = &mut self.records.entry(session).or_default().recent;
        for key in keys {
            if recent.len() == RECENT_MAX {
                recent.pop_front();
            }
            recent.push_back(key);
        }
    }

    /// A scheduler is gone.
    pub(super) fn forget(&mut self, session: SessionId) {
        self.records.remove(&session);
    }

    /// Begins to check a block: holds what is kept under its key, and takes a slot for what was computed. `None`: there is no
    /// verdict on it.
    pub(super) fn begin(
        &mut self,
        (session, op): OpKey,
        index: u32,
        binding: &Binding,
        key: &BlockKey,
        cx: &mut Context,
    ) -> Option<(SlotRef, SlotRef)> {
        let checking = self.records.get(&session).map_or(0, |record| record.checking);
        let bytes = (checking as u64 + 1) * binding.block_bytes();
        if checking == BLOCKS_MAX || checking > 0 && bytes > BYTES_MAX {
            return None;
        }
        let kept = cx.dram.hold(key, HolderId::NOBODY)?;
        let hash = BlockHash::from_words([session, op, index.into(), 0]);
        let scratch = BlockKey { namespace: SCRATCH, group: GROUP, hash };
        let Ok(computed) = cx.begin_fill(scratch, binding) else {
            cx.dram.unhold(kept, HolderId::NOBODY);
            return None;
        };
        self.records.entry(session).or_default().checking += 1;
        Some((kept, computed))
    }

    /// Ends the check of a block, with or without a verdict.
    pub(super) fn end(&mut self, session: SessionId, kept: SlotRef, computed: SlotRef, cx: &mut Context) {
        cx.dram.unhold(kept, HolderId::NOBODY);
        cx.abandon(computed);
        if let Some(record) = self.records.get_mut(&session) {
            record.checking -= 1;
        }
    }

    fn end_all(&mut self, session: SessionId, pairs: Vec<(SlotRef, SlotRef)>, cx: &mut Context) {
        pairs.into_iter().for_each(|(kept, computed)| self.end(session, kept, computed, cx));
    }

    /// What an engine committed last under a namespace's id, which is told of no more.
    fn take_recent(&mut self, session: SessionId, namespace: u32) -> BTreeSet<BlockKey> {
        let recent = self.records.get_mut(&session).map(|record| std::mem::take(&mut record.recent));
        let recent = recent.unwrap_or_default().into_iter();
        recent.filter(|key| key.namespace == namespace).collect()
    }
}

// === impl Transfers ===

impl Transfers {
    /// The blocks of a save were copied and not cancelled: compares them, and tells of the save's end afterwards.
    pub(super) fn compare(
        &mut self,
        save: OpKey,
        binding: Binding,
        pairs: Vec<(SlotRef, SlotRef)>,
        end: Saved,
        base: &mut Base,
    ) {
        let Some((_, rank)) = base.engines.ranks(save.0).next() else {
            // Nobody is left to say what the bytes are.
            base.cx.stats.checks_undecided += 1;
            self.checks.end_all(save.0, pairs, &mut base.cx);
            return self.tell_saved(save.0, end, &mut base.cx);
        };
        let (layers, shards) = (Arc::clone(&rank.layers), binding.shards);
        base.cx.actions.push(Action::Compare(Comparison { save, pairs: pairs.clone(), shards, layers }));
        self.checks.running.insert(save, Running { binding, pairs, end });
    }

    /// A comparison has ended.
    pub(crate) fn compared(&mut self, save: OpKey, found: Found, queries: &mut Queries, base: &mut Base) {
        let running = self.checks.running.remove(&save).expect("a comparison ends once");
        let Running { binding, pairs, mut end } = running;
        (end.checked, end.differing) = (pairs.len() as u32, found.differing);
        (end.difference, end.limit) = (millionths(found.worst.amount), millionths(found.worst.limit()));
        self.checks.end_all(save.0, pairs, &mut base.cx);
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
        } else {
            base.cx.stats.checks_differing += 1;
            if !base.engines.is_barred(save.0, binding.space()) {
                self.differs(save.0, &binding, found.worst, queries, base);
            }
        }
        self.tell_saved(save.0, end, &mut base.cx);
    }

    /// What an engine computes is not what is kept.
    fn differs(
        &mut self,
        session: SessionId,
        binding: &Binding,
        worst: Difference,
        queries: &mut Queries,
        base: &mut Base,
    ) {
        self.bar(session, binding, Some(worst), queries, base);
        let recent = self.checks.take_recent(session, binding.namespace);
        base.sources.remove(&recent, &mut base.cx);
        base.sources.tell_tiers(Notice::Distrusted(binding, false), &mut base.cx);
        base.sources.tell_tiers(Notice::Refuted(&recent), &mut base.cx);
        base.cx.dram.end_removal();
        base.cx.apply_evictions();
        let Difference { layer, number, amount } = worst;
        let at_peers =
            if recent.is_empty() { String::new() } else { kept_by_peers("these blocks", binding, base) };
        base.cx.actions.push(Action::Warn(format!(
            "namespace {} is closed to engine {}: its KV differs from the kept KV by {amount:.2e} in layer {layer} ({}; \
             the limit is {:.0e}). {} blocks that it saved are removed. It runs other weights, code or settings than \
             the engines that saved: find the difference and restart it, or give it a pillion.model_id of its own if \
             it is right{at_peers}",
            binding.digest,
            base.engines[session].engine,
            number.name(),
            worst.limit(),
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
        for save in self.saves.range_mut(operations(session)).map(|(_, save)| save) {
            save.void_in(binding.namespace);
        }
        if base.engines.bar(session, binding, worst) {
            queries.end_leases(session, &mut base.cx);
        }
    }

    /// Nothing of the saves under way is kept in a namespace.
    pub(crate) fn void_saves(&mut self, namespace: u32) {
        self.saves.values_mut().for_each(|save| save.void_in(namespace));
    }

    /// Begins a namespace anew if most of its engines differ from what is kept.
    fn retire(&mut self, binding: &Binding, queries: &mut Queries, base: &mut Base) {
        let space = binding.space();
        if base.cx.namespaces.known(space) != Some(binding.namespace) {
            // It was forgotten, or has begun anew, since this engine was served in it.
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
        // Of engines that have another namespace by now, too.
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

/// What a warning says of peers, in a mesh, where what is removed here may be shared.
fn kept_by_peers(what: &str, binding: &Binding, base: &Base) -> String {
    if base.sources.mesh().is_none() || binding.is_private() {
        return String::new();
    }
    format!(
        ". Peers may still keep {what}. This sidecar requests none of {what} from them until it restarts: run pillion \
         ctl evict at the peers first"
    )
}
