//! A set of digests in two bytes each: a cuckoo filter (Fan and others, 2014) of 16-bit fingerprints, four to a bucket.
//!
//! - A digest inserted and not removed is contained, also after an insertion without room: such an insertion
//!   changes nothing.
//! - A digest not inserted is contained once in 8,200 times at a full filter (eight fingerprints are
//!   compared).
//! - A thinned filter ([`Thinning`]) keeps this promise for the digests kept by the thinning.
//! - A digest not inserted must not be removed: the removal could take the fingerprint of another.

use crate::digest::{Digest, Thinning};
use shm_protocol::random::Random;

/// Fingerprints of a bucket.
const WAYS: usize = 4;
/// A filter is full at this share of its places: beyond it, insertions move dozens of others and soon fail.
const LOAD_MAX: (usize, usize) = (95, 100);
/// Minimum buckets: in a smaller filter chance fills a pair of buckets long before the rest.
const BUCKETS_MIN: usize = 64;
/// Maximum fingerprints moved by an insertion. At the greatest load it moves some ten; of a thousand filters
/// filled to it, none needed as many.
const MOVES_MAX: usize = 512;
/// Digests looked up side by side, so that their cache misses overlap.
const BATCH: usize = 32;
/// One in each of the four places.
const ONES: u64 = 0x0001_0001_0001_0001;

#[derive(Clone, Debug)]
pub struct Filter {
    /// Four fingerprints in each; zero is a free place.
    buckets: Box<[u64]>,
    keys: usize,
    thinning: Thinning,
    random: Random,
}

/// The form of a digest in a filter: its fingerprint, and one of the two buckets for it.
#[derive(Copy, Clone, Debug)]
struct Print {
    fingerprint: u16,
    bucket: usize,
}

// === impl Filter ===

impl Filter {
    /// An empty filter for at least `keys`.
    pub fn with_capacity(keys: usize) -> Self {
        Self::thinned(keys, Thinning::NONE)
    }

    /// The same, for the digests kept by `thinning` alone.
    pub fn thinned(keys: usize, thinning: Thinning) -> Self {
        let buckets = (keys * LOAD_MAX.1).div_ceil(LOAD_MAX.0 * WAYS).max(BUCKETS_MIN);
        assert!(u32::try_from(buckets).is_ok(), "a filter's buckets are numbered in 32 bits");
        let random = Random(buckets as u64);
        Self { buckets: vec![0; buckets].into_boxed_slice(), keys: 0, thinning, random }
    }

    /// The thinning of its digests.
    pub fn thinning(&self) -> Thinning {
        self.thinning
    }

    pub fn len(&self) -> usize {
        self.keys
    }

    /// True without digests.
    pub fn is_empty(&self) -> bool {
        self.keys == 0
    }

    pub fn capacity(&self) -> usize {
        Self::capacity_of(self.bytes())
    }

    /// Maximum keys of a filter of so many bytes.
    pub fn capacity_of(bytes: usize) -> usize {
        bytes / size_of::<u64>() * WAYS * LOAD_MAX.0 / LOAD_MAX.1
    }

    pub fn bytes(&self) -> usize {
        self.buckets.len() * size_of::<u64>()
    }

    /// True if `digest` may have been inserted.
    #[inline]
    pub fn contains(&self, digest: Digest) -> bool {
        let Print { fingerprint, bucket } = self.print(digest);
        // Both are always read: a branch between them would keep the misses of two look-ups from overlapping.
        self.holds(bucket, fingerprint) | self.holds(self.other(fingerprint, bucket), fingerprint)
    }

    /// The number of leading digests that may have been inserted.
    ///
    /// Most lie in the first of their two buckets. A batch is looked up in those first, side by side, and
    /// then the rest of it in the others.
    pub fn leading(&self, digests: &[Digest]) -> usize {
        let mut found = 0;
        for batch in digests.chunks(BATCH) {
            let mut prints = [Print { fingerprint: 0, bucket: 0 }; BATCH];
            let mut missing = 0u32;
            for (at, (print, digest)) in prints.iter_mut().zip(batch).enumerate() {
                *print = self.print(*digest);
                missing |= u32::from(!self.holds(print.bucket, print.fingerprint)) << at;
            }
            let mut absent = 0u32;
            while missing != 0 {
                let at = missing.trailing_zeros();
                let Print { fingerprint, bucket } = prints[at as usize];
                absent |= u32::from(!self.holds(self.other(fingerprint, bucket), fingerprint)) << at;
                missing &= missing - 1;
            }
            if absent != 0 {
                return found + absent.trailing_zeros() as usize;
            }
            found += batch.len();
        }
        found
    }

    /// Inserts a digest, once more if it is in already. Returns false and changes nothing if there is no
    /// room.
    #[must_use = "a digest without room is not contained"]
    pub fn insert(&mut self, digest: Digest) -> bool {
        if self.keys >= self.capacity() {
            return false;
        }
        let Print { fingerprint, bucket } = self.print(digest);
        let other = self.other(fingerprint, bucket);
        let room = self.put(bucket, fingerprint) || self.put(other, fingerprint);
        let inserted = room || self.displace(fingerprint, other);
        self.keys += usize::from(inserted);
        inserted
    }

    /// Removes one insertion of a digest. Returns false if there is none.
    pub fn remove(&mut self, digest: Digest) -> bool {
        let Print { fingerprint, bucket } = self.print(digest);
        let other = self.other(fingerprint, bucket);
        let removed = self.take(bucket, fingerprint) || self.take(other, fingerprint);
        self.keys -= usize::from(removed);
        removed
    }

    #[inline]
    fn print(&self, digest: Digest) -> Print {
        let bucket = scale((digest.0 >> 32) as u32, self.buckets.len());
        Print { fingerprint: (digest.0 as u16).max(1), bucket }
    }

    /// The other bucket of a fingerprint in `bucket`. The two add up to a number derived from the
    /// fingerprint, so the function is its own inverse for any number of buckets.
    #[inline]
    fn other(&self, fingerprint: u16, bucket: usize) -> usize {
        let sum = scale(u32::from(fingerprint).wrapping_mul(0x9e37_79b1), self.buckets.len());
        if sum >= bucket { sum - bucket } else { sum + self.buckets.len() - bucket }
    }

    #[inline]
    fn holds(&self, bucket: usize, fingerprint: u16) -> bool {
        zeros(self.buckets[bucket] ^ (u64::from(fingerprint) * ONES)) != 0
    }

    fn put(&mut self, bucket: usize, fingerprint: u16) -> bool {
        let zeros = zeros(self.buckets[bucket]);
        if zeros != 0 {
            self.buckets[bucket] |= u64::from(fingerprint) << shift_of_first(zeros);
        }
        zeros != 0
    }

    fn take(&mut self, bucket: usize, fingerprint: u16) -> bool {
        let zeros = zeros(self.buckets[bucket] ^ (u64::from(fingerprint) * ONES));
        if zeros != 0 {
            self.buckets[bucket] &= !(0xffff << shift_of_first(zeros));
        }
        zeros != 0
    }

    /// Puts a fingerprint into a full bucket, moves the replaced one to its other bucket, and so on. Puts
    /// everything back if this finds no free place.
    fn displace(&mut self, fingerprint: u16, bucket: usize) -> bool {
        let (mut fingerprint, mut bucket) = (fingerprint, bucket);
        let mut path = [(0, 0); MOVES_MAX];
        for step in &mut path {
            *step = (bucket, self.random.next() as u32 % WAYS as u32 * u16::BITS);
            fingerprint = self.exchange(*step, fingerprint);
            bucket = self.other(fingerprint, bucket);
            if self.put(bucket, fingerprint) {
                return true;
            }
        }
        for step in path.iter().rev() {
            fingerprint = self.exchange(*step, fingerprint);
        }
        false
    }

    fn exchange(&mut self, (bucket, shift): (usize, u32), fingerprint: u16) -> u16 {
        let word = self.buckets[bucket];
        self.buckets[bucket] = word & !(0xffff << shift) | u64::from(fingerprint) << shift;
        (word >> shift) as u16
    }
}

/// Maps `value` in proportion to a number below `range`.
#[inline]
fn scale(value: u32, range: usize) -> usize {
    ((u64::from(value) * range as u64) >> u32::BITS) as usize
}

/// Not zero if one of the four places is free; the lowest bit set then lies in the first of them.
#[inline]
fn zeros(word: u64) -> u64 {
    word.wrapping_sub(ONES) & !word & (ONES << 15)
}

fn shift_of_first(zeros: u64) -> u32 {
    zeros.trailing_zeros() & !(u16::BITS - 1)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn digests(seed: u64) -> impl Iterator<Item = Digest> {
        let mut random = Random(seed);
        std::iter::repeat_with(move || Digest(random.next()))
    }

    #[test]
    fn takes_what_it_was_made_for_and_contains_all_of_it() {
        for keys in [0, 1, 3, 100, 243, 244, 1000, 4099, 20_000] {
            for seed in 0..8 {
                let mut filter = Filter::with_capacity(keys);
                let capacity = filter.capacity();
                assert!(capacity >= keys);
                assert!(
                    digests(seed).take(capacity).all(|digest| filter.insert(digest)),
                    "{keys}, seed {seed}"
                );
                assert_eq!(filter.len(), capacity);
                assert!(!filter.insert(Digest(seed)), "it is full");
                assert!(digests(seed).take(capacity).all(|digest| filter.contains(digest)));
                let all: Vec<Digest> = digests(seed).take(capacity).collect();
                assert_eq!(filter.leading(&all), capacity);
                assert!(digests(seed).take(capacity).all(|digest| filter.remove(digest)));
                assert!(filter.is_empty() && filter.buckets.iter().all(|bucket| *bucket == 0));
            }
        }
    }

    #[test]
    fn a_leading_run_ends_where_the_first_digest_is_missing() {
        let all: Vec<Digest> = digests(3).take(300).collect();
        let mut filter = Filter::with_capacity(300);
        assert!(all.iter().all(|digest| filter.insert(*digest)));
        for at in (0..300).rev() {
            assert!(filter.remove(all[at]));
            assert_eq!(filter.leading(&all), at);
            assert_eq!(filter.leading(&all[..at]), at);
        }
    }

    #[test]
    fn a_full_filter_is_wrong_about_others_as_often_as_its_fingerprints_say() {
        let mut filter = Filter::with_capacity(100_000);
        assert!(digests(1).take(100_000).all(|digest| filter.insert(digest)));
        let wrong = digests(2).take(1_000_000).filter(|digest| filter.contains(*digest)).count();
        // Eight places at 95 % of 2^16 values: 116 in a million.
        assert!((60..200).contains(&wrong), "{wrong} of a million");
        assert!(filter.bytes() as f64 / 100_000.0 < 2.2);
    }

    #[test]
    fn an_insertion_that_finds_no_room_changes_nothing() {
        let mut filter = Filter::with_capacity(0);
        // One fingerprint in one bucket: its two buckets take eight, or four if they are one.
        let same = Digest(5 << 60 | 77);
        while filter.insert(same) {}
        assert!(filter.len() == 8 || filter.len() == 4);
        let mut kept: Vec<Digest> = vec![same; filter.len()];
        // Others with these buckets alone are refused, and digests already in stay in.
        for digest in digests(9).take(filter.capacity() * 2) {
            if filter.insert(digest) {
                kept.push(digest);
            }
            assert!(!filter.insert(same));
        }
        assert_eq!(filter.len(), kept.len());
        assert!(kept.iter().all(|digest| filter.contains(*digest)));
        assert!(kept.iter().all(|digest| filter.remove(*digest)));
        assert!(filter.is_empty());
    }

    #[test]
    fn random_insertions_and_removals_never_lose_a_key() {
        for seed in 0..6 {
            let mut random = Random(seed);
            let mut filter = Filter::with_capacity(600);
            let mut model: HashMap<u64, usize> = HashMap::new();
            for _ in 0..10_000 {
                // Few digests, so many are in more than once and share fingerprints.
                let number = random.next() % 800;
                let digest = Digest(shm_protocol::random::mix(number % 400) & !0xfff0);
                let count = model.entry(digest.0).or_default();
                if random.next().is_multiple_of(2) {
                    *count += usize::from(filter.insert(digest));
                } else if *count > 0 {
                    assert!(filter.remove(digest), "seed {seed}");
                    *count -= 1;
                }
            }
            for (digest, count) in &model {
                assert!(*count == 0 || filter.contains(Digest(*digest)), "seed {seed}");
            }
            assert_eq!(filter.len(), model.values().sum::<usize>(), "seed {seed}");
        }
    }
}
