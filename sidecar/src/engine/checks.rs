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
//!   believed: all are barred, all that is kept is removed, and for runs that come later the namespace begins anew.
//! - Bars are of this life. An engine checks its first hit of every connection, so the next life finds the same.
//!
//! A removed block is gone from DRAM and found on no disk of this life. Other pods keep what they have fetched, and disks what
//! lies on them for the next life: there the first hit of every engine is checked as well.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::message::Saved;
use shm_protocol::pool::SlotRef;

use tiers::dram::HolderId;

use super::comparison::{Comparison, Found};
use super::members::Scheduler;
use super::namespaces::{Binding, Space};
use super::{Action, Core, GROUP, SessionId, operations};
use crate::compare::{Difference, Number, millionths};

/// Blocks of one engine that are compared at once: the 64 tokens that a check is allowed to cost, a token each.
const BLOCKS_MAX: usize = 64;
/// Bytes of the same, unless one block is larger: threads that copy loads compare them, too.
const BYTES_MAX: u64 = 256 << 20;
/// Blocks that an engine committed last: those that go if it is barred. 2.6 MB of keys for each engine; of one that saved more
/// without being found out, the oldest stay.
const RECENT_MAX: usize = 65_536;
/// Bars that are remembered, of runs past and present: four of every engine process that may be connected.
const BARS_MAX: usize = 1024;
/// The namespace of keys that nobody asks for: [`super::namespaces::Namespaces`] never gives it out.
const SCRATCH: u32 = u32::MAX;

/// An engine that a namespace is closed to.
#[derive(Clone, Debug, PartialEq)]
pub struct Barred {
    /// The namespace, as the engine's facts make it.
    pub base: NamespaceDigest,
    /// The engine's id, as its HELLO states it.
    pub engine: String,
    /// What its own check found; none: others' checks did.
    pub worst: Option<Difference>,
}

/// The state of all checks.
#[derive(Debug, Default)]
pub(super) struct Checks {
    running: BTreeMap<(SessionId, u64), Running>,
    records: BTreeMap<SessionId, Record>,
    bars: VecDeque<Bar>,
    /// The largest difference that was within its limit, as a part of that, by [`Number`].
    largest: [f64; Number::ALL.len()],
}

/// A comparison that has not ended, and the end of its save.
#[derive(Debug)]
struct Running {
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

/// A run that a namespace is closed to.
#[derive(Debug)]
struct Bar {
    run: [u8; 16],
    space: Space,
    /// The id that the namespace had.
    namespace: u32,
    worst: Option<Difference>,
}

// === impl Checks ===

impl Checks {
    /// Whether a comparison has not ended.
    pub(super) fn any(&self) -> bool {
        !self.running.is_empty()
    }

    /// Whether this save's blocks are being compared.
    pub(super) fn runs(&self, save: (SessionId, u64)) -> bool {
        self.running.contains_key(&save)
    }

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

    /// Whether a run is barred.
    pub(super) fn bars(&self, run: [u8; 16], space: Space) -> bool {
        self.bar(run, space).is_some()
    }

    fn bar(&self, run: [u8; 16], space: Space) -> Option<&Bar> {
        self.bars.iter().find(|bar| bar.run == run && bar.space == space)
    }

    fn add(&mut self, bar: Bar) {
        if self.bars.len() == BARS_MAX {
            self.bars.pop_front();
        }
        self.bars.push_back(bar);
    }
}

// === impl Core: checking ===

impl Core {
    /// Begins to check a block: holds what is kept under its key, and takes a slot for what was computed. `None`: there is no
    /// verdict on it.
    pub(super) fn begin_check(
        &mut self,
        (session, op): (SessionId, u64),
        index: u32,
        binding: &Binding,
        key: &BlockKey,
        out: &mut Vec<Action>,
    ) -> Option<(SlotRef, SlotRef)> {
        let checking = self.checks.records.get(&session).map_or(0, |record| record.checking);
        let bytes = (checking as u64 + 1) * binding.block_bytes();
        if checking == BLOCKS_MAX || checking > 0 && bytes > BYTES_MAX {
            return None;
        }
        let kept = self.dram.hold(key, HolderId::NOBODY)?;
        let hash = BlockHash::from_words([session, op, index.into(), 0]);
        let scratch = BlockKey { namespace: SCRATCH, group: GROUP, hash };
        let computed = self.dram.begin_fill(scratch, binding.block_bytes(), binding.whose);
        self.apply_evictions(out);
        let Ok(computed) = computed else {
            self.dram.unhold(kept, HolderId::NOBODY);
            return None;
        };
        self.checks.records.entry(session).or_default().checking += 1;
        out.push(Action::FillSlot { slot: computed, namespace: binding.digest, key: scratch });
        Some((kept, computed))
    }

    /// Ends the check of a block, with or without a verdict.
    pub(super) fn end_check(
        &mut self,
        session: SessionId,
        kept: SlotRef,
        computed: SlotRef,
        out: &mut Vec<Action>,
    ) {
        self.dram.unhold(kept, HolderId::NOBODY);
        self.dram.abandon(computed);
        out.push(Action::FreeSlot { slot: computed });
        if let Some(record) = self.checks.records.get_mut(&session) {
            record.checking -= 1;
        }
    }

    /// The blocks of a save were copied and not cancelled: compares them, and tells of the save's end afterwards.
    pub(super) fn compare(
        &mut self,
        save: (SessionId, u64),
        binding: Binding,
        pairs: Vec<(SlotRef, SlotRef)>,
        end: Saved,
        out: &mut Vec<Action>,
    ) {
        let scheduler = self.schedulers.get(&save.0);
        let rank = scheduler.and_then(|scheduler| scheduler.ranks.iter().flatten().next());
        let Some(form) = rank.map(|rank| Arc::clone(&self.workers[rank].page)) else {
            // Nobody is left to say what the bytes are.
            self.stats.checks_undecided += 1;
            pairs.into_iter().for_each(|(kept, computed)| self.end_check(save.0, kept, computed, out));
            return self.tell_saved(save, end, out);
        };
        out.push(Action::Compare(Comparison { save, pairs: pairs.clone(), shards: binding.shards, form }));
        self.checks.running.insert(save, Running { binding, pairs, end });
    }

    /// A comparison has ended.
    pub(super) fn compared(&mut self, save: (SessionId, u64), found: Found, out: &mut Vec<Action>) {
        let running = self.checks.running.remove(&save).expect("a comparison ends once");
        let Running { binding, pairs, mut end } = running;
        (end.checked, end.differing) = (pairs.len() as u32, found.differing);
        (end.difference, end.limit) = (millionths(found.worst.amount), millionths(found.worst.limit()));
        pairs.into_iter().for_each(|(kept, computed)| self.end_check(save.0, kept, computed, out));
        if !self.schedulers.contains_key(&save.0) {
            return;
        }
        self.stats.checks += 1;
        if found.differing == 0 {
            let largest = &mut self.checks.largest[found.worst.number as usize];
            *largest = largest.max(found.worst.part());
        } else {
            self.stats.checks_differing += 1;
            self.differs(save.0, &binding, found.worst, out);
        }
        self.tell_saved(save, end, out);
    }
}

// === impl Core: verdicts ===

impl Core {
    /// What an engine computes is not what is kept.
    fn differs(&mut self, session: SessionId, binding: &Binding, worst: Difference, out: &mut Vec<Action>) {
        let space = binding.space();
        if self.checks.bars(self.schedulers[&session].run, space) {
            return;
        }
        let engine = self.schedulers[&session].engine.clone();
        self.bar(session, binding, Some(worst));
        let removed = self.remove_recent(session, binding.namespace, out);
        let Difference { layer, number, amount } = worst;
        out.push(Action::Warn(format!(
            "namespace {} is closed to engine {engine}: what it computes differs from what is kept by {amount:.2e} in layer \
             {layer} ({}; the limit is {:.0e}). {removed} blocks that it saved are removed. It runs other weights, code or \
             settings than those that saved: find which, start it again, and give it a pillion.model_id of its own if it \
             is right",
            binding.digest,
            number.name(),
            worst.limit()
        )));
        self.retire(binding, out);
    }

    /// Closes a namespace to an engine for the rest of its run.
    fn bar(&mut self, session: SessionId, binding: &Binding, worst: Option<Difference>) {
        let space = binding.space();
        for save in self.saves.range_mut(operations(session)).map(|(_, save)| save) {
            save.void_in(binding.namespace);
        }
        let scheduler = self.schedulers.get_mut(&session).expect("the caller looked");
        self.checks.add(Bar { run: scheduler.run, space, namespace: binding.namespace, worst });
        if let Some(bound) = scheduler.binding.take_if(|bound| bound.space() == space) {
            scheduler.barred = Some(bound);
            self.end_leases(session);
        }
    }

    /// Removes what an engine committed last under a namespace's id; how many blocks that were.
    fn remove_recent(&mut self, session: SessionId, namespace: u32, out: &mut Vec<Action>) -> usize {
        let Some(record) = self.checks.records.get_mut(&session) else { return 0 };
        let recent = std::mem::take(&mut record.recent).into_iter();
        let keys: BTreeSet<BlockKey> = recent.filter(|key| key.namespace == namespace).collect();
        self.remove(&keys, out);
        keys.len()
    }

    /// Removes blocks from DRAM and from what is known of disks, those on their way too.
    fn remove(&mut self, keys: &BTreeSet<BlockKey>, out: &mut Vec<Action>) {
        for key in keys {
            self.dram.remove(key);
            self.ssd.iter_mut().for_each(|ssd| ssd.forget(key));
        }
        self.arrivals.distrust(|key| keys.contains(key));
        self.end_removal(out);
    }

    fn end_removal(&mut self, out: &mut Vec<Action>) {
        self.dram.end_removal();
        self.apply_evictions(out);
    }

    /// Begins a namespace anew if most of its engines differ from what is kept.
    fn retire(&mut self, binding: &Binding, out: &mut Vec<Action>) {
        let space = binding.space();
        if self.namespaces.known(space) != Some(binding.namespace) {
            // It was forgotten, or has begun anew, since this engine was served in it.
            return;
        }
        let serves = |bound: &Option<Binding>| bound.is_some_and(|bound| bound.space() == space);
        let served = self.schedulers.iter().filter(|(_, scheduler)| serves(&scheduler.binding));
        let served: Vec<SessionId> = served.map(|(session, _)| *session).collect();
        let connected = |bar: &&Bar| self.schedulers.values().any(|scheduler| scheduler.run == bar.run);
        let bars = self.checks.bars.iter().filter(|bar| bar.namespace == binding.namespace);
        let barred = bars.filter(connected).count();
        if barred < 2 || barred <= served.len() {
            return;
        }
        for session in &served {
            self.bar(*session, binding, None);
        }
        // Of engines that have another namespace by now, too.
        self.saves.values_mut().for_each(|save| save.void_in(binding.namespace));
        self.namespaces.forget(space);
        self.arrivals.distrust(|key| key.namespace == binding.namespace);
        self.dram.remove_namespace(binding.namespace);
        self.end_removal(out);
        out.push(Action::Warn(format!(
            "namespace {} begins anew: {barred} engines compute other KV than it kept, and {} did not. Nobody is believed: it \
             is closed to all of them until they start again. They run different weights, code or settings under equal facts: \
             give each kind a pillion.model_id of its own",
            binding.digest,
            served.len()
        )));
    }

    /// Engines that are connected and that a namespace is closed to.
    pub fn barred(&self) -> Vec<Barred> {
        let of_scheduler = |scheduler: &Scheduler| {
            let barred = scheduler.barred?;
            let bar = self.checks.bar(scheduler.run, barred.space())?;
            Some(Barred { base: barred.base, engine: scheduler.engine.clone(), worst: bar.worst })
        };
        self.schedulers.values().filter_map(of_scheduler).collect()
    }

    /// The largest differences that were within their limits, as parts of those, each by the kind of numbers that it is of.
    pub fn largest_differences(&self) -> impl Iterator<Item = (Number, f64)> + '_ {
        Number::ALL.into_iter().zip(self.checks.largest)
    }
}
