//! Keys of evicted blocks: a key that comes back while it is remembered has been used.

use crate::index::Print;

/// The ghost's part of the slots, in keys: 7 of 10.
const GHOST_PART: (u64, u64) = (7, 10);
/// Fingerprints of one set of the ghost: one cache line.
const GHOST_WAYS: usize = 16;

/// Keys of evicted blocks, in sets; each set forgets its oldest.
#[derive(Debug, Default)]
pub(super) struct Ghost {
    sets: Box<[GhostSet]>,
    /// The number of slots at the making of the sets.
    slots: u64,
}

#[repr(C, align(64))]
#[derive(Copy, Clone, Debug, Default)]
struct GhostSet([u32; GHOST_WAYS]);

// === impl Ghost ===

impl Ghost {
    /// Makes room for the keys of `slots` slots. The number settles before the first eviction; a large later
    /// change forgets all remembered keys.
    fn fit(&mut self, slots: u64) {
        if self.slots < slots / 2 || self.slots > slots.saturating_mul(2) || self.sets.is_empty() {
            let sets = (slots * GHOST_PART.0 / GHOST_PART.1).div_ceil(GHOST_WAYS as u64).max(1);
            self.sets = vec![GhostSet::default(); sets as usize].into_boxed_slice();
            self.slots = slots;
        }
    }

    fn set(&mut self, print: Print) -> Option<&mut GhostSet> {
        let place = print.place(self.sets.len());
        self.sets.get_mut(place)
    }

    /// Returns one fingerprint of a key's set.
    pub(super) fn load(&self, print: Print) -> u64 {
        self.sets.get(print.place(self.sets.len())).map_or(0, |GhostSet(ways)| ways[0].into())
    }

    /// Remembers an evicted key.
    pub(super) fn remember(&mut self, print: Print, slots: u64) {
        self.fit(slots);
        if let Some(GhostSet(ways)) = self.set(print) {
            ways.copy_within(..GHOST_WAYS - 1, 1);
            ways[0] = fingerprint(print);
        }
    }

    /// Forgets a key. Returns true if it was remembered.
    pub(super) fn recall(&mut self, print: Print) -> bool {
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

/// Returns the fingerprint. It is never zero, since no tag is.
fn fingerprint(print: Print) -> u32 {
    print.tag()
}

#[cfg(test)]
mod tests {
    use shm_protocol::key::BlockHash;

    use super::*;

    fn print(number: u64) -> Print {
        Print::new(0, 0, &BlockHash::from_words([number, 0, 0, 0]))
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
