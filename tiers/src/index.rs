//! The map from a key to the number of its entry: open addressing in cache-line buckets.
//!
//! The table holds (tag, entry) words only; the caller compares the full key in the entry. Each of 1,024
//! shards grows by itself, by half, so the longest stall of an insertion is the rehash of one shard (about
//! 100,000 words, some 2 ms, at 10^8 keys). The rehash needs no entry: a word's place follows from its tag.

use shm_protocol::key::{BlockHash, BlockKey};

/// Words of a bucket: one cache line.
const BUCKET_WORDS: usize = 8;
/// Shards, a power of two: more would cost memory in an empty index, fewer would lengthen a rehash.
const SHARDS: usize = 1024;
const SHARD_SHIFT: u32 = u64::BITS - SHARDS.trailing_zeros();
/// A shard grows when more than 3 of 4 words are used: beyond that too many buckets overflow.
const LOAD_MAX: (usize, usize) = (3, 4);
/// Odd constants (fractions of pi) that keep the folded products away from zero.
const MIX: [u64; 5] = [
    0x243f_6a88_85a3_08d3,
    0x1319_8a2e_0370_7344,
    0xa409_3822_299f_31d1,
    0x082e_fa98_ec4e_6c89,
    0x4528_21e6_38d0_1377,
];

/// The digest of a key: the shard in its high bits, the tag in its low ones.
#[derive(Copy, Clone, Debug, Default, Eq, Hash, PartialEq)]
pub(crate) struct Print(u64);

/// The result of one look at a key's home bucket: the one entry with its tag, if any.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Glance {
    /// The entry to compare with, or [`NO_ENTRY`].
    pub(crate) entry: u32,
    /// Several entries have the tag, or the key may lie in a later bucket: call [`Index::find`].
    pub(crate) unsure: bool,
}

/// No entry has this number.
pub(crate) const NO_ENTRY: u32 = u32::MAX;

/// Words whose tags have this home, and words displaced from full buckets before it.
#[repr(C, align(64))]
#[derive(Copy, Clone, Debug, Default)]
pub(crate) struct Bucket([u64; BUCKET_WORDS]);

#[derive(Clone, Debug)]
struct Shard {
    buckets: Box<[Bucket]>,
    used: usize,
}

#[derive(Debug)]
pub(crate) struct Index {
    shards: Box<[Shard]>,
}

// === impl Print ===

fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    product as u64 ^ (product >> 64) as u64
}

impl Print {
    #[inline]
    pub(crate) fn new(namespace: u32, group: u32, hash: &BlockHash) -> Self {
        let words = hash.words();
        let place = u64::from(namespace) << 32 | u64::from(group);
        let left = fold(words[0] ^ MIX[0], words[1] ^ MIX[1]);
        let right = fold(words[2] ^ MIX[2], words[3] ^ place ^ MIX[3]);
        Self(fold(left ^ right.rotate_left(32), place ^ MIX[4]))
    }

    #[inline]
    pub(crate) fn of(key: &BlockKey) -> Self {
        Self::new(key.namespace, key.group, &key.hash)
    }

    #[inline]
    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    #[inline]
    fn shard(self) -> usize {
        (self.0 >> SHARD_SHIFT) as usize
    }

    /// Returns the tag. It is never zero, so an unused word matches no tag. Its low bits also serve the ghost
    /// queue.
    #[inline]
    pub(crate) fn tag(self) -> u32 {
        self.0 as u32 | 1
    }

    /// Returns the key's place in a table of so many sets.
    #[inline]
    pub(crate) fn place(self, sets: usize) -> usize {
        home(self.tag(), sets)
    }
}

// === impl Shard ===

#[inline]
fn home(tag: u32, buckets: usize) -> usize {
    ((u64::from(tag) * buckets as u64) >> 32) as usize
}

fn word(tag: u32, entry: u32) -> u64 {
    u64::from(tag) << 32 | u64::from(entry)
}

fn tag_of(word: u64) -> u32 {
    (word >> 32) as u32
}

impl Shard {
    fn new(buckets: usize) -> Self {
        Self { buckets: vec![Bucket::default(); buckets].into_boxed_slice(), used: 0 }
    }

    fn after(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() { 0 } else { bucket + 1 }
    }

    /// Returns the number of buckets from `from` forward to `to`, around the end.
    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.buckets.len() - from }
    }

    fn insert(&mut self, word: u64) {
        let mut at = home(tag_of(word), self.buckets.len());
        loop {
            if let Some(free) = self.buckets[at].0.iter_mut().find(|slot| **slot == 0) {
                *free = word;
                self.used += 1;
                return;
            }
            at = self.after(at);
        }
    }

    fn grow(&mut self) {
        let buckets = self.buckets.len();
        let mut larger = Self::new(buckets + buckets.div_ceil(2));
        for bucket in &self.buckets {
            bucket.0.iter().filter(|word| **word != 0).for_each(|word| larger.insert(*word));
        }
        *self = larger;
    }

    /// Takes `word` out, and moves words back so no bucket on a word's way from its home has room.
    fn remove(&mut self, word: u64) -> bool {
        let mut at = home(tag_of(word), self.buckets.len());
        let position = loop {
            if let Some(position) = self.buckets[at].0.iter().position(|other| *other == word) {
                break position;
            }
            if self.buckets[at].0.contains(&0) {
                return false;
            }
            at = self.after(at);
        };
        self.used -= 1;
        let full = !self.buckets[at].0.contains(&0);
        self.buckets[at].0[position] = 0;
        if full {
            self.fill_hole(at, position);
        }
        true
    }

    fn fill_hole(&mut self, mut hole: usize, mut position: usize) {
        let mut from = self.after(hole);
        while from != hole {
            let full = !self.buckets[from].0.contains(&0);
            let way = self.distance(hole, from);
            let passed =
                |word: u64| word != 0 && self.distance(home(tag_of(word), self.buckets.len()), from) >= way;
            let moved = self.buckets[from].0.iter().position(|word| passed(*word));
            if let Some(moved) = moved {
                self.buckets[hole].0[position] = std::mem::take(&mut self.buckets[from].0[moved]);
                (hole, position) = (from, moved);
            }
            if !full {
                return;
            }
            from = self.after(from);
        }
    }
}

// === impl Bucket ===

impl Bucket {
    pub(crate) const NONE: &Self = &Self([0; BUCKET_WORDS]);

    /// Loads one word. In a loop of such calls alone, their cache misses are in flight together: a prefetch
    /// in safe code.
    #[inline]
    pub(crate) fn load(&self) -> u64 {
        self.0[0]
    }

    /// Looks once at a key's home, without a branch on its content.
    #[inline]
    pub(crate) fn glance(&self, print: Print) -> Glance {
        let (mut entry, mut matches, mut unused) = (0u32, 0u32, 0u32);
        for word in self.0 {
            let same = u32::from(tag_of(word) == print.tag());
            entry |= word as u32 & same.wrapping_neg();
            matches += same;
            unused += u32::from(word == 0);
        }
        // Words hold the number plus one: none wraps to NO_ENTRY.
        Glance { entry: entry.wrapping_sub(1), unsure: (matches > 1) | ((matches == 0) & (unused == 0)) }
    }
}

// === impl Index ===

impl Index {
    /// The largest entry number.
    pub(crate) const ENTRY_MAX: u32 = u32::MAX - 1;

    pub(crate) fn new() -> Self {
        Self { shards: vec![Shard::new(1); SHARDS].into_boxed_slice() }
    }

    /// Adds an entry under a new key.
    pub(crate) fn insert(&mut self, print: Print, entry: u32) {
        debug_assert!(entry <= Self::ENTRY_MAX, "zero marks an unused word");
        let shard = &mut self.shards[print.shard()];
        if (shard.used + 1) * LOAD_MAX.1 > shard.buckets.len() * BUCKET_WORDS * LOAD_MAX.0 {
            shard.grow();
        }
        shard.insert(word(print.tag(), entry + 1));
    }

    /// Takes an entry out; returns false if it is not there.
    pub(crate) fn remove(&mut self, print: Print, entry: u32) -> bool {
        self.shards[print.shard()].remove(word(print.tag(), entry + 1))
    }

    /// Returns the key's home bucket. The key lies there, unless the bucket was full.
    #[inline]
    pub(crate) fn home(&self, print: Print) -> &Bucket {
        let shard = &self.shards[print.shard()];
        &shard.buckets[print.place(shard.buckets.len())]
    }

    /// Returns the entry with the tag for which `same` holds.
    pub(crate) fn find(&self, print: Print, mut same: impl FnMut(u32) -> bool) -> Option<u32> {
        let shard = &self.shards[print.shard()];
        let mut at = print.place(shard.buckets.len());
        loop {
            for word in shard.buckets[at].0 {
                if tag_of(word) == print.tag() && same(word as u32 - 1) {
                    return Some(word as u32 - 1);
                }
            }
            if shard.buckets[at].0.contains(&0) {
                return None;
            }
            at = shard.after(at);
        }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.used).sum()
    }
}

#[cfg(test)]
mod tests;
