//! Copies of one direction, cut into batches in turn, and their ends. No GPU is used here.
//!
//! Loads without a waiting step take turns only up to a limit of bytes; the rest start as those end. If all
//! copies of a backlog started at once, all would end only at its end.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use crate::copiers::Finished;
use crate::core::CopyId;

/// Largest batch: 2.4 ms on the wire, the delay of a small load behind a large one. The words around a batch
/// cost 10 us: a load of 1.3 GB takes 24.80 ms, with batches of half the size 24.97 ms, of twice the size
/// 24.63 ms.
pub(super) const BATCH_BYTES_MAX: u64 = 128 << 20;
/// Largest batch while other ranks load into the same GPU: a load waits for two batches in flight of each of
/// them.
pub(super) const BATCH_BYTES_SHARED: u64 = 32 << 20;
/// Cuts of a load are joined while a batch stays below this size, 80 us on the wire: a small load then has
/// few words.
const BATCH_BYTES_MIN: u64 = 4 << 20;
/// Batches of one direction in flight: the next is enqueued while one moves.
const BATCHES_IN_FLIGHT: usize = 2;
/// Bytes of asynchronous loads that take turns: 10 ms on the wire.
const TURNS_BYTES_MAX: u64 = 512 << 20;
/// Most bytes counted for one load: beside a large load there is room for another.
const COUNTED_BYTES_MAX: u64 = TURNS_BYTES_MAX / 2;

/// Batches of one direction.
#[derive(Debug, Default)]
pub(super) struct GpuLane {
    /// Copies that take turns.
    turns: VecDeque<PendingCopy>,
    /// Copies that wait for the end of those, in order.
    held: VecDeque<PendingCopy>,
    /// Counted bytes of the unfinished copies that take turns.
    counted: u64,
    flying: VecDeque<BatchFlight>,
    /// Batches enqueued so far.
    pub(super) batches: u64,
}

/// The rest of a copy.
#[derive(Debug)]
pub(super) struct PendingCopy {
    pub(super) copy: CopyId,
    pub(super) op: u64,
    pub(super) blocks: Vec<(u32, u64)>,
    /// The next cut, and its next block.
    pub(super) cut: usize,
    pub(super) block: usize,
    /// Time of its start.
    pub(super) since: Duration,
    /// Bytes counted while it takes turns; 0 for a save and for a load with a waiting step.
    pub(super) counted: u64,
}

/// A part of a copy: these blocks of these cuts.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct CopyStep {
    pub(super) cuts: Range<usize>,
    pub(super) blocks: Range<usize>,
}

/// An enqueued batch, or the end of an abandoned copy.
#[derive(Debug)]
pub(super) struct BatchFlight {
    pub(super) batch: u64,
    pub(super) op: u64,
    /// The end of its copy, if this is its last batch.
    last: Option<CopyEnd>,
}

/// The end of a copy.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) struct CopyEnd {
    pub(super) finished: Finished,
    pub(super) blocks: usize,
    pub(super) since: Duration,
    counted: u64,
}

// === impl GpuLane ===

impl GpuLane {
    pub(super) fn busy(&self) -> bool {
        self.has_waiting() || !self.flying.is_empty()
    }

    /// True if there are copies to enqueue now or later.
    pub(super) fn has_waiting(&self) -> bool {
        !self.turns.is_empty() || !self.held.is_empty()
    }

    /// The batches in flight, in order.
    pub(super) fn flying(&self) -> impl Iterator<Item = &BatchFlight> {
        self.flying.iter()
    }

    /// The batch that ends next.
    pub(super) fn front(&self) -> Option<&BatchFlight> {
        self.flying.front()
    }

    pub(super) fn accept_copy(&mut self, transfer: PendingCopy) {
        if transfer.counted == 0 {
            self.turns.push_back(transfer);
        } else {
            self.held.push_back(transfer);
            self.admit_held();
        }
    }

    /// Lets held copies take turns, as far as there is room.
    fn admit_held(&mut self) {
        let fits =
            |counted: u64, next: &PendingCopy| counted == 0 || counted + next.counted <= TURNS_BYTES_MAX;
        while let Some(next) = self.held.pop_front_if(|next| fits(self.counted, next)) {
            self.counted += next.counted;
            self.turns.push_back(next);
        }
    }

    /// True if another batch may be enqueued.
    pub(super) fn has_room(&self) -> bool {
        self.flying.len() < BATCHES_IN_FLIGHT
    }

    /// The next copy in turn.
    pub(super) fn next(&mut self) -> Option<PendingCopy> {
        self.turns.pop_front()
    }

    /// Counts an enqueued batch of a copy. The rest of the copy waits behind the others.
    pub(super) fn fly(&mut self, transfer: PendingCopy, cuts: usize) {
        self.batches += 1;
        let done = transfer.cut == cuts;
        let last = done.then(|| transfer.end_copy(true));
        self.flying.push_back(BatchFlight { batch: self.batches, op: transfer.op, last });
        if !done {
            self.turns.push_back(transfer);
        }
    }

    /// The copy ends as failed, after all batches enqueued so far.
    pub(super) fn give_up(&mut self, transfer: &PendingCopy) {
        let last = Some(transfer.end_copy(false));
        self.flying.push_back(BatchFlight { batch: self.batches, op: transfer.op, last });
    }

    pub(super) fn give_up_all(&mut self) {
        for transfer in std::mem::take(&mut self.turns) {
            self.give_up(&transfer);
        }
        for transfer in std::mem::take(&mut self.held) {
            self.give_up(&PendingCopy { counted: 0, ..transfer });
        }
    }

    /// Copies that ended with batch `batch` or before.
    pub(super) fn take_ended(&mut self, batch: u64) -> Vec<CopyEnd> {
        let mut ended = Vec::new();
        while let Some(flight) = self.flying.pop_front_if(|flight| flight.batch <= batch) {
            ended.extend(flight.last);
        }
        self.counted -= ended.iter().map(|end| end.counted).sum::<u64>();
        self.admit_held();
        ended
    }
}

// === impl PendingCopy ===

impl PendingCopy {
    /// A copy of `bytes` bytes; `awaited` if a step of the engine waits for it.
    pub(super) fn new(
        (copy, op): (CopyId, u64),
        blocks: Vec<(u32, u64)>,
        bytes: u64,
        awaited: bool,
        since: Duration,
    ) -> Self {
        let counted = if awaited { 0 } else { bytes.min(COUNTED_BYTES_MAX) };
        Self { copy, op, blocks, cut: 0, block: 0, since, counted }
    }

    /// The next batch: one cut of as many blocks as fit, or several cuts of few blocks.
    pub(super) fn next_step(&self, cuts: &[u64], bytes_max: u64) -> CopyStep {
        let start = self.cut.checked_sub(1).map_or(0, |before| cuts[before]);
        let left = self.blocks.len() - self.block;
        let fitting = usize::try_from(bytes_max / (cuts[self.cut] - start)).unwrap_or(usize::MAX);
        let blocks = self.block..self.block + left.min(fitting.max(1));
        let small = |end: &u64| {
            blocks.len() == self.blocks.len() && (end - start) * blocks.len() as u64 <= BATCH_BYTES_MIN
        };
        let joined = cuts[self.cut + 1..].iter().take_while(|end| small(end)).count();
        CopyStep { cuts: self.cut..self.cut + 1 + joined, blocks }
    }

    fn end_copy(&self, ok: bool) -> CopyEnd {
        let finished = Finished { copy: self.copy, ok };
        CopyEnd { finished, blocks: self.blocks.len(), since: self.since, counted: self.counted }
    }

    pub(super) fn advance(&mut self, step: &CopyStep) {
        if step.blocks.end == self.blocks.len() {
            (self.cut, self.block) = (step.cuts.end, 0);
        } else {
            self.block = step.blocks.end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn steps(count: usize, cuts: &[u64]) -> Vec<CopyStep> {
        let blocks = (0..count as u32).map(|block| (block, 0)).collect();
        let mut transfer = PendingCopy::new((1, 1), blocks, 0, true, Duration::ZERO);
        let mut steps = Vec::new();
        while transfer.cut < cuts.len() {
            let step = transfer.next_step(cuts, BATCH_BYTES_MAX);
            transfer.advance(&step);
            steps.push(step);
        }
        steps
    }

    fn of_one_block(copy: CopyId, cut: usize) -> PendingCopy {
        PendingCopy { cut, ..of_bytes(copy, 0, true) }
    }

    fn of_bytes(copy: CopyId, bytes: u64, awaited: bool) -> PendingCopy {
        PendingCopy::new((copy, copy), vec![(0, 0)], bytes, awaited, Duration::ZERO)
    }

    /// Enqueues the next batch, of two in each copy. Returns its copy.
    fn enqueue(lane: &mut GpuLane) -> Option<CopyId> {
        let mut transfer = lane.next()?;
        let copy = transfer.copy;
        transfer.cut += 1;
        lane.fly(transfer, 2);
        Some(copy)
    }

    #[test]
    fn a_large_load_is_cut_by_layers_and_then_by_blocks() {
        let cuts: Vec<u64> = (1..=8).map(|cut| cut * MIB / 4).collect();
        let steps = steps(1280, &cuts);
        assert_eq!(steps.len(), 8 * 3);
        assert_eq!(
            steps[..4],
            [
                CopyStep { cuts: 0..1, blocks: 0..512 },
                CopyStep { cuts: 0..1, blocks: 512..1024 },
                CopyStep { cuts: 0..1, blocks: 1024..1280 },
                CopyStep { cuts: 1..2, blocks: 0..512 },
            ]
        );
    }

    #[test]
    fn a_small_load_is_one_batch_and_a_larger_one_joins_few_cuts() {
        let cuts: Vec<u64> = (1..=8).map(|cut| cut * MIB / 4).collect();
        assert_eq!(steps(2, &cuts), [CopyStep { cuts: 0..8, blocks: 0..2 }]);
        assert_eq!(steps(5, &cuts), [0..3, 3..6, 6..8].map(|cuts| CopyStep { cuts, blocks: 0..5 }));
    }

    #[test]
    fn a_copy_that_is_given_up_ends_after_its_batches_in_flight() {
        let mut lane = GpuLane::default();
        let transfer = |copy| of_one_block(copy, 1);
        lane.fly(transfer(1), 2);
        lane.give_up_all();
        lane.fly(transfer(2), 1);
        let mut ended = |batch| lane.take_ended(batch).iter().map(|end| end.finished).collect::<Vec<_>>();
        assert_eq!(ended(0), []);
        assert_eq!(ended(1), [Finished { copy: 1, ok: false }]);
        assert_eq!(ended(2), [Finished { copy: 2, ok: true }]);
        assert!(!lane.busy());
    }

    #[test]
    fn copies_take_turns() {
        let mut lane = GpuLane::default();
        [1, 2].into_iter().for_each(|copy| lane.accept_copy(of_one_block(copy, 0)));
        let turns: Vec<_> = std::iter::from_fn(|| enqueue(&mut lane)).collect();
        assert_eq!(turns, [1, 2, 1, 2]);
    }

    #[test]
    fn a_backlog_is_carried_out_in_its_order_and_an_awaited_load_beside_it() {
        let mut lane = GpuLane::default();
        (1..=4).for_each(|copy| lane.accept_copy(of_bytes(copy, 4096 * MIB, false)));
        lane.accept_copy(of_bytes(5, 4096 * MIB, true));
        let turns: Vec<_> = std::iter::from_fn(|| enqueue(&mut lane)).collect();
        assert_eq!(turns, [1, 2, 5, 1, 2, 5], "two large loads, and the awaited one");
        assert!(lane.has_waiting());
        assert_eq!(
            lane.take_ended(4).len(),
            1,
            "the first copy has two batches, of which the second is the fourth"
        );
        assert_eq!(enqueue(&mut lane), Some(3));
        lane.give_up_all();
        let ended = lane.take_ended(lane.batches);
        let ended: Vec<_> = ended.iter().map(|end| (end.finished.copy, end.finished.ok)).collect();
        assert_eq!(ended, [(2, true), (5, true), (3, false), (4, false)]);
        assert!(!lane.busy() && lane.counted == 0);
    }

    #[test]
    fn small_loads_fill_the_room_beside_a_large_one() {
        let mut lane = GpuLane::default();
        let sizes = [4096, 200, 100, 1];
        sizes.iter().zip(1..).for_each(|(size, copy)| lane.accept_copy(of_bytes(copy, size * MIB, false)));
        let turns: Vec<_> = std::iter::from_fn(|| enqueue(&mut lane)).collect();
        assert_eq!(turns, [1, 2, 1, 2], "the third has no room, and nothing overtakes it");
        assert_eq!(lane.take_ended(2), [], "neither has ended");
        assert_eq!(lane.take_ended(3).len(), 1);
        assert_eq!(enqueue(&mut lane), Some(3));
        assert_eq!(enqueue(&mut lane), Some(4));
    }
}
