//! The ends of saves: whole blocks are committed once no CANCEL for them can be unread and their step was
//! accepted, the other slots are given back, and the engine gets the result.

use std::collections::BTreeSet;
use std::ops::ControlFlow::{Break, Continue};
use std::time::Duration;

use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::message::Saved;
use shm_protocol::pool::SlotRef;
use tiers::dram::Dram;

use super::phases::{SaveEvent, SavePhase, Search};
use super::{Save, SaveAim, SaveBlock};
use crate::core::tier::Notice;
use crate::core::timing::{Timed, TimedPart};
use crate::core::transfers::checks::{Pair, SaveChain};
use crate::core::transfers::pending::Acceptance;
use crate::core::transfers::scans::count_broken;
use crate::core::transfers::{Action, Base, Context, CopyOwner, OpKey, SessionId, Transfers, operations};

/// The longest time a whole save holds its slots for its engine's ACCEPT. Engines post it milliseconds after
/// a step.
const UNACCEPTED_MAX: Duration = Duration::from_secs(30);

// === impl Save ===

impl Save {
    /// Commits a block behind its parent: the tier never drops a parent before its child. The parent of a
    /// parentless block may be saved never, and that of a block on the engine's device later. Returns false if the block cannot be kept.
    fn commit(&self, block: &SaveBlock, dram: &mut Dram) -> bool {
        let parent = self.parent(block).map(|hash| self.binding.block_key(&hash));
        match (parent, self.others.leaving) {
            // A replaced block may be the parent, and goes before this one.
            (_, None) if self.others.replaced.is_some() => dram.commit(block.slot),
            (parent, Some((chain, first))) => {
                dram.commit_left(block.slot, parent.as_ref(), (chain, first + block.index as usize))
            }
            (Some(parent), None) if self.others.has_parents => dram.commit_before(block.slot, &parent),
            (Some(parent), None) if self.binding.parentless => dram.commit_apart(block.slot, &parent),
            (Some(parent), None) => dram.commit_behind(block.slot, &parent),
            (None, None) => dram.commit(block.slot),
        }
    }

    /// Returns the preceding key in the chain.
    fn parent(&self, block: &SaveBlock) -> Option<BlockHash> {
        match block.index.checked_sub(1) {
            Some(before) => Some(self.keys[before as usize]),
            None => self.before.last().copied(),
        }
    }

    /// Returns the slots to be searched for non-finite numbers, once blocks are copied. Blocks for another
    /// engine are searched when they are committed: the engine awaits them.
    fn to_be_searched(&self) -> Option<Vec<SlotRef>> {
        let is_copied = matches!(self.phase, SavePhase::Copied { .. });
        let is_meant =
            |block: &&SaveBlock| !block.cancelled && block.kept.is_none() && Some(&block.hash) != self.tail();
        let slots = self.blocks.iter().filter(is_meant).map(|block| block.slot);
        (is_copied && self.search == Search::NotBegun && self.handover.is_none()).then(|| slots.collect())
    }

    /// Counts the save's end.
    fn count_end(&self, cx: &mut Context) {
        let (cancelled, dropped) = (u64::from(self.end.cancelled), u64::from(self.end.dropped));
        cx.stats.saved_blocks += u64::from(self.end.committed);
        cx.stats.saved_bytes += u64::from(self.end.committed) * self.binding.block_bytes();
        cx.stats.saves_lost_to_reuse += cancelled;
        cx.stats.saves_dropped += dropped;
        cx.stats.saves_unaccepted += u64::from(self.end.unaccepted);
        if self.handover.is_some() {
            cx.produced.over = true;
            cx.stats.handover_lost_to_reuse += cancelled;
            cx.stats.handover_dropped += dropped;
        }
        if self.handover.is_some() && cancelled + dropped > 0 {
            cx.lost.note_lost(self.binding.namespace, &self.keys, cx.now_ms, &cx.dram);
        }
    }
}

// === impl Transfers ===

impl Transfers {
    /// Takes a save into its next phase, or to its end. No other code ends a save. Without effect if there is
    /// no such save.
    pub(in crate::core::transfers) fn change_save(&mut self, key: OpKey, event: SaveEvent, base: &mut Base) {
        let Some(save) = self.saves.remove(&key) else { return };
        let wanted = save.phase.wanted_blocks().len();
        match save.after(event) {
            Continue(mut save) => {
                self.unwant(key.0, wanted - save.phase.wanted_blocks().len());
                if let Some(slots) = save.to_be_searched() {
                    let is_begun = self.scan(key, save.binding, slots, Vec::new(), base);
                    save.search = if is_begun { Search::Running } else { Search::Ended };
                }
                // A save of a gone engine has no such record.
                if let Some(pending) = self.pending.get_mut(&key.0) {
                    if !matches!(save.phase, SavePhase::Wanted { .. }) {
                        pending.waiting.remove(&key.1);
                    }
                    if save.awaits_drain() {
                        pending.await_drain(key.1);
                    }
                }
                self.saves.insert(key, save);
            }
            Break(save) => {
                self.unwant(key.0, wanted);
                self.finish_save(key, save, base);
            }
        }
    }

    pub(in crate::core::transfers) fn save_copied(&mut self, owner: CopyOwner, ok: bool, base: &mut Base) {
        self.change_save(owner.key, SaveEvent::CopyEnded(ok), base);
    }

    /// Stops the saves of an engine with a lost rank, if their copies have not begun: their blocks are gone
    /// with its memory, and must not be copied from its successor.
    pub(crate) fn fail_saves(&mut self, session: SessionId, base: &mut Base) {
        self.drop_unbound(session, &mut base.cx);
        for op in self.pending[&session].waiting.clone() {
            self.change_save((session, op), SaveEvent::RankLost, base);
        }
        self.dispatch(session, base);
    }

    /// Handles a ring read to its tail after these saves' copies ended: no CANCEL for them is unread.
    pub(crate) fn commit_copied(&mut self, session: SessionId, void_below: u64, base: &mut Base) {
        let Some(pending) = self.pending.get_mut(&session) else { return };
        for op in pending.drained() {
            self.change_save((session, op), SaveEvent::Drained(base.cx.now, void_below), base);
        }
    }

    /// Ends whole saves without their ACCEPT for too long.
    pub(crate) fn drop_unaccepted(&mut self, base: &mut Base) {
        let is_overdue = |key: &OpKey| match self.saves.get(key).map(|save| &save.phase) {
            Some(SavePhase::Whole { since, .. }) => base.cx.now >= *since + UNACCEPTED_MAX,
            _ => false,
        };
        let unaccepted = self.pending.iter().flat_map(|(session, pending)| pending.unaccepted(*session));
        let overdue: BTreeSet<OpKey> = unaccepted.filter(is_overdue).collect();
        overdue.into_iter().for_each(|key| self.change_save(key, SaveEvent::Overdue, base));
    }

    /// Ends a save: commits the whole blocks, gives the other slots back, and reports to the engine if it is
    /// still there.
    fn finish_save(&mut self, key: OpKey, mut save: Save, base: &mut Base) {
        let (session, op) = key;
        let (mut committed, mut parents, mut pairs) = (Vec::new(), Vec::new(), Vec::new());
        save.drop_blocks(save.phase.wanted_blocks().len() as u32);
        let (fenced, whole_since) = match save.phase {
            SavePhase::Whole { fenced, since } => (Some(fenced), Some(since)),
            _ => (None, None),
        };
        let blocks = std::mem::take(&mut save.blocks);
        if !blocks.is_empty() {
            base.cx.took(Timed::Save(TimedPart::Whole), save.posted);
        }
        for block in &blocks {
            let whole = !block.cancelled && !block.broken && save.acceptance == Acceptance::Given;
            match block.kept {
                Some(kept) if whole => {
                    save.end.present += 1;
                    pairs.push(Pair { place: block.index, kept, computed: block.slot });
                    continue;
                }
                Some(kept) => self.checks.end_check(session, kept, block.slot, &mut base.cx),
                None if whole && save.commit(block, &mut base.cx.dram) => {
                    save.end.committed += 1;
                    base.cx.actions.push(Action::CommitSlot { slot: block.slot, checksum: 0 });
                    committed.push((block.slot, save.binding.block_key(&block.hash)));
                    parents.push(save.parent(block));
                    base.cx.end_saved(save.binding.block_key(&block.hash), true);
                    if save.handover.is_some() {
                        base.cx.keep(&save.binding.block_key(&block.hash), &save.binding, fenced);
                    }
                    continue;
                }
                None => {
                    base.cx.abandon(block.slot);
                    base.cx.end_saved(save.binding.block_key(&block.hash), false);
                }
            }
            match block.cancelled {
                true => save.end.cancelled += 1,
                false => save.drop_blocks(1),
            }
        }
        let broken = blocks.iter().filter(|block| block.broken && !block.cancelled).count();
        count_broken(session, broken as u64, base);
        base.cx.stats.saves_not_finite += broken as u64;
        if !committed.is_empty() {
            self.note_committed(session, &save, &committed, &parents, base);
            if let Some(since) = whole_since.filter(|_| save.handover.is_some()) {
                base.cx.took(Timed::Acceptance, since);
            }
        }
        if save.handover.is_some() {
            let searched = committed.iter().filter(|(_, key)| Some(&key.hash) != save.tail());
            let searched: Vec<_> = searched.copied().collect();
            self.scan(key, save.binding, searched.iter().map(|(slot, _)| *slot).collect(), searched, base);
        }
        // The head comes first: if a tier has no room for all blocks, it is worth more.
        for (slot, key) in committed {
            base.sources.tell_tiers(Notice::Offered(key, Some(slot), &save.binding), &mut base.cx);
        }
        save.count_end(&mut base.cx);
        if let Some(pending) = self.pending.get_mut(&session) {
            pending.forget_save(op, save.step);
        }
        if pairs.is_empty() {
            base.cx.stats.checks_undecided += u64::from(save.aim != SaveAim::Keep);
            self.tell_saved(session, save.end, &mut base.cx);
        } else {
            let chain = SaveChain { before: save.before, keys: save.keys };
            self.compare(key, save.binding, chain, pairs, save.end, base);
        }
    }

    /// Notes newly committed blocks: other engines may find them from now on. A block that they replace goes.
    fn note_committed(
        &mut self,
        session: SessionId,
        save: &Save,
        committed: &[(SlotRef, BlockKey)],
        parents: &[Option<BlockHash>],
        base: &mut Base,
    ) {
        if base.engines.has_scheduler(session) {
            let blocks = committed.iter().map(|(_, key)| *key).zip(parents.iter().copied());
            self.doubts.committed(base.engines[session].run, save.step, blocks);
        }
        if let Some(replaced) = save.others.replaced.filter(|_| committed.len() == save.keys.len()) {
            base.cx.drop_replaced(&save.binding.block_key(&replaced), &save.binding);
        }
        base.cx.namespaces.note_kept(save.binding.space());
        base.cx.produced.kept.insert((save.binding.namespace, session));
    }

    /// Reports a save's end to the engine, if it is still there.
    pub(in crate::core::transfers) fn tell_saved(
        &mut self,
        session: SessionId,
        saved: Saved,
        cx: &mut Context,
    ) {
        if let Some(pending) = self.pending.get_mut(&session) {
            pending.saves -= 1;
            cx.actions.push(Action::Saved { session, saved });
        }
    }

    /// Ends the saves of a gone engine, as soon as no copy runs.
    pub(in crate::core::transfers) fn abandon_saves(&mut self, session: SessionId, base: &mut Base) {
        self.drop_unbound(session, &mut base.cx);
        let keys: Vec<OpKey> = self.saves.range(operations(session)).map(|(key, _)| *key).collect();
        keys.into_iter().for_each(|key| self.change_save(key, SaveEvent::EngineLost, base));
    }
}
