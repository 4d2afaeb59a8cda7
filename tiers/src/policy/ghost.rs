//! Remembered keys of evicted blocks. A block that is stored again while its key is remembered counts as
//! used: requests wanted it again soon after its eviction.
//!
//! The memory has room for 7 keys for every 10 slots of the cache, in sets of 16. A full set forgets its
//! oldest key for each new one.

use crate::index::KeyPrint;

/// Remembered keys for each slot of the cache: 7 for 10.
const GHOST_PART: (u64, u64) = (7, 10);
/// Fingerprints in one set: a cache line.
const GHOST_WAYS: usize = 16;

/// Fingerprints of the keys evicted last.
#[derive(Debug, Default)]
pub(super) struct Ghost {
    sets: Box<[GhostSet]>,
    /// Slots of the cache for which the sets were made.
    slots: u64,
}

/// Fingerprints, the newest first; 0 is a free place.
#[repr(C, align(64))]
#[derive(Copy, Clone, Debug, Default)]
struct GhostSet([u32; GHOST_WAYS]);

// === impl Ghost ===

impl Ghost {
    /// Makes the sets for a cache of `slots` slots. If they were made for less than half or more than twice
    /// as many slots, they are made again, and all keys are forgotten. The number of slots hardly changes
    /// after the first eviction.
    fn fit(&mut self, slots: u64) {
        if self.slots < slots / 2 || self.slots > slots.saturating_mul(2) || self.sets.is_empty() {
            let sets = (slots * GHOST_PART.0 / GHOST_PART.1).div_ceil(GHOST_WAYS as u64).max(1);
            self.sets = vec![GhostSet::default(); sets as usize].into_boxed_slice();
            self.slots = slots;
        }
    }

    fn set_of(&mut self, print: KeyPrint) -> Option<&mut GhostSet> {
        let place = print.set_index(self.sets.len());
        self.sets.get_mut(place)
    }

    /// Returns a word of the key's set, to bring the set into the processor's cache.
    pub(super) fn load_set(&self, print: KeyPrint) -> u64 {
        self.sets.get(print.set_index(self.sets.len())).map_or(0, |GhostSet(ways)| ways[0].into())
    }

    /// Remembers an evicted key.
    pub(super) fn remember(&mut self, print: KeyPrint, slots: u64) {
        self.fit(slots);
        if let Some(GhostSet(ways)) = self.set_of(print) {
            ways.copy_within(..GHOST_WAYS - 1, 1);
            ways[0] = fingerprint(print);
        }
    }

    /// Returns true if a key is remembered, and forgets it: a second call returns false, until the key is
    /// evicted again.
    pub(super) fn recall(&mut self, print: KeyPrint) -> bool {
        let Some(GhostSet(ways)) = self.set_of(print) else { return false };
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

/// Returns the fingerprint of a key: its tag, which is never zero.
fn fingerprint(print: KeyPrint) -> u32 {
    print.tag()
}

#[cfg(test)]
mod tests {
    use shm_protocol::key::BlockHash;

    use super::*;

    fn print(number: u64) -> KeyPrint {
        KeyPrint::new(0, 0, &BlockHash::from_words([number, 0, 0, 0]))
    }

    #[test]
    fn a_ghost_remembers_seven_keys_for_ten_slots_and_each_once() {
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
