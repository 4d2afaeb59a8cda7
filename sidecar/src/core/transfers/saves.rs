//! Saves: slots filled from engine memory. A block is committed only if nothing could have overwritten its
//! source, and if the engine accepted the step of it: a passed fence does not say the step was done.
//!
//! A save takes its slots and begins its copies when every rank has done its step, so a save without its step
//! holds nothing. A save for another engine takes its slots while its step runs: the other engine then knows
//! early, and loads the blocks before them. Its copies, too, begin when the step is done.

mod ends;
mod phases;

use std::time::Duration;

use shm_protocol::key::BlockHash;
use shm_protocol::message::Saved;
use shm_protocol::pool::SlotRef;
use shm_protocol::request::{self, Cancel};
use tiers::FillError;
use tiers::dram::EndedChain;

pub(super) use self::phases::SaveEvent;
use self::phases::{SavePhase, Search};
use super::checks::is_chosen;
use super::pending::Acceptance;
use super::{
    Base, Binding, Context, CopyDirection, CopyOwner, OpKey, Queries, RankBlock, SessionId, Transfers,
    Violation, operations,
};
use crate::core::engines::Proof;
use crate::core::tier::Notice;
use crate::core::timing::{Timed, TimedPart};

/// Slots are taken during a step if the last step for another engine took no longer: an engine waits for them
/// 2 s at most.
const STEP_MAX: Duration = Duration::from_millis(500);

/// A SAVE read before every rank had joined: rings are read one after the other, and a rank joins in the very
/// step of its scheduler's first saves.
#[derive(Debug)]
pub(super) struct UnboundSave {
    posted: Duration,
    step: u64,
    acceptance: Acceptance,
    /// Keys before the first one: all, if blocks are compared, otherwise the last one.
    before: Vec<BlockHash>,
    /// True if kept blocks are compared with its blocks.
    checked: bool,
    /// `Some` if another engine will load the blocks: the number of blocks kept for such engines when the
    /// request came.
    handover: Option<u64>,
    /// Each key with its block; `None` if the block was cancelled.
    blocks: Vec<(BlockHash, Option<u32>)>,
    /// True if the last block is a prompt's tail: any bytes may lie behind its tokens.
    tail: bool,
    others: OtherBlocks,
}

/// The relations of a save's blocks to those elsewhere, and to an earlier one of the request.
#[derive(Copy, Clone, Debug)]
struct OtherBlocks {
    /// `Some` if they are about to leave the device: their ended request, and the place of the first one in it.
    leaving: Option<(EndedChain, usize)>,
    /// True if the block before one of them may be there alone.
    has_parents: bool,
    /// The key of a block of no use to the request once this save is kept.
    replaced: Option<BlockHash>,
    /// The number of the first blocks that came in a stream: the pool has no room for all of them.
    streamed: u32,
}

/// One SAVE message, from its binding to its completion.
#[derive(Debug)]
pub(super) struct Save {
    binding: Binding,
    posted: Duration,
    step: u64,
    acceptance: Acceptance,
    aim: SaveAim,
    /// `Some` if another engine will load the blocks; see [`UnboundSave`].
    pub(super) handover: Option<u64>,
    /// The keys before the save, see [`UnboundSave`]; and all keys of the save.
    before: Vec<BlockHash>,
    keys: Vec<BlockHash>,
    /// True if the last key is of a prompt's tail.
    tail: bool,
    others: OtherBlocks,
    /// Blocks with a slot.
    blocks: Vec<SaveBlock>,
    phase: SavePhase,
    search: Search,
    end: Saved,
}

/// The use of the blocks of a save.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum SaveAim {
    Keep,
    /// Kept blocks are compared, the others are kept.
    CheckOrKeep,
    /// Kept blocks are compared, and the others dropped: the engine may not save them.
    Check,
}

#[derive(Copy, Clone, Debug)]
struct WantedSave {
    /// Position within the save, as in a CANCEL.
    index: u32,
    block: u32,
    hash: BlockHash,
}

#[derive(Debug)]
struct SaveBlock {
    /// Position within the save, as in a CANCEL.
    index: u32,
    block: u32,
    hash: BlockHash,
    slot: SlotRef,
    /// The kept block to be compared with this one: then nothing is committed.
    kept: Option<SlotRef>,
    cancelled: bool,
    /// True if one of its numbers is not finite.
    broken: bool,
}

// === impl UnboundSave ===

impl UnboundSave {
    /// Returns the keys of its blocks.
    pub(super) fn keys(&self) -> impl Iterator<Item = BlockHash> + '_ {
        self.blocks.iter().filter(|(_, block)| block.is_some()).map(|(hash, _)| *hash)
    }
}

// === impl Save ===

impl Save {
    /// Returns the keys of its blocks.
    pub(super) fn keys(&self) -> &[BlockHash] {
        &self.keys
    }

    /// Returns the key of the prompt's tail, if the save has one.
    fn tail(&self) -> Option<&BlockHash> {
        self.keys.last().filter(|_| self.tail)
    }

    /// Counts blocks not kept, although the engine did not reuse them.
    fn drop_blocks(&mut self, count: u32) {
        self.end.dropped += count;
        if self.acceptance == Acceptance::Refused {
            self.end.unaccepted += count;
        }
    }
}

// === impl Transfers ===

impl Transfers {
    pub(crate) fn begin_save(
        &mut self,
        session: SessionId,
        asked: &request::Save,
        blocks: &[u32],
        queries: &Queries,
        base: &mut Base,
    ) -> Result<(), Violation> {
        let key = (session, asked.op);
        self.check_new(key)?;
        self.pending[&session].check_save()?;
        let (before, keys) = queries.keys_of(session, asked)?;
        base.cx.stats.saves_posted_blocks += u64::from(asked.keys.count);
        let blocks = keys.into_iter().zip(blocks.iter().copied().map(Some)).collect();
        let posted = base.cx.now;
        let (step, checked) = (asked.step, asked.checked);
        let handover = asked.handover.then(|| queries.kept_before(session, asked.keys.log));
        let pending = self.pending(session);
        pending.saves += 1;
        let acceptance = match base.engines[session].accepts {
            true => pending.await_acceptance(asked.op, step),
            false => Acceptance::Refused,
        };
        let tail = queries.ends_with_tail(session, asked);
        let (ended, has_parents) = queries.on_device(session, asked.keys.log);
        let leaving = ended.map(|chain| (chain, asked.keys.from as usize));
        if leaving.is_some() {
            base.cx.stats.saves_leaving_blocks += u64::from(asked.keys.count);
        }
        let (replaced, streamed) =
            (queries.replaced_key(session, asked), queries.streamed_count(session, asked));
        let others = OtherBlocks { leaving, has_parents, replaced, streamed };
        let save = UnboundSave { posted, step, acceptance, before, checked, handover, blocks, tail, others };
        let too_many = !pending.may_want(save.blocks.len());
        match base.engines[session].binding() {
            _ if base.cx.draining || too_many => self.drop_save(key, &save, &mut base.cx),
            Some(binding) => self.accept_save(key, binding, save, base),
            None if base.engines[session].barred().is_some() || base.engines[session].lost_rank() => {
                self.drop_save(key, &save, &mut base.cx);
            }
            None => {
                pending.wanted += save.blocks.len();
                self.unbound.insert(key, save);
            }
        }
        Ok(())
    }

    /// Takes a save of a bound engine, to be begun with its step. Blocks already kept need no copy.
    fn accept_save(&mut self, key: OpKey, binding: Binding, asked: UnboundSave, base: &mut Base) {
        let UnboundSave { posted, step, acceptance, before, checked, handover, blocks: asked, tail, others } =
            asked;
        let keys: Vec<BlockHash> = asked.iter().map(|(hash, _)| *hash).collect();
        let compares = |place| checked && is_chosen(place, keys.len(), binding.block_bytes());
        let stays_elsewhere = !checked && handover.is_none() && others.leaving.is_none();
        let is_elsewhere = |place| stays_elsewhere && place < others.streamed as usize;
        let is_refused = acceptance == Acceptance::Refused;
        let is_doubted = self.doubts.doubts_engine(key.0, binding.namespace, base.cx.now);
        let commits = !is_refused && !is_doubted && may_save(key.0, &binding, checked, base);
        let mut end = Saved { op: key.1, ..Saved::default() };
        let mut wanted = Vec::new();
        for (index, (hash, block)) in asked.into_iter().enumerate() {
            match block {
                // vLLM's null block: it never holds a request's KV.
                Some(0) => end.dropped += 1,
                Some(_) if others.leaving.is_some() && leaves_kept(&binding, hash, base) => end.present += 1,
                Some(_) if !compares(index) && others.leaving.is_none() && is_kept(&binding, hash, base) => {
                    end.present += 1;
                    if handover.is_some() {
                        base.cx.keep(&binding.block_key(&hash), &binding, None);
                    }
                }
                Some(_) if is_elsewhere(index) => end.present += 1,
                Some(_) if is_refused => {
                    (end.dropped, end.unaccepted) = (end.dropped + 1, end.unaccepted + 1)
                }
                Some(_) if !checked && is_doubted => drop_doubted(&mut end, &mut base.cx),
                Some(_) if !checked && !commits => drop_unproven(&mut end, &mut base.cx),
                Some(block) => wanted.push(WantedSave { index: index as u32, block, hash }),
                None => end.cancelled += 1,
            }
        }
        if end.present > 0 && others.leaving.is_none() {
            base.cx.dram.use_run(binding.namespace, &keys);
        }
        let aim = match (checked, commits) {
            (false, _) => SaveAim::Keep,
            (true, true) => SaveAim::CheckOrKeep,
            (true, false) => SaveAim::Check,
        };
        let is_empty = wanted.is_empty();
        self.pending(key.0).wanted += wanted.len();
        let phase = SavePhase::Wanted { wanted, runs_since: None, fenced: None };
        let (blocks, search) = (Vec::new(), Search::NotBegun);
        let save = Save {
            binding,
            posted,
            step,
            acceptance,
            aim,
            handover,
            before,
            keys,
            tail,
            others,
            blocks,
            phase,
            search,
            end,
        };
        self.saves.insert(key, save);
        if is_empty {
            self.change_save(key, SaveEvent::Empty, base);
        } else {
            self.pending(key.0).waiting.insert(key.1);
            self.dispatch_save(key, base.cx.claims_max, base);
        }
    }

    /// Begins the saves waiting for the binding of an engine, or drops them if it is barred.
    pub(crate) fn begin_unbound(&mut self, session: SessionId, base: &mut Base) {
        let binding = base.engines[session].binding().filter(|_| !base.cx.draining);
        for (key, save) in self.take_unbound(session) {
            match binding {
                Some(binding) => self.accept_save(key, binding, save, base),
                None => self.drop_save(key, &save, &mut base.cx),
            }
        }
    }

    /// Drops the saves waiting for a binding: the namespace's generation, or the engine, is over.
    pub(crate) fn drop_unbound(&mut self, session: SessionId, cx: &mut Context) {
        for (key, save) in self.take_unbound(session) {
            self.drop_save(key, &save, cx);
        }
    }

    fn take_unbound(&mut self, session: SessionId) -> Vec<(OpKey, UnboundSave)> {
        let keys: Vec<_> = self.unbound.range(operations(session)).map(|(key, _)| *key).collect();
        let saves = keys.into_iter().map(|key| (key, self.unbound.remove(&key).expect("listed above")));
        let saves: Vec<_> = saves.collect();
        self.unwant(session, saves.iter().map(|(_, save)| save.blocks.len()).sum());
        saves
    }

    /// Counts so many blocks of a session's saves as no longer waiting.
    fn unwant(&mut self, session: SessionId, blocks: usize) {
        if let Some(pending) = self.pending.get_mut(&session) {
            pending.wanted -= blocks;
        }
    }

    /// Drops a save not begun yet, and reports its end.
    fn drop_save(&mut self, (session, op): OpKey, save: &UnboundSave, cx: &mut Context) {
        let dropped = save.blocks.iter().filter(|(_, block)| block.is_some()).count() as u32;
        let cancelled = save.blocks.len() as u32 - dropped;
        cx.stats.saves_dropped += u64::from(dropped);
        cx.stats.saves_lost_to_reuse += u64::from(cancelled);
        if let Some(pending) = self.pending.get_mut(&session) {
            pending.forget_save(op, save.step);
        }
        self.tell_saved(session, Saved { op, cancelled, dropped, ..Saved::default() }, cx);
    }

    /// ACCEPT: the engine went on with the output of a step. Whole saves of it are committed in this turn,
    /// after a look at the word for void saves. Earlier steps without an ACCEPT are refused.
    pub(crate) fn accept_step(&mut self, session: SessionId, step: u64, base: &mut Base) {
        for (op, acceptance) in self.pending(session).accept_step(step) {
            let key = (session, op);
            if let Some(save) = self.unbound.get_mut(&key) {
                save.acceptance = acceptance;
            } else {
                self.change_save(key, SaveEvent::Settled(acceptance), base);
            }
        }
    }

    /// CANCEL: the engine is about to overwrite the sources of some blocks of a save.
    pub(crate) fn cancel(&mut self, session: SessionId, cancel: Cancel, base: &mut Base) {
        // An ended save was committed before this CANCEL was posted: its bytes were whole.
        let key = (session, cancel.op);
        let range = cancel.from..cancel.from + cancel.count;
        if let Some(save) = self.unbound.get_mut(&key) {
            let blocks = save.blocks.iter_mut().zip(0..);
            blocks.filter(|(_, index)| range.contains(index)).for_each(|((_, block), _)| *block = None);
            if save.blocks.iter().all(|(_, block)| block.is_none()) {
                let save = self.unbound.remove(&key).expect("found above");
                self.unwant(session, save.blocks.len());
                self.drop_save(key, &save, &mut base.cx);
            }
            return;
        }
        let Some(save) = self.saves.get(&key) else { return };
        if !matches!(save.phase, SavePhase::Whole { .. }) {
            self.change_save(key, SaveEvent::Cancelled(range), base);
        }
    }

    /// Takes slots for at most `claims_max` blocks of a save, and starts its copies once every rank has
    /// joined and passed its step. Returns the number of these blocks.
    pub(super) fn dispatch_save(&mut self, key: OpKey, claims_max: usize, base: &mut Base) -> usize {
        let Some(Save { phase: SavePhase::Wanted { runs_since, .. }, step, .. }) = self.saves.get(&key)
        else {
            return 0;
        };
        let is_done = base.engines.every_rank(key.0, |rank| rank.done >= *step);
        let runs_since = *runs_since;
        if !is_done && !self.may_claim_early(key, base) {
            return 0;
        }
        if let Some(since) = runs_since.filter(|_| is_done) {
            self.pending(key.0).handover_step = Some(base.cx.now.saturating_sub(since));
        }
        let mut save = self.saves.remove(&key).expect("found above");
        let SavePhase::Wanted { wanted, fenced, .. } = &mut save.phase else { unreachable!("matched above") };
        let done_since = is_done.then(|| *fenced.get_or_insert(base.cx.now));
        let claims = wanted.len().min(claims_max);
        self.unwant(key.0, claims);
        for wanted in wanted.drain(..claims).collect::<Vec<_>>() {
            self.claim(key.0, &mut save, wanted, base);
        }
        let (claimed, nothing_to_copy) = (save.phase.wanted_blocks().is_empty(), save.blocks.is_empty());
        self.saves.insert(key, save);
        if !claimed {
            if !self.behind.contains(&key.0) {
                self.behind.push_back(key.0);
            }
        } else if nothing_to_copy {
            self.change_save(key, SaveEvent::Empty, base);
        } else if let Some(fenced) = done_since {
            self.start_save(key, fenced, base);
        }
        claims
    }

    /// True if a save is for another engine, and its step runs on every rank and is short, judged by the last
    /// one.
    fn may_claim_early(&mut self, key: OpKey, base: &Base) -> bool {
        let last = self.pending(key.0).handover_step;
        let save = self.saves.get_mut(&key).expect("the caller found it");
        let SavePhase::Wanted { runs_since, .. } = &mut save.phase else { return false };
        if save.handover.is_none()
            || save.aim != SaveAim::Keep
            || !base.engines.every_rank(key.0, |rank| rank.start >= save.step)
        {
            return false;
        }
        runs_since.get_or_insert(base.cx.now);
        last.is_some_and(|took| took <= STEP_MAX)
    }

    /// Takes a slot for one block, unless the block is there or there is no room.
    fn claim(&mut self, session: SessionId, save: &mut Save, wanted: WantedSave, base: &mut Base) {
        let WantedSave { index, block, hash } = wanted;
        let key = save.binding.block_key(&hash);
        let take = |slot, kept| SaveBlock { index, block, hash, slot, kept, cancelled: false, broken: false };
        if save.aim != SaveAim::Keep {
            let check =
                self.checks.begin_check((session, save.end.op), index, &save.binding, &key, &mut base.cx);
            if let Some((kept, slot)) = check {
                return save.blocks.push(take(slot, Some(kept)));
            }
        }
        if save.aim == SaveAim::Check {
            let is_doubted = self.doubts.doubts_engine(session, save.binding.namespace, base.cx.now);
            let drop = if is_doubted { drop_doubted } else { drop_unproven };
            return drop(&mut save.end, &mut base.cx);
        }
        match base.cx.claim(key, &save.binding, save.handover) {
            Ok(slot) => {
                base.cx.produced.claimed = true;
                save.blocks.push(take(slot, None));
            }
            Err(error @ (FillError::Present | FillError::Filling)) => {
                save.end.present += 1;
                if error == FillError::Present && save.others.leaving.is_some() {
                    leaves_kept(&save.binding, hash, base);
                } else if error == FillError::Present {
                    if save.handover.is_some() {
                        base.cx.keep(&key, &save.binding, None);
                    }
                    base.sources.tell_tiers(Notice::Offered(key, None, &save.binding), &mut base.cx);
                }
            }
            Err(error @ (FillError::NoSpace | FillError::TooLarge { .. } | FillError::Empty)) => {
                save.end.dropped += 1;
                base.cx.stats.saves_without_room += u64::from(error == FillError::NoSpace);
                base.cx.stats.saves_too_large += u64::from(matches!(error, FillError::TooLarge { .. }));
            }
        }
    }

    fn start_save(&mut self, key: OpKey, fenced: Duration, base: &mut Base) {
        let save = self.saves.get_mut(&key).expect("the caller found it");
        let mut ready = Vec::new();
        for (session, worker) in base.engines.ranks(key.0) {
            let rank = worker.rank;
            let offset = u64::from(worker.shard) * save.binding.shard_bytes;
            let replicas = base.engines[key.0].world_size / worker.shards;
            let chosen = |block: &&SaveBlock| {
                let holder = u32::from(block.hash.0[0]) % replicas;
                !block.cancelled && block.block < worker.blocks && rank % replicas == holder
            };
            let blocks = save.blocks.iter().filter(chosen);
            let pieces = blocks.map(|b| RankBlock { block: b.block, offset: b.slot.offset + offset });
            let pieces: Vec<RankBlock> = pieces.collect();
            if save.blocks.iter().any(|block| block.block >= worker.blocks) {
                save.acceptance.accept_answer(Acceptance::Void);
            }
            if !pieces.is_empty() {
                ready.push((CopyOwner { key, rank, direction: CopyDirection::Save }, session, pieces));
            }
        }
        base.cx.took(Timed::Save(TimedPart::Waiting), save.posted);
        let copies = ready.len() as u32;
        for (owner, session, pieces) in ready {
            self.start_copy(owner, session, pieces, &mut base.cx);
        }
        self.change_save(key, SaveEvent::Started(copies, fenced), base);
    }
}

/// True if an engine's saves may be kept. An engine without a proof is the first of its namespace if no block
/// is kept, here or elsewhere, to compare its blocks with; see [`crate::core::engines`].
fn may_save(session: SessionId, binding: &Binding, checked: bool, base: &mut Base) -> bool {
    if base.engines.may_save(session) {
        return true;
    }
    let space = binding.space();
    let is_first = !checked
        && base.sources.knows_all(&base.cx)
        && !base.cx.namespaces.has_kept(space)
        && !base.engines.any_may_save(space);
    if is_first {
        base.engines.prove(session, space, Proof::First);
    }
    is_first
}

/// Counts a block dropped because its engine has no proof.
fn drop_unproven(end: &mut Saved, cx: &mut Context) {
    end.dropped += 1;
    end.unproven += 1;
    cx.stats.saves_unproven += 1;
}

/// Counts a block dropped because its engine is in doubt.
fn drop_doubted(end: &mut Saved, cx: &mut Context) {
    end.dropped += 1;
    cx.stats.saves_doubted += 1;
}

/// True if a block is kept and needs no copy. It is offered to tiers again: one may lack it.
fn is_kept(binding: &Binding, hash: BlockHash, base: &mut Base) -> bool {
    let key = binding.block_key(&hash);
    let kept = base.cx.dram.probe(key.namespace, &[hash]) == 1;
    if kept {
        base.sources.tell_tiers(Notice::Offered(key, None, binding), &mut base.cx);
    }
    kept
}

/// True if a block about to leave the engine's device is kept. From now on it is judged like any other. This is
/// no use of it.
fn leaves_kept(binding: &Binding, hash: BlockHash, base: &mut Base) -> bool {
    base.cx.dram.leave_device(binding.namespace, &[hash]) == 1
}
