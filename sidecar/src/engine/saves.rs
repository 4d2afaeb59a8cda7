//! Saves: slots filled from engine memory, committed only when nothing could have overwritten their source.

use shm_protocol::key::{BlockHash, BlockKey};
use shm_protocol::layout::COMPLETION_SLOTS;
use shm_protocol::message::Saved;
use shm_protocol::pool::SlotRef;
use shm_protocol::request::{self, Cancel, Keys};
use tiers::FillError;

use super::members::all_ranks;
use super::namespaces::Binding;
use super::{Action, CopyOwner, Core, Direction, GROUP, Piece, SessionId, Violation, operations};

/// Blocks of a scheduler's saves that wait for its binding, 3 MB: more than the first steps of any engine fill. Saves beyond
/// that are dropped.
const UNBOUND_BLOCKS_MAX: usize = 65_536;

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
    blocks: Vec<SaveBlock>,
    /// Ranks whose copy has not been started.
    unstarted: u64,
    /// Copies running.
    running: u32,
    /// A copy failed, a rank or the engine is gone: nothing of this save is committed.
    void: bool,
    end: Saved,
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
        if self.schedulers[&session].saves >= COMPLETION_SLOTS {
            return Err(format!("more than {COMPLETION_SLOTS} saves at once"));
        }
        let log = self.log(session, log)?;
        let keys = log.keys.get(from as usize..asked.keys.end() as usize);
        let keys = keys.ok_or_else(|| format!("{asked:?} names keys that were not appended"))?.to_vec();
        let parent = from.checked_sub(1).map(|before| log.keys[before as usize]);
        self.stats.saves_posted_blocks += u64::from(count);
        let blocks = keys.into_iter().zip(blocks.iter().copied().map(Some)).collect();
        let save = UnboundSave { step: asked.step, parent, checked: asked.checked, blocks };
        let binding = self.binding(session);
        let scheduler = self.schedulers.get_mut(&session).expect("the caller checked");
        scheduler.saves += 1;
        let barred = scheduler.barred.is_some();
        let waiting = self.unbound.range(operations(session));
        let waiting: usize = waiting.map(|(_, other)| other.blocks.len()).sum();
        match binding {
            _ if self.draining => self.drop_save((session, op), &save, out),
            Some(binding) => self.begin_save((session, op), binding, save, out),
            None if barred || waiting + save.blocks.len() > UNBOUND_BLOCKS_MAX => {
                self.drop_save((session, op), &save, out);
            }
            None => {
                self.unbound.insert((session, op), save);
            }
        }
        Ok(())
    }

    /// Takes the slots of a save whose blocks are known.
    fn begin_save(
        &mut self,
        key: (SessionId, u64),
        binding: Binding,
        asked: UnboundSave,
        out: &mut Vec<Action>,
    ) {
        let (session, op) = key;
        let unstarted = all_ranks(self.schedulers[&session].world_size);
        let end = Saved { op, ..Saved::default() };
        let (step, checked) = (asked.step, asked.checked);
        let (parent, keys) = (asked.parent, asked.blocks.iter().map(|(hash, _)| *hash).collect());
        let blocks = Vec::new();
        let mut save =
            Save { binding, step, checked, parent, keys, blocks, unstarted, running: 0, void: false, end };
        for (index, (hash, block)) in asked.blocks.into_iter().enumerate() {
            match block {
                Some(block) => self.claim(session, &mut save, (index as u32, hash, block), out),
                None => save.end.cancelled += 1,
            }
        }
        if save.end.present > 0 {
            self.dram.use_run(save.binding.namespace, GROUP, &save.keys);
        }
        let nothing_to_copy = save.blocks.is_empty();
        self.saves.insert(key, save);
        if nothing_to_copy {
            self.finish_save(key, 0, out);
        } else {
            self.scheduler_waits(session, op);
            self.dispatch_save(session, op, out);
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
                Some(binding) => self.begin_save(key, binding, save, out),
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
        keys.into_iter().map(|key| (key, self.unbound.remove(&key).expect("listed above"))).collect()
    }

    /// Ends a save of which nothing was begun.
    fn drop_save(&mut self, (session, op): (SessionId, u64), save: &UnboundSave, out: &mut Vec<Action>) {
        let dropped = save.blocks.iter().filter(|(_, block)| block.is_some()).count() as u32;
        let cancelled = save.blocks.len() as u32 - dropped;
        self.stats.saves_dropped += u64::from(dropped);
        self.stats.saves_lost_to_reuse += u64::from(cancelled);
        self.schedulers.get_mut(&session).expect("the caller checked").saves -= 1;
        let saved = Saved { op, cancelled, dropped, ..Saved::default() };
        out.push(Action::Saved { session, saved });
    }

    /// Takes a slot for one block, unless the block is there or there is no room.
    fn claim(
        &mut self,
        session: SessionId,
        save: &mut Save,
        (index, hash, block): (u32, BlockHash, u32),
        out: &mut Vec<Action>,
    ) {
        let key = BlockKey { namespace: save.binding.namespace, group: GROUP, hash };
        let block_bytes = save.binding.block_bytes();
        if save.checked && block != 0 {
            let check = self.begin_check((session, save.end.op), index, &save.binding, &key, out);
            if let Some((kept, slot)) = check {
                save.blocks.push(SaveBlock { index, block, hash, slot, kept: Some(kept), cancelled: false });
                return;
            }
        }
        // Block 0 is vLLM's null block: it never holds a request's KV.
        let claimed = match block {
            0 => Err(FillError::NoSpace),
            _ => self.dram.begin_fill(key, block_bytes, save.binding.quota),
        };
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
            Err(
                FillError::NoSpace | FillError::NotAdmitted | FillError::TooLarge { .. } | FillError::Empty,
            ) => save.end.dropped += 1,
        }
    }

    pub(super) fn apply_evictions(&mut self, out: &mut Vec<Action>) {
        out.extend(self.dram.drain_evicted().map(|slot| Action::FreeSlot { slot }));
        let assigned = self.dram.drain_assigned();
        out.extend(
            assigned.map(|new| Action::AssignSegment { segment: new.segment, block_bytes: new.block_bytes }),
        );
    }

    /// Starts the copies of a save on every rank that has joined and passed the save's step.
    pub(super) fn dispatch_save(&mut self, session: SessionId, op: u64, out: &mut Vec<Action>) {
        let Some(save) = self.saves.get_mut(&(session, op)) else { return };
        let scheduler = &self.schedulers[&session];
        let mut ready = Vec::new();
        for rank in (0..scheduler.world_size).filter(|rank| save.unstarted >> rank & 1 == 1) {
            let Some(worker_id) = scheduler.ranks[rank as usize] else { continue };
            let worker = &self.workers[&worker_id];
            if worker.done < save.step {
                continue;
            }
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
            save.unstarted &= !(1 << rank);
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
        if save.unstarted == 0 {
            scheduler.waiting.remove(&op);
            if save.running == 0 && !scheduler.copied.contains(&op) {
                scheduler.copied.push(op);
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
                self.drop_save(key, &save, out);
            }
            return Ok(());
        }
        let Some(save) = self.saves.get_mut(&key) else { return Ok(()) };
        for block in save.blocks.iter_mut().filter(|block| range.contains(&block.index)) {
            block.cancelled = true;
        }
        if save.running == 0 && save.blocks.iter().all(|block| block.cancelled) {
            self.finish_save(key, 0, out);
        }
        Ok(())
    }

    /// The ring was read to its tail after these saves' copies ended: every CANCEL that matters has been seen.
    pub(super) fn commit_copied(&mut self, session: SessionId, void_below: u64, out: &mut Vec<Action>) {
        let Some(scheduler) = self.schedulers.get_mut(&session) else { return };
        for op in std::mem::take(&mut scheduler.copied) {
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
            scheduler.waiting.remove(&op);
            scheduler.copied.retain(|copied| *copied != op);
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
            scheduler.saves -= 1;
            out.push(Action::Saved { session, saved });
        }
    }

    /// A rank is gone: what it has not copied cannot be completed.
    pub(super) fn fail_saves_of_rank(&mut self, session: SessionId, rank: u32, out: &mut Vec<Action>) {
        let waiting: Vec<u64> = self.schedulers[&session].waiting.iter().copied().collect();
        for op in waiting {
            let Some(save) = self.saves.get_mut(&(session, op)) else { continue };
            if save.unstarted >> rank & 1 == 1 {
                save.void = true;
                save.unstarted = 0;
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
            (save.void, save.unstarted) = (true, 0);
            if save.running == 0 {
                self.finish_save(key, 0, out);
            }
        }
    }

    pub(super) fn scheduler_waits(&mut self, session: SessionId, op: u64) {
        self.schedulers.get_mut(&session).expect("the caller checked").waiting.insert(op);
    }
}
