//! Shares a GPU's link by bytes among this sidecar's ranks with loads into it; the number of waiting batches
//! does not matter. No GPU is used here.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::system::clock::Clock;

/// Bytes by which a rank may exceed the least served active rank: two batches, 5 ms on the wire.
const LEAD_BYTES_MAX: u64 = 256 << 20;
/// A rank whose last batch ended longer ago is not active, and others do not wait for it: its stream may be
/// stuck. A batch alone takes 2.4 ms.
const ACTIVE: Duration = Duration::from_millis(50);

/// The link of each served GPU, by its UUID.
#[derive(Debug)]
pub(in crate::copiers) struct GpuLinks {
    clock: Clock,
    links: Mutex<BTreeMap<[u8; 16], Arc<Mutex<GpuLink>>>>,
}

/// A rank's use of its GPU's link, given up on drop.
#[derive(Debug)]
pub(in crate::copiers) struct LinkPlace {
    rank: u64,
    link: Arc<Mutex<GpuLink>>,
    pub(super) clock: Clock,
}

/// A rank's permission.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(super) enum RankTurn {
    /// Enqueue a large batch: no other rank is active.
    Alone,
    Shared,
    /// Wait until other ranks have moved as many bytes.
    Later,
}

/// The ranks of one GPU.
#[derive(Debug, Default)]
struct GpuLink {
    ranks: BTreeMap<u64, Share>,
    next: u64,
}

/// The bytes moved by a rank.
#[derive(Debug, Default)]
struct Share {
    bytes: u64,
    waits: bool,
    /// Time of its last end of a batch.
    ended: Option<Duration>,
}

// === impl GpuLinks ===

impl GpuLinks {
    pub(in crate::copiers) fn new() -> Self {
        Self { clock: Clock::start_now(), links: Mutex::default() }
    }

    /// Adds a rank to a GPU's link.
    pub(in crate::copiers) fn enter_rank(&self, gpu: [u8; 16]) -> LinkPlace {
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        let link = Arc::clone(links.entry(gpu).or_default());
        let rank = link.lock().unwrap_or_else(PoisonError::into_inner).add_rank();
        LinkPlace { rank, link, clock: self.clock }
    }
}

// === impl LinkPlace ===

impl LinkPlace {
    /// The permission of a rank with a batch to enqueue.
    pub(super) fn ask_turn(&self) -> RankTurn {
        self.link().rank_turn(self.rank, self.clock.now())
    }

    /// Marks the rank as idle.
    pub(super) fn note_idle(&self) {
        self.link().share(self.rank).waits = false;
    }

    /// Counts an enqueued batch.
    pub(super) fn enqueued(&self, bytes: u64) {
        self.link().share(self.rank).bytes += bytes;
    }

    pub(super) fn note_ended(&self) {
        self.link().share(self.rank).ended = Some(self.clock.now());
    }

    fn link(&self) -> MutexGuard<'_, GpuLink> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LinkPlace {
    fn drop(&mut self) {
        self.link().ranks.remove(&self.rank);
    }
}

// === impl GpuLink ===

impl GpuLink {
    fn add_rank(&mut self) -> u64 {
        self.next += 1;
        self.ranks.insert(self.next, Share::default());
        self.next
    }

    fn share(&mut self, rank: u64) -> &mut Share {
        self.ranks.get_mut(&rank).expect("it has a place")
    }

    fn rank_turn(&mut self, rank: u64, now: Duration) -> RankTurn {
        let active = self.ranks.iter().filter(|(other, share)| **other != rank && share.is_active(now));
        let least = active.map(|(_, share)| share.bytes).min();
        let share = self.share(rank);
        if !share.is_active(now) {
            // An idle rank saves up no bytes for later.
            share.bytes = share.bytes.max(least.unwrap_or(0));
        }
        share.waits = true;
        match least {
            None => RankTurn::Alone,
            Some(least) if share.bytes < least + LEAD_BYTES_MAX => RankTurn::Shared,
            Some(_) => RankTurn::Later,
        }
    }
}

// === impl Share ===

impl Share {
    fn is_active(&self, now: Duration) -> bool {
        self.waits && self.ended.is_some_and(|ended| now.saturating_sub(ended) <= ACTIVE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATCH: u64 = 128 << 20;
    const MS: Duration = Duration::from_millis(1);

    /// The ranks of a GPU; each batch takes a millisecond.
    #[derive(Default)]
    struct Wire {
        link: GpuLink,
        now: Duration,
    }

    impl Wire {
        /// The number of batches a rank may enqueue now, each of which ends at once.
        fn moves(&mut self, rank: u64, wanted: usize) -> usize {
            let may = |wire: &mut Self| {
                let may = wire.link.rank_turn(rank, wire.now) != RankTurn::Later;
                if may {
                    wire.link.share(rank).bytes += BATCH;
                    wire.link.share(rank).ended = Some(wire.now);
                }
                may
            };
            (0..wanted).take_while(|_| may(self)).count()
        }
    }

    #[test]
    fn a_rank_alone_never_waits() {
        let mut wire = Wire::default();
        let (alone, idle) = (wire.link.add_rank(), wire.link.add_rank());
        assert_eq!(wire.moves(alone, 1000), 1000);
        wire.moves(idle, 1);
        wire.link.share(idle).waits = false;
        assert_eq!(wire.moves(alone, 1000), 1000, "others do not wait for an idle rank");
    }

    #[test]
    fn ranks_get_equal_bytes_however_much_each_wants() {
        let mut wire = Wire::default();
        let (greedy, modest) = (wire.link.add_rank(), wire.link.add_rank());
        wire.moves(greedy, 100);
        wire.moves(modest, 1);
        let (mut many, mut few) = (0, 0);
        for _ in 0..100 {
            wire.now += MS;
            many += wire.moves(greedy, 8);
            few += wire.moves(modest, 1);
        }
        assert_eq!(few, 100);
        assert!((99..=103).contains(&many), "{many}");
    }

    #[test]
    fn who_comes_back_does_not_make_up_for_its_rest() {
        let mut wire = Wire::default();
        let (steady, returning) = (wire.link.add_rank(), wire.link.add_rank());
        wire.moves(returning, 1);
        wire.link.share(returning).waits = false;
        wire.moves(steady, 1000);
        wire.now += 10 * MS;
        assert_eq!(wire.moves(returning, 1000), 2, "two batches ahead of the other");
        assert_eq!(wire.moves(steady, 1000), 4);
    }

    #[test]
    fn a_rank_whose_batches_do_not_end_holds_nobody_up_for_long() {
        let mut wire = Wire::default();
        let (stuck, moving) = (wire.link.add_rank(), wire.link.add_rank());
        wire.moves(stuck, 1);
        wire.moves(moving, 1);
        assert!(wire.moves(moving, 1000) < 3);
        wire.now += ACTIVE;
        assert_eq!(wire.moves(moving, 1000), 0);
        wire.now += MS;
        assert_eq!(wire.moves(moving, 1000), 1000);
        wire.now += MS;
        wire.moves(stuck, 1);
        assert!(wire.moves(moving, 1000) > 0, "it starts at the bytes of the others");
    }
}
