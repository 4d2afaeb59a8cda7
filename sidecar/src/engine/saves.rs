//! Saves: slots filled from engine memory, committed only when nothing could have overwritten their source.
//!
//! A save takes its slots when every rank has done its step, and its copies begin: one whose step never comes holds nothing.

use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::message::Saved;
use shm_protocol::pool::SlotRef;
use shm_protocol::request::{self, Cancel, Keys};
use tiers::FillError;

use super::namespaces::Binding;
use super::{Action, CopyOwner, Core, Direction, GROUP, Piece, SessionId, Violation, operations};

/// A SAVE that was read before every rank had joined: rings are read one after the other, and a rank joins in the step whose
/// saves its scheduler has posted.
#[derive(Debug)]
pub(super) struct UnboundSave {
    step: u64,
    /// The key before the first one.
    parent: Option<BlockHash>,
    /// Blocks that are kept already are compared with these.
    checked: bool,
    /// Each key, and its block unless that was given up.
    blocks: Vec<(BlockHash, Option<u32>)>,
}

/// One SAVE message, from its binding to its completion.
#[derive(Debug)]
pub(super) struct Save {
    binding: Binding,
    step: u64,
    checked: bool,
    /// The key before the first one, and all of the save's.
    parent: Option<BlockHash>,
    keys: Vec<BlockHash>,
    /// What has no slot yet: all of it until the save begins, nothing afterwards.
    wanted: Vec<Wanted>,
    blocks: Vec<SaveBlock>,
    /// Its copies have been started, or never will be.
    begun: bool,
    running: u32,
    /// A copy failed, a rank or the engine is gone: nothing of this save is committed.
    void: bool,
    end: Saved,
}

#[derive(Copy, Clone, Debug)]
struct Wanted {
    /// Position within the save, by which CANCEL names it.
    index: u32,
    block: u32,
    hash: BlockHash,
}

#[derive(Debug)]
struct SaveBlock {
    /// Position within the save, by which CANCEL names it.
    index: u32,
    block: u32,
    hash: BlockHash,
    slot: SlotRef,
    /// The kept block that this one is to be compared with: nothing is committed then.
    kept: Option<SlotRef>,
    cancelled: bool,
}

// === impl Save ===

impl Save {
    /// The key before that of a block.
    fn parent(&self, index: u32) -> Option<BlockKey> {
        let hash = index.checked_sub(1).map_or(self.parent, |before| Some(self.keys[before as usize]))?;
        Some(BlockKey { namespace: self.binding.namespace, group: GROUP, hash })
    }

    /// The engine is barred from a namespace: nothing of it is committed or compared there.
    pub(super) fn void_in(&mut self, namespace: u32) {
        self.void |= self.binding.namespace == namespace;
    }
}

// === impl Core ===

impl Core {
    pub(super) fn save(
        &mut self,
        session: SessionId,
        asked: &request::Save,
        blocks: &[u32],
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        let (op, Keys { log, from, count }) = (asked.op, asked.keys);
        self.check_new(session, op)?;
        self.schedulers[&session].pending.check_save()?;
        let log = self.schedulers[&session].logs.get(log)?;
        let keys = log.keys.get(from as usize..asked.keys.end() as usize);
        let keys = keys.ok_or_else(|| format!("{asked:?} names keys that were not appended"))?.to_vec();
        let parent = from.checked_sub(1).map(|before| log.keys[before as usize]);
        self.stats.saves_posted_blocks += u64::from(count);
        let blocks = keys.into_iter().zip(blocks.iter().copied().map(Some)).collect();
        let save = UnboundSave { step: asked.step, parent, checked: asked.checked, blocks };
        let binding = self.binding(session);
        let scheduler = self.schedulers.get_mut(&session).expect("the caller checked");
        scheduler.pending.begin_save();
        let barred = scheduler.barred.is_some();
        let too_many = !scheduler.pending.may_want(save.blocks.len());
        match binding {
            _ if self.draining || too_many => self.drop_save((session, op), &save, out),
            Some(binding) => self.accept_save((session, op), binding, save, out),
            None if barred => self.drop_save((session, op), &save, out),
            None => {
                scheduler.pending.want(save.blocks.len());
                self.unbound.insert((session, op), save);
            }
        }
        Ok(())
    }

    /// Takes a save whose blocks are known, to be begun with its step. What is kept already needs no copy.
    fn accept_save(
        &mut self,
        key: (SessionId, u64),
        binding: Binding,
        asked: UnboundSave,
        out: &mut Vec<Action>,
    ) {
        let (session, op) = key;
        let UnboundSave { step, parent, checked, blocks: asked } = asked;
        let keys: Vec<BlockHash> = asked.iter().map(|(hash, _)| *hash).collect();
        let mut end = Saved { op, ..Saved::default() };
        let mut wanted = Vec::new();
        for (index, (hash, block)) in asked.into_iter().enumerate() {
            match block {
                // vLLM's null block: it never holds a request's KV.
                Some(0) => end.dropped += 1,
                Some(_) if !checked && self.is_kept(&binding, hash) => end.present += 1,
                Some(block) => wanted.push(Wanted { index: index as u32, block, hash }),
                None => end.cancelled += 1,
            }
        }
        if end.present > 0 {
            self.dram.use_run(binding.namespace, GROUP, &keys);
        }
        let (blocks, begun) = (Vec::new(), wanted.is_empty());
        let save = Save {
            binding,
            step,
            checked,
            parent,
            keys,
            wanted,
            blocks,
            begun,
            running: 0,
            void: false,
            end,
        };
        self.scheduler(session).pending.want(save.wanted.len());
        self.saves.insert(key, save);
        if begun {
            self.finish_save(key, 0, out);
        } else {
            self.scheduler_waits(session, op);
            self.dispatch_save(session, op, self.claims_max, out);
        }
    }

    /// Begins what has waited for the binding, if there is one now.
    pub(super) fn begin_unbound_saves(&mut self, session: SessionId, out: &mut Vec<Action>) {
        let binding = self.binding(session);
        if binding.is_none() && self.schedulers[&session].barred.is_none() {
            return;
        }
        for (key, save) in self.take_unbound_saves(session) {
            match binding.filter(|_| !self.draining) {
                Some(binding) => self.accept_save(key, binding, save, out),
                None => self.drop_save(key, &save, out),
            }
        }
    }

    /// Ends what waits for the binding: its generation of the namespace, or its engine, is over.
    pub(super) fn drop_unbound_saves(&mut self, session: SessionId, out: &mut Vec<Action>) {
        for (key, save) in self.take_unbound_saves(session) {
            self.drop_save(key, &save, out);
        }
    }

    fn take_unbound_saves(&mut self, session: SessionId) -> Vec<((SessionId, u64), UnboundSave)> {
        let keys: Vec<_> = self.unbound.range(operations(session)).map(|(key, _)| *key).collect();
        let saves = keys.into_iter().map(|key| (key, self.unbound.remove(&key).expect("listed above")));
        let saves: Vec<_> = saves.collect();
        self.unwant(session, saves.iter().map(|(_, save)| save.blocks.len()).sum());
        saves
    }

    /// Ends a save of which nothing was begun.
    fn drop_save(&mut self, (session, op): (SessionId, u64), save: &UnboundSave, out: &mut Vec<Action>) {
        let dropped = save.blocks.iter().filter(|(_, block)| block.is_some()).count() as u32;
        let cancelled = save.blocks.len() as u32 - dropped;
        self.stats.saves_dropped += u64::from(dropped);
        self.stats.saves_lost_to_reuse += u64::from(cancelled);
        self.scheduler(session).pending.end_save();
        let saved = Saved { op, cancelled, dropped, ..Saved::default() };
        out.push(Action::Saved { session, saved });
    }

    /// Whether a block needs no copy; one that a disk may lack is offered to it again.
    fn is_kept(&mut self, binding: &Binding, hash: BlockHash) -> bool {
        let key = BlockKey { namespace: binding.namespace, group: GROUP, hash };
        let kept = self.dram.probe(key.namespace, key.group, &[hash]) == 1;
        if kept {
            self.offer_again(key, binding.digest, binding.block_bytes());
        }
        kept
    }

    /// Takes a slot for one block, unless the block is there or there is no room.
    fn claim(&mut self, session: SessionId, save: &mut Save, wanted: Wanted, out: &mut Vec<Action>) {
        let Wanted { index, block, hash } = wanted;
        let key = BlockKey { namespace: save.binding.namespace, group: GROUP, hash };
        let block_bytes = save.binding.block_bytes();
        if save.checked {
            let check = self.begin_check((session, save.end.op), index, &save.binding, &key, out);
            if let Some((kept, slot)) = check {
                save.blocks.push(SaveBlock { index, block, hash, slot, kept: Some(kept), cancelled: false });
                return;
            }
        }
        let claimed = self.dram.begin_fill(key, block_bytes, save.binding.whose);
        self.apply_evictions(out);
        match claimed {
            Ok(slot) => {
                out.push(Action::FillSlot { slot, namespace: save.binding.digest, key });
                save.blocks.push(SaveBlock { index, block, hash, slot, kept: None, cancelled: false });
            }
            Err(error @ (FillError::Present | FillError::Filling)) => {
                save.end.present += 1;
                if error == FillError::Present {
                    self.offer_again(key, save.binding.digest, block_bytes);
                }
            }
            Err(FillError::NoSpace | FillError::TooLarge { .. } | FillError::Empty) => save.end.dropped += 1,
        }
    }

    /// Takes the slots of a save and starts its copies, once every rank has joined and passed the save's step. How many blocks it
    /// took slots for, at most so many.
    pub(super) fn dispatch_save(
        &mut self,
        session: SessionId,
        op: u64,
        claims_max: usize,
        out: &mut Vec<Action>,
    ) -> usize {
        let Some(save) = self.saves.get(&(session, op)).filter(|save| !save.begun) else { return 0 };
        let done = |worker: &Option<SessionId>| worker.is_some_and(|id| self.workers[&id].done >= save.step);
        if !self.schedulers[&session].ranks.iter().all(done) {
            return 0;
        }
        let mut save = self.saves.remove(&(session, op)).expect("found above");
        let claims = save.wanted.len().min(claims_max);
        self.unwant(session, claims);
        for wanted in save.wanted.drain(..claims).collect::<Vec<_>>() {
            self.claim(session, &mut save, wanted, out);
        }
        save.begun = save.wanted.is_empty();
        let (begun, nothing_to_copy) = (save.begun, save.blocks.is_empty());
        self.saves.insert((session, op), save);
        if !begun {
            self.fall_behind(session);
        } else if nothing_to_copy {
            self.finish_save((session, op), 0, out);
        } else {
            self.start_save(session, op, out);
        }
        claims
    }

    fn start_save(&mut self, session: SessionId, op: u64, out: &mut Vec<Action>) {
        let save = self.saves.get_mut(&(session, op)).expect("the caller found it");
        let scheduler = &self.schedulers[&session];
        let mut ready = Vec::new();
        for (rank, worker_id) in (0..).zip(scheduler.ranks.iter().flatten().copied()) {
            let worker = &self.workers[&worker_id];
            let offset = u64::from(worker.shard) * save.binding.shard_bytes;
            let replicas = scheduler.world_size / worker.shards;
            let chosen = |block: &&SaveBlock| {
                let holder = u32::from(block.hash.0[0]) % replicas;
                !block.cancelled && block.block < worker.blocks && rank % replicas == holder
            };
            let blocks = save.blocks.iter().filter(chosen);
            let pieces = blocks.map(|b| Piece { block: b.block, offset: b.slot.offset + offset }).collect();
            save.void |= save.blocks.iter().any(|block| block.block >= worker.blocks);
            ready.push((rank, worker_id, pieces));
        }
        for (rank, worker_id, pieces) in ready {
            let save = self.saves.get_mut(&(session, op)).expect("found above");
            let pieces: Vec<Piece> = pieces;
            if !pieces.is_empty() {
                save.running += 1;
                let owner = CopyOwner { scheduler: session, op, rank, direction: Direction::Save };
                self.start_copy(owner, worker_id, pieces, out);
            }
        }
        self.settle(session, op);
    }

    /// Moves a save whose copies are all started, and ended, to those that wait for a drained ring.
    fn settle(&mut self, session: SessionId, op: u64) {
        let save = &self.saves[&(session, op)];
        let scheduler = self.schedulers.get_mut(&session).expect("its saves end with it");
        if save.begun {
            scheduler.pending.start(op);
            if save.running == 0 {
                scheduler.pending.await_drain(op);
            }
        }
    }

    pub(super) fn save_copied(&mut self, owner: CopyOwner, ok: bool, out: &mut Vec<Action>) {
        let key = (owner.scheduler, owner.op);
        let save = self.saves.get_mut(&key).expect("a save outlives its copies");
        save.running -= 1;
        save.void |= !ok;
        if self.schedulers.contains_key(&owner.scheduler) {
            self.settle(owner.scheduler, owner.op);
        } else if save.running == 0 {
            self.finish_save(key, 0, out);
        }
    }

    /// CANCEL: the engine is about to overwrite the sources of some blocks of a save.
    pub(super) fn cancel(
        &mut self,
        session: SessionId,
        cancel: Cancel,
        out: &mut Vec<Action>,
    ) -> Result<(), Violation> {
        // A save that has ended was committed before this CANCEL was posted: its bytes were whole.
        let key = (session, cancel.op);
        let range = cancel.from..cancel.from + cancel.count;
        if let Some(save) = self.unbound.get_mut(&key) {
            let blocks = save.blocks.iter_mut().zip(0..);
            blocks.filter(|(_, index)| range.contains(index)).for_each(|((_, block), _)| *block = None);
            if save.blocks.iter().all(|(_, block)| block.is_none()) {
                let save = self.unbound.remove(&key).expect("found above");
                self.unwant(session, save.blocks.len());
                self.drop_save(key, &save, out);
            }
            return Ok(());
        }
        let Some(save) = self.saves.get_mut(&key) else { return Ok(()) };
        let before = save.wanted.len();
        save.wanted.retain(|wanted| !range.contains(&wanted.index));
        let cancelled = before - save.wanted.len();
        save.end.cancelled += cancelled as u32;
        for block in save.blocks.iter_mut().filter(|block| range.contains(&block.index)) {
            block.cancelled = true;
        }
        let is_over =
            save.running == 0 && save.wanted.is_empty() && save.blocks.iter().all(|block| block.cancelled);
        self.unwant(session, cancelled);
        if is_over {
            self.finish_save(key, 0, out);
        }
        Ok(())
    }

    /// The ring was read to its tail after these saves' copies ended: every CANCEL that matters has been seen.
    pub(super) fn commit_copied(&mut self, session: SessionId, void_below: u64, out: &mut Vec<Action>) {
        let Some(scheduler) = self.schedulers.get_mut(&session) else { return };
        for op in scheduler.pending.drained() {
            if self.saves.contains_key(&(session, op)) {
                self.finish_save((session, op), void_below, out);
            }
        }
    }

    /// Ends a save: commits what is whole, gives the rest back, and tells the engine if it is still there.
    fn finish_save(&mut self, key: (SessionId, u64), void_below: u64, out: &mut Vec<Action>) {
        let mut save = self.saves.remove(&key).expect("the caller found it");
        let (session, op) = key;
        let block_bytes = save.binding.block_bytes();
        let (namespace, digest) = (save.binding.namespace, save.binding.digest);
        let (mut committed, mut pairs) = (Vec::new(), Vec::new());
        let unbegun = save.wanted.len() as u32;
        self.unwant(session, save.wanted.len());
        match op < void_below {
            true => save.end.cancelled += unbegun,
            false => save.end.dropped += unbegun,
        }
        let blocks = std::mem::take(&mut save.blocks);
        for block in &blocks {
            let reused = block.cancelled || op < void_below;
            let whole = !reused && !save.void;
            if let Some(kept) = block.kept {
                if whole {
                    save.end.present += 1;
                    pairs.push((kept, block.slot));
                } else {
                    save.end.cancelled += u32::from(reused);
                    save.end.dropped += u32::from(!reused);
                    self.end_check(session, kept, block.slot, out);
                }
                continue;
            }
            if whole && self.commit_saved(&save, block) {
                save.end.committed += 1;
                out.push(Action::CommitSlot { slot: block.slot, checksum: 0 });
                committed.push((block.slot, BlockKey { namespace, group: GROUP, hash: block.hash }));
                continue;
            }
            if reused {
                save.end.cancelled += 1
            } else {
                save.end.dropped += 1
            }
            self.dram.abandon(block.slot);
            out.push(Action::FreeSlot { slot: block.slot });
        }
        if !committed.is_empty() {
            self.checks.committed(session, committed.iter().map(|(_, key)| *key));
        }
        // Head first: where a disk has no room for all of them, that part is worth more.
        for (slot, key) in committed {
            self.offer_saved(slot, key, digest, block_bytes);
        }
        self.stats.saved_blocks += u64::from(save.end.committed);
        self.stats.saved_bytes += u64::from(save.end.committed) * block_bytes;
        self.stats.saves_lost_to_reuse += u64::from(save.end.cancelled);
        self.stats.saves_dropped += u64::from(save.end.dropped);
        if let Some(scheduler) = self.schedulers.get_mut(&session) {
            scheduler.pending.forget(op);
        }
        if pairs.is_empty() {
            self.stats.checks_undecided += u64::from(save.checked);
            self.tell_saved(key, save.end, out);
        } else {
            self.compare(key, save.binding, pairs, save.end, out);
        }
    }

    /// From its beginning on a chain is committed block behind block: the tier never drops a parent before its child.
    fn commit_saved(&mut self, save: &Save, block: &SaveBlock) -> bool {
        match save.parent(block.index) {
            Some(parent) => self.dram.commit_behind(block.slot, &parent),
            None => self.dram.commit(block.slot),
        }
    }

    /// Tells the engine of a save's end, if it is still there.
    pub(super) fn tell_saved(&mut self, (session, _): (SessionId, u64), saved: Saved, out: &mut Vec<Action>) {
        if let Some(scheduler) = self.schedulers.get_mut(&session) {
            scheduler.pending.end_save();
            out.push(Action::Saved { session, saved });
        }
    }

    /// A rank is gone: what has not begun cannot be completed.
    pub(super) fn fail_saves(&mut self, session: SessionId, out: &mut Vec<Action>) {
        for op in self.schedulers[&session].pending.waiting() {
            let Some(save) = self.saves.get_mut(&(session, op)) else { continue };
            if !save.begun {
                (save.void, save.begun) = (true, true);
                self.settle(session, op);
            }
        }
        self.dispatch(session, out);
    }

    /// The engine is gone: its saves end as soon as no copy runs.
    pub(super) fn abandon_saves(&mut self, session: SessionId, out: &mut Vec<Action>) {
        self.drop_unbound_saves(session, out);
        let keys: Vec<(SessionId, u64)> =
            self.saves.range(operations(session)).map(|(key, _)| *key).collect();
        for key in keys {
            let save = self.saves.get_mut(&key).expect("listed above");
            (save.void, save.begun) = (true, true);
            if save.running == 0 {
                self.finish_save(key, 0, out);
            }
        }
    }

    pub(super) fn scheduler_waits(&mut self, session: SessionId, op: u64) {
        self.scheduler(session).pending.wait(op);
    }
}
