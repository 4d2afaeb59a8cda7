//! Where every byte comes from. A block of KV is a pure function of (namespace, key, shard), so the simulator gives each
//! of its words the digest of those: whoever holds a word can say what it is, and wrong bytes cannot look right.

use std::cell::Cell;

use shm_protocol::key::{BlockHash, NamespaceDigest};

use crate::rng::mix;

/// Words that stand for a block's bytes on one rank: a copy in progress can be torn at each.
pub(crate) const WORDS: usize = 3;
/// Set in words that no key stands for: KV computed on blocks that were never loaded, or on two generations' KV.
const TAINT: u64 = 1 << 63;

/// What a block holds.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub(crate) struct Origin {
    pub(crate) digest: NamespaceDigest,
    pub(crate) hash: BlockHash,
    pub(crate) shard: u32,
}

/// One rank's KV blocks. They outlive their process as long as the sidecar holds the descriptor.
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
        parts.fold(seed, |state, part| mix(state ^ part)) & !TAINT
    }

    /// Panics unless `word` gives this block's words.
    pub(crate) fn check(&self, place: impl Fn() -> String, word: impl Fn(usize) -> u64) {
        for index in 0..WORDS {
            let (found, right) = (word(index), self.word(index));
            if found != right {
                let tainted = if found & TAINT != 0 { ", which was computed on broken KV" } else { "" };
                panic!("wrong bytes: {}, word {index}: {found:#x}{tainted}, not {self:?}", place());
            }
        }
    }
}

/// A word that belongs to no key.
pub(crate) fn taint(count: u64) -> u64 {
    TAINT | count
}

// === impl Kv ===

impl Kv {
    pub(crate) fn new(blocks: u32) -> Self {
        // What memory holds before anything was computed belongs to no key either.
        Self { words: (0..blocks as usize * WORDS).map(|_| Cell::new(TAINT)).collect() }
    }

    pub(crate) fn get(&self, block: u32, word: usize) -> u64 {
        self.words[block as usize * WORDS + word].get()
    }

    pub(crate) fn set(&self, block: u32, word: usize, value: u64) {
        self.words[block as usize * WORDS + word].set(value);
    }

    /// Panics unless `block` holds `origin`.
    pub(crate) fn check(&self, block: u32, origin: &Origin, place: impl Fn() -> String) {
        origin.check(|| format!("{}, block {block}", place()), |word| self.get(block, word));
    }
}
