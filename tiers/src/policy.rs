//! Which block goes: S3-FIFO, per block size, or among the blocks of one quota.
//!
//! A new block enters the small queue, three tenths of its class; one that was asked for by the time it reaches the
//! tail moves to the main queue, any other is evicted and remembered in the ghost. A block that comes back while the
//! ghost remembers it enters the main queue. There, a block at the tail goes round again once for every access, up
//! to three. A leased or held block that reaches a tail leaves the queues until nothing holds it: it is never evicted,
//! and is met at most once per lease or hold.

use crate::index::Print;
use crate::quota::QuotaId;
use crate::slab::{Place, Slab};

/// Accesses that are counted, as in the S3-FIFO paper.
const ACCESSES_MAX: u8 = 3;
/// Accesses that bring a block from the small queue to the main one. Beside a GPU's own cache, one is a conversation that
/// goes on.
const PROMOTED_FROM: u8 = 1;
/// The small queue's part: 3 of 10. In a tenth, as the paper has it, a conversation's blocks do not last until its next turn;
/// see `policy` in benches/README.md.
const SMALL_PART: (u64, u64) = (3, 10);
/// Blocks looked at before the next unleased one goes, whatever its accesses. Bounds one eviction to some 20 us; where
/// every block of a class is hot, one in so many goes too early.
pub(crate) const SCANS_MAX: u32 = 256;
/// Fingerprints of one set of the ghost: one cache line.
const GHOST_WAYS: usize = 16;

/// The policy's own memory: keys that were evicted from a small queue, in sets that each forget their oldest.
#[derive(Debug, Default)]
pub(crate) struct Ghost {
    sets: Box<[GhostSet]>,
    /// Slots that the sets were made for.
    slots: u64,
}

#[repr(C, align(64))]
#[derive(Copy, Clone, Debug, Default)]
struct GhostSet([u32; GHOST_WAYS]);

/// The blocks one of which must go.
#[derive(Copy, Clone, Debug)]
pub(crate) enum Among {
    /// All of one size.
    Class(usize),
    /// All that count to one quota.
    Quota(QuotaId),
}

/// A block that must go.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Verdict {
    pub(crate) entry: u32,
    /// Whether the ghost should remember it.
    pub(crate) remember: bool,
}

// === impl Ghost ===

impl Ghost {
    /// Makes room for the main queues of `slots` slots. The number settles before the first eviction; where it changes
    /// much later, what was remembered is forgotten.
    fn fit(&mut self, slots: u64) {
        if self.slots < slots / 2 || self.slots > slots.saturating_mul(2) || self.sets.is_empty() {
            let sets = (slots - small_part(slots)).div_ceil(GHOST_WAYS as u64).max(1);
            self.sets = vec![GhostSet::default(); sets as usize].into_boxed_slice();
            self.slots = slots;
        }
    }

    fn set(&mut self, print: Print) -> Option<&mut GhostSet> {
        let set = (u64::from(print.tag()) * self.sets.len() as u64) >> 32;
        self.sets.get_mut(set as usize)
    }

    /// Remembers an evicted key.
    pub(crate) fn remember(&mut self, print: Print, slots: u64) {
        self.fit(slots);
        if let Some(GhostSet(ways)) = self.set(print) {
            ways.copy_within(..GHOST_WAYS - 1, 1);
            ways[0] = fingerprint(print);
        }
    }

    /// Whether the key was remembered; it is not any more.
    pub(crate) fn recall(&mut self, print: Print) -> bool {
        let Some(GhostSet(ways)) = self.set(print) else { return false };
        match ways.iter().position(|way| *way == fingerprint(print)) {
            Some(way) => {
                ways.copy_within(way + 1.., way);
                ways[GHOST_WAYS - 1] = 0;
                true
            }
            None => false,
        }
    }
}

/// Never zero, as a tag is not.
fn fingerprint(print: Print) -> u32 {
    print.tag()
}

// === S3-FIFO ===

fn small_part(slots: u64) -> u64 {
    slots * SMALL_PART.0 / SMALL_PART.1
}

/// Counts an access.
#[inline]
pub(crate) fn touch(accesses: &mut u8) {
    *accesses = (*accesses + 1).min(ACCESSES_MAX);
}

/// Puts a block that was just committed into a queue.
pub(crate) fn admit(slab: &mut Slab, entry: u32, remembered: bool) {
    slab.move_to(entry, if remembered { Place::Main } else { Place::Small });
}

/// Puts a block whose last lease has ended back into a queue, if it had left: in use when its turn came, it has earned
/// the main one.
pub(crate) fn unpinned(slab: &mut Slab, entry: u32) {
    if slab.entries.get(entry).place == Place::Detached {
        slab.move_to(entry, Place::Main);
    }
}

/// The same for a block that was held and not used: of itself that earns it nothing.
pub(crate) fn unheld(slab: &mut Slab, entry: u32) {
    if slab.entries.get(entry).place == Place::Detached {
        admit(slab, entry, slab.entries.get(entry).accesses >= PROMOTED_FROM);
    }
}

/// The block that goes next, left in its queue; `None` if every one is leased or being filled.
pub(crate) fn next(slab: &mut Slab, among: Among) -> Option<Verdict> {
    let mut scans = 0;
    loop {
        let (queues, slots) = slab.queues(among);
        let small_max = small_part(slots).max(1);
        let small = u64::from(queues.small.len()) >= small_max || queues.main.len() == 0;
        let entry = if small { queues.small.tail() } else { queues.main.tail() };
        // The main queue is empty whenever the small one was looked at and found empty.
        let entry = entry?;
        let block = slab.entries.get_mut(entry);
        if block.pins > 0 {
            slab.move_to(entry, Place::Detached);
            continue;
        }
        let forced = scans >= SCANS_MAX;
        if small && (block.accesses < PROMOTED_FROM || forced) {
            return Some(Verdict { entry, remember: true });
        }
        if !small && (block.accesses == 0 || forced) {
            return Some(Verdict { entry, remember: false });
        }
        block.accesses = if small { 0 } else { block.accesses - 1 };
        slab.move_to(entry, Place::Main);
        scans += 1;
    }
}

#[cfg(test)]
mod tests {
    use shm_protocol::key::BlockHash;

    use super::*;

    fn print(number: u64) -> Print {
        Print::new(0, 0, &BlockHash::from_words([number, 0, 0, 0]))
    }

    #[test]
    fn a_ghost_remembers_about_as_many_keys_as_main_has_slots_and_each_once() {
        let mut ghost = Ghost::default();
        assert!(!ghost.recall(print(1)));
        for number in 0..10_000 {
            ghost.remember(print(number), 1000);
        }
        let recalled: Vec<u64> = (0..10_000).filter(|number| ghost.recall(print(*number))).collect();
        assert!((600..=704).contains(&recalled.len()), "{}", recalled.len());
        assert!(recalled.iter().all(|number| *number > 6_000), "the youngest are remembered");
        assert!(!recalled.iter().any(|number| ghost.recall(print(*number))));
    }
}
