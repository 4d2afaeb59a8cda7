//! How long a load into GPU memory is left to the sidecar, and the action afterwards. Pure: observations come
//! in, actions go out.
//!
//! The engine's stream may wait for the load's word meanwhile. It goes on once every byte is there, from
//! either process, and never before.

use std::time::{Duration, Instant};

use shm_protocol::gate::DEVICE_LATENCY;

use super::link::Batches;
use super::patience::{CopyPatience, LoadProgress};

/// Longest wait for the end of a sidecar's copy once the gate is closed. A copy takes less than a
/// millisecond, but a runnable thread was seen to wait 3 s for a busy core. On host memory, a sidecar frozen
/// within a block is given up after this time: `pillion.copy=sidecar` has no better guarantee there. On a GPU
/// a batch that began ends by itself, so after this time the GPU or the sidecar's words are broken, and the
/// process ends.
pub const SETTLE: Duration = Duration::from_secs(5);

/// The phase of a load.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum WatchPhase {
    /// The engine's stream has not reached it: no one may write its blocks.
    Ahead,
    /// The sidecar may write.
    Begun,
    /// The gate was closed at this time.
    TakenBack(Instant),
    /// The gate was closed, and the batches begun by now must end.
    Settling { since: Instant, began: u64 },
    /// This process copies it.
    Ours,
}

/// A load's progress.
#[derive(Debug)]
pub(crate) struct LoadWatch {
    phase: WatchPhase,
    /// The time limits, counted from the moment when the engine's stream reaches the load.
    patience: CopyPatience,
}

/// The observations of a load.
#[derive(Copy, Clone, Debug)]
pub(crate) struct LoadSeen {
    /// The engine's stream has reached it.
    pub(crate) reached: bool,
    /// Every byte of it has arrived.
    pub(crate) whole: bool,
    /// The sidecar has written nothing of it, and never will.
    pub(crate) refused: bool,
    /// The sidecar ended it in another way, or hung up.
    pub(crate) broken: bool,
    /// Counters of the sidecar's stream.
    pub(crate) batches: Batches,
    /// Number of cuts of this load that are there.
    pub(crate) cuts: u64,
    /// The sidecar's process has ended.
    pub(crate) gone: bool,
}

/// The next action.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) enum WatchVerdict {
    /// Nothing yet.
    Wait,
    /// The sidecar has copied every block.
    Whole,
    /// Close the gate.
    TakeBack,
    /// Copy every block.
    Copy,
    /// End the process: the blocks cannot be taken back, and a further wait has no end.
    GiveUp,
}

// === impl LoadWatch ===

impl LoadWatch {
    /// The watch of a load promised by the sidecar.
    pub(crate) fn promised(patience: CopyPatience) -> Self {
        Self { phase: WatchPhase::Ahead, patience }
    }

    /// The watch of a load that only this process copies.
    pub(crate) fn ours() -> Self {
        Self { phase: WatchPhase::Ours, patience: CopyPatience::new(Duration::ZERO, 0) }
    }

    /// True if this process copies it, now or as soon as its blocks are free.
    pub(crate) fn is_ours(&self) -> bool {
        self.phase == WatchPhase::Ours
    }

    /// Returns the next action. After `Whole` or `Copy` the load needs no more looks.
    pub(crate) fn next(&mut self, seen: &LoadSeen, now: Instant) -> WatchVerdict {
        match self.phase {
            WatchPhase::Ahead | WatchPhase::Begun => self.with_sidecar(seen, now),
            WatchPhase::TakenBack(since) if now.duration_since(since) < DEVICE_LATENCY => WatchVerdict::Wait,
            WatchPhase::TakenBack(_) => {
                // The time counts from this look: this process may have been frozen since it closed the gate.
                self.phase = WatchPhase::Settling { since: now, began: seen.batches.began };
                self.next(seen, now)
            }
            WatchPhase::Settling { since, began } => {
                // Batches that began later belong to loads whose gate is open.
                let settled = seen.batches.ended.wrapping_sub(began).cast_signed() >= 0;
                if settled || seen.gone {
                    self.phase = WatchPhase::Ours;
                    return self.next(seen, now);
                }
                if now.duration_since(since) < SETTLE { WatchVerdict::Wait } else { WatchVerdict::GiveUp }
            }
            WatchPhase::Ours if !seen.reached => WatchVerdict::Wait,
            WatchPhase::Ours => WatchVerdict::Copy,
        }
    }

    fn with_sidecar(&mut self, seen: &LoadSeen, now: Instant) -> WatchVerdict {
        if seen.whole {
            return WatchVerdict::Whole;
        }
        if seen.refused {
            // There is nothing to take back.
            self.phase = WatchPhase::Ours;
            return self.next(seen, now);
        }
        if self.phase == WatchPhase::Ahead && seen.reached {
            self.phase = WatchPhase::Begun;
        }
        let progress = LoadProgress { ended: seen.batches.ended, cuts: seen.cuts };
        let late = self.phase == WatchPhase::Begun && self.patience.is_over(progress, now);
        if !seen.broken && !late {
            return WatchVerdict::Wait;
        }
        self.phase = WatchPhase::TakenBack(now);
        WatchVerdict::TakeBack
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::worker::patience::LOAD_DEADLINE;

    const NOTHING: LoadSeen = LoadSeen {
        reached: false,
        whole: false,
        refused: false,
        broken: false,
        batches: Batches { began: 7, ended: 7 },
        cuts: 0,
        gone: false,
    };
    const REACHED: LoadSeen = LoadSeen { reached: true, ..NOTHING };
    const RUNNING: LoadSeen = LoadSeen { batches: Batches { began: 8, ended: 7 }, ..REACHED };
    const MS: Duration = Duration::from_millis(1);

    fn start() -> Instant {
        crate::clock::read_clock()
    }

    fn promised() -> LoadWatch {
        LoadWatch::promised(CopyPatience::new(Duration::ZERO, 0))
    }

    /// A watch, and the instant at which its gate was closed.
    fn taken_back() -> (LoadWatch, Instant) {
        let (mut watch, now) = (promised(), start());
        assert_eq!(watch.next(&LoadSeen { broken: true, ..REACHED }, now), WatchVerdict::TakeBack);
        (watch, now)
    }

    #[test]
    fn a_load_is_left_to_the_sidecar_until_it_is_whole() {
        let (mut watch, now) = (promised(), start());
        assert_eq!(watch.next(&NOTHING, now), WatchVerdict::Wait);
        assert_eq!(watch.next(&RUNNING, now + MS), WatchVerdict::Wait);
        assert_eq!(
            watch.next(&LoadSeen { whole: true, broken: true, ..RUNNING }, now + 2 * MS),
            WatchVerdict::Whole
        );
    }

    #[test]
    fn the_deadline_counts_from_when_the_sidecar_could_begin() {
        let (mut watch, now) = (promised(), start());
        assert_eq!(watch.next(&NOTHING, now), WatchVerdict::Wait);
        let reached = now + 10 * LOAD_DEADLINE;
        assert_eq!(watch.next(&NOTHING, reached), WatchVerdict::Wait, "the engine was busy before");
        assert_eq!(watch.next(&REACHED, reached), WatchVerdict::Wait);
        assert_eq!(watch.next(&REACHED, reached + LOAD_DEADLINE - MS), WatchVerdict::Wait);
        assert_eq!(watch.next(&REACHED, reached + LOAD_DEADLINE), WatchVerdict::TakeBack);
    }

    #[test]
    fn a_load_is_taken_back_once_nothing_moves_any_more() {
        let (mut watch, now) = (promised(), start());
        let at = |ended| LoadSeen { batches: Batches { began: ended + 1, ended }, ..REACHED };
        for turn in 0..4_u32 {
            assert_eq!(watch.next(&at(turn.into()), now + (LOAD_DEADLINE - MS) * turn), WatchVerdict::Wait);
        }
        let stopped = now + (LOAD_DEADLINE - MS) * 3;
        assert_eq!(watch.next(&at(3), stopped + LOAD_DEADLINE - MS), WatchVerdict::Wait);
        assert_eq!(watch.next(&at(3), stopped + LOAD_DEADLINE), WatchVerdict::TakeBack);
    }

    #[test]
    fn a_late_look_finds_a_whole_load_whole() {
        let (mut watch, now) = (promised(), start());
        assert_eq!(watch.next(&REACHED, now), WatchVerdict::Wait);
        assert_eq!(
            watch.next(&LoadSeen { whole: true, ..REACHED }, now + 9 * LOAD_DEADLINE),
            WatchVerdict::Whole
        );
    }

    #[test]
    fn what_the_sidecar_refuses_is_not_taken_back() {
        let (mut watch, now) = (promised(), start());
        let refused = LoadSeen { refused: true, broken: true, ..NOTHING };
        assert_eq!(watch.next(&refused, now), WatchVerdict::Wait, "its blocks are not free yet");
        assert_eq!(watch.next(&LoadSeen { reached: true, ..refused }, now), WatchVerdict::Copy);
    }

    #[test]
    fn a_batch_that_began_is_awaited_and_a_later_one_is_not() {
        let (mut watch, closed) = taken_back();
        assert_eq!(
            watch.next(&REACHED, closed + DEVICE_LATENCY - MS),
            WatchVerdict::Wait,
            "its word may be late"
        );
        assert_eq!(watch.next(&RUNNING, closed + DEVICE_LATENCY), WatchVerdict::Wait);
        let busy = LoadSeen { batches: Batches { began: 90, ended: 7 }, ..REACHED };
        assert_eq!(watch.next(&busy, closed + SETTLE), WatchVerdict::Wait);
        let ended = LoadSeen { batches: Batches { began: 91, ended: 8 }, ..REACHED };
        assert_eq!(watch.next(&ended, closed + SETTLE), WatchVerdict::Copy);
    }

    #[test]
    fn a_batch_of_a_dead_sidecar_is_awaited_no_more() {
        let (mut watch, closed) = taken_back();
        let later = closed + DEVICE_LATENCY;
        assert_eq!(watch.next(&RUNNING, later), WatchVerdict::Wait);
        assert_eq!(watch.next(&LoadSeen { gone: true, ..RUNNING }, later), WatchVerdict::Copy);
    }

    #[test]
    fn a_batch_that_never_ends_ends_the_process() {
        let (mut watch, closed) = taken_back();
        let looked = closed + 10 * SETTLE;
        assert_eq!(watch.next(&RUNNING, looked), WatchVerdict::Wait, "this process was frozen meanwhile");
        assert_eq!(watch.next(&RUNNING, looked + SETTLE - MS), WatchVerdict::Wait);
        assert_eq!(watch.next(&RUNNING, looked + SETTLE), WatchVerdict::GiveUp);
    }

    #[test]
    fn blocks_are_not_touched_before_the_engine_gave_them_up() {
        let (mut watch, now) = (promised(), start());
        assert_eq!(watch.next(&LoadSeen { broken: true, ..NOTHING }, now), WatchVerdict::TakeBack);
        let gone = LoadSeen { gone: true, ..NOTHING };
        assert_eq!(watch.next(&gone, now + 10 * SETTLE), WatchVerdict::Wait);
        assert_eq!(watch.next(&LoadSeen { reached: true, ..gone }, now + 10 * SETTLE), WatchVerdict::Copy);
        let mut ours = LoadWatch::ours();
        assert_eq!(ours.next(&NOTHING, now + 10 * SETTLE), WatchVerdict::Wait);
        assert_eq!(ours.next(&REACHED, now + 10 * SETTLE), WatchVerdict::Copy);
    }
}
