//! The ends of saves: what is whole is committed once no CANCEL of it can be unread and its step was accepted, the rest goes back, and
//! the engine is told.

use shm_protocol::message::Saved;
use tiers::dram::Dram;

use super::{Save, SaveBlock};
use crate::core::timing::{Part, Timed};
use crate::core::transfers::pending::{Acceptance, Pending};
use crate::core::transfers::{Action, Base, Context, CopyOwner, OpKey, SessionId, Transfers, operations};

// === impl Save ===

impl Save {
    /// Commits a block behind the one before it, from its beginning on: the tier never drops a parent before its child. Of windows
    /// that block may never have been saved.
    fn commit(&self, block: &SaveBlock, dram: &mut Dram) -> bool {
        let parent = block.index.checked_sub(1).map_or(self.parent, |at| Some(self.keys[at as usize]));
        match parent {
            Some(parent) if self.binding.windows => dram.commit_apart(block.slot, &self.binding.key(&parent)),
            Some(parent) => dram.commit_behind(block.slot, &self.binding.key(&parent)),
            None => dram.commit(block.slot),
        }
    }

    /// The save has ended as `end` says.
    fn count(&self, cx: &mut Context) {
        let (cancelled, dropped) = (u64::from(self.end.cancelled), u64::from(self.end.dropped));
        cx.stats.saved_blocks += u64::from(self.end.committed);
        cx.stats.saved_bytes += u64::from(self.end.committed) * self.binding.block_bytes();
        cx.stats.saves_lost_to_reuse += cancelled;
        cx.stats.saves_dropped += dropped;
        cx.stats.saves_unaccepted += u64::from(self.end.unaccepted);
        if self.handover {
            cx.produced.over = true;
            cx.stats.handover_lost_to_reuse += cancelled;
            cx.stats.handover_dropped += dropped;
        }
        if self.handover && cancelled + dropped > 0 {
            cx.lost.note(self.binding.namespace, &self.keys, cx.now_ms, &cx.dram);
        }
    }
}

// === impl Transfers ===

impl Transfers {
    /// Moves a save whose copies are all started, and ended, to those that wait for a drained ring.
    pub(super) fn settle(&mut self, key: OpKey) {
        let (begun, running) = (self.saves[&key].begun, self.saves[&key].running);
        if begun {
            self.pending(key.0).waiting.remove(&key.1);
            if running == 0 {
                self.pending(key.0).await_drain(key.1);
            }
        }
    }

    pub(in crate::core::transfers) fn save_copied(&mut self, owner: CopyOwner, ok: bool, base: &mut Base) {
        let key = owner.key;
        let save = self.saves.get_mut(&key).expect("a save outlives its copies");
        save.running -= 1;
        save.void |= !ok;
        if self.pending.contains_key(&key.0) {
            self.settle(key);
        } else if save.running == 0 {
            self.finish_save(key, 0, base);
        }
    }

    /// A rank is gone, and the blocks of these saves with its memory: what has not begun must not be copied from that of another.
    pub(crate) fn fail_saves(&mut self, session: SessionId, base: &mut Base) {
        self.drop_unbound(session, &mut base.cx);
        for op in self.pending[&session].waiting.clone() {
            let Some(save) = self.saves.get_mut(&(session, op)) else { continue };
            if !save.begun {
                (save.void, save.begun) = (true, true);
                self.settle((session, op));
            }
        }
        self.dispatch(session, base);
    }

    /// The ring was read to its tail after these saves' copies ended: every CANCEL that matters has been seen.
    pub(crate) fn commit_copied(&mut self, session: SessionId, void_below: u64, base: &mut Base) {
        let Some(pending) = self.pending.get_mut(&session) else { return };
        for op in pending.drained() {
            let Some(save) = self.saves.get(&(session, op)) else { continue };
            let is_over = save.acceptance != Acceptance::Awaited || save.void || op < void_below;
            self.pending(session).note_whole(op, base.cx.now);
            if is_over {
                self.finish_save((session, op), void_below, base);
            }
        }
    }

    /// Time passed: what is whole and was not accepted so long is nobody's.
    pub(crate) fn drop_unaccepted(&mut self, base: &mut Base) {
        let overdue = |(session, pending): (&SessionId, &Pending)| {
            pending.overdue(base.cx.now).into_iter().map(|op| (*session, op)).collect::<Vec<_>>()
        };
        let keys: Vec<OpKey> = self.pending.iter().flat_map(overdue).collect();
        for key in keys {
            let save = self.saves.get_mut(&key).expect("a whole save has not ended");
            if save.acceptance == Acceptance::Awaited {
                save.acceptance = Acceptance::Refused;
                self.finish_save(key, 0, base);
            }
        }
    }

    /// Ends a save: commits what is whole, gives the rest back, and tells the engine if it is still there.
    pub(super) fn finish_save(&mut self, key: OpKey, void_below: u64, base: &mut Base) {
        let mut save = self.saves.remove(&key).expect("the caller found it");
        let (session, op) = key;
        let (mut committed, mut pairs) = (Vec::new(), Vec::new());
        let unbegun = save.wanted.len() as u32;
        self.unwant(session, save.wanted.len());
        match op < void_below {
            true => save.end.cancelled += unbegun,
            false => save.drop_blocks(unbegun),
        }
        let blocks = std::mem::take(&mut save.blocks);
        if !blocks.is_empty() {
            base.cx.took(Timed::Save(Part::Whole), save.posted);
        }
        let whole_since = self.pending.get(&session).and_then(|pending| pending.whole_since(op));
        for block in &blocks {
            let reused = block.cancelled || op < void_below;
            let whole = !reused && !save.void && save.acceptance == Acceptance::Given;
            match block.kept {
                Some(kept) if whole => {
                    save.end.present += 1;
                    pairs.push((kept, block.slot));
                    continue;
                }
                Some(kept) => self.checks.end(session, kept, block.slot, &mut base.cx),
                None if whole && save.commit(block, &mut base.cx.dram) => {
                    save.end.committed += 1;
                    base.cx.actions.push(Action::CommitSlot { slot: block.slot, checksum: 0 });
                    committed.push((block.slot, save.binding.key(&block.hash)));
                    base.cx.end_saved(save.binding.key(&block.hash), true);
                    if save.handover {
                        base.cx.keep(&save.binding.key(&block.hash), &save.binding, save.fenced);
                    }
                    continue;
                }
                None => {
                    base.cx.abandon(block.slot);
                    base.cx.end_saved(save.binding.key(&block.hash), false);
                }
            }
            match reused {
                true => save.end.cancelled += 1,
                false => save.drop_blocks(1),
            }
        }
        if !committed.is_empty() {
            self.checks.committed(session, committed.iter().map(|(_, key)| *key));
            base.cx.namespaces.note_kept(save.binding.space());
            base.cx.produced.kept.insert((save.binding.namespace, session));
            if let Some(since) = whole_since.filter(|_| save.handover) {
                base.cx.took(Timed::Acceptance, since);
            }
        }
        // Head first: where a disk has no room for all of them, that part is worth more.
        for (slot, key) in committed {
            let dram = &base.cx.dram;
            base.sources.ssd.iter_mut().for_each(|ssd| ssd.offer_saved(slot, key, &save.binding, dram));
        }
        save.count(&mut base.cx);
        if let Some(pending) = self.pending.get_mut(&session) {
            pending.forget(op, save.step);
        }
        if pairs.is_empty() {
            base.cx.stats.checks_undecided += u64::from(save.checked);
            self.tell_saved(session, save.end, &mut base.cx);
        } else {
            self.compare(key, save.binding, pairs, save.end, base);
        }
    }

    /// Tells the engine of a save's end, if it is still there.
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

    /// The engine is gone: its saves end as soon as no copy runs.
    pub(in crate::core::transfers) fn abandon_saves(&mut self, session: SessionId, base: &mut Base) {
        self.drop_unbound(session, &mut base.cx);
        let keys: Vec<OpKey> = self.saves.range(operations(session)).map(|(key, _)| *key).collect();
        for key in keys {
            let save = self.saves.get_mut(&key).expect("listed above");
            (save.void, save.begun) = (true, true);
            if save.running == 0 {
                self.finish_save(key, 0, base);
            }
        }
    }
}
