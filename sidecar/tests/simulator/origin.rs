//! The origin of every byte. A block of KV is a pure function of (namespace, key, shard), so each of its
//! words is a digest of these in the simulator: every word shows its origin, and wrong bytes cannot look
//! right.
//!
//! A word is two numbers of binary32 with random last bits, different at each computation. A model of other
//! weights under equal facts makes other numbers; its blocks pass as their key's blocks until a check
//! compares them.

use std::cell::Cell;
use std::ops::Range;

use shm_protocol::key::{BlockHash, NamespaceDigest};

use crate::rng::mix;

/// Words in place of a block's bytes on one rank: a running copy can be torn at each.
pub(crate) const WORDS: usize = 3;
/// Two numbers from 1 to 2.
const ONES: u64 = 0x3f80_0000_3f80_0000;
/// The bits of their fractions that depend on the key.
const FRACTIONS: u64 = 0x007f_fff8_007f_fff8;
/// Random bits.
const NOISE: u64 = 0x0000_0007_0000_0007;
/// Added to the shard for a model of other weights.
const OTHER_WEIGHTS: u32 = 1 << 16;
/// Set in words of no key: KV computed from missing blocks, or from KV of two generations.
const TAINT: u64 = 1 << 63;

/// The contents of a block.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Origin {
    pub(crate) digest: NamespaceDigest,
    pub(crate) hash: BlockHash,
    pub(crate) shard: u32,
}

/// One rank's KV blocks. They outlive their process while the sidecar holds the descriptor.
#[derive(Debug)]
pub(crate) struct Kv {
    words: Vec<Cell<u64>>,
}

// === impl Origin ===

impl Origin {
    /// Word `index` of the block.
    pub(crate) fn word(&self, index: usize) -> u64 {
        let parts = self.digest.words().into_iter().chain(self.hash.words());
        let seed = mix(u64::from(self.shard) << 8 | index as u64);
        parts.fold(seed, |state, part| mix(state ^ part)) & FRACTIONS | ONES
    }

    /// The same key's KV in a model of other weights.
    pub(crate) fn of_other_weights(self) -> Self {
        Self { shard: self.shard + OTHER_WEIGHTS, ..self }
    }

    /// Panics unless `word` gives these words of the block, from either model. Returns for each word true if
    /// other weights made it.
    pub(crate) fn check(
        &self,
        words: Range<usize>,
        place: impl Fn() -> String,
        word: impl Fn(usize) -> u64,
    ) -> Vec<bool> {
        let other = self.of_other_weights();
        let check = |index: usize| match word(index) & !NOISE {
            found if found == self.word(index) => false,
            found if found == other.word(index) => true,
            _ => self.fail(words.clone(), place(), &word),
        };
        words.clone().map(check).collect()
    }

    fn fail(&self, words: Range<usize>, place: String, word: impl Fn(usize) -> u64) -> ! {
        let found: Vec<u64> = words.map(word).collect();
        let tainted = found.iter().any(|found| found & TAINT != 0);
        let tainted = if tainted { ", which was computed on broken KV" } else { "" };
        panic!("wrong bytes: {place}: {found:#x?}{tainted}, not {self:?}");
    }
}

/// A computed word of these numbers.
pub(crate) fn with_noise(word: u64, random: u64) -> u64 {
    word | random & NOISE
}

/// A word of no key.
pub(crate) fn taint(count: u64) -> u64 {
    TAINT | count
}

// === impl Kv ===

impl Kv {
    pub(crate) fn new(blocks: u32) -> Self {
        // Uninitialised memory belongs to no key.
        Self { words: (0..blocks as usize * WORDS).map(|_| Cell::new(TAINT)).collect() }
    }

    pub(crate) fn get(&self, block: u32, word: usize) -> u64 {
        self.words[block as usize * WORDS + word].get()
    }

    pub(crate) fn set(&self, block: u32, word: usize, value: u64) {
        self.words[block as usize * WORDS + word].set(value);
    }

    /// Panics unless these words of `block` hold `origin`.
    pub(crate) fn check(&self, block: u32, words: Range<usize>, origin: &Origin, place: impl Fn() -> String) {
        let _ = origin.check(words, || format!("{}, block {block}", place()), |word| self.get(block, word));
    }
}
