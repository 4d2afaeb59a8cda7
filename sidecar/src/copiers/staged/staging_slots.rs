//! The state of the slots of a staging segment. No memory and no thread is used here.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use shm_protocol::message::StageRequest;

use crate::copiers::Finished;
use crate::core::{CopyId, RankBlock};

/// Blocks queued for a slot: as many as for copies of host memory. Further saves fail.
const BLOCKS_WAITING_MAX: usize = 65_536;
/// Time limit of a rank for one block, which takes microseconds on the wire; until then the saves keep their
/// slots and keys. After it every save of the rank fails, and its slots only wait for their answers. A rank
/// that waited longer for a busy core loses these saves and goes on.
pub(super) const ANSWER: Duration = Duration::from_secs(2);

/// A rank's slots and its queue.
#[derive(Debug)]
pub(super) struct StagingSlots {
    slots: Vec<Slot>,
    waiting: VecDeque<(CopyId, RankBlock)>,
    copies: BTreeMap<CopyId, OpenBatch>,
    ended: Vec<Finished>,
    /// Random at first, so answers and slots of an earlier session match no request of this one.
    next_tag: u64,
    stopped: bool,
}

#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Slot {
    Free,
    /// The rank may be writing the slot.
    Asked {
        tag: u64,
        copy: CopyId,
        offset: u64,
        since: Duration,
    },
    /// The rank may still be writing the slot for a dropped save. The slot is free once the rank answers
    /// `tag`.
    Owed {
        tag: u64,
    },
    /// The slot holds a block.
    Filled {
        tag: u64,
        copy: CopyId,
        offset: u64,
    },
    /// The thread is moving the slot's block.
    Moving {
        copy: CopyId,
    },
}

/// An unfinished batch.
#[derive(Debug)]
struct OpenBatch {
    left: usize,
    ok: bool,
}

/// A slot to be emptied.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Filled {
    pub(super) slot: u32,
    pub(super) tag: u64,
    pub(super) offset: u64,
}

/// The next work of the thread.
#[derive(Debug, Default)]
pub(super) struct StagingTurn {
    pub(super) asked: Vec<StageRequest>,
    pub(super) filled: Vec<Filled>,
    pub(super) ended: Vec<Finished>,
}

// === impl StagingTurn ===

impl StagingTurn {
    pub(super) fn is_empty(&self) -> bool {
        self.asked.is_empty() && self.filled.is_empty() && self.ended.is_empty()
    }
}

// === impl StagingSlots ===

impl StagingSlots {
    pub(super) fn new(slots: u32, next_tag: u64) -> Self {
        let slots = vec![Slot::Free; slots as usize];
        let (waiting, copies) = (VecDeque::new(), BTreeMap::new());
        Self { slots, waiting, copies, ended: Vec::new(), next_tag, stopped: false }
    }

    /// Takes a batch of at least one block. Returns `false` if it was stopped, there is no room, or the rank
    /// owes answers for all slots.
    pub(super) fn post_batch(&mut self, copy: CopyId, pieces: &[RankBlock]) -> bool {
        let silent = self.slots.iter().all(|slot| matches!(slot, Slot::Owed { .. }));
        if self.stopped || silent || self.waiting.len() + pieces.len() > BLOCKS_WAITING_MAX {
            return false;
        }
        self.copies.insert(copy, OpenBatch { left: pieces.len(), ok: true });
        self.waiting.extend(pieces.iter().map(|piece| (copy, *piece)));
        true
    }

    /// Handles a rank's answer. An answer to no open request is an error: the rank broke the protocol.
    pub(super) fn staged(&mut self, tag: u64, slot: u32, ok: bool) -> Result<(), String> {
        let place = self.slots.get_mut(slot as usize);
        match place {
            Some(place @ &mut Slot::Asked { tag: awaited, copy, offset, .. }) if awaited == tag => {
                *place = if ok { Slot::Filled { tag, copy, offset } } else { Slot::Free };
                if !ok {
                    self.end_piece(copy, false);
                }
                Ok(())
            }
            Some(place @ &mut Slot::Owed { tag: awaited }) if awaited == tag => {
                *place = Slot::Free;
                Ok(())
            }
            _ => Err(format!("STAGED for slot {slot} with a tag that the sidecar did not send")),
        }
    }

    /// The work possible now, which the caller must carry out.
    pub(super) fn next_turn(&mut self, now: Duration) -> StagingTurn {
        let late = |slot: &Slot| matches!(slot, Slot::Asked { since, .. } if now >= *since + ANSWER);
        if self.slots.iter().any(late) {
            tracing::warn!("a rank did not stage its blocks in time: its saves under way are dropped");
            self.give_up();
        }
        let mut turn = StagingTurn::default();
        for (number, place) in (0..).zip(&mut self.slots) {
            match *place {
                Slot::Filled { tag, copy, offset } => {
                    *place = Slot::Moving { copy };
                    turn.filled.push(Filled { slot: number, tag, offset });
                }
                Slot::Free => {
                    let Some((copy, piece)) = self.waiting.pop_front() else { continue };
                    let tag = self.next_tag;
                    self.next_tag = tag.wrapping_add(1);
                    *place = Slot::Asked { tag, copy, offset: piece.offset, since: now };
                    turn.asked.push(StageRequest { tag, block: piece.block, slot: number });
                }
                Slot::Asked { .. } | Slot::Owed { .. } | Slot::Moving { .. } => {}
            }
        }
        turn.ended = std::mem::take(&mut self.ended);
        turn
    }

    /// Frees an emptied slot.
    pub(super) fn moved(&mut self, filled: &Filled, ok: bool) {
        let place = &mut self.slots[filled.slot as usize];
        let Slot::Moving { copy } = *place else { unreachable!("the thread was given it by `turn`") };
        *place = Slot::Free;
        self.end_piece(copy, ok);
    }

    /// Stops further requests.
    pub(super) fn stop(&mut self) {
        self.stopped = true;
        self.give_up();
    }

    /// True if a slot waits for an answer within the time limit.
    pub(super) fn is_asking(&self) -> bool {
        self.slots.iter().any(|slot| matches!(slot, Slot::Asked { .. }))
    }

    /// True if no event can follow any more.
    pub(super) fn is_over(&self) -> bool {
        self.stopped && self.copies.is_empty() && self.ended.is_empty()
    }

    /// Fails every batch, as soon as none of its blocks is being moved.
    fn give_up(&mut self) {
        for (copy, _) in std::mem::take(&mut self.waiting) {
            self.end_piece(copy, false);
        }
        for at in 0..self.slots.len() {
            let (left, copy) = match self.slots[at] {
                Slot::Asked { tag, copy, .. } => (Slot::Owed { tag }, copy),
                Slot::Filled { copy, .. } => (Slot::Free, copy),
                Slot::Free | Slot::Owed { .. } | Slot::Moving { .. } => continue,
            };
            self.slots[at] = left;
            self.end_piece(copy, false);
        }
    }

    fn end_piece(&mut self, copy: CopyId, ok: bool) {
        let open = self.copies.get_mut(&copy).expect("a batch outlives its blocks");
        open.left -= 1;
        open.ok &= ok;
        let OpenBatch { left, ok } = *open;
        if left == 0 {
            self.copies.remove(&copy);
            self.ended.push(Finished { copy, ok });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Duration = Duration::from_secs(100);

    fn pieces(count: u32) -> Vec<RankBlock> {
        (0..count).map(|block| RankBlock { block, offset: u64::from(block) * 512 }).collect()
    }

    /// Two slots and a batch of three blocks, two of which are requested.
    fn asked() -> (StagingSlots, Vec<StageRequest>) {
        let mut slots = StagingSlots::new(2, 7);
        assert!(slots.post_batch(1, &pieces(3)));
        let turn = slots.next_turn(START);
        assert!(turn.filled.is_empty() && turn.ended.is_empty());
        (slots, turn.asked)
    }

    fn empty(slots: &mut StagingSlots, ok: bool) -> StagingTurn {
        let turn = slots.next_turn(START);
        turn.filled.iter().for_each(|slot| slots.moved(slot, ok));
        turn
    }

    #[test]
    fn slots_go_round_and_a_batch_ends_with_its_last_block() {
        let (mut slots, first) = asked();
        let stage = |tag, block, slot| StageRequest { tag, block, slot };
        assert_eq!(first, [stage(7, 0, 0), stage(8, 1, 1)]);
        slots.staged(8, 1, true).unwrap();
        let turn = empty(&mut slots, true);
        assert_eq!(turn.filled, [Filled { slot: 1, tag: 8, offset: 512 }]);
        assert!(turn.asked.is_empty(), "a slot is asked for when it is empty");
        assert_eq!(slots.next_turn(START).asked, [stage(9, 2, 1)]);
        slots.staged(9, 1, true).unwrap();
        slots.staged(7, 0, true).unwrap();
        assert_eq!(empty(&mut slots, true).filled.len(), 2);
        assert_eq!(slots.next_turn(START).ended, [Finished { copy: 1, ok: true }]);
        assert!(!slots.is_asking() && !slots.is_over());
    }

    #[test]
    fn one_block_that_fails_on_either_side_fails_its_batch() {
        for (staged, moved) in [(false, true), (true, false)] {
            let (mut slots, _) = asked();
            slots.staged(7, 0, staged).unwrap();
            slots.staged(8, 1, true).unwrap();
            let turn = empty(&mut slots, moved);
            // A slot that the rank could not fill is requested again in the same turn.
            let third = turn.asked.into_iter().chain(slots.next_turn(START).asked).next().unwrap();
            slots.staged(third.tag, third.slot, true).unwrap();
            empty(&mut slots, true);
            assert_eq!(slots.next_turn(START).ended, [Finished { copy: 1, ok: false }]);
        }
    }

    #[test]
    fn answers_that_nobody_asked_for_are_refused() {
        let (mut slots, _) = asked();
        for (tag, slot) in [(8, 0), (7, 1), (6, 0), (7, 2), (7, u32::MAX)] {
            assert!(slots.staged(tag, slot, true).is_err(), "{tag} {slot}");
        }
        slots.staged(7, 0, true).unwrap();
        assert!(slots.staged(7, 0, true).is_err(), "the slot was answered already");
        empty(&mut slots, true);
        assert!(slots.staged(7, 0, true).is_err(), "the request has ended");
    }

    #[test]
    fn a_rank_that_is_silent_holds_its_slots_and_nothing_else() {
        let (mut slots, _) = asked();
        slots.staged(7, 0, true).unwrap();
        let moving = slots.next_turn(START).filled;
        assert_eq!(slots.next_turn(START + ANSWER - Duration::from_millis(1)).ended, []);
        assert_eq!(slots.next_turn(START + ANSWER).ended, [], "a block is being moved into the pool");
        slots.moved(&moving[0], true);
        assert_eq!(slots.next_turn(START + ANSWER).ended, [Finished { copy: 1, ok: false }]);
        assert!(slots.post_batch(2, &pieces(1)), "one slot is free");
        assert_eq!(slots.next_turn(START + ANSWER).asked, [StageRequest { tag: 9, block: 0, slot: 0 }]);
        let late = START + ANSWER + ANSWER;
        assert_eq!(slots.next_turn(late).ended, [Finished { copy: 2, ok: false }]);
        assert!(!slots.post_batch(3, &pieces(1)), "no slot is free");
        slots.staged(8, 1, true).unwrap();
        assert!(slots.post_batch(3, &pieces(1)), "the late answer freed a slot");
        assert_eq!(slots.next_turn(late).asked, [StageRequest { tag: 10, block: 0, slot: 1 }]);
    }

    #[test]
    fn a_rank_that_left_ends_its_batches_when_nothing_is_moved() {
        let (mut slots, _) = asked();
        slots.staged(8, 1, true).unwrap();
        let moving = slots.next_turn(START).filled;
        slots.stop();
        assert!(slots.next_turn(START).is_empty() && !slots.is_over());
        slots.moved(&moving[0], true);
        assert_eq!(slots.next_turn(START).ended, [Finished { copy: 1, ok: false }]);
        assert!(slots.is_over() && !slots.post_batch(2, &pieces(1)));
    }

    #[test]
    fn more_than_may_wait_is_refused() {
        let mut slots = StagingSlots::new(2, 0);
        assert!(slots.post_batch(1, &pieces(BLOCKS_WAITING_MAX as u32)));
        assert!(!slots.post_batch(2, &pieces(1)));
    }
}
