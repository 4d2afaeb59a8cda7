//! This process' own copies of one load, batch after batch, cut after cut.
//!
//! A cut is called delivered once its copies have ended and, after that, every slot was seen whole and still
//! of its filling, and the pool was seen to have lost nothing.

use std::collections::VecDeque;

use copy_engine::{CopyError, EngineMemory};
use shm_protocol::pool::SlotRef;

use super::SlotPart;
use crate::core::plan::Plan;
use crate::pool::MappedPool;

/// Batches of a load in progress: one is filled while another moves.
const FLYING_MAX: usize = 2;

/// The rest of a load.
#[derive(Debug)]
pub(in crate::worker) struct BlockFetch {
    /// Blocks with whole slots so far.
    sound: Vec<(u32, SlotRef)>,
    failed: Vec<u32>,
    /// The next part, and the next block of it.
    cut: usize,
    next: usize,
    /// Batches in progress, each with the number of cuts that are whole after it.
    flying: VecDeque<(u64, usize)>,
}

/// The result of a step.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum FetchStep {
    /// A batch was begun, or ended.
    Worked,
    /// All possible batches are in progress.
    Waits,
    /// All batches have ended.
    Done,
}

// === impl BlockFetch ===

impl BlockFetch {
    /// Prepares the copies of a plan. Blocks with a changed slot count as failed.
    pub(super) fn new(memory: &EngineMemory, pool: &MappedPool, part: SlotPart, plan: &Plan) -> Self {
        let kept = pool.is_whole();
        let whole = |&(block, slot): &(u32, SlotRef)| {
            kept && memory.holds(block) && pool.verify_slot(slot, part.slot_bytes)
        };
        let (sound, failed): (Vec<_>, Vec<_>) = plan.blocks.iter().copied().partition(whole);
        Self { sound, ..Self::nothing(failed.into_iter().map(|(block, _)| block).collect()) }
    }

    /// A fetch without copies.
    pub(super) fn nothing(failed: Vec<u32>) -> Self {
        Self { sound: Vec::new(), failed, cut: 0, next: 0, flying: VecDeque::new() }
    }

    /// Begins the next batch, or finds the end of one. While no block has failed, calls `delivered` with the
    /// number of whole cuts.
    pub(super) fn step(
        &mut self,
        memory: &EngineMemory,
        pool: &MappedPool,
        part: SlotPart,
        cuts: &[u64],
        mut delivered: impl FnMut(usize),
    ) -> Result<FetchStep, CopyError> {
        let ended = memory.last_ended()?;
        let mut worked = false;
        while let Some(&(_, whole)) = self.flying.front().filter(|(batch, _)| *batch <= ended) {
            self.flying.pop_front();
            worked = true;
            // The caller delivers the last cut, from the result.
            if (1..cuts.len()).contains(&whole) && self.is_sound(pool, part) {
                delivered(whole);
            }
        }
        if self.sound.is_empty() || self.cut == cuts.len() {
            if !self.flying.is_empty() {
                return Ok(if worked { FetchStep::Worked } else { FetchStep::Waits });
            }
            self.drop_unsound(pool, part);
            return Ok(FetchStep::Done);
        }
        if self.flying.len() == FLYING_MAX {
            return Ok(if worked { FetchStep::Worked } else { FetchStep::Waits });
        }
        self.begin_batch(memory, pool, part, cuts)?;
        Ok(FetchStep::Worked)
    }

    /// Blocks that this fetch did not fill.
    pub(super) fn failed_blocks(self) -> Vec<u32> {
        self.failed
    }

    fn begin_batch(
        &mut self,
        memory: &EngineMemory,
        pool: &MappedPool,
        part: SlotPart,
        cuts: &[u64],
    ) -> Result<(), CopyError> {
        let start = self.cut.checked_sub(1).map_or(0, |before| cuts[before]);
        let cut = start..cuts[self.cut];
        let end = self.sound.len().min(self.next + memory.batch_blocks(&cut));
        let blocks =
            self.sound[self.next..end].iter().map(|(block, slot)| (*block, slot.offset + part.offset));
        match memory.begin_load(pool.source(), &cut, &blocks.collect::<Vec<_>>()) {
            Ok(batch) => {
                self.next = end;
                let last = end == self.sound.len();
                self.flying.push_back((batch, if last { self.cut + 1 } else { 0 }));
            }
            Err(error @ CopyError::Cuda(_)) => return Err(error),
            Err(_) => self.failed.extend(self.sound.drain(self.next..end).map(|(block, _)| block)),
        }
        if self.next == self.sound.len() {
            (self.cut, self.next) = (self.cut + 1, 0);
        }
        Ok(())
    }

    fn is_sound(&self, pool: &MappedPool, part: SlotPart) -> bool {
        let verified = |(_, slot): &(u32, SlotRef)| pool.verify_slot(*slot, part.slot_bytes);
        self.failed.is_empty() && self.sound.iter().all(verified) && pool.is_whole()
    }

    fn drop_unsound(&mut self, pool: &MappedPool, part: SlotPart) {
        let kept = pool.is_whole();
        let unsound =
            self.sound.extract_if(.., |(_, slot)| !kept || !pool.verify_slot(*slot, part.slot_bytes));
        self.failed.extend(unsound.map(|(block, _)| block));
    }
}
